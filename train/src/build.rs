//! What a model is built with: where, in which dtypes, from which seed, and how it is stored.

use crate::{
    Error, Param, Policy, Result,
    nn::Context,
    pipeline::{LayerCosts, Split, Stages},
};
use anymesh_core::{IntoSharding, Mesh, Place, Shape, Sharding, Tensor, ops::Rng};

/// Which part of the state of training is cut over the data-parallel axes. A stage is only another
/// layout of the same numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Zero {
    /// Nothing is: every rank has it all.
    #[default]
    Off,
    /// What the optimizer works on: the parameters in full precision and its own state. Weights to
    /// compute with are gathered once a step.
    One,
    /// The gradients too: each is added up and cut as soon as it is complete.
    Two,
    /// The weights too: they are gathered for each use.
    Three,
}

/// How a new parameter begins.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Zeros.
    Zeros,
    /// Ones.
    Ones,
    /// One number.
    Constant(f64),
    /// Normally distributed around zero, with this deviation.
    Normal(f64),
    /// Evenly distributed between minus and plus this.
    Uniform(f64),
}

/// What constructors of modules take: the place, the dtypes, the seed, and the path so far.
///
/// A parameter's first values depend on the seed and on its full name, and on nothing else: a
/// process that builds only some of the layers gives them the same values.
///
/// ```
/// # use anymesh_core::Mesh;
/// # use anymesh_train::{Build, Init, Policy, nn::Linear};
/// # let device = anymesh_backend_cpu::device();
/// let mesh = Mesh::new("dp=2, tp=2", &device)?;
/// let b = Build::new(&mesh, Policy::f32(), 42);
/// let up = Linear::new(&b.at("mlp.up_proj"), [8, 32], "[@tp?, _]", Init::Normal(0.02))?;
/// assert_eq!(up.weight.value().type_string(), "f32[32@tp, 8]");
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Build {
    mesh: Mesh,
    policy: Policy,
    seed: u64,
    path: String,
    zero: Zero,
    /// The axes that [`Zero`] cuts over, where the mesh has them.
    axes: Vec<String>,
    stages: Stages,
    one_by_one: bool,
    blank: bool,
    sequence_parallel: bool,
    context: Context,
}

impl Build {
    /// For a mesh, or a device. On [`meta`](anymesh_core::meta) a model of any size costs nothing.
    pub fn new(place: impl Into<Place>, policy: Policy, seed: u64) -> Self {
        Self {
            mesh: place.into().mesh,
            policy,
            seed,
            path: String::new(),
            zero: Zero::Off,
            axes: vec![],
            stages: Stages::default(),
            one_by_one: false,
            blank: false,
            sequence_parallel: false,
            context: Context::default(),
        }
    }

    /// With the state cut over these axes, those of them that the mesh has; `dp` mostly.
    pub fn zero(mut self, stage: Zero, axes: &[&str]) -> Self {
        self.axes = axes.iter().map(|a| a.to_string()).collect();
        self.zero = stage;
        self
    }

    /// With layers in stages along the axis `pp`, as a pipeline runs them. Without this each rank of
    /// that axis has one stage, and all cost about the same.
    pub fn stages(mut self, stages: Stages) -> Self {
        self.stages = stages;
        self
    }

    /// With stages by these costs of layers.
    pub fn with_costs(mut self, costs: LayerCosts) -> Self {
        self.stages.costs = Some(costs);
        self
    }

    /// With [each layer](Split::one_by_one) as a stage of its own, to measure what they cost.
    pub fn layer_by_layer(mut self) -> Self {
        self.one_by_one = true;
        self
    }

    /// The stages of a model with layers of these costs, and of what is computed before and after
    /// them, unless costs were [measured](Stages::costs).
    pub fn split(&self, costs: &[f64], first: f64, last: f64) -> Result<Split> {
        if self.one_by_one {
            return Split::one_by_one(&self.mesh, costs.len());
        }
        let Stages {
            chunks,
            placement,
            layers,
            costs: measured,
        } = &self.stages;
        let fits = |found: usize, what: String| match found == costs.len() {
            true => Ok(()),
            false => {
                let detail = format!("{what} are {found}, the model has {}", costs.len());
                Err(Error::config("pipeline.split", detail))
            }
        };
        if let Some(layers) = layers {
            let what = format!("stages of {layers:?} layers together");
            fits(layers.iter().sum(), what)?;
            return Split::new(&self.mesh, layers, *placement);
        }
        let (costs, first, last) = match measured {
            None => (costs, first, last),
            Some(measured) => {
                fits(
                    measured.layers.len(),
                    "the layers that were measured".into(),
                )?;
                (&measured.layers[..], measured.first, measured.last)
            }
        };
        Split::balanced(&self.mesh, costs, first, last, *chunks, *placement)
    }

    /// The same on another mesh, such as that of a stage.
    pub fn on(&self, mesh: &Mesh) -> Self {
        Self {
            mesh: mesh.clone(),
            ..self.clone()
        }
    }

    /// With zeros instead of first values: for a model that is about to be loaded.
    pub fn blank(mut self) -> Self {
        self.blank = true;
        self
    }

    /// With the residual stream `[batch, sequence, width]` cut along the sequence over `tp` between
    /// blocks (Megatron's sequence parallelism): norms and dropout then work on a part, and what an
    /// all-reduce would send goes as a scatter and a gather.
    pub fn sequence_parallel(mut self, on: bool) -> Self {
        self.sequence_parallel = on;
        self
    }

    /// How the residual stream lies between blocks, where sequences are cut over `cp`.
    pub fn stream(&self) -> &'static str {
        match self.sequence_parallel {
            true => "[@dp?@ep?, @cp?@tp?, _]",
            false => "[@dp?@ep?, @cp?, _]",
        }
    }

    /// Whether the stream is cut over `tp` between blocks.
    pub fn is_sequence_parallel(&self) -> bool {
        self.sequence_parallel
    }

    /// With sequences that are cut over the mesh axis `cp` computed in this way.
    pub fn long_sequences(mut self, context: Context) -> Self {
        self.context = context;
        self
    }

    /// How sequences are computed that are cut over `cp`.
    pub fn context(&self) -> Context {
        self.context
    }

    /// The same further down: `at("q_proj")`, `at("layers.3")`.
    pub fn at(&self, name: impl AsRef<str>) -> Self {
        Self {
            path: join(&self.path, name.as_ref()),
            ..self.clone()
        }
    }

    /// Where tensors go.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The dtypes.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// The same for layers that [8-bit products](Policy::f8_products) are too coarse for, such as a
    /// head.
    pub fn without_f8(&self) -> Self {
        let mut build = self.clone();
        build.policy.f8_products = false;
        build
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The path so far.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// A parameter below the path so far, used in computations with this sharding, such as
    /// `"[@tp?, _]"`, and stored as [`Zero`] says.
    pub fn param(
        &self,
        name: &str,
        shape: impl Into<Shape>,
        sharding: impl IntoSharding,
        init: Init,
    ) -> Result<Param> {
        let shape = shape.into();
        let compute = sharding.into_sharding(&self.mesh, shape.rank())?;
        let stored = match self.zero {
            Zero::Off => compute.clone(),
            _ => self.cut_further(&compute, &shape),
        };
        self.stored_as(name, shape, compute, stored, init)
    }

    /// [`param`](Self::param) with a sharding of its own for storage.
    pub fn param_stored(
        &self,
        name: &str,
        shape: impl Into<Shape>,
        sharding: impl IntoSharding,
        stored: impl IntoSharding,
        init: Init,
    ) -> Result<Param> {
        let shape = shape.into();
        let compute = sharding.into_sharding(&self.mesh, shape.rank())?;
        let stored = stored.into_sharding(&self.mesh, shape.rank())?;
        self.stored_as(name, shape, compute, stored, init)
    }

    fn stored_as(
        &self,
        name: &str,
        shape: Shape,
        compute: Sharding,
        stored: Sharding,
        init: Init,
    ) -> Result<Param> {
        let name = join(&self.path, name);
        let (dtype, place) = (self.policy.parameter, (&self.mesh, stored));
        let rng = key(self.seed, &name);
        let init = if self.blank { Init::Zeros } else { init };
        let value = match init {
            Init::Zeros => Tensor::zeros(shape, dtype, place),
            Init::Ones => Tensor::ones(shape, dtype, place),
            Init::Constant(x) => Tensor::full(shape, x, dtype, place),
            Init::Normal(deviation) => Tensor::normal(shape, 0.0, deviation, dtype, place, rng),
            Init::Uniform(bound) => Tensor::uniform(shape, -bound, bound, dtype, place, rng),
        }?;
        Param::new(name, value, compute, self.policy, self.zero)
    }

    /// A sharding that is also cut over the axes of [`Zero`]: in the first dimension that divides
    /// evenly, else in the one with the largest parts.
    fn cut_further(&self, compute: &Sharding, shape: &Shape) -> Sharding {
        let mut sharding = compute.clone();
        for axis in self.axes.iter().filter_map(|a| self.mesh.axis(a).ok()) {
            if sharding.cuts().any(|(_, a)| a == axis) {
                continue;
            }
            let parts = |dim: usize| -> usize {
                sharding.axes_of(dim).map(|a| self.mesh.size(a)).product()
            };
            let ranks = self.mesh.size(axis);
            let dims = shape.dims().iter().enumerate();
            let even = dims
                .clone()
                .find(|(d, n)| **n > 0 && **n % (parts(*d) * ranks) == 0);
            let Some((dim, _)) = even.or_else(|| dims.rev().max_by_key(|(d, n)| **n / parts(*d)))
            else {
                break; // a number
            };
            sharding = sharding.cut(dim, axis);
        }
        sharding
    }
}

/// A random key that depends on a seed and a name.
pub fn key(seed: u64, name: &str) -> Rng {
    // FNV-1a, then mixed with the seed so that near seeds and near names have nothing in common.
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let mut x = hash ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    Rng::new(x ^ (x >> 31))
}

/// A name below a path.
pub fn join(path: &str, name: &str) -> String {
    match (path, name) {
        ("", name) => name.into(),
        (path, "") => path.into(),
        (path, name) => format!("{path}.{name}"),
    }
}

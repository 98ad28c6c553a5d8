//! Mixtures of experts: a router that sends each token to a few of many MLPs.
//!
//! Experts are stacks, `[experts, .., ..]`, cut over the axis `ep`. On a mesh `dp=2, ep=4` the batch
//! is cut over both axes and the experts over `ep`: so `ep` is a factor of data parallelism, and the
//! gradients of experts are added up over `dp` alone.
//!
//! | | |
//! |---|---|
//! | [`Routing`], [`Routed`] | which experts a token goes to and with what weight; the losses that balance them |
//! | [`Dispatch`] | tokens to the ranks that have their experts and back, each once |
//! | [`Experts`] | the layer |

mod dispatch;
mod local;
mod router;

pub use dispatch::{Capacity, Dispatch};
pub use router::{Routed, Router, Routing, Scoring, balanced_bias};

use crate::{Build, Init, Module, Param, Result, nn::GatedMlp};
use anymesh_core::Tensor;

/// Many gated MLPs, of which each token goes through a few, and perhaps one that all go through.
///
/// ```
/// # use anymesh_core::{DType, Mesh, Tensor, ops::Rng};
/// # use anymesh_train::{Build, Init, Policy, nn::experts::{Capacity, Experts, Routing}};
/// # let device = anymesh_backend_cpu::device();
/// let mesh = Mesh::new("dp=2, ep=2", &device)?;
/// let routing = Routing { experts: 4, top_k: 2, ..Routing::default() };
/// let b = Build::new(&mesh, Policy::f32(), 1);
/// let init = Init::Normal(0.1);
/// let experts = Experts::new(&b, [16, 32], routing, Capacity::All, Some(32), [init; 2])?;
/// let x = Tensor::normal([8, 16], 0.0, 1.0, DType::F32, (&mesh, "[@dp@ep, _]"), Rng::new(2))?;
/// let (y, routed) = experts.forward(&x, None)?;
/// assert_eq!(y.dims(), [8, 16]);
/// let loss = routed.balance_loss()?; // times a small factor, added to the model's own
/// # assert!(loss.item()?.to_f64() > 0.9);
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Clone, Debug, Module)]
pub struct Experts {
    /// Says where tokens go.
    pub gate: Router,
    /// What is activated, `[experts, inner, width]`.
    #[name = "experts.gate_proj"]
    pub gate_proj: Param,
    /// What it is multiplied with, `[experts, inner, width]`.
    #[name = "experts.up_proj"]
    pub up_proj: Param,
    /// Back to the width, `[experts, width, inner]`.
    #[name = "experts.down_proj"]
    pub down_proj: Param,
    /// What all tokens go through beside.
    pub shared_experts: Option<GatedMlp>,
    #[skip]
    routing: Routing,
    #[skip]
    capacity: Capacity,
}

impl Experts {
    /// From `width` to `inner` and back, with a shared MLP of another inner width where one is given.
    /// The layers back begin as the second of `init` says.
    pub fn new(
        b: &Build,
        [width, inner]: [usize; 2],
        routing: Routing,
        capacity: Capacity,
        shared: Option<usize>,
        [init, out]: [Init; 2],
    ) -> Result<Self> {
        routing.check()?;
        capacity.check()?;
        let e = routing.experts;
        let below = b.at("experts");
        let (wide, back) = ("[@ep?, @tp?, _]", "[@ep?, _, @tp?]");
        let shared_experts = match shared {
            Some(inner) => {
                let b = b.at("shared_experts");
                Some(GatedMlp::new(&b, [width, inner], false, init, out)?)
            }
            None => None,
        };
        Ok(Self {
            gate: Router::new(&b.at("gate"), e, width, init)?,
            gate_proj: below.param("gate_proj", [e, inner, width], wide, init)?,
            up_proj: below.param("up_proj", [e, inner, width], wide, init)?,
            down_proj: below.param("down_proj", [e, width, inner], back, out)?,
            shared_experts,
            routing,
            capacity,
        })
    }

    /// With a bias of each expert that has a say in who is chosen, and that is balanced between
    /// steps ([`Router::balance`]).
    pub fn with_bias(mut self, b: &Build) -> Result<Self> {
        self.gate = self.gate.with_bias(&b.at("gate"))?;
        Ok(self)
    }

    /// How tokens are routed.
    pub fn routing(&self) -> &Routing {
        &self.routing
    }

    /// What tokens `[tokens, width]` become, and where they went: a partial sum where the layer is
    /// cut over `tp`. The bias is that of [`Routing::route`]; the router's own where none is given.
    #[track_caller]
    pub fn forward(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<(Tensor, Routed)> {
        let own = self.gate.bias.as_ref().map(Param::value);
        let mut routed = self.routing.route(&self.gate.forward(x)?, bias.or(own))?;
        let dispatch = Dispatch::new(&routed, self.capacity)?;
        routed.kept = dispatch.kept().cloned();
        let stacks = [
            self.gate_proj.get()?,
            self.up_proj.get()?,
            self.down_proj.get()?,
        ];
        let mut y = dispatch.through(x, &routed.weights, [&stacks[0], &stacks[1], &stacks[2]])?;
        if let Some(shared) = &self.shared_experts {
            y = y.add(&shared.forward(x)?)?;
        }
        Ok((y, routed))
    }
}

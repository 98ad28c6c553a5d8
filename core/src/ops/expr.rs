//! Float expressions over tensors, run as one map or as one reduction: what the neural-network ops
//! are written in, and what programs write their own elementwise steps in.

use super::{Map, MapRule, OpInfo, Operand, index_kind, reduce::Reduce};
use crate::{
    Buffer, DType, Error, Kind, Result, Scalar, Shape, Tensor,
    backend::{Affine, Launch, ReduceOp},
    grad::is_recording,
    map::{Builder, MapProgram, Val},
    observe,
    spmd::plain,
};
use smallvec::SmallVec;

/// An elementwise expression over tensors, which runs as one kernel and gives one result or
/// several.
///
/// Operands broadcast; floats of any width meet in `f32` (in `f64` where one of them is `f64`) and
/// only the results are rounded. On a mesh every rank computes what it holds. Gradients follow from
/// the expression.
///
/// A step of AdamW that also writes the bf16 copy of the weights, in one pass over memory:
///
/// ```
/// # use anymesh_core::{DType, Tensor, ops::Expr};
/// # let device = anymesh_backend_cpu::device();
/// # let w = Tensor::new(&[1f32, -2.0], &device)?;
/// # let gradient = Tensor::new(&[0.5f32, 4.0], &device)?;
/// # let (m, v) = (w.zeros_like()?, w.zeros_like()?);
/// let (rate, beta1, beta2, eps, decay, step) = (1e-2, 0.9, 0.999, 1e-8, 0.1, 1);
/// let unbias = [1.0 - f64::powi(beta1, step), 1.0 - f64::powi(beta2, step)];
/// let [w, m, v, copy] = Expr::new("adamw", &[&w, &gradient, &m, &v])
///     .params(&[rate, unbias[0], unbias[1]])
///     .maps([DType::F32, DType::F32, DType::F32, DType::BF16], |a| {
///         let (w, g, m, v) = (a.x[0], a.x[1], a.x[2], a.x[3]);
///         let (rate, unbias1, unbias2) = (a.p[0], a.p[1], a.p[2]);
///         let m = m * beta1 + g * (1.0 - beta1);
///         let v = v * beta2 + g * g * (1.0 - beta2);
///         let step = m / unbias1 / ((v / unbias2).sqrt() + eps) + w * decay;
///         let w = w - rate * step;
///         [w, m, v, w]
///     })?;
/// assert_eq!(format!("{w:.3}"), "[ 0.989, -2.008]\nf32[2] on cpu");
/// assert_eq!(copy.to_vec::<anymesh_core::bf16>()?, w.cast(DType::BF16)?.to_vec()?);
/// # assert_eq!((m.to_string(), v.dims()), ("[0.05, 0.40]\nf32[2] on cpu".into(), &[2][..]));
/// # Ok::<(), anymesh_core::Error>(())
/// ```
///
/// A kernel has room for 6 inputs, 4 results, and 8 of both together
/// ([`MAX_BUFFERS`](crate::map::MAX_BUFFERS)).
#[derive(Clone, Debug)]
pub struct Expr<'a> {
    op: &'static str,
    inputs: SmallVec<[&'a Tensor; 6]>,
    maybe: SmallVec<[Option<&'a Tensor>; 3]>,
    params: SmallVec<[Scalar; 4]>,
    indices: SmallVec<[Affine; 1]>,
    rule: MapRule,
}

/// The values an expression is written over.
#[derive(Debug)]
pub struct Args<'b> {
    /// The element of each input: floats as the compute kind, others as they are.
    pub x: SmallVec<[Val<'b>; 6]>,
    /// The same for the inputs that may be missing.
    pub(crate) maybe: SmallVec<[Option<Val<'b>>; 3]>,
    /// The runtime scalars, of the compute kind.
    pub p: SmallVec<[Val<'b>; 4]>,
    /// The affine indices, as integers.
    pub(crate) i: SmallVec<[Val<'b>; 1]>,
}

impl<'a> Expr<'a> {
    /// An expression over these inputs, of which there is at least one. `op` is its name in errors
    /// and in the ledger.
    pub fn new(op: &'static str, inputs: &[&'a Tensor]) -> Self {
        Self {
            op,
            inputs: inputs.into(),
            maybe: SmallVec::new(),
            params: SmallVec::new(),
            indices: SmallVec::new(),
            rule: MapRule::Unknown,
        }
    }

    /// By the rule of an op, whose clauses on partial values hold or not. For maps.
    pub(crate) fn rule(mut self, info: &'static OpInfo, partials: bool) -> Self {
        self.rule = MapRule::Op {
            info,
            numbers: 0,
            partials,
        };
        self
    }

    /// With inputs that may be missing.
    pub(crate) fn maybe(mut self, inputs: &[Option<&'a Tensor>]) -> Self {
        self.maybe.extend(inputs.iter().copied());
        self
    }

    fn tensors(&self) -> impl Iterator<Item = &'a Tensor> {
        self.inputs
            .iter()
            .copied()
            .chain(self.maybe.iter().copied().flatten())
    }

    /// With scalars that are passed at run time, so that their values need no new kernel.
    pub fn params(mut self, params: &[f64]) -> Self {
        self.params = params.iter().map(|p| Scalar::Float(*p)).collect();
        self
    }

    /// With an index computed from the position.
    pub(crate) fn index(mut self, index: Affine) -> Self {
        self.indices.push(index);
        self
    }

    /// The dtype that the inputs meet in.
    pub(crate) fn compute_type(&self) -> DType {
        compute_type(self.tensors())
    }

    /// The common shape of the inputs.
    pub(crate) fn shape(&self) -> Result<Shape> {
        let Some(first) = self.inputs.first() else {
            return Err(Error::argument(
                self.op,
                "inputs",
                "an expression without inputs has no shape: give it a tensor",
            ));
        };
        self.tensors().try_fold(first.shape().clone(), |shape, t| {
            shape.broadcast(self.op, t.shape())
        })
    }

    fn program<const N: usize>(
        &self,
        shape: &Shape,
        dtypes: [DType; N],
        f: impl for<'b> FnOnce(&Args<'b>) -> [Val<'b>; N],
    ) -> Result<MapProgram> {
        let kind = self.compute_type();
        let b = Builder::new();
        let load = |t: &Tensor| {
            if t.dtype().is_float() {
                b.load(t.dtype()).cast(kind)
            } else {
                b.load(t.dtype())
            }
        };
        let args = Args {
            x: self.inputs.iter().map(|t| load(t)).collect(),
            maybe: self.maybe.iter().map(|t| t.map(load)).collect(),
            p: self.params.iter().map(|_| b.param(kind)).collect(),
            i: self
                .indices
                .iter()
                .map(|a| b.index(affine_kind(a, shape).dtype()))
                .collect(),
        };
        let outputs: SmallVec<[_; 4]> = f(&args).into_iter().zip(dtypes).collect();
        b.finish(&outputs)
    }

    fn over<'p>(&'p self, program: &'p MapProgram, shape: &'p Shape) -> Map<'p> {
        Map {
            indices: &self.indices,
            params: &self.params,
            rule: self.rule,
            ..Map::new(self.op, program, shape)
        }
    }

    /// One value for each position, stored as `dtype`.
    #[track_caller]
    pub fn map(self, dtype: DType, f: impl for<'b> FnOnce(&Args<'b>) -> Val<'b>) -> Result<Tensor> {
        let [out] = self.maps([dtype], |a| [f(a)])?;
        Ok(out)
    }

    /// Several values for each position, each a tensor of its dtype.
    #[track_caller]
    pub fn maps<const N: usize>(
        self,
        dtypes: [DType; N],
        f: impl for<'b> FnOnce(&Args<'b>) -> [Val<'b>; N],
    ) -> Result<[Tensor; N]> {
        let shape = self.shape()?;
        let program = self.program(&shape, dtypes, f)?;
        let operands: SmallVec<[&Tensor; 6]> = self.tensors().collect();
        let outputs = self.over(&program, &shape).recorded(&operands)?;
        let found = outputs.len();
        <[Tensor; N]>::try_from(outputs.into_vec()).map_err(|_| {
            Error::argument(
                self.op,
                "dtypes",
                format!("a program of {N} results gave {found}"),
            )
        })
    }

    /// What [`maps`](Self::maps) gives for each of several expressions that differ in their tensors
    /// alone, such as one step of an optimizer for all parameters. A device may take many of them in
    /// one launch.
    ///
    /// ```
    /// # use anymesh_core::{DType, Tensor, ops::Expr};
    /// # let device = anymesh_backend_cpu::device();
    /// let a = Tensor::new(&[1f32, 2.0], &device)?;
    /// let b = Tensor::new(&[3f32], &device)?;
    /// let each = [&a, &b].map(|x| Expr::new("twice", &[x]).params(&[2.0]));
    /// let twice = Expr::maps_each(&each, [DType::F32], |a| [a.x[0] * a.p[0]])?;
    /// assert_eq!(twice[0][0].to_vec::<f32>()?, [2.0, 4.0]);
    /// assert_eq!(twice[1][0].to_vec::<f32>()?, [6.0]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn maps_each<const N: usize>(
        each: &[Expr<'a>],
        dtypes: [DType; N],
        f: impl for<'b> Fn(&Args<'b>) -> [Val<'b>; N],
    ) -> Result<Vec<[Tensor; N]>> {
        Self::maps_together(each, dtypes, f, |_| vec![])
    }

    /// [`maps_each`](Self::maps_each) over tensors that are let go, so that a device may write
    /// results in their place: result `k` in that of tensor `over[k]`, where nobody else holds it.
    /// The first `reads` tensors of each are the inputs, the others are there for their memory.
    /// Afterwards `each` is empty; where this fails the tensors are still in it.
    ///
    /// ```
    /// # use anymesh_core::{DType, Tensor, ops::Expr};
    /// # let device = anymesh_backend_cpu::device();
    /// let (x, y) = (Tensor::new(&[1f32, 2.0], &device)?, Tensor::new(&[3f32], &device)?);
    /// let mut each = vec![vec![x], vec![y]];
    /// let next = Expr::maps_over("next", &[], &mut each, 1, [Some(0)], [DType::F32], |a| [a.x[0] + 1.0])?;
    /// assert_eq!(next[0][0].to_vec::<f32>()?, [2.0, 3.0]);
    /// assert!(each.is_empty());
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn maps_over<const N: usize>(
        op: &'static str,
        params: &[f64],
        each: &mut Vec<Vec<Tensor>>,
        reads: usize,
        over: [Option<usize>; N],
        dtypes: [DType; N],
        f: impl for<'b> Fn(&Args<'b>) -> [Val<'b>; N],
    ) -> Result<Vec<[Tensor; N]>> {
        let all: Vec<Expr<'_>> = (each.iter())
            .map(|tensors| {
                let inputs: SmallVec<[&Tensor; 6]> = tensors.iter().take(reads).collect();
                Expr::new(op, &inputs).params(params)
            })
            .collect();
        let memory = |i: usize| {
            let mut memory = vec![];
            for (k, from) in over.iter().enumerate() {
                let tensor = from.and_then(|from| each[i].get(from));
                let fits = |t: &&Tensor| t.dtype() == dtypes[k] && t.shape() == each[i][0].shape();
                memory.extend(
                    tensor
                        .filter(fits)
                        .and_then(Tensor::own_buffer)
                        .map(|b| (k, b)),
                );
            }
            memory
        };
        let made = Expr::maps_together(&all, dtypes, f, memory)?;
        drop(all);
        each.clear();
        Ok(made)
    }

    /// What [`maps_each`](Self::maps_each) gives. `over` says which memory may be taken for which
    /// results of an expression.
    #[track_caller]
    fn maps_together<const N: usize>(
        each: &[Expr<'_>],
        dtypes: [DType; N],
        f: impl for<'b> Fn(&Args<'b>) -> [Val<'b>; N],
        over: impl Fn(usize) -> Vec<(usize, Buffer)>,
    ) -> Result<Vec<[Tensor; N]>> {
        let mut out: Vec<Option<[Tensor; N]>> = Vec::with_capacity(each.len());
        // Programs that were made, with the expressions they are for and their launches.
        let mut groups: Vec<(MapProgram, usize, Vec<(usize, Launch)>)> = vec![];
        for (i, expr) in each.iter().enumerate() {
            let (tensors, shape) = (expr.tensors().collect::<SmallVec<[_; 6]>>(), expr.shape()?);
            let together = shape.numel() > 0
                && !is_recording(&tensors)
                && !observe::is_on()
                && plain(expr.op, &tensors)?;
            if !together {
                out.push(Some(expr.clone().maps(dtypes, &f)?));
                continue;
            }
            out.push(None);
            let known = groups
                .iter()
                .position(|(_, of, _)| expr.is_like(&each[*of]));
            let group = match known {
                Some(group) => group,
                None => {
                    groups.push((expr.program(&shape, dtypes, &f)?, i, vec![]));
                    groups.len() - 1
                }
            };
            let (program, _, calls) = &mut groups[group];
            let operands: SmallVec<[Operand<'_>; 6]> =
                tensors.iter().map(|t| Operand::from(*t)).collect();
            let call = expr
                .over(program, &shape)
                .call(&operands, tensors[0].device())?;
            let launch = Launch {
                kernel: call.into(),
                over: over(i),
            };
            calls.push((i, launch));
        }
        for (_, of, calls) in groups {
            let device = each[of].inputs[0].device();
            let (at, launches): (Vec<usize>, Vec<Launch>) = calls.into_iter().unzip();
            for (i, views) in at.into_iter().zip(device.launch_all(launches)?) {
                let mesh = each[i].inputs[0].mesh();
                let made: Vec<Tensor> = (views.into_iter())
                    .map(|view| Tensor::from_view(view, mesh))
                    .collect();
                out[i] = made.try_into().ok();
            }
        }
        let all: Vec<[Tensor; N]> = out.into_iter().flatten().collect();
        debug_assert_eq!(all.len(), each.len(), "results for each");
        Ok(all)
    }

    /// Whether it has the program of another one, for the same function, and its device.
    fn is_like(&self, other: &Self) -> bool {
        let types = |e: &Self| -> SmallVec<[DType; 6]> { e.tensors().map(Tensor::dtype).collect() };
        self.op == other.op
            && self.params.len() == other.params.len()
            && self.indices.is_empty()
            && other.indices.is_empty()
            && self.maybe.is_empty()
            && other.maybe.is_empty()
            && types(self) == types(other)
            && self.inputs[0].device() == other.inputs[0].device()
    }

    /// The values added up over `axes` (all where there are none), stored as `dtype`: one pass over
    /// the inputs, of which the first has the common shape. On a mesh every rank adds up what it
    /// holds, and the result is partial over the axes that cut what was added up.
    ///
    /// ```
    /// # use anymesh_core::{DType, Mesh, Tensor, ops::Expr};
    /// # let device = anymesh_backend_cpu::device();
    /// let mesh = Mesh::new("dp=2", &device)?;
    /// let x = Tensor::new(&[1f32, 2.0, 3.0], &device)?.to_mesh(&mesh, "[@dp]")?;
    /// let squares = Expr::new("squares", &[&x]).sum(&[], false, DType::F32, |a| a.x[0] * a.x[0])?;
    /// assert_eq!(squares.type_string(), "f32[]{sum:dp}");
    /// assert_eq!(squares.item()?.to_f64(), 14.0);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn sum(
        self,
        axes: &[i64],
        keepdim: bool,
        dtype: DType,
        f: impl for<'b> FnOnce(&Args<'b>) -> Val<'b>,
    ) -> Result<Tensor> {
        self.reduce_axes(axes, keepdim, ReduceOp::Sum, dtype, f)
    }

    /// The largest of the values over `axes`, as [`sum`](Self::sum) adds them up.
    #[track_caller]
    pub fn max(
        self,
        axes: &[i64],
        keepdim: bool,
        dtype: DType,
        f: impl for<'b> FnOnce(&Args<'b>) -> Val<'b>,
    ) -> Result<Tensor> {
        self.reduce_axes(axes, keepdim, ReduceOp::Max, dtype, f)
    }

    #[track_caller]
    fn reduce_axes(
        self,
        axes: &[i64],
        keepdim: bool,
        reduce: ReduceOp,
        dtype: DType,
        f: impl for<'b> FnOnce(&Args<'b>) -> Val<'b>,
    ) -> Result<Tensor> {
        let (op, shape) = (self.op, self.shape()?);
        if self.inputs[0].shape() != &shape {
            let detail = format!("the first input must have the common shape {shape}");
            return Err(Error::shape(op, [self.inputs[0]], detail));
        }
        let axes = shape.axes(op, axes)?;
        let out = self.reduce(&axes, reduce, None, dtype, f)?;
        match keepdim {
            true => Ok(out),
            false => out.reordered(op, &left(shape.rank(), &axes)),
        }
    }

    /// The values reduced over `axes` (which stay, of size 1), times `scale`, stored as `dtype`.
    /// The first input has the common shape, and there are no indices.
    #[track_caller]
    pub(crate) fn reduce(
        self,
        axes: &[usize],
        reduce: ReduceOp,
        scale: Option<f64>,
        dtype: DType,
        f: impl for<'b> FnOnce(&Args<'b>) -> Val<'b>,
    ) -> Result<Tensor> {
        let program = self.program(&self.shape()?, [dtype], |a| [f(a)])?;
        let operands: SmallVec<[&Tensor; 6]> = self.tensors().collect();
        Reduce {
            op: self.op,
            program: &program,
            operands: &operands,
            params: &self.params,
            axes,
            keepdim: true,
            reduce,
            scale,
            dtype,
            linear: false,
        }
        .run()
    }
}

/// The dimensions that a reduction leaves.
fn left(rank: usize, axes: &[usize]) -> SmallVec<[usize; 4]> {
    (0..rank).filter(|d| !axes.contains(d)).collect()
}

/// The kind that holds every value of the index over `shape`.
fn affine_kind(index: &Affine, shape: &Shape) -> Kind {
    let steps = index
        .strides
        .iter()
        .zip(shape.dims())
        .map(|(stride, size)| stride.unsigned_abs() as usize * size.saturating_sub(1));
    index_kind(steps.fold(index.offset.unsigned_abs() as usize, usize::saturating_add))
}

/// The dtype that floats meet in: `f64` where there is one, else `f32`.
pub(crate) fn compute_type<'t>(tensors: impl IntoIterator<Item = &'t Tensor>) -> DType {
    if tensors.into_iter().any(|t| t.dtype() == DType::F64) {
        DType::F64
    } else {
        DType::F32
    }
}

/// Refuses tensors that are not floats.
pub(crate) fn check_float(op: &'static str, tensors: &[&Tensor]) -> Result<()> {
    match tensors.iter().find(|t| !t.dtype().is_float()) {
        Some(t) => Err(Error::DType {
            op,
            dtype: t.dtype(),
            expected: "a float dtype",
        }),
        None => Ok(()),
    }
}

/// Refuses tensors whose shape is not that of the first.
pub(crate) fn check_same_shape(op: &'static str, tensors: &[&Tensor]) -> Result<()> {
    match tensors.iter().find(|t| t.shape() != tensors[0].shape()) {
        Some(t) => Err(Error::shape(
            op,
            [tensors[0], *t],
            format!("{} and {} must be equal", tensors[0].shape(), t.shape()),
        )),
        None => Ok(()),
    }
}

/// Refuses an `eps` that is negative, infinite or NaN.
pub(crate) fn check_eps(op: &'static str, eps: f64) -> Result<()> {
    if eps >= 0.0 && eps.is_finite() {
        Ok(())
    } else {
        Err(Error::argument(
            op,
            "eps",
            format!("eps must be finite and not negative, got {eps}"),
        ))
    }
}

//! Float expressions over tensors, run as one map or as one reduction: what the neural-network ops
//! are written in, and what programs write their own elementwise steps in.

mod together;

use super::{Map, MapRule, OpInfo, index_kind, reduce::Reduce};
use crate::{
    DType, Error, Kind, Result, Scalar, Shape, Tensor,
    backend::{Affine, ReduceOp},
    map::{Builder, MapProgram, Val},
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

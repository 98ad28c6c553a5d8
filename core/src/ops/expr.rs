//! Float expressions over tensors, run as one map or as one reduction: what the neural-network ops
//! are written in.
//!
//! Operands broadcast; floats of any width meet in `f32` (in `f64` where one of them is `f64`) and
//! only the result is rounded.

use super::{Map, MapRule, OpInfo, index_kind, reduce::Reduce};
use crate::{
    DType, Error, Kind, Result, Scalar, Shape, Tensor,
    backend::{Affine, ReduceOp},
    map::{Builder, MapProgram, Val},
};
use smallvec::SmallVec;

/// What an expression computes with: all that it reads, not yet how.
pub(crate) struct Expr<'a> {
    op: &'static str,
    inputs: SmallVec<[&'a Tensor; 6]>,
    maybe: SmallVec<[Option<&'a Tensor>; 3]>,
    params: SmallVec<[Scalar; 4]>,
    indices: SmallVec<[Affine; 1]>,
    rule: MapRule,
}

/// The values an expression is written over.
pub(crate) struct Args<'b> {
    /// The element of each input: floats as the compute kind, others as they are.
    pub(crate) x: SmallVec<[Val<'b>; 6]>,
    /// The same for the inputs that may be missing.
    pub(crate) maybe: SmallVec<[Option<Val<'b>>; 3]>,
    /// The runtime scalars, of the compute kind.
    pub(crate) p: SmallVec<[Val<'b>; 4]>,
    /// The affine indices, as integers.
    pub(crate) i: SmallVec<[Val<'b>; 1]>,
}

impl<'a> Expr<'a> {
    /// An expression over these inputs; there is at least one.
    pub(crate) fn new(op: &'static str, inputs: &[&'a Tensor]) -> Self {
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
    pub(crate) fn params(mut self, params: &[f64]) -> Self {
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
        self.tensors()
            .try_fold(self.inputs[0].shape().clone(), |shape, t| {
                shape.broadcast(self.op, t.shape())
            })
    }

    fn program(
        &self,
        shape: &Shape,
        dtype: DType,
        f: impl for<'b> FnOnce(&Args<'b>) -> Val<'b>,
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
            p: self.params.iter().map(|_| b.param(kind.kind())).collect(),
            i: self
                .indices
                .iter()
                .map(|a| b.index(affine_kind(a, shape)))
                .collect(),
        };
        b.finish(&[(f(&args), dtype)])
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
    pub(crate) fn map(
        self,
        dtype: DType,
        f: impl for<'b> FnOnce(&Args<'b>) -> Val<'b>,
    ) -> Result<Tensor> {
        let shape = self.shape()?;
        let program = self.program(&shape, dtype, f)?;
        let operands: SmallVec<[&Tensor; 6]> = self.tensors().collect();
        Ok(self.over(&program, &shape).recorded(&operands)?.remove(0))
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
        let program = self.program(&self.shape()?, dtype, f)?;
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
        Some(t) => Err(Error::Shape {
            op,
            detail: format!("{} and {} must be equal", tensors[0].shape(), t.shape()),
        }),
        None => Ok(()),
    }
}

/// Refuses an `eps` that is negative, infinite or NaN.
pub(crate) fn check_eps(op: &'static str, eps: f64) -> Result<()> {
    if eps >= 0.0 && eps.is_finite() {
        Ok(())
    } else {
        Err(Error::Argument {
            op,
            detail: format!("eps must be finite and not negative, got {eps}"),
        })
    }
}

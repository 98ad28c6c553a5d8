//! The ops, one file per family. Each file holds an op's shape and dtype rule, its sharding rule as text, and its
//! lowering to the backend's kernel families.

pub mod activation;
pub mod attention;
pub mod binary;
pub mod cast;
pub mod conv;
pub mod create;
pub mod cross_entropy;
pub mod dropout;
pub mod dynamic;
pub mod einsum;
pub mod elementwise;
mod expr;
pub mod glu;
pub mod index;
pub mod interpolate;
pub mod loss;
pub mod matmul;
pub mod movement;
pub mod norm;
pub mod pool;
pub mod random;
pub mod reduce;
pub mod rope;
pub mod scan;
pub mod scatter;
pub mod select;
pub mod shape;
pub mod similarity;
pub mod slice;
pub mod softmax;
pub mod sort;
pub mod unary;

pub use attention::{Attention, AttentionOptions};
pub use conv::{Conv, ConvTranspose};
pub use cross_entropy::CrossEntropyOptions;
pub use dynamic::Unique;
pub use interpolate::Interpolate;
pub use loss::LossReduction;
pub use movement::PadMode;
pub use pool::{AvgPool, MaxPool};
pub use random::Rng;
pub use rope::RopeStyle;
pub use shape::Indexing;

use crate::{
    DType, Device, Dims, Error, Kind, MapProgram, Reduction, Result, Scalar, Shape, Tensor,
    backend::{Affine, MapCall, MapInput},
    grad,
    map::{Inst, Unary},
    spmd::{Call, Rule, plain, rule::letter as rule_letter},
};

/// What is known about an op beside its code. See `ARCHITECTURE.md` for the notation of rules.
#[derive(Clone, Copy, Debug)]
pub struct OpInfo {
    /// The name of the method or function.
    pub name: &'static str,
    /// The sharding rule.
    pub rule: &'static str,
    /// Why it has no gradient, if it has none.
    pub no_gradient: Option<&'static str>,
}

/// Shorthand for tables of ops.
pub(crate) const fn op(name: &'static str, rule: &'static str) -> OpInfo {
    OpInfo { name, rule, no_gradient: None }
}

/// An op without a gradient.
pub(crate) const fn op_without_gradient(name: &'static str, rule: &'static str, why: &'static str) -> OpInfo {
    OpInfo { name, rule, no_gradient: Some(why) }
}

/// Nothing comes in.
pub(crate) const CREATES: &str = "has no operand";
/// Positions, counts and truth values are integers.
pub(crate) const POSITIONS: &str = "gives positions";
/// Likewise.
pub(crate) const COUNTS: &str = "counts";
/// Likewise.
pub(crate) const TRUTH: &str = "gives bools";

/// Every op of the library.
pub fn catalog() -> Vec<OpInfo> {
    [
        attention::OPS,
        cross_entropy::OPS,
        dropout::OPS,
        glu::OPS,
        loss::OPS,
        norm::OPS,
        rope::OPS,
        similarity::OPS,
        softmax::OPS,
        cast::OPS,
        shape::OPS,
        slice::OPS,
        movement::OPS,
        create::OPS,
        random::OPS,
        unary::OPS,
        activation::OPS,
        binary::OPS,
        select::OPS,
        reduce::OPS,
        scan::OPS,
        index::OPS,
        scatter::OPS,
        sort::OPS,
        dynamic::OPS,
        matmul::OPS,
        einsum::OPS,
        conv::OPS,
        pool::OPS,
        interpolate::OPS,
    ]
    .concat()
}

/// Checks that all operands live on one device and returns it. A local step's operands are plain.
pub(crate) fn same_device<'a>(op: &'static str, tensors: &[&'a Tensor]) -> Result<&'a Device> {
    let device = tensors[0].device();
    match tensors.iter().find(|t| t.device() != device) {
        Some(other) => Err(Error::DeviceMismatch { op, left: device.to_string(), right: other.device().to_string() }),
        None => Ok(device),
    }
}

/// An operand of [`run_map`]: a tensor that broadcasts to the iteration shape, or one placed at `window` in it.
pub(crate) struct Operand<'a> {
    tensor: &'a Tensor,
    window: Option<Dims<isize>>,
}

impl<'a> Operand<'a> {
    /// A tensor whose origin lies at `start` of the iteration space.
    pub(crate) fn at(tensor: &'a Tensor, start: Dims<isize>) -> Self {
        Self { tensor, window: Some(start) }
    }
}

impl<'a> From<&'a Tensor> for Operand<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Self { tensor, window: None }
    }
}

/// Float functions that no shader language has for `f64`.
fn needs_f64_math(program: &MapProgram) -> bool {
    use crate::map::Binary::*;
    use Unary::*;
    program.insts.iter().any(|inst| match *inst {
        Inst::Unary(op, r) => {
            program.kinds[r as usize] == Kind::F64 && !matches!(op, Neg | Abs | Sign | Floor | Ceil | Round | Trunc | IsNan | IsInf | Sqrt | Rsqrt)
        }
        Inst::Binary(op, r, _) => program.kinds[r as usize] == Kind::F64 && matches!(op, Pow | Atan2 | Hypot | FloorDiv | TruncDiv | Rem),
        _ => false,
    })
}

/// Refuses transcendental functions in `f64` on devices that have none.
pub(crate) fn need_float_math(op: &'static str, device: &Device, dtype: DType) -> Result<()> {
    if dtype != DType::F64 || device.backend().capabilities().f64_math {
        return Ok(());
    }
    Err(Error::Unsupported { device: device.name().into(), what: format!("{op} in f64"), hint: "cast to f32 or use the cpu or cuda device".into() })
}

/// Everything a backend's map call needs, checked, with operands broadcast to `shape`.
pub(crate) struct PreparedMap<'a> {
    op: &'static str,
    program: &'a MapProgram,
    shape: &'a Shape,
    inputs: smallvec::SmallVec<[MapInput; 3]>,
    indices: &'a [Affine],
    params: &'a [Scalar],
}

impl<'a> PreparedMap<'a> {
    /// The operands hold elements and the device can do what the program asks.
    pub(crate) fn new(
        op: &'static str,
        program: &'a MapProgram,
        shape: &'a Shape,
        operands: &[Operand<'_>],
        indices: &'a [Affine],
        params: &'a [Scalar],
        device: &Device,
    ) -> Result<Self> {
        // A reduction stores no tensor of this shape, so only dtypes are checked here; sizes are where buffers are made.
        for (_, dtype) in &program.outputs {
            device.check(*dtype, 0)?;
        }
        for kind in &program.kinds {
            device.check(kind.dtype(), 0)?;
        }
        if needs_f64_math(program) {
            need_float_math(op, device, DType::F64)?;
        }
        let mut inputs = smallvec::SmallVec::with_capacity(operands.len());
        for operand in operands {
            let mut view = operand.tensor.view()?;
            if operand.window.is_none() && view.layout.shape != *shape {
                view.layout = view.layout.expand(shape);
            }
            inputs.push(MapInput { view, window: operand.window.clone() });
        }
        Ok(Self { op, program, shape, inputs, indices, params })
    }

    pub(crate) fn call(&self) -> MapCall<'_> {
        MapCall { op: self.op, program: self.program, shape: self.shape, inputs: &self.inputs, indices: self.indices, params: self.params }
    }
}

/// [`run_map`] on a mesh: every dimension may be cut. Nothing partial passes, because a program says nothing of what it computes, unless it is known to be
/// `linear` in the first operand. Indices stay global.
#[track_caller]
fn sharded_map(
    op: &'static str,
    program: &MapProgram,
    shape: &Shape,
    operands: &[Operand<'_>],
    indices: &[Affine],
    params: &[Scalar],
    linear: bool,
) -> Result<smallvec::SmallVec<[Tensor; 1]>> {
    if operands.iter().any(|o| o.window.is_some()) {
        return Err(Error::Argument { op, detail: "a window into a tensor on a mesh: the op has no rule".into() });
    }
    let tensors: smallvec::SmallVec<[&Tensor; 3]> = operands.iter().map(|o| o.tensor).collect();
    let rule = || {
        let rule = Rule::broadcast(shape, &tensors, program.outputs.len());
        Ok(if linear { rule.let_through(1, &[Reduction::Sum]) } else { rule })
    };
    // Ops have attributes of their own, so the rules that core makes are told apart by a negative number.
    Call { op, inputs: &tensors, attrs: &[-1, shape.rank() as i64, program.outputs.len() as i64, linear.into()] }.run(rule, |l| {
        let parts: smallvec::SmallVec<[Operand<'_>; 3]> = l.inputs.iter().map(Operand::from).collect();
        let mut local: Dims = shape.dims().into();
        let mut indices: smallvec::SmallVec<[Affine; 2]> = indices.iter().cloned().collect();
        for d in 0..shape.rank() {
            if let Some((range, _)) = l.part(rule_letter(d)) {
                local[d] = range.len();
                for index in &mut indices {
                    index.offset += range.start as i64 * index.strides[d];
                }
            }
        }
        run_map(op, program, &Shape::from(local), &parts, &indices, params, l[0].device())
    })
}

/// Runs a map program over `shape` and returns its outputs. Operands broadcast; empty results launch nothing.
#[track_caller]
pub(crate) fn run_map(
    op: &'static str,
    program: &MapProgram,
    shape: &Shape,
    operands: &[Operand<'_>],
    indices: &[Affine],
    params: &[Scalar],
    device: &Device,
) -> Result<smallvec::SmallVec<[Tensor; 1]>> {
    run_linear_map(op, program, shape, operands, indices, params, device, false)
}

/// [`run_map`]; with `linear`, for a program that is linear in its first operand, through which partial sums may pass.
#[track_caller]
#[allow(clippy::too_many_arguments)]
pub(crate) fn run_linear_map(
    op: &'static str,
    program: &MapProgram,
    shape: &Shape,
    operands: &[Operand<'_>],
    indices: &[Affine],
    params: &[Scalar],
    device: &Device,
    linear: bool,
) -> Result<smallvec::SmallVec<[Tensor; 1]>> {
    let tensors: smallvec::SmallVec<[&Tensor; 3]> = operands.iter().map(|o| o.tensor).collect();
    if !plain(op, &tensors)? {
        return sharded_map(op, program, shape, operands, indices, params, linear);
    }
    let result = |buffer, dtype| match operands.first() {
        Some(first) => first.tensor.result(buffer, dtype, shape.clone()),
        None => Tensor::created(buffer, dtype, shape.clone(), device),
    };
    let elements = shape.checked_numel(op)?;
    if elements == 0 {
        return Ok(program.outputs.iter().map(|(_, dtype)| result(None, *dtype)).collect());
    }
    for (_, dtype) in &program.outputs {
        device.check(*dtype, elements)?;
    }
    let prepared = PreparedMap::new(op, program, shape, operands, indices, params, device)?;
    let buffers = device.backend().map(&prepared.call())?;
    Ok(buffers.into_iter().zip(&program.outputs).map(|(buffer, (_, dtype))| result(Some(buffer), *dtype)).collect())
}

/// [`run_map`] for programs with one output and only broadcast operands. Its gradient follows from the program.
#[track_caller]
pub(crate) fn map1(op: &'static str, program: &MapProgram, inputs: &[&Tensor], params: &[Scalar]) -> Result<Tensor> {
    let mut shape = inputs[0].shape().clone();
    for t in &inputs[1..] {
        shape = shape.broadcast(op, t.shape())?;
    }
    Ok(grad::mapped(op, program, &shape, inputs, &[], params, false)?.remove(0))
}

/// Runs a user's own elementwise program: inputs broadcast, one tensor for each of the program's outputs.
///
/// ```
/// # use anymesh_core::{Tensor, DType, map::Builder, ops};
/// # let device = anymesh_backend_cpu::device();
/// let b = Builder::new();
/// let (x, y) = (b.load(DType::F32), b.load(DType::F32));
/// let program = b.finish(&[((x * x + y * y).sqrt(), DType::F32)])?;
/// let x = Tensor::from_slice(&[3f32, 5.0], [2], &device)?;
/// let y = Tensor::from_slice(&[4f32, 12.0], [2], &device)?;
/// assert_eq!(ops::map(&program, &[&x, &y], &[])?[0].to_vec::<f32>()?, [5.0, 13.0]);
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[track_caller]
pub fn map(program: &MapProgram, inputs: &[&Tensor], params: &[Scalar]) -> Result<Vec<Tensor>> {
    let fits = !inputs.is_empty()
        && program.indices.is_empty()
        && params.len() == program.params.len()
        && inputs.iter().map(|t| t.dtype()).eq(program.inputs.iter().copied());
    if !fits {
        let detail = format!("the program takes inputs {:?} and {} params", program.inputs, program.params.len());
        return Err(Error::Argument { op: "map", detail });
    }
    let mut shape = inputs[0].shape().clone();
    for t in &inputs[1..] {
        shape = shape.broadcast("map", t.shape())?;
    }
    Ok(grad::mapped("map", program, &shape, inputs, &[], params, false)?.into_vec())
}

/// The kind of index that counts up to `max`: i32 unless that is too small.
pub(crate) fn index_kind(max: usize) -> Kind {
    if max <= i32::MAX as usize { Kind::I32 } else { Kind::I64 }
}

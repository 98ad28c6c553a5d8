//! The ops, one file per family. Each file holds an op's shape and dtype rule, its sharding rule,
//! its gradient, and its lowering to the backend's kernel families.

pub mod activation;
mod affine;
mod assemble;
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
mod gradient;
pub mod grouped;
pub mod index;
pub mod interpolate;
pub mod loss;
pub mod matmul;
pub mod movement;
pub mod norm;
pub mod operators;
pub mod pad;
pub mod pool;
pub mod quantize;
pub mod random;
pub mod reduce;
pub mod rope;
mod row_program;
pub mod rows;
mod run;
pub mod scan;
pub mod scatter;
pub mod select;
pub mod shape;
pub mod similarity;
pub mod slice;
pub mod softmax;
pub mod sort;
pub mod unary;

pub use crate::promotion::{Promotion, with_promotion};
pub use crate::spmd::{OpInfo, RuleForm};
pub(crate) use affine::index_kind;
pub use attention::{Attention, AttentionOptions, SequenceOptions, SequenceOrder};
pub use conv::{Conv, ConvTranspose};
pub use cross_entropy::CrossEntropyOptions;
pub use dynamic::Unique;
pub use expr::{Args, Expr};
pub(crate) use gradient::{broadcast_axes, sum_to};
pub use interpolate::Interpolate;
pub use loss::{GaussianNll, LossReduction, PoissonNll, TripletMargin};
pub use matmul::Baddbmm;
pub use norm::NormOptions;
pub use pad::PadMode;
pub use pool::{AvgPool, MaxPool};
pub use random::Rng;
pub use rope::{RopeOptions, RopeStyle};
pub use rows::RowExchange;
pub(crate) use run::{Map, MapRule, Operand};
pub use shape::Indexing;
pub use sort::{Order, Side};

use crate::{
    DType, Device, Error, Kind, MapProgram, Result, Scalar, Shape, Tensor,
    map::{Inst, Unary},
};

/// An op whose rule is this text.
pub(crate) const fn op(name: &'static str, rule: &'static str) -> OpInfo {
    OpInfo::new(name, RuleForm::Text(rule))
}

/// An op without operands.
pub(crate) const fn creates(name: &'static str) -> OpInfo {
    OpInfo::new(name, RuleForm::Creates).without_gradient(CREATES)
}

// Why ops have no gradient.
const CREATES: &str = "has no operand";
const POSITIONS: &str = "gives positions";
const COUNTS: &str = "counts";
const TRUTH: &str = "gives bools";

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
        quantize::OPS,
        shape::OPS,
        slice::OPS,
        movement::OPS,
        pad::OPS,
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
        grouped::OPS,
        einsum::OPS,
        conv::OPS,
        pool::OPS,
        interpolate::OPS,
    ]
    .concat()
}

/// Steps that several ops have in common: no methods, but what `OpInfo::runs` may name beside ops.
pub fn steps() -> Vec<OpInfo> {
    [
        run::STEPS,
        assemble::STEPS,
        reduce::STEPS,
        shape::STEPS,
        movement::STEPS,
        dynamic::STEPS,
        index::STEPS,
        sort::STEPS,
    ]
    .concat()
}

/// Checks that all operands live on one device and returns it. A local step's operands are plain.
pub(crate) fn same_device<'a>(op: &'static str, tensors: &[&'a Tensor]) -> Result<&'a Device> {
    let device = tensors[0].device();
    match tensors.iter().find(|t| t.device() != device) {
        Some(other) => Err(Error::DeviceMismatch {
            op,
            left: device.to_string(),
            right: other.device().to_string(),
        }),
        None => Ok(device),
    }
}

/// Float functions that no shader language has for `f64`.
fn needs_f64_math(program: &MapProgram) -> bool {
    use crate::map::Binary::*;
    use Unary::*;
    program.insts.iter().any(|inst| match *inst {
        Inst::Unary(op, r) => {
            program.kinds[r as usize] == Kind::F64
                && !matches!(
                    op,
                    Neg | Abs | Sign | Floor | Ceil | Round | Trunc | IsNan | IsInf | Sqrt | Rsqrt
                )
        }
        Inst::Binary(op, r, _) => {
            program.kinds[r as usize] == Kind::F64
                && matches!(op, Pow | Atan2 | Hypot | FloorDiv | TruncDiv | Rem)
        }
        _ => false,
    })
}

/// Refuses transcendental functions in `f64` on devices that have none.
pub(crate) fn need_float_math(op: &'static str, device: &Device, dtype: DType) -> Result<()> {
    if dtype != DType::F64 || device.backend().capabilities().f64_math {
        return Ok(());
    }
    Err(Error::Unsupported {
        device: device.name().into(),
        what: format!("{op} in f64"),
        hint: "cast to f32 or use the cpu or cuda device".into(),
    })
}

/// The shape that tensors broadcast to; there is at least one.
pub(crate) fn common_shape(op: &'static str, tensors: &[&Tensor]) -> Result<Shape> {
    tensors[1..]
        .iter()
        .try_fold(tensors[0].shape().clone(), |shape, t| {
            shape.broadcast(op, t.shape())
        })
}

/// A map program with one output over the common shape of its inputs. Its gradient follows from the
/// program.
#[track_caller]
pub(crate) fn map1(
    op: &'static str,
    program: &MapProgram,
    inputs: &[&Tensor],
    params: &[Scalar],
) -> Result<Tensor> {
    let shape = common_shape(op, inputs)?;
    Ok(Map {
        params,
        ..Map::new(op, program, &shape)
    }
    .recorded(inputs)?
    .remove(0))
}

/// Runs a user's own elementwise program: inputs broadcast, one tensor for each of the program's
/// outputs.
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
        && inputs
            .iter()
            .map(|t| t.dtype())
            .eq(program.inputs.iter().copied());
    if !fits {
        let detail = format!(
            "the program takes inputs {:?} and {} params",
            program.inputs,
            program.params.len()
        );
        return Err(Error::argument("map", "inputs", detail).of(inputs.iter().copied()));
    }
    let shape = common_shape("map", inputs)?;
    Ok(Map {
        params,
        ..Map::new("map", program, &shape)
    }
    .recorded(inputs)?
    .into_vec())
}

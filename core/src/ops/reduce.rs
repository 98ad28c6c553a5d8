//! Reductions over any axes. An empty list of axes means all of them; `keepdim` leaves reduced
//! dimensions with size 1.
//!
//! ```
//! # let device = anymesh_backend_cpu::device();
//! let x = anymesh_core::Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0], [2, 2], &device)?;
//! assert_eq!(x.sum(&[0], false)?.to_vec::<f32>()?, [4.0, 6.0]);
//! assert_eq!(x.mean(&[], false)?.to_vec::<f32>()?, [2.5]);
//! assert_eq!(x.max(&[-1], true)?.dims(), [2, 1]);
//! # Ok::<(), anymesh_core::Error>(())
//! ```
//!
//! What has to happen to each element first (a square, a comparison, a cast) is a map program in
//! front of the reduction, so the data is read once and no intermediate tensor exists. Small floats
//! accumulate in `f32` and round once, to the dtype of the operand: a mean or a norm goes back into
//! the computation that it came from, and would widen it. Cast the operand to `f32` where the sum
//! itself is what matters. A log-sum-exp is always wide.
//!
//! In sharding rules `r` stands for the reduced dimensions. Where they are cut, `reduce r sum`
//! leaves partial sums; `stats r` combines one result for each part (positions, log-sum-exp), or
//! runs the reductions that the op is made of.

mod moments;
mod positions;
mod sharded;

use super::{
    COUNTS, Map, OpInfo, POSITIONS, PadMode, TRUTH,
    elementwise::{Key, Slot, cached},
    expr::Expr,
    need_float_math, same_device,
};
use crate::{
    DType, Dims, Error, MapProgram, Reduction, Result, Scalar, Shape, Tensor,
    backend::{ReduceCall, ReduceOp},
    launch::launch_as,
    ledger::on_behalf_of,
    map::{Builder, Val},
    spmd::{
        Call,
        built::{Combine, REDUCE, reduce_data},
        plain, without_partials,
    },
};

/// The ops of this file.
pub const OPS: &[OpInfo] = &[
    REDUCED.named("sum"),
    REDUCED.named("mean"),
    REDUCED.named("prod"),
    REDUCED.named("max"),
    REDUCED.named("min"),
    REDUCED.named("amax"),
    REDUCED.named("amin"),
    REDUCED.named("any").without_gradient(TRUTH),
    REDUCED.named("all").without_gradient(TRUTH),
    REDUCED.named("count_nonzero").without_gradient(COUNTS),
    OpInfo::composed("norm", &["reduce", "map"]),
    OpInfo::composed("var", &["reduce"]),
    OpInfo::composed("std", &["reduce", "map"]),
    REDUCED.named("logsumexp"),
    COMPARED.named("argmax"),
    COMPARED.named("argmin"),
    OpInfo::composed("max_with_indices", &["reduce", "argmax"]),
    OpInfo::composed("min_with_indices", &["reduce", "argmin"]),
    OpInfo::composed(
        "median",
        &[
            "argsort",
            "isnan",
            "max_with_indices",
            "narrow",
            "reshape",
            "squeeze",
            "take_along_axis",
            "where_",
        ],
    ),
];

/// The steps of this file: a reduction on behalf of an op.
pub(super) const STEPS: &[OpInfo] = &[REDUCED];

const REDUCED: OpInfo = OpInfo::new("reduce", REDUCE);

/// Where the axis is cut, the results of the parts are compared.
const COMPARED: OpInfo = REDUCED.without_gradient(POSITIONS).runs(&[
    "eq",
    "isnan",
    "logical_and",
    "logical_or",
    "squeeze",
    "where_",
]);

/// A reduction of what a map program makes of its operands.
pub(crate) struct Reduce<'a> {
    pub(crate) op: &'static str,
    /// Has one output, of the kind of `dtype` (of any kind for arg-reductions).
    pub(crate) program: &'a MapProgram,
    /// They broadcast to the shape of the first.
    pub(crate) operands: &'a [&'a Tensor],
    pub(crate) params: &'a [Scalar],
    /// Sorted.
    pub(crate) axes: &'a [usize],
    pub(crate) keepdim: bool,
    pub(crate) reduce: ReduceOp,
    /// Multiplies the result before it is rounded.
    pub(crate) scale: Option<f64>,
    pub(crate) dtype: DType,
    /// Whether the program is linear in the first operand: a sum of it may then be of partial sums.
    pub(crate) linear: bool,
}

impl Reduce<'_> {
    /// Runs it without a gradient.
    #[track_caller]
    pub(super) fn compute(&self) -> Result<Tensor> {
        if plain(self.op, self.operands)? {
            self.run_plain()
        } else {
            self.run_sharded()
        }
    }

    /// The same reduction of other operands.
    fn of<'b>(&'b self, operands: &'b [&'b Tensor], axes: &'b [usize]) -> Reduce<'b> {
        Reduce {
            operands,
            axes,
            ..*self
        }
    }

    /// How results of parts combine, where they do so without anything else.
    fn reduction(&self) -> Option<Reduction> {
        match (self.reduce, self.dtype) {
            (ReduceOp::Sum, _) => Some(Reduction::Sum),
            (ReduceOp::Prod, _) => Some(Reduction::Prod),
            (ReduceOp::Max, DType::Bool) => Some(Reduction::Or),
            (ReduceOp::Min, DType::Bool) => Some(Reduction::And),
            (ReduceOp::Max, _) => Some(Reduction::Max),
            (ReduceOp::Min, _) => Some(Reduction::Min),
            _ => None,
        }
    }

    fn run_plain(&self) -> Result<Tensor> {
        let device = same_device(self.op, self.operands)?;
        let (first, shape) = (self.operands[0], self.operands[0].shape());
        let out = reduced_shape(shape, self.axes, self.keepdim);
        if matches!(self.reduce, ReduceOp::ArgMax | ReduceOp::ArgMin) {
            check_positions(self.op, self.axes.iter().map(|&a| shape[a]).product())?;
        }
        if self.reduce == ReduceOp::LogSumExp {
            need_float_math(self.op, device, self.dtype)?;
        }
        if out.checked_numel(self.op)? == 0 {
            return first.no_elements(self.dtype, out);
        }
        if shape.numel() == 0 {
            return self.empty(&out);
        }
        // A 0-d tensor is a row of one element: kernels always have an axis to reduce.
        let (row, only) = (Shape::from([1]), [0]);
        let (shape, axes): (&Shape, &[usize]) = if shape.rank() == 0 {
            (&row, &only)
        } else {
            (shape, self.axes)
        };
        let operands: smallvec::SmallVec<[_; 2]> =
            self.operands.iter().map(|t| (*t).into()).collect();
        let map = Map {
            params: self.params,
            ..Map::new(self.op, self.program, shape)
        };
        let call = ReduceCall {
            map: map.call(&operands, device)?,
            axes: axes.into(),
            mode: self.reduce,
            scale: self.scale,
            dtype: self.dtype,
        };
        launch_as(first.mesh(), out, call)
    }

    /// What a reduction of nothing gives.
    fn empty(&self, out: &Shape) -> Result<Tensor> {
        let identity: f64 = match (self.reduce, self.dtype) {
            (ReduceOp::Sum, _) | (ReduceOp::Max, DType::Bool) => 0.0,
            (ReduceOp::Prod, _) | (ReduceOp::Min, DType::Bool) => 1.0,
            (ReduceOp::LogSumExp, _) => f64::NEG_INFINITY,
            (ReduceOp::Max | ReduceOp::ArgMax, _) => {
                return Err(
                    Error::argument(self.op, "axes", "an empty axis has no maximum")
                        .of(self.operands.iter().copied()),
                );
            }
            (ReduceOp::Min | ReduceOp::ArgMin, _) => {
                return Err(
                    Error::argument(self.op, "axes", "an empty axis has no minimum")
                        .of(self.operands.iter().copied()),
                );
            }
        };
        let b = Builder::new();
        let value = b.param(self.dtype);
        let program = b.finish(&[(value, self.dtype)])?;
        let identity = super::elementwise::number(
            self.op,
            Scalar::Float(identity * self.scale.unwrap_or(1.0)),
            self.dtype,
        )?;
        Ok(Map {
            params: &[identity],
            ..Map::new(self.op, &program, out)
        }
        .run(&[], self.operands[0].device())?
        .remove(0))
    }
}

/// Whether a program only loads its input, without rounding it.
fn is_identity(program: &MapProgram) -> bool {
    let (from, to) = (program.inputs[0], program.outputs[0].1);
    program.insts.len() == 1 && from.kind() == to.kind() && from.size() <= to.size()
}

fn reduced_shape(shape: &Shape, axes: &[usize], keepdim: bool) -> Shape {
    (0..shape.rank())
        .filter(|d| keepdim || !axes.contains(d))
        .map(|d| if axes.contains(&d) { 1 } else { shape[d] })
        .collect()
}

/// Positions are `i32`.
pub(crate) fn check_positions(op: &'static str, extent: usize) -> Result<()> {
    if extent <= i32::MAX as usize {
        return Ok(());
    }
    Err(Error::Positions { op, count: extent })
}

/// The dtype of a sum or product: bool and u8 would overflow at once, so they count in `i32`.
pub(crate) fn sum_type(dtype: DType) -> DType {
    if matches!(dtype, DType::Bool | DType::U8) {
        DType::I32
    } else {
        dtype
    }
}

/// The dtype that holds intermediate results of a float op: nothing is rounded before the end.
fn wide(dtype: DType) -> DType {
    dtype.to_float().kind().dtype()
}

/// The program `f(x)` that computes in the kind of `to`; `name` tells the formulas of one op apart.
fn front(
    name: &'static str,
    from: DType,
    to: DType,
    f: impl for<'b> FnOnce(Val<'b>) -> Val<'b>,
) -> Result<MapProgram> {
    let slots = [Slot::Load(from), Slot::Empty, Slot::Empty, Slot::Empty];
    cached(
        Key {
            op: name,
            dtype: to,
            slots,
        },
        |b| b.finish(&[(f(b.load(from).cast(to.kind().dtype())), to)]),
    )
}

/// A reduction of one tensor as it is, in the kind of `dtype`.
#[track_caller]
fn as_is(
    x: &Tensor,
    op: &'static str,
    axes: &[i64],
    keepdim: bool,
    reduce: ReduceOp,
    dtype: DType,
) -> Result<Tensor> {
    over(x, op, &x.shape().axes(op, axes)?, keepdim, reduce, dtype)
}

/// [`as_is`] over axes that are checked and sorted.
#[track_caller]
fn over(
    x: &Tensor,
    op: &'static str,
    axes: &[usize],
    keepdim: bool,
    reduce: ReduceOp,
    dtype: DType,
) -> Result<Tensor> {
    let program = front(op, x.dtype(), dtype, |v| v)?;
    Reduce {
        op,
        program: &program,
        operands: &[x],
        params: &[],
        axes,
        keepdim,
        reduce,
        scale: None,
        dtype,
        linear: false,
    }
    .run()
}

/// A sum over axes that are checked and sorted, which stay with size 1.
#[track_caller]
pub(crate) fn summed(op: &'static str, x: &Tensor, axes: &[usize]) -> Result<Tensor> {
    over(x, op, axes, true, ReduceOp::Sum, x.dtype())
}

/// The gradient of the values that were reduced to `out`, from that of `out`; both have the reduced
/// dimensions with size 1.
#[track_caller]
pub(crate) fn spread(
    op: &'static str,
    reduce: ReduceOp,
    values: &Tensor,
    out: &Tensor,
    axes: &[usize],
    gradient: &Tensor,
) -> Result<Tensor> {
    match reduce {
        ReduceOp::Max | ReduceOp::Min => {
            // Those that are the extreme share its gradient.
            let hit = values.eq(out)?;
            let hits = over(
                &hit.cast(gradient.dtype())?,
                op,
                axes,
                true,
                ReduceOp::Sum,
                gradient.dtype(),
            )?;
            hit.where_(&gradient.div(&hits)?, 0)
        }
        // The product of all others, which a quotient would not give where one of them is zero.
        ReduceOp::Prod => others(values, axes)?.mul(gradient),
        ReduceOp::LogSumExp => {
            // Where nothing was summed there is nothing to share.
            let weight = Expr::new(op, &[values, out]).map(gradient.dtype(), |a| {
                a.x[1]
                    .eq(f64::NEG_INFINITY)
                    .select(a.x[1].lit(0.0), (a.x[0] - a.x[1]).exp())
            })?;
            weight.mul(gradient)
        }
        ReduceOp::Sum | ReduceOp::ArgMax | ReduceOp::ArgMin => gradient.expand(values.shape()),
    }
}

/// For each element the product of all others along `axes`.
#[track_caller]
fn others(x: &Tensor, axes: &[usize]) -> Result<Tensor> {
    let last: Dims<i64> = (0..axes.len())
        .map(|i| i as i64 - axes.len() as i64)
        .collect();
    let from: Dims<i64> = axes.iter().map(|a| *a as i64).collect();
    let moved = x.movedim(&from, &last)?;
    let n = axes.iter().map(|a| x.dims()[*a]).product();
    let rows = moved.reshape(
        moved.dims()[..x.rank() - axes.len()]
            .iter()
            .copied()
            .chain([n])
            .collect::<Shape>(),
    )?;
    // What comes before an element: the running product, one further on.
    let before = |rows: &Tensor| {
        let mut pairs = vec![(0, 0); rows.rank()];
        pairs[rows.rank() - 1] = (1, 0);
        rows.narrow(-1, 0, n.saturating_sub(1))?
            .pad(&pairs, PadMode::Constant(1.0.into()))?
            .cumprod(-1)
    };
    let after = before(&rows.flip(&[-1])?)?.flip(&[-1])?;
    before(&rows)?
        .mul(&after)?
        .reshape(moved.shape())?
        .movedim(&last, &from)
}

/// A tensor with nothing partial, for several steps that read it all to reduce it over `axes`:
/// combined once, and cut as the reduction would have it cut.
#[track_caller]
fn settled(op: &'static str, x: &Tensor, axes: &[usize], combine: Combine) -> Result<Tensor> {
    if !x.sharding().is_partial() || x.numel() == 0 {
        return without_partials(x.clone());
    }
    let _scope = on_behalf_of(op, x);
    let detached = x.detach();
    let targets = Call::of(&REDUCED, &[&detached])
        .on_behalf_of(op)
        .data(&reduce_data(axes, true, combine))
        .targets()?;
    x.reshard(&targets[0])
}

/// The number of elements that become one.
fn extent(x: &Tensor, axes: &[usize]) -> f64 {
    axes.iter().map(|&a| x.dims()[a] as f64).product()
}

/// Mean with a chosen result dtype.
#[track_caller]
fn mean(
    x: &Tensor,
    op: &'static str,
    axes: &[usize],
    keepdim: bool,
    dtype: DType,
) -> Result<Tensor> {
    let program = front("mean", x.dtype(), dtype, |v| v)?;
    let scale = Some(1.0 / extent(x, axes));
    Reduce {
        op,
        program: &program,
        operands: &[x],
        params: &[],
        axes,
        keepdim,
        reduce: ReduceOp::Sum,
        scale,
        dtype,
        linear: false,
    }
    .run()
}

impl Tensor {
    /// Sum. `bool` and `u8` give `i32`, other integers keep their type and wrap. The sum of nothing
    /// is 0.
    #[track_caller]
    pub fn sum(&self, axes: &[i64], keepdim: bool) -> Result<Tensor> {
        as_is(
            self,
            "sum",
            axes,
            keepdim,
            ReduceOp::Sum,
            sum_type(self.dtype()),
        )
    }

    /// Mean; integers and bools give `f32`. The mean of nothing is NaN.
    #[track_caller]
    pub fn mean(&self, axes: &[i64], keepdim: bool) -> Result<Tensor> {
        mean(
            self,
            "mean",
            &self.shape().axes("mean", axes)?,
            keepdim,
            self.dtype().to_float(),
        )
    }

    /// The [`sum`](Self::sum) of all elements, 0-d.
    ///
    /// ```
    /// # use anymesh_core::Tensor;
    /// # let device = anymesh_backend_cpu::device();
    /// let x = Tensor::new(&[[1f32, 2.0], [3.0, 6.0]], &device)?;
    /// let all = [x.sum_all()?, x.mean_all()?, x.max_all()?, x.min_all()?];
    /// assert_eq!(all.map(|t| t.to_string()), ["12.0", "3.0", "6.0", "1.0"].map(|v| format!("{v}\nf32[] on cpu")));
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn sum_all(&self) -> Result<Tensor> {
        self.sum(&[], false)
    }

    /// The [`mean`](Self::mean) of all elements, 0-d.
    #[track_caller]
    pub fn mean_all(&self) -> Result<Tensor> {
        self.mean(&[], false)
    }

    /// The largest element ([`max`](Self::max)), 0-d.
    #[track_caller]
    pub fn max_all(&self) -> Result<Tensor> {
        self.max(&[], false)
    }

    /// The smallest element ([`min`](Self::min)), 0-d.
    #[track_caller]
    pub fn min_all(&self) -> Result<Tensor> {
        self.min(&[], false)
    }

    /// Product, with the dtypes of `sum`. The product of nothing is 1.
    #[track_caller]
    pub fn prod(&self, axes: &[i64], keepdim: bool) -> Result<Tensor> {
        as_is(
            self,
            "prod",
            axes,
            keepdim,
            ReduceOp::Prod,
            sum_type(self.dtype()),
        )
    }

    /// The largest value; NaN if any is NaN. An empty axis has none, which is an error.
    #[track_caller]
    pub fn amax(&self, axes: &[i64], keepdim: bool) -> Result<Tensor> {
        as_is(self, "amax", axes, keepdim, ReduceOp::Max, self.dtype())
    }

    /// The smallest value; NaN if any is NaN. An empty axis has none, which is an error.
    #[track_caller]
    pub fn amin(&self, axes: &[i64], keepdim: bool) -> Result<Tensor> {
        as_is(self, "amin", axes, keepdim, ReduceOp::Min, self.dtype())
    }

    /// The same as [`amax`](Self::amax).
    #[track_caller]
    pub fn max(&self, axes: &[i64], keepdim: bool) -> Result<Tensor> {
        as_is(self, "max", axes, keepdim, ReduceOp::Max, self.dtype())
    }

    /// The same as [`amin`](Self::amin).
    #[track_caller]
    pub fn min(&self, axes: &[i64], keepdim: bool) -> Result<Tensor> {
        as_is(self, "min", axes, keepdim, ReduceOp::Min, self.dtype())
    }

    /// Whether any value is true (not zero). False for nothing.
    #[track_caller]
    pub fn any(&self, axes: &[i64], keepdim: bool) -> Result<Tensor> {
        as_is(self, "any", axes, keepdim, ReduceOp::Max, DType::Bool)
    }

    /// Whether all values are true (not zero). True for nothing.
    #[track_caller]
    pub fn all(&self, axes: &[i64], keepdim: bool) -> Result<Tensor> {
        as_is(self, "all", axes, keepdim, ReduceOp::Min, DType::Bool)
    }

    /// How many values are not zero, as `i32`.
    #[track_caller]
    pub fn count_nonzero(&self, axes: &[i64], keepdim: bool) -> Result<Tensor> {
        let op = "count_nonzero";
        let axes = self.shape().axes(op, axes)?;
        check_positions(op, axes.iter().map(|&a| self.dims()[a]).product())?;
        let slots = [
            Slot::Load(self.dtype()),
            Slot::Empty,
            Slot::Empty,
            Slot::Empty,
        ];
        let program = cached(
            Key {
                op,
                dtype: DType::I32,
                slots,
            },
            |b| b.finish(&[(b.load(self.dtype()).cast(DType::Bool), DType::I32)]),
        )?;
        Reduce {
            op,
            program: &program,
            operands: &[self],
            params: &[],
            axes: &axes,
            keepdim,
            reduce: ReduceOp::Sum,
            scale: None,
            dtype: DType::I32,
            linear: false,
        }
        .run()
    }

    /// `log(sum(exp(x)))` without overflow; -inf for nothing. It is `f32` (`f64` for `f64`): what
    /// follows is a difference or a loss, which the digits of a small float are too few for.
    #[track_caller]
    pub fn logsumexp(&self, axes: &[i64], keepdim: bool) -> Result<Tensor> {
        as_is(
            self,
            "logsumexp",
            axes,
            keepdim,
            ReduceOp::LogSumExp,
            wide(self.dtype()),
        )
    }
}

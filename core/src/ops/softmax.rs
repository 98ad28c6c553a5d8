//! Softmax and its logarithm along one axis.

use super::{
    OpInfo,
    expr::{Expr, check_float, compute_type},
    op,
    row_program::Rows,
};
use crate::{
    Layout, Result, Tensor, View,
    backend::{ReduceOp, RowBuilder, RowCall, RowOp},
    grad::{Back, is_recording, record1},
    launch::launch_fused,
    spmd::{Call, plain, settled, without_partials},
    tensor::Outputs,
};
use smallvec::smallvec;

/// The ops of this file.
pub const OPS: &[OpInfo] = &[ROWS, ROWS.named("log_softmax")];

/// Where rows are cut, only their largest values and sums cross.
const ROWS: OpInfo = op("softmax", "...r -> ...r ; stats r 2").runs(&["map", "reduce"]);

impl Tensor {
    /// `exp(x) / sum(exp(x))` along `axis`, without overflow. A row of only `-inf` gives NaN.
    ///
    /// ```
    /// # use anymesh_core::Tensor;
    /// # let device = anymesh_backend_cpu::device();
    /// let x = Tensor::from_slice(&[1e4f32, 1e4, f32::NEG_INFINITY], [1, 3], &device)?;
    /// assert_eq!(x.softmax(-1)?.to_vec::<f32>()?, [0.5, 0.5, 0.0]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn softmax(&self, axis: i64) -> Result<Tensor> {
        let run = || along_rows("softmax", self, axis, RowOp::Softmax, decomposed);
        crate::observe::tell(|| serde_json::json!({ "axis": axis }));
        record1("softmax", &[self], run, |y| {
            let (y, axis) = (y.clone(), self.shape().axis("softmax", axis)?);
            Ok(move |b: &Back<'_>| Ok(smallvec![Some(pull(b.grad()?, &b.out(0, &y), axis)?)]))
        })
    }

    /// The logarithm of [`softmax`](Tensor::softmax), precise also where the probability
    /// underflows.
    #[track_caller]
    pub fn log_softmax(&self, axis: i64) -> Result<Tensor> {
        let run = || along_rows("log_softmax", self, axis, RowOp::LogSoftmax, log_decomposed);
        crate::observe::tell(|| serde_json::json!({ "axis": axis }));
        record1("log_softmax", &[self], run, |y| {
            let (y, axis) = (y.clone(), self.shape().axis("log_softmax", axis)?);
            Ok(move |b: &Back<'_>| Ok(smallvec![Some(log_pull(b.grad()?, &b.out(0, &y), axis)?)]))
        })
    }
}

/// The gradient of rows, from that of the result and the result: one launch for each rank that has
/// them whole.
const PULL: OpInfo = op("softmax_pull", "...r, ...r -> ...r ; stats r 1");

/// The gradient of rows along `axis` on a mesh.
fn pull_call<'a>(op: &'static str, operands: &'a [&'a Tensor], axis: &'a [usize]) -> Call<'a> {
    Call::of(&PULL, operands).on_behalf_of(op).bind('r', axis)
}

/// The gradient `y (g - sum(g y))` of what gave the probabilities `y`.
#[track_caller]
fn pull(g: &Tensor, y: &Tensor, axis: usize) -> Result<Tensor> {
    let op = "softmax";
    let g = settled(op, g, y, &[axis])?;
    if !plain(op, &[&g, y])? && !is_recording(&[&g, y]) {
        return pull_call(op, &[&g, y], &[axis]).run1_or(
            |l| pull(&l[0], &l[1], axis),
            |inputs| pull_composed(&inputs[0], &inputs[1], axis),
        );
    }
    if let Some(rows) = gradient_rows(op, &g, y, axis)? {
        let mut b = RowBuilder::new(&[g.dtype(), y.dtype()], 0);
        let inner = b.fold(ReduceOp::Sum, None, |a| a.x[0] * a.x[1])?;
        b.each([y.dtype()], |a| [a.x[1] * (a.x[0] - a.r[inner])])?;
        if let Some(mut made) = rows.launch(b.finish()?, &[])? {
            return Ok(made.remove(0));
        }
    }
    pull_composed(&g, y, axis)
}

/// [`pull`] as a reduction and a map.
#[track_caller]
fn pull_composed(g: &Tensor, y: &Tensor, axis: usize) -> Result<Tensor> {
    let op = "softmax";
    let inner = without_partials(Expr::new(op, &[g, y]).reduce(
        &[axis],
        ReduceOp::Sum,
        None,
        compute_type([y]),
        |a| a.x[0] * a.x[1],
    )?)?;
    Expr::new(op, &[g, y, &inner]).map(y.dtype(), |a| a.x[1] * (a.x[0] - a.x[2]))
}

/// The gradient `g - exp(y) sum(g)` of what gave the logarithms `y`.
#[track_caller]
fn log_pull(g: &Tensor, y: &Tensor, axis: usize) -> Result<Tensor> {
    let op = "log_softmax";
    let g = settled(op, g, y, &[axis])?;
    if !plain(op, &[&g, y])? && !is_recording(&[&g, y]) {
        return pull_call(op, &[&g, y], &[axis]).run1_or(
            |l| log_pull(&l[0], &l[1], axis),
            |inputs| log_pull_composed(&inputs[0], &inputs[1], axis),
        );
    }
    if let Some(rows) = gradient_rows(op, &g, y, axis)? {
        let mut b = RowBuilder::new(&[g.dtype(), y.dtype()], 0);
        let sum = b.fold(ReduceOp::Sum, None, |a| a.x[0])?;
        b.each([y.dtype()], |a| [a.x[0] - a.x[1].exp() * a.r[sum]])?;
        if let Some(mut made) = rows.launch(b.finish()?, &[])? {
            return Ok(made.remove(0));
        }
    }
    log_pull_composed(&g, y, axis)
}

/// [`log_pull`] as a reduction and a map.
#[track_caller]
fn log_pull_composed(g: &Tensor, y: &Tensor, axis: usize) -> Result<Tensor> {
    let op = "log_softmax";
    let sum = without_partials(Expr::new(op, &[g]).reduce(
        &[axis],
        ReduceOp::Sum,
        None,
        compute_type([y]),
        |a| a.x[0],
    )?)?;
    Expr::new(op, &[g, y, &sum]).map(y.dtype(), |a| a.x[0] - a.x[1].exp() * a.x[2])
}

/// A gradient and a result as the rows of a program, where rows are innermost.
fn gradient_rows<'t>(
    op: &'static str,
    g: &Tensor,
    y: &'t Tensor,
    axis: usize,
) -> Result<Option<Rows<'t>>> {
    if axis + 1 != y.rank() {
        return Ok(None);
    }
    match Rows::new(op, y, 1, &[g, y])? {
        Some(rows) => rows.elements(g)?.elements(y).map(Some),
        None => Ok(None),
    }
}

/// Softmax as two reductions and a map: what backends without a fused kernel run, and what a
/// sharded axis runs.
#[track_caller]
pub fn decomposed(x: &Tensor, axis: i64) -> Result<Tensor> {
    let (max, sum) = statistics("softmax", x, axis)?;
    Expr::new("softmax", &[x, &max, &sum]).map(x.dtype(), |a| (a.x[0] - a.x[1]).exp() / a.x[2])
}

/// Log-softmax as two reductions and a map.
#[track_caller]
pub fn log_decomposed(x: &Tensor, axis: i64) -> Result<Tensor> {
    let (max, sum) = statistics("log_softmax", x, axis)?;
    Expr::new("log_softmax", &[x, &max, &sum]).map(x.dtype(), |a| a.x[0] - a.x[1] - a.x[2].log())
}

/// The largest value, and the sum of exponentials relative to it; the axis stays with size 1.
#[track_caller]
fn statistics(op: &'static str, x: &Tensor, axis: i64) -> Result<(Tensor, Tensor)> {
    check_float(op, &[x])?;
    let axis = x.shape().axis(op, axis)?;
    if x.numel() == 0 {
        // Nothing is normalised, so the statistics of an empty axis are never read.
        return Ok((x.clone(), x.clone()));
    }
    let max = without_partials(Expr::new(op, &[x]).reduce(
        &[axis],
        ReduceOp::Max,
        None,
        x.dtype(),
        |a| a.x[0],
    )?)?;
    let sum =
        Expr::new(op, &[x, &max]).reduce(&[axis], ReduceOp::Sum, None, compute_type([x]), |a| {
            (a.x[0] - a.x[1]).exp()
        })?;
    Ok((max, without_partials(sum)?))
}

/// Runs the fused kernel on rows along `axis`, or the decomposition where there is none.
#[track_caller]
fn along_rows(
    op: &'static str,
    x: &Tensor,
    axis: i64,
    mode: RowOp,
    decomposed: fn(&Tensor, i64) -> Result<Tensor>,
) -> Result<Tensor> {
    check_float(op, &[x])?;
    let axis = x.shape().axis(op, axis)?;
    if !x.is_plain() {
        return Call::of(&ROWS, &[x])
            .on_behalf_of(op)
            .bind('r', &[axis])
            .run1_or(
                |l| along_rows(op, &l[0], axis as i64, mode.clone(), decomposed),
                |inputs| decomposed(&inputs[0], axis as i64),
            );
    }
    let last = x.rank() - 1;
    let mut order: crate::Dims = (0..=last).filter(|d| *d != axis).collect();
    order.push(axis);
    let rows = x.with_layout(x.layout().permute(&order));
    let out = match fused_rows(op, &rows, None, x.shape()[axis], mode)? {
        Some(mut out) => out.remove(0),
        None => return decomposed(x, axis as i64),
    };
    let mut back: crate::Dims = (0..last).collect();
    back.insert(axis, last);
    Ok(out.with_layout(out.layout().permute(&back)))
}

/// The results of the backend's row kernel for rows of `n` neighbouring elements, in the shape of
/// `x`: of `x`, or their sum with a residual and then of that. `None` where the backend has none.
pub(crate) fn fused_rows(
    op: &'static str,
    x: &Tensor,
    residual: Option<&Tensor>,
    n: usize,
    mode: RowOp,
) -> Result<Option<Outputs>> {
    if x.numel() == 0 {
        return Ok(None);
    }
    let rows = |x: &Tensor| -> Result<View> {
        let mut view = x.contiguous()?.view()?;
        view.layout = Layout {
            offset: view.layout.offset,
            ..Layout::contiguous([x.numel() / n, n].into())
        };
        Ok(view)
    };
    let call = RowCall {
        op,
        input: rows(x)?,
        residual: residual.map(rows).transpose()?,
        mode,
    };
    let Some(mut out) = launch_fused(x.mesh(), call)? else {
        return Ok(None);
    };
    for out in &mut out {
        *out = out.with_layout(Layout::contiguous(x.shape().clone()));
    }
    Ok(Some(out))
}

//! The gradients of products.

use super::{Ready, biased, local_product, product};
use crate::{
    DType, Dims, Layout, Result, Shape, Tensor,
    backend::{Addend, Kernel, ReduceOp},
    grad::{Back, Pulled, is_recording},
    launch::launch_as,
    ops::{OpInfo, RuleForm, expr::Expr, op, sum_to},
    spmd::{Call, Local, plain, rule::Wanted},
    tensor::Outputs,
};
use smallvec::smallvec;

/// From the gradient of the result, the weight and the input, those of the input and the weight.
const LINEAR_PULL: OpInfo = op(
    "linear_pull",
    "...n, nk, ...k -> ...k, nk ; reduce n ... sum ; linear 0",
);

/// From the gradient of the result, the right and the left factor, those of the left and the right:
/// of one matrix for a whole stack, and of a stack.
const PRODUCT_PULL: OpInfo = OpInfo::new(
    "product_pull",
    RuleForm::Variants(&[
        "...mn, kn, ...mk -> ...mk, kn ; reduce n m ... sum ; linear 0",
        "...mn, ...kn, ...mk -> ...mk, ...kn ; reduce n m sum ; linear 0",
    ]),
);

/// The product `a b` as the gradient of `of`: in its dtype, summed over the dimensions of the batch
/// along which it was repeated.
#[track_caller]
pub(super) fn factor_gradient(
    op: &'static str,
    a: &Tensor,
    b: &Tensor,
    of: &Tensor,
) -> Result<Tensor> {
    sum_to(op, &product_as(op, a, b, of.dtype())?, of.shape())
}

/// The product in a float dtype of any width.
#[track_caller]
pub(super) fn product_as(op: &'static str, a: &Tensor, b: &Tensor, dtype: DType) -> Result<Tensor> {
    let common = a.dtype().promote(b.dtype());
    let store = if common.kind() == dtype.kind() {
        dtype
    } else {
        common
    };
    product(op, a, b, store)?.cast(dtype)
}

/// The gradient of operand `i` as the product `a b` of plain matrices: in this dtype, or, where there
/// is a sum of gradients to add it to, the new sum.
#[track_caller]
pub(super) fn product_onto(
    op: &'static str,
    back: &Back<'_>,
    i: usize,
    [a, b]: [&Tensor; 2],
    dtype: DType,
) -> Result<Tensor> {
    let Some(sum) = back.take_sum(i) else {
        return product_as(op, a, b, dtype);
    };
    match added_at_once(op, a, b, &sum, sum.is_sole())? {
        Some(out) => Ok(out),
        // Rounded once, as by the kernel.
        None => {
            let wide = product_as(op, a, b, sum.dtype().kind().dtype())?;
            biased(op, &wide, &sum, sum.dtype())
        }
    }
}

/// The sum of something and a product of plain matrices by one kernel, where the device has one, in
/// the dtype of the former; and in its memory where it is to go `over` it.
#[track_caller]
pub(super) fn added_at_once(
    op: &'static str,
    a: &Tensor,
    b: &Tensor,
    addend: &Tensor,
    over: bool,
) -> Result<Option<Tensor>> {
    let (common, dtype) = (a.dtype().promote(b.dtype()), addend.dtype());
    if common.kind() != dtype.kind() || !plain(op, &[a, b, addend])? || !addend.is_contiguous() {
        return Ok(None);
    }
    let made = local_product(op, &a.cast(common)?, &b.cast(common)?, dtype)?;
    let Ready::Launch(shape, mut call) = made else {
        return Ok(None);
    };
    if shape != *addend.shape() {
        return Ok(None);
    }
    let mut view = addend.view()?;
    let (rows, columns) = (&call.a.layout.shape, &call.b.layout.shape);
    let rows = rows.dims()[..rows.rank() - 1].iter().copied();
    let whole: Shape = rows.chain(columns.dims().last().copied()).collect();
    view.layout = Layout {
        offset: view.layout.offset,
        ..Layout::contiguous(whole)
    };
    call.addend = Some(Box::new(Addend { view, over }));
    let kernel = Kernel::from(*call);
    match addend.device().backend().supports(&kernel) {
        true => launch_as(addend.mesh(), shape, kernel).map(Some),
        false => Ok(None),
    }
}

/// The gradient of operand `i`, one matrix for all rows of the others: the sum over rows of
/// the outer products of theirs.
#[track_caller]
pub(super) fn rows_onto(
    op: &'static str,
    back: &Back<'_>,
    i: usize,
    [left, right]: [&Tensor; 2],
    dtype: DType,
) -> Result<Tensor> {
    let flat = |t: &Tensor| {
        let last = t.dims()[t.rank() - 1];
        t.reshape([t.numel() / last.max(1), last])
    };
    product_onto(op, back, i, [&flat(left)?.t()?, &flat(right)?], dtype)
}

/// The gradient of a weight that rows of `x` were multiplied by, which is operand `i` of a pass, where
/// there is one: it may add to a sum of gradients.
#[track_caller]
pub(super) fn weight_gradient(
    op: &'static str,
    back: Option<&Back<'_>>,
    i: usize,
    gradient: &Tensor,
    x: &Tensor,
    dtype: DType,
) -> Result<Tensor> {
    match (x.rank(), back) {
        (1, _) => product_as(op, &gradient.unsqueeze(1)?, &x.unsqueeze(0)?, dtype),
        (2, Some(back)) if x.is_plain() => product_onto(op, back, i, [&gradient.t()?, x], dtype),
        (_, Some(back)) if back.has_sum(i) => rows_onto(op, back, i, [gradient, x], dtype),
        // Not of transposes on a mesh: both products read one gradient, which is then brought once.
        _ => einsum_as("...o,...i->oi", &[gradient, x], dtype),
    }
}

/// Where the gradient of operand `i` is wanted, as far as that is known, if it is one of `terms` that
/// are added up first.
pub(super) fn place(back: &Back<'_>, i: usize, terms: u32) -> Option<Wanted> {
    let (sharding, shared_by) = back.place(i)?;
    Some(Wanted {
        sharding,
        shared_by: shared_by.saturating_mul(terms),
    })
}

/// An einsum in a float dtype of any width.
#[track_caller]
pub(super) fn einsum_as(equation: &str, tensors: &[&Tensor], dtype: DType) -> Result<Tensor> {
    Tensor::einsum(equation, tensors)?.cast(dtype)
}

/// Both gradients of a product on a mesh in one call: the gradient of the result and both factors
/// are brought once, to where it costs least for both. Not where only one is wanted, where the pass
/// is recorded, or where dtypes differ, so that parts of a sum would be rounded one by one.
#[track_caller]
fn pull_both(
    op: &'static str,
    places: [Option<Wanted>; 2],
    (info, variant): (&'static OpInfo, usize),
    [gradient, left, right]: [&Tensor; 3],
    local: impl Fn(&Local<'_>) -> Result<Outputs>,
) -> Result<Option<[Tensor; 2]>> {
    let operands = [gradient, right, left];
    let differ = operands.iter().any(|t| t.dtype() != gradient.dtype());
    if differ || is_recording(&operands) || plain(op, &operands)? {
        return Ok(None);
    }
    let call = Call::of(info, &operands)
        .on_behalf_of(op)
        .variant(variant)
        .wanted(places);
    let mut out = call.run(local)?.into_iter();
    Ok(out.next().zip(out.next()).map(Into::into))
}

/// The gradients of an input of several dimensions and of its weight, where both are wanted, on a
/// mesh.
#[track_caller]
pub(super) fn linear_pull(
    op: &'static str,
    places: [Option<Wanted>; 2],
    gradient: &Tensor,
    weight: &Tensor,
    x: &Tensor,
) -> Result<Option<[Tensor; 2]>> {
    let local = |l: &Local<'_>| {
        let (gradient, weight, x) = (&l[0], &l[1], &l[2]);
        Ok(smallvec![
            product_as(op, gradient, weight, x.dtype())?,
            einsum_as("...o,...i->oi", &[gradient, x], weight.dtype())?,
        ])
    };
    pull_both(op, places, (&LINEAR_PULL, 0), [gradient, x, weight], local)
}

/// The gradient of a bias of this shape and dtype.
#[track_caller]
pub(super) fn bias_gradient(gradient: &Tensor, (shape, dtype): &(Shape, DType)) -> Result<Tensor> {
    let rows: Dims = (0..gradient.rank() - 1).collect();
    Expr::new("linear", &[gradient])
        .reduce(&rows, ReduceOp::Sum, None, *dtype, |a| a.x[0])?
        .reshape(shape)
}

/// Both gradients of a product of matrices, or of stacks of matrices, on a mesh.
#[track_caller]
pub(super) fn product_pull(
    op: &'static str,
    back: &Back<'_>,
    gradient: &Tensor,
    left: &Tensor,
    right: &Tensor,
) -> Result<Option<Pulled>> {
    let (one, same) = (
        right.rank() == 2,
        left.dims()[..left.rank() - 2] == right.dims()[..right.rank() - 2],
    );
    if !(back.needs(0) && back.needs(1)) || !(one || same) {
        return Ok(None);
    }
    let local = |l: &Local<'_>| {
        let (gradient, right, left) = (&l[0], &l[1], &l[2]);
        let second = if one {
            einsum_as("...mk,...mn->kn", &[left, gradient], right.dtype())?
        } else {
            product_as(op, &left.t()?, gradient, right.dtype())?
        };
        Ok(smallvec![
            product_as(op, gradient, &right.t()?, left.dtype())?,
            second
        ])
    };
    let both = pull_both(
        op,
        [place(back, 0, 1), place(back, 1, 1)],
        (&PRODUCT_PULL, usize::from(!one)),
        [gradient, left, right],
        local,
    )?;
    Ok(both.map(|[first, second]| smallvec![Some(first), Some(second)]))
}

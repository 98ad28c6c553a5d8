//! Matrix products.
//!
//! Small floats accumulate in `f32` and round once; integers wrap; a product over zero elements is
//! zero.
//!
//! ```
//! # use anymesh_core::Tensor;
//! # let device = anymesh_backend_cpu::device();
//! let a = Tensor::from_slice(&[1f32, 2., 3., 4.], [2, 2], &device)?;
//! let x = Tensor::from_slice(&[1f32, -1.], [2], &device)?;
//! assert_eq!(a.matmul(&x)?.to_vec::<f32>()?, [-1., -1.]);
//! assert_eq!(x.matmul(&a)?.to_vec::<f32>()?, [-2., -2.]);
//! # Ok::<(), anymesh_core::Error>(())
//! ```

mod baddbmm;
mod each;
mod gradient;
mod scaled;

use super::{OpInfo, RuleForm, expr::Expr, op, same_device, sum_to};
use crate::{
    DType, Error, Layout, Result, Shape, Tensor,
    backend::{Kernel, MatmulCall},
    grad::{Back, Pulled, record1},
    launch::launch_as,
    promotion,
    spmd::{Call, plain},
};
pub use baddbmm::Baddbmm;

use baddbmm::BADDBMM;
use gradient::{
    bias_gradient, einsum_as, factor_gradient, linear_pull, place, product_as, product_onto,
    product_pull, rows_onto, weight_gradient,
};
use scaled::{OUTER_SCALED, SCALED};
use smallvec::{SmallVec, smallvec};

const PRODUCT: &str = "...mk, ...kn -> ...mn ; reduce k sum ; linear 0 ; linear 1";
const DOT: &str = "k, k -> ; reduce k sum ; linear 0 ; linear 1";

/// The ops of this file. A bias is an addend: where `k` is cut, one rank adds it.
pub const OPS: &[OpInfo] = &[
    MATMUL,
    MATMUL.named("matmul_as"),
    op("bmm", PRODUCT).runs(&["cast"]),
    op("dot", DOT).runs(&["cast"]),
    OUTER,
    LINEAR,
    each::EACH,
    BADDBMM,
    SCALED,
    OUTER_SCALED,
];

/// Two matrices; a vector and a matrix; a matrix and a vector; two vectors.
const MATMUL: OpInfo = OpInfo::new(
    "matmul",
    RuleForm::Variants(&[
        PRODUCT,
        "k, ...kn -> ...n ; reduce k sum ; linear 0 ; linear 1",
        "...mk, k -> ...m ; reduce k sum ; linear 0 ; linear 1",
        DOT,
    ]),
)
.runs(&["cast"]);
const OUTER: OpInfo = op("outer", "m, n -> mn ; linear 0 ; linear 1").runs(&["cast"]);
/// Integers become floats when a float bias is added: they are whole by then, so the sum is an op of
/// its own.
const LINEAR: OpInfo = op(
    "linear",
    "...k, nk, n -> ...n ; reduce k sum ; linear 0 2 ; linear 1 2",
)
.runs(&["add", "cast", "matmul", "transpose"]);
/// The dtype in which several operands multiply; `bool` has no product of its own. Floats of
/// different dtypes do so where the [policy](super::with_promotion) lets them.
pub(super) fn number_type(op: &'static str, tensors: &[&Tensor]) -> Result<DType> {
    promotion::check(op, tensors)?;
    if tensors.iter().any(|t| t.dtype() == DType::Bool) {
        return Err(Error::DType {
            op,
            dtype: DType::Bool,
            expected: "numbers: cast to the type to count in",
        });
    }
    Ok(tensors
        .iter()
        .fold(tensors[0].dtype(), |dtype, t| dtype.promote(t.dtype())))
}

/// The product under NumPy's rules, computed in the operands' common dtype and stored as `store`,
/// which has the same kind.
#[track_caller]
pub(super) fn product(op: &'static str, a: &Tensor, b: &Tensor, store: DType) -> Result<Tensor> {
    plain(op, &[a, b])?;
    let dtype = number_type(op, &[a, b])?;
    if store.kind() != dtype.kind() {
        return Err(Error::DType {
            op,
            dtype: store,
            expected: "a result dtype that the operands compute in: another float for floats up to 32 bits, else their own",
        });
    }
    if a.rank() == 0 || b.rank() == 0 {
        return Err(Error::shape(
            op,
            [a, b],
            format!(
                "{} and {}: a scalar has no rows, multiply by it instead",
                a.type_string(),
                b.type_string()
            ),
        ));
    }
    check_inner(op, a, b, a.rank() - 1, b.rank().saturating_sub(2))?;
    record1(
        op,
        &[a, b],
        || multiplied(op, a, b, dtype, store),
        |_| {
            let (a, b) = (a.kept(), b.kept());
            Ok(move |back: &Back<'_>| {
                // A vector is a matrix with one row or one column.
                let column = |t: &Tensor, is_vector: bool, at: i64| {
                    if is_vector {
                        t.unsqueeze(at)
                    } else {
                        Ok(t.clone())
                    }
                };
                let (left, right) = (column(&a, a.rank() == 1, 0)?, column(&b, b.rank() == 1, 1)?);
                // Factors of bf16 whose product is kept wider: the products of the gradient are of
                // bf16 too, or they would be f32 products. It has the range for any gradient.
                let gradient = if dtype == DType::BF16 {
                    back.grad()?.cast(dtype)?
                } else {
                    back.grad()?.clone()
                };
                if a.rank() > 1
                    && b.rank() > 1
                    && let Some(pulled) = product_pull(op, back, &gradient, &left, &right)?
                {
                    return Ok(pulled);
                }
                let gradient = column(&column(&gradient, b.rank() == 1, -1)?, a.rank() == 1, -2)?;
                let first = back.wanted(0, || {
                    factor_gradient(op, &gradient, &right.t()?, &left)?.reshape(a.shape())
                })?;
                let second = back.wanted(1, || {
                    // One matrix for a whole batch: its gradient is one product over all rows of
                    // the batch.
                    if right.rank() == 2 && left.rank() > 2 && b.rank() == 2 && back.has_sum(1) {
                        return rows_onto(op, back, 1, [&left, &gradient], b.dtype());
                    }
                    if right.rank() == 2 && left.rank() > 2 {
                        return einsum_as("...mk,...mn->kn", &[&left, &gradient], right.dtype())?
                            .reshape(b.shape());
                    }
                    // Not of transposes on a mesh: both products read one gradient, which is then
                    // brought once.
                    if !left.is_plain() {
                        let all =
                            einsum_as("...mk,...mn->...kn", &[&left, &gradient], right.dtype())?;
                        return sum_to(op, &all, right.shape())?.reshape(b.shape());
                    }
                    if left.rank() == 2 && right.rank() == 2 && b.rank() == 2 {
                        return product_onto(op, back, 1, [&left.t()?, &gradient], b.dtype());
                    }
                    factor_gradient(op, &left.t()?, &gradient, &right)?.reshape(b.shape())
                })?;
                Ok(smallvec![first, second])
            })
        },
    )
}

#[track_caller]
fn multiplied(
    op: &'static str,
    a: &Tensor,
    b: &Tensor,
    dtype: DType,
    store: DType,
) -> Result<Tensor> {
    let (left, right) = (a.cast(dtype)?, b.cast(dtype)?);
    if !a.is_plain() {
        let batch = |t: &Tensor| Shape::from(&t.dims()[..t.rank().saturating_sub(2)]);
        batch(a).broadcast(op, &batch(b))?;
        let variant = match (a.rank(), b.rank()) {
            (1, 1) => 3,
            (_, 1) => 2,
            (1, _) => 1,
            _ => 0,
        };
        return Call::of(&MATMUL, &[&left, &right])
            .on_behalf_of(op)
            .variant(variant)
            .run1(|l| product(op, &l[0], &l[1], store));
    }
    match local_product(op, &left, &right, store)? {
        Ready::Known(out) => Ok(out),
        Ready::Launch(shape, call) => launch_as(a.mesh(), shape, *call),
    }
}

/// A product of one device: a result that needs no launch, or the launch and the shape of its result.
enum Ready {
    Known(Tensor),
    Launch(Shape, Box<MatmulCall>),
}

/// The product of tensors of one dtype on one device.
fn local_product(op: &'static str, a: &Tensor, b: &Tensor, store: DType) -> Result<Ready> {
    let (left, right) = (a.clone(), b.clone());
    let left = if a.rank() == 1 {
        left.unsqueeze(0)?
    } else {
        left
    };
    let right = if b.rank() == 1 {
        right.unsqueeze(1)?
    } else {
        right
    };
    let ([left_batch @ .., m, k], [right_batch @ .., _, n]) = (left.dims(), right.dims()) else {
        return Err(Error::shape(op, [a, b], "matrices have two dimensions"));
    };
    let (m, k, n) = (*m, *k, *n);
    let batch = Shape::from(left_batch).broadcast(op, &Shape::from(right_batch))?;
    let rows = (a.rank() > 1).then_some(m);
    let columns = (b.rank() > 1).then_some(n);
    let shape: Shape = batch
        .dims()
        .iter()
        .copied()
        .chain(rows)
        .chain(columns)
        .collect();
    if shape.checked_numel(op)? == 0 {
        return a.no_elements(store, shape).map(Ready::Known);
    }
    if k == 0 {
        return Tensor::zeros(shape, store, a.device()).map(Ready::Known);
    }
    let with_batch = |r: usize, c: usize| {
        batch
            .dims()
            .iter()
            .copied()
            .chain([r, c])
            .collect::<Shape>()
    };
    let (mut left_view, mut right_view) = (left.view()?, right.view()?);
    left_view.layout = left_view.layout.expand(&with_batch(m, k));
    // One matrix on the right for the whole batch: the batch is just more rows, if they step
    // evenly.
    let one_right = right_batch.iter().all(|d| *d == 1);
    let folded: Option<Layout> = if one_right && batch.rank() > 0 {
        left_view.layout.reshape(&[batch.numel() * m, k].into())
    } else {
        None
    };
    match folded {
        Some(layout) => {
            left_view.layout = layout;
            right_view.layout = right_view
                .layout
                .permute(&[right.rank() - 2, right.rank() - 1]);
        }
        None => right_view.layout = right_view.layout.expand(&with_batch(k, n)),
    }
    let call = MatmulCall {
        op,
        a: left_view,
        b: right_view,
        scales: None,
        bias: None,
        addend: None,
        dtype: store,
    };
    Ok(Ready::Launch(shape, Box::new(call)))
}

/// The sum of a product of floats and a bias that broadcasts, rounded to `dtype`.
#[track_caller]
pub(super) fn biased(
    op: &'static str,
    product: &Tensor,
    bias: &Tensor,
    dtype: DType,
) -> Result<Tensor> {
    if product.dtype().promote(bias.dtype()) == dtype {
        return product.add(bias);
    }
    let bias = if bias.dtype().is_float() {
        bias.clone()
    } else {
        bias.cast(product.dtype())?
    };
    Expr::new(op, &[product, &bias]).map(dtype, |a| a.x[0] + a.x[1])
}

/// Checks the sizes that a product sums over: dimension `i` of `a` and `j` of `b`.
fn check_inner(op: &'static str, a: &Tensor, b: &Tensor, i: usize, j: usize) -> Result<()> {
    let (k, k2) = (a.dims()[i], b.dims()[j]);
    if k == k2 {
        return Ok(());
    }
    Err(Error::shape(
        op,
        [a, b],
        format!(
            "{} and {}: the inner dimensions are {k} and {k2}",
            a.type_string(),
            b.type_string()
        ),
    ))
}

fn check_rank(op: &'static str, tensor: &Tensor, rank: usize) -> Result<()> {
    if tensor.rank() == rank {
        Ok(())
    } else {
        Err(Error::shape(
            op,
            [tensor],
            format!("{} was given, rank {rank} is needed", tensor.type_string()),
        ))
    }
}

impl Tensor {
    /// Matrix product with NumPy's rules: leading dimensions broadcast, a vector on the left is a
    /// row and on the right a column that disappears again. Operands meet in their promoted dtype.
    #[track_caller]
    pub fn matmul(&self, other: &Tensor) -> Result<Tensor> {
        product("matmul", self, other, self.dtype().promote(other.dtype()))
    }

    /// [`matmul`](Tensor::matmul) that stores another float type, as for 8-bit operands with a 16
    /// or 32-bit result: the sum is rounded once, to `dtype`. The gradient of a product of `bf16`
    /// operands is taken in `bf16`, whatever it is stored as; that of other small floats in the
    /// dtype of the result, because it may not have their range.
    #[track_caller]
    pub fn matmul_as(&self, other: &Tensor, dtype: DType) -> Result<Tensor> {
        product("matmul_as", self, other, dtype)
    }

    /// Product of two stacks of matrices `[b, m, k]` and `[b, k, n]`, without broadcasting.
    #[track_caller]
    pub fn bmm(&self, other: &Tensor) -> Result<Tensor> {
        let op = "bmm";
        check_rank(op, self, 3)?;
        check_rank(op, other, 3)?;
        if self.shape()[0] != other.shape()[0] {
            return Err(Error::shape(
                op,
                [self, other],
                format!(
                    "{} and {} are stacks of different heights",
                    self.type_string(),
                    other.type_string()
                ),
            ));
        }
        product(op, self, other, self.dtype().promote(other.dtype()))
    }

    /// The sum of products of two vectors, 0-d.
    #[track_caller]
    pub fn dot(&self, other: &Tensor) -> Result<Tensor> {
        let op = "dot";
        check_rank(op, self, 1)?;
        check_rank(op, other, 1)?;
        product(op, self, other, self.dtype().promote(other.dtype()))
    }

    /// All products of two vectors: `out[i, j] = self[i] * other[j]`.
    #[track_caller]
    pub fn outer(&self, other: &Tensor) -> Result<Tensor> {
        let op = "outer";
        check_rank(op, self, 1)?;
        check_rank(op, other, 1)?;
        number_type(op, &[self, other])?;
        same_device(op, &[self, other])?;
        Shape::from([self.numel(), other.numel()]).checked_numel(op)?;
        let run = || {
            if plain(op, &[self, other])? {
                return self.unsqueeze(1)?.mul(other);
            }
            let dtype = self.dtype().promote(other.dtype());
            let (m, n) = (self.cast(dtype)?, other.cast(dtype)?);
            Call::of(&OUTER, &[&m, &n]).run1(|l| l[0].outer(&l[1]))
        };
        record1(op, &[self, other], run, |_| {
            let (a, b) = (self.kept(), other.kept());
            Ok(move |back: &Back<'_>| {
                let gradient = back.grad()?;
                let first = back.wanted(0, || product_as(op, gradient, &b, a.dtype()))?;
                Ok(smallvec![
                    first,
                    back.wanted(1, || product_as(op, &a, gradient, b.dtype()))?
                ])
            })
        })
    }

    /// `self @ weight^T + bias` for a weight `[out, in]` over the last dimension of this tensor.
    ///
    /// Floats give the dtype that this tensor and the weight promote to. A bias does not widen it
    /// (an `f32` bias beside `bf16` activations and weights is usual); it is added before the sum
    /// is rounded.
    #[track_caller]
    pub fn linear(&self, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let op = "linear";
        check_rank(op, weight, 2)?;
        // Here, where the weight is the one that was given and not its transpose.
        if let Some(last) = self.rank().checked_sub(1) {
            check_inner(op, self, weight, last, 1)?;
        }
        let dtype = self.dtype().promote(weight.dtype());
        if let Some(bias) = bias.filter(|b| b.dims() != [weight.shape()[0]]) {
            return Err(Error::shape(
                op,
                [self, weight, bias],
                format!(
                    "a weight of shape {} takes a bias of [{}], got {}",
                    weight.shape(),
                    weight.shape()[0],
                    bias.shape()
                ),
            ));
        }
        let tensors: SmallVec<[&Tensor; 3]> = [self, weight].into_iter().chain(bias).collect();
        record1(
            op,
            &tensors,
            || self.transformed(weight, bias, dtype),
            |_| {
                let (x, weight, bias) = (
                    self.kept(),
                    weight.kept(),
                    bias.map(|b| (b.shape().clone(), b.dtype())),
                );
                Ok(move |back: &Back<'_>| {
                    let gradient = back.grad()?;
                    let both = match back.needs(0) && back.needs(1) && x.rank() > 1 {
                        true => {
                            let places = [place(back, 0, 1), place(back, 1, 1)];
                            linear_pull(op, places, gradient, &weight, &x)?
                        }
                        false => None,
                    };
                    let mut pulled: Pulled = match both {
                        Some(both) => both.map(Some).into_iter().collect(),
                        None => smallvec![
                            back.wanted(0, || product_as(op, gradient, &weight, x.dtype()))?,
                            back.wanted(1, || {
                                weight_gradient(op, Some(back), 1, gradient, &x, weight.dtype())
                            })?,
                        ],
                    };
                    if let Some(bias) = &bias {
                        pulled.push(back.wanted(2, || bias_gradient(gradient, bias))?);
                    }
                    Ok(pulled)
                })
            },
        )
    }

    /// [`linear`](Self::linear) of this tensor with each of several weights, which may have a bias:
    /// queries, keys and values, or the gate and the value of an MLP. On a mesh this tensor is
    /// brought once, to where it costs least for all of them together. Many rows may be one
    /// product, whose parts the results are.
    ///
    /// ```
    /// # use anymesh_core::{DType, Mesh, Tensor, meta, spmd::Ledger};
    /// let mesh = Mesh::new("tp=2", &meta())?;
    /// let x = Tensor::zeros([4, 8], DType::F32, (&mesh, "[@tp, _]"))?;
    /// let weight = |n: usize| Tensor::zeros([n, 8], DType::F32, (&mesh, "[@tp, _]"));
    /// let (q, k) = (weight(8)?, weight(4)?);
    /// let (out, ledger) = Ledger::record(|| x.linear_each(&[(&q, None), (&k, None)]));
    /// assert_eq!(out?[1].type_string(), "f32[4, 4@tp]");
    /// assert_eq!(ledger.bytes(), 64, "x is gathered once");
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn linear_each(&self, weights: &[(&Tensor, Option<&Tensor>)]) -> Result<Vec<Tensor>> {
        if let Some(out) = self.linear_as_one(weights)? {
            return Ok(out);
        }
        let mut out: Vec<Tensor> = Vec::with_capacity(weights.len());
        for (weight, bias) in weights {
            out.push(self.linear(weight, *bias)?);
        }
        Ok(out)
    }

    /// [`linear`](Self::linear) without a gradient, for operands that were checked.
    #[track_caller]
    fn transformed(&self, weight: &Tensor, bias: Option<&Tensor>, dtype: DType) -> Result<Tensor> {
        let op = "linear";
        let tensors: SmallVec<[&Tensor; 3]> = [self, weight].into_iter().chain(bias).collect();
        // Integers become floats when a float bias is added: they must be whole by then, so the sum
        // is an op of its own.
        let widens = bias.is_some_and(|b| dtype.promote(b.dtype()).is_float() && !dtype.is_float());
        if !plain(op, &tensors)? && self.rank() > 0 && !widens {
            let (x, matrix) = (
                self.cast(number_type(op, &[self, weight])?)?,
                weight.cast(dtype)?,
            );
            let bias = bias.map(|b| b.cast(dtype.promote(b.dtype()))).transpose()?;
            let tensors: SmallVec<[&Tensor; 3]> = [&x, &matrix].into_iter().chain(&bias).collect();
            return Call::of(&LINEAR, &tensors)
                .optional(2, &[bias.as_ref()])
                .run1(|l| l[0].linear(&l[1], l.inputs.get(2)));
        }
        match bias {
            None => product(op, self, &weight.t()?, dtype),
            // The product is kept wide, so that the result is rounded once.
            Some(bias) if dtype.is_float() => {
                if let Some(out) = self.transformed_at_once(weight, bias, dtype)? {
                    return Ok(out);
                }
                let wide = product(op, self, &weight.t()?, dtype.kind().dtype())?;
                biased(op, &wide, bias, dtype)
            }
            Some(bias) => product(op, self, &weight.t()?, dtype)?.add(bias),
        }
    }

    /// [`linear`](Self::linear) by one kernel, where the device has one that adds the bias.
    fn transformed_at_once(
        &self,
        weight: &Tensor,
        bias: &Tensor,
        dtype: DType,
    ) -> Result<Option<Tensor>> {
        let op = "linear";
        number_type(op, &[self, weight])?;
        if self.rank() == 0 {
            return Ok(None);
        }
        let (x, matrix) = (self.cast(dtype)?, weight.cast(dtype)?.t()?);
        let Ready::Launch(shape, mut call) = local_product(op, &x, &matrix, dtype)? else {
            return Ok(None);
        };
        call.bias = Some(bias.view()?);
        let kernel = Kernel::from(*call);
        match self.device().backend().supports(&kernel) {
            true => launch_as(self.mesh(), shape, kernel).map(Some),
            false => Ok(None),
        }
    }
}

//! Whether products may widen their operands by themselves.

use crate::{Error, Result, Tensor, scoped::Scoped};
use std::cell::RefCell;

/// What a product (of matrices, of an einsum, a convolution) does with floats of different dtypes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Promotion {
    /// It computes in the dtype that both promote to: a `bf16` activation times an `f32` weight is
    /// an `f32` product, which GPUs run at a fraction of the speed.
    #[default]
    Auto,
    /// It fails, and names both dtypes: the program says what it means with a cast.
    Explicit,
}

thread_local! {
    static CURRENT: RefCell<Promotion> = const { RefCell::new(Promotion::Auto) };
}

/// Runs `f` under a policy for products of different float dtypes, on this thread (other threads
/// take it along with a [`Context`](crate::Context)); inner policies override outer ones.
///
/// Sums, comparisons and other elementwise ops promote as ever, and so does the backward pass: the
/// products of a gradient follow from those of the program.
///
/// ```
/// # use anymesh_core::{DType, Error, Tensor, ops::{Promotion, with_promotion}};
/// # let device = anymesh_backend_cpu::device();
/// let w = Tensor::ones([2, 2], DType::F32, &device)?;
/// let x = w.cast(DType::BF16)?;
/// assert_eq!(x.matmul(&w)?.dtype(), DType::F32);
/// with_promotion(Promotion::Explicit, || {
///     assert!(matches!(x.matmul(&w), Err(Error::Promotion { .. })));
///     assert_eq!(x.matmul(&w.cast(DType::BF16)?)?.dtype(), DType::BF16);
///     Ok::<(), Error>(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
pub fn with_promotion<T>(promotion: Promotion, f: impl FnOnce() -> T) -> T {
    let _scope = enter(promotion);
    f()
}

/// The policy of this thread.
pub(crate) fn current() -> Promotion {
    CURRENT.with_borrow(|p| *p)
}

/// Until it is dropped, another policy.
pub(crate) fn enter(promotion: Promotion) -> Scoped<Promotion> {
    Scoped::set(&CURRENT, promotion)
}

/// Refuses a product of different floats where the policy is explicit.
pub(crate) fn check(op: &'static str, factors: &[&Tensor]) -> Result<()> {
    if current() == Promotion::Auto {
        return Ok(());
    }
    let mut floats = factors.iter().map(|t| t.dtype()).filter(|d| d.is_float());
    let Some(left) = floats.next() else {
        return Ok(());
    };
    match floats.find(|d| *d != left) {
        Some(right) => Err(Error::Promotion {
            op,
            left,
            right,
            to: left.promote(right),
        }),
        None => Ok(()),
    }
}

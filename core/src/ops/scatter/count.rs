//! Counting: scatters of ones.

use super::{
    super::{Map, index::check_indices, index_kind, map1},
    BINCOUNT, ONE_HOT,
    local::leading_axes,
};
use crate::wait::wait;
use crate::{
    DType, Dims, Error, Result, Tensor,
    backend::{Affine, ScatterOp},
    grad::{Back, record1},
    ledger::on_behalf_of_caller,
    map::Builder,
    observe,
    spmd::{Call, plain},
};
use smallvec::{SmallVec, smallvec};
use std::panic::Location;

impl Tensor {
    /// How often each of `0..bins` occurs in a vector (i32), or the sum of its weights (in their
    /// dtype). A value outside that range, also a negative one, is [`Error::IndexOutOfRange`].
    /// Reads nothing back.
    #[track_caller]
    pub fn bincount_bins(&self, weights: Option<&Tensor>, bins: usize) -> Result<Tensor> {
        let op = "bincount";
        check_indices(op, &[self])?;
        if self.rank() != 1 || weights.is_some_and(|w| w.shape() != self.shape()) {
            return Err(Error::shape(
                op,
                [Some(self), weights].into_iter().flatten(),
                format!(
                    "counts a vector with as many weights, got shape {}",
                    self.shape()
                ),
            ));
        }
        let inputs: SmallVec<[&Tensor; 2]> = std::iter::once(self).chain(weights).collect();
        record1(
            op,
            &inputs,
            || self.counted(weights, bins, &inputs),
            |_| {
                let bin = self.clone();
                Ok(move |b: &Back<'_>| Ok(smallvec![None, Some(b.grad()?.index_select(0, &bin)?)]))
            },
        )
    }

    /// [`bincount_bins`](Self::bincount_bins) of operands that fit.
    #[track_caller]
    fn counted(&self, weights: Option<&Tensor>, bins: usize, inputs: &[&Tensor]) -> Result<Tensor> {
        let op = "bincount";
        if !plain(op, inputs)? {
            return Call::of(&BINCOUNT, inputs)
                .optional(1, &[weights])
                .run1(|l| l[0].bincount_bins(l.inputs.get(1), bins));
        }
        let updates = match weights {
            Some(weights) => weights.clone(),
            None => Tensor::new(1i32, self.device())?.expand(self.shape())?,
        };
        // A negative index would count from the end; here it is an error, so it is moved where it
        // is one.
        let b = Builder::new();
        let x = b.load(self.dtype());
        let lowest = if self.dtype() == DType::I64 {
            i64::MIN
        } else {
            i64::from(i32::MIN)
        };
        let checked = if self.dtype() == DType::U32 {
            x
        } else {
            x.lt(0).select(x.lit(lowest), x)
        };
        let index = map1(op, &b.finish(&[(checked, self.dtype())])?, &[self], &[])?;
        let zeros = Tensor::zeros([bins], updates.dtype(), self.device())?;
        leading_axes(op, &zeros, &[&index], &updates, ScatterOp::Add, |_| None)
    }

    /// [`bincount_bins`](Tensor::bincount_bins) with as many bins as the largest value needs, at
    /// least `minlength`. Reads that value from the device.
    #[track_caller]
    pub fn bincount_async(
        &self,
        weights: Option<&Tensor>,
        minlength: usize,
    ) -> impl Future<Output = Result<Tensor>> + use<> {
        let (op, caller) = ("bincount", Location::caller());
        let (x, weights) = (self.clone(), weights.cloned());
        let largest = check_indices(op, &[self]).and_then(|()| {
            let _scope = on_behalf_of_caller(op, self, caller);
            if self.numel() == 0 {
                return Ok(None);
            }
            Ok(Some(self.max(&[], false)?.item_async()))
        });
        async move {
            let bins = match largest? {
                Some(largest) => largest.await?.to_i64().saturating_add(1),
                None => 0,
            };
            let bins = minlength.max(usize::try_from(bins).unwrap_or(0));
            let _scope = on_behalf_of_caller(op, &x, caller);
            x.bincount_bins(weights.as_ref(), bins)
        }
    }

    /// [`bincount_async`](Tensor::bincount_async), waiting for the read.
    #[track_caller]
    pub fn bincount(&self, weights: Option<&Tensor>, minlength: usize) -> Result<Tensor> {
        wait("bincount", self.bincount_async(weights, minlength))
    }

    /// One more dimension of size `classes` (i32) that is 1 at the element's value and 0 elsewhere;
    /// all 0 for a value outside `0..classes`.
    #[track_caller]
    pub fn one_hot(&self, classes: usize) -> Result<Tensor> {
        let op = "one_hot";
        check_indices(op, &[self])?;
        observe::op(op, &[self], || self.hot(classes))
    }

    #[track_caller]
    fn hot(&self, classes: usize) -> Result<Tensor> {
        let op = "one_hot";
        if !self.is_plain() {
            return Call::of(&ONE_HOT, &[self]).run1(|l| l[0].hot(classes));
        }
        let dims: Dims = self.dims().iter().copied().chain([classes]).collect();
        // Where u32 wraps to i32 it becomes negative, which no class is.
        let dtype = if self.dtype() == DType::I64 {
            DType::I64
        } else {
            index_kind(classes).dtype()
        };
        let b = Builder::new();
        let hit = b
            .load(self.dtype())
            .cast(dtype)
            .eq(b.index(index_kind(classes).dtype()).cast(dtype));
        let program = b.finish(&[(hit, DType::I32)])?;
        let mut class = Affine {
            offset: 0,
            strides: smallvec![0; dims.len()],
        };
        class.strides[self.rank()] = 1;
        let column = self.unsqueeze(-1)?;
        Ok(Map {
            indices: &[class],
            ..Map::new(op, &program, &dims.into())
        }
        .run(&[(&column).into()], self.device())?
        .remove(0))
    }
}

//! Gradients of slices of one tensor. Each would be a tensor of the whole size, mostly zeros, and all
//! of them would be added up; instead a pass keeps them as they are until all are there, and joins
//! them once. Those that a kernel wrote next to each other are then only said to be one.

use super::tape::Back;
use crate::{Result, Tensor, observe};
use std::cell::RefCell;

/// The gradient of elements `start .. start + len` of a dimension, where `len` is its own size.
pub(crate) struct Part {
    /// The op that took the slice.
    pub(crate) op: &'static str,
    pub(crate) axis: usize,
    pub(crate) start: usize,
    /// The whole size of the dimension.
    pub(crate) size: usize,
    pub(crate) gradient: Tensor,
}

impl Part {
    fn len(&self) -> usize {
        self.gradient.dims()[self.axis]
    }

    fn end(&self) -> usize {
        self.start + self.len()
    }

    /// With zeros for the rest of the dimension.
    #[track_caller]
    pub(crate) fn whole(&self) -> Result<Tensor> {
        let Part {
            op,
            axis,
            start,
            size,
            ..
        } = *self;
        self.gradient.unsliced(op, axis, start, 1, size)
    }
}

/// Where a pull leaves the gradient of a slice.
pub(super) type Left = RefCell<Option<Part>>;

impl Back<'_> {
    /// Leaves the gradient of a slice to the pass, which joins it with those of other slices; gives it
    /// back where the pass does not.
    pub(crate) fn leave(&self, part: Part) -> Option<Part> {
        match self.left {
            Some(left) if part.gradient.is_plain() && !observe::is_observed() => {
                *left.borrow_mut() = Some(part);
                None
            }
            _ => Some(part),
        }
    }
}

/// Whether there are more elements in parts than in the dimension, so that some meet.
pub(super) fn overlap<'p>(parts: impl Iterator<Item = &'p Part>) -> bool {
    let mut left = None;
    for part in parts {
        match left.unwrap_or(part.size).checked_sub(part.len()) {
            Some(rest) => left = Some(rest),
            None => return true,
        }
    }
    false
}

/// The gradient of the tensor that slices were taken of.
#[track_caller]
pub(super) fn joined(mut parts: Vec<Part>) -> Result<Option<Tensor>> {
    let alike = |a: &Part, b: &Part| a.axis == b.axis && a.gradient.dtype() == b.gradient.dtype();
    let aside = parts.windows(2).all(|pair| alike(&pair[0], &pair[1]));
    if aside {
        parts.sort_by_key(|part| part.start);
    }
    if !aside || parts.windows(2).any(|pair| pair[0].end() > pair[1].start) {
        let mut sum: Option<Tensor> = None;
        for part in parts {
            let whole = part.whole()?;
            sum = Some(match sum {
                Some(sum) => sum.add(&whole)?,
                None => whole,
            });
        }
        return Ok(sum);
    }
    let Some(first) = parts.first() else {
        return Ok(None);
    };
    let (op, axis, start, size) = (first.op, first.axis, first.start, first.size);
    let mut all: Vec<Tensor> = vec![];
    let mut end = start;
    for part in parts {
        let (shape, dtype) = (part.gradient.shape(), part.gradient.dtype());
        if part.start > end {
            let between = shape.with(axis, part.start - end);
            all.push(Tensor::zeros(between, dtype, part.gradient.mesh())?);
        }
        end = part.end();
        all.push(part.gradient);
    }
    let gradient = Tensor::concat(&all.iter().collect::<Vec<_>>(), axis as i64)?;
    let whole = Part {
        op,
        axis,
        start,
        size,
        gradient,
    };
    whole.whole().map(Some)
}

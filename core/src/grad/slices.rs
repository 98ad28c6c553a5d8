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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Device};
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    /// A device that counts its launches.
    fn counting() -> (Device, Arc<AtomicUsize>) {
        let count = Arc::<AtomicUsize>::default();
        let own = count.clone();
        let device = anymesh_backend_cpu::device().decorated(move |backend, kernel| {
            own.fetch_add(1, Ordering::Relaxed);
            backend.launch(kernel)
        });
        (device, count)
    }

    /// The gradient of the sum of slices, each times its number from 1 on, and how many launches it took.
    fn gradient(slices: &[(i64, usize, usize)]) -> Result<(Vec<f32>, usize)> {
        let (device, count) = counting();
        let x = Tensor::arange(0, 24, 1, DType::F32, &device)?.reshape([4, 6])?;
        let x = x.require_grad()?;
        let mut sum: Option<Tensor> = None;
        for (k, (axis, start, len)) in slices.iter().enumerate() {
            let part = x
                .narrow(*axis, *start, *len)?
                .mul(1.0 + k as f64)?
                .sum_all()?;
            sum = Some(match sum {
                Some(sum) => sum.add(&part)?,
                None => part,
            });
        }
        let Some(sum) = sum else {
            return Ok((vec![], 0));
        };
        let before = count.load(Ordering::Relaxed);
        let found = sum.backward()?.of(&x)?;
        let launches = count.load(Ordering::Relaxed) - before;
        Ok((found.to_vec()?, launches))
    }

    fn expected(slices: &[(i64, usize, usize)]) -> Vec<f32> {
        let at = |i: usize| {
            let (row, column) = (i / 6, i % 6);
            let inside = |(k, (axis, start, len)): (usize, &(i64, usize, usize))| {
                let place = if *axis == 0 { row } else { column };
                let inside = (*start..start + len).contains(&place);
                if inside { 1.0 + k as f32 } else { 0.0 }
            };
            slices.iter().enumerate().map(inside).sum()
        };
        (0..24).map(at).collect()
    }

    #[test]
    fn gradients_of_slices_are_joined_wherever_they_lie() {
        let cases: [&[(i64, usize, usize)]; 7] = [
            &[(1, 0, 2), (1, 2, 3), (1, 5, 1)],
            // Not in order, and with elements before, between and after them that nobody took.
            &[(1, 4, 1), (1, 1, 2)],
            &[(0, 3, 1), (0, 0, 1)],
            // Of different dimensions, and elements that several took.
            &[(1, 0, 2), (0, 1, 2)],
            &[(1, 0, 4), (1, 2, 4)],
            &[(1, 0, 5), (1, 1, 5), (1, 2, 2)],
            &[(1, 3, 2)],
        ];
        for slices in cases {
            let (found, _) = gradient(slices).expect("runs");
            assert_eq!(found, expected(slices), "{slices:?}");
        }
    }

    #[test]
    fn a_step_through_time_joins_the_gradients_of_all_steps_at_once() {
        let of = |count: usize| {
            let slices: Vec<_> = (0..count).map(|k| (1, k, 1)).collect();
            gradient(&slices).expect("runs").1
        };
        // A slice costs what its own sum and product do, and a sixth of a kernel that joins.
        let (three, six) = (of(3), of(6));
        assert!(six <= 2 * three, "{three} and {six} launches");
        // Each of them as a tensor of the whole size would be a launch, and another one to add it.
        assert!(six < 6 * 4, "{six} launches");
    }
}

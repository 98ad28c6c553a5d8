//! Positions of one space as positions of another: how a reader's view of a result becomes views of
//! what the result is computed from.

use anymesh_kernel::{Dims, Layout, Shape, backend::Affine};
use smallvec::smallvec;

/// For each dimension of a space, its coordinate as an affine form of the coordinates of another.
pub(crate) struct Coordinates {
    rank: usize,
    forms: Vec<(i64, Dims<i64>)>,
}

impl Coordinates {
    /// Where each position of `view` lies in the dense space `shape` that it looks at; `None` where
    /// that is no affine form, such as a row that runs over the end of a dimension.
    pub(crate) fn new(shape: &Shape, view: &Layout) -> Option<Self> {
        let (strides, rank) = (shape.strides(), view.shape.rank());
        // The digits of a distance in the space. They need not be less than a dimension's size: it
        // counts that no coordinate ever leaves its dimension, which is looked at below.
        let digits = |mut distance: i64| -> Dims<i64> {
            let digit = |stride: &isize| {
                let digit = distance / *stride as i64;
                distance -= digit * *stride as i64;
                digit
            };
            strides.iter().map(digit).collect()
        };
        let mut forms: Vec<(i64, Dims<i64>)> = digits(view.offset as i64)
            .into_iter()
            .map(|start| (start, smallvec![0; rank]))
            .collect();
        let mut ends: Vec<(i64, i64)> = forms.iter().map(|form| (form.0, form.0)).collect();
        for (d, (&size, &stride)) in view.shape.dims().iter().zip(&view.strides).enumerate() {
            if size <= 1 || stride == 0 {
                continue;
            }
            for (j, digit) in digits(stride as i64).into_iter().enumerate() {
                forms[j].1[d] = digit;
                let reach = digit * (size as i64 - 1);
                ends[j].0 += reach.min(0);
                ends[j].1 += reach.max(0);
            }
        }
        // A space without dimensions has one element, and all positions are there.
        let inside = ends.iter().zip(shape.dims());
        let all = |((low, high), size): (&(i64, i64), &usize)| *low >= 0 && *high < *size as i64;
        inside.into_iter().all(all).then_some(Self { rank, forms })
    }

    /// A form of the space as one of the other.
    pub(crate) fn of(&self, offset: i64, strides: &[isize]) -> Affine {
        let mut out = Affine {
            offset,
            strides: smallvec![0; self.rank],
        };
        for ((start, steps), &stride) in self.forms.iter().zip(strides) {
            out.offset += start * stride as i64;
            for (out, step) in out.strides.iter_mut().zip(steps) {
                *out += step * stride as i64;
            }
        }
        out
    }
}

/// Whether a view shows all elements of a dense buffer of this many in their order.
pub(crate) fn is_whole(layout: &Layout, elements: usize) -> bool {
    layout.offset == 0 && layout.is_contiguous() && layout.shape.numel() == elements
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every position of a view, once through the view of a dense copy and once straight.
    fn check(inner: &Layout, view: &Layout) -> bool {
        let Some(map) = Coordinates::new(&inner.shape, view) else {
            return false;
        };
        let form = map.of(inner.offset as i64, &inner.strides);
        let straight = Layout {
            shape: view.shape.clone(),
            strides: form.strides.iter().map(|&s| s as isize).collect(),
            offset: form.offset as usize,
        };
        let through: Vec<usize> = inner.positions().collect();
        let expected: Vec<usize> = view.positions().map(|at| through[at]).collect();
        assert_eq!(
            straight.positions().collect::<Vec<_>>(),
            expected,
            "{inner:?} {view:?}"
        );
        true
    }

    #[test]
    fn a_view_of_a_view_reads_the_same_elements() {
        let inner = Layout::contiguous([5, 6, 8].into())
            .permute(&[1, 0, 2])
            .slice(2, 6, -2, 4);
        assert_eq!(inner.shape.dims(), [6, 5, 4]);
        let dense = Layout::contiguous([6, 5, 4].into());
        let views = [
            dense.clone(),
            dense.permute(&[2, 0, 1]),
            dense.slice(1, 1, 2, 2),
            dense.slice(0, 5, -1, 6),
            dense.slice(1, 2, 1, 1).expand(&[6, 7, 4].into()),
            dense.unsqueeze(0).expand(&[3, 6, 5, 4].into()),
            dense.reshape(&[2, 3, 5, 2, 2].into()).expect("dense"),
        ];
        for view in &views {
            assert!(check(&inner, view), "{view:?}");
        }
    }

    #[test]
    fn what_runs_over_the_end_of_a_dimension_is_refused() {
        let inner = Layout::contiguous([4, 3].into()).permute(&[1, 0]);
        let dense = Layout::contiguous([3, 4].into());
        assert!(!check(&inner, &dense.reshape(&[12].into()).expect("dense")));
        assert!(!check(
            &inner,
            &dense.reshape(&[2, 6].into()).expect("dense")
        ));
        // Within a dimension it is none.
        assert!(check(
            &inner,
            &dense.slice(0, 0, 1, 1).reshape(&[4].into()).expect("a row")
        ));
    }

    #[test]
    fn a_scalar_is_everywhere_the_same() {
        let inner = Layout {
            shape: Shape::scalar(),
            strides: smallvec![],
            offset: 7,
        };
        let view = Layout::contiguous(Shape::scalar()).expand(&[2, 3].into());
        assert!(check(&inner, &view));
    }
}

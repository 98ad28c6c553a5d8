//! How a tensor's elements lie in its buffer. Views change the layout and leave the buffer alone.

use crate::{Shape, shape::Dims};

/// Shape, strides and offset, all in elements. Strides may be zero (expanded) or negative
/// (flipped).
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    /// The dimensions.
    pub shape: Shape,
    /// Elements to step for each dimension.
    pub strides: Dims<isize>,
    /// Position of element `[0, 0, ..]`.
    pub offset: usize,
}

impl Clone for Layout {
    fn clone(&self) -> Self {
        Self {
            shape: self.shape.clone(),
            strides: Dims::from_slice(&self.strides),
            offset: self.offset,
        }
    }
}

impl Layout {
    /// Row-major and dense from the start of the buffer.
    pub fn contiguous(shape: Shape) -> Self {
        Self {
            strides: shape.strides(),
            shape,
            offset: 0,
        }
    }

    /// How many elements follow each other in memory, and the layout of the first of each such run.
    pub fn runs(&self) -> (usize, Self) {
        let (mut run, mut outer) = (1, self.shape.rank());
        while outer > 0 && (self.shape[outer - 1] == 1 || self.strides[outer - 1] == run as isize) {
            outer -= 1;
            run *= self.shape[outer];
        }
        (
            run,
            Self {
                shape: self.shape.dims()[..outer].into(),
                strides: self.strides[..outer].into(),
                offset: self.offset,
            },
        )
    }

    /// Whether the elements are dense and in row-major order (from any offset).
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1isize;
        for (&size, &stride) in self.shape.dims().iter().zip(&self.strides).rev() {
            if size == 0 {
                return true;
            }
            if size != 1 {
                if stride != expected {
                    return false;
                }
                expected *= size as isize;
            }
        }
        true
    }

    /// Dimensions in the order `order`.
    pub fn permute(&self, order: &[usize]) -> Self {
        Self {
            shape: order.iter().map(|&i| self.shape[i]).collect(),
            strides: order.iter().map(|&i| self.strides[i]).collect(),
            offset: self.offset,
        }
    }

    /// Elements `start`, `start + step`, ... (`len` of them) of dimension `axis`.
    pub fn slice(&self, axis: usize, start: usize, step: isize, len: usize) -> Self {
        let mut out = self.clone();
        if len > 0 {
            out.offset = (self.offset as isize + start as isize * self.strides[axis]) as usize;
        }
        out.shape = self.shape.with(axis, len);
        out.strides[axis] = self.strides[axis] * step;
        out
    }

    /// A view of the broadcast shape `shape`; the caller has checked that it broadcasts.
    pub fn expand(&self, shape: &Shape) -> Self {
        let lead = shape.rank() - self.shape.rank();
        let strides = (0..shape.rank())
            .map(|i| match i.checked_sub(lead) {
                Some(j) if self.shape[j] == shape[i] => self.strides[j],
                _ => 0,
            })
            .collect();
        Self {
            shape: shape.clone(),
            strides,
            offset: self.offset,
        }
    }

    /// With a new dimension of size 1 before `axis`.
    pub fn unsqueeze(&self, axis: usize) -> Self {
        let mut dims: Dims = self.shape.dims().into();
        dims.insert(axis, 1);
        let mut strides = self.strides.clone();
        strides.insert(axis, 0);
        Self {
            shape: dims.into(),
            strides,
            offset: self.offset,
        }
    }

    /// The layout of the same elements under `shape` without moving them, if one exists.
    ///
    /// Runs of dimensions that step evenly through memory are merged, then cut along the new
    /// dimensions.
    pub fn reshape(&self, shape: &Shape) -> Option<Self> {
        if self.shape.numel() == 0 || self.is_contiguous() {
            return Some(Self {
                strides: shape.strides(),
                shape: shape.clone(),
                offset: self.offset,
            });
        }
        let old: Vec<(usize, isize)> = self
            .shape
            .dims()
            .iter()
            .copied()
            .zip(self.strides.iter().copied())
            .filter(|(n, _)| *n != 1)
            .collect();
        let mut strides: Dims<isize> = smallvec::smallvec![0; shape.rank()];
        let (mut next, mut i) = (0, 0);
        while i < old.len() {
            // The smallest run of old dimensions that holds as many elements as a run of new ones.
            let (mut have, mut want) = (old[i].0, 1);
            let mut end = i + 1;
            let first = next;
            while want != have {
                if want < have {
                    want *= shape[next];
                    next += 1;
                } else {
                    let (size, stride) = old[end];
                    if old[end - 1].1 != stride * size as isize {
                        return None;
                    }
                    have *= size;
                    end += 1;
                }
            }
            let mut step = old[end - 1].1;
            for d in (first..next).rev() {
                strides[d] = step;
                step *= shape[d] as isize;
            }
            i = end;
        }
        Some(Self {
            shape: shape.clone(),
            strides,
            offset: self.offset,
        })
    }

    /// Positions in the buffer of all elements in row-major order. For tests and host-side code,
    /// not for kernels.
    pub fn positions(&self) -> impl Iterator<Item = usize> + '_ {
        let dims = self.shape.dims();
        let mut coords: Dims = smallvec::smallvec![0; dims.len()];
        let mut at = self.offset as isize;
        (0..self.shape.numel()).map(move |_| {
            let here = at as usize;
            for d in (0..dims.len()).rev() {
                coords[d] += 1;
                at += self.strides[d];
                if coords[d] < dims[d] {
                    break;
                }
                at -= self.strides[d] * dims[d] as isize;
                coords[d] = 0;
            }
            here
        })
    }
}

/// Merges neighbouring dimensions that every one of `strides` steps through evenly, and drops
/// dimensions of size 1.
///
/// Kernels run over fewer, longer dimensions this way: any number of dense operands collapse to one
/// dimension.
pub fn collapse(shape: &Shape, strides: &mut [Dims<isize>]) -> Shape {
    let mut dims = Dims::new();
    let mut kept: Vec<Dims<isize>> = vec![Dims::new(); strides.len()];
    for d in 0..shape.rank() {
        if shape[d] == 1 {
            continue;
        }
        let mergeable = !dims.is_empty()
            && strides
                .iter()
                .zip(&kept)
                .all(|(s, k)| k[k.len() - 1] == s[d] * shape[d] as isize);
        if mergeable {
            let last = dims.len() - 1;
            dims[last] *= shape[d];
            for (s, k) in strides.iter().zip(&mut kept) {
                k[last] = s[d];
            }
        } else {
            dims.push(shape[d]);
            for (s, k) in strides.iter().zip(&mut kept) {
                k.push(s[d]);
            }
        }
    }
    for (s, k) in strides.iter_mut().zip(kept) {
        *s = k;
    }
    dims.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reshape_of_a_view_keeps_every_element_where_it_was() {
        let base = Layout::contiguous([4, 6, 5].into());
        let views = [
            base.clone(),
            base.permute(&[1, 0, 2]),
            base.slice(1, 1, 2, 3),
            base.slice(0, 3, -1, 4),
            base.slice(2, 0, 1, 1),
        ];
        let shapes: [&[usize]; 9] = [
            &[120],
            &[24, 5],
            &[4, 30],
            &[2, 2, 6, 5],
            &[4, 2, 3, 5],
            &[6, 20],
            &[60],
            &[12, 5],
            &[2, 2, 3, 1, 2],
        ];
        let mut viewed = 0;
        for view in &views {
            for dims in shapes {
                let shape = Shape::from(dims);
                if shape.numel() != view.shape.numel() {
                    continue;
                }
                if let Some(out) = view.reshape(&shape) {
                    viewed += 1;
                    assert_eq!(
                        out.positions().collect::<Vec<_>>(),
                        view.positions().collect::<Vec<_>>(),
                        "{view:?} -> {shape}"
                    );
                }
            }
        }
        assert_eq!(viewed, 11);
    }

    #[test]
    fn reshape_refuses_what_needs_a_copy() {
        assert!(
            Layout::contiguous([4, 6].into())
                .permute(&[1, 0])
                .reshape(&[24].into())
                .is_none()
        );
    }

    #[test]
    fn collapse_merges_dense_dimensions() {
        let shape = Shape::from([2, 3, 1, 4]);
        let mut strides = [shape.strides(), smallvec::smallvec![0, 0, 0, 1]];
        let shape = collapse(&shape, &mut strides);
        assert_eq!(shape.dims(), [6, 4]);
        assert_eq!(strides[0].as_slice(), [4, 1]);
        assert_eq!(strides[1].as_slice(), [0, 1]);
    }
}

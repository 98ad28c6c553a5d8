//! Which box each rank holds: the arithmetic under planning, arranged so that many shardings can be
//! compared in little time.

use crate::{Mesh, Shape, Sharding};
use smallvec::SmallVec;

/// Coordinates of a rank by mesh axis; a mesh has at most 16.
pub(super) type At = [usize; 16];

/// The sizes of a mesh and of a tensor on it.
pub(super) struct Geometry<'a> {
    pub(super) mesh: &'a Mesh,
    pub(super) shape: &'a Shape,
    /// Whether the tensor has no elements: then nothing is ever sent, and products of its other
    /// dimensions may not even fit a number.
    pub(super) empty: bool,
}

/// Where a sharding cuts each dimension.
pub(super) struct Grid {
    dims: SmallVec<[Lines; 4]>,
    /// The mesh axes that cut, a bit for each.
    used: u32,
}

/// The cuts of one dimension: line `i` of `parts` is at `i * step + i * rest / parts`, as
/// [`split`](crate::split) has it.
#[derive(Clone)]
struct Lines {
    step: usize,
    rest: usize,
    parts: usize,
    /// Axes, with how far a step along each advances the part.
    weights: SmallVec<[(u8, usize); 3]>,
}

impl Lines {
    fn line(&self, i: usize) -> usize {
        if self.rest == 0 {
            i * self.step
        } else {
            i * self.step + i * self.rest / self.parts
        }
    }

    fn range(&self, at: &At) -> (usize, usize) {
        let part = self.weights.iter().map(|(a, w)| at[*a as usize] * w).sum();
        (self.line(part), self.line(part + 1))
    }
}

/// What a change of sharding asks of the worst rank, in elements.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Traffic {
    /// Elements of the new part that are not in the old one.
    pub(super) missing: u64,
    /// The old part and the new one together.
    pub(super) both: u64,
}

impl<'a> Geometry<'a> {
    pub(super) fn new(mesh: &'a Mesh, shape: &'a Shape) -> Self {
        Self {
            mesh,
            shape,
            empty: shape.dims().contains(&0),
        }
    }

    pub(super) fn rank(&self) -> usize {
        self.shape.rank()
    }

    pub(super) fn grid(&self, sharding: &Sharding) -> Grid {
        let dims = (0..self.rank())
            .map(|d| {
                let cuts = sharding.cuts_of(d);
                let mut weights: SmallVec<[(u8, usize); 3]> =
                    cuts.iter().map(|(_, a)| (*a, 1)).collect();
                let mut parts = 1;
                for (a, weight) in weights.iter_mut().rev() {
                    *weight = parts;
                    parts *= self.mesh.size(*a as usize);
                }
                Lines {
                    step: self.shape[d] / parts,
                    rest: self.shape[d] % parts,
                    parts,
                    weights,
                }
            })
            .collect();
        Grid {
            dims,
            used: sharding.cut_mask(),
        }
    }

    /// Elements of the largest part.
    pub(super) fn largest(&self, sharding: &Sharding) -> u64 {
        if self.empty {
            return 0;
        }
        (0..self.rank())
            .map(|d| {
                let cuts = sharding.cuts_of(d);
                if cuts.is_empty() {
                    return self.shape[d] as u64;
                }
                self.shape[d].div_ceil(
                    cuts.iter()
                        .map(|(_, a)| self.mesh.size(*a as usize))
                        .product(),
                ) as u64
            })
            .product()
    }

    /// Compares what ranks hold before and after. Ranks off the origin of the `idle` axes need
    /// nothing after.
    pub(super) fn compare(&self, from: &Grid, to: &Grid, idle: u32) -> Traffic {
        let mut worst = Traffic::default();
        if self.empty {
            return worst;
        }
        // Dimensions that neither cuts are the same for every rank.
        let mut whole = 1;
        let mut cut: SmallVec<[(&Lines, &Lines); 4]> = SmallVec::new();
        for (a, b) in from.dims.iter().zip(&to.dims) {
            if a.parts == 1 && b.parts == 1 {
                whole *= a.step as u64;
            } else {
                cut.push((a, b));
            }
        }
        self.walk(from.used | to.used | idle, &mut [0; 16], |at| {
            let (mut have, mut want, mut common) = (whole, whole, whole);
            for (a, b) in &cut {
                let ((a0, a1), (b0, b1)) = (a.range(at), b.range(at));
                have *= (a1 - a0) as u64;
                want *= (b1 - b0) as u64;
                common *= a1.min(b1).saturating_sub(a0.max(b0)) as u64;
            }
            worst.both = worst.both.max(have + want);
            if idle == 0 || !off_origin(at, idle) {
                worst.missing = worst.missing.max(want - common);
            }
        });
        worst
    }

    /// Elements that a rank at `source` has of what one at `at` wants.
    pub(super) fn overlap(&self, from: &Grid, source: &At, to: &Grid, at: &At) -> u64 {
        from.dims
            .iter()
            .zip(&to.dims)
            .map(|(a, b)| {
                let ((a0, a1), (b0, b1)) = (a.range(source), b.range(at));
                a1.min(b1).saturating_sub(a0.max(b0)) as u64
            })
            .product()
    }

    /// Calls `f` with every combination of coordinates along the axes of `mask`; the others stay as
    /// they are in `at`.
    pub(super) fn walk(&self, mask: u32, at: &mut At, mut f: impl FnMut(&At)) {
        for axis in bits(mask) {
            at[axis] = 0;
        }
        loop {
            f(at);
            let mut rest = mask;
            loop {
                if rest == 0 {
                    return;
                }
                let axis = 31 - rest.leading_zeros() as usize;
                at[axis] += 1;
                if at[axis] < self.mesh.size(axis) {
                    break;
                }
                at[axis] = 0;
                rest &= !(1 << axis);
            }
        }
    }

    /// The number of ranks of a group over the axes of `mask`.
    pub(super) fn group(&self, mask: u32) -> u64 {
        bits(mask).map(|a| self.mesh.size(a) as u64).product()
    }

    /// Mesh axes with more than one rank, a bit for each: the others change nothing.
    pub(super) fn axes(&self) -> u32 {
        (0..self.mesh.axes().len())
            .filter(|a| self.mesh.size(*a) > 1)
            .fold(0, |mask, a| mask | 1 << a)
    }
}

/// Whether a rank is not the first along some axis of `mask`.
pub(super) fn off_origin(at: &At, mask: u32) -> bool {
    bits(mask).any(|a| at[a] != 0)
}

/// The axes of a mask, ascending.
pub(super) fn bits(mut mask: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let axis = mask.trailing_zeros() as usize;
        mask &= mask.wrapping_sub(1);
        (axis < 32).then_some(axis)
    })
}

//! Which box each rank holds: the arithmetic under planning, arranged so that many shardings can be
//! compared in little time.

use crate::{Mesh, Shape, Sharding};
use smallvec::SmallVec;
use std::cell::Cell;

/// Coordinates of a rank by mesh axis; a mesh has at most 16.
pub(super) type At = [usize; 16];

/// The sizes of a mesh and of a tensor on it.
pub(super) struct Geometry<'a> {
    pub(super) mesh: &'a Mesh,
    pub(super) shape: &'a Shape,
    /// Whether the tensor has no elements: then nothing is ever sent, and products of its other
    /// dimensions may not even fit a number.
    pub(super) empty: bool,
    walked: Cell<usize>,
}

/// Where a sharding cuts each dimension.
pub(super) struct Grid {
    dims: SmallVec<[Lines; 4]>,
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

/// Pairs of sizes of which none is worse than another in both: what the worst rank may have.
type Front = SmallVec<[(u64, u64); 2]>;

/// Whether a rank that wants (this much, and has that much of it) lacks at least as much as another
/// one, whatever other dimensions do.
fn worse_to_need(a: (u64, u64), b: (u64, u64)) -> bool {
    a.0 >= b.0 && a.1 <= b.1
}

/// The same for what a rank holds before and after.
fn worse_to_hold(a: (u64, u64), b: (u64, u64)) -> bool {
    a.0 >= b.0 && a.1 >= b.1
}

type Worse = fn((u64, u64), (u64, u64)) -> bool;

/// Adds a pair, unless another is worse.
fn keep(front: &mut Front, pair: (u64, u64), worse: Worse) {
    if !front.iter().any(|other| worse(*other, pair)) {
        front.retain(|other| !worse(pair, *other));
        front.push(pair);
    }
}

/// What happens along some dimensions and independently along others.
fn multiply(front: &mut Front, by: &[(u64, u64)], worse: Worse) {
    let mut out = Front::new();
    for (a, b) in front.iter() {
        for (c, d) in by {
            keep(&mut out, (a * c, b * d), worse);
        }
    }
    *front = out;
}

impl<'a> Geometry<'a> {
    pub(super) fn new(mesh: &'a Mesh, shape: &'a Shape) -> Self {
        Self {
            mesh,
            shape,
            empty: shape.dims().contains(&0),
            walked: Cell::new(0),
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
        Grid { dims }
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

    /// What changes where every part of a dimension is as large as the others, before and after;
    /// `None` where some are not. Every rank then holds and wants as much as any other, so it takes
    /// no look at ranks.
    pub(super) fn even(&self, from: &Sharding, to: &Sharding) -> Option<Traffic> {
        if self.empty {
            return Some(Traffic::default());
        }
        let (mut have, mut want, mut common) = (1, 1, 1);
        for d in 0..self.rank() {
            let n = self.shape[d] as u64;
            let (a, b) = (from.cuts_of(d), to.cuts_of(d));
            if a.is_empty() && b.is_empty() {
                (have, want, common) = (have * n, want * n, common * n);
                continue;
            }
            let size = |(_, axis): &(u8, u8)| self.mesh.size(*axis as usize) as u64;
            let parts = |cuts: &[(u8, u8)]| cuts.iter().map(size).product::<u64>();
            let (parts_a, parts_b) = (parts(a), parts(b));
            if !n.is_multiple_of(parts_a) || !n.is_multiple_of(parts_b) {
                return None;
            }
            have *= n / parts_a;
            want *= n / parts_b;
            // Axes of one rank cut nothing.
            let (mut a, mut b) = (
                a.iter().filter(|c| size(c) > 1).peekable(),
                b.iter().filter(|c| size(c) > 1).peekable(),
            );
            while a.peek().is_some() && a.peek() == b.peek() {
                a.next();
                b.next();
            }
            common *= match (a.peek(), b.peek()) {
                (None, _) => n / parts_b,
                (_, None) => n / parts_a,
                // Two axes that differ each divide what is left of the dimension first: a rank at
                // one end of it by the one and at the other end by the other has nothing of what
                // it wants.
                _ => 0,
            };
        }
        Some(Traffic {
            missing: want - common,
            both: have + want,
        })
    }

    /// Compares what ranks hold before and after. Ranks off the origin of the `idle` axes need
    /// nothing after.
    ///
    /// Dimensions that no axis connects are looked at one by one, and only for what could make a
    /// rank the worst; so this takes as many looks as the axes of one dimension have ranks, and
    /// none at all for what is only gathered or cut further.
    pub(super) fn compare(&self, from: &Grid, to: &Grid, idle: u32) -> Traffic {
        if self.empty {
            return Traffic::default();
        }
        let mut needs: Front = smallvec::smallvec![(1, 1)];
        let mut holds: Front = smallvec::smallvec![(1, 1)];
        let mut left: SmallVec<[(&Lines, &Lines, u32); 4]> = SmallVec::new();
        for (a, b) in from.dims.iter().zip(&to.dims) {
            if a.parts == 1 && b.parts == 1 {
                let n = a.step as u64;
                multiply(&mut needs, &[(n, n)], worse_to_need);
                multiply(&mut holds, &[(n, n)], worse_to_hold);
            } else {
                left.push((a, b, self.mask(a) | self.mask(b)));
            }
        }
        while let Some((a, b, mut mask)) = left.pop() {
            let mut group: SmallVec<[(&Lines, &Lines); 4]> = smallvec::smallvec![(a, b)];
            while let Some(i) = left.iter().position(|(.., m)| m & mask != 0) {
                let (a, b, m) = left.swap_remove(i);
                group.push((a, b));
                mask |= m;
            }
            let (need, hold) = match group[..] {
                [(a, b)] if mask & idle == 0 => self.alone(a, b),
                _ => None,
            }
            .unwrap_or_else(|| self.look(&group, mask, idle));
            multiply(&mut needs, &need, worse_to_need);
            multiply(&mut holds, &hold, worse_to_hold);
        }
        let missing = needs.iter().map(|(want, common)| want - common).max();
        let both = holds.iter().map(|(have, want)| have + want).max();
        Traffic {
            missing: missing.unwrap_or(0),
            both: both.unwrap_or(0),
        }
    }

    /// What can happen along a dimension that is only gathered or cut further.
    ///
    /// Parts are as large as the smallest or one larger, and a block of `n` of them that holds `b`
    /// elements has a part of `b / n` elements, rounded down, and one rounded up.
    fn alone(&self, a: &Lines, b: &Lines) -> Option<(Front, Front)> {
        let axes = |lines: &Lines| -> SmallVec<[u8; 4]> {
            let wide = |axis: &u8| self.mesh.size(*axis as usize) > 1;
            lines
                .weights
                .iter()
                .map(|(axis, _)| *axis)
                .filter(wide)
                .collect()
        };
        let (from, to) = (axes(a), axes(b));
        let largest = |lines: &Lines| (lines.step + usize::from(lines.rest > 0)) as u64;
        let hold = smallvec::smallvec![(largest(a), largest(b))];
        if to.starts_with(&from) {
            return Some((smallvec::smallvec![(largest(b), largest(b))], hold));
        }
        if !from.starts_with(&to) {
            return None;
        }
        let parts = (a.parts / b.parts) as u64;
        let mut need: Front = SmallVec::new();
        for block in [largest(b), b.step as u64] {
            keep(&mut need, (block, block / parts), worse_to_need);
        }
        Some((need, hold))
    }

    /// What can happen along dimensions, from a look at every combination of coordinates.
    fn look(&self, dims: &[(&Lines, &Lines)], mask: u32, idle: u32) -> (Front, Front) {
        let (mut need, mut hold) = (Front::new(), Front::new());
        let mut walked = 0;
        self.walk(mask, &mut [0; 16], |at| {
            walked += 1;
            let (mut have, mut want, mut common) = (1, 1, 1);
            for (a, b) in dims {
                let ((a0, a1), (b0, b1)) = (a.range(at), b.range(at));
                have *= (a1 - a0) as u64;
                want *= (b1 - b0) as u64;
                common *= a1.min(b1).saturating_sub(a0.max(b0)) as u64;
            }
            keep(&mut hold, (have, want), worse_to_hold);
            if !off_origin(at, mask & idle) {
                keep(&mut need, (want, common), worse_to_need);
            }
        });
        self.charge(walked);
        (need, hold)
    }

    /// The axes of more than one rank by which a dimension is cut.
    fn mask(&self, lines: &Lines) -> u32 {
        let axes = lines.weights.iter().map(|(axis, _)| *axis as usize);
        axes.filter(|axis| self.mesh.size(*axis) > 1)
            .fold(0, |mask, axis| mask | 1 << axis)
    }

    /// Ranks looked at so far: what planning has taken, beside the number of its choices.
    pub(super) fn walked(&self) -> usize {
        self.walked.get()
    }

    /// Notes that so many ranks were looked at.
    pub(super) fn charge(&self, ranks: usize) {
        self.walked.set(self.walked.get().saturating_add(ranks));
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

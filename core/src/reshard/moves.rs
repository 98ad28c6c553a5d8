//! Where one step can lead: the edges that planners try. Every function hands its shardings to
//! `emit`, and stops (with `false`) once `emit` has had enough.

use super::{edge::Space, grid::bits};
use crate::Sharding;
use smallvec::SmallVec;

/// The partial axes of `from` that a way to `to` must combine.
pub(super) fn to_resolve(from: &Sharding, to: &Sharding) -> u32 {
    from.partial()
        .filter(|p| !to.partial().any(|q| q == *p))
        .fold(0, |mask, (a, _)| mask | 1 << a)
}

/// All ways to cut further along the axes of `free` that make the largest part smaller; each once.
pub(super) fn slicings(
    space: &Space,
    at: &Sharding,
    free: u32,
    emit: &mut dyn FnMut(&Sharding) -> bool,
) -> bool {
    fn extend(
        space: &Space,
        at: &Sharding,
        free: u32,
        first: usize,
        emit: &mut dyn FnMut(&Sharding) -> bool,
    ) -> bool {
        for d in first..space.rank() {
            for axis in bits(free) {
                let next = at.clone().cut(d, axis);
                if space.largest(&next) < space.largest(at)
                    && !(emit(&next) && extend(space, &next, free & !(1 << axis), d, emit))
                {
                    return false;
                }
            }
        }
        true
    }
    extend(space, at, free, 0, emit)
}

/// All ways to combine partial axes of `resolve` in one step, with the bytes received.
pub(super) fn reductions(
    space: &Space,
    at: &Sharding,
    resolve: u32,
    emit: &mut dyn FnMut(&Sharding, u64) -> bool,
) -> bool {
    let left = at.partial_mask() & resolve;
    // All subsets, the largest first.
    let mut subset = left;
    while subset != 0 {
        if !emit(
            &at.without_mask(subset),
            space.all_reduce_bytes(space.local(at), space.group(subset)),
        ) {
            return false;
        }
        subset = (subset - 1) & left;
    }
    (0..space.rank()).all(|d| scatter(space, at, left, 0, d, emit))
}

/// Reduce-scatters of axes of `left` into dimension `d`, after those of `taken`, which `at` has
/// there already.
fn scatter(
    space: &Space,
    at: &Sharding,
    left: u32,
    taken: u32,
    d: usize,
    emit: &mut dyn FnMut(&Sharding, u64) -> bool,
) -> bool {
    bits(left & !taken).all(|axis| {
        let (next, taken) = (at.without(axis).cut(d, axis), taken | 1 << axis);
        emit(
            &next,
            space.reduce_scatter_bytes(space.local(&next), space.group(taken)),
        ) && scatter(space, &next, left, taken, d, emit)
    })
}

/// All steps that gather the last cuts of some dimensions, move the last cuts of one to another, or
/// swap two axes.
pub(super) fn collectives(
    space: &Space,
    at: &Sharding,
    emit: &mut dyn FnMut(&Sharding) -> bool,
) -> bool {
    if !gathers(space, at, 0, false, emit) {
        return false;
    }
    for d in 0..space.rank() {
        let cuts = at.cuts_of(d);
        for keep in 0..cuts.len() {
            let moved: SmallVec<[usize; 4]> =
                cuts[keep..].iter().map(|(_, a)| *a as usize).collect();
            let rest = at.without_mask(moved.iter().fold(0, |mask, a| mask | 1 << a));
            for other in (0..space.rank()).filter(|other| *other != d) {
                if !emit(&moved.iter().fold(rest.clone(), |s, a| s.cut(other, *a))) {
                    return false;
                }
            }
        }
    }
    let free = space.axes() & !at.cut_mask() & !at.partial_mask();
    let cuts: SmallVec<[(usize, usize); 4]> = at.cuts().collect();
    for (i, (d, axis)) in cuts.iter().enumerate() {
        let size = space.mesh.size(*axis);
        let cutting = cuts[i + 1..]
            .iter()
            .filter(|(e, other)| d == e || space.mesh.size(*other) == size)
            .map(|(_, other)| *other);
        for other in cutting.chain(bits(free).filter(|other| space.mesh.size(*other) == size)) {
            if !emit(&swapped(at, *axis, other)) {
                return false;
            }
        }
    }
    true
}

fn gathers(
    space: &Space,
    at: &Sharding,
    d: usize,
    changed: bool,
    emit: &mut dyn FnMut(&Sharding) -> bool,
) -> bool {
    if d == space.rank() {
        return !changed || emit(at);
    }
    let mut gone = 0;
    gathers(space, at, d + 1, changed, emit)
        && at.cuts_of(d).iter().rev().all(|(_, axis)| {
            gone |= 1 << axis;
            gathers(space, &at.without_mask(gone), d + 1, true, emit)
        })
}

/// With two axes in each other's place.
fn swapped(at: &Sharding, axis: usize, other: usize) -> Sharding {
    let name = |a| {
        if a == axis {
            other
        } else if a == other {
            axis
        } else {
            a
        }
    };
    at.cuts().fold(at.without_mask(at.cut_mask()), |s, (d, a)| {
        s.cut(d, name(a))
    })
}

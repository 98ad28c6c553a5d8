//! The way of fewest bytes out of a partial sharding.
//!
//! Such a way slices what it can for nothing, combines the partial axes (scattering where that
//! helps), then gets what is still lacking in one exchange. Moving data before it is combined never
//! pays: there is more of it. All choices are tried, with a bound that discards most of them at
//! once.

use super::{
    edge::{Collective, Space},
    grid::{Geometry, Grid},
    moves,
};
use crate::Sharding;
use smallvec::SmallVec;

/// Shardings on the way, from the source on.
pub(super) type Path = SmallVec<[Sharding; 4]>;

/// What may be tried, in choices and in ranks looked at: all there is on a small mesh, and never
/// more than a millisecond. Beyond, the best so far is taken.
const BUDGET: usize = 8_000;

/// What is left after everything has been combined.
pub(super) struct Rest {
    /// Bytes that the worst rank lacks.
    pub(super) bytes: u64,
    /// Whether a step is left.
    pub(super) step: bool,
    /// Whether that step is an exchange.
    pub(super) exchange: bool,
}

impl Rest {
    pub(super) fn new(space: &Space, at: &Sharding, to: &Sharding, to_grid: &Grid) -> Self {
        let traffic = space.traffic(at, &space.grid(at), to, to_grid);
        let exchange = matches!(
            space.classify(at, to, traffic),
            Some((Collective::Exchange, _))
        );
        Self {
            bytes: traffic.missing * space.size,
            step: at != to,
            exchange,
        }
    }
}

pub(super) struct Fewest<'a> {
    space: &'a Space<'a>,
    /// Partial axes to combine.
    resolve: u32,
    /// Bytes of the largest part at the goal.
    need: u64,
    rest: &'a dyn Fn(&Sharding) -> Rest,
    path: Path,
    best: Path,
    /// Bytes, steps, whether it exchanges: less is better.
    key: (u64, usize, bool),
    /// Whether only the bytes matter.
    only_bytes: bool,
    budget: usize,
}

impl<'a> Fewest<'a> {
    /// The best path from `from` to where everything in `resolve` is combined, on the way to `to`;
    /// `rest` says what it takes from there on.
    pub(super) fn path(
        space: &'a Space<'a>,
        from: &Sharding,
        to: &Sharding,
        resolve: u32,
        need: u64,
        rest: &'a dyn Fn(&Sharding) -> Rest,
    ) -> Path {
        Self::search(space, from, to, resolve, need, rest, false).best
    }

    /// The bytes of that path; `None` where not everything could be tried, so that the path may take
    /// more.
    pub(super) fn bytes(
        space: &'a Space<'a>,
        from: &Sharding,
        to: &Sharding,
        resolve: u32,
        need: u64,
        rest: &'a dyn Fn(&Sharding) -> Rest,
    ) -> Option<u64> {
        let found = Self::search(space, from, to, resolve, need, rest, true);
        (found.budget > 0).then_some(found.key.0)
    }

    fn search(
        space: &'a Space<'a>,
        from: &Sharding,
        to: &Sharding,
        resolve: u32,
        need: u64,
        rest: &'a dyn Fn(&Sharding) -> Rest,
        only_bytes: bool,
    ) -> Self {
        let path = Path::from_iter([from.clone()]);
        let mut search = Self {
            space,
            resolve,
            need,
            rest,
            path,
            best: Path::new(),
            key: (u64::MAX, usize::MAX, true),
            only_bytes,
            budget: BUDGET,
        };
        search.straight(to);
        search.path.truncate(1);
        if only_bytes && search.key.0 <= at_least(space, space.size, from, resolve, need) {
            return search;
        }
        search.combine(0);
        let free = space.axes() & !from.cut_mask() & !from.partial_mask();
        moves::slicings(space, from, free, &mut |sliced| {
            search.path.push(sliced.clone());
            search.combine(0);
            search.path.pop();
            search.budget > 0
        });
        search
    }

    /// Tries the way that only ever cuts as `to` does: often the best, and then it discards all
    /// others.
    fn straight(&mut self, to: &Sharding) {
        let (space, mut at, mut bytes) = (self.space, self.path[0].clone(), 0);
        let mut free = space.axes() & !at.cut_mask() & !at.partial_mask();
        for d in 0..space.rank() {
            let sliced = next_cuts(&at, to, d, free);
            free = sliced.iter().fold(free, |mask, a| mask & !(1 << a));
            at = sliced.iter().fold(at, |s, a| s.cut(d, *a));
        }
        if at != self.path[0] {
            self.path.push(at.clone());
        }
        while at.partial_mask() & self.resolve != 0 {
            let left = at.partial_mask() & self.resolve;
            let scattered = (0..space.rank())
                .map(|d| (d, next_cuts(&at, to, d, left)))
                .find(|(_, axes)| !axes.is_empty());
            at = match scattered {
                Some((d, axes)) => {
                    let mask = axes.iter().fold(0, |mask, a| mask | 1 << a);
                    let next = axes.iter().fold(at.without_mask(mask), |s, a| s.cut(d, *a));
                    bytes += space.reduce_scatter_bytes(space.local(&next), space.group(mask));
                    next
                }
                None => {
                    bytes += space.all_reduce_bytes(space.local(&at), space.group(left));
                    at.without_mask(left)
                }
            };
            self.path.push(at.clone());
        }
        self.finish(&at, bytes);
    }

    /// Weighs the path, after which nothing is left to combine.
    fn finish(&mut self, at: &Sharding, bytes: u64) {
        let walked = self.space.walked();
        let rest = (self.rest)(at);
        let looked = self.space.walked() - walked;
        self.budget = self.budget.saturating_sub(1 + looked / 4);
        let key = (
            bytes + rest.bytes,
            self.path.len() - 1 + usize::from(rest.step),
            rest.exchange,
        );
        if key < self.key {
            (self.key, self.best) = (key, self.path.clone());
        }
    }

    /// Tries all ways on from the end of the path, which has received `bytes` so far.
    fn combine(&mut self, bytes: u64) {
        let Some(at) = self.path.last().cloned() else {
            return;
        };
        let left = at.partial_mask() & self.resolve;
        let steps = self.path.len() - 1;
        if left == 0 {
            return self.finish(&at, bytes);
        }
        if self.hopeless(bytes, &at, left, steps + 1) {
            return;
        }
        let space = self.space;
        moves::reductions(space, &at, self.resolve, &mut |next, received| {
            self.budget = self.budget.saturating_sub(1);
            let left = next.partial_mask() & self.resolve;
            if !self.hopeless(
                bytes + received,
                next,
                left,
                steps + 1 + usize::from(left != 0),
            ) {
                self.path.push(next.clone());
                self.combine(bytes + received);
                self.path.pop();
            }
            self.budget > 0
        });
    }

    /// Whether no way on from `at` can beat the best.
    fn hopeless(&self, bytes: u64, at: &Sharding, left: u32, steps: usize) -> bool {
        let bound = bytes.saturating_add(least(
            self.space.local(at),
            self.space.group(left),
            self.need,
        ));
        if self.only_bytes {
            return bound >= self.key.0;
        }
        (bound, steps, false) >= self.key
    }
}

/// The axes of `mask` by which `to` goes on cutting dimension `d` where `at` ends.
fn next_cuts(at: &Sharding, to: &Sharding, d: usize, mask: u32) -> SmallVec<[usize; 3]> {
    let next = to.cuts_of(d).strip_prefix(at.cuts_of(d)).unwrap_or(&[]);
    next.iter()
        .map(|(_, a)| *a as usize)
        .take_while(|a| mask & 1 << a != 0)
        .collect()
}

/// The least bytes of any way from `from` that combines the axes of `resolve` and ends with `need`
/// bytes, with elements of `size` bytes: what can be cut for nothing is cut first.
pub(super) fn at_least(
    geometry: &Geometry,
    size: u64,
    from: &Sharding,
    resolve: u32,
    need: u64,
) -> u64 {
    let free = geometry.axes() & !from.cut_mask() & !from.partial_mask();
    let cut = geometry.largest(from) * size / geometry.group(free);
    least(cut, geometry.group(from.partial_mask() & resolve), need)
}

/// The least bytes to combine parts of `local` bytes over `k` ranks and end with `need` bytes:
/// `(k - 1) * w + max(0, need - w)` grows with the size `w` of what a rank combines, and `w` is at
/// least `local / k`.
pub(super) fn least(local: u64, k: u64, need: u64) -> u64 {
    let (local, k, need) = (u128::from(local), u128::from(k), u128::from(need));
    let least = if k == 1 {
        need.saturating_sub(local)
    } else if need * k >= local {
        need + (k - 2) * local / k
    } else {
        (k - 1) * local / k
    };
    u64::try_from(least).unwrap_or(u64::MAX)
}

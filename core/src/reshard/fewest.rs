//! The way of fewest bytes out of a partial sharding.
//!
//! Such a way slices what it can for nothing, combines the partial axes (scattering where that helps), then gets what is still lacking in one exchange. Moving
//! data before it is combined never pays: there is more of it. All choices are tried, with a bound that discards most of them at once.

use super::{edge::Space, moves};
use crate::Sharding;
use smallvec::SmallVec;

/// Shardings on the way, from the source on.
pub(super) type Path = SmallVec<[Sharding; 4]>;

/// What may be tried, in choices and in ranks looked at: all there is on a small mesh, and never more than a millisecond. Beyond, the best so far is taken.
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
    budget: usize,
}

impl<'a> Fewest<'a> {
    /// The best path from `from` to where everything in `resolve` is combined; `rest` says what it takes from there on.
    pub(super) fn path(space: &'a Space<'a>, from: &Sharding, resolve: u32, need: u64, rest: &'a dyn Fn(&Sharding) -> Rest) -> Path {
        let path = Path::from_iter([from.clone()]);
        let mut search = Self { space, resolve, need, rest, path, best: Path::new(), key: (u64::MAX, usize::MAX, true), budget: BUDGET };
        search.combine(0);
        let free = space.axes() & !from.cut_mask() & !from.partial_mask();
        moves::slicings(space, from, free, &mut |sliced| {
            search.path.push(sliced.clone());
            search.combine(0);
            search.path.pop();
            search.budget > 0
        });
        search.best
    }

    /// Tries all ways on from the end of the path, which has received `bytes` so far.
    fn combine(&mut self, bytes: u64) {
        let Some(at) = self.path.last().cloned() else { return };
        let left = at.partial_mask() & self.resolve;
        let steps = self.path.len() - 1;
        if left == 0 {
            self.budget = self.budget.saturating_sub(self.space.mesh.ranks() / 4);
            let rest = (self.rest)(&at);
            let key = (bytes + rest.bytes, steps + usize::from(rest.step), rest.exchange);
            if key < self.key {
                (self.key, self.best) = (key, self.path.clone());
            }
            return;
        }
        if self.hopeless(bytes, &at, left, steps + 1) {
            return;
        }
        let space = self.space;
        moves::reductions(space, &at, self.resolve, &mut |next, received| {
            self.budget = self.budget.saturating_sub(1);
            let left = next.partial_mask() & self.resolve;
            if !self.hopeless(bytes + received, next, left, steps + 1 + usize::from(left != 0)) {
                self.path.push(next.clone());
                self.combine(bytes + received);
                self.path.pop();
            }
            self.budget > 0
        });
    }

    /// Whether no way on from `at` can beat the best.
    fn hopeless(&self, bytes: u64, at: &Sharding, left: u32, steps: usize) -> bool {
        let bound = bytes.saturating_add(least(self.space.local(at), self.space.group(left), self.need));
        (bound, steps, false) >= self.key
    }
}

/// The least bytes to combine parts of `local` bytes over `k` ranks and end with `need` bytes: `(k - 1) * w + max(0, need - w)` grows with the size `w` of what
/// a rank combines, and `w` is at least `local / k`.
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

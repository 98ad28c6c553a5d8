//! Choices that cost less together than those that each op would make by itself.
//!
//! The start is a run in which every op decides by itself. A [`Change`](change::Change) is another
//! choice for all calls of one class, or a form that is held; what it would save is
//! [estimated](follow) on the calls that were written down, and the best of them are tried by a run.
//! Only what such a run took counts, so a change that was estimated wrongly costs nothing but time.

use super::{
    PlanFor, PlanOptions, Totals,
    change::{self, Change},
    follow::Memo,
    run::{Planner, Run},
    session::Guide,
};
use crate::Result;
use std::collections::HashSet;

/// How many changes are tried to get below a bound on memory.
const MEMORY_TRIES: usize = 24;

/// What the step takes where ops decide by themselves, and the best run that was found.
pub(super) fn best(planner: &Planner<'_>, options: &PlanOptions) -> Result<(Totals, Run)> {
    let start = planner.guided(&Guide::default())?;
    let eager = start.totals;
    let mut search = Search {
        planner,
        options,
        guide: Guide::default(),
        best: start,
        tried: HashSet::new(),
    };
    search.improve()?;
    if let Some(bound) = options.memory {
        search.fit(bound)?;
    }
    Ok((eager, search.best))
}

struct Search<'a> {
    planner: &'a Planner<'a>,
    options: &'a PlanOptions,
    guide: Guide,
    best: Run,
    /// By what they are known.
    tried: HashSet<u64>,
}

impl Search<'_> {
    /// Tries changes, those first that seem to save most, as long as there are such.
    fn improve(&mut self) -> Result<()> {
        let mut left = self.options.tries;
        let mut improved = left > 0;
        let memo = Memo::default();
        while improved {
            improved = false;
            for change in change::candidates(&self.best, self.options, &memo)? {
                if left == 0 {
                    return Ok(());
                }
                if self.tried.insert(change.digest()) {
                    left -= 1;
                    if self.attempt(&change, Self::is_better) {
                        improved = true;
                        break;
                    }
                }
            }
        }
        Ok(())
    }

    /// Has gradients keep less, what saves most for what it costs first, until the step fits.
    fn fit(&mut self, bound: u64) -> Result<()> {
        let mut left = MEMORY_TRIES;
        while self.best.totals.memory > bound && left > 0 {
            let changes = change::to_save_memory(&self.best)?.into_iter();
            let tried = &mut self.tried;
            let Some(change) = { changes }.find(|change| tried.insert(change.digest())) else {
                return Ok(());
            };
            left -= 1;
            self.attempt(&change, |run, best, _| {
                run.totals.memory < best.totals.memory
            });
        }
        Ok(())
    }

    /// Runs the step with a change more, and keeps the change where that is good. A change may also
    /// make an op impossible, and then it is none.
    fn attempt(&mut self, change: &Change, is_good: fn(&Run, &Run, &PlanOptions) -> bool) -> bool {
        let mut guide = self.guide.clone();
        change.apply(&mut guide);
        match self.planner.guided(&guide) {
            Ok(run) if is_good(&run, &self.best, self.options) => {
                (self.guide, self.best) = (guide, run);
                true
            }
            _ => false,
        }
    }

    fn is_better(run: &Run, best: &Run, options: &PlanOptions) -> bool {
        // What holds more than before must still fit.
        let bound = options.memory.unwrap_or(u64::MAX).max(best.totals.memory);
        run.totals.memory <= bound
            && match options.target {
                PlanFor::Bytes => run.totals.bytes < best.totals.bytes,
                PlanFor::Seconds => run.totals.seconds < best.totals.seconds,
            }
    }
}

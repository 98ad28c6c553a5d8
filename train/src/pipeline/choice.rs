//! Which schedule a run has.

use super::Pipeline;
use crate::{Error, Result};
use anymesh_schedule::{Schedule, Search, build};

/// A schedule by name, or one's own.
#[derive(Clone, Debug, PartialEq)]
pub enum ScheduleChoice {
    /// One of [`anymesh_schedule::NAMES`], made for the stages of the model and the micro-batches of
    /// a step.
    Named(String),
    /// Searched for, with at most this many activations alive on each rank.
    Searched(usize),
    /// As it is.
    Own(Schedule),
}

impl Default for ScheduleChoice {
    fn default() -> Self {
        Self::Named("1f1b".into())
    }
}

impl ScheduleChoice {
    /// For stages on these ranks, proven.
    pub fn pipeline(&self, owners: &[usize], micros: usize) -> Result<Pipeline> {
        let ranks = owners.iter().max().map_or(1, |rank| rank + 1);
        let chunks = owners.len() / ranks;
        let schedule = match self {
            Self::Named(name) => build(name, ranks, chunks, micros)?,
            Self::Searched(live) => Search {
                live: *live,
                ..Search::new(ranks, chunks, micros)
            }
            .run()?,
            Self::Own(schedule) => schedule.clone(),
        };
        if schedule.owner != owners {
            let detail = format!(
                "the stages of '{}' are on ranks {:?}, those of the model on {owners:?}: the placement of the model (loop or v) must be that of the schedule",
                schedule.name, schedule.owner
            );
            return Err(Error::config("pipeline.schedule", detail));
        }
        Pipeline::new(&schedule)
    }
}

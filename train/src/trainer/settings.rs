//! What a run is told.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// How long to train, and what to do on the way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Steps of the whole run, those before a resume included.
    pub steps: u64,
    /// What dropout draws from.
    pub seed: u64,
    /// The last step that is logged is always the last one; others every so many steps.
    pub log_every: u64,
    /// Evaluation.
    pub evaluate: Evaluate,
    /// Checkpoints; none where there is no folder.
    pub save: Save,
    /// What happens when a step goes wrong.
    pub guard: Guard,
    /// The decay of an average of the parameters that is kept beside them, where one is wanted.
    pub ema: Option<f64>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            steps: 1000,
            seed: 0,
            log_every: 10,
            evaluate: Evaluate::default(),
            save: Save::default(),
            guard: Guard::default(),
            ema: None,
        }
    }
}

/// When to evaluate.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Evaluate {
    /// Every so many steps, and after the last one; never where it is 0.
    pub every: u64,
    /// At most so many batches of the evaluation's data; all where it is 0.
    pub batches: u64,
}

/// When to save, and what to keep.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Save {
    /// The folder that checkpoints go to. A run goes on from the newest one in it.
    pub folder: Option<PathBuf>,
    /// Every so many steps; 0 is never.
    pub every_steps: u64,
    /// Every so many minutes; 0 is never.
    pub every_minutes: f64,
    /// How many of the newest stay.
    pub keep: usize,
    /// Of those, the ones whose step is a multiple of this stay for good; 0 is none.
    pub keep_every: u64,
    /// Whether the one with the lowest loss of the evaluation stays, too.
    pub best: bool,
    /// Bytes that are copied to the host between two steps while a checkpoint is written.
    pub bytes_per_step: usize,
}

impl Default for Save {
    fn default() -> Self {
        Self {
            folder: None,
            every_steps: 0,
            every_minutes: 0.0,
            keep: 2,
            keep_every: 0,
            best: false,
            bytes_per_step: 64 << 20,
        }
    }
}

/// What happens when a step goes wrong.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Guard {
    /// The run ends when so many steps in a row had a loss or a gradient that is not finite. Each
    /// is skipped: the parameters stay, the data goes on.
    pub max_skips: u64,
    /// Every so many steps the gradients are computed a second time, and must have the same bits;
    /// 0 is never.
    pub rerun_every: u64,
}

impl Default for Guard {
    fn default() -> Self {
        Self {
            max_skips: 5,
            rerun_every: 0,
        }
    }
}

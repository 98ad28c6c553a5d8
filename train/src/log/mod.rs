//! Logs of a run: numbers by step, as TensorBoard's event files and as JSON lines, and a line of
//! progress.
//!
//! Nothing is hidden: a loss that is not a number is logged as such.

mod json_lines;
mod progress;
mod tensorboard;

use crate::{Error, Result};
use std::{
    fs,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

pub use json_lines::JsonLog;
pub use progress::{Progress, Status, flops_per_token, mfu};
pub use tensorboard::EventFile;

/// Writes numbers by step to an event file and to `metrics.jsonl` in one folder.
///
/// A run that goes on writes a new event file, which TensorBoard joins with the others, and
/// appends to the lines.
///
/// ```
/// # use anymesh_train::log::Logger;
/// # let folder = std::env::temp_dir().join(format!("anymesh-doc-log-{}", std::process::id()));
/// let mut log = Logger::new(&folder)?;
/// log.scalars(300, &[("loss", 1.5), ("gradient_norm", f64::NAN)])?;
/// let lines = std::fs::read_to_string(folder.join("metrics.jsonl")).expect("written");
/// assert!(lines.contains(r#""loss":1.5,"gradient_norm":"NaN"}"#), "{lines}");
/// # std::fs::remove_dir_all(&folder).ok();
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Debug)]
pub struct Logger {
    events: EventFile,
    lines: JsonLog,
}

impl Logger {
    /// Logs into a folder, which is made if it is not there.
    pub fn new(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        fs::create_dir_all(folder).map_err(|e| Error::io(folder, "create", &e))?;
        Ok(Self {
            events: EventFile::create(folder)?,
            lines: JsonLog::append(folder.join("metrics.jsonl"))?,
        })
    }

    /// Numbers of a step, with the time now. They are in the files when this returns.
    pub fn scalars(&mut self, step: u64, scalars: &[(&str, f64)]) -> Result<()> {
        let time = now();
        for (name, value) in scalars {
            self.events.scalar(time, step, name, *value)?;
        }
        self.events.flush()?;
        self.lines.scalars(time, step, scalars)
    }
}

/// Seconds since 1970.
fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
mod tests;

//! A line that tells how far a run is.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::{
    io::{IsTerminal, Write},
    time::{Duration, Instant},
};

/// How a run is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Status {
    /// The loss of the last step.
    pub loss: f64,
    /// Tokens a second.
    pub tokens_per_second: f64,
    /// The share of what the devices could compute at best, 0 to 1, where that is known.
    pub mfu: Option<f64>,
    /// Bytes of memory in use on the fullest device, where that is known.
    pub memory: Option<u64>,
}

/// Shows how far a run is: a bar on a terminal, else a line from time to time.
#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
    total: u64,
    /// Where this run began, which may be in the middle, and when.
    first: u64,
    began: Instant,
    told: Option<Instant>,
    every: Duration,
}

impl Progress {
    /// Of a run from step `first` to `total`, on standard error.
    pub fn new(first: u64, total: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
            if let Ok(style) = ProgressStyle::with_template("{wide_bar} {msg}") {
                bar.set_style(style);
            }
            bar.set_position(first);
            bar
        });
        Self {
            bar,
            total,
            first,
            began: Instant::now(),
            told: None,
            every: Duration::from_secs(10),
        }
    }

    /// With a line at most so often, where there is no terminal.
    pub fn every(mut self, every: Duration) -> Self {
        self.every = every;
        self
    }

    /// After a step.
    pub fn step(&mut self, step: u64, status: &Status) {
        let text = line(step, self.total, self.left(step), status);
        if let Some(bar) = &self.bar {
            bar.set_position(step);
            bar.set_message(text);
            return;
        }
        let due = self.told.is_none_or(|told| told.elapsed() >= self.every);
        if due || step >= self.total {
            self.told = Some(Instant::now());
            self.say(&text);
        }
    }

    /// A line of its own, above the bar.
    pub fn say(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            // Whoever closed standard error does not want to know.
            None => drop(writeln!(std::io::stderr(), "{text}")),
        }
    }

    /// The end: what was shown last stays.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }

    /// How long the rest takes if it goes on like this.
    fn left(&self, step: u64) -> Option<Duration> {
        left(
            step.checked_sub(self.first)?,
            self.total.saturating_sub(step),
            self.began.elapsed(),
        )
    }
}

fn left(done: u64, left: u64, elapsed: Duration) -> Option<Duration> {
    let seconds = elapsed.as_secs_f64() / done as f64 * left as f64;
    Duration::try_from_secs_f64(seconds).ok()
}

/// `step 120/1000  loss 3.2174  41.2k tokens/s  mfu 38.1%  12.3 GiB  0:12:05 left`
fn line(step: u64, total: u64, left: Option<Duration>, status: &Status) -> String {
    let mut line = format!("step {step}/{total}  loss {:.4}", status.loss);
    line += &format!("  {} tokens/s", short(status.tokens_per_second));
    if let Some(mfu) = status.mfu {
        line += &format!("  mfu {:.1}%", 100.0 * mfu);
    }
    if let Some(memory) = status.memory {
        line += &format!("  {}", bytes(memory));
    }
    if let Some(left) = left {
        let seconds = left.as_secs();
        let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
        line += &format!("  {hours}:{minutes:02}:{:02} left", seconds % 60);
    }
    line
}

fn short(value: f64) -> String {
    match value {
        v if v >= 1e9 => format!("{:.1}G", v / 1e9),
        v if v >= 1e6 => format!("{:.1}M", v / 1e6),
        v if v >= 1e3 => format!("{:.1}k", v / 1e3),
        v => format!("{v:.0}"),
    }
}

fn bytes(value: u64) -> String {
    let value = value as f64;
    match value / f64::from(1 << 30) {
        gib if gib >= 1.0 => format!("{gib:.1} GiB"),
        gib => format!("{:.0} MiB", gib * 1024.0),
    }
}

/// Floating-point operations that a token costs in training: six for each parameter that is
/// multiplied with (all but those of the embedding lookup), and those of attention.
///
/// ```
/// # use anymesh_train::log::flops_per_token;
/// // 124M parameters, 12 layers of width 768, rows of 1024 tokens.
/// assert_eq!(flops_per_token(124_000_000, 12, 768, 1024), 857_246_208.0);
/// ```
pub fn flops_per_token(parameters: u64, layers: u64, width: u64, length: u64) -> f64 {
    let attention = [12, layers, width, length].map(|n| n as f64);
    6.0 * parameters as f64 + attention.iter().product::<f64>()
}

/// The share of what devices could compute at best: `peak` is in floating-point operations a
/// second, of all of them together. None where the peak is not known.
pub fn mfu(tokens_per_second: f64, flops_per_token: f64, peak: f64) -> Option<f64> {
    let share = tokens_per_second * flops_per_token / peak;
    (peak > 0.0 && share.is_finite()).then_some(share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_tells_what_is_known() {
        let status = Status {
            loss: 3.21744,
            tokens_per_second: 41_234.0,
            mfu: Some(0.3812),
            memory: Some(13_207_024_435),
        };
        let left = Some(Duration::from_secs(725));
        assert_eq!(
            line(120, 1000, left, &status),
            "step 120/1000  loss 3.2174  41.2k tokens/s  mfu 38.1%  12.3 GiB  0:12:05 left"
        );
        let unknown = Status {
            loss: f64::NAN,
            tokens_per_second: 7.4,
            mfu: None,
            memory: None,
        };
        assert_eq!(line(1, 2, None, &unknown), "step 1/2  loss NaN  7 tokens/s");
        let large = Status {
            tokens_per_second: 2.5e9,
            memory: Some(5 << 20),
            ..unknown
        };
        let left = Some(Duration::from_secs(100 * 3600 + 61));
        assert_eq!(
            line(1, 2, left, &large),
            "step 1/2  loss NaN  2.5G tokens/s  5 MiB  100:01:01 left"
        );
    }

    #[test]
    fn time_left_counts_from_where_the_run_began() {
        let elapsed = Duration::from_secs(20);
        assert_eq!(left(10, 50, elapsed), Some(Duration::from_secs(100)));
        assert_eq!(left(10, 0, elapsed), Some(Duration::ZERO));
        assert_eq!(left(0, 50, elapsed), None, "nothing is known yet");
        assert_eq!(left(1, u64::MAX, Duration::MAX), None);
        let mut progress = Progress::new(500, 1000).every(Duration::ZERO);
        progress.step(499, &Status::default());
        progress.step(501, &Status::default());
        progress.finish();
        assert!(progress.left(501).is_some() && progress.left(499).is_none());
    }

    #[test]
    fn mfu_is_a_share_of_the_peak() {
        let flops = flops_per_token(1_000, 2, 8, 16);
        assert_eq!(flops, 6_000.0 + 12.0 * 2.0 * 8.0 * 16.0);
        assert_eq!(mfu(100.0, 1e9, 2e11), Some(0.5));
        assert_eq!(mfu(100.0, 1e9, 0.0), None);
        assert_eq!(mfu(f64::INFINITY, 1e9, 1e9), None);
    }
}

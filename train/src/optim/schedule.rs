//! Learning rates over a run.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::f64::consts::PI;

/// What the learning rate is multiplied with at each step. A function of the step and of nothing
/// else, so a run that goes on needs to remember its step only; after the end it stays what it is
/// there.
///
/// All begin with `warmup` steps in which the factor rises evenly from `warmup_from` to 1. Step 0
/// of a warm-up from 0 does nothing: count steps from 1.
///
/// ```
/// # use anymesh_train::optim::Schedule;
/// let cosine: Schedule = toml::from_str("kind = 'cosine'\nwarmup = 10\ntotal = 100\nmin = 0.1")?;
/// assert_eq!([5, 10, 55, 100, 1000].map(|step| cosine.factor(step)), [0.5, 1.0, 0.55, 0.1, 0.1]);
/// # Ok::<(), toml::de::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Schedule {
    /// 1 after the warm-up.
    Constant {
        /// Steps of warm-up.
        #[serde(default)]
        warmup: u64,
        /// What it begins at.
        #[serde(default)]
        warmup_from: f64,
    },
    /// Falls evenly from 1 to `min`.
    Linear {
        /// Steps of warm-up.
        #[serde(default)]
        warmup: u64,
        /// What it begins at.
        #[serde(default)]
        warmup_from: f64,
        /// The step at which it ends.
        total: u64,
        /// What it ends at.
        #[serde(default)]
        min: f64,
    },
    /// Falls as half a wave of a cosine from 1 to `min`.
    Cosine {
        /// Steps of warm-up.
        #[serde(default)]
        warmup: u64,
        /// What it begins at.
        #[serde(default)]
        warmup_from: f64,
        /// The step at which it ends.
        total: u64,
        /// What it ends at.
        #[serde(default)]
        min: f64,
    },
    /// Falls as a power of what is left, from 1 to `min`.
    Polynomial {
        /// Steps of warm-up.
        #[serde(default)]
        warmup: u64,
        /// What it begins at.
        #[serde(default)]
        warmup_from: f64,
        /// The step at which it ends.
        total: u64,
        /// What it ends at.
        #[serde(default)]
        min: f64,
        /// The power.
        power: f64,
    },
    /// Stays at 1 and falls to `min` at the end.
    Wsd {
        /// Steps of warm-up.
        #[serde(default)]
        warmup: u64,
        /// What it begins at.
        #[serde(default)]
        warmup_from: f64,
        /// Steps at 1.
        stable: u64,
        /// Steps of the fall.
        decay: u64,
        /// What it ends at.
        #[serde(default)]
        min: f64,
        /// How it falls.
        #[serde(default)]
        shape: Fall,
    },
    /// Falls as one over the root of the step, without an end.
    InverseSqrt {
        /// Steps of warm-up.
        #[serde(default)]
        warmup: u64,
        /// What it begins at.
        #[serde(default)]
        warmup_from: f64,
        /// The steps after which it is `1 / sqrt(2)`, counted from the end of the warm-up: as many
        /// as those of the warm-up unless given, and 10,000 where there are none.
        timescale: Option<u64>,
    },
}

/// How [`Schedule::Wsd`] falls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fall {
    /// Evenly.
    #[default]
    #[serde(rename = "linear")]
    Linear,
    /// As half a wave of a cosine.
    #[serde(rename = "cosine")]
    Cosine,
    /// As `1 - sqrt(r)`: fast at first.
    #[serde(rename = "1-sqrt")]
    OneMinusSqrt,
    /// As `2 (1/2)^r - 1`.
    #[serde(rename = "exponential")]
    Exponential,
}

impl Fall {
    /// What is left after a part `r` of the fall.
    fn left(self, r: f64) -> f64 {
        match self {
            Self::Linear => 1.0 - r,
            Self::Cosine => 0.5 * (1.0 + (PI * r).cos()),
            Self::OneMinusSqrt => 1.0 - r.sqrt(),
            Self::Exponential => 2.0 * 0.5f64.powf(r) - 1.0,
        }
    }
}

impl Default for Schedule {
    fn default() -> Self {
        Self::Constant {
            warmup: 0,
            warmup_from: 0.0,
        }
    }
}

impl Schedule {
    /// What the learning rate is multiplied with at a step.
    pub fn factor(&self, step: u64) -> f64 {
        let (warmup, from) = self.warmup();
        if step < warmup {
            return from + (1.0 - from) * step as f64 / warmup as f64;
        }
        let past = |start: u64, steps: u64| match steps {
            0 => 1.0,
            _ => (step.saturating_sub(start) as f64 / steps as f64).min(1.0),
        };
        let falls = |total: u64| past(warmup, total.saturating_sub(warmup));
        let to = |min: f64, left: f64| min + (1.0 - min) * left;
        match *self {
            Self::Constant { .. } => 1.0,
            Self::Linear { total, min, .. } => to(min, Fall::Linear.left(falls(total))),
            Self::Cosine { total, min, .. } => to(min, Fall::Cosine.left(falls(total))),
            Self::Polynomial {
                total, min, power, ..
            } => to(min, (1.0 - falls(total)).powf(power)),
            Self::Wsd {
                stable,
                decay,
                min,
                shape,
                ..
            } => {
                let start = warmup.saturating_add(stable);
                match step <= start {
                    true => 1.0,
                    false => to(min, shape.left(past(start, decay))),
                }
            }
            Self::InverseSqrt { timescale, .. } => {
                let scale = timescale.unwrap_or(match warmup {
                    0 => 10_000,
                    steps => steps,
                });
                let scale = scale.max(1) as f64;
                (scale / ((step - warmup) as f64 + scale)).sqrt()
            }
        }
    }

    fn warmup(&self) -> (u64, f64) {
        match *self {
            Self::Constant {
                warmup,
                warmup_from,
            }
            | Self::Linear {
                warmup,
                warmup_from,
                ..
            }
            | Self::Cosine {
                warmup,
                warmup_from,
                ..
            }
            | Self::Polynomial {
                warmup,
                warmup_from,
                ..
            }
            | Self::Wsd {
                warmup,
                warmup_from,
                ..
            }
            | Self::InverseSqrt {
                warmup,
                warmup_from,
                ..
            } => (warmup, warmup_from),
        }
    }

    /// That it makes sense; `key` is where it comes from, such as `schedule`.
    pub fn check(&self, key: &str) -> Result<()> {
        let refuse = |name: &str, detail: String| -> Result<()> {
            Err(Error::config(format!("{key}.{name}"), detail))
        };
        let (warmup, from) = self.warmup();
        if !(0.0..=1.0).contains(&from) {
            return refuse("warmup_from", format!("{from} is not from 0 to 1"));
        }
        match *self {
            Self::Linear { total, min, .. }
            | Self::Cosine { total, min, .. }
            | Self::Polynomial { total, min, .. } => {
                if total <= warmup {
                    let detail = format!("{total} steps end before the {warmup} of the warm-up");
                    return refuse("total", detail);
                }
                if !(0.0..=1.0).contains(&min) {
                    return refuse("min", format!("{min} is not from 0 to 1"));
                }
            }
            Self::Wsd { min, .. } if !(0.0..=1.0).contains(&min) => {
                return refuse("min", format!("{min} is not from 0 to 1"));
            }
            Self::InverseSqrt {
                timescale: Some(0), ..
            } => return refuse("timescale", "it needs at least one step".into()),
            _ => {}
        }
        match *self {
            Self::Polynomial { power, .. } if !(power.is_finite() && power > 0.0) => {
                refuse("power", format!("{power} is not a number above 0"))
            }
            _ => Ok(()),
        }
    }
}

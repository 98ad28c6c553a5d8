//! Loss scaling, for f16.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// Gradients in f16 vanish below 6e-8, so the loss is multiplied with a number as large as still
/// works: halved when a gradient overflows, in which case the step is left out, and doubled after
/// many steps that went well. Settings and where it is now, which a checkpoint keeps.
///
/// ```
/// # use anymesh_train::optim::LossScaler;
/// let mut scaler = LossScaler { interval: 2, ..LossScaler::default() };
/// scaler.update(true);
/// assert_eq!(scaler.scale, 32768.0);
/// scaler.update(false);
/// scaler.update(false);
/// assert_eq!(scaler.scale, 65536.0);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LossScaler {
    /// What the loss is multiplied with now.
    pub scale: f64,
    /// What the scale is multiplied with after `interval` good steps.
    pub growth: f64,
    /// What the scale is multiplied with after an overflow.
    pub backoff: f64,
    /// How many good steps in a row it takes to grow.
    pub interval: u64,
    /// Good steps in a row so far.
    pub good: u64,
}

impl Default for LossScaler {
    fn default() -> Self {
        Self {
            scale: 65536.0,
            growth: 2.0,
            backoff: 0.5,
            interval: 2000,
            good: 0,
        }
    }
}

impl LossScaler {
    /// After a step: whether a gradient was not finite.
    pub fn update(&mut self, overflow: bool) {
        if overflow {
            self.good = 0;
            self.scale *= self.backoff;
            return;
        }
        self.good += 1;
        if self.good >= self.interval {
            self.good = 0;
            let larger = self.scale * self.growth;
            // A loss in f32 has to hold it.
            if larger <= f64::from(f32::MAX) {
                self.scale = larger;
            }
        }
    }

    /// That the settings make sense; `key` is where they come from.
    pub fn check(&self, key: &str) -> Result<()> {
        let fits = [
            ("scale", self.scale > 0.0 && self.scale.is_finite()),
            ("growth", self.growth >= 1.0 && self.growth.is_finite()),
            ("backoff", self.backoff > 0.0 && self.backoff < 1.0),
            ("interval", self.interval > 0),
        ];
        match fits.iter().find(|(_, fits)| !fits) {
            None => Ok(()),
            Some((name, _)) => Err(Error::config(
                format!("{key}.{name}"),
                "scale and interval are above 0, growth is at least 1, backoff is between 0 and 1",
            )),
        }
    }
}

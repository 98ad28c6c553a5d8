//! Efficiency by size.

use crate::{Error, Result};

/// The fraction of its rate that something reaches, by the amount it does: bytes, or operations.
///
/// Between two points the *time* is interpolated, not the fraction, and points whose time falls
/// are refused. So more never takes less time, which a table of fractions alone does not promise.
/// Before the first point and after the last one their fractions hold. Without points everything runs
/// at its rate.
///
/// ```
/// # use anymesh_core::cost::Curve;
/// let curve = Curve::new([(1e6, 0.5), (1e8, 0.8)])?;
/// // 1 MB takes as long as 2 MB would at the full rate.
/// assert_eq!(curve.at_best(1e6), 2e6);
/// assert!(Curve::new([(1e6, 0.1), (2e6, 0.9)]).is_err(), "twice as much in a fraction of the time");
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Curve(Vec<(f64, f64)>);

impl Curve {
    /// A curve through (amount, fraction), amounts ascending, fractions above 0 and at most 1.
    pub fn new(points: impl IntoIterator<Item = (f64, f64)>) -> Result<Self> {
        let points: Vec<(f64, f64)> = points.into_iter().collect();
        let wrong = |detail: String| Err(Error::argument("curve", "points", detail));
        for (amount, fraction) in &points {
            if !(amount.is_finite() && *amount > 0.0 && *fraction > 0.0 && *fraction <= 1.0) {
                return wrong(format!(
                    "[{amount:e}, {fraction}] is no point: amounts are above 0, fractions above 0 and at most 1"
                ));
            }
        }
        for pair in points.windows(2) {
            let ((a, f), (b, g)) = (pair[0], pair[1]);
            if b <= a {
                return wrong(format!("amounts ascend, {b:e} comes after {a:e}"));
            }
            if b / g < a / f {
                return wrong(format!(
                    "{b:e} at {g} would take less time than {a:e} at {f}: more never takes less time"
                ));
            }
        }
        Ok(Self(points))
    }

    /// The points, ascending.
    pub fn points(&self) -> &[(f64, f64)] {
        &self.0
    }

    /// How much could be done at the full rate in the time that `amount` takes.
    pub fn at_best(&self, amount: f64) -> f64 {
        let Some((first, last)) = self.0.first().zip(self.0.last()) else {
            return amount;
        };
        let after = self.0.partition_point(|(a, _)| *a < amount);
        if after == 0 {
            return amount / first.1;
        }
        let Some(((a, f), (b, g))) = self.0.get(after - 1).zip(self.0.get(after)) else {
            return amount / last.1;
        };
        let (low, high) = (a / f, b / g);
        low + (high - low) * (amount - a) / (b - a)
    }
}

//! Numbers as colours.

/// From low to high, where all values have one sign.
const ALONG: [(u8, u8, u8); 5] = [
    (68, 20, 92),
    (56, 84, 142),
    (32, 146, 140),
    (102, 202, 96),
    (250, 229, 60),
];
/// From below zero over zero to above.
const ACROSS: [(u8, u8, u8); 5] = [
    (30, 86, 168),
    (118, 172, 216),
    (240, 240, 238),
    (238, 148, 110),
    (176, 32, 50),
];

/// The steps that a colour may have.
pub(super) const LEVELS: usize = 48;

/// What is no number, above all and below all.
pub(super) const NAN: &str = "#ff1fc7";
pub(super) const ABOVE: &str = "#00d7ff";
pub(super) const BELOW: &str = "#7dff3a";

/// A scale between the smallest and the largest value; around zero where there are both signs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    pub(super) low: f64,
    pub(super) high: f64,
    across: bool,
}

impl Scale {
    pub(super) fn of(values: impl Iterator<Item = f64>) -> Self {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for v in values.filter(|v| v.is_finite()) {
            (low, high) = (low.min(v), high.max(v));
        }
        if low > high {
            (low, high) = (0.0, 0.0);
        }
        let across = low < 0.0 && high > 0.0;
        if across {
            let size = high.max(-low);
            (low, high) = (-size, size);
        }
        Self { low, high, across }
    }

    /// Which of the [levels](LEVELS) a number has.
    pub(super) fn level(&self, x: f64) -> usize {
        // Halves, so that the largest floats do not overflow.
        let span = self.high / 2.0 - self.low / 2.0;
        let part = match span > 0.0 {
            true => (x / 2.0 - self.low / 2.0) / span,
            false => 0.5,
        };
        ((part * LEVELS as f64) as usize).min(LEVELS - 1)
    }

    /// The colour of a level.
    pub(super) fn color(&self, level: usize) -> String {
        let stops = if self.across { ACROSS } else { ALONG };
        let at = level as f64 / (LEVELS - 1) as f64 * 4.0;
        let i = (at as usize).min(3);
        let part = at - i as f64;
        let mix = |a: u8, b: u8| (f64::from(a) * (1.0 - part) + f64::from(b) * part).round() as u8;
        let (a, b) = (stops[i], stops[i + 1]);
        let (r, g, b) = (mix(a.0, b.0), mix(a.1, b.1), mix(a.2, b.2));
        format!("#{r:02x}{g:02x}{b:02x}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_is_in_the_middle_of_both_signs_and_no_number_overflows() {
        let scale = Scale::of([-1.0, 4.0, f64::NAN].into_iter());
        assert_eq!((scale.low, scale.high), (-4.0, 4.0));
        assert_eq!(scale.level(0.0), LEVELS / 2);
        let scale = Scale::of([-f64::MAX, f64::MAX].into_iter());
        assert_eq!(
            (scale.level(f64::MAX), scale.level(-f64::MAX)),
            (LEVELS - 1, 0)
        );
        assert_eq!(Scale::of([2.0].into_iter()).level(2.0), LEVELS / 2);
        assert_eq!(Scale::of(std::iter::empty()).color(LEVELS - 1), "#fae53c");
    }
}

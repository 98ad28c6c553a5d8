//! Which token comes next.

use crate::{Error, Result, key};
use anymesh_core::{DType, Device, Tensor};

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// What logits are divided by; 0 takes the likeliest token always.
    pub temperature: f64,
    /// Only so many of the likeliest tokens are drawn from; 0 for all.
    pub top_k: usize,
    /// Only the likeliest tokens whose probabilities add up to this are drawn from.
    pub top_p: f64,
    /// What the logits of tokens that the text has already are divided by, where they are positive;
    /// others are multiplied with it.
    pub repetition_penalty: f64,
    /// Where chance comes from: the same seed gives the same text, on every device and mesh.
    pub seed: u64,
}

impl Default for Sampling {
    /// The likeliest token.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            repetition_penalty: 1.0,
            seed: 0,
        }
    }
}

impl Sampling {
    /// That the settings make sense.
    pub fn check(&self) -> Result<()> {
        let wrong = |key: &str, detail: String| Err(Error::config(key, detail));
        let Self {
            temperature,
            top_p,
            repetition_penalty,
            ..
        } = *self;
        if !(temperature >= 0.0 && temperature.is_finite()) {
            return wrong("temperature", format!("{temperature} is not 0 or more"));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return wrong("top_p", format!("{top_p} is not above 0 and at most 1"));
        }
        if !(repetition_penalty > 0.0 && repetition_penalty.is_finite()) {
            let detail = format!("{repetition_penalty} is not above 0");
            return wrong("repetition_penalty", detail);
        }
        Ok(())
    }

    /// Whether the likeliest token is taken as the model gives it.
    pub(crate) fn is_plain_greedy(&self) -> bool {
        self.temperature == 0.0 && self.repetition_penalty == 1.0
    }

    /// Numbers from 0 to 1, one for each token of the `row`-th text.
    pub(crate) fn draws(&self, row: usize, count: usize, device: &Device) -> Result<Vec<f64>> {
        if self.temperature == 0.0 {
            return Ok(vec![0.0; count]);
        }
        let rng = key(self.seed, &format!("generate.{row}"));
        let draws = Tensor::uniform([count], 0.0, 1.0, DType::F32, device, rng)?;
        Ok(draws.to_vec::<f32>()?.into_iter().map(f64::from).collect())
    }

    /// The next token by its logits, of a text that has these tokens already; `draw` is a number
    /// from 0 to 1.
    ///
    /// ```
    /// # use anymesh_train::Sampling;
    /// let logits = [1.0, 3.0, 2.0];
    /// assert_eq!(Sampling::default().next(&logits, &[], 0.0), 1);
    /// let penalised = Sampling { repetition_penalty: 2.0, ..Sampling::default() };
    /// assert_eq!(penalised.next(&logits, &[1], 0.0), 2);
    /// let warm = Sampling { temperature: 1.0, top_k: 2, ..Sampling::default() };
    /// assert_eq!([0.0, 0.72, 0.74, 0.99].map(|draw| warm.next(&logits, &[], draw)), [1, 1, 2, 2]);
    /// ```
    pub fn next(&self, logits: &[f32], text: &[u32], draw: f64) -> u32 {
        let mut logits: Vec<f64> = logits.iter().map(|x| f64::from(*x)).collect();
        if self.repetition_penalty != 1.0 {
            let mut seen: Vec<u32> = text.to_vec();
            seen.sort_unstable();
            seen.dedup();
            for token in seen {
                if let Some(logit) = logits.get_mut(token as usize) {
                    *logit *= match *logit > 0.0 {
                        true => 1.0 / self.repetition_penalty,
                        false => self.repetition_penalty,
                    };
                }
            }
        }
        // Of equal ones the first; what is not a number comes last.
        let likelier = |a: &u32, b: &u32| {
            let value = |i: u32| match logits[i as usize] {
                x if x.is_nan() => f64::NEG_INFINITY,
                x => x,
            };
            value(*b).total_cmp(&value(*a)).then(a.cmp(b))
        };
        let mut tokens: Vec<u32> = (0..logits.len() as u32).collect();
        if self.temperature == 0.0 {
            return tokens.into_iter().min_by(likelier).unwrap_or(0);
        }
        let count = match self.top_k {
            0 => tokens.len(),
            k => k.min(tokens.len()),
        };
        if count < tokens.len() {
            tokens.select_nth_unstable_by(count, likelier);
            tokens.truncate(count);
        }
        tokens.sort_unstable_by(likelier);
        let Some(&first) = tokens.first() else {
            return 0;
        };
        let highest = logits[first as usize];
        let weight = |t: &u32| ((logits[*t as usize] - highest) / self.temperature).exp();
        let weights: Vec<f64> = tokens.iter().map(weight).collect();
        let all: f64 = weights.iter().sum();
        // The likeliest ones until they have the share that is asked for.
        let (mut kept, mut share) = (0, 0.0);
        while kept < weights.len() && (kept == 0 || share < self.top_p * all) {
            share += weights[kept];
            kept += 1;
        }
        let mut left = draw * share;
        for (token, weight) in tokens.iter().zip(&weights).take(kept) {
            left -= weight;
            if left < 0.0 {
                return *token;
            }
        }
        tokens[kept - 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [0.0, 2.0, 1.0, -1.0, 2.0];

    /// How often each token comes when all draws are as likely.
    fn shares(sampling: &Sampling) -> Vec<f64> {
        let mut counts = vec![0.0; LOGITS.len()];
        let n = 20_000;
        for i in 0..n {
            let draw = (f64::from(i) + 0.5) / f64::from(n);
            counts[sampling.next(&LOGITS, &[], draw) as usize] += 1.0 / f64::from(n);
        }
        counts
    }

    fn softmax(temperature: f64, allowed: &[usize]) -> Vec<f64> {
        let weight = |i: usize| match allowed.contains(&i) {
            true => (f64::from(LOGITS[i]) / temperature).exp(),
            false => 0.0,
        };
        let weights: Vec<f64> = (0..LOGITS.len()).map(weight).collect();
        let all: f64 = weights.iter().sum();
        weights.into_iter().map(|w| w / all).collect()
    }

    #[track_caller]
    fn assert_shares(sampling: Sampling, expected: &[f64]) {
        for (a, b) in shares(&sampling).iter().zip(expected) {
            assert!((a - b).abs() < 2e-4, "{sampling:?}: {a} is not {b}");
        }
    }

    #[test]
    fn draws_follow_the_probabilities_of_what_is_kept() {
        let warm = Sampling {
            temperature: 0.7,
            ..Sampling::default()
        };
        assert_shares(warm, &softmax(0.7, &[0, 1, 2, 3, 4]));
        assert_shares(Sampling { top_k: 3, ..warm }, &softmax(0.7, &[1, 2, 4]));
        // Of two equal ones the first.
        assert_shares(Sampling { top_k: 1, ..warm }, &softmax(0.7, &[1]));
        let probabilities = softmax(0.7, &[0, 1, 2, 3, 4]);
        let two = probabilities[1] + probabilities[4];
        let top = |top_p| Sampling { top_p, ..warm };
        assert_shares(top(two - 1e-6), &softmax(0.7, &[1, 4]));
        assert_shares(top(two + 1e-6), &softmax(0.7, &[1, 2, 4]));
        assert_shares(top(1e-9), &softmax(0.7, &[1]));
    }

    #[test]
    fn numbers_that_are_none_are_never_chosen() {
        let greedy = Sampling::default();
        assert_eq!(
            greedy.next(&[f32::NAN, -3.0, f32::NEG_INFINITY], &[], 0.0),
            1
        );
        let penalised = Sampling {
            repetition_penalty: 3.0,
            ..greedy
        };
        // A negative one gets smaller.
        assert_eq!(penalised.next(&[-1.0, -2.0], &[0, 9], 0.0), 1);
    }

    #[test]
    fn settings_that_make_no_sense_are_named() {
        let d = Sampling::default();
        for (sampling, key) in [
            (
                Sampling {
                    temperature: -1.0,
                    ..d
                },
                "temperature",
            ),
            (
                Sampling {
                    temperature: f64::NAN,
                    ..d
                },
                "temperature",
            ),
            (Sampling { top_p: 0.0, ..d }, "top_p"),
            (Sampling { top_p: 1.5, ..d }, "top_p"),
            (
                Sampling {
                    repetition_penalty: 0.0,
                    ..d
                },
                "repetition_penalty",
            ),
        ] {
            let text = sampling.check().expect_err(key).to_string();
            assert!(text.starts_with(key), "{text}");
        }
    }
}

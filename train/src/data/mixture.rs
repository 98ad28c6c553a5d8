//! Several sources as one, in given parts.

use super::{Sample, Shuffle, Source};
use crate::{Error, Result, key};
use std::sync::Arc;

/// Sources that take turns: of every block of positions each has as many as its weight says, in
/// the same order in each block, and each goes through its samples on its own.
///
/// So which sample of which source comes at a position is a formula: a run can begin anywhere.
///
/// ```
/// # use anymesh_train::data::{Concat, Document, Memory, Mixture, Source};
/// # use std::sync::Arc;
/// # let tokens = |token| Memory::new([Document::new(vec![token; 41])]);
/// let web: Arc<dyn Source> = Arc::new(Concat::new(tokens(1), 4)?);
/// let code: Arc<dyn Source> = Arc::new(Concat::new(tokens(2), 4)?);
/// let mixture = Mixture::new(vec![(web, 0.75), (code, 0.25)])?;
/// let sources: Vec<usize> = (0..8).map(|position| mixture.locate(position).0).collect();
/// assert_eq!(sources, [0, 0, 1, 0, 0, 0, 1, 0]);
/// assert_eq!(mixture.locate(1_000_002), (1, 250_000));
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Mixture {
    sources: Vec<Arc<dyn Source>>,
    /// For each position of a block its source, and how many of that source's come before it.
    pattern: Vec<(usize, u64)>,
    /// How many positions of a block each source has.
    quotas: Vec<u64>,
}

/// Positions of a block, where nothing else is said: weights of a thousandth are met exactly.
const BLOCK: usize = 1000;

/// The longest block: its pattern is in memory.
const LONGEST: usize = 1 << 20;

impl Mixture {
    /// Sources with their weights, in blocks of a thousand.
    pub fn new(parts: Vec<(Arc<dyn Source>, f64)>) -> Result<Self> {
        Self::with_block(parts, BLOCK)
    }

    /// Sources with their weights, in blocks of so many positions.
    pub fn with_block(parts: Vec<(Arc<dyn Source>, f64)>, block: usize) -> Result<Self> {
        let (sources, weights): (Vec<_>, Vec<f64>) = parts.into_iter().unzip();
        let wrong = |detail: String| Err(Error::config("data.weights", detail));
        let total: f64 = weights.iter().sum();
        if let Some(weight) = weights.iter().find(|w| !w.is_finite() || **w < 0.0) {
            return wrong(format!("{weight} is no weight: weights are zero or more"));
        }
        if !(total > 0.0 && total.is_finite()) {
            return wrong("no source has a weight above zero".into());
        }
        if !(1..=LONGEST).contains(&block) {
            return wrong(format!(
                "a block of {block} positions: 1 to {LONGEST} will do"
            ));
        }
        let quotas = largest_remainder(&weights, total, block as u64);
        for (i, (weight, quota)) in weights.iter().zip(&quotas).enumerate() {
            if *weight > 0.0 && *quota == 0 {
                return wrong(format!(
                    "source {i} has {weight} of {total}, which is not one in a block of {block}: give it more, or nothing, or make blocks longer"
                ));
            }
            if *weight > 0.0 && sources[i].count() == 0 {
                return Err(Error::config("data", format!("source {i} is empty")));
            }
        }
        Ok(Self {
            pattern: spread(&quotas),
            sources,
            quotas,
        })
    }

    /// One source.
    pub fn one(source: impl Source + 'static) -> Result<Self> {
        let source: Arc<dyn Source> = Arc::new(source);
        Self::with_block(vec![(source, 1.0)], 1)
    }

    /// Which source has a position, and which of that source's positions it is.
    pub fn locate(&self, position: u64) -> (usize, u64) {
        let block = self.pattern.len() as u64;
        let (source, before) = self.pattern[(position % block) as usize];
        (source, position / block * self.quotas[source] + before)
    }

    /// The source at a position and the number of its sample there. Sources begin anew when they
    /// are through, shuffled in another order.
    pub fn at(&self, position: u64, seed: u64, shuffle: bool) -> (usize, u64) {
        let (source, position) = self.locate(position);
        let count = self.sources[source].count();
        let (epoch, position) = (position / count, position % count);
        if !shuffle {
            return (source, position);
        }
        let seed = key(seed, &format!("source {source}")).seed;
        let shuffled = Shuffle::new(count, seed, epoch).at(position);
        (source, shuffled.unwrap_or(position))
    }

    /// A sample of a source.
    pub fn sample(&self, source: usize, index: u64) -> Result<Sample> {
        self.sources[source].sample(index)
    }

    /// The samples of all sources that are used.
    pub fn count(&self) -> u64 {
        let used = self.sources.iter().zip(&self.quotas);
        used.filter(|(_, quota)| **quota > 0)
            .map(|(source, _)| source.count())
            .fold(0, u64::saturating_add)
    }

    /// The length of rows: that of the longest source.
    pub fn length(&self) -> usize {
        self.sources.iter().map(|s| s.length()).max().unwrap_or(0)
    }

    /// Whether rows have several documents or padding.
    pub fn has_documents(&self) -> bool {
        let length = self.length();
        let padded = |s: &Arc<dyn Source>| s.has_documents() || s.length() != length;
        self.sources.iter().any(padded)
    }
}

/// Shares `total` out by weights: each gets the whole part of what is its due, and what is left
/// goes to those with the largest remainders, the first of equal ones first.
fn largest_remainder(weights: &[f64], sum: f64, total: u64) -> Vec<u64> {
    let due: Vec<f64> = weights.iter().map(|w| w / sum * total as f64).collect();
    let mut quotas: Vec<u64> = due.iter().map(|d| *d as u64).collect();
    let mut order: Vec<usize> = (0..due.len()).collect();
    order.sort_by(|a, b| due[*b].fract().total_cmp(&due[*a].fract()));
    let left = total.saturating_sub(quotas.iter().sum());
    for i in order.into_iter().cycle().take(left as usize) {
        quotas[i] += 1;
    }
    quotas
}

/// An order in which each source comes as often as its quota says, as evenly as can be: the one
/// that lags behind most is next, the first of equal ones first.
fn spread(quotas: &[u64]) -> Vec<(usize, u64)> {
    let total: u64 = quotas.iter().sum();
    let mut lag = vec![0i64; quotas.len()];
    let mut given = vec![0; quotas.len()];
    let mut pattern = vec![];
    for _ in 0..total {
        let mut next = 0;
        for (source, quota) in quotas.iter().enumerate() {
            lag[source] += *quota as i64;
            if lag[source] > lag[next] {
                next = source;
            }
        }
        lag[next] -= total as i64;
        pattern.push((next, given[next]));
        given[next] += 1;
    }
    pattern
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::tests::Numbers;

    fn mixture(weights: &[f64], block: usize) -> Result<Mixture> {
        let part = |w: &f64| (Arc::new(Numbers::new(10)) as Arc<dyn Source>, *w);
        Mixture::with_block(weights.iter().map(part).collect(), block)
    }

    #[test]
    fn every_block_has_what_the_weights_say_evenly_spread() {
        for (weights, block, expected) in [
            (&[1.0, 1.0][..], 10, &[5, 5][..]),
            (&[0.5, 0.3, 0.2], 10, &[5, 3, 2]),
            (&[1.0, 1.0, 1.0], 10, &[4, 3, 3]),
            (&[0.7, 0.0, 0.3], 100, &[70, 0, 30]),
            (&[2.0, 1.0], 7, &[5, 2]),
            (&[0.001, 0.9995, 0.9995], 2000, &[1, 1000, 999]),
        ] {
            let mixture = mixture(weights, block).expect("weights");
            assert_eq!(mixture.quotas, expected, "{weights:?}");
            assert_eq!(mixture.pattern.len(), block);
            let mut given = vec![0u64; weights.len()];
            for (position, (source, before)) in (1u64..).zip(&mixture.pattern) {
                assert_eq!(*before, given[*source]);
                given[*source] += 1;
                for (quota, given) in expected.iter().zip(&given) {
                    // Never a whole sample from its share, up to two for many sources.
                    let due = *quota as f64 * position as f64 / block as f64;
                    assert!(
                        (due - *given as f64).abs() < 2.0,
                        "{weights:?} at {position}"
                    );
                }
            }
            assert_eq!(given, expected, "{weights:?}");
        }
    }

    #[test]
    fn every_source_goes_through_its_own_positions_without_a_gap() {
        let mixture = mixture(&[0.61, 0.05, 0.34], 97).expect("weights");
        let mut next = [0; 3];
        for position in 0..10_000 {
            let (source, own) = mixture.locate(position);
            assert_eq!(own, next[source], "position {position}");
            next[source] += 1;
        }
        // Far away too, without having been on the way.
        let (source, own) = mixture.locate(u64::MAX);
        assert!(source < 3 && own > u64::MAX / 40);
    }

    #[test]
    fn each_epoch_of_each_source_has_every_sample_once_in_an_order_of_its_own() {
        let mixture = mixture(&[0.5, 0.5], 10).expect("weights");
        let mut orders = vec![];
        for source in 0..2 {
            let mut seen: Vec<u64> = (0..60)
                .map(|position| mixture.at(position, 7, true))
                .filter(|(s, _)| *s == source)
                .map(|(_, index)| index)
                .collect();
            assert_eq!(seen.len(), 30);
            for epoch in seen.chunks_mut(10) {
                orders.push(epoch.to_vec());
                epoch.sort_unstable();
                assert_eq!(epoch, (0..10).collect::<Vec<_>>());
            }
        }
        let all = orders.len();
        orders.sort();
        orders.dedup();
        assert_eq!(orders.len(), all);
        let plain: Vec<_> = (0..6).map(|p| mixture.at(p, 7, false)).collect();
        assert_eq!(plain, [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]);
    }

    #[test]
    fn what_is_no_mixture_is_refused() {
        for (weights, block, said) in [
            (&[1.0, -0.5][..], 10, "-0.5 is no weight"),
            (&[1.0, f64::NAN], 10, "NaN is no weight"),
            (&[f64::INFINITY], 10, "inf is no weight"),
            (&[0.0, 0.0], 10, "no source has a weight"),
            (&[], 10, "no source has a weight"),
            (&[f64::MAX, f64::MAX], 10, "no source has a weight"),
            (&[1.0, 0.001], 10, "source 1 has 0.001 of 1.001"),
            (&[1.0], 0, "a block of 0"),
            (&[1.0], usize::MAX, "positions"),
        ] {
            let error = mixture(weights, block).expect_err(said);
            assert!(error.to_string().contains(said), "{error}");
        }
        let empty: Arc<dyn Source> = Arc::new(Numbers::new(0));
        let error = Mixture::new(vec![(empty, 1.0)]).expect_err("empty");
        assert_eq!(error.to_string(), "data: source 0 is empty");
    }
}

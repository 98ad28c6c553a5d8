//! Shuffling without a table: a permutation that is a function.

/// A permutation of `0..count` that depends on a seed and an epoch and needs no memory: where a
/// sample goes is computed when it is asked for, so a run can begin anywhere.
///
/// A Feistel network permutes the numbers of an even number of bits; where it leads beyond `count`
/// it is applied again until it leads back, which is a permutation of `0..count` again. Its round
/// function is Philox, keyed by seed, epoch and round.
///
/// ```
/// # use anymesh_train::data::Shuffle;
/// let shuffle = Shuffle::new(1_000_000_000_000, 42, 0);
/// let at = shuffle.at(123).expect("below the count");
/// assert_eq!(shuffle.position_of(at), Some(123));
/// assert_ne!(Shuffle::new(1_000_000_000_000, 42, 1).at(123), Some(at));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shuffle {
    count: u64,
    seed: u64,
    epoch: u64,
    /// Half of the bits of the numbers that the network permutes.
    half: u32,
}

/// More than the four rounds that make a Feistel network with random round functions a random
/// permutation.
const ROUNDS: u32 = 5;

impl Shuffle {
    /// The permutation of `0..count` of an epoch.
    pub fn new(count: u64, seed: u64, epoch: u64) -> Self {
        let bits = u64::BITS - count.saturating_sub(1).leading_zeros();
        Self {
            count,
            seed,
            epoch,
            half: bits.div_ceil(2).max(1),
        }
    }

    /// What comes at `position`; nothing if that is not below the count.
    pub fn at(&self, position: u64) -> Option<u64> {
        self.walk(position, |x| {
            let (mut left, mut right) = self.halves(x);
            for round in 0..ROUNDS {
                (left, right) = (right, left ^ self.word(right, round));
            }
            self.joined(left, right)
        })
    }

    /// At which position `value` comes; nothing if it is not below the count.
    pub fn position_of(&self, value: u64) -> Option<u64> {
        self.walk(value, |x| {
            let (mut left, mut right) = self.halves(x);
            for round in (0..ROUNDS).rev() {
                (left, right) = (right ^ self.word(left, round), left);
            }
            self.joined(left, right)
        })
    }

    /// Follows a permutation of more numbers until it leads to one below the count. It does: it
    /// leads back to where it began.
    fn walk(&self, from: u64, step: impl Fn(u64) -> u64) -> Option<u64> {
        if from >= self.count {
            return None;
        }
        let mut at = step(from);
        while at >= self.count {
            at = step(at);
        }
        Some(at)
    }

    fn mask(&self) -> u32 {
        u32::MAX >> (u32::BITS - self.half)
    }

    fn halves(&self, x: u64) -> (u32, u32) {
        ((x >> self.half) as u32, x as u32 & self.mask())
    }

    fn joined(&self, left: u32, right: u32) -> u64 {
        u64::from(left) << self.half | u64::from(right)
    }

    fn word(&self, half: u32, round: u32) -> u32 {
        let low_and_high = |x: u64| [x as u32, (x >> 32) as u32];
        let [low, high] = low_and_high(self.epoch);
        philox([half, round, low, high], low_and_high(self.seed))[0] & self.mask()
    }
}

/// Philox 4x32-10, on the host.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let [c0, c1, c2, c3] = counter;
        let (a, b) = (u64::from(c0) * 0xd251_1f53, u64::from(c2) * 0xcd9e_8d57);
        let high = |x: u64| (x >> 32) as u32;
        counter = [
            high(b) ^ c1 ^ key[0],
            b as u32,
            high(a) ^ c3 ^ key[1],
            a as u32,
        ];
        key = [
            key[0].wrapping_add(0x9e37_79b9),
            key[1].wrapping_add(0xbb67_ae85),
        ];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_published_answers() {
        assert_eq!(
            philox([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(
            philox(pi, [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn every_count_below_1000_is_permuted() {
        for count in 0..1000 {
            for (seed, epoch) in [(0, 0), (u64::MAX, 3)] {
                let shuffle = Shuffle::new(count, seed, epoch);
                let mut seen = vec![false; count as usize];
                for position in 0..count {
                    let value = shuffle.at(position).expect("below the count");
                    assert!(!std::mem::replace(&mut seen[value as usize], true));
                    assert_eq!(shuffle.position_of(value), Some(position));
                }
                assert_eq!(
                    (shuffle.at(count), shuffle.position_of(count)),
                    (None, None)
                );
            }
        }
    }

    #[test]
    fn large_counts_lead_back_too() {
        for count in [1 << 40, (1 << 40) - 1, (1 << 40) + 1, 1 << 63, u64::MAX] {
            let shuffle = Shuffle::new(count, 17, 5);
            let spots = (0..300u64).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15) % count);
            for position in spots.chain([0, 1, count - 2, count - 1]) {
                let value = shuffle.at(position).expect("below the count");
                assert!(value < count);
                assert_eq!(shuffle.position_of(value), Some(position), "{count}");
                let at = shuffle.position_of(position).expect("below the count");
                assert_eq!(shuffle.at(at), Some(position), "{count}");
            }
        }
    }

    /// Runs that resume need the order they began with, in every later version: these come from
    /// another program of the same formulas.
    #[test]
    fn the_order_never_changes() {
        let order = |count, seed, epoch, n| -> Vec<u64> {
            let shuffle = Shuffle::new(count, seed, epoch);
            (0..n).filter_map(|i| shuffle.at(i)).collect()
        };
        assert_eq!(order(1000, 42, 0, 6), [547, 39, 522, 837, 331, 26]);
        assert_eq!(order(1000, 42, 1, 3), [72, 922, 284]);
        assert_eq!(
            order(1 << 40, 7 << 32 | 1, 1 << 33, 3),
            [1_051_909_889_027, 220_019_744_015, 956_840_651_810]
        );
    }

    #[test]
    fn every_value_is_as_likely_at_every_position() {
        // Chi-square with 9 x 9 degrees of freedom for each count of 10, over many seeds: beyond
        // 140 once in 20,000.
        let (count, seeds) = (10usize, 20_000);
        let mut hits = vec![0u32; count * count];
        for seed in 0..seeds {
            let shuffle = Shuffle::new(count as u64, seed, 0);
            for position in 0..count {
                let value = shuffle.at(position as u64).expect("below the count");
                hits[position * count + value as usize] += 1;
            }
        }
        let expected = seeds as f64 / count as f64;
        let off = |n: &u32| (f64::from(*n) - expected).powi(2) / expected;
        let chi: f64 = hits.iter().map(off).sum();
        assert!((40.0..140.0).contains(&chi), "{chi}");
    }

    #[test]
    fn epochs_and_seeds_have_orders_of_their_own() {
        let order = |seed, epoch| -> Vec<_> {
            let shuffle = Shuffle::new(100, seed, epoch);
            (0..100).map(|i| shuffle.at(i)).collect()
        };
        let orders = [order(1, 0), order(1, 1), order(2, 0), order(1, 1 << 40)];
        for (i, a) in orders.iter().enumerate() {
            for b in &orders[..i] {
                let same = a.iter().zip(b).filter(|(x, y)| x == y).count();
                assert!(same < 10, "{same} of 100 at the same place");
            }
        }
    }
}

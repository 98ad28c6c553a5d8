//! Random index expressions, most of them valid.

use super::model::{Array, Entry};
use crate::registry::SplitMix;

/// Random choices.
pub(super) struct Dice(pub(super) SplitMix);

impl Dice {
    /// One of `0..n`.
    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.0.next() % n.max(1) as u64) as usize
    }

    /// Once in `n` times.
    pub(super) fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// One of `low..=high`.
    fn between(&mut self, low: i64, high: i64) -> i64 {
        low + self.below((high - low + 1) as usize) as i64
    }
}

/// Sizes of a tensor to index, with at most a few hundred elements.
pub(super) fn shape(dice: &mut Dice) -> Vec<usize> {
    let rank = [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 5, 6][dice.below(14)];
    let mut shape: Vec<usize> = (0..rank)
        .map(|_| {
            if dice.once_in(25) {
                0
            } else {
                1 + dice.below(if rank > 4 { 3 } else { 5 })
            }
        })
        .collect();
    while shape.iter().product::<usize>() > 400 {
        let largest = (0..rank).max_by_key(|d| shape[*d]).unwrap_or(0);
        shape[largest] -= 1;
    }
    shape
}

/// An expression for a tensor of this shape. Some do not fit it: those must be refused.
pub(super) fn expression(dice: &mut Dice, shape: &[usize]) -> Vec<Entry> {
    // Index arrays are made from one common shape, so that most of them broadcast.
    let batch: Vec<usize> = (0..[0, 1, 1, 1, 2, 2, 3][dice.below(7)])
        .map(|_| {
            if dice.once_in(20) {
                0
            } else {
                1 + dice.below(4)
            }
        })
        .collect();
    let advanced = !dice.once_in(3);
    let (mut entries, mut axis) = (vec![], 0);
    let many = dice.once_in(8);
    loop {
        let left = shape.len() - axis;
        if (left == 0 || dice.once_in(9)) && !many && dice.once_in(2) {
            break;
        }
        match dice.below(20) {
            0 => {
                entries.push(Entry::Ellipsis);
                axis += dice.below(left + 1);
                return [entries, tail(dice, &shape[axis..], &batch, advanced)].concat();
            }
            1 => entries.push(Entry::NewAxis),
            2 if advanced && dice.once_in(2) => entries.push(Entry::Flag(!dice.once_in(3))),
            2 if advanced => entries.push(Entry::Mask(Array {
                shape: vec![],
                data: vec![!dice.once_in(3)],
            })),
            _ if left == 0 => break,
            _ => axis += one(dice, &shape[axis..], &batch, advanced, many, &mut entries),
        }
    }
    entries
}

/// Entries for all of these axes.
fn tail(dice: &mut Dice, shape: &[usize], batch: &[usize], advanced: bool) -> Vec<Entry> {
    let (mut entries, mut axis) = (vec![], 0);
    while axis < shape.len() {
        axis += one(dice, &shape[axis..], batch, advanced, false, &mut entries);
        if dice.once_in(12) {
            entries.push(Entry::NewAxis);
        }
    }
    entries
}

/// One entry for the first of these axes, or a mask for several of them. Says for how many.
fn one(
    dice: &mut Dice,
    shape: &[usize],
    batch: &[usize],
    advanced: bool,
    many: bool,
    entries: &mut Vec<Entry>,
) -> usize {
    let size = shape[0];
    let entry = match if many { 19 } else { dice.below(20) } {
        0..=3 => Entry::At(at(dice, size)),
        4..=8 if advanced => {
            let axes = 1 + dice.below(shape.len().min(3));
            let mask = mask(dice, &shape[..axes], batch);
            entries.push(Entry::Mask(mask.clone()));
            return mask.shape.len();
        }
        9..=19 if advanced => Entry::Places(places(dice, size, batch)),
        _ => slice(dice, size),
    };
    entries.push(entry);
    1
}

/// A place of an axis; now and then one that does not exist.
fn at(dice: &mut Dice, size: usize) -> i64 {
    let n = size as i64;
    if n == 0 || dice.once_in(150) {
        [n, -n - 1][dice.below(2)]
    } else {
        dice.between(-n, n - 1)
    }
}

fn slice(dice: &mut Dice, size: usize) -> Entry {
    let n = size as i64;
    let bound = |dice: &mut Dice| {
        if dice.once_in(3) {
            None
        } else {
            Some(dice.between(-n - 2, n + 2))
        }
    };
    let (start, stop) = (bound(dice), bound(dice));
    if dice.once_in(3) {
        return Entry::Slice(None, None, [1, -1][dice.below(2)]);
    }
    Entry::Slice(
        start,
        stop,
        [1, 1, 1, 2, 3, -1, -1, -2, -3, 7][dice.below(10)],
    )
}

/// A shape that broadcasts to `to`.
pub(super) fn narrower(dice: &mut Dice, to: &[usize]) -> Vec<usize> {
    let dropped = if dice.once_in(3) {
        dice.below(to.len() + 1)
    } else {
        0
    };
    to[dropped..]
        .iter()
        .map(|n| if dice.once_in(4) { 1 } else { *n })
        .collect()
}

fn places(dice: &mut Dice, size: usize, batch: &[usize]) -> Array<i64> {
    let shape = narrower(dice, batch);
    // With few places many of them are the same.
    let few = dice.once_in(2);
    let data = (0..shape.iter().product())
        .map(|_| {
            if few && size > 0 {
                dice.below(size.min(2)) as i64
            } else {
                at(dice, size)
            }
        })
        .collect();
    Array { shape, data }
}

/// A mask with as many true elements as the last dimension of the other index arrays, or one, or
/// (mostly a mask alone) any number.
fn mask(dice: &mut Dice, shape: &[usize], batch: &[usize]) -> Array<bool> {
    let n: usize = shape.iter().product();
    let count = match batch.last() {
        Some(last) if *last <= n && !dice.once_in(4) => *last,
        Some(_) if n > 0 && !dice.once_in(10) => 1,
        _ => dice.below(n + 1),
    };
    let mut data = vec![false; n];
    for _ in 0..count {
        let free: Vec<usize> = (0..n).filter(|i| !data[*i]).collect();
        data[free[dice.below(free.len())]] = true;
    }
    let wrong = dice.once_in(200);
    let shape: Vec<usize> = shape
        .iter()
        .enumerate()
        .map(|(d, n)| if wrong && d == 0 { n + 1 } else { *n })
        .collect();
    data.resize(shape.iter().product(), false);
    Array { shape, data }
}

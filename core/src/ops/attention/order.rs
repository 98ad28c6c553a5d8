//! The order in which the positions of a sequence come, where it is cut over ranks.

use crate::{Error, Result, Tensor, grad::custom};
use smallvec::{SmallVec, smallvec};
use std::ops::Range;

/// The order in which the positions of a sequence come.
///
/// Where a sequence is cut over ranks and each position sees those before it, the rank with the last
/// part has much to look at and the first one little. In pairs each rank has one chunk from the
/// front and one from the back, and all have as much to do. It is a permutation of the sequence
/// before it is cut: tokens, labels, document ids and positions are all put in this order, and what
/// a position sees is told by where it stood.
///
/// ```
/// # use anymesh_core::{Tensor, ops::SequenceOrder};
/// # let device = anymesh_backend_cpu::device();
/// let order = SequenceOrder::Paired { ranks: 2 };
/// let x = Tensor::arange(0, 8, 1, anymesh_core::DType::I32, &device)?;
/// // Chunks 0 and 3 for the first rank, 1 and 2 for the second.
/// let paired = x.in_order(0, order)?;
/// assert_eq!(paired.to_vec::<i32>()?, [0, 1, 6, 7, 2, 3, 4, 5]);
/// assert_eq!((order.position(2, 8), order.place(6, 8)), (6, 2));
/// assert_eq!(paired.from_order(0, order)?.to_vec::<i32>()?, x.to_vec::<i32>()?);
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SequenceOrder {
    /// As it is.
    #[default]
    Straight,
    /// In twice as many chunks as there are ranks: those of rank `r` are `r` and `2 * ranks - 1 - r`.
    Paired {
        /// How many ranks the sequence is cut over.
        ranks: usize,
    },
}

/// Places of a sequence whose positions count up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) place: usize,
    pub(super) position: usize,
    pub(super) len: usize,
}

impl SequenceOrder {
    /// Pairs of chunks for so many ranks; one rank has the sequence as it is.
    pub fn paired(ranks: usize) -> Self {
        match ranks {
            0 | 1 => Self::Straight,
            _ => Self::Paired { ranks },
        }
    }

    /// That a sequence of so many positions divides into the chunks.
    pub fn check(self, positions: usize) -> Result<()> {
        let Self::Paired { ranks } = self else {
            return Ok(());
        };
        let chunks = ranks.saturating_mul(2);
        if chunks > 0 && positions.is_multiple_of(chunks) {
            return Ok(());
        }
        let near = positions.checked_div(chunks).unwrap_or(0);
        Err(Error::argument(
            "sequence order",
            "ranks",
            format!(
                "{positions} positions do not divide into {chunks} chunks, two for each of {ranks} ranks: {} or {} do, and any number in straight order",
                near * chunks,
                (near + 1).saturating_mul(chunks)
            ),
        ))
    }

    fn chunk(self, positions: usize) -> usize {
        match self {
            Self::Straight => positions,
            Self::Paired { ranks } => positions / (2 * ranks.max(1)),
        }
        .max(1)
    }

    /// The position of what stands at a place of a sequence that [divides](Self::check).
    pub fn position(self, place: usize, positions: usize) -> usize {
        let (chunk, Self::Paired { ranks }) = (self.chunk(positions), self) else {
            return place;
        };
        let (number, inside) = (place / chunk, place % chunk);
        let from = match number % 2 {
            0 => number / 2,
            _ => 2 * ranks - 1 - number / 2,
        };
        from * chunk + inside
    }

    /// The place at which a position stands: the other way of [`position`](Self::position).
    pub fn place(self, position: usize, positions: usize) -> usize {
        let (chunk, Self::Paired { ranks }) = (self.chunk(positions), self) else {
            return position;
        };
        let (from, inside) = (position / chunk, position % chunk);
        let number = match from < ranks {
            true => 2 * from,
            false => 2 * (2 * ranks - 1 - from) + 1,
        };
        number * chunk + inside
    }

    /// What stands at some places, in runs of positions that count up; places begin at zero.
    pub(super) fn runs(self, places: Range<usize>, positions: usize) -> SmallVec<[Run; 2]> {
        let mut runs: SmallVec<[Run; 2]> = SmallVec::new();
        let chunk = self.chunk(positions);
        let mut at = places.start;
        while at < places.end {
            let end = (at / chunk + 1).saturating_mul(chunk).min(places.end);
            let (position, len) = (self.position(at, positions), end - at);
            match runs.last_mut() {
                // The last chunk of the first half and the first of the second are neighbours.
                Some(last) if last.position + last.len == position => last.len += len,
                _ => runs.push(Run {
                    place: at - places.start,
                    position,
                    len,
                }),
            }
            at = end;
        }
        runs
    }
}

impl Tensor {
    /// A dimension whose positions count up, in another order.
    #[track_caller]
    pub fn in_order(&self, dim: i64, order: SequenceOrder) -> Result<Tensor> {
        self.reorder(dim, order, true)
    }

    /// A dimension that is in some order, with positions that count up again.
    #[track_caller]
    pub fn from_order(&self, dim: i64, order: SequenceOrder) -> Result<Tensor> {
        self.reorder(dim, order, false)
    }

    #[track_caller]
    fn reorder(&self, dim: i64, order: SequenceOrder, there: bool) -> Result<Tensor> {
        let SequenceOrder::Paired { ranks } = order else {
            return Ok(self.clone());
        };
        let axes = self.shape().axes("in_order", &[dim])?;
        let axis = axes[0];
        order.check(self.dims()[axis])?;
        let permute = move |x: &Tensor, there: bool| match there {
            true => into_pairs(x, axis, ranks),
            false => out_of_pairs(x, axis, ranks),
        };
        // The gradient goes the other way, and not through sums of padded pieces.
        Ok(custom(
            "in_order",
            &[self],
            |x| Ok(vec![permute(&x[0], there)?]),
            move |_, _, g| Ok(vec![Some(permute(&g[0], !there)?)]),
        )?
        .remove(0))
    }
}

/// The shape of `x` with a dimension taken apart.
fn apart(x: &Tensor, axis: usize, sizes: &[usize]) -> Vec<usize> {
    let dims = x.dims();
    [&dims[..axis], sizes, &dims[axis + 1..]].concat()
}

fn into_pairs(x: &Tensor, axis: usize, ranks: usize) -> Result<Tensor> {
    let (n, dim) = (x.dims()[axis], axis as i64);
    let chunks = x.reshape(apart(x, axis, &[2 * ranks, n / (2 * ranks)]))?;
    let front = chunks.narrow(dim, 0, ranks)?;
    let back = chunks.narrow(dim, ranks, ranks)?.flip(&[dim])?;
    Tensor::stack(&[&front, &back], dim + 1)?.reshape(x.shape())
}

fn out_of_pairs(x: &Tensor, axis: usize, ranks: usize) -> Result<Tensor> {
    let (n, dim) = (x.dims()[axis], axis as i64);
    let pairs = x.reshape(apart(x, axis, &[ranks, 2, n / (2 * ranks)]))?;
    let half = |at: usize| pairs.narrow(dim + 1, at, 1)?.squeeze(&[dim + 1]);
    let back = half(1)?.flip(&[dim])?;
    Tensor::concat(&[&half(0)?, &back], dim)?.reshape(x.shape())
}

/// What queries of a rank look at in a part of the keys, and how: one call of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Look {
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
    /// Whether the last query is the first that sees the last key, and so on.
    pub(super) causal: bool,
}

pub(super) type Looks = SmallVec<[Look; 2]>;

impl SequenceOrder {
    /// What the rank with part `own` of a sequence looks at in part `from` of it. Parts of pairs are
    /// as large as each other; what nobody sees is not looked at.
    pub(super) fn looks_at_part(
        self,
        causal: bool,
        (own, from): (usize, usize),
        (queries, keys): (usize, usize),
    ) -> Looks {
        use std::cmp::Ordering::{Equal, Greater, Less};
        let all = Look {
            queries: 0..queries,
            keys: 0..keys,
            causal: false,
        };
        if !causal {
            return smallvec![all];
        }
        match (own.cmp(&from), self) {
            (Equal, _) => smallvec![Look {
                causal: true,
                ..all
            }],
            (Greater, Self::Straight) => smallvec![all],
            (Less, Self::Straight) => smallvec![],
            // An earlier rank's front chunk is before both of mine, its back chunk behind both.
            (Greater, Self::Paired { .. }) => smallvec![Look {
                keys: 0..keys / 2,
                ..all
            }],
            // A later rank's chunks are both behind my front one and before my back one.
            (Less, Self::Paired { .. }) => smallvec![Look {
                queries: queries / 2..queries,
                ..all
            }],
        }
    }

    /// What a rank that has some places of a sequence looks at among all keys, which are straight.
    pub(super) fn looks_at_all(
        self,
        causal: bool,
        places: Range<usize>,
        positions: usize,
    ) -> Looks {
        if !causal {
            return smallvec![Look {
                queries: 0..places.len(),
                keys: 0..positions,
                causal,
            }];
        }
        let look = |run: Run| Look {
            queries: run.place..run.place + run.len,
            keys: 0..run.position + run.len,
            causal,
        };
        let mut looks: Looks = self.runs(places, positions).into_iter().map(look).collect();
        if looks.is_empty() {
            // There is a result also where there are no queries.
            looks.push(Look {
                queries: 0..0,
                keys: 0..0,
                causal,
            });
        }
        looks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::split;

    /// Which keys each query sees, by what a rank looks at.
    fn seen(looks: &Looks, own: &[usize], keys: &[usize], sees: &mut [Vec<usize>]) -> usize {
        let mut scores = 0;
        for look in looks {
            for (n, q) in look.queries.clone().enumerate() {
                let hidden = look.queries.len() - 1 - n;
                let end = match look.causal {
                    true => look.keys.end - hidden.min(look.keys.end),
                    false => look.keys.end,
                };
                let read = look.keys.start..end.max(look.keys.start);
                scores += read.len();
                sees[own[q]].extend(read.map(|k| keys[k]));
            }
        }
        scores
    }

    #[test]
    fn every_query_looks_once_at_every_key_up_to_its_own_position() {
        for (ranks, positions) in [(2, 8), (3, 12), (4, 16), (5, 40), (4, 8)] {
            for order in [SequenceOrder::Straight, SequenceOrder::paired(ranks)] {
                let part = |r: usize| -> Vec<usize> {
                    let places = split(positions, r, ranks);
                    places.map(|p| order.position(p, positions)).collect()
                };
                let straight: Vec<usize> = (0..positions).collect();
                let (mut ring, mut all) = (vec![vec![]; positions], vec![vec![]; positions]);
                let (mut in_ring, mut in_all) = (vec![0; ranks], vec![0; ranks]);
                for r in 0..ranks {
                    for c in 0..ranks {
                        let (q, k) = (part(r), part(c));
                        let looks = order.looks_at_part(true, (r, c), (q.len(), k.len()));
                        in_ring[r] += seen(&looks, &q, &k, &mut ring);
                    }
                    let looks = order.looks_at_all(true, split(positions, r, ranks), positions);
                    in_all[r] += seen(&looks, &part(r), &straight, &mut all);
                }
                for (position, mut sees) in ring.into_iter().enumerate() {
                    sees.sort();
                    assert_eq!(sees, (0..=position).collect::<Vec<_>>(), "{order:?}");
                    all[position].sort();
                    assert_eq!(all[position], sees);
                }
                if order != SequenceOrder::Straight {
                    assert!(in_ring.iter().all(|n| *n == in_ring[0]), "{in_ring:?}");
                    assert!(in_all.iter().all(|n| *n == in_all[0]), "{in_all:?}");
                }
            }
        }
    }

    #[test]
    fn uneven_parts_in_straight_order_see_what_they_should() {
        for (ranks, positions) in [(2, 7), (4, 10), (4, 3), (3, 1)] {
            let order = SequenceOrder::Straight;
            let mut ring = vec![vec![]; positions];
            for r in 0..ranks {
                for c in 0..ranks {
                    let (q, k) = (split(positions, r, ranks), split(positions, c, ranks));
                    let looks = order.looks_at_part(true, (r, c), (q.len(), k.len()));
                    let (q, k): (Vec<usize>, Vec<usize>) = (q.collect(), k.collect());
                    seen(&looks, &q, &k, &mut ring);
                }
            }
            for (position, mut sees) in ring.into_iter().enumerate() {
                sees.sort();
                assert_eq!(sees, (0..=position).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn places_and_positions_are_each_others_inverse() {
        for (ranks, positions) in [(1, 5), (2, 8), (3, 18), (8, 64)] {
            let order = SequenceOrder::paired(ranks);
            let mut seen = vec![false; positions];
            for place in 0..positions {
                let position = order.position(place, positions);
                assert_eq!(order.place(position, positions), place);
                assert!(!std::mem::replace(&mut seen[position], true));
            }
        }
        let error = SequenceOrder::Paired { ranks: 4 }.check(12).unwrap_err();
        assert!(error.to_string().contains("8 or 16"), "{error}");
        assert!(SequenceOrder::Paired { ranks: 0 }.check(12).is_err());
    }
}

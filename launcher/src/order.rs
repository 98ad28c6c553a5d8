//! Which launches of a graph have to wait for which: those that use memory which the other writes.
//!
//! Ranks that are simulated on one GPU do equal work in memory of their own. One by one, each of them
//! leaves a part of the GPU idle at its end.

use smallvec::SmallVec;
use std::{collections::BTreeMap, ops::Range};

/// Memory that a launch reads, or also writes.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    pub(crate) place: Range<u64>,
    pub(crate) written: bool,
}

/// A piece of memory, and the launches that used it last.
#[derive(Clone, Debug)]
struct Piece {
    end: u64,
    writer: Option<u32>,
    /// Since it was written.
    readers: SmallVec<[u32; 4]>,
}

/// The launches of a list so far.
#[derive(Debug, Default)]
pub(crate) struct Order {
    /// By where they begin; they do not overlap.
    pieces: BTreeMap<u64, Piece>,
    /// For each launch those that are done when it begins, one bit for each.
    done: Vec<Vec<u64>>,
    /// The last one that ran beside no other.
    alone: Option<u32>,
}

impl Order {
    /// The next launch: those that it has to wait for, but for those that these wait for. Where it is
    /// not to run `beside` others, it waits for all before it, and all later ones for it.
    pub(crate) fn next(&mut self, accesses: &[Access], beside: bool) -> SmallVec<[u32; 4]> {
        let own = self.done.len() as u32;
        let mut needed: SmallVec<[u32; 16]> = SmallVec::new();
        if beside {
            needed.extend(self.alone);
        } else {
            needed.extend(self.alone.unwrap_or(0)..own);
            self.alone = Some(own);
        }
        // Reads first: what a launch writes over is read before.
        for written in [false, true] {
            for access in accesses.iter().filter(|access| access.written == written) {
                self.use_memory(own, access, &mut needed);
            }
        }
        needed.retain(|earlier| *earlier != own);
        needed.sort_unstable_by(|a, b| b.cmp(a));
        needed.dedup();
        let mut done = vec![0u64; own as usize / 64 + 1];
        let mut waits = SmallVec::new();
        for earlier in needed {
            let (word, bit) = (earlier as usize / 64, earlier % 64);
            if done[word] >> bit & 1 == 0 {
                let its = &self.done[earlier as usize];
                done.iter_mut().zip(its).for_each(|(all, its)| *all |= its);
                done[word] |= 1 << bit;
                waits.push(earlier);
            }
        }
        self.done.push(done);
        waits
    }

    fn use_memory(&mut self, own: u32, access: &Access, needed: &mut SmallVec<[u32; 16]>) {
        let Range { start, end } = access.place;
        if start >= end {
            return;
        }
        self.cut(start);
        self.cut(end);
        let mut at = start;
        let mut gaps: SmallVec<[Range<u64>; 2]> = SmallVec::new();
        for (begin, piece) in self.pieces.range_mut(start..end) {
            if at < *begin {
                gaps.push(at..*begin);
            }
            at = piece.end;
            needed.extend(piece.writer);
            if access.written {
                needed.extend(piece.readers.drain(..));
                piece.writer = Some(own);
            } else if piece.readers.last() != Some(&own) {
                piece.readers.push(own);
            }
        }
        if at < end {
            gaps.push(at..end);
        }
        for gap in gaps {
            let new = Piece {
                end: gap.end,
                writer: access.written.then_some(own),
                readers: (!access.written).then_some(own).into_iter().collect(),
            };
            self.pieces.insert(gap.start, new);
        }
    }

    /// Has a piece begin here, where one goes on.
    fn cut(&mut self, at: u64) {
        let before = self.pieces.range_mut(..at).next_back();
        if let Some((_, piece)) = before.filter(|(_, piece)| piece.end > at) {
            let rest = piece.clone();
            piece.end = at;
            self.pieces.insert(at, rest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(place: Range<u64>) -> Access {
        let written = false;
        Access { place, written }
    }

    fn write(place: Range<u64>) -> Access {
        let written = true;
        Access { place, written }
    }

    fn waits(launches: &[&[Access]]) -> Vec<Vec<u32>> {
        let mut order = Order::default();
        (launches.iter())
            .map(|accesses| order.next(accesses, true).to_vec())
            .collect()
    }

    #[test]
    fn ranks_wait_for_nobody_but_themselves() {
        let launch = |from: u64, to: u64| [read(from..from + 8), write(to..to + 8)];
        let all = [launch(0, 16), launch(8, 24), launch(16, 32), launch(24, 40)];
        let all: Vec<&[Access]> = all.iter().map(|launch| &launch[..]).collect();
        assert_eq!(waits(&all), [vec![], vec![], vec![0], vec![1]]);
    }

    #[test]
    fn what_runs_alone_is_between_all_before_and_all_after() {
        let mut order = Order::default();
        let mut next = |at: u64, beside| order.next(&[write(at..at + 8)], beside).to_vec();
        let kinds = [true, true, false, true, true, false, false];
        let waits: Vec<_> = (0..)
            .zip(kinds)
            .map(|(i, beside)| next(8 * i, beside))
            .collect();
        let none: Vec<u32> = vec![];
        assert_eq!(
            waits,
            [
                none.clone(),
                none,
                vec![1, 0],
                vec![2],
                vec![2],
                vec![4, 3],
                vec![5]
            ]
        );
    }

    #[test]
    fn memory_is_written_again_when_all_have_read_it() {
        let all: [&[Access]; 4] = [
            &[write(0..8)],
            &[read(0..8), write(8..16)],
            &[read(4..8), write(16..24)],
            &[write(0..8)],
        ];
        assert_eq!(waits(&all), [vec![], vec![0], vec![0], vec![2, 1]]);
    }

    #[test]
    fn a_launch_waits_only_for_the_last_of_those_that_wait_for_each_other() {
        let all: [&[Access]; 4] = [
            &[write(0..8)],
            &[read(0..8), write(8..16)],
            &[read(0..16), write(16..24)],
            &[write(4..20)],
        ];
        assert_eq!(waits(&all), [vec![], vec![0], vec![1], vec![2]]);
    }

    #[test]
    fn what_is_written_over_is_read_before() {
        let all: [&[Access]; 2] = [&[write(0..8)], &[write(0..8), read(0..8)]];
        assert_eq!(waits(&all), [vec![], vec![0]]);
    }

    /// Every two launches of which one writes what the other uses, of any lists, run in order, and
    /// no others are kept waiting.
    #[test]
    fn launches_that_share_memory_run_in_order_and_others_need_not() {
        let mut seed = 7u64;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1);
            (seed >> 33) % below
        };
        for _ in 0..300 {
            let lists: Vec<Vec<Access>> = (0..2 + random(90))
                .map(|_| {
                    let access = |_| {
                        let start = random(64);
                        let place = start..start + random(12);
                        let written = random(3) == 0;
                        Access { place, written }
                    };
                    (0..3).map(access).collect()
                })
                .collect();
            let lists: Vec<&[Access]> = lists.iter().map(|list| &list[..]).collect();
            let found = waits(&lists);
            let meet = |a: &Access, b: &Access| {
                let both = a.place.start.max(b.place.start)..a.place.end.min(b.place.end);
                !both.is_empty() && (a.written || b.written)
            };
            // What is done when a launch begins: by the rule, and by what was found.
            let mut ruled: Vec<Vec<bool>> = vec![];
            let mut done: Vec<Vec<bool>> = vec![];
            for (i, list) in lists.iter().enumerate() {
                let mut of_rule = vec![false; lists.len()];
                let mut of_found = of_rule.clone();
                let needs = |j: &usize| (lists[*j].iter()).any(|a| list.iter().any(|b| meet(a, b)));
                for j in (0..i).filter(needs) {
                    of_rule[j] = true;
                    (of_rule.iter_mut().zip(&ruled[j])).for_each(|(all, its)| *all |= its);
                }
                for j in &found[i] {
                    assert!(!of_found[*j as usize], "{j} is waited for by way of others");
                    of_found[*j as usize] = true;
                    let its = &done[*j as usize];
                    (of_found.iter_mut().zip(its)).for_each(|(all, its)| *all |= its);
                }
                assert_eq!(of_rule, of_found, "launch {i} of {lists:?}");
                ruled.push(of_rule);
                done.push(of_found);
            }
        }
    }
}

//! Schedules with several stages on each rank, `rank`, `rank + ranks`, `rank + 2 ranks`, ...

use super::{Name, made};
use crate::{Action, Kind, Result, Schedule};

/// All forward passes, then all backward passes in the same order of micro-batches, so that the
/// activations of a micro-batch go as soon as its backward is done.
///
/// Its [`with_weights_last`](Schedule::with_weights_last) is Paddle's VPP with split backward passes.
pub fn f_then_b(ranks: usize, chunks: usize, micros: usize) -> Result<Schedule> {
    made(Name::FThenB, [ranks, chunks, micros], |rank| {
        let stages = (0..chunks).map(|c| c * ranks + rank);
        let all = |stage: usize, kind| (0..micros).map(move |m| Action::new(kind, stage, m));
        let forward = stages.clone().flat_map(|s| all(s, Kind::F));
        forward
            .chain(stages.rev().flat_map(|s| all(s, Kind::B)))
            .collect()
    })
}

/// Breadth first: all forward passes stage by stage, then all backward passes in the opposite order.
pub fn looped_bfs(ranks: usize, chunks: usize, micros: usize) -> Result<Schedule> {
    made(Name::LoopedBfs, [ranks, chunks, micros], |rank| {
        let stages = (0..chunks).map(|c| c * ranks + rank);
        let forward = stages
            .clone()
            .flat_map(|s| (0..micros).map(move |m| Action::f(s, m)));
        let backward = stages
            .rev()
            .flat_map(|s| (0..micros).rev().map(move |m| Action::b(s, m)));
        forward.chain(backward).collect()
    })
}

/// How many micro-batches each round has: a round goes through all stages of a rank before the next
/// begins. As even as they can be, the larger ones first, because a backward pass of a round may
/// only come after its forward passes, which the round before made room for.
fn rounds(ranks: usize, micros: usize) -> Vec<usize> {
    let count = (micros / ranks).max(1);
    (0..count)
        .map(|i| micros / count + usize::from(i < micros % count))
        .collect()
}

/// The (chunk, micro-batch) of each pass of a rank in order, for forward passes.
fn passes(ranks: usize, chunks: usize, micros: usize) -> Vec<(usize, usize)> {
    let mut passes = Vec::with_capacity(chunks * micros);
    let mut first = 0;
    for size in rounds(ranks, micros) {
        for chunk in 0..chunks {
            passes.extend((first..first + size).map(|m| (chunk, m)));
        }
        first += size;
    }
    passes
}

/// 1F1B with several stages on each rank (VPP): smaller bubbles, more transfers. Takes any number of
/// micro-batches: the ranks go through them in rounds of at least `ranks`, which need not be even.
pub fn interleaved(ranks: usize, chunks: usize, micros: usize) -> Result<Schedule> {
    made(Name::Interleaved, [ranks, chunks, micros], |rank| {
        let forward = passes(ranks, chunks, micros);
        let ahead = (chunks - 1) * rounds(ranks, micros)[0] + 2 * (ranks - 1 - rank);
        let ahead = ahead.min(forward.len());
        let f = |(chunk, micro): (usize, usize)| Action::f(chunk * ranks + rank, micro);
        let b =
            |(chunk, micro): (usize, usize)| Action::b((chunks - 1 - chunk) * ranks + rank, micro);
        let mut list: Vec<Action> = forward[..ahead].iter().map(|p| f(*p)).collect();
        for (i, back) in forward.iter().enumerate() {
            list.extend(forward.get(ahead + i).map(|p| f(*p)));
            list.push(b(*back));
        }
        list
    })
}

/// [`interleaved`] with backward passes in two halves: half the forwards ahead, and gradients of
/// weights put off by as many passes as the rank's number.
pub fn interleaved_zero_bubble(ranks: usize, chunks: usize, micros: usize) -> Result<Schedule> {
    let shape = [ranks, chunks, micros];
    made(Name::InterleavedZeroBubble, shape, |rank| {
        let forward = passes(ranks, chunks, micros);
        let ahead = (chunks - 1) * rounds(ranks, micros)[0] + (ranks - 1 - rank);
        let ahead = ahead.min(forward.len());
        let f = |(chunk, micro): (usize, usize)| Action::f(chunk * ranks + rank, micro);
        let back = |kind, (chunk, micro): (usize, usize)| {
            Action::new(kind, (chunks - 1 - chunk) * ranks + rank, micro)
        };
        let mut list: Vec<Action> = forward[..ahead].iter().map(|p| f(*p)).collect();
        for (i, pass) in forward.iter().enumerate() {
            list.extend(forward.get(ahead + i).map(|p| f(*p)));
            list.push(back(Kind::I, *pass));
            if i >= rank {
                list.push(back(Kind::W, forward[i - rank]));
            }
        }
        let left = forward.len().saturating_sub(rank);
        list.extend(forward[left..].iter().map(|p| back(Kind::W, *p)));
        list
    })
}

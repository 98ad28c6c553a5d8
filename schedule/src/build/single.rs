//! Schedules with one stage on each rank.

use super::{Name, made};
use crate::{Action, Error, Result, Schedule};

/// `ahead(rank)` forwards, then backward and forward in turn, then the backwards that are left.
fn alternating(
    name: Name,
    ranks: usize,
    micros: usize,
    ahead: impl Fn(usize) -> usize,
) -> Result<Schedule> {
    made(name, [ranks, 1, micros], |rank| {
        let ahead = ahead(rank).min(micros);
        let mut list: Vec<Action> = (0..ahead).map(|m| Action::f(rank, m)).collect();
        for micro in 0..micros {
            list.push(Action::b(rank, micro));
            if ahead + micro < micros {
                list.push(Action::f(rank, ahead + micro));
            }
        }
        list
    })
}

/// One forward, one backward. With fewer micro-batches than ranks the pipeline never fills, and the
/// order is still right.
pub fn one_f_one_b(ranks: usize, micros: usize) -> Result<Schedule> {
    alternating(Name::OneFOneB, ranks, micros, |rank| ranks - rank)
}

/// 1F1B with `2 (ranks - rank) - 1` forwards ahead instead of `ranks - rank`: more activations, and
/// time for transfers.
pub fn eager_one_f_one_b(ranks: usize, micros: usize) -> Result<Schedule> {
    alternating(Name::EagerOneFOneB, ranks, micros, |rank| {
        2 * (ranks - rank) - 1
    })
}

/// Zero bubble at 1F1B's memory, the list of Paddle's ZBH1: the later ranks put off as many gradients
/// of weights as they would otherwise idle at the end. Needs as many micro-batches as ranks.
pub fn zero_bubble_h1(ranks: usize, micros: usize) -> Result<Schedule> {
    if micros < ranks && ranks > 0 && micros > 0 {
        return Err(Error::Refused {
            name: "zbh1",
            what: format!("{micros} micro-batches on {ranks} ranks"),
            instead: format!(
                "it needs at least {ranks} micro-batches; searched and 1f1b take fewer"
            ),
        });
    }
    made(Name::ZeroBubbleH1, [ranks, 1, micros], |rank| {
        let ahead = ranks - rank;
        let mut list: Vec<Action> = (0..ahead).map(|m| Action::f(rank, m)).collect();
        for micro in 0..micros {
            let halves = rank > 0 && (micro < rank || micro + 1 == micros);
            list.push(match halves {
                true => Action::i(rank, micro),
                false => Action::b(rank, micro),
            });
            if ahead + micro < micros {
                list.push(Action::f(rank, ahead + micro));
            }
        }
        if rank > 0 {
            list.push(Action::w(rank, micros - 1));
        }
        list.extend((0..rank).map(|m| Action::w(rank, m)));
        list
    })
}

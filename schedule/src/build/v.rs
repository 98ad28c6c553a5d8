//! Schedules with two stages on each rank, placed as a V: rank 0 has the first stage and the last.

use super::{Name, made};
use crate::{Action, Error, Kind, Result, Schedule};
use std::collections::VecDeque;

/// A rank's list while it is made: the two stages of the rank, and which micro-batch is next for
/// each kind of pass.
struct List {
    stages: [usize; 2],
    next: [[usize; 3]; 2],
    /// Gradients of weights that are put off, in order.
    put_off: VecDeque<Action>,
    list: Vec<Action>,
}

impl List {
    fn new(ranks: usize, rank: usize) -> List {
        List {
            stages: [rank, 2 * ranks - 1 - rank],
            next: [[0; 3]; 2],
            put_off: VecDeque::new(),
            list: vec![],
        }
    }

    /// The next pass of a kind in the rank's first (0) or second (1) stage.
    fn pass(&mut self, kind: Kind, chunk: usize) {
        let column = match kind {
            Kind::F => 0,
            Kind::W => 2,
            _ => 1,
        };
        let micro = self.next[chunk][column];
        self.next[chunk][column] += 1;
        let action = Action::new(kind, self.stages[chunk], micro);
        if kind == Kind::I {
            self.put_off.push_back(Action {
                kind: Kind::W,
                ..action
            });
        }
        self.list.push(action);
    }

    /// A forward pass in one stage together with a backward pass in the other.
    fn pair(&mut self, forward: usize) {
        self.pass(Kind::F, forward);
        if let Some(last) = self.list.last_mut() {
            last.joined = true;
        }
        self.pass(Kind::B, 1 - forward);
    }

    /// The gradient of weights that is put off longest.
    fn weights(&mut self) {
        self.list.extend(self.put_off.pop_front());
    }
}

/// Zero bubble with the V placement: at 1F1B's memory no bubble but the filling of the pipe, if the
/// three passes take equally long.
pub fn zero_bubble_v(ranks: usize, micros: usize) -> Result<Schedule> {
    made(Name::ZeroBubbleV, [ranks, 2, micros], |rank| {
        // The list is that of a pipe that fills; what is not there is left out at the end.
        let full = micros.max(2 * ranks - 1);
        let mut l = List::new(ranks, rank);
        for _ in 0..2 * (ranks - rank) - 1 {
            l.pass(Kind::F, 0);
        }
        for _ in 0..rank {
            l.pass(Kind::F, 1);
            l.pass(Kind::F, 0);
        }
        for _ in 0..ranks - rank {
            l.pass(Kind::F, 1);
            l.pass(Kind::I, 1);
            l.pass(Kind::W, 1);
        }
        while l.next[1][0] < l.next[0][0] || l.next[0][0] < full {
            if l.next[0][0] < full {
                l.pass(Kind::F, 0);
            }
            l.pass(Kind::I, 0);
            l.pass(Kind::W, 0);
            l.pass(Kind::F, 1);
            l.pass(Kind::I, 1);
            l.pass(Kind::W, 1);
        }
        for _ in 0..rank {
            l.pass(Kind::I, 0);
            l.pass(Kind::I, 1);
        }
        for _ in 0..ranks - rank {
            l.pass(Kind::I, 0);
            l.pass(Kind::W, 0);
        }
        for chunk in [1, 0] {
            while l.next[chunk][2] < l.next[chunk][1] {
                l.pass(Kind::W, chunk);
            }
        }
        l.list.retain(|a| a.micro < micros);
        l.list
    })
}

/// DualPipe with the V placement: in the steady state each forward pass runs together with a
/// backward pass of the rank's other stage. Needs as many micro-batches as stages.
pub fn dual_pipe_v(ranks: usize, micros: usize) -> Result<Schedule> {
    if micros < 2 * ranks && micros > 0 {
        return Err(Error::Refused {
            name: "dualpipev",
            what: format!("{micros} micro-batches and {} stages", 2 * ranks),
            instead: format!(
                "it needs at least {} micro-batches; zbv and searched take fewer",
                2 * ranks
            ),
        });
    }
    made(Name::DualPipeV, [ranks, 2, micros], |rank| {
        let after = ranks - 1 - rank;
        let mut l = List::new(ranks, rank);
        for _ in 0..2 * after {
            l.pass(Kind::F, 0);
        }
        for _ in 0..=rank {
            l.pass(Kind::F, 0);
            l.pass(Kind::F, 1);
        }
        for _ in 0..after {
            l.pass(Kind::I, 1);
            l.weights();
            l.pass(Kind::F, 1);
        }
        for i in 0..micros + rank + 1 - 2 * ranks {
            if i == 0 && after == 0 {
                // On the last rank these two are no pair: the backward pass waits for the forward
                // pass before it.
                l.pass(Kind::F, 0);
                l.pass(Kind::B, 1);
            } else {
                l.pair(0);
            }
            l.pair(1);
        }
        for _ in 0..after {
            l.pass(Kind::B, 1);
            l.pair(1);
        }
        // From the middle on backward passes are halves, whose gradients of weights fill the end.
        let mut kind = Kind::B;
        for i in 0..=rank {
            let middle = i == rank.div_ceil(2);
            if middle && rank % 2 == 1 {
                kind = Kind::I;
            }
            l.pass(kind, 1);
            if middle && rank % 2 == 0 {
                kind = Kind::I;
            }
            l.pass(kind, 0);
        }
        for _ in 0..after {
            l.weights();
            l.pass(kind, 0);
        }
        for _ in 0..=rank {
            l.weights();
        }
        l.list
    })
}

//! From stages that ran to the prices that an estimate is made of.

use super::{Setup, stage::Ran};
use crate::pipeline::Split;
use anymesh_schedule::Schedule;
use anymesh_simulate::{Bytes, Passes, Priced, Rank, Spent, Stage};

/// A stage that ran, and those that it stands for.
pub(crate) struct Class {
    pub(crate) ran: Ran,
    /// Bytes that its layers keep.
    pub(crate) kept: f64,
    pub(crate) stages: Vec<usize>,
}

/// Data parallel communication of a pass, as far as the pass does not hide it.
fn hidden(mut pass: Spent, overlap: f64) -> Spent {
    let rest = pass.total() - pass.dp;
    pass.dp = (pass.dp - overlap * rest).max(0.0);
    pass
}

pub(crate) fn price(
    setup: &Setup,
    split: &Split,
    schedule: &Schedule,
    classes: &[Class],
) -> Priced {
    let (machine, micros) = (&setup.machine, setup.micros as f64);
    let overlap = machine.coefficients.data_overlap;
    let at = setup.axes.iter().position(|a| a.0 == "pp");
    let stride = at.map_or(1, |at| setup.axes[at + 1..].iter().map(|a| a.1).product());
    let ranks = at.map_or(1, |at| setup.axes[at].1);
    let others: usize = setup.axes.iter().map(|a| a.1).product::<usize>() / ranks;
    let owners = split.owners();
    let mut priced = Priced {
        stages: vec![Stage::default(); split.stages()],
        ranks: vec![Rank::default(); ranks],
        ..Priced::default()
    };
    let mut border = 0f64;
    // For each rank: gradients added up, and weights gathered, in seconds that could be hidden.
    let mut data = vec![[0.0; 2]; ranks];
    for class in classes {
        let ran = &class.ran;
        border = border.max(ran.border);
        let Passes { f, i, w } = ran.passes();
        let bytes = ran
            .passes
            .iter()
            .fold(Bytes::default(), |all, w| all + w.bytes);
        for stage in &class.stages {
            priced.stages[*stage] = Stage {
                rank: owners[*stage],
                layers: split.layers(*stage).len(),
                passes: Passes {
                    f: hidden(f, overlap),
                    i: hidden(i, overlap),
                    w: hidden(w, overlap),
                },
                halves: ran
                    .halves
                    .map(|h| h.map(|pass| hidden(pass, overlap).total())),
                kept: class.kept,
                ends: (ran.kept - class.kept).max(0.0),
                forward: ran.needs[0].max(0.0),
                backward: ran.needs[1].max(0.0),
                state: ran.state,
                bytes,
                fullest: Some(ran.fullest.clone()),
            };
            let operations: f64 = ran.passes.iter().map(|w| w.operations).sum();
            priced.operations += operations * micros * others as f64;
            let rank = &mut priced.ranks[owners[*stage]];
            rank.stages.push(*stage);
            let state = rank.state.iter_mut().zip(ran.state);
            state.for_each(|(all, one)| *all += one);
            let [borrow, reduce, update, back] = &ran.once;
            let once = borrow.bytes + reduce.bytes + update.bytes;
            rank.bytes = rank.bytes + bytes * micros + once;
            rank.working += ran.needs[2].max(0.0);
            rank.optimizer += reduce.spent.products + reduce.spent.traffic;
            rank.optimizer += update.spent.products + update.spent.traffic;
            let beside = |s: &Spent| s.tp + s.cp + s.ep;
            rank.exposed += beside(&reduce.spent) + beside(&update.spent);
            rank.exposed += machine.transfer(borrow.bytes.pp, stride, ranks);
            let data = &mut data[owners[*stage]];
            data[0] += reduce.spent.dp;
            data[1] += update.spent.dp;
            // What was lent goes back to the stage that has it.
            let owner = &mut priced.ranks[owners[0]];
            owner.bytes = owner.bytes + back.bytes;
            owner.exposed += machine.transfer(back.bytes.pp, stride, ranks);
        }
    }
    for (rank, [after, before]) in priced.ranks.iter_mut().zip(data) {
        rank.stages.sort_unstable();
        let own = rank.stages.iter().map(|s| &priced.stages[*s].passes);
        let (forward, backward) =
            own.fold((0.0, 0.0), |(f, b), p| (f + p.f.total(), b + p.backward()));
        rank.exposed += (after - overlap * backward).max(0.0);
        rank.exposed += (before - overlap * forward).max(0.0);
    }
    priced.transfer = machine.transfer(border, stride, ranks);
    if schedule.name == "dualpipev" {
        let sum = |of: fn(&Stage) -> f64| priced.stages.iter().map(of).sum::<f64>();
        priced.overlap = sum(|s| s.passes.f.ep) / sum(|s| s.passes.f.total());
    }
    priced
}

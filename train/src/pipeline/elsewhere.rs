//! Stages of other processes: only types come of them, which are worked out once for micro-batches of
//! one kind.

use super::{
    run::{Lent, Passed},
    split::AXIS,
};
use crate::{Result, optim::Accumulator};
use anymesh_core::{Mesh, Tensor};
use std::collections::HashMap;

/// A stage, and what the types of its passes depend on.
pub(super) type Kind = (usize, String);

/// What the passes of a stage give for one kind of micro-batches.
#[derive(Default)]
struct Passes {
    gave: Vec<Passed>,
    loss: Option<Tensor>,
    back: Option<Vec<Option<Tensor>>>,
    sums: Option<(Accumulator, Vec<Option<Tensor>>)>,
}

/// What is known of stages of other processes.
#[derive(Default)]
pub(super) struct Elsewhere {
    known: HashMap<Kind, Passes>,
    /// Passes that are worked out now, by stage and micro-batch.
    at_work: HashMap<(usize, usize), Kind>,
    /// Passes that are known.
    skipped: HashMap<(usize, usize), Kind>,
}

impl Elsewhere {
    /// What a forward pass gives, where all of its kind is known: then its backward pass is too.
    pub(super) fn forward(
        &mut self,
        at: (usize, usize),
        kind: &Kind,
        backward: bool,
    ) -> Option<(Vec<Passed>, Option<Tensor>)> {
        let passes = self.known.get(kind)?;
        let complete = passes.back.is_some() && passes.sums.is_some();
        if backward && !complete {
            return None;
        }
        self.skipped.insert(at, kind.clone());
        Some((passes.gave.clone(), passes.loss.clone()))
    }

    /// A forward pass was worked out.
    pub(super) fn found(
        &mut self,
        at: (usize, usize),
        kind: Kind,
        gave: Vec<Passed>,
        loss: Option<Tensor>,
    ) {
        let passes = self.known.entry(kind.clone()).or_default();
        (passes.gave, passes.loss) = (gave, loss);
        self.at_work.insert(at, kind);
    }

    /// What goes back to the stage before, where the forward pass was known.
    pub(super) fn back(&self, at: (usize, usize)) -> Option<Vec<Option<Tensor>>> {
        self.known.get(self.skipped.get(&at)?)?.back.clone()
    }

    /// What goes back was worked out.
    pub(super) fn found_back(&mut self, at: (usize, usize), back: &[Option<Tensor>]) {
        let known = self
            .at_work
            .get(&at)
            .and_then(|kind| self.known.get_mut(kind));
        if let Some(passes) = known {
            passes.back = Some(back.to_vec());
        }
    }

    /// Whether the passes of a micro-batch are those of a stage of other processes.
    pub(super) fn has(&self, at: (usize, usize)) -> bool {
        self.at_work.contains_key(&at) || self.skipped.contains_key(&at)
    }

    /// The gradients of parameters were worked out, or are known; they are added.
    pub(super) fn add(
        &mut self,
        at: (usize, usize),
        found: Option<(Accumulator, Vec<Option<Tensor>>)>,
        sums: &mut Accumulator,
        lent: &mut Lent,
    ) -> Result<()> {
        let kind = self.at_work.remove(&at).or(self.skipped.remove(&at));
        let Some(passes) = kind.and_then(|kind| self.known.get_mut(&kind)) else {
            return Ok(());
        };
        if found.is_some() {
            passes.sums = found;
        }
        if let Some((gradients, of_lent)) = &passes.sums {
            sums.add_types(gradients)?;
            lent.add_types(of_lent)?;
        }
        Ok(())
    }
}

/// Adds to a sum of which there are no values here: a sum of two of one type has that type.
pub(crate) fn add_type(sum: Option<Tensor>, more: &Tensor) -> Result<Tensor> {
    Ok(match sum {
        None => more.clone(),
        Some(sum) if sum.sharding() == more.sharding() && sum.dtype() == more.dtype() => sum,
        Some(sum) => anymesh_core::grad::no_grad(|| sum.add(more))?,
    })
}

/// The [kind](super::Staged::kind_of) of a micro-batch of these tensors; none where a stage would have
/// to fetch them.
pub(crate) fn kind_of<'a>(
    mesh: &Mesh,
    tensors: impl Iterator<Item = &'a Tensor>,
) -> Option<String> {
    let stages = mesh.axis(AXIS).ok();
    let mut text = String::new();
    for x in tensors {
        if x.mesh() != mesh || x.sharding().cuts().any(|(_, axis)| Some(axis) == stages) {
            return None;
        }
        text += &format!("{} ", x.type_string());
    }
    Some(text)
}

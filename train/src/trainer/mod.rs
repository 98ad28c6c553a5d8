//! The trainer: steps, evaluation, checkpoints, and what happens when something goes wrong.
//!
//! A step is a function of the parameters, the optimizer's state and a position in the data. So a
//! run that goes on from a checkpoint gives the same bits as one that never stopped, a step that is
//! skipped leaves everything as it was, and a step that gives other bits when it is run again names
//! a device that cannot be trusted.

mod agree;
mod contrastive;
mod guard;
mod language;
mod run;
mod save;
mod settings;
mod step;

pub use contrastive::{ContrastiveModel, Pairs};
pub use guard::Suspect;
pub use language::{FromLoader, LanguageModel};
pub use run::{Event, Finished, Trainer};
pub use settings::{Evaluate, Guard, Save, Settings};
pub use step::StepReport;

pub(crate) use agree::wait_for_all;

use crate::{Module, Pass, Result, optim::Accumulator};
use anymesh_core::{Mesh, Tensor};

/// What the micro-batches of a step gave.
#[derive(Clone, Debug, Default)]
pub struct Computed {
    /// Their gradients, added up as they lie: partial sums stay partial, and nothing was sent for
    /// them.
    pub gradients: Accumulator,
    /// The sum of the losses of each.
    pub losses: Vec<Tensor>,
}

/// What is trained: a model and what its loss is.
pub trait Task {
    /// What a micro-batch is.
    type Batch;

    /// The model.
    fn model(&self) -> &dyn Module;

    /// The model, to change it.
    fn model_mut(&mut self) -> &mut dyn Module;

    /// Where it lies.
    fn mesh(&self) -> &Mesh;

    /// What the losses of a micro-batch are summed over: tokens with a label, pairs, samples. Those
    /// of all ranks together.
    fn count(&self, batch: &Self::Batch) -> Result<f64>;

    /// The sum of the losses of a micro-batch; the trainer divides by the count of the whole global
    /// batch, which no micro-batch knows.
    fn loss(&mut self, batch: &Self::Batch, pass: &Pass) -> Result<Tensor>;

    /// The gradients of `factor` times the sum of the losses of all micro-batches, and those losses.
    /// One micro-batch after the other, where this is not said otherwise.
    fn gradients(
        &mut self,
        batches: &[Self::Batch],
        factor: f64,
        pass: &dyn Fn(usize) -> Pass,
    ) -> Result<Computed> {
        one_after_the_other(self, batches, factor, pass)
    }

    /// What is to be done when a step has changed the parameters, or was skipped: state that no
    /// gradient changes follows what the step's batches did. Gives numbers for the log, by name. All
    /// processes of the mesh call this alike.
    fn finish_step(&mut self, _skipped: bool) -> Result<Vec<(&'static str, f64)>> {
        Ok(vec![])
    }

    /// Operations for a unit of [`count`](Self::count), forward and backward, where they are known.
    fn operations(&self) -> Option<f64> {
        None
    }
}

/// The gradients of micro-batches that are computed one after the other.
fn one_after_the_other<T: Task + ?Sized>(
    task: &mut T,
    batches: &[T::Batch],
    factor: f64,
    pass: &dyn Fn(usize) -> Pass,
) -> Result<Computed> {
    let mut computed = Computed::default();
    for (i, batch) in batches.iter().enumerate() {
        let sum = task.loss(batch, &pass(i))?;
        computed
            .gradients
            .backward(task.model(), &sum.mul(factor)?)?;
        computed.losses.push(sum.detach());
    }
    Ok(computed)
}

/// Where batches come from: a function of the position.
pub trait Feed<B> {
    /// The micro-batches of the global batch that begins at sample `consumed`, and how many samples
    /// it has. None where the data has ended.
    fn global_batch(&mut self, consumed: u64) -> Result<Option<(Vec<B>, u64)>>;
}

//! Pipelines: the layers of a model in stages, each on its own ranks, with several micro-batches
//! under way at once.
//!
//! What is done when is a [`Schedule`](anymesh_schedule::Schedule), which is data and is proven
//! before it runs. A model that can be run stage by stage is [`Staged`]; [`Pipeline::run`] goes
//! through the schedule with it and gives the gradients of all micro-batches, added up.
//!
//! Values and gradients are those of the model without a pipeline: a stage cuts the tape at its
//! inputs, and the gradients that come back go on from there.

mod cached;
mod choice;
mod elsewhere;
mod measure;
mod place;
mod run;
mod split;

pub use cached::Cached;
pub use choice::ScheduleChoice;
pub(crate) use elsewhere::{add_type, kind_of};
pub use measure::measure;
pub(crate) use place::{on_mesh, start_on_mesh};
pub(crate) use run::Lent;
pub use run::Pipeline;
pub use split::{LayerCosts, Split, Stages, balanced};

use crate::{Module, Pass, Result};
use anymesh_core::{Mesh, Tensor};

/// A model that runs stage by stage.
pub trait Staged {
    /// What a micro-batch is.
    type Batch;

    /// The model, all stages of it.
    fn model(&self) -> &dyn Module;

    /// How many stages it has.
    fn stages(&self) -> usize;

    /// Where a stage lies.
    fn mesh_of(&self, stage: usize) -> &Mesh;

    /// What a stage makes of what the stage before it gave, which lies on this stage's mesh. The
    /// first stage is given nothing, and the last gives the sum of the losses of the micro-batch, or
    /// what a loss over [all of them](Pipeline::run_cached) reads: the vectors of an encoder.
    fn forward(
        &self,
        stage: usize,
        given: &Given<'_>,
        batch: &Self::Batch,
        pass: &Pass,
    ) -> Result<Vec<Tensor>>;

    /// What the shapes and shardings of everything that stages make of a micro-batch depend on, as a
    /// text: a process works out what stages of others make of it once for all micro-batches of one
    /// kind, and a step of many costs it no more than one of few. Ledgers have it once, too. Only for
    /// batches of which a stage reads nothing that its own ranks do not have. Without it each is
    /// worked out.
    fn kind_of(&self, _batch: &Self::Batch) -> Option<String> {
        None
    }

    /// The parameters of other stages that a stage reads: an embedding that is the head as well.
    fn borrows(&self, _stage: usize) -> Result<Vec<Borrowed>> {
        Ok(vec![])
    }
}

/// What a stage works with beside the micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct Given<'a> {
    /// What the stage before gave.
    pub inputs: &'a [Tensor],
    /// What it [borrows](Staged::borrows), in that order.
    pub borrowed: &'a [Tensor],
}

/// A parameter of another stage.
#[derive(Clone, Debug)]
pub struct Borrowed {
    /// Its name in the model.
    pub name: String,
    /// Its value as the owner computes with it. A copy goes to the borrower once a step, and the
    /// gradient of the copy comes back once.
    pub value: Tensor,
}

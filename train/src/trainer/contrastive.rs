//! Contrastive training as a task.

use super::{Computed, Task};
use crate::{
    Encoder, Error, Module, Pass, Result, Sentences,
    objective::{Contrastive, Prefix, Temperature, contrastive, matryoshka},
    pipeline::{ScheduleChoice, on_mesh},
};
use anymesh_core::{Mesh, Tensor};

/// Texts that are to find each other: the passages of query `i` begin at number `i * group`, its own
/// first.
#[derive(Clone, Debug)]
pub struct Pairs {
    /// What looks.
    pub queries: Sentences,
    /// What is to be found.
    pub passages: Sentences,
}

/// An encoder that learns which texts belong together.
///
/// Every query of a global batch is compared with all its passages, while the activations of one
/// micro-batch of texts at a time are in memory, or of those that a pipeline has under way: the
/// vectors are computed once without a graph, then again with the gradients that the loss has for
/// them ([`Pipeline::run_cached`](crate::pipeline::Pipeline::run_cached)). An encoder on a mesh with
/// an axis `pp` has its layers in stages.
///
/// An evaluation compares the queries of a micro-batch with the passages of the same micro-batch.
#[derive(Debug)]
pub struct ContrastiveModel {
    /// The encoder.
    pub encoder: Encoder,
    /// How vectors are compared.
    pub options: Contrastive,
    /// Prefixes of the vectors that are to be vectors of their own; none for whole ones alone.
    pub prefixes: Vec<Prefix>,
    /// What is done when, where the model has stages.
    pub schedule: ScheduleChoice,
}

impl ContrastiveModel {
    /// Whole vectors, in the order of all forward and then all backward passes where there are stages.
    pub fn new(encoder: Encoder, options: Contrastive) -> Result<Self> {
        if let Temperature::Learned(_) = options.temperature {
            let detail = "a learned temperature is no parameter of the encoder, so the trainer does not change it: give a number";
            return Err(Error::config("temperature", detail));
        }
        Ok(Self {
            encoder,
            options,
            prefixes: vec![],
            schedule: ScheduleChoice::default(),
        })
    }

    /// The sum over queries.
    fn sum(&self, queries: &Tensor, passages: &Tensor) -> Result<Tensor> {
        let mean = match self.prefixes.is_empty() {
            true => contrastive(queries, passages, &self.options)?,
            false => matryoshka(queries, passages, &self.prefixes, &self.options)?,
        };
        Ok(mean.mul(queries.dims()[0] as f64)?)
    }
}

/// Queries and passages of a micro-batch have random keys of their own.
fn part(pass: &Pass, is_passage: bool) -> Pass {
    pass.part(usize::from(is_passage))
}

impl Task for ContrastiveModel {
    type Batch = Pairs;

    fn model(&self) -> &dyn Module {
        &self.encoder.model
    }

    fn model_mut(&mut self) -> &mut dyn Module {
        &mut self.encoder.model
    }

    fn mesh(&self) -> &Mesh {
        self.encoder.model.mesh()
    }

    fn count(&self, batch: &Pairs) -> Result<f64> {
        let rows = batch.queries.tokens.ids.dims().first();
        Ok(rows.map_or(0.0, |rows| *rows as f64))
    }

    fn loss(&mut self, batch: &Pairs, pass: &Pass) -> Result<Tensor> {
        let queries = self.encoder.forward(&batch.queries, &part(pass, false))?;
        let passages = self.encoder.forward(&batch.passages, &part(pass, true))?;
        on_mesh(&self.sum(&queries, &passages)?, self.mesh())
    }

    fn gradients(
        &mut self,
        batches: &[Pairs],
        factor: f64,
        pass: &dyn Fn(usize) -> Pass,
    ) -> Result<Computed> {
        let texts: Vec<Sentences> = (batches.iter())
            .flat_map(|batch| [batch.queries.clone(), batch.passages.clone()])
            .collect();
        let owners = self.encoder.model.split().owners();
        let pipeline = self.schedule.pipeline(owners, texts.len())?;
        let pass = |i: usize| part(&pass(i / 2), i % 2 == 1);
        let mut told = None;
        let cached = pipeline.run_cached(&self.encoder, &texts, &pass, |vectors| {
            let whole = |first: usize| {
                let parts: Vec<&Tensor> = vectors.iter().skip(first).step_by(2).collect();
                Tensor::concat(&parts, 0)
            };
            let sum = self.sum(&whole(0)?, &whole(1)?)?;
            told = Some(sum.detach());
            Ok(sum.mul(factor)?)
        })?;
        // The last stage has it; every process reads it.
        let losses = told.iter().map(|sum| on_mesh(sum, self.mesh()));
        Ok(Computed {
            gradients: cached.gradients,
            losses: losses.collect::<Result<_>>()?,
        })
    }
}

//! Language modelling as a task.

use super::{Computed, Feed, Task, one_after_the_other};
use crate::{
    Error, Module, Pass, Result,
    data::{Batch, Loader, Steps},
    lora, lora_pass,
    models::{Model, Reads, Tokens},
    objective::{Language, language},
    pipeline::{Borrowed, Given, ScheduleChoice, Staged, on_mesh},
};
use anymesh_core::{Mesh, Tensor};
use anymesh_schedule::Limits;
use std::borrow::Cow;

/// A model that learns to predict the next token.
#[derive(Clone, Debug)]
pub struct LanguageModel {
    /// The model.
    pub model: Model,
    /// How losses are weighed.
    pub options: Language,
    /// Whether documents that share a row see each other.
    pub mix_documents: bool,
    /// What is done when, where the model has stages.
    pub schedule: ScheduleChoice,
    /// Values in products: all parameters but the rows that tokens are looked up in.
    products: f64,
    /// Operations of attention for a token: `12 * layers * width * length`.
    attention: f64,
}

impl LanguageModel {
    /// With texts of `length` tokens.
    pub fn new(model: Model, options: Language, length: usize) -> Self {
        let config = model.config();
        // A head that is tied to the embedding is still a product.
        let looked_up = match model.tied().is_empty() {
            true => model.embedding().value().numel(),
            false => 0,
        };
        let (layers, width) = config.layers_and_width();
        Self {
            products: (model.count() - looked_up.min(model.count())) as f64,
            attention: 12.0 * (layers * width * length) as f64,
            model,
            options,
            mix_documents: false,
            schedule: ScheduleChoice::default(),
        }
    }
}

impl Task for LanguageModel {
    type Batch = Batch;

    fn model(&self) -> &dyn Module {
        &self.model
    }

    fn model_mut(&mut self) -> &mut dyn Module {
        &mut self.model
    }

    fn mesh(&self) -> &Mesh {
        self.model.mesh()
    }

    fn count(&self, batch: &Batch) -> Result<f64> {
        Ok(batch.valid()?.item()?.to_f64())
    }

    fn loss(&mut self, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        let tokens = self.tokens(batch)?;
        lora_pass(&mut self.model, pass);
        let logits = self.model.logits(&tokens, pass, None)?;
        let labels = on_mesh(&batch.labels, logits.mesh())?;
        language(&logits, &labels, &self.options)
    }

    fn gradients(
        &mut self,
        batches: &[Batch],
        factor: f64,
        pass: &dyn Fn(usize) -> Pass,
    ) -> Result<Computed> {
        if self.stages() == 1 {
            return one_after_the_other(self, batches, factor, pass);
        }
        let owners = self.model.stack().map(|s| s.split().owners().to_vec());
        let pipeline = self
            .schedule
            .pipeline(&owners.unwrap_or_default(), batches.len())?;
        let mut computed = pipeline.run(self, batches, factor, pass)?;
        // The last stage has them; every process reads them.
        let mesh = self.model.mesh();
        for loss in &mut computed.losses {
            *loss = on_mesh(loss, mesh)?;
        }
        Ok(computed)
    }

    fn operations(&self) -> Option<f64> {
        Some(6.0 * self.products + self.attention)
    }
}

impl LanguageModel {
    /// That there is a schedule for so many micro-batches which keeps to a limit of activations.
    pub fn check_schedule(&self, micros: usize, live: Option<usize>) -> Result<()> {
        if self.stages() == 1 {
            return Ok(());
        }
        let owners = self.model.stack().map(|s| s.split().owners().to_vec());
        let pipeline = self
            .schedule
            .pipeline(&owners.unwrap_or_default(), micros)?;
        if let Some(live) = live {
            pipeline.proof().schedule().prove(&Limits::live(live))?;
        }
        Ok(())
    }

    fn tokens(&self, batch: &Batch) -> Result<Tokens> {
        let tokens = match (&batch.documents, &batch.positions) {
            (Some(documents), Some(positions)) if !self.mix_documents => {
                Tokens::packed(batch.ids.clone(), documents, positions.clone())?
            }
            _ => Tokens::new(batch.ids.clone()),
        };
        Ok(tokens.in_order(batch.order))
    }
}

impl Staged for LanguageModel {
    type Batch = Batch;

    fn model(&self) -> &dyn Module {
        &self.model
    }

    fn stages(&self) -> usize {
        self.model.stack().map_or(1, |s| s.split().stages())
    }

    fn mesh_of(&self, stage: usize) -> &Mesh {
        match self.model.stack() {
            Some(stack) => stack.split().mesh_of(stage),
            None => self.model.mesh(),
        }
    }

    fn forward(
        &self,
        stage: usize,
        given: &Given<'_>,
        batch: &Batch,
        pass: &Pass,
    ) -> Result<Vec<Tensor>> {
        // Micro-batches take turns in a stage, each with its own keys; parameters are shared.
        let model = match lora::drops(&self.model) {
            true => {
                let mut model = self.model.clone();
                lora_pass(&mut model, pass);
                Cow::Owned(model)
            }
            false => Cow::Borrowed(&self.model),
        };
        let Some(stack) = model.stack() else {
            let detail = "an encoder has no stages: train it without the axis pp";
            return Err(Error::config("pipeline", detail));
        };
        let mesh = stack.split().mesh_of(stage);
        let reads = Reads {
            tokens: &self.tokens(batch)?.on(mesh)?,
            from: 0,
            pass,
        };
        let stream = stack.part(stage, given.inputs.first(), &reads, None)?;
        if stage + 1 < stack.split().stages() {
            return Ok(vec![stream]);
        }
        let logits = model.head_with(&stream, given.borrowed.first())?;
        let labels = on_mesh(&batch.labels, mesh)?;
        Ok(vec![language(&logits, &labels, &self.options)?])
    }

    /// The last stage borrows the embedding that its head is tied to, unless it has it.
    fn borrows(&self, stage: usize) -> Result<Vec<Borrowed>> {
        let (first, here) = (self.mesh_of(0), self.mesh_of(stage));
        let last = stage + 1 == self.stages();
        Ok(match self.model.tied().first() {
            Some((_, name)) if last && first != here => vec![Borrowed {
                name: name.clone(),
                value: self.model.embedding().get()?,
            }],
            _ => vec![],
        })
    }
}

/// Batches of a loader in order, read ahead by its thread.
#[derive(Debug)]
pub struct FromLoader {
    loader: Loader,
    steps: Option<Steps>,
}

impl FromLoader {
    /// Batches of this loader.
    pub fn new(loader: Loader) -> Self {
        Self {
            loader,
            steps: None,
        }
    }
}

impl Feed<Batch> for FromLoader {
    fn global_batch(&mut self, consumed: u64) -> Result<Option<(Vec<Batch>, u64)>> {
        // Reading begins anew where the run is not where it was read to.
        let mut steps = match self.steps.take() {
            Some(steps) if steps.consumed() == consumed => steps,
            _ => self.loader.steps(consumed),
        };
        let Some(step) = steps.next().transpose()? else {
            return Ok(None);
        };
        self.steps = Some(steps);
        let samples = step.positions.end - step.positions.start;
        Ok(Some((step.micro_batches, samples)))
    }
}

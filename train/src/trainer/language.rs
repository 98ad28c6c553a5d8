//! Language modelling as a task.

use super::{Feed, Task};
use crate::{
    Module, Pass, Result,
    data::{Batch, Loader, Steps},
    lora_pass,
    models::{Model, Tokens},
    objective::{Language, language},
};
use anymesh_core::{Mesh, Tensor};

/// A model that learns to predict the next token.
#[derive(Clone, Debug)]
pub struct LanguageModel {
    /// The model.
    pub model: Model,
    /// How losses are weighed.
    pub options: Language,
    /// Whether documents that share a row see each other.
    pub mix_documents: bool,
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
        let tokens = match (&batch.documents, &batch.positions) {
            (Some(documents), Some(positions)) if !self.mix_documents => {
                Tokens::packed(batch.ids.clone(), documents, positions.clone())?
            }
            _ => Tokens::new(batch.ids.clone()),
        };
        lora_pass(&mut self.model, pass);
        let logits = self.model.logits(&tokens, pass, None)?;
        language(&logits, &batch.labels, &self.options)
    }

    fn operations(&self) -> Option<f64> {
        Some(6.0 * self.products + self.attention)
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

//! Language modelling as a task.

use super::{Computed, Feed, Task, one_after_the_other};
use crate::{
    Module, Pass, Result,
    data::{Batch, Loader, Steps},
    lora, lora_pass,
    models::{Aside, Asides, Model, Tokens, added_up},
    objective::{Language, language},
    pipeline::{Borrowed, Given, ScheduleChoice, Staged, kind_of, on_mesh},
};
use anymesh_core::{DType, Mesh, Tensor, grad::no_grad};
use anymesh_schedule::Limits;
use std::{
    borrow::Cow,
    sync::{Mutex, PoisonError},
};

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
    tally: Tally,
}

/// What the layers of a mixture of experts said in the micro-batches of a step, added up.
#[derive(Debug, Default)]
struct Tally(Mutex<Vec<Aside>>);

/// A copy of a task has steps of its own.
impl Clone for Tally {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl Tally {
    fn take(&self) -> Vec<Aside> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn add(&self, said: &[Aside]) -> Result<()> {
        let mut sums = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for aside in said {
            let sum = sums.iter_mut().find(|sum| sum.layer == aside.layer);
            match sum {
                None => sums.push(Aside {
                    loss: None,
                    ..aside.clone()
                }),
                Some(sum) => no_grad(|| -> Result<()> {
                    sum.counts = sum.counts.add(&aside.counts)?;
                    sum.dropped = sum.dropped.add(&aside.dropped)?;
                    Ok(())
                })?,
            }
        }
        Ok(())
    }
}

/// A loss, and what layers ask for beside: a mean, which counts for as many labels as the
/// micro-batch has, so that it is a mean over the global batch in the end.
fn with_aside(loss: Tensor, aside: Option<Tensor>, batch: &Batch) -> Result<Tensor> {
    let Some(aside) = aside else {
        return Ok(loss);
    };
    let labels = on_mesh(&batch.valid()?, loss.mesh())?.cast(loss.dtype())?;
    Ok(loss.add(&aside.cast(loss.dtype())?.mul(&labels)?)?)
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
        let idle = match &model {
            Model::Moe(model) => model.idle(),
            _ => 0,
        };
        let (layers, width) = config.layers_and_width();
        Self {
            products: model.count().saturating_sub(looked_up + idle) as f64,
            attention: 12.0 * (layers * width * length) as f64,
            model,
            options,
            mix_documents: false,
            schedule: ScheduleChoice::default(),
            tally: Tally::default(),
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
        let asides = Asides::default();
        let hidden = self.model.hidden_with(&tokens, pass, None, &asides)?;
        let logits = self.model.head(&hidden)?;
        let labels = on_mesh(&batch.labels, logits.mesh())?;
        let loss = language(&logits, &labels, &self.options)?;
        if !pass.is_training() {
            return Ok(loss);
        }
        let said = asides.take();
        self.tally.add(&said)?;
        with_aside(loss, added_up(None, &said, logits.mesh())?, batch)
    }

    fn gradients(
        &mut self,
        batches: &[Batch],
        factor: f64,
        pass: &dyn Fn(usize) -> Pass,
    ) -> Result<Computed> {
        self.tally.take();
        if self.stages() == 1 {
            return one_after_the_other(self, batches, factor, pass);
        }
        let owners = self.model.split().owners();
        let pipeline = self.schedule.pipeline(owners, batches.len())?;
        let mut computed = pipeline.run(self, batches, factor, pass)?;
        // The last stage has them; every process reads them.
        let mesh = self.model.mesh();
        for loss in &mut computed.losses {
            *loss = on_mesh(loss, mesh)?;
        }
        Ok(computed)
    }

    fn finish_step(&mut self, skipped: bool) -> Result<Vec<(&'static str, f64)>> {
        let mut said = self.tally.take();
        // In one order for all processes.
        said.sort_by_key(|aside| aside.layer);
        if said.is_empty() {
            return Ok(vec![]);
        }
        no_grad(|| {
            if let (Model::Moe(model), false) = (&mut self.model, skipped) {
                model.balance(&said)?;
            }
            loads(&said, self.model.mesh())
        })
    }

    fn operations(&self) -> Option<f64> {
        Some(6.0 * self.products + self.attention)
    }
}

/// How full the fullest expert of any layer is beside its even share, and what share of all choices
/// found no room. The stages of a pipeline have theirs; every process reads them.
fn loads(said: &[Aside], mesh: &Mesh) -> Result<Vec<(&'static str, f64)>> {
    let mut each = vec![];
    for aside in said {
        let counts = aside.counts.cast(DType::F32)?;
        let three = [
            counts.max_all()?.div(&counts.mean_all()?.maximum(1e-9)?)?,
            aside.dropped.cast(DType::F32)?,
            counts.sum_all()?,
        ];
        let three = three.map(|number| number.reshape([1]));
        let [load, dropped, all] = three;
        let numbers = Tensor::concat(&[&load?, &dropped?, &all?], 0)?;
        each.push(on_mesh(&numbers.reshard("[_]")?, mesh)?);
    }
    let numbers = Tensor::concat(&each.iter().collect::<Vec<_>>(), 0)?.to_vec::<f32>()?;
    let sum = |i: usize| -> f64 { numbers.chunks(3).map(|n| f64::from(n[i])).sum() };
    let load = numbers.chunks(3).map(|n| f64::from(n[0]));
    Ok(vec![
        ("expert_load", load.fold(0.0, f64::max)),
        ("expert_drops", sum(1) / sum(2).max(1.0)),
    ])
}

impl LanguageModel {
    /// That there is a schedule for so many micro-batches which keeps to a limit of activations.
    pub fn check_schedule(&self, micros: usize, live: Option<usize>) -> Result<()> {
        if self.stages() == 1 {
            return Ok(());
        }
        let owners = self.model.split().owners();
        let pipeline = self.schedule.pipeline(owners, micros)?;
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
        self.model.split().stages()
    }

    fn mesh_of(&self, stage: usize) -> &Mesh {
        self.model.split().mesh_of(stage)
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
        let split = model.split();
        let (mesh, asides) = (split.mesh_of(stage), Asides::default());
        let (input, tokens) = (given.inputs.first(), self.tokens(batch)?);
        let stream = model.stage_with(stage, input, &tokens, pass, &asides)?;
        let said = asides.take();
        self.tally.add(&said)?;
        // What layers ask for beside travels with the stream.
        let aside = added_up(given.inputs.get(1), &said, mesh)?;
        if stage + 1 < split.stages() {
            return Ok([stream].into_iter().chain(aside).collect());
        }
        let logits = model.head_with(&stream, given.borrowed.first())?;
        let labels = on_mesh(&batch.labels, mesh)?;
        let loss = language(&logits, &labels, &self.options)?;
        Ok(vec![with_aside(loss, aside, batch)?])
    }

    fn kind_of(&self, batch: &Batch) -> Option<String> {
        let more = [batch.documents.as_ref(), batch.positions.as_ref()];
        let all = [&batch.ids, &batch.labels]
            .into_iter()
            .chain(more.into_iter().flatten());
        kind_of(self.model.mesh(), all)
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

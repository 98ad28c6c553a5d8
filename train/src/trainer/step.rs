//! One step: gradients of all micro-batches, one update.

use super::{Feed, Task, Trainer, guard};
use crate::{Error, Pass, Result, optim::Accumulator};
use anymesh_core::{Tensor, grad::no_grad, ops::Rng};
use std::ops::Range;

/// What a step did.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// Its number; the first is 1.
    pub step: u64,
    /// The mean loss of the global batch, before the update.
    pub loss: f64,
    /// The norm of all gradients together, before clipping.
    pub norm: f64,
    /// The factor of the schedule that learning rates had.
    pub rate: f64,
    /// What the loss is a mean over: tokens with a label, mostly.
    pub count: f64,
    /// The samples it was made of, by their positions in the data.
    pub samples: Range<u64>,
    /// Whether loss or gradients were not finite, so that nothing was changed.
    pub skipped: bool,
    /// More numbers, by name: of a mixture of experts `expert_load`, the tokens of the fullest expert
    /// over its even share, and `expert_drops`, the share of choices that found no room.
    pub more: Vec<(&'static str, f64)>,
}

/// The gradients of a global batch, as they lie, and its mean loss.
struct Global {
    gradients: Accumulator,
    loss: f64,
    count: f64,
}

/// The random key of a micro-batch of the step to come: a function of where the run is.
fn key(seed: u64, step: u64, micro: usize) -> Rng {
    Rng {
        seed: crate::key(seed, "dropout").seed ^ step,
        stream: micro as u32,
    }
}

impl<T: Task> Trainer<T> {
    /// Trains on the next global batch. None where the data has ended.
    pub fn step(&mut self, feed: &mut dyn Feed<T::Batch>) -> Result<Option<StepReport>> {
        let Some((batches, samples)) = feed.global_batch(self.consumed)? else {
            return Ok(None);
        };
        let step = self.step + 1;
        let samples = self.consumed..self.consumed + samples;
        let computed = self.compute(&batches)?;
        let every = self.settings.guard.rerun_every;
        if every > 0 && step.is_multiple_of(every) {
            self.compute_again(&batches, &computed)?;
        }

        let rate = self.schedule.factor(self.step);
        let mut gradients = computed.gradients.clone();
        let sums = gradients.finish(self.task.model())?;
        let (norm, skipped) = match computed.loss.is_finite() {
            true => {
                let outcome = self.optimizer.step(self.task.model_mut(), sums, rate)?;
                (outcome.norm.unwrap_or(f64::NAN), outcome.skipped)
            }
            false => {
                self.optimizer.skip();
                (f64::NAN, true)
            }
        };
        if skipped {
            // A batch that is bad is bad again; a device that fails is not.
            self.compute_again(&batches, &computed)?;
            self.skips += 1;
        } else {
            self.skips = 0;
            if let Some(ema) = &mut self.ema {
                ema.update(self.task.model())?;
            }
        }
        let more = self.task.finish_step(skipped)?;
        (self.step, self.consumed) = (step, samples.end);
        let report = StepReport {
            step,
            loss: computed.loss,
            norm,
            rate,
            count: computed.count,
            samples,
            skipped,
            more,
        };
        let limit = self.settings.guard.max_skips.max(1);
        // A loss scale that is too large is found by skipping.
        if skipped && self.skips >= limit && self.optimizer.loss_scale() <= 1.0 {
            return Err(Error::Stopped {
                step,
                detail: format!(
                    "{} steps in a row had a loss or gradients that are not finite (loss {}, norm {norm}; the last on samples {}..{}): lower the learning rate, look at those samples, or go on from the last checkpoint with another seed",
                    self.skips, report.loss, report.samples.start, report.samples.end
                ),
            });
        }
        Ok(Some(report))
    }

    fn compute(&mut self, batches: &[T::Batch]) -> Result<Global> {
        // Known before the first backward pass: a micro-batch with few labels counts for few.
        let mut count = 0.0;
        for batch in batches {
            count += self.task.count(batch)?;
        }
        let scale = self.optimizer.loss_scale();
        let factor = if count > 0.0 { scale / count } else { 0.0 };
        let (seed, step) = (self.settings.seed, self.step);
        let pass = |i: usize| Pass::train(key(seed, step, i));
        let computed = self.task.gradients(batches, factor, &pass)?;
        // Read when everything is queued.
        let mut loss = 0.0;
        for sum in &computed.losses {
            loss += sum.item()?.to_f64();
        }
        let loss = if count > 0.0 { loss / count } else { 0.0 };
        Ok(Global {
            gradients: computed.gradients,
            loss,
            count,
        })
    }

    /// Computes the same gradients again: the bits must be the same.
    fn compute_again(&mut self, batches: &[T::Batch], before: &Global) -> Result<()> {
        let again = self.compute(batches)?;
        let suspect = guard::compare(before.gradients.sums(), again.gradients.sums())?;
        let mine = suspect.is_some();
        if !super::agree::any(self.task.mesh(), mine)? {
            return Ok(());
        }
        let detail = match suspect {
            Some(suspect) => suspect.to_string(),
            None => "another process computed a gradient twice and got other bits: its message names the device".into(),
        };
        let step = self.step + 1;
        Err(Error::Stopped { step, detail })
    }

    /// The mean loss over all batches of a feed from its beginning, without dropout and without
    /// changing anything.
    pub fn evaluate(&mut self, feed: &mut dyn Feed<T::Batch>) -> Result<f64> {
        let (mut sum, mut count, mut at, mut batches) = (0.0, 0.0, 0, 0);
        let limit = self.settings.evaluate.batches;
        while limit == 0 || batches < limit {
            let Some((micro, samples)) = feed.global_batch(at)? else {
                break;
            };
            at += samples;
            batches += 1;
            for batch in &micro {
                count += self.task.count(batch)?;
                let loss: Result<Tensor> = no_grad(|| self.task.loss(batch, &Pass::eval()));
                sum += loss?.item()?.to_f64();
            }
        }
        match count > 0.0 {
            true => Ok(sum / count),
            false => Err(Error::config(
                "evaluate",
                "the data of the evaluation has no labels to compare with",
            )),
        }
    }
}

//! A run: steps until it ends, with everything that happens between them.

use super::{Feed, Settings, StepReport, Task, agree, save::checkpoint_name};
use crate::{
    Error, Result,
    optim::{Ema, Optimizer, Schedule},
};
use anymesh_checkpoint::{Background, Training};
use std::{
    fmt,
    time::{Duration, Instant},
};

/// A model in training.
pub struct Trainer<T> {
    /// What is trained.
    pub task: T,
    /// What a checkpoint tells beside the tensors: the architecture and the configuration, so that
    /// it can be exported, and whatever the program adds.
    pub about: Training,
    pub(super) settings: Settings,
    pub(super) optimizer: Optimizer,
    pub(super) schedule: Schedule,
    pub(super) ema: Option<Ema>,
    pub(super) step: u64,
    pub(super) consumed: u64,
    pub(super) skips: u64,
    /// The step with the lowest loss of an evaluation, and that loss.
    pub(super) best: Option<(u64, f64)>,
    pub(super) saver: Option<Background>,
    last_save: Instant,
    stop: Box<dyn Fn() -> bool>,
}

impl<T: fmt::Debug> fmt::Debug for Trainer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trainer")
            .field("task", &self.task)
            .field("settings", &self.settings)
            .field("step", &self.step)
            .field("consumed", &self.consumed)
            .finish_non_exhaustive()
    }
}

/// What happens in a run, for those who watch. They only read.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'e> {
    /// A step was done, or skipped.
    Step {
        /// What it did.
        report: &'e StepReport,
        /// How long it took, loading of data included.
        time: Duration,
    },
    /// An evaluation was done.
    Evaluated {
        /// After which step.
        step: u64,
        /// The mean loss.
        loss: f64,
        /// Whether it is the lowest so far.
        best: bool,
    },
    /// A save was begun.
    Saving {
        /// After which step.
        step: u64,
    },
    /// A checkpoint could not be written; the run goes on and tries again when it is time.
    SaveFailed {
        /// After which step.
        step: u64,
        /// Why.
        error: &'e Error,
    },
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finished {
    /// All steps are done.
    Done,
    /// The data ended first.
    NoMoreData,
    /// It was asked to stop; what it had is saved.
    Stopped,
}

impl<T: Task> Trainer<T> {
    /// A trainer at step 0. The optimizer knows the model's parameters.
    pub fn new(
        task: T,
        optimizer: Optimizer,
        schedule: Schedule,
        settings: Settings,
    ) -> Result<Self> {
        let ema = match settings.ema {
            Some(decay) => Some(Ema::new(task.model(), decay)?.with_warmup()),
            None => None,
        };
        Ok(Self {
            task,
            about: Training::default(),
            settings,
            optimizer,
            schedule,
            ema,
            step: 0,
            consumed: 0,
            skips: 0,
            best: None,
            saver: None,
            last_save: Instant::now(),
            stop: Box::new(|| false),
        })
    }

    /// Asks this between steps whether to save and leave, such as whether a signal came.
    pub fn stop_when(mut self, stop: impl Fn() -> bool + 'static) -> Self {
        self.stop = Box::new(stop);
        self
    }

    /// Steps that are done.
    pub fn steps_done(&self) -> u64 {
        self.step
    }

    /// Samples that were consumed: where the data goes on.
    pub fn consumed(&self) -> u64 {
        self.consumed
    }

    /// The averages of the parameters, where they are kept.
    pub fn ema(&self) -> Option<&Ema> {
        self.ema.as_ref()
    }

    /// What it was told.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Trains until all steps are done, the data ends or it is told to stop. All processes of the
    /// mesh call this alike.
    pub fn run(
        &mut self,
        feed: &mut dyn Feed<T::Batch>,
        mut evaluation: Option<&mut dyn Feed<T::Batch>>,
        watch: &mut dyn FnMut(&Event<'_>),
    ) -> Result<Finished> {
        self.last_save = Instant::now();
        let mut outcome = Finished::Done;
        while self.step < self.settings.steps {
            let start = Instant::now();
            let Some(report) = self.step(feed)? else {
                outcome = Finished::NoMoreData;
                break;
            };
            watch(&Event::Step {
                report: &report,
                time: start.elapsed(),
            });
            let saved = self.advance_save();
            self.tell_failure(saved, watch);

            let every = self.settings.evaluate.every;
            let due = every > 0 && self.step.is_multiple_of(every);
            let mut best = false;
            if let Some(evaluation) = evaluation.as_deref_mut().filter(|_| due) {
                best = self.evaluated(evaluation, watch)?;
            }
            let stop = agree::any(self.task.mesh(), (self.stop)())?;
            if stop || self.save_is_due(best)? {
                self.last_save = Instant::now();
                let begun = self.save_now(watch);
                self.tell_failure(begun, watch);
            }
            if stop {
                outcome = Finished::Stopped;
                break;
            }
        }
        let every = self.settings.evaluate.every;
        let left = every > 0 && !self.step.is_multiple_of(every);
        if let Some(evaluation) = evaluation.filter(|_| left && outcome != Finished::Stopped) {
            self.evaluated(evaluation, watch)?;
        }
        // What is left at the end is saved, or the run says why not.
        self.save_now(watch)?;
        self.finish_save()?;
        Ok(outcome)
    }

    fn evaluated(
        &mut self,
        feed: &mut dyn Feed<T::Batch>,
        watch: &mut dyn FnMut(&Event<'_>),
    ) -> Result<bool> {
        let (loss, step) = (self.evaluate(feed)?, self.step);
        let best = loss.is_finite() && self.best.is_none_or(|(_, lowest)| loss < lowest);
        if best {
            self.best = Some((step, loss));
        }
        watch(&Event::Evaluated { step, loss, best });
        Ok(best)
    }

    fn save_is_due(&self, best: bool) -> Result<bool> {
        let save = &self.settings.save;
        if save.folder.is_none() {
            return Ok(false);
        }
        let by_step = save.every_steps > 0 && self.step.is_multiple_of(save.every_steps);
        let by_best = save.best && best;
        let mut by_time = false;
        if save.every_minutes > 0.0 {
            let passed = self.last_save.elapsed().as_secs_f64() >= save.every_minutes * 60.0;
            by_time = agree::any(self.task.mesh(), passed)?;
        }
        Ok(by_step || by_best || by_time)
    }

    /// Begins to save this step, after the save before it has ended.
    fn save_now(&mut self, watch: &mut dyn FnMut(&Event<'_>)) -> Result<()> {
        let before = self.finish_save();
        // Nothing to save to, or this very step is saved, perhaps by the run before this one.
        let folder = self.settings.save.folder.as_ref();
        if folder.is_none_or(|folder| folder.join(checkpoint_name(self.step)).exists()) {
            return before.map(|_| ());
        }
        watch(&Event::Saving { step: self.step });
        self.begin_save()?;
        before.map(|_| ())
    }

    fn tell_failure(&mut self, saved: Result<()>, watch: &mut dyn FnMut(&Event<'_>)) {
        if let Err(error) = saved {
            let (step, error) = (self.step, &error);
            watch(&Event::SaveFailed { step, error });
        }
    }
}

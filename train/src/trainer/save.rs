//! What a run keeps, and how it goes on.

use super::{Task, Trainer};
use crate::{Error, Result, optim::Ema};
use anymesh_checkpoint::{
    Background, Checkpoint, Contents, Keep, Load, Source, Training, latest, rotate,
};
use anymesh_core::Tensor;
use std::{collections::BTreeMap, path::PathBuf};

/// What the name of an average begins with.
pub(super) const AVERAGE: &str = "ema.";

impl<T: Task> Trainer<T> {
    /// Everything that a run needs to go on: parameters, the optimizer's state, averages, and where
    /// it is.
    pub fn contents(&self) -> Contents {
        let mut tensors = self.task.model().values();
        tensors.extend(self.optimizer.state());
        if let Some(ema) = &self.ema {
            let averages = ema.values.iter();
            tensors.extend(averages.map(|(name, t)| (format!("{AVERAGE}{name}"), t.clone())));
        }
        let mut training = Training {
            consumed_samples: self.consumed,
            ..self.about.clone()
        };
        let more = &mut training.more;
        more.insert("skips_in_a_row".into(), self.skips.into());
        let progress = serde_json::to_value(self.optimizer.progress());
        more.insert("optimizer".into(), progress.unwrap_or_default());
        if let Some(ema) = &self.ema {
            more.insert("ema_updates".into(), ema.updates.into());
        }
        if let Some((step, loss)) = self.best {
            more.insert("best_step".into(), step.into());
            more.insert("best_loss".into(), loss.into());
        }
        Contents {
            step: self.step,
            tensors,
            state: training.to_state(),
            ..Contents::default()
        }
    }

    /// Goes on from the newest checkpoint of the folder, wherever it was saved from, and tells which
    /// one that is. None where there is none yet.
    pub fn resume(&mut self) -> Result<Option<PathBuf>> {
        let Some(folder) = &self.settings.save.folder else {
            return Ok(None);
        };
        if !folder.exists() {
            return Ok(None);
        }
        match latest(folder)? {
            Some(saved) => {
                self.load(&saved)?;
                Ok(Some(saved.path().into()))
            }
            None => Ok(None),
        }
    }

    /// Goes on from a checkpoint.
    pub fn load(&mut self, saved: &Checkpoint) -> Result<()> {
        let mut wanted = self.contents().tensors;
        // An average that begins now begins with the parameters.
        let averaged = |name: &str| name.starts_with(AVERAGE);
        let missing = |name: &str| averaged(name) && saved.info(name).is_err();
        wanted.retain(|name, _| !missing(name));
        let load = Load {
            ignore: match self.ema {
                Some(_) => vec![],
                None => vec![format!("{AVERAGE}*")],
            },
            ..Load::default()
        };
        let loaded = load.replace(saved, &Contents::new(0, wanted))?.tensors;
        let (mut values, mut state, mut averages) = (
            BTreeMap::new(),
            BTreeMap::new(),
            BTreeMap::<String, Tensor>::new(),
        );
        let names: std::collections::BTreeSet<String> =
            self.task.model().names().into_iter().collect();
        for (name, tensor) in loaded {
            if names.contains(&name) {
                values.insert(name, tensor);
            } else if let Some(of) = name.strip_prefix(AVERAGE) {
                averages.insert(of.into(), tensor);
            } else {
                state.insert(name, tensor);
            }
        }
        self.task.model_mut().set_values(&values)?;
        self.optimizer.load_state(state)?;

        let training = Training::from_state(&saved.manifest().state)?;
        let number = |key: &str| training.more.get(key).and_then(serde_json::Value::as_f64);
        self.step = saved.manifest().step;
        self.consumed = training.consumed_samples;
        self.skips = number("skips_in_a_row").unwrap_or(0.0) as u64;
        if let Some(progress) = training.more.get("optimizer") {
            let progress = serde_json::from_value(progress.clone()).map_err(|e| {
                Error::config("optimizer", format!("{}: {e}", saved.path().display()))
            })?;
            self.optimizer.set_progress(progress);
        }
        if let (Some(step), Some(loss)) = (number("best_step"), number("best_loss")) {
            self.best = Some((step as u64, loss));
        }
        if let Some(ema) = &mut self.ema {
            // Those that the checkpoint has not begin with the parameters.
            *ema = Ema {
                warmup: ema.warmup,
                updates: number("ema_updates").unwrap_or(0.0) as u64,
                ..Ema::new(self.task.model(), ema.decay)?
            };
            ema.values.extend(averages);
        }
        Ok(())
    }

    /// Begins to save what there is now; a save that is still going on is waited for.
    pub(super) fn begin_save(&mut self) -> Result<()> {
        let contents = self.contents();
        let Some(folder) = self.settings.save.folder.clone() else {
            return Ok(());
        };
        let name = checkpoint_name(self.step);
        std::fs::create_dir_all(&folder).map_err(|e| Error::io(&folder, "create folder", &e))?;
        let mesh = self.task.mesh().clone();
        let saver = self.saver.get_or_insert_with(|| {
            let saver = Background::new(&folder);
            match mesh.is_local() {
                true => saver,
                false => saver.with_world(&mesh),
            }
        });
        Ok(saver.begin(&name, &contents)?)
    }

    /// Waits for what is being saved, and removes checkpoints that are too many.
    pub(super) fn finish_save(&mut self) -> Result<Option<PathBuf>> {
        let Some(saver) = &mut self.saver else {
            return Ok(None);
        };
        let path = saver.finish()?;
        self.rotate()?;
        Ok(path)
    }

    /// Copies a piece of what is being saved.
    pub(super) fn advance_save(&mut self) -> Result<()> {
        let bytes = self.settings.save.bytes_per_step;
        match &mut self.saver {
            Some(saver) => Ok(saver.advance(bytes).map(|_| ())?),
            None => Ok(()),
        }
    }

    fn rotate(&self) -> Result<()> {
        let save = &self.settings.save;
        let Some(folder) = save.folder.as_deref().filter(|_| save.keep > 0) else {
            return Ok(());
        };
        if !self.task.mesh().is_first() {
            return Ok(());
        }
        let keep = Keep {
            last: save.keep,
            every: (save.keep_every > 0).then_some(save.keep_every),
            names: match (save.best, self.best) {
                (true, Some((step, _))) => vec![checkpoint_name(step)],
                _ => vec![],
            },
        };
        rotate(folder, &keep)?;
        Ok(())
    }
}

/// The folder of a step's checkpoint.
pub(super) fn checkpoint_name(step: u64) -> String {
    format!("step-{step}")
}

//! Removing old checkpoints.

use super::{Answer, Outcome, wrong};
use anymesh::checkpoint::{
    Keep, Result, SourceFormat,
    files::{Disk, Files, Output},
    list, rotate_with,
};
use clap::Args;
use serde_json::json;
use std::path::{Path, PathBuf};

/// Arguments of `ckpt prune`.
#[derive(Args)]
pub(crate) struct Prune {
    /// A folder of checkpoints.
    root: PathBuf,
    /// How many of the newest stay; at least one does.
    #[arg(long)]
    keep_last: usize,
    /// Those whose step is a multiple of this stay too.
    #[arg(long)]
    keep_every: Option<u64>,
    /// Those with these names stay too. May be given several times.
    #[arg(long, value_name = "NAME")]
    protect: Vec<String>,
    /// Only say what would be removed.
    #[arg(long)]
    dry_run: bool,
}

impl Prune {
    pub(crate) fn run(&self) -> Answer {
        if SourceFormat::of(&self.root).is_ok() {
            return Err(wrong(format!(
                "{} is one checkpoint: give the folder that holds checkpoints",
                self.root.display()
            )));
        }
        let there = list(&self.root)?;
        if let Some(name) = self.protect.iter().find(|name| {
            !there
                .iter()
                .any(|found| found.path.file_name().is_some_and(|n| *n == ***name))
        }) {
            return Err(wrong(format!(
                "--protect {name}: there is nothing of that name in {}",
                self.root.display()
            )));
        }
        let keep = Keep {
            last: self.keep_last,
            every: self.keep_every,
            names: self.protect.clone(),
        };
        let files: &dyn Files = if self.dry_run { &Dry } else { &Disk };
        let removed = rotate_with(files, &self.root, &keep)?;
        let kept: Vec<&Path> = there
            .iter()
            .filter(|found| found.step.is_ok() && !removed.contains(&found.path))
            .map(|found| found.path.as_path())
            .collect();
        let verb = if self.dry_run {
            "would be removed"
        } else {
            "removed"
        };
        let mut text = String::new();
        removed
            .iter()
            .for_each(|path| text += &format!("{verb}: {}\n", path.display()));
        text += &format!("{} {verb}, {} kept\n", removed.len(), kept.len());
        Ok(Outcome::done(
            text,
            json!({"removed": removed, "kept": kept, "dry_run": self.dry_run}),
        ))
    }
}

/// A file system on which nothing happens.
#[derive(Debug)]
struct Dry;

impl Files for Dry {
    fn create(&self, path: &Path) -> Result<Box<dyn Output>> {
        Err(wrong(format!(
            "{} is not written in a dry run",
            path.display()
        )))
    }

    fn create_folder(&self, _: &Path) -> Result<()> {
        Ok(())
    }

    fn sync_folder(&self, _: &Path) -> Result<()> {
        Ok(())
    }

    fn rename(&self, _: &Path, _: &Path) -> Result<()> {
        Ok(())
    }

    fn remove_folder(&self, _: &Path) -> Result<()> {
        Ok(())
    }
}

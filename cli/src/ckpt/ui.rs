//! How a command talks: progress on a terminal, and what is printed.

use anymesh::{
    Region,
    checkpoint::{Result, Source, TensorInfo},
};
use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::collections::BTreeMap;

/// Options of every command.
#[derive(Args)]
pub(crate) struct Ui {
    /// Print one JSON object with the result, or with the error.
    #[arg(long, global = true)]
    pub(super) json: bool,
    /// Print nothing but errors; the exit code is the answer.
    #[arg(long, short, global = true)]
    pub(super) quiet: bool,
}

impl Ui {
    /// A bar for so many bytes, which only a terminal shows.
    pub(super) fn bar(&self, what: &'static str, total: usize) -> ProgressBar {
        // Where the errors go is no terminal, nothing is drawn.
        let target = if self.json || self.quiet {
            ProgressDrawTarget::hidden()
        } else {
            ProgressDrawTarget::stderr()
        };
        let bar = ProgressBar::with_draw_target(Some(total as u64), target).with_message(what);
        match ProgressStyle::with_template(
            "{msg} [{bar:40}] {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left",
        ) {
            Ok(style) => bar.with_style(style.progress_chars("=> ")),
            Err(_) => bar,
        }
    }

    /// A source that moves a bar when it is read. The bar goes away with it.
    pub(super) fn watch<'s>(&self, what: &'static str, source: &'s dyn Source) -> Watched<'s> {
        let total = source.tensors().values().map(TensorInfo::bytes).sum();
        Watched {
            source,
            bar: self.bar(what, total),
        }
    }
}

/// A source whose reads are counted.
pub(super) struct Watched<'s> {
    source: &'s dyn Source,
    bar: ProgressBar,
}

impl Watched<'_> {
    /// How many bytes will be read, where that is not every tensor once.
    pub(super) fn expecting(self, total: usize) -> Self {
        self.bar.set_length(total as u64);
        self
    }
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

impl Source for Watched<'_> {
    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        self.source.tensors()
    }

    fn foreign(&self) -> Vec<(String, String)> {
        self.source.foreign()
    }

    fn info(&self, name: &str) -> Result<&TensorInfo> {
        self.source.info(name)
    }

    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()> {
        self.source.read(name, region, out)?;
        self.bar.inc(out.len() as u64);
        Ok(())
    }
}

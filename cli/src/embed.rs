//! `anymesh embed`: vectors of sentences.

use crate::model::Placed;
use anymesh::train::{Encoder, Error, Result, models::ModelFiles};
use clap::Args;
use serde::Serialize;
use std::{
    io::{Read, Write},
    path::PathBuf,
    time::Instant,
};

/// Arguments of `anymesh embed`.
#[derive(Args)]
pub(crate) struct Embed {
    /// A Hugging Face folder of a BERT encoder.
    model: PathBuf,
    /// A file with a text on each line; `-` reads stdin.
    file: PathBuf,
    /// Print a JSON object for each line, with `text` and `embedding`; without it a vector on each
    /// line, numbers separated by tabs.
    #[arg(long)]
    json: bool,
    /// Texts that go through the model at once.
    #[arg(long, default_value_t = 32)]
    batch: usize,
    #[command(flatten)]
    placed: Placed,
}

/// A line of JSON.
#[derive(Serialize)]
struct Line<'l> {
    text: &'l str,
    embedding: &'l [f32],
}

/// Texts of this many batches are made vectors of and printed at a time.
const BATCHES: usize = 32;

impl Embed {
    pub(crate) fn run(self) -> Result<()> {
        let mut text = String::new();
        let read = match self.file.as_os_str() == "-" {
            true => std::io::stdin().read_to_string(&mut text).map(drop),
            false => std::fs::read_to_string(&self.file).map(|t| text = t),
        };
        read.map_err(|e| Error::io(&self.file, "read", &e))?;
        let lines: Vec<&str> = text.lines().collect();
        let files = ModelFiles::open(&self.model)?;
        let mut encoder = Encoder::new(files.load(&self.placed.build()?)?, &files)?;
        encoder.batch = self.batch.max(1);
        let begun = Instant::now();
        let mut out = std::io::BufWriter::new(std::io::stdout().lock());
        for lines in lines.chunks(BATCHES * encoder.batch) {
            for (line, vector) in lines.iter().zip(encoder.encode(lines)?) {
                let written = match self.json {
                    true => {
                        let line = Line {
                            text: line,
                            embedding: &vector,
                        };
                        let written = serde_json::to_writer(&mut out, &line);
                        written.map_err(Into::into).and_then(|()| writeln!(out))
                    }
                    false => {
                        let numbers: Vec<String> = vector.iter().map(f32::to_string).collect();
                        writeln!(out, "{}", numbers.join("\t"))
                    }
                };
                // Whoever reads has had enough.
                if written.is_err() {
                    return Ok(());
                }
            }
        }
        if out.flush().is_err() {
            return Ok(());
        }
        let (count, time) = (lines.len(), begun.elapsed().as_secs_f64());
        eprintln!(
            "{count} texts in {time:.2} s, {:.1} texts/s",
            count as f64 / time.max(1e-9)
        );
        Ok(())
    }
}

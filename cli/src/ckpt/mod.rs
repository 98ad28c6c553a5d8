//! `anymesh ckpt`: look into, check, compare and convert checkpoints. Nothing is ever written half,
//! and memory stays within a limit.

mod check;
mod convert;
mod files;
mod gguf;
mod input;
mod inspect;
mod memory;
mod prune;
mod tree;
mod ui;

use anymesh::checkpoint::{Error, Result};
use clap::{Args, Subcommand};
use serde_json::{Value, json};
use std::{io::Write, process::ExitCode};
use ui::Ui;

const CODES: &str = "Exit codes: 0 yes or done, 1 the answer is no (damaged, different), 2 it could not be done.\n\
    With --json a command prints one JSON object, errors too: {\"error\": \"...\"}.";

/// `anymesh ckpt`.
#[derive(Args)]
#[command(after_help = CODES)]
pub(crate) struct CkptCommand {
    #[command(flatten)]
    ui: Ui,
    #[command(subcommand)]
    command: Ckpt,
}

/// The commands.
#[derive(Subcommand)]
enum Ckpt {
    /// Show the tensors as a tree, with types, layouts, sizes and, with --sums, sums of what they
    /// hold.
    #[command(after_help = CODES)]
    Inspect(inspect::Inspect),
    /// Read everything and check it against its sums; other formats, which have none, as far as
    /// that goes.
    #[command(after_help = CODES)]
    Verify(check::Verify),
    /// Compare two checkpoints: names, types, and values with --values.
    #[command(after_help = CODES)]
    Diff(check::Diff),
    /// Write a checkpoint anew, laid out for another mesh.
    #[command(after_help = CODES)]
    Reshard(convert::Reshard),
    /// Convert float tensors to another dtype.
    #[command(after_help = CODES)]
    Cast(convert::Cast),
    /// Rename, join, cut, transpose and cast tensors by a mapping.
    #[command(after_help = CODES)]
    Map(convert::Map),
    /// Write a checkpoint from a Hugging Face, torch or split folder or a safetensors or GGUF file.
    #[command(after_help = CODES)]
    Import(convert::Import),
    /// Write a Hugging Face folder.
    #[command(after_help = CODES)]
    Export(files::Export),
    /// Write all tensors into one safetensors file or a Hugging Face folder, with LoRA adapters
    /// merged into them.
    #[command(after_help = CODES)]
    Merge(files::Merge),
    /// Write plain safetensors files for each rank with that rank's shards, as tensor-parallel
    /// inference servers load them.
    #[command(after_help = CODES)]
    Split(files::Split),
    /// Remove old checkpoints from a folder.
    #[command(after_help = CODES)]
    Prune(prune::Prune),
}

/// What a command found or did.
struct Outcome {
    /// Whether the answer is yes.
    yes: bool,
    /// For people: lines, each with its end.
    text: String,
    /// The same for programs, an object.
    json: Value,
}

impl Outcome {
    /// A command that has printed what it was asked for.
    fn shown() -> Self {
        Self::done(String::new(), Value::Null)
    }

    /// A command that did what it was asked.
    fn done(text: String, json: Value) -> Self {
        Self {
            yes: true,
            text,
            json,
        }
    }
}

type Answer = Result<Outcome>;

impl CkptCommand {
    pub(crate) fn run(self) -> ExitCode {
        let ui = &self.ui;
        let result = match self.command {
            Ckpt::Inspect(c) => c.run(ui),
            Ckpt::Verify(c) => c.run(ui),
            Ckpt::Diff(c) => c.run(ui),
            Ckpt::Reshard(c) => c.run(ui),
            Ckpt::Cast(c) => c.run(ui),
            Ckpt::Map(c) => c.run(ui),
            Ckpt::Import(c) => c.run(ui),
            Ckpt::Export(c) => c.run(ui),
            Ckpt::Merge(c) => c.run(ui),
            Ckpt::Split(c) => c.run(ui),
            Ckpt::Prune(c) => c.run(),
        };
        match &result {
            Ok(outcome) if outcome.json.is_null() => {}
            Ok(outcome) if ui.json => print(&format!("{:#}\n", outcome.json)),
            Ok(outcome) if !ui.quiet => print(&outcome.text),
            Ok(_) => {}
            Err(error) if ui.json => print_error(&error.to_string()),
            Err(error) => eprintln!("{error}"),
        }
        match result {
            Ok(Outcome { yes: true, .. }) => ExitCode::SUCCESS,
            Ok(_) => ExitCode::FAILURE,
            Err(_) => ExitCode::from(2),
        }
    }
}

/// Prints an error for programs.
pub(crate) fn print_error(error: &str) {
    print(&format!("{:#}\n", json!({"error": error.trim_end()})));
}

/// Prints to the standard output. A reader that closes it early, such as `head`, is no error.
fn print(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}

/// An error about what was asked for.
fn wrong(text: impl Into<String>) -> Error {
    Error::Argument(text.into())
}

/// A number of bytes as people read it.
fn human(bytes: usize) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (bytes as f64, 0);
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 {
        format!("{bytes} B")
    } else {
        format!("{value:.1} {}", units[unit])
    }
}

/// `1 tensor`, `3 tensors`.
fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// `256M`, `2GiB`, `1000000`: a number of bytes.
fn bytes(text: &str) -> Result<usize, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1usize,
        "k" | "kb" | "kib" => 1 << 10,
        "m" | "mb" | "mib" => 1 << 20,
        "g" | "gb" | "gib" => 1 << 30,
        other => return Err(format!("'{other}' is no unit: use K, M or G")),
    };
    let number: usize = digits
        .parse()
        .map_err(|_| format!("'{text}' is no number of bytes, such as 256M"))?;
    number
        .checked_mul(factor)
        .ok_or_else(|| format!("'{text}' is too large"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_bytes_are_read_and_told() {
        assert_eq!(bytes("256M"), Ok(256 << 20));
        assert_eq!(bytes("3GiB"), Ok(3 << 30));
        assert_eq!(bytes("17"), Ok(17));
        assert!(bytes("12Q").is_err() && bytes("").is_err() && bytes("99999999999G").is_err());
        assert_eq!(
            (human(17).as_str(), human(3 << 20).as_str()),
            ("17 B", "3.0 MiB")
        );
        assert_eq!(
            (count(1, "region"), count(2, "region"), count(0, "tensor")),
            ("1 region".into(), "2 regions".into(), "0 tensors".into())
        );
    }
}

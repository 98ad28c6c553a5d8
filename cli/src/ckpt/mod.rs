//! `anymesh ckpt`: look into, check, compare and convert checkpoints. Nothing is ever written half, and memory stays within a limit.
//!
//! Exit codes: 0 all is well, 1 the answer is no (damaged, different), 2 it could not be done.

mod convert;
mod look;

use anymesh::checkpoint::Result;
use clap::Subcommand;
use std::process::ExitCode;

/// The commands.
#[derive(Subcommand)]
pub(crate) enum Ckpt {
    /// List the tensors of a checkpoint or safetensors file, with types, layouts and sizes.
    Inspect(look::Inspect),
    /// Read everything and check it against its sums.
    Verify(look::Verify),
    /// Compare two checkpoints: names, types, and values with --values.
    Diff(look::Diff),
    /// Write a checkpoint anew, laid out for another mesh.
    Reshard(convert::Reshard),
    /// Convert float tensors to another dtype.
    Cast(convert::Cast),
    /// Rename, join, cut, transpose and cast tensors by a mapping.
    Map(convert::Map),
    /// Write a Hugging Face folder.
    Export(convert::Export),
    /// Write a checkpoint from a Hugging Face folder, a folder of torch.distributed.checkpoint or a safetensors file.
    Import(convert::Import),
    /// Write all tensors into one safetensors file.
    Merge(convert::Merge),
    /// Remove old checkpoints from a folder.
    Prune(convert::Prune),
}

impl Ckpt {
    pub(crate) fn run(self) -> ExitCode {
        let result = match self {
            Ckpt::Inspect(c) => c.run(),
            Ckpt::Verify(c) => c.run(),
            Ckpt::Diff(c) => c.run(),
            Ckpt::Reshard(c) => c.run(),
            Ckpt::Cast(c) => c.run(),
            Ckpt::Map(c) => c.run(),
            Ckpt::Export(c) => c.run(),
            Ckpt::Import(c) => c.run(),
            Ckpt::Merge(c) => c.run(),
            Ckpt::Prune(c) => c.run(),
        };
        match result {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::FAILURE,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::from(2)
            }
        }
    }
}

/// Whether the answer is yes.
type Answer = Result<bool>;

/// A number of bytes as people read it.
fn human(bytes: usize) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (bytes as f64, 0);
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", units[unit]) }
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
    let number: usize = digits.parse().map_err(|_| format!("'{text}' is no number of bytes, such as 256M"))?;
    number.checked_mul(factor).ok_or_else(|| format!("'{text}' is too large"))
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
        assert_eq!((human(17).as_str(), human(3 << 20).as_str()), ("17 B", "3.0 MiB"));
    }
}

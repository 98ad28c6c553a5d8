//! The `anymesh` command.

mod doctor;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// One sharded tensor program, any mesh.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List backends and devices, what each supports, and test their kernels.
    Doctor(doctor::Doctor),
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Doctor(doctor) => doctor.run(),
    }
}

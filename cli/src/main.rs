//! The `anymesh` command.

mod bench;
#[cfg(test)]
mod book;
mod ckpt;
mod diff_run;
mod doctor;
mod embed;
mod explain;
mod generate;
#[cfg(test)]
mod hostile;
#[cfg(unix)]
mod launch;
mod layout;
mod measure;
mod model;
mod picture;
mod plan;
mod processes;
mod profile;
mod replay;
mod request;
mod rule;
mod schedule;
mod seeded;
mod server;
mod show;
mod simulate;
mod trace;
mod train;

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
    /// Explain what an op does with given shardings: letters, choices, costs, results.
    Rule(rule::RuleCommand),
    /// Print the steps, bytes and bounds of a reshard.
    Plan(plan::PlanCommand),
    /// Tell where the bytes of a step's plan go and why, or how two plans differ.
    Explain(explain::Explain),
    /// Find how to lay a model out on many ranks: axes, cuts of parameters, recompute.
    Layout(layout::LayoutCommand),
    /// Show a pipeline schedule: who does what when, how long it takes, how much memory, who waits for
    /// whom.
    Schedule(schedule::ScheduleCommand),
    /// Tell what a training step costs on a cluster that is not there: time, memory and bytes, of a
    /// layout or of the best ones.
    Simulate(simulate::SimulateCommand),
    /// Draw which rank holds what.
    Show(show::Show),
    /// Go on with a text, or answer a question, with a model of a Hugging Face folder or a GGUF
    /// file.
    Generate(generate::Generate),
    /// Make vectors of the lines of a file with an encoder.
    Embed(embed::Embed),
    /// Look into, check, compare and convert checkpoints.
    Ckpt(ckpt::CkptCommand),
    /// Train a language model as a configuration file says.
    Train(train::Train),
    /// Measure kernels and a training step on this machine, beside NumPy, PyTorch and JAX.
    Bench(bench::Bench),
    /// Run a program and tell where its time and its memory go: by op, kernel and line, with gaps, and
    /// as a trace for Perfetto.
    Profile(profile::Profile),
    /// Run one program in two places and name the first op at which they part.
    DiffRun(diff_run::DiffRun),
    /// Call an op at which two runs parted alone.
    Replay(replay::Replay),
    /// Start many processes of a program, here or on several hosts, and end all when one dies.
    #[cfg(unix)]
    Launch(launch::Launch),
    /// Tell from flight records who waits for whom, where programs differ, and who is missing.
    Trace(trace::Trace),
    #[cfg(unix)]
    #[command(name = launch::guard::COMMAND, hide = true)]
    LaunchGuard,
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        // A program that asked for JSON gets JSON, whatever it asked wrongly.
        Err(error)
            if error.use_stderr()
                && std::env::args().nth(1).is_some_and(|arg| arg == "ckpt")
                && std::env::args().any(|arg| arg == "--json") =>
        {
            ckpt::print_error(&error.to_string());
            return ExitCode::from(2);
        }
        Err(error) => error.exit(),
    };
    match cli.command {
        Command::Doctor(doctor) => doctor.run(),
        Command::Rule(rule) => finish(rule.run()),
        Command::Plan(plan) => finish(plan.run()),
        Command::Explain(explain) => finish(explain.run()),
        Command::Layout(layout) => finish(layout.run()),
        Command::Schedule(schedule) => finish(schedule.run()),
        Command::Simulate(simulate) => finish(simulate.run()),
        Command::Show(show) => finish(show.run()),
        Command::Generate(generate) => model::finish(generate.run()),
        Command::Embed(embed) => model::finish(embed.run()),
        Command::Ckpt(ckpt) => ckpt.run(),
        Command::Train(train) => train.run(),
        Command::Bench(bench) => bench.run(),
        Command::Profile(profile) => profile.run(),
        Command::DiffRun(diff) => diff.run(),
        Command::Replay(replay) => replay.run(),
        #[cfg(unix)]
        Command::Launch(launch) => launch.run(),
        Command::Trace(trace) => trace.run(),
        #[cfg(unix)]
        Command::LaunchGuard => launch::guard::watch(),
    }
}

fn finish(result: anymesh::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

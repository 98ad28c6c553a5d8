//! `anymesh profile`: where the time and the memory of a program go.

mod read;
mod report;

use anymesh::profile::{TIMING, VARIABLE};
use clap::{Args, ValueEnum};
use read::Process;
use report::Report;
use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

/// Arguments of `anymesh profile`.
#[derive(Args)]
#[command(
    after_help = "The program's devices must be opened by name (`anymesh::device`, `default_device`, `init`). Open the trace in https://ui.perfetto.dev: a track for each thread of the host, each device and rank, communication, and memory. \
Exit codes: that of the program, if it ran; 2 if it could not be started or nothing was recorded."
)]
pub(crate) struct Profile {
    /// The program and its arguments. A command of this one (train, generate, embed, bench, launch) needs no
    /// name of a program: `anymesh profile train run.toml`.
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        required_unless_present = "read",
        value_name = "PROGRAM"
    )]
    program: Vec<String>,
    /// Where the trace goes.
    #[arg(long, value_name = "FILE", default_value = "trace.json")]
    out: PathBuf,
    /// What is measured. `done` waits for the device before and after each kernel: each has a time
    /// of its own, and the program is slower than without. `launch` waits for nothing: times are those
    /// of the host.
    #[arg(long, value_enum, default_value_t = What::Done)]
    timing: What,
    /// How many rows each table has.
    #[arg(long, value_name = "N", default_value_t = 12)]
    top: usize,
    /// Explain this trace, and run nothing.
    #[arg(long, value_name = "FILE", conflicts_with = "program")]
    read: Option<PathBuf>,
    /// Print JSON, with every row.
    #[arg(long)]
    json: bool,
}

/// What is measured.
#[derive(Clone, Copy, ValueEnum)]
enum What {
    /// Until each kernel is done.
    Done,
    /// How long the host takes.
    Launch,
}

/// The commands of this program that others may be.
const OWN: [&str; 5] = ["train", "generate", "embed", "bench", "launch"];

/// A folder that is gone when this is dropped.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Profile {
    pub(crate) fn run(&self) -> ExitCode {
        match self.explain() {
            Ok(code) => code,
            Err(message) => {
                eprintln!("{message}");
                ExitCode::from(2)
            }
        }
    }

    fn explain(&self) -> Result<ExitCode, String> {
        if let Some(path) = &self.read {
            self.print(&[read::file(path)?].concat());
            return Ok(ExitCode::SUCCESS);
        }
        let (code, processes) = self.profiled()?;
        self.print(&processes);
        if !self.json {
            println!(
                "\nThe trace is in {}: open it in https://ui.perfetto.dev",
                self.out.display()
            );
        }
        Ok(code)
    }

    /// Runs the program, and writes and reads what its processes recorded.
    fn profiled(&self) -> Result<(ExitCode, Vec<Process>), String> {
        let (name, arguments) = self.program.split_first().ok_or("there is no program")?;
        let own = OWN.contains(&name.as_str()) && !Path::new(name).exists();
        let mut command = match own {
            true => {
                let own = std::env::current_exe();
                let mut command = Command::new(own.map_err(|e| format!("anymesh itself: {e}"))?);
                command.arg(name);
                command
            }
            false => Command::new(name),
        };
        let folder = std::env::temp_dir().join(format!("anymesh-profile-{}", std::process::id()));
        let written = |path: &Path, error: io::Error| {
            format!("{} cannot be written: {error}", path.display())
        };
        fs::create_dir_all(&folder).map_err(|error| written(&folder, error))?;
        let folder = Folder(folder);
        // Before the program runs, which may take long: whether the trace has a place.
        fs::write(&self.out, "[]").map_err(|error| written(&self.out, error))?;
        let timing = match self.timing {
            What::Done => "done",
            What::Launch => "launch",
        };
        let status = command
            .args(arguments)
            .env(VARIABLE, &folder.0)
            .env(TIMING, timing)
            .status()
            .map_err(|error| {
                format!(
                    "'{name}' cannot be started: {error}: give the path of a program, or one of {}",
                    OWN.join(", ")
                )
            })?;
        let mut processes = vec![];
        let entries = fs::read_dir(&folder.0).map_err(|error| error.to_string())?;
        let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        paths.sort();
        let mut events = vec![];
        for path in &paths {
            let (own, process) = read::recorded(path)?;
            events.push(own);
            processes.extend(process);
        }
        if processes.iter().all(Process::is_empty) {
            return Err(format!(
                "'{name}' ended ({status}) and nothing was recorded: did it open a device by name (`anymesh::device`), with a version of anymesh that knows {VARIABLE}?"
            ));
        }
        read::write(&self.out, events).map_err(|error| written(&self.out, error))?;
        let code = match status.code() {
            Some(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
            // By a signal.
            None => ExitCode::FAILURE,
        };
        Ok((code, processes))
    }

    fn print(&self, processes: &[Process]) {
        let report = Report::of(processes);
        match self.json {
            true => println!("{}", serde_json::json!(report)),
            false => print!("{}", report.text(self.top)),
        }
    }
}

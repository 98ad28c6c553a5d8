//! `anymesh launch`: many processes of one program, here and on other hosts.

mod attempt;
pub(crate) mod guard;
mod hosts;
mod os;
mod output;
mod remote;
mod summary;

use attempt::{Attempt, Outcome, Plan};
use clap::Args;
use guard::Guard;
use hosts::Host;
use os::End;
use signal_hook::{
    consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};
use std::{
    ffi::OsString,
    io,
    net::{Ipv4Addr, TcpListener},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::mpsc::{self, Receiver},
    time::Duration,
};

/// Each process has two threads and two pipes here.
const MOST_PROCESSES: usize = 4096;

const HELP: &str = "\
Every process gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, \
ANYMESH_TOKEN, ANYMESH_RUN, ANYMESH_RESTART and ANYMESH_FLIGHT, and reads nothing from the standard input. \
SIGTERM, SIGINT and SIGHUP are passed on; the third kills.\n\n\
When a process fails, the others have --grace seconds to end by themselves; then they get SIGTERM, 5 seconds later SIGKILL. \
The exit code is that of the process that failed first, 128 + n if signal n killed it.";

/// Arguments of `anymesh launch`.
#[derive(Args)]
#[command(after_help = HELP)]
pub(crate) struct Launch {
    /// How many processes; with --hosts host:slots for all hosts, the sum of the slots if not given.
    #[arg(short = 'n', long, value_name = "N", value_parser = at_least_one)]
    processes: Option<usize>,
    /// Where they run, by ssh: evenly, or as many as the slots say. The first is where they meet.
    #[arg(long, value_name = "HOST[:SLOTS]", value_delimiter = ',')]
    hosts: Vec<String>,
    /// How many times to start all again after a failure.
    #[arg(long, value_name = "N", default_value_t = 0)]
    restarts: u64,
    /// Start again without the processes that died, as long as there are so many left.
    #[arg(long, value_name = "N", value_parser = at_least_one, requires = "restarts")]
    min: Option<usize>,
    /// The port where they meet; if not given, a free one, another at each restart.
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    master_port: Option<u16>,
    /// Where processes write flight records when they fail; those of an earlier run are removed. Restart k writes into restart-k in it.
    #[arg(long, value_name = "DIR")]
    flight: Option<PathBuf>,
    /// One more variable for every process; may be repeated.
    #[arg(long, value_name = "NAME=VALUE", value_parser = variable)]
    env: Vec<(String, String)>,
    /// Print lines as they are, without the number of the process in front.
    #[arg(long)]
    no_prefix: bool,
    /// How long the others have to end by themselves when one fails.
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    grace: Duration,
    /// The program and its arguments, after --.
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err("it must be a whole number from 1".into()),
    }
}

fn variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.into(), value.into())),
        _ => Err("write NAME=VALUE".into()),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(s) if (0.0..=86400.0).contains(&s) => Ok(Duration::from_secs_f64(s)),
        _ => Err("it must be a number of seconds from 0 to a day".into()),
    }
}

/// Why processes could not be started.
#[derive(Debug)]
pub(crate) enum LaunchError {
    /// What was asked for makes no sense.
    Argument(String),
    /// A program did not start.
    Spawn {
        program: OsString,
        source: io::Error,
    },
    /// A folder cannot be used.
    Folder { path: PathBuf, source: io::Error },
    /// The system refused something else.
    System {
        what: &'static str,
        source: io::Error,
    },
}

impl std::fmt::Display for LaunchError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Argument(text) => f.write_str(text),
            Self::Spawn { program, source } => {
                write!(f, "cannot start {}: {source}", program.display())
            }
            Self::Folder { path, source } => write!(f, "cannot use {}: {source}", path.display()),
            Self::System { what, source } => write!(f, "cannot {what}: {source}"),
        }
    }
}

impl LaunchError {
    /// As shells tell it.
    fn code(&self) -> u8 {
        match self {
            Self::Argument(_) => 2,
            Self::Spawn { source, .. } if source.kind() == io::ErrorKind::NotFound => 127,
            Self::Spawn { .. } => 126,
            _ => 1,
        }
    }
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> LaunchError {
    move |source| LaunchError::System { what, source }
}

/// Where records go.
struct Flight {
    folder: PathBuf,
    /// Whether somebody asked for this folder.
    asked: bool,
}

impl Drop for Flight {
    /// A folder that nobody asked for goes when it has no records.
    fn drop(&mut self) {
        if self.asked {
            return;
        }
        for entry in std::fs::read_dir(&self.folder).into_iter().flatten() {
            // Both fail where there is something inside.
            let _ = entry.map(|restart| std::fs::remove_dir(restart.path()));
        }
        let _ = std::fs::remove_dir(&self.folder);
    }
}

/// Random letters that nobody guesses.
fn random() -> Result<String, LaunchError> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|e| LaunchError::System {
        what: "get random bytes",
        source: io::Error::other(e.to_string()),
    })?;
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

/// Where the processes meet. A port of this machine is one that was free a moment ago; of another
/// one, any below those that systems give to outgoing connections.
fn meeting(hosts: &[Host]) -> Result<u16, LaunchError> {
    let first = &hosts[0];
    if !first.here {
        let mut bytes = [0; 2];
        getrandom::fill(&mut bytes).map_err(|e| LaunchError::System {
            what: "get random bytes",
            source: io::Error::other(e.to_string()),
        })?;
        return Ok(15_000 + u16::from_ne_bytes(bytes) % 17_000);
    }
    let listen = match hosts.iter().all(|host| host.here) {
        true => Ipv4Addr::LOCALHOST,
        false => Ipv4Addr::UNSPECIFIED,
    };
    TcpListener::bind((listen, 0))
        .and_then(|listener| listener.local_addr())
        .map(|address| address.port())
        .map_err(system("find a free port"))
}

/// Signals for this process, children that end among them, as a line of numbers.
fn signals() -> Result<Receiver<i32>, LaunchError> {
    let mut heard = vec![SIGTERM, SIGINT, SIGCHLD];
    if !os::ignored(SIGHUP) {
        heard.push(SIGHUP);
    }
    let mut signals = Signals::new(heard).map_err(system("hear signals"))?;
    let (tell, told) = mpsc::channel();
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            for signal in signals.forever() {
                if tell.send(signal).is_err() {
                    return;
                }
            }
        })
        .map_err(system("start a thread"))?;
    Ok(told)
}

impl Launch {
    pub(crate) fn run(self) -> ExitCode {
        match self.all() {
            Ok(code) => ExitCode::from(code),
            Err(error) => {
                summary::say(&error.to_string());
                ExitCode::from(error.code())
            }
        }
    }

    /// Starts until it went well, or often enough.
    fn all(&self) -> Result<u8, LaunchError> {
        let hosts = hosts::read(&self.hosts)?;
        let mut places = hosts::place(&hosts, self.processes)?;
        if self.min.is_some_and(|min| min > places.len()) {
            return Err(LaunchError::Argument(format!(
                "--min is more than the {} processes there are",
                places.len()
            )));
        }
        if hosts.iter().any(|host| !host.here) && self.program[0].as_encoded_bytes().contains(&b'=')
        {
            return Err(LaunchError::Argument(format!(
                "the name of a program on other hosts must not have a '=': {}",
                self.program[0].display()
            )));
        }
        let run = random()?;
        let flight = self.flight_folder(&run)?;
        // Signals are heard before anything runs that would have to be ended.
        let signals = signals()?;
        let mut guard = Guard::start().map_err(system("start the guard of processes"))?;
        let mut restart = 0;
        loop {
            let records = match restart {
                0 => flight.folder.clone(),
                _ => flight.folder.join(format!("restart-{restart}")),
            };
            summary::clear(&records)?;
            let plan = self.plan(&hosts, &places, &run, restart, &records)?;
            let outcome = Attempt::start(plan, &mut guard)?.watch(&signals)?;
            let Some(first) = outcome.first else {
                return Ok(0);
            };
            summary::failure(&outcome, first, &hosts, &places, &records);
            let code = outcome.ended[first].end.code();
            if outcome.asked || restart == self.restarts {
                return Ok(code);
            }
            if let Some(min) = self.min {
                let left = survivors(&outcome, first, &hosts, &places);
                if left.len() < min {
                    summary::say(&format!(
                        "{} processes are left, and --min is {min}",
                        left.len()
                    ));
                    return Ok(code);
                }
                places = left;
            }
            restart += 1;
            summary::say(&format!(
                "restart {restart} of {} with {} processes",
                self.restarts,
                places.len()
            ));
        }
    }

    fn flight_folder(&self, run: &str) -> Result<Flight, LaunchError> {
        let (asked, path) = match (&self.flight, std::env::var_os("ANYMESH_FLIGHT")) {
            (Some(folder), _) => (true, folder.clone()),
            (None, Some(folder)) if !folder.is_empty() => (true, folder.into()),
            _ => (
                false,
                std::env::temp_dir().join(format!("anymesh-flight-{run}")),
            ),
        };
        match std::path::absolute(&path) {
            Ok(folder) => Ok(Flight { folder, asked }),
            Err(source) => Err(LaunchError::Folder { path, source }),
        }
    }

    fn plan<'a>(
        &'a self,
        hosts: &'a [Host],
        places: &'a [usize],
        run: &str,
        restart: u64,
        records: &Path,
    ) -> Result<Plan<'a>, LaunchError> {
        // Without its processes, the first host may be another now.
        let used: Vec<Host> = places.iter().map(|host| hosts[*host].clone()).collect();
        let address = match used.iter().all(|host| host.here) {
            true => "127.0.0.1",
            false => used[0].address(),
        };
        let port = self.master_port.map_or_else(|| meeting(&used), Ok)?;
        let mut variables: Vec<(OsString, OsString)> = self
            .env
            .iter()
            .map(|(name, value)| (name.into(), value.into()))
            .collect();
        for (name, value) in [
            ("MASTER_ADDR", address.to_string()),
            ("MASTER_PORT", port.to_string()),
            ("ANYMESH_RUN", run.to_string()),
            ("ANYMESH_RESTART", restart.to_string()),
        ] {
            variables.push((name.into(), value.into()));
        }
        variables.push(("ANYMESH_FLIGHT".into(), records.into()));
        let here = Path::new(".");
        let folder = std::env::current_dir().map_err(|source| LaunchError::Folder {
            path: here.into(),
            source,
        })?;
        Ok(Plan {
            program: &self.program,
            hosts,
            places,
            variables,
            token: random()?,
            folder,
            prefix: !self.no_prefix,
            grace: self.grace,
        })
    }
}

/// The places of the processes that did not die: those that gave up because another had died
/// count as alive.
fn survivors(outcome: &Outcome, first: usize, hosts: &[Host], places: &[usize]) -> Vec<usize> {
    let died = |rank: usize| {
        let ended = &outcome.ended[rank];
        let killed = matches!(ended.end, End::Signal(_)) && !ended.told;
        // What ssh says when it has lost the host.
        let lost = !hosts[places[rank]].here && ended.end == End::Code(255);
        rank == first || killed || lost
    };
    (0..places.len())
        .filter(|rank| !died(*rank))
        .map(|rank| places[rank])
        .collect()
}

//! One start of all processes, until the last has ended.

use super::{
    LaunchError,
    guard::Guard,
    hosts::Host,
    os::{self, End, signal_group},
    output::{Copying, To},
    remote,
};
use signal_hook::consts::{SIGHUP, SIGINT, SIGKILL, SIGTERM};
use std::{
    ffi::OsString,
    io::Write,
    path::PathBuf,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::{Duration, Instant},
};

/// How long processes have between SIGTERM and SIGKILL.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// How long ssh has to bring the end of a killed process back, and what was left behind by a
/// process to end by itself, before they are killed too.
const STRAGGLERS: Duration = Duration::from_secs(2);
/// How often to look, should a signal about a child be missed.
const LOOK: Duration = Duration::from_millis(500);

/// What to start.
pub(super) struct Plan<'a> {
    pub(super) program: &'a [OsString],
    pub(super) hosts: &'a [Host],
    /// The host of each process.
    pub(super) places: &'a [usize],
    /// What all processes get.
    pub(super) variables: Vec<(OsString, OsString)>,
    pub(super) token: String,
    pub(super) folder: PathBuf,
    pub(super) prefix: bool,
    pub(super) grace: Duration,
}

struct Process {
    child: Child,
    /// The line to a process on another host.
    line: Option<ChildStdin>,
    end: Option<End>,
    /// Whether it ended only after it was told to.
    told: bool,
}

impl Process {
    fn leader(&self) -> i32 {
        self.child.id() as i32
    }

    fn signal(&mut self, signal: i32) {
        let name = match signal {
            SIGTERM => "TERM\n",
            SIGINT => "INT\n",
            SIGHUP => "HUP\n",
            _ => "KILL\n",
        };
        match &mut self.line {
            // A line that is cut has ended the process already.
            Some(line) => drop(line.write_all(name.as_bytes())),
            None => signal_group(self.leader(), signal),
        }
    }
}

/// How a process of an attempt ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ended {
    pub(super) pid: u32,
    pub(super) end: End,
    /// Whether it ended only after it was told to.
    pub(super) told: bool,
}

/// How an attempt went.
pub(super) struct Outcome {
    /// By rank.
    pub(super) ended: Vec<Ended>,
    /// The rank that failed first.
    pub(super) first: Option<usize>,
    /// Whether a signal asked this command to leave.
    pub(super) asked: bool,
}

/// What happens to the processes that still run.
#[derive(Clone, Copy)]
enum Stage {
    Running,
    /// One has failed; the others may notice by themselves.
    Grace(Instant),
    /// They were told to leave.
    Leaving(Instant),
    /// They were killed.
    Killed(Instant),
    /// So were the commands that started them elsewhere.
    Over,
}

pub(super) struct Attempt<'a> {
    plan: Plan<'a>,
    guard: &'a mut Guard,
    processes: Vec<Process>,
    copying: Copying,
    first: Option<usize>,
    stage: Stage,
    /// How many signals asked this command to leave.
    asked: usize,
}

impl<'a> Attempt<'a> {
    /// Starts all. When one cannot be started, none is left.
    pub(super) fn start(plan: Plan<'a>, guard: &'a mut Guard) -> Result<Self, LaunchError> {
        let mut attempt = Self {
            guard,
            processes: vec![],
            copying: Copying::new(),
            first: None,
            stage: Stage::Running,
            asked: 0,
            plan,
        };
        for rank in 0..attempt.plan.places.len() {
            attempt.start_one(rank)?;
        }
        Ok(attempt)
    }

    fn start_one(&mut self, rank: usize) -> Result<(), LaunchError> {
        let plan = &self.plan;
        let places = plan.places;
        let host = &plan.hosts[places[rank]];
        let local = places[..rank]
            .iter()
            .filter(|h| **h == places[rank])
            .count();
        let together = places.iter().filter(|h| **h == places[rank]).count();
        let mut variables = plan.variables.clone();
        for (name, value) in [
            ("RANK", rank),
            ("WORLD_SIZE", places.len()),
            ("LOCAL_RANK", local),
            ("LOCAL_WORLD_SIZE", together),
        ] {
            variables.push((name.into(), value.to_string().into()));
        }
        let mut command = if host.here {
            let mut command = Command::new(&plan.program[0]);
            command.args(&plan.program[1..]).stdin(Stdio::null());
            for (name, _) in std::env::vars_os().filter(|(name, _)| of_another_launcher(name)) {
                command.env_remove(name);
            }
            command.envs(variables).env("ANYMESH_TOKEN", &plan.token);
            command
        } else {
            let mut command = remote::command(&host.name, &plan.folder, &variables, plan.program);
            command.stdin(Stdio::piped());
            command
        };
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        os::bind(&mut command);
        let mut child = command.spawn().map_err(|source| LaunchError::Spawn {
            program: command.get_program().to_owned(),
            source,
        })?;
        self.guard.add(child.id() as i32);
        let prefix = match plan.prefix {
            true => format!("[{rank}] "),
            false => String::new(),
        };
        let (line, out, err) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        self.processes.push(Process {
            child,
            line,
            end: None,
            told: false,
        });
        let threads = |source| LaunchError::System {
            what: "start a thread",
            source,
        };
        if let Some(out) = out {
            self.copying
                .add(out, To::Stdout, &prefix)
                .map_err(threads)?;
        }
        if let Some(err) = err {
            self.copying
                .add(err, To::Stderr, &prefix)
                .map_err(threads)?;
        }
        if let Some(line) = self.processes.last_mut().and_then(|p| p.line.as_mut()) {
            // Where this fails ssh has ended, and its end tells.
            let _ = line.write_all(format!("{}\n", self.plan.token).as_bytes());
        }
        Ok(())
    }

    /// Waits until the last process has ended.
    pub(super) fn watch(mut self, signals: &Receiver<i32>) -> Result<Outcome, LaunchError> {
        loop {
            self.look()?;
            if self.processes.iter().all(|p| p.end.is_some()) {
                break;
            }
            let until = self.next_stage();
            let time = until.map_or(LOOK, |t| {
                LOOK.min(t.saturating_duration_since(Instant::now()))
            });
            match signals.recv_timeout(time) {
                Ok(signal) if [SIGTERM, SIGINT, SIGHUP].contains(&signal) => self.ask(signal),
                Ok(_) | Err(RecvTimeoutError::Timeout) => {}
                // The thread that hears signals never ends; if it did, looking is enough.
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(time),
            }
        }
        self.copying.finish(STRAGGLERS);
        let ended = self.processes.iter().map(|p| Ended {
            pid: p.child.id(),
            end: p.end.unwrap_or(End::Code(0)),
            told: p.told,
        });
        Ok(Outcome {
            ended: ended.collect(),
            first: self.first,
            asked: self.asked > 0,
        })
    }

    /// Notes who has ended since.
    fn look(&mut self) -> Result<(), LaunchError> {
        let told = !matches!(self.stage, Stage::Running | Stage::Grace(_));
        let mut failed = vec![];
        for (rank, process) in self.processes.iter_mut().enumerate() {
            if process.end.is_some() {
                continue;
            }
            let end = os::ended(process.leader()).map_err(|source| LaunchError::System {
                what: "wait for a process",
                source,
            })?;
            process.end = match end {
                // The shell over there tells a signal so.
                Some(End::Code(code @ 129..=192)) if process.line.is_some() => {
                    Some(End::Signal(code - 128))
                }
                end => end,
            };
            if let Some(end) = process.end {
                process.told = told;
                if end.failed() {
                    failed.push((matches!(end, End::Code(_)), rank));
                }
            }
        }
        if self.first.is_none() {
            // Of several at once, one that was killed is rather the cause than one that gave up.
            self.first = failed.into_iter().min().map(|(_, rank)| rank);
        }
        Ok(())
    }

    /// Goes on to the next stage if it is time; returns when to ask again.
    fn next_stage(&mut self) -> Option<Instant> {
        let now = Instant::now();
        if let (Stage::Running, Some(_)) = (self.stage, self.first) {
            self.stage = Stage::Grace(now + self.plan.grace);
        }
        match self.stage {
            Stage::Grace(until) if now >= until => {
                self.signal(SIGTERM);
                self.stage = Stage::Leaving(now + LAST_WORDS);
            }
            Stage::Leaving(until) if now >= until => {
                self.signal(SIGKILL);
                self.stage = Stage::Killed(now + STRAGGLERS);
            }
            Stage::Killed(until) if now >= until => {
                for process in self.processes.iter().filter(|p| p.end.is_none()) {
                    signal_group(process.leader(), SIGKILL);
                }
                self.stage = Stage::Over;
            }
            _ => {}
        }
        match self.stage {
            Stage::Grace(t) | Stage::Leaving(t) | Stage::Killed(t) => Some(t),
            Stage::Running | Stage::Over => None,
        }
    }

    fn signal(&mut self, signal: i32) {
        for process in self.processes.iter_mut().filter(|p| p.end.is_none()) {
            process.signal(signal);
        }
    }

    /// Passes a signal on. They may take the time they need to save; whoever asks a third time
    /// does not want to wait.
    fn ask(&mut self, signal: i32) {
        self.asked += 1;
        if self.asked < 3 {
            self.signal(signal);
        } else if !matches!(self.stage, Stage::Killed(_) | Stage::Over) {
            self.signal(SIGKILL);
            self.stage = Stage::Killed(Instant::now() + STRAGGLERS);
        }
    }
}

impl Drop for Attempt<'_> {
    /// Whatever happened, nothing stays: neither a process nor what it left behind in its group.
    fn drop(&mut self) {
        for process in &mut self.processes {
            // Elsewhere the line is cut by this.
            process.line = None;
            signal_group(process.leader(), SIGKILL);
        }
        for process in &mut self.processes {
            self.guard.remove(process.leader());
            let _ = process.child.wait();
        }
        self.copying.finish(STRAGGLERS);
    }
}

/// Whether a variable is what a launcher outside of this one said about its own processes.
fn of_another_launcher(name: &std::ffi::OsStr) -> bool {
    let outer = [
        "TORCHELASTIC_",
        "OMPI_COMM_WORLD_",
        "PMI_",
        "PMIX_",
        "MPI_LOCAL",
        "GROUP_RANK",
    ];
    name.to_str()
        .is_some_and(|name| outer.iter().any(|start| name.starts_with(start)))
}

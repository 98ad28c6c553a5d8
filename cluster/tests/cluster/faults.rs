//! Accidents of one process, at every call of a training run: what the others say, how soon, and
//! that the last checkpoint is whole. `ANYMESH_FAULTS=all` looks at every rank and call, otherwise
//! it is a sample.

use crate::{
    fault::FAULT,
    run::{Ended, Process, all_succeed_with, free_port, start, start_one},
    train::{prepare, simulated},
};
use anymesh_checkpoint::{latest, list};
use libtest_mimic::{Failed, Trial};
use std::{
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How long calls wait here, and processes for each other at the start.
const DEADLINE: Duration = Duration::from_secs(3);
/// How much longer a failure may take to be told.
const MORE: Duration = Duration::from_secs(2);
const PROCESSES: usize = 4;

pub(crate) fn trials() -> Vec<Trial> {
    let all = std::env::var("ANYMESH_FAULTS").is_ok_and(|v| v == "all");
    // One after the other, since each keeps the machine busy by itself.
    let run = move || {
        let calls = calls()?;
        let mut cases = vec![];
        let every = if all { 1 } else { 9 };
        let seldom = if all { 5 } else { 40 };
        for rank in 0..PROCESSES {
            // Others in every run.
            let shift = if all { 0 } else { std::process::id() as u64 };
            for call in 0..calls {
                let turn = call + rank as u64 * 5 + shift;
                for (how, each) in [
                    ("kill", every),
                    ("during", 2 * every),
                    ("stop", seldom),
                    ("delay", seldom),
                    ("exit", seldom),
                    ("panic", seldom),
                    ("error", seldom),
                ] {
                    if turn % each == how.len() as u64 % each {
                        cases.push(Case::new(how, rank, call.to_string()));
                    }
                }
            }
            for how in ["kill", "stop"] {
                if all || (rank + shift as usize).is_multiple_of(3) {
                    cases.push(Case::new(how, rank, "start".into()));
                }
            }
        }
        matrix(cases)
    };
    vec![
        Trial::test("a_fault_at_any_call_is_told_to_all", run),
        Trial::test("many_processes_meet_and_one_is_lost", move || {
            many(if all { 64 } else { 12 })
        }),
        Trial::test("a_kill_while_processes_meet_is_told_to_all", move || {
            killed_while_meeting(if all { 80 } else { 12 })
        }),
    ]
}

/// How many calls a process makes, and that all is well without a fault.
fn calls() -> Result<u64, Failed> {
    let root = Root::new("count")?;
    let out = all_succeed_with(
        "faulty",
        PROCESSES,
        &[
            (FAULT, "none 0 never".into()),
            ("ANYMESH_TEST_ROOT", root.0.display().to_string()),
        ],
    )?;
    let before = latest(&root.0)?.ok_or("no checkpoint")?;
    if before.manifest().step != crate::train::STEPS {
        return Err("not all steps were saved".into());
    }
    let first = list(&root.0)?.into_iter().find(|f| f.step == Ok(0));
    let first = anymesh_checkpoint::Checkpoint::open(first.ok_or("no first step")?.path)?;
    let expected = simulated(PROCESSES, &first)?;
    let mut calls = 0;
    for out in out {
        let said = Said::of(&out);
        if said.losses() != expected {
            return Err(format!("{out}\nexpected {expected:?}").into());
        }
        calls = calls.max(said.number("done").ok_or("no count")?);
    }
    Ok(calls)
}

/// What a process said, each with its time in microseconds.
pub(crate) struct Said(Vec<(u64, String)>);

impl Said {
    pub(crate) fn of(output: &str) -> Self {
        let line = |line: &str| {
            let (time, text) = line.split_once(' ')?;
            Some((time.parse().ok()?, text.to_string()))
        };
        Self(output.lines().filter_map(line).collect())
    }

    pub(crate) fn all(&self, word: &str) -> Vec<(u64, &str)> {
        let rest = |(time, text): &'_ (u64, String)| {
            let rest = text.strip_prefix(word)?;
            Some((*time, rest.len()))
        };
        self.0
            .iter()
            .filter_map(|said| rest(said).map(|(t, n)| (t, said.1[said.1.len() - n..].trim())))
            .collect()
    }

    pub(crate) fn number(&self, word: &str) -> Option<u64> {
        self.all(word).last()?.1.parse().ok()
    }

    pub(crate) fn losses(&self) -> Vec<String> {
        let losses = self.all("loss").into_iter();
        losses.map(|(_, text)| format!("loss {text}")).collect()
    }
}

/// A folder with a checkpoint, until it is dropped.
pub(crate) struct Root(pub(crate) PathBuf);

impl Root {
    pub(crate) fn new(name: &str) -> Result<Self, Failed> {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("anymesh-faults-{}-{name}-{number}", std::process::id());
        let root = Self(std::env::temp_dir().join(name));
        std::fs::create_dir_all(&root.0)?;
        prepare(&root.0)?;
        Ok(root)
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// An accident of one process.
#[derive(Clone, Debug)]
struct Case {
    how: &'static str,
    rank: usize,
    at: String,
}

impl Case {
    fn new(how: &'static str, rank: usize, at: String) -> Self {
        Self { how, rank, at }
    }

    fn way(&self) -> &'static str {
        match (self.how, self.at.as_str()) {
            ("kill", "start") => "kill before the start",
            ("stop", "start") => "stop before the start",
            _ => self.how,
        }
    }

    /// What the others should say it is.
    fn kinds(&self) -> &'static [&'static str] {
        match (self.how, self.at.as_str()) {
            (_, "start") | ("stop" | "delay", _) => &["timeout"],
            ("error" | "panic", _) => &["elsewhere"],
            _ => &["lost"],
        }
    }

    /// Runs it; how long the others took, in seconds.
    fn run(&self) -> Result<Vec<f64>, Failed> {
        let root = Root::new(self.how)?;
        let Self { how, rank, at } = self;
        let mut processes = start(
            "faulty",
            PROCESSES,
            &[
                (FAULT, format!("{how} {rank} {at}")),
                ("ANYMESH_TEST_ROOT", root.0.display().to_string()),
                ("ANYMESH_TIMEOUT", DEADLINE.as_secs().to_string()),
                ("ANYMESH_START_TIMEOUT", DEADLINE.as_secs().to_string()),
            ],
        )?;
        let ended = end(&mut processes, Some(self.rank))?;
        if let Some(saved) = ended
            .iter()
            .filter_map(|e| Said::of(&e.output).number("saved"))
            .max()
        {
            is_whole(&root.0, saved)?;
        }
        is_whole(&root.0, 0)?;
        self.judge(&ended)
    }

    fn judge(&self, ended: &[Ended]) -> Result<Vec<f64>, Failed> {
        let victim = Said::of(&ended[self.rank].output);
        let Some((struck, _)) = victim.all("fault").first().copied() else {
            return Err(format!("{self:?}: no fault: {ended:#?}").into());
        };
        let mut took = vec![];
        for (process, ended) in ended.iter().enumerate().filter(|(p, _)| *p != self.rank) {
            let said = Said::of(&ended.output);
            let error = said.all("error").first().copied();
            let bad = |what: &str| -> Failed {
                format!("{self:?}: process {process} {what}: {ended:#?}").into()
            };
            // A process that was through before it mattered is no survivor of anything.
            if error.is_none() && ended.code == Some(0) && self.how != "kill" {
                continue;
            }
            let Some((time, kind)) = error else {
                return Err(bad("told no error"));
            };
            let names = format!("[{}]", self.rank);
            // In a save it may be the checkpoint's own protocol that notices an error first.
            let in_a_save = self.how == "error" && kind.contains(&format!("rank {} ", self.rank));
            if !in_a_save && !self.kinds().iter().any(|k| kind == format!("{k} {names}")) {
                return Err(bad("told another error"));
            }
            let seconds = time.saturating_sub(struck) as f64 / 1e6;
            if seconds > (DEADLINE + MORE).as_secs_f64() {
                return Err(bad("took too long"));
            }
            took.push(seconds);
        }
        Ok(took)
    }
}

/// Waits for all processes; one that may be stopped is let go on when the others have ended, and must
/// end then.
fn end(processes: &mut [Process], stopped: Option<usize>) -> Result<Vec<Ended>, Failed> {
    let now = Instant::now();
    let until = now + Duration::from_secs(60);
    let mut ended: Vec<Option<Ended>> = processes.iter().map(|_| None).collect();
    let order = (0..processes.len()).filter(|p| Some(*p) != stopped);
    for p in order.chain(stopped) {
        if Some(p) == stopped {
            let pid = processes[p].child.id().to_string();
            // It may have ended long ago.
            let _ = std::process::Command::new("kill")
                .args(["-s", "CONT", &pid])
                .stderr(std::process::Stdio::null())
                .status();
        }
        let end = processes[p].end(until)?;
        if end.code == Some(-1) {
            return Err(format!("process {p} hangs: {end:#?}").into());
        }
        ended[p] = Some(end);
    }
    Ok(ended.into_iter().flatten().collect())
}

/// All checkpoints in sight are whole, and the last is at least of this step.
pub(crate) fn is_whole(root: &Path, step: u64) -> Result<(), Failed> {
    for found in list(root)? {
        let checkpoint = anymesh_checkpoint::Checkpoint::open(&found.path)?;
        if found.step.is_err() || !checkpoint.verify().is_empty() {
            return Err(format!("{} is torn", found.path.display()).into());
        }
    }
    let last = latest(root)?.ok_or("no checkpoint is left")?;
    match last.manifest().step >= step {
        true => Ok(()),
        false => Err(format!("step {step} was saved and is lost").into()),
    }
}

/// Runs cases, some at once.
fn matrix(cases: Vec<Case>) -> Result<(), Failed> {
    let now = Instant::now();
    let (next, took) = (AtomicUsize::new(0), Mutex::new((vec![], vec![])));
    let at_once = 2 * thread::available_parallelism().map_or(1, |n| n.get());
    thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let result = case.run();
                    let mut took = took.lock().unwrap_or_else(PoisonError::into_inner);
                    match result {
                        Ok(seconds) => took.0.push((case.way(), seconds)),
                        Err(e) => took.1.push(e.message().unwrap_or_default().to_string()),
                    }
                }
            });
        }
    });
    let (took, failed) = took.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut ways: Vec<&str> = cases.iter().map(Case::way).collect();
    ways.sort_unstable();
    ways.dedup();
    for way in ways {
        let of = took.iter().filter(|(how, _)| *how == way);
        let mut seconds: Vec<f64> = of.clone().flat_map(|(_, s)| s.iter().copied()).collect();
        seconds.sort_unstable_by(f64::total_cmp);
        let at = |share: usize| seconds.get(seconds.len().saturating_sub(1) * share / 2);
        println!(
            "{way}: {} cases, {} survivors told of it after {:.3} s (median), {:.3} s (longest)",
            of.count(),
            seconds.len(),
            at(1).unwrap_or(&0.0),
            at(2).unwrap_or(&0.0),
        );
    }
    println!(
        "{} cases in {:.0} s",
        cases.len(),
        now.elapsed().as_secs_f64()
    );
    match failed.is_empty() {
        true => Ok(()),
        false => {
            let text = failed[..failed.len().min(5)].join("\n\n");
            Err(format!("{} of {} cases failed:\n{text}", failed.len(), cases.len()).into())
        }
    }
}

/// Kills a process some milliseconds after it was started: before it connects, while the hub waits
/// for others (the last process comes late), between its connections.
fn killed_while_meeting(times: usize) -> Result<(), Failed> {
    for i in 0..times {
        let (rank, wait) = (i % PROCESSES, Duration::from_millis(13 * i as u64 % 200));
        let root = Root::new("meet")?;
        let variables = [
            ("ANYMESH_TEST_ROOT", root.0.display().to_string()),
            ("ANYMESH_TIMEOUT", DEADLINE.as_secs().to_string()),
            ("ANYMESH_START_TIMEOUT", DEADLINE.as_secs().to_string()),
        ];
        let (port, mut processes) = (free_port(), vec![]);
        let begun = Instant::now();
        for p in 0..PROCESSES {
            if p + 1 == PROCESSES && i % 2 == 0 {
                thread::sleep(Duration::from_millis(100));
            }
            processes.push(start_one("faulty", p, PROCESSES, port, &variables)?);
        }
        thread::sleep((begun + wait).saturating_duration_since(Instant::now()));
        let _ = processes[rank].child.kill();
        let struck = Instant::now();
        let ended = end(&mut processes, None)?;
        let longest = (DEADLINE + MORE).max(Duration::from_secs(5));
        for (p, ended) in ended.iter().enumerate().filter(|(p, _)| *p != rank) {
            let said = Said::of(&ended.output);
            // All may have been through before.
            if ended.code == Some(0) && said.number("done").is_some() {
                continue;
            }
            let named = said.all("error").first().is_some_and(|(_, kind)| {
                // Where process 0 gives up first, it is the one that others miss.
                let names = [format!("[{rank}]"), "[0]".into()];
                ["lost", "timeout"].iter().any(|k| kind.starts_with(k))
                    && names.iter().any(|n| kind.ends_with(n.as_str()))
            });
            if !named || struck.elapsed() > longest + MORE {
                let text = format!("kill {rank} after {wait:?}: process {p}: {ended:#?}");
                return Err(text.into());
            }
        }
        is_whole(&root.0, 0)?;
    }
    Ok(())
}

/// Many more processes than the machine has cores: they train to the end, and where one is killed, all
/// others are told.
fn many(processes: usize) -> Result<(), Failed> {
    let root = Root::new("many")?;
    let train = |fault: String| -> Result<Vec<Ended>, Failed> {
        let variables = [
            (FAULT, fault),
            ("ANYMESH_TEST_ROOT", root.0.display().to_string()),
            ("ANYMESH_TIMEOUT", "60".into()),
        ];
        end(&mut start("faulty", processes, &variables)?, None)
    };
    let killed = processes / 2;
    for (p, ended) in train(format!("kill {killed} 3"))?.iter().enumerate() {
        let told = ended.output.contains(&format!("error lost [{killed}]"));
        if p != killed && !told {
            return Err(format!("process {p}: {ended:#?}").into());
        }
    }
    match train("none 0 never".into())?
        .iter()
        .find(|e| e.code != Some(0))
    {
        Some(bad) => Err(format!("{bad:#?}").into()),
        None => is_whole(&root.0, crate::train::STEPS),
    }
}

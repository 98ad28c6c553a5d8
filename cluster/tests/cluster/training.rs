//! Training over processes: the losses are those of the simulation to the bit, however the ranks are
//! dealt out, also after a resume on another number of processes.

use crate::{
    model::{Training, other},
    roles,
    run::{Ended, all_succeed_with, start},
};
use anymesh_checkpoint::{Contents, latest, list, save};
use anymesh_cluster::{Cluster, stop};
use anymesh_core::{Mesh, Result};
use libtest_mimic::{Failed, Trial};
use serde::{Deserialize, Serialize};
use std::{
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

/// What the processes of a run are told.
#[derive(Clone, Default, Serialize, Deserialize)]
pub(crate) struct Run {
    axes: String,
    /// Axes that are dealt out first.
    order: Vec<String>,
    /// How the parameters lie.
    layout: String,
    /// Until this step, or until a signal.
    until: u64,
    /// Where checkpoints are; one is there already where the run resumes.
    folder: Option<PathBuf>,
    /// The step after which it saves.
    save_at: Option<u64>,
}

const RUN: &str = "ANYMESH_TEST_RUN";
/// The worst relative difference of a loss where sums are taken in another order, over 25 steps of
/// AdamW in f32.
const BOUND: f64 = 1e-5;

impl Run {
    fn new(axes: &str, layout: &str, until: u64) -> Self {
        Self {
            axes: axes.into(),
            layout: layout.into(),
            until,
            ..Self::default()
        }
    }

    /// The losses of the run on a mesh; `stop` is asked after each step.
    fn train(&self, mesh: &Mesh, stop: impl Fn() -> Result<bool>) -> Result<Vec<f64>> {
        let mut training = Training::new(mesh, &self.layout)?;
        if let Some(folder) = self.folder.as_ref().filter(|f| f.exists())
            && let Some(saved) = latest(folder).map_err(other)?
        {
            training.load(&saved)?;
        }
        let mut losses = vec![];
        while training.step < self.until {
            losses.push(training.step()?);
            let stopped = stop()?;
            if let Some(folder) = &self.folder
                && (Some(training.step) == self.save_at || stopped)
            {
                let contents = Contents::new(training.step, training.tensors.clone());
                save(folder, &format!("step-{}", training.step), &contents).map_err(other)?;
            }
            if stopped {
                break;
            }
        }
        Ok(losses)
    }

    /// What the simulation of all ranks in one process gives.
    fn simulated(&self) -> Result<Vec<f64>> {
        let alone = Self {
            save_at: None,
            ..self.clone()
        };
        let mesh = Mesh::new(&self.axes, &anymesh_backend_cpu::device())?;
        alone.train(&mesh, || Ok(false))
    }

    /// What each of `n` processes says.
    fn told(&self, n: usize) -> Result<Vec<Told>, Failed> {
        all_succeed_with("training", n, &[self.variable()?])?
            .iter()
            .map(|output| read(output))
            .collect()
    }

    fn variable(&self) -> Result<(&'static str, String), Failed> {
        Ok((RUN, serde_json::to_string(self)?))
    }

    /// Every process that has ranks must have the losses of the simulation, to the bit.
    fn same_over(&self, n: usize) -> Result<(Vec<f64>, Vec<Told>), Failed> {
        let simulated = self.simulated()?;
        let all = self.told(n)?;
        let nothing = vec![f64::NAN; simulated.len()];
        for (process, told) in all.iter().enumerate() {
            let expected = match told.ranks {
                0 => &nothing,
                _ => &simulated,
            };
            equal(&told.losses, expected).map_err(|e| format!("process {process}: {e}"))?;
        }
        Ok((simulated, all))
    }
}

/// What a process prints.
#[derive(Serialize, Deserialize)]
struct Told {
    losses: Vec<u64>,
    /// How many ranks it has.
    ranks: usize,
    placement: String,
}

fn read(output: &str) -> Result<Told, Failed> {
    let line = output.lines().last().ok_or("a process said nothing")?;
    Ok(serde_json::from_str(line).map_err(|e| format!("{e} in {output}"))?)
}

fn equal(told: &[u64], expected: &[f64]) -> Result<(), String> {
    let expected: Vec<u64> = expected.iter().map(|x| x.to_bits()).collect();
    let at = (0..told.len().max(expected.len())).find(|i| told.get(*i) != expected.get(*i));
    match at {
        None => Ok(()),
        Some(i) => Err(format!(
            "{} losses and {} of the simulation; {i} is {:?} and {:?}",
            told.len(),
            expected.len(),
            told.get(i).map(|x| f64::from_bits(*x)),
            expected.get(i).map(|x| f64::from_bits(*x))
        )),
    }
}

/// The role: trains as one process of several.
pub(crate) fn train() -> Result<()> {
    let text = std::env::var(RUN).map_err(other)?;
    let run: Run = serde_json::from_str(&text).map_err(other)?;
    stop::install().map_err(other)?;
    let cluster = roles::cluster()?;
    let order: Vec<&str> = run.order.iter().map(String::as_str).collect();
    let dealt: Cluster = cluster.with_order(&order);
    let mesh = Mesh::new(&run.axes, &dealt)?;
    let losses = cluster.run(|cluster| run.train(&mesh, || cluster.stop_requested()))?;
    cluster.barrier()?;
    let told = Told {
        losses: losses.iter().map(|x| x.to_bits()).collect(),
        ranks: mesh.addressable().len(),
        placement: dealt.placement(&mesh),
    };
    println!("{}", serde_json::to_string(&told).map_err(other)?);
    Ok(())
}

/// A folder that goes when this does.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("anymesh-{name}-{}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn fifty_steps() -> Result<(), Failed> {
    for (axes, layout) in [
        ("dp=4", "whole"),
        ("dp=2, tp=2", "tensor"),
        ("dp=4", "sharded"),
        ("dp=2, tp=2", "both"),
    ] {
        let (losses, _) = Run::new(axes, layout, 50)
            .same_over(4)
            .map_err(|e| format!("{axes}, {layout}: {}", e.message().unwrap_or_default()))?;
        let (first, last) = (losses[0], losses[49]);
        if losses.len() != 50 || last > 0.9 * first {
            return Err(format!("{axes}, {layout}: it learns nothing: {losses:?}").into());
        }
        println!("{axes}, {layout}: 50 losses equal to the bit, {first} to {last}");
    }
    Ok(())
}

/// The same as a job of four processes, whose lines `job` gives in any order.
pub(crate) fn in_a_job(
    job: impl Fn(&[(&str, String)]) -> Result<String, Failed>,
) -> Result<(), Failed> {
    let run = Run::new("dp=2, tp=2", "both", 50);
    let (simulated, output) = (run.simulated()?, job(&[run.variable()?])?);
    // Launchers may end one line after the beginning of the next.
    let told = serde_json::Deserializer::from_str(&output).into_iter::<Told>();
    let told: Vec<Told> = told.collect::<Result<_, _>>()?;
    if told.len() != 4 {
        return Err(format!("{} of 4 processes told their losses: {output}", told.len()).into());
    }
    for told in told {
        equal(&told.losses, &simulated)?;
    }
    Ok(())
}

/// Saved by four processes in the middle, gone on with on two, three and one.
fn resume() -> Result<(), Failed> {
    let folder = Folder::new("resume");
    let run = Run {
        folder: Some(folder.0.clone()),
        save_at: Some(25),
        ..Run::new("dp=2, tp=2", "both", 50)
    };
    let whole = Run {
        folder: None,
        ..run.clone()
    };
    let (simulated, uninterrupted) = (whole.simulated()?, run.told(4)?);
    for told in &uninterrupted {
        equal(&told.losses, &simulated)?;
    }
    for (n, axes) in [
        (2, "dp=2"),
        (2, "tp=2"),
        (3, "dp=3"),
        (1, "dp=1"),
        (1, "dp=2, tp=2"),
        (4, "dp=2, tp=2"),
    ] {
        let on = Run {
            axes: axes.into(),
            save_at: None,
            ..run.clone()
        };
        let (losses, _) = on.same_over(n)?;
        if losses.len() != 25 {
            return Err(format!("{axes}: {} steps after the resume", losses.len()).into());
        }
        let worst = losses
            .iter()
            .zip(&simulated[25..])
            .map(|(a, b)| (a - b).abs() / b.abs())
            .fold(0.0, f64::max);
        println!("resumed on {n} processes with {axes}: at most {worst:.1e} from uninterrupted");
        let bound = if axes == run.axes { 0.0 } else { BOUND };
        if worst > bound {
            return Err(format!("{axes} on {n}: {worst:e} from the uninterrupted run").into());
        }
    }
    Ok(())
}

/// More ranks than processes, evenly and not, and fewer.
fn uneven() -> Result<(), Failed> {
    for (axes, layout, ranks) in [
        ("dp=4, tp=2", "both", &[4, 4][..]),
        ("dp=5", "sharded", &[1, 2, 2]),
        ("dp=2", "sharded", &[1, 1, 0, 0]),
    ] {
        let folder = Folder::new("uneven");
        let run = Run {
            folder: Some(folder.0.clone()),
            save_at: Some(5),
            ..Run::new(axes, layout, 10)
        };
        let (_, all) = run.same_over(ranks.len())?;
        let saved = latest(&folder.0)?.ok_or("no checkpoint")?;
        if saved.manifest().step != 5 || !saved.verify().is_empty() {
            return Err(format!("{axes}: {:?}", saved.verify()).into());
        }
        let found: Vec<usize> = all.iter().map(|told| told.ranks).collect();
        if found != ranks {
            return Err(format!("{axes}: {found:?}, expected {ranks:?}").into());
        }
    }
    Ok(())
}

/// Ranks are dealt out in another order of axes: others talk to each other, and nothing else changes.
fn order_of_axes() -> Result<(), Failed> {
    let host = |text: &str| {
        let line = text.lines().nth(3).unwrap_or_default();
        line.split(',')
            .next()
            .unwrap_or_default()
            .trim()
            .to_string()
    };
    for (order, dp, tp, ranks) in [
        (
            &[][..],
            "between processes of a node",
            "inside of a process",
            "[0, 1] [2, 3]",
        ),
        (
            &["tp"],
            "inside of a process",
            "between processes of a node",
            "[0, 2] [1, 3]",
        ),
    ] {
        let run = Run {
            order: order.iter().map(|axis| axis.to_string()).collect(),
            ..Run::new("dp=2, tp=2", "both", 5)
        };
        let (_, all) = run.same_over(2)?;
        let (first, second) = ranks.split_once("] ").ok_or("two lists")?;
        for told in all {
            let host = host(&told.placement);
            let expected = format!(
                "mesh(dp=2, tp=2): 4 ranks, 2 processes, 1 nodes\n  dp=2: {dp}\n  tp=2: {tp}\n  {host}, process 0: ranks {first}]\n  {host}, process 1: ranks {second}\n"
            );
            if told.placement != expected {
                return Err(format!("{}\nexpected\n{expected}", told.placement).into());
            }
        }
    }
    Ok(())
}

/// SIGTERM to one process of four: all of them save one checkpoint, together, and succeed.
fn sigterm() -> Result<(), Failed> {
    let folder = Folder::new("sigterm");
    let run = Run {
        folder: Some(folder.0.clone()),
        save_at: Some(3),
        ..Run::new("dp=2, tp=2", "both", u64::MAX)
    };
    let now = Instant::now();
    let until = now + Duration::from_secs(120);
    let mut processes = start("training", 4, &[run.variable()?])?;
    while !folder.0.join("step-3").exists() {
        if Instant::now() > until {
            return Err("no checkpoint at step 3".into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let pid = processes[2].child.id().to_string();
    let sent = Command::new("kill").args(["-s", "TERM", &pid]).status()?;
    if !sent.success() {
        return Err("the signal could not be sent".into());
    }
    let ended = processes.iter_mut().map(|p| p.end(until));
    let ended: Vec<Ended> = ended.collect::<Result<_, _>>()?;
    if let Some(bad) = ended.iter().find(|e| e.code != Some(0)) {
        return Err(format!("{bad:#?}").into());
    }
    let told: Vec<Told> = ended
        .iter()
        .map(|e| read(&e.output))
        .collect::<Result<_, _>>()?;
    let steps = told[0].losses.len() as u64;
    let there: Vec<u64> = list(&folder.0)?
        .into_iter()
        .map(|found| found.step)
        .collect::<Result<_, _>>()?;
    if there != [steps, 3] {
        return Err(format!("{steps} steps, checkpoints of steps {there:?}").into());
    }
    let saved = latest(&folder.0)?.ok_or("no checkpoint")?;
    let damaged = saved.verify();
    if !damaged.is_empty() {
        return Err(format!("{damaged:?}").into());
    }
    let simulated = Run::new(&run.axes, &run.layout, steps).simulated()?;
    for told in &told {
        equal(&told.losses, &simulated)?;
    }
    Ok(())
}

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::test(
            "training_over_4_processes_is_the_simulation_to_the_bit",
            fifty_steps,
        ),
        Trial::test(
            "training_saved_by_4_processes_goes_on_with_2_3_and_1",
            resume,
        ),
        Trial::test("training_with_more_and_fewer_ranks_than_processes", uneven),
        Trial::test("training_with_axes_in_another_order", order_of_axes),
        Trial::test(
            "sigterm_to_one_of_4_processes_saves_once_and_all_leave",
            sigterm,
        )
        .with_ignored_flag(!cfg!(unix)),
    ]
}

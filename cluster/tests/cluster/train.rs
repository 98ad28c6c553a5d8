//! A small training run: data and tensor parallel where there are ranks for it, saved after every
//! step, and begun from the last checkpoint.

use crate::fault::Fault;
use anymesh_checkpoint::{Checkpoint, Contents, Error, Result, latest, save};
use anymesh_cluster::Cluster;
use anymesh_core::{Machine, Mesh, Tensor};
use std::{
    collections::BTreeMap,
    io::Write,
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// The step at which training ends.
pub(crate) const STEPS: u64 = 2;

/// The axes of a mesh of so many ranks.
pub(crate) fn axes(ranks: usize) -> String {
    match ranks {
        4 => "dp=2, tp=2".into(),
        _ => format!("dp={ranks}"),
    }
}

/// The parameters, and where they lie.
const PARAMETERS: [(&str, [usize; 2], &str); 2] =
    [("up", [6, 8], "[_, @tp?]"), ("down", [8, 4], "[@tp?, _]")];

pub(crate) struct Model {
    parameters: BTreeMap<String, Tensor>,
    inputs: Tensor,
    targets: Tensor,
    pub(crate) step: u64,
}

impl Model {
    /// What training begins with.
    pub(crate) fn new(mesh: &Mesh) -> Result<Self> {
        let draw = |(name, shape, layout): (&str, [usize; 2], &str)| {
            let value = |at: &[usize]| ((at[0] * 7 + at[1] * 3) % 11) as f32 / 8.0 - 0.6;
            let w = Tensor::from_fn(shape, (mesh, layout), value)?;
            Ok((name.to_string(), w.require_grad()?))
        };
        let parameters = PARAMETERS.into_iter().map(draw).collect::<Result<_>>()?;
        Self::with(mesh, parameters, 0)
    }

    /// What a checkpoint holds.
    pub(crate) fn load(mesh: &Mesh, checkpoint: &Checkpoint) -> Result<Self> {
        let load = |(name, _, layout): (&str, [usize; 2], &str)| {
            let w = checkpoint.load(name, (mesh, layout))?;
            Ok((name.to_string(), w.require_grad()?))
        };
        let parameters = PARAMETERS.into_iter().map(load).collect::<Result<_>>()?;
        Self::with(mesh, parameters, checkpoint.manifest().step)
    }

    fn with(mesh: &Mesh, parameters: BTreeMap<String, Tensor>, step: u64) -> Result<Self> {
        let numbers = |shape, factor: usize| {
            let value = move |at: &[usize]| ((at[0] * factor + at[1] * 5) % 13) as f32 / 13.0;
            Tensor::from_fn(shape, (mesh, "[@dp?, _]"), value)
        };
        Ok(Self {
            parameters,
            inputs: numbers([12, 6], 3)?,
            targets: numbers([12, 4], 2)?,
            step,
        })
    }

    /// One step of gradient descent; the loss before it.
    pub(crate) fn train(&mut self) -> Result<f32> {
        let hidden = self.inputs.matmul(&self.parameters["up"])?.tanh()?;
        let off = (hidden.matmul(&self.parameters["down"])? - &self.targets)?;
        let loss = (&off * &off)?.mean_all()?;
        let gradients = loss.backward()?;
        for w in self.parameters.values_mut() {
            let g = gradients.of(w)?;
            w.update(|w| w - g * 0.1)?;
        }
        self.step += 1;
        Ok(loss.item()?.to_f64() as f32)
    }

    pub(crate) fn save(&self, root: &Path) -> Result<()> {
        let contents = Contents::new(self.step, self.parameters.clone());
        save(root, &format!("step-{}", self.step), &contents).map(|_| ())
    }
}

/// A line for the test that started this process, with the time.
pub(crate) fn say(text: &str) {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{} {text}", now.as_micros());
    let _ = out.flush();
}

/// What an error is and whom it names.
pub(crate) fn kind(error: &Error) -> String {
    use anymesh_core::Error as Core;
    let Error::Core(error) = error else {
        return format!("other: {error}");
    };
    match error {
        Core::Lost { ranks, .. } => format!("lost {ranks:?}"),
        Core::Timeout { missing, .. } => format!("timeout {missing:?}"),
        Core::Elsewhere { rank, .. } => format!("elsewhere [{rank}]"),
        Core::Diverged { calls } => format!("diverged [{}, {}]", calls[0].rank, calls[1].rank),
        Core::Transport { ranks, .. } => format!("transport {ranks:?}"),
        _ => "other".into(),
    }
}

/// The mesh of all processes, on which the fault strikes that this process was told of.
fn mesh(cluster: &Cluster) -> Result<Mesh> {
    let mesh = cluster.mesh(&axes(cluster.size()))?;
    Ok(Fault::from_env(cluster.start().rank).on(&mesh))
}

/// From the last checkpoint to the end.
fn train(mesh: &Mesh, root: &Path) -> Result<()> {
    let checkpoint = latest(root)?.ok_or_else(|| Error::Argument("no checkpoint".into()))?;
    let mut model = Model::load(mesh, &checkpoint)?;
    say(&format!("from {}", model.step));
    while model.step < STEPS {
        let loss = model.train()?;
        say(&format!("loss {} {:08x}", model.step, loss.to_bits()));
        model.save(root)?;
        say(&format!("saved {}", model.step));
        if let Some(transport) = mesh.transport() {
            let all: Vec<usize> = (0..mesh.ranks()).collect();
            transport.barrier(mesh, &all)?;
        }
    }
    Ok(())
}

/// The role: trains, and on a failure says what it is; with `rebuilds`, those who are left go on.
pub(crate) fn play(rebuilds: usize) -> i32 {
    let root = std::env::var_os("ANYMESH_TEST_ROOT").unwrap_or_default();
    if let Some(fault) = Fault::at_start() {
        fault.strike();
    }
    let mut attempt = crate::roles::cluster().map_err(Error::from);
    for _ in 0..=rebuilds {
        let cluster = match attempt {
            Ok(cluster) => cluster,
            Err(e) => return failed(&e),
        };
        say(&format!("process {} of {}", cluster.rank(), cluster.size()));
        let done = cluster.run(|cluster| train(&mesh(cluster)?, Path::new(&root)));
        let Err(e) = done else {
            say(&format!("done {}", Fault::calls()));
            return 0;
        };
        if rebuilds == 0 {
            return failed(&e);
        }
        failed(&e);
        attempt = cluster.rebuild(Duration::from_secs(3)).map_err(Error::from);
    }
    1
}

pub(crate) fn failed(e: &Error) -> i32 {
    say(&format!("error {}", kind(e)));
    say(&format!("because {}", e.to_string().replace('\n', " ")));
    1
}

/// The losses of a simulated run on so many ranks, from a checkpoint.
pub(crate) fn simulated(ranks: usize, checkpoint: &Checkpoint) -> Result<Vec<String>> {
    let mesh = Mesh::new(&axes(ranks), &anymesh_backend_cpu::device())?;
    let mut model = Model::load(&mesh, checkpoint)?;
    let mut losses = vec![];
    while model.step < STEPS {
        let loss = model.train()?;
        losses.push(format!("loss {} {:08x}", model.step, loss.to_bits()));
    }
    Ok(losses)
}

/// A folder with the checkpoint of step 0.
pub(crate) fn prepare(root: &Path) -> Result<()> {
    let mesh = Mesh::new("x=1", &anymesh_backend_cpu::device())?;
    Model::new(&mesh)?.save(root)
}

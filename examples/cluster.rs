//! One training, on simulated ranks and on the processes of a cluster: every loss is the same to the
//! bit. Goes on from its last checkpoint on any number of processes, and SIGTERM saves and leaves.
//!
//! ```sh
//! cargo build --release --example cluster
//! target/release/examples/cluster                                    # four simulated ranks
//! anymesh launch -n 4 -- target/release/examples/cluster             # four processes; or torchrun, mpirun, srun
//! anymesh launch -n 4 -- target/release/examples/cluster runs/demo   # saves there as it goes
//! anymesh launch -n 3 -- target/release/examples/cluster runs/demo   # goes on from there, on three
//! ```

use anymesh::{
    checkpoint::{Checkpoint, Contents, Load, latest, save},
    ops::Expr,
    prelude::*,
};
use std::{collections::BTreeMap, error::Error as StdError, path::Path, time::Instant};

const STEPS: u64 = 50;
const BATCH: usize = 32;
const CONTEXT: usize = 8;
const VOCABULARY: usize = 64;

/// The parameters and how they lie on a mesh that has the axis: `?` says that it may lack it.
const PARAMETERS: [(&str, &str); 4] = [
    ("embedding", "f32[64@tp?, 32]"),
    ("up", "f32[256@tp?, 256]"),
    ("down", "f32[32, 256@tp?]"),
    ("head", "f32[64@tp?, 32]"),
];

/// A small language model that reads eight tokens, and AdamW. Nothing in it knows of processes.
struct Training {
    mesh: Mesh,
    step: u64,
    /// The parameters, and for each its first and second moment, `m.` and `v.`.
    tensors: BTreeMap<String, Tensor>,
}

impl Training {
    fn new(mesh: &Mesh) -> Result<Self> {
        let (mut rng, mut tensors) = (Rng::new(42), BTreeMap::new());
        for (name, ty) in PARAMETERS {
            let ty: TypeSpec = ty.parse()?;
            let w = Tensor::normal(&ty.shape, 0.0, 0.1, ty.dtype, (mesh, &ty), rng.split())?;
            tensors.insert(format!("m.{name}"), w.zeros_like()?);
            tensors.insert(format!("v.{name}"), w.zeros_like()?);
            tensors.insert(name.into(), w.require_grad()?);
        }
        Ok(Self {
            mesh: mesh.clone(),
            step: 0,
            tensors,
        })
    }

    /// The same training where a checkpoint left it, wherever that was saved from.
    fn resume(mesh: &Mesh, saved: &Checkpoint) -> Result<Self, Box<dyn StdError>> {
        let mut training = Self::new(mesh)?;
        let wanted = Contents::new(0, training.tensors);
        training.tensors = Load::default().replace(saved, &wanted)?.tensors;
        for (name, _) in PARAMETERS {
            let w = &mut training.tensors.get_mut(name).ok_or("a parameter")?;
            **w = w.require_grad()?;
        }
        training.step = saved.manifest().step;
        Ok(training)
    }

    fn loss(&self) -> Result<Tensor> {
        let w = |name: &str| &self.tensors[name];
        // Lines that count up in steps of their own, each step of training others.
        let first = self.step as usize * BATCH;
        let tokens = Tensor::from_fn([BATCH, CONTEXT + 1], (&self.mesh, "[@dp?, _]"), |at| {
            let line = (first + at[0]) * 2_654_435_761 % 1_000_003;
            ((line + at[1] * (1 + line % 5)) % VOCABULARY) as i32
        })?;
        let seen = w("embedding").embedding(&tokens.get(i![.., ..-1])?)?;
        let x = seen.reshape([BATCH, CONTEXT * 32])?;
        let h = x.linear(w("up"), None)?.silu()?.linear(w("down"), None)?;
        let logits = h.rms_norm(&NormOptions::new())?.linear(w("head"), None)?;
        logits.cross_entropy(&tokens.get(i![.., -1])?, &CrossEntropyOptions::default())
    }

    /// One step of AdamW. Every gradient ends where its parameter lies.
    fn step(&mut self) -> Result<f64> {
        let loss = self.loss()?;
        let grads = loss.backward()?;
        self.step += 1;
        let unbias = [0.9, 0.99].map(|beta| 1.0 - f64::powi(beta, self.step as i32));
        for (name, _) in PARAMETERS {
            let [w, m, v] =
                ["", "m.", "v."].map(|kind| self.tensors[&format!("{kind}{name}")].clone());
            let [next, m, v] = no_grad(|| {
                Expr::new("adamw", &[&w, &grads.of(&w)?, &m, &v])
                    .params(&unbias)
                    .maps([DType::F32; 3], |a| {
                        let (w, g) = (a.x[0], a.x[1]);
                        let m = a.x[2] * 0.9 + g * 0.1;
                        let v = a.x[3] * 0.99 + g * g * 0.01;
                        let step = m / a.p[0] / ((v / a.p[1]).sqrt() + 1e-8) + w * 0.01;
                        [w - step * 0.01, m, v]
                    })
            })?;
            self.tensors.insert(format!("m.{name}"), m);
            self.tensors.insert(format!("v.{name}"), v);
            self.tensors.insert(name.into(), w.with_values(&next)?);
        }
        Ok(loss.item()?.to_f64())
    }
}

fn train(cluster: &Cluster) -> Result<(), Box<dyn StdError>> {
    let mut arguments = std::env::args().skip(1);
    let (folder, axes) = (arguments.next(), arguments.next());
    let folder = folder.as_deref().map(Path::new);
    // A rank for each process, or four simulated ones.
    let ranks = if cluster.size() == 1 {
        4
    } else {
        cluster.size()
    };
    let axes = axes.unwrap_or(match ranks % 2 {
        0 => format!("dp={}, tp=2", ranks / 2),
        _ => format!("dp={ranks}"),
    });
    let mesh = Mesh::new(&axes, cluster)?;

    let saved = match folder {
        Some(folder) if folder.exists() => latest(folder)?,
        _ => None,
    };
    let begin = |mesh: &Mesh| match &saved {
        Some(saved) => Training::resume(mesh, saved),
        None => Ok(Training::new(mesh)?),
    };
    let mut training = begin(&mesh)?;
    if cluster.is_first() {
        println!("{cluster}\n{}", cluster.placement(&mesh));
        if let Some(saved) = &saved {
            println!("goes on from {}", saved.path().display());
        }
    }

    let (start, mut losses, mut sent) = (Instant::now(), vec![], 0);
    while training.step < STEPS {
        let (loss, ledger) = Ledger::record(|| training.step());
        (sent, _) = (ledger.bytes(), losses.push(loss?));
        let stop = cluster.stop_requested()?;
        if cluster.is_first() && (training.step % 10 == 0 || losses.len() == 1) {
            println!(
                "step {:>2}: loss {:.6}",
                training.step,
                losses[losses.len() - 1]
            );
        }
        if let Some(folder) = folder
            && (training.step % 10 == 0 || stop)
        {
            let name = format!("step-{}", training.step);
            save(
                folder,
                &name,
                &Contents::new(training.step, training.tensors.clone()),
            )?;
        }
        if stop {
            break;
        }
    }
    let each = start.elapsed().as_secs_f64() * 1e3 / losses.len().max(1) as f64;

    // The same with all ranks in one process.
    if cluster.is_first() {
        println!("{each:.2} ms and {sent} bytes received by the worst rank in each step");
        let mut simulated = begin(&Mesh::new(&axes, &cluster.devices()[0])?)?;
        let again = losses.iter().map(|_| simulated.step());
        let again = again.collect::<Result<Vec<f64>>>()?;
        let bits = |losses: &[f64]| losses.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let equal = if bits(&losses) == bits(&again) {
            "yes"
        } else {
            "no"
        };
        println!(
            "{} losses on {cluster} and simulated, equal to the bit: {equal}",
            losses.len()
        );
    }
    Ok(cluster.barrier()?)
}

fn main() -> Result<(), Box<dyn StdError>> {
    let cluster = anymesh::init()?;
    // An error of one process ends all.
    cluster.run(train)
}

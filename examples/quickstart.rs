//! A tour in one run: a small language model written once, trained on one device and on a mesh of
//! eight ranks, in four processes, in stages of a pipeline, saved and gone on with elsewhere; what a
//! reshard costs; and what it looks like when something is wrong. `cargo run --release --example quickstart`

use anymesh::{
    checkpoint::{Checkpoint, Contents, Load, save},
    compare::compare,
    prelude::*,
    reshard::{Objective, plan},
    spmd::{self, PlanOptions},
};
use std::{
    collections::BTreeMap,
    error::Error as StdError,
    net::TcpListener,
    process::{Command, Stdio},
};

/// The argument with which the program starts itself again.
const IN_A_PROCESS: &str = "in-a-process";

/// The parameters, with where each lies on a mesh that has the axes: `?` says that it may lack them.
const PARAMETERS: [(&str, &str); 9] = [
    ("embedding", "f32[60@tp?, 64]"),
    ("queries", "f32[64@tp?, 64]"),
    ("keys", "f32[64@tp?, 64]"),
    ("values", "f32[64@tp?, 64]"),
    ("output", "f32[64, 64@tp?]"),
    ("gate", "f32[128@tp?, 64]"),
    ("up", "f32[128@tp?, 64]"),
    ("down", "f32[64, 128@tp?]"),
    ("head", "f32[60@tp?, 64]"),
];

/// A transformer block between an embedding and a head. Nothing in it knows of meshes.
struct Model {
    parameters: BTreeMap<String, Tensor>,
    tokens: Tensor,
    rope: (Tensor, Tensor),
}

impl Model {
    fn new(mesh: &Mesh) -> Result<Self> {
        let mut rng = Rng::new(42);
        let draw = |(name, ty): (&str, &str)| {
            let ty: TypeSpec = ty.parse()?;
            let w = Tensor::normal(&ty.shape, 0.0, 0.15, ty.dtype, (mesh, &ty), rng.split())?;
            Ok((name.to_string(), w.require_grad()?))
        };
        Ok(Self {
            parameters: PARAMETERS.into_iter().map(draw).collect::<Result<_>>()?,
            // A text to learn: each of the eight lines counts up in steps of its own.
            tokens: Tensor::from_fn([8, 33], (mesh, "[@dp?, _]"), |at| {
                ((at[0] * 7 + at[1] * (at[0] + 1)) % 60) as i32
            })?,
            rope: Tensor::rope_tables(32, 8, &RopeOptions::default(), mesh)?,
        })
    }

    fn loss(&self) -> Result<Tensor> {
        let norm = |x: &Tensor| x.rms_norm(&NormOptions::new());
        let linear = |x: &Tensor, name: &str| x.linear(&self.parameters[name], None);
        let x = self.parameters["embedding"].embedding(&self.tokens.get(i![.., ..-1])?)?;
        let h = norm(&x)?;
        let heads = |name: &str| linear(&h, name)?.reshape([8, 32, 8, 8])?.transpose(1, 2);
        let turned = |name: &str| heads(name)?.rope(&self.rope.0, &self.rope.1, RopeStyle::Half);
        let causal = AttentionOptions::causal();
        let seen = turned("queries")?
            .attention(&turned("keys")?, &heads("values")?, &causal)?
            .out;
        let x = (x + linear(&seen.transpose(1, 2)?.reshape([8, 32, 64])?, "output"))?;
        let h = norm(&x)?;
        let x = (&x + linear(&linear(&h, "gate")?.swiglu2(&linear(&h, "up")?)?, "down"))?;
        let logits = linear(&norm(&x)?, "head")?.transpose(1, 2)?;
        logits.cross_entropy(
            &self.tokens.get(i![.., 1..])?,
            &CrossEntropyOptions::default(),
        )
    }

    /// One step of gradient descent. Every gradient ends where its parameter lies.
    fn step(&mut self) -> Result<f64> {
        let loss = self.loss()?;
        let grads = loss.backward()?;
        for w in self.parameters.values_mut() {
            let g = grads.of(w)?;
            w.update(|w| w - g * 0.4)?;
        }
        Ok(loss.item()?.to_f64())
    }

    fn train(&mut self, steps: usize) -> Result<Vec<f64>> {
        (0..steps).map(|_| self.step()).collect()
    }
}

fn difference(a: &[f64], b: &[f64]) -> f64 {
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f64::max)
}

/// What a process of a cluster runs: the same model. The first one says how it went.
fn in_a_process() -> Result<(), Box<dyn StdError>> {
    let cluster = anymesh::init()?;
    let losses = Model::new(&Mesh::new("dp=2, tp=2", &cluster)?)?.train(60)?;
    if cluster.is_first() {
        println!("{losses:?}");
    }
    Ok(())
}

/// Starts this program again as so many processes, as `anymesh launch` does; what the first prints.
fn in_processes(count: usize) -> Result<String, Box<dyn StdError>> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let start = |rank: usize| {
        let mut program = Command::new(std::env::current_exe()?);
        program.args([IN_A_PROCESS]).env("ANYMESH_DEVICE", "cpu");
        program.envs([("RANK", rank), ("WORLD_SIZE", count)].map(|(k, v)| (k, v.to_string())));
        program.envs([
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", &port.to_string()),
        ]);
        program.stdout(Stdio::piped()).spawn()
    };
    let started: Vec<_> = (0..count).map(start).collect::<std::io::Result<_>>()?;
    let ended = started
        .into_iter()
        .map(|process| process.wait_with_output());
    let ended: Vec<_> = ended.collect::<std::io::Result<_>>()?;
    Ok(String::from_utf8(ended[0].stdout.clone())?)
}

/// A run as a configuration: a GPT reads this program, on one device and on a mesh.
#[cfg(feature = "train")]
fn trained(device: &Device) -> Result<(), Box<dyn StdError>> {
    use anymesh::train::{config, trainer::Event};
    const RUN: &str = r#"
        data = []
        batch = { global = 8, accumulation = 4, length = 64 }
        pipeline = { schedule = "zbh1" }
        mesh = { zero = 2 }
        optimizer = { kind = "adamw", lr = 2e-3 }
        run = { steps = 40 }
        [model]
        model_type = "gpt2"
        vocab_size = 257
        n_positions = 64
        n_embd = 64
        n_layer = 2
        n_head = 4
        attn_pdrop = 0.0
        embd_pdrop = 0.0
        resid_pdrop = 0.0
    "#;
    let text = std::env::temp_dir().join(format!("quickstart-{}.txt", std::process::id()));
    std::fs::write(&text, include_str!("quickstart.rs"))?;
    let data = format!("data=[{{ path = {text:?} }}]");
    let run = config::parse::<config::RunConfig>(RUN, &[data])?;
    let mut losses = vec![];
    for axes in ["dp=1", "dp=2, tp=2", "pp=2, dp=2", "cp=2, tp=2"] {
        let mesh = Mesh::new(axes, device)?;
        let (mut ready, mut seen) = (run.prepare(&mesh)?, vec![]);
        ready.trainer.run(&mut ready.feed, None, &mut |event| {
            if let Event::Step { report, .. } = event {
                seen.push(report.loss);
            }
        })?;
        losses.push(seen);
    }
    std::fs::remove_file(&text)?;
    println!(
        "\nA GPT reads this program, loss {:.3} to {:.3} in 40 steps; with ZeRO 2 on dp=2, tp=2: losses differ by {:.1e}; in two stages, zero bubble: {:.1e}; with its sequences cut: {:.1e}",
        losses[0][0],
        losses[0][39],
        difference(&losses[0], &losses[1]),
        difference(&losses[0], &losses[2]),
        difference(&losses[0], &losses[3])
    );
    Ok(())
}

fn main() -> Result<(), Box<dyn StdError>> {
    if std::env::args().nth(1).as_deref() == Some(IN_A_PROCESS) {
        return in_a_process();
    }
    let device = default_device()?;
    println!(
        "anymesh on {device}: {}\n",
        device.backend().capabilities().description
    );
    let losses = Model::new(&Mesh::single(&device))?.train(60)?;
    println!(
        "A transformer learns to count, loss {:.3} to {:.3} in 60 steps",
        losses[0], losses[59]
    );

    let mesh = Mesh::new("dp=2, tp=4", &device)?;
    let mut model = Model::new(&mesh)?;
    let mut sharded = model.train(30)?;
    let folder = std::env::temp_dir().join(format!("anymesh-quickstart-{}", std::process::id()));
    let halfway = Contents::new(30, model.parameters.clone());
    let saved = Checkpoint::open(save(&folder, "halfway", &halfway)?)?;
    let (more, ledger) = Ledger::record(|| model.train(1));
    sharded.extend(more?);
    sharded.extend(model.train(29)?);
    println!(
        "The same program on {mesh}: losses differ by {:.1e}",
        difference(&losses, &sharded)
    );
    println!("What one step sends, and for which line:");
    let table = ledger.to_string();
    for line in table
        .lines()
        .take(9)
        .chain(["..."])
        .chain(table.lines().last())
    {
        println!("  {line}");
    }

    let planned = spmd::plan(&PlanOptions::default(), || model.loss()?.backward())?;
    println!(
        "Planned for all ops together, loss and gradients receive {} bytes instead of {}",
        planned.bytes(),
        planned.eager().bytes
    );

    let simulated = Model::new(&Mesh::new("dp=2, tp=2", &anymesh::device("cpu")?)?)?.train(60)?;
    let same = in_processes(4)?.trim() == format!("{simulated:?}");
    println!(
        "The same program in 4 processes: losses are {} those of 4 simulated ranks to the bit",
        if same { "equal to" } else { "NOT" }
    );

    // A device whose kernel for attention's gradients gives those of queries and keys in the wrong order.
    let broken = device.decorated(|device, kernel| {
        let is_backward = kernel.family() == "attention_backward";
        let mut out = device.launch(kernel)?;
        if is_backward {
            out.swap(0, 1);
        }
        Ok(out)
    });
    let faulty = Mesh::new("dp=2, tp=4", &broken)?;
    let found = compare(
        |mesh: &Mesh| Model::new(mesh)?.step(),
        &Mesh::single(&device),
        &faulty,
    )?;
    println!("\nWith a fault in a kernel of that mesh, the first op that differs from one device:");
    for line in found.to_string().lines().take(3) {
        println!("  {line}");
    }

    for found in anymesh::found() {
        let there = anymesh::device(&found.name).map(|device| Mesh::single(&device));
        match there.and_then(|place| Model::new(&place)?.train(60)) {
            Ok(theirs) => {
                let off = difference(&losses, &theirs);
                println!(
                    "\nThe same program on {}: losses differ by {off:.1e}",
                    found.name
                );
            }
            Err(error) => println!("\n{}: {error}", found.name),
        }
    }
    #[cfg(feature = "train")]
    trained(&device)?;
    println!();

    for axes in ["dp=1", "dp=8", "tp=2", "dp=3, tp=5"] {
        let mut model = Model::new(&Mesh::new(axes, &device)?)?;
        let wanted = Contents::new(0, model.parameters.clone());
        for (name, w) in Load::default().replace(&saved, &wanted)?.tensors {
            model.parameters.insert(name, w.require_grad()?);
        }
        let off = difference(&losses[30..], &model.train(30)?);
        println!("Saved on {mesh}, gone on with on mesh({axes}): losses differ by {off:.1e}");
    }
    std::fs::remove_dir_all(&folder)?;

    let from = TensorType::parse("f32[4096@dp, 4096@tp]", &mesh)?;
    let to = TensorType::parse("f32[4096@tp@dp, 4096]", &mesh)?.sharding;
    let route = plan(
        &mesh,
        &from.shape,
        from.dtype,
        &from.sharding,
        &to,
        Objective::Time,
    )?;
    println!("\n{route}\n");

    let x = Tensor::arange(0, 24, 1, DType::I32, &device)?.reshape([4, 6])?;
    println!("x[1:3, ::-2] =\n{}\n", x.get(i![1..3, ..;-2])?);
    println!(
        "x[x % 2 == 0] = -1 gives\n{}\n",
        x.set(i![&(&x % 2)?.eq(0)?], -1)?
    );
    println!("Bad input is an error that says what to do:");
    println!(
        "  {}",
        (&model.parameters["head"] + Tensor::ones([60, 64], DType::F32, &device))
            .expect_err("only one lies on a mesh")
    );
    println!("  {}", x.get(i![9]).expect_err("there are four rows"));
    println!(
        "  {}",
        x.cast(DType::F32)?
            .backward()
            .expect_err("nothing was tracked")
    );
    Ok(())
}

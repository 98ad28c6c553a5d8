//! Written from examples/notebooks/4-training.ipynb: `ANYMESH_UPDATE=1 cargo test --test notebook_programs` writes it again.

#![allow(unused, unreachable_pub, clippy::all)]

use crate::shown::{Outcome, begin, line, show};

macro_rules! println {
    ($($t:tt)*) => { line(format_args!($($t)*)) };
}

pub(crate) fn run() -> Outcome {
    begin(0);
    // Builds the library, for the first notebook on a machine: some minutes. Run the cells in order.
    begin(1);
    use anymesh::prelude::*;

    let cpu = device("cpu")?;
    let four = Mesh::new("dp=4", &cpu)?;
    let x = Tensor::ones([64, 8], DType::F32, (&four, "[@dp, _]"))?;
    let w = Tensor::zeros([8, 1], DType::F32, &four)?.require_grad()?;
    let grads = (x.matmul(&w)? - 1.0)?.square()?.mean_all()?.backward()?;
    println!("as the backward pass left it  {}", grads.partial(&w)?.type_string());
    println!("as an update needs it         {}", grads.of(&w)?.type_string());
    begin(2);
    use std::collections::BTreeMap;

    const PARAMETERS: [(&str, &str); 9] = [
        ("embedding", "f32[60@tp?, 64]"), ("queries", "f32[64@tp?, 64]"), ("keys", "f32[64@tp?, 64]"),
        ("values", "f32[64@tp?, 64]"), ("output", "f32[64, 64@tp?]"), ("gate", "f32[128@tp?, 64]"),
        ("up", "f32[128@tp?, 64]"), ("down", "f32[64, 128@tp?]"), ("head", "f32[60@tp?, 64]"),
    ];

    pub struct Model {
        parameters: BTreeMap<String, Tensor>,
        tokens: Tensor,
        rope: (Tensor, Tensor),
    }

    impl Model {
        pub fn new(mesh: &Mesh) -> Result<Self> {
            let mut rng = Rng::new(42);
            let draw = |(name, ty): (&str, &str)| {
                let ty: TypeSpec = ty.parse()?;
                let w = Tensor::normal(&ty.shape, 0.0, 0.15, ty.dtype, (mesh, &ty), rng.split())?;
                Ok((name.to_string(), w.require_grad()?))
            };
            Ok(Self {
                parameters: PARAMETERS.into_iter().map(draw).collect::<Result<_>>()?,
                tokens: Tensor::from_fn([8, 33], (mesh, "[@dp?, _]"), |at| ((at[0] * 7 + at[1] * (at[0] + 1)) % 60) as i32)?,
                rope: Tensor::rope_tables(32, 8, &RopeOptions::default(), mesh)?,
            })
        }

        pub fn loss(&self) -> Result<Tensor> {
            let norm = |x: &Tensor| x.rms_norm(&NormOptions::new());
            let linear = |x: &Tensor, name: &str| x.linear(&self.parameters[name], None);
            let x = self.parameters["embedding"].embedding(&self.tokens.get(i![.., ..-1])?)?;
            let h = norm(&x)?;
            let heads = |name: &str| linear(&h, name)?.reshape([8, 32, 8, 8])?.transpose(1, 2);
            let turned = |name: &str| heads(name)?.rope(&self.rope.0, &self.rope.1, RopeStyle::Half);
            let seen = turned("queries")?.attention(&turned("keys")?, &heads("values")?, &AttentionOptions::causal())?.out;
            let x = (x + linear(&seen.transpose(1, 2)?.reshape([8, 32, 64])?, "output"))?;
            let h = norm(&x)?;
            let x = (&x + linear(&linear(&h, "gate")?.swiglu2(&linear(&h, "up")?)?, "down"))?;
            let logits = linear(&norm(&x)?, "head")?.transpose(1, 2)?;
            logits.cross_entropy(&self.tokens.get(i![.., 1..])?, &CrossEntropyOptions::default())
        }

        pub fn step(&mut self) -> Result<f64> {
            let loss = self.loss()?;
            let grads = loss.backward()?;
            for w in self.parameters.values_mut() {
                let g = grads.of(w)?;
                w.update(|w| w - g * 0.4)?;
            }
            Ok(loss.item()?.to_f64())
        }

        pub fn train(&mut self, steps: usize) -> Result<Vec<f64>> {
            (0..steps).map(|_| self.step()).collect()
        }
    }
    begin(3);
    let alone: Vec<f64> = Model::new(&Mesh::single(&cpu))?.train(40)?;
    let mesh: Mesh = Mesh::new("dp=2, tp=4", &cpu)?;
    let mut model: Model = Model::new(&mesh)?;
    let sharded: Vec<f64> = model.train(40)?;
    let apart: f64 = alone.iter().zip(&sharded).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    println!("loss {:.3} to {:.3}; on {mesh} within 1e-4: {}", alone[0], alone[39], apart < 1e-4);
    begin(4);
    use anymesh::show::Curve;

    fn curve(losses: &[f64]) -> Curve {
        // To three digits: what is kept in this file should not depend on the last ones.
        let points = losses.iter().enumerate().map(|(i, l)| (i as f64, (l * 1e3).round() / 1e3));
        Curve::new("training loss", "nats").line("mesh(dp=2, tp=4)", points.collect())
    }

    show(&(
    curve(&sharded)
    ));
    begin(5);
    let (_, ledger) = Ledger::record(|| model.step());
    let bytes: u64 = ledger.bytes();
    let steps: usize = ledger.entries.len();
    show(&(
    ledger
    ));
    begin(6);
    println!("{bytes} bytes in {steps} steps");
    begin(7);
    use anymesh::spmd::{self, PlanOptions};

    {
        let planned = spmd::plan(&PlanOptions::default(), || model.loss()?.backward())?;
        println!("loss and gradients receive {} bytes planned, {} without a plan", planned.bytes(), planned.eager().bytes);
    };
    begin(8);
    use anymesh::compare::compare;

    let found = compare(|mesh: &Mesh| Model::new(mesh)?.step(), &Mesh::single(&cpu), &mesh)?;
    println!("{found}");
    begin(9);
    let broken = cpu.decorated(|device, kernel| {
        let is_backward = kernel.family() == "attention_backward";
        let mut out = device.launch(kernel)?;
        if is_backward {
            out.swap(0, 1);
        }
        Ok(out)
    });
    let faulty: Mesh = Mesh::new("dp=2, tp=4", &broken)?;
    let found = compare(|mesh: &Mesh| Model::new(mesh)?.step(), &Mesh::single(&cpu), &faulty)?;
    println!("{found}");
    Ok(())
}

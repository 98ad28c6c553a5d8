//! The stages of ZeRO are layouts: what a rank holds and what crosses, by the formulas.

use anymesh_core::{DType, Device, Mesh, Tensor, grad::Gradients, meta, spmd::Ledger};
use anymesh_train::{Build, Init, Module, Param, Policy, Result, Zero, nn::Linear};

const WIDTH: usize = 256;
const LAYERS: usize = 4;
const RANKS: usize = 8;

#[derive(Module)]
struct Model {
    layers: Vec<Linear>,
}

impl Model {
    fn new(mesh: &Mesh, policy: Policy, zero: Zero) -> Result<Self> {
        let b = Build::new(mesh, policy, 1).zero(zero, &["dp"]);
        let layer = |i: usize| {
            let at = b.at(format!("layers.{i}"));
            Linear::new(&at, [WIDTH, WIDTH], "[_, _]", Init::Normal(0.05))
        };
        Ok(Self {
            layers: (0..LAYERS).map(layer).collect::<Result<_>>()?,
        })
    }

    fn loss(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = x.clone();
        for layer in &self.layers {
            x = layer.forward(&x)?.tanh()?;
        }
        Ok(x.cast(DType::F32)?.sum_all()?)
    }
}

/// Bytes in use on the device for one rank: the model, a state of two moments, and the gradients of
/// a pass whose activations are gone.
fn states(policy: Policy, zero: Zero) -> Result<u64> {
    let device: Device = meta().decorated(|backend, kernel| backend.launch(kernel));
    let mesh = Mesh::new(&format!("dp={RANKS}"), &device)?;
    let model = Model::new(&mesh, policy, zero)?;
    let mut moments = vec![];
    model.visit("", &mut |_, p: &Param| {
        moments.push(p.value().detach().zeros_like());
        moments.push(p.value().detach().zeros_like());
    });
    let x = Tensor::zeros([RANKS * 2, WIDTH], policy.compute, (&mesh, "[@dp, _]"))?;
    let gradients: Gradients = model.loss(&x)?.backward()?;
    drop(x);
    let held = device.memory().in_use;
    drop((moments, gradients));
    Ok(held)
}

#[test]
fn a_rank_holds_what_the_formula_says() -> Result<()> {
    let p = (WIDTH * WIDTH * LAYERS) as u64;
    let d = RANKS as u64;
    // Weights and gradients of 2 bytes, and 12 for the values and two moments in f32.
    let policy = Policy {
        reduce: DType::BF16,
        ..Policy::bf16()
    };
    assert_eq!(states(policy, Zero::Off)?, 16 * p);
    assert_eq!(states(policy, Zero::One)?, 4 * p + 12 * p / d);
    assert_eq!(states(policy, Zero::Two)?, 2 * p + 14 * p / d);
    assert_eq!(states(policy, Zero::Three)?, 16 * p / d);
    Ok(())
}

#[test]
fn a_step_sends_what_the_formula_says() -> Result<()> {
    let p = (WIDTH * WIDTH * LAYERS) as u64;
    let share = |bytes: u64| bytes * (RANKS as u64 - 1) / RANKS as u64;
    let mesh = Mesh::new(&format!("dp={RANKS}"), &meta())?;
    let sent = |zero| -> Result<u64> {
        let mut model = Model::new(&mesh, Policy::f32(), zero)?;
        let x = Tensor::zeros([RANKS * 2, WIDTH], DType::F32, (&mesh, "[@dp, _]"))?;
        let (done, ledger) = Ledger::record(|| -> Result<()> {
            let gradients = model.loss(&x)?.backward()?;
            model.try_each(&mut |_, p| {
                let g = p.partial_gradient(&gradients)?.expect("all are used");
                let g = p.place_gradient(&g)?;
                let next = p.value().detach().sub(&g)?;
                p.set(&next)
            })
        });
        done?;
        // The loss itself is a sum over ranks that nobody asked for.
        Ok(ledger.bytes() as u64)
    };
    // An all-reduce, or a reduce-scatter and a gather after the step, or a gather before and a
    // reduce-scatter after: the same bytes.
    assert_eq!(sent(Zero::Off)?, share(2 * 4 * p));
    assert_eq!(sent(Zero::One)?, share(2 * 4 * p));
    assert_eq!(sent(Zero::Two)?, share(2 * 4 * p));
    assert_eq!(sent(Zero::Three)?, share(2 * 4 * p));
    Ok(())
}

//! Whole models trained for 50 steps: on a 2x2 mesh the losses are those of one device, however the
//! model is sharded.
//!
//! In f64 on the host. A mesh that replicates everything gives the same bits. Where a dimension
//! that is summed over is cut, sums are taken in another order: each loss then agrees to [`BOUND`],
//! relative.

mod mlp;
mod processes;
mod transformer;

use anymesh_core::{Mesh, Result, Tensor};
use processes::same_over_processes;

/// Fifty steps let differences of rounding (1e-16) grow.
const BOUND: f64 = 1e-12;
const STEPS: usize = 50;

/// Where a model's tensors lie.
#[derive(Clone)]
struct Layout<'a> {
    mesh: Option<&'a Mesh>,
    /// Sharding by name; replicated where there is none.
    shardings: &'a [(&'a str, &'a str)],
    steps: usize,
}

impl Layout<'_> {
    fn place(&self, name: &str, x: Tensor) -> Result<Tensor> {
        let Some(mesh) = self.mesh else { return Ok(x) };
        match self.shardings.iter().find(|(n, _)| *n == name) {
            Some((_, sharding)) => x.to_mesh(mesh, *sharding),
            None => x.to_mesh(mesh, anymesh_core::Sharding::replicated()),
        }
    }
}

/// Numbers that look random and are the same everywhere.
fn weights(shape: &[usize], seed: usize, scale: f64) -> Result<Tensor> {
    let value = |at: &[usize]| {
        at.iter()
            .fold(seed * 97 + 13, |h, i| (h * 31 + i * 17 + 7) % 10_007) as f64
            / 10_007.0
            - 0.5
    };
    Tensor::from_fn(shape, &anymesh_backend_cpu::device(), |at| {
        value(at) * scale
    })
}

/// Parameters by name.
struct Parameters(Vec<(&'static str, Tensor)>);

impl Parameters {
    fn get(&self, name: &str) -> &Tensor {
        &self
            .0
            .iter()
            .find(|(n, _)| *n == name)
            .expect("a parameter of the model")
            .1
    }

    /// One step of gradient descent. Gradients and new values lie as the parameters do.
    fn step(&mut self, loss: &Tensor, rate: f64) -> Result<()> {
        let grads = loss.backward()?;
        for (name, p) in &mut self.0 {
            let g = grads.of(p)?;
            assert_eq!(g.sharding(), p.sharding(), "{name}");
            p.update(|p| p.sub(&g.mul(rate)?))?;
        }
        Ok(())
    }
}

/// Trains on one device, replicated, and in each of several layouts.
fn same_losses(
    train: impl Fn(&Layout<'_>) -> Result<Vec<f64>>,
    layouts: &[(&str, &[(&str, &str)])],
) -> Result<()> {
    let device = anymesh_backend_cpu::device();
    let mesh = Mesh::new("dp=2, tp=2", &device)?;
    let one = train(&Layout {
        mesh: None,
        shardings: &[],
        steps: STEPS,
    })?;
    assert_eq!(one.len(), STEPS);
    assert!(
        one[STEPS - 1] < 0.9 * one[0],
        "it learns: {} to {}",
        one[0],
        one[STEPS - 1]
    );
    assert_eq!(
        train(&Layout {
            mesh: Some(&mesh),
            shardings: &[],
            steps: STEPS,
        })?,
        one,
        "replicated, to the bit"
    );
    for (name, shardings) in layouts {
        let layout = Layout {
            mesh: Some(&mesh),
            shardings,
            steps: STEPS,
        };
        let losses = train(&layout)?;
        let worst = losses
            .iter()
            .zip(&one)
            .map(|(a, b)| (a - b).abs() / b.abs())
            .fold(0.0, f64::max);
        println!("{name}: worst relative difference of {STEPS} losses {worst:.1e}");
        assert!(worst <= BOUND, "{name}: {worst:e}");
        assert_eq!(train(&layout)?, losses, "{name}: the same bits every time");
    }
    Ok(())
}

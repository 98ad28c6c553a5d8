//! What these tests share: facts, meshes, and how losses are held.

use anymesh_core::{Mesh, Tensor};
use anymesh_train::Result;
use serde_json::Value;

/// The recorded numbers of other programs.
pub(crate) fn facts(key: &str) -> Value {
    let text = include_str!("../facts/optimizers.json");
    let all: Value = serde_json::from_str(text).expect("JSON");
    all[key].clone()
}

/// The numbers of a JSON array of any depth, in order.
pub(crate) fn numbers(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(items) => items.iter().flat_map(numbers).collect(),
        other => vec![other.as_f64().expect("a number")],
    }
}

/// Where everything must give the same.
pub(crate) fn meshes() -> Vec<Mesh> {
    let device = anymesh_backend_cpu::device();
    let named = ["dp=1", "dp=2", "dp=3", "tp=2", "dp=2, tp=2"];
    let mut meshes = vec![Mesh::single(&device)];
    meshes.extend(named.map(|axes| Mesh::new(axes, &device).expect("a mesh")));
    meshes
}

/// A float operand: its values, its shape and how it lies.
#[derive(Clone, Debug)]
pub(crate) struct Operand {
    pub(crate) values: Vec<f64>,
    pub(crate) shape: Vec<usize>,
    pub(crate) sharding: &'static str,
}

impl Operand {
    pub(crate) fn new(values: Vec<f64>, shape: &[usize], sharding: &'static str) -> Self {
        assert_eq!(values.len(), shape.iter().product::<usize>());
        Self {
            values,
            shape: shape.to_vec(),
            sharding,
        }
    }

    /// Values between -2 and 2 without a pattern.
    pub(crate) fn mixed(seed: usize, shape: &[usize], sharding: &'static str) -> Self {
        let value = |i: usize| (((i + 1) * (seed * 7919 + 104_729)) % 4001) as f64 / 1000.0 - 2.0;
        let count = shape.iter().product();
        Self::new((0..count).map(value).collect(), shape, sharding)
    }

    fn tensor(&self, mesh: &Mesh) -> Tensor {
        let flat = |at: &[usize]| at.iter().zip(&self.shape).fold(0, |i, (at, n)| i * n + at);
        let place = (mesh, self.sharding);
        Tensor::from_fn(&self.shape[..], place, |at| self.values[flat(at)]).expect("a tensor")
    }
}

/// Whole numbers in a place, such as labels.
pub(crate) fn integers(mesh: &Mesh, shape: &[usize], sharding: &str, values: &[i32]) -> Tensor {
    let flat = |at: &[usize]| at.iter().zip(shape).fold(0, |i, (at, n)| i * n + at);
    Tensor::from_fn(shape, (mesh, sharding), |at| values[flat(at)]).expect("a tensor")
}

#[track_caller]
pub(crate) fn near(what: &str, found: &[f64], expected: &[f64], within: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        let apart = (f - e).abs();
        assert!(
            apart <= within * e.abs().max(1.0),
            "{what}, value {i}: {f}, expected {e}, {apart:e} apart"
        );
    }
}

/// A loss and the gradients of all operands.
pub(crate) type Found = (f64, Vec<Vec<f64>>);

pub(crate) fn run(
    mesh: &Mesh,
    operands: &[Operand],
    loss: &dyn Fn(&Mesh, &[Tensor]) -> Result<Tensor>,
) -> Result<Found> {
    let mut leaves = vec![];
    for operand in operands {
        leaves.push(operand.tensor(mesh).require_grad()?);
    }
    let loss = loss(mesh, &leaves)?;
    let gradients = loss.backward()?;
    let mut found = vec![];
    for leaf in &leaves {
        found.push(gradients.of(leaf)?.to_vec::<f64>()?);
    }
    Ok((loss.item()?.to_f64(), found))
}

/// Runs a loss of f64 operands on every mesh: the same to 1e-12. Returns what one device gives.
#[track_caller]
pub(crate) fn on_every_mesh(
    operands: &[Operand],
    loss: &dyn Fn(&Mesh, &[Tensor]) -> Result<Tensor>,
) -> Found {
    let mut first: Option<Found> = None;
    for mesh in meshes() {
        let found = run(&mesh, operands, loss).unwrap_or_else(|e| panic!("{mesh}: {e}"));
        match &first {
            None => first = Some(found),
            Some((value, gradients)) => {
                near(&format!("loss on {mesh}"), &[found.0], &[*value], 1e-12);
                for (i, (f, e)) in found.1.iter().zip(gradients).enumerate() {
                    near(&format!("gradient {i} on {mesh}"), f, e, 1e-12);
                }
            }
        }
    }
    first.expect("one device at least")
}

/// [`on_every_mesh`] with gradients held against central differences of a formula in plain numbers,
/// which is also what the loss must be.
#[track_caller]
pub(crate) fn as_the_formula(
    operands: &[Operand],
    loss: &dyn Fn(&Mesh, &[Tensor]) -> Result<Tensor>,
    formula: &dyn Fn(&[Vec<f64>]) -> f64,
) -> Found {
    let found = on_every_mesh(operands, loss);
    let at: Vec<Vec<f64>> = operands.iter().map(|o| o.values.clone()).collect();
    near("loss", &[found.0], &[formula(&at)], 1e-12);
    let step = 1e-5;
    for (o, gradient) in found.1.iter().enumerate() {
        let mut slopes = vec![];
        for i in 0..gradient.len() {
            let mut moved = at.clone();
            moved[o][i] += step;
            let up = formula(&moved);
            moved[o][i] -= 2.0 * step;
            slopes.push((up - formula(&moved)) / (2.0 * step));
        }
        // Of the differences themselves: their own error is of the order of the step's square.
        near(&format!("gradient {o}"), gradient, &slopes, 1e-8);
    }
    found
}

/// `log(sum(exp(x)))`.
pub(crate) fn log_sum_exp(x: &[f64]) -> f64 {
    let most = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    most + x.iter().map(|x| (x - most).exp()).sum::<f64>().ln()
}

//! The same program again and again, with other values each time.
//!
//! Devices remember launches and lists of launches, and make them again with other memory. What they
//! compute must be what the first run would have computed.

use crate::Suite;
use anymesh::{DType, Device, Result, Tensor, ops::Rng};

pub(crate) const SUITE: Suite = &[(
    "programs_that_come_again_compute_with_what_they_are_given",
    programs_that_come_again_compute_with_what_they_are_given,
)];

const RUNS: u64 = 8;

/// A few layers, with a number that changes from run to run, views, an embedding and a loss.
fn program(run: u64, device: &Device) -> Result<Vec<Vec<f32>>> {
    let uniform = |shape: &[usize], seed: u64, dtype: DType| {
        Tensor::uniform(shape, -1.0, 1.0, dtype, device, Rng::new(seed))
    };
    let table = uniform(&[50, 64], 100 + run, DType::F32)?.require_grad()?;
    let rows: Vec<i32> = (0..96)
        .map(|k| ((k * 7 + run as usize * 3) % 50) as i32)
        .collect();
    let rows = Tensor::new(&rows, device)?;
    let mut x = table.index_select(0, &rows)?;
    let mut weights = vec![];
    for layer in 0..3 {
        let w = uniform(&[64, 64], 10 * run + layer, DType::F32)?.require_grad()?;
        let y = x.matmul(&w.t()?)?.tanh()?;
        let scores = y.matmul(&x.t()?)?.softmax(-1)?;
        let mixed = scores.matmul(&y)?;
        let scaled = mixed.mul(0.5 + run as f64 / 16.0)?;
        x = x.add(&scaled)?;
        weights.push(w);
    }
    let loss = x.square()?.mean(&[], false)?;
    let gradients = loss.backward()?;
    let mut found = vec![loss.to_vec()?, x.sum(&[0], false)?.to_vec()?];
    for leaf in weights.iter().chain([&table]) {
        if let Some(gradient) = gradients.get(leaf)? {
            found.push(gradient.to_vec()?);
        }
    }
    Ok(found)
}

fn programs_that_come_again_compute_with_what_they_are_given(device: &Device) {
    let host = anymesh::device("eager:cpu").expect("the CPU backend is always there");
    let eager = device.innermost();
    let deferred = anymesh_engine::deferred(eager);
    let all = |device: &Device, runs: &mut dyn Iterator<Item = u64>| -> Vec<Vec<Vec<f32>>> {
        runs.map(|run| program(run, device).expect("it runs"))
            .collect()
    };
    let first = all(eager, &mut (0..RUNS));
    // The runs in the other order: what was remembered of one is used for others.
    let mut again = all(eager, &mut (0..RUNS).rev());
    again.reverse();
    assert_eq!(first, again, "the same bits in any order");
    for pass in 0..3 {
        let later = all(&deferred, &mut (0..RUNS));
        assert_eq!(first, later, "the same bits deferred, pass {pass}");
    }
    let expected = all(&host, &mut (0..RUNS));
    for (run, (found, expected)) in first.iter().zip(&expected).enumerate() {
        for (found, expected) in found.iter().zip(expected) {
            let most = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
            for (a, b) in found.iter().zip(expected) {
                // Devices add in other orders.
                assert!((a - b).abs() <= 1e-4 * most, "run {run}: {a} is not {b}");
            }
        }
    }
    assert_ne!(first[0], first[1], "runs differ");
}

//! The same program again and again, with other values each time.
//!
//! Devices remember launches and lists of launches, and make them again with other memory. What they
//! compute must be what the first run would have computed.

use crate::Suite;
use anymesh::{DType, Device, Result, Tensor, ops::Rng};

pub(crate) const SUITE: Suite = &[
    (
        "programs_that_come_again_compute_with_what_they_are_given",
        programs_that_come_again_compute_with_what_they_are_given,
    ),
    (
        "uploads_launches_and_reads_happen_in_the_order_of_the_program",
        uploads_launches_and_reads_happen_in_the_order_of_the_program,
    ),
    (
        "numbers_and_sizes_that_never_come_again_are_right_too",
        numbers_and_sizes_that_never_come_again_are_right_too,
    ),
    (
        "threads_that_share_a_device_do_not_disturb_each_other",
        threads_that_share_a_device_do_not_disturb_each_other,
    ),
];

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

/// Each upload lies where the one before it lay, whose readers may not be done.
fn uploads_launches_and_reads_happen_in_the_order_of_the_program(device: &Device) {
    let run = |device: &Device| -> Result<()> {
        let mut sum = Tensor::zeros([5000], DType::F32, device)?;
        let mut expected = 0f32;
        for k in 0..300usize {
            let values = vec![k as f32; 5000];
            let x = Tensor::new(&values, device)?;
            sum = sum.add(&x)?.sub(&x.mul(0.5)?)?;
            expected += k as f32 * 0.5;
            // Reads of odd places, some with much that waits and some with nothing.
            if k % 37 == 0 || k % 37 == 1 {
                let part = sum.narrow(0, k + 1, 3)?;
                assert_eq!(part.to_vec::<f32>()?, [expected; 3], "{k} on {device}");
            }
        }
        assert_eq!(sum.to_vec::<f32>()?, [expected; 5000], "on {device}");
        Ok(())
    };
    for device in [
        device.innermost(),
        &anymesh_engine::deferred(device.innermost()),
    ] {
        run(device).expect("it runs");
    }
}

/// What devices keep of launches is bounded, and goes.
fn numbers_and_sizes_that_never_come_again_are_right_too(device: &Device) {
    let run = |device: &Device| -> Result<()> {
        let x = Tensor::new(&[1f32, 2.0, 3.0], device)?;
        let mut all = vec![];
        for k in 0..9000 {
            all.push(x.mul(f64::from(k))?);
            if all.len() == 500 {
                let first = k - 499;
                for (found, k) in all.drain(..).zip(first..).step_by(83) {
                    let k = k as f32;
                    assert_eq!(found.to_vec::<f32>()?, [k, 2.0 * k, 3.0 * k], "on {device}");
                }
            }
        }
        for size in (1..40_000).step_by(211) {
            let ones = Tensor::ones([size], DType::F32, device)?;
            let sum = ones.add(&ones)?.sum(&[], false)?;
            assert_eq!(sum.to_vec::<f32>()?, [2.0 * size as f32], "on {device}");
        }
        Ok(())
    };
    run(device.innermost()).expect("it runs");
}

fn threads_that_share_a_device_do_not_disturb_each_other(device: &Device) {
    let run = |device: &Device, thread: usize| -> Result<()> {
        let mut x = Tensor::new(&vec![thread as f32; 1000], device)?;
        for step in 1..60 {
            x = x.add(1.0)?;
            if step % 7 == thread % 7 {
                let expected = (thread + step) as f32;
                assert_eq!(x.to_vec::<f32>()?, [expected; 1000], "on {device}");
            }
        }
        Ok(())
    };
    for device in [
        device.innermost(),
        &anymesh_engine::deferred(device.innermost()),
    ] {
        std::thread::scope(|scope| {
            for thread in 0..6 {
                scope.spawn(move || run(device, thread).expect("it runs"));
            }
        });
    }
}

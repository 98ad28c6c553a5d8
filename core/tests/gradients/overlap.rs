//! Gradients that are reduced beside the backward pass.

use crate::gate::Gate;
use anymesh_core::{
    DType, Error, Mesh, Result, Tensor,
    grad::{Buckets, Gradients, with_buckets},
    spmd::Ledger,
    transport::{Background, Fault, Faulty, InProcess, Threads, Transport},
};
use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

fn mesh(transport: Arc<dyn Transport>) -> Result<Mesh> {
    let mesh = Mesh::new("dp=2", &anymesh_backend_cpu::device())?;
    Ok(mesh.with_transport(transport))
}

const WIDTH: usize = 8;

/// Square layers that are cut, the rows of which two ranks divide evenly or not.
fn layers(mesh: &Mesh, count: usize, rows: usize) -> Result<Vec<Tensor>> {
    let device = anymesh_backend_cpu::device();
    let layer = |i: usize| {
        let value = move |at: &[usize]| ((at[0] * 7 + at[1] * 3 + i) % 11) as f32 / 11.0 - 0.5;
        let whole = Tensor::from_fn([rows, rows], &device, value)?;
        whole.to_mesh(mesh, "[@dp, _]")?.require_grad()
    };
    (0..count).map(layer).collect()
}

fn loss(mesh: &Mesh, layers: &[Tensor]) -> Result<Tensor> {
    let rows = layers[0].dims()[0];
    let x = Tensor::ones([4, rows], DType::F32, (mesh, "[@dp, _]"))?;
    let y = (layers.iter()).try_fold(x, |x, w| x.matmul(w)?.tanh())?;
    y.square()?.sum(&[], false)
}

fn values(grads: &Gradients, layers: &[Tensor]) -> Result<Vec<Vec<f32>>> {
    layers.iter().map(|w| grads.of(w)?.to_vec()).collect()
}

#[test]
fn a_pass_does_not_wait_for_its_reductions_and_readers_do() -> Result<()> {
    let gate = Arc::new(Gate::default());
    let mesh = mesh(Background::new(gate.clone()))?;
    let layers = layers(&mesh, 1, WIDTH)?;
    let expected = values(&loss(&mesh, &layers)?.backward()?, &layers)?;
    let loss = loss(&mesh, &layers)?;
    let (result, ledger) = Ledger::record(|| {
        let before = gate.seen().len();
        gate.shut();
        // It would never return if it waited.
        let grads = loss.backward()?;
        while gate.seen().len() == before {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(20));
        gate.open();
        values(&grads, &layers)
    });
    assert_eq!(result?, expected);
    assert!(ledger.ran() >= Duration::from_millis(20));
    Ok(())
}

#[test]
fn the_ledger_tells_what_was_hidden() -> Result<()> {
    let gate = Arc::new(Gate::default());
    let beside = mesh(Background::new(gate.clone()))?;
    let x = Tensor::ones([4, 4], DType::F32, (&beside, "[@dp, _]"))?;
    let (result, ledger) = Ledger::record(|| {
        gate.shut();
        let ahead = x.prefetch("[_, _]")?;
        while gate.seen().is_empty() {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(20));
        gate.open();
        while !ahead.is_done() {
            std::thread::yield_now();
        }
        ahead.wait().map(drop)
    });
    result?;
    let entry = &ledger.entries[0];
    assert!(entry.ran >= Duration::from_millis(20), "{ledger}");
    assert!(!entry.hidden().is_zero() && entry.hidden() == ledger.hidden());
    assert!(ledger.to_string().contains("\nhidden "), "{ledger}");
    let json = ledger.to_json();
    assert_eq!(json[0]["hidden_seconds"], entry.hidden().as_secs_f64());
    // In one process nothing goes on beside the program.
    let alone = mesh(Arc::new(InProcess))?;
    let layers = layers(&alone, 3, WIDTH)?;
    let loss = loss(&alone, &layers)?;
    let (grads, ledger) = Ledger::record(|| loss.backward());
    grads?;
    assert!(!ledger.entries.is_empty() && ledger.hidden().is_zero());
    assert!(ledger.entries.iter().all(|e| e.ran == e.time));
    assert!(!ledger.to_string().contains("hidden"));
    Ok(())
}

/// Runs as two processes of one rank each.
fn two<T: Send>(run: impl Fn(usize, Arc<Threads>) -> T + Sync) -> [T; 2] {
    let threads = Threads::new(Duration::from_secs(60));
    std::thread::scope(|scope| {
        let start = |rank| {
            let (run, threads) = (&run, threads.clone());
            scope.spawn(move || run(rank, threads))
        };
        [0, 1].map(start).map(|t| t.join().expect("no panic"))
    })
}

/// The gradients of so many layers, and how many calls were made in the pass.
fn calls(
    rank: usize,
    carrier: Arc<Faulty>,
    rows: usize,
    buckets: Buckets,
) -> Result<(u64, Vec<Vec<f32>>)> {
    let mesh = mesh(Background::new(carrier.clone()))?.addressing(&[rank])?;
    let layers = layers(&mesh, 12, rows)?;
    let loss = loss(&mesh, &layers)?;
    let before = carrier.counts().calls;
    let grads = with_buckets(buckets, || loss.backward())?;
    mesh.transport().expect("ours").barrier(&mesh, &[0, 1])?;
    Ok((carrier.counts().calls - before, values(&grads, &layers)?))
}

#[test]
fn small_gradients_go_as_one_and_keep_their_bits() {
    let bytes = (WIDTH * WIDTH * 4) as u64;
    let run = |rows: usize, buckets: Buckets| {
        let [one, other] = two(|rank, threads| {
            let carrier = Arc::new(Faulty::new(threads, []));
            calls(rank, carrier, rows, buckets).expect("gradients")
        });
        assert_eq!(one, other);
        one
    };
    let of = |bytes| Buckets {
        bytes,
        ..Buckets::default()
    };
    // One after the other, in threes, all together.
    let (alone, expected) = run(WIDTH, of(0));
    for (size, saved) in [(3 * bytes, 8), (Buckets::default().bytes, 11)] {
        let (calls, values) = run(WIDTH, of(size));
        assert_eq!((calls, values), (alone - saved, expected.clone()));
    }
    // Parts of different sizes go by themselves.
    let (alone, expected) = run(WIDTH + 1, of(0));
    assert_eq!(run(WIDTH + 1, Buckets::default()), (alone, expected));
}

#[test]
fn what_waits_and_what_is_on_its_way_is_bounded() -> Result<()> {
    const LAYERS: usize = 12;
    const ROWS: usize = 96;
    // What a rank holds of a gradient that is not reduced; two ranks share the device.
    let bytes = (ROWS * ROWS * 4) as u64;
    let gate = Arc::new(Gate::default());
    let delay = |call| Fault::Delay {
        call,
        rank: 0,
        by: Duration::from_millis(3),
    };
    let slow = Arc::new(Faulty::new(gate.clone(), (LAYERS as u64..100).map(delay)));
    let run = |carrier: Arc<dyn Transport>, in_flight: u64, shut: bool| {
        let device = anymesh_backend_cpu::device();
        let mesh = Mesh::new("dp=2", &device)?.with_transport(Background::new(carrier));
        let layers = layers(&mesh, LAYERS, ROWS)?;
        let loss = loss(&mesh, &layers)?;
        let before = device.memory().in_use;
        device.reset_peak();
        if shut {
            gate.shut();
        }
        let buckets = Buckets {
            in_flight,
            ..Buckets::default()
        };
        let grads = with_buckets(buckets, || loss.backward())?;
        let held = device.memory().in_use.saturating_sub(before);
        gate.open();
        let values = values(&grads, &layers)?;
        Ok::<_, Error>((held, device.memory().peak - before, values))
    };
    // While nothing is carried, all gradients are there as they were made.
    let (held, _, expected) = run(gate.clone(), u64::MAX, true)?;
    assert!(held > (LAYERS as u64 - 1) * 2 * bytes, "{held}");
    // One is on its way, one is made, one was just received, and gathered layers are at hand.
    let (_, peak, values) = run(slow, bytes, false)?;
    assert!(peak < (LAYERS as u64 + 7) * bytes, "{peak} of {bytes}");
    assert_eq!(values, expected);
    Ok(())
}

#[test]
fn hooks_see_gradients_that_are_reduced() {
    let shown = two(|rank, threads| -> Result<(Vec<String>, Vec<f32>)> {
        let mesh = mesh(Background::new(threads))?.addressing(&[rank])?;
        let layers = layers(&mesh, 3, WIDTH)?;
        let seen = Arc::new(Mutex::new(vec![]));
        let notes = seen.clone();
        let _hook = layers[1].on_gradient(move |g| {
            notes.lock().expect("whole").push(g.type_string());
            g.mul(2.0).map(Some)
        })?;
        let grads = loss(&mesh, &layers)?.backward()?;
        let twice = grads.of(&layers[1])?.to_vec()?;
        let seen = seen.lock().expect("whole").clone();
        Ok((seen, twice))
    });
    for result in shown {
        let (seen, twice) = result.expect("gradients");
        assert_eq!(seen, ["f32[8@dp, 8]"]);
        assert!(twice.iter().any(|g| *g != 0.0));
    }
}

#[test]
fn micro_batches_are_added_while_they_are_on_their_way() {
    let sums = two(|rank, threads| -> Result<(Vec<Vec<f32>>, Vec<Vec<f32>>)> {
        let mesh = mesh(Background::new(threads))?.addressing(&[rank])?;
        let layers = layers(&mesh, 3, WIDTH)?;
        let mut all = Gradients::default();
        for _ in 0..2 {
            all.add(loss(&mesh, &layers)?.backward()?)?;
        }
        let once = values(&loss(&mesh, &layers)?.backward()?, &layers)?;
        Ok((values(&all, &layers)?, once))
    });
    for result in sums {
        let (twice, once) = result.expect("gradients");
        let doubled: Vec<Vec<f32>> = once
            .iter()
            .map(|g| g.iter().map(|v| 2.0 * v).collect())
            .collect();
        assert_eq!(twice, doubled);
    }
}

#[test]
fn a_reduction_that_fails_is_an_error_of_the_step_and_nobody_hangs() {
    let small = Buckets {
        bytes: 2 * (WIDTH * WIDTH * 4) as u64,
        ..Buckets::default()
    };
    let mut failed = 0;
    for call in 0..40 {
        let threads = Threads::new(Duration::from_millis(100));
        let run = |rank: usize| {
            let faults = (rank == 0).then_some(Fault::Fail { call });
            let carrier = Arc::new(Faulty::new(threads.clone(), faults));
            calls(rank, carrier, WIDTH, small).map(drop)
        };
        let [first, second] = std::thread::scope(|scope| {
            [0, 1]
                .map(|rank| scope.spawn(move || run(rank)))
                .map(|t| t.join().expect("no panic"))
        });
        match (first, second) {
            (Err(Error::Transport { .. }), Err(Error::Timeout { .. })) => failed += 1,
            (Ok(()), Ok(())) => {}
            other => panic!("call {call}: {other:?}"),
        }
    }
    assert!(
        failed > 20,
        "{failed} of the calls of a step are made to fail"
    );
}

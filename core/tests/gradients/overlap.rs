//! Gradients that are reduced beside the backward pass.

use crate::gate::Gate;
use anymesh_core::{
    DType, Error, Mesh, Result, Tensor,
    grad::{Gradients, Overlap, with_overlap},
    spmd::{Held, Ledger, with_held},
    transport::{
        Arrived, Background, Call, Fault, Faulty, InProcess, Message, Pending, Threads, Transport,
    },
};
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
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
    // Enough rows that sums of gradients are less than what they are made of.
    let x = Tensor::ones([8 * rows, rows], DType::F32, (mesh, "[@dp, _]"))?;
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
    buckets: Overlap,
) -> Result<(u64, Vec<Vec<f32>>)> {
    let mesh = mesh(Background::new(carrier.clone()))?.addressing(&[rank])?;
    let layers = layers(&mesh, 12, rows)?;
    let loss = loss(&mesh, &layers)?;
    let before = carrier.counts().calls;
    let grads = with_overlap(buckets, || loss.backward())?;
    mesh.transport().expect("ours").barrier(&mesh, &[0, 1])?;
    Ok((carrier.counts().calls - before, values(&grads, &layers)?))
}

#[test]
fn small_gradients_go_as_one_and_keep_their_bits() {
    let bytes = (WIDTH * WIDTH * 4) as u64;
    let run = |rows: usize, buckets: Overlap| {
        let [one, other] = two(|rank, threads| {
            let carrier = Arc::new(Faulty::new(threads, []));
            calls(rank, carrier, rows, buckets).expect("gradients")
        });
        assert_eq!(one, other);
        one
    };
    let of = |bucket| Overlap {
        bucket,
        ..Overlap::default()
    };
    // One after the other, in threes, all together.
    let (alone, expected) = run(WIDTH, of(0));
    for (size, saved) in [(3 * bytes, 8), (Overlap::default().bucket, 11)] {
        let (calls, values) = run(WIDTH, of(size));
        assert_eq!((calls, values), (alone - saved, expected.clone()));
    }
    // Parts of different sizes go by themselves.
    let (alone, expected) = run(WIDTH + 1, of(0));
    assert_eq!(run(WIDTH + 1, Overlap::default()), (alone, expected));
}

/// Makes the calls that are started when they are waited for, and counts what they hold until then.
#[derive(Debug, Default)]
struct Lazy {
    held: Arc<AtomicU64>,
    most: AtomicU64,
}

#[derive(Debug)]
struct Later {
    mesh: Mesh,
    call: Call,
    bytes: u64,
    held: Arc<AtomicU64>,
}

impl Pending for Later {
    fn is_done(&self) -> bool {
        false
    }

    fn wait(self: Box<Self>) -> Result<Arrived> {
        self.held.fetch_sub(self.bytes, Relaxed);
        Ok(Arrived {
            answer: self.call.run(&InProcess, &self.mesh)?,
            ran: Duration::ZERO,
        })
    }
}

impl Transport for Lazy {
    fn name(&self) -> &str {
        "lazy"
    }

    fn overlaps(&self) -> bool {
        true
    }

    fn start(&self, mesh: &Mesh, call: Call) -> Result<Box<dyn Pending>> {
        let (mesh, held) = (mesh.clone(), self.held.clone());
        let bytes = match &call {
            Call::ReduceScatter { parts, .. } => 4 * parts[0].shape.numel() as u64,
            other => panic!("a gradient is reduced by {}", other.name()),
        };
        let now = held.fetch_add(bytes, Relaxed) + bytes;
        self.most.fetch_max(now, Relaxed);
        Ok(Box::new(Later {
            mesh,
            call,
            bytes,
            held,
        }))
    }

    fn exchange(&self, mesh: &Mesh, messages: Vec<Message>) -> Result<Vec<Option<Tensor>>> {
        InProcess.exchange(mesh, messages)
    }

    fn barrier(&self, mesh: &Mesh, group: &[usize]) -> Result<()> {
        InProcess.barrier(mesh, group)
    }
}

#[test]
fn what_is_on_its_way_is_bounded() -> Result<()> {
    let bytes = (WIDTH * WIDTH * 4) as u64;
    let run = |in_flight: u64| {
        let lazy = Arc::new(Lazy::default());
        let mesh = mesh(lazy.clone())?;
        let layers = layers(&mesh, 12, WIDTH)?;
        let buckets = Overlap {
            in_flight,
            ..Overlap::default()
        };
        let grads = with_overlap(buckets, || loss(&mesh, &layers)?.backward())?;
        let most = lazy.most.load(Relaxed);
        let values = values(&grads, &layers)?;
        assert_eq!(lazy.held.load(Relaxed), 0, "all are waited for");
        Ok::<_, Error>((most, values))
    };
    let (most, expected) = run(u64::MAX)?;
    assert_eq!(most, 12 * bytes);
    for (in_flight, most) in [(0, 1), (bytes, 1), (3 * bytes, 3), (3 * bytes + 1, 3)] {
        assert_eq!(run(in_flight)?, (most * bytes, expected.clone()));
    }
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
fn parameters_are_gathered_ahead_of_the_pass_and_no_more_than_told() {
    let bytes = (WIDTH * WIDTH * 4) as u64;
    // Forms are let go of soon, so that the pass has to gather again.
    let soon = Held {
        calls: 2,
        ..Held::default()
    };
    let run = |ahead: u64| {
        let [one, other] = two(|rank, threads| {
            let mesh = mesh(Background::new(threads))?.addressing(&[rank])?;
            let layers = layers(&mesh, 8, WIDTH)?;
            let overlap = Overlap {
                ahead,
                ..Overlap::default()
            };
            let (result, ledger) = with_overlap(overlap, || {
                with_held(soon, || {
                    let loss = loss(&mesh, &layers)?;
                    let (grads, ledger) = Ledger::record(|| loss.backward());
                    Ok::<_, Error>((values(&grads?, &layers)?, ledger))
                })
            })?;
            let kinds: Vec<_> = ledger.entries.iter().map(|e| e.kind).collect();
            Ok::<_, Error>((result, kinds, ledger.bytes()))
        });
        let one = one.expect("gradients");
        assert_eq!(Ok(one.clone()), other);
        one
    };
    let first = |kinds: &[&str]| kinds.iter().take_while(|k| **k == "all_gather").count();
    let (expected, kinds, sent) = run(0);
    let gathers = kinds.iter().filter(|k| **k == "all_gather").count();
    assert!(first(&kinds) <= 1 && gathers >= 5, "{kinds:?}");
    let (values, three, bytes_of_three) = run(3 * bytes);
    assert_eq!((&values, bytes_of_three), (&expected, sent));
    assert!((2..=4).contains(&first(&three)), "{three:?}");
    let (values, all, bytes_of_all) = run(u64::MAX);
    assert_eq!((values, bytes_of_all), (expected, sent));
    assert_eq!(first(&all), gathers, "{all:?}");
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
    let small = Overlap {
        bucket: 2 * (WIDTH * WIDTH * 4) as u64,
        ..Overlap::default()
    };
    let run = |call: u64, deadline: u64| {
        let threads = Threads::new(Duration::from_millis(deadline));
        let run = |rank: usize| {
            let faults = (rank == 0).then_some(Fault::Fail { call });
            let carrier = Arc::new(Faulty::new(threads.clone(), faults));
            calls(rank, carrier, WIDTH, small).map(drop)
        };
        std::thread::scope(|scope| {
            [0, 1]
                .map(|rank| scope.spawn(move || run(rank)))
                .map(|t| t.join().expect("no panic"))
        })
    };
    let mut failed = 0;
    for call in 0..40 {
        // On a machine with too much to do, a short deadline can pass before a rank comes to its call.
        let mut deadlines = [100, 1_000, 10_000].into_iter();
        loop {
            let outcome = deadlines.next().map(|deadline| run(call, deadline));
            match outcome {
                Some([Err(Error::Transport { .. }), Err(Error::Timeout { .. })]) => failed += 1,
                Some([Ok(()), Ok(())]) => {}
                Some([Err(Error::Timeout { .. }), _]) => continue,
                other => panic!("call {call}: {other:?}"),
            }
            break;
        }
    }
    assert!(
        failed > 20,
        "{failed} of the calls of a step are made to fail"
    );
}

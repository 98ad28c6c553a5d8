//! The same with the ranks in several processes, whose gradients are reduced beside the backward
//! pass or not: the same bits, and the same communication.

use super::Layout;
use anymesh_core::{
    Mesh, Result,
    grad::{Buckets, with_buckets},
    spmd::Ledger,
    transport::{Background, Fault, Faulty, Threads, Transport},
};
use std::{sync::Arc, time::Duration};

/// Rounding would show after a few.
const STEPS: usize = 4;

/// What a process makes of the transport between all of them.
type Carrier = fn(usize, Arc<Threads>) -> Arc<dyn Transport>;

fn beside(_: usize, threads: Arc<Threads>) -> Arc<dyn Transport> {
    Background::new(threads)
}

/// Beside the program, and each process late in its own way.
fn beside_and_late(process: usize, threads: Arc<Threads>) -> Arc<dyn Transport> {
    let delays = Fault::script(process as u64, 400, 4, Duration::from_micros(700));
    let delays = delays.into_iter();
    let delays = delays.filter(|fault| matches!(fault, Fault::Delay { .. }));
    Background::new(Arc::new(Faulty::new(threads, delays)))
}

/// One line for each piece of communication.
fn lines(ledger: &Ledger) -> Vec<String> {
    let line = |e: &anymesh_core::spmd::Entry| {
        format!("{} {} {} -> {}: {}", e.op, e.kind, e.from, e.to, e.bytes)
    };
    ledger.entries.iter().map(line).collect()
}

/// The losses of every process, and what each communicated.
fn losses(
    train: &(impl Fn(&Layout<'_>) -> Result<Vec<f64>> + Sync),
    shardings: &[(&str, &str)],
    processes: usize,
    carrier: Carrier,
    buckets: Buckets,
) -> Result<Vec<(Vec<f64>, Ledger)>> {
    let whole = Mesh::new("dp=2, tp=2", &anymesh_backend_cpu::device())?;
    let threads = Threads::new(Duration::from_secs(60));
    std::thread::scope(|scope| {
        let run = |process: usize| {
            let (whole, threads) = (&whole, threads.clone());
            scope.spawn(move || {
                let ranks: Vec<usize> = (0..4).filter(|r| r * processes / 4 == process).collect();
                let mesh = whole.with_transport(carrier(process, threads));
                let mesh = mesh.addressing(&ranks)?;
                let layout = Layout {
                    mesh: Some(&mesh),
                    shardings,
                    steps: STEPS,
                };
                let (losses, ledger) = Ledger::record(|| with_buckets(buckets, || train(&layout)));
                Ok((losses?, ledger))
            })
        };
        let running: Vec<_> = (0..processes).map(run).collect();
        let join = running.into_iter().map(|thread| thread.join());
        join.map(|result| result.expect("no panic")).collect()
    })
}

/// Trains with the ranks in 2 and in 4 processes, with and without overlap.
pub(super) fn same_over_processes(
    train: impl Fn(&Layout<'_>) -> Result<Vec<f64>> + Sync,
    layouts: &[(&str, &[(&str, &str)])],
) -> Result<()> {
    let whole = Mesh::new("dp=2, tp=2", &anymesh_backend_cpu::device())?;
    let default = Buckets::default();
    let small = Buckets {
        bytes: 300,
        in_flight: 700,
        ..default
    };
    let alone = Buckets {
        bytes: 0,
        in_flight: 0,
        ..default
    };
    for (name, shardings) in layouts {
        let one = train(&Layout {
            mesh: Some(&whole),
            shardings,
            steps: STEPS,
        })?;
        for processes in [2, 4] {
            let plain: Carrier = |_, threads| threads;
            let run = |carrier, buckets| losses(&train, shardings, processes, carrier, buckets);
            let without = run(plain, default)?;
            for (losses, ledger) in &without {
                assert_eq!(*losses, one, "{name} on {processes} processes");
                assert!(ledger.hidden().is_zero(), "nothing goes on beside");
            }
            let ways: [(&str, Carrier, Buckets); 4] = [
                ("beside", beside, default),
                ("beside, small buckets", beside, small),
                ("beside, no buckets", beside, alone),
                ("beside, late", beside_and_late, small),
            ];
            for (way, carrier, buckets) in ways {
                let with = run(carrier, buckets)?;
                for ((losses, ledger), (_, expected)) in with.iter().zip(&without) {
                    assert_eq!(*losses, one, "{name} on {processes} processes {way}");
                    assert_eq!(lines(ledger), lines(expected), "{name} {processes} {way}");
                }
            }
            // What is whole is added up in the pass: the same bits and bytes, at another time.
            for buckets in [default, small] {
                let whole = Buckets {
                    whole: true,
                    ..buckets
                };
                for ((losses, ledger), (_, expected)) in run(beside, whole)?.iter().zip(&without) {
                    assert_eq!(*losses, one, "{name} on {processes} processes, whole");
                    assert_eq!(ledger.bytes(), expected.bytes(), "{name}");
                }
            }
        }
    }
    Ok(())
}

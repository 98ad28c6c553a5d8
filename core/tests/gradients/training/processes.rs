//! The same with the ranks in several processes, whose gradients are reduced beside the backward
//! pass or not: the same bits, and the same communication.

use super::Layout;
use anymesh_core::{
    Mesh, Result,
    grad::{Overlap, with_overlap},
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
    overlap: Overlap,
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
                let (losses, ledger) = Ledger::record(|| with_overlap(overlap, || train(&layout)));
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
    let default = Overlap::default();
    let small = Overlap {
        bucket: 300,
        in_flight: 700,
        ..default
    };
    let alone = Overlap {
        bucket: 0,
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
            let run = |carrier, overlap| losses(&train, shardings, processes, carrier, overlap);
            let without = run(plain, default)?;
            for (losses, ledger) in &without {
                assert_eq!(*losses, one, "{name} on {processes} processes");
                assert!(ledger.hidden().is_zero(), "nothing goes on beside");
            }
            let ways: [(&str, Carrier, Overlap); 4] = [
                ("beside", beside, default),
                ("beside, small overlap", beside, small),
                ("beside, no overlap", beside, alone),
                ("beside, late", beside_and_late, small),
            ];
            for (way, carrier, overlap) in ways {
                let with = run(carrier, overlap)?;
                for ((losses, ledger), (_, expected)) in with.iter().zip(&without) {
                    assert_eq!(*losses, one, "{name} on {processes} processes {way}");
                    assert_eq!(lines(ledger), lines(expected), "{name} {processes} {way}");
                }
            }
            // What is brought ahead may change what ops do, and overlap does not change it further.
            let ahead = Overlap {
                ahead: 1000,
                ..small
            };
            let without_ahead = run(plain, ahead)?;
            for carrier in [beside as Carrier, beside_and_late] {
                for (with, expected) in run(carrier, ahead)?.iter().zip(&without_ahead) {
                    assert_eq!(with.0, expected.0, "{name} on {processes} processes, ahead");
                    assert_eq!(
                        lines(&with.1),
                        lines(&expected.1),
                        "{name} {processes} ahead"
                    );
                }
            }
            // What is whole is added up in the pass: the same bits and bytes, at another time.
            for overlap in [default, small] {
                let whole = Overlap {
                    whole: true,
                    ..overlap
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

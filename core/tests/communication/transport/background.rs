//! Calls that go on beside the program: their order, their errors, and that nothing hangs.

use super::devices::{device, parts, values};
use crate::gate::Gate;
use anymesh_core::{
    DType, Error, Mesh, Reduction, Result, Tensor,
    transport::{
        Background, Call, Fault, Faulty, InProcess, Message, Part, Pending, Threads, Transport,
    },
};
use std::{sync::Arc, time::Duration};

fn mesh(ranks: usize, transport: Arc<dyn Transport>) -> Mesh {
    let mesh = Mesh::new(&format!("x={ranks}"), &device()).expect("a mesh");
    mesh.with_transport(transport)
}

fn sum(values: &[&[f32]]) -> Call {
    Call::AllReduce {
        parts: parts(values),
        reduction: Reduction::Sum,
    }
}

#[test]
fn a_started_call_does_not_hold_up_the_program() -> Result<()> {
    let gate = Arc::new(Gate::default());
    gate.shut();
    let mesh = mesh(2, Background::new(gate.clone()));
    let transport = mesh.transport().expect("ours");
    assert!(transport.overlaps());
    let first = transport.start(&mesh, sum(&[&[1.0], &[2.0]]))?;
    let second = transport.start(&mesh, sum(&[&[3.0], &[4.0]]))?;
    // Nothing can have happened: if these had waited, the gate would never open.
    assert!(!first.is_done() && !second.is_done());
    gate.open();
    assert_eq!(values(second.wait()?.answer), [[7.0], [7.0]]);
    assert!(first.is_done(), "calls are made in their order");
    assert_eq!(values(first.wait()?.answer), [[3.0], [3.0]]);
    Ok(())
}

#[test]
fn a_call_that_nobody_waits_for_happens_all_the_same() -> Result<()> {
    let counting = Arc::new(Faulty::new(Arc::new(InProcess), []));
    let background = Background::new(counting.clone());
    let mesh = mesh(2, background.clone());
    for _ in 0..5 {
        drop(background.start(&mesh, sum(&[&[1.0], &[2.0]]))?);
    }
    let all = background.all_reduce(&mesh, &parts(&[&[1.0], &[1.0]]), Reduction::Sum)?;
    assert_eq!(values(all), [[2.0], [2.0]]);
    assert_eq!(counting.counts().calls, 6, "and before the one after it");
    for _ in 0..5 {
        drop(background.start(&mesh, sum(&[&[1.0], &[2.0]]))?);
    }
    background.settle()?;
    assert_eq!(counting.counts().calls, 11);
    // The calls hold their transport until they are made.
    drop(background.start(&mesh, sum(&[&[1.0], &[2.0]]))?);
    drop((mesh, background));
    while counting.counts().calls < 12 {
        std::thread::yield_now();
    }
    Ok(())
}

#[test]
fn a_started_call_that_fails_ends_all_later_ones() -> Result<()> {
    let faulty = Arc::new(Faulty::new(Arc::new(InProcess), [Fault::Fail { call: 1 }]));
    let mesh = mesh(2, Background::new(faulty.clone()));
    let transport = mesh.transport().expect("ours");
    let calls = (0..4).map(|_| transport.start(&mesh, sum(&[&[1.0], &[2.0]])));
    let mut calls = calls.collect::<Result<Vec<_>>>()?;
    let late = calls.split_off(1);
    for call in calls {
        assert_eq!(values(call.wait()?.answer), [[3.0], [3.0]]);
    }
    let fails = |error: &Error| {
        assert!(matches!(error, Error::Transport { .. }), "{error}");
        assert!(error.to_string().contains("call 1"), "{error}");
    };
    for call in late {
        fails(&call.wait().expect_err("it or one before it failed"));
    }
    fails(&transport.barrier(&mesh, &[0, 1]).expect_err("no going on"));
    let again = transport.start(&mesh, sum(&[&[1.0], &[2.0]]));
    fails(&again.expect_err("no going on"));
    assert_eq!(faulty.counts().calls, 2, "nothing more is sent");
    Ok(())
}

#[test]
fn a_call_that_was_not_started_fails_alone_and_can_be_repeated() -> Result<()> {
    let faulty = Arc::new(Faulty::new(Arc::new(InProcess), [Fault::Fail { call: 0 }]));
    let mesh = mesh(2, Background::new(faulty));
    let transport = mesh.transport().expect("ours");
    assert!(transport.barrier(&mesh, &[0, 1]).is_err());
    transport.barrier(&mesh, &[0, 1])
}

/// Panics when it is to carry something.
#[derive(Debug)]
struct Panics;

impl Transport for Panics {
    fn name(&self) -> &str {
        "panics"
    }

    fn exchange(&self, _: &Mesh, _: Vec<Message>) -> Result<Vec<Option<Tensor>>> {
        panic!("no way")
    }

    fn barrier(&self, _: &Mesh, _: &[usize]) -> Result<()> {
        panic!("no way at all")
    }
}

#[test]
fn a_panic_is_an_error_of_the_call_and_of_later_ones() -> Result<()> {
    let started = mesh(2, Background::new(Arc::new(Panics)));
    let transport = started.transport().expect("ours");
    let call = transport.start(&started, sum(&[&[1.0], &[2.0]]))?;
    let error = call.wait().expect_err("it panicked");
    assert!(error.to_string().contains("no way"), "{error}");
    assert!(transport.barrier(&started, &[0, 1]).is_err());
    // One that was not started panics where it was called, and leaves nobody waiting.
    let mesh = mesh(2, Background::new(Arc::new(Panics)));
    let transport = mesh.transport().expect("ours");
    let call = || transport.barrier(&mesh, &[0, 1]);
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).is_err());
    assert!(transport.barrier(&mesh, &[0, 1]).is_err());
    Ok(())
}

#[test]
fn the_thread_knows_on_whose_behalf_it_calls() -> Result<()> {
    let gate = Arc::new(Gate::default());
    let mesh = mesh(2, Background::new(gate.clone()));
    let x = Tensor::ones([4], DType::F32, (&mesh, "[@x]"))?;
    let ahead = x.prefetch("[_]")?;
    assert_eq!(ahead.wait()?.to_vec::<f32>()?, [1.0; 4]);
    assert_eq!(gate.seen(), [Some("prefetch")]);
    Ok(())
}

/// Numbers that look random and are the same everywhere.
fn random(seed: &mut u64) -> u64 {
    *seed = seed
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407);
    *seed >> 33
}

/// What one process does: calls of all kinds, started or not, waited for at once, later or never.
fn program(process: usize, seed: u64, transport: Arc<dyn Transport>) -> Result<()> {
    const RANKS: usize = 3;
    let mesh = mesh(RANKS, transport).addressing(&[process])?;
    let transport = mesh.transport().expect("ours");
    let mut seed = seed;
    let mut open: Vec<(f32, Box<dyn Pending>)> = vec![];
    let check = |sum: f32, answer: Vec<Option<Tensor>>| -> Result<()> {
        let mine = answer[process].as_ref().expect("what this rank gets");
        assert_eq!(mine.to_vec::<f32>()?, [sum]);
        Ok(())
    };
    for number in 0..60 {
        let of = |rank: usize| (number * RANKS + rank) as f32;
        let part = |rank: usize| -> Result<Part> {
            Ok(match rank == process {
                true => Part::new(rank, &Tensor::from_slice(&[of(rank)], [1], mesh.device(0))?),
                false => Part::elsewhere(rank, DType::F32, [1]),
            })
        };
        let parts = (0..RANKS).map(part).collect::<Result<Vec<_>>>()?;
        let (sum, reduction) = ((0..RANKS).map(of).sum(), Reduction::Sum);
        match random(&mut seed) % 4 {
            0 => check(sum, transport.all_reduce(&mesh, &parts, reduction)?)?,
            1 => drop(transport.start(&mesh, Call::AllReduce { parts, reduction })?),
            _ => {
                let call = transport.start(&mesh, Call::AllReduce { parts, reduction })?;
                open.push((sum, call));
            }
        }
        // Each process waits in an order of its own.
        if open.len() > 4 {
            let (sum, call) = open.remove(process % open.len());
            check(sum, call.wait()?.answer)?;
        }
        if random(&mut seed) % 8 == process as u64 {
            std::thread::sleep(Duration::from_micros(300));
        }
    }
    for (sum, call) in open {
        check(sum, call.wait()?.answer)?;
    }
    transport.barrier(&mesh, &[0, 1, 2])
}

#[test]
fn processes_of_different_speeds_stay_in_step() {
    for seed in 0..12 {
        let threads = Threads::new(Duration::from_secs(60));
        std::thread::scope(|scope| {
            for process in 0..3 {
                let delays =
                    Fault::script(seed + process as u64, 60, 3, Duration::from_micros(500));
                let delays = delays
                    .into_iter()
                    .filter(|f| matches!(f, Fault::Delay { .. }));
                let late = Arc::new(Faulty::new(threads.clone(), delays));
                scope.spawn(move || {
                    program(process, seed, Background::new(late)).expect("all is well");
                });
            }
        });
    }
}

#[test]
fn a_process_that_fails_leaves_nobody_waiting() {
    for call in (0..60).step_by(7) {
        let threads = Threads::new(Duration::from_millis(100));
        let results: Vec<Result<()>> = std::thread::scope(|scope| {
            let process = |process: usize| {
                let faults = (process == 1).then_some(Fault::Fail { call });
                let faulty = Arc::new(Faulty::new(threads.clone(), faults));
                scope.spawn(move || program(process, 5, Background::new(faulty)))
            };
            let running: Vec<_> = (0..3).map(process).collect();
            let join = running.into_iter().map(|thread| thread.join());
            join.map(|result| result.expect("no panic")).collect()
        });
        for (process, result) in results.into_iter().enumerate() {
            match (process, result) {
                (1, Err(Error::Transport { .. })) | (0 | 2, Err(Error::Timeout { .. })) => {}
                (_, result) => panic!("call {call}, process {process}: {result:?}"),
            }
        }
    }
}

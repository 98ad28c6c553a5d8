//! The conformance suite on every transport there is, and on some that must not pass.

use super::devices::{Minimal, counting_device, device};
use anymesh_conformance::transport as conformance;
use anymesh_core::{
    Mesh, Reduction, Result, Tensor,
    transport::{Background, Faulty, InProcess, Message, Part, Threads, Transport},
};
use std::{sync::Arc, time::Duration};

fn run(transport: Arc<dyn Transport>) -> conformance::Report {
    pollster::block_on(conformance::run(|ranks| {
        Ok(Mesh::new(&format!("x={ranks}"), &device())?.with_transport(transport.clone()))
    }))
}

#[track_caller]
fn passes(report: &conformance::Report) {
    assert!(report.failures.is_empty(), "{report}");
    assert!(report.passed > 15_000, "{report}");
}

#[test]
fn the_in_process_transport_passes() {
    passes(&run(Arc::new(InProcess)));
}

#[test]
fn a_transport_with_only_the_required_methods_passes() {
    passes(&run(Arc::new(Minimal)));
}

#[test]
fn a_decorator_without_faults_changes_nothing() {
    let transport = Arc::new(Faulty::new(Arc::new(InProcess), []));
    let report = run(transport.clone());
    passes(&report);
    assert!(transport.counts().calls as usize >= report.passed);
}

#[test]
fn calls_beside_the_program_change_nothing() {
    passes(&run(Background::new(Arc::new(Minimal))));
}

#[test]
fn calls_that_are_started_answer_the_same() {
    let beside = Background::new(Arc::new(Minimal));
    passes(&run(Arc::new(conformance::Started(beside))));
    // A transport that does nothing beside the program starts calls too.
    passes(&run(Arc::new(conformance::Started(Arc::new(InProcess)))));
}

#[test]
fn ranks_on_different_devices_pass() {
    let devices = [device(), counting_device().0, device(), counting_device().0];
    for transport in [Arc::new(InProcess) as Arc<dyn Transport>, Arc::new(Minimal)] {
        passes(&pollster::block_on(conformance::run(|ranks| {
            Ok(Mesh::over(&format!("x={ranks}"), &devices[..ranks])?
                .with_transport(transport.clone()))
        })));
    }
}

#[test]
fn ranks_spread_over_threads_pass() {
    spread(&|threads| threads);
}

#[test]
fn ranks_spread_over_threads_pass_with_calls_that_are_started() {
    spread(&|threads| Arc::new(conformance::Started(Background::new(threads))));
}

/// With the transport that each process makes of what carries data between them.
fn spread(transport_of: &(dyn Fn(Arc<Threads>) -> Arc<dyn Transport> + Sync)) {
    // Each thread sees the ranks that it would address as a process of its own: one has two of
    // them.
    let owner = [0, 1, 0, 2];
    let threads = Threads::new(Duration::from_secs(60));
    let transports: Vec<_> = (0..3).map(|_| transport_of(threads.clone())).collect();
    let device = device();
    let seen_by = |process: usize, ranks: usize| {
        let transport = transports[process].clone();
        let mesh = Mesh::new(&format!("x={ranks}"), &device)?.with_transport(transport);
        mesh.addressing(
            &(0..ranks)
                .filter(|r| owner[*r] == process)
                .collect::<Vec<_>>(),
        )
    };
    // Small meshes do not reach every process: those run on one rank of a mesh of their own.
    let own = Mesh::new("x=1", &device).expect("a mesh");
    let reports: Vec<conformance::Report> = std::thread::scope(|scope| {
        let run = |process| {
            let (seen_by, own) = (&seen_by, &own);
            move || {
                pollster::block_on(conformance::run(|ranks| {
                    seen_by(process, ranks).or_else(|_| own_ranks(own, ranks))
                }))
            }
        };
        let threads: Vec<_> = (0..3).map(|process| scope.spawn(run(process))).collect();
        threads
            .into_iter()
            .map(|t| t.join().expect("no thread panics"))
            .collect()
    });
    for report in &reports {
        passes(report);
    }
}

/// A mesh of that many ranks which has nothing to do with the others.
fn own_ranks(one: &Mesh, ranks: usize) -> Result<Mesh> {
    Mesh::new(&format!("x={ranks}"), one.device(0))
}

/// A transport with a mistake in one place.
#[derive(Debug)]
struct Mistaken(&'static str);

impl Transport for Mistaken {
    fn name(&self) -> &str {
        self.0
    }

    fn exchange(&self, mesh: &Mesh, mut messages: Vec<Message>) -> Result<Vec<Option<Tensor>>> {
        if self.0 == "takes messages in another order" {
            messages.reverse();
        }
        let mut answers = if self.0 == "checks nothing" {
            let here = |m: Message| {
                m.part
                    .data
                    .map(|t| t.to_device(mesh.device(m.to.min(mesh.ranks() - 1))))
                    .transpose()
            };
            messages.into_iter().map(here).collect::<Result<_>>()?
        } else {
            InProcess.exchange(mesh, messages)?
        };
        if self.0 == "loses a message" {
            answers.pop();
        }
        Ok(answers)
    }

    fn barrier(&self, mesh: &Mesh, group: &[usize]) -> Result<()> {
        if self.0 == "lets anybody through" {
            Ok(())
        } else {
            InProcess.barrier(mesh, group)
        }
    }

    fn all_reduce(
        &self,
        mesh: &Mesh,
        parts: &[Part],
        reduction: Reduction,
    ) -> Result<Vec<Option<Tensor>>> {
        let mut parts = parts.to_vec();
        if self.0 == "adds in another order" {
            parts.reverse();
        }
        let mut sums = InProcess.all_reduce(mesh, &parts, reduction)?;
        if self.0 == "answers too much" {
            sums.push(None);
        }
        Ok(sums)
    }
}

#[test]
fn the_suite_finds_mistakes() {
    for mistake in [
        "takes messages in another order",
        "checks nothing",
        "loses a message",
        "lets anybody through",
        "adds in another order",
        "answers too much",
    ] {
        let report = run(Arc::new(Mistaken(mistake)));
        assert!(
            !report.failures.is_empty(),
            "a transport that {mistake} passed"
        );
    }
    assert!(run(Arc::new(Mistaken("makes none"))).failures.is_empty());
}

//! Ops under shardings of their operands give what they give without a mesh.
//!
//! Every run picks other cases; a failure is run again with `ANYMESH_SWEEP_SEED` as printed and
//! `ANYMESH_SWEEP_OPS` for its op. `ANYMESH_SWEEP_LIMIT=all` runs every case there is.

use anymesh_conformance::{
    processes::SPREADS,
    sweep::{self, Options, Report},
};
use anymesh_core::{Device, Mesh, transport::Threads};
use std::time::Duration;

#[test]
fn every_op_on_every_mesh_equals_the_unsharded_op() {
    let options = Options::default().with_env().unwrap();
    let report = sweep::run(&anymesh_backend_cpu::device(), &options);
    println!("{}\n{report}", report.coverage());
    report.assert_right();
}

/// Every sample of every op, in four processes here, on meshes that reach all of them or some.
#[test]
fn every_op_with_ranks_in_processes_equals_the_unsharded_op() {
    let options = Options {
        limit: Some(1),
        meshes: &["a=2, b=2", "a=4", "a=3", "a=2"],
        ..Options::default().with_env().unwrap()
    };
    let device = anymesh_backend_cpu::device();
    let transport = Threads::new(Duration::from_secs(20));
    let process = |own: &'static [usize]| {
        let mesh = |axes: &str| {
            let ranks = Mesh::new(axes, &device)?.ranks();
            let here: Vec<(usize, Device)> = own
                .iter()
                .filter(|rank| **rank < ranks)
                .map(|rank| (*rank, device.clone()))
                .collect();
            let ids: Vec<usize> = (0..ranks).collect();
            Mesh::spread(axes, &ids, &here, transport.clone())
        };
        sweep::over_processes(&device, mesh, &options)
    };
    let reports: Vec<Report> = std::thread::scope(|scope| {
        let start = |own: &&'static [usize]| {
            let (process, own) = (&process, *own);
            scope.spawn(move || process(own))
        };
        let threads: Vec<_> = SPREADS[0].iter().map(start).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("no panic"))
            .collect()
    });
    for (rank, report) in reports.iter().enumerate() {
        println!("process {rank}: {report}");
    }
    reports.iter().for_each(Report::assert_right);
}

//! Programs as several processes run them.
//!
//! A program is a function of a mesh and uses nothing else: `fn program(mesh: &Mesh) -> Result<T>`.
//! So the same one runs with all ranks in one process, in [threads that act as processes](run), and
//! in real processes over any transport. [`programs`] has some that check themselves.

pub mod programs;

use anymesh_core::{
    Device, Error, Mesh, Result,
    transport::{Threads, Transport},
};
use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    time::Duration,
};

/// Ways to spread four ranks over processes: one each, two each, unevenly and not in order, all in
/// one, and with a process that has none.
pub const SPREADS: [&[&[usize]]; 5] = [
    &[&[0], &[1], &[2], &[3]],
    &[&[0, 1], &[2, 3]],
    &[&[0, 3], &[1], &[2]],
    &[&[0, 1, 2, 3]],
    &[&[0, 2], &[], &[1, 3]],
];

/// Runs a program in a thread for each group of ranks, as processes would that have those ranks, and
/// gives what each came to.
///
/// No wait takes longer than `limit`. Where one ends with an error or a panic, the others stop as
/// they would when a process dies; panics are passed on.
///
/// ```
/// # use anymesh_conformance::processes;
/// # use anymesh_core::{DType, Error, Mesh, Tensor};
/// # let device = anymesh_backend_cpu::device();
/// let program = |mesh: &Mesh| {
///     let x = Tensor::arange(0, 6, 1, DType::F32, mesh.device(0))?.to_mesh(mesh, "[@x]")?;
///     x.sum(&[], false)?.item()
/// };
/// let limit = std::time::Duration::from_secs(10);
/// for sum in processes::run(&device, "x=3", &[&[0], &[1, 2]], limit, program)? {
///     assert_eq!(sum?.to_f64(), 15.0);
/// }
/// # Ok::<(), Error>(())
/// ```
pub fn run<T: Send>(
    device: &Device,
    axes: &str,
    groups: &[&[usize]],
    limit: Duration,
    program: impl Fn(&Mesh) -> Result<T> + Sync,
) -> Result<Vec<Result<T>>> {
    run_on(|_| device.clone(), axes, groups, limit, program)
}

/// [`run`] with a device for each rank.
pub fn run_on<T: Send>(
    device: impl Fn(usize) -> Device,
    axes: &str,
    groups: &[&[usize]],
    limit: Duration,
    program: impl Fn(&Mesh) -> Result<T> + Sync,
) -> Result<Vec<Result<T>>> {
    let transport = Threads::new(limit);
    let ranks: usize = groups.iter().map(|group| group.len()).sum();
    let ids: Vec<usize> = (0..ranks).collect();
    // Ranks are named as they are counted.
    let seen = |group: &&[usize]| {
        let here: Vec<(usize, Device)> = group.iter().map(|r| (*r, device(*r))).collect();
        Mesh::spread(axes, &ids, &here, transport.clone())
    };
    let meshes = groups.iter().map(seen).collect::<Result<Vec<_>>>()?;
    let process = |mesh: &Mesh| {
        let result = catch_unwind(AssertUnwindSafe(|| program(mesh)));
        let dead = Error::argument("processes", "program", "it panicked");
        let error = match &result {
            Ok(Ok(_)) => return result,
            Ok(Err(error)) => error,
            Err(_) => &dead,
        };
        transport.report(mesh.addressable().next().unwrap_or(ranks), error);
        result
    };
    let ended: Vec<_> = std::thread::scope(|scope| {
        let process = &process;
        let start = |mesh| scope.spawn(move || process(mesh));
        let threads: Vec<_> = meshes.iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    });
    let result = |ended: std::thread::Result<_>| match ended.and_then(|program| program) {
        Ok(result) => result,
        Err(panic) => resume_unwind(panic),
    };
    Ok(ended.into_iter().map(result).collect())
}

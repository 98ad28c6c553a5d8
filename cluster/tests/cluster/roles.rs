//! What the processes of a cluster do in the tests.

use anymesh_cluster::Cluster;
use anymesh_conformance::sweep::{self, Options};
use anymesh_core::{Error, Mesh, Result};

/// Plays a role; the exit code.
pub(crate) fn play(role: &str) -> i32 {
    let played = match role {
        "faulty" => return crate::train::play(0),
        "diverge" => return crate::divergence::play(),
        "peers" => match crate::peers::play() {
            Ok(()) => return 0,
            Err(e) => return crate::train::failed(&e),
        },
        "rebuild" => return crate::train::play(2),
        "conformance" => conformance(),
        "sweep" => sweep(),
        "training" => crate::training::train(),
        other => Err(Error::argument("test", "role", other.to_string())),
    };
    match played {
        Ok(()) => 0,
        Err(e) => {
            println!("{e}");
            1
        }
    }
}

pub(crate) fn cluster() -> Result<Cluster> {
    Cluster::from_env(&[anymesh_backend_cpu::device()])
}

/// The suite that every transport passes, on meshes of one rank in each process and of several.
fn conformance() -> Result<()> {
    let cluster = cluster()?;
    let report = pollster::block_on(anymesh_conformance::transport::run(|ranks| {
        Mesh::new(&format!("x={ranks}"), &cluster)
    }));
    println!("{report}");
    match report.failures.is_empty() {
        true => cluster.barrier(),
        false => Err(Error::argument("test", "report", report.to_string())),
    }
}

/// Ops under shardings of their operands give on every rank what they give without a mesh.
fn sweep() -> Result<()> {
    let cluster = cluster()?;
    let options = Options {
        threads: 1,
        ..Options::default().with_env()?
    };
    let report = sweep::over_processes(
        &cluster.devices()[0],
        |axes| Mesh::new(axes, &cluster),
        &options,
    );
    println!("{}\n{report}", report.coverage());
    match report.failures.is_empty() {
        true => cluster.barrier(),
        false => Err(Error::argument("test", "report", report.to_string())),
    }
}

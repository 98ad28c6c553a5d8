//! What the processes of a cluster do in the tests.

use anymesh_cluster::Cluster;
use anymesh_core::{Error, Mesh, Result};

/// Plays a role; the exit code.
pub(crate) fn play(role: &str) -> i32 {
    let played = match role {
        "conformance" => conformance(),
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

//! The same roles as processes of an MPI job.

use crate::run::{Process, ROLE};
use libtest_mimic::{Failed, Trial};
use std::{
    process::Command,
    time::{Duration, Instant},
};

/// Tests that count as ignored where MPI was not built in or no `mpirun` is there.
pub(crate) fn trials() -> Vec<Trial> {
    let version = Command::new("mpirun").arg("--version").output();
    let kind = match version {
        _ if !cfg!(feature = "mpi") => "built without MPI",
        Ok(version) if String::from_utf8_lossy(&version.stdout).contains("Open MPI") => "Open MPI",
        Ok(_) => "MPICH",
        Err(_) => "no mpirun",
    };
    let ignored = !["Open MPI", "MPICH"].contains(&kind);
    let trial = |name: String, role, n, variables: Vec<(&'static str, String)>| {
        let run = move || job(kind == "Open MPI", role, n, &variables).map(|_| ());
        Trial::test(name, run)
            .with_kind(kind)
            .with_ignored_flag(ignored)
    };
    let mut trials: Vec<Trial> = [2, 3, 4, 8]
        .map(|n| {
            trial(
                format!("conformance_over_mpi_with_{n}_processes"),
                "conformance",
                n,
                vec![],
            )
        })
        .into();
    trials.push(trial(
        "sweep_over_mpi_with_4_processes".into(),
        "sweep",
        4,
        crate::sweep::sample(),
    ));
    let train = move || {
        crate::training::in_a_job(|variables| job(kind == "Open MPI", "training", 4, variables))
    };
    trials.push(
        Trial::test("training_over_mpi_with_4_processes", train)
            .with_kind(kind)
            .with_ignored_flag(ignored),
    );
    trials
}

/// Runs a role in `n` processes of an MPI job, all of which must succeed, and gives what they said.
fn job(
    open_mpi: bool,
    role: &str,
    n: usize,
    variables: &[(&str, String)],
) -> Result<String, Failed> {
    let mut command = Command::new("mpirun");
    if open_mpi {
        command.args(["--allow-run-as-root", "--oversubscribe"]);
    }
    command
        .args(["-n", &n.to_string()])
        .arg(std::env::current_exe()?)
        .env(ROLE, role)
        .env("ANYMESH_TIMEOUT", "60")
        .envs(variables.iter().map(|(name, value)| (name, value)));
    let now = Instant::now();
    let ended = Process::new(command)?.end(now + Duration::from_secs(300))?;
    match ended.code {
        Some(0) => Ok(ended.output),
        _ => Err(format!("{n} processes failed: {ended:#?}").into()),
    }
}

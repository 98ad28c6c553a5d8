//! The part of `anymesh doctor` that is about several processes: what the environment says, and what
//! may carry tensors between them.

use anymesh::cluster::{Meeting, Start, TRANSPORTS};
use std::{env, fs, path::PathBuf, process::Command};

/// Prints it; whether the environment makes sense.
pub(crate) fn report() -> bool {
    let start = Start::from_env();
    println!("processes");
    match &start {
        Ok(start) => println!("  {}", in_words(start)),
        Err(problem) => println!("  {}", problem.to_string().replace('\n', "\n  ")),
    }
    println!("  carried by {}", carriers());
    println!("  mpirun     {}", mpirun());
    println!("  libnccl    {}", libnccl());
    start.is_ok()
}

fn in_words(start: &Start) -> String {
    let local = match (start.local_rank, start.local_size) {
        (Some(rank), Some(size)) => format!(", {rank} of {size} on this node"),
        (Some(rank), None) => format!(", {rank} on this node"),
        (None, _) => String::new(),
    };
    let meets = match &start.meeting {
        Meeting::Alone => return format!("started by {}: one process", start.launcher),
        Meeting::Bind { host, port } => format!("process 0 listens at {host}:{port}"),
        Meeting::TorchStore { host, port } => {
            format!("addresses are in torchrun's store at {host}:{port}")
        }
        Meeting::ThroughMpi => "addresses go over MPI".into(),
    };
    let token = match start.token {
        Some(_) => "with a token",
        None => "without a token: set ANYMESH_TOKEN where others reach the port",
    };
    format!(
        "started by {}: process {} of {}{local}; {meets}, {token}",
        start.launcher, start.rank, start.size
    )
}

/// What this build has, and how to get the rest.
fn carriers() -> String {
    let lacking: Vec<&str> = ["mpi", "nccl"]
        .into_iter()
        .filter(|name| !TRANSPORTS.contains(name))
        .collect();
    match lacking.is_empty() {
        true => TRANSPORTS.join(", "),
        false => format!(
            "{} (build with the features {} for more)",
            TRANSPORTS.join(", "),
            lacking.join(", ")
        ),
    }
}

fn mpirun() -> String {
    let Ok(said) = Command::new("mpirun").arg("--version").output() else {
        return "not found; only MPI jobs need it (openmpi-bin or mpich)".into();
    };
    let text = String::from_utf8_lossy(&said.stdout);
    let first = text.lines().find(|line| !line.trim().is_empty());
    first.map_or("says no version".into(), |line| line.trim().to_string())
}

/// Where the loader finds it. It is not loaded: that may start threads and take GPU memory.
fn libnccl() -> String {
    const NAME: &str = "libnccl.so.2";
    let paths = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let named = env::split_paths(&paths).map(|folder| folder.join(NAME));
    let known = Command::new("ldconfig").arg("-p").output();
    let known = known.map_or(String::new(), |said| {
        String::from_utf8_lossy(&said.stdout).into_owned()
    });
    let known = known.lines().filter_map(|line| {
        let (name, path) = line.split_once(" => ")?;
        name.trim()
            .starts_with(NAME)
            .then(|| PathBuf::from(path.trim()))
    });
    let found = named.chain(known).find(|path| path.exists());
    match found.map(|path| fs::canonicalize(&path).unwrap_or(path)) {
        Some(path) => path.display().to_string(),
        None => "not found; collectives between NVIDIA GPUs need it (libnccl2)".into(),
    }
}

//! Clusters of real processes whose tensors go over NCCL: this program starts itself again, once for
//! each process. Without a GPU its tests count as ignored.
//!
//! Several processes may share one GPU, with NCCL 2.30 or newer and `NCCL_MULTI_RANK_GPU_ENABLE=1`.
//! `nccl bench N` is no test: it prints what calls cost, in JSON lines, for `benches/peers/nccl.py`.

mod bench;
#[path = "../cluster/model.rs"]
#[allow(dead_code, reason = "shared with the tests of other transports")]
mod model;
mod roles;
#[path = "../cluster/run.rs"]
#[allow(dead_code, reason = "shared with the tests of other transports")]
mod run;

use anymesh_conformance::sweep::Options;
use libtest_mimic::{Arguments, Failed, Trial};
use std::time::{Duration, Instant};

fn main() {
    if let Ok(role) = std::env::var(run::ROLE) {
        std::process::exit(roles::play(&role));
    }
    if std::env::args().nth(1).as_deref() == Some("bench") {
        let n = std::env::args().nth(2).and_then(|n| n.parse().ok());
        std::process::exit(bench::start(n.unwrap_or(2)));
    }
    let why = why_not();
    if let Some(why) = &why {
        eprintln!("ignored: {why}");
    }
    let ignored = why.is_some();
    let trials = [false, true].into_iter().flat_map(trials);
    let trials = trials.map(|t| t.with_ignored_flag(ignored)).collect();
    // They share a GPU, and some measure how long others take.
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(1);
    libtest_mimic::run(&arguments, trials).exit();
}

/// All trials, on devices that put launches off or not.
fn trials(eager: bool) -> Vec<Trial> {
    let form = if eager { "eager_" } else { "" };
    let with = |name: &str, role, n, sums: Option<&str>| {
        let sums = sums.map(|sums| ("ANYMESH_SUMS", sums.to_string()));
        // Every run looks at other cases.
        let sample = [
            ("ANYMESH_SWEEP_SEED", Options::default().seed.to_string()),
            ("ANYMESH_SWEEP_LIMIT", limit("ANYMESH_SWEEP_LIMIT", "1")),
            ("ANYMESH_SWEEP_EVERY", limit("ANYMESH_SWEEP_EVERY", "5")),
        ];
        let variables = common(eager)
            .into_iter()
            .chain(sums)
            .chain(sample)
            .collect();
        trial(format!("{form}{name}_{n}"), role, n, variables)
    };
    let mut all = vec![
        with("conformance_fixed", "conformance", 2, Some("fixed")),
        with("conformance_native", "conformance", 2, Some("native")),
        with("conformance_fixed", "conformance", 4, Some("fixed")),
        with("conformance_native", "conformance", 4, Some("native")),
        with("sweep", "sweep", 4, Some("fixed")),
        with("order", "order", 2, None),
        with("trains", "trains", 2, Some("fixed")),
        with("trains", "trains", 4, Some("fixed")),
    ];
    all.extend(["dies", "stops", "is_absent"].map(|how| {
        let name = format!("{form}one_of_three_{how}");
        Trial::test(name, move || loses(how, eager))
    }));
    all
}

fn limit(name: &str, usual: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| usual.into())
}

/// What is missing here.
fn why_not() -> Option<String> {
    if let Err(e) = anymesh_backend_cuda::gpus() {
        return Some(e.to_string());
    }
    anymesh_backend_cuda::nccl::Library::open()
        .err()
        .map(|e| e.to_string())
}

/// What every process of these tests is told.
fn common(eager: bool) -> Vec<(&'static str, String)> {
    let mut all = vec![
        ("ANYMESH_TRANSPORT", "nccl".into()),
        ("NCCL_MULTI_RANK_GPU_ENABLE", "1".into()),
    ];
    if eager {
        all.push((roles::EAGER, "1".into()));
    }
    all
}

fn trial(
    name: String,
    role: &'static str,
    n: usize,
    variables: Vec<(&'static str, String)>,
) -> Trial {
    Trial::test(name, move || {
        let now = Instant::now();
        let mut processes = run::start(role, n, &variables)?;
        let until = now + Duration::from_secs(540);
        let mut last = String::new();
        for (i, process) in processes.iter_mut().enumerate() {
            let ended = process.end(until)?;
            if ended.code != Some(0) {
                return Err(format!("process {i} of {n} failed: {ended:#?}").into());
            }
            last = ended.output;
        }
        println!("{role} over {n}: {} ({:.1?})", last.trim(), now.elapsed());
        Ok(())
    })
}

/// The last of three processes is lost in a collective; the others return an error that names it
/// within the deadline, and go on without it where it is gone.
fn loses(how: &'static str, eager: bool) -> Result<(), Failed> {
    let variables: Vec<_> = common(eager)
        .into_iter()
        .chain([
            ("ANYMESH_TIMEOUT", roles::DEADLINE.to_string()),
            (roles::HOW, how.into()),
        ])
        .collect();
    let now = Instant::now();
    let mut processes = run::start("loses", 3, &variables)?;
    let lost = processes.pop();
    for (i, process) in processes.iter_mut().enumerate() {
        let ended = process.end(now + Duration::from_secs(90))?;
        println!("{how}, process {i}: {}", ended.output.trim());
        if ended.code != Some(0) {
            return Err(format!("survivor {i} failed: {ended:#?}").into());
        }
    }
    // Whoever is stopped or asleep is ended with this.
    drop(lost);
    Ok(())
}

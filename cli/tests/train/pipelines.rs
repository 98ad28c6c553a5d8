//! Stages in processes: over TCP and as MPI jobs, with one that dies, and what goes on afterwards.

use super::*;
use std::{
    net::TcpListener,
    process::Child,
    time::{Duration, Instant},
};

/// Four micro-batches, three layers.
const SMALL: [&str; 4] = [
    "model.n_layer=3",
    "batch.global=8",
    "batch.accumulation=4",
    "run.steps=4",
];

/// What runs in four processes.
const WAYS: [(&str, &str); 3] = [
    ("pp=2, dp=2", "pipeline.schedule=zbh1"),
    ("pp=4", "pipeline.schedule=1f1b"),
    ("pp=2, tp=2", "pipeline.schedule=zbv"),
];

#[test]
fn four_processes_give_the_losses_of_simulated_ranks() {
    for (axes, schedule) in WAYS {
        let folder = Folder::new("pipeline");
        let settings = [&SMALL[..], &[schedule]].concat();
        assert_processes_equal_ranks(&folder, &mut launch("4"), axes, &settings);
        // What the processes saved goes on in one process: on one device, and with other stages.
        for (axes, steps) in [("", 6), ("pp=3", 8)] {
            let axes = format!("mesh.axes={axes}");
            let more = format!("run.steps={steps}");
            let more = set(&[&SMALL[..3], &[&axes, &more]].concat());
            let output = folder.run(&more.iter().map(String::as_str).collect::<Vec<_>>());
            let from = format!("goes on from run/step-{}", steps - 2);
            let done = format!("done after {steps} steps");
            for part in [from, done] {
                assert!(said(&output).contains(&part), "{axes}: {}", said(&output));
            }
        }
        let seen = losses(&folder.path("run/logs/metrics.jsonl"));
        assert!(seen.iter().map(|(step, _)| *step).eq(1..=8), "{seen:?}");
        assert!(seen[7].1 < seen[0].1, "it learns: {seen:?}");
    }
}

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "built without MPI")]
fn four_processes_of_an_mpi_job_give_the_losses_of_simulated_ranks() {
    let version = Command::new("mpirun").arg("--version").output();
    let version = version.expect("an MPI to build with has mpirun");
    let open_mpi = String::from_utf8_lossy(&version.stdout).contains("Open MPI");
    for (axes, schedule) in WAYS {
        let folder = Folder::new("mpi");
        let mut job = Command::new("mpirun");
        if open_mpi {
            job.args(["--allow-run-as-root", "--oversubscribe"]);
        }
        job.args(["-n", "4"]);
        let settings = [&SMALL[..], &[schedule]].concat();
        assert_processes_equal_ranks(&folder, &mut job, axes, &settings);
    }
}

/// A port that is free now.
fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    listener.local_addr().expect("an address").port()
}

/// Processes without anybody who ends the others when one dies.
fn start(folder: &Folder, settings: &[&str]) -> Vec<Child> {
    let port = free_port().to_string();
    let start = |rank: usize| {
        let mut command = folder.command(&[]);
        command
            .args(set(settings))
            .env("RANK", rank.to_string())
            .envs([("WORLD_SIZE", "4"), ("MASTER_ADDR", "127.0.0.1")])
            .env("MASTER_PORT", &port)
            .envs([("ANYMESH_TOKEN", "of this test"), ("ANYMESH_TIMEOUT", "5")])
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        command.spawn().expect("it starts")
    };
    (0..4).map(start).collect()
}

/// The steps that are saved and whole.
fn saved(folder: &Folder) -> Vec<u64> {
    let names = fs::read_dir(folder.path("run")).into_iter().flatten();
    let names = names.filter_map(Result::ok).map(|e| e.file_name());
    let step = |name: std::ffi::OsString| name.to_str()?.strip_prefix("step-")?.parse().ok();
    let mut steps: Vec<u64> = names.filter_map(step).collect();
    steps.sort_unstable();
    steps
}

/// A signal to one of four processes amid a run: the others end with an error that names it, and the
/// last checkpoint is whole.
fn strike(signal: &str) {
    let folder = Folder::new(signal);
    let endless = [
        &SMALL[..3],
        &[
            "run.steps=100000",
            "run.save.every_steps=3",
            "mesh.axes=pp=4",
        ],
    ]
    .concat();
    let mut processes = start(&folder, &endless);
    let until = Instant::now() + Duration::from_secs(60);
    while saved(&folder).len() < 2 {
        assert!(Instant::now() < until, "no checkpoint was written");
        for process in &mut processes {
            let ended = process.try_wait().expect("its state");
            assert!(ended.is_none(), "{ended:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    // In the middle of a step, most likely; it may be anywhere.
    let pid = processes[2].id().to_string();
    let sent = Command::new("kill").args(["-s", signal, &pid]).status();
    assert!(sent.expect("kill is there").success());
    let struck = Instant::now();
    let mut victim = processes.remove(2);
    for (i, process) in processes.into_iter().enumerate() {
        let output = process.wait_with_output().expect("it ends");
        let text = said(&output);
        assert!(!output.status.success(), "process {i} of the others");
        assert!(text.contains("process 2"), "{i} of the others said: {text}");
        assert!(!text.contains("panicked"), "{i} of the others said: {text}");
    }
    // The deadline, and time to tell all of them on a machine that is busy.
    assert!(struck.elapsed() < Duration::from_secs(15), "{struck:?}");
    victim.kill().ok();
    victim.wait().expect("it ends");

    let last = *saved(&folder).last().expect("saved");
    let steps = format!("run.steps={}", last + 1);
    let more = set(&[&SMALL[..3], &[&steps]].concat());
    let output = folder.command(&[]).args(more).output().expect("it starts");
    let from = format!("goes on from run/step-{last}");
    assert!(said(&output).contains(&from), "{}", said(&output));
    assert!(output.status.success(), "{}", said(&output));
}

#[test]
fn a_process_that_is_killed_amid_a_pipeline_ends_all_and_loses_no_checkpoint() {
    strike("KILL");
}

#[test]
fn a_process_that_is_stopped_amid_a_pipeline_is_found_by_the_deadline() {
    strike("STOP");
}

#[test]
fn layers_may_be_shared_out_by_the_time_they_take() {
    let folder = Folder::new("measured");
    let measured = [&SMALL[..], &["pipeline.split=measured"]].concat();
    // Whatever the stages are, losses are the same to the bit.
    assert_processes_equal_ranks(&folder, &mut launch("2"), "pp=2", &measured);
}

#[test]
fn a_pipeline_that_cannot_be_is_told_before_it_runs() {
    let folder = Folder::new("no-pipeline");
    let wrong = [
        ("pipeline.schedule=zigzag", "zigzag"),
        ("pipeline.schedule=zbh1", "micro-batches"),
        ("pipeline.schedule=searched", "pipeline.memory"),
        ("pipeline.memory=0", "alive"),
        ("pipeline.layers=[1, 1, 1]", "layers"),
        ("pipeline.schedule=nowhere.csv", "nowhere.csv"),
        ("pipeline.split=guessed", "guessed"),
    ];
    for (setting, says) in wrong {
        let output = folder.run(&["--set", "mesh.axes=pp=2", "--set", setting]);
        assert!(!output.status.success(), "{setting}");
        assert!(said(&output).contains(says), "{setting}: {}", said(&output));
    }
}

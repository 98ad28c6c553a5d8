//! `anymesh train` as a user runs it: good and bad configurations, signals, full disks, processes.

#![cfg(unix)]

mod pipelines;

use serde_json::Value;
use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

const CONFIG: &str = r#"
tokenizer = "bytes"

[model]
model_type = "gpt2"
vocab_size = 257
n_positions = 32
n_embd = 32
n_layer = 1
n_head = 2

[[data]]
path = "text.txt"

[batch]
global = 4
length = 32

[optimizer]
kind = "adamw"
lr = 5e-3

[run]
steps = 30
log_every = 1

[run.save]
folder = "run"
"#;

/// A folder with a configuration and a text.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("anymesh-train-{name}-{}", std::process::id()));
        fs::remove_dir_all(&path).ok();
        fs::create_dir_all(&path).expect("a folder");
        fs::write(path.join("run.toml"), CONFIG).expect("written");
        let text: String = (0..400)
            .map(|i| format!("{i} and {} are numbers.\n", i * 7 % 100))
            .collect();
        fs::write(path.join("text.txt"), text).expect("written");
        Self(path)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_anymesh"));
        command.current_dir(&self.0).env("ANYMESH_DEVICE", "cpu");
        command.args(["train", "run.toml"]).args(arguments);
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("it starts")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The losses that were logged, by step.
fn losses(log: &Path) -> Vec<(u64, f64)> {
    let text = fs::read_to_string(log).expect("a log");
    text.lines()
        .map(|line| {
            let line: Value = serde_json::from_str(line).expect("JSON");
            let loss = line["loss"].as_f64().expect("a loss");
            (line["step"].as_u64().expect("a step"), loss)
        })
        .collect()
}

#[test]
fn a_run_learns_logs_saves_and_is_done_when_it_is_done() {
    let folder = Folder::new("whole");
    let output = folder.run(&[]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(
        said(&output).contains("done after 30 steps"),
        "{}",
        said(&output)
    );
    let losses = losses(&folder.path("run/logs/metrics.jsonl"));
    assert_eq!(losses.len(), 30);
    assert!(losses[29].1 < 0.8 * losses[0].1, "{losses:?}");
    let events = fs::read_dir(folder.path("run/logs")).expect("logs");
    let events = events.filter_map(Result::ok).map(|e| e.file_name());
    assert!(
        events
            .into_iter()
            .any(|name| name.to_string_lossy().contains("tfevents"))
    );
    let again = folder.run(&[]);
    assert!(
        said(&again).contains("goes on from run/step-30"),
        "{}",
        said(&again)
    );

    // The checkpoint is a model: other commands read it.
    let mut inspect = Command::new(env!("CARGO_BIN_EXE_anymesh"));
    let inspect = inspect
        .args(["ckpt", "inspect"])
        .arg(folder.path("run/step-30"));
    let inspect = inspect.output().expect("it starts");
    assert!(
        String::from_utf8_lossy(&inspect.stdout).contains("m.transformer"),
        "{inspect:?}"
    );
}

#[test]
fn what_is_wrong_with_a_configuration_is_said_before_the_first_step() {
    let folder = Folder::new("wrong");
    for (set, part) in [
        ("run.stepps=3", "unknown field `stepps`"),
        ("mesh.zero=4", "there is no stage 4"),
        ("mesh.dtype=f31", "'f31' is none of"),
        ("model.n_heads=3", "n_heads"),
        ("model.n_head=3", "3 heads"),
        ("model.model_type=gpt9", "'gpt9' is not supported"),
        ("model.vocab_size=100", "the tokenizer has 257 tokens"),
        (
            "batch.length=33",
            "33 tokens are more than the model can tell apart, 32",
        ),
        ("batch.micro=3", "the nearest are 3 and 6"),
        ("optimizer.kind=adamm", "adamm"),
        ("optimizer.lr=-1", "lr"),
        ("run.evaluate.every=3", "nothing to evaluate on"),
        ("mesh.axes=dp=x", "dp"),
        ("data=[]", "give a path"),
        ("data=[{ path = \"nowhere.txt\" }]", "nowhere.txt"),
        ("freeze=*.nothing", "fits no parameter"),
        (
            "groups=[{ of = \"*.bias\", rule = { kind = \"muon\" } }]",
            "bias",
        ),
        ("model.path=else", "leave this out"),
    ] {
        let output = folder.run(&["--set", set]);
        assert_eq!(output.status.code(), Some(1), "{set}: {}", said(&output));
        assert!(said(&output).contains(part), "{set}: {}", said(&output));
        assert!(
            !said(&output).contains("panicked"),
            "{set}: {}",
            said(&output)
        );
    }
    let output = Command::new(env!("CARGO_BIN_EXE_anymesh"))
        .args(["train", "nowhere.toml"])
        .output()
        .expect("it starts");
    assert!(said(&output).contains("nowhere.toml"), "{}", said(&output));
}

#[test]
fn data_that_is_damaged_is_told_with_its_place() {
    let folder = Folder::new("damaged");
    fs::write(folder.path("text.txt"), b"good text\n\xff\xfe no text").expect("written");
    let output = folder.run(&[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        said(&output).contains("text.txt, byte 10"),
        "{}",
        said(&output)
    );
    fs::write(folder.path("a.jsonl"), "{\"text\": \"yes\"}\n{\"text\": 3").expect("written");
    let output = folder.run(&["--set", "data=[{ path = \"a.jsonl\" }]"]);
    assert!(said(&output).contains("a.jsonl, byte"), "{}", said(&output));
    fs::write(folder.path("a.bin"), b"xx").expect("written");
    fs::write(folder.path("a.idx"), b"MMIDIDX\0\0short").expect("written");
    let output = folder.run(&["--set", "data=[{ path = \"a.bin\" }]"]);
    assert!(said(&output).contains("a.idx, byte"), "{}", said(&output));
}

#[test]
fn the_printed_configuration_is_the_same_run() {
    let folder = Folder::new("print");
    let printed = folder.run(&["--print-config", "--set", "run.seed=9"]);
    let text = String::from_utf8(printed.stdout).expect("text");
    assert!(
        text.contains("seed = 9") && text.contains("every_minutes"),
        "{text}"
    );
    fs::write(folder.path("run.toml"), &text).expect("written");
    let again = folder.run(&["--print-config"]);
    assert_eq!(String::from_utf8(again.stdout).expect("text"), text);
}

#[test]
fn a_signal_saves_and_the_same_command_goes_on() {
    let folder = Folder::new("signal");
    let steps = ["--set", "run.steps=100000"];
    let mut child = folder
        .command(&steps)
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines();
    let mut text = String::new();
    for line in &mut lines {
        let line = line.expect("text");
        let is_step = line.contains("loss");
        text += &line;
        if is_step {
            break;
        }
    }
    let kill = Command::new("kill")
        .args(["-TERM", &child.id().to_string()])
        .status();
    assert!(kill.expect("kill is there").success());
    for line in lines {
        text += &line.expect("text");
    }
    let status = child.wait().expect("it ends");
    assert!(
        status.success() && text.contains("stopped after step"),
        "{status}: {text}"
    );
    let saved = fs::read_dir(folder.path("run")).expect("saved");
    let saved = saved
        .filter_map(Result::ok)
        .map(|e| e.file_name().to_string_lossy().into_owned());
    let saved: Vec<String> = saved.filter(|name| name.starts_with("step-")).collect();
    let step: u64 = saved[0]
        .trim_start_matches("step-")
        .parse()
        .expect("a step");

    let output = folder.run(&["--set", &format!("run.steps={}", step + 3)]);
    assert!(
        said(&output).contains(&format!("goes on from run/step-{step}")),
        "{}",
        said(&output)
    );
    let losses = losses(&folder.path("run/logs/metrics.jsonl"));
    let logged: Vec<u64> = losses.iter().map(|(step, _)| *step).collect();
    assert_eq!(
        logged,
        (1..=step + 3).collect::<Vec<_>>(),
        "no step is missing or comes twice"
    );
}

#[test]
fn a_disk_that_is_full_is_told_and_loses_nothing_that_was_saved() {
    let folder = Folder::new("full");
    assert!(folder.run(&["--set", "run.steps=5"]).status.success());
    // No file may become larger than so many KiB; the signal for that is ignored, so writing fails
    // as on a full disk.
    let script = format!(
        "trap '' XFSZ; ulimit -f 40; exec {} train run.toml --set run.steps=9 --set run.save.every_steps=2",
        env!("CARGO_BIN_EXE_anymesh")
    );
    let mut bash = Command::new("bash");
    let output = bash
        .args(["-c", &script])
        .current_dir(&folder.0)
        .env("ANYMESH_DEVICE", "cpu");
    let output = output.output().expect("bash is there");
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(
        said(&output).contains("the checkpoint was not written, the run goes on"),
        "{}",
        said(&output)
    );
    let output = folder.run(&["--set", "run.steps=9"]);
    assert!(
        said(&output).contains("goes on from run/step-5"),
        "{}",
        said(&output)
    );
    assert!(
        said(&output).contains("done after 9 steps"),
        "{}",
        said(&output)
    );
}

/// The settings as arguments.
fn set(settings: &[&str]) -> Vec<String> {
    let each = settings.iter().flat_map(|s| ["--set", s]);
    each.map(str::to_string).collect()
}

fn bits(folder: PathBuf) -> Vec<u64> {
    let losses = losses(&folder.join("logs/metrics.jsonl"));
    losses.iter().map(|(_, loss)| loss.to_bits()).collect()
}

/// Losses of a run in processes, which `launch` starts, and of one on simulated ranks, to the bit.
fn assert_processes_equal_ranks(
    folder: &Folder,
    launch: &mut Command,
    axes: &str,
    settings: &[&str],
) {
    let axes = format!("mesh.axes={axes}");
    let settings = [&[axes.as_str()], settings].concat();
    let simulated = set(&[&settings[..], &["run.save.folder=simulated"]].concat());
    let simulated = folder.run(&simulated.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(simulated.status.success(), "{}", said(&simulated));
    launch.current_dir(&folder.0).env("ANYMESH_DEVICE", "cpu");
    launch.args([env!("CARGO_BIN_EXE_anymesh"), "train", "run.toml"]);
    let together = launch.args(set(&settings)).output().expect("it starts");
    assert!(together.status.success(), "{axes}: {}", said(&together));
    let expected = bits(folder.path("simulated"));
    assert!(!expected.is_empty());
    assert_eq!(expected, bits(folder.path("run")), "{settings:?}");
}

fn launch(processes: &str) -> Command {
    let mut launch = Command::new(env!("CARGO_BIN_EXE_anymesh"));
    launch.args(["launch", "-n", processes, "--"]);
    launch
}

#[test]
fn processes_give_the_losses_of_simulated_ranks() {
    let folder = Folder::new("processes");
    assert_processes_equal_ranks(&folder, &mut launch("2"), "dp=2", &["mesh.zero=2"]);
}

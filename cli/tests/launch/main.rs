//! `anymesh launch` with real processes, most of them shells.
#![cfg(unix)]

mod endings;
mod remote;
mod restarts;
mod trace;

use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader, Lines},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Output, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

/// A folder that is removed when the test is over.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("anymesh-launch-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_anymesh"));
    // However the tests were started.
    hang_up(&mut command, libc::SIG_DFL);
    command
        .arg("launch")
        .args(args)
        .env_remove("ANYMESH_FLIGHT");
    command
}

/// What the program does with SIGHUP from the start.
fn hang_up(command: &mut Command, action: libc::sighandler_t) {
    // SAFETY: `signal` may be called between fork and exec.
    unsafe {
        command.pre_exec(move || {
            libc::signal(libc::SIGHUP, action);
            Ok(())
        });
    }
}

/// Runs `launch` with a shell script as the program.
fn shell(args: &[&str], script: &str) -> Output {
    let args = [args, &["--", "sh", "-c", script]].concat();
    command(&args).output().unwrap()
}

fn out(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn err(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn sorted(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort();
    lines
}

/// A `launch` that runs while the test goes on.
struct Running {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Running {
    fn start(mut command: Command) -> Self {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    fn shell(args: &[&str], script: &str) -> Self {
        Self::start(command(&[args, &["--", "sh", "-c", script]].concat()))
    }

    /// The next lines, in no order.
    fn next(&mut self, count: usize) -> Vec<String> {
        let mut lines: Vec<String> = (0..count)
            .map(|_| self.lines.next().unwrap().unwrap())
            .collect();
        lines.sort();
        lines
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let status = Command::new("kill").args(["-s", name, &pid]).status();
        assert!(status.unwrap().success());
    }

    fn code(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

impl Drop for Running {
    /// A test that failed leaves nothing running: the guard ends the rest.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether a process runs; one that nobody has waited for yet does not.
fn alive(pid: &str) -> bool {
    let status = Command::new("ps").args(["-o", "stat=", "-p", pid]).output();
    let state = String::from_utf8(status.unwrap().stdout).unwrap();
    !state.trim().is_empty() && !state.trim().starts_with('Z')
}

/// Waits until none of the processes runs.
fn all_gone(pids: &[String]) {
    let until = Instant::now() + Duration::from_secs(30);
    while pids.iter().any(|pid| alive(pid)) {
        assert!(Instant::now() < until, "left: {pids:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The last word of each line.
fn last_words(lines: &[String]) -> Vec<String> {
    lines
        .iter()
        .map(|line| line.rsplit(' ').next().unwrap().to_string())
        .collect()
}

#[test]
fn lines_say_whose_they_are_and_keep_to_their_stream() {
    let output = shell(
        &["-n", "3"],
        r"echo out; echo err >&2; printf 'bytes \377\n'; printf last",
    );
    assert_eq!(output.status.code(), Some(0));
    let mut lines: Vec<&[u8]> = output.stdout.split_inclusive(|b| *b == b'\n').collect();
    lines.sort();
    let expected: Vec<Vec<u8>> = (0..3)
        .flat_map(|rank| {
            [&b"bytes \xff"[..], b"last", b"out"]
                .map(|text| [format!("[{rank}] ").as_bytes(), text, b"\n"].concat())
        })
        .collect();
    assert_eq!(lines, expected);
    assert_eq!(sorted(&err(&output)), ["[0] err", "[1] err", "[2] err"]);

    let plain = shell(&["-n", "2", "--no-prefix"], "echo out");
    assert_eq!(out(&plain), "out\nout\n");
}

#[test]
fn lines_written_in_pieces_by_many_at_once_stay_whole() {
    let script = r#"i=0; while [ $i -lt 100 ]; do printf "a$RANK-"; printf "b$RANK-"; printf "c$RANK $i\n"; i=$((i+1)); done"#;
    let output = shell(&["-n", "8"], script);
    let text = out(&output);
    let found: BTreeSet<&str> = text.lines().collect();
    let expected: BTreeSet<String> = (0..8)
        .flat_map(|r| (0..100).map(move |i| format!("[{r}] a{r}-b{r}-c{r} {i}")))
        .collect();
    assert_eq!(text.lines().count(), 800);
    assert_eq!(found, expected.iter().map(String::as_str).collect());
}

#[test]
fn every_process_knows_who_it_is_and_where_to_meet() {
    let folder = Folder::new();
    let script = r#"echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $ANYMESH_RESTART $ANYMESH_FLIGHT $MORE $OMPI_COMM_WORLD_RANK; echo same $MASTER_PORT $ANYMESH_TOKEN $ANYMESH_RUN"#;
    let flight = folder.path("flight");
    let flight = flight.to_str().unwrap();
    let args = [
        "-n",
        "2",
        "--no-prefix",
        "--flight",
        flight,
        "--env",
        "MORE=a=b",
        "--env",
        "RANK=9",
        "--",
        "sh",
        "-c",
        script,
    ];
    // What an outer launcher said about its own processes is not for these.
    let output = command(&args)
        .env("OMPI_COMM_WORLD_RANK", "7")
        .output()
        .unwrap();
    let text = out(&output);
    let lines = sorted(&text);
    assert_eq!(lines[0], format!("0 2 0 2 127.0.0.1 0 {flight} a=b"));
    assert_eq!(lines[1], format!("1 2 1 2 127.0.0.1 0 {flight} a=b"));
    assert_eq!(lines[2], lines[3]);
    let words: Vec<&str> = lines[2].split(' ').collect();
    assert!(words[1].parse::<u16>().unwrap() > 0);
    assert!(words[2].len() == 32 && words[3].len() == 32 && words[2] != words[3]);

    let port = shell(&["-n", "1", "--master-port", "4567"], "echo $MASTER_PORT");
    assert_eq!(out(&port), "[0] 4567\n");
}

#[test]
fn sixty_four_processes_run() {
    let output = shell(&["-n", "64"], "echo $RANK of $WORLD_SIZE");
    assert_eq!(output.status.code(), Some(0));
    let text = out(&output);
    let found: BTreeSet<&str> = text.lines().collect();
    let expected: Vec<String> = (0..64).map(|r| format!("[{r}] {r} of 64")).collect();
    assert_eq!(found, expected.iter().map(String::as_str).collect());
}

#[test]
fn a_program_that_cannot_be_started_is_named() {
    let output = command(&["-n", "2", "--restarts", "3", "--", "no-such-program"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(127));
    let text = err(&output);
    assert!(
        text.starts_with("anymesh launch: cannot start no-such-program: ")
            && text.lines().count() == 1,
        "{text}"
    );
    let folder = Folder::new();
    let file = folder.path("text");
    std::fs::write(&file, "hello").unwrap();
    let file = file.to_str().unwrap();
    let output = command(&["-n", "2", "--", file]).output().unwrap();
    assert_eq!(output.status.code(), Some(126));
    assert!(err(&output).contains(file));
}

#[test]
fn arguments_that_make_no_sense_start_nothing() {
    for args in [
        &["--", "true"][..],
        &["-n", "0", "--", "true"],
        &["-n", "x", "--", "true"],
        &["-n", "2"],
        &["-n", "99999999", "--", "true"],
        &["-n", "2", "--min", "3", "--restarts", "1", "--", "true"],
        &["-n", "2", "--min", "1", "--", "true"],
        &["-n", "2", "--hosts", "-oProxyCommand=touch", "--", "true"],
        &["-n", "2", "--hosts", "localhost,other", "--", "true"],
        &["-n", "2", "--env", "NAME", "--", "true"],
        &["-n", "2", "--env", "=x", "--", "true"],
        &["-n", "2", "--grace", "-1", "--", "true"],
        &["-n", "2", "--grace", "NaN", "--", "true"],
        &["-n", "2", "--master-port", "0", "--", "true"],
    ] {
        let output = command(args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(!output.stderr.is_empty(), "{args:?}");
    }
    let output = command(&["-n", "1", "--flight", "/dev/null/x", "--", "true"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(err(&output).contains("/dev/null/x"));
}

/// Where a file appears, for a script to wait for.
fn waits_for(file: &Path) -> String {
    format!("while [ ! -e {} ]; do sleep 0.02; done", file.display())
}

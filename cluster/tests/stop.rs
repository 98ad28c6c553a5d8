//! Signals that ask a program to leave. The programs are this test again, with other arguments.
#![cfg(unix)]

use anymesh_cluster::stop;
use std::{
    io::{BufRead, BufReader},
    os::unix::process::ExitStatusExt,
    process::{Child, Command, Stdio},
    time::Duration,
};

/// Waits to be stopped, says so, and waits to be ended.
#[test]
#[ignore = "a program that the others start"]
fn program() {
    stop::install().unwrap();
    stop::install().unwrap();
    assert!(!stop::stop_requested());
    eprintln!("ready");
    while !stop::stop_requested() {
        std::thread::sleep(Duration::from_millis(5));
    }
    eprintln!("asked");
    // Ends by itself, so that no program is left when a test fails.
    std::thread::sleep(Duration::from_secs(20));
}

struct Program {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStderr>>,
}

impl Program {
    fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["program", "--exact", "--ignored", "--nocapture"])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut program = Self { child, lines };
        program.says("ready");
        program
    }

    fn says(&mut self, expected: &str) {
        assert_eq!(self.lines.next().unwrap().unwrap(), expected);
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let status = Command::new("kill").args(["-s", name, &pid]).status();
        assert!(status.unwrap().success());
    }
}

#[test]
fn sigterm_asks_as_often_as_it_comes() {
    let mut program = Program::start();
    program.signal("TERM");
    program.says("asked");
    program.signal("TERM");
    std::thread::sleep(Duration::from_millis(100));
    assert!(program.child.try_wait().unwrap().is_none());
    program.child.kill().unwrap();
    program.child.wait().unwrap();
}

#[test]
fn the_first_sigint_asks_and_the_second_ends() {
    let mut program = Program::start();
    program.signal("INT");
    program.says("asked");
    assert!(program.child.try_wait().unwrap().is_none());
    program.signal("INT");
    assert_eq!(program.child.wait().unwrap().signal(), Some(2));
}

#[test]
fn sigint_after_sigterm_still_lets_the_program_save() {
    let mut program = Program::start();
    program.signal("TERM");
    program.says("asked");
    program.signal("INT");
    std::thread::sleep(Duration::from_millis(100));
    assert!(program.child.try_wait().unwrap().is_none());
    program.signal("INT");
    assert_eq!(program.child.wait().unwrap().signal(), Some(2));
}

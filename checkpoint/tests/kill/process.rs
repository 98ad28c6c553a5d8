//! This test binary as a child process: how it is started, what the two say to each other, and its
//! end.

use std::{
    io::{BufRead, BufReader, Read, Write},
    path::Path,
    process::{ChildStderr, Command, Stdio},
    time::Duration,
};

const PART: &str = "ANYMESH_TEST_CHILD";

/// The test that a child is started with: it plays the child's part instead.
pub(crate) const TEST: &str =
    "a_process_killed_at_any_operation_leaves_the_previous_or_the_new_checkpoint";

/// What this process is to do, where it is a child: the part, the folder, numbers.
pub(crate) fn part() -> Option<(String, String, Vec<usize>)> {
    let text = std::env::var(PART).ok()?;
    let mut fields = text.split('\n');
    let (part, root) = (fields.next()?.to_string(), fields.next()?.to_string());
    Some((part, root, fields.filter_map(|n| n.parse().ok()).collect()))
}

/// The child says a line. The test harness writes to the other stream.
pub(crate) fn say(line: &str) {
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// The child waits for an answer.
pub(crate) fn hear() {
    let _ = std::io::stdin().lock().read_line(&mut String::new());
}

/// The child stands still until it is killed; not for ever, in case nobody is left to do it.
pub(crate) fn stand() {
    std::thread::sleep(Duration::from_secs(60));
    std::process::exit(3);
}

/// A child of the test; it does not outlive it.
pub(crate) struct Child {
    process: std::process::Child,
    said: BufReader<ChildStderr>,
}

impl Child {
    pub(crate) fn start(part: &str, root: &Path, numbers: &[usize]) -> Self {
        let numbers: String = numbers.iter().map(|n| format!("\n{n}")).collect();
        let mut process = Command::new(std::env::current_exe().expect("this binary"))
            .args(["--exact", TEST])
            .env(PART, format!("{part}\n{}{numbers}", root.display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a child");
        let said = BufReader::new(process.stderr.take().expect("piped"));
        Self { process, said }
    }

    /// What it says, up to the line that is waited for.
    pub(crate) fn until(&mut self, wanted: impl Fn(&str) -> bool) -> Vec<String> {
        let mut lines = vec![];
        for line in self.said.by_ref().lines() {
            lines.push(line.expect("text"));
            if wanted(&lines[lines.len() - 1]) {
                return lines;
            }
        }
        let mut told = String::new();
        let _ = self
            .process
            .stdout
            .take()
            .expect("piped")
            .read_to_string(&mut told);
        panic!("the child ended early after {lines:?}: {told}");
    }

    /// What it said since, after its end.
    pub(crate) fn rest(&mut self) -> Vec<String> {
        self.said
            .by_ref()
            .lines()
            .map(|line| line.expect("text"))
            .collect()
    }

    pub(crate) fn answer(&mut self) {
        self.process
            .stdin
            .take()
            .expect("piped")
            .write_all(b"go on\n")
            .expect("it listens");
    }

    /// SIGKILL (on Windows TerminateProcess): no destructor runs, nothing is flushed.
    pub(crate) fn kill(&mut self) {
        self.process.kill().expect("it lives");
        let status = self.process.wait().expect("it was started");
        #[cfg(unix)]
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&status),
            Some(9),
            "{status}"
        );
        assert!(!status.success());
    }

    /// It ends by itself, and well.
    pub(crate) fn succeed(&mut self) {
        let status = self.process.wait().expect("it was started");
        assert!(status.success(), "{status}");
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

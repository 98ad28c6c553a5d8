//! Starting the processes of a cluster, and waiting for them without ever hanging.

use libtest_mimic::Failed;
use std::{
    io::Read,
    net::TcpListener,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// The variable that tells a process what to do.
pub(crate) const ROLE: &str = "ANYMESH_TEST_ROLE";

/// A process and what it has printed.
pub(crate) struct Process {
    pub(crate) child: Child,
    reader: Option<thread::JoinHandle<String>>,
}

/// How a process ended.
#[derive(Debug)]
pub(crate) struct Ended {
    /// The exit code; none where a signal ended it or it had to be killed.
    pub(crate) code: Option<i32>,
    pub(crate) output: String,
    pub(crate) after: Duration,
}

/// A port that is free now.
pub(crate) fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0))
        .and_then(|l| l.local_addr())
        .map_or(29500, |a| a.port())
}

/// Starts `n` processes with a role.
pub(crate) fn start(
    role: &str,
    n: usize,
    variables: &[(&str, String)],
) -> Result<Vec<Process>, Failed> {
    let port = free_port();
    (0..n)
        .map(|rank| start_one(role, rank, n, port, variables))
        .collect()
}

pub(crate) fn start_one(
    role: &str,
    rank: usize,
    n: usize,
    port: u16,
    variables: &[(&str, String)],
) -> Result<Process, Failed> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .env(ROLE, role)
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", n.to_string())
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string())
        .env("ANYMESH_TOKEN", "of this test")
        .env("ANYMESH_TIMEOUT", "30")
        .envs(variables.iter().map(|(name, value)| (name, value)));
    Process::new(command)
}

impl Process {
    /// Starts it.
    pub(crate) fn new(mut command: Command) -> Result<Self, Failed> {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit());
        let mut child = command.spawn()?;
        let mut out = child.stdout.take().ok_or("no output")?;
        let reader = thread::spawn(move || {
            let mut text = vec![];
            let _ = out.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        });
        Ok(Self {
            child,
            reader: Some(reader),
        })
    }

    /// Waits for the end; kills it at `until`.
    pub(crate) fn end(&mut self, since: Instant, until: Instant) -> Result<Ended, Failed> {
        let code = loop {
            if let Some(status) = self.child.try_wait()? {
                break status.code();
            }
            if Instant::now() > until {
                self.child.kill()?;
                self.child.wait()?;
                break Some(-1);
            }
            thread::sleep(Duration::from_millis(5));
        };
        let after = since.elapsed();
        let output = self
            .reader
            .take()
            .and_then(|reader| reader.join().ok())
            .unwrap_or_default();
        Ok(Ended {
            code,
            output,
            after,
        })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs a role in `n` processes, all of which must succeed within two minutes.
pub(crate) fn all_succeed(role: &str, n: usize) -> Result<(), Failed> {
    all_succeed_with(role, n, &[]).map(|_| ())
}

pub(crate) fn all_succeed_with(
    role: &str,
    n: usize,
    variables: &[(&str, String)],
) -> Result<Vec<String>, Failed> {
    let now = Instant::now();
    let mut processes = start(role, n, variables)?;
    let ended: Vec<Ended> = processes
        .iter_mut()
        .map(|p| p.end(now, now + Duration::from_secs(120)))
        .collect::<Result<_, _>>()?;
    match ended.iter().position(|e| e.code != Some(0)) {
        Some(bad) => Err(format!("process {bad} of {n} failed: {:#?}", ended[bad]).into()),
        None => Ok(ended.into_iter().map(|e| e.output).collect()),
    }
}

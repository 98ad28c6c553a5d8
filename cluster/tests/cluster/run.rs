//! Starting the processes of a cluster, and waiting for them without ever hanging.

use libtest_mimic::Failed;
use std::{
    io::Read,
    net::TcpListener,
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// The variable that tells a process what to do.
pub(crate) const ROLE: &str = "ANYMESH_TEST_ROLE";

/// What lets a process in.
pub(crate) const TOKEN: &str = "of this test";

/// A process and what it has printed.
pub(crate) struct Process {
    pub(crate) child: Child,
    output: Arc<Mutex<Vec<u8>>>,
    reader: Option<thread::JoinHandle<()>>,
}

/// How a process ended.
#[derive(Debug)]
pub(crate) struct Ended {
    /// The exit code; none where a signal ended it or it had to be killed.
    pub(crate) code: Option<i32>,
    pub(crate) output: String,
    /// Shown by tests that fail.
    #[allow(dead_code)]
    pub(crate) after: Duration,
}

/// A port that is free now, outside of those that the system gives to others.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let turn = std::process::id().wrapping_mul(641) + NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 12_000 + (turn % 20_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
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
        .env("ANYMESH_TOKEN", TOKEN)
        .env("ANYMESH_TIMEOUT", "30")
        .env("RUST_BACKTRACE", "0")
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
        let output: Arc<Mutex<Vec<u8>>> = Arc::default();
        let shared = output.clone();
        let reader = thread::spawn(move || {
            let mut some = [0; 4096];
            while let Some(n) = out.read(&mut some).ok().filter(|n| *n > 0) {
                let mut text = shared.lock().unwrap_or_else(PoisonError::into_inner);
                text.extend_from_slice(&some[..n]);
            }
        });
        Ok(Self {
            child,
            output,
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
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
        Ok(Ended {
            code,
            output: self.said(),
            after,
        })
    }

    /// What it has printed so far.
    pub(crate) fn said(&self) -> String {
        let text = self.output.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&text).into_owned()
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

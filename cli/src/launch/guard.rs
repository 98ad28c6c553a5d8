//! A process that outlives `launch` when that is killed, and then kills what it had started: the
//! kernel would end the direct children at most, not theirs.

use super::os::signal_group;
use std::{
    io::{self, PipeWriter, Read, Write},
    os::unix::process::CommandExt,
    process::{Child, Command, ExitCode, Stdio},
};

/// The hidden command that [`watch`] is behind.
pub(crate) const COMMAND: &str = "launch-guard";

/// Leaders of groups are told as numbers through a pipe, and told again, negative, when their
/// groups are gone. The pipe's end is this process's.
pub(super) struct Guard {
    child: Child,
    pipe: Option<PipeWriter>,
}

impl Guard {
    pub(super) fn start() -> io::Result<Self> {
        let program = match cfg!(target_os = "linux") {
            // Right even after the file was replaced.
            true => "/proc/self/exe".into(),
            false => std::env::current_exe()?,
        };
        let (read, write) = io::pipe()?;
        let child = Command::new(program)
            .arg(COMMAND)
            .stdin(read)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // What is sent to the group of `launch` is not for the guard.
            .process_group(0)
            .spawn()?;
        Ok(Self {
            child,
            pipe: Some(write),
        })
    }

    /// Without a guard, which somebody must have killed, there is nobody to tell.
    fn tell(&mut self, number: i32) {
        if let Some(pipe) = &mut self.pipe {
            let _ = pipe.write_all(&number.to_ne_bytes());
        }
    }

    pub(super) fn add(&mut self, leader: i32) {
        self.tell(leader);
    }

    pub(super) fn remove(&mut self, leader: i32) {
        self.tell(-leader);
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.pipe = None;
        let _ = self.child.wait();
    }
}

/// Remembers groups until the other end of the standard input is closed, then kills those left.
pub(crate) fn watch() -> ExitCode {
    let (mut input, mut number) = (io::stdin().lock(), [0; 4]);
    let mut leaders = vec![];
    while input.read_exact(&mut number).is_ok() {
        match i32::from_ne_bytes(number) {
            leader if leader > 1 => leaders.push(leader),
            gone => leaders.retain(|leader| *leader != gone.saturating_neg()),
        }
    }
    for leader in leaders {
        signal_group(leader, libc::SIGKILL);
    }
    ExitCode::SUCCESS
}

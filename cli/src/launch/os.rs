//! What the standard library lacks: signals to groups of processes, and looking at an end without
//! forgetting the process.

use std::{
    io,
    os::unix::process::CommandExt,
    process::{Command, ExitStatus},
};

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Code(i32),
    Signal(i32),
}

impl End {
    pub(super) fn failed(self) -> bool {
        self != Self::Code(0)
    }

    /// As shells tell it.
    pub(super) fn code(self) -> u8 {
        let code = match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
        };
        // A failure never looks like a success.
        u8::try_from(code).unwrap_or(1)
    }
}

impl From<ExitStatus> for End {
    fn from(status: ExitStatus) -> Self {
        use std::os::unix::process::ExitStatusExt;
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, signal) => Self::Signal(signal.unwrap_or(libc::SIGKILL)),
        }
    }
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => match signal_hook::low_level::signal_name(*signal) {
                Some(name) => write!(f, "killed by {name}"),
                None => write!(f, "killed by signal {signal}"),
            },
        }
    }
}

/// Sends a signal to every process of the group that `leader` leads. One that is gone is no error.
pub(super) fn signal_group(leader: i32, signal: i32) {
    // A leader of 0 or 1 would mean this group or everybody.
    if leader > 1 {
        // SAFETY: takes two numbers.
        unsafe { libc::killpg(leader, signal) };
    }
}

/// How a child ended, if it has. It stays a zombie, so that nobody gets its number while its group
/// may still be signalled.
pub(super) fn ended(pid: i32) -> io::Result<Option<End>> {
    // SAFETY: all zeros is a valid `siginfo_t`, and the call fills in the one it is given.
    let (result, info) = unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        let result = libc::waitid(libc::P_PID, pid as libc::id_t, &mut info, flags);
        (result, info)
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `waitid` succeeded, so these fields are the ones in use.
    let (who, status) = unsafe { (info.si_pid(), info.si_status()) };
    Ok((who != 0).then_some(match info.si_code {
        libc::CLD_EXITED => End::Code(status),
        _ => End::Signal(status),
    }))
}

/// Whether a signal was ignored when this process started, as `nohup` does.
pub(super) fn ignored(signal: i32) -> bool {
    // SAFETY: all zeros is a valid `sigaction`; with no new action the call only fills in the old.
    unsafe {
        let mut old: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut old) == 0
            && old.sa_sigaction == libc::SIG_IGN
    }
}

/// The process leads a group of its own, and is killed when this one is. Call from the main
/// thread: Linux watches the thread, not the process.
pub(super) fn bind(command: &mut Command) {
    command.process_group(0);
    #[cfg(target_os = "linux")]
    {
        let parent = std::process::id() as libc::pid_t;
        // SAFETY: between fork and exec only async-signal-safe calls are made.
        unsafe {
            command.pre_exec(move || {
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                    return Err(io::Error::last_os_error());
                }
                // The parent may have died before it could be watched.
                if libc::getppid() != parent {
                    libc::_exit(128 + libc::SIGKILL);
                }
                Ok(())
            });
        }
    }
}

/// The name of this machine.
pub(super) fn host_name() -> String {
    let mut name = [0u8; 256];
    // SAFETY: the length is that of the buffer; the last byte stays zero.
    let result = unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
    let end = name.iter().position(|b| *b == 0).unwrap_or(0);
    match result {
        0 => String::from_utf8_lossy(&name[..end]).into_owned(),
        _ => String::new(),
    }
}

//! Bytes between processes: the one thing that TCP and MPI do in their own ways.

#[cfg(feature = "mpi")]
pub(crate) mod mpi;
pub(crate) mod tcp;

use anymesh_core::transport::{Incoming, Outgoing};
use std::{
    fmt::Debug,
    ops::Range,
    time::{Duration, Instant},
};

/// Bytes for another process. They are owned, so that an engine that was given up while it still
/// read them can keep them for ever.
#[derive(Debug)]
pub(crate) struct Send {
    /// The number of the process.
    pub(crate) to: usize,
    pub(crate) bytes: Outgoing,
    /// What the call is: both ends must have the same, or their programs differ.
    pub(crate) digest: u64,
}

/// Bytes from another process, and where they go: into which of the memories of the call, and which
/// part of it. Parts that are received in one call do not overlap.
#[derive(Debug)]
pub(crate) struct Receive {
    pub(crate) from: usize,
    pub(crate) memory: usize,
    pub(crate) bytes: Range<usize>,
    pub(crate) digest: u64,
}

/// Why bytes did not arrive.
#[derive(Debug)]
pub(crate) enum Broken {
    /// The deadline passed; these processes have not sent everything or not taken everything.
    Late(Vec<usize>),
    /// A process sent something else than this one expected.
    Differs(usize),
    /// The connection to a process is gone, in words.
    Gone(usize, String),
    /// Somebody else has failed, which `Wait::stopped` told.
    Stopped,
}

/// How long to wait, and whether it still makes sense.
pub(crate) trait Wait: Sync {
    fn until(&self) -> Instant;
    /// Whether the cluster has failed elsewhere, so that nothing more will arrive. Cheap: asked in
    /// every turn of a waiting loop.
    fn stopped(&self) -> bool;
    /// Whether it has failed, without regard to processes that have left: for wires that see
    /// themselves when nothing more can come from one.
    fn failed(&self) -> bool {
        self.stopped()
    }
}

/// Carries bytes between this process and others.
pub(crate) trait Wire: Debug + std::marker::Send + Sync {
    /// A short name for messages and ledgers.
    fn name(&self) -> &'static str;

    /// Sends and receives all of these and returns the memories, filled where received. What
    /// goes from one process to another arrives in the order in which it was sent. Both ends know
    /// the sizes; an end that gets another digest or size says [`Broken::Differs`]. Never waits
    /// longer than `wait` allows. One call at a time.
    fn transfer(
        &self,
        sends: Vec<Send>,
        memories: Vec<Incoming>,
        receives: Vec<Receive>,
        wait: &dyn Wait,
    ) -> Result<Vec<Incoming>, Broken>;

    /// Whether what is [posted](Self::post) goes on by itself.
    fn posts(&self) -> bool {
        false
    }

    /// Begins to send and receive all of these, each message in a memory of its own, and returns; it
    /// waits only for a peer that takes nothing. What is received from a process comes in the order in
    /// which it was posted and [transferred](Self::transfer). Provided for wires that do not.
    fn post(
        &self,
        sends: Vec<Send>,
        memories: Vec<Incoming>,
        receives: Vec<Receive>,
        wait: &dyn Wait,
    ) -> Result<Box<dyn Flying>, Broken> {
        let memories = self.transfer(sends, memories, receives, wait)?;
        Ok(Box::new(Landed(memories)))
    }

    /// Returns when everything that was sent is on its way, or `wait` ends: the process is about to
    /// leave.
    fn flush(&self, _wait: &dyn Wait) {}
}

/// What was posted.
pub(crate) trait Flying: Debug + std::marker::Send {
    /// Whether nobody would have to wait for it.
    fn is_done(&self) -> bool;

    /// The memories, filled, and how long bytes were on their way.
    fn land(self: Box<Self>, wait: &dyn Wait) -> Result<(Vec<Incoming>, Duration), Broken>;
}

#[derive(Debug)]
struct Landed(Vec<Incoming>);

impl Flying for Landed {
    fn is_done(&self) -> bool {
        true
    }

    fn land(self: Box<Self>, _: &dyn Wait) -> Result<(Vec<Incoming>, Duration), Broken> {
        Ok((self.0, Duration::ZERO))
    }
}

//! What the ranks of a group do in a call, as data.

use super::{Communicator, Error, communicator::number, lane::Region, native::Reduce};
use cudarc::nccl::sys::ncclDataType_t;
use std::ffi::c_void;

/// What one rank does in a call. Counts are in elements of the reduction, or in bytes.
#[derive(Clone, Debug)]
pub enum Op {
    /// The reduction of everybody's `from` into everybody's `to`.
    AllReduce {
        /// What it gives.
        from: Region,
        /// What it gets.
        to: Region,
        /// Elements.
        count: usize,
        /// How.
        reduce: Reduce,
    },
    /// Everybody's `from`, in the order of ranks.
    AllGather {
        /// What it gives.
        from: Region,
        /// What it gets.
        to: Region,
        /// Bytes that each gives.
        bytes: usize,
    },
    /// A piece of the reduction for each, in the order of ranks.
    ReduceScatter {
        /// What it gives: as many pieces as members.
        from: Region,
        /// What it gets: one piece.
        to: Region,
        /// Elements of a piece.
        count: usize,
        /// How.
        reduce: Reduce,
    },
    /// The root's `from` for everybody.
    Broadcast {
        /// What the root gives; not read elsewhere.
        from: Region,
        /// What it gets; the root has it already.
        to: Option<Region>,
        /// Bytes.
        bytes: usize,
        /// Whose.
        root: usize,
    },
    /// To another rank.
    Send {
        /// What it gives.
        from: Region,
        /// Bytes.
        bytes: usize,
        /// To whom.
        peer: usize,
    },
    /// From another rank.
    Recv {
        /// What it gets.
        to: Region,
        /// Bytes.
        bytes: usize,
        /// From whom.
        peer: usize,
    },
}

impl Op {
    /// The memory it uses: what it reads, what it writes.
    pub(super) fn regions(&self) -> (Option<&Region>, Option<&Region>) {
        match self {
            Self::AllReduce { from, to, .. }
            | Self::AllGather { from, to, .. }
            | Self::ReduceScatter { from, to, .. } => (Some(from), Some(to)),
            Self::Broadcast { from, to, .. } => (Some(from), to.as_ref()),
            Self::Send { from, .. } => (Some(from), None),
            Self::Recv { to, .. } => (None, Some(to)),
        }
    }

    /// Queues it on the communicator's stream.
    ///
    /// # Safety
    /// The regions must hold what the counts say and stay until the stream has passed the call.
    pub(super) unsafe fn queue(&self, communicator: &Communicator) -> Result<(), Error> {
        const BYTES: ncclDataType_t = ncclDataType_t::ncclUint8;
        let (library, comm) = (communicator.library(), communicator.raw());
        let (call, stream) = (&library.call, communicator.lane.stream());
        let read = |region: &Region| region.address as *const c_void;
        let write = |region: &Region| region.address as *mut c_void;
        // SAFETY: the caller's promise; the communicator is locked and alive.
        let (name, code) = unsafe {
            match self {
                Self::AllReduce {
                    from,
                    to,
                    count,
                    reduce,
                } => (
                    "ncclAllReduce",
                    (call.ncclAllReduce)(
                        read(from),
                        write(to),
                        *count,
                        reduce.element,
                        reduce.op,
                        comm,
                        stream,
                    ),
                ),
                Self::AllGather { from, to, bytes } => (
                    "ncclAllGather",
                    (call.ncclAllGather)(read(from), write(to), *bytes, BYTES, comm, stream),
                ),
                Self::ReduceScatter {
                    from,
                    to,
                    count,
                    reduce,
                } => (
                    "ncclReduceScatter",
                    (call.ncclReduceScatter)(
                        read(from),
                        write(to),
                        *count,
                        reduce.element,
                        reduce.op,
                        comm,
                        stream,
                    ),
                ),
                Self::Broadcast {
                    from,
                    to,
                    bytes,
                    root,
                } => (
                    "ncclBroadcast",
                    (call.ncclBroadcast)(
                        read(from),
                        write(to.as_ref().unwrap_or(from)),
                        *bytes,
                        BYTES,
                        number(*root)?,
                        comm,
                        stream,
                    ),
                ),
                Self::Send { from, bytes, peer } => (
                    "ncclSend",
                    (call.ncclSend)(read(from), *bytes, BYTES, number(*peer)?, comm, stream),
                ),
                Self::Recv { to, bytes, peer } => (
                    "ncclRecv",
                    (call.ncclRecv)(write(to), *bytes, BYTES, number(*peer)?, comm, stream),
                ),
            }
        };
        library.check(name, code, comm)
    }
}

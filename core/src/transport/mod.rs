//! What carries data between ranks.
//!
//! A [`Transport`] needs three methods: its name, [`exchange`](Transport::exchange) and
//! [`barrier`](Transport::barrier). The collectives are provided on top of `exchange`, and a
//! transport that has better ones overrides them: they answer the same bits. The `conformance`
//! suite (a feature of the same name) holds any transport to that, [`Faulty`] wraps any
//! transport to make it late, failing or short of a rank, and [`Lossy`] to make it forget a sum.
//!
//! # One call for all ranks of a process
//! A call names every part of its group, with data for the ranks that this process can address; it
//! answers for those ranks, with `None` for the others. Every process that can address a rank of
//! the group makes the same calls in the same order. Why not one call for each rank, as in MPI?
//! Because then ranks that share a process would need threads to meet each other, which browsers do
//! not have, and could not share a result that is the same for all.
//!
//! # Reductions
//! Parts are combined in the order in which they are given, so results are the same bits every
//! time. Floats of 16 and 8 bits are added and multiplied in `f32` and rounded once, at the end.
//! Integers wrap. Every dtype has every reduction: of bools a sum is whether any is true and a
//! product whether all are; `and` and `or` of numbers ask "is not zero" and answer 0 or 1 in the
//! parts' dtype.
//!
//! # Beside the program
//! [`start`](Transport::start) takes a call as [data](Call) and answers with a [`Pending`], so that
//! the program computes while data is on its way. [`Background`] does that for any transport, with a
//! thread that makes the calls in the order in which they were posted; a transport that has a
//! stream of the device to itself overrides it. Whatever the way, the calls of a process begin in
//! the order of the program, started or not, and those that a process has with another one end in it.
//!
//! # Failure
//! Tensors are values, so a failed call leaves its inputs as they were and can be repeated. Calls
//! that can wait have a [deadline](Transport::deadline).
//!
//! ```
//! # use anymesh_core::{Mesh, Reduction, Tensor, transport::{InProcess, Part, Transport}};
//! # let device = anymesh_backend_cpu::device();
//! let mesh = Mesh::new("x=3", &device)?;
//! let part = |rank| Ok(Part::new(rank, &Tensor::from_slice(&[rank as i32, 10], [2], &device)?));
//! let parts = (0..3).map(part).collect::<Result<Vec<_>, anymesh_core::Error>>()?;
//! let sums = InProcess.all_reduce(&mesh, &parts, Reduction::Sum)?;
//! assert_eq!(sums[2].as_ref().map(|t| t.to_vec::<i32>()), Some(Ok(vec![3, 30])));
//! # Ok::<(), anymesh_core::Error>(())
//! ```

mod background;
mod call;
mod check;
mod collectives;
mod fault;
mod gather;
mod host;
mod in_process;
mod lossy;
mod no_values;
mod reduce;
#[cfg(not(target_family = "wasm"))]
mod threads;

pub use background::Background;
pub use call::{Arrived, Call, Pending};
pub use check::{check_group, check_parts};
pub use collectives::check_broadcast;
pub use fault::{Counts, Fault, Faulty};
pub use gather::gather_bytes;
pub use host::{DeviceMemory, Incoming, Outgoing};
pub use in_process::InProcess;
pub use lossy::Lossy;
pub use no_values::NoValues;
pub use reduce::reduce;
#[cfg(not(target_family = "wasm"))]
pub use threads::Threads;

use crate::{DType, Error, Mesh, Reduction, Result, Shape, Tensor};
use std::{panic::Location, time::Duration};

/// The op on whose behalf this thread communicates, and the line that called it; for messages.
pub fn on_behalf_of() -> Option<(&'static str, &'static Location<'static>)> {
    crate::ledger::outermost()
}

/// What this process came to on a mesh, in what a rank of it did or all of them: an error that it may
/// have alone is told to the others, who would wait for it.
pub(crate) fn told<T>(mesh: &Mesh, rank: Option<usize>, result: Result<T>) -> Result<T> {
    if let (Err(error), Some(transport)) = (&result, mesh.transport())
        && error.only_here()
        && !mesh.is_local()
        && let Some(rank) = rank.or_else(|| mesh.addressable().next())
    {
        transport.report(mesh.ids()[rank], error);
    }
    result
}

/// Writes a note into the ledgers that are open: what a program should know of how it communicates.
pub fn note(text: String) {
    crate::ledger::note(text);
}

/// What one rank gives to a collective or a message carries. `data` is there if this process can
/// address the rank.
#[derive(Clone, Debug)]
pub struct Part {
    /// The rank in the mesh.
    pub rank: usize,
    /// Its elements.
    pub dtype: DType,
    /// Its size, which every process knows.
    pub shape: Shape,
    /// A plain tensor on the rank's device, where it is addressable.
    pub data: Option<Tensor>,
}

impl Part {
    /// What a rank of this process gives.
    pub fn new(rank: usize, data: &Tensor) -> Self {
        Self {
            rank,
            dtype: data.dtype(),
            shape: data.shape().clone(),
            data: Some(data.clone()),
        }
    }

    /// What a rank of another process gives.
    pub fn elsewhere(rank: usize, dtype: DType, shape: impl Into<Shape>) -> Self {
        Self {
            rank,
            dtype,
            shape: shape.into(),
            data: None,
        }
    }

    /// The size of what is sent; 0 where no memory could hold it, which [`check`](Part::check)
    /// refuses.
    fn bytes(&self) -> u64 {
        self.shape
            .checked_numel("bytes")
            .map_or(0, |n| n as u64 * self.dtype.size() as u64)
    }
}

/// One message of an exchange.
#[derive(Clone, Debug)]
pub struct Message {
    /// From this rank, what it sends.
    pub part: Part,
    /// To this rank.
    pub to: usize,
}

/// Moves data between the ranks of a mesh. The module's text has the contract.
///
/// Tensors stay on their device unless a message goes to another one. Parts without elements, 0-d
/// parts, parts of different sizes and groups of one rank are ordinary. Calls that make no sense (a
/// rank that the mesh does not have, parts that do not fit together) are answered with a typed
/// error before anything is sent.
pub trait Transport: std::fmt::Debug + Send + Sync {
    /// A short name for messages and ledgers.
    fn name(&self) -> &str;

    /// Delivers every message; the answer has the data of those whose receiver is addressable, on
    /// the receiver's device.
    ///
    /// A process names the messages of which it can address an end, those between the same two
    /// ranks in the same order as the process at the other end. A rank may send to itself.
    /// Implementations call [`Message::check`] first.
    fn exchange(&self, mesh: &Mesh, messages: Vec<Message>) -> Result<Vec<Option<Tensor>>>;

    /// Returns when every rank of the group has called it, or with the ranks that are missing.
    /// Implementations call [`check_group`] first.
    fn barrier(&self, mesh: &Mesh, group: &[usize]) -> Result<()>;

    /// How long a call waits for other ranks before it gives [`Error::Timeout`] with those that are
    /// missing; `None` where there is nobody to wait for.
    fn deadline(&self) -> Option<Duration> {
        None
    }

    /// Tells the other processes of an error that only this one has: they get
    /// [`Error::Elsewhere`] instead of waiting for it. `rank` is the [id](Mesh::ids) of the rank
    /// that has it. Ops, reshards and reads on a mesh over processes call this with every error that
    /// may be [only here](Error::only_here).
    fn report(&self, _rank: usize, _error: &Error) {}

    /// Whether ranks of one device may read each other's parts where they are, without a message:
    /// only where all ranks are in this process, and nothing that they send is to be seen.
    fn hands_over(&self) -> bool {
        false
    }

    /// Whether calls that are [started](Self::start) go on beside what the program does next.
    fn overlaps(&self) -> bool {
        false
    }

    /// Whether an [exchange](Call::Exchange) that is [started](Self::start) begins at once and goes on
    /// by itself, so that others can begin and end before it does: one that waits for a rank holds up
    /// nobody but those who need something of the same rank.
    fn posts(&self) -> bool {
        false
    }

    /// Begins a call. It takes its place among the calls of this process here, and its errors are
    /// returned by [`Pending::wait`]. One that makes [no sense](Call::check) is refused at once. Provided for transports that do nothing beside the program:
    /// they make the call at once.
    fn start(&self, mesh: &Mesh, call: Call) -> Result<Box<dyn Pending>> {
        Ok(Box::new(call::Made::run(self, mesh, call)))
    }

    /// The reduction of all parts, in the order given, for every addressable member.
    fn all_reduce(
        &self,
        mesh: &Mesh,
        parts: &[Part],
        reduction: Reduction,
    ) -> Result<Vec<Option<Tensor>>> {
        collectives::all_reduce(self, mesh, parts, reduction)
    }

    /// The parts joined along `dim` in the order given, for every addressable member. They may
    /// differ in size along `dim`.
    fn all_gather(&self, mesh: &Mesh, parts: &[Part], dim: usize) -> Result<Vec<Option<Tensor>>> {
        collectives::all_gather(self, mesh, parts, dim)
    }

    /// Of the reduction of all parts, piece `i` of `dim` (by [`split`](crate::split)) for member
    /// `i`.
    fn reduce_scatter(
        &self,
        mesh: &Mesh,
        parts: &[Part],
        reduction: Reduction,
        dim: usize,
    ) -> Result<Vec<Option<Tensor>>> {
        collectives::reduce_scatter(self, mesh, parts, reduction, dim)
    }

    /// The root's part for every addressable rank of `group`; the root is the rank of the part and
    /// one of the group.
    fn broadcast(&self, mesh: &Mesh, root: &Part, group: &[usize]) -> Result<Vec<Option<Tensor>>> {
        collectives::broadcast(self, mesh, root, group)
    }

    /// Every part is cut along `cut` (by [`split`](crate::split)); member `i` gets piece `i` of
    /// each and joins them along `join` in the order given.
    fn all_to_all(
        &self,
        mesh: &Mesh,
        parts: &[Part],
        cut: usize,
        join: usize,
    ) -> Result<Vec<Option<Tensor>>> {
        collectives::all_to_all(self, mesh, parts, cut, join)
    }

    /// One message, called by the process of the sender and by that of the receiver, which gets the
    /// data.
    fn send(&self, mesh: &Mesh, part: Part, to: usize) -> Result<Option<Tensor>> {
        Ok(self
            .exchange(mesh, vec![Message { part, to }])?
            .pop()
            .flatten())
    }

    /// The other side of [`send`](Transport::send), for a process that can address the receiver and
    /// not the sender.
    fn recv(
        &self,
        mesh: &Mesh,
        from: usize,
        dtype: DType,
        shape: Shape,
        to: usize,
    ) -> Result<Tensor> {
        let none = || Error::Transport {
            op: "recv",
            detail: "the receiver is not in this process".into(),
            ranks: vec![to],
        };
        self.send(mesh, Part::elsewhere(from, dtype, shape), to)?
            .ok_or_else(none)
    }
}

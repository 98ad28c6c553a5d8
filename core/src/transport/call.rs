//! Calls that are started now and finished later.

use super::{Message, Part, Transport, check};
use crate::{Mesh, Reduction, Result, Tensor};
use std::time::Duration;

/// A call of a [`Transport`] as data, to be [started](Transport::start).
#[derive(Clone, Debug)]
pub enum Call {
    /// [`Transport::exchange`].
    Exchange {
        /// What goes where.
        messages: Vec<Message>,
    },
    /// [`Transport::all_reduce`].
    AllReduce {
        /// What each member gives.
        parts: Vec<Part>,
        /// How they are combined.
        reduction: Reduction,
    },
    /// [`Transport::all_gather`].
    AllGather {
        /// What each member gives.
        parts: Vec<Part>,
        /// The dimension that they are joined along.
        dim: usize,
    },
    /// [`Transport::reduce_scatter`].
    ReduceScatter {
        /// What each member gives.
        parts: Vec<Part>,
        /// How they are combined.
        reduction: Reduction,
        /// The dimension that the result is cut along.
        dim: usize,
    },
}

impl Call {
    /// The name of the method that it is a call of.
    pub fn name(&self) -> &'static str {
        match self {
            Call::Exchange { .. } => "exchange",
            Call::AllReduce { .. } => "all_reduce",
            Call::AllGather { .. } => "all_gather",
            Call::ReduceScatter { .. } => "reduce_scatter",
        }
    }

    /// Refuses a call that makes no sense: a transport does so before it starts one, while nothing
    /// has been sent.
    pub fn check(&self, mesh: &Mesh) -> Result<()> {
        let name = self.name();
        match self {
            Call::Exchange { messages } => messages.iter().try_for_each(|m| m.check(mesh)),
            Call::AllReduce { parts, .. } => check::check_parts(name, mesh, parts, &[], &[]),
            Call::AllGather { parts, dim } => {
                check::check_parts(name, mesh, parts, &[*dim], &[*dim])
            }
            Call::ReduceScatter { parts, dim, .. } => {
                check::check_parts(name, mesh, parts, &[*dim], &[])
            }
        }
    }

    /// Makes the call, and answers when it is done. What was given is released before that.
    pub fn run<T: Transport + ?Sized>(
        self,
        transport: &T,
        mesh: &Mesh,
    ) -> Result<Vec<Option<Tensor>>> {
        match self {
            Call::Exchange { messages } => transport.exchange(mesh, messages),
            Call::AllReduce { parts, reduction } => transport.all_reduce(mesh, &parts, reduction),
            Call::AllGather { parts, dim } => transport.all_gather(mesh, &parts, dim),
            Call::ReduceScatter {
                parts,
                reduction,
                dim,
            } => transport.reduce_scatter(mesh, &parts, reduction, dim),
        }
    }
}

/// What a call that was started brought.
#[derive(Clone, Debug)]
pub struct Arrived {
    /// The answer of the call.
    pub answer: Vec<Option<Tensor>>,
    /// How long the call ran, wherever it did; zero where that is not known.
    pub ran: Duration,
}

/// A call that was [started](Transport::start). It happens whether or not anybody waits for it.
pub trait Pending: std::fmt::Debug + Send {
    /// Whether [`wait`](Self::wait) would return at once.
    fn is_done(&self) -> bool;

    /// The answer, once it may be used: a transport that works on a stream of a device returns as
    /// soon as later kernels are certain to wait for it. What went wrong is returned here.
    fn wait(self: Box<Self>) -> Result<Arrived>;
}

/// A call that was made at once, because its transport does nothing beside the program.
#[derive(Debug)]
pub(super) struct Made(Result<Arrived>);

impl Made {
    pub(super) fn run<T: Transport + ?Sized>(transport: &T, mesh: &Mesh, call: Call) -> Self {
        let start = crate::ledger::Clock::start();
        let answer = call.run(transport, mesh);
        let ran = start.elapsed();
        Self(answer.map(|answer| Arrived { answer, ran }))
    }
}

impl Pending for Made {
    fn is_done(&self) -> bool {
        true
    }

    fn wait(self: Box<Self>) -> Result<Arrived> {
        self.0
    }
}

//! A transport by way of calls that are started.

use anymesh_core::{
    Error, Mesh, Reduction, Result, Tensor,
    transport::{Call, Message, Part, Transport},
};
use std::{sync::Arc, time::Duration};

/// Starts every call of another transport that can be [started](Transport::start), and waits for it.
/// So the suite holds that way to what it holds the others to.
#[derive(Debug)]
pub struct Started(pub Arc<dyn Transport>);

impl Started {
    fn run(&self, mesh: &Mesh, call: Call) -> Result<Vec<Option<Tensor>>> {
        Ok(self.0.start(mesh, call)?.wait()?.answer)
    }
}

impl Transport for Started {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn deadline(&self) -> Option<Duration> {
        self.0.deadline()
    }

    fn report(&self, rank: usize, error: &Error) {
        self.0.report(rank, error);
    }

    fn exchange(&self, mesh: &Mesh, messages: Vec<Message>) -> Result<Vec<Option<Tensor>>> {
        self.run(mesh, Call::Exchange { messages })
    }

    fn barrier(&self, mesh: &Mesh, group: &[usize]) -> Result<()> {
        self.0.barrier(mesh, group)
    }

    fn all_reduce(
        &self,
        mesh: &Mesh,
        parts: &[Part],
        reduction: Reduction,
    ) -> Result<Vec<Option<Tensor>>> {
        let parts = parts.to_vec();
        self.run(mesh, Call::AllReduce { parts, reduction })
    }

    fn all_gather(&self, mesh: &Mesh, parts: &[Part], dim: usize) -> Result<Vec<Option<Tensor>>> {
        let parts = parts.to_vec();
        self.run(mesh, Call::AllGather { parts, dim })
    }

    fn reduce_scatter(
        &self,
        mesh: &Mesh,
        parts: &[Part],
        reduction: Reduction,
        dim: usize,
    ) -> Result<Vec<Option<Tensor>>> {
        let (parts, reduction) = (parts.to_vec(), reduction);
        self.run(
            mesh,
            Call::ReduceScatter {
                parts,
                reduction,
                dim,
            },
        )
    }
}

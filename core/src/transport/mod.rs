//! What carries data between ranks.
//!
//! A transport needs `exchange` and `barrier`; the collectives follow from them, and a transport that has better ones overrides them. Every process that
//! takes part makes the same calls in the same order; a call names all parts of its group, with data for the ranks that the process can address.

mod in_process;

pub use in_process::InProcess;

use crate::{DType, Mesh, Reduction, Result, Shape, Tensor};

/// What one rank gives to a collective or a message carries. `data` is there if this process can address the rank.
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

/// One message of an exchange.
#[derive(Clone, Debug)]
pub struct Message {
    /// From this rank, what it sends.
    pub part: Part,
    /// To this rank.
    pub to: usize,
}

/// Moves data between the ranks of a mesh. See the module's text for the contract.
pub trait Transport: std::fmt::Debug + Send + Sync {
    /// A short name for messages and ledgers.
    fn name(&self) -> &str;

    /// Delivers every message; the answer has the data of those whose receiver is addressable, on the receiver's device.
    fn exchange(&self, mesh: &Mesh, messages: Vec<Message>) -> Result<Vec<Option<Tensor>>>;

    /// Returns when every rank of the group has called it, or with the ranks that are missing.
    fn barrier(&self, mesh: &Mesh, group: &[usize]) -> Result<()>;

    /// The reduction of all parts, in rank order, for every addressable member.
    fn all_reduce(&self, mesh: &Mesh, parts: &[Part], reduction: Reduction) -> Result<Vec<Option<Tensor>>>;

    /// The parts joined along `dim` in the order given, for every addressable member.
    fn all_gather(&self, mesh: &Mesh, parts: &[Part], dim: usize) -> Result<Vec<Option<Tensor>>>;

    /// Of the reduction of all parts, piece `i` of `dim` (by [`split`](crate::split)) for member `i`.
    fn reduce_scatter(&self, mesh: &Mesh, parts: &[Part], reduction: Reduction, dim: usize) -> Result<Vec<Option<Tensor>>>;
}

/// Two plain tensors combined.
pub(crate) fn combine(a: &Tensor, b: &Tensor, reduction: Reduction) -> Result<Tensor> {
    match reduction {
        Reduction::Sum => a.add(b),
        Reduction::Prod => a.mul(b),
        Reduction::Max => a.maximum(b),
        Reduction::Min => a.minimum(b),
        Reduction::And => a.logical_and(b),
        Reduction::Or => a.logical_or(b),
    }
}

//! Communication beside the program: tensors that are on their way.
//!
//! Where a transport [overlaps](crate::transport::Transport::overlaps), the gradients of parameters
//! are reduced while the backward pass goes on, several small ones [as one](Overlap), and
//! [`Tensor::prefetch`] gathers a parameter while the program computes something else, and
//! [`Tensor::start_to_mesh`] takes a tensor to another mesh meanwhile. Whoever reads such a tensor
//! waits for it, and nobody else.
//!
//! What is sent, in which order and in how many pieces depends on the program and on sizes alone,
//! never on how far communication has got: so the processes of a cluster stay in step, and values
//! have the same bits as without overlap.

mod ahead;
mod buckets;
mod coming;
mod moving;

pub use ahead::Ahead;
pub use buckets::{Overlap, with_overlap};
pub use moving::Moving;

pub(crate) use buckets::{Reductions, capture, enter};
pub(crate) use coming::{Coming, Shipment};

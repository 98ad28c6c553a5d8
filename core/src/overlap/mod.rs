//! Communication beside the program: tensors that are on their way.
//!
//! Where a transport [overlaps](crate::transport::Transport::overlaps), the gradients of parameters
//! are reduced while the backward pass goes on, several small ones [as one](Buckets), and
//! [`Tensor::prefetch`] gathers a parameter while the program computes something else. Whoever reads
//! such a tensor waits for it, and nobody else.
//!
//! What is sent, in which order and in how many pieces depends on the program and on sizes alone,
//! never on how far communication has got: so the processes of a cluster stay in step, and values
//! have the same bits as without overlap.

mod ahead;
mod buckets;
mod coming;

pub use ahead::Ahead;
pub use buckets::{Buckets, with_buckets};

pub(crate) use buckets::{Reductions, capture, enter};
pub(crate) use coming::{Coming, Shipment};

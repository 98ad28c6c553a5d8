//! Pipelines: every schedule gives the values and gradients of the model without one, and keeps as
//! much in memory as its proof says.

mod encoders;
mod measured;
mod memory;
mod parity;
mod processes;
mod support;
mod sweep;

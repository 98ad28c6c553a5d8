//! Mixtures of experts in training: the losses of one device on every mesh, in one process and in
//! several, and checkpoints that go on elsewhere; and what settings can be.

mod checkpoints;
mod configuration;
mod parity;
mod processes;
mod support;

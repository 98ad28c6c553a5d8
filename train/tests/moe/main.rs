//! Mixtures of experts in training: the losses of one device on every mesh, in one process and in
//! several, and checkpoints that go on elsewhere.

mod checkpoints;
mod parity;
mod processes;
mod support;

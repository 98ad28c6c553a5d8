//! Plans and what they do to tensors, on meshes of the CPU device.

mod across;
mod cases;
mod memory;
mod optimal;
mod printed;
mod processes;
mod regressions;
mod sweep;
mod validation;

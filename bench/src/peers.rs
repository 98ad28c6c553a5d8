//! The scripts that measure the same in other libraries, for programs that have no copy of
//! `benches/peers/` at hand.

/// The rows of [`kernels`](crate::kernels) in PyTorch: `SCRIPT --rows DEVICE` reads names, one a
/// line, and prints a JSON object for each.
pub const TORCH_KERNELS: &str = include_str!("../../benches/peers/torch_kernels.py");

/// The same in NumPy.
pub const NUMPY_KERNELS: &str = include_str!("../../benches/peers/numpy_cpu.py");

/// A [`step`](crate::step) in PyTorch: `SCRIPT - DEVICE WORDS.. --steps N --peer eager|compile`
/// prints what a step of ours prints.
pub const TORCH_STEP: &str = include_str!("../../benches/peers/torch_step.py");

/// The step of `small` in JAX: `SCRIPT jax1`.
pub const JAX_STEP: &str = include_str!("../../benches/peers/step.py");

//! Compiles the kernels of ops for an NVIDIA GPU that is not there, and says which do not:
//! `cargo run -p anymesh-backend-cuda --example compile [a100] [op ...]`, for an H200 without a name,
//! all ops without one.
//!
//! Needs NVRTC on the loader's paths and, for 16-bit floats, CUDA's headers (`CUDA_PATH`).
//! `ANYMESH_GPU_LOG=1` shows each kernel with its time.

use anymesh_backend_cuda::{Model, compile_only};
use anymesh_conformance::registry::{self, Attrs, Entry, Sample};
use anymesh_core::{Device, Error, Result};

/// Calls an op, and reads what it gives: an error of a kernel shows there.
fn run(entry: &Entry, sample: &Sample, device: &Device) -> Result<()> {
    let attrs = Attrs::new(entry, &sample.attrs)?;
    for tensor in entry.call(&sample.make(7, device)?, &attrs, device)? {
        tensor.to_device(&anymesh_backend_cpu::device())?;
    }
    Ok(())
}

fn main() -> Result<()> {
    let mut names: Vec<String> = std::env::args().skip(1).collect();
    let model = match names.first().map(String::as_str) {
        Some("a100") => Model::A100,
        _ => Model::H200,
    };
    names.retain(|name| name != "a100");
    let device = compile_only(model)?;
    let entries: Vec<&Entry> = if names.is_empty() {
        registry::entries().iter().collect()
    } else {
        (names.iter().map(|name| registry::find(name))).collect::<Result<_>>()?
    };
    let (mut calls, mut failures) = (0, 0);
    for entry in entries {
        for sample in entry.samples() {
            calls += 1;
            // Other errors come of values that are all zero.
            if let Err(e @ Error::DeviceFailed { .. }) = run(entry, &sample, &device) {
                failures += 1;
                println!("{}: {e}", entry.name);
            }
        }
    }
    println!("{calls} calls, {failures} with kernels that do not compile");
    if failures > 0 {
        std::process::exit(1);
    }
    Ok(())
}

//! Everything that shows itself, held to what pictures promise: well-formed XML, nothing outside of
//! its frame, no texts on top of each other, bounded sizes, the same bytes twice.

mod charts;
mod hostile;
mod inspect;
#[cfg(feature = "layout")]
mod layouts;
mod meshes;
mod plans;
mod snapshots;
#[cfg(feature = "checkpoint")]
mod stored;
mod tensors;

use anymesh_core::{Device, Mesh, TensorType};
use anymesh_show::Show;

fn cpu() -> Device {
    anymesh_backend_cpu::device()
}

fn mesh(axes: &str) -> Mesh {
    Mesh::new(axes, &anymesh_core::meta()).unwrap()
}

fn ty(text: &str, mesh: &Mesh) -> TensorType {
    TensorType::parse(text, mesh).unwrap()
}

/// The SVG of a thing, after everything about it was inspected.
#[track_caller]
fn svg(thing: &impl Show) -> String {
    inspect::check(thing).expect("it has a picture")
}

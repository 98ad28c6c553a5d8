//! Launches on a deferred device around the host, which tells what reaches it.
#![allow(dead_code, reason = "shared by several programs")]

use anymesh_engine::{Options, deferred_with};
use anymesh_kernel::{
    DType, Device, Layout, Result, Shape, View,
    backend::{MapCall, MapInput, ReduceCall, ReduceOp},
    map::{Builder, Val},
};
use smallvec::smallvec;
use std::sync::{Arc, Mutex};

/// What the device below was asked for: families and ops.
pub(crate) type Seen = Arc<Mutex<Vec<String>>>;

/// A deferred device on the host, and what reaches the host.
pub(crate) fn watched() -> (Device, Seen) {
    watched_with(Options::host())
}

pub(crate) fn watched_with(options: Options) -> (Device, Seen) {
    let seen = Seen::default();
    let told = seen.clone();
    let inner = anymesh_backend_cpu::device().decorated(move |backend, kernel| {
        let mut told = told.lock().expect("nobody panics");
        told.push(format!("{} {}", kernel.family(), kernel.op()));
        drop(told);
        backend.launch(kernel)
    });
    (deferred_with(&inner, options), seen)
}

pub(crate) fn seen(seen: &Seen) -> Vec<String> {
    std::mem::take(&mut seen.lock().expect("nobody panics"))
}

pub(crate) fn floats(device: &Device, shape: impl Into<Shape>, values: &[f32]) -> View {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    View {
        buffer: device.upload(&bytes).expect("uploads"),
        dtype: DType::F32,
        layout: Layout::contiguous(shape.into()),
    }
}

pub(crate) fn call(
    op: &'static str,
    views: &[&View],
    program: anymesh_kernel::MapProgram,
) -> MapCall {
    MapCall {
        op,
        program,
        shape: views[0].layout.shape.clone(),
        inputs: (views.iter())
            .map(|view| MapInput {
                view: (*view).clone(),
                window: None,
            })
            .collect(),
        indices: smallvec![],
        params: smallvec![],
        over: Default::default(),
    }
}

pub(crate) fn one(
    device: &Device,
    op: &'static str,
    x: &View,
    f: impl Fn(Val<'_>) -> Val<'_>,
) -> View {
    let b = Builder::new();
    let y = f(b.load(x.dtype));
    let program = b.finish(&[(y, x.dtype)]).expect("valid");
    device
        .launch(call(op, &[x], program))
        .expect("launches")
        .swap_remove(0)
}

pub(crate) fn add(device: &Device, x: &View, y: &View) -> View {
    let b = Builder::new();
    let sum = b.load(x.dtype) + b.load(y.dtype);
    let program = b.finish(&[(sum, x.dtype)]).expect("valid");
    device
        .launch(call("add", &[x, y], program))
        .expect("launches")
        .swap_remove(0)
}

pub(crate) fn sum(device: &Device, x: &View, axis: usize) -> View {
    let b = Builder::new();
    let program = b.finish(&[(b.load(x.dtype), x.dtype)]).expect("valid");
    let reduce = ReduceCall {
        map: call("sum", &[x], program),
        axes: smallvec![axis],
        mode: ReduceOp::Sum,
        scale: None,
        dtype: x.dtype,
    };
    device.launch(reduce).expect("launches").swap_remove(0)
}

pub(crate) fn read(device: &Device, view: &View) -> Result<Vec<f32>> {
    let bytes = view.layout.shape.numel() * 4;
    let bytes = pollster::block_on(device.backend().download(&view.buffer, 0..bytes))?;
    let four = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    Ok(bytes.chunks_exact(4).map(four).collect())
}

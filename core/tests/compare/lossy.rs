//! What goes wrong on purpose: a device that computes one element wrong, a transport that loses a
//! reduction.

use super::step::{PHASE, Phase};
use anymesh_core::{
    Buffer, DType, Device, Result, Shape,
    backend::{Backend, Buffers, Kernel},
    transport::{InProcess, Lossy, Transport, on_behalf_of},
};
use std::{
    panic::Location,
    sync::{Arc, Mutex},
};

/// What struck: the op that ran, its line, where the program was, and what was struck.
pub(crate) type Struck = Option<(
    &'static str,
    &'static Location<'static>,
    Phase,
    &'static str,
)>;

/// Counts what comes by, and strikes at one of them.
#[derive(Debug, Default)]
pub(crate) struct Trigger {
    pub(crate) at: Option<u64>,
    pub(crate) count: u64,
    pub(crate) struck: Struck,
    /// What came by, and when.
    pub(crate) phases: Vec<Phase>,
}

pub(crate) type Shared = Arc<Mutex<Trigger>>;

pub(crate) fn trigger(at: Option<u64>) -> Shared {
    Arc::new(Mutex::new(Trigger {
        at,
        ..Trigger::default()
    }))
}

/// Whether this is the one.
fn strikes(trigger: &Shared, what: &'static str) -> bool {
    let mut trigger = trigger.lock().expect("no panic under the lock");
    let now = trigger.count;
    trigger.count += 1;
    trigger.phases.push(PHASE.get());
    if trigger.at != Some(now) {
        return false;
    }
    trigger.struck = on_behalf_of().map(|(op, line)| (op, line, PHASE.get(), what));
    true
}

/// How an element goes wrong.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wrong {
    /// By as much as the largest element.
    Added,
    /// It and its neighbours' sign: the negative, and more.
    Negated,
    Nan,
    Infinite,
}

pub(crate) const WRONGS: [Wrong; 4] = [Wrong::Added, Wrong::Negated, Wrong::Nan, Wrong::Infinite];

/// A device like `inner` whose launch of this number has one element wrong. Only launches that give
/// f32 count.
pub(crate) fn broken(inner: &Device, trigger: &Shared, wrong: Wrong, element: u64) -> Device {
    let trigger = trigger.clone();
    inner.decorated(
        move |backend: &dyn Backend, kernel: Kernel| -> Result<Buffers> {
            let (op, outputs) = (kernel.op(), kernel.outputs());
            let mut buffers = backend.launch(kernel)?;
            let float = |(dtype, shape): &(DType, Shape)| *dtype == DType::F32 && shape.numel() > 0;
            let Some(o) = outputs.iter().position(float) else {
                return Ok(buffers);
            };
            if !strikes(&trigger, op) {
                return Ok(buffers);
            }
            let mut values = numbers(backend, &buffers[o], outputs[o].1.numel());
            let largest = values.iter().fold(0f32, |m, x| m.max(x.abs())).max(1e-3);
            let at = element as usize % values.len();
            values[at] = match wrong {
                Wrong::Added => values[at] + largest,
                Wrong::Negated => -values[at] - 0.5 * largest,
                Wrong::Nan => f32::NAN,
                Wrong::Infinite => f32::INFINITY,
            };
            let data: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            buffers[o] = backend.upload(&data)?;
            Ok(buffers)
        },
    )
}

/// The elements of a buffer in the memory of the host.
fn numbers(backend: &dyn Backend, buffer: &Buffer, count: usize) -> Vec<f32> {
    let data = backend.in_place(buffer).expect("memory of the host");
    let number = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    data[..4 * count].chunks_exact(4).map(number).collect()
}

/// A transport that loses a reduction: everyone keeps what they had.
pub(crate) fn lossy(trigger: &Shared) -> Arc<dyn Transport> {
    let trigger = trigger.clone();
    let loses = move |_: &'static str| strikes(&trigger, "reduction");
    Arc::new(Lossy::new(Arc::new(InProcess), loses))
}

//! The communication stream of a GPU, and its order with the kernels.
//!
//! An event in the stream of the kernels holds everything queued so far, and this stream waits for
//! that before a call. What comes after a call is queued behind it by the [gate](crate::gate) when a
//! result is first used, so that other kernels run beside it.

use super::Error;
use crate::gate::Gate;
use anymesh_kernel::{Buffer, DType};
use anymesh_launcher::{Engine, place};
use anymesh_shaders::{Arena, Memory};
use cudarc::driver::{CudaContext, CudaStream, sys as driver};
use std::{
    any::Any,
    fmt::Debug,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

fn check(call: &'static str, result: driver::CUresult) -> Result<(), Error> {
    result.result().map_err(|e| Error::Driver {
        call,
        detail: e.to_string(),
    })
}

/// Where collectives of one device run, one after the other.
pub(crate) struct Lane {
    device: String,
    ordinal: usize,
    engine: Engine,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    gate: Arc<Gate>,
    events: Arc<Events>,
    calls: AtomicU64,
    /// Held while a call is queued: what belongs to it lies side by side in the stream.
    pub(super) turn: Mutex<()>,
}

impl Debug for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lane({})", self.device)
    }
}

/// Memory of a device, kept in place while this is held.
#[derive(Clone)]
pub struct Region {
    pub(super) address: u64,
    pub(super) pin: Arc<dyn Any + Send + Sync>,
    pub(super) serial: u64,
}

impl Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Region({:#x})", self.address)
    }
}

impl Region {
    /// So many bytes further.
    pub fn at(&self, bytes: usize) -> Self {
        Self {
            address: self.address + bytes as u64,
            ..self.clone()
        }
    }
}

impl Lane {
    pub(crate) fn new(
        device: String,
        engine: Engine,
        context: &Arc<CudaContext>,
        gate: Arc<Gate>,
    ) -> Result<Self, Error> {
        let driver = |call: &'static str| {
            move |e: cudarc::driver::DriverError| Error::Driver {
                call,
                detail: e.to_string(),
            }
        };
        context
            .bind_to_thread()
            .map_err(driver("cuCtxSetCurrent"))?;
        Ok(Self {
            device,
            ordinal: context.ordinal(),
            engine,
            stream: context.new_stream().map_err(driver("cuStreamCreate"))?,
            context: context.clone(),
            gate,
            events: Arc::new(Events {
                context: context.clone(),
                free: Mutex::default(),
            }),
            calls: AtomicU64::new(0),
            turn: Mutex::default(),
        })
    }

    pub(super) fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    pub(super) fn device(&self) -> &str {
        &self.device
    }

    /// The GPU's number, by which lanes are locked in one order.
    pub(super) fn ordinal(&self) -> usize {
        self.ordinal
    }

    pub(super) fn stream(&self) -> *mut std::ffi::c_void {
        self.stream.cu_stream().cast()
    }

    /// Makes the device the one that this thread works with.
    pub(super) fn bind(&self) -> Result<(), Error> {
        self.context.bind_to_thread().map_err(|e| Error::Driver {
            call: "cuCtxSetCurrent",
            detail: e.to_string(),
        })
    }

    /// Memory for so many bytes, to be filled.
    pub(super) fn empty(&self, bytes: usize) -> Result<Buffer, Error> {
        let memory = self
            .engine
            .arena()
            .alloc(Memory::padded(DType::U8, bytes))?;
        Ok(memory.buffer())
    }

    /// Where a buffer lies.
    pub(super) fn region(&self, buffer: &Buffer, start: usize) -> Result<Region, Error> {
        self.gate.usable(&self.device, buffer)?;
        let memory = buffer.get::<Memory>()?;
        Ok(Region {
            address: place(memory).start + start as u64,
            pin: Arc::new(memory.clone()),
            serial: buffer.serial(),
        })
    }

    /// Queues the stream behind everything that was launched, and gives an event that is over when
    /// the stream has come there.
    pub(super) fn follow(&self) -> Result<Event, Error> {
        let before = Events::take(&self.events)?;
        let failed = |call| move |detail| Error::Driver { call, detail };
        let event = Raw(before.raw());
        self.engine
            .on_stream(move |kernels| {
                let event = event;
                // SAFETY: live handles of this context.
                crate::stream::check("of the kernels", unsafe {
                    driver::cuEventRecord(event.0, kernels.0 as _)
                })
            })
            .map_err(failed("cuEventRecord"))?;
        // SAFETY: live handles of this context. The event may be used again once the stream waits
        // for what it holds now.
        check("cuStreamWaitEvent", unsafe {
            driver::cuStreamWaitEvent(self.stream.cu_stream(), before.raw(), 0)
        })?;
        self.mark()
    }

    /// An event that is over when the stream has come here.
    pub(super) fn mark(&self) -> Result<Event, Error> {
        let event = Events::take(&self.events)?;
        // SAFETY: live handles of this context.
        check("cuEventRecord", unsafe {
            driver::cuEventRecord(event.raw(), self.stream.cu_stream())
        })?;
        Ok(event)
    }

    /// The number of the next call on this lane.
    pub(super) fn number(&self) -> u64 {
        self.calls.fetch_add(1, Ordering::Relaxed)
    }

    /// Lets whoever uses one of these buffers first be queued behind `end`.
    pub(super) fn expect(&self, number: u64, serials: Vec<u64>, end: &Arc<Event>) {
        let (engine, end) = (self.engine.clone(), end.clone());
        let device = self.device.clone();
        self.gate.expect(number, serials, move || {
            let joined = engine.on_stream(|kernels| {
                // SAFETY: live handles of this context.
                crate::stream::check("cuStreamWaitEvent", unsafe {
                    driver::cuStreamWaitEvent(kernels.0 as _, end.raw(), 0)
                })
            });
            joined.map_err(|detail| anymesh_kernel::Error::DeviceFailed { device, detail })
        });
    }
}

/// Events that are used again: to make one costs more than to record it.
struct Events {
    context: Arc<CudaContext>,
    free: Mutex<Vec<Raw>>,
}

/// An event's handle.
struct Raw(driver::CUevent);

// SAFETY: events may be used from any thread.
unsafe impl Send for Raw {}
unsafe impl Sync for Raw {}

/// A point in a stream.
pub(super) struct Event {
    raw: Option<Raw>,
    events: Arc<Events>,
}

impl Events {
    fn take(events: &Arc<Self>) -> Result<Event, Error> {
        let free = events
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop();
        let raw = match free {
            Some(raw) => raw,
            None => {
                let mut raw = std::ptr::null_mut();
                let no_timing = driver::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
                // SAFETY: writes a handle of the context, which the caller has bound.
                check("cuEventCreate", unsafe {
                    driver::cuEventCreate(&mut raw, no_timing)
                })?;
                Raw(raw)
            }
        };
        Ok(Event {
            raw: Some(raw),
            events: events.clone(),
        })
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let free = std::mem::take(self.free.get_mut().unwrap_or_else(PoisonError::into_inner));
        let _ = self.context.bind_to_thread();
        for raw in free {
            // SAFETY: nobody else has it. A failure has nobody to tell.
            let _ = unsafe { driver::cuEventDestroy_v2(raw.0) };
        }
    }
}

impl Event {
    fn raw(&self) -> driver::CUevent {
        self.raw.as_ref().map_or(std::ptr::null_mut(), |raw| raw.0)
    }

    /// Whether the stream has come there. Never waits for the device.
    pub(super) fn is_over(&self) -> Result<bool, Error> {
        let context = &self.events.context;
        context.bind_to_thread().map_err(|e| Error::Driver {
            call: "cuCtxSetCurrent",
            detail: e.to_string(),
        })?;
        // SAFETY: a live handle.
        match unsafe { driver::cuEventQuery(self.raw()) } {
            driver::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("cuEventQuery", result).map(|()| true),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Some(raw) = self.raw.take() {
            self.events
                .free
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(raw);
        }
    }
}

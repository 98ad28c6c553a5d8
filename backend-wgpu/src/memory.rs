//! The buffers of a wgpu device, by addresses that we make up: each is a piece of memory by itself.

use anymesh_launcher::Slabs;
use cubecl::wgpu::wgpu::{self, BufferUsages};
use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// What no buffer lies in, between two of them and at the beginning.
const GAP: u64 = 1 << 12;

/// All buffers, by where they begin. No address is used twice.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    all: Mutex<(BTreeMap<u64, wgpu::Buffer>, u64)>,
    given: AtomicBool,
}

impl Buffers {
    fn all(&self) -> MutexGuard<'_, (BTreeMap<u64, wgpu::Buffer>, u64)> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The buffer that addresses lie in, and how far behind its beginning they do.
    pub(crate) fn at(&self, place: &Range<u64>) -> Result<(wgpu::Buffer, u64), String> {
        let all = self.all();
        let found = all.0.range(..=place.start).next_back();
        match found.filter(|(start, buffer)| place.end <= **start + buffer.size()) {
            Some((start, buffer)) => Ok((buffer.clone(), place.start - start)),
            None => Err(format!("no buffer lies at {place:x?}")),
        }
    }

    /// Whether buffers went back to the driver since this was last asked.
    pub(crate) fn were_given(&self) -> bool {
        self.given.load(Ordering::Relaxed) && self.given.swap(false, Ordering::Relaxed)
    }
}

/// A buffer, or that there is no memory for it. In a browser nothing can be waited for: there that shows
/// at the next read.
pub(crate) fn buffer(
    device: &wgpu::Device,
    size: u64,
    usage: BufferUsages,
    mapped_at_creation: bool,
) -> Result<wgpu::Buffer, String> {
    #[cfg(not(target_family = "wasm"))]
    let none_left = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
    let buffer = device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size,
        usage,
        mapped_at_creation,
    });
    #[cfg(not(target_family = "wasm"))]
    if let Some(error) = cubecl::future::block_on(none_left.pop()) {
        return Err(format!("no memory for {size} bytes: {error}"));
    }
    Ok(buffer)
}

/// Where buffers come from.
pub(crate) struct WgpuSlabs {
    pub(crate) device: wgpu::Device,
    pub(crate) buffers: Arc<Buffers>,
}

impl Slabs for WgpuSlabs {
    fn take(&self, bytes: u64) -> Result<Option<u64>, String> {
        // What was rounded up beyond the limit nobody asked for.
        let size = bytes.min(self.device.limits().max_buffer_size);
        let usage = BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST;
        let Ok(buffer) = buffer(&self.device, size, usage, false) else {
            return Ok(None);
        };
        let mut all = self.buffers.all();
        let address = all.1 + GAP;
        all.1 = address + bytes;
        all.0.insert(address, buffer);
        Ok(Some(address))
    }

    fn give(&self, address: u64) {
        self.buffers.all().0.remove(&address);
        self.buffers.given.store(true, Ordering::Relaxed);
    }
}

//! A handle on a backend.

use crate::{Backend, DType, Error, Result};
use std::sync::Arc;

/// Where a tensor lives and computes. Cheap to clone; two handles are equal when they are the same
/// device.
#[derive(Clone)]
pub struct Device(Arc<dyn Backend>);

impl Device {
    /// A device run by `backend`.
    pub fn new(backend: impl Backend + 'static) -> Self {
        Self(Arc::new(backend))
    }

    /// The name to select it by.
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// The backend, for calls below the level of tensors.
    pub fn backend(&self) -> &dyn Backend {
        &*self.0
    }

    /// Whether tensors of `dtype` can live here.
    pub fn supports(&self, dtype: DType) -> bool {
        self.0.capabilities().dtypes.contains(&dtype)
    }

    /// Waits until everything queued is done, and returns any fault it met.
    #[cfg(not(target_family = "wasm"))]
    pub fn sync(&self) -> Result<()> {
        pollster::block_on(self.0.sync())
    }

    /// Waits until everything queued is done, and returns any fault it met.
    pub async fn sync_async(&self) -> Result<()> {
        self.0.sync().await
    }

    /// Refuses dtypes and sizes the device cannot hold, before anything is launched.
    pub fn check(&self, dtype: DType, elements: usize) -> Result<()> {
        let caps = self.0.capabilities();
        if !caps.dtypes.contains(&dtype) {
            let hint = format!(
                "cast to one of {} or use the cpu device",
                caps.dtypes
                    .iter()
                    .map(|d| d.name())
                    .collect::<Vec<_>>()
                    .join(" ")
            );
            return Err(Error::Unsupported {
                device: self.name().into(),
                what: format!("dtype {dtype}"),
                hint,
            });
        }
        let bytes = elements as u64 * dtype.size() as u64;
        if bytes > caps.max_buffer_bytes {
            return Err(Error::TooLarge {
                device: self.name().into(),
                bytes,
                limit: caps.max_buffer_bytes,
            });
        }
        Ok(())
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Device {}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device({})", self.name())
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

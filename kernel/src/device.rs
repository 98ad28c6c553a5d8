//! A handle on a backend: where launches are checked, counted and measured.

mod dry;
mod profile;

pub use dry::Dry;
pub(crate) use dry::Planned;
pub use profile::{Launched, MemoryChange, Profiling, Timing, Watch, clock};

use crate::{
    Backend, Buffer, Capabilities, DType, Error, Layout, Result, View,
    backend::{
        BoxFuture, Buffers, HostMemory, Kernel, Launch, List, MemoryUse, Meter, OutputTypes, Steps,
        Views,
    },
};
use std::{ops::Range, sync::Arc};

/// Where a tensor lives and computes. Cheap to clone; two handles are equal when they are the same
/// device.
#[derive(Clone)]
pub struct Device(Arc<Inner<dyn Backend>>);

struct Inner<B: ?Sized> {
    memory: Arc<Meter>,
    hooks: profile::Hooks,
    backend: B,
}

impl Device {
    /// A device run by `backend`.
    pub fn new(backend: impl Backend + 'static) -> Self {
        Self(Arc::new(Inner {
            memory: Arc::default(),
            hooks: profile::Hooks::default(),
            backend,
        }))
    }

    /// The name to select it by.
    pub fn name(&self) -> &str {
        self.backend().name()
    }

    /// The backend, for calls below the level of tensors.
    pub fn backend(&self) -> &dyn Backend {
        &self.0.backend
    }

    /// The device at the bottom, where this one is [around others](Backend::inner); else itself.
    pub fn innermost(&self) -> &Device {
        self.backend().inner().map_or(self, Device::innermost)
    }

    /// Who counts what lies here.
    fn meter(&self) -> &Arc<Meter> {
        &self.innermost().0.memory
    }

    /// Another device that is this one in everything but its launches, which `launch` makes. It
    /// gets this device's backend and every kernel; to pass one on is
    /// `backend.launch(kernel)`. Tensors of the two devices do not mix.
    ///
    /// ```
    /// # use anymesh_kernel::{Device, Error, backend::Kernel};
    /// /// A device on which sorting fails.
    /// fn without_sort(device: &Device) -> Device {
    ///     let name = device.name().to_string();
    ///     device.decorated(move |backend, kernel| match kernel {
    ///         Kernel::Sort(_) => Err(Error::DeviceFailed {
    ///             device: name.clone(),
    ///             detail: "it cannot sort".into(),
    ///         }),
    ///         kernel => backend.launch(kernel),
    ///     })
    /// }
    /// ```
    pub fn decorated(
        &self,
        launch: impl Fn(&dyn Backend, Kernel) -> Result<Buffers> + Send + Sync + 'static,
    ) -> Self {
        Self::new(Decorated {
            inner: self.clone(),
            takes: |_| true,
            has: |_| false,
            same: false,
            launch,
        })
    }

    /// As [`decorated`](Self::decorated), but only kernels that `takes` says are launched by
    /// `launch`; the others are this device's, also where they are
    /// [launched together](Self::launch_all). [Fused](Kernel::is_fused) kernels that `has` says are
    /// supported beside the device's. Whatever `launch` does it does by launches of the device, the
    /// same every time: [lists](Backend::list) that come again may be made without asking it.
    pub fn decorated_for(
        &self,
        takes: fn(&Kernel) -> bool,
        has: fn(&Kernel) -> bool,
        launch: impl Fn(&dyn Backend, Kernel) -> Result<Buffers> + Send + Sync + 'static,
    ) -> Self {
        Self::new(Decorated {
            inner: self.clone(),
            takes,
            has,
            same: true,
            launch,
        })
    }

    /// Whether tensors of `dtype` can live here.
    pub fn supports(&self, dtype: DType) -> bool {
        self.backend().capabilities().dtypes.contains(&dtype)
    }

    /// A buffer with these bytes.
    pub fn upload(&self, bytes: &[u8]) -> Result<Buffer> {
        if let Some(dry) = Dry::current() {
            return Ok(dry.buffer(bytes.len()));
        }
        let mut buffer = match self.0.hooks.listening() {
            true => self.0.hooks.upload(self.backend(), bytes)?,
            false => self.backend().upload(bytes)?,
        };
        buffer.count(self.meter());
        Ok(buffer)
    }

    /// Memory of the host for a buffer that comes from elsewhere, such as another process.
    pub fn receive(&self, bytes: usize) -> Result<Receiving> {
        let place = match self.backend().host_memory(bytes)? {
            Some(memory) => Place::Taken(memory),
            None => {
                let mut copied = Vec::new();
                let no_memory = |_| Error::OutOfMemory {
                    device: "the host".into(),
                    bytes: bytes as u64,
                };
                copied.try_reserve_exact(bytes).map_err(no_memory)?;
                copied.resize(bytes, 0);
                Place::Copied(copied)
            }
        };
        Ok(Receiving {
            device: self.clone(),
            place,
        })
    }

    /// Counts a buffer that was made on this device by something else than a launch, such as a
    /// library that fills its memory.
    pub fn adopt(&self, mut buffer: Buffer) -> Buffer {
        buffer.count(self.meter());
        buffer
    }

    /// Counts memory that work which was queued fills on its way, beside what is in use now, and that
    /// nobody holds: it may be the [peak](MemoryUse::peak).
    pub fn passes(&self, bytes: u64) {
        self.meter().pass(bytes);
    }

    /// Whether kernels run beside the host, in memory of their own, and each launch costs.
    pub fn runs_kernels(&self) -> bool {
        self.has_values() && matches!(self.backend().host_memory(0), Ok(None))
    }

    /// Whether its tensors have values. On a device without them ops are checked, planned and
    /// counted, and nothing is computed.
    pub fn has_values(&self) -> bool {
        self.backend().placeholder(0).is_none()
    }

    /// A buffer with nothing in it, counted as any other; `None` on a device with values, unless
    /// [nothing is computed](Dry) now.
    pub fn placeholder(&self, bytes: usize) -> Option<Buffer> {
        if let Some(dry) = Dry::current() {
            return Some(dry.buffer(bytes));
        }
        let mut buffer = self.backend().placeholder(bytes)?;
        buffer.count(self.meter());
        Some(buffer)
    }

    /// Queues a kernel, unless the device cannot hold what it gives; its outputs, dense.
    #[inline(always)]
    pub fn launch(&self, kernel: impl Into<Kernel>) -> Result<Views> {
        self.launch_kernel(kernel.into())
    }

    fn launch_kernel(&self, kernel: Kernel) -> Result<Views> {
        let outputs = self.check_outputs(&kernel)?;
        let buffers = if let Some(dry) = Dry::current() {
            dry.launch(&outputs)
        } else if self.0.hooks.listening() {
            self.0.hooks.launch(self.backend(), kernel)?
        } else {
            self.backend().launch(kernel)?
        };
        Ok(self.views(buffers, outputs))
    }

    /// A [list](Backend::list) of launches begins. Nothing where somebody watches, who is to see every
    /// launch.
    pub fn list<'a>(&'a self, list: &List<'_>) -> Option<Box<dyn Steps + 'a>> {
        match self.0.hooks.listening() || self.meter().is_watched() {
            true => None,
            false => self.backend().list(list),
        }
    }

    /// Queues kernels of which none reads what another one gives, unless the device cannot hold
    /// what one of them gives; the outputs of each, as from a launch of its own. A device may make
    /// [fewer launches](Backend::launch_all) of them, and may write results over
    /// [memory that the caller gives up](Launch::over).
    ///
    /// ```
    /// # use anymesh_kernel::{DType, Kernel, Layout, View, backend::SortCall};
    /// # let device = anymesh_backend_cpu::device();
    /// let sorts = [&[3, 1, 2][..], &[1, 0]].map(|bytes| {
    ///     let input = View {
    ///         buffer: device.upload(bytes)?,
    ///         dtype: DType::U8,
    ///         layout: Layout::contiguous([bytes.len()].into()),
    ///     };
    ///     Ok(Kernel::from(SortCall { op: "argsort", input, descending: false }).into())
    /// });
    /// let launches = sorts.into_iter().collect::<Result<_, anymesh_kernel::Error>>()?;
    /// let sorted = device.launch_all(launches)?;
    /// assert_eq!(sorted[1][0].layout.shape.dims(), [2]);
    /// # Ok::<(), anymesh_kernel::Error>(())
    /// ```
    pub fn launch_all(&self, launches: Vec<Launch>) -> Result<Vec<Views>> {
        let outputs = launches
            .iter()
            .map(|launch| self.check_outputs(&launch.kernel))
            .collect::<Result<Vec<_>>>()?;
        let buffers = if let Some(dry) = Dry::current() {
            outputs.iter().map(|outputs| dry.launch(outputs)).collect()
        } else if self.0.hooks.listening() {
            self.0.hooks.launch_all(self.backend(), launches)?
        } else {
            self.backend().launch_all(launches)?
        };
        debug_assert_eq!(buffers.len(), outputs.len(), "buffers for each kernel");
        let views = |(buffers, outputs)| self.views(buffers, outputs);
        Ok(buffers.into_iter().zip(outputs).map(views).collect())
    }

    /// What a kernel gives, if the device can hold it.
    fn check_outputs(&self, kernel: &Kernel) -> Result<OutputTypes> {
        let outputs = kernel.outputs();
        for (dtype, shape) in &outputs {
            self.check(*dtype, shape.checked_numel(kernel.op())?)?;
        }
        Ok(outputs)
    }

    /// Counts what a launch gave, as views.
    fn views(&self, buffers: Buffers, outputs: OutputTypes) -> Views {
        debug_assert_eq!(buffers.len(), outputs.len(), "a buffer for each output");
        // A device around another one gives values that may have no memory yet: the other one counts
        // what it makes.
        let counts = self.backend().inner().is_none();
        let mut views = Views::with_capacity(outputs.len());
        for (mut buffer, (dtype, shape)) in buffers.into_iter().zip(outputs) {
            if counts {
                buffer.count(&self.0.memory);
            }
            views.push(View {
                buffer,
                dtype,
                layout: Layout::contiguous(shape),
            });
        }
        views
    }

    /// The memory that tensors hold here, on every handle of this device. On a device without
    /// memory it is what they would hold.
    ///
    /// ```
    /// # use anymesh_kernel::Device;
    /// let device = Device::new(anymesh_backend_cpu::CpuBackend::new());
    /// let first = device.upload(&[0; 1000])?;
    /// let second = device.upload(&[0; 3000])?;
    /// drop(first);
    /// let memory = device.memory();
    /// assert_eq!((memory.in_use, memory.peak), (3000, 4000));
    /// # Ok::<(), anymesh_kernel::Error>(())
    /// ```
    pub fn memory(&self) -> MemoryUse {
        self.meter().read()
    }

    /// Starts measuring the peak of [`memory`](Self::memory) anew, from what is in use now.
    pub fn reset_peak(&self) {
        self.meter().reset_peak();
    }

    /// Waits until everything queued is done, and returns any fault it met.
    #[cfg(not(target_family = "wasm"))]
    pub fn sync(&self) -> Result<()> {
        pollster::block_on(self.backend().sync())
    }

    /// Waits until everything queued is done, and returns any fault it met.
    pub async fn sync_async(&self) -> Result<()> {
        self.backend().sync().await
    }

    /// Refuses dtypes and sizes the device cannot hold, before anything is launched.
    pub fn check(&self, dtype: DType, elements: usize) -> Result<()> {
        let caps = self.backend().capabilities();
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

/// Host memory that is filled and then becomes a buffer of a device: [`Device::receive`].
#[derive(Debug)]
pub struct Receiving {
    device: Device,
    place: Place,
}

#[derive(Debug)]
enum Place {
    /// The buffer's own memory.
    Taken(Box<dyn HostMemory>),
    /// What will be uploaded.
    Copied(Vec<u8>),
}

impl Receiving {
    /// All of it; whoever receives writes every byte.
    pub fn bytes(&mut self) -> &mut [u8] {
        match &mut self.place {
            Place::Taken(memory) => memory.bytes(),
            Place::Copied(bytes) => bytes,
        }
    }

    /// The buffer.
    pub fn finish(self) -> Result<Buffer> {
        match self.place {
            Place::Taken(memory) => {
                let mut buffer = memory.into_buffer();
                buffer.count(self.device.meter());
                Ok(buffer)
            }
            Place::Copied(bytes) => self.device.upload(&bytes),
        }
    }
}

/// See [`Device::decorated`].
struct Decorated<F> {
    inner: Device,
    takes: fn(&Kernel) -> bool,
    has: fn(&Kernel) -> bool,
    /// Whether it does the same every time.
    same: bool,
    launch: F,
}

impl<F> std::fmt::Debug for Decorated<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Decorated({:?})", self.inner.backend())
    }
}

impl<F> Backend for Decorated<F>
where
    F: Fn(&dyn Backend, Kernel) -> Result<Buffers> + Send + Sync,
{
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn capabilities(&self) -> &Capabilities {
        self.inner.backend().capabilities()
    }

    fn upload(&self, bytes: &[u8]) -> Result<Buffer> {
        self.inner.backend().upload(bytes)
    }

    fn placeholder(&self, bytes: usize) -> Option<Buffer> {
        self.inner.backend().placeholder(bytes)
    }

    fn download<'a>(
        &'a self,
        buffer: &'a Buffer,
        bytes: Range<usize>,
    ) -> BoxFuture<'a, Result<Vec<u8>>> {
        self.inner.backend().download(buffer, bytes)
    }

    fn in_place<'b>(&self, buffer: &'b Buffer) -> Option<&'b [u8]> {
        self.inner.backend().in_place(buffer)
    }

    fn host_memory(&self, bytes: usize) -> Result<Option<Box<dyn HostMemory>>> {
        self.inner.backend().host_memory(bytes)
    }

    fn resolve(&self, buffer: &Buffer) -> Result<Buffer> {
        self.inner.backend().resolve(buffer)
    }

    fn sync(&self) -> BoxFuture<'_, Result<()>> {
        self.inner.backend().sync()
    }

    fn supports(&self, kernel: &Kernel) -> bool {
        (self.has)(kernel) || self.inner.backend().supports(kernel)
    }

    fn launch(&self, kernel: Kernel) -> Result<Buffers> {
        match (self.takes)(&kernel) {
            true => (self.launch)(self.inner.backend(), kernel),
            false => self.inner.backend().launch(kernel),
        }
    }

    fn list<'a>(&'a self, list: &List<'_>) -> Option<Box<dyn Steps + 'a>> {
        match self.same {
            true => self.inner.backend().list(list),
            false => None,
        }
    }

    fn launch_all(&self, launches: Vec<Launch>) -> Result<Vec<Buffers>> {
        if launches.iter().any(|launch| (self.takes)(&launch.kernel)) {
            return launches
                .into_iter()
                .map(|launch| self.launch(launch.kernel))
                .collect();
        }
        self.inner.backend().launch_all(launches)
    }
}

//! What CubeCL's client talks to: kernels are compiled when they are first launched, and launched.
//!
//! CubeCL runs this on a thread of its own, behind a channel; so the thread that computes never waits
//! for the driver. Everything that is queued goes through that channel, in order.

mod list;
mod watch;

pub(crate) use watch::{Argument, Taped};

use crate::{
    failures::Failures,
    log,
    memory::{Places, STANDING},
    queue::{Compiler, Function, Launch, Queue, Stream},
    replay::Held,
};
use cubecl::{
    CubeCount, CubeKernel,
    bytes::Bytes,
    profile::ProfileDuration,
    server::{
        BufferBinding, CopyDescriptor, Handle, IoError, KernelArguments, KernelResource,
        MemoryLayout, MemoryLayoutDescriptor, MemoryLayoutPolicy, ProfileError, ProfilingToken,
        Server, ServerCommunication, ServerError, ServerStorage, ServerUtilities,
    },
};
use cubecl_common::device::{DeviceId, DeviceService, ServerUtilitiesHandle, ServiceId};
use cubecl_environment::{future::DynFut, stream::StreamId};
use cubecl_runtime::{
    dry_run::LaunchMode,
    id::KernelId,
    kernel::BufferIOAttr,
    logging::ServerLogger,
    memory_management::{ManagedMemoryHandle, MemoryAllocationMode, StreamMemoryReport},
    storage::{ComputeStorage, ManagedResource, StorageHandle, StorageId},
};
use std::{
    collections::HashMap,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

/// A kernel that was launched before.
#[derive(Clone)]
struct Loaded {
    function: Function,
    block: [u32; 3],
    shared: usize,
    io: Arc<[BufferIOAttr]>,
}

/// A device as CubeCL sees it.
pub struct Launcher {
    compiler: Box<dyn Compiler>,
    queue: Box<dyn Queue>,
    /// Whether the thread that this runs on was told of the device.
    bound: bool,
    /// What became of each kernel: one that cannot be compiled is not tried again.
    kernels: HashMap<KernelId, Result<Loaded, Arc<str>>>,
    failures: Failures,
    /// What threads that are watched have launched; nothing where they did something else too, or
    /// where it failed.
    tapes: HashMap<StreamId, Option<Vec<Taped>>>,
    /// The launches of a list that did not end yet, and whether nothing else came in between.
    held: Option<Vec<Held>>,
    whole: bool,
    /// Launches since somebody waited for the GPU, counted by whoever makes them.
    pub(crate) since_read: Arc<AtomicU32>,
    utilities: Arc<ServerUtilities>,
    /// Used again from launch to launch.
    places: Vec<Range<u64>>,
}

impl std::fmt::Debug for Launcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Launcher({})", self.compiler.runtime())
    }
}

fn failed(reason: impl Into<String>) -> ServerError {
    ServerError::Generic {
        reason: reason.into(),
        backtrace: Default::default(),
    }
}

/// Why a kernel's results cannot be read, for the log too.
fn not_run(name: &str, detail: &str) -> Arc<str> {
    let why = format!("the kernel {name} did not run: {detail}");
    log::say(1, || why.clone());
    Arc::from(why)
}

/// Whether memory is garbage when work that was to write it is not done.
fn fresh(binding: &&BufferBinding) -> bool {
    binding.stream != STANDING
}

/// The addresses behind a binding.
fn place(binding: &BufferBinding) -> Range<u64> {
    let start = binding.offset_start.unwrap_or(0);
    start..start + binding.size_in_used()
}

impl Launcher {
    pub(crate) fn new(id: DeviceId, compiler: Box<dyn Compiler>, queue: Box<dyn Queue>) -> Self {
        let (utilities, _) = ServerUtilities::init(
            ServiceId::of::<Self>(id),
            compiler.runtime(),
            compiler.properties(),
            compiler.target(),
            Arc::new(ServerLogger::default()),
            NoLayouts,
        );
        Self {
            compiler,
            queue,
            bound: false,
            kernels: HashMap::new(),
            failures: Failures::default(),
            tapes: HashMap::new(),
            held: None,
            whole: false,
            since_read: Arc::default(),
            utilities: Arc::new(utilities),
            places: vec![],
        }
    }

    fn bind(&mut self) -> Result<(), String> {
        if !self.bound {
            self.queue.bind()?;
            self.bound = true;
        }
        Ok(())
    }

    /// The kernel, compiled if it was not launched before.
    fn kernel(&mut self, kernel: &dyn CubeKernel) -> Result<Loaded, Arc<str>> {
        let id = kernel.id();
        if let Some(known) = self.kernels.get(&id) {
            return known.clone();
        }
        let made = self.make(kernel, &id).map_err(|detail| {
            let why = format!("the kernel {} could not be made: {detail}", id.short_name());
            log::say(1, || why.clone());
            Arc::from(why)
        });
        self.kernels.insert(id, made.clone());
        made
    }

    fn make(&mut self, kernel: &dyn CubeKernel, id: &KernelId) -> Result<Loaded, String> {
        let image = self.compiler.image(id.short_name(), kernel)?;
        Ok(Loaded {
            function: self.queue.load(&image)?,
            block: image.block,
            shared: image.shared,
            io: image.io.into(),
        })
    }

    /// Queues a kernel that was made.
    fn run(
        &mut self,
        loaded: &Loaded,
        count: &CubeCount,
        arguments: &KernelArguments,
    ) -> Result<(), String> {
        let CubeCount::Static(x, y, z) = *count else {
            return Err("how many cubes to launch must be known".into());
        };
        let info = &arguments.info;
        if info.dynamic_metadata_offset < info.data.len() {
            return Err("kernels take lists, not tensors with shapes".into());
        }
        self.places.clear();
        for resource in &arguments.resources {
            let KernelResource::Buffer(binding) = resource else {
                return Err("kernels take lists, not tensor maps".into());
            };
            self.places.push(place(binding));
        }
        let launch = Launch {
            function: loaded.function,
            grid: [x, y, z],
            block: loaded.block,
            shared: loaded.shared,
            places: &self.places,
            info: &info.data,
        };
        // SAFETY: one place for each buffer of the kernel and its words, as CubeCL writes kernels;
        // whoever launches holds the memory.
        unsafe { self.queue.launch(launch) }
    }

    /// Does work that reads and writes memory, unless what it reads is garbage; then, or where it
    /// fails, so is what it would have written.
    fn perform(
        &mut self,
        reads: impl Iterator<Item = Range<u64>>,
        writes: impl Iterator<Item = Range<u64>>,
        work: impl FnOnce(&mut Self) -> Result<(), Arc<str>>,
    ) {
        let lost = if self.failures.is_empty() {
            None
        } else {
            reads
                .into_iter()
                .find_map(|range| self.failures.find(&range).cloned())
        };
        let done = match lost {
            Some(why) => Err(why),
            None => self.bind().map_err(Arc::from).and_then(|()| work(self)),
        };
        match done {
            Err(why) => writes.for_each(|range| self.failures.set(range, why.clone())),
            Ok(()) if self.failures.is_empty() => {}
            Ok(()) => writes.for_each(|range| self.failures.clear(&range)),
        }
    }

    /// Lets a library queue work on the stream. Where it fails, or what it reads is garbage, what it
    /// was to fill is garbage too.
    pub(crate) fn library(
        &mut self,
        reads: &[Range<u64>],
        writes: Range<u64>,
        work: impl FnOnce(Stream) -> Result<(), String>,
    ) {
        self.queue_held();
        self.perform(reads.iter().cloned(), std::iter::once(writes), |this| {
            work(this.queue.stream()).map_err(|detail| {
                log::say(1, || detail.clone());
                Arc::from(detail)
            })
        });
    }

    /// The kernel that was queued last to write some memory used other memory too: what it could
    /// not be run for, or what it made of garbage, is garbage.
    pub(crate) fn reached(&mut self, used: Places) {
        self.queue_held();
        if self.failures.is_empty() {
            return;
        }
        let lost = self.failures.find(&used.done).cloned();
        let mut places = used.places.into_iter();
        for [reads, writes] in used.also {
            let reads: Vec<_> = places.by_ref().take(reads).collect();
            let why = lost.clone().or_else(|| {
                let mut found = reads.iter().filter_map(|range| self.failures.find(range));
                found.next().cloned()
            });
            for range in places.by_ref().take(writes) {
                match &why {
                    Some(why) => self.failures.set(range, why.clone()),
                    None => self.failures.clear(&range),
                }
            }
        }
    }

    /// Lets work be done on the stream that fills no memory.
    pub(crate) fn on_stream<R>(
        &mut self,
        work: impl FnOnce(Stream) -> Result<R, String>,
    ) -> Result<R, String> {
        self.queue_held();
        self.bind()?;
        work(self.queue.stream())
    }

    fn readable<'b>(
        &self,
        mut bindings: impl Iterator<Item = &'b BufferBinding>,
    ) -> Result<(), ServerError> {
        match bindings.find_map(|binding| self.failures.find(&place(binding))) {
            Some(why) => Err(failed(&**why)),
            None => Ok(()),
        }
    }
}

impl Server for Launcher {
    fn initialize_memory(
        &mut self,
        _: ManagedMemoryHandle,
        _: u64,
        _: StreamId,
    ) -> Result<(), ServerError> {
        Err(failed("memory of this device comes from its arena"))
    }

    fn logger(&self) -> Arc<ServerLogger> {
        self.utilities.logger.clone()
    }

    fn utilities(&self) -> Arc<ServerUtilities> {
        self.utilities.clone()
    }

    fn read(
        &mut self,
        descriptors: Vec<CopyDescriptor>,
        thread: StreamId,
    ) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        self.queue_held();
        self.since_read.store(0, Ordering::Relaxed);
        self.spoil(thread);
        let parts = descriptors.iter().map(|d| place(&d.handle)).collect();
        let ready = self
            .readable(descriptors.iter().map(|d| &d.handle))
            .and_then(|()| self.bind().map_err(failed));
        match ready {
            Err(error) => Box::pin(std::future::ready(Err(error))),
            Ok(()) => {
                let copies = self.queue.download(parts);
                Box::pin(async move { copies.await.map_err(failed) })
            }
        }
    }

    fn write(&mut self, descriptors: Vec<(CopyDescriptor, Bytes)>, thread: StreamId) {
        self.queue_held();
        self.spoil(thread);
        for (descriptor, bytes) in descriptors {
            let to = place(&descriptor.handle);
            self.perform(std::iter::empty(), std::iter::once(to.clone()), |this| {
                this.queue.upload(to.start, &bytes).map_err(Arc::from)
            });
        }
    }

    fn sync(
        &mut self,
        handles: Vec<BufferBinding>,
        _: StreamId,
    ) -> DynFut<Result<(), ServerError>> {
        self.queue_held();
        if let Err(error) = self.readable(handles.iter()) {
            return Box::pin(std::future::ready(Err(error)));
        }
        let done = self.queue.finish();
        Box::pin(async move { done.await.map_err(failed) })
    }

    fn check(&mut self, handles: Vec<BufferBinding>, _: StreamId) -> Result<(), ServerError> {
        self.queue_held();
        self.readable(handles.iter())
    }

    unsafe fn launch(
        &mut self,
        kernel: Box<dyn CubeKernel>,
        count: CubeCount,
        arguments: KernelArguments,
        thread: StreamId,
        mode: LaunchMode,
    ) {
        self.queue_held();
        let loaded = match self.bind().map_err(Arc::from) {
            Ok(()) => self.kernel(&*kernel),
            Err(why) => Err(why),
        };
        if mode.is_skipped() {
            return;
        }
        if !self.tapes.is_empty() {
            match &loaded {
                Ok(loaded) => {
                    let name = kernel.id().short_name().to_string();
                    self.tape(thread, &name, loaded, &count, &arguments);
                }
                Err(_) => self.spoil(thread),
            }
        }
        let io = loaded.as_ref().ok().map(|loaded| loaded.io.clone());
        log::say(2, || {
            format!("{} {count:?} {:x?}", kernel.id().short_name(), {
                arguments.buffers().map(place).collect::<Vec<_>>()
            })
        });
        let reads = arguments
            .buffers_read(io.as_deref())
            .filter(fresh)
            .map(place);
        let writes = arguments
            .buffers_written(io.as_deref())
            .filter(fresh)
            .map(place);
        self.perform(reads, writes, |this| {
            this.run(&loaded?, &count, &arguments)
                .map_err(|detail| not_run(kernel.id().short_name(), &detail))
        });
    }

    fn flush(&mut self, _: StreamId) -> Result<(), ServerError> {
        self.queue_held();
        Ok(())
    }

    fn memory_report(&mut self, _: StreamId) -> Option<StreamMemoryReport> {
        None
    }

    fn memory_cleanup(&mut self, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn start_profile(&mut self, _: StreamId) -> Result<ProfilingToken, ServerError> {
        Err(failed("CubeCL's profiling is not supported"))
    }

    fn end_profile(
        &mut self,
        _: StreamId,
        _: ProfilingToken,
    ) -> Result<ProfileDuration, ProfileError> {
        Err(ProfileError::from(&failed(
            "CubeCL's profiling is not supported",
        )))
    }

    fn allocation_mode(&mut self, _: MemoryAllocationMode, _: StreamId) {}
}

impl ServerCommunication for Launcher {}

impl DeviceService for Launcher {
    fn init(_: DeviceId) -> Self {
        unreachable!("a launcher is registered before its client is made")
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        self.utilities.clone()
    }
}

/// CubeCL's own memory management, which this device does not use.
struct NoLayouts;

impl MemoryLayoutPolicy for NoLayouts {
    fn apply(
        &self,
        service: ServiceId,
        stream: StreamId,
        _: &[MemoryLayoutDescriptor],
    ) -> (Handle, Vec<MemoryLayout>) {
        (Handle::new(service, stream, 0), vec![])
    }
}

/// The same for its storage.
#[derive(Debug)]
pub struct NoStorage;

impl ComputeStorage for NoStorage {
    type Resource = ();

    fn alignment(&self) -> usize {
        crate::pool::ALIGNMENT as usize
    }

    fn get(&mut self, _: &StorageHandle) -> Result<(), IoError> {
        Ok(())
    }

    fn alloc(&mut self, size: u64) -> Result<StorageHandle, IoError> {
        Err(IoError::BufferTooBig {
            size,
            backtrace: Default::default(),
        })
    }

    fn dealloc(&mut self, _: StorageId) {}

    fn flush(&mut self) {}

    fn bytes_allocated(&self) -> u64 {
        0
    }
}

impl ServerStorage for Launcher {
    type Storage = NoStorage;

    fn get_resource(
        &mut self,
        _: BufferBinding,
        _: StreamId,
    ) -> Result<ManagedResource<()>, ServerError> {
        Err(failed("memory of this device is known by its address"))
    }
}

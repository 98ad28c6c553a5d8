//! A GPU that is open: its launcher, its memory, and the way to its stream.

use crate::{
    again::Repeated,
    compile::Compiler,
    disk::Store,
    gpu::Gpu,
    memory::{GpuArena, NoSlabs, Slabs},
    queue::{Nothing, Queue, Stream},
    replay::{Held, Library},
    server::Launcher,
    stream::{GpuSlabs, GpuStream},
    trace,
};
use cubecl::{client::Client, device_handle::DeviceHandle};
use cubecl_common::device::DeviceId;
use cudarc::driver::CudaContext;
use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU16, AtomicU32, Ordering},
    },
};

/// CubeCL's number for our kind of devices, unlike those of its own: each kind has its own threads.
const GPUS: u16 = 0xcda;

/// The same for devices that only compile.
const COMPILERS: u16 = 0xcdb;

/// A GPU that is open.
#[derive(Clone)]
pub(crate) struct Engine {
    handle: DeviceHandle<Launcher>,
    client: Client,
    arena: GpuArena,
    way: Way,
}

/// The way of launches that are made again to the thread that makes them.
#[derive(Clone)]
pub(crate) struct Way {
    pub(crate) handle: DeviceHandle<Launcher>,
    /// Launches since somebody waited for the GPU.
    since_read: Arc<AtomicU32>,
}

/// Launches that are handed over at once after somebody waited for the GPU.
const EAGER: u32 = 4;

impl Way {
    pub(crate) fn submit(&self, held: Held) {
        trace::launched(&held);
        self.handle.submit(move |launcher| launcher.again(held));
        // The channel hands over many tasks at a time, and whoever hands over fewer waits for it. So
        // only a GPU that has nothing to do is given work at once.
        if self.since_read.fetch_add(1, Ordering::Relaxed) < EAGER {
            self.handle.flush_queue();
        }
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Engine")
    }
}

impl Engine {
    /// The GPU of a context. The caller has checked that NVRTC can be loaded, and opens each GPU
    /// once.
    pub(crate) fn open(index: u16, context: &Arc<CudaContext>) -> Result<Self, String> {
        let gpu = Gpu::of(context).map_err(|e| e.to_string())?;
        if gpu.version < 70 {
            return Err(format!(
                "compute capability {}.{} is too old, kernels need 7.0",
                gpu.version / 10,
                gpu.version % 10
            ));
        }
        Self::new(
            DeviceId::new(GPUS, index),
            format!("cuda:{index}"),
            Compiler::new(gpu, Store::of_user())?,
            Box::new(GpuStream::new(context)?),
            Box::new(GpuSlabs(context.clone())),
        )
    }

    /// A device that compiles kernels for a GPU that is not there.
    pub(crate) fn compile_only(gpu: Gpu, store: Option<Store>) -> Result<Self, String> {
        Self::without_gpu(Compiler::new(gpu, store)?)
    }

    /// A device that runs nothing.
    pub(crate) fn without_gpu(compiler: Compiler) -> Result<Self, String> {
        static COUNT: AtomicU16 = AtomicU16::new(0);
        Self::new(
            DeviceId::new(COMPILERS, COUNT.fetch_add(1, Ordering::Relaxed)),
            "cuda:compile".into(),
            compiler,
            Box::new(Nothing),
            Box::<NoSlabs>::default(),
        )
    }

    fn new(
        id: DeviceId,
        device: String,
        compiler: Compiler,
        queue: Box<dyn Queue>,
        slabs: Box<dyn Slabs>,
    ) -> Result<Self, String> {
        let launcher = Launcher::new(id, compiler, queue);
        let since_read = launcher.since_read.clone();
        let handle = DeviceHandle::insert(id, launcher).map_err(|e| format!("{e:?}"))?;
        let client = Client::load::<Launcher>(id);
        let waiting = client.clone();
        let drain = move || cubecl::future::block_on(waiting.sync()).map_err(|e| e.to_string());
        let told = handle.clone();
        let reached = move |places| told.submit(move |launcher| launcher.reached(places));
        Ok(Self {
            arena: GpuArena::new(
                device,
                client.clone(),
                slabs,
                Box::new(drain),
                Box::new(reached),
            ),
            way: Way {
                handle: handle.clone(),
                since_read,
            },
            handle,
            client,
        })
    }

    /// CubeCL's way to it.
    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    #[cfg(test)]
    pub(crate) fn way(&self) -> &Way {
        &self.way
    }

    /// Makes calls again that were made before.
    pub(crate) fn repeated(&self) -> Repeated {
        Repeated::new(self.way.clone(), self.arena.clone())
    }

    pub(crate) fn arena(&self) -> &GpuArena {
        &self.arena
    }

    /// Queues work of a library behind everything that was queued before. It is done by the thread
    /// that launches, soon; what fails makes garbage of `writes`, and whoever reads that is told.
    /// The caller holds the memory until this returns, not longer.
    pub(crate) fn library(
        &self,
        reads: Vec<Range<u64>>,
        writes: Range<u64>,
        work: impl FnOnce(Stream) -> Result<(), String> + Send + 'static,
    ) {
        self.handle
            .submit(move |launcher| launcher.library(&reads, writes, work));
        // Libraries do large things: the GPU should have them at once, and what was queued before.
        self.handle.flush_queue();
    }

    /// The same for work that comes again and again.
    pub(crate) fn product(&self, library: Library) {
        self.way.submit(Held::Library(Arc::new(library)));
    }

    /// Does something on the stream behind everything that was queued before, and waits until the
    /// driver has it (not until it is done).
    #[cfg_attr(not(feature = "nccl"), allow(dead_code))]
    pub(crate) fn on_stream<R: Send>(
        &self,
        work: impl FnOnce(Stream) -> Result<R, String> + Send,
    ) -> Result<R, String> {
        let done = self
            .handle
            .submit_blocking(|launcher| launcher.on_stream(work));
        done.unwrap_or_else(|e| Err(format!("{e:?}")))
    }
}

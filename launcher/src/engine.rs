//! A device that is open: its launcher, its memory, and the way to its queue.

use crate::{
    again::Repeated,
    memory::{GpuArena, Slabs},
    pool::Pieces,
    queue::{Compiler, Queue, Stream},
    replay::{Held, Library},
    server::Launcher,
    trace,
};
use cubecl::{client::Client, device_handle::DeviceHandle};
use cubecl_common::device::DeviceId;
use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

/// A device that is open.
#[derive(Clone)]
pub struct Engine {
    handle: DeviceHandle<Launcher>,
    client: Client,
    arena: GpuArena,
    way: Way,
}

/// The way of launches that are made again to the thread that makes them.
#[derive(Clone)]
pub(crate) struct Way {
    pub(crate) handle: DeviceHandle<Launcher>,
    /// Launches since somebody waited for the device.
    since_read: Arc<AtomicU32>,
}

/// Launches that are handed over at once after somebody waited for the device.
const EAGER: u32 = 4;

impl Way {
    pub(crate) fn submit(&self, held: Held) {
        trace::launched(&held);
        self.handle.submit(move |launcher| launcher.again(held));
        // The channel hands over many tasks at a time, and whoever hands over fewer waits for it. So
        // only a device that has nothing to do is given work at once.
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
    /// A device that messages call by this name. CubeCL tells devices apart by their numbers, and each
    /// kind of numbers has threads of its own.
    pub fn new(
        id: DeviceId,
        device: String,
        compiler: Box<dyn Compiler>,
        queue: Box<dyn Queue>,
        slabs: Box<dyn Slabs>,
        pieces: Pieces,
    ) -> Result<Self, String> {
        let launcher = Launcher::new(id, compiler, queue);
        let since_read = launcher.since_read.clone();
        let handle = DeviceHandle::insert(id, launcher).map_err(|e| format!("{e:?}"))?;
        let client = Client::load::<Launcher>(id);
        #[cfg(not(target_family = "wasm"))]
        let drain = {
            let waiting = client.clone();
            move || cubecl::future::block_on(waiting.sync()).map_err(|e| e.to_string())
        };
        // In a browser everything is queued at once, and the browser keeps buffers that are in use.
        #[cfg(target_family = "wasm")]
        let drain = || Ok(());
        let told = handle.clone();
        let reached = move |places| told.submit(move |launcher| launcher.reached(places));
        Ok(Self {
            arena: GpuArena::new(
                device,
                client.clone(),
                slabs,
                pieces,
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
    pub fn client(&self) -> &Client {
        &self.client
    }

    #[cfg(test)]
    pub(crate) fn way(&self) -> &Way {
        &self.way
    }

    /// Makes calls again that were made before.
    pub fn repeated(&self) -> Repeated {
        Repeated::new(self.way.clone(), self.arena.clone())
    }

    /// Its memory.
    pub fn arena(&self) -> &GpuArena {
        &self.arena
    }

    /// Queues work of a library behind everything that was queued before. It is done by the thread
    /// that launches, soon; what fails makes garbage of `writes`, and whoever reads that is told.
    /// The caller holds the memory until this returns, not longer.
    pub fn library(
        &self,
        reads: Vec<Range<u64>>,
        writes: Range<u64>,
        work: impl FnOnce(Stream) -> Result<(), String> + Send + 'static,
    ) {
        self.handle
            .submit(move |launcher| launcher.library(&reads, writes, work));
        // Libraries do large things: the device should have them at once, and what was queued before.
        self.handle.flush_queue();
    }

    /// The same for work that comes again and again.
    pub fn product(&self, library: Library) {
        self.way.submit(Held::Library(Arc::new(library)));
    }

    /// Does something on the stream behind everything that was queued before, and waits until the
    /// driver has it (not until it is done).
    pub fn on_stream<R: Send>(
        &self,
        work: impl FnOnce(Stream) -> Result<R, String> + Send,
    ) -> Result<R, String> {
        let done = self
            .handle
            .submit_blocking(|launcher| launcher.on_stream(work));
        done.unwrap_or_else(|e| Err(format!("{e:?}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        memory::NoSlabs,
        queue::{Image, Nothing},
    };
    use cubecl::{
        CubeKernel,
        ir::{
            DeviceIdentity, DeviceProperties, HardwareProperties, MemoryDeviceProperties,
            TargetProperties, VectorSize,
        },
        profile::TimingMethod,
    };
    use std::sync::atomic::AtomicU16;

    /// Makes no kernel.
    struct Idle;

    impl Compiler for Idle {
        fn runtime(&self) -> &'static str {
            "idle"
        }

        fn properties(&self) -> DeviceProperties {
            let hardware = HardwareProperties {
                load_width: 128,
                vector_register_count: None,
                plane_size_min: 32,
                plane_size_max: 32,
                max_bindings: 8,
                max_shared_memory_size: 1 << 14,
                max_cube_count: (1, 1, 1),
                max_units_per_cube: 32,
                max_cube_dim: (32, 1, 1),
                num_streaming_multiprocessors: None,
                num_tensor_cores: None,
                min_tensor_cores_dim: None,
                num_cpu_cores: None,
                last_level_cache_size: None,
                max_vector_size: VectorSize::MAX,
                cube_mma_reserved_shared_memory: 0,
            };
            let identity = DeviceIdentity {
                name: "idle".into(),
                fingerprint: "idle".into(),
                physical: None,
            };
            DeviceProperties::new(
                Default::default(),
                MemoryDeviceProperties::new(1 << 40, 512),
                hardware,
                TimingMethod::System,
                identity,
            )
        }

        fn target(&self) -> TargetProperties {
            TargetProperties {
                mma: Default::default(),
            }
        }

        fn image(&self, name: &str, _: &dyn CubeKernel) -> Result<Image, String> {
            Err(format!("{name} is not made here"))
        }
    }

    impl Engine {
        /// A device that is not there.
        pub(crate) fn idle() -> Result<Self, String> {
            static COUNT: AtomicU16 = AtomicU16::new(0);
            Self::new(
                DeviceId::new(0xcdc, COUNT.fetch_add(1, Ordering::Relaxed)),
                "idle".into(),
                Box::new(Idle),
                Box::new(Nothing),
                Box::<NoSlabs>::default(),
                Pieces::OfSlabs,
            )
        }
    }
}

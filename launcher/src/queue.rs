//! What a device does, one thing after the other.

use cubecl::{
    CubeKernel,
    bytes::Bytes,
    ir::{DeviceProperties, TargetProperties},
};
use cubecl_environment::future::DynFut;
use cubecl_runtime::kernel::BufferIOAttr;
use std::{any::Any, ops::Range, sync::Arc};

/// A kernel that a [`Queue`] has loaded, by a number of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Function(pub u64);

/// A kernel as a [`Queue`] takes it.
#[derive(Clone, Debug)]
pub struct Image {
    /// What the driver makes the kernel of.
    pub code: Vec<u8>,
    /// The name of its entry.
    pub entry: String,
    /// Bytes of shared memory that a launch sets aside.
    pub shared: usize,
    /// Its threads.
    pub block: [u32; 3],
    /// What it does with each of its buffers.
    pub io: Vec<BufferIOAttr>,
    /// For each thing that is bound to it, whether it says that it writes there; the last may be the
    /// numbers. Nothing where buffers are passed as addresses.
    pub bound: Vec<bool>,
}

/// Makes kernels for one device.
pub trait Compiler: Send + 'static {
    /// CubeCL's name for such devices.
    fn runtime(&self) -> &'static str;

    /// What CubeCL's kernels may use of the device.
    fn properties(&self) -> DeviceProperties;

    /// How tensor cores take their operands.
    fn target(&self) -> TargetProperties;

    /// The kernel, compiled as far as no driver is needed.
    fn image(&self, name: &str, kernel: &dyn CubeKernel) -> Result<Image, String>;
}

/// A launch of a kernel, with everything but the addresses of its buffers.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) name: Arc<str>,
    pub(crate) function: Function,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared: usize,
    /// Scalars and lengths.
    pub(crate) info: Vec<u64>,
}

/// The driver's stream of a [`Queue`], as a number, for libraries that queue work of their own.
#[derive(Clone, Copy, Debug)]
pub struct Stream(pub usize);

/// What was written down, as the [`Queue`] that wrote it keeps it.
pub type Graph = Box<dyn Any + Send>;

/// One list of work for a device: what is queued later runs later. Addresses are the device's own,
/// and what lies there is the caller's to keep in place until work on it is queued.
pub trait Queue: Send + 'static {
    /// To be called by the thread that queues, before anything else.
    fn bind(&mut self) -> Result<(), String>;

    /// Takes a compiled kernel.
    fn load(&mut self, image: &Image) -> Result<Function, String>;

    /// Queues a kernel with its buffers, and the words of its scalars and lengths.
    ///
    /// # Safety
    ///
    /// There are as many places as the kernel has buffers, and its words; memory is in place.
    unsafe fn launch(&mut self, launch: Launch<'_>) -> Result<(), String>;

    /// Queues a copy to the device; the bytes may go when it returns.
    fn upload(&mut self, to: u64, bytes: &[u8]) -> Result<(), String>;

    /// Queues copies from the device, which are there when the answer is.
    fn download(&mut self, parts: Vec<Range<u64>>) -> DynFut<Result<Vec<Bytes>, String>>;

    /// Waits, in the answer, for everything that is queued by then.
    fn finish(&mut self) -> DynFut<Result<(), String>>;

    /// The driver's stream, for libraries.
    fn stream(&self) -> Stream;

    /// Calls of `launch` and of libraries are written down from here on, and not run.
    fn write_down(&mut self) -> Result<(), String>;

    /// What is written down next waits for these alone, by the order in which this was called for
    /// them, and not for everything before.
    fn wait_for(&mut self, earlier: &[u32]) -> Result<(), String>;

    /// What was written down. Ends the writing also where it fails.
    fn written(&mut self) -> Result<Graph, String>;

    /// Queues everything that was written down, with the addresses it had then.
    fn replay(&mut self, graph: &Graph) -> Result<(), String>;
}

/// One launch of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// The kernel.
    pub function: Function,
    /// How many cubes.
    pub grid: [u32; 3],
    /// Their threads.
    pub block: [u32; 3],
    /// Bytes of shared memory that are set aside.
    pub shared: usize,
    /// Where its buffers lie.
    pub places: &'a [Range<u64>],
    /// Scalars and lengths.
    pub info: &'a [u64],
}

/// A queue that does nothing: for compiling kernels where there is no GPU. What is read is zero.
#[derive(Debug)]
pub struct Nothing;

impl Queue for Nothing {
    fn bind(&mut self) -> Result<(), String> {
        Ok(())
    }

    fn load(&mut self, _: &Image) -> Result<Function, String> {
        Ok(Function(0))
    }

    unsafe fn launch(&mut self, _: Launch<'_>) -> Result<(), String> {
        Ok(())
    }

    fn upload(&mut self, _: u64, _: &[u8]) -> Result<(), String> {
        Ok(())
    }

    fn download(&mut self, parts: Vec<Range<u64>>) -> DynFut<Result<Vec<Bytes>, String>> {
        let zeros = |part: Range<u64>| vec![0; (part.end - part.start) as usize];
        let zeros = parts
            .into_iter()
            .map(zeros)
            .map(Bytes::from_bytes_vec)
            .collect();
        Box::pin(std::future::ready(Ok(zeros)))
    }

    fn finish(&mut self) -> DynFut<Result<(), String>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn stream(&self) -> Stream {
        Stream(0)
    }

    fn write_down(&mut self) -> Result<(), String> {
        Ok(())
    }

    fn wait_for(&mut self, _: &[u32]) -> Result<(), String> {
        Ok(())
    }

    fn written(&mut self) -> Result<Graph, String> {
        Ok(Box::new(()))
    }

    fn replay(&mut self, _: &Graph) -> Result<(), String> {
        Ok(())
    }
}

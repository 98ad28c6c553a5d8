//! What a device does, one thing after the other.

use cubecl::bytes::Bytes;
use cubecl_environment::future::DynFut;
use cudarc::driver::sys;
use std::{ffi::c_void, ops::Range, sync::Arc};

/// A kernel in the driver's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function(pub(crate) sys::CUfunction);

// SAFETY: a name for something in the driver, which any thread may use.
unsafe impl Send for Function {}

/// A launch of a kernel, with everything but the addresses of its buffers.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) name: Arc<str>,
    pub(crate) function: Function,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared: usize,
    /// Scalars and lengths, in a struct that is passed by value.
    pub(crate) info: Vec<u64>,
}

// SAFETY: a name for something in the driver, and numbers.
unsafe impl Sync for Prepared {}

/// A stream of the driver.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream(pub(crate) sys::CUstream);

// SAFETY: as above.
unsafe impl Send for Stream {}
unsafe impl Sync for Stream {}

/// One list of work for a device: what is queued later runs later. Addresses are the device's own,
/// and what lies there is the caller's to keep in place until work on it is queued.
pub(crate) trait Queue: Send + 'static {
    /// To be called by the thread that queues, before anything else.
    fn bind(&mut self) -> Result<(), String>;

    /// Takes a compiled kernel, with so many bytes of shared memory.
    fn load(&mut self, image: &[u8], entry: &str, shared: usize) -> Result<Function, String>;

    /// Queues a kernel.
    ///
    /// # Safety
    ///
    /// The arguments point to as many values as the kernel has, of its types; the memory that they
    /// name is in place.
    unsafe fn launch(
        &mut self,
        function: Function,
        grid: [u32; 3],
        block: [u32; 3],
        shared: usize,
        arguments: &mut [*mut c_void],
    ) -> Result<(), String>;

    /// Queues a copy to the device; the bytes may go when it returns.
    fn upload(&mut self, to: u64, bytes: &[u8]) -> Result<(), String>;

    /// Queues copies from the device, which are there when the answer is.
    fn download(&mut self, parts: Vec<Range<u64>>) -> DynFut<Result<Vec<Bytes>, String>>;

    /// Waits, in the answer, for everything that is queued by then.
    fn finish(&self) -> DynFut<Result<(), String>>;

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

/// Kernels that the driver queues at once.
#[derive(Debug)]
pub(crate) struct Graph(pub(crate) sys::CUgraphExec);

// SAFETY: a name for something in the driver, used by one thread at a time.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made by the driver, dropped once; what of it is queued still runs. A failure has
            // nobody to tell.
            let _ = unsafe { sys::cuGraphExecDestroy(self.0) };
        }
    }
}

/// A queue that does nothing: for compiling kernels where there is no GPU. What is read is zero.
#[derive(Debug)]
pub(crate) struct Nothing;

impl Queue for Nothing {
    fn bind(&mut self) -> Result<(), String> {
        Ok(())
    }

    fn load(&mut self, _: &[u8], _: &str, _: usize) -> Result<Function, String> {
        Ok(Function(std::ptr::null_mut()))
    }

    unsafe fn launch(
        &mut self,
        _: Function,
        _: [u32; 3],
        _: [u32; 3],
        _: usize,
        _: &mut [*mut c_void],
    ) -> Result<(), String> {
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

    fn finish(&self) -> DynFut<Result<(), String>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn stream(&self) -> Stream {
        Stream(std::ptr::null_mut())
    }

    fn write_down(&mut self) -> Result<(), String> {
        Ok(())
    }

    fn wait_for(&mut self, _: &[u32]) -> Result<(), String> {
        Ok(())
    }

    fn written(&mut self) -> Result<Graph, String> {
        Ok(Graph(std::ptr::null_mut()))
    }

    fn replay(&mut self, _: &Graph) -> Result<(), String> {
        Ok(())
    }
}

//! The queue of a GPU: one stream of the driver, for kernels, copies and libraries.

use anymesh_launcher::{Function, Graph, Image, Launch, Queue, Slabs, Stream, log};
use cubecl::bytes::Bytes;
use cubecl_environment::future::DynFut;
use cudarc::driver::{CudaContext, CudaStream, sys};
use smallvec::SmallVec;
use std::{
    ffi::{CString, c_void},
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

/// Up to here a download goes through memory that the GPU writes by itself, beside other work.
const STAGED: usize = 1 << 20;

pub(crate) fn check(call: &str, result: sys::CUresult) -> Result<(), String> {
    result.result().map_err(|e| format!("{call}: {e}"))
}

fn bind(context: &CudaContext) -> Result<(), String> {
    (context.bind_to_thread()).map_err(|e| format!("cuCtxSetCurrent: {e}"))
}

/// The stream of a GPU.
pub(crate) struct GpuStream {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    staging: Arc<Staging>,
    /// Of what is written down: what each part of it ended in. Nothing where the driver is too old to
    /// be told what waits for what.
    ends: Option<Vec<Nodes>>,
    /// Whether a part is being written down.
    open: bool,
    /// Pointers to the arguments of a launch, used again from launch to launch.
    arguments: Vec<*mut c_void>,
}

/// Work in a graph of the driver's.
type Nodes = SmallVec<[sys::CUgraphNode; 1]>;

// SAFETY: names for something in the driver, used by the thread that owns the stream, and pointers that
// are used only in the launch that they are made for.
unsafe impl Send for GpuStream {}

/// The first version of the driver that can be told what waits for what.
const BRANCHES: i32 = 12_030;

impl GpuStream {
    pub(crate) fn new(context: &Arc<CudaContext>) -> Result<Self, String> {
        bind(context)?;
        let mut version = 0;
        // SAFETY: writes a number.
        check("cuDriverGetVersion", unsafe {
            sys::cuDriverGetVersion(&mut version)
        })?;
        let branches = version >= BRANCHES;
        Ok(Self {
            context: context.clone(),
            stream: (context.new_stream()).map_err(|e| format!("cuStreamCreate: {e}"))?,
            staging: Arc::new(Staging {
                context: context.clone(),
                free: Mutex::default(),
            }),
            ends: branches.then(Vec::new),
            open: false,
            arguments: vec![],
        })
    }

    /// What the work that is written down so far ended in.
    fn newest(&self) -> Result<Nodes, String> {
        let (mut nodes, mut edges, mut count) = (std::ptr::null(), std::ptr::null(), 0);
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: a live stream, which is writing down; the driver's list is good until its next call.
        unsafe {
            check(
                "cuStreamGetCaptureInfo",
                sys::cuStreamGetCaptureInfo_v3(
                    self.stream.cu_stream(),
                    &mut status,
                    std::ptr::null_mut(),
                    std::ptr::null_mut(),
                    &mut nodes,
                    &mut edges,
                    &mut count,
                ),
            )?;
            match count {
                0 => Ok(Nodes::new()),
                _ => Ok(std::slice::from_raw_parts(nodes, count).into()),
            }
        }
    }
}

impl Queue for GpuStream {
    fn bind(&mut self) -> Result<(), String> {
        bind(&self.context)
    }

    fn load(&mut self, image: &Image) -> Result<Function, String> {
        let entry = CString::new(&*image.entry).map_err(|e| e.to_string())?;
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: a whole image; the module stays loaded for as long as the process lives, as kernels
        // that are queued may need it.
        unsafe {
            check(
                "cuModuleLoadData",
                sys::cuModuleLoadData(&mut module, image.code.as_ptr().cast()),
            )?;
            check(
                "cuModuleGetFunction",
                sys::cuModuleGetFunction(&mut function, module, entry.as_ptr()),
            )?;
            if image.shared > 0 {
                let most =
                    sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                check(
                    "cuFuncSetAttribute",
                    sys::cuFuncSetAttribute(function, most, image.shared as i32),
                )?;
            }
        }
        Ok(Function(function as u64))
    }

    unsafe fn launch(&mut self, launch: Launch<'_>) -> Result<(), String> {
        let stream = self.stream.cu_stream();
        let ([x, y, z], block) = (launch.grid, launch.block);
        self.arguments.clear();
        let addresses =
            (launch.places.iter()).map(|place| (&raw const place.start).cast_mut().cast());
        self.arguments.extend(addresses);
        // The words are in a struct that is passed by value.
        (self.arguments).push(launch.info.as_ptr().cast_mut().cast());
        // SAFETY: the caller's promise; the driver copies arguments before it returns.
        unsafe {
            check(
                "cuLaunchKernel",
                sys::cuLaunchKernel(
                    launch.function.0 as sys::CUfunction,
                    x,
                    y,
                    z,
                    block[0],
                    block[1],
                    block[2],
                    launch.shared as u32,
                    stream,
                    self.arguments.as_mut_ptr(),
                    std::ptr::null_mut(),
                ),
            )?;
            if log::level() >= 2 {
                check("the kernel", sys::cuStreamSynchronize(stream))?;
            }
        }
        Ok(())
    }

    fn upload(&mut self, to: u64, bytes: &[u8]) -> Result<(), String> {
        // SAFETY: the caller's promise. The bytes are ordinary memory, which the driver has copied
        // when it returns.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(
                to,
                bytes.as_ptr().cast(),
                bytes.len(),
                self.stream.cu_stream(),
            )
        })
    }

    fn download(&mut self, parts: Vec<Range<u64>>) -> DynFut<Result<Vec<Bytes>, String>> {
        let total: u64 = parts.iter().map(|part| part.end - part.start).sum();
        if total > STAGED as u64 {
            return Box::pin(large(self.context.clone(), self.stream.clone(), parts));
        }
        let staged = Staging::take(&self.staging).and_then(|staged| {
            let mut at = 0;
            for part in &parts {
                let len = (part.end - part.start) as usize;
                // SAFETY: the parts are no longer than the memory; it is this download's until the
                // event behind the copies was waited for.
                check("cuMemcpyDtoHAsync", unsafe {
                    let to = staged.memory.add(at).cast();
                    sys::cuMemcpyDtoHAsync_v2(to, part.start, len, self.stream.cu_stream())
                })?;
                at += len;
            }
            // SAFETY: live handles of one context.
            check("cuEventRecord", unsafe {
                sys::cuEventRecord(staged.event, self.stream.cu_stream())
            })?;
            Ok(staged)
        });
        Box::pin(async move {
            let staged = staged?;
            let bytes = staged.wait(total as usize)?;
            let mut rest = bytes;
            let cut = |part: Range<u64>| {
                let (now, later) = rest.split_at((part.end - part.start) as usize);
                rest = later;
                Bytes::from_bytes_vec(now.to_vec())
            };
            Ok(parts.into_iter().map(cut).collect())
        })
    }

    fn finish(&mut self) -> DynFut<Result<(), String>> {
        let (context, stream) = (self.context.clone(), self.stream.clone());
        Box::pin(async move {
            bind(&context)?;
            // SAFETY: a live stream.
            check("cuStreamSynchronize", unsafe {
                sys::cuStreamSynchronize(stream.cu_stream())
            })
        })
    }

    fn stream(&self) -> Stream {
        Stream(self.stream.cu_stream() as usize)
    }

    fn write_down(&mut self) -> Result<(), String> {
        self.ends.iter_mut().for_each(Vec::clear);
        self.open = false;
        // Other threads may allocate meanwhile.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: a live stream.
        check("cuStreamBeginCapture", unsafe {
            sys::cuStreamBeginCapture_v2(self.stream.cu_stream(), mode)
        })
    }

    fn wait_for(&mut self, earlier: &[u32]) -> Result<(), String> {
        if self.ends.is_none() {
            return Ok(());
        }
        let last = self.open.then(|| self.newest()).transpose()?;
        self.open = true;
        let Some(ends) = &mut self.ends else {
            return Ok(());
        };
        ends.extend(last);
        let mut nodes: Vec<sys::CUgraphNode> = (earlier.iter())
            .flat_map(|k| ends[*k as usize].iter().copied())
            .collect();
        let all = sys::CUstreamUpdateCaptureDependencies_flags::CU_STREAM_SET_CAPTURE_DEPENDENCIES;
        // SAFETY: a live stream, which is writing down, and nodes of its graph.
        check("cuStreamUpdateCaptureDependencies", unsafe {
            sys::cuStreamUpdateCaptureDependencies_v2(
                self.stream.cu_stream(),
                nodes.as_mut_ptr(),
                std::ptr::null(),
                nodes.len(),
                all as u32,
            )
        })
    }

    fn written(&mut self) -> Result<Graph, String> {
        let (mut graph, mut ready) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the stream is writing down; the graph is only needed to make what is replayed.
        unsafe {
            check(
                "cuStreamEndCapture",
                sys::cuStreamEndCapture(self.stream.cu_stream(), &mut graph),
            )?;
            let made = check(
                "cuGraphInstantiate",
                sys::cuGraphInstantiateWithFlags(&mut ready, graph, 0),
            );
            let _ = sys::cuGraphDestroy(graph);
            made?;
        }
        Ok(Box::new(Replayed(ready)))
    }

    fn replay(&mut self, graph: &Graph) -> Result<(), String> {
        let graph = (graph.downcast_ref::<Replayed>()).ok_or("a graph of another device")?;
        // SAFETY: live handles; whoever replays holds the memory that the graph names.
        check("cuGraphLaunch", unsafe {
            sys::cuGraphLaunch(graph.0, self.stream.cu_stream())
        })
    }
}

/// Kernels that the driver queues at once.
struct Replayed(sys::CUgraphExec);

// SAFETY: a name for something in the driver, used by one thread at a time.
unsafe impl Send for Replayed {}

impl Drop for Replayed {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made by the driver, dropped once; what of it is queued still runs. A failure has
            // nobody to tell.
            let _ = unsafe { sys::cuGraphExecDestroy(self.0) };
        }
    }
}

/// Copies in the thread that waits for them: the driver moves them piece by piece, and other threads
/// go on queueing.
async fn large(
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    parts: Vec<Range<u64>>,
) -> Result<Vec<Bytes>, String> {
    bind(&context)?;
    let mut all = Vec::with_capacity(parts.len());
    for part in parts {
        let len = (part.end - part.start) as usize;
        let mut bytes = Vec::new();
        (bytes.try_reserve_exact(len)).map_err(|_| format!("no host memory for {len} bytes"))?;
        bytes.resize(len, 0u8);
        // SAFETY: as long as the part, and alive until the stream was waited for.
        unsafe {
            let to = bytes.as_mut_ptr().cast();
            check(
                "cuMemcpyDtoHAsync",
                sys::cuMemcpyDtoHAsync_v2(to, part.start, len, stream.cu_stream()),
            )?;
            check(
                "cuStreamSynchronize",
                sys::cuStreamSynchronize(stream.cu_stream()),
            )?;
        }
        all.push(Bytes::from_bytes_vec(bytes));
    }
    Ok(all)
}

/// Host memory that the GPU writes by itself, and an event to wait for that. Used again: to make one
/// costs more than a download.
struct Staging {
    context: Arc<CudaContext>,
    free: Mutex<Vec<Raw>>,
}

struct Raw(*mut u8, sys::CUevent);

// SAFETY: plain memory and a name for something in the driver, owned by one at a time.
unsafe impl Send for Raw {}

/// What one download has of it.
struct Staged {
    memory: *mut u8,
    event: sys::CUevent,
    staging: Arc<Staging>,
}

// SAFETY: as `Raw`.
unsafe impl Send for Staged {}

impl Staging {
    fn take(staging: &Arc<Self>) -> Result<Staged, String> {
        let free = (staging.free.lock())
            .unwrap_or_else(PoisonError::into_inner)
            .pop();
        let Raw(memory, event) = match free {
            Some(raw) => raw,
            None => {
                let (mut memory, mut event) = (std::ptr::null_mut(), std::ptr::null_mut());
                let no_timing = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
                // SAFETY: makes memory and an event of the context, which is bound.
                unsafe {
                    check("cuEventCreate", sys::cuEventCreate(&mut event, no_timing))?;
                    check(
                        "cuMemAllocHost",
                        sys::cuMemAllocHost_v2(&mut memory, STAGED),
                    )?;
                }
                Raw(memory.cast(), event)
            }
        };
        Ok(Staged {
            memory,
            event,
            staging: staging.clone(),
        })
    }
}

impl Staged {
    /// The copied bytes, once they are there.
    fn wait(&self, len: usize) -> Result<&[u8], String> {
        bind(&self.staging.context)?;
        // SAFETY: the event was recorded behind the copies, and nobody writes there after it.
        unsafe {
            check("cuEventSynchronize", sys::cuEventSynchronize(self.event))?;
            Ok(std::slice::from_raw_parts(self.memory, len))
        }
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // A download that nobody waited for may still be writing.
        let _ = self.wait(0);
        let mut free = self
            .staging
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        free.push(Raw(self.memory, self.event));
    }
}

/// The driver's memory.
pub(crate) struct GpuSlabs(pub(crate) Arc<CudaContext>);

impl Slabs for GpuSlabs {
    fn take(&self, bytes: u64) -> Result<Option<u64>, String> {
        bind(&self.0)?;
        let mut address = 0;
        // SAFETY: writes an address.
        match unsafe { sys::cuMemAlloc_v2(&mut address, bytes as usize) } {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Ok(None),
            result => check("cuMemAlloc", result).map(|()| Some(address)),
        }
    }

    fn give(&self, address: u64) {
        // SAFETY: made by `take`, and nothing that is queued uses it. A failure has nobody to tell.
        let _ = bind(&self.0).map(|()| unsafe { sys::cuMemFree_v2(address) });
    }
}

/// The us that work takes on a stream: the mean of several runs, after one that is not counted.
pub(crate) fn timed(stream: Stream, work: impl Fn() -> Result<(), String>) -> Result<f64, String> {
    const RUNS: u32 = 10;
    let event = || {
        let mut event = std::ptr::null_mut();
        // SAFETY: makes an event of the bound context.
        check("cuEventCreate", unsafe {
            sys::cuEventCreate(&mut event, sys::CUevent_flags::CU_EVENT_DEFAULT as u32)
        })?;
        Ok::<_, String>(event)
    };
    let (start, end) = (event()?, event()?);
    let stream = stream.0 as sys::CUstream;
    let mut ms = 0f32;
    // SAFETY: live handles; events are destroyed after they were waited for.
    let done = unsafe {
        work()
            .and_then(|()| check("cuEventRecord", sys::cuEventRecord(start, stream)))
            .and_then(|()| (0..RUNS).try_for_each(|_| work()))
            .and_then(|()| check("cuEventRecord", sys::cuEventRecord(end, stream)))
            .and_then(|()| check("cuEventSynchronize", sys::cuEventSynchronize(end)))
            .and_then(|()| {
                check(
                    "cuEventElapsedTime",
                    sys::cuEventElapsedTime_v2(&mut ms, start, end),
                )
            })
    };
    for event in [start, end] {
        // SAFETY: made above, used nowhere else.
        let _ = unsafe { sys::cuEventDestroy_v2(event) };
    }
    done.map(|()| f64::from(ms) * 1e3 / f64::from(RUNS))
}

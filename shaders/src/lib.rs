//! Every GPU kernel of anymesh, written once, and the backend that launches them on a CubeCL
//! client.
//!
//! A backend crate opens a device with `anymesh_launcher` and hands its client to
//! [`CubeBackend::new`]; everything else is here, one file per kernel family. `words` and `reg` say how
//! dtypes lie in memory and in registers, `program` expands map programs.

mod attention;
mod conv;
mod fault;
mod gather;
mod grouped;
mod hopper;
mod int;
mod intern;
mod map;
mod maps;
mod math;
mod matmul;
mod nvidia;
mod philox;
mod program;
mod reduce;
mod reg;
mod row;
mod row_program;
mod scan;
mod scatter;
mod search;
mod sort;
mod tile;
mod turn;
mod words;

use anymesh_kernel::{
    Backend, Buffer, Capabilities, DType, Error, Kernel, Result, View,
    backend::{BoxFuture, Buffers, Launch, List, Steps},
};
use cubecl::{bytes::Bytes, prelude::*, server::Handle};
use intern::Interner;
use smallvec::{SmallVec, smallvec};
use std::{any::Any, ops::Range, sync::Arc};

/// Buffers are padded to this many bytes, so that four elements of any dtype can be written at
/// once.
const PAD: usize = 32;

/// Device memory: a handle and its padded size in bytes.
#[derive(Clone)]
pub struct Memory {
    handle: Handle,
    bytes: usize,
    /// Whose drop gives the memory back.
    owner: Arc<dyn Any + Send + Sync>,
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Memory({} bytes)", self.bytes)
    }
}

impl Memory {
    /// Memory of an [`Arena`]: `bytes` behind a handle, given back when the last copy of `owner`
    /// is dropped. Kernels that were launched before then may still run.
    pub fn owned(handle: Handle, bytes: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self {
            handle,
            bytes,
            owner,
        }
    }

    /// The CubeCL handle. It does not keep the memory: this does.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// What gives the memory back.
    pub fn owner(&self) -> &Arc<dyn Any + Send + Sync> {
        &self.owner
    }

    /// Its size, padded.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The padded size of `elements` of `dtype`.
    pub fn padded(dtype: DType, elements: usize) -> usize {
        (elements * dtype.size()).next_multiple_of(PAD)
    }

    /// As a buffer that kernels take.
    pub fn buffer(self) -> Buffer {
        let bytes = self.bytes;
        Buffer::new(self, bytes)
    }
}

/// Where the memory of a device comes from.
pub trait Arena: Send + Sync {
    /// Memory of so many bytes, which are padded; contents undefined.
    fn alloc(&self, bytes: usize) -> Result<Memory>;

    /// Memory with these contents, which are padded.
    fn filled(&self, bytes: Vec<u8>) -> Result<Memory>;

    /// Memory with these contents, as [`filled`](Self::filled) gives: `old`, of the same size, which nobody
    /// but kernels that are queued uses any more, or other memory.
    fn refilled(&self, old: &Memory, bytes: Vec<u8>) -> Result<Memory>;

    /// Memory with these contents that kernels write in place: one that cannot be run leaves it as
    /// it was, and not as garbage.
    fn standing(&self, bytes: Vec<u8>) -> Result<Memory>;

    /// Where memory lies, on devices whose kernels reach all of it from any part of it.
    fn address(&self, memory: &Memory) -> Option<u64>;

    /// Tells of memory that the last kernel which wrote `done` also used, by its
    /// [address](Arena::address): what could not be run has made garbage of that too.
    fn reached(&self, done: &Memory, also: &[Reached<'_>]);
}

/// Memory that a kernel used without being given it, a part of its work for itself.
#[derive(Debug, Default)]
pub struct Reached<'a> {
    /// What it read.
    pub reads: SmallVec<[&'a Memory; 6]>,
    /// What it wrote, from that.
    pub writes: SmallVec<[&'a Memory; 4]>,
}

/// Makes calls of a device, some of them without CubeCL.
pub trait Repeats: Send + Sync {
    /// The buffers of a call, which `make` would make.
    fn launch(&self, kernel: &Kernel, make: &dyn Fn() -> Result<Buffers>) -> Result<Buffers>;

    /// See [`Backend::list`].
    fn list<'a>(&'a self, list: &List<'_>) -> Option<Box<dyn Steps + 'a>>;
}

/// The backend of every GPU.
pub struct CubeBackend {
    name: String,
    client: Client,
    arena: Arc<dyn Arena>,
    repeats: Option<Arc<dyn Repeats>>,
    capabilities: Capabilities,
    faults: Memory,
    /// The programs of kernels that were launched, as they are compiled.
    programs: Interner<program::MapPlan>,
    /// The same of row programs, and what sums of columns are stored as.
    row_programs: Interner<row_program::RowPlan>,
    dtype_lists: Interner<Vec<DType>>,
    /// Where the tensors of launches of many lie.
    tables: maps::Tables,
    /// How kernels find places by indices.
    indexings: Interner<gather::IndexPlan>,
    /// How tiles turn.
    turns: Interner<turn::Turn>,
    /// Counters for cubes that meet, on devices where they see each other's writes. A kernel leaves
    /// them as they were.
    tickets: Option<Memory>,
    /// Whether threads can exchange values in groups.
    planes: bool,
    /// Whether the device's own float functions are accurate.
    native: bool,
    /// The tensor cores that attention and products of groups may use.
    cores: Option<Cores>,
}

/// Instructions of NVIDIA's tensor cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cores {
    /// Those of GPUs from Ampere on, by which warps multiply.
    Mma,
    /// Those of Hopper's as well, by which warp groups let the cores multiply on their own.
    Wgmma,
}

impl CubeBackend {
    /// A backend on `client` with memory of its own. What the device can compute is read from the
    /// client; the caller adds what only it knows.
    pub fn new(
        name: String,
        client: Client,
        arena: Arc<dyn Arena>,
        description: String,
        software: bool,
        f64_math: bool,
        max_buffer_bytes: u64,
    ) -> Result<Self> {
        use cubecl::ir::{ElemType, FloatKind, IntKind, UIntKind};
        let has = |elem: ElemType| client.properties().supports_type(elem);
        let wide_ints = has(ElemType::Int(IntKind::I64)) && has(ElemType::UInt(UIntKind::U64));
        let doubles = has(ElemType::Float(FloatKind::F64)) && wide_ints;
        let dtypes = DType::ALL
            .into_iter()
            .filter(|dtype| match dtype {
                DType::I64 => wide_ints,
                DType::F64 => doubles,
                _ => true,
            })
            .collect();
        let planes = client
            .properties()
            .features
            .plane
            .contains(cubecl::features::Plane::Ops);
        let faults = arena.standing(vec![0; fault::WORDS * 4])?;
        // Kernels that write the same memory run one after the other there, so that all can have the
        // same counters.
        let tickets = match arena.address(&faults) {
            Some(_) if client.properties().features.device_memory_scope => {
                Some(arena.standing(vec![0; reduce::TICKETS * 4])?)
            }
            _ => None,
        };
        Ok(Self {
            name,
            arena,
            repeats: None,
            capabilities: Capabilities {
                dtypes,
                f64_math,
                max_buffer_bytes,
                max_buffers: anymesh_kernel::map::MAX_BUFFERS,
                software,
                description,
            },
            client,
            faults,
            programs: Interner::new(),
            row_programs: Interner::new(),
            dtype_lists: Interner::new(),
            tables: maps::Tables::default(),
            indexings: Interner::new(),
            turns: Interner::new(),
            tickets,
            planes,
            native: false,
            cores: None,
        })
    }

    /// Lets map programs use the device's own `exp`, `log`, `tanh` and `erf`, which are right to
    /// two ulp on CUDA and unspecified elsewhere.
    pub fn with_native_functions(mut self) -> Self {
        self.native = true;
        self
    }

    /// Says that a kernel may have more buffers than browsers let it have.
    pub fn with_buffers(mut self, most: usize) -> Self {
        self.capabilities.max_buffers = most;
        self
    }

    /// Lets somebody else make calls that were made before.
    pub fn with_repeats(mut self, repeats: impl Repeats + 'static) -> Self {
        self.repeats = Some(Arc::new(repeats));
        self
    }

    /// Lets attention and products of groups use tensor cores, if there are some.
    pub fn with_cores(mut self, cores: Option<Cores>) -> Self {
        self.cores = cores;
        self
    }

    /// Memory for `elements` of `dtype`, contents undefined.
    fn alloc(&self, dtype: DType, elements: usize) -> Result<Memory> {
        let bytes = Memory::padded(dtype, elements);
        let limit = self.capabilities.max_buffer_bytes;
        if bytes as u64 > limit {
            return Err(Error::TooLarge {
                device: self.name.clone(),
                bytes: bytes as u64,
                limit,
            });
        }
        self.arena.alloc(bytes)
    }

    fn failed(&self, detail: impl std::fmt::Display) -> Error {
        Error::DeviceFailed {
            device: self.name.clone(),
            detail: detail.to_string(),
        }
    }

    /// Reports and clears a fault found by an earlier kernel.
    fn check_faults(&self, bytes: &[u8]) -> Result<()> {
        let words: Vec<u32> = bytes
            .chunks_exact(4)
            .map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]]))
            .collect();
        match fault::decode(&words) {
            None => Ok(()),
            Some(error) => {
                self.client.write(
                    &self.faults.handle,
                    Bytes::from_bytes_vec(vec![0; fault::WORDS * 4]),
                );
                Err(error)
            }
        }
    }

    /// The fault buffer as a kernel argument.
    fn fault_arg(&self) -> BufferArg {
        // SAFETY: the length is the buffer's own.
        unsafe { BufferArg::from_raw_parts(self.faults.handle.clone(), fault::WORDS) }
    }

    /// The fault buffer for a kernel that writes it only if its program can fault. Bound where it
    /// is not needed it would order kernels that have nothing to do with each other.
    fn fault_if(&self, can_fault: bool) -> SequenceArg<Box<[u32]>> {
        can_fault.then(|| self.fault_arg()).into_iter().collect()
    }

    /// Launches what a call comes to.
    fn run(&self, kernel: &Kernel) -> Result<Buffers> {
        Ok(match kernel {
            Kernel::Map(call) => self.run_map(call)?,
            Kernel::Reduce(call) => smallvec![self.run_reduce(call)?],
            Kernel::Scan(call) => self.run_scan(call)?,
            Kernel::Matmul(call) => smallvec![self.run_matmul(call)?],
            Kernel::Grouped(call) => smallvec![self.run_grouped(call)?],
            Kernel::Gather(call) => smallvec![self.run_gather(call)?],
            Kernel::CheckIndex(call) => {
                self.run_check_index(call)?;
                smallvec![]
            }
            Kernel::Scatter(call) => smallvec![self.run_scatter(call)?],
            Kernel::Search(call) => smallvec![self.run_search(call)?],
            Kernel::Sort(call) => smallvec![self.run_sort(call)?],
            Kernel::Conv(call) => smallvec![self.run_conv(call)?],
            Kernel::Row(call) => self.run_row(call)?,
            Kernel::RowProgram(call) => self.run_row_program(call)?,
            Kernel::Attention(call) => self.run_attention(call)?.into_iter().collect(),
            Kernel::AttentionBackward(call) => self.run_attention_backward(call)?,
        })
    }

    /// The error for a fused kernel that [`supports`](Backend::supports) did not promise.
    fn not_supported(&self, kernel: &Kernel) -> Error {
        Error::Unsupported {
            device: self.name.clone(),
            what: format!("this {} by one kernel", kernel.op()),
            hint: "compose it of other ops".into(),
        }
    }
}

impl std::fmt::Debug for CubeBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CubeBackend({})", self.name)
    }
}

/// The memory behind a view.
fn memory(view: &View) -> Result<&Memory> {
    view.buffer.get()
}

/// A buffer as a kernel argument of elements of `size` bytes.
fn arg(memory: &Memory, size: usize) -> BufferArg {
    // SAFETY: the length is the buffer's own.
    unsafe { BufferArg::from_raw_parts(memory.handle.clone(), memory.bytes / size) }
}

/// Enough cubes of `per_cube` threads for `threads`, spread over two grid dimensions; kernels guard
/// the tail.
fn cubes(threads: usize, per_cube: u32) -> CubeCount {
    let n = threads.div_ceil(per_cube as usize);
    let x = n.clamp(1, 65535);
    CubeCount::Static(x as u32, n.div_ceil(x) as u32, 1)
}

impl Backend for CubeBackend {
    fn name(&self) -> &str {
        &self.name
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn upload(&self, bytes: &[u8]) -> Result<Buffer> {
        let mut data = Vec::with_capacity(bytes.len().next_multiple_of(PAD));
        data.extend_from_slice(bytes);
        data.resize(data.capacity(), 0);
        Ok(self.arena.filled(data)?.buffer())
    }

    fn download<'a>(
        &'a self,
        buffer: &'a Buffer,
        range: Range<usize>,
    ) -> BoxFuture<'a, Result<Vec<u8>>> {
        Box::pin(async move {
            let memory = buffer.get::<Memory>()?;
            // Copies want aligned bounds.
            let (start, end) = (range.start / PAD * PAD, range.end.next_multiple_of(PAD));
            let part = memory
                .handle
                .clone()
                .offset_start(start as u64)
                .offset_end((memory.bytes - end) as u64);
            let mut read = self
                .client
                .read_async(vec![part, self.faults.handle.clone()])
                .await
                .map_err(|e| self.failed(e))?;
            self.check_faults(&read[1])?;
            let bytes = read.swap_remove(0);
            Ok(bytes[range.start - start..range.end - start].to_vec())
        })
    }

    fn sync(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let read = self
                .client
                .read_async(vec![self.faults.handle.clone()])
                .await
                .map_err(|e| self.failed(e))?;
            self.client.sync().await.map_err(|e| self.failed(e))?;
            self.check_faults(&read[0])
        })
    }

    fn supports(&self, kernel: &Kernel) -> bool {
        match kernel {
            Kernel::Matmul(call) => !call.is_fused(),
            Kernel::Row(call) => row::fits(call),
            Kernel::RowProgram(call) => row_program::fits(call),
            Kernel::Attention(call) => attention::fits(call),
            Kernel::AttentionBackward(call) => attention::fits_backward(call),
            _ => true,
        }
    }

    fn launch(&self, kernel: Kernel) -> Result<Buffers> {
        if !self.supports(&kernel) {
            return Err(self.not_supported(&kernel));
        }
        match &self.repeats {
            Some(repeats) => repeats.launch(&kernel, &|| self.run(&kernel)),
            None => self.run(&kernel),
        }
    }

    fn list<'a>(&'a self, list: &List<'_>) -> Option<Box<dyn Steps + 'a>> {
        self.repeats.as_ref()?.list(list)
    }

    fn launch_all(&self, mut launches: Vec<Launch>) -> Result<Vec<Buffers>> {
        launches.iter_mut().for_each(Launch::keep_sole);
        let mut given: Vec<Option<Buffers>> = vec![None; launches.len()];
        for group in self.groups(&launches)? {
            for (member, buffers) in group.iter().zip(self.run_maps(&group)?) {
                given[member.position] = Some(buffers);
            }
        }
        if given.iter().all(Option::is_some) {
            return Ok(given.into_iter().flatten().collect());
        }
        let rest = launches.into_iter().zip(given);
        rest.map(|(launch, given)| given.map_or_else(|| self.launch(launch.kernel), Ok))
            .collect()
    }
}

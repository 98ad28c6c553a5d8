//! Deferred execution: a device around a device.
//!
//! [`deferred`] gives a device that computes nothing when a kernel is launched. It writes the launch
//! down and hands out a buffer that waits. When somebody reads, or enough was written down, it looks
//! at all of it at once: elementwise kernels that feed each other become one, results that nobody can
//! read any more need no memory, and the rest runs as it stands. On devices that compile kernels that
//! is done when such a list comes for the second time ([`Options::first`]). Nothing above a device
//! notices, but for the time.
//!
//! ```
//! use anymesh_kernel::{DType, Layout, MapProgram, View, backend::{MapCall, MapInput}, map::Builder};
//! # use smallvec::smallvec;
//! let device = anymesh_engine::deferred(&anymesh_backend_cpu::device());
//! let twice = |x: &View| {
//!     let b = Builder::new();
//!     let program = b.finish(&[(b.load(DType::F32) * 2.0, DType::F32)])?;
//!     let call = MapCall {
//!         op: "twice",
//!         program,
//!         shape: x.layout.shape.clone(),
//!         inputs: smallvec![MapInput { view: x.clone(), window: None }],
//!         indices: smallvec![],
//!         params: smallvec![],
//!         over: Default::default(),
//!     };
//!     Ok::<View, anymesh_kernel::Error>(device.launch(call)?.swap_remove(0))
//! };
//! let x = View {
//!     buffer: device.upload(&1.5f32.to_le_bytes())?,
//!     dtype: DType::F32,
//!     layout: Layout::contiguous([1].into()),
//! };
//! let y = twice(&twice(&x)?)?; // nothing was computed so far, and the device below sees one launch
//! let bytes = pollster::block_on(device.backend().download(&y.buffer, 0..4))?;
//! assert_eq!(bytes, 6f32.to_le_bytes());
//! # Ok::<(), anymesh_kernel::Error>(())
//! ```
//!
//! # What is promised
//! - **The bits of the unfused program.** Every value that was stored is rounded as if it had been,
//!   reductions keep their order, elements that are only moved keep their bits, and on devices that
//!   compile programs [fences](anymesh_kernel::map::Inst::Fence) keep the compiler from contracting
//!   across what were kernels of their own.
//! - **Faults in order.** Kernels that may fault (an index, an integer division) run even if nobody
//!   reads their results, in the order of the program, unfused.
//! - **Errors where they belong.** What fails when it runs is an error of its results and of all that
//!   is computed from them, and the next read or sync reports the first one. Everything else goes on.
//! - **Memory.** An operand is let go when the last kernel that waits for it has run; on GPUs [so many
//!   launches and bytes](Options::lag) later.
//! - **Bounds.** Plans are kept in a cache of bounded size, and one flush makes only so many programs
//!   that were not seen before; what is beyond runs unfused.
//!
//! # Parts
//! `queue.rs` writes down and flushes. `graph.rs` is the flushed list as a graph of values, and the
//! key that finds its plan again. `groups.rs` decides what becomes one kernel, `casts.rs` which conversions row kernels make themselves, `recipes.rs` which values are left to the next list, `coordinates.rs` moves
//! views from one space of positions into another, `program.rs` joins programs, `rows.rs` makes row programs of reductions and what is around them, `plan.rs` puts
//! everything in order: a [list of launches](plan::Plan) as data, `over.rs` says which results take the
//! memory of an operand. `run.rs` makes them.

#![forbid(unsafe_code)]

mod cache;
mod casts;
mod coordinates;
mod graph;
mod groups;
mod over;
mod plan;
mod program;
mod queue;
mod recipes;
mod rows;
mod run;
mod value;

use anymesh_kernel::{
    Device,
    map::{MAX_BUFFERS, MAX_INPUTS, MAX_OUTPUTS},
};

/// How much is put off, and how it is fused.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Launches that wait before they run without being asked for.
    pub launches: usize,
    /// After a read, at first run after fewer launches, so that a device that works beside the host
    /// has something to do.
    pub ramp: bool,
    /// Bytes of results that wait before they run without being asked for.
    pub bytes: u64,
    /// Whether the device compiles programs: joined ones get
    /// [fences](anymesh_kernel::map::Inst::Fence), and what is new costs time.
    pub compiles: bool,
    /// Whether the device runs softmax, norms and [reductions of rows](anymesh_kernel::backend::ReduceCall::as_rows)
    /// as [row programs](anymesh_kernel::backend::RowProgram): these then make conversions around them
    /// themselves, and reductions of the same rows become one with what is around them.
    pub rows: bool,
    /// Buffers that a joined program may read and write.
    pub buffers: usize,
    /// Programs that one flush may have made anew, where the device compiles them.
    pub new_programs: usize,
    /// Bytes that operands may stay longer for one fused kernel than without it.
    pub slack: u64,
    /// Launches after which memory that a list needs no more is given back, as long as that is no more
    /// than so many bytes: what is taken at once by others makes these wait for its last reader, where
    /// a device could run both beside each other.
    pub lag: (usize, u64),
    /// Bytes from which on a value that is held, but was read by no launch yet, may be left to be made
    /// where it is read, of values that are no larger together.
    pub recipes: u64,
    /// Bytes of plans that are kept.
    pub plans: usize,
    /// Whether a list is fused the first time it comes, too. What never comes again costs more to plan,
    /// and to compile for, than it gains.
    pub first: bool,
}

impl Options {
    /// For a device that computes on the host while it is called.
    pub fn host() -> Self {
        Self {
            launches: 512,
            ramp: false,
            bytes: 1 << 30,
            compiles: false,
            rows: false,
            buffers: MAX_BUFFERS,
            new_programs: usize::MAX,
            slack: 32 << 20,
            lag: (0, 0),
            recipes: u64::MAX,
            plans: 64 << 20,
            first: true,
        }
    }

    /// For a device that compiles kernels and runs them beside the host.
    pub fn gpu() -> Self {
        Self {
            launches: 256,
            ramp: true,
            bytes: 64 << 30,
            compiles: true,
            rows: true,
            buffers: MAX_BUFFERS,
            new_programs: 64,
            slack: 256 << 20,
            lag: (16, 256 << 20),
            recipes: 1 << 20,
            plans: 64 << 20,
            first: false,
        }
    }

    /// For this device: by whether its memory is the host's, and by how many buffers a kernel may have.
    pub fn of(device: &Device) -> Self {
        let options = match device.runs_kernels() {
            true => Self::gpu(),
            false => Self::host(),
        };
        Self {
            buffers: device.backend().capabilities().max_buffers,
            ..options
        }
    }

    /// Inputs and outputs that a joined program may have.
    pub(crate) fn most(&self) -> (usize, usize) {
        let more = self.buffers.saturating_sub(MAX_BUFFERS);
        (MAX_INPUTS + more / 2, MAX_OUTPUTS + more / 4)
    }
}

/// A device that puts off the launches of `device` until somebody reads. Tensors of the two do not
/// mix: results of this one are read here.
pub fn deferred(device: &Device) -> Device {
    deferred_with(device, Options::of(device))
}

/// [`deferred`], with options.
pub fn deferred_with(device: &Device, options: Options) -> Device {
    Device::new(queue::Deferred::new(device, options))
}

//! What a backend does: hold buffers, and run kernels on them.
//!
//! A launch is a value: a [`Kernel`] owns what it reads, and says without running what it gives and
//! what it does besides. Decorators, recorders and devices without memory need nothing else.
//!
//! Kernels arrive validated: shapes fit, dtypes are among [`Capabilities`], no operand is empty. A
//! backend never sees a zero-element tensor and never allocates on behalf of the caller's mistake.
//! Every output is a fresh dense buffer in row-major order, so kernels write without looking at
//! strides. An element that is only moved keeps its bits, also those of a NaN: through a map program
//! that computes nothing with it ([`MapProgram::moved`]), a gather, a scatter that sets.
//! Data-dependent faults (an index out of range, an integer divided by zero) may be found only later
//! by a GPU; they are returned by the next `download` or `sync`.

mod buffer;
mod elementwise;
mod form;
mod fused;
mod index;
mod kernel;
mod list;
mod norm_gradient;
mod product;
mod row_call;
mod row_program;
mod row_reduce;
mod work;

pub(crate) use buffer::Meter;
pub use buffer::{Buffer, Buffers, MemoryUse, View, Views};
pub use elementwise::{Affine, MapCall, MapInput, Over, ReduceCall, ReduceOp, ScanCall, ScanOp};
pub use form::Form;
pub use fused::{AttentionBackwardCall, AttentionCall, AttentionOrder, RowCall, RowOp};
pub use index::{
    CheckIndexCall, GatherCall, IndexAxis, ScatterCall, ScatterOp, SearchCall, SortCall,
};
pub use kernel::{Effects, Kernel, OutputTypes};
pub use list::{List, Operands, Steps, Wanted};
pub use norm_gradient::{NormGradient, NormPosition};
pub use product::{Addend, ConvCall, GroupedCall, GroupedOp, MatmulCall};
pub use row_call::Repeat;
pub use row_program::{RowArgs, RowBuilder, RowFold, RowProgram, RowProgramCall};
pub use row_reduce::in_rows;
pub use work::Work;

use crate::{DType, Device, Result};
use smallvec::SmallVec;
use std::{fmt::Debug, future::Future, ops::Range, pin::Pin};

/// A future that a backend returns. It can change threads where there are threads.
#[cfg(not(target_family = "wasm"))]
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;
/// A future that a backend returns.
#[cfg(target_family = "wasm")]
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// Memory of the host that is to be a buffer. See [`Backend::host_memory`].
pub trait HostMemory: Debug + Send {
    /// All of it, with any contents.
    fn bytes(&mut self) -> &mut [u8];

    /// The buffer.
    fn into_buffer(self: Box<Self>) -> Buffer;
}

/// What a device can do. Asked before any launch, so that what is missing is a typed error and not
/// a driver's.
#[derive(Clone, Debug)]
pub struct Capabilities {
    /// Dtypes that can be stored and computed with.
    pub dtypes: Vec<DType>,
    /// Whether transcendental functions exist for `f64`.
    pub f64_math: bool,
    /// The largest buffer one kernel can address, in bytes.
    pub max_buffer_bytes: u64,
    /// How many buffers one kernel can read and write: at least [`MAX_BUFFERS`](crate::map::MAX_BUFFERS).
    pub max_buffers: usize,
    /// Whether this is a CPU pretending to be a GPU.
    pub software: bool,
    /// Hardware, driver and API in words.
    pub description: String,
}

/// A device that runs kernels. See the module's text for what it may rely on.
///
/// Programs launch through a [`Device`](crate::Device), which checks, counts and measures. A backend
/// that differs from another only in its launches is made by
/// [`Device::decorated`](crate::Device::decorated).
pub trait Backend: Debug + Send + Sync {
    /// A short name a user can select the device by, such as `cpu` or `wgpu:llvmpipe`.
    fn name(&self) -> &str;

    /// What the device can do.
    fn capabilities(&self) -> &Capabilities;

    /// A buffer with these bytes.
    fn upload(&self, bytes: &[u8]) -> Result<Buffer>;

    /// A buffer of this size with nothing in it, on a backend whose tensors have types and no
    /// values; `None` on every other. What runs on such a device is the same on all ranks that hold
    /// parts of one size, so that one of them stands for all.
    fn placeholder(&self, _bytes: usize) -> Option<Buffer> {
        None
    }

    /// The bytes of a buffer, and any fault of earlier kernels.
    fn download<'a>(
        &'a self,
        buffer: &'a Buffer,
        bytes: Range<usize>,
    ) -> BoxFuture<'a, Result<Vec<u8>>>;

    /// The bytes of a buffer where they are, on devices whose memory the host can read at any time.
    fn in_place<'b>(&self, _buffer: &'b Buffer) -> Option<&'b [u8]> {
        None
    }

    /// Host memory of this size that becomes a buffer without another copy once it is filled, where
    /// the device's memory is the host's; `None` where bytes are [uploaded](Backend::upload).
    fn host_memory(&self, _bytes: usize) -> Result<Option<Box<dyn HostMemory>>> {
        Ok(None)
    }

    /// The device that does the work, where this backend is around another one: its memory and its
    /// launches are the ones there are.
    fn inner(&self) -> Option<&Device> {
        None
    }

    /// The buffer that the backend at the bottom made, which has its own type in it: for code that
    /// works on a device's memory beside its kernels. What was put off is done first.
    fn resolve(&self, buffer: &Buffer) -> Result<Buffer> {
        Ok(buffer.clone())
    }

    /// Waits until everything queued is done; returns any fault.
    fn sync(&self) -> BoxFuture<'_, Result<()>>;

    /// Whether this very kernel can be launched. Asked before a [fused](Kernel::is_fused) one, which
    /// is composed of others where the answer is no; every backend runs the others.
    fn supports(&self, kernel: &Kernel) -> bool {
        !kernel.is_fused()
    }

    /// Queues a kernel; a buffer for each of its [outputs](Kernel::outputs).
    fn launch(&self, kernel: Kernel) -> Result<Buffers>;

    /// A list of launches begins, which ends with what is returned: launches in between may wait
    /// until then, so that a device can queue them as one, and lists that came before it may make
    /// again without being given each launch. What is read is there all the same. Nothing on devices
    /// that have no use for lists.
    fn list<'a>(&'a self, _list: &List<'_>) -> Option<Box<dyn Steps + 'a>> {
        None
    }

    /// Whether nobody holds memory but a tensor and the caller, or the device will see to that: where
    /// launches wait they hold their operands, too.
    fn is_sole(&self, buffer: &Buffer) -> bool {
        buffer.handles() == 2
    }

    /// Queues kernels of which none reads what another one gives; the buffers of each, in order and
    /// with the same bits as from a launch of its own. A device may make fewer launches of them:
    /// the same map over many tensors can be one.
    fn launch_all(&self, launches: Vec<Launch>) -> Result<Vec<Buffers>> {
        launches
            .into_iter()
            .map(|launch| self.launch(launch.kernel))
            .collect()
    }
}

/// A kernel that is launched together with others, and memory that its results may take.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The kernel.
    pub kernel: Kernel,
    /// Results and memory that they may be written to, whose values the caller will not read any
    /// more. The kernel reads each of its elements, if at all, only to compute the one that takes
    /// its place. A backend may take other memory, and must where this is not [sole](Self::keep_sole).
    pub over: SmallVec<[(usize, Buffer); 4]>,
}

impl From<Kernel> for Launch {
    fn from(kernel: Kernel) -> Self {
        let over = SmallVec::new();
        Self { kernel, over }
    }
}

impl Launch {
    /// Forgets memory that somebody else holds: beside the handle that the caller gives up, this
    /// one, and those of the kernel's operands.
    pub fn keep_sole(&mut self) {
        if self.over.is_empty() {
            return;
        }
        let operands: SmallVec<[&View; 6]> = self.kernel.operands().collect();
        self.over.retain(|(_, memory)| {
            let operands = operands.iter().filter(|view| view.buffer.same(memory));
            memory.handles() == 2 + operands.count()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Layout};

    #[test]
    fn memory_that_somebody_else_holds_is_not_given_up() {
        let (own, shared) = (Buffer::new((), 8), Buffer::new((), 8));
        let somebody = shared.clone();
        let input = View {
            buffer: own.clone(),
            dtype: DType::U8,
            layout: Layout::contiguous([8].into()),
        };
        let mut launch = Launch::from(Kernel::from(SortCall {
            op: "argsort",
            input,
            descending: false,
        }));
        launch.over = smallvec::smallvec![(0, own.clone()), (1, shared.clone())];
        launch.keep_sole();
        assert_eq!(launch.over.len(), 1);
        assert!(launch.over[0].1.same(&own));
        drop(somebody);
        launch.over = smallvec::smallvec![(0, shared.clone()), (1, shared.clone())];
        launch.keep_sole();
        assert_eq!(launch.over.len(), 1, "one of two results can have it");
    }
}

//! Matrix products by cuBLASLt, on the stream of the kernels.
//!
//! What the library needs to know of a problem is made once and kept in a table; a product is then a
//! lookup and a call, which the thread that launches makes.
//!
//! cuBLASLt is column-major; a row-major product `A B` is the column-major product `B' A'` of the
//! same memory.

mod plan;
mod tuned;

use crate::stream::{check, timed};
use anymesh_kernel::{
    Backend, Buffer, DType, Device, Error, Kernel, Layout, MapProgram, Result, View,
    backend::{GroupedCall, GroupedOp, MapCall, MapInput, MatmulCall},
};
use anymesh_launcher::{Engine, Stream, place};
use anymesh_shaders::{Arena, Memory};
use cudarc::{
    cublaslt::{
        result as lt,
        sys::{self, cublasLtMatmulDescAttributes_t as Attribute},
    },
    driver::{CudaContext, sys as driver},
};
use plan::{
    Algorithm, CHOICES, Problem, ProductPlan, WORKSPACE, alignment, has_product,
    has_scaled_product, matrix, problem,
};
use smallvec::smallvec;
use std::{
    collections::HashMap,
    ffi::c_void,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};
use tuned::Tuned;

/// How many problems are kept; a program with more of them has new ones all the time.
const MOST: usize = 4096;

/// The library on one GPU, and what it has been asked for.
#[derive(Debug)]
struct CublasLt {
    engine: Engine,
    library: Arc<Library>,
    /// What was chosen for each problem; nothing where the library cannot.
    table: Mutex<HashMap<Problem, Option<Arc<Ready>>>>,
    /// What was found to be faster than the library's first choice.
    tuned: Tuned,
}

/// What a product reads beside its factors, by address.
#[derive(Clone, Copy, Debug, Default)]
struct Beside {
    /// Of the left and of the right factor.
    scales: Option<[u64; 2]>,
    bias: Option<u64>,
    /// What it is added to; may be where the result goes.
    addend: Option<u64>,
}

/// The library's state.
#[derive(Debug)]
struct Library {
    context: Arc<CudaContext>,
    handle: sys::cublasLtHandle_t,
    workspace: driver::CUdeviceptr,
}

// SAFETY: the library's handle may be used from any thread; the workspace is used on one stream
// only.
unsafe impl Send for Library {}
unsafe impl Sync for Library {}

/// A problem with everything a product of it needs but addresses.
struct Ready {
    problem: Problem,
    plan: ProductPlan,
    /// What it is computed by, and what else the library would compute it by.
    algorithm: Algorithm,
    choices: Vec<Algorithm>,
}

// SAFETY: descriptors that nobody changes any more.
unsafe impl Send for Ready {}
unsafe impl Sync for Ready {}

impl std::fmt::Debug for Ready {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ready({:?})", self.problem)
    }
}

impl Library {
    fn new(context: &Arc<CudaContext>) -> Result<Self, String> {
        // SAFETY: only tries to open the library.
        if !unsafe { sys::is_culib_present() } {
            return Err("libcublasLt was not found".into());
        }
        context.bind_to_thread().map_err(|e| e.to_string())?;
        let handle = lt::create_handle().map_err(|e| e.to_string())?;
        let mut workspace = 0;
        // SAFETY: a plain allocation in the bound context, released in `drop`.
        check("cuMemAlloc", unsafe {
            driver::cuMemAlloc_v2(&mut workspace, WORKSPACE)
        })?;
        Ok(Self {
            context: context.clone(),
            handle,
            workspace,
        })
    }

    /// What the library needs for a problem, or `None` where it cannot. Of its first algorithms, at
    /// most so many, it takes the one with the number `choice`, or the first.
    fn ready(
        &self,
        problem: &Problem,
        choice: usize,
        most: usize,
    ) -> Result<Option<Ready>, String> {
        self.context.bind_to_thread().map_err(|e| e.to_string())?;
        let plan = ProductPlan::new(problem)?;
        let choices = plan.choices(self.handle, problem, most)?;
        let algorithm = choices.get(choice).or(choices.first()).copied();
        Ok(algorithm.map(|algorithm| Ready {
            problem: *problem,
            plan,
            algorithm,
            choices,
        }))
    }

    /// Queues one product.
    fn multiply(
        &self,
        ready: &Ready,
        addresses: [u64; 3],
        beside: Beside,
        stream: Stream,
    ) -> Result<(), String> {
        self.multiply_by(ready, &ready.algorithm, addresses, beside, stream)
    }

    /// Queues one product by one of the library's algorithms.
    fn multiply_by(
        &self,
        ready: &Ready,
        algorithm: &Algorithm,
        [a, b, out]: [u64; 3],
        beside: Beside,
        stream: Stream,
    ) -> Result<(), String> {
        let plan = &ready.plan;
        // All of a descriptor that changes; only the thread that launches gets here.
        if let Some(bias) = beside.bias {
            plan.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
        }
        if let Some([left, right]) = beside.scales {
            plan.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &right)?;
            plan.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &left)?;
        }
        let added = f32::from(u8::from(beside.addend.is_some()));
        let (one, beta) = (1f32, added);
        let (one64, beta64) = (1f64, f64::from(added));
        let (alpha, beta): (*const c_void, *const c_void) = match ready.problem.dtype {
            DType::F64 => ((&raw const one64).cast(), (&raw const beta64).cast()),
            _ => ((&raw const one).cast(), (&raw const beta).cast()),
        };
        // SAFETY: operands and result are in place until this is queued, which is all that the
        // memory of one stream needs; descriptors live until the end of the call.
        unsafe {
            lt::matmul(
                self.handle,
                plan.matmul,
                alpha,
                beta,
                b as *const c_void,
                plan.layouts[0],
                a as *const c_void,
                plan.layouts[1],
                beside.addend.unwrap_or(out) as *const c_void,
                plan.layouts[2],
                out as *mut c_void,
                plan.layouts[2],
                &algorithm.algorithm,
                self.workspace as *mut c_void,
                WORKSPACE,
                stream.0 as _,
            )
            .map_err(|e| format!("cuBLASLt: {e}"))
        }
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: made in `new`, used nowhere else. A failure at the end of the process has nobody
        // to tell.
        unsafe {
            let _ = self.context.bind_to_thread();
            let _ = driver::cuMemFree_v2(self.workspace);
            let _ = lt::destroy_handle(self.handle);
        }
    }
}

/// Whether the library may compute a product that is more than one, on any GPU: no scales, and a bias
/// that is of the dtype of factors and result. It adds to wide sums that lie as the result does; for
/// narrow ones its kernels may round what they add first.
fn has_fused(call: &MatmulCall) -> bool {
    let dtype = call.a.dtype;
    let floats = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    let same = |bias: &View| floats && bias.dtype == dtype && call.dtype == dtype;
    call.scales.is_none()
        && call.bias.as_ref().is_none_or(same)
        && (call.addend.is_none() || call.dtype.size() >= 4 && has_product(dtype, call.dtype))
}

/// [`has_fused`] on a GPU with tensor cores for 8-bit floats. These want operands that are dense
/// along the dimension that is summed over, in steps of 16 bytes.
fn has_fused_or_scaled(call: &MatmulCall) -> bool {
    if call.scales.is_none() {
        return has_fused(call);
    }
    let even = |layout: &Layout, inner: usize| {
        let strides = layout.strides.iter().enumerate();
        let steps = strides.filter(|(d, _)| *d != inner && layout.shape[*d] != 1);
        layout.strides[inner] == 1
            && layout.shape[inner] % 16 == 0
            && layout.offset % 16 == 0
            && steps.map(|(_, step)| step).all(|step| step % 16 == 0)
    };
    let (a, b) = (&call.a.layout, &call.b.layout);
    let rank = a.shape.rank();
    has_scaled_product([call.a.dtype, call.b.dtype], call.dtype)
        && call.bias.is_none()
        && call.addend.is_none()
        && even(a, rank - 1)
        && even(b, rank - 2)
        && b.shape[rank - 1] % 16 == 0
}

/// Operations of a product from which on an operand that the library cannot read is copied for it.
const WORTH_A_COPY: f64 = (1u64 << 27) as f64;

/// A large product with copies of the operands that the library cannot read as they lie, such as heads
/// that are parts of one tensor: their batch dimensions are no one step apart. `None` where it reads
/// both, or the product is not worth it.
fn with_copies(portable: &dyn Backend, call: &MatmulCall) -> Result<Option<MatmulCall>> {
    let work = Kernel::from(call.clone()).work();
    let read = |view: &View| matrix(&view.layout, 0, view.dtype.size()).is_some();
    if work.products < WORTH_A_COPY || read(&call.a) && read(&call.b) {
        return Ok(None);
    }
    let copy = |view: &View| -> Result<View> {
        if read(view) {
            return Ok(view.clone());
        }
        // In the order in which the matrices lie: the library turns them as it reads.
        let rank = view.layout.shape.rank();
        let mut order: Vec<usize> = (0..rank).collect();
        if view.layout.strides[rank - 2] == 1 {
            order.swap(rank - 2, rank - 1);
        }
        let layout = view.layout.permute(&order);
        let shape = layout.shape.clone();
        let input = MapInput {
            view: View {
                layout,
                ..view.clone()
            },
            window: None,
        };
        let copy = MapCall {
            op: call.op,
            program: MapProgram::cast(view.dtype, view.dtype),
            shape: shape.clone(),
            inputs: smallvec![input],
            indices: smallvec![],
            params: smallvec![],
            over: Default::default(),
        };
        Ok(View {
            buffer: portable.launch(copy.into())?.swap_remove(0),
            dtype: view.dtype,
            layout: Layout::contiguous(shape).permute(&order),
        })
    };
    Ok(Some(MatmulCall {
        a: copy(&call.a)?,
        b: copy(&call.b)?,
        ..call.clone()
    }))
}

/// The address of something dense and the memory that it is in; nothing where the library cannot read
/// it.
fn place_of_dense(dense: &View) -> Result<Option<(u64, Range<u64>)>> {
    let place = place(dense.buffer.get()?);
    let at = place.start + (dense.layout.offset * dense.dtype.size()) as u64;
    let readable = dense.layout.is_contiguous() && alignment(at) >= 16;
    Ok(readable.then_some((at, place)))
}

/// The address of a number and the memory that it is in.
fn place_of_number(number: &View) -> Result<(u64, Range<u64>)> {
    let place = place(number.buffer.get()?);
    let at = place.start + (number.layout.offset * number.dtype.size()) as u64;
    Ok((at, place))
}

impl CublasLt {
    /// What is needed for a problem, kept from the first time on.
    fn known(
        &self,
        problem: &Problem,
        addresses: [u64; 3],
        beside: Beside,
    ) -> Result<Option<Arc<Ready>>> {
        let table = || self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = table().get(problem) {
            return Ok(known.clone());
        }
        let choice = self.tuned.choice(problem);
        let measures = choice.is_none() && self.tuned.measures();
        // A number of the table is one of all that were compared.
        let most = if measures || choice.is_some() {
            CHOICES
        } else {
            1
        };
        let made = self.library.ready(problem, choice.unwrap_or(0), most);
        let mut made = made.map_err(failed)?;
        if let (Some(ready), true) = (&mut made, measures) {
            self.tune(ready, addresses, beside)?;
        }
        let made = made.map(Arc::new);
        let mut table = table();
        if table.len() >= MOST {
            table.clear();
        }
        table.insert(*problem, made.clone());
        Ok(made)
    }

    /// Times all algorithms for a problem with its operands, and keeps the fastest.
    fn tune(&self, ready: &mut Ready, addresses: [u64; 3], beside: Beside) -> Result<()> {
        let library = &self.library;
        let times = self.engine.on_stream(|stream| {
            let time = |algorithm| {
                timed(stream, || {
                    library.multiply_by(ready, algorithm, addresses, beside, stream)
                })
            };
            Ok(ready.choices.iter().map(time).collect::<Vec<_>>())
        });
        let times = times.map_err(failed)?;
        let best = self.tuned.keep(&ready.problem, &times)?;
        ready.algorithm = ready.choices[best];
        Ok(())
    }

    fn alloc(&self, dtype: DType, elements: usize) -> Result<Memory> {
        self.engine.arena().alloc(Memory::padded(dtype, elements))
    }

    /// The product, or `None` where the library has no way to compute it.
    fn product(&self, call: &MatmulCall) -> Result<Option<Buffer>> {
        let dtype = call.a.dtype;
        let known = match &call.scales {
            Some(_) => has_scaled_product([dtype, call.b.dtype], call.dtype),
            None => has_product(dtype, call.dtype),
        };
        if !known {
            return Ok(None);
        }
        let scales = match &call.scales {
            Some(scales) => Some([place_of_number(&scales[0])?, place_of_number(&scales[1])?]),
            None => None,
        };
        let bias = match &call.bias {
            Some(bias) => match place_of_dense(bias)? {
                Some(place) => Some(place),
                None => return Ok(None),
            },
            None => None,
        };
        let (shape_a, shape_b) = (&call.a.layout.shape, &call.b.layout.shape);
        let rank = shape_a.rank();
        let batch: usize = shape_a.dims()[..rank - 2].iter().product();
        let (m, n) = (shape_a[rank - 2], shape_b[rank - 1]);
        let addend = match &call.addend {
            Some(addend) => match place_of_dense(&addend.view)? {
                Some(place) => Some(place),
                None => return Ok(None),
            },
            None => None,
        };
        // What is measured is computed several times, and must not add to what it wrote.
        let bytes = Memory::padded(call.dtype, batch * m * n);
        let taken = (call.addend.as_ref())
            .filter(|addend| addend.over && !self.tuned.measures())
            .map(|addend| &addend.view)
            .filter(|view| view.layout.offset == 0 && view.buffer.bytes() == bytes as u64);
        let out = match taken {
            Some(view) => view.buffer.get::<Memory>()?.clone(),
            None => self.alloc(call.dtype, batch * m * n)?,
        };
        let [a_at, b_at, out_at] = [call.a.buffer.get()?, call.b.buffer.get()?, &out].map(place);
        let types = (dtype, call.dtype);
        let Some((mut problem, addresses)) = problem(
            types,
            (&call.a.layout, a_at.start),
            (&call.b.layout, b_at.start),
            out_at.start,
        ) else {
            return Ok(None);
        };
        problem.biased = bias.is_some();
        problem.right = call.b.dtype;
        let beside = Beside {
            scales: scales.as_ref().map(|[left, right]| [left.0, right.0]),
            bias: bias.as_ref().map(|(at, _)| *at),
            addend: addend.as_ref().map(|(at, _)| *at),
        };
        let Some(ready) = self.known(&problem, addresses, beside)? else {
            return Ok(None);
        };
        let library = self.library.clone();
        let workspace = library.workspace..library.workspace + ready.algorithm.workspace as u64;
        let [a, b, to] = addresses;
        self.engine.product(anymesh_launcher::Library {
            identity: [
                Arc::as_ptr(&ready) as u64,
                a,
                b,
                to,
                beside.bias.unwrap_or(0),
                beside.addend.unwrap_or(0),
                beside.scales.map_or(0, |scales| scales[0]),
                beside.scales.map_or(0, |scales| scales[1]),
            ],
            reads: [a_at, b_at]
                .into_iter()
                .chain(
                    scales
                        .into_iter()
                        .flatten()
                        .chain(bias)
                        .chain(addend)
                        .map(|(_, place)| place),
                )
                .collect(),
            writes: out_at,
            workspace: (!workspace.is_empty()).then_some(workspace),
            work: Box::new(move |stream| library.multiply(&ready, addresses, beside, stream)),
        });
        Ok(Some(match taken {
            Some(view) => view.buffer.clone(),
            None => out.buffer(),
        }))
    }

    /// A product for each group of rows, or `None` where the portable kernels do better: where groups
    /// are small, or many. Where groups end is read first, so the host waits for what is queued.
    fn grouped(&self, call: &GroupedCall) -> Result<Option<Buffer>> {
        let (dtype, groups) = (call.a.dtype, call.groups());
        let [n, k, m] = call.sizes();
        let each = 2.0 * (n * k * m) as f64 / groups as f64;
        // Tensor cores have a kernel of their own for small groups; others have not.
        let least = if dtype.size() == 2 { 3e10 } else { 1e8 };
        if !has_product(dtype, call.dtype) || each < least {
            return Ok(None);
        }
        let Some(ends) = self.read_ends(&call.ends)? else {
            return Ok(None);
        };
        let (len, step) = match call.mode {
            GroupedOp::Rows => (n * m, None),
            GroupedOp::Sums { groups } => (groups * k * m, Some(k * m)),
        };
        let out = self.alloc(call.dtype, len)?;
        let [a_at, b_at, out_at] = [call.a.buffer.get()?, call.b.buffer.get()?, &out].map(place);
        let mut products = Vec::with_capacity(groups);
        // What no product writes is zero.
        let mut zeros = vec![];
        let mut done = 0;
        for (g, rows) in (GroupedCall::rows(&ends, call.first, groups, n).into_iter()).enumerate() {
            let a = call.a.layout.slice(0, rows.start, 1, rows.len());
            let (a, b, writes) = match step {
                None => {
                    let b = call.b.layout.slice(0, g, 1, 1);
                    (a, b, rows.start * m..rows.end * m)
                }
                Some(step) => {
                    let b = call.b.layout.slice(0, rows.start, 1, rows.len());
                    (a.permute(&[1, 0]), b, g * step..(g + 1) * step)
                }
            };
            if rows.is_empty() {
                continue;
            }
            zeros.push(done..writes.start);
            done = writes.end;
            let to = out_at.start + (writes.start * call.dtype.size()) as u64;
            let types = (dtype, call.dtype);
            let (a, b) = ((&a, a_at.start), (&b, b_at.start));
            let Some((problem, addresses)) = problem(types, a, b, to) else {
                return Ok(None);
            };
            // Sizes of groups are seldom the same again: these are not kept.
            let Some(ready) = self.library.ready(&problem, 0, 1).map_err(failed)? else {
                return Ok(None);
            };
            products.push((ready, addresses));
        }
        zeros.push(done..len);
        let (library, size, to) = (self.library.clone(), call.dtype.size(), out_at.start);
        self.engine
            .library(vec![a_at, b_at], out_at, move |stream| {
                for range in zeros.iter().filter(|range| !range.is_empty()) {
                    let (to, bytes) = (to + (range.start * size) as u64, range.len() * size);
                    // SAFETY: a part of the output, which is in place.
                    check("cuMemsetD8Async", unsafe {
                        driver::cuMemsetD8Async(to, 0, bytes, stream.0 as _)
                    })?;
                }
                (products.iter()).try_for_each(|(ready, addresses)| {
                    library.multiply(ready, *addresses, Beside::default(), stream)
                })
            });
        Ok(Some(out.buffer()))
    }

    /// Where groups end; nothing for ends that are no dense list.
    fn read_ends(&self, ends: &View) -> Result<Option<Vec<i32>>> {
        if !ends.layout.is_contiguous() {
            return Ok(None);
        }
        let memory: &Memory = ends.buffer.get()?;
        let bytes = (self.engine.client())
            .read_one(memory.handle().clone())
            .map_err(|e| failed(e.to_string()))?;
        let all = bytes.chunks_exact(4);
        let all = all.map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let (from, count) = (ends.layout.offset, ends.layout.shape.numel());
        Ok(Some(all.skip(from).take(count).collect()))
    }
}

fn failed(detail: String) -> Error {
    Error::DeviceFailed {
        device: "cuda".into(),
        detail: format!("cuBLASLt: {detail}"),
    }
}

/// The device with its matrix products, and the convolutions that are one, made by the library
/// where that can.
pub(crate) fn with_products(
    device: &Device,
    engine: &Engine,
    context: &Arc<CudaContext>,
) -> Result<Device, String> {
    let products = CublasLt {
        engine: engine.clone(),
        library: Arc::new(Library::new(context)?),
        table: Mutex::default(),
        tuned: Tuned::of_environment(&context.name().unwrap_or_default())?,
    };
    let has: fn(&Kernel) -> bool = match context.compute_capability() {
        Ok(capability) if capability >= (8, 9) => {
            |kernel| matches!(kernel, Kernel::Matmul(call) if has_fused_or_scaled(call))
        }
        _ => |kernel| matches!(kernel, Kernel::Matmul(call) if has_fused(call)),
    };
    let takes = |kernel: &Kernel| {
        matches!(
            kernel,
            Kernel::Matmul(_) | Kernel::Grouped(_) | Kernel::Conv(_)
        )
    };
    Ok(device.decorated_for(takes, has, move |portable, kernel| {
        let product = match &kernel {
            Kernel::Matmul(call) => match products.product(call)? {
                Some(out) => Some(out),
                None if !has_product(call.a.dtype, call.dtype) || call.scales.is_some() => None,
                None => match with_copies(portable, call)? {
                    Some(call) => products.product(&call)?,
                    None => None,
                },
            },
            Kernel::Grouped(call) => products.grouped(call)?,
            Kernel::Conv(call) => match call.as_product() {
                Some(call) => products.product(&call)?,
                None => None,
            },
            _ => None,
        };
        match (product, kernel) {
            (Some(out), _) => Ok([out].into()),
            (None, Kernel::Matmul(call)) if call.is_fused() => {
                call.by_steps(|kernel| match &kernel {
                    Kernel::Matmul(call) => match products.product(call)? {
                        Some(out) => Ok([out].into()),
                        None => portable.launch(kernel),
                    },
                    _ => portable.launch(kernel),
                })
            }
            (None, kernel) => portable.launch(kernel),
        }
    }))
}

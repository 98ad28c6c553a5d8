//! Matrix products by cuBLASLt, on the stream of the kernels.
//!
//! What the library needs to know of a problem is made once and kept in a table; a product is then a
//! lookup and a call, which the thread that launches makes.
//!
//! cuBLASLt is column-major; a row-major product `A B` is the column-major product `B' A'` of the
//! same memory.

use crate::{engine::Engine, memory::place, queue::Stream, stream::check};
use anymesh_kernel::{
    Buffer, DType, Device, Error, Kernel, Layout, Result, View,
    backend::{GroupedCall, GroupedOp, MatmulCall},
};
use anymesh_shaders::{Arena, Memory};
use cudarc::{
    cublaslt::{
        result as lt,
        sys::{
            self, cublasComputeType_t as Compute, cublasLtEpilogue_t as Epilogue,
            cublasLtMatmulDescAttributes_t as Attribute,
            cublasLtMatmulPreferenceAttributes_t as Pref,
            cublasLtMatrixLayoutAttribute_t as LayoutAttribute, cudaDataType_t as Type,
        },
    },
    driver::{CudaContext, sys as driver},
};
use std::{
    collections::HashMap,
    ffi::c_void,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

/// Scratch memory for the library; what NVIDIA recommends for Hopper.
const WORKSPACE: usize = 32 << 20;

/// How many problems are kept; a program with more of them has new ones all the time.
const MOST: usize = 4096;

/// Where a matrix is and how it is read, as the library sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Matrix {
    transposed: bool,
    /// Elements between columns.
    leading: i64,
    /// Elements between the matrices of a batch.
    batch_step: i64,
    /// Largest power of two (up to 256) that divides the address.
    alignment: u32,
}

/// Everything the choice of an algorithm depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Problem {
    /// Of both factors.
    dtype: DType,
    /// Of the result.
    stored: DType,
    m: u64,
    n: u64,
    k: u64,
    batch: i32,
    a: Matrix,
    b: Matrix,
    out_alignment: u32,
    /// Whether a bias is added to every row.
    biased: bool,
}

/// The library on one GPU, and what it has been asked for.
#[derive(Debug)]
struct CublasLt {
    engine: Engine,
    library: Arc<Library>,
    /// What was chosen for each problem; nothing where the library cannot.
    table: Mutex<HashMap<Problem, Option<Arc<Ready>>>>,
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
    algorithm: sys::cublasLtMatmulHeuristicResult_t,
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

    /// What the library needs for a problem, or `None` where it cannot.
    fn ready(&self, problem: &Problem) -> Result<Option<Ready>, String> {
        self.context.bind_to_thread().map_err(|e| e.to_string())?;
        let plan = ProductPlan::new(problem)?;
        let algorithm = plan.choose(self.handle, problem)?;
        Ok(algorithm.map(|algorithm| Ready {
            problem: *problem,
            plan,
            algorithm,
        }))
    }

    /// Queues one product.
    fn multiply(
        &self,
        ready: &Ready,
        [a, b, out]: [u64; 3],
        bias: Option<u64>,
        stream: Stream,
    ) -> Result<(), String> {
        let plan = &ready.plan;
        if let Some(bias) = bias {
            // The one thing of a descriptor that changes; only the thread that launches gets here.
            plan.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
        }
        let (one, zero) = (1f32.to_bits(), 0u32);
        let (one64, zero64) = (1f64.to_bits(), 0u64);
        let (alpha, beta): (*const c_void, *const c_void) = match ready.problem.dtype {
            DType::F64 => ((&raw const one64).cast(), (&raw const zero64).cast()),
            _ => ((&raw const one).cast(), (&raw const zero).cast()),
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
                out as *const c_void,
                plan.layouts[2],
                out as *mut c_void,
                plan.layouts[2],
                &ready.algorithm.algo,
                self.workspace as *mut c_void,
                WORKSPACE,
                stream.0.cast(),
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

/// Whether the library multiplies factors of a dtype and stores another.
fn has_product(factors: DType, stored: DType) -> bool {
    match factors {
        DType::F16 | DType::BF16 => stored == factors || stored == DType::F32,
        DType::F32 | DType::F64 => stored == factors,
        _ => false,
    }
}

/// The library's name of a dtype that [`has_product`] knows.
fn element(dtype: DType) -> Type {
    match dtype {
        DType::F64 => Type::CUDA_R_64F,
        DType::F16 => Type::CUDA_R_16F,
        DType::BF16 => Type::CUDA_R_16BF,
        _ => Type::CUDA_R_32F,
    }
}

/// The library's descriptors of a problem.
struct ProductPlan {
    matmul: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
}

impl ProductPlan {
    fn new(problem: &Problem) -> Result<Self, String> {
        let text = |e: lt::CublasError| e.to_string();
        // Full f32, not TF32: precision is not given away unasked.
        let (compute, scale) = match problem.dtype {
            DType::F64 => (Compute::CUBLAS_COMPUTE_64F, Type::CUDA_R_64F),
            _ => (Compute::CUBLAS_COMPUTE_32F, Type::CUDA_R_32F),
        };
        let (m, n, k) = (problem.m, problem.n, problem.k);
        let stored = |rows: u64, columns: u64, matrix: &Matrix, dtype: DType| {
            let (rows, columns) = if matrix.transposed {
                (columns, rows)
            } else {
                (rows, columns)
            };
            let layout = lt::create_matrix_layout(element(dtype), rows, columns, matrix.leading)?;
            // SAFETY: the layout was just made; attributes are of the documented types.
            unsafe {
                lt::set_matrix_layout_attribute(
                    layout,
                    LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                    (&raw const problem.batch).cast(),
                    4,
                )?;
                lt::set_matrix_layout_attribute(
                    layout,
                    LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                    (&raw const matrix.batch_step).cast(),
                    8,
                )?;
            }
            Ok::<_, lt::CublasError>(layout)
        };
        let out = Matrix {
            transposed: false,
            leading: n as i64,
            batch_step: (m * n) as i64,
            alignment: 0,
        };
        let matmul = lt::create_matmul_desc(compute, scale).map_err(text)?;
        let layouts = [
            stored(n, k, &problem.b, problem.dtype).map_err(text)?,
            stored(k, m, &problem.a, problem.dtype).map_err(text)?,
            stored(n, m, &out, problem.stored).map_err(text)?,
        ];
        let plan = Self { matmul, layouts };
        // CUBLAS_OP_N is 0 and CUBLAS_OP_T is 1.
        plan.set(
            Attribute::CUBLASLT_MATMUL_DESC_TRANSA,
            &i32::from(problem.b.transposed),
        )?;
        plan.set(
            Attribute::CUBLASLT_MATMUL_DESC_TRANSB,
            &i32::from(problem.a.transposed),
        )?;
        if problem.biased {
            let epilogue = Epilogue::CUBLASLT_EPILOGUE_BIAS;
            plan.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
        }
        Ok(plan)
    }

    /// Sets an attribute of the product, which has the size of `value`.
    fn set<T>(&self, attribute: Attribute, value: &T) -> Result<(), String> {
        // SAFETY: the descriptor is alive, and the library copies as many bytes as it is told of.
        unsafe {
            lt::set_matmul_desc_attribute(
                self.matmul,
                attribute,
                (value as *const T).cast(),
                size_of::<T>(),
            )
        }
        .map_err(|e| e.to_string())
    }

    /// The library's choice of algorithm, or `None` where it has none for this problem.
    fn choose(
        &self,
        handle: sys::cublasLtHandle_t,
        problem: &Problem,
    ) -> Result<Option<sys::cublasLtMatmulHeuristicResult_t>, String> {
        let preference = lt::create_matmul_pref().map_err(|e| e.to_string())?;
        let workspace = WORKSPACE;
        let alignments = [
            (
                Pref::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                problem.b.alignment,
            ),
            (
                Pref::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                problem.a.alignment,
            ),
            (
                Pref::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                problem.out_alignment,
            ),
            (
                Pref::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
                problem.out_alignment,
            ),
        ];
        // SAFETY: descriptors are alive; attributes are of the documented types.
        unsafe {
            let set = |attribute, value: *const c_void, size| {
                lt::set_matmul_pref_attribute(preference, attribute, value, size)
                    .map_err(|e| e.to_string())
            };
            // Parts of a split sum are added in f32, not in the output's dtype.
            let in_compute_type = 2u32;
            set(
                Pref::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                (&raw const in_compute_type).cast(),
                4,
            )?;
            set(
                Pref::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const workspace).cast(),
                8,
            )?;
            for (attribute, bytes) in &alignments {
                set(*attribute, (bytes as *const u32).cast(), 4)?;
            }
            let [b, a, out] = self.layouts;
            let found =
                lt::get_matmul_algo_heuristic(handle, self.matmul, b, a, out, out, preference);
            let _ = lt::destroy_matmul_pref(preference);
            Ok(found.ok())
        }
    }
}

impl Drop for ProductPlan {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once.
        unsafe {
            for layout in self.layouts {
                let _ = lt::destroy_matrix_layout(layout);
            }
            let _ = lt::destroy_matmul_desc(self.matmul);
        }
    }
}

/// The last two dimensions of a layout as a library matrix with one step over all batch dimensions,
/// if they are one.
fn matrix(layout: &Layout, address: u64, size: usize) -> Option<Matrix> {
    let rank = layout.shape.rank();
    let (rows, columns) = (layout.shape[rank - 2], layout.shape[rank - 1]);
    let (row_step, column_step) = (
        layout.strides[rank - 2] as i64,
        layout.strides[rank - 1] as i64,
    );
    let (transposed, leading) = if column_step == 1 && (row_step >= columns as i64 || rows == 1) {
        (false, row_step.max(columns as i64))
    } else if row_step == 1 && (column_step >= rows as i64 || columns == 1) {
        (true, column_step.max(rows as i64))
    } else {
        return None;
    };
    // Batch dimensions must step evenly: from the innermost outwards each step is the one inside
    // times its size.
    let mut step: Option<(i64, i64)> = None;
    for d in (0..rank - 2).rev().filter(|&d| layout.shape[d] != 1) {
        let (size, stride) = (layout.shape[d] as i64, layout.strides[d] as i64);
        match step {
            None => step = Some((stride, stride * size)),
            Some((first, expected)) if expected == stride => step = Some((first, stride * size)),
            Some(_) => return None,
        }
    }
    let address = address + (layout.offset * size) as u64;
    let batch_step = step.map_or(0, |(first, _)| first);
    (batch_step >= 0).then_some(Matrix {
        transposed,
        leading,
        batch_step,
        alignment: alignment(address),
    })
}

/// Whether the library may add a bias: it is of the dtype of factors and result.
fn has_bias(call: &MatmulCall) -> bool {
    let dtype = call.a.dtype;
    let floats = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    let same = |bias: &View| bias.dtype == dtype && call.dtype == dtype;
    floats && call.bias.as_ref().is_some_and(same)
}

/// The address of a bias and the memory that it is in; nothing where the library cannot read it.
fn place_of_bias(bias: &View) -> Result<Option<(u64, Range<u64>)>> {
    let place = place(bias.buffer.get()?);
    let at = place.start + (bias.layout.offset * bias.dtype.size()) as u64;
    let readable = bias.layout.is_contiguous() && alignment(at) >= 16;
    Ok(readable.then_some((at, place)))
}

fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(8)
}

impl CublasLt {
    /// What is needed for a problem, kept from the first time on.
    fn known(&self, problem: &Problem) -> Result<Option<Arc<Ready>>> {
        let table = || self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = table().get(problem) {
            return Ok(known.clone());
        }
        let made = self.library.ready(problem).map_err(failed)?.map(Arc::new);
        let mut table = table();
        if table.len() >= MOST {
            table.clear();
        }
        table.insert(*problem, made.clone());
        Ok(made)
    }

    fn alloc(&self, dtype: DType, elements: usize) -> Result<Memory> {
        self.engine.arena().alloc(Memory::padded(dtype, elements))
    }

    /// The product, or `None` where the library has no way to compute it.
    fn product(&self, call: &MatmulCall) -> Result<Option<Buffer>> {
        let dtype = call.a.dtype;
        if !has_product(dtype, call.dtype) {
            return Ok(None);
        }
        let bias = match &call.bias {
            Some(bias) => match place_of_bias(bias)? {
                Some(place) => Some(place),
                None => return Ok(None),
            },
            None => None,
        };
        let (shape_a, shape_b) = (&call.a.layout.shape, &call.b.layout.shape);
        let rank = shape_a.rank();
        let batch: usize = shape_a.dims()[..rank - 2].iter().product();
        let (m, n) = (shape_a[rank - 2], shape_b[rank - 1]);
        let out = self.alloc(call.dtype, batch * m * n)?;
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
        let Some(ready) = self.known(&problem)? else {
            return Ok(None);
        };
        let library = self.library.clone();
        let bias_at = bias.as_ref().map(|(at, _)| *at);
        let reads = [a_at, b_at].into_iter().chain(bias.map(|(_, place)| place));
        self.engine.library(reads.collect(), out_at, move |stream| {
            library.multiply(&ready, addresses, bias_at, stream)
        });
        Ok(Some(out.buffer()))
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
            let Some(ready) = self.library.ready(&problem).map_err(failed)? else {
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
                        driver::cuMemsetD8Async(to, 0, bytes, stream.0)
                    })?;
                }
                (products.iter()).try_for_each(|(ready, addresses)| {
                    library.multiply(ready, *addresses, None, stream)
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

/// The product of two stacks of matrices with the addresses of its operands and its result, as the
/// library sees it; `None` where it cannot read them.
fn problem(
    (dtype, stored): (DType, DType),
    (a, a_at): (&Layout, u64),
    (b, b_at): (&Layout, u64),
    out_at: u64,
) -> Option<(Problem, [u64; 3])> {
    let (rank, right, size) = (a.shape.rank(), b.shape.rank(), dtype.size());
    let batch: usize = a.shape.dims()[..rank - 2].iter().product();
    let problem = Problem {
        dtype,
        stored,
        m: a.shape[rank - 2] as u64,
        n: b.shape[right - 1] as u64,
        k: a.shape[rank - 1] as u64,
        batch: i32::try_from(batch).ok()?,
        a: matrix(a, a_at, size)?,
        b: matrix(b, b_at, size)?,
        out_alignment: alignment(out_at),
        biased: false,
    };
    let offset = |address: u64, layout: &Layout| address + (layout.offset * size) as u64;
    Some((problem, [offset(a_at, a), offset(b_at, b), out_at]))
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
    };
    let biased = |kernel: &Kernel| matches!(kernel, Kernel::Matmul(call) if has_bias(call));
    let takes = |kernel: &Kernel| {
        matches!(
            kernel,
            Kernel::Matmul(_) | Kernel::Grouped(_) | Kernel::Conv(_)
        )
    };
    Ok(device.decorated_for(takes, biased, move |portable, kernel| {
        let product = match &kernel {
            Kernel::Matmul(call) => products.product(call)?,
            Kernel::Grouped(call) => products.grouped(call)?,
            Kernel::Conv(call) => match call.as_product() {
                Some(call) => products.product(&call)?,
                None => None,
            },
            _ => None,
        };
        match (product, kernel) {
            (Some(out), _) => Ok([out].into()),
            (None, Kernel::Matmul(call)) if call.bias.is_some() => {
                call.by_two_launches(|kernel| match &kernel {
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

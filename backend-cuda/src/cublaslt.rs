//! Matrix products by cuBLASLt on CubeCL's memory.
//!
//! The library works on a stream of its own. CubeCL does not show its streams, but both live in the
//! GPU's primary context, so context-wide events order the two: ours waits for everything queued
//! before, everything queued later waits for ours.
//!
//! cuBLASLt is column-major; a row-major product `A B` is the column-major product `B' A'` of the
//! same memory.

use anymesh_kernel::{Buffer, DType, Device, Error, Kernel, Layout, Result, backend::MatmulCall};
use anymesh_shaders::Memory;
use cubecl::prelude::*;
use cudarc::{
    cublaslt::{
        result as lt,
        sys::{
            self, cublasComputeType_t as Compute, cublasLtMatmulPreferenceAttributes_t as Pref,
            cublasLtMatrixLayoutAttribute_t as LayoutAttribute, cudaDataType_t as Type,
        },
    },
    driver::{CudaContext, CudaStream, sys as driver},
};
use std::{
    collections::HashMap,
    ffi::c_void,
    sync::{Arc, Mutex},
};

type CudaServer = <cubecl::cuda::CudaRuntime as cubecl::__private::Runtime>::Server;

/// Scratch memory for the library; what NVIDIA recommends for Hopper.
const WORKSPACE: usize = 32 << 20;

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
}

/// The library on one GPU.
struct CublasLt {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    handle: sys::cublasLtHandle_t,
    workspace: driver::CUdeviceptr,
    before: driver::CUevent,
    after: driver::CUevent,
    algorithms: Mutex<HashMap<Problem, Option<sys::cublasLtMatmulHeuristicResult_t>>>,
}

// SAFETY: the library's handle may be used from any thread, one call at a time (`algorithms` is
// locked throughout a call); events, stream and workspace are plain handles of the context, which
// is bound to the thread before use.
unsafe impl Send for CublasLt {}
unsafe impl Sync for CublasLt {}

impl std::fmt::Debug for CublasLt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CublasLt")
    }
}

fn check(result: driver::CUresult) -> Result<(), String> {
    result.result().map_err(|e| e.to_string())
}

impl CublasLt {
    fn new(context: &Arc<CudaContext>) -> Result<Self, String> {
        // SAFETY: only tries to open the library.
        if !unsafe { sys::is_culib_present() } {
            return Err("libcublasLt was not found".into());
        }
        context.bind_to_thread().map_err(|e| e.to_string())?;
        let stream = context.new_stream().map_err(|e| e.to_string())?;
        let handle = lt::create_handle().map_err(|e| e.to_string())?;
        let mut workspace = 0;
        let (mut before, mut after) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: plain allocations in the bound context, released in `drop`.
        unsafe {
            check(driver::cuMemAlloc_v2(&mut workspace, WORKSPACE))?;
            let no_timing = driver::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
            check(driver::cuEventCreate(&mut before, no_timing))?;
            check(driver::cuEventCreate(&mut after, no_timing))?;
        }
        Ok(Self {
            context: context.clone(),
            stream,
            handle,
            workspace,
            before,
            after,
            algorithms: Mutex::default(),
        })
    }

    fn run(
        &self,
        client: &Client,
        problem: Problem,
        heuristic: &sys::cublasLtMatmulHeuristicResult_t,
        a: u64,
        b: u64,
        out: u64,
    ) -> Result<(), String> {
        client.flush().map_err(|e| e.to_string())?;
        let plan = ProductPlan::new(&problem)?;
        let (one, zero) = (1f32.to_bits(), 0u32);
        let (one64, zero64) = (1f64.to_bits(), 0u64);
        let (alpha, beta): (*const c_void, *const c_void) = match problem.dtype {
            DType::F64 => ((&raw const one64).cast(), (&raw const zero64).cast()),
            _ => ((&raw const one).cast(), (&raw const zero).cast()),
        };
        let stream = self.stream.cu_stream();
        // SAFETY: the addresses are pinned by the caller, descriptors live until the end of the
        // call, and the events order this stream against all others of the context on both sides.
        unsafe {
            check(driver::cuCtxRecordEvent(self.context.cu_ctx(), self.before))?;
            check(driver::cuStreamWaitEvent(stream, self.before, 0))?;
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
                &heuristic.algo,
                self.workspace as *mut c_void,
                WORKSPACE,
                stream.cast(),
            )
            .map_err(|e| e.to_string())?;
            check(driver::cuEventRecord(self.after, stream))?;
            check(driver::cuCtxWaitEvent(self.context.cu_ctx(), self.after))
        }
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // SAFETY: made in `new`, used nowhere else. A failure at the end of the process has nobody
        // to tell.
        unsafe {
            let _ = self.context.bind_to_thread();
            let _ = driver::cuStreamSynchronize(self.stream.cu_stream());
            let _ = driver::cuMemFree_v2(self.workspace);
            let _ = driver::cuEventDestroy_v2(self.before);
            let _ = driver::cuEventDestroy_v2(self.after);
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
        for (attribute, transposed) in [
            (
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                problem.b.transposed,
            ),
            (
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSB,
                problem.a.transposed,
            ),
        ] {
            let value = i32::from(transposed);
            // SAFETY: the descriptor was just made; CUBLAS_OP_N is 0 and CUBLAS_OP_T is 1.
            unsafe {
                lt::set_matmul_desc_attribute(matmul, attribute, (&raw const value).cast(), 4)
            }
            .map_err(text)?;
        }
        Ok(Self { matmul, layouts })
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

fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(8)
}

impl CublasLt {
    /// The product, or `None` where the library has no way to compute it.
    fn product(&self, client: &Client, call: &MatmulCall) -> Result<Option<Buffer>> {
        let dtype = call.a.dtype;
        if !has_product(dtype, call.dtype) {
            return Ok(None);
        }
        let (shape_a, shape_b) = (&call.a.layout.shape, &call.b.layout.shape);
        let rank = shape_a.rank();
        let batch: usize = shape_a.dims()[..rank - 2].iter().product();
        let (m, n, k) = (shape_a[rank - 2], shape_b[rank - 1], shape_a[rank - 1]);
        let out = Memory::new(client, call.dtype, batch * m * n);
        let failed = |detail: String| Error::DeviceFailed {
            device: "cuda".into(),
            detail: format!("cuBLASLt: {detail}"),
        };
        // The guards keep the memory in place until the product is queued; later work waits for it.
        let pin = |memory: &Memory| {
            client
                .get_resource::<CudaServer>(memory.handle().clone())
                .map_err(|e| failed(e.to_string()))
        };
        let (a_pin, b_pin, out_pin) = (
            pin(call.a.buffer.get()?)?,
            pin(call.b.buffer.get()?)?,
            pin(&out)?,
        );
        let (a_at, b_at, out_at) = (
            a_pin.resource().ptr,
            b_pin.resource().ptr,
            out_pin.resource().ptr,
        );
        let size = dtype.size();
        let (Some(ma), Some(mb), Ok(batch)) = (
            matrix(&call.a.layout, a_at, size),
            matrix(&call.b.layout, b_at, size),
            i32::try_from(batch),
        ) else {
            return Ok(None);
        };
        let problem = Problem {
            dtype,
            stored: call.dtype,
            m: m as u64,
            n: n as u64,
            k: k as u64,
            batch,
            a: ma,
            b: mb,
            out_alignment: alignment(out_at),
        };
        self.context
            .bind_to_thread()
            .map_err(|e| failed(e.to_string()))?;
        let mut algorithms = self
            .algorithms
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        let algorithm = match algorithms.get(&problem) {
            Some(known) => *known,
            None => {
                let found = ProductPlan::new(&problem)
                    .and_then(|plan| plan.choose(self.handle, &problem))
                    .map_err(failed)?;
                algorithms.insert(problem, found);
                found
            }
        };
        let Some(algorithm) = algorithm else {
            return Ok(None);
        };
        let offset = |address: u64, layout: &Layout| address + (layout.offset * size) as u64;
        self.run(
            client,
            problem,
            &algorithm,
            offset(a_at, &call.a.layout),
            offset(b_at, &call.b.layout),
            out_at,
        )
        .map_err(failed)?;
        drop((a_pin, b_pin, out_pin));
        Ok(Some(out.buffer()))
    }
}

/// The device with its matrix products, and the convolutions that are one, made by the library
/// where that can.
pub(crate) fn with_products(
    device: &Device,
    client: Client,
    context: &Arc<CudaContext>,
) -> Result<Device, String> {
    let library = CublasLt::new(context)?;
    Ok(device.decorated(move |portable, kernel| {
        let product = match &kernel {
            Kernel::Matmul(call) => library.product(&client, call)?,
            Kernel::Conv(call) => match call.as_product() {
                Some(call) => library.product(&client, &call)?,
                None => None,
            },
            _ => None,
        };
        match product {
            Some(out) => Ok([out].into()),
            None => portable.launch(kernel),
        }
    }))
}

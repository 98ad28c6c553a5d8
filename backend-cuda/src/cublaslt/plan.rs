//! What the library is told of a product.

use anymesh_kernel::{DType, Layout};
use cudarc::cublaslt::{
    result as lt,
    sys::{
        self, cublasComputeType_t as Compute, cublasLtEpilogue_t as Epilogue,
        cublasLtMatmulDescAttributes_t as Attribute, cublasLtMatmulPreferenceAttributes_t as Pref,
        cublasLtMatrixLayoutAttribute_t as LayoutAttribute, cudaDataType_t as Type,
    },
};
use std::{ffi::c_void, mem::MaybeUninit};

/// Scratch memory for the library; what NVIDIA recommends for Hopper.
pub(super) const WORKSPACE: usize = 32 << 20;

/// How many algorithms the library is asked for.
pub(super) const CHOICES: usize = 8;

/// Where a matrix is and how it is read, as the library sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Matrix {
    pub(super) transposed: bool,
    /// Elements between columns.
    pub(super) leading: i64,
    /// Elements between the matrices of a batch.
    pub(super) batch_step: i64,
    /// Largest power of two (up to 256) that divides the address.
    pub(super) alignment: u32,
}

/// Everything the choice of an algorithm depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Problem {
    /// Of the left factor.
    pub(super) dtype: DType,
    /// Of the right factor: the same, but for 8-bit floats.
    pub(super) right: DType,
    /// Of the result.
    pub(super) stored: DType,
    pub(super) m: u64,
    pub(super) n: u64,
    pub(super) k: u64,
    pub(super) batch: i32,
    pub(super) a: Matrix,
    pub(super) b: Matrix,
    pub(super) out_alignment: u32,
    /// Whether a bias is added to every row.
    pub(super) biased: bool,
}

/// Whether the library multiplies factors of a dtype and stores another.
pub(super) fn has_product(factors: DType, stored: DType) -> bool {
    match factors {
        DType::F16 | DType::BF16 => stored == factors || stored == DType::F32,
        DType::F32 | DType::F64 => stored == factors,
        _ => false,
    }
}

/// Whether it multiplies factors of 8-bit floats, with a scale for each, and stores a dtype. Its
/// kernels have no two factors of `f8e5m2`.
pub(super) fn has_scaled_product(factors: [DType; 2], stored: DType) -> bool {
    let small = |dtype| matches!(dtype, DType::F8E4M3 | DType::F8E5M2);
    factors.into_iter().all(small)
        && factors.contains(&DType::F8E4M3)
        && matches!(stored, DType::F32 | DType::F16 | DType::BF16)
}

/// The library's name of a dtype that [`has_product`] or [`has_scaled_product`] knows.
pub(super) fn element(dtype: DType) -> Type {
    match dtype {
        DType::F8E4M3 => Type::CUDA_R_8F_E4M3,
        DType::F8E5M2 => Type::CUDA_R_8F_E5M2,
        DType::F64 => Type::CUDA_R_64F,
        DType::F16 => Type::CUDA_R_16F,
        DType::BF16 => Type::CUDA_R_16BF,
        _ => Type::CUDA_R_32F,
    }
}

/// A way of the library's to compute a problem.
#[derive(Clone, Copy)]
pub(super) struct Algorithm {
    pub(super) algorithm: sys::cublasLtMatmulAlgo_t,
    /// Bytes of scratch memory that it needs.
    pub(super) workspace: usize,
}

/// The library's descriptors of a problem.
pub(super) struct ProductPlan {
    pub(super) matmul: sys::cublasLtMatmulDesc_t,
    pub(super) layouts: [sys::cublasLtMatrixLayout_t; 3],
}

impl ProductPlan {
    pub(super) fn new(problem: &Problem) -> Result<Self, String> {
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
            stored(n, k, &problem.b, problem.right).map_err(text)?,
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
    pub(super) fn set<T>(&self, attribute: Attribute, value: &T) -> Result<(), String> {
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

    /// The library's algorithms for this problem, the one it thinks best of first, and at most so
    /// many: looking for more takes it longer.
    pub(super) fn choices(
        &self,
        handle: sys::cublasLtHandle_t,
        problem: &Problem,
        most: usize,
    ) -> Result<Vec<Algorithm>, String> {
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
            let mut found = [const { MaybeUninit::uninit() }; CHOICES];
            let mut count = 0;
            let asked = sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                self.matmul,
                b,
                a,
                out,
                out,
                preference,
                most.clamp(1, CHOICES) as i32,
                found.as_mut_ptr().cast(),
                &mut count,
            );
            let _ = lt::destroy_matmul_pref(preference);
            if asked != sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS {
                return Ok(vec![]);
            }
            let found = found[..count.clamp(0, CHOICES as i32) as usize].iter();
            // The library has filled in as many as it says.
            let found = found
                .map(|one: &MaybeUninit<sys::cublasLtMatmulHeuristicResult_t>| one.assume_init());
            let usable = |one: &sys::cublasLtMatmulHeuristicResult_t| {
                one.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS
            };
            let algorithm = |one: sys::cublasLtMatmulHeuristicResult_t| Algorithm {
                algorithm: one.algo,
                workspace: one.workspaceSize,
            };
            Ok(found.filter(usable).map(algorithm).collect())
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
pub(super) fn matrix(layout: &Layout, address: u64, size: usize) -> Option<Matrix> {
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

pub(super) fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(8)
}

/// The product of two stacks of matrices with the addresses of its operands and its result, as the
/// library sees it; `None` where it cannot read them.
pub(super) fn problem(
    (dtype, stored): (DType, DType),
    (a, a_at): (&Layout, u64),
    (b, b_at): (&Layout, u64),
    out_at: u64,
) -> Option<(Problem, [u64; 3])> {
    let (rank, right, size) = (a.shape.rank(), b.shape.rank(), dtype.size());
    let batch: usize = a.shape.dims()[..rank - 2].iter().product();
    let problem = Problem {
        dtype,
        right: dtype,
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

//! What is known of a GPU before anything is compiled for it, and what CubeCL is told of it.

use anymesh_shaders::Cores;
use cubecl::{
    cmma::MatrixLayout,
    features::{Plane, Tma, TypeUsage},
    ir::{
        ContiguousElements, DeviceIdentity, DeviceProperties, ElemType, FloatKind,
        HardwareProperties, MemoryDeviceProperties, MmaProperties, OpaqueType, TargetProperties,
        VectorSize,
    },
    profile::TimingMethod,
};
use cubecl_cpp::{
    cuda::{
        arch::CudaArchitecture,
        mma::{CudaCmmaCompiler, manual::contiguous_elements_cuda},
        supported_mma_combinations, supported_scaled_mma_combinations,
    },
    register_supported_types,
    shared::{
        CompilationOptions, CppSupportedFeatures, register_mma_features,
        register_scaled_mma_features, register_wmma_features,
    },
};
use cudarc::driver::{CudaContext, DriverError, sys::CUdevice_attribute as Attribute};

/// Threads that go in step, on every NVIDIA GPU.
const WARP: u32 = 32;

/// What kernels are compiled for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Gpu {
    pub(crate) name: String,
    /// Its compute capability: 90 for 9.0.
    pub(crate) version: u32,
    /// Bytes of its memory.
    pub(crate) memory: u64,
    /// Bytes of shared memory that a block may ask for.
    pub(crate) shared: usize,
    /// How many multiprocessors it has.
    pub(crate) processors: u32,
}

impl Gpu {
    /// The GPU behind a context.
    pub(crate) fn of(context: &CudaContext) -> Result<Self, DriverError> {
        let (major, minor) = context.compute_capability()?;
        let number = |attribute| context.attribute(attribute).map(|n| n.max(0) as u32);
        Ok(Self {
            name: context.name()?,
            version: (major * 10 + minor) as u32,
            memory: context.total_mem()? as u64,
            shared: number(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?
                as usize,
            processors: number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        })
    }

    /// An H200 that is not there, to compile for.
    pub(crate) fn h200() -> Self {
        Self {
            name: "NVIDIA H200".into(),
            version: 90,
            memory: 140 << 30,
            shared: 227 << 10,
            processors: 132,
        }
    }

    /// An A100 that is not there.
    pub(crate) fn a100() -> Self {
        Self {
            name: "NVIDIA A100".into(),
            version: 80,
            memory: 80 << 30,
            shared: 163 << 10,
            processors: 108,
        }
    }

    /// The tensor cores that our kernels can use of it.
    pub(crate) fn cores(&self) -> Option<Cores> {
        match self.version {
            90 => Some(Cores::Wgmma),
            80.. => Some(Cores::Mma),
            _ => None,
        }
    }

    /// NVRTC's name for it. From Hopper on instructions belong to one architecture only: its name
    /// ends in `a`.
    pub(crate) fn architecture(&self) -> String {
        let exact = if self.version >= 90 { "a" } else { "" };
        format!("sm_{}{exact}", self.version)
    }

    fn cuda(&self) -> CudaArchitecture {
        CudaArchitecture {
            version: self.version,
            tensor_cores: CudaArchitecture::has_tensor_cores(self.version, &self.name),
        }
    }

    /// How CubeCL writes kernels for it.
    pub(crate) fn options(&self) -> CompilationOptions {
        CompilationOptions {
            warp_size: WARP as usize,
            supports_features: CppSupportedFeatures {
                // Scalars and lengths of buffers are passed by value.
                grid_constants: true,
                clusters: self.version >= 90,
                elect_sync: self.version >= 90,
                fast_math: true,
                fast_tanh: self.version >= 75,
                dp4a: self.version >= 61,
            },
            ..Default::default()
        }
    }

    /// What CubeCL's kernels may use of it.
    pub(crate) fn properties(&self) -> DeviceProperties {
        let cuda = self.cuda();
        let wmma = CudaCmmaCompiler::Cpp.supported_cmma_combinations(&cuda);
        let memory =
            MemoryDeviceProperties::new(self.memory, 512).with_max_memory(self.memory.max(1));
        let hardware = HardwareProperties {
            load_width: 128,
            vector_register_count: None,
            plane_size_min: WARP,
            plane_size_max: WARP,
            max_bindings: 1024,
            max_shared_memory_size: self.shared,
            max_cube_count: (i32::MAX as u32, 65535, 65535),
            max_units_per_cube: 1024,
            max_cube_dim: (1024, 1024, 64),
            num_streaming_multiprocessors: Some(self.processors),
            num_tensor_cores: cuda
                .tensor_cores
                .then_some(if self.version < 80 { 8 } else { 4 }),
            min_tensor_cores_dim: (!wmma.is_empty()).then_some(8),
            num_cpu_cores: None,
            last_level_cache_size: None,
            max_vector_size: VectorSize::MAX,
            cube_mma_reserved_shared_memory: 0,
        };
        let identity = DeviceIdentity {
            name: self.name.clone(),
            fingerprint: self.architecture(),
            physical: None,
        };
        let mut known = DeviceProperties::new(
            Default::default(),
            memory,
            hardware,
            TimingMethod::System,
            identity,
        );
        register_supported_types(&mut known);
        register_wmma_features(wmma, &mut known);
        register_mma_features(supported_mma_combinations(&cuda), &mut known);
        register_scaled_mma_features(supported_scaled_mma_combinations(&cuda), &mut known);
        let halves = [FloatKind::F16, FloatKind::BF16].map(ElemType::Float);
        let features = &mut known.features;
        features.memory_reinterpret = true;
        features.alignment = true;
        features.device_memory_scope = true;
        features.plane.insert(Plane::Ops);
        features.plane.insert(Plane::NonUniformControlFlow);
        features.plane.insert(Plane::Sync);
        if self.version >= 75 {
            features.matmul.ldmatrix.extend(halves);
        }
        features.copy_async = self.version >= 80;
        if self.version >= 90 {
            features.tma.insert(Tma::Base);
            features.cube_cluster = true;
            features.matmul.stmatrix.extend(halves);
            known.register_opaque_type(OpaqueType::TensorMap);
        }
        known.register_opaque_type(OpaqueType::Barrier);
        if self.version >= 80 {
            known.register_type_usage(ElemType::Float(FloatKind::TF32), TypeUsage::Conversion);
        }
        known
    }
}

/// How the operands of `mma` lie in registers, the same on all of NVIDIA's tensor cores.
pub(crate) fn target() -> TargetProperties {
    TargetProperties {
        mma: MmaProperties {
            register_size_bits: 32,
            const_plane_size: WARP,
            register_layout_a: MatrixLayout::RowMajor,
            register_layout_b: MatrixLayout::ColMajor,
            register_layout_acc: MatrixLayout::RowMajor,
            register_duplication_a: 1,
            register_duplication_b: 1,
            register_duplication_acc: 1,
            contiguous_elements: ContiguousElements::new(contiguous_elements_cuda),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_of_one_architecture_are_asked_for_by_its_own_name() {
        let of = |version| {
            Gpu {
                version,
                ..Gpu::h200()
            }
            .architecture()
        };
        assert_eq!([of(80), of(90), of(120)], ["sm_80", "sm_90a", "sm_120a"]);
    }

    #[test]
    fn hopper_has_what_its_kernels_use() {
        let known = Gpu::h200().properties();
        assert!(known.supports_type(ElemType::Float(FloatKind::F64)));
        assert!(known.features.plane.contains(Plane::Ops));
        assert!(known.features.copy_async);
        assert!(!known.features.matmul.mma.is_empty());
    }
}

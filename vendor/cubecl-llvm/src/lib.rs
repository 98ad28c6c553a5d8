//! An interface stand-in for the crate `cubecl-llvm`.
//!
//! `cubecl-cuda` always links `cubecl-llvm`, whose build script downloads LLVM. This workspace
//! compiles its kernels with CubeCL's C++ backend (feature `cuda-cpp`), so only the names matter:
//! asking this compiler for a kernel is an error.

use std::fmt;

use cubecl_core::ir::nvidia::SmArch;
use cubecl_runtime::compiler::{CompilationError, Compiler};
use cubecl_runtime::kernel::{BufferIOAttr, KernelDefinition};

use nvptx::ptx_version::PtxVersion;

/// Items for NVIDIA targets.
pub mod nvptx {
    /// The PTX language version.
    pub mod ptx_version {
        use std::fmt;

        /// A PTX version; with the C++ backend NVRTC chooses it, so none is ever known here.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct PtxVersion(u32);

        impl PtxVersion {
            /// The version for a driver: unknown to this stand-in.
            pub fn for_driver(_driver: i32) -> Option<Self> {
                None
            }
        }

        impl fmt::Display for PtxVersion {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "ptx{}", self.0)
            }
        }
    }
}

/// Items shared by the targets.
pub mod shared {
    /// Narrowing of device features to what LLVM lowers.
    pub mod lowered_features {
        use cubecl_core::ir::DeviceProperties;

        /// The target whose features are narrowed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum GpuTarget {
            /// NVIDIA.
            Nvptx,
        }

        /// Narrows nothing: only the LLVM backend would need it.
        pub fn restrict_features(_props: &mut DeviceProperties, _target: GpuTarget) {}
    }
}

/// The machine a module is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LlvmTarget {
    /// NVIDIA.
    Nvptx,
}

/// The compiler, which refuses every kernel.
#[derive(Clone, Debug)]
pub struct PlironCompiler {
    /// The machine to compile for.
    pub target: LlvmTarget,
}

/// What the compiler would be told.
#[derive(Clone, Debug, Default)]
pub struct PlironOptions {
    /// The processor's name.
    pub arch: Option<String>,
    /// The NVIDIA architecture.
    pub sm_arch: Option<SmArch>,
    /// The PTX version.
    pub ptx_version: Option<PtxVersion>,
    /// Whether kernel parameters are grid constants.
    pub grid_constants: bool,
    /// Keeps the struct open to `..Default::default()`.
    pub reserved: (),
}

/// A compiled module.
#[derive(Clone, Debug)]
pub struct NvptxModule {
    /// The PTX text, NUL-terminated.
    pub ptx: Vec<std::ffi::c_char>,
    /// The LLVM text.
    pub ir: String,
    /// Bytes of shared memory.
    pub shared_memory_size: usize,
    /// What the kernel does with each buffer.
    pub io: Vec<BufferIOAttr>,
}

/// What compiling would give.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum PlironArtifact {
    /// PTX for NVIDIA.
    NvptxCode(NvptxModule),
}

impl fmt::Display for PlironArtifact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PlironArtifact::NvptxCode(module) => f.write_str(&module.ir),
        }
    }
}

impl Compiler for PlironCompiler {
    type Representation = PlironArtifact;
    type CompilationOptions = PlironOptions;

    fn compile(
        &mut self,
        _kernel: KernelDefinition,
        _options: &Self::CompilationOptions,
    ) -> Result<Self::Representation, CompilationError> {
        panic!("this build has no LLVM: enable the feature `cuda-cpp` of `cubecl`")
    }

    fn extension(&self) -> &'static str {
        "ll"
    }

    fn lang_tag(&self) -> &'static str {
        "llvm"
    }
}

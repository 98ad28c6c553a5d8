//! From a CubeCL kernel to what the driver loads: CubeCL writes CUDA C++, NVRTC makes a cubin of
//! it. No driver and no GPU are needed for either.

use crate::{disk::Store, gpu::Gpu};
use anymesh_launcher::{Compiler, Image, log};
use cubecl::{
    Compiler as _, CubeKernel, define_kernel,
    ir::{DeviceProperties, TargetProperties},
};
use cubecl_cpp::{
    shared::{CompilationOptions, CppCompiler},
    target::Cuda,
};
use cubecl_runtime::kernel::BufferIOAttr;
use cudarc::nvrtc::sys as nvrtc;
use std::{
    ffi::CString,
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    time::Instant,
};

/// A kernel as CUDA C++, and what a launch of it needs to know.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    pub(crate) text: String,
    pub(crate) shape: Shape,
}

/// What a launch of a compiled kernel needs to know beside its code.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Shape {
    /// The name of its entry.
    pub(crate) entry: String,
    /// Bytes of shared memory that a launch sets aside.
    pub(crate) shared: usize,
    pub(crate) block: [u32; 3],
    /// What it does with each of its buffers.
    pub(crate) io: Vec<BufferIOAttr>,
}

/// Makes kernels for one kind of GPU.
#[derive(Debug)]
pub(crate) struct Kernels {
    gpu: Gpu,
    options: CompilationOptions,
    /// NVRTC's options.
    flags: Vec<String>,
    version: (i32, i32),
    store: Option<Store>,
}

impl Kernels {
    /// A compiler for a GPU, with what an earlier one left on disk. The caller has checked that NVRTC
    /// can be loaded.
    pub(crate) fn new(gpu: Gpu, store: Option<Store>) -> Result<Self, String> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes two numbers.
        let answer = unsafe { nvrtc::nvrtcVersion(&mut major, &mut minor) };
        answer.result().map_err(|e| format!("NVRTC: {e}"))?;
        let mut flags = vec![format!("--gpu-architecture={}", gpu.architecture())];
        if let Some(root) = toolkit() {
            let folders = [root.join("include"), root.join("include").join("cccl")];
            for folder in folders.iter().filter(|folder| folder.is_dir()) {
                flags.push(format!("--include-path={}", folder.display()));
            }
        }
        Ok(Self {
            options: gpu.options(),
            gpu,
            flags,
            version: (major, minor),
            store,
        })
    }

    /// The kernel as CUDA C++. What CubeCL cannot write, or panics at, is told.
    pub(crate) fn write(&self, kernel: &dyn CubeKernel) -> Result<Source, String> {
        let written = catch_unwind(AssertUnwindSafe(|| {
            let definition = define_kernel(kernel).map_err(|e| e.to_string())?;
            let entry = definition.settings.kernel_name.clone();
            let block = definition.settings.cube_dim;
            let written = CppCompiler::<Cuda>::default()
                .compile(definition, &self.options)
                .map_err(|e| e.to_string())?;
            Ok(Source {
                text: with_residents(written.source),
                shape: Shape {
                    entry,
                    shared: written.shared_memory_size,
                    block: [block.x, block.y, block.z],
                    io: written.io,
                },
            })
        }));
        let source: Source = written.unwrap_or_else(|panic| {
            let text = (panic.downcast_ref::<&str>().map(ToString::to_string))
                .or_else(|| panic.downcast_ref::<String>().cloned());
            Err(text.unwrap_or_else(|| "CubeCL's compiler panicked".into()))
        })?;
        let (wanted, most) = (source.shape.shared, self.gpu.shared);
        if wanted > most {
            return Err(format!(
                "it wants {wanted} bytes of shared memory, the GPU has {most}"
            ));
        }
        Ok(source)
    }

    /// The kernel as the GPU runs it, from disk if it was made before.
    pub(crate) fn cubin(&self, name: &str, source: &Source) -> Result<Vec<u8>, String> {
        let started = Instant::now();
        let key = self.key(&source.text);
        if let Some(image) = self.store.as_ref().and_then(|store| store.get(&key)) {
            log::say(1, || {
                format!("{name}: {key} from disk in {:?}", started.elapsed())
            });
            return Ok(image);
        }
        let image = compile(&source.text, &self.flags)?;
        log::say(1, || {
            format!(
                "{name}: {key} compiled in {:?}, {} bytes, {} of shared memory",
                started.elapsed(),
                image.len(),
                source.shape.shared
            )
        });
        if let Some(store) = &self.store {
            store.put(&key, &image);
        }
        Ok(image)
    }

    /// What a cubin depends on, in one name: source, options, NVRTC's version. Folders of headers
    /// count by name only, as they belong to that version.
    fn key(&self, text: &str) -> String {
        crate::disk::key(&[
            text,
            &self.flags.join(" "),
            &format!("{}.{}", self.version.0, self.version.1),
        ])
    }
}

impl Compiler for Kernels {
    fn runtime(&self) -> &'static str {
        "cuda"
    }

    fn properties(&self) -> DeviceProperties {
        self.gpu.properties()
    }

    fn target(&self) -> TargetProperties {
        crate::gpu::target()
    }

    fn image(&self, name: &str, kernel: &dyn CubeKernel) -> Result<Image, String> {
        let source = self.write(kernel)?;
        let code = self.cubin(name, &source)?;
        let shape = source.shape;
        Ok(Image {
            code,
            entry: shape.entry,
            shared: shape.shared,
            block: shape.block,
            io: shape.io,
            bound: vec![],
        })
    }
}

/// The source with the number of cubes that are to share a multiprocessor, which CubeCL has no word
/// for: a kernel says it in a comment of its PTX. The compiler keeps to fewer registers then.
fn with_residents(source: String) -> String {
    const SAID: &str = "// cubes of a multiprocessor: ";
    let Some((_, said)) = source.split_once(SAID) else {
        return source;
    };
    let digits = said.find(|c: char| !c.is_ascii_digit());
    let number = &said[..digits.unwrap_or(said.len())];
    let bounds = "__launch_bounds__(";
    match source.split_once(bounds) {
        Some((before, after)) => match after.split_once(')') {
            Some((threads, rest)) => format!("{before}{bounds}{threads}, {number}){rest}"),
            None => source,
        },
        None => source,
    }
}

/// Where CUDA's headers are, which kernels of 16-bit floats include.
fn toolkit() -> Option<PathBuf> {
    let named = ["CUDA_PATH", "CUDA_HOME"].into_iter();
    let named = named.filter_map(|name| std::env::var_os(name).filter(|value| !value.is_empty()));
    let usual = ["/usr/local/cuda", "/opt/cuda", "/usr"].map(Into::into);
    let mut all = named.chain(usual).map(PathBuf::from);
    all.find(|root| root.join("include").join("cuda_fp16.h").is_file())
}

/// A program of NVRTC, destroyed when dropped.
struct Program(nvrtc::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by `compile`, destroyed once.
        let _ = unsafe { nvrtc::nvrtcDestroyProgram(&mut self.0) };
    }
}

/// The cubin of a source, or the first lines of NVRTC's log that say what is wrong.
fn compile(text: &str, flags: &[String]) -> Result<Vec<u8>, String> {
    let failed = |call: &str, e: &dyn std::fmt::Display| format!("NVRTC's {call}: {e}");
    let c_text = |text: &str| CString::new(text).map_err(|e| failed("source", &e));
    let source = c_text(text)?;
    let flags = (flags.iter().map(|flag| c_text(flag))).collect::<Result<Vec<_>, _>>()?;
    let pointers: Vec<_> = flags.iter().map(|flag| flag.as_ptr()).collect();
    let mut program = Program(std::ptr::null_mut());
    // SAFETY: texts end in zero and live until the program is destroyed; sizes are NVRTC's own.
    unsafe {
        nvrtc::nvrtcCreateProgram(
            &mut program.0,
            source.as_ptr(),
            c"kernel.cu".as_ptr(),
            0,
            std::ptr::null(),
            std::ptr::null(),
        )
        .result()
        .map_err(|e| failed("nvrtcCreateProgram", &e))?;
        let compiled =
            nvrtc::nvrtcCompileProgram(program.0, pointers.len() as i32, pointers.as_ptr());
        if let Err(e) = compiled.result() {
            return Err(explain(&log_of(&program), &e.to_string()));
        }
        let mut size = 0;
        nvrtc::nvrtcGetCUBINSize(program.0, &mut size)
            .result()
            .map_err(|e| failed("nvrtcGetCUBINSize", &e))?;
        let mut image = vec![0u8; size];
        nvrtc::nvrtcGetCUBIN(program.0, image.as_mut_ptr().cast())
            .result()
            .map_err(|e| failed("nvrtcGetCUBIN", &e))?;
        Ok(image)
    }
}

fn log_of(program: &Program) -> String {
    let mut size = 0;
    // SAFETY: a live program; the buffer has the size that NVRTC says.
    unsafe {
        if nvrtc::nvrtcGetProgramLogSize(program.0, &mut size)
            .result()
            .is_err()
        {
            return String::new();
        }
        let mut log = vec![0u8; size];
        if nvrtc::nvrtcGetProgramLog(program.0, log.as_mut_ptr().cast())
            .result()
            .is_err()
        {
            return String::new();
        }
        String::from_utf8_lossy(&log)
            .trim_end_matches('\0')
            .to_string()
    }
}

/// What a user needs of NVRTC's log.
fn explain(log: &str, otherwise: &str) -> String {
    let errors: Vec<_> = (log.lines())
        .filter(|line| line.contains("error") || line.contains("fatal"))
        .take(5)
        .collect();
    let mut text = if errors.is_empty() {
        format!("NVRTC: {otherwise}")
    } else {
        format!("NVRTC: {}", errors.join("; "))
    };
    if text.contains("could not open source file") || text.contains("cannot open source file") {
        text += ": CUDA's headers were not found, set CUDA_PATH to the toolkit's folder";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A compiler for Hopper, or why there is none.
    fn compiler(store: Option<Store>) -> Option<Kernels> {
        // SAFETY: only tries to open the library.
        if !unsafe { nvrtc::is_culib_present() } {
            println!("skipped: libnvrtc was not found on the loader's paths");
            return None;
        }
        Some(Kernels::new(Gpu::h200(), store).expect("NVRTC was found"))
    }

    fn source(text: &str) -> Source {
        Source {
            text: text.into(),
            shape: Shape {
                entry: "twice".into(),
                shared: 0,
                block: [1, 1, 1],
                io: vec![],
            },
        }
    }

    #[test]
    fn a_source_becomes_a_cubin_and_the_second_time_comes_from_disk() {
        let folder = crate::disk::tests::folder("cubin");
        let store = || Some(Store::at(folder.clone(), 1 << 20));
        let Some(made) = compiler(store()) else {
            return;
        };
        let good = source("extern \"C\" __global__ void twice(float *x) { x[threadIdx.x] *= 2; }");
        let image = made.cubin("twice", &good).expect("it is right");
        assert_eq!(&image[..4], b"\x7fELF");
        let key = made.key(&good.text);
        assert_eq!(store().and_then(|s| s.get(&key)), Some(image.clone()));
        // What is on disk is what is used: another image under the same key comes back.
        store().expect("a store").put(&key, b"other");
        assert_eq!(made.cubin("twice", &good), Ok(b"other".to_vec()));
        let other = Kernels::new(
            Gpu {
                version: 80,
                ..Gpu::h200()
            },
            store(),
        )
        .expect("NVRTC");
        assert_ne!(other.cubin("twice", &good), Ok(b"other".to_vec()));
        let _ = std::fs::remove_dir_all(folder);
    }

    #[test]
    fn what_is_wrong_with_a_source_is_told_in_a_few_lines() {
        let Some(made) = compiler(None) else { return };
        let bad = source("extern \"C\" __global__ void twice(float *x) { x[0] = nothing; }");
        let told = made.cubin("twice", &bad).expect_err("it is wrong");
        assert!(told.contains("nothing") && told.contains("error"), "{told}");
        assert!(told.lines().count() == 1, "{told}");
    }

    #[test]
    fn a_missing_header_says_what_to_set() {
        let told = explain(
            "k.cu(1): catastrophic error: could not open source file \"mma.h\"",
            "x",
        );
        assert!(told.contains("CUDA_PATH"), "{told}");
    }
}

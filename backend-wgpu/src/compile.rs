//! From a CubeCL kernel to WGSL. No device is needed for it.

use anymesh_launcher::{Compiler, Image};
use cubecl::{
    Compiler as _, CubeKernel, WgpuCompilationOptions, define_kernel,
    ir::{DeviceProperties, ElemType, TargetProperties, UIntKind},
    wgpu::WgslCompiler,
};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Makes kernels for one device.
pub(crate) struct Kernels {
    properties: DeviceProperties,
    options: WgpuCompilationOptions,
}

impl Kernels {
    /// For a device that CubeCL says this of.
    pub(crate) fn new(properties: DeviceProperties) -> Self {
        let options = WgpuCompilationOptions {
            supports_u64: properties.supports_type(ElemType::UInt(UIntKind::U64)),
            ..Default::default()
        };
        Self {
            properties,
            options,
        }
    }

    fn write(&self, kernel: &dyn CubeKernel) -> Result<Image, String> {
        let definition = define_kernel(kernel).map_err(|e| e.to_string())?;
        let (entry, block) = (
            definition.settings.kernel_name.clone(),
            definition.settings.cube_dim,
        );
        let shader = WgslCompiler
            .compile(definition, &self.options)
            .map_err(|e| e.to_string())?;
        let (wanted, most) = (
            shader.shared_memory_size,
            self.properties.hardware.max_shared_memory_size,
        );
        if wanted > most {
            return Err(format!(
                "it wants {wanted} bytes of shared memory, the device has {most}"
            ));
        }
        let text = shader.to_string();
        Ok(Image {
            bound: bound(&text),
            code: text.into_bytes(),
            entry,
            shared: wanted,
            block: [block.x, block.y, block.z],
            io: shader.io.clone(),
        })
    }
}

impl Compiler for Kernels {
    fn runtime(&self) -> &'static str {
        "wgpu"
    }

    fn properties(&self) -> DeviceProperties {
        self.properties.clone()
    }

    fn target(&self) -> TargetProperties {
        TargetProperties {
            mma: Default::default(),
        }
    }

    fn image(&self, _: &str, kernel: &dyn CubeKernel) -> Result<Image, String> {
        // What CubeCL cannot write, or panics at, is told.
        catch_unwind(AssertUnwindSafe(|| self.write(kernel))).unwrap_or_else(|panic| {
            let text = (panic.downcast_ref::<&str>().map(ToString::to_string))
                .or_else(|| panic.downcast_ref::<String>().cloned());
            Err(text.unwrap_or_else(|| "CubeCL's compiler panicked".into()))
        })
    }
}

/// What a shader binds, in order, and whether it says that it writes there.
fn bound(wgsl: &str) -> Vec<bool> {
    let declared = wgsl.split("@binding(").skip(1).filter_map(|rest| {
        let (number, rest) = rest.split_once(')')?;
        let (kind, _) = rest.split_once('>')?;
        Some((
            number.trim().parse::<usize>().ok()?,
            kind.contains("read_write"),
        ))
    });
    let mut all: Vec<(usize, bool)> = declared.collect();
    all.sort_unstable();
    all.into_iter().map(|(_, written)| written).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_shader_binds_is_read_from_its_text() {
        let text = "@group(0) @binding(1) var<storage, read_write> b: array<u32>;\n\
                    @group(0) @binding(0) var<storage, read> a: array<u32>;\n\
                    @group(0) @binding(2) var<storage, read> info: Info;\n fn main() {}";
        assert_eq!(bound(text), [false, true, false]);
        assert_eq!(bound("fn main() {}"), [false; 0]);
    }
}

//! The one way from an op to a kernel. What a device cannot hold is refused before the launch, and
//! what comes back are tensors.

use crate::{
    Device, Layout, Mesh, Result, Shape, Tensor,
    backend::{CheckIndexCall, Kernel},
    tensor::Outputs,
};

/// Runs a kernel with plain operands that lie on `mesh`, and gives a tensor for each output. Inlined,
/// so that the kernel is made where it is launched from, and not copied there.
#[inline(always)]
pub(crate) fn launch(mesh: &Mesh, kernel: impl Into<Kernel>) -> Result<Outputs> {
    let mut outputs = Outputs::new();
    for view in mesh.device(0).launch(kernel)? {
        outputs.push(Tensor::from_view(view, mesh));
    }
    Ok(outputs)
}

/// [`launch`] of a kernel with one output, which to the op has another shape of as many elements.
pub(crate) fn launch_as(
    mesh: &Mesh,
    shape: impl Into<Shape>,
    kernel: impl Into<Kernel>,
) -> Result<Tensor> {
    let mut view = mesh.device(0).launch(kernel)?.remove(0);
    let shape = shape.into();
    debug_assert_eq!(view.layout.shape.numel(), shape.numel());
    view.layout = Layout::contiguous(shape);
    Ok(Tensor::from_view(view, mesh))
}

/// [`launch`] of a fused kernel; `None` where the device has it not, and it is to be composed.
pub(crate) fn launch_fused(mesh: &Mesh, kernel: impl Into<Kernel>) -> Result<Option<Outputs>> {
    let kernel = kernel.into();
    if mesh.device(0).backend().supports(&kernel) {
        launch(mesh, kernel).map(Some)
    } else {
        Ok(None)
    }
}

/// Has indices checked against the size of the dimension that they index. A device may report what
/// is wrong only later.
pub(crate) fn check_index(device: &Device, call: CheckIndexCall) -> Result<()> {
    device.launch(call).map(drop)
}

//! The one tensor type.

use crate::grad::Edge;
use crate::{
    Buffer, DType, Device, Element, Error, Layout, Mesh, Result, Scalar, Shape, Sharding, View,
};
use std::sync::Arc;

/// A multi-dimensional array: a global shape, a dtype, a sharding over a mesh, and the shards this
/// process can address.
///
/// Tensors are values: no op changes one, views share memory, cloning is free.
///
/// ```
/// # use anymesh_backend_cpu as cpu;
/// # use anymesh_core::Tensor;
/// let device = cpu::device();
/// let x = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0], [2, 2], &device)?;
/// let y = (&x.t()? + &x)?;
/// assert_eq!(y.to_vec::<f32>()?, [2.0, 5.0, 5.0, 8.0]);
/// assert_eq!(y.type_string(), "f32[2, 2]");
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Tensor(Arc<Inner>);

/// The results of an op.
pub(crate) type Outputs = smallvec::SmallVec<[Tensor; 1]>;

#[derive(Clone)]
struct Inner {
    dtype: DType,
    shape: Shape,
    mesh: Mesh,
    sharding: Sharding,
    /// One for each addressable rank of the mesh.
    shards: smallvec::SmallVec<[Shard; 1]>,
    /// Where it came from, if gradients are to flow there.
    edge: Option<Edge>,
}

/// What one rank holds: memory and how to read it. Zero-element shards have no memory.
#[derive(Clone, Debug)]
struct Shard {
    buffer: Option<Buffer>,
    layout: Layout,
}

impl Tensor {
    /// A tensor from host data in row-major order.
    pub fn from_slice<T: Element>(
        data: &[T],
        shape: impl Into<Shape>,
        device: &Device,
    ) -> Result<Self> {
        Self::from_bytes(bytemuck::cast_slice(data), T::DTYPE, shape, device)
    }

    /// A tensor from stored bytes: little-endian elements in row-major order.
    pub fn from_bytes(
        bytes: &[u8],
        dtype: DType,
        shape: impl Into<Shape>,
        device: &Device,
    ) -> Result<Self> {
        let shape = shape.into();
        let elements = shape.checked_numel("from_bytes")?;
        if bytes.len() != elements * dtype.size() {
            let detail = format!(
                "{dtype}{shape} needs {} bytes of data, got {}",
                elements * dtype.size(),
                bytes.len()
            );
            return Err(Error::Shape {
                op: "from_bytes",
                detail,
            });
        }
        device.check(dtype, elements)?;
        let buffer = if elements == 0 {
            None
        } else {
            Some(device.upload(bytes)?)
        };
        Ok(Self::assemble(
            buffer,
            dtype,
            Layout::contiguous(shape),
            Mesh::single(device),
        ))
    }

    /// A 0-d tensor.
    pub fn scalar<T: Element>(value: T, device: &Device) -> Result<Self> {
        Self::from_slice(&[value], (), device)
    }

    /// A tensor on a mesh from what each addressable rank holds. The caller has checked that the
    /// parts fit.
    pub(crate) fn from_parts(
        mesh: &Mesh,
        sharding: Sharding,
        dtype: DType,
        shape: Shape,
        parts: impl IntoIterator<Item = Self>,
    ) -> Self {
        let shards = parts.into_iter().map(|part| part.shard().clone()).collect();
        Self(Arc::new(Inner {
            dtype,
            shape,
            mesh: mesh.clone(),
            sharding,
            shards,
            edge: None,
        }))
    }

    /// What the `i`-th addressable rank holds, as a plain tensor on its device.
    pub(crate) fn part(&self, i: usize) -> Self {
        let shard = self.0.shards[i].clone();
        let (dtype, shape, mesh) = (
            self.0.dtype,
            shard.layout.shape.clone(),
            self.0.mesh.local_mesh(i).clone(),
        );
        Self(Arc::new(Inner {
            dtype,
            shape,
            mesh,
            sharding: Sharding::replicated(),
            shards: smallvec::smallvec![shard],
            edge: None,
        }))
    }

    /// Whether two handles are the same tensor.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Whether the first addressable shards of two tensors are the same memory, as views of one
    /// tensor are.
    pub fn shares_memory(&self, other: &Self) -> bool {
        matches!((&self.shard().buffer, &other.shard().buffer), (Some(a), Some(b)) if a.same(b))
    }

    /// Whether it lies on a single device, without a mesh.
    pub fn is_plain(&self) -> bool {
        self.0.mesh.is_single()
    }

    fn assemble(buffer: Option<Buffer>, dtype: DType, layout: Layout, mesh: Mesh) -> Self {
        let shard = Shard { buffer, layout };
        Self(Arc::new(Inner {
            dtype,
            shape: shard.layout.shape.clone(),
            mesh,
            sharding: Sharding::replicated(),
            shards: smallvec::smallvec![shard],
            edge: None,
        }))
    }

    /// A plain tensor on `mesh` that reads a view.
    pub(crate) fn from_view(view: View, mesh: &Mesh) -> Self {
        Self::assemble(Some(view.buffer), view.dtype, view.layout, mesh.clone())
    }

    /// A result without elements, where this tensor lies. Nothing is launched for it; a dtype that
    /// the device cannot hold is refused all the same.
    pub(crate) fn no_elements(&self, dtype: DType, shape: Shape) -> Result<Self> {
        self.device().check(dtype, 0)?;
        Ok(Self::assemble(
            None,
            dtype,
            Layout::contiguous(shape),
            self.0.mesh.clone(),
        ))
    }

    /// A tensor without elements.
    pub(crate) fn nothing(dtype: DType, shape: Shape, device: &Device) -> Self {
        Self::assemble(None, dtype, Layout::contiguous(shape), Mesh::single(device))
    }

    /// The same memory seen through another layout. Only for plain tensors.
    pub(crate) fn with_layout(&self, layout: Layout) -> Self {
        debug_assert!(
            self.is_plain(),
            "a view of a sharded tensor bypassed its rule"
        );
        debug_assert!(
            !crate::grad::is_recording(&[self]),
            "a view of a tracked tensor bypassed the tape"
        );
        Self::assemble(
            self.shard().buffer.clone(),
            self.0.dtype,
            layout,
            self.0.mesh.clone(),
        )
    }

    /// The op or leaf that made it, where gradients flow.
    pub(crate) fn edge(&self) -> Option<&Edge> {
        self.0.edge.as_ref()
    }

    /// Makes it the result of a node.
    pub(crate) fn attach(&mut self, edge: Edge) {
        Arc::make_mut(&mut self.0).edge = Some(edge);
    }

    /// The same values without a past: gradients stop here.
    pub fn detach(&self) -> Tensor {
        if self.0.edge.is_none() {
            return self.clone();
        }
        Self(Arc::new(Inner {
            edge: None,
            ..(*self.0).clone()
        }))
    }

    fn shard(&self) -> &Shard {
        &self.0.shards[0]
    }

    /// The layout of the local elements.
    pub fn layout(&self) -> &Layout {
        &self.shard().layout
    }

    /// The operand a kernel takes. Only for tensors with elements.
    pub(crate) fn view(&self) -> Result<View> {
        if !self.is_plain() {
            let detail = format!(
                "{} lies on {}, and the op has no rule for meshes: call `full_tensor()` first",
                self.type_string(),
                self.mesh()
            );
            return Err(Error::Argument { op: "view", detail });
        }
        if crate::grad::is_recording(&[self]) {
            let detail = "a kernel was to read a tracked tensor past the tape: this op has no gradient, use `detach()` or `no_grad`".into();
            return Err(Error::Gradient { op: "view", detail });
        }
        let shard = self.shard();
        let buffer = shard.buffer.clone().ok_or_else(|| Error::Argument {
            op: "view",
            detail: "a tensor without elements reached a kernel".into(),
        })?;
        Ok(View {
            buffer,
            dtype: self.0.dtype,
            layout: shard.layout.clone(),
        })
    }

    /// The global shape.
    pub fn shape(&self) -> &Shape {
        &self.0.shape
    }

    /// The global dimensions.
    pub fn dims(&self) -> &[usize] {
        self.0.shape.dims()
    }

    /// The number of dimensions.
    pub fn rank(&self) -> usize {
        self.0.shape.rank()
    }

    /// The number of elements.
    pub fn numel(&self) -> usize {
        self.0.shape.numel()
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// The mesh it lies on.
    pub fn mesh(&self) -> &Mesh {
        &self.0.mesh
    }

    /// How it lies on the mesh.
    pub fn sharding(&self) -> &Sharding {
        &self.0.sharding
    }

    /// The device of the first addressable rank.
    pub fn device(&self) -> &Device {
        self.0.mesh.device(0)
    }

    /// Dtype, shape and sharding as text, such as `f32[2, 3]`.
    pub fn type_string(&self) -> String {
        self.0
            .sharding
            .type_string(self.0.dtype, &self.0.shape, &self.0.mesh)
    }

    /// Whether the elements are dense and in row-major order.
    pub fn is_contiguous(&self) -> bool {
        self.layout().is_contiguous()
    }

    /// The stored bytes in row-major order. This is where faults of earlier kernels surface.
    pub async fn to_bytes_async(&self) -> Result<Vec<u8>> {
        if self.numel() == 0 {
            // There is nothing to read but what went wrong.
            self.device().sync_async().await?;
            return Ok(Vec::new());
        }
        if !self.is_plain() {
            return Box::pin(self.detach().full_tensor()?.to_bytes_async()).await;
        }
        let dense = self.detach().contiguous()?;
        let shard = dense.shard();
        let Some(buffer) = &shard.buffer else {
            return Ok(Vec::new());
        };
        let size = self.dtype().size();
        let start = shard.layout.offset * size;
        self.device()
            .backend()
            .download(buffer, start..start + self.numel() * size)
            .await
    }

    /// The elements in row-major order. `T` must be the tensor's dtype; cast first to convert.
    pub async fn to_vec_async<T: Element>(&self) -> Result<Vec<T>> {
        if T::DTYPE != self.dtype() {
            return Err(Error::DType {
                op: "to_vec",
                dtype: self.dtype(),
                expected: T::DTYPE.name(),
            });
        }
        Ok(T::from_bytes(&self.to_bytes_async().await?))
    }

    /// The stored bytes in row-major order.
    #[cfg(not(target_family = "wasm"))]
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        pollster::block_on(self.to_bytes_async())
    }

    /// Writes the stored bytes in row-major order to memory that is there already, which has
    /// exactly their size.
    ///
    /// ```
    /// # use anymesh_core::{DType, Tensor};
    /// # let device = anymesh_backend_cpu::device();
    /// let x = Tensor::arange(0, 6, 1, DType::U8, &device)?.reshape([2, 3])?.transpose(0, 1)?;
    /// let mut bytes = [0; 6];
    /// x.copy_bytes(&mut bytes)?;
    /// assert_eq!(bytes, [0, 3, 1, 4, 2, 5]);
    /// assert!(x.copy_bytes(&mut [0; 7]).is_err());
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[cfg(not(target_family = "wasm"))]
    pub fn copy_bytes(&self, out: &mut [u8]) -> Result<()> {
        let size = self.dtype().size();
        if out.len() != self.numel() * size {
            let detail = format!(
                "{} has {} bytes, the memory has {}",
                self.type_string(),
                self.numel() * size,
                out.len()
            );
            return Err(Error::Argument {
                op: "copy_bytes",
                detail,
            });
        }
        let in_place = if self.is_plain() {
            self.shard()
                .buffer
                .as_ref()
                .and_then(|b| self.device().backend().in_place(b))
        } else {
            None
        };
        let Some(bytes) = in_place.filter(|_| !out.is_empty()) else {
            out.copy_from_slice(&self.to_bytes()?);
            return Ok(());
        };
        let (run, first) = self.shard().layout.runs();
        for (to, at) in out.chunks_exact_mut(run * size).zip(first.positions()) {
            to.copy_from_slice(&bytes[at * size..(at + run) * size]);
        }
        Ok(())
    }

    /// The elements in row-major order. `T` must be the tensor's dtype; cast first to convert.
    #[cfg(not(target_family = "wasm"))]
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        pollster::block_on(self.to_vec_async())
    }

    /// The only element, of any dtype.
    pub async fn item_async(&self) -> Result<Scalar> {
        if self.numel() != 1 {
            return Err(Error::Shape {
                op: "item",
                detail: format!(
                    "{} has {} elements, exactly one is needed",
                    self.type_string(),
                    self.numel()
                ),
            });
        }
        Ok(match self.dtype().kind() {
            crate::Kind::Bool => Scalar::Bool(self.to_vec_async::<bool>().await?[0]),
            crate::Kind::I64 => Scalar::Int(self.to_vec_async::<i64>().await?[0]),
            crate::Kind::F64 => Scalar::Float(self.to_vec_async::<f64>().await?[0]),
            crate::Kind::F32 => self
                .detach()
                .cast(DType::F32)?
                .to_vec_async::<f32>()
                .await?[0]
                .into(),
            crate::Kind::U32 => self
                .detach()
                .cast(DType::U32)?
                .to_vec_async::<u32>()
                .await?[0]
                .into(),
            crate::Kind::I32 => self.to_vec_async::<i32>().await?[0].into(),
        })
    }

    /// The only element, of any dtype.
    #[cfg(not(target_family = "wasm"))]
    pub fn item(&self) -> Result<Scalar> {
        pollster::block_on(self.item_async())
    }

    /// The same values on another device, through the host.
    pub async fn to_device_async(&self, device: &Device) -> Result<Self> {
        if device == self.device() && self.is_plain() {
            return Ok(self.clone());
        }
        if crate::grad::is_recording(&[self]) {
            let detail = "a tracked tensor cannot be moved while waiting: `detach()` it first, or use `to_mesh`".into();
            return Err(Error::Gradient {
                op: "to_device",
                detail,
            });
        }
        Self::from_bytes(
            &self.to_bytes_async().await?,
            self.dtype(),
            self.shape(),
            device,
        )
    }
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} on {}", self.type_string(), self.mesh())
    }
}

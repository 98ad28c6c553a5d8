//! The one tensor type.

mod read;

use crate::{
    Buffer, DType, Device, Element, Error, IntoPlace, Layout, Mesh, NoGradient, Result, Shape,
    Sharding, View,
};
use crate::{
    forms::{Forms, Holder},
    grad::Edge,
};
use smallvec::SmallVec;
use std::sync::{Arc, OnceLock};

/// A multi-dimensional array: a global shape, a dtype, a sharding over a mesh, and the shards this
/// process can address.
///
/// Tensors are values: no op changes one, views share memory, cloning is free.
///
/// ```
/// # use anymesh_backend_cpu as cpu;
/// # use anymesh_core::Tensor;
/// let device = cpu::device();
/// let x = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &device)?;
/// let y = (x.t()? * 2.0 + &x)?;
/// assert_eq!(y.to_vec::<f32>()?, [3.0, 8.0, 7.0, 12.0]);
/// assert_eq!(y.to_string(), "[[ 3.0,  8.0],\n [ 7.0, 12.0]]\nf32[2, 2] on cpu");
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
    shards: Memory,
    /// The other shardings that the value is at hand in; none where it is plain.
    forms: Option<Arc<Forms>>,
    /// What holds some of them, made when there is something to hold; none where it is plain, or
    /// what a gradient keeps.
    holder: Option<OnceLock<Arc<Holder>>>,
    /// Where it came from, if gradients are to flow there.
    edge: Option<Edge>,
}

/// One shard for each rank that a mesh [holds](Mesh::held).
pub(crate) type Shards = [Shard];

/// What those ranks hold. A plain tensor has one rank and no other form to share with.
#[derive(Clone)]
enum Memory {
    Plain(Shard),
    Mesh(Arc<Shards>),
}

impl Memory {
    fn shard(&self, i: usize) -> &Shard {
        match self {
            Memory::Plain(shard) => shard,
            Memory::Mesh(shards) => &shards[i],
        }
    }
}

/// What one rank holds: memory and how to read it. Zero-element shards have no memory.
#[derive(Clone, Debug)]
pub(crate) struct Shard {
    buffer: Option<Buffer>,
    layout: Layout,
}

impl Tensor {
    /// A tensor from host data in row-major order; on a mesh each rank gets its part.
    pub fn from_slice<T: Element>(
        data: &[T],
        shape: impl Into<Shape>,
        place: impl IntoPlace,
    ) -> Result<Self> {
        Self::from_bytes(bytemuck::cast_slice(data), T::DTYPE, shape, place)
    }

    /// A tensor from stored bytes: little-endian elements in row-major order. On a mesh each rank
    /// gets its part.
    pub fn from_bytes(
        bytes: &[u8],
        dtype: DType,
        shape: impl Into<Shape>,
        place: impl IntoPlace,
    ) -> Result<Self> {
        let shape = shape.into();
        let place = place.into_place(shape.rank())?;
        let elements = shape.checked_numel("from_bytes")?;
        if Some(bytes.len()) != elements.checked_mul(dtype.size()) {
            let detail = format!(
                "{dtype}{shape} has {elements} elements of {} bytes each, got {} bytes",
                dtype.size(),
                bytes.len()
            );
            return Err(Error::shape("from_bytes", [(dtype, &shape)], detail));
        }
        place.build(dtype, &shape, |device, region| {
            let part = region.of(&Layout::contiguous(shape.clone()));
            let size = dtype.size();
            let dense;
            let bytes = if part.is_contiguous() {
                &bytes[part.offset * size..][..part.shape.numel() * size]
            } else {
                let (run, first) = part.runs();
                dense = first
                    .positions()
                    .flat_map(|at| &bytes[at * size..(at + run) * size])
                    .copied()
                    .collect::<Vec<u8>>();
                &dense
            };
            Self::uploaded(bytes, dtype, part.shape, device)
        })
    }

    /// A plain tensor from as many bytes as it has.
    fn uploaded(bytes: &[u8], dtype: DType, shape: Shape, device: &Device) -> Result<Self> {
        device.check(dtype, shape.numel())?;
        let buffer = if bytes.is_empty() {
            None
        } else {
            Some(device.upload(bytes)?)
        };
        let layout = Layout::contiguous(shape);
        Ok(Self::assemble(buffer, dtype, layout, Mesh::single(device)))
    }

    /// A tensor on a mesh from what each held rank has, or each addressable one. The caller has
    /// checked that the parts fit.
    pub(crate) fn from_parts(
        mesh: &Mesh,
        sharding: Sharding,
        dtype: DType,
        shape: Shape,
        parts: impl IntoIterator<Item = Self>,
    ) -> Self {
        let shards = parts.into_iter().map(|part| part.shard().clone());
        let mut shards: SmallVec<[Shard; 1]> = match mesh.stands_for_all() {
            true => shards.last().into_iter().collect(),
            false => shards.collect(),
        };
        let shards: Arc<Shards> = match (shards.len(), shards.pop()) {
            (1, Some(only)) => Arc::new([only]),
            (_, last) => shards.into_iter().chain(last).collect(),
        };
        Self(Arc::new(Inner {
            dtype,
            shape,
            mesh: mesh.clone(),
            sharding,
            shards: Memory::Mesh(shards),
            forms: Some(Arc::default()),
            holder: Some(OnceLock::new()),
            edge: None,
        }))
    }

    /// A value that lies as `like` does, where that is on a mesh of its shape, from the memory of each
    /// held rank and how it is read.
    pub(crate) fn from_held(
        like: &Self,
        dtype: DType,
        held: impl Iterator<Item = (Option<Buffer>, Layout)>,
    ) -> Self {
        let mut shards = held.map(|(buffer, layout)| Shard { buffer, layout });
        let is_plain = like.is_plain();
        let shards = match is_plain.then(|| shards.next()).flatten() {
            Some(shard) => Memory::Plain(shard),
            None => Memory::Mesh(shards.collect()),
        };
        let shape = match &shards {
            Memory::Plain(shard) => shard.layout.shape.clone(),
            Memory::Mesh(_) => like.0.shape.clone(),
        };
        let value = Self(Arc::new(Inner {
            dtype,
            shape,
            mesh: like.0.mesh.clone(),
            sharding: like.0.sharding.clone(),
            shards,
            forms: (!is_plain).then(Arc::default),
            holder: (!is_plain).then(OnceLock::new),
            edge: None,
        }));
        value.computed()
    }

    /// The same as a value that an op computed from others.
    pub(crate) fn computed(self) -> Self {
        if let Some(forms) = self.forms() {
            forms.set_computed();
        }
        self
    }

    /// The same value in another sharding, without a past.
    pub(crate) fn with_form(&self, sharding: Sharding, shards: Arc<Shards>) -> Self {
        Self(Arc::new(Inner {
            dtype: self.0.dtype,
            shape: self.0.shape.clone(),
            mesh: self.0.mesh.clone(),
            sharding,
            shards: Memory::Mesh(shards),
            forms: self.0.forms.clone(),
            // One for all forms that the program has.
            holder: self.holder().map(|holder| holder.clone().into()),
            edge: None,
        }))
    }

    /// The other shardings that the value is at hand in; none where it is plain.
    pub(crate) fn forms(&self) -> Option<&Arc<Forms>> {
        self.0.forms.as_ref()
    }

    /// What holds forms of the value for the program.
    pub(crate) fn holder(&self) -> Option<&Arc<Holder>> {
        let holder = self.0.holder.as_ref()?;
        Some(holder.get_or_init(Arc::default))
    }

    /// The same for a gradient to keep: it holds nothing beside itself.
    pub(crate) fn without_holder(&self) -> Self {
        Self(Arc::new(Inner {
            holder: None,
            ..(*self.0).clone()
        }))
    }

    /// What the addressable ranks hold; none where it is plain.
    pub(crate) fn shared_shards(&self) -> Option<&Arc<Shards>> {
        match &self.0.shards {
            Memory::Plain(_) => None,
            Memory::Mesh(shards) => Some(shards),
        }
    }

    /// What the `i`-th addressable rank has, as a plain tensor on its device. Where another rank
    /// stands for it, a window of what that one holds, which is as large.
    pub(crate) fn part(&self, i: usize) -> Self {
        if !self.0.mesh.stands_for_all() {
            return self.held(i);
        }
        let mut region = self.0.sharding.region(&self.0.mesh, i, &self.0.shape);
        region.start.fill(0);
        let held = self.held(0);
        match region.numel() {
            0 => Self::nothing(self.0.dtype, Shape::from(region.shape), self.device()),
            _ if held.dims() == &region.shape[..] => held,
            _ => held.with_layout(region.of(held.layout())),
        }
    }

    /// What the `i`-th held rank has, as a plain tensor on its device.
    pub(crate) fn held(&self, i: usize) -> Self {
        let shard = self.0.shards.shard(i).clone();
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
            shards: Memory::Plain(shard),
            forms: None,
            holder: None,
            edge: None,
        }))
    }

    /// How a kernel reads what the `i`-th held rank has, of a tensor that is not tracked.
    pub(crate) fn held_view(&self, i: usize) -> Result<View> {
        let shard = self.0.shards.shard(i);
        let buffer = shard.buffer.clone().ok_or_else(|| {
            let detail = match shard.layout.shape.numel() {
                0 => "a tensor without elements reached a kernel",
                _ => "its values were taken out of it: give it others by `with_values` first",
            };
            Error::argument("view", "self", detail).of([self])
        })?;
        Ok(View {
            buffer,
            dtype: self.0.dtype,
            layout: shard.layout.clone(),
        })
    }

    /// The shape of what the `i`-th held rank has.
    pub(crate) fn held_shape(&self, i: usize) -> &Shape {
        &self.0.shards.shard(i).layout.shape
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

    /// Whether this is the only handle on it and on its memory, of all ranks that are here.
    pub(crate) fn is_sole(&self) -> bool {
        let shared = matches!(&self.0.shards, Memory::Mesh(all) if Arc::strong_count(all) > 1);
        let mesh = self.mesh();
        let sole = |i| {
            let view = self.held_view(i);
            view.is_ok_and(|view| mesh.device(i).backend().is_sole(&view.buffer))
        };
        Arc::strong_count(&self.0) == 1
            && !shared
            && !crate::grad::is_recording(&[self])
            && (0..mesh.held().len()).all(sole)
    }

    /// The memory of a rank that it holds, where this is the only handle on the tensor, and what the
    /// rank has is dense and all that the memory holds. Others may have that too.
    pub(crate) fn own_buffer(&self, rank: usize) -> Option<Buffer> {
        let Shard { buffer, layout } = self.0.shards.shard(rank);
        let whole = layout.offset == 0 && layout.is_contiguous();
        let shared = matches!(&self.0.shards, Memory::Mesh(all) if Arc::strong_count(all) > 1);
        let sole = Arc::strong_count(&self.0) == 1 && !shared;
        let sole = sole && !crate::grad::is_recording(&[self]);
        buffer.clone().filter(|_| whole && sole)
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
            shards: Memory::Plain(shard),
            forms: None,
            holder: None,
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

    /// A plain dense tensor of memory that was filled from outside.
    pub(crate) fn of_memory(buffer: Buffer, dtype: DType, shape: Shape, device: &Device) -> Self {
        let layout = Layout::contiguous(shape);
        Self::assemble(Some(buffer), dtype, layout, Mesh::single(device))
    }

    /// Where the elements of a plain tensor are; `None` where it has none.
    pub(crate) fn memory(&self) -> Option<(&Buffer, &Layout)> {
        let shard = self.shard();
        Some((shard.buffer.as_ref()?, &shard.layout))
    }

    /// A tensor of a device without values, where `mesh` is that device: what a rank would receive.
    pub(crate) fn placeholder(dtype: DType, shape: &Shape, mesh: &Mesh) -> Result<Self> {
        let (device, elements) = (mesh.device(0), shape.checked_numel("placeholder")?);
        device.check(dtype, elements)?;
        let buffer = match elements {
            0 => None,
            _ => Some(
                device
                    .placeholder(elements * dtype.size())
                    .ok_or_else(|| crate::meta::no_values(device.name()))?,
            ),
        };
        let layout = Layout::contiguous(shape.clone());
        Ok(Self::assemble(buffer, dtype, layout, mesh.clone()))
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

    /// [`detach`](Self::detach) of a tensor that nobody needs with its past.
    pub(crate) fn without_past(mut self) -> Tensor {
        if self.0.edge.is_some() {
            Arc::make_mut(&mut self.0).edge = None;
        }
        self
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

    /// Takes the values out of a tensor, if this is the only handle on it and no other form of it on
    /// its mesh shares them: they are no longer part of the tape, and here is nothing to read until
    /// [`with_values`](Self::with_values) makes it anew. So whoever changes a parameter can give its
    /// memory [to what becomes of it](crate::ops::Expr::maps_over).
    ///
    /// ```
    /// # use anymesh_core::Tensor;
    /// # let device = anymesh_backend_cpu::device();
    /// let mut w = Tensor::new(&[1f32, 2.0], &device)?.require_grad()?;
    /// let values = w.take_values().expect("nobody else has it");
    /// assert_eq!(values.to_vec::<f32>()?, [1.0, 2.0]);
    /// assert!(w.to_vec::<f32>().is_err());
    /// let w = w.with_values(&values.mul(3.0)?)?;
    /// assert!(w.is_leaf() && w.to_vec::<f32>()? == [3.0, 6.0]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    pub fn take_values(&mut self) -> Option<Tensor> {
        let inner = Arc::get_mut(&mut self.0)?;
        match &mut inner.shards {
            Memory::Plain(shard) => {
                let (buffer, layout) = (shard.buffer.take()?, shard.layout.clone());
                let mesh = inner.mesh.clone();
                Some(Self::assemble(Some(buffer), inner.dtype, layout, mesh))
            }
            Memory::Mesh(shards) => {
                let own = Arc::get_mut(shards)?;
                let shards = (own.iter_mut())
                    .map(|shard| Shard {
                        buffer: shard.buffer.take(),
                        layout: shard.layout.clone(),
                    })
                    .collect();
                // What else the value is at hand in is not taken, and goes with it.
                inner.forms = Some(Arc::default());
                inner.holder = Some(OnceLock::new());
                Some(Self(Arc::new(Inner {
                    dtype: inner.dtype,
                    shape: inner.shape.clone(),
                    mesh: inner.mesh.clone(),
                    sharding: inner.sharding.clone(),
                    shards: Memory::Mesh(shards),
                    forms: Some(Arc::default()),
                    holder: Some(OnceLock::new()),
                    edge: None,
                })))
            }
        }
    }

    fn shard(&self) -> &Shard {
        self.0.shards.shard(0)
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
            return Err(Error::argument("view", "self", detail).of([self]));
        }
        if crate::grad::is_recording(&[self]) {
            let detail = "a kernel was to read a tracked tensor past the tape: this op has no gradient, use `detach()` or `no_grad`";
            return Err(Error::gradient("view", NoGradient::NotDifferentiable, detail).of([self]));
        }
        self.held_view(0)
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
}

/// Whether all operands are plain; an error where they lie on different meshes.
#[inline]
pub(crate) fn plain(op: &'static str, inputs: &[&Tensor]) -> Result<bool> {
    let Some((first, rest)) = inputs.split_first() else {
        return Ok(true);
    };
    let mesh = first.mesh();
    for other in rest {
        if other.mesh() != mesh {
            if other.mesh().is_single() && mesh.is_single() {
                return Err(Error::DeviceMismatch {
                    op,
                    left: mesh.to_string(),
                    right: other.mesh().to_string(),
                });
            }
            return Err(Error::MeshMismatch {
                op,
                left: mesh.to_string(),
                right: other.mesh().to_string(),
            });
        }
    }
    Ok(mesh.is_single())
}

//! Where a new tensor goes, and the ways on and off a mesh.

use crate::grad::{Back, Pulled, record1};
use crate::wait::wait;
use crate::{
    DType, Device, Element, Error, Mesh, OperandType, Reduction, Region, Result, Shape, Sharding,
    ShardingSpec, Tensor, TensorType, TypeSpec, observe, operand::type_on, transport::told,
};
use smallvec::SmallVec;
use std::collections::HashMap;

/// A mesh and how to lie on it. A device is the place of plain tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The mesh.
    pub mesh: Mesh,
    /// How to lie on it.
    pub sharding: Sharding,
}

/// On this device, without a mesh.
impl From<&Device> for Place {
    fn from(device: &Device) -> Self {
        Self::from(&Mesh::single(device))
    }
}

/// On every rank of the mesh, whole.
impl From<&Mesh> for Place {
    fn from(mesh: &Mesh) -> Self {
        Self {
            mesh: mesh.clone(),
            sharding: Sharding::replicated(),
        }
    }
}

impl From<&Place> for Place {
    fn from(place: &Place) -> Self {
        place.clone()
    }
}

/// Where a tensor lies, with nothing partial.
impl From<&Tensor> for Place {
    fn from(tensor: &Tensor) -> Self {
        Self {
            mesh: tensor.mesh().clone(),
            sharding: tensor.sharding().whole(),
        }
    }
}

/// Anything that says where a tensor goes: what constructors take.
///
/// `&device` is a plain tensor; `&mesh` the whole tensor on every rank; `(&mesh, sharding)` a
/// tensor that is cut as a [`Sharding`] or a text says; `&tensor` where another tensor lies.
///
/// ```
/// # use anymesh_core::{DType, Mesh, Sharding, Tensor};
/// # let device = anymesh_backend_cpu::device();
/// let mesh = Mesh::new("dp=2, tp=2", &device)?;
/// let ty = |t: Tensor| t.type_string();
/// assert_eq!(ty(Tensor::zeros([4, 6], DType::F32, &device)?), "f32[4, 6]");
/// assert_eq!(ty(Tensor::zeros([4, 6], DType::F32, &mesh)?), "f32[4, 6]");
/// let x = Tensor::zeros([4, 6], DType::F32, (&mesh, "[@dp, @tp]"))?;
/// assert_eq!(x.type_string(), "f32[4@dp, 6@tp]");
/// assert_eq!(ty(Tensor::ones([8, 2], DType::I32, &x)?), "i32[8@dp, 2@tp]");
/// let columns = Sharding::replicated().cut(1, mesh.axis("tp")?);
/// assert_eq!(ty(Tensor::zeros([4, 6], DType::F32, (&mesh, columns))?), "f32[4, 6@tp]");
/// # Ok::<(), anymesh_core::Error>(())
/// ```
pub trait IntoPlace {
    /// The place of a tensor of `rank` dimensions.
    fn into_place(self, rank: usize) -> Result<Place>;
}

impl<T: Into<Place>> IntoPlace for T {
    fn into_place(self, _: usize) -> Result<Place> {
        Ok(self.into())
    }
}

impl<S: IntoSharding> IntoPlace for (&Mesh, S) {
    fn into_place(self, rank: usize) -> Result<Place> {
        let (mesh, sharding) = self;
        Ok(Place {
            mesh: mesh.clone(),
            sharding: sharding.into_sharding(mesh, rank)?,
        })
    }
}

impl Place {
    /// A tensor here, part by part: `make` gets the device of a rank and the box it holds. Along
    /// partial axes only the first rank's part is made; the others hold the identity of the
    /// reduction.
    pub(crate) fn build(
        &self,
        dtype: DType,
        shape: &Shape,
        make: impl Fn(&Device, &Region) -> Result<Tensor>,
    ) -> Result<Tensor> {
        self.sharding.check(&self.mesh, shape.rank())?;
        shape.checked_numel("place")?;
        let whole = Region {
            start: smallvec::smallvec![0; shape.rank()],
            shape: shape.dims().into(),
        };
        if self.mesh.is_single() {
            return make(self.mesh.device(0), &whole);
        }
        let _unseen = observe::unseen();
        let mut parts: Vec<Tensor> = Vec::with_capacity(self.mesh.held().len());
        // Which parts have a box, or hold identities instead of it: one on each device.
        let mut made: HashMap<(Region, Option<Reduction>), SmallVec<[usize; 1]>> = HashMap::new();
        for (i, rank) in self.mesh.held() {
            let region = self.sharding.region(&self.mesh, rank, shape);
            let filled =
                crate::reshard::filled(&self.mesh, rank, &Sharding::replicated(), &self.sharding);
            let device = self.mesh.device(i);
            // Tensors are values: ranks of one device that hold the same share it.
            let there = made.entry((region.clone(), filled)).or_default();
            let same = there.iter().find(|j| self.mesh.device(**j) == device);
            if let Some(j) = same {
                parts.push(parts[*j].clone());
                continue;
            }
            there.push(i);
            let part = match filled {
                Some(reduction) => Tensor::full(
                    Shape::from(region.shape.clone()),
                    reduction.identity(dtype),
                    dtype,
                    device,
                ),
                None => make(device, &region),
            };
            parts.push(told(&self.mesh, Some(rank), part)?);
        }
        Ok(Tensor::from_parts(
            &self.mesh,
            self.sharding.clone(),
            dtype,
            shape.clone(),
            parts,
        ))
    }
}

impl Tensor {
    /// This tensor on another mesh (or on the same one, in another way). A plain tensor is cut up;
    /// one that lies on a mesh is moved by the cheapest plan. Where processes have ranks of one mesh
    /// or the other, all of them call this.
    ///
    /// ```
    /// # use anymesh_core::{Mesh, Tensor, TensorType};
    /// # let device = anymesh_backend_cpu::device();
    /// let mesh = Mesh::new("dp=2, tp=2", &device)?;
    /// let x = Tensor::arange(0, 10, 1, anymesh_core::DType::F32, &device)?.to_mesh(&mesh, "[@tp]")?;
    /// assert_eq!(x.type_string(), "f32[10@tp]");
    /// assert_eq!(x.shards()[1].1.to_vec::<f32>()?, [5.0, 6.0, 7.0, 8.0, 9.0]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn to_mesh(&self, mesh: &Mesh, sharding: impl IntoSharding) -> Result<Tensor> {
        let sharding = sharding.into_sharding(mesh, self.rank())?;
        sharding.check(mesh, self.rank())?;
        let run = || {
            if self.is_plain() {
                let place = Place {
                    mesh: mesh.clone(),
                    sharding,
                };
                return place.build(self.dtype(), self.shape(), |device, region| {
                    self.window(region)?.copied_to(device)
                });
            }
            crate::reshard::to_mesh(self, mesh, &sharding)
        };
        record1("reshard", &[self], run, |_| Ok(self.way_back()))
    }

    /// The gradient of moving a tensor: moved back to where it lay. Parts of a sum each have the
    /// gradient of the sum, so they need no way back.
    fn way_back(&self) -> impl Fn(&Back<'_>) -> Result<Pulled> + Send + Sync + 'static {
        let (mesh, sharding) = (self.mesh().clone(), self.sharding().clone());
        move |b: &Back<'_>| {
            let gradient = b.grad()?;
            Ok(smallvec::smallvec![Some(if mesh.is_single() {
                gradient.full_tensor()?.moved_to(mesh.device(0))?
            } else if sharding.is_partial() && *gradient.mesh() == mesh {
                gradient.clone()
            } else {
                gradient.to_mesh(&mesh, sharding.whole())?
            })])
        }
    }

    /// The same values on another device, through the host, whole and without a mesh.
    #[track_caller]
    pub fn to_device(&self, device: &Device) -> Result<Tensor> {
        self.full_tensor()?.moved_to(device)
    }

    /// A plain tensor on another device; nothing happens if it is there.
    #[track_caller]
    fn moved_to(&self, device: &Device) -> Result<Tensor> {
        if self.device() == device {
            return Ok(self.clone());
        }
        record1(
            "to_device",
            &[self],
            || self.copied_to(device),
            |_| Ok(self.way_back()),
        )
    }

    /// The same values in another sharding of the same mesh, by the plan that the mesh's cost model
    /// likes best.
    #[track_caller]
    pub fn reshard(&self, sharding: impl IntoSharding) -> Result<Tensor> {
        let sharding = sharding.into_sharding(self.mesh(), self.rank())?;
        self.to_mesh(&self.mesh().clone(), sharding)
    }

    /// The whole tensor on one device, without a mesh: in every process that has a rank of its
    /// mesh, on the device of its first rank. All of those processes call this.
    #[track_caller]
    pub fn full_tensor(&self) -> Result<Tensor> {
        if self.is_plain() {
            return Ok(self.clone());
        }
        self.mesh().check_here("full_tensor")?;
        record1(
            "full_tensor",
            &[self],
            || Ok(self.reshard(Sharding::replicated())?.part(0)),
            |_| Ok(self.way_back()),
        )
    }

    /// A tensor on a mesh from what each addressable rank holds, in rank order. Every part must
    /// have the size that the sharding gives its rank.
    pub fn from_shards(ty: &TensorType, mesh: &Mesh, parts: &[Tensor]) -> Result<Tensor> {
        let op = "from_shards";
        ty.sharding.check(mesh, ty.shape.rank())?;
        if parts.len() != mesh.addressable().len() {
            return Err(Error::argument(
                op,
                "parts",
                format!(
                    "{} parts for {} addressable ranks",
                    parts.len(),
                    mesh.addressable().len()
                ),
            )
            .of(parts));
        }
        for (i, (rank, part)) in mesh.addressable().zip(parts).enumerate() {
            let region = ty.sharding.region(mesh, rank, &ty.shape);
            if part.dims() != &region.shape[..] || part.dtype() != ty.dtype || !part.is_plain() {
                let needed = ty.sharding.type_string(ty.dtype, &ty.shape, mesh);
                let detail = format!(
                    "rank {rank} of {needed} holds {}{}, got {}",
                    ty.dtype,
                    Shape::from(region.shape),
                    part.type_string()
                );
                return Err(Error::shape(
                    op,
                    [type_on(ty, mesh), OperandType::from(part).on_rank(rank)],
                    detail,
                ));
            }
            if part.device() != mesh.device(i) {
                return Err(Error::DeviceMismatch {
                    op,
                    left: mesh.device(i).to_string(),
                    right: part.device().to_string(),
                });
            }
        }
        if parts.is_empty() {
            // What others have, as this process sees it.
            return Tensor::zeros(ty.shape.clone(), ty.dtype, (mesh, &ty.sharding));
        }
        Ok(Self::from_parts(
            mesh,
            ty.sharding.clone(),
            ty.dtype,
            ty.shape.clone(),
            parts.iter().cloned(),
        ))
    }

    /// A tensor whose elements are a function of their global index; each rank computes its own.
    ///
    /// ```
    /// # use anymesh_core::Tensor;
    /// # let device = anymesh_backend_cpu::device();
    /// let x = Tensor::from_fn([2, 3], &device, |at| (10 * at[0] + at[1]) as f32)?;
    /// assert_eq!(x.to_vec::<f32>()?, [0.0, 1.0, 2.0, 10.0, 11.0, 12.0]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    pub fn from_fn<T: Element>(
        shape: impl Into<Shape>,
        place: impl IntoPlace,
        value: impl Fn(&[usize]) -> T,
    ) -> Result<Tensor> {
        let shape = shape.into();
        place
            .into_place(shape.rank())?
            .build(T::DTYPE, &shape, |device, region| {
                let mut at = region.start.clone();
                let values: Vec<T> = (0..region.numel())
                    .map(|mut i| {
                        for d in (0..at.len()).rev() {
                            at[d] = region.start[d] + i % region.shape[d];
                            i /= region.shape[d];
                        }
                        value(&at)
                    })
                    .collect();
                Tensor::from_slice(&values, Shape::from(region.shape.clone()), device)
            })
    }

    /// The parts this process holds: (rank, part), each a plain tensor on its device. They are
    /// detached: gradients do not flow through them (use [`spmd::apply`](crate::spmd::apply) with
    /// [`grad::custom`](crate::grad::custom) for that).
    pub fn shards(&self) -> Vec<(usize, Tensor)> {
        self.mesh()
            .addressable()
            .enumerate()
            .map(|(i, rank)| (rank, self.part(i)))
            .collect()
    }

    /// A box of a plain tensor, as a view.
    pub(crate) fn window(&self, region: &Region) -> Result<Tensor> {
        Ok(self.with_layout(region.of(self.layout())))
    }

    /// [`moved_to`](Self::moved_to) without its gradient.
    pub(crate) fn copied_to(&self, device: &Device) -> Result<Tensor> {
        if self.device() == device {
            return Ok(self.clone());
        }
        if self.numel() == 0 {
            let (dtype, shape) = (self.dtype(), self.shape().clone());
            return Ok(Tensor::nothing(dtype, shape, device));
        }
        if !device.has_values() {
            return Tensor::placeholder(self.dtype(), self.shape(), &Mesh::single(device));
        }
        wait("to_device", self.to_device_async(device))
    }
}

/// What can name a sharding: a [`Sharding`], a [`ShardingSpec`] or [`TypeSpec`], or text such as
/// `[@dp, _, @tp@sp]{sum:pp}` (see [`ShardingSpec`]).
pub trait IntoSharding {
    /// The sharding for a tensor of `rank` dimensions on `mesh`.
    fn into_sharding(self, mesh: &Mesh, rank: usize) -> Result<Sharding>;
}

impl IntoSharding for Sharding {
    fn into_sharding(self, _: &Mesh, _: usize) -> Result<Sharding> {
        Ok(self)
    }
}

impl IntoSharding for &Sharding {
    fn into_sharding(self, _: &Mesh, _: usize) -> Result<Sharding> {
        Ok(self.clone())
    }
}

impl IntoSharding for &ShardingSpec {
    fn into_sharding(self, mesh: &Mesh, rank: usize) -> Result<Sharding> {
        self.on(mesh, rank)
    }
}

impl IntoSharding for &TypeSpec {
    fn into_sharding(self, mesh: &Mesh, rank: usize) -> Result<Sharding> {
        self.sharding.on(mesh, rank)
    }
}

impl IntoSharding for &str {
    fn into_sharding(self, mesh: &Mesh, rank: usize) -> Result<Sharding> {
        self.parse::<ShardingSpec>()?.on(mesh, rank)
    }
}

impl IntoSharding for &String {
    fn into_sharding(self, mesh: &Mesh, rank: usize) -> Result<Sharding> {
        self.as_str().into_sharding(mesh, rank)
    }
}

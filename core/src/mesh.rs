//! Meshes: named axes over ranks.

use crate::{Device, Error, Result, cost::CostModel, transport::Transport};
use smallvec::SmallVec;
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

static KEYS: AtomicU64 = AtomicU64::new(1);

/// Named axes over ranks, such as `dp=2, tp=4`, and the devices of the ranks this process can
/// address.
///
/// Ranks are counted in row-major order of the axes. A plain tensor lies on a mesh without axes:
/// one rank.
///
/// ```
/// # use anymesh_core::Mesh;
/// # let device = anymesh_backend_cpu::device();
/// let mesh = Mesh::new("dp=2, tp=4", &device)?;
/// assert_eq!((mesh.ranks(), mesh.coordinate(6, 0), mesh.coordinate(6, 1)), (8, 1, 2));
/// assert_eq!(mesh.at("dp", 1)?.ids(), [4, 5, 6, 7]);
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Mesh(Arc<MeshData>);

struct MeshData {
    axes: SmallVec<[(String, usize); 3]>,
    /// For each axis, how far apart neighbours along it are.
    strides: SmallVec<[usize; 3]>,
    /// Names of the ranks that stay the same in sub-meshes.
    ids: Vec<usize>,
    /// The ranks this process can address, ascending, each with its device as a mesh of its own.
    local: SmallVec<[(usize, Local); 1]>,
    transport: Option<Arc<dyn Transport>>,
    cost: CostModel,
    key: u64,
}

enum Local {
    Device(Device),
    Mesh(Mesh),
}

/// The largest number of ranks of a mesh that fits in one process or one description.
const MAX_RANKS: usize = 1 << 20;

impl Mesh {
    /// The mesh of one rank without axes: a single device.
    pub fn single(device: &Device) -> Self {
        let local = smallvec::smallvec![(0, Local::Device(device.clone()))];
        Self(Arc::new(MeshData {
            axes: SmallVec::new(),
            strides: SmallVec::new(),
            ids: vec![0],
            local,
            transport: None,
            cost: CostModel::default(),
            key: 0,
        }))
    }

    /// A simulated mesh: every rank on one device of this process. Axes are written `dp=2, tp=4`,
    /// major first.
    pub fn new(axes: &str, device: &Device) -> Result<Self> {
        let axes = parse_axes(axes)?;
        let ranks = check_axes(&axes)?;
        Self::with_devices(axes, &vec![device.clone(); ranks])
    }

    /// A mesh with a device for each rank, all in this process. The same device may serve several
    /// ranks.
    pub fn over(axes: &str, devices: &[Device]) -> Result<Self> {
        Self::with_devices(parse_axes(axes)?, devices)
    }

    fn with_devices(axes: SmallVec<[(String, usize); 3]>, devices: &[Device]) -> Result<Self> {
        let ranks = check_axes(&axes)?;
        if devices.len() != ranks {
            let detail = format!(
                "{} ranks need as many devices, got {}",
                ranks,
                devices.len()
            );
            return Err(Error::Mesh { detail });
        }
        let local = devices
            .iter()
            .enumerate()
            .map(|(rank, device)| (rank, Local::Mesh(Mesh::single(device))))
            .collect();
        Ok(Self::assemble(
            axes,
            (0..ranks).collect(),
            local,
            Arc::new(crate::transport::InProcess),
            CostModel::default(),
        ))
    }

    fn assemble(
        axes: SmallVec<[(String, usize); 3]>,
        ids: Vec<usize>,
        local: SmallVec<[(usize, Local); 1]>,
        transport: Arc<dyn Transport>,
        cost: CostModel,
    ) -> Self {
        let mut strides: SmallVec<[usize; 3]> = smallvec::smallvec![1; axes.len()];
        for a in (1..axes.len()).rev() {
            strides[a - 1] = strides[a] * axes[a].1;
        }
        Self(Arc::new(MeshData {
            axes,
            strides,
            ids,
            local,
            transport: Some(transport),
            cost,
            key: KEYS.fetch_add(1, Ordering::Relaxed),
        }))
    }

    /// A mesh with the same axes and cost model, all of whose ranks are on `device`.
    pub fn on(&self, device: &Device) -> Result<Self> {
        Ok(
            Self::with_devices(self.0.axes.clone(), &vec![device.clone(); self.ranks()])?
                .with_cost(self.0.cost.clone()),
        )
    }

    /// The same ranks with another transport, such as one that injects faults.
    pub fn with_transport(&self, transport: Arc<dyn Transport>) -> Self {
        Self::assemble(
            self.0.axes.clone(),
            self.0.ids.clone(),
            self.locals(),
            transport,
            self.0.cost.clone(),
        )
    }

    /// The same ranks with another model of what communication costs.
    pub fn with_cost(&self, cost: CostModel) -> Self {
        let transport = self
            .0
            .transport
            .clone()
            .unwrap_or_else(|| Arc::new(crate::transport::InProcess));
        Self::assemble(
            self.0.axes.clone(),
            self.0.ids.clone(),
            self.locals(),
            transport,
            cost,
        )
    }

    /// The same ranks as one of several processes sees them: it can address only `ranks`, and the
    /// transport carries the rest.
    pub fn addressing(&self, ranks: &[usize]) -> Result<Self> {
        if let Some(rank) = ranks.iter().find(|r| self.addressable().all(|a| a != **r)) {
            return Err(Error::Mesh {
                detail: format!(
                    "rank {rank} of {self} is not in this process, which cannot address it"
                ),
            });
        }
        if ranks.is_empty() {
            return Err(Error::Mesh {
                detail: "a process addresses at least one rank".into(),
            });
        }
        let local = self
            .locals()
            .into_iter()
            .filter(|(rank, _)| ranks.contains(rank))
            .collect();
        let transport = self
            .0
            .transport
            .clone()
            .unwrap_or_else(|| Arc::new(crate::transport::InProcess));
        Ok(Self::assemble(
            self.0.axes.clone(),
            self.0.ids.clone(),
            local,
            transport,
            self.0.cost.clone(),
        ))
    }

    fn locals(&self) -> SmallVec<[(usize, Local); 1]> {
        (0..self.0.local.len())
            .map(|i| (self.0.local[i].0, Local::Mesh(self.local_mesh(i).clone())))
            .collect()
    }

    /// The ranks where `axis` has the index `at`: a mesh with the other axes, whose ranks keep
    /// their ids.
    pub fn at(&self, axis: &str, at: usize) -> Result<Self> {
        let a = self.axis(axis)?;
        let size = self.0.axes[a].1;
        if at >= size {
            return Err(Error::Mesh {
                detail: format!(
                    "axis {axis} has {size} ranks, there is no index {at}: use 0..{size}"
                ),
            });
        }
        let axes = self
            .0
            .axes
            .iter()
            .enumerate()
            .filter(|(i, _)| *i != a)
            .map(|(_, axis)| axis.clone())
            .collect();
        self.sub(
            axes,
            (0..self.ranks())
                .filter(|r| self.coordinate(*r, a) == at)
                .collect(),
        )
    }

    /// The first ranks along every axis that is not named: a mesh with only the named axes, in the
    /// order given.
    pub fn only(&self, names: &[&str]) -> Result<Self> {
        let kept = names
            .iter()
            .map(|n| self.axis(n))
            .collect::<Result<SmallVec<[usize; 3]>>>()?;
        if (1..kept.len()).any(|i| kept[..i].contains(&kept[i])) {
            return Err(Error::Mesh {
                detail: format!("an axis is named twice in {names:?}"),
            });
        }
        let axes: SmallVec<[(String, usize); 3]> =
            kept.iter().map(|a| self.0.axes[*a].clone()).collect();
        let ranks: usize = axes.iter().map(|(_, n)| n).product();
        let members = (0..ranks)
            .map(|i| {
                let mut rest = i;
                kept.iter().rev().fold(0, |rank, a| {
                    let at = rest % self.0.axes[*a].1;
                    rest /= self.0.axes[*a].1;
                    rank + at * self.0.strides[*a]
                })
            })
            .collect();
        self.sub(axes, members)
    }

    fn sub(&self, axes: SmallVec<[(String, usize); 3]>, members: Vec<usize>) -> Result<Self> {
        let mut local = SmallVec::new();
        for (i, rank) in members.iter().enumerate() {
            if let Some(at) = self.0.local.iter().position(|(r, _)| r == rank) {
                local.push((i, Local::Mesh(self.local_mesh(at).clone())));
            }
        }
        let ids = members.iter().map(|r| self.0.ids[*r]).collect();
        let transport = self
            .0
            .transport
            .clone()
            .unwrap_or_else(|| Arc::new(crate::transport::InProcess));
        Ok(Self::assemble(
            axes,
            ids,
            local,
            transport,
            self.0.cost.clone(),
        ))
    }

    /// One mesh over the ranks of two, all in this process: those of `self` first, then those of
    /// `other` that are none of them. `same` says for each rank of `other` which one of `self` it
    /// is. The numbers are where the ranks of `other` are in the union.
    pub(crate) fn union(&self, other: &Mesh, same: &[Option<usize>]) -> (Self, Vec<usize>) {
        let (mut ids, mut local) = (self.0.ids.clone(), self.locals());
        let number = |(rank, same): (usize, &Option<usize>)| {
            same.unwrap_or_else(|| {
                ids.push(other.0.ids[rank]);
                local.push((ids.len() - 1, Local::Mesh(other.local_mesh(rank).clone())));
                ids.len() - 1
            })
        };
        let numbers = same.iter().enumerate().map(number).collect();
        let axes = smallvec::smallvec![("rank".to_string(), ids.len())];
        let transport = self
            .0
            .transport
            .clone()
            .unwrap_or_else(|| Arc::new(crate::transport::InProcess));
        (
            Self::assemble(axes, ids, local, transport, self.0.cost.clone()),
            numbers,
        )
    }

    /// Axis names and sizes, major first.
    pub fn axes(&self) -> &[(String, usize)] {
        &self.0.axes
    }

    /// The position of an axis, by name.
    pub fn axis(&self, name: &str) -> Result<usize> {
        self.0
            .axes
            .iter()
            .position(|(n, _)| n == name)
            .ok_or_else(|| Error::Mesh {
                detail: format!("there is no axis '{name}' in {self}"),
            })
    }

    /// The number of ranks along an axis.
    pub fn size(&self, axis: usize) -> usize {
        self.0.axes[axis].1
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.0.ids.len()
    }

    /// Where a rank lies along an axis.
    pub fn coordinate(&self, rank: usize, axis: usize) -> usize {
        rank / self.0.strides[axis] % self.0.axes[axis].1
    }

    /// The rank at the same place as `rank`, but at `at` along `axis`.
    pub fn moved(&self, rank: usize, axis: usize, at: usize) -> usize {
        rank + at * self.0.strides[axis] - self.coordinate(rank, axis) * self.0.strides[axis]
    }

    /// The ranks that differ from `rank` only along `axes`, in row-major order of `axes`.
    pub fn group(&self, rank: usize, axes: &[usize]) -> SmallVec<[usize; 8]> {
        let mut group: SmallVec<[usize; 8]> = smallvec::smallvec![rank];
        for &axis in axes {
            group = group
                .iter()
                .flat_map(|r| (0..self.size(axis)).map(|at| self.moved(*r, axis, at)))
                .collect();
        }
        group
    }

    /// Names of the ranks that stay the same in sub-meshes.
    pub fn ids(&self) -> &[usize] {
        &self.0.ids
    }

    /// The ranks this process can address, ascending.
    pub fn addressable(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.0.local.iter().map(|(rank, _)| *rank)
    }

    /// Where among the addressable ranks `rank` is, if this process addresses it.
    pub fn position_of(&self, rank: usize) -> Option<usize> {
        if self.is_local() {
            (rank < self.ranks()).then_some(rank)
        } else {
            self.addressable().position(|r| r == rank)
        }
    }

    /// Whether this process can address every rank.
    pub fn is_local(&self) -> bool {
        self.0.local.len() == self.ranks()
    }

    /// Whether it has no axes: a single device.
    pub fn is_single(&self) -> bool {
        self.0.transport.is_none()
    }

    /// The device of the `i`-th addressable rank.
    pub fn device(&self, i: usize) -> &Device {
        match &self.0.local[i].1 {
            Local::Device(device) => device,
            Local::Mesh(mesh) => mesh.device(0),
        }
    }

    /// The `i`-th addressable rank as a mesh of its own.
    pub(crate) fn local_mesh(&self, i: usize) -> &Mesh {
        match &self.0.local[i].1 {
            Local::Device(_) => self,
            Local::Mesh(mesh) => mesh,
        }
    }

    /// What carries data between ranks; a single device needs nothing.
    pub fn transport(&self) -> Option<&Arc<dyn Transport>> {
        self.0.transport.as_ref()
    }

    /// What communication costs.
    pub fn cost(&self) -> &CostModel {
        &self.0.cost
    }

    /// A number that handles on the same mesh share, and no other mesh ever has.
    pub(crate) fn key(&self) -> u64 {
        self.0.key
    }
}

/// Reads `dp=2, tp=4`.
fn parse_axes(text: &str) -> Result<SmallVec<[(String, usize); 3]>> {
    let error = || Error::Parse {
        what: "mesh",
        text: text.into(),
        expected: "axes with sizes, major first, such as `dp=2, tp=4`".into(),
    };
    text.split(',')
        .map(|axis| {
            let (name, size) = axis.split_once('=').ok_or_else(error)?;
            let size = size.trim().parse().map_err(|_| error())?;
            Ok((name.trim().to_string(), size))
        })
        .collect()
}

/// The number of ranks, if the axes make sense.
fn check_axes(axes: &[(String, usize)]) -> Result<usize> {
    let fail = |detail: String| Err(Error::Mesh { detail });
    for (i, (name, size)) in axes.iter().enumerate() {
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
            return fail(format!(
                "'{name}' is no axis name: use letters, digits and _"
            ));
        }
        if axes[..i].iter().any(|(n, _)| n == name) {
            return fail(format!("axis {name} is named twice"));
        }
        if *size == 0 {
            return fail(format!("axis {name} has no ranks"));
        }
    }
    if axes.len() > 16 {
        return fail(format!("{} axes: at most 16", axes.len()));
    }
    match axes
        .iter()
        .try_fold(1usize, |n, (_, size)| n.checked_mul(*size))
        .filter(|n| *n <= MAX_RANKS)
    {
        Some(ranks) => Ok(ranks),
        None => fail(format!("more than {MAX_RANKS} ranks")),
    }
}

impl PartialEq for Mesh {
    fn eq(&self, other: &Self) -> bool {
        if Arc::ptr_eq(&self.0, &other.0) {
            return true;
        }
        let (a, b) = (&self.0, &other.0);
        let devices = || {
            (0..a.local.len())
                .all(|i| a.local[i].0 == b.local[i].0 && self.device(i) == other.device(i))
        };
        a.axes == b.axes
            && a.ids == b.ids
            && self.is_single() == other.is_single()
            && a.local.len() == b.local.len()
            && devices()
    }
}

impl Eq for Mesh {}

impl std::fmt::Display for Mesh {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.is_single() {
            return write!(f, "{}", self.device(0));
        }
        let axes: Vec<String> = self
            .0
            .axes
            .iter()
            .map(|(name, size)| format!("{name}={size}"))
            .collect();
        write!(f, "mesh({})", axes.join(", "))
    }
}

impl std::fmt::Debug for Mesh {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

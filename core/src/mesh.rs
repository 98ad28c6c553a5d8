//! Meshes: named axes over ranks.

mod axes;
mod together;

pub(crate) use axes::is_axis_name;

use crate::{Device, Dry, Error, Result, cost::CostModel, transport::Transport};
use axes::{check_axes, parse_axes};
use smallvec::SmallVec;
use std::sync::{
    Arc, OnceLock,
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
///
/// # Without values
/// On [one device without values](crate::meta()) ranks differ in the sizes of their parts and in
/// nothing else, so that the last rank, whose parts are the largest in every dimension, stands for
/// all: an op costs the same on 8 ranks and on 16,384, and the device's
/// [memory](Device::memory) is what that one rank would hold. All ranks are addressable
/// all the same, and [`shards`](crate::Tensor::shards) has a part of the right size for each. A
/// mesh that [addresses](Mesh::addressing) some of its ranks holds exactly the parts of those, and
/// nobody waits for the others.
///
/// # In other processes
/// Every process of a program makes every mesh, also those that have no rank in it, such as the
/// other stages of a pipeline. Tensors there have no [shards](crate::Tensor::shards) in this process;
/// ops, reshards and gradients work all the same and compute nothing, and [`to_mesh`](crate::Tensor::to_mesh)
/// sends to such a mesh and receives from it. Values can be read where the mesh has a rank.
#[derive(Clone)]
pub struct Mesh(Arc<MeshData>);

struct MeshData {
    axes: SmallVec<[(String, usize); 3]>,
    /// For each axis, how far apart neighbours along it are.
    strides: SmallVec<[usize; 3]>,
    ranks: usize,
    ids: Ids,
    /// The ranks of which this process holds parts, ascending, each with its device as a mesh of
    /// its own: those it can address, or the last one where that stands for all.
    local: SmallVec<[(usize, Local); 1]>,
    stands_for_all: bool,
    /// Whether all ranks are in other processes: the last one, without values, stands for them.
    elsewhere: bool,
    /// Whether tensors have values that a transport must carry, here or elsewhere.
    has_values: bool,
    transport: Option<Arc<dyn Transport>>,
    cost: CostModel,
    key: u64,
}

#[derive(Clone)]
enum Local {
    Device(Device),
    Mesh(Mesh),
}

/// Names of the ranks that stay the same in sub-meshes.
#[derive(Clone)]
enum Ids {
    /// As they are counted, listed once somebody asks.
    Counted(OnceLock<Vec<usize>>),
    Named(Vec<usize>),
}

/// What a mesh is made on: a device, which simulates all ranks, or the processes of a cluster.
pub trait Machine {
    /// A mesh with these axes, written `dp=2, tp=4`.
    fn mesh(&self, axes: &str) -> Result<Mesh>;
}

impl Machine for Device {
    fn mesh(&self, axes: &str) -> Result<Mesh> {
        Mesh::simulated(parse_axes(axes)?, self)
    }
}

impl<T: Machine + ?Sized> Machine for &T {
    fn mesh(&self, axes: &str) -> Result<Mesh> {
        (**self).mesh(axes)
    }
}

impl<T: Machine + ?Sized> Machine for Arc<T> {
    fn mesh(&self, axes: &str) -> Result<Mesh> {
        (**self).mesh(axes)
    }
}

impl Mesh {
    /// The mesh of one rank without axes: a single device.
    pub fn single(device: &Device) -> Self {
        let local = smallvec::smallvec![(0, Local::Device(device.clone()))];
        Self(Arc::new(MeshData {
            axes: SmallVec::new(),
            strides: SmallVec::new(),
            ranks: 1,
            ids: Ids::Named(vec![0]),
            local,
            stands_for_all: false,
            elsewhere: false,
            has_values: true,
            transport: None,
            cost: CostModel::default(),
            key: 0,
        }))
    }

    /// A mesh on a machine. Axes are written `dp=2, tp=4`, major first. On a device it is simulated:
    /// every rank is on that device of this process. On a cluster the ranks are spread over its
    /// processes.
    pub fn new(axes: &str, machine: &impl Machine) -> Result<Self> {
        machine.mesh(axes)
    }

    /// A mesh over several processes, as one of them sees it: `ids` names every rank the same way in
    /// every process and in every mesh, `here` has the ranks of this process with their devices, and
    /// `transport` reaches the others. Every process makes the same mesh. Programs have this done by
    /// a cluster, which is a [`Machine`].
    pub fn spread(
        axes: &str,
        ids: &[usize],
        here: &[(usize, Device)],
        transport: Arc<dyn Transport>,
    ) -> Result<Self> {
        let axes = parse_axes(axes)?;
        let ranks = check_axes(&axes)?;
        let mut sorted = ids.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        if ids.len() != ranks || sorted.len() != ranks {
            let detail = format!("{ranks} ranks need as many different names, got {ids:?}");
            return Err(Error::mesh(&axes, detail));
        }
        let mut local: SmallVec<[(usize, Local); 1]> = here
            .iter()
            .map(|(rank, device)| (*rank, Local::Mesh(Mesh::single(device))))
            .collect();
        local.sort_by_key(|(rank, _)| *rank);
        let twice = local.windows(2).any(|pair| pair[0].0 == pair[1].0);
        if twice || local.last().is_some_and(|(rank, _)| *rank >= ranks) {
            let told: Vec<usize> = local.iter().map(|(rank, _)| *rank).collect();
            let detail = format!("the ranks of this process are {told:?}, out of 0..{ranks}");
            return Err(Error::mesh(&axes, detail));
        }
        Ok(Self::assemble(MeshData {
            has_values: here.iter().all(|(_, device)| device.has_values()),
            ids: Ids::Named(ids.to_vec()),
            local,
            transport: Some(transport),
            ..MeshData::counted(axes, ranks)
        }))
    }

    /// A mesh with a device for each rank, all in this process. The same device may serve several
    /// ranks.
    pub fn over(axes: &str, devices: &[Device]) -> Result<Self> {
        let axes = parse_axes(axes)?;
        let ranks = check_axes(&axes)?;
        if devices.len() != ranks {
            let detail = format!(
                "{} ranks need as many devices, got {}",
                ranks,
                devices.len()
            );
            return Err(Error::mesh(&axes, detail));
        }
        if devices.iter().all(|device| *device == devices[0]) {
            return Self::simulated(axes, &devices[0]);
        }
        let local = devices.iter().map(Mesh::single).map(Local::Mesh);
        Ok(Self::assemble(MeshData {
            has_values: devices.iter().any(Device::has_values),
            local: local.enumerate().collect(),
            ..MeshData::counted(axes, ranks)
        }))
    }

    fn simulated(axes: SmallVec<[(String, usize); 3]>, device: &Device) -> Result<Self> {
        let ranks = check_axes(&axes)?;
        let (single, has_values) = (Mesh::single(device), device.has_values());
        let held = if has_values {
            0..ranks
        } else {
            ranks - 1..ranks
        };
        Ok(Self::assemble(MeshData {
            has_values,
            stands_for_all: !has_values,
            local: held.map(|r| (r, Local::Mesh(single.clone()))).collect(),
            ..MeshData::counted(axes, ranks)
        }))
    }

    fn assemble(mut data: MeshData) -> Self {
        data.strides = smallvec::smallvec![1; data.axes.len()];
        for a in (1..data.axes.len()).rev() {
            data.strides[a - 1] = data.strides[a] * data.axes[a].1;
        }
        let carrier = || -> Arc<dyn Transport> {
            match data.has_values {
                true => Arc::new(crate::transport::InProcess),
                false => Arc::new(crate::transport::NoValues),
            }
        };
        data.transport = Some(data.transport.take().unwrap_or_else(carrier));
        if data.local.is_empty() {
            let nobody = Local::Mesh(Mesh::single(&crate::meta()));
            data.local = smallvec::smallvec![(data.ranks - 1, nobody)];
            (data.stands_for_all, data.elsewhere) = (true, true);
        }
        data.key = KEYS.fetch_add(1, Ordering::Relaxed);
        Self(Arc::new(data))
    }

    /// What another mesh of the same ranks is made from.
    fn data(&self) -> MeshData {
        let data = &self.0;
        let local = |(rank, local): &(usize, Local)| match local {
            Local::Device(_) => (*rank, Local::Mesh(self.clone())),
            Local::Mesh(_) => (*rank, local.clone()),
        };
        MeshData {
            local: data.local.iter().map(local).collect(),
            ids: data.ids.clone(),
            transport: data.transport.clone(),
            cost: data.cost.clone(),
            stands_for_all: data.stands_for_all,
            elsewhere: data.elsewhere,
            has_values: data.has_values,
            ..MeshData::counted(data.axes.clone(), data.ranks)
        }
    }

    /// A mesh with the same axes and cost model, all of whose ranks are on `device`.
    pub fn on(&self, device: &Device) -> Result<Self> {
        Ok(Self::simulated(self.0.axes.clone(), device)?.with_cost(self.0.cost.clone()))
    }

    /// The same ranks with another transport, such as one that injects faults. Where it is to carry
    /// what has no values, every rank holds its parts.
    pub fn with_transport(&self, transport: Arc<dyn Transport>) -> Self {
        let mut data = self.data();
        if data.elsewhere {
            let transport = Some(transport);
            return Self::assemble(MeshData { transport, ..data });
        }
        if data.stands_for_all {
            let all = 0..self.ranks();
            data.local = all.map(|rank| (rank, data.local[0].1.clone())).collect();
        }
        Self::assemble(MeshData {
            stands_for_all: false,
            has_values: true,
            transport: Some(transport),
            ..data
        })
    }

    /// The same ranks with another model of what communication costs.
    pub fn with_cost(&self, cost: CostModel) -> Self {
        Self::assemble(MeshData {
            cost,
            ..self.data()
        })
    }

    /// The same ranks as one of several processes sees them: it can address only `ranks`, and the
    /// transport carries the rest. Without values nothing needs carrying, so a program can be run as
    /// any one of many ranks would run it:
    ///
    /// ```
    /// # use anymesh_core::{DType, Mesh, Tensor, meta};
    /// let mesh = Mesh::new("dp=512, tp=8", &meta())?.addressing(&[9])?;
    /// let x = Tensor::zeros([1026, 64], DType::BF16, (&mesh, "[@dp, @tp]"))?;
    /// assert_eq!(x.shards()[0].1.dims(), [2, 8]);
    /// assert_eq!(x.reshard("[@dp, _]")?.shards()[0].1.dims(), [2, 64]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    pub fn addressing(&self, ranks: &[usize]) -> Result<Self> {
        if let Some(rank) = ranks.iter().find(|r| self.position_of(**r).is_none()) {
            return Err(Error::Mesh {
                axes: self.axes().into(),
                ranks: [*rank].into(),
                detail: format!(
                    "rank {rank} of {self} is not in this process, which cannot address it"
                ),
            });
        }
        if ranks.is_empty() {
            return Err(Error::mesh(
                self.axes(),
                "a process addresses at least one rank",
            ));
        }
        let mut ranks: SmallVec<[usize; 8]> = ranks.into();
        ranks.sort_unstable();
        ranks.dedup();
        let local = |rank: &usize| {
            let at = self.position_of(*rank)?;
            Some((*rank, Local::Mesh(self.local_mesh(at).clone())))
        };
        Ok(Self::assemble(MeshData {
            local: ranks.iter().filter_map(local).collect(),
            stands_for_all: false,
            ..self.data()
        }))
    }

    /// The ranks where `axis` has the index `at`: a mesh with the other axes, whose ranks keep
    /// their ids.
    pub fn at(&self, axis: &str, at: usize) -> Result<Self> {
        let a = self.axis(axis)?;
        let size = self.0.axes[a].1;
        if at >= size {
            return Err(Error::mesh(
                self.axes(),
                format!("axis {axis} has {size} ranks, there is no index {at}: use 0..{size}"),
            ));
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
            return Err(Error::mesh(
                self.axes(),
                format!("an axis is named twice in {names:?}"),
            ));
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
        let local = |(i, rank): (usize, &usize)| {
            let at = self.position_of(*rank)?;
            Some((i, Local::Mesh(self.local_mesh(at).clone())))
        };
        let mut here = members.iter().enumerate();
        let local = match self.0.stands_for_all && !self.0.elsewhere {
            true => here.next_back().and_then(local).into_iter().collect(),
            false => here.filter_map(local).collect(),
        };
        Ok(Self::assemble(MeshData {
            axes,
            ranks: members.len(),
            ids: Ids::Named(members.iter().map(|r| self.id(*r)).collect()),
            local,
            ..self.data()
        }))
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
            .ok_or_else(|| Error::NoSuchAxis {
                axis: name.into(),
                mesh: self.to_string(),
            })
    }

    /// The number of ranks along an axis.
    pub fn size(&self, axis: usize) -> usize {
        self.0.axes[axis].1
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.0.ranks
    }

    /// Where a rank lies along an axis.
    pub fn coordinate(&self, rank: usize, axis: usize) -> usize {
        rank / self.0.strides[axis] % self.0.axes[axis].1
    }

    /// The rank at the same place as `rank`, but at `at` along `axis`.
    pub fn moved(&self, rank: usize, axis: usize, at: usize) -> usize {
        rank + at * self.0.strides[axis] - self.coordinate(rank, axis) * self.0.strides[axis]
    }

    /// Which part a rank has of something that `axes` cut, major first, and how many parts there are.
    pub(crate) fn part(&self, rank: usize, axes: impl Iterator<Item = usize>) -> (usize, usize) {
        axes.fold((0, 1), |(part, parts), axis| {
            let size = self.size(axis);
            (part * size + self.coordinate(rank, axis), parts * size)
        })
    }

    /// The rank at the same place as `rank`, but with this part of what `axes` cut, major first.
    pub(crate) fn with_part(&self, rank: usize, axes: &[usize], mut part: usize) -> usize {
        axes.iter().rev().fold(rank, |rank, axis| {
            let at = part % self.size(*axis);
            part /= self.size(*axis);
            self.moved(rank, *axis, at)
        })
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
        match &self.0.ids {
            Ids::Counted(list) => list.get_or_init(|| (0..self.ranks()).collect()),
            Ids::Named(ids) => ids,
        }
    }

    fn id(&self, rank: usize) -> usize {
        match &self.0.ids {
            Ids::Counted(_) => rank,
            Ids::Named(ids) => ids[rank],
        }
    }

    /// The ranks this process can address, ascending.
    pub fn addressable(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        let all = self.is_local();
        let count = if all {
            self.ranks()
        } else if self.0.elsewhere {
            0
        } else {
            self.0.local.len()
        };
        (0..count).map(move |i| if all { i } else { self.0.local[i].0 })
    }

    /// Where among the addressable ranks `rank` is, if this process addresses it.
    pub fn position_of(&self, rank: usize) -> Option<usize> {
        if self.is_local() {
            return (rank < self.ranks()).then_some(rank);
        }
        if self.0.elsewhere {
            return None;
        }
        self.0.local.binary_search_by_key(&rank, |(r, _)| *r).ok()
    }

    /// The ranks whose parts are held, each with its number in the list of shards: the addressable
    /// ones, or the one that stands for all. What a program does on every rank, it does on these.
    pub(crate) fn held(&self) -> impl ExactSizeIterator<Item = (usize, usize)> + '_ {
        let rank = |(slot, (rank, _)): (usize, &(usize, Local))| (slot, *rank);
        self.0.local.iter().enumerate().map(rank)
    }

    /// Whether the last rank is held in the place of all.
    pub(crate) fn stands_for_all(&self) -> bool {
        self.0.stands_for_all
    }

    /// Whether tensors have values in this process, which a transport carries; not while a step is
    /// planned.
    pub(crate) fn has_values(&self) -> bool {
        self.carries_values() && !self.0.elsewhere
    }

    /// Whether tensors have values, in this process or in others.
    pub(crate) fn carries_values(&self) -> bool {
        self.0.has_values && !Dry::is_on()
    }

    /// Whether this process can address every rank.
    pub fn is_local(&self) -> bool {
        !self.0.elsewhere && (self.0.stands_for_all || self.0.local.len() == self.ranks())
    }

    /// Whether this process has the first rank: of all processes exactly one. It is the one that
    /// prints, after all of them have gathered what is printed.
    ///
    /// ```
    /// # use anymesh_core::{DType, Mesh, Tensor};
    /// # let mesh = Mesh::new("dp=2", &anymesh_backend_cpu::device())?;
    /// # let loss = Tensor::ones([], DType::F32, &mesh)?;
    /// let text = loss.to_string(); // All processes, because it may lie on any of them.
    /// if mesh.is_first() {
    ///     println!("{text}");
    /// }
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    pub fn is_first(&self) -> bool {
        self.position_of(0).is_some()
    }

    /// Whether it has no axes: a single device.
    pub fn is_single(&self) -> bool {
        self.0.transport.is_none()
    }

    /// The device of the `i`-th addressable rank.
    pub fn device(&self, i: usize) -> &Device {
        match self.local(i) {
            Local::Device(device) => device,
            Local::Mesh(mesh) => mesh.device(0),
        }
    }

    /// The `i`-th addressable rank as a mesh of its own.
    pub(crate) fn local_mesh(&self, i: usize) -> &Mesh {
        match self.local(i) {
            Local::Device(_) => self,
            Local::Mesh(mesh) => mesh,
        }
    }

    fn local(&self, i: usize) -> &Local {
        &self.0.local[if self.0.stands_for_all { 0 } else { i }].1
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

impl MeshData {
    /// Axes over ranks that are named as they are counted; nobody is here yet.
    fn counted(axes: SmallVec<[(String, usize); 3]>, ranks: usize) -> Self {
        Self {
            axes,
            strides: SmallVec::new(),
            ranks,
            ids: Ids::Counted(OnceLock::new()),
            local: SmallVec::new(),
            stands_for_all: false,
            elsewhere: false,
            has_values: true,
            transport: None,
            cost: CostModel::default(),
            key: 0,
        }
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
        let ids = || match (&a.ids, &b.ids) {
            (Ids::Counted(_), Ids::Counted(_)) => true,
            _ => self.ids() == other.ids(),
        };
        a.axes == b.axes
            && ids()
            && a.stands_for_all == b.stands_for_all
            && a.elsewhere == b.elsewhere
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

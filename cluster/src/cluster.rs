//! The processes of a run, as one of them sees them.

use crate::{
    carried::{Carried, Engine},
    control::{Control, Verdict},
    meet::{self, World},
    meeting::meeting,
    start::{Launcher, Over, Start},
    stop,
    wire::{Wire, tcp::Tcp},
};
use anymesh_core::{
    DType, Device, Error, Machine, Mesh, Reduction, Result, Tensor, split,
    transport::{Background, Part, Transport},
};
use std::{
    collections::BTreeMap,
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

/// The processes of a run: what a mesh over several of them is made on.
///
/// ```
/// # use anymesh_cluster::{Cluster, Start};
/// # use anymesh_core::{DType, Mesh, Tensor};
/// // Without a launcher it is this process alone, and meshes are simulated.
/// let cluster = Cluster::new(&Start::alone(), &[anymesh_backend_cpu::device()])?;
/// let mesh = Mesh::new("dp=2, tp=4", &cluster)?;
/// let ones = Tensor::ones([8, 8], DType::F32, (&mesh, "[@dp, @tp]"))?;
/// assert_eq!(ones.sum(&[], false)?.item()?.to_f64(), 64.0);
/// # Ok::<(), anymesh_core::Error>(())
/// ```
///
/// # Who has which rank
/// The ranks of a mesh are dealt out to the processes in order, as evenly as possible: neighbours
/// along the last axis are in the same process, or in processes next to each other, which launchers
/// put on one node. [`with_order`](Self::with_order) deals them out in another order of axes, and
/// [`placement`](Self::placement) prints who has what. A process with several devices gives its
/// ranks to them in turn; one with fewer devices than ranks simulates. A mesh with fewer ranks than
/// there are processes leaves the last ones out.
///
/// # When something fails
/// A process that dies, an error that only one has, a wait longer than the deadline, programs that
/// differ: every process gets the same typed error from its next call, and every later one. What
/// then: [`rebuild`](Self::rebuild) with those who are left, or end and let the launcher start again.
///
/// The processes leave when the last mesh, tensor and handle of a cluster is dropped.
#[derive(Clone)]
pub struct Cluster {
    inner: Arc<Inner>,
    order: Vec<String>,
}

struct Inner {
    devices: Vec<Device>,
    /// Nothing for a process alone.
    many: Option<Many>,
    timeout: Duration,
    start: Start,
}

/// A program that unwinds does not end as it should.
impl Drop for Inner {
    fn drop(&mut self) {
        if std::thread::panicking()
            && let Some(many) = &self.many
        {
            many.world.control.failed("the program panicked");
        }
    }
}

struct Many {
    world: World,
    /// Shared by all meshes: the calls of a process have one order.
    transport: Arc<dyn Transport>,
    /// The same, where calls are made by a thread.
    line: Option<Arc<Background>>,
}

impl Drop for Many {
    /// The end of a program would end calls that others wait for.
    fn drop(&mut self) {
        if let Some(line) = &self.line {
            let _ = line.settle();
        }
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cluster({self})")
    }
}

impl fmt::Display for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.inner.many {
            None => write!(f, "one process"),
            Some(many) => write!(
                f,
                "process {} of {} over {}",
                self.rank(),
                self.size(),
                many.transport.name()
            ),
        }
    }
}

impl Cluster {
    /// Meets the other processes that the launcher started. `devices` are those of this process, at
    /// least one.
    pub fn from_env(devices: &[Device]) -> Result<Self> {
        let start =
            Start::from_env().map_err(|e| Error::argument("init", "environment", e.to_string()))?;
        Self::new(&start, devices)
    }

    /// Meets the other processes as `start` says.
    pub fn new(start: &Start, devices: &[Device]) -> Result<Self> {
        if devices.is_empty() {
            let detail = "a process needs at least one device";
            return Err(Error::argument("init", "devices", detail));
        }
        let many = match start.size {
            1 => None,
            _ => {
                let world = meet::meet(&meeting(start)?)?;
                Some(Many::new(world, start, devices)?)
            }
        };
        Ok(Self {
            inner: Arc::new(Inner {
                devices: devices.to_vec(),
                many,
                timeout: start.timeout,
                start: start.clone(),
            }),
            order: vec![],
        })
    }

    /// The number of this process, as its launcher counts.
    pub fn rank(&self) -> usize {
        self.control().map_or(0, |control| control.process)
    }

    /// How many processes there are.
    pub fn size(&self) -> usize {
        self.control().map_or(1, |control| control.cards.len())
    }

    /// Whether this is the process that should print and do what only one may do.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// The devices of this process.
    pub fn devices(&self) -> &[Device] {
        &self.inner.devices
    }

    /// What the launcher said.
    pub fn start(&self) -> &Start {
        &self.inner.start
    }

    /// How long a call waits for other processes.
    pub fn deadline(&self) -> Duration {
        self.inner.timeout
    }

    /// Deals ranks out with these axes major first, instead of in the order in which a mesh names
    /// them; axes that are not named come last. With `["tp"]` the neighbours along `tp` are as far
    /// apart as possible.
    pub fn with_order(&self, axes: &[&str]) -> Self {
        Self {
            inner: self.inner.clone(),
            order: axes.iter().map(|axis| axis.to_string()).collect(),
        }
    }

    /// Who has which ranks of a mesh, and which axes stay inside of a node, as a text of a few lines.
    pub fn placement(&self, mesh: &Mesh) -> String {
        let size = self.size();
        let process = |rank: usize| mesh.ids()[rank] % size;
        let node = |rank: usize| match self.control() {
            Some(control) => control.cards[process(rank)].host.clone(),
            None => "this machine".into(),
        };
        let mut nodes: BTreeMap<String, BTreeMap<usize, Vec<usize>>> = BTreeMap::new();
        for rank in 0..mesh.ranks() {
            let processes = nodes.entry(node(rank)).or_default();
            processes.entry(process(rank)).or_default().push(rank);
        }
        let mut text = format!(
            "{mesh}: {} ranks, {size} processes, {} nodes\n",
            mesh.ranks(),
            nodes.len()
        );
        for (a, (name, count)) in mesh.axes().iter().enumerate() {
            let crosses = |of: &dyn Fn(usize) -> String| {
                (0..mesh.ranks()).any(|r| of(r) != of(mesh.moved(r, a, 0)))
            };
            let how = match (crosses(&node), crosses(&|r| process(r).to_string())) {
                (true, _) => "between nodes",
                (false, true) => "between processes of a node",
                (false, false) => "inside of a process",
            };
            text.push_str(&format!("  {name}={count}: {how}\n"));
        }
        for (node, processes) in nodes {
            for (process, ranks) in processes {
                text.push_str(&format!("  {node}, process {process}: ranks {ranks:?}\n"));
            }
        }
        text
    }

    /// Tells all other processes of an error of this program, so that they stop as well: with
    /// [`Error::Elsewhere`] from their next call.
    pub fn fail(&self, error: &dyn fmt::Display) {
        if let Some(control) = self.control() {
            control.failed(&error.to_string());
        }
    }

    /// Runs a program; where it ends with an error, the other processes are told.
    pub fn run<T, E: fmt::Display>(
        &self,
        program: impl FnOnce(&Self) -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        program(self).inspect_err(|e| self.fail(e))
    }

    /// Whether the cluster has failed: the error that every call gives now.
    pub fn failure(&self) -> Option<Error> {
        let verdict = self.control()?.alarm.verdict()?;
        Some(verdict.error("cluster", |process| vec![process]))
    }

    /// Returns when all processes have called it.
    pub fn barrier(&self) -> Result<()> {
        let Some(many) = &self.inner.many else {
            return Ok(());
        };
        let mesh = self.processes()?;
        let all: Vec<usize> = (0..mesh.ranks()).collect();
        many.transport.barrier(&mesh, &all)
    }

    /// Whether any process was asked to leave, by SIGTERM or the first SIGINT since
    /// [`stop::install`]. All processes call it, between two steps, and all get the same answer, so
    /// they save and leave together; it costs about as much as a barrier.
    ///
    /// ```
    /// # use anymesh_cluster::{Cluster, Start, stop};
    /// # let cluster = Cluster::new(&Start::alone(), &[anymesh_backend_cpu::device()])?;
    /// # stop::install().expect("signals can be handled");
    /// for step in 0..3 {
    ///     // train
    ///     if cluster.stop_requested()? {
    ///         // save
    ///         break;
    ///     }
    /// }
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    pub fn stop_requested(&self) -> Result<bool> {
        let own = stop::stop_requested();
        let Some(many) = &self.inner.many else {
            return Ok(own);
        };
        let mesh = self.processes()?;
        let part = |rank: usize| match mesh.position_of(rank) {
            Some(at) => {
                let flag = Tensor::from_slice(&[u8::from(own)], [1], mesh.device(at))?;
                Ok(Part::new(rank, &flag))
            }
            None => Ok(Part::elsewhere(rank, DType::U8, [1])),
        };
        let parts = (0..mesh.ranks()).map(part).collect::<Result<Vec<_>>>()?;
        let told = many.transport.all_reduce(&mesh, &parts, Reduction::Max)?;
        let told = told.into_iter().flatten().next();
        let any = told.map(|flag| flag.to_vec::<u8>()).transpose()?;
        Ok(own || any.is_some_and(|any| any == [1]))
    }

    /// A mesh with a rank for each process.
    fn processes(&self) -> Result<Mesh> {
        self.with_order(&[])
            .mesh(&format!("process={}", self.size()))
    }

    /// After a failure: a new cluster of those who are left, in their old order. Every survivor calls
    /// it; whoever has not come `within` this time stays out. Meshes and tensors of the old cluster
    /// stay failed: build new ones, and load the last checkpoint.
    pub fn rebuild(&self, within: Duration) -> Result<Self> {
        let Some(many) = &self.inner.many else {
            return Ok(self.clone());
        };
        let lost = match many.world.control.alarm.verdict() {
            Some(Verdict::Died { process, .. }) => vec![process],
            Some(Verdict::Missing { processes, .. }) => processes,
            Some(Verdict::Failed { .. } | Verdict::Diverged { .. }) | None => vec![],
        };
        let mut tries = self.size();
        let many = loop {
            let world = many.world.meet_again(&lost, within);
            tries -= 1;
            match world.and_then(|world| Many::new(world, &self.inner.start, &self.inner.devices)) {
                Ok(many) => break many,
                // One more died meanwhile.
                Err(Error::Lost { .. }) if tries > 0 => {}
                Err(e) => return Err(e),
            }
        };
        Ok(Self {
            inner: Arc::new(Inner {
                devices: self.inner.devices.clone(),
                many: Some(many),
                timeout: self.inner.timeout,
                start: self.inner.start.clone(),
            }),
            order: self.order.clone(),
        })
    }

    fn control(&self) -> Option<&Control> {
        self.inner.many.as_ref().map(|many| &*many.world.control)
    }
}

impl Many {
    fn new(world: World, start: &Start, devices: &[Device]) -> Result<Self> {
        if let Some(folder) = start.flight.clone() {
            let (recorder, process) = (world.control.recorder.clone(), world.control.process);
            world.control.alarm.on_ring(move |verdict| {
                let error = verdict.error("cluster", |p| vec![p]).to_string();
                if let Err(e) = recorder.dump(&folder, &error) {
                    eprintln!(
                        "anymesh: process {process} cannot write its flight record into {}: {e}",
                        folder.display()
                    );
                }
            });
        }
        let wire = wire(&world, start)?;
        let engine = Arc::new(Engine::new(wire, world.control.clone(), start.timeout));
        let (transport, line) = match over_nccl(&world, &engine, start, devices)? {
            Some(transport) => (transport, None),
            None => {
                let line = Background::new(Arc::new(Carried(engine)));
                (line.clone() as Arc<dyn Transport>, Some(line))
            }
        };
        world.control.ready(start.start_timeout)?;
        Ok(Self {
            world,
            transport,
            line,
        })
    }
}

/// What carries the bytes of tensors, as the program or its launcher chose.
fn wire(world: &World, start: &Start) -> Result<Box<dyn Wire>> {
    let by_mpi = matches!(start.launcher, Launcher::OpenMpi | Launcher::Mpich);
    match start.over {
        Over::Mpi => over_mpi(world, start),
        Over::Auto if by_mpi && cfg!(feature = "mpi") => over_mpi(world, start),
        _ => {
            let until = Instant::now() + start.start_timeout;
            Ok(Box::new(Tcp::connect(world, until)?))
        }
    }
}

#[cfg(feature = "mpi")]
fn over_mpi(world: &World, start: &Start) -> Result<Box<dyn Wire>> {
    let until = Instant::now() + start.start_timeout;
    Ok(Box::new(crate::wire::mpi::Mpi::connect(world, until)?))
}

#[cfg(not(feature = "mpi"))]
fn over_mpi(_: &World, _: &Start) -> Result<Box<dyn Wire>> {
    let detail = "this build has no MPI: build with the feature `mpi`, or choose another transport";
    Err(Error::argument("init", "ANYMESH_TRANSPORT", detail))
}

/// NCCL, where it is asked for, or where nothing is and all devices are NVIDIA GPUs.
#[cfg(feature = "nccl")]
fn over_nccl(
    world: &World,
    engine: &Arc<Engine>,
    start: &Start,
    devices: &[Device],
) -> Result<Option<Arc<dyn Transport>>> {
    if !matches!(start.over, Over::Auto | Over::Nccl) {
        return Ok(None);
    }
    match crate::nccl::Nccl::connect(world, engine, start, devices)? {
        Ok(nccl) => Ok(Some(nccl)),
        Err(why) if start.over == Over::Nccl => {
            Err(Error::argument("init", "ANYMESH_TRANSPORT", why))
        }
        Err(why) => {
            let gpu = |device: &Device| device.name().starts_with("cuda");
            if world.control.process == 0 && devices.iter().any(gpu) {
                eprintln!("anymesh: tensors go over TCP instead of NCCL.\n  {why}");
            }
            Ok(None)
        }
    }
}

#[cfg(not(feature = "nccl"))]
fn over_nccl(
    _: &World,
    _: &Arc<Engine>,
    start: &Start,
    _: &[Device],
) -> Result<Option<Arc<dyn Transport>>> {
    match start.over {
        Over::Nccl => {
            let detail = "this build has no NCCL: build with the feature `nccl`, or choose another transport";
            Err(Error::argument("init", "ANYMESH_TRANSPORT", detail))
        }
        _ => Ok(None),
    }
}

/// A mesh over the processes.
impl Machine for Cluster {
    fn mesh(&self, axes: &str) -> Result<Mesh> {
        let devices = &self.inner.devices;
        let device = |i: usize| devices[i % devices.len()].clone();
        // What the axes say is the same wherever the ranks are.
        let plan = Mesh::new(axes, &anymesh_core::meta())?;
        let ranks = plan.ranks();
        let Some(many) = &self.inner.many else {
            return match devices.len() {
                1 => Mesh::new(axes, &devices[0]),
                _ => Mesh::over(axes, &(0..ranks).map(device).collect::<Vec<_>>()),
            };
        };
        let (own, size) = (self.rank(), self.size());
        let places = self.places(&plan)?;
        let mut ids = vec![0; ranks];
        let mut here = vec![];
        // With fewer ranks than processes the first ones have one each.
        let busy = ranks.min(size);
        for process in 0..busy {
            for (i, place) in split(ranks, process, busy).enumerate() {
                ids[places[place]] = process + i * size;
                if process == own {
                    here.push((places[place], device(i)));
                }
            }
        }
        Mesh::spread(axes, &ids, &here, many.transport.clone())
    }
}

impl Cluster {
    /// The ranks of a mesh in the order in which they are dealt out.
    fn places(&self, mesh: &Mesh) -> Result<Vec<usize>> {
        let named: Vec<usize> = self
            .order
            .iter()
            .map(|axis| mesh.axis(axis))
            .collect::<Result<_>>()?;
        if (1..named.len()).any(|i| named[..i].contains(&named[i])) {
            let detail = format!("an axis is named twice in the order {:?}", self.order);
            return Err(Error::mesh(mesh.axes(), detail));
        }
        let rest = (0..mesh.axes().len()).filter(|a| !named.contains(a));
        let order: Vec<usize> = named.iter().copied().chain(rest).collect();
        let mut ranks: Vec<usize> = (0..mesh.ranks()).collect();
        ranks.sort_by_cached_key(|rank| {
            order
                .iter()
                .map(|axis| mesh.coordinate(*rank, *axis))
                .collect::<Vec<_>>()
        });
        Ok(ranks)
    }
}

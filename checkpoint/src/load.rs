//! Loading tensors from any source, in any layout.

use crate::{
    Contents, Difference, Error, Fused, MASTER, Result, Source, TensorInfo, contents::PlacedTensor,
    names::matches, regions::slabs,
};
use anymesh_core::{DType, Device, IntoPlace, Place, Region, Shape, Tensor, TensorType};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Condvar, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

/// A tensor of a source, cut up over a mesh or on one device. Reads what this process holds, each
/// region once.
pub fn load(source: &dyn Source, name: &str, place: impl IntoPlace) -> Result<Tensor> {
    let place = place.into_place(source.info(name)?.shape.len())?;
    load_within(source, name, &place, usize::MAX, &mut vec![])
}

/// [`load`] with so many bytes at most on the host at a time. `spare` is memory that was used
/// before, which is cheaper than new memory.
fn load_within(
    source: &dyn Source,
    name: &str,
    place: &Place,
    memory: usize,
    spare: &mut Vec<Vec<u8>>,
) -> Result<Tensor> {
    let info = source.info(name)?;
    let (mesh, shape) = (&place.mesh, Shape::from(info.shape.as_slice()));
    place.sharding.check(mesh, shape.rank())?;
    if place.sharding.is_partial() {
        return Err(Error::Partial {
            tensor: name.into(),
            layout: place.sharding.type_string(info.dtype, &shape, mesh),
        });
    }
    let regions = local_regions(place, &shape);
    let unique = unique(&regions);
    // All regions in one go where memory allows: they may share what is read.
    let mut buffers: Vec<(Region, Vec<u8>)> = vec![];
    if bytes_of(&unique, info) <= memory {
        for region in unique {
            let mut bytes = spare.pop().unwrap_or_default();
            bytes.resize(region.numel() * info.dtype.size(), 0);
            buffers.push((region.clone(), bytes));
        }
        source.read_many(name, &mut buffers)?;
    }
    let mut made: Vec<(&Region, usize, Tensor)> = vec![];
    for (i, region) in regions.iter().enumerate() {
        let device = mesh.device(i);
        let part = match made
            .iter()
            .find(|(r, j, _)| *r == region && mesh.device(*j) == device)
        {
            Some((.., part)) => part.clone(),
            None => match buffers.iter().find(|(r, _)| r == region) {
                Some((_, bytes)) => Tensor::from_bytes(
                    bytes,
                    info.dtype,
                    Shape::from(region.shape.clone()),
                    device,
                )?,
                None => in_slabs(source, name, info, region, device, memory)?,
            },
        };
        made.push((region, i, part));
    }
    let mut parts: Vec<Tensor> = made.into_iter().map(|(.., part)| part).collect();
    spare.extend(buffers.into_iter().map(|(_, bytes)| bytes));
    if mesh.is_single() {
        return parts
            .pop()
            .ok_or_else(|| Error::Argument("a mesh without ranks".into()));
    }
    let ty = TensorType {
        dtype: info.dtype,
        shape,
        sharding: place.sharding.clone(),
    };
    Ok(Tensor::from_shards(&ty, mesh, &parts)?)
}

/// The region of each rank of this process.
fn local_regions(place: &Place, shape: &Shape) -> Vec<Region> {
    place
        .mesh
        .addressable()
        .map(|rank| place.sharding.region(&place.mesh, rank, shape))
        .collect()
}

fn unique(regions: &[Region]) -> Vec<&Region> {
    let mut unique: Vec<&Region> = vec![];
    for region in regions {
        if !unique.contains(&region) {
            unique.push(region);
        }
    }
    unique
}

fn bytes_of(regions: &[&Region], info: &TensorInfo) -> usize {
    regions.iter().map(|r| r.numel() * info.dtype.size()).sum()
}

/// A region that is larger than what may be in memory: joined on the device from parts that follow
/// each other.
fn in_slabs(
    source: &dyn Source,
    name: &str,
    info: &TensorInfo,
    region: &Region,
    device: &Device,
    memory: usize,
) -> Result<Tensor> {
    let mut parts = vec![];
    for mut slab in slabs(region.shape.to_vec(), info.dtype.size(), memory) {
        slab.start
            .iter_mut()
            .zip(&region.start)
            .for_each(|(at, start)| *at += start);
        let mut bytes = vec![0; slab.numel() * info.dtype.size()];
        source.read(name, &slab, &mut bytes)?;
        parts.push(Tensor::from_bytes(
            &bytes,
            info.dtype,
            [slab.numel()],
            device,
        )?);
    }
    if parts.is_empty() {
        return Ok(Tensor::from_bytes(
            &[],
            info.dtype,
            Shape::from(region.shape.clone()),
            device,
        )?);
    }
    Ok(Tensor::concat(&parts.iter().collect::<Vec<_>>(), 0)?.reshape(&region.shape[..])?)
}

/// How to load, and what to do about names and types that do not fit.
pub struct Load<'a> {
    /// Leave a tensor that the source lacks as it is, instead of an error.
    pub allow_missing: bool,
    /// Pass over a tensor of the source that nobody asked for, instead of an error.
    pub allow_unexpected: bool,
    /// Leave a tensor whose shape differs as it is, instead of an error.
    pub allow_mismatched: bool,
    /// Convert to the dtype of the tensor that is there, instead of an error where it differs.
    pub cast: bool,
    /// Make a weight of its master copy where only that is stored, and a master copy of its weight.
    /// See [`Weights`](crate::Weights).
    pub rebuild: bool,
    /// Names that are loaded, all where it is empty; `*` stands for anything. What is there under
    /// other names stays as it is.
    pub only: Vec<String>,
    /// Names that are left out on both sides; `*` stands for anything.
    pub ignore: Vec<String>,
    /// Tensors that are read at the same time.
    pub threads: usize,
    /// Bytes that may be on the host at once on their way to devices. A larger region is read in
    /// parts. (A fused buffer takes what a rank holds of it.)
    pub memory: usize,
    /// Called from the reading threads with the bytes done and all there are.
    pub progress: Option<&'a (dyn Fn(usize, usize) + Sync)>,
}

impl std::fmt::Debug for Load<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Load({} threads, {} bytes)", self.threads, self.memory)
    }
}

impl Default for Load<'_> {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        Self {
            allow_missing: false,
            allow_unexpected: false,
            allow_mismatched: false,
            cast: false,
            rebuild: false,
            only: vec![],
            ignore: vec![],
            threads,
            memory: usize::MAX,
            progress: None,
        }
    }
}

/// What was loaded, and what did not fit.
#[derive(Clone, Debug, Default)]
pub struct Loaded {
    /// Every tensor that was asked for: loaded, or as it was.
    pub tensors: BTreeMap<String, Tensor>,
    /// Every fused buffer, with what was loaded in place of what was there.
    pub fused: Vec<Fused>,
    /// Names that the source lacks.
    pub missing: Vec<String>,
    /// Names of the source that nobody asked for.
    pub unexpected: Vec<String>,
    /// Names whose shapes differ.
    pub mismatched: Vec<String>,
    /// Weights that were made of their masters, and masters of their weights.
    pub rebuilt: Vec<String>,
}

/// Names of tensors that are loaded, each with the name of the source's tensor that it is read
/// from.
type Wanted<'w> = BTreeMap<&'w String, String>;

impl Load<'_> {
    /// Loads a tensor for each that is there, in its layout, fused or not. All misfits are found
    /// before anything is read, and told together.
    pub fn replace(&self, source: &dyn Source, there: &Contents) -> Result<Loaded> {
        let present = there.placed_tensors()?;
        let mut out = Loaded {
            tensors: there.tensors.clone(),
            ..Loaded::default()
        };
        let wanted = self.fit(source, &present, &mut out)?;
        let bytes = |name: &str| present[name].placed.info.bytes();
        let total: usize = wanted.keys().map(|name| bytes(name)).sum();
        let done = AtomicUsize::new(0);
        let tell = |bytes: usize| {
            let done = done.fetch_add(bytes, Ordering::Relaxed) + bytes;
            if let Some(progress) = self.progress {
                progress(done, total);
            }
        };
        let plain: Vec<(&String, &String)> = wanted
            .iter()
            .filter(|(name, _)| present[**name].placed.fused.is_none())
            .map(|(name, from)| (*name, from))
            .collect();
        let (next, loaded, gate) = (
            AtomicUsize::new(0),
            Mutex::new(vec![]),
            Gate {
                used: Mutex::new(0),
                freed: Condvar::new(),
            },
        );
        let run = || {
            let mut spare = vec![];
            while let Some((name, from)) = plain.get(next.fetch_add(1, Ordering::Relaxed)) {
                let x = &present[*name].tensor;
                let place = Place {
                    mesh: x.mesh().clone(),
                    sharding: x.sharding().whole(),
                };
                let staged = source
                    .info(from)
                    .map(|info| bytes_of(&unique(&local_regions(&place, x.shape())), info))
                    .unwrap_or(0)
                    .min(self.memory);
                gate.enter(staged, self.memory);
                let tensor = load_within(source, from, &place, self.memory, &mut spare)
                    .and_then(|t| Ok(t.cast(x.dtype())?));
                if self.memory != usize::MAX {
                    spare.clear();
                }
                gate.leave(staged);
                tell(bytes(name));
                loaded
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push((name.to_string(), tensor));
            }
        };
        std::thread::scope(|scope| {
            (1..self.threads.min(plain.len())).for_each(|_| drop(scope.spawn(run)));
            run();
        });
        for (name, tensor) in loaded.into_inner().unwrap_or_else(PoisonError::into_inner) {
            out.tensors.insert(name, tensor?);
        }
        for fused in &there.fused {
            out.fused.push(fill(source, fused, &present, &wanted)?);
            tell(
                fused
                    .parts
                    .iter()
                    .filter(|p| wanted.contains_key(&p.name))
                    .map(|p| bytes(&p.name))
                    .sum(),
            );
        }
        Ok(out)
    }

    /// Which tensor of the source takes the place of which, or all that does not fit.
    fn fit<'k>(
        &self,
        source: &dyn Source,
        present: &'k BTreeMap<String, PlacedTensor>,
        out: &mut Loaded,
    ) -> Result<Wanted<'k>> {
        let asked = |name: &str| {
            let named = |patterns: &[String]| patterns.iter().any(|pattern| matches(pattern, name));
            !named(&self.ignore) && (self.only.is_empty() || named(&self.only))
        };
        // The master copy of a weight, or the weight of a master copy.
        let twin = |name: &str| {
            name.strip_prefix(MASTER)
                .map_or_else(|| format!("{MASTER}{name}"), String::from)
        };
        let (mut shapes, mut dtypes, mut wanted) = (vec![], vec![], Wanted::new());
        for (name, PlacedTensor { placed, .. }) in present.iter().filter(|(name, _)| asked(name)) {
            let from = if source.tensors().contains_key(name) || !self.rebuild {
                name.clone()
            } else {
                twin(name)
            };
            let here = &placed.info;
            let difference = |stored: &TensorInfo| Difference {
                name: name.clone(),
                here: here.clone(),
                stored: stored.clone(),
            };
            match source.tensors().get(&from) {
                None => out.missing.push(name.clone()),
                Some(info) if info.shape != here.shape => {
                    out.mismatched.push(name.clone());
                    shapes.push(difference(info));
                }
                Some(info) if info.dtype != here.dtype && !self.cast && from == *name => {
                    dtypes.push(difference(info));
                }
                Some(_) => {
                    if from != *name {
                        out.rebuilt.push(name.clone());
                    }
                    wanted.insert(name, from);
                }
            }
        }
        let read: BTreeSet<&String> = wanted.values().collect();
        let used = |name: &String| present.contains_key(name) || read.contains(name);
        out.unexpected = source
            .tensors()
            .keys()
            .filter(|name| asked(name) && !used(name))
            .cloned()
            .collect();
        let unless = |allowed: bool, names: &[String]| {
            if allowed { vec![] } else { names.to_vec() }
        };
        if self.allow_mismatched {
            shapes.clear();
        }
        let missing = unless(self.allow_missing, &out.missing);
        let unexpected = unless(self.allow_unexpected, &out.unexpected);
        if missing.is_empty() && unexpected.is_empty() && shapes.is_empty() && dtypes.is_empty() {
            return Ok(wanted);
        }
        Err(Error::Misfit {
            missing,
            unexpected,
            shapes,
            dtypes,
        })
    }
}

/// A fused buffer with parts of it loaded. Its other parts and its padding stay.
fn fill(
    source: &dyn Source,
    fused: &Fused,
    present: &BTreeMap<String, PlacedTensor>,
    wanted: &Wanted<'_>,
) -> Result<Fused> {
    let parts: Vec<(&PlacedTensor, &String)> = fused
        .parts
        .iter()
        .filter_map(|p| Some((&present[&p.name], wanted.get(&p.name)?)))
        .collect();
    if parts.is_empty() {
        return Ok(fused.clone());
    }
    let (buffer, mesh, dtype) = (&fused.buffer, fused.buffer.mesh(), fused.buffer.dtype());
    let mut made: Vec<(Region, Device, Tensor)> = vec![];
    let mut filled = vec![];
    for (i, (rank, part)) in buffer.shards().into_iter().enumerate() {
        let (device, region) = (
            mesh.device(i),
            buffer.sharding().region(mesh, rank, buffer.shape()),
        );
        if let Some((.., same)) = made.iter().find(|(r, d, _)| *r == region && d == device) {
            filled.push(same.clone());
            continue;
        }
        let mut bytes = part.to_bytes()?;
        for (tensor, from) in &parts {
            for (of, at) in tensor.placed.regions(rank) {
                let at = at.unwrap_or(0) * dtype.size();
                let new = read_as(source, from, &of, dtype, device)?;
                bytes[at..at + new.len()].copy_from_slice(&new);
            }
        }
        let new = Tensor::from_bytes(&bytes, dtype, part.shape().clone(), device)?;
        made.push((region, device.clone(), new.clone()));
        filled.push(new);
    }
    let ty = TensorType {
        dtype,
        shape: buffer.shape().clone(),
        sharding: buffer.sharding().clone(),
    };
    let plain = if mesh.is_single() { filled.pop() } else { None };
    let buffer = plain.map_or_else(|| Tensor::from_shards(&ty, mesh, &filled), Ok)?;
    Ok(Fused {
        buffer,
        parts: fused.parts.clone(),
    })
}

/// The bytes of a region as another dtype.
fn read_as(
    source: &dyn Source,
    name: &str,
    region: &Region,
    dtype: DType,
    device: &Device,
) -> Result<Vec<u8>> {
    let stored = source.info(name)?.dtype;
    let mut bytes = vec![0; region.numel() * stored.size()];
    source.read(name, region, &mut bytes)?;
    Ok(if stored == dtype {
        bytes
    } else {
        Tensor::from_bytes(&bytes, stored, [region.numel()], device)?
            .cast(dtype)?
            .to_bytes()?
    })
}

/// Lets threads in as long as what they hold together stays within a limit.
struct Gate {
    used: Mutex<usize>,
    freed: Condvar,
}

impl Gate {
    fn enter(&self, bytes: usize, limit: usize) {
        let used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let full = |used: &mut usize| *used > 0 && used.saturating_add(bytes) > limit;
        *self
            .freed
            .wait_while(used, full)
            .unwrap_or_else(PoisonError::into_inner) += bytes;
    }

    fn leave(&self, bytes: usize) {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) -= bytes;
        self.freed.notify_all();
    }
}

//! Loading tensors from any source, in any layout.

use crate::{Error, Result, Source};
use anymesh_core::{Place, Region, Shape, Tensor, TensorType};
use std::{
    collections::BTreeMap,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

/// A tensor of a source, cut up over a mesh or on one device. Reads what this process holds, each box once.
pub fn load(source: &dyn Source, name: &str, place: impl Into<Place>) -> Result<Tensor> {
    let (info, place) = (source.info(name)?, place.into());
    let (mesh, shape) = (&place.mesh, Shape::from(info.shape.as_slice()));
    place.sharding.check(mesh, shape.rank())?;
    if place.sharding.is_partial() {
        return Err(Error::Argument(format!("'{name}' cannot be loaded as a partial value: load it whole or cut")));
    }
    // Each box once for all ranks that hold it, and all boxes in one go: they may share what is read.
    let regions: Vec<Region> = mesh.addressable().map(|rank| place.sharding.region(mesh, rank, &shape)).collect();
    let mut boxes: Vec<(Region, Vec<u8>)> = vec![];
    for region in &regions {
        if !boxes.iter().any(|(r, _)| r == region) {
            boxes.push((region.clone(), vec![0; region.numel() * info.dtype.size()]));
        }
    }
    source.read_many(name, &mut boxes)?;
    let mut made: Vec<(usize, usize, Tensor)> = vec![];
    for (i, region) in regions.iter().enumerate() {
        let (at, device) = (boxes.iter().position(|(r, _)| r == region).unwrap_or(0), mesh.device(i));
        let part = match made.iter().find(|(b, j, _)| *b == at && mesh.device(*j) == device) {
            Some((.., part)) => part.clone(),
            None => Tensor::from_bytes(&boxes[at].1, info.dtype, Shape::from(region.shape.clone()), device)?,
        };
        made.push((at, i, part));
    }
    let mut parts: Vec<Tensor> = made.into_iter().map(|(.., part)| part).collect();
    if mesh.is_single() {
        return parts.pop().ok_or_else(|| Error::Argument("a mesh without ranks".into()));
    }
    let ty = TensorType { dtype: info.dtype, shape, sharding: place.sharding.clone() };
    Ok(Tensor::from_shards(&ty, mesh, &parts)?)
}

/// What to do about names and types that do not fit.
#[derive(Clone, Debug)]
pub struct Load {
    /// Leave a tensor that the source lacks as it is, instead of an error.
    pub allow_missing: bool,
    /// Pass over a tensor of the source that nobody asked for, instead of an error.
    pub allow_unexpected: bool,
    /// Leave a tensor whose shape differs as it is, instead of an error.
    pub allow_mismatched: bool,
    /// Convert to the dtype of the tensor that is there, instead of an error where it differs.
    pub cast: bool,
    /// Names that are left out on both sides; `*` stands for anything.
    pub ignore: Vec<String>,
    /// Tensors that are read at the same time.
    pub threads: usize,
}

impl Default for Load {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        Self { allow_missing: false, allow_unexpected: false, allow_mismatched: false, cast: false, ignore: vec![], threads }
    }
}

/// Tensors that were loaded, and what did not fit.
#[derive(Clone, Debug, Default)]
pub struct Loaded {
    /// Every tensor that was asked for: loaded, or as it was.
    pub tensors: BTreeMap<String, Tensor>,
    /// Names that the source lacks.
    pub missing: Vec<String>,
    /// Names of the source that nobody asked for.
    pub unexpected: Vec<String>,
    /// Names whose shapes differ.
    pub mismatched: Vec<String>,
}

/// Whether a name matches a pattern in which `*` stands for anything.
pub fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((head, tail)) => name.strip_prefix(head).is_some_and(|rest| (0..=rest.len()).any(|i| rest.is_char_boundary(i) && matches(tail, &rest[i..]))),
    }
}

impl Load {
    /// Loads a tensor for each that is there, in its layout. All misfits are found before anything is read, and told together.
    pub fn replace(&self, source: &dyn Source, there: &BTreeMap<String, Tensor>) -> Result<Loaded> {
        let ignored = |name: &String| self.ignore.iter().any(|pattern| matches(pattern, name));
        let mut out = Loaded::default();
        let (mut wrong, mut wanted) = (vec![], vec![]);
        for (name, x) in there.iter().filter(|(name, _)| !ignored(name)) {
            match source.tensors().get(name) {
                None => out.missing.push(name.clone()),
                Some(info) if info.shape != x.dims() => out.mismatched.push(name.clone()),
                Some(info) if info.dtype != x.dtype() && !self.cast => {
                    wrong.push(format!("'{name}' is stored as {} and is {} here: allow a cast", info.dtype, x.dtype()));
                }
                Some(_) => wanted.push((name, x)),
            }
        }
        out.unexpected = source.tensors().keys().filter(|name| !there.contains_key(*name) && !ignored(name)).cloned().collect();
        let told = |names: &[String]| names.iter().take(8).map(|n| format!("'{n}'")).collect::<Vec<_>>().join(", ");
        for (names, allowed, what) in [
            (&out.missing, self.allow_missing, "are not in the source"),
            (&out.unexpected, self.allow_unexpected, "are in the source and nobody asked for them"),
            (&out.mismatched, self.allow_mismatched, "have another shape in the source"),
        ] {
            if !allowed && !names.is_empty() {
                wrong.push(format!("{} {} {what}", names.len(), told(names)));
            }
        }
        if !wrong.is_empty() {
            return Err(Error::Argument(format!("the tensors do not fit: {}", wrong.join("; "))));
        }
        out.tensors = there.clone();
        let (next, done) = (AtomicUsize::new(0), Mutex::new(vec![]));
        let run = || {
            while let Some((name, x)) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
                let place = Place { mesh: x.mesh().clone(), sharding: x.sharding().whole() };
                let tensor = load(source, name, place).and_then(|t| Ok(t.cast(x.dtype())?));
                done.lock().unwrap_or_else(PoisonError::into_inner).push((name.to_string(), tensor));
            }
        };
        std::thread::scope(|scope| {
            (1..self.threads.min(wanted.len())).for_each(|_| drop(scope.spawn(run)));
            run();
        });
        for (name, tensor) in done.into_inner().unwrap_or_else(PoisonError::into_inner) {
            out.tensors.insert(name, tensor?);
        }
        Ok(out)
    }
}

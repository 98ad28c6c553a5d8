//! Putting the shards of ranks together again.

use super::names::{MESH, TYPES, file_name};
use crate::plan::{Placed, holders};
use crate::regions::checked_numel;
use crate::source::check_region;
use crate::{Error, Layouts, Result, Source, TensorInfo, copy_region, safetensors};
use anymesh_core::{Mesh, Region, Sharding, TensorType, meta};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const WHAT: &str = "folder split by rank";

/// A folder with files for each rank, read as whole tensors region by region. What several ranks
/// hold must be equal on all of them, which is checked when it is read.
#[derive(Debug)]
pub struct Folder {
    ranks: Vec<Vec<safetensors::File>>,
    tensors: BTreeMap<String, TensorInfo>,
    /// The regions of a tensor, each with the ranks that hold it.
    regions: BTreeMap<String, Vec<(Region, Vec<usize>)>>,
}

impl Folder {
    /// Opens a folder whose files say how the tensors lie.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let wrong = |detail: String| Error::format(path, WHAT, detail);
        let first = safetensors::File::open(path.join(file_name(0, 0)))?;
        let (Some(mesh), Some(types)) = (first.metadata().get(MESH), first.metadata().get(TYPES))
        else {
            return Err(wrong(
                "its files do not say how the tensors lie: say it yourself, by a mesh and layouts"
                    .into(),
            ));
        };
        // Counted before a mesh of that size is made: a header may say anything.
        let said = mesh
            .split(',')
            .filter_map(|axis| axis.split_once('=')?.1.trim().parse().ok())
            .try_fold(1usize, |n, size: usize| n.checked_mul(size));
        let found = (0..)
            .take_while(|rank| path.join(file_name(*rank, 0)).is_file())
            .count();
        if said != Some(found) {
            return Err(wrong(format!(
                "its files say that it is for the mesh {mesh}, and there are files of {found} ranks"
            )));
        }
        let mesh = Mesh::new(mesh, &meta())?;
        let types: BTreeMap<String, String> = serde_json::from_str(types)
            .map_err(|e| wrong(format!("the types in its files are not JSON: {e}")))?;
        let mut layout = BTreeMap::new();
        for (name, text) in types {
            let TensorType {
                dtype,
                shape,
                sharding,
            } = TensorType::parse(&text, &mesh)?;
            layout.insert(
                name,
                Placed::new(
                    TensorInfo {
                        dtype,
                        shape: shape.dims().to_vec(),
                    },
                    &mesh,
                    sharding,
                ),
            );
        }
        Self::new(path, ranks(path, &mesh)?, &layout)
    }

    /// Opens a folder whose files do not say how the tensors lie: `layouts` does.
    pub fn open_as(path: impl AsRef<Path>, layouts: &Layouts) -> Result<Self> {
        let (path, mesh) = (path.as_ref(), layouts.mesh());
        let ranks = ranks(path, mesh)?;
        let tensors = || ranks[0].iter().flat_map(|file| file.tensors());
        let mut shardings =
            layouts.shardings(tensors().map(|(name, info)| (name.as_str(), info.shape.len())))?;
        let mut layout = BTreeMap::new();
        for (name, info) in tensors() {
            let sharding = shardings.remove(name).unwrap_or_default();
            let mut info = info.clone();
            for d in 0..info.shape.len() {
                info.shape[d] =
                    length(name, d, mesh, &sharding, &ranks).ok_or_else(|| Error::TooLarge {
                        tensor: name.clone(),
                        shape: info.shape.clone(),
                    })?;
            }
            layout.insert(name.clone(), Placed::new(info, mesh, sharding));
        }
        Self::new(path, ranks, &layout)
    }

    /// Holds the files against how the tensors are said to lie.
    fn new(
        path: &Path,
        ranks: Vec<Vec<safetensors::File>>,
        layout: &BTreeMap<String, Placed>,
    ) -> Result<Self> {
        if let Some((name, placed)) = layout
            .iter()
            .find(|(_, placed)| checked_numel(&placed.info.shape).is_none())
        {
            return Err(Error::format(
                path,
                WHAT,
                format!(
                    "tensor '{name}' of shape {:?} is too large",
                    placed.info.shape
                ),
            ));
        }
        for (rank, files) in ranks.iter().enumerate() {
            let wrong = |name: &str, detail: String| {
                let file = file_name(rank, 0);
                Err(Error::Index {
                    path: path.into(),
                    tensor: name.into(),
                    file,
                    detail,
                })
            };
            for (name, placed) in layout {
                let expected = placed.sharding.region(
                    &placed.mesh,
                    rank,
                    &placed.info.shape.as_slice().into(),
                );
                match files.iter().find_map(|file| file.tensors().get(name)) {
                    None => return wrong(name, format!("rank {rank} does not have it")),
                    Some(found)
                        if found.dtype != placed.info.dtype
                            || found.shape != expected.shape[..] =>
                    {
                        let (shape, whole) = (&expected.shape[..], &placed.info.shape);
                        let detail = format!(
                            "rank {rank} holds {}{:?}, not its part {}{shape:?} of {whole:?}",
                            found.dtype, found.shape, placed.info.dtype
                        );
                        return wrong(name, detail);
                    }
                    Some(_) => {}
                }
            }
            if let Some(name) = files
                .iter()
                .flat_map(|file| file.tensors().keys())
                .find(|name| !layout.contains_key(*name))
            {
                return wrong(
                    name,
                    format!("rank {rank} has a tensor that rank 0 does not have"),
                );
            }
        }
        let tensors = layout
            .iter()
            .map(|(name, placed)| (name.clone(), placed.info.clone()))
            .collect();
        let regions = layout
            .iter()
            .map(|(name, placed)| (name.clone(), holders(placed)))
            .collect();
        Ok(Self {
            ranks,
            tensors,
            regions,
        })
    }

    /// How many ranks it is split into.
    pub fn ranks(&self) -> usize {
        self.ranks.len()
    }

    fn read_from(&self, rank: usize, name: &str, region: &Region, out: &mut [u8]) -> Result<()> {
        match self.ranks[rank]
            .iter()
            .find(|file| file.tensors().contains_key(name))
        {
            Some(file) => file.read(name, region, out),
            None => crate::source::find(&BTreeMap::new(), name).map(drop),
        }
    }
}

/// The files of all ranks of a mesh.
fn ranks(path: &Path, mesh: &Mesh) -> Result<Vec<Vec<safetensors::File>>> {
    let mut ranks = vec![];
    for rank in 0..mesh.ranks() {
        if !path.join(file_name(rank, 0)).is_file() {
            let detail = format!(
                "{} is not there, and the mesh has {} ranks",
                file_name(rank, 0),
                mesh.ranks()
            );
            return Err(Error::format(path, WHAT, detail));
        }
        let parts = (0..)
            .map(|part| path.join(file_name(rank, part)))
            .take_while(|file| file.is_file());
        let mut files: Vec<safetensors::File> =
            parts.map(safetensors::File::open).collect::<Result<_>>()?;
        files.iter_mut().for_each(safetensors::File::close);
        ranks.push(files);
    }
    let more = file_name(mesh.ranks(), 0);
    if path.join(&more).exists() {
        return Err(Error::format(
            path,
            WHAT,
            format!(
                "{more} is there, but the mesh has only {} ranks",
                mesh.ranks()
            ),
        ));
    }
    Ok(ranks)
}

/// The length of a dimension: that of its parts, one after the other.
fn length(
    name: &str,
    d: usize,
    mesh: &Mesh,
    sharding: &Sharding,
    ranks: &[Vec<safetensors::File>],
) -> Option<usize> {
    let axes: Vec<usize> = sharding.axes_of(d).collect();
    let mut seen = BTreeSet::new();
    let mut total = 0usize;
    for (rank, files) in ranks.iter().enumerate() {
        let part: Vec<usize> = axes
            .iter()
            .map(|axis| mesh.coordinate(rank, *axis))
            .collect();
        if seen.insert(part) {
            let shape = files
                .iter()
                .find_map(|file| file.tensors().get(name))
                .map(|info| info.shape.as_slice());
            total =
                total.checked_add(shape.and_then(|shape| shape.get(d)).copied().unwrap_or(0))?;
        }
    }
    Some(total)
}

impl Source for Folder {
    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    fn foreign(&self) -> Vec<(String, String)> {
        let all: BTreeSet<(String, String)> = self
            .ranks
            .iter()
            .flatten()
            .flat_map(Source::foreign)
            .collect();
        all.into_iter().collect()
    }

    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()> {
        let info = self.info(name)?;
        check_region(name, info, region, out)?;
        let size = info.dtype.size();
        for (of, holders) in self.regions.get(name).into_iter().flatten() {
            let Some(part) = (region.numel() > 0).then(|| of.intersect(region)).flatten() else {
                continue;
            };
            let inner = Region {
                start: part
                    .start
                    .iter()
                    .zip(&of.start)
                    .map(|(a, b)| a - b)
                    .collect(),
                shape: part.shape.clone(),
            };
            let mut first: Option<Vec<u8>> = None;
            for rank in holders {
                let mut bytes = vec![0; part.numel() * size];
                self.read_from(*rank, name, &inner, &mut bytes)?;
                match &first {
                    None => first = Some(bytes),
                    Some(first) if *first != bytes => {
                        let detail = format!(
                            "ranks {} and {rank} should hold the same of it and do not: is it cut? then say so by a layout",
                            holders[0]
                        );
                        return Err(Error::Argument(format!("tensor '{name}': {detail}")));
                    }
                    Some(_) => {}
                }
            }
            if let Some(bytes) = first {
                copy_region(&bytes, &part, out, region, &part, size);
            }
        }
        Ok(())
    }
}

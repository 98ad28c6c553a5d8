//! Folders with plain safetensors files for each rank, which hold that rank's shards under their
//! plain names: what tensor-parallel inference servers load.
//!
//! Files are called `model-rank-{rank}-part-{part}.safetensors`. Those that are written here say in
//! their headers how the tensors lie, so that they can be put together again; for those of other
//! programs the caller says it.
//!
//! ```
//! use anymesh_checkpoint::{Layouts, Memory, Source, TensorInfo};
//! use anymesh_checkpoint::{hugging_face::Export, safetensors, split};
//! use anymesh_core::{DType, Mesh, meta};
//!
//! # let parent = std::env::temp_dir().join(format!("anymesh-doc-split-{}", std::process::id()));
//! # std::fs::create_dir_all(&parent).unwrap();
//! let mut model = Memory::default();
//! let info = TensorInfo { dtype: DType::U8, shape: vec![2, 4] };
//! model.insert("w", info, (0..8).collect())?;
//! let mesh = Mesh::new("tp=2", &meta())?;
//! let layout = Layouts::new(&mesh, ["*=[..., @tp]"])?.place(&model)?;
//!
//! let folder = parent.join("split");
//! split::write(&model, &folder, &mesh, &layout, &Export::default())?;
//! let second = safetensors::File::open(folder.join("model-rank-1-part-0.safetensors"))?;
//! assert_eq!(second.read_all("w")?, [2, 3, 6, 7]);
//! assert_eq!(split::Folder::open(&folder)?.read_all("w")?, [0, 1, 2, 3, 4, 5, 6, 7]);
//! # std::fs::remove_dir_all(&parent).unwrap();
//! # Ok::<(), anymesh_checkpoint::Error>(())
//! ```

mod names;
mod read;

use crate::hugging_face::{Export, groups, write_folder};
use crate::plan::Placed;
use crate::safetensors::{copy_tensor, refuse_foreign, write_in_place};
use crate::{Error, Result, Source, TensorInfo};
use anymesh_core::{Mesh, Region};
use names::{MESH, TYPES};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;

pub use names::file_name;
pub use read::Folder;

/// Writes a folder, which must not be there yet or be empty, with the shards of each rank of a
/// mesh; returns the names of the files. A rank has more than one where [`Export::max_file_bytes`]
/// asks for it. The folder is there whole or not at all.
pub fn write(
    source: &dyn Source,
    folder: impl AsRef<Path>,
    mesh: &Mesh,
    layout: &BTreeMap<String, Placed>,
    options: &Export,
) -> Result<Vec<String>> {
    let folder = folder.as_ref();
    refuse_foreign(source, folder)?;
    let mut types = BTreeMap::new();
    for (name, placed) in layout {
        let info = source.info(name)?;
        if *info != placed.info {
            return Err(Error::TypeMismatch {
                tensor: name.clone(),
                found: info.clone(),
                expected: placed.info.clone(),
            });
        }
        if placed.mesh.axes() != mesh.axes() {
            return Err(Error::Argument(format!(
                "tensor '{name}' is said to lie on {}, and the folder is for {mesh}",
                placed.mesh
            )));
        }
        placed.sharding.check(mesh, info.shape.len())?;
        if placed.sharding.is_partial() {
            return Err(Error::Partial {
                tensor: name.clone(),
                layout: placed.layout(),
            });
        }
        if placed.fused.is_some() {
            return Err(Error::Argument(format!(
                "tensor '{name}' cannot be split as a part of a fused buffer"
            )));
        }
        types.insert(name, placed.layout());
    }
    let axes: Vec<String> = mesh
        .axes()
        .iter()
        .map(|(name, size)| format!("{name}={size}"))
        .collect();
    let mut metadata = options.metadata.clone();
    metadata.insert(MESH.into(), axes.join(","));
    metadata.insert(TYPES.into(), json!(types).to_string());
    let mut names = vec![];
    write_folder(folder, options, |temporary| {
        for rank in 0..mesh.ranks() {
            let shards = Shards::new(source, layout, rank);
            let mut parts = groups(&shards.tensors, options.max_file_bytes);
            if parts.is_empty() {
                parts.push(BTreeMap::new());
            }
            for (part, tensors) in parts.iter().enumerate() {
                let name = file_name(rank, part);
                write_in_place(&temporary.join(&name), tensors, &metadata, |tensor, out| {
                    copy_tensor(&shards, tensor, options.chunk, out)
                })?;
                names.push(name);
            }
        }
        Ok(())
    })?;
    Ok(names)
}

/// What one rank holds of a source.
struct Shards<'s> {
    source: &'s dyn Source,
    tensors: BTreeMap<String, TensorInfo>,
    regions: BTreeMap<String, Region>,
}

impl<'s> Shards<'s> {
    fn new(source: &'s dyn Source, layout: &BTreeMap<String, Placed>, rank: usize) -> Self {
        let region = |placed: &Placed| {
            placed
                .sharding
                .region(&placed.mesh, rank, &placed.info.shape.as_slice().into())
        };
        let regions: BTreeMap<String, Region> = layout
            .iter()
            .map(|(name, placed)| (name.clone(), region(placed)))
            .collect();
        let info = |(name, region): (&String, &Region)| {
            (
                name.clone(),
                TensorInfo {
                    dtype: layout[name].info.dtype,
                    shape: region.shape.to_vec(),
                },
            )
        };
        Self {
            source,
            tensors: regions.iter().map(info).collect(),
            regions,
        }
    }
}

impl Source for Shards<'_> {
    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()> {
        self.info(name)?;
        let mut region = region.clone();
        region
            .start
            .iter_mut()
            .zip(&self.regions[name].start)
            .for_each(|(at, start)| *at += start);
        self.source.read(name, &region, out)
    }
}

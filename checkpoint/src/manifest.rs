//! What a checkpoint holds: `manifest.json`, beside ordinary safetensors files.
//!
//! The manifest is written last, so a folder with one is whole. It names for each tensor its dtype,
//! its global shape and the regions it is stored in, each with file, place and checksums. Regions
//! of one tensor do not overlap and fill it. [`Manifest::parse`] checks all of that once; what it
//! returns can be trusted.
//!
//! Versions: a reader takes every version up to its own. `migrate` lifts an older one step by step;
//! a newer one is refused with its number.

use crate::{Error, Result, TensorInfo, regions::checked_numel};
use anymesh_core::{DType, Region};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::{collections::BTreeMap, path::Path};

/// The version that this library writes.
pub const VERSION: u64 = 1;
/// What its `format` says.
pub const FORMAT: &str = "anymesh-checkpoint";
/// The name of the file.
pub const NAME: &str = "manifest.json";
/// Bytes of a region that share a checksum: what a read of a part takes too much of at each of its
/// ends is less than this.
pub const BLOCK: usize = 1 << 20;

/// The contents of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Always `anymesh-checkpoint`.
    pub format: String,
    /// The version of this schema.
    pub version: u64,
    /// The training step: the newest of several checkpoints is the one with the highest.
    pub step: u64,
    /// The axes of the mesh it was saved from, for readers; empty for one device.
    pub mesh: Vec<(String, usize)>,
    /// The tensors by name.
    pub tensors: BTreeMap<String, Stored>,
    /// The size in bytes of each data file.
    pub files: BTreeMap<String, u64>,
    /// Whatever the program wants to find again: counters, random keys, schedules, configurations.
    pub state: Map<String, Value>,
}

/// A tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stored {
    /// The name of the element type.
    pub dtype: String,
    /// The global shape.
    pub shape: Vec<usize>,
    /// Dtype, shape and sharding as text, for readers.
    pub layout: String,
    /// Where its elements are. (`boxes` in the file.)
    #[serde(rename = "boxes")]
    pub regions: Vec<StoredRegion>,
}

/// A region of a tensor, in row-major order at one place of a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StoredRegion {
    /// Its first element in the tensor.
    pub start: Vec<usize>,
    /// Its sizes.
    pub shape: Vec<usize>,
    /// The file.
    pub file: String,
    /// Its first byte in the file.
    pub offset: u64,
    /// The XXH3 of each [`BLOCK`] bytes, as 16 hexadecimal digits.
    pub sums: Vec<String>,
}

impl StoredRegion {
    /// The region in the tensor.
    pub fn region(&self) -> Region {
        Region {
            start: self.start.iter().copied().collect(),
            shape: self.shape.iter().copied().collect(),
        }
    }
}

/// The checksum of a block.
pub fn checksum(block: &[u8]) -> String {
    format!("{:016x}", xxhash_rust::xxh3::xxh3_64(block))
}

impl Stored {
    /// Its type. Dtypes were checked when the manifest was parsed.
    pub fn info(&self) -> TensorInfo {
        TensorInfo {
            dtype: dtype(&self.dtype).unwrap_or(DType::U8),
            shape: self.shape.clone(),
        }
    }
}

fn dtype(name: &str) -> Option<DType> {
    DType::ALL.into_iter().find(|d| d.name() == name)
}

impl Manifest {
    /// Reads and checks a manifest. `path` is for errors.
    pub fn parse(text: &[u8], path: &Path) -> Result<Self> {
        let wrong = |detail: String| Error::Format {
            path: path.into(),
            what: "checkpoint manifest",
            detail,
        };
        let mut value: Value = serde_json::from_slice(text).map_err(|e| wrong(e.to_string()))?;
        if value.get("format").and_then(Value::as_str) != Some(FORMAT) {
            return Err(wrong(format!("its format is not '{FORMAT}'")));
        }
        migrate(&mut value).map_err(&wrong)?;
        let manifest: Manifest = serde_json::from_value(value).map_err(|e| wrong(e.to_string()))?;
        manifest.check().map_err(wrong)?;
        Ok(manifest)
    }

    /// As text.
    pub fn to_text(&self) -> String {
        // A map with text keys always serialises.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Whether files have plain names and the regions of every tensor lie in them, fill it and do
    /// not overlap.
    pub(crate) fn check(&self) -> Result<(), String> {
        for name in self.files.keys() {
            let plain = !name.is_empty()
                && name != NAME
                && !name.starts_with('.')
                && !name.contains(['/', '\\', '\0']);
            if !plain {
                return Err(format!("'{name}' is no name of a file in the folder"));
            }
        }
        self.tensors.iter().try_for_each(|(name, stored)| {
            self.check_tensor(stored)
                .map_err(|why| format!("tensor '{name}': {why}"))
        })
    }

    fn check_tensor(&self, stored: &Stored) -> Result<(), String> {
        let dtype =
            dtype(&stored.dtype).ok_or_else(|| format!("unknown dtype '{}'", stored.dtype))?;
        let count = |shape: &[usize]| checked_numel(shape).map(|n| n * dtype.size());
        let bytes = count(&stored.shape).ok_or("its shape is too large to address")?;
        let mut covered = 0usize;
        for (i, b) in stored.regions.iter().enumerate() {
            let at = || format!("region {i} at {:?} of shape {:?}", b.start, b.shape);
            let rank = stored.shape.len();
            let inside = |d: usize| {
                b.start[d]
                    .checked_add(b.shape[d])
                    .is_some_and(|end| end <= stored.shape[d])
            };
            if b.start.len() != rank || b.shape.len() != rank || !(0..rank).all(inside) {
                return Err(format!(
                    "{} is not inside the shape {:?}",
                    at(),
                    stored.shape
                ));
            }
            let size = count(&b.shape).ok_or_else(|| format!("{} is too large", at()))?;
            let file = *self.files.get(&b.file).ok_or_else(|| {
                format!(
                    "{} is in '{}', which is no file of the checkpoint",
                    at(),
                    b.file
                )
            })?;
            if b.offset
                .checked_add(size as u64)
                .is_none_or(|end| end > file)
            {
                return Err(format!("{} reaches past the end of '{}'", at(), b.file));
            }
            if b.sums.len() != size.div_ceil(BLOCK) {
                return Err(format!(
                    "{} of {size} bytes has {} checksums",
                    at(),
                    b.sums.len()
                ));
            }
            covered = covered
                .checked_add(size)
                .ok_or("its regions are too large")?;
        }
        if covered != bytes || overlap(&stored.regions) {
            return Err(format!(
                "its regions have {covered} bytes of {bytes}, or overlap: they must fill it exactly"
            ));
        }
        Ok(())
    }
}

/// Whether any two regions share an element.
fn overlap(regions: &[StoredRegion]) -> bool {
    let mut groups = vec![
        regions
            .iter()
            .map(StoredRegion::region)
            .filter(|r| r.numel() > 0)
            .collect::<Vec<Region>>(),
    ];
    // Regions of a grid, or of a part of one, come apart dimension by dimension. Those that do not
    // are compared with each other.
    while let Some(mut group) = groups.pop() {
        let rank = group.first().map_or(0, |r| r.start.len());
        let parts = (0..rank)
            .map(|d| apart(&mut group, d))
            .find(|parts| parts.len() > 1);
        match parts {
            Some(parts) => groups.extend(parts),
            None if group.iter().enumerate().any(|(i, a)| {
                group[i + 1..]
                    .iter()
                    .any(|b| a.intersect(b).is_some_and(|r| r.numel() > 0))
            }) =>
            {
                return true;
            }
            None => {}
        }
    }
    false
}

/// Regions in groups that do not meet along a dimension, or nothing where all are one group.
fn apart(regions: &mut [Region], d: usize) -> Vec<Vec<Region>> {
    regions.sort_unstable_by_key(|r| r.start[d]);
    let (mut end, mut first, mut cuts) = (0, 0, vec![]);
    for (i, r) in regions.iter().enumerate() {
        if r.start[d] >= end && i > 0 {
            cuts.push(first..i);
            first = i;
        }
        end = end.max(r.start[d] + r.shape[d]);
    }
    if cuts.is_empty() {
        vec![]
    } else {
        cuts.into_iter()
            .chain([first..regions.len()])
            .map(|range| regions[range].to_vec())
            .collect()
    }
}

/// Step `i` lifts a manifest of version `i + 1` to the next. A change of the schema adds one, with
/// a stored sample of the old version to test it on.
const MIGRATIONS: [fn(&mut Map<String, Value>) -> Result<(), String>; VERSION as usize - 1] = [];

/// Lifts a manifest of an older version.
fn migrate(value: &mut Value) -> Result<(), String> {
    let Some(object) = value.as_object_mut() else {
        return Err("it is no object".into());
    };
    let version = object
        .get("version")
        .and_then(Value::as_u64)
        .ok_or("it has no version")?;
    if version == 0 {
        return Err("there is no version 0".into());
    }
    if version > VERSION {
        return Err(format!(
            "version {version} was written by a newer library: this one reads 1 to {VERSION}, update it"
        ));
    }
    for step in &MIGRATIONS[version as usize - 1..] {
        step(object)?;
    }
    object.insert("version".into(), VERSION.into());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn manifest(tensors: Value, state: Value) -> Result<Manifest> {
        let whole = json!({"format": "anymesh-checkpoint", "version": 1, "step": 1, "mesh": [], "tensors": tensors, "files": {"f": 16}, "state": state});
        Manifest::parse(whole.to_string().as_bytes(), Path::new(NAME))
    }

    #[test]
    fn numbers_of_the_state_come_back_bit_for_bit() {
        // Of these, a reader that rounds in a hurry misses some by the last bit.
        for bits in (0..20_000u64).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15)) {
            let x = f64::from_bits(bits);
            if x.is_finite() {
                let found = manifest(json!({}), json!({"x": x}))
                    .expect("a manifest")
                    .state["x"]
                    .as_f64();
                assert_eq!(found.map(f64::to_bits), Some(bits), "{x:e}");
            }
        }
    }

    #[test]
    fn sizes_beside_a_zero_must_be_addressable_too() {
        let tensor = |shape: &[usize]| {
            manifest(
                json!({"t": {"dtype": "f32", "shape": shape, "layout": "", "boxes": []}}),
                json!({}),
            )
        };
        assert!(tensor(&[0, 1 << 40]).is_ok());
        for shape in [[0, 1 << 40, 1 << 40], [1 << 40, 1 << 40, 0]] {
            let error = tensor(&shape)
                .expect_err("strides would overflow")
                .to_string();
            assert!(error.contains("too large to address"), "{error}");
        }
    }
}

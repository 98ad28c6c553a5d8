//! A model under the names and in the layout of Hugging Face.

use super::names::{ARCHITECTURES, Turned, hugging_face_name, turned};
use super::{File, config};
use crate::regions::flat_regions;
use crate::source::{check_region, find};
use crate::{Error, Result, Source, TensorInfo};
use anymesh_core::Region;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// The tensor with what rotary frequencies are divided by, which Hugging Face's models compute from
/// their configuration.
pub(super) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// The model of a GGUF file as Hugging Face's libraries have it: their names of tensors, their
/// order of the rows of queries and keys, their configuration. It is a [`Source`].
///
/// It is made of the architectures [`ARCHITECTURES`]; of others read [`File`] under its own names.
#[derive(Debug)]
pub struct Model {
    file: File,
    tensors: BTreeMap<String, TensorInfo>,
    foreign: BTreeMap<String, String>,
    origins: BTreeMap<String, Origin>,
    config: Map<String, Value>,
}

/// Where a tensor comes from.
#[derive(Debug)]
struct Origin {
    name: String,
    /// The heads whose rows were turned.
    heads: Option<usize>,
}

impl Model {
    /// Opens a file as a model.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::new(File::open(path)?)
    }

    /// The model of a file. An error where its architecture is not known here, where it has tensors
    /// that such models do not have, and where its metadata does not say what a model needs.
    pub fn new(file: File) -> Result<Self> {
        let architecture = known_architecture(&file)?.to_string();
        if let Some(parts) = file.metadata().count("split.count").filter(|n| *n > 1) {
            return Err(file.wrong(
                "split.count",
                format!(
                    "the model is split into {parts} files: join them (llama-gguf-split --merge), or read this one under its own names"
                ),
            ));
        }
        let config = config::config(&file, &architecture)?;
        let heads = config::Heads::of(&file, &architecture)?;
        let mut model = Self {
            tensors: BTreeMap::new(),
            foreign: BTreeMap::new(),
            origins: BTreeMap::new(),
            config,
            file,
        };
        let file = &model.file;
        for name in file.tensors().keys().chain(file.header.foreign.keys()) {
            if name == ROPE_FACTORS {
                continue;
            }
            let ours = hugging_face_name(&architecture, name).ok_or_else(|| {
                file.wrong(
                    name.as_str(),
                    format!("a {architecture} model of Hugging Face has no such tensor: read the file under its own names"),
                )
            })?;
            let Some(info) = file.tensors().get(name) else {
                let kind = file.header.foreign.get(name).cloned().unwrap_or_default();
                model.foreign.insert(ours, kind);
                continue;
            };
            let heads = match turned(&architecture, name) {
                Some(Turned::Query) => Some(heads.queries),
                Some(Turned::Key) => Some(heads.keys),
                None => None,
            };
            if let Some(heads) = heads {
                check_turned(file, name, info, heads)?;
            }
            let name = name.clone();
            model.tensors.insert(ours.clone(), info.clone());
            model.origins.insert(ours, Origin { name, heads });
        }
        Ok(model)
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// What `config.json` says.
    pub fn config(&self) -> &Map<String, Value> {
        &self.config
    }

    /// What `generation_config.json` says: which tokens begin, end and pad texts.
    pub fn generation_config(&self) -> Map<String, Value> {
        config::generation_config(&self.file)
    }

    fn origin(&self, name: &str) -> Result<&Origin> {
        self.info(name)?;
        self.origins.get(name).ok_or_else(|| Error::Missing {
            name: name.into(),
            near: None,
        })
    }
}

/// The architecture of a file, if it is known here.
fn known_architecture(file: &File) -> Result<&str> {
    let known = ARCHITECTURES.join(" and ");
    let key = "general.architecture";
    match file.architecture() {
        None => Err(file.wrong(key, "it is missing, or not a text")),
        Some(name) if ARCHITECTURES.contains(&name) => Ok(name),
        Some(name) => Err(file.wrong(
            key,
            format!("Hugging Face's names are known here for {known}, not for {name}: read the file under its own names"),
        )),
    }
}

/// Whether the rows of a tensor can have been turned.
fn check_turned(file: &File, name: &str, info: &TensorInfo, heads: usize) -> Result<()> {
    let quantized_vector = info.shape.len() == 1
        && file
            .tensor_type(name)
            .is_none_or(|kind| kind.unpack().is_some());
    match info.shape.first() {
        Some(rows) if info.shape.len() <= 2 && rows % (2 * heads) == 0 && !quantized_vector => {
            Ok(())
        }
        _ => Err(file.wrong(
            name,
            format!("{info} does not have rows for {heads} heads of pairs"),
        )),
    }
}

impl Source for Model {
    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    fn foreign(&self) -> Vec<(String, String)> {
        self.foreign
            .iter()
            .map(|(name, kind)| (name.clone(), kind.clone()))
            .collect()
    }

    fn info(&self, name: &str) -> Result<&TensorInfo> {
        if let Some(kind) = self.foreign.get(name) {
            return Err(Error::ForeignType {
                path: self.file.path().into(),
                tensor: name.into(),
                dtype: kind.clone(),
            });
        }
        find(&self.tensors, name)
    }

    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()> {
        let info = self.info(name)?;
        check_region(name, info, region, out)?;
        let origin = self.origin(name)?;
        let stored = self.file.header.stored.get(&origin.name).copied();
        let (Some(heads), Some(stored)) = (origin.heads, stored) else {
            return self.file.read(&origin.name, region, out);
        };
        // Here a row is (head, half, pair), in the file (head, pair, half). A vector is a matrix of
        // rows of one element.
        let (rows, columns) = (
            info.shape[0],
            info.shape.get(1).map_or(1, |columns| *columns),
        );
        let half = rows / heads / 2;
        let bytes = (columns / stored.kind.block() * stored.kind.bytes()) as u64;
        let strides = [2 * half as u64 * bytes, bytes, 2 * bytes];
        let (from, count) = (region.start[0], region.shape[0]);
        let (first, width) = match (region.start.get(1), region.shape.get(1)) {
            (Some(first), Some(width)) => (*first, *width),
            _ => (0, 1),
        };
        // The rows that are asked for are a few boxes of those three dimensions, in order.
        for (part, at) in flat_regions(&[heads, 2, half], from..from + count) {
            let part = Region {
                start: [&part.start[..], &[first]].concat().into(),
                shape: [&part.shape[..], &[width]].concat().into(),
            };
            let begin = (at - from) * width * info.dtype.size();
            let end = begin + part.numel() * info.dtype.size();
            self.file
                .read_rows(stored, &strides, &part, &mut out[begin..end])?;
        }
        Ok(())
    }
}

//! Hugging Face folders, in and out: `model.safetensors`, or `model-0000i-of-0000n.safetensors`
//! with `model.safetensors.index.json`.
//!
//! ```
//! use anymesh_checkpoint::{hugging_face::{self, Export}, Memory, Source, TensorInfo};
//! use anymesh_core::DType;
//!
//! # let name = format!("anymesh-doc-hugging-face-{}", std::process::id());
//! # let parent = std::env::temp_dir().join(name);
//! # std::fs::create_dir_all(&parent).unwrap();
//! let mut model = Memory::default();
//! let info = |shape: &[usize]| TensorInfo { dtype: DType::U8, shape: shape.to_vec() };
//! model.insert("embed.weight", info(&[2, 2]), vec![1, 2, 3, 4])?;
//! model.insert("head.weight", info(&[3]), vec![5, 6, 7])?;
//!
//! let folder = parent.join("model");
//! let options = Export { max_file_bytes: 4, ..Export::default() };
//! let written = hugging_face::export(&model, &folder, &options)?;
//! assert_eq!(written, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]);
//! assert_eq!(hugging_face::Folder::open(&folder)?.read_all("head.weight")?, [5, 6, 7]);
//! # std::fs::remove_dir_all(&parent).unwrap();
//! # Ok::<(), anymesh_checkpoint::Error>(())
//! ```

mod export;
mod names;

use crate::{Error, Result, Source, TensorInfo, safetensors};
use anymesh_core::Region;
use names::plain_name;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub use export::{Export, export};
pub(crate) use export::{groups, write_folder};
pub use names::{CONFIGS, INDEX, SINGLE};

const WHAT_INDEX: &str = "index of a Hugging Face folder";

/// A Hugging Face folder that is read region by region.
///
/// Opening reads the headers of the files and holds them against the index; the files are opened
/// again when something of them is first read.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    files: Vec<safetensors::File>,
    tensors: BTreeMap<String, TensorInfo>,
    /// Which of `files` has a tensor.
    places: BTreeMap<String, usize>,
}

impl Folder {
    /// Opens a folder. As in the Hugging Face libraries, `model.safetensors` goes before an index.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let mut folder = Self {
            path: path.into(),
            files: vec![],
            tensors: BTreeMap::new(),
            places: BTreeMap::new(),
        };
        let index = path.join(INDEX);
        if path.join(SINGLE).is_file() {
            folder.add(safetensors::File::open(path.join(SINGLE))?);
        } else if index.is_file() {
            for (file, names) in read_index(&index)? {
                folder.add_indexed(&index, &file, &names)?;
            }
        } else {
            return Err(Error::format(
                path,
                "Hugging Face folder",
                format!("it has neither '{SINGLE}' nor '{INDEX}'"),
            ));
        }
        Ok(folder)
    }

    /// The text of `config.json`, `generation_config.json` or another small file of the folder,
    /// where there is one.
    pub fn text(&self, file: &str) -> Result<Option<String>> {
        let path = self
            .path
            .join(plain_name(file).ok_or_else(|| Error::BadName {
                name: file.into(),
                what: "the name of a file in this folder",
            })?);
        match std::fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::io(path, "read", &error)),
        }
    }

    /// How many safetensors files it has.
    pub fn files(&self) -> usize {
        self.files.len()
    }

    /// Whether the index, where there is one, says the bytes that the tensors of the files have.
    /// Opening the folder has checked names, types and sizes.
    pub fn check_total(&self) -> Result<()> {
        let index = self.path.join(INDEX);
        if self.path.join(SINGLE).is_file() || !index.is_file() {
            return Ok(());
        }
        let text = std::fs::read(&index).map_err(|e| Error::io(&index, "read", &e))?;
        let json: Value = serde_json::from_slice(&text)
            .map_err(|e| Error::format(&index, WHAT_INDEX, format!("not JSON: {e}")))?;
        let said = json
            .pointer("/metadata/total_size")
            .and_then(|n| n.as_u64().or_else(|| n.as_f64().map(|x| x as u64)));
        let found: u64 = self.files.iter().map(|file| file.header().bytes).sum();
        match said {
            Some(said) if said != found => Err(Error::format(
                &index,
                WHAT_INDEX,
                format!(
                    "its total_size says {said} bytes, the tensors have {found}: fetch or write the folder again"
                ),
            )),
            _ => Ok(()),
        }
    }

    fn add(&mut self, mut file: safetensors::File) {
        file.close();
        let foreign = file.foreign().into_iter().map(|(name, _)| name);
        self.places.extend(
            file.tensors()
                .keys()
                .cloned()
                .chain(foreign)
                .map(|name| (name, self.files.len())),
        );
        self.tensors.extend(
            file.tensors()
                .iter()
                .map(|(name, info)| (name.clone(), info.clone())),
        );
        self.files.push(file);
    }

    fn add_indexed(&mut self, index: &Path, name: &str, expected: &[String]) -> Result<()> {
        let wrong = |tensor: &str, detail: &str| Error::Index {
            path: index.into(),
            tensor: tensor.into(),
            file: name.into(),
            detail: detail.into(),
        };
        let first = expected.first().map_or("", String::as_str);
        let path = self.path.join(
            plain_name(name)
                .ok_or_else(|| wrong(first, "not the name of a file in this folder"))?,
        );
        if !path.is_file() {
            return Err(wrong(
                first,
                "the file is not there; fetch the folder again",
            ));
        }
        let file = safetensors::File::open(path)?;
        let foreign = file.foreign();
        let mut held: Vec<&String> = file
            .tensors()
            .keys()
            .chain(foreign.iter().map(|(name, _)| name))
            .collect();
        held.sort();
        if let Some(missing) = expected
            .iter()
            .find(|name| held.binary_search(name).is_err())
        {
            return Err(wrong(
                missing,
                "the index says the tensor is in this file, but it is not",
            ));
        }
        if let Some(extra) = held
            .iter()
            .find(|name| expected.binary_search(name).is_err())
        {
            return Err(wrong(
                extra,
                "the file has this tensor, but the index does not say so",
            ));
        }
        self.add(file);
        Ok(())
    }

    fn file(&self, name: &str) -> Option<&safetensors::File> {
        self.places.get(name).and_then(|&at| self.files.get(at))
    }
}

impl Source for Folder {
    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    fn foreign(&self) -> Vec<(String, String)> {
        self.files.iter().flat_map(Source::foreign).collect()
    }

    fn info(&self, name: &str) -> Result<&TensorInfo> {
        match self.file(name) {
            Some(file) => file.info(name),
            None => crate::source::find(&self.tensors, name),
        }
    }

    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()> {
        match self.file(name) {
            Some(file) => file.read(name, region, out),
            None => self.info(name).map(drop),
        }
    }
}

/// The files of an index with the names of their tensors, sorted.
fn read_index(path: &Path) -> Result<BTreeMap<String, Vec<String>>> {
    let wrong = |detail: String| Error::format(path, WHAT_INDEX, detail);
    let text = std::fs::read(path).map_err(|e| Error::io(path, "read", &e))?;
    let json: Value = serde_json::from_slice(&text).map_err(|e| wrong(format!("not JSON: {e}")))?;
    let map = json
        .get("weight_map")
        .and_then(Value::as_object)
        .ok_or_else(|| wrong("it has no object 'weight_map'".into()))?;
    let mut files: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, file) in map {
        let file = file
            .as_str()
            .ok_or_else(|| wrong(format!("weight_map: the file of '{name}' is not a string")))?;
        files.entry(file.into()).or_default().push(name.clone());
    }
    files.values_mut().for_each(|names| names.sort());
    Ok(files)
}

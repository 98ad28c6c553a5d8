//! Writing a Hugging Face folder, whole or not at all.

use super::names::{CONFIGS, INDEX, SINGLE, plain_name};
use crate::safetensors::{CHUNK, copy_tensor, refuse_foreign, sync_folder, write_in_place};
use crate::{Error, Result, Source, TensorInfo};
use serde_json::json;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// How a folder is written.
#[derive(Clone, Debug)]
pub struct Export {
    /// The most bytes of tensors in one file. A tensor that is larger gets a file of its own.
    pub max_file_bytes: u64,
    /// The strings of each file's header. The libraries of Hugging Face refuse files that do not
    /// say `format`.
    pub metadata: BTreeMap<String, String>,
    /// A folder whose `config.json` and `generation_config.json` are copied, where it has them.
    pub configs_from: Option<PathBuf>,
    /// Other files by name; one that is also in `configs_from` is taken from here.
    pub files: BTreeMap<String, Vec<u8>>,
    /// Bytes of tensors that are in memory at a time.
    pub chunk: usize,
}

impl Default for Export {
    /// Files of 5 GB, as the Hugging Face libraries write them, and no other files.
    fn default() -> Self {
        Self {
            max_file_bytes: 5_000_000_000,
            metadata: BTreeMap::from([("format".into(), "pt".into())]),
            configs_from: None,
            files: BTreeMap::new(),
            chunk: CHUNK,
        }
    }
}

/// Writes all tensors of a source as a Hugging Face folder, which must not be there yet or be
/// empty; returns the names of its safetensors files.
///
/// Tensors go into files in the order of their names, each file as full as the limit allows. The
/// folder is written under another name beside it, brought to the disk, and renamed: it is there
/// whole or not at all. At most [`Export::chunk`] bytes of tensors are in memory.
pub fn export(
    source: &dyn Source,
    folder: impl AsRef<Path>,
    options: &Export,
) -> Result<Vec<String>> {
    let folder = folder.as_ref();
    refuse_foreign(source, folder)?;
    let groups = groups(source.tensors(), options.max_file_bytes);
    let names: Vec<String> = match groups.len() {
        0 | 1 => vec![SINGLE.into()],
        n => (1..=n)
            .map(|i| format!("model-{i:05}-of-{n:05}.safetensors"))
            .collect(),
    };
    write_folder(folder, options, |temporary| {
        for (name, group) in names
            .iter()
            .zip(groups.iter().chain(std::iter::repeat(&BTreeMap::new())))
        {
            write_in_place(
                &temporary.join(name),
                group,
                &options.metadata,
                |tensor, out| copy_tensor(source, tensor, options.chunk, out),
            )?;
        }
        if groups.len() > 1 {
            write_file(&temporary.join(INDEX), &index(&groups, &names))?;
        }
        Ok(())
    })?;
    Ok(names)
}

/// Makes a folder, whole or not at all: `write` fills one beside it, to which the other files are
/// added, and that is renamed.
pub(crate) fn write_folder(
    folder: &Path,
    options: &Export,
    write: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    let files = other_files(options)?;
    if std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some())
        || folder.is_file()
    {
        return Err(Error::Exists {
            path: folder.into(),
        });
    }
    let parent = folder
        .parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let temporary = Temporary::create(folder, parent)?;
    write(&temporary.path)?;
    for (name, bytes) in files {
        write_file(&temporary.path.join(name), &bytes)?;
    }
    sync_folder(&temporary.path)?;
    temporary.rename(folder)?;
    sync_folder(parent)
}

/// Cuts tensors, in the order of their names, into groups of at most `limit` bytes or one tensor.
pub(crate) fn groups(
    tensors: &BTreeMap<String, TensorInfo>,
    limit: u64,
) -> Vec<BTreeMap<String, TensorInfo>> {
    let mut groups: Vec<BTreeMap<String, TensorInfo>> = vec![];
    let mut filled = 0;
    for (name, info) in tensors {
        let bytes = info.bytes() as u64;
        filled += bytes;
        if groups.is_empty() || filled > limit {
            groups.push(BTreeMap::new());
            filled = bytes;
        }
        if let Some(group) = groups.last_mut() {
            group.insert(name.clone(), info.clone());
        }
    }
    groups
}

fn index(groups: &[BTreeMap<String, TensorInfo>], names: &[String]) -> Vec<u8> {
    let total: u64 = groups
        .iter()
        .flat_map(BTreeMap::values)
        .map(|info| info.bytes() as u64)
        .sum();
    let map: BTreeMap<&String, &String> = groups
        .iter()
        .zip(names)
        .flat_map(|(group, file)| group.keys().map(move |tensor| (tensor, file)))
        .collect();
    format!(
        "{:#}\n",
        json!({"metadata": {"total_size": total}, "weight_map": map})
    )
    .into_bytes()
}

/// The files beside the tensors, read before anything is written.
fn other_files(options: &Export) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut files = options.files.clone();
    for name in files.keys() {
        if plain_name(name).is_none() || name.ends_with(".safetensors") || name == INDEX {
            return Err(Error::BadName {
                name: name.clone(),
                what: "the name of a file beside the tensors",
            });
        }
    }
    if let Some(from) = &options.configs_from {
        for name in CONFIGS
            .iter()
            .filter(|name| !options.files.contains_key(**name))
        {
            let path = from.join(name);
            match std::fs::read(&path) {
                Ok(bytes) => drop(files.insert(name.to_string(), bytes)),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(Error::io(path, "read", &error)),
            }
        }
    }
    Ok(files)
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = std::fs::File::create(path).map_err(|e| Error::io(path, "create", &e))?;
    file.write_all(bytes)
        .and_then(|()| file.sync_all())
        .map_err(|e| Error::io(path, "write", &e))
}

/// A folder that is removed unless it was renamed.
struct Temporary {
    path: PathBuf,
    renamed: bool,
}

impl Temporary {
    fn create(folder: &Path, parent: &Path) -> Result<Self> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let name = folder.file_name().ok_or_else(|| {
            Error::Argument(format!(
                "'{}' is not the path of a folder",
                folder.display()
            ))
        })?;
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!(
            ".{}.{}-{count}.part",
            name.to_string_lossy(),
            std::process::id()
        ));
        std::fs::create_dir(&path).map_err(|e| Error::io(&path, "create", &e))?;
        Ok(Self {
            path,
            renamed: false,
        })
    }

    fn rename(mut self, to: &Path) -> Result<()> {
        std::fs::rename(&self.path, to).map_err(|e| Error::io(to, "rename", &e))?;
        self.renamed = true;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.renamed {
            // The error that led here is the one to report.
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

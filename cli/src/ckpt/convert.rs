//! Commands that write.

use super::{Answer, bytes, human};
use anymesh::{
    DType, Mesh, Sharding,
    checkpoint::{
        Checkpoint, Error, Keep, Result, Saver, Source, hugging_face,
        manifest::{self, Manifest},
        map::{Mapped, Mapping, Options},
        matches, open,
        plan::Placed,
        rotate, safetensors,
    },
    meta,
};
use clap::Args;
use std::{
    collections::BTreeMap,
    io::{IsTerminal, Write},
    path::{Path, PathBuf},
};

/// Where to write and how much memory to use.
#[derive(Args)]
pub(crate) struct Target {
    /// The checkpoint to write: a folder that does not exist yet.
    to: PathBuf,
    /// Memory for data on its way, such as 256M.
    #[arg(long, default_value = "256M", value_parser = bytes)]
    memory_limit: usize,
    /// Threads that write at the same time.
    #[arg(long, default_value_t = 2)]
    threads: usize,
}

impl Target {
    /// Writes the tensors of a source with a layout, and what else the first manifest says.
    fn write(&self, source: &dyn Source, layout: &BTreeMap<String, Placed>, old: Option<&Manifest>) -> Answer {
        let wrong = || Error::Argument(format!("{} has no name for a checkpoint", self.to.display()));
        let name = self.to.file_name().and_then(|n| n.to_str()).ok_or_else(wrong)?;
        let root = self.to.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let bar = std::io::stderr().is_terminal();
        let progress = |done: usize, total: usize| {
            if bar {
                let filled = if total == 0 { 40 } else { done * 40 / total };
                eprint!("\r[{:40}] {} of {}", "#".repeat(filled), human(done), human(total));
                let _ = std::io::stderr().flush();
            }
        };
        // A reader holds one window beside each piece that is being written.
        let (threads, window) = (self.threads.max(1), 8 << 20);
        let memory = self.memory_limit.saturating_sub(threads * window).max(threads << 20) / 2;
        let saver = Saver { threads, memory, progress: Some(&progress), ..Saver::default() };
        let (step, state) = old.map(|m| (m.step, m.state.clone())).unwrap_or_default();
        let path = saver.save_source(root, name, step, source, layout, &state)?;
        if bar {
            eprintln!();
        }
        let total: usize = layout.values().map(|p| p.info.bytes()).sum();
        println!("{}: {} tensors, {}", path.display(), layout.len(), human(total));
        Ok(true)
    }
}

/// A source, and its manifest where it is a checkpoint.
fn from(path: &Path) -> Result<(Box<dyn Source>, Option<Manifest>)> {
    if path.join(manifest::NAME).exists() {
        let checkpoint = Checkpoint::open(path)?;
        let manifest = checkpoint.manifest().clone();
        return Ok((Box::new(checkpoint), Some(manifest)));
    }
    Ok((open(path)?, None))
}

/// All tensors whole, on one device.
fn whole(source: &dyn Source) -> Result<BTreeMap<String, Placed>> {
    let mesh = Mesh::new("x=1", &meta())?;
    Ok(source.tensors().iter().map(|(name, info)| (name.clone(), Placed::new(info.clone(), &mesh, Sharding::replicated()))).collect())
}

/// Arguments of `ckpt reshard`.
#[derive(Args)]
pub(crate) struct Reshard {
    /// A checkpoint, Hugging Face or torch folder, or a safetensors file.
    path: PathBuf,
    #[command(flatten)]
    target: Target,
    /// The mesh, such as dp=2,tp=4.
    #[arg(long)]
    mesh: String,
    /// How tensors lie on it: a pattern of names and a sharding, such as "*.weight=[@tp, _]". The first that matches counts; others are replicated.
    #[arg(long = "layout", value_name = "NAMES=SHARDING")]
    layouts: Vec<String>,
}

impl Reshard {
    pub(crate) fn run(&self) -> Answer {
        let (source, old) = from(&self.path)?;
        let mesh = Mesh::new(&self.mesh, &meta())?;
        let rules: Vec<(&str, &str)> = self
            .layouts
            .iter()
            .map(|l| l.split_once('=').ok_or_else(|| Error::Argument(format!("'{l}' is no layout: write NAMES=SHARDING, such as \"*.weight=[@tp, _]\""))))
            .collect::<Result<_>>()?;
        let mut layout = BTreeMap::new();
        for (name, info) in source.tensors() {
            let text = rules.iter().find(|(pattern, _)| matches(pattern, name)).map(|(_, text)| *text);
            let sharding = match text {
                Some(text) => anymesh::IntoSharding::into_sharding(text, &mesh, info.shape.len())?,
                None => Sharding::replicated(),
            };
            layout.insert(name.clone(), Placed::new(info.clone(), &mesh, sharding));
        }
        self.target.write(source.as_ref(), &layout, old.as_ref())
    }
}

/// Arguments of `ckpt cast`.
#[derive(Args)]
pub(crate) struct Cast {
    /// A checkpoint, Hugging Face or torch folder, or a safetensors file.
    path: PathBuf,
    #[command(flatten)]
    target: Target,
    /// The dtype, such as bf16.
    #[arg(long)]
    dtype: String,
    /// Only tensors whose names match; `*` stands for anything.
    #[arg(long, default_value = "*")]
    filter: String,
}

impl Cast {
    pub(crate) fn run(&self) -> Answer {
        let (source, old) = from(&self.path)?;
        let to = anymesh::checkpoint::map::dtype_by_name(&self.dtype).filter(|d| d.is_float());
        let to: DType = to.ok_or_else(|| Error::Argument(format!("'{}' is no float dtype, such as bf16", self.dtype)))?;
        let changed = source.tensors().iter().filter(|(name, info)| matches(&self.filter, name) && info.dtype.is_float() && info.dtype != to);
        let lines: Vec<String> = changed.map(|(name, _)| format!("{name} -> {name}, dtype=\"{}\"", to.name())).collect();
        let mapped = Mapped::new(source, &Mapping::from_lines(lines)?, &Options::default())?;
        let layout = whole(&mapped)?;
        self.target.write(&mapped, &layout, old.as_ref())
    }
}

/// Arguments of `ckpt map`.
#[derive(Args)]
pub(crate) struct Map {
    /// A checkpoint, Hugging Face or torch folder, or a safetensors file.
    path: PathBuf,
    #[command(flatten)]
    target: Target,
    /// A file with the statements of the mapping.
    #[arg(long, value_name = "FILE")]
    statements: PathBuf,
    /// Apply the inverse.
    #[arg(long)]
    reverse: bool,
    /// Drop tensors that no statement names.
    #[arg(long)]
    only_mapped: bool,
}

impl Map {
    pub(crate) fn run(&self) -> Answer {
        let (source, old) = from(&self.path)?;
        let text = std::fs::read_to_string(&self.statements).map_err(|e| Error::io(&self.statements, "read", &e))?;
        let options = Options { reverse: self.reverse, only_mapped: self.only_mapped, ..Options::default() };
        let mapped = Mapped::new(source, &Mapping::parse(&text)?, &options)?;
        let layout = whole(&mapped)?;
        self.target.write(&mapped, &layout, old.as_ref())
    }
}

/// Arguments of `ckpt export`.
#[derive(Args)]
pub(crate) struct Export {
    /// A checkpoint folder.
    path: PathBuf,
    /// The folder to write, which does not exist yet.
    to: PathBuf,
    /// The largest file.
    #[arg(long, default_value = "5G", value_parser = bytes)]
    max_file_size: usize,
    /// Leave out tensors whose names match; `*` stands for anything.
    #[arg(long)]
    remove: Vec<String>,
    /// A folder whose config.json and generation_config.json are copied.
    #[arg(long, value_name = "FOLDER")]
    configs: Option<PathBuf>,
}

impl Export {
    pub(crate) fn run(&self) -> Answer {
        let (source, _) = from(&self.path)?;
        let gone: Vec<&str> = source.tensors().keys().filter(|name| self.remove.iter().any(|pattern| matches(pattern, name))).map(String::as_str).collect();
        let left = hugging_face::Without::new(source.as_ref(), &gone)?;
        let options = hugging_face::Export { max_file_bytes: self.max_file_size as u64, configs_from: self.configs.clone(), ..hugging_face::Export::default() };
        let files = hugging_face::export(&left, &self.to, &options)?;
        println!("{}: {} tensors in {} files", self.to.display(), left.tensors().len(), files.len());
        Ok(true)
    }
}

/// Arguments of `ckpt import`.
#[derive(Args)]
pub(crate) struct Import {
    /// A Hugging Face folder, a folder of torch.distributed.checkpoint or a safetensors file.
    path: PathBuf,
    #[command(flatten)]
    target: Target,
}

impl Import {
    pub(crate) fn run(&self) -> Answer {
        let (source, old) = from(&self.path)?;
        let layout = whole(source.as_ref())?;
        self.target.write(source.as_ref(), &layout, old.as_ref())
    }
}

/// Arguments of `ckpt merge`.
#[derive(Args)]
pub(crate) struct Merge {
    /// A checkpoint folder.
    path: PathBuf,
    /// The safetensors file to write.
    to: PathBuf,
}

impl Merge {
    pub(crate) fn run(&self) -> Answer {
        let (source, _) = from(&self.path)?;
        if self.to.exists() {
            return Err(Error::Argument(format!("{} exists already: remove it or choose another name", self.to.display())));
        }
        safetensors::write_source(&self.to, source.as_ref(), &BTreeMap::new())?;
        println!("{}: {} tensors", self.to.display(), source.tensors().len());
        Ok(true)
    }
}

/// Arguments of `ckpt prune`.
#[derive(Args)]
pub(crate) struct Prune {
    /// A folder of checkpoints.
    root: PathBuf,
    /// How many of the newest stay; at least one does.
    #[arg(long)]
    keep_last: usize,
    /// Those whose step is a multiple of this stay too.
    #[arg(long)]
    keep_every: Option<u64>,
    /// Those with these names stay too.
    #[arg(long)]
    protect: Vec<String>,
}

impl Prune {
    pub(crate) fn run(&self) -> Answer {
        let keep = Keep { last: self.keep_last, every: self.keep_every, names: self.protect.clone() };
        let removed = rotate(&self.root, &keep)?;
        removed.iter().for_each(|path| println!("removed {}", path.display()));
        println!("{} removed", removed.len());
        Ok(true)
    }
}

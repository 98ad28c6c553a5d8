//! Commands that write what other programs read.

use super::{
    Answer, Outcome, bytes, count,
    gguf::{Files, Names},
    human,
    input::{Opened, Select, above, layouts},
    memory::Memory,
    ui::Ui,
    wrong,
};
use anymesh::checkpoint::{
    Error, Result, Source, SourceFormat, TensorInfo, config_files, hugging_face, lora, safetensors,
    split,
};
use clap::Args;
use serde_json::json;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

/// What all of them need.
#[derive(Args)]
pub(crate) struct Common {
    #[command(flatten)]
    names: Names,
    #[command(flatten)]
    select: Select,
    #[command(flatten)]
    memory: Memory,
    /// A folder whose config.json and generation_config.json are copied; else those of the source
    /// are, or those in its state, or those that are made of the metadata of a GGUF file.
    #[arg(long, value_name = "FOLDER")]
    configs: Option<PathBuf>,
}

impl Common {
    fn open(&self, path: &Path) -> Result<Opened> {
        Opened::model(path, &self.names)
    }

    /// How a folder is written, and what is to be said about it.
    fn options(
        &self,
        path: &Path,
        from: &Opened,
        max_file_bytes: usize,
    ) -> Result<(hugging_face::Export, Vec<String>)> {
        if let Some(folder) = self.configs.as_ref().filter(|folder| {
            !hugging_face::CONFIGS
                .iter()
                .any(|name| folder.join(name).is_file())
        }) {
            return Err(wrong(format!(
                "--configs {}: there is neither {}",
                folder.display(),
                hugging_face::CONFIGS.join(" nor ")
            )));
        }
        let state = from
            .manifest()
            .filter(|_| self.configs.is_none())
            .map(|m| &m.state);
        let Files { mut files, notes } = Files::of(from);
        if self.configs.is_some() {
            hugging_face::CONFIGS
                .iter()
                .for_each(|name| drop(files.remove(*name)));
        }
        files.extend(state.map(config_files).unwrap_or_default());
        let configs_from = self
            .configs
            .clone()
            .or_else(|| path.is_dir().then(|| path.into()));
        let options = hugging_face::Export {
            max_file_bytes: max_file_bytes as u64,
            configs_from,
            files,
            chunk: self.memory.chunk()?,
            ..hugging_face::Export::default()
        };
        Ok((options, notes))
    }
}

/// Adds what could not be done to what was.
fn noting(mut outcome: Outcome, notes: Vec<String>) -> Outcome {
    for note in &notes {
        outcome.text += &format!("{note}\n");
    }
    if !notes.is_empty() {
        outcome.json["notes"] = notes.into();
    }
    outcome
}

/// What was written.
fn written(to: &Path, source: &dyn Source, files: &[String]) -> Outcome {
    let total: usize = source.tensors().values().map(TensorInfo::bytes).sum();
    let n = source.tensors().len();
    let text = format!(
        "{}: {} in {}, {}\n",
        to.display(),
        count(n, "tensor"),
        count(files.len(), "file"),
        human(total)
    );
    Outcome::done(
        text,
        json!({"written": to, "tensors": n, "files": files, "bytes": total}),
    )
}

/// Makes the folder in which something is to be written.
fn make_room(to: &Path) -> Result<()> {
    if std::fs::read_dir(to).is_ok_and(|mut entries| entries.next().is_some()) || to.is_file() {
        return Err(Error::Exists { path: to.into() });
    }
    let above = above(to);
    std::fs::create_dir_all(&above).map_err(|e| Error::io(&above, "create", &e))
}

/// Arguments of `ckpt export`.
#[derive(Args)]
pub(crate) struct Export {
    /// A checkpoint, a Hugging Face, torch or split folder, or a safetensors or GGUF file.
    path: PathBuf,
    /// The folder to write, which does not exist yet.
    to: PathBuf,
    #[command(flatten)]
    common: Common,
    /// The largest file.
    #[arg(long, default_value = "5G", value_parser = bytes, value_name = "BYTES")]
    max_file_size: usize,
}

impl Export {
    pub(crate) fn run(&self, ui: &Ui) -> Answer {
        let from = self.common.open(&self.path)?;
        let selected = self.common.select.of(from.source())?;
        let (options, notes) = self.common.options(&self.path, &from, self.max_file_size)?;
        make_room(&self.to)?;
        let files = hugging_face::export(&ui.watch("writing", &selected), &self.to, &options)?;
        Ok(noting(written(&self.to, &selected, &files), notes))
    }
}

/// Arguments of `ckpt merge`.
#[derive(Args)]
pub(crate) struct Merge {
    /// A checkpoint, a Hugging Face, torch or split folder, or a safetensors or GGUF file.
    path: PathBuf,
    /// What to write: one file if the name ends in .safetensors, else a Hugging Face folder. It
    /// does not exist yet.
    to: PathBuf,
    #[command(flatten)]
    common: Common,
    /// The folder of a LoRA adapter (adapter_model.safetensors and adapter_config.json) to merge
    /// into the tensors. May be given several times.
    #[arg(long, value_name = "ADAPTER")]
    lora: Vec<PathBuf>,
    /// The largest file of a Hugging Face folder; 5G if not given.
    #[arg(long, value_parser = bytes, value_name = "BYTES")]
    max_file_size: Option<usize>,
    /// The mesh of a split folder whose files do not say how the tensors lie, such as tp=4.
    #[arg(long)]
    mesh: Option<String>,
    /// How tensors lie on it, as for `split`.
    #[arg(long = "layout", value_name = "NAMES=SHARDING", requires = "mesh")]
    layouts: Vec<String>,
}

impl Merge {
    pub(crate) fn run(&self, ui: &Ui) -> Answer {
        let from = self.open()?;
        let mut adapters = vec![];
        for folder in &self.lora {
            adapters.push(
                lora::open(folder)
                    .map_err(|e| wrong(format!("--lora {}: {e}", folder.display())))?,
            );
        }
        self.write_with(ui, &from, from.source(), &adapters)
    }

    fn open(&self) -> Result<Opened> {
        let Some(mesh) = &self.mesh else {
            return self.common.open(&self.path);
        };
        if SourceFormat::of(&self.path)? != SourceFormat::Split {
            return Err(wrong(format!(
                "--mesh says how split files lie, but {} is a {}: leave it out",
                self.path.display(),
                SourceFormat::of(&self.path)?
            )));
        }
        let folder = split::Folder::open_as(&self.path, &layouts(mesh, &self.layouts)?)?;
        Ok(Opened::Other(Box::new(folder)))
    }

    /// Merges one adapter after the other into the source, then writes it.
    fn write_with(
        &self,
        ui: &Ui,
        from: &Opened,
        source: &dyn Source,
        adapters: &[(safetensors::File, lora::Config)],
    ) -> Answer {
        if let Some(((adapter, config), others)) = adapters.split_first() {
            let folder = self.lora[self.lora.len() - adapters.len()].display();
            let merged = lora::Merged::new(source, adapter, config)
                .map_err(|e| wrong(format!("--lora {folder}: {e}")))?;
            return self.write_with(ui, from, &merged, others);
        }
        let selected = self.common.select.of(source)?;
        let watched = ui.watch("writing", &selected);
        if self.to.extension().is_none_or(|end| end != "safetensors") {
            let (options, notes) =
                self.common
                    .options(&self.path, from, self.max_file_size.unwrap_or(5 << 30))?;
            make_room(&self.to)?;
            let files = hugging_face::export(&watched, &self.to, &options)?;
            return Ok(noting(written(&self.to, &selected, &files), notes));
        }
        if self.max_file_size.is_some() {
            return Err(wrong(format!(
                "--max-file-size is for folders: give one instead of {}",
                self.to.display()
            )));
        }
        let chunk = self.common.memory.chunk()?;
        make_room(&self.to)?;
        safetensors::write_source(
            &self.to,
            &watched,
            &BTreeMap::from([("format".into(), "pt".into())]),
            chunk,
        )?;
        let name = self
            .to
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        Ok(written(&self.to, &selected, &[name]))
    }
}

/// Arguments of `ckpt split`.
#[derive(Args)]
pub(crate) struct Split {
    /// A checkpoint, a Hugging Face or torch folder, or a safetensors or GGUF file.
    path: PathBuf,
    /// The folder to write, which does not exist yet: model-rank-0-part-0.safetensors and so on.
    /// `merge` puts it together again.
    to: PathBuf,
    #[command(flatten)]
    common: Common,
    /// The mesh, such as tp=4.
    #[arg(long)]
    mesh: String,
    /// How tensors lie on it: a pattern of names and a sharding, such as "*.weight=[@tp, _]" for
    /// tensors of two dimensions or "*=[@tp, ...]" for all that have one. The first that is for a
    /// tensor counts; every rank gets all of the others.
    #[arg(long = "layout", value_name = "NAMES=SHARDING")]
    layouts: Vec<String>,
    /// The largest file; a rank gets several where needed. Without it each has one.
    #[arg(long, value_parser = bytes, value_name = "BYTES")]
    max_file_size: Option<usize>,
}

impl Split {
    pub(crate) fn run(&self, ui: &Ui) -> Answer {
        let from = self.common.open(&self.path)?;
        let selected = self.common.select.of(from.source())?;
        let layouts = layouts(&self.mesh, &self.layouts)?;
        let layout = layouts.place(&selected)?;
        let (options, notes) =
            self.common
                .options(&self.path, &from, self.max_file_size.unwrap_or(usize::MAX))?;
        make_room(&self.to)?;
        let of = |rank: usize| {
            layout.values().map(move |p| {
                p.sharding
                    .region(&p.mesh, rank, &p.info.shape.as_slice().into())
                    .numel()
                    * p.info.dtype.size()
            })
        };
        let total = (0..layouts.mesh().ranks()).flat_map(of).sum();
        let files = split::write(
            &ui.watch("writing", &selected).expecting(total),
            &self.to,
            layouts.mesh(),
            &layout,
            &options,
        )?;
        let (ranks, n) = (layouts.mesh().ranks(), layout.len());
        let text = format!(
            "{}: {} for {}, {}\n",
            self.to.display(),
            count(n, "tensor"),
            count(ranks, "rank"),
            human(total)
        );
        let json = json!({"written": self.to, "tensors": n, "ranks": ranks, "files": files, "bytes": total});
        Ok(noting(Outcome::done(text, json), notes))
    }
}

//! Commands that write a checkpoint.

use super::{
    Answer, Outcome, count,
    gguf::{self, Names},
    human,
    input::{Opened, Select, above, layouts, whole},
    memory::Memory,
    ui::Ui,
    wrong,
};
use anymesh::{
    DType,
    checkpoint::{
        Error, Result, Saver, Source, TensorInfo, hugging_face,
        map::{Mapped, Mapping, Options, dtype_by_name},
        plan::Placed,
        select,
    },
};
use clap::Args;
use serde_json::{Map as Object, Value, json};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

/// Where to write, and how.
#[derive(Args)]
pub(crate) struct Target {
    /// The checkpoint to write: a folder that does not exist yet.
    to: PathBuf,
    #[command(flatten)]
    names: Names,
    #[command(flatten)]
    select: Select,
    #[command(flatten)]
    memory: Memory,
}

impl Target {
    /// Opens what the checkpoint is made of.
    fn open(&self, path: &Path) -> Result<Opened> {
        Opened::model(path, &self.names)
    }

    /// Writes the tensors that are selected as `layout` says they lie, with step and state.
    fn write(
        &self,
        ui: &Ui,
        source: &dyn Source,
        layout: &BTreeMap<String, Placed>,
        step: u64,
        state: &Object<String, Value>,
    ) -> Answer {
        let name = self
            .to
            .file_name()
            .and_then(|n| n.to_str())
            .ok_or_else(|| {
                wrong(format!(
                    "{} has no name for a checkpoint",
                    self.to.display()
                ))
            })?;
        // Each rank has a file, and threads share out files.
        let ranks = layout.values().map(|p| p.mesh.ranks()).max().unwrap_or(1);
        let share = self
            .memory
            .share(ranks.min(std::thread::available_parallelism().map_or(1, |n| n.get())))?;
        let saver = Saver {
            threads: share.threads,
            memory: share.threads * share.chunk,
            ..Saver::default()
        };
        let path = saver.save_source(
            &above(&self.to),
            name,
            step,
            &ui.watch("writing", source),
            layout,
            state,
        )?;
        let total: usize = layout.values().map(|p| p.info.bytes()).sum();
        let text = format!(
            "{}: {}, {}\n",
            path.display(),
            count(layout.len(), "tensor"),
            human(total)
        );
        Ok(Outcome::done(
            text,
            json!({"written": path, "tensors": layout.len(), "bytes": total, "step": step}),
        ))
    }

    /// What a mapping makes of a source.
    fn write_mapped(&self, ui: &Ui, from: &Opened, mapping: &Mapping, options: &Options) -> Answer {
        // While a part is written, what it is made of is in memory too.
        let mapped = Mapped::new(from.source(), mapping, options)?.within(2 * self.memory.chunk()?);
        let selected = self.select.of(&mapped)?;
        let (step, state) = step_and_state(from);
        self.write(ui, &selected, &whole(&selected)?, step, &state)
    }
}

/// The step and the state of a checkpoint; what is known of a GGUF file.
fn step_and_state(from: &Opened) -> (u64, Object<String, Value>) {
    match from.manifest() {
        Some(m) => (m.step, m.state.clone()),
        None => (0, gguf::state(from)),
    }
}

/// Arguments of `ckpt reshard`.
#[derive(Args)]
pub(crate) struct Reshard {
    /// A checkpoint, a Hugging Face, torch or split folder, or a safetensors or GGUF file.
    path: PathBuf,
    #[command(flatten)]
    target: Target,
    /// The mesh, such as dp=2,tp=4.
    #[arg(long)]
    mesh: String,
    /// How tensors lie on it: a pattern of names and a sharding, such as "*.weight=[@tp, _]" for
    /// tensors of two dimensions or "*=[@tp, ...]" for all that have one. The first that is for a
    /// tensor counts; others are replicated.
    #[arg(long = "layout", value_name = "NAMES=SHARDING")]
    layouts: Vec<String>,
}

impl Reshard {
    pub(crate) fn run(&self, ui: &Ui) -> Answer {
        let from = self.target.open(&self.path)?;
        let selected = self.target.select.of(from.source())?;
        let layout = layouts(&self.mesh, &self.layouts)?.place(&selected)?;
        let (step, state) = step_and_state(&from);
        self.target.write(ui, &selected, &layout, step, &state)
    }
}

/// Arguments of `ckpt cast`.
#[derive(Args)]
pub(crate) struct Cast {
    /// A checkpoint, a Hugging Face, torch or split folder, or a safetensors or GGUF file.
    path: PathBuf,
    #[command(flatten)]
    target: Target,
    /// The float dtype, such as bf16.
    #[arg(long)]
    dtype: String,
    /// Convert only tensors whose names match, and write the others as they are; `*` stands for
    /// anything. May be given several times.
    #[arg(long, value_name = "NAMES")]
    only: Vec<String>,
}

impl Cast {
    pub(crate) fn run(&self, ui: &Ui) -> Answer {
        let floats: Vec<&str> = DType::ALL
            .into_iter()
            .filter(|d| d.is_float())
            .map(DType::name)
            .collect();
        let to = dtype_by_name(&self.dtype).filter(|d| d.is_float());
        let to = to.ok_or_else(|| {
            wrong(format!(
                "--dtype {}: there is no such float dtype; there are {}",
                self.dtype,
                floats.join(", ")
            ))
        })?;
        let from = self.target.open(&self.path)?;
        let tensors = from.source().tensors();
        let named = select(
            &tensors.keys().map(String::as_str).collect(),
            &self.only,
            &[],
        )?;
        let changes = |info: &TensorInfo| info.dtype.is_float() && info.dtype != to;
        // Quoted: a name may hold anything.
        let line = |name: &str| format!("\"{name}\" -> \"{name}\", dtype=\"{}\"", to.name());
        let lines: Vec<String> = named
            .into_iter()
            .filter(|name| changes(&tensors[*name]))
            .map(line)
            .collect();
        self.target
            .write_mapped(ui, &from, &Mapping::from_lines(lines)?, &Options::default())
    }
}

/// Arguments of `ckpt map`.
#[derive(Args)]
pub(crate) struct Map {
    /// A checkpoint, a Hugging Face, torch or split folder, or a safetensors or GGUF file.
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
    pub(crate) fn run(&self, ui: &Ui) -> Answer {
        let from = self.target.open(&self.path)?;
        let text = std::fs::read_to_string(&self.statements)
            .map_err(|e| Error::io(&self.statements, "read", &e))?;
        let options = Options {
            reverse: self.reverse,
            only_mapped: self.only_mapped,
            ..Options::default()
        };
        self.target
            .write_mapped(ui, &from, &Mapping::parse(&text)?, &options)
    }
}

/// Arguments of `ckpt import`.
#[derive(Args)]
pub(crate) struct Import {
    /// A Hugging Face, torch or split folder, or a safetensors or GGUF file. What its config.json
    /// and generation_config.json say becomes a part of the state, and so does the metadata of a
    /// GGUF file but for its tokenizer.
    path: PathBuf,
    #[command(flatten)]
    target: Target,
    /// The training step it is from.
    #[arg(long)]
    step: Option<u64>,
}

impl Import {
    pub(crate) fn run(&self, ui: &Ui) -> Answer {
        let from = self.target.open(&self.path)?;
        let selected = self.target.select.of(from.source())?;
        let (step, mut state) = step_and_state(&from);
        for file in hugging_face::CONFIGS {
            if let Some(config) = read_config(&self.path.join(file))? {
                if let Some(Value::String(architecture)) = config.pointer("/architectures/0") {
                    state.insert("architecture".into(), architecture.as_str().into());
                }
                state.insert(file.trim_end_matches(".json").into(), config);
            }
        }
        self.target.write(
            ui,
            &selected,
            &whole(&selected)?,
            self.step.unwrap_or(step),
            &state,
        )
    }
}

/// A configuration, where there is one.
fn read_config(path: &Path) -> Result<Option<Value>> {
    if !path.is_file() {
        return Ok(None);
    }
    let text = std::fs::read(path).map_err(|e| Error::io(path, "read", &e))?;
    serde_json::from_slice(&text)
        .map(Some)
        .map_err(|e| Error::format(path, "JSON file", e.to_string()))
}

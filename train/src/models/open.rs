//! Models of files.

use super::{Gpt2, Model, ModelConfig, settings::Settings};
use crate::{Build, Error, Module, Result};
use anymesh_checkpoint::{
    Checkpoint, Load, Source, SourceFormat,
    map::{Mapped, Mapping, Options},
};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};
use tokenizers::Tokenizer;

/// A model's files: its tensors, its settings, and the small files that come with them.
pub struct ModelFiles {
    path: PathBuf,
    source: Box<dyn Source>,
    settings: Settings,
    /// Small files that are not on the disk: what a single file says of them.
    texts: BTreeMap<String, String>,
    /// Where small files are.
    folder: Option<PathBuf>,
    /// Whether other tensors than the model's may be there.
    is_training: bool,
}

impl std::fmt::Debug for ModelFiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ModelFiles")
            .field("path", &self.path)
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

/// Tensors that files have and models do not: tables that are computed, and heads of other tasks.
const IGNORED: [&str; 5] = [
    "*.attn.bias",
    "*.attn.masked_bias",
    "*.rotary_emb.inv_freq",
    "embeddings.position_ids",
    "cls.*",
];

impl ModelFiles {
    /// What is at a path: a Hugging Face folder, or a checkpoint of a training run.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let mut files = match SourceFormat::of(path)? {
            SourceFormat::Checkpoint => Self::of_checkpoint(path)?,
            _ => Self {
                path: path.into(),
                source: anymesh_checkpoint::open(path)?,
                settings: Settings::new(),
                texts: BTreeMap::new(),
                folder: match path.is_dir() {
                    true => Some(path.into()),
                    false => path.parent().map(Into::into),
                },
                is_training: false,
            },
        };
        files.settings = match files.json("config.json")? {
            Some(Value::Object(settings)) => settings,
            _ => {
                return Err(Error::config(
                    "config.json",
                    format!("{} does not say what the model is", path.display()),
                ));
            }
        };
        Ok(files)
    }

    /// A checkpoint of ours, whose state has the configuration. Small files may lie beside it.
    fn of_checkpoint(path: &Path) -> Result<Self> {
        let checkpoint = Checkpoint::open(path)?;
        let said = anymesh_checkpoint::config_files(&checkpoint.manifest().state);
        let text =
            |(name, bytes): (String, Vec<u8>)| (name, String::from_utf8_lossy(&bytes).into_owned());
        Ok(Self {
            path: path.into(),
            texts: said.into_iter().map(text).collect(),
            settings: Settings::new(),
            folder: Some(path.into()),
            source: Box::new(checkpoint),
            is_training: true,
        })
    }

    /// Where they are.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What `config.json` says.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The settings, if they are those of a model that is known here.
    pub fn config(&self) -> Result<ModelConfig> {
        ModelConfig::from_settings(&self.settings)
    }

    /// The tensors as they are named in the files.
    pub fn source(&self) -> &dyn Source {
        &*self.source
    }

    /// A small file by its name, such as `tokenizer_config.json`.
    pub fn text(&self, name: &str) -> Result<Option<String>> {
        if let Some(text) = self.texts.get(name) {
            return Ok(Some(text.clone()));
        }
        let Some(path) = self.folder.as_ref().map(|folder| folder.join(name)) else {
            return Ok(None);
        };
        match std::fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::io(path, "read", &error)),
        }
    }

    /// A small file of JSON.
    pub fn json(&self, name: &str) -> Result<Option<Value>> {
        let Some(text) = self.text(name)? else {
            return Ok(None);
        };
        let parsed = serde_json::from_str(&text);
        parsed.map(Some).map_err(|error| Error::Data {
            path: self.path.join(name),
            offset: offset(&text, error.line(), error.column()),
            detail: error.to_string(),
        })
    }

    /// The tokenizer, which neither cuts texts off nor fills them up.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        let path = self.path.join("tokenizer.json");
        let Some(text) = self.text("tokenizer.json")? else {
            let detail = "there is none, and texts cannot be made tokens without it".into();
            return Err(Error::Tokenizer { path, detail });
        };
        let wrong = |error: tokenizers::Error| Error::Tokenizer {
            path: path.clone(),
            detail: error.to_string(),
        };
        let mut tokenizer = Tokenizer::from_bytes(text.as_bytes()).map_err(wrong)?;
        tokenizer.with_truncation(None).map_err(wrong)?;
        tokenizer.with_padding(None);
        Ok(tokenizer)
    }

    /// The model with its weights, each rank reading what it holds.
    pub fn load(&self, b: &Build) -> Result<Model> {
        let config = self.config()?;
        let b = b.clone().blank();
        let source = named(&config, &*self.source)?;
        let mut model = match (config.build(&b)?, source.info("pooler.dense.weight")) {
            (Model::Bert(bert), Ok(_)) => Model::Bert(bert.with_pooler(&b)?),
            (model, _) => model,
        };
        let load = Load {
            allow_unexpected: self.is_training,
            ignore: IGNORED.map(String::from).to_vec(),
            ..Load::default()
        };
        model.load(&*source, load)?;
        Ok(model)
    }
}

/// Opens the model at a path: a Hugging Face folder, a GGUF file, or a checkpoint of a training
/// run, laid out as `b` says.
///
/// ```no_run
/// # use anymesh_core::Mesh;
/// # use anymesh_train::{Build, Policy, models};
/// # let device = anymesh_backend_cpu::device();
/// let mesh = Mesh::new("tp=3", &device)?;
/// let model = models::open("models/SmolLM2-135M", &Build::new(&mesh, Policy::f32(), 0))?;
/// # Ok::<(), anymesh_train::Error>(())
/// ```
pub fn open(path: impl AsRef<Path>, b: &Build) -> Result<Model> {
    ModelFiles::open(path)?.load(b)
}

/// A source under the names of the model, which files may have differently.
fn named<'s>(config: &ModelConfig, source: &'s dyn Source) -> Result<Box<dyn Source + 's>> {
    let has = |name: &str| source.info(name).is_ok();
    let text = match config {
        ModelConfig::Gpt2(_) => {
            let fused = |p: &&str| has(&format!("{p}h.0.attn.c_attn.weight"));
            ["transformer.", ""]
                .into_iter()
                .find(fused)
                .map(Gpt2::mapping)
        }
        ModelConfig::Bert(_) => {
            let renamed = |name: &String| {
                let short = name.strip_prefix("bert.")?;
                Some(format!("{name} -> {short}\n"))
            };
            let text: String = source.tensors().keys().filter_map(renamed).collect();
            Some(text).filter(|text| !text.is_empty())
        }
        ModelConfig::Llama(_) => None,
    };
    Ok(match text {
        None => Box::new(source),
        Some(text) => {
            let mapping = Mapping::parse(&text)?;
            Box::new(Mapped::new(source, &mapping, &Options::default())?)
        }
    })
}

/// The byte at a line and column, both of which count from 1.
fn offset(text: &str, line: usize, column: usize) -> u64 {
    let before: usize = text
        .split_inclusive('\n')
        .take(line.saturating_sub(1))
        .map(str::len)
        .sum();
    (before + column.saturating_sub(1)) as u64
}

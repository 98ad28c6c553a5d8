//! Models of files.

use super::{Gpt2, Model, ModelConfig, Moe, settings::Settings};
use crate::{
    Build, Error, Module, Result,
    data::{Special, Tokenizer},
};
use anymesh_checkpoint::{
    Checkpoint, Load, Source, SourceFormat, gguf,
    map::{Mapped, Mapping, Options},
};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

/// A model's files: its tensors, its settings, and the small files that come with them.
pub struct ModelFiles {
    path: PathBuf,
    source: Box<dyn Source>,
    settings: Settings,
    /// Small files that are not on the disk: what a checkpoint says of them.
    texts: BTreeMap<String, String>,
    /// What tells them too.
    gguf: Option<Arc<gguf::Model>>,
    /// Where small files may be.
    folders: Vec<PathBuf>,
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
    /// What is at a path: a Hugging Face folder, a GGUF file or a folder with one, or a checkpoint
    /// of a training run.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = &match only_gguf(path.as_ref()) {
            Some(file) => file,
            None => path.as_ref().to_path_buf(),
        };
        let mut files = match SourceFormat::of(path)? {
            SourceFormat::Checkpoint => Self::of_checkpoint(path)?,
            SourceFormat::Gguf => Self::of_gguf(path)?,
            _ => {
                let folder = match path.is_dir() {
                    true => path.clone(),
                    false => path.parent().unwrap_or(Path::new("")).into(),
                };
                Self::new(path, anymesh_checkpoint::open(path)?, vec![folder])
            }
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

    fn new(path: &Path, source: Box<dyn Source>, folders: Vec<PathBuf>) -> Self {
        Self {
            path: path.into(),
            source,
            settings: Settings::new(),
            texts: BTreeMap::new(),
            gguf: None,
            folders,
            is_training: false,
        }
    }

    /// A checkpoint of ours, whose state has the configuration. Small files may lie in it or beside
    /// it.
    fn of_checkpoint(path: &Path) -> Result<Self> {
        let checkpoint = Checkpoint::open(path)?;
        let said = anymesh_checkpoint::config_files(&checkpoint.manifest().state);
        let text =
            |(name, bytes): (String, Vec<u8>)| (name, String::from_utf8_lossy(&bytes).into_owned());
        let folders = [Some(path), path.parent()].into_iter().flatten();
        let folders = folders.map(PathBuf::from).collect();
        Ok(Self {
            texts: said.into_iter().map(text).collect(),
            is_training: true,
            ..Self::new(path, Box::new(checkpoint), folders)
        })
    }

    /// A GGUF file, which has everything in it.
    fn of_gguf(path: &Path) -> Result<Self> {
        let model = Arc::new(gguf::Model::open(path)?);
        Ok(Self {
            gguf: Some(model.clone()),
            ..Self::new(path, Box::new(model), vec![])
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
        if let Some(model) = &self.gguf {
            let json = match name {
                "config.json" => Value::Object(model.config().clone()),
                "generation_config.json" => Value::Object(model.generation_config()),
                "tokenizer.json" => model.file().tokenizer()?,
                "tokenizer_config.json" => Value::Object(model.file().tokenizer_config()?),
                _ => return Ok(None),
            };
            return Ok(Some(json.to_string()));
        }
        for path in self.folders.iter().map(|folder| folder.join(name)) {
            match std::fs::read_to_string(&path) {
                Ok(text) => return Ok(Some(text)),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(Error::io(path, "read", &error)),
            }
        }
        Ok(None)
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

    /// The tokenizer, with the tokens that begin and end texts.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        let path = self.path.join("tokenizer.json");
        let Some(text) = self.text("tokenizer.json")? else {
            let detail = "there is none, and texts cannot be made tokens without it".into();
            return Err(Error::Tokenizer { path, detail });
        };
        let tokenizer = Tokenizer::from_json(text.as_bytes(), path)?;
        let object = |name: &str| match self.json(name)? {
            Some(Value::Object(object)) => Ok(object),
            _ => Ok::<_, Error>(Settings::new()),
        };
        let names = [
            object("tokenizer_config.json")?,
            object("special_tokens_map.json")?,
        ];
        let numbers = [self.settings.clone(), object("generation_config.json")?];
        let special = Special::of_objects(&names, &numbers, |token| tokenizer.id(token));
        Ok(tokenizer.with_special(special))
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

/// The GGUF file of a folder that has one and no other model.
fn only_gguf(folder: &Path) -> Option<PathBuf> {
    if SourceFormat::of(folder).is_ok() {
        return None;
    }
    let files = std::fs::read_dir(folder).ok()?.flatten().map(|e| e.path());
    let mut files = files.filter(|path| path.extension().is_some_and(|e| e == "gguf"));
    match (files.next(), files.next()) {
        (Some(file), None) => Some(file),
        _ => None,
    }
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
        // A checkpoint of a run has stacks.
        ModelConfig::Moe(config) => {
            let stack = |name: &String| name.ends_with(".experts.gate_proj");
            let stacked = source.tensors().keys().any(stack);
            (!stacked).then(|| Moe::mapping(config))
        }
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

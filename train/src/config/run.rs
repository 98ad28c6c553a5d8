//! What `anymesh train` reads: a whole run as one struct.

use crate::{
    BatchSpec, Error, Lora, Policy, Result, Zero,
    models::ModelConfig,
    nn::Context,
    optim::{self, AdamW, Clip, Group, Rule},
    pipeline::{ScheduleChoice, Stages},
    trainer,
};
use anymesh_schedule::{Name, Placement, Schedule};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// A run of language modelling: the model, the data, where and how.
///
/// ```
/// # use anymesh_train::config::{RunConfig, parse};
/// let config: RunConfig = parse(
///     r#"
///     data = [{ path = "corpus.txt" }]
///     [model]
///     model_type = "gpt2"
///     n_layer = 4
///     n_embd = 256
///     n_head = 8
///     [batch]
///     global = 32
///     length = 128
///     "#,
///     &["mesh.axes=dp=2, tp=2", "mesh.zero=1"],
/// )?;
/// assert_eq!((config.batch.length, config.mesh.zero), (128, 1));
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// A tokenizer: a file or folder, `bytes`, or `bpe:2048`, which is learnt from the data. That of
    /// the model where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
    /// Parameters that are not trained, as a pattern.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub freeze: Option<String>,
    /// Where logs go: TensorBoard events and JSON lines. Beside the checkpoints unless told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logs: Option<PathBuf>,
    /// Steps, checkpoints, evaluation, faults.
    #[serde(default)]
    pub run: trainer::Settings,
    /// The mesh, and how the model lies on it.
    #[serde(default)]
    pub mesh: MeshConfig,
    /// How layers are stages, where the mesh has an axis `pp`.
    #[serde(default)]
    pub pipeline: PipelineConfig,
    /// How sequences are computed, where the mesh has an axis `cp` that cuts them.
    #[serde(default)]
    pub context: Context,
    /// Sizes of batches.
    #[serde(default)]
    pub batch: BatchConfig,
    /// The optimizer's rule.
    #[serde(default = "adamw")]
    pub optimizer: Rule,
    /// Groups of parameters with rules of their own, before that of all others.
    #[serde(default)]
    pub groups: Vec<Group>,
    /// How gradients are limited.
    #[serde(default)]
    pub clip: Clip,
    /// How learning rates change.
    #[serde(default = "constant")]
    pub schedule: optim::Schedule,
    /// Low-rank adapters instead of the model's own parameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora: Option<LoraConfig>,
    /// The model: `path` to one that is trained already, or the settings of a new one, as a
    /// `config.json` has them.
    pub model: Map<String, Value>,
    /// What to train on.
    pub data: Vec<DataConfig>,
    /// What to evaluate on.
    #[serde(default)]
    pub evaluation: Vec<DataConfig>,
}

fn adamw() -> Rule {
    Rule::AdamW(AdamW::default())
}

fn constant() -> optim::Schedule {
    optim::Schedule::Constant {
        warmup: 0,
        warmup_from: 0.0,
    }
}

/// What the model of a run is.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelChoice {
    /// A folder or file that has one.
    Trained(PathBuf),
    /// One that begins anew.
    New(Box<ModelConfig>),
}

/// The mesh of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MeshConfig {
    /// Axes, such as `dp=2, tp=4`; empty for one rank. In a run of several processes the axes that
    /// are not given are one `dp` over all of them.
    pub axes: String,
    /// The stage of ZeRO, 0 to 3, over `dp` and `ep`.
    pub zero: u8,
    /// Whether the stream between blocks is cut along the sequence over `tp`.
    pub sequence_parallel: bool,
    /// Whether layers are computed again for the backward pass instead of kept.
    pub recompute: bool,
    /// `f32`, `bf16`, `f16`, `f64`, or `f8` (bf16 with products of 8 bits): what is computed in.
    pub dtype: String,
}

impl Default for MeshConfig {
    fn default() -> Self {
        Self {
            axes: String::new(),
            zero: 0,
            sequence_parallel: false,
            recompute: false,
            dtype: "f32".into(),
        }
    }
}

impl MeshConfig {
    /// The stage of ZeRO.
    pub fn stage(&self) -> Result<Zero> {
        Ok(match self.zero {
            0 => Zero::Off,
            1 => Zero::One,
            2 => Zero::Two,
            3 => Zero::Three,
            other => {
                let detail = format!("there is no stage {other}: 0 to 3 are");
                return Err(Error::config("mesh.zero", detail));
            }
        })
    }

    /// The dtypes.
    pub fn policy(&self) -> Result<Policy> {
        Policy::named(&self.dtype).map_err(|error| match error {
            Error::Config { detail, .. } => Error::config("mesh.dtype", detail),
            other => other,
        })
    }
}

/// The pipeline of a run whose mesh has an axis `pp`. Micro-batches are those of
/// [`accumulation`](BatchConfig::accumulation).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PipelineConfig {
    /// The name of a schedule (`anymesh schedule` lists them), or a file with one: CSV as torch
    /// writes it, or JSON.
    pub schedule: String,
    /// How many stages each rank of `pp` has; what the schedule needs where it is not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunks: Option<usize>,
    /// The most activations that a rank may have alive: for `searched`, and checked for all others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<usize>,
    /// How many layers each stage has; evenly by cost where it is not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<Vec<usize>>,
    /// What the cost of a layer is.
    pub split: SplitBy,
}

/// What layers are shared out to stages by, where it is not said how many each has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SplitBy {
    /// The sizes of their products.
    #[default]
    Products,
    /// The time that each takes on the devices of the run, measured on a micro-batch when it begins.
    Measured,
}

impl Default for PipelineConfig {
    fn default() -> Self {
        Self {
            schedule: "1f1b".into(),
            chunks: None,
            memory: None,
            layers: None,
            split: SplitBy::default(),
        }
    }
}

impl PipelineConfig {
    /// The stages of a model on `ranks` ranks of `pp`, and what is done when.
    pub fn choose(&self, ranks: usize) -> Result<(Stages, ScheduleChoice)> {
        let (key, name) = ("pipeline.schedule", &self.schedule);
        let file = Path::new(name).extension().is_some();
        let mut stages = Stages {
            chunks: self.chunks.unwrap_or(1),
            placement: Placement::Loop,
            layers: self.layers.clone(),
            costs: None,
        };
        if file {
            let text = std::fs::read_to_string(name)
                .map_err(|error| Error::io(Path::new(name), "read", &error))?;
            let own = match name.ends_with(".json") {
                true => Schedule::from_json(&text)?,
                false => Schedule::from_csv(&text)?,
            };
            stages.chunks = own.stages() / ranks.max(1);
            stages.placement = match own.owner == Placement::V.owners(ranks, stages.chunks) {
                true => Placement::V,
                false => Placement::Loop,
            };
            return Ok((stages, ScheduleChoice::Own(own)));
        }
        let known: Name = name.parse()?;
        if ranks > 1 {
            stages.chunks = self.chunks.unwrap_or(known.chunks());
            stages.placement = known.placement();
        }
        let choice = match (known, self.memory) {
            (Name::Searched, Some(live)) => ScheduleChoice::Searched(live),
            (Name::Searched, None) => {
                let detail = "a schedule is searched for under a limit: set pipeline.memory to the activations that a rank may have alive";
                return Err(Error::config(key, detail));
            }
            _ => ScheduleChoice::Named(name.clone()),
        };
        Ok((stages, choice))
    }
}

/// The sizes of a batch: any of the numbers, the others follow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BatchConfig {
    /// Sequences of one step over all ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub global: Option<u64>,
    /// Sequences that a data-parallel rank computes at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro: Option<u64>,
    /// Micro-batches whose gradients are added up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accumulation: Option<u64>,
    /// Tokens of a sequence.
    pub length: usize,
    /// Whether documents that share a row see each other: cheaper, and a little wrong.
    pub mix_documents: bool,
}

impl Default for BatchConfig {
    fn default() -> Self {
        Self {
            global: None,
            micro: None,
            accumulation: None,
            length: 256,
            mix_documents: true,
        }
    }
}

impl BatchConfig {
    /// What is known, for so many data-parallel ranks. Nothing given is 8 sequences for each.
    pub fn spec(&self, dp: u64) -> BatchSpec {
        let nothing = self.global.or(self.micro).is_none();
        BatchSpec {
            global: self.global,
            micro: self.micro.or(nothing.then_some(8)),
            accumulation: self.accumulation,
            dp: Some(dp),
            ..BatchSpec::default()
        }
    }
}

/// A source of text or tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// A file: text, JSON lines, Parquet, or tokens (`.bin`, with `.idx` as Megatron has it).
    pub path: PathBuf,
    /// How often it is taken beside the others.
    #[serde(default = "one")]
    pub weight: f64,
    /// Where records have their text.
    #[serde(default = "text")]
    pub field: String,
    /// Where records have a prompt, which is read and not learnt; the text is then what follows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt: Option<String>,
}

fn one() -> f64 {
    1.0
}

fn text() -> String {
    "text".into()
}

/// Adapters of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoraConfig {
    /// The weights that get one, as a pattern.
    #[serde(default = "projections")]
    pub of: String,
    /// The rank.
    #[serde(default = "rank")]
    pub rank: usize,
    /// The scale times the rank.
    #[serde(default = "alpha")]
    pub alpha: f64,
    /// The share of their input that is dropped in training.
    #[serde(default)]
    pub dropout: f64,
}

fn projections() -> String {
    "*.q_proj.weight, *.v_proj.weight".into()
}

fn rank() -> usize {
    Lora::default().rank
}

fn alpha() -> f64 {
    Lora::default().alpha
}

impl RunConfig {
    /// What the model is.
    pub fn model_choice(&self) -> Result<ModelChoice> {
        let Some(path) = self.model.get("path") else {
            let config = ModelConfig::try_from(self.model.clone()).map_err(|e| match e {
                Error::Config { key, detail } => Error::config(format!("model.{key}"), detail),
                other => other,
            })?;
            return Ok(ModelChoice::New(Box::new(config)));
        };
        let Some(path) = path.as_str() else {
            return Err(Error::config("model.path", format!("{path} is no path")));
        };
        if let Some(other) = self.model.keys().find(|key| *key != "path") {
            let detail = "a model that is trained already has its own settings: leave this out";
            return Err(Error::config(format!("model.{other}"), detail));
        }
        Ok(ModelChoice::Trained(path.into()))
    }
}

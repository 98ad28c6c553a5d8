//! What a training run needs beside its tensors, in a ready form.

use crate::{Error, Result};
use anymesh_core::ops::Rng;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// What a training run needs to go on where it was, on any number of ranks. It is kept as the state
/// of a checkpoint: fields by their names, and whatever else the program adds beside them.
///
/// ```
/// # use anymesh_checkpoint::Training;
/// # use anymesh_core::ops::Rng;
/// let mut training = Training {
///     consumed_samples: 4096,
///     architecture: Some("LlamaForCausalLM".into()),
///     ..Training::default()
/// };
/// training.set_rng("dropout", Rng::new(7).next());
/// training.more.insert("best_loss".into(), 1.25.into());
/// let again = Training::from_state(&training.to_state())?;
/// assert_eq!(again, training);
/// assert_eq!(again.rng("dropout"), Some(Rng { seed: 7, stream: 1 }));
/// # Ok::<(), anymesh_checkpoint::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Training {
    /// Samples that were trained on. Counted as they are consumed: a product of step and batch size
    /// is wrong as soon as one of them changes.
    pub consumed_samples: u64,
    /// Random keys by what they are for. A key is a seed and a counter, and what it draws does not
    /// depend on how many ranks there are.
    pub rng: BTreeMap<String, RandomKey>,
    /// The learning-rate schedule.
    pub schedule: Map<String, Value>,
    /// Where the data loader is.
    pub loader: Map<String, Value>,
    /// The class of the model, as Hugging Face names it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub architecture: Option<String>,
    /// What becomes `config.json`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config: Option<Map<String, Value>>,
    /// What becomes `generation_config.json`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub generation_config: Option<Map<String, Value>>,
    /// Everything else.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

/// A random key, as it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RandomKey {
    /// What the user chose.
    pub seed: u64,
    /// How many keys were drawn.
    pub stream: u32,
}

impl Training {
    /// As the state of a checkpoint.
    pub fn to_state(&self) -> Map<String, Value> {
        // All keys are text and all numbers are finite, so this is always an object.
        match serde_json::to_value(self) {
            Ok(Value::Object(state)) => state,
            _ => Map::new(),
        }
    }

    /// From the state of a checkpoint. What it lacks has its default.
    pub fn from_state(state: &Map<String, Value>) -> Result<Self> {
        serde_json::from_value(Value::Object(state.clone()))
            .map_err(|e| Error::Argument(format!("this is no state of a training run: {e}")))
    }

    /// A random key.
    pub fn rng(&self, what: &str) -> Option<Rng> {
        self.rng.get(what).map(|k| Rng {
            seed: k.seed,
            stream: k.stream,
        })
    }

    /// Keeps a random key.
    pub fn set_rng(&mut self, what: impl Into<String>, rng: Rng) {
        self.rng.insert(
            what.into(),
            RandomKey {
                seed: rng.seed,
                stream: rng.stream,
            },
        );
    }
}

/// The configuration files of a Hugging Face folder that a state tells of: `config.json` with the
/// architecture, and `generation_config.json`.
///
/// ```
/// # use anymesh_checkpoint::{Training, config_files};
/// let mut training = Training::default();
/// training.architecture = Some("LlamaForCausalLM".into());
/// let files = config_files(&training.to_state());
/// let expected = "{\n  \"architectures\": [\n    \"LlamaForCausalLM\"\n  ]\n}\n";
/// assert_eq!(files["config.json"], expected.as_bytes());
/// ```
pub fn config_files(state: &Map<String, Value>) -> BTreeMap<String, Vec<u8>> {
    let object = |key: &str| state.get(key).and_then(Value::as_object).cloned();
    let mut config = object("config");
    if let Some(name) = state.get("architecture").filter(|name| name.is_string()) {
        config
            .get_or_insert_default()
            .insert("architectures".into(), Value::Array(vec![name.clone()]));
    }
    let files = [
        ("config.json", config),
        ("generation_config.json", object("generation_config")),
    ];
    files
        .into_iter()
        .filter_map(|(name, value)| {
            Some((
                name.to_string(),
                format!("{:#}\n", Value::Object(value?)).into_bytes(),
            ))
        })
        .collect()
}

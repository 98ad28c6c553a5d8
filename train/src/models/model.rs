//! A model of any of the families.

use super::{
    Bert, BertConfig, Gpt2, Gpt2Config, Llama, LlamaConfig, Moe, MoeConfig,
    settings::{Settings, absent, read_strictly, write},
    staged::{Asides, Reads, Stack},
    tokens::Tokens,
};
use crate::{
    Build, Error, Module, Param, Pass, Result,
    nn::{Cache, ContextAttention},
    pipeline::Split,
};
use anymesh_core::{Mesh, Tensor, ops::SequenceOrder};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The settings of a model; `model_type` says of which family.
///
/// ```
/// # use anymesh_train::models::ModelConfig;
/// let json = r#"{"model_type": "gpt2", "n_layer": 2}"#;
/// let ModelConfig::Gpt2(config) = serde_json::from_str(json)? else { panic!() };
/// assert_eq!((config.n_layer, config.n_embd), (2, 768));
/// let wrong = serde_json::from_str::<ModelConfig>(r#"{"model_type": "gpt2", "layers": 2}"#);
/// assert!(wrong.unwrap_err().to_string().starts_with("layers: there is no such setting"));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Settings", into = "Settings")]
pub enum ModelConfig {
    /// `gpt2`.
    Gpt2(Gpt2Config),
    /// `llama`, `mistral`, `qwen2`.
    Llama(LlamaConfig),
    /// `mixtral`, `qwen3_moe`.
    Moe(MoeConfig),
    /// `bert`.
    Bert(BertConfig),
}

const FAMILIES: &str = "gpt2, llama, mistral, qwen2, mixtral, qwen3_moe and bert are";

impl ModelConfig {
    /// From `config.json` of a Hugging Face folder. Settings that do not matter here are passed
    /// over; one that changes what a model computes and is not supported is an error that names it.
    pub fn from_settings(settings: &Settings) -> Result<Self> {
        absent(
            settings,
            "quantization_config",
            "quantized weights are not read from Hugging Face folders: take the folder of the original, or a GGUF file",
        )?;
        let config = match kind(settings)? {
            "gpt2" => Self::Gpt2(Gpt2Config::from_settings(settings)?),
            "llama" | "mistral" | "qwen2" => Self::Llama(LlamaConfig::from_settings(settings)?),
            "mixtral" | "qwen3_moe" => Self::Moe(MoeConfig::from_settings(settings)?),
            "bert" => Self::Bert(BertConfig::from_settings(settings)?),
            other => {
                let detail = format!("'{other}' is not supported: {FAMILIES}");
                return Err(Error::config("model_type", detail));
            }
        };
        Ok(config)
    }

    /// As `config.json` has them, with the class that Hugging Face has for the model.
    pub fn to_settings(&self) -> Result<Settings> {
        let (mut settings, kind, class) = match self {
            Self::Gpt2(c) => (write(c)?, "gpt2", "GPT2LMHeadModel"),
            Self::Bert(c) => (write(c)?, "bert", "BertModel"),
            Self::Moe(c) => {
                let (settings, class) = c.to_settings()?;
                (settings, c.llama.model_type.as_str(), class)
            }
            Self::Llama(c) => (
                write(c)?,
                c.model_type.as_str(),
                match c.model_type.as_str() {
                    "mistral" => "MistralForCausalLM",
                    "qwen2" => "Qwen2ForCausalLM",
                    _ => "LlamaForCausalLM",
                },
            ),
        };
        settings.retain(|_, value| !value.is_null());
        settings.insert("model_type".into(), kind.into());
        settings.insert("architectures".into(), vec![Value::from(class)].into());
        Ok(settings)
    }

    /// A new model with these settings.
    pub fn build(&self, b: &Build) -> Result<Model> {
        Ok(match self {
            Self::Gpt2(c) => Model::Gpt2(Gpt2::new(b, c)?),
            Self::Llama(c) => Model::Llama(Llama::new(b, c)?),
            Self::Moe(c) => Model::Moe(Moe::new(b, c)?),
            Self::Bert(c) => Model::Bert(Bert::new(b, c)?),
        })
    }

    /// The longest text.
    pub fn longest(&self) -> usize {
        match self {
            Self::Gpt2(c) => c.n_positions,
            Self::Llama(c) => c.longest(),
            Self::Moe(c) => c.llama.longest(),
            Self::Bert(c) => c.max_position_embeddings,
        }
    }

    /// How many layers there are, and how wide they are.
    pub fn layers_and_width(&self) -> (usize, usize) {
        match self {
            Self::Gpt2(c) => (c.n_layer, c.n_embd),
            Self::Llama(c) => (c.num_hidden_layers, c.hidden_size),
            Self::Moe(c) => (c.llama.num_hidden_layers, c.llama.hidden_size),
            Self::Bert(c) => (c.num_hidden_layers, c.hidden_size),
        }
    }

    /// The stages of its layers.
    pub(crate) fn split(&self, b: &Build) -> Result<Split> {
        match self {
            Self::Gpt2(c) => c.split(b),
            Self::Llama(c) => c.split(b),
            Self::Moe(c) => c.split(b),
            Self::Bert(c) => c.split(b),
        }
    }

    /// The same with another number of layers.
    pub(crate) fn with_layers(&self, layers: usize) -> Self {
        let mut config = self.clone();
        match &mut config {
            Self::Gpt2(c) => c.n_layer = layers,
            Self::Llama(c) => c.num_hidden_layers = layers,
            Self::Moe(c) => c.llama.num_hidden_layers = layers,
            Self::Bert(c) => c.num_hidden_layers = layers,
        }
        config
    }

    /// How many tokens there are.
    pub fn vocabulary(&self) -> usize {
        match self {
            Self::Gpt2(c) => c.vocab_size,
            Self::Llama(c) => c.vocab_size,
            Self::Moe(c) => c.llama.vocab_size,
            Self::Bert(c) => c.vocab_size,
        }
    }
}

fn kind(settings: &Settings) -> Result<&str> {
    match settings.get("model_type") {
        Some(Value::String(kind)) => Ok(kind),
        Some(other) => Err(Error::config("model_type", format!("{other} is no name"))),
        None => Err(Error::config(
            "model_type",
            format!("it is missing, and says what the model is: {FAMILIES} supported"),
        )),
    }
}

impl TryFrom<Settings> for ModelConfig {
    type Error = Error;

    /// Every setting must be known.
    fn try_from(mut settings: Settings) -> Result<Self> {
        let kind = kind(&settings)?.to_string();
        settings.remove("architectures");
        if kind == "gpt2" || kind == "bert" {
            settings.remove("model_type");
        }
        let config = match kind.as_str() {
            "gpt2" => Self::Gpt2(read_strictly(&settings)?),
            "llama" | "mistral" | "qwen2" => Self::Llama(read_strictly(&settings)?),
            "mixtral" | "qwen3_moe" => Self::Moe(MoeConfig::from_strict(&settings)?),
            "bert" => Self::Bert(read_strictly(&settings)?),
            other => {
                let detail = format!("'{other}' is not supported: {FAMILIES}");
                return Err(Error::config("model_type", detail));
            }
        };
        match &config {
            Self::Gpt2(c) => c.check()?,
            Self::Llama(c) => c.check()?,
            Self::Moe(c) => c.check()?,
            Self::Bert(c) => c.check()?,
        }
        Ok(config)
    }
}

impl From<ModelConfig> for Settings {
    fn from(config: ModelConfig) -> Self {
        // A struct of numbers and texts always has settings.
        config.to_settings().unwrap_or_default()
    }
}

/// A model of one of the families.
#[derive(Clone, Debug)]
pub enum Model {
    /// GPT-2.
    Gpt2(Gpt2),
    /// Llama, SmolLM2, Mistral, Qwen2.
    Llama(Llama),
    /// Mixtral, Qwen3-MoE.
    Moe(Moe),
    /// A BERT encoder.
    Bert(Bert),
}

impl Model {
    /// The settings.
    pub fn config(&self) -> ModelConfig {
        match self {
            Self::Gpt2(m) => ModelConfig::Gpt2(m.config().clone()),
            Self::Llama(m) => ModelConfig::Llama(m.config().clone()),
            Self::Moe(m) => ModelConfig::Moe(m.config().clone()),
            Self::Bert(m) => ModelConfig::Bert(m.config().clone()),
        }
    }

    /// The rows of its tokens.
    pub fn embedding(&self) -> &Param {
        match self {
            Self::Gpt2(m) => &m.wte.weight,
            Self::Llama(m) => &m.embed_tokens.weight,
            Self::Moe(m) => &m.llama.embed_tokens.weight,
            Self::Bert(m) => &m.words.weight,
        }
    }

    /// Where it lies, all stages of it.
    pub fn mesh(&self) -> &Mesh {
        self.split().mesh()
    }

    /// Which layers are in which stage; one stage on a mesh without an axis `pp`.
    pub fn split(&self) -> &Split {
        self.stack().split()
    }

    /// What a stage makes of the stream `[b, s, width]` that the stage before it gave and that lies on
    /// its mesh: for models with an own head, which implement [`Staged`](crate::pipeline::Staged). The
    /// first stage is given none; what the last one gives is [`hidden`](Self::hidden). What routers
    /// ask for beside is left out.
    #[track_caller]
    pub fn stage(
        &self,
        stage: usize,
        stream: Option<&Tensor>,
        tokens: &Tokens,
        pass: &Pass,
    ) -> Result<Tensor> {
        self.stage_with(stage, stream, tokens, pass, &Asides::default())
    }

    /// [`stage`](Self::stage), and what its layers say beside.
    #[track_caller]
    pub(crate) fn stage_with(
        &self,
        stage: usize,
        stream: Option<&Tensor>,
        tokens: &Tokens,
        pass: &Pass,
        asides: &Asides,
    ) -> Result<Tensor> {
        let reads = Reads {
            tokens: &tokens.on(self.split().mesh_of(stage))?,
            from: 0,
            pass,
            asides,
        };
        self.stack().part(stage, stream, &reads, None)
    }

    /// Its layers in stages.
    pub(crate) fn stack(&self) -> &dyn Stack {
        match self {
            Self::Gpt2(m) => m,
            Self::Llama(m) => m,
            Self::Moe(m) => m.stack(),
            Self::Bert(m) => m,
        }
    }

    /// The order in which it is to be given texts of so many tokens: pairs of chunks, where the mesh
    /// has an axis `cp` that cuts them and its ranks have more equal work then. An error where what
    /// was asked for in [`Build::long_sequences`] cannot be.
    pub fn order(&self, length: usize) -> Result<SequenceOrder> {
        let (context, heads, dropout) = match self {
            Self::Gpt2(m) => (m.context(), m.config().heads()?, m.config().attn_pdrop),
            Self::Llama(m) => (
                m.context(),
                m.config().heads()?,
                m.config().attention_dropout,
            ),
            Self::Moe(m) => (
                m.llama.context(),
                m.config().llama.heads()?,
                m.config().llama.attention_dropout,
            ),
            Self::Bert(_) => return Ok(SequenceOrder::Straight),
        };
        let order = context.order(self.mesh(), heads, length)?;
        let cut = self.mesh().axis("cp").is_ok();
        if dropout == 0.0 || !cut {
            return Ok(order);
        }
        let refused = |key: &str| {
            let detail = format!(
                "attention drops {dropout} of its weights, for which the scores of all pairs are kept in straight order: take the way of heads, or gather without balance, or no dropout of attention"
            );
            Error::config(key, detail)
        };
        match context.attention.on(self.mesh(), heads)? {
            ContextAttention::Ring => Err(refused("context.attention")),
            ContextAttention::Gather if context.balance == Some(true) => {
                Err(refused("context.balance"))
            }
            ContextAttention::Gather => Ok(SequenceOrder::Straight),
            _ => Ok(order),
        }
    }

    /// Whether layers forget what is inside of them and run again in the backward pass.
    pub fn set_recompute(&mut self, on: bool) {
        match self {
            Self::Gpt2(m) => m.set_recompute(on),
            Self::Llama(m) => m.set_recompute(on),
            Self::Moe(m) => m.llama.set_recompute(on),
            Self::Bert(m) => m.set_recompute(on),
        }
    }

    /// Empty caches of keys and values, one for each layer; none for encoders.
    pub fn caches(&self) -> Vec<Cache> {
        let layers = match self {
            Self::Gpt2(m) => m.h.len(),
            Self::Llama(m) => m.layers.len(),
            Self::Moe(m) => m.llama.layers.len(),
            Self::Bert(_) => 0,
        };
        vec![Cache::default(); layers]
    }

    /// A vector for each token, `[b, s, width]`: what the head reads.
    #[track_caller]
    pub fn hidden(
        &self,
        tokens: &Tokens,
        pass: &Pass,
        caches: Option<&mut [Cache]>,
    ) -> Result<Tensor> {
        self.hidden_with(tokens, pass, caches, &Asides::default())
    }

    /// [`hidden`](Self::hidden), and what layers say beside.
    #[track_caller]
    pub(crate) fn hidden_with(
        &self,
        tokens: &Tokens,
        pass: &Pass,
        caches: Option<&mut [Cache]>,
        asides: &Asides,
    ) -> Result<Tensor> {
        // An encoder has none.
        let caches = caches.filter(|_| !matches!(self, Self::Bert(_)));
        let layers = self.config().layers_and_width().0;
        let from = super::cached(caches.as_deref(), layers)?;
        let stack = self.stack();
        stack.all_parts(tokens, from, pass, caches, asides)
    }

    /// How well each token fits after `[b, s, width]`; an encoder has no head.
    #[track_caller]
    pub fn head(&self, hidden: &Tensor) -> Result<Tensor> {
        match self {
            Self::Gpt2(m) => m.head(hidden),
            Self::Llama(m) => m.head(hidden),
            Self::Moe(m) => m.llama.head(hidden),
            Self::Bert(_) => Err(Error::config(
                "model_type",
                "a bert encoder has no head that predicts tokens: gpt2, llama, mistral, qwen2, mixtral and qwen3_moe have one",
            )),
        }
    }

    /// [`head`](Self::head) with a copy of the embedding that it is tied to.
    #[track_caller]
    pub(crate) fn head_with(&self, hidden: &Tensor, rows: Option<&Tensor>) -> Result<Tensor> {
        match self {
            Self::Gpt2(m) => m.head_with(hidden, rows),
            Self::Llama(m) => m.head_with(hidden, rows),
            Self::Moe(m) => m.llama.head_with(hidden, rows),
            Self::Bert(_) => self.head(hidden),
        }
    }

    /// How well each token fits after each of these, `[b, s, tokens]`, in the dtype of outputs.
    #[track_caller]
    pub fn logits(
        &self,
        tokens: &Tokens,
        pass: &Pass,
        caches: Option<&mut [Cache]>,
    ) -> Result<Tensor> {
        self.head(&self.hidden(tokens, pass, caches)?)
    }

    fn module(&self) -> &dyn Module {
        match self {
            Self::Gpt2(m) => m,
            Self::Llama(m) => m,
            Self::Moe(m) => m,
            Self::Bert(m) => m,
        }
    }

    fn module_mut(&mut self) -> &mut dyn Module {
        match self {
            Self::Gpt2(m) => m,
            Self::Llama(m) => m,
            Self::Moe(m) => m,
            Self::Bert(m) => m,
        }
    }
}

impl Module for Model {
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, &Param)) {
        self.module().visit(path, f);
    }

    fn visit_mut(&mut self, path: &str, f: &mut dyn FnMut(&str, &mut Param)) {
        self.module_mut().visit_mut(path, f);
    }

    fn tied(&self) -> Vec<(String, String)> {
        self.module().tied()
    }
}

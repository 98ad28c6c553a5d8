//! Llama and the models that share its layers: SmolLM2, Mistral, Qwen2.

use super::{
    rope::{RopeScaling, frequencies},
    settings::{self, Settings, above_zero, absent, only, positive, share},
    staged::{Asides, Gave, Layer, Layers, Open, Reads, Stack},
    tokens::Tokens,
};
use crate::{
    Build, Error, Init, Module, Pass, Policy, Result,
    nn::{
        Attend, Attention, AttentionBias, Cache, Context, Dropout, Embedding, GatedMlp, Heads,
        Linear, RmsNorm, Rope, Stream,
    },
    pipeline::{Split, on_mesh},
};
use anymesh_core::{
    Tensor,
    ops::{RopeStyle, SequenceOrder},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The settings of a Llama, under the names and with the defaults of Hugging Face.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LlamaConfig {
    /// `llama`, `mistral`, or `qwen2`, whose queries, keys and values have a bias. Those of
    /// [`MoeConfig`](super::MoeConfig) are `mixtral` and `qwen3_moe`.
    pub model_type: String,
    /// Tokens.
    pub vocab_size: usize,
    /// The width of the residual stream.
    pub hidden_size: usize,
    /// The width of the MLP.
    pub intermediate_size: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Heads of queries.
    pub num_attention_heads: usize,
    /// Heads of keys and values; as many as of queries where not given.
    pub num_key_value_heads: Option<usize>,
    /// The size of a head; `hidden_size / num_attention_heads` where not given.
    pub head_dim: Option<usize>,
    /// What the gate of the MLP goes through: `silu`.
    pub hidden_act: String,
    /// The longest text.
    pub max_position_embeddings: usize,
    /// The deviation that weights begin with.
    pub initializer_range: f64,
    /// What norms add to the mean square.
    pub rms_norm_eps: f64,
    /// Whether the head is the embedding.
    pub tie_word_embeddings: bool,
    /// What rotary frequencies are powers of.
    pub rope_theta: f64,
    /// How frequencies are stretched for longer texts.
    pub rope_scaling: Option<RopeScaling>,
    /// The share of attention that is dropped in training.
    pub attention_dropout: f64,
    /// Whether all projections of attention have a bias.
    pub attention_bias: bool,
    /// Whether the projections of the MLP have a bias.
    pub mlp_bias: bool,
    /// How far back a token sees. Longer texts are refused: within it attention is whole.
    pub sliding_window: Option<usize>,
}

impl Default for LlamaConfig {
    fn default() -> Self {
        Self {
            model_type: "llama".into(),
            vocab_size: 32_000,
            hidden_size: 4096,
            intermediate_size: 11_008,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: None,
            head_dim: None,
            hidden_act: "silu".into(),
            max_position_embeddings: 2048,
            initializer_range: 0.02,
            rms_norm_eps: 1e-6,
            tie_word_embeddings: false,
            rope_theta: 10_000.0,
            rope_scaling: None,
            attention_dropout: 0.0,
            attention_bias: false,
            mlp_bias: false,
            sliding_window: None,
        }
    }
}

impl LlamaConfig {
    /// From `config.json`. A setting that changes what a model computes and is not supported is an
    /// error that names it.
    pub fn from_settings(settings: &Settings) -> Result<Self> {
        for key in ["num_local_experts", "num_experts", "n_routed_experts"] {
            absent(
                settings,
                key,
                "mixtures of experts are mixtral and qwen3_moe",
            )?;
        }
        let config: Self = Self::read(settings)?;
        config.check()?;
        Ok(config)
    }

    /// The settings that models with these layers share.
    pub(crate) fn read(settings: &Settings) -> Result<Self> {
        let mut given = settings.clone();
        // Transformers 5 has the base and the scaling in one place.
        if let Some(Value::Object(rope)) = given.remove("rope_parameters") {
            if let Some(base) = rope.get("rope_theta") {
                given.insert("rope_theta".into(), base.clone());
            }
            given.insert("rope_scaling".into(), Value::Object(rope));
        }
        let scaling = given.remove("rope_scaling");
        // Qwen2 has a window that it does not use unless told.
        if given.get("use_sliding_window") == Some(&json!(false)) {
            given.remove("sliding_window");
        }
        only(
            &given,
            "use_sliding_window",
            json!(false),
            "windows differ between layers",
        )?;
        if let Some(Value::Array(types)) = given.get("layer_types")
            && let Some(other) = types.iter().find(|t| **t != json!("full_attention"))
        {
            let detail = format!("{other} is not supported: only full_attention is");
            return Err(Error::config("layer_types", detail));
        }
        only(
            &given,
            "partial_rotary_factor",
            json!(1.0),
            "all of a head is rotated",
        )?;
        let mut config: Self = settings::read(&given)?;
        if let Some(scaling) = scaling {
            config.rope_scaling = RopeScaling::of(&scaling)?;
        }
        Ok(config)
    }

    /// That the settings fit together.
    pub fn check(&self) -> Result<()> {
        if !["llama", "mistral", "qwen2"].contains(&self.model_type.as_str()) {
            let detail = format!("'{}' is not llama, mistral or qwen2", self.model_type);
            return Err(Error::config("model_type", detail));
        }
        self.check_sizes()
    }

    /// [`check`](Self::check) whatever the type is.
    pub(crate) fn check_sizes(&self) -> Result<()> {
        let keys = self.num_key_value_heads.unwrap_or(self.num_attention_heads);
        positive(&[
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", keys),
            ("max_position_embeddings", self.max_position_embeddings),
        ])?;
        share("attention_dropout", self.attention_dropout)?;
        above_zero("rms_norm_eps", self.rms_norm_eps)?;
        above_zero("rope_theta", self.rope_theta)?;
        above_zero("initializer_range", self.initializer_range)?;
        if !["silu", "swish"].contains(&self.hidden_act.as_str()) {
            let detail = format!("'{}' is not supported: silu is", self.hidden_act);
            return Err(Error::config("hidden_act", detail));
        }
        if !self.num_attention_heads.is_multiple_of(keys) {
            return Err(Error::config(
                "num_key_value_heads",
                format!(
                    "{} heads of queries do not divide into {keys} groups",
                    self.num_attention_heads
                ),
            ));
        }
        if let Some(scaling) = &self.rope_scaling {
            scaling.check()?;
        }
        Rope::frequencies(self.heads()?.size, self.rope_theta)?;
        Ok(())
    }

    /// The heads of a layer.
    pub fn heads(&self) -> Result<Heads> {
        let queries = self.num_attention_heads;
        let size = match self.head_dim {
            Some(size) => size,
            None => {
                let heads = Heads::of(self.hidden_size, queries);
                heads
                    .map_err(|e| Error::config("num_attention_heads", e.to_string()))?
                    .size
            }
        };
        Ok(Heads {
            queries,
            keys: self.num_key_value_heads.unwrap_or(queries),
            size,
        })
    }

    /// The stages of its layers, by their multiplications for a token.
    pub(crate) fn split(&self, b: &Build) -> Result<Split> {
        let layer = self.attention_cost()? + self.mlp_cost(self.intermediate_size);
        self.split_by(b, &vec![layer as f64; self.num_hidden_layers])
    }

    /// The stages of layers that cost so much.
    pub(crate) fn split_by(&self, b: &Build, costs: &[f64]) -> Result<Split> {
        b.split(costs, 0.0, (self.hidden_size * self.vocab_size) as f64)
    }

    /// Multiplications for a token: of the attention of a layer, and of a gated MLP of some width.
    pub(crate) fn attention_cost(&self) -> Result<usize> {
        let heads = self.heads()?;
        let (queries, keys) = (heads.queries * heads.size, heads.keys * heads.size);
        Ok(self.hidden_size * (2 * queries + 2 * keys))
    }

    pub(crate) fn mlp_cost(&self, inner: usize) -> usize {
        3 * self.hidden_size * inner
    }

    /// The longest text that is computed as the model means it.
    pub fn longest(&self) -> usize {
        let window = self.sliding_window.unwrap_or(usize::MAX);
        self.max_position_embeddings.min(window)
    }

    /// How weights begin, and those of the layers back to the stream: smaller, so that it has the
    /// same size after any number of layers.
    pub(crate) fn inits(&self) -> [Init; 2] {
        let deviation = self.initializer_range;
        let out = deviation / (2.0 * self.num_hidden_layers as f64).sqrt();
        [Init::Normal(deviation), Init::Normal(out)]
    }

    /// Whether queries and keys are normalised head by head, as Qwen3 does.
    fn has_head_norms(&self) -> bool {
        self.model_type.starts_with("qwen3")
    }

    fn bias(&self) -> AttentionBias {
        match (self.attention_bias, self.model_type == "qwen2") {
            (true, _) => AttentionBias::All,
            (false, true) => AttentionBias::Inputs,
            (false, false) => AttentionBias::None,
        }
    }
}

/// What a layer does to each token alone: a gated MLP, or a mixture of experts.
pub trait FeedForward: Module + Clone + Send + Sync + 'static {
    /// What becomes of `[b, s, width]`, a partial sum where it is cut. A mixture of experts says
    /// more: how many tokens each expert got, how many choices found no room, and a loss.
    fn feed(&self, x: &Tensor) -> Result<Vec<Tensor>>;
}

impl FeedForward for GatedMlp {
    fn feed(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        Ok(vec![self.forward(x)?])
    }
}

/// A layer: attention and a gated MLP, or what else is in its place, each with a norm before it and
/// a residual around it.
#[derive(Clone, Debug, Module)]
pub struct LlamaLayer<M: Module = GatedMlp> {
    /// Before attention.
    pub input_layernorm: RmsNorm,
    /// Attention.
    pub self_attn: Attention,
    /// Before the MLP.
    pub post_attention_layernorm: RmsNorm,
    /// The MLP.
    pub mlp: M,
    #[skip]
    attn_dropout: Dropout,
    #[skip]
    stream: Stream,
}

impl<M: Module> LlamaLayer<M> {
    fn new(b: &Build, c: &LlamaConfig, mlp: M) -> Result<Self> {
        let [init, out] = c.inits();
        let norm = |name| RmsNorm::new(&b.at(name), c.hidden_size, c.rms_norm_eps);
        let at = b.at("self_attn");
        let mut attention = Attention::new(&at, c.hidden_size, c.heads()?, c.bias(), init, out)?;
        if c.has_head_norms() {
            attention = attention.with_head_norms(&at, c.rms_norm_eps)?;
        }
        Ok(Self {
            input_layernorm: norm("input_layernorm")?,
            self_attn: attention,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            mlp,
            attn_dropout: Dropout::new(&b.at("self_attn.dropout"), c.attention_dropout),
            stream: Stream::of(b),
        })
    }
}

impl LlamaLayer {
    /// The layer's output for `[b, s, width]`.
    #[track_caller]
    pub fn forward(
        &self,
        x: &Tensor,
        attend: &Attend,
        cache: Option<&mut Cache>,
        pass: &Pass,
    ) -> Result<Tensor> {
        let gave = self.run(x.clone().into(), attend, cache, pass)?;
        gave.stream.closed()
    }
}

impl<M: FeedForward> Layer for LlamaLayer<M> {
    #[track_caller]
    fn run(
        &self,
        stream: Open,
        attend: &Attend,
        cache: Option<&mut Cache>,
        pass: &Pass,
    ) -> Result<Gave> {
        let attend = Attend {
            dropout: self.attn_dropout.key(pass),
            ..attend.clone()
        };
        let (x, h) = (self.input_layernorm).after(&stream.x, stream.branch.as_ref())?;
        let y = self
            .self_attn
            .forward(&self.stream.enter(&h)?, &attend, cache)?;
        let y = self.stream.settle(&y)?;
        let (x, h) = self.post_attention_layernorm.after(&x, Some(&y))?;
        let mut said = self.mlp.feed(&self.stream.enter(&h)?)?;
        let branch = Some(self.stream.settle(&said.remove(0))?);
        Ok(Gave {
            stream: Open { x, branch },
            said,
        })
    }
}

impl<M: FeedForward> Stack for Llama<M> {
    fn split(&self) -> &Split {
        &self.split
    }

    fn part(
        &self,
        stage: usize,
        stream: Option<&Tensor>,
        reads: &Reads<'_>,
        caches: Option<&mut [Cache]>,
    ) -> Result<Tensor> {
        let Reads { tokens, from, .. } = *reads;
        let count = tokens.length()?;
        super::check_length(from + count, self.config.longest())?;
        let rope = match &tokens.positions {
            None if tokens.order != SequenceOrder::Straight => {
                self.rope.ordered(tokens.ids.mesh(), tokens.order, count)?
            }
            None => self.rope.counting(tokens.ids.mesh(), from, count)?,
            Some(positions) => self.rope.at(positions, from + count)?,
        };
        let attend = Attend {
            rope: Some(rope),
            ..tokens.attend(self.context)
        };
        let x = match stream {
            Some(stream) => stream.clone(),
            None => {
                let rows = self.embed_tokens.forward(&tokens.ids)?;
                self.stream.settle(&rows)?
            }
        };
        let layers = Layers {
            all: &self.layers,
            range: self.split.layers(stage),
            recompute: self.recompute,
        };
        let stream = layers.run(x, &attend, reads, caches)?;
        match stage + 1 == self.split.stages() {
            true => Ok(self.norm.after(&stream.x, stream.branch.as_ref())?.1),
            false => stream.closed(),
        }
    }
}

/// A Llama. Its names are those of Hugging Face's `LlamaForCausalLM`.
///
/// ```
/// # use anymesh_core::Mesh;
/// # use anymesh_train::{Build, Module, Pass, Policy, models::{Llama, LlamaConfig, Tokens}};
/// # let device = anymesh_backend_cpu::device();
/// let config = LlamaConfig {
///     vocab_size: 64, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2,
///     num_attention_heads: 4, num_key_value_heads: Some(2), tie_word_embeddings: true,
///     ..LlamaConfig::default()
/// };
/// let mesh = Mesh::new("dp=2, tp=2", &device)?;
/// let model = Llama::new(&Build::new(&mesh, Policy::f32(), 1), &config)?;
/// let tokens = Tokens::of_rows(&mesh, &[vec![1, 2, 3], vec![4, 5, 6]])?;
/// let logits = model.logits(&tokens, &Pass::eval(), None)?;
/// assert_eq!(logits.type_string(), "f32[2@dp, 3, 64@tp]");
/// assert_eq!(model.names()[1], "model.layers.0.input_layernorm.weight");
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Clone, Debug, Module)]
#[tied = "aliases"]
pub struct Llama<M: Module = GatedMlp> {
    /// Rows of tokens, cut over the vocabulary.
    #[name = "model.embed_tokens"]
    pub embed_tokens: Embedding,
    /// The layers.
    #[name = "model.layers"]
    pub layers: Vec<LlamaLayer<M>>,
    /// Before the head.
    #[name = "model.norm"]
    pub norm: RmsNorm,
    /// The head, where it is not the embedding.
    pub lm_head: Option<Linear>,
    #[skip]
    config: LlamaConfig,
    #[skip]
    rope: Rope,
    #[skip]
    stream: Stream,
    #[skip]
    context: Context,
    #[skip]
    policy: Policy,
    #[skip]
    recompute: bool,
    #[skip]
    split: Split,
}

impl Llama {
    /// A new one.
    pub fn new(b: &Build, config: &LlamaConfig) -> Result<Self> {
        config.check()?;
        let c = config;
        let sizes = [c.hidden_size, c.intermediate_size];
        let [init, out] = c.inits();
        Self::with_mlps(b, c, c.split(b)?, |b, _| {
            GatedMlp::new(b, sizes, c.mlp_bias, init, out)
        })
    }

    /// Says how many tokens there are after embedding and head have grown.
    pub(crate) fn set_vocabulary(&mut self, tokens: usize) {
        self.config.vocab_size = tokens;
    }
}

impl<M: FeedForward> Llama<M> {
    /// A new one, with what `mlp` makes for each layer in the place of its MLP.
    pub(crate) fn with_mlps(
        b: &Build,
        config: &LlamaConfig,
        split: Split,
        mlp: impl Fn(&Build, usize) -> Result<M>,
    ) -> Result<Self> {
        let (c, policy) = (config, b.policy());
        let (first, last) = (split.mesh_of(0), split.mesh_of(split.stages() - 1));
        let (sizes, init) = (
            [c.vocab_size, c.hidden_size],
            Init::Normal(c.initializer_range),
        );
        let below = b.at("model");
        let layers = below.at("layers");
        let layer = |i: usize| {
            let mesh = split.mesh_of(split.stage_of(i));
            let b = layers.at(i.to_string()).on(mesh);
            LlamaLayer::new(&b, c, mlp(&b.at("mlp"), i)?)
        };
        let frequencies = frequencies(c.heads()?.size, c.rope_theta, c.rope_scaling.as_ref())?;
        let head = || {
            let sizes = [c.hidden_size, c.vocab_size];
            Linear::new(
                &b.at("lm_head").on(last).without_f8(),
                sizes,
                "[@tp?, _]",
                init,
            )
        };
        let rows = below.at("embed_tokens").on(first);
        Ok(Self {
            embed_tokens: Embedding::new(&rows, sizes, "[@tp?, _]", init)?,
            layers: (0..c.num_hidden_layers).map(layer).collect::<Result<_>>()?,
            norm: RmsNorm::new(&below.at("norm").on(last), c.hidden_size, c.rms_norm_eps)?,
            lm_head: match c.tie_word_embeddings {
                true => None,
                false => Some(head()?),
            },
            config: c.clone(),
            rope: Rope::new(frequencies, RopeStyle::Half, policy.compute),
            stream: Stream::of(b),
            context: b.context(),
            policy,
            recompute: false,
            split,
        })
    }

    /// The settings.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// How sequences are computed that are cut over `cp`.
    pub fn context(&self) -> Context {
        self.context
    }

    /// Whether layers forget what is inside of them and run again in the backward pass.
    pub fn set_recompute(&mut self, on: bool) {
        self.recompute = on;
    }

    /// What the head reads, `[b, s, width]`.
    #[track_caller]
    pub fn hidden(
        &self,
        tokens: &Tokens,
        pass: &Pass,
        caches: Option<&mut [Cache]>,
    ) -> Result<Tensor> {
        let from = super::cached(caches.as_deref(), self.layers.len())?;
        self.all_parts(tokens, from, pass, caches, &Asides::default())
    }

    /// How well each token fits after `[b, s, width]`, in the dtype of outputs, cut over the
    /// vocabulary.
    #[track_caller]
    pub fn head(&self, hidden: &Tensor) -> Result<Tensor> {
        self.head_with(hidden, None)
    }

    /// [`head`](Self::head) with a copy of the embedding that it is tied to.
    #[track_caller]
    pub(crate) fn head_with(&self, hidden: &Tensor, rows: Option<&Tensor>) -> Result<Tensor> {
        let x = self.stream.enter(hidden)?;
        let logits = match (&self.lm_head, rows) {
            (Some(head), _) => head.forward(&x)?,
            (None, Some(rows)) => x.linear(rows, None)?,
            (None, None) => {
                x.linear(&on_mesh(&self.embed_tokens.weight.get()?, x.mesh())?, None)?
            }
        };
        Ok(logits.cast(self.policy.output)?)
    }

    /// How well each token fits after each of these, `[b, s, tokens]`.
    #[track_caller]
    pub fn logits(
        &self,
        tokens: &Tokens,
        pass: &Pass,
        caches: Option<&mut [Cache]>,
    ) -> Result<Tensor> {
        self.head(&self.hidden(tokens, pass, caches)?)
    }
}

impl<M: Module> Llama<M> {
    pub(crate) fn aliases(&self) -> Vec<(String, String)> {
        match self.lm_head {
            Some(_) => vec![],
            None => vec![("lm_head.weight".into(), "model.embed_tokens.weight".into())],
        }
    }
}

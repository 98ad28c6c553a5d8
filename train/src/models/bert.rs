//! BERT encoders.

use super::{
    settings::{self, Settings, above_zero, only, positive, share},
    staged::{Asides, Gave, Layer, Layers, Open, Reads, Stack},
    tokens::Tokens,
};
use crate::{
    Build, Error, Init, Module, Pass, Policy, Result,
    nn::{
        Activation, Attend, Cache, Dropout, Embedding, Heads, LayerNorm, Linear, Stream,
        attend as attention,
    },
    pipeline::Split,
};
use anymesh_core::Tensor;
use serde::{Deserialize, Serialize};
use serde_json::json;

/// The settings of a BERT, under the names and with the defaults of Hugging Face.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BertConfig {
    /// Tokens.
    pub vocab_size: usize,
    /// The width of the residual stream.
    pub hidden_size: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Heads.
    pub num_attention_heads: usize,
    /// The width of the MLP.
    pub intermediate_size: usize,
    /// What stands in the MLP.
    pub hidden_act: String,
    /// The share that is dropped of the embedding and of what a branch adds to the stream.
    pub hidden_dropout_prob: f64,
    /// The share of attention that is dropped.
    pub attention_probs_dropout_prob: f64,
    /// The longest text.
    pub max_position_embeddings: usize,
    /// Kinds of texts.
    pub type_vocab_size: usize,
    /// The deviation that weights begin with.
    pub initializer_range: f64,
    /// What norms add to the variance.
    pub layer_norm_eps: f64,
    /// The token that fills up short texts.
    pub pad_token_id: usize,
}

impl Default for BertConfig {
    fn default() -> Self {
        Self {
            vocab_size: 30_522,
            hidden_size: 768,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            intermediate_size: 3072,
            hidden_act: "gelu".into(),
            hidden_dropout_prob: 0.1,
            attention_probs_dropout_prob: 0.1,
            max_position_embeddings: 512,
            type_vocab_size: 2,
            initializer_range: 0.02,
            layer_norm_eps: 1e-12,
            pad_token_id: 0,
        }
    }
}

impl BertConfig {
    /// From `config.json`. A setting that changes what a model computes and is not supported is an
    /// error that names it.
    pub fn from_settings(settings: &Settings) -> Result<Self> {
        let key = "position_embedding_type";
        only(
            settings,
            key,
            json!("absolute"),
            "positions have rows of their own",
        )?;
        only(
            settings,
            "is_decoder",
            json!(false),
            "every token sees all others",
        )?;
        only(
            settings,
            "add_cross_attention",
            json!(false),
            "there is nothing else to look at",
        )?;
        let config: Self = settings::read(settings)?;
        config.check()?;
        Ok(config)
    }

    /// That the settings fit together.
    pub fn check(&self) -> Result<()> {
        positive(&[
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_attention_heads", self.num_attention_heads),
            ("intermediate_size", self.intermediate_size),
            ("max_position_embeddings", self.max_position_embeddings),
            ("type_vocab_size", self.type_vocab_size),
        ])?;
        share("hidden_dropout_prob", self.hidden_dropout_prob)?;
        share(
            "attention_probs_dropout_prob",
            self.attention_probs_dropout_prob,
        )?;
        above_zero("layer_norm_eps", self.layer_norm_eps)?;
        above_zero("initializer_range", self.initializer_range)?;
        self.heads()?;
        self.activation()?;
        Ok(())
    }

    /// The heads of a layer.
    pub fn heads(&self) -> Result<Heads> {
        let (width, heads) = (self.hidden_size, self.num_attention_heads);
        Heads::of(width, heads).map_err(|_| {
            let detail = format!("{width} values do not divide into {heads} heads");
            Error::config("num_attention_heads", detail)
        })
    }

    /// The stages of its layers, by their multiplications for a token.
    pub(crate) fn split(&self, b: &Build) -> Result<Split> {
        let layer = self.hidden_size * (4 * self.hidden_size + 2 * self.intermediate_size);
        b.split(&vec![layer as f64; self.num_hidden_layers], 0.0, 0.0)
    }

    fn activation(&self) -> Result<Activation> {
        super::activation("hidden_act", &self.hidden_act)
    }
}

/// A layer: attention and an MLP, each with a residual around it and a norm after that.
#[derive(Clone, Debug, Module)]
pub struct BertLayer {
    /// To queries.
    #[name = "attention.self.query"]
    pub query: Linear,
    /// To keys.
    #[name = "attention.self.key"]
    pub key: Linear,
    /// To values.
    #[name = "attention.self.value"]
    pub value: Linear,
    /// Back to the width.
    #[name = "attention.output.dense"]
    pub attention_output: Linear,
    /// After attention.
    #[name = "attention.output.LayerNorm"]
    pub attention_norm: LayerNorm,
    /// Into the MLP.
    #[name = "intermediate.dense"]
    pub intermediate: Linear,
    /// Out of the MLP.
    #[name = "output.dense"]
    pub output: Linear,
    /// After the MLP.
    #[name = "output.LayerNorm"]
    pub norm: LayerNorm,
    #[skip]
    activation: Activation,
    #[skip]
    heads: Heads,
    #[skip]
    dropouts: [Dropout; 2],
    #[skip]
    attention_dropout: Dropout,
    #[skip]
    stream: Stream,
}

impl BertLayer {
    fn new(b: &Build, c: &BertConfig) -> Result<Self> {
        let (width, inner) = (c.hidden_size, c.intermediate_size);
        let linear = |name: &str, sizes: [usize; 2], sharding: &str| {
            let (at, init) = (b.at(name), Init::Normal(c.initializer_range));
            Linear::new(&at, sizes, sharding, init)?.with_bias(&at)
        };
        let norm = |name| LayerNorm::new(&b.at(name), width, c.layer_norm_eps);
        let (square, rows, columns) = ([width, width], "[_, @tp?]", "[@tp?, _]");
        Ok(Self {
            query: linear("attention.self.query", square, columns)?,
            key: linear("attention.self.key", square, columns)?,
            value: linear("attention.self.value", square, columns)?,
            attention_output: linear("attention.output.dense", square, rows)?,
            attention_norm: norm("attention.output.LayerNorm")?,
            intermediate: linear("intermediate.dense", [width, inner], columns)?,
            output: linear("output.dense", [inner, width], rows)?,
            norm: norm("output.LayerNorm")?,
            activation: c.activation()?,
            heads: c.heads()?,
            dropouts: ["attention.output.dropout", "output.dropout"]
                .map(|name| Dropout::new(&b.at(name), c.hidden_dropout_prob)),
            attention_dropout: Dropout::new(
                &b.at("attention.self.dropout"),
                c.attention_probs_dropout_prob,
            ),
            stream: Stream::of(b),
        })
    }

    /// The layer's output for `[b, s, width]`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor, mask: Option<&Tensor>, pass: &Pass) -> Result<Tensor> {
        let attend = Attend {
            mask: mask.cloned(),
            dropout: self.attention_dropout.key(pass),
            ..Attend::default()
        };
        let h = self.stream.enter(x)?;
        let qkv = Linear::forward_each(&h, &[&self.query, &self.key, &self.value])?;
        let seen = attention([&qkv[0], &qkv[1], &qkv[2]], self.heads, &attend, None)?;
        let y = self.stream.settle(&self.attention_output.forward(&seen)?)?;
        let (x, y) = self.dropouts[0].branch(y, x, pass)?;
        let (_, x) = self.attention_norm.after(&x, y.as_ref())?;
        let h = self.stream.enter(&x)?;
        let inner = self.activation.apply(&self.intermediate.forward(&h)?)?;
        let y = self.stream.settle(&self.output.forward(&inner)?)?;
        let (x, y) = self.dropouts[1].branch(y, &x, pass)?;
        Ok(self.norm.after(&x, y.as_ref())?.1)
    }
}

/// A BERT encoder. Its names are those of Hugging Face's `BertModel`.
#[derive(Clone, Debug, Module)]
pub struct Bert {
    /// Rows of tokens, cut over the vocabulary.
    #[name = "embeddings.word_embeddings"]
    pub words: Embedding,
    /// Rows of positions.
    #[name = "embeddings.position_embeddings"]
    pub positions: Embedding,
    /// Rows of kinds of texts.
    #[name = "embeddings.token_type_embeddings"]
    pub types: Embedding,
    /// Before the layers.
    #[name = "embeddings.LayerNorm"]
    pub norm: LayerNorm,
    /// The layers.
    #[name = "encoder.layer"]
    pub layers: Vec<BertLayer>,
    /// What the first token goes through for [`pooled`](Self::pooled), in models that have it. It
    /// is frozen, because most uses do without.
    #[name = "pooler.dense"]
    pub pooler: Option<Linear>,
    #[skip]
    dropout: Dropout,
    #[skip]
    config: BertConfig,
    #[skip]
    stream: Stream,
    #[skip]
    policy: Policy,
    #[skip]
    recompute: bool,
    #[skip]
    split: Split,
}

impl Layer for BertLayer {
    fn run(
        &self,
        stream: Open,
        attend: &Attend,
        _: Option<&mut Cache>,
        pass: &Pass,
    ) -> Result<Gave> {
        let x = self.forward(&stream.closed()?, attend.mask.as_ref(), pass)?;
        Ok(Gave::stream(x.into()))
    }
}

impl Stack for Bert {
    fn split(&self) -> &Split {
        &self.split
    }

    fn part(
        &self,
        stage: usize,
        stream: Option<&Tensor>,
        reads: &Reads<'_>,
        _: Option<&mut [Cache]>,
    ) -> Result<Tensor> {
        let Reads { tokens, pass, .. } = *reads;
        let count = tokens.length()?;
        super::check_length(count, self.config.max_position_embeddings)?;
        let x = match stream {
            Some(stream) => stream.clone(),
            None => {
                let places = match &tokens.positions {
                    None => self.positions.weight.get()?.narrow(0, 0, count)?,
                    Some(positions) => self.positions.forward(positions)?,
                };
                let kind = self.types.weight.get()?.narrow(0, 0, 1)?;
                let rows = self.stream.settle(&self.words.forward(&tokens.ids)?)?;
                let rows = rows.add(&places.add(&kind)?)?;
                self.dropout.forward(&self.norm.forward(&rows)?, pass)?
            }
        };
        let attend = Attend {
            mask: tokens.mask.clone(),
            ..Attend::default()
        };
        let layers = Layers {
            all: &self.layers,
            range: self.split.layers(stage),
            recompute: self.recompute,
        };
        let x = layers.run(x, &attend, reads, None)?.closed()?;
        Ok(match stage + 1 == self.split.stages() {
            true => x.cast(self.policy.output)?,
            false => x,
        })
    }
}

impl Bert {
    /// A new one, without a pooler.
    pub fn new(b: &Build, config: &BertConfig) -> Result<Self> {
        config.check()?;
        let split = config.split(b)?;
        let first = b.at("embeddings").on(split.mesh_of(0));
        let (c, below, layers) = (config, first, b.at("encoder.layer"));
        let layer = |i: usize| {
            let mesh = split.mesh_of(split.stage_of(i));
            BertLayer::new(&layers.at(i.to_string()).on(mesh), c)
        };
        let rows = |name, count, sharding| {
            let init = Init::Normal(c.initializer_range);
            Embedding::new(&below.at(name), [count, c.hidden_size], sharding, init)
        };
        let places = c.max_position_embeddings;
        Ok(Self {
            words: rows("word_embeddings", c.vocab_size, "[@tp?, _]")?,
            positions: rows("position_embeddings", places, "[_, _]")?,
            types: rows("token_type_embeddings", c.type_vocab_size, "[_, _]")?,
            norm: LayerNorm::new(&below.at("LayerNorm"), c.hidden_size, c.layer_norm_eps)?,
            layers: (0..c.num_hidden_layers).map(layer).collect::<Result<_>>()?,
            pooler: None,
            dropout: Dropout::new(&below.at("dropout"), c.hidden_dropout_prob),
            config: c.clone(),
            stream: Stream::of(b),
            policy: b.policy(),
            recompute: false,
            split,
        })
    }

    /// With a pooler, which is frozen.
    pub fn with_pooler(mut self, b: &Build) -> Result<Self> {
        let last = self.split.mesh_of(self.split.stages() - 1);
        let (at, width) = (b.at("pooler.dense").on(last), self.config.hidden_size);
        let init = Init::Normal(self.config.initializer_range);
        let mut pooler = Linear::new(&at, [width, width], "[_, _]", init)?.with_bias(&at)?;
        pooler.try_each(&mut |_, p| p.train(false))?;
        self.pooler = Some(pooler);
        Ok(self)
    }

    /// The settings.
    pub fn config(&self) -> &BertConfig {
        &self.config
    }

    /// Says how many tokens there are after the embedding has grown.
    pub(crate) fn set_vocabulary(&mut self, tokens: usize) {
        self.config.vocab_size = tokens;
    }

    /// Whether layers forget what is inside of them and run again in the backward pass.
    pub fn set_recompute(&mut self, on: bool) {
        self.recompute = on;
    }

    /// A vector for each token, `[b, s, width]`. The mask says which tokens are there (see
    /// [`Tokens::mask`]); all are of the first kind of texts.
    #[track_caller]
    pub fn hidden(&self, tokens: &Tokens, pass: &Pass) -> Result<Tensor> {
        self.all_parts(tokens, 0, pass, None, &Asides::default())
    }

    /// The first token's vector `[b, width]` through the pooler; an error in a model without one.
    #[track_caller]
    pub fn pooled(&self, hidden: &Tensor) -> Result<Tensor> {
        let Some(pooler) = &self.pooler else {
            return Err(Error::parameter(
                "pooler.dense.weight",
                "the model has no pooler",
            ));
        };
        let first = hidden.narrow(1, 0, 1)?.squeeze(&[1])?;
        Ok(pooler
            .forward(&first.cast(self.policy.compute)?)?
            .tanh()?
            .cast(self.policy.output)?)
    }
}

//! GPT-2.

use super::{
    settings::{self, Settings, above_zero, only, positive, share},
    staged::{Asides, Gave, Layer, Layers, Open, Reads, Stack},
    tokens::Tokens,
};
use crate::{
    Build, Error, Init, Module, Pass, Policy, Result,
    nn::{
        Activation, Attend, Attention, AttentionBias, Cache, Context, Dropout, Embedding, Heads,
        LayerNorm, Linear, Mlp, Stream,
    },
    pipeline::{Split, on_mesh},
};
use anymesh_core::{Tensor, ops::SequenceOrder};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// The settings of a GPT-2, under the names and with the defaults of Hugging Face.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Gpt2Config {
    /// Tokens.
    pub vocab_size: usize,
    /// The longest text.
    pub n_positions: usize,
    /// The width of the residual stream.
    pub n_embd: usize,
    /// Layers.
    pub n_layer: usize,
    /// Heads.
    pub n_head: usize,
    /// The width of the MLP; four times `n_embd` where not given.
    pub n_inner: Option<usize>,
    /// What stands in the MLP.
    pub activation_function: String,
    /// The share that is dropped of what a branch adds to the stream.
    pub resid_pdrop: f64,
    /// The share that is dropped of the embedding.
    pub embd_pdrop: f64,
    /// The share of attention that is dropped.
    pub attn_pdrop: f64,
    /// What norms add to the variance.
    pub layer_norm_epsilon: f64,
    /// The deviation that weights begin with.
    pub initializer_range: f64,
    /// Whether the head is the embedding.
    pub tie_word_embeddings: bool,
}

impl Default for Gpt2Config {
    fn default() -> Self {
        Self {
            vocab_size: 50_257,
            n_positions: 1024,
            n_embd: 768,
            n_layer: 12,
            n_head: 12,
            n_inner: None,
            activation_function: "gelu_new".into(),
            resid_pdrop: 0.1,
            embd_pdrop: 0.1,
            attn_pdrop: 0.1,
            layer_norm_epsilon: 1e-5,
            initializer_range: 0.02,
            tie_word_embeddings: true,
        }
    }
}

impl Gpt2Config {
    /// The stages of its layers, by their multiplications for a token.
    pub(crate) fn split(&self, b: &Build) -> Result<Split> {
        let inner = self.n_inner.unwrap_or(4 * self.n_embd);
        let layer = self.n_embd * (4 * self.n_embd + 2 * inner);
        let head = self.n_embd * self.vocab_size;
        b.split(&vec![layer as f64; self.n_layer], 0.0, head as f64)
    }

    /// From `config.json`. A setting that changes what a model computes and is not supported is an
    /// error that names it.
    pub fn from_settings(settings: &Settings) -> Result<Self> {
        only(
            settings,
            "scale_attn_weights",
            json!(true),
            "scores are scaled",
        )?;
        let key = "scale_attn_by_inverse_layer_idx";
        only(settings, key, json!(false), "all layers scale alike")?;
        only(
            settings,
            "add_cross_attention",
            json!(false),
            "there is no encoder to look at",
        )?;
        let config: Self = settings::read(settings)?;
        config.check()?;
        Ok(config)
    }

    /// That the settings fit together.
    pub fn check(&self) -> Result<()> {
        positive(&[
            ("vocab_size", self.vocab_size),
            ("n_positions", self.n_positions),
            ("n_embd", self.n_embd),
            ("n_head", self.n_head),
            ("n_inner", self.n_inner.unwrap_or(1)),
        ])?;
        share("resid_pdrop", self.resid_pdrop)?;
        share("embd_pdrop", self.embd_pdrop)?;
        share("attn_pdrop", self.attn_pdrop)?;
        above_zero("layer_norm_epsilon", self.layer_norm_epsilon)?;
        above_zero("initializer_range", self.initializer_range)?;
        self.heads()?;
        self.activation()?;
        Ok(())
    }

    /// The heads of a layer.
    pub fn heads(&self) -> Result<Heads> {
        Heads::of(self.n_embd, self.n_head).map_err(|_| {
            let detail = format!(
                "{} values do not divide into {} heads",
                self.n_embd, self.n_head
            );
            Error::config("n_head", detail)
        })
    }

    fn activation(&self) -> Result<Activation> {
        super::activation("activation_function", &self.activation_function)
    }
}

/// A layer: attention and an MLP, each with a norm before it and a residual around it.
#[derive(Clone, Debug, Module)]
pub struct Gpt2Layer {
    /// Before attention.
    pub ln_1: LayerNorm,
    /// Attention, with projections of their own for queries, keys and values: those are cut over
    /// `tp` by heads, which one matrix for the three could not be. Files have them as one.
    pub attn: Attention,
    /// Before the MLP.
    pub ln_2: LayerNorm,
    /// The MLP.
    pub mlp: Mlp,
    #[skip]
    dropouts: [Dropout; 2],
    #[skip]
    attn_dropout: Dropout,
    #[skip]
    stream: Stream,
}

impl Gpt2Layer {
    fn new(b: &Build, c: &Gpt2Config) -> Result<Self> {
        let init = Init::Normal(c.initializer_range);
        // So that the stream has the same size after any number of layers.
        let out = Init::Normal(c.initializer_range / (2.0 * c.n_layer as f64).sqrt());
        let norm = |name| LayerNorm::new(&b.at(name), c.n_embd, c.layer_norm_epsilon);
        let sizes = [c.n_embd, c.n_inner.unwrap_or(4 * c.n_embd)];
        let (heads, all) = (c.heads()?, AttentionBias::All);
        Ok(Self {
            ln_1: norm("ln_1")?,
            attn: Attention::new(&b.at("attn"), c.n_embd, heads, all, init, out)?,
            ln_2: norm("ln_2")?,
            mlp: Mlp::new(&b.at("mlp"), sizes, true, c.activation()?, init, out)?,
            dropouts: ["attn.resid_dropout", "mlp.dropout"]
                .map(|name| Dropout::new(&b.at(name), c.resid_pdrop)),
            attn_dropout: Dropout::new(&b.at("attn.attn_dropout"), c.attn_pdrop),
            stream: Stream::of(b),
        })
    }

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

/// A GPT-2. Its names are those of Hugging Face's `GPT2LMHeadModel`, but for the projections of
/// its layers, which files have fused and transposed ([`Gpt2::mapping`]).
///
/// ```
/// # use anymesh_core::Mesh;
/// # use anymesh_train::{Build, Pass, Policy, models::{Gpt2, Gpt2Config, Tokens}};
/// # let device = anymesh_backend_cpu::device();
/// let config = Gpt2Config { vocab_size: 50, n_embd: 12, n_layer: 1, n_head: 3, ..Gpt2Config::default() };
/// let mesh = Mesh::new("tp=3", &device)?;
/// let model = Gpt2::new(&Build::new(&mesh, Policy::f32(), 1), &config)?;
/// let tokens = Tokens::of_rows(&mesh, &[vec![1, 2, 3]])?;
/// assert_eq!(model.logits(&tokens, &Pass::eval(), None)?.type_string(), "f32[1, 3, 50@tp]");
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Clone, Debug, Module)]
#[tied = "aliases"]
pub struct Gpt2 {
    /// Rows of tokens, cut over the vocabulary.
    #[name = "transformer.wte"]
    pub wte: Embedding,
    /// Rows of positions.
    #[name = "transformer.wpe"]
    pub wpe: Embedding,
    /// The layers.
    #[name = "transformer.h"]
    pub h: Vec<Gpt2Layer>,
    /// Before the head.
    #[name = "transformer.ln_f"]
    pub ln_f: LayerNorm,
    /// The head, where it is not the embedding.
    pub lm_head: Option<Linear>,
    #[skip]
    dropout: Dropout,
    #[skip]
    config: Gpt2Config,
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

impl Layer for Gpt2Layer {
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
        let (x, h) = self.ln_1.after(&stream.x, stream.branch.as_ref())?;
        let y = self.attn.forward(&self.stream.enter(&h)?, &attend, cache)?;
        let (x, y) = self.dropouts[0].branch(self.stream.settle(&y)?, &x, pass)?;
        let (x, h) = self.ln_2.after(&x, y.as_ref())?;
        let y = self.mlp.forward(&self.stream.enter(&h)?)?;
        let (x, branch) = self.dropouts[1].branch(self.stream.settle(&y)?, &x, pass)?;
        Ok(Gave::stream(Open { x, branch }))
    }
}

impl Stack for Gpt2 {
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
        let Reads {
            tokens, from, pass, ..
        } = *reads;
        let count = tokens.length()?;
        super::check_length(from + count, self.config.n_positions)?;
        let attend = tokens.attend(self.context);
        let x = match stream {
            Some(stream) => stream.clone(),
            None => {
                let places = match &tokens.positions {
                    None if tokens.order != SequenceOrder::Straight => {
                        tokens.order.check(count)?;
                        let place = (tokens.ids.mesh(), "[@cp?]");
                        let at = |at: &[usize]| tokens.order.position(at[0], count) as i32;
                        self.wpe.forward(&Tensor::from_fn([count], place, at)?)?
                    }
                    None => self.wpe.weight.get()?.narrow(0, from, count)?,
                    Some(positions) => self.wpe.forward(positions)?,
                };
                let rows = self.stream.settle(&self.wte.forward(&tokens.ids)?)?;
                self.dropout.forward(&rows.add(&places)?, pass)?
            }
        };
        let layers = Layers {
            all: &self.h,
            range: self.split.layers(stage),
            recompute: self.recompute,
        };
        let stream = layers.run(x, &attend, reads, caches)?;
        match stage + 1 == self.split.stages() {
            true => Ok(self.ln_f.after(&stream.x, stream.branch.as_ref())?.1),
            false => stream.closed(),
        }
    }
}

impl Gpt2 {
    /// A new one.
    pub fn new(b: &Build, config: &Gpt2Config) -> Result<Self> {
        config.check()?;
        let (c, below) = (config, b.at("transformer"));
        let (init, layers) = (Init::Normal(c.initializer_range), below.at("h"));
        let split = c.split(b)?;
        let (first, last) = (split.mesh_of(0), split.mesh_of(split.stages() - 1));
        let rows = |name, count, sharding| {
            Embedding::new(&below.at(name).on(first), [count, c.n_embd], sharding, init)
        };
        let layer = |i: usize| {
            let mesh = split.mesh_of(split.stage_of(i));
            Gpt2Layer::new(&layers.at(i.to_string()).on(mesh), c)
        };
        let norm = below.at("ln_f").on(last);
        let head = || {
            let sizes = [c.n_embd, c.vocab_size];
            Linear::new(
                &b.at("lm_head").on(last).without_f8(),
                sizes,
                "[@tp?, _]",
                init,
            )
        };
        Ok(Self {
            wte: rows("wte", c.vocab_size, "[@tp?, _]")?,
            wpe: rows("wpe", c.n_positions, "[_, _]")?,
            h: (0..c.n_layer).map(layer).collect::<Result<_>>()?,
            ln_f: LayerNorm::new(&norm, c.n_embd, c.layer_norm_epsilon)?,
            lm_head: match c.tie_word_embeddings {
                true => None,
                false => Some(head()?),
            },
            dropout: Dropout::new(&below.at("drop"), c.embd_pdrop),
            config: c.clone(),
            stream: Stream::of(b),
            context: b.context(),
            policy: b.policy(),
            recompute: false,
            split,
        })
    }

    /// The settings.
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    /// How sequences are computed that are cut over `cp`.
    pub fn context(&self) -> Context {
        self.context
    }

    /// Says how many tokens there are after embedding and head have grown.
    pub(crate) fn set_vocabulary(&mut self, tokens: usize) {
        self.config.vocab_size = tokens;
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
        let from = super::cached(caches.as_deref(), self.h.len())?;
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
            (None, None) => x.linear(&on_mesh(&self.wte.weight.get()?, x.mesh())?, None)?,
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

    /// How the names of files become those of the model, in the language of
    /// [`map`](anymesh_checkpoint::map): projections are transposed, and the one of attention is
    /// three. `prefix` is what names in the file begin with: `transformer.`, or nothing.
    pub fn mapping(prefix: &str) -> String {
        let (mut text, layer) = (String::new(), "h.$LAYER_ID");
        let mut line = |from: &str, to: &str| {
            text += &format!("{prefix}{from} -> {to}\n");
        };
        let parts = |kind: &str| {
            let part = |p: &str| format!("transformer.{layer}.attn.{p}_proj.{kind}");
            format!("{}, {}, {}, axis=0", part("q"), part("k"), part("v"))
        };
        line(&format!("{layer}.attn.c_attn.weight^T"), &parts("weight"));
        line(&format!("{layer}.attn.c_attn.bias"), &parts("bias"));
        let renamed = [
            ("attn.c_proj", "attn.o_proj"),
            ("mlp.c_fc", "mlp.up_proj"),
            ("mlp.c_proj", "mlp.down_proj"),
        ];
        for (from, to) in renamed {
            let name = |kind: &str| format!("transformer.{layer}.{to}.{kind}");
            line(&format!("{layer}.{from}.weight^T"), &name("weight"));
            line(&format!("{layer}.{from}.bias"), &name("bias"));
        }
        if prefix != "transformer." {
            let vectors = ["ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"];
            for name in vectors.map(|name| format!("{layer}.{name}")) {
                line(&name, &format!("transformer.{name}"));
            }
            for name in ["wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias"] {
                line(name, &format!("transformer.{name}"));
            }
        }
        text
    }

    fn aliases(&self) -> Vec<(String, String)> {
        match self.lm_head {
            Some(_) => vec![],
            None => vec![("lm_head.weight".into(), "transformer.wte.weight".into())],
        }
    }
}

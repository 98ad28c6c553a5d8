//! A model of the llama family by its sizes.

use crate::{
    Layout,
    model::{Block, Matrix, Middle, Model},
};
use anymesh_core::{
    DType, Error, Mesh, Result, Tensor,
    grad::checkpoint,
    ops::{
        AttentionOptions, NormOptions, RopeOptions, RopeStyle, cross_entropy::CrossEntropyOptions,
    },
};
use std::collections::BTreeMap;

/// Rms norms, rotary positions, grouped heads, a gated feed-forward layer, no biases; names as Hugging
/// Face has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Llama {
    /// Elements of the stream for each token.
    pub width: usize,
    /// Columns of the feed-forward layer.
    pub ffn: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head: usize,
    /// Layers.
    pub layers: usize,
    /// Tokens that there are; 0 for layers alone, without embedding and loss.
    pub vocabulary: usize,
    /// Tokens of a sequence.
    pub length: usize,
    /// Of parameters and activations.
    pub dtype: DType,
}

impl Llama {
    /// Reads a Hugging Face `config.json`.
    ///
    /// ```
    /// # use anymesh_layout::{Llama, Model};
    /// let text = r#"{"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    ///     "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256}"#;
    /// let model = Llama::from_config(text, 8192)?;
    /// let parameters: f64 = model.blocks().iter().map(|b| b.parameters()).sum();
    /// assert_eq!(parameters, 8_030_261_248.0);
    /// let error = Llama::from_config("{}", 8192).unwrap_err().to_string();
    /// assert!(error.contains("hidden_size"), "{error}");
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    pub fn from_config(text: &str, length: usize) -> Result<Self> {
        let wrong = |key: &str, expected: &str| Error::Parse {
            what: "config.json",
            text: key.into(),
            expected: expected.into(),
        };
        let config: serde_json::Value = serde_json::from_str(text)
            .map_err(|error| wrong("the file", &format!("JSON ({error})")))?;
        let optional = |key: &str| match &config[key] {
            serde_json::Value::Null => Ok(None),
            value => value
                .as_u64()
                .filter(|n| (1..=1 << 40).contains(n))
                .map(|n| Some(n as usize))
                .ok_or_else(|| wrong(&format!("{key}: {value}"), "a number above 0")),
        };
        let number =
            |key: &str| optional(key)?.ok_or_else(|| wrong(key, "a number under this key"));
        let (width, heads) = (number("hidden_size")?, number("num_attention_heads")?);
        let model = Self {
            width,
            ffn: number("intermediate_size")?,
            heads,
            kv_heads: optional("num_key_value_heads")?.unwrap_or(heads),
            head: optional("head_dim")?.unwrap_or(width / heads),
            layers: number("num_hidden_layers")?,
            vocabulary: number("vocab_size")?,
            length,
            dtype: DType::BF16,
        };
        if model.head == 0 || !model.head.is_multiple_of(2) || !heads.is_multiple_of(model.kv_heads)
        {
            return Err(wrong(
                &format!(
                    "{heads} heads of {}, {} key heads",
                    model.head, model.kv_heads
                ),
                "heads of an even size, and a number of key heads that divides that of heads",
            ));
        }
        Ok(model)
    }

    /// The parameters of a layer: names after the layer's, and shapes.
    fn layer(&self) -> Vec<(&'static str, Vec<usize>)> {
        let (q, kv) = (self.heads * self.head, self.kv_heads * self.head);
        vec![
            ("input_layernorm.weight", vec![self.width]),
            ("self_attn.q_proj.weight", vec![q, self.width]),
            ("self_attn.k_proj.weight", vec![kv, self.width]),
            ("self_attn.v_proj.weight", vec![kv, self.width]),
            ("self_attn.o_proj.weight", vec![self.width, q]),
            ("post_attention_layernorm.weight", vec![self.width]),
            ("mlp.gate_proj.weight", vec![self.ffn, self.width]),
            ("mlp.up_proj.weight", vec![self.ffn, self.width]),
            ("mlp.down_proj.weight", vec![self.width, self.ffn]),
        ]
    }

    /// Every parameter with its shape.
    pub fn parameters(&self) -> Vec<(String, Vec<usize>)> {
        let layers = (0..self.layers).flat_map(|i| {
            let named = move |(name, shape)| (format!("model.layers.{i}.{name}"), shape);
            self.layer().into_iter().map(named)
        });
        let mut all: Vec<_> = layers.collect();
        if self.vocabulary > 0 {
            let table = vec![self.vocabulary, self.width];
            all.insert(0, ("model.embed_tokens.weight".into(), table.clone()));
            all.push(("model.norm.weight".into(), vec![self.width]));
            all.push(("lm_head.weight".into(), table));
        }
        all
    }
}

/// One layer: `p` has its parameters by their names after the layer's.
fn layer(model: &Llama, p: &BTreeMap<&str, Tensor>, x: &Tensor, layout: &Layout) -> Result<Tensor> {
    let settled = |x: Tensor| x.reshard(&layout.stream);
    let norm = |x: &Tensor, name: &str| x.rms_norm(&NormOptions::new().weight(&p[name]));
    let (batch, length) = (x.dims()[0], x.dims()[1]);
    let h = norm(x, "input_layernorm.weight")?;
    let (cos, sin) = Tensor::rope_tables(length, model.head, &RopeOptions::default(), x.mesh())?;
    let heads = |name: &str, heads: usize| {
        h.linear(&p[name], None)?
            .reshape([batch, length, heads, model.head])?
            .transpose(1, 2)
    };
    let turned = |x: Tensor| x.rope(&cos, &sin, RopeStyle::Half);
    let q = turned(heads("self_attn.q_proj.weight", model.heads)?)?;
    let k = turned(heads("self_attn.k_proj.weight", model.kv_heads)?)?;
    let v = heads("self_attn.v_proj.weight", model.kv_heads)?;
    let seen = q.attention(&k, &v, &AttentionOptions::causal())?.out;
    let seen = seen
        .transpose(1, 2)?
        .reshape([batch, length, model.heads * model.head])?;
    let x = settled(x.add(&seen.linear(&p["self_attn.o_proj.weight"], None)?)?)?;
    let h = norm(&x, "post_attention_layernorm.weight")?;
    let wide = h
        .linear(&p["mlp.gate_proj.weight"], None)?
        .swiglu2(&h.linear(&p["mlp.up_proj.weight"], None)?)?;
    settled(x.add(&wide.linear(&p["mlp.down_proj.weight"], None)?)?)
}

impl Model for Llama {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn width(&self) -> usize {
        self.width
    }

    fn length(&self) -> usize {
        self.length
    }

    fn blocks(&self) -> Vec<Block> {
        let shapes: BTreeMap<_, _> = self.layer().into_iter().collect();
        let matrix = |name: &str| {
            let shape = &shapes[name];
            Matrix::new(&format!("model.layers.*.{name}"), shape[0], shape[1])
        };
        let vector = |name: &str| (format!("model.layers.*.{name}"), self.width);
        let (q, kv) = (
            (self.heads * self.head) as f64,
            (self.kv_heads * self.head) as f64,
        );
        let ffn = self.ffn as f64;
        let attention = Block {
            name: "attention".into(),
            count: self.layers,
            reads: ["q_proj", "k_proj", "v_proj"]
                .map(|name| matrix(&format!("self_attn.{name}.weight")))
                .into(),
            middle: Middle {
                units: self.kv_heads,
                mixes_tokens: true,
                // Scores and their product with v, for half of the pairs.
                products: 2.0 * (self.length as f64 + 1.0) * q,
                kept: 2.0 * q + 2.0 * kv,
                // Rope reads and writes q and k, attention reads q, k, v and writes one; backward
                // the gradients too.
                touched: 10.0 * q + 12.0 * kv,
                statistics: 0.0,
            },
            writes: Some(matrix("self_attn.o_proj.weight")),
            vectors: vec![vector("input_layernorm.weight")],
            // The norm, the sum, and their gradients.
            touched: 12.0,
            kept: 1.0,
        };
        let mlp = Block {
            name: "mlp".into(),
            count: self.layers,
            reads: ["gate_proj", "up_proj"]
                .map(|name| matrix(&format!("mlp.{name}.weight")))
                .into(),
            middle: Middle {
                units: self.ffn,
                kept: 3.0 * ffn,
                touched: 8.0 * ffn,
                ..Middle::default()
            },
            writes: Some(matrix("mlp.down_proj.weight")),
            vectors: vec![vector("post_attention_layernorm.weight")],
            touched: 12.0,
            kept: 1.0,
        };
        if self.vocabulary == 0 {
            return vec![attention, mlp];
        }
        let v = self.vocabulary as f64;
        let embedding = Block {
            name: "embedding".into(),
            count: 1,
            reads: vec![Matrix {
                name: "model.embed_tokens.weight".into(),
                inputs: self.vocabulary,
                outputs: self.width,
                lookup: true,
            }],
            middle: Middle::default(),
            writes: None,
            vectors: vec![],
            touched: 0.0,
            kept: 0.0,
        };
        let head = Block {
            name: "head".into(),
            count: 1,
            reads: vec![Matrix::new("lm_head.weight", self.vocabulary, self.width)],
            middle: Middle {
                units: self.vocabulary,
                kept: v,
                // The loss reads the logits, its gradient reads and writes them.
                touched: 4.0 * v,
                // The largest, the target's, the sum.
                statistics: 3.0,
                ..Middle::default()
            },
            writes: None,
            vectors: vec![("model.norm.weight".into(), self.width)],
            touched: 6.0,
            kept: 1.0,
        };
        vec![embedding, attention, mlp, head]
    }

    fn step(&self, mesh: &Mesh, layout: &Layout, sequences: usize) -> Result<()> {
        let mut parameters = BTreeMap::new();
        for (name, shape) in self.parameters() {
            let sharding = layout.sharding_of(&name, shape.len());
            let value = Tensor::zeros(shape, self.dtype, (mesh, &sharding))?;
            parameters.insert(name, value.require_grad()?);
        }
        let tokens = || {
            Tensor::zeros(
                [sequences, self.length],
                DType::I32,
                (mesh, &layout.stream_of(2)),
            )
        };
        let mut x = match parameters.get("model.embed_tokens.weight") {
            Some(table) => table.embedding(&tokens()?)?.reshard(&layout.stream)?,
            None => {
                let dims = [sequences, self.length, self.width];
                Tensor::zeros(dims, self.dtype, (mesh, &layout.stream))?.require_grad()?
            }
        };
        let first = x.clone();
        for i in 0..self.layers {
            let of_layer = |(name, _): (&'static str, _)| {
                (
                    name,
                    parameters[&format!("model.layers.{i}.{name}")].clone(),
                )
            };
            let p: BTreeMap<&'static str, Tensor> =
                self.layer().into_iter().map(of_layer).collect();
            x = if layout.recompute {
                let (model, layout) = (self.clone(), layout.clone());
                let run = move |x: &[Tensor]| Ok(vec![layer(&model, &p, &x[0], &layout)?]);
                checkpoint(run, &[&x])?.remove(0)
            } else {
                layer(self, &p, &x, layout)?
            };
        }
        let gradients = match parameters.get("lm_head.weight") {
            Some(head) => {
                let norm = NormOptions::new().weight(&parameters["model.norm.weight"]);
                let logits = x.rms_norm(&norm)?.linear(head, None)?.transpose(1, 2)?;
                let loss = logits.cross_entropy(&tokens()?, &CrossEntropyOptions::default())?;
                drop((x, logits));
                loss.backward()?
            }
            None => {
                let seed = Tensor::zeros(x.dims().to_vec(), self.dtype, (mesh, &layout.stream))?;
                let gradients = x.backward_with(&seed)?;
                gradients.of(&first)?;
                gradients
            }
        };
        let mut kept = vec![];
        for parameter in parameters.values() {
            kept.push(gradients.of(parameter)?);
        }
        Ok(())
    }
}

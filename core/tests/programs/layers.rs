//! Layers of known models in the public API, for any mesh and any cut of their weights.

use anymesh_core::{
    DType, Mesh, Result, Tensor,
    ops::{AttentionOptions, NormOptions, RopeOptions, RopeStyle},
};

/// Parameters by name.
#[derive(Clone)]
pub(crate) struct Parameters(pub(crate) Vec<(String, Tensor)>);

impl Parameters {
    #[track_caller]
    pub(crate) fn get(&self, name: &str) -> &Tensor {
        let found = self.0.iter().find(|(n, _)| n == name);
        &found.unwrap_or_else(|| panic!("no parameter {name}")).1
    }

    /// Those that have gradients.
    pub(crate) fn trained(&self) -> impl Iterator<Item = &Tensor> {
        let all = self.0.iter().map(|(_, w)| w);
        all.filter(|w| w.requires_grad())
    }
}

/// How a model's tensors lie: shardings by name, whole where there is none.
pub(crate) type Layout = [(&'static str, &'static str)];

/// The sharding of a tensor by its name.
pub(crate) fn sharding_of(layout: &Layout, name: &str, rank: usize) -> String {
    match layout.iter().find(|(n, _)| *n == name) {
        Some((_, sharding)) => sharding.to_string(),
        None => format!("[{}]", vec!["_"; rank].join(", ")),
    }
}

/// What is done with the residual stream after each addition to it.
pub(crate) type Settle<'a> = &'a dyn Fn(Tensor) -> Result<Tensor>;

/// A layer: its parameters with their shapes, and the function.
pub(crate) trait Layer {
    fn shapes(&self) -> Vec<(&'static str, Vec<usize>)>;
    fn forward(&self, p: &Parameters, x: &Tensor, settle: Settle<'_>) -> Result<Tensor>;

    /// Elements of all matrices.
    fn matrices(&self) -> usize {
        let shapes = self.shapes().into_iter();
        let matrices = shapes.filter(|(_, shape)| shape.len() > 1);
        matrices.map(|(_, s)| s.iter().product::<usize>()).sum()
    }
}

/// Parameters without values, for the device without memory.
pub(crate) fn zeros(
    layer: &dyn Layer,
    mesh: &Mesh,
    layout: &Layout,
    dtype: DType,
    trained: impl Fn(&str) -> bool,
) -> Result<Parameters> {
    let make = |(name, shape): (&'static str, Vec<usize>)| {
        let sharding = sharding_of(layout, name, shape.len());
        let value = Tensor::zeros(shape, dtype, (mesh, &sharding))?;
        let value = if trained(name) {
            value.require_grad()?
        } else {
            value
        };
        Ok((name.to_string(), value))
    };
    layer
        .shapes()
        .into_iter()
        .map(make)
        .collect::<Result<_>>()
        .map(Parameters)
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) width: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    /// Of each head.
    pub(crate) d: usize,
    pub(crate) ffn: usize,
}

/// `[b, s, heads * d]` as `[b, heads, s, d]`.
pub(crate) fn heads_of(x: &Tensor, heads: usize) -> Result<Tensor> {
    let [b, s, n] = x.dims() else {
        unreachable!("batch, positions, features")
    };
    x.reshape([*b, *s, heads, n / heads])?.transpose(1, 2)
}

/// `[b, heads, s, d]` as `[b, s, heads * d]`.
pub(crate) fn joined(x: &Tensor) -> Result<Tensor> {
    let [b, h, s, d] = x.dims() else {
        unreachable!("batch, heads, positions, features")
    };
    x.transpose(1, 2)?.reshape([*b, *s, h * d])
}

/// GPT: layer norms, one product for queries, keys and values, biases, gelu.
pub(crate) struct Gpt(pub(crate) Sizes);

impl Layer for Gpt {
    fn shapes(&self) -> Vec<(&'static str, Vec<usize>)> {
        let Sizes {
            width,
            heads,
            d,
            ffn,
            ..
        } = self.0;
        vec![
            ("norm1", vec![width]),
            ("shift1", vec![width]),
            ("qkv", vec![heads * 3 * d, width]),
            ("qkv_bias", vec![heads * 3 * d]),
            ("out", vec![width, heads * d]),
            ("out_bias", vec![width]),
            ("norm2", vec![width]),
            ("shift2", vec![width]),
            ("up", vec![ffn, width]),
            ("up_bias", vec![ffn]),
            ("down", vec![width, ffn]),
            ("down_bias", vec![width]),
        ]
    }

    fn forward(&self, p: &Parameters, x: &Tensor, settle: Settle<'_>) -> Result<Tensor> {
        let Sizes { heads, d, .. } = self.0;
        let norm = |x: &Tensor, weight: &str, bias: &str| {
            x.layer_norm(&NormOptions::new().weight(p.get(weight)).bias(p.get(bias)))
        };
        let (b, s) = (x.dims()[0], x.dims()[1]);
        let qkv = norm(x, "norm1", "shift1")?
            .linear(p.get("qkv"), Some(p.get("qkv_bias")))?
            .reshape([b, s, heads, 3, d])?
            .unbind(3)?;
        let [q, k, v] = [0, 1, 2].map(|i| qkv[i].transpose(1, 2));
        let seen = q?.attention(&k?, &v?, &AttentionOptions::causal())?.out;
        let x = settle(x.add(&joined(&seen)?.linear(p.get("out"), Some(p.get("out_bias")))?)?)?;
        let wide = norm(&x, "norm2", "shift2")?
            .linear(p.get("up"), Some(p.get("up_bias")))?
            .gelu()?;
        settle(x.add(&wide.linear(p.get("down"), Some(p.get("down_bias")))?)?)
    }
}

/// Llama: rms norms, separate products, rotary positions, swiglu, no biases.
pub(crate) struct Llama(pub(crate) Sizes);

impl Layer for Llama {
    fn shapes(&self) -> Vec<(&'static str, Vec<usize>)> {
        let Sizes {
            width,
            heads,
            kv_heads,
            d,
            ffn,
        } = self.0;
        vec![
            ("norm1", vec![width]),
            ("wq", vec![heads * d, width]),
            ("wk", vec![kv_heads * d, width]),
            ("wv", vec![kv_heads * d, width]),
            ("wo", vec![width, heads * d]),
            ("norm2", vec![width]),
            ("gate", vec![ffn, width]),
            ("up", vec![ffn, width]),
            ("down", vec![width, ffn]),
        ]
    }

    fn forward(&self, p: &Parameters, x: &Tensor, settle: Settle<'_>) -> Result<Tensor> {
        let Sizes {
            heads, kv_heads, d, ..
        } = self.0;
        let seen = {
            let h = x.rms_norm(&NormOptions::new().weight(p.get("norm1")))?;
            let tables = RopeOptions::default();
            let (cos, sin) = Tensor::rope_tables(x.dims()[1], d, &tables, x.mesh())?;
            let [q, k, v] = [("wq", heads), ("wk", kv_heads), ("wv", kv_heads)]
                .map(|(w, heads)| heads_of(&h.linear(p.get(w), None)?, heads));
            let turn = |x: Tensor| x.rope(&cos, &sin, RopeStyle::Half);
            turn(q?)?
                .attention(&turn(k?)?, &v?, &AttentionOptions::causal())?
                .out
        };
        let x = settle(x.add(&joined(&seen)?.linear(p.get("wo"), None)?)?)?;
        let gated = {
            let h = x.rms_norm(&NormOptions::new().weight(p.get("norm2")))?;
            h.linear(p.get("gate"), None)?
                .swiglu2(&h.linear(p.get("up"), None)?)?
        };
        settle(x.add(&gated.linear(p.get("down"), None)?)?)
    }
}

/// [`Llama`] with one op for the products that read the same input.
pub(crate) struct LlamaEach(pub(crate) Sizes);

impl Layer for LlamaEach {
    fn shapes(&self) -> Vec<(&'static str, Vec<usize>)> {
        Llama(self.0).shapes()
    }

    fn forward(&self, p: &Parameters, x: &Tensor, settle: Settle<'_>) -> Result<Tensor> {
        let Sizes {
            heads, kv_heads, d, ..
        } = self.0;
        let of = |names: &[&str], x: &Tensor| {
            let weights: Vec<_> = names.iter().map(|w| (p.get(w), None)).collect();
            x.linear_each(&weights)
        };
        let seen = {
            let h = x.rms_norm(&NormOptions::new().weight(p.get("norm1")))?;
            let tables = RopeOptions::default();
            let (cos, sin) = Tensor::rope_tables(x.dims()[1], d, &tables, x.mesh())?;
            let qkv = of(&["wq", "wk", "wv"], &h)?;
            let turn = |x: Tensor| x.rope(&cos, &sin, RopeStyle::Half);
            let (q, k) = (heads_of(&qkv[0], heads)?, heads_of(&qkv[1], kv_heads)?);
            let v = heads_of(&qkv[2], kv_heads)?;
            turn(q)?
                .attention(&turn(k)?, &v, &AttentionOptions::causal())?
                .out
        };
        let x = settle(x.add(&joined(&seen)?.linear(p.get("wo"), None)?)?)?;
        let gated = {
            let h = x.rms_norm(&NormOptions::new().weight(p.get("norm2")))?;
            let both = of(&["gate", "up"], &h)?;
            both[0].swiglu2(&both[1])?
        };
        settle(x.add(&gated.linear(p.get("down"), None)?)?)
    }
}

/// Attention whose weights have a dimension for heads.
pub(crate) struct UnevenHeads(pub(crate) Sizes);

impl Layer for UnevenHeads {
    fn shapes(&self) -> Vec<(&'static str, Vec<usize>)> {
        let Sizes {
            width, heads, d, ..
        } = self.0;
        vec![
            ("norm", vec![width]),
            ("wq", vec![heads, d, width]),
            ("wk", vec![heads, d, width]),
            ("wv", vec![heads, d, width]),
            ("wo", vec![width, heads, d]),
        ]
    }

    fn forward(&self, p: &Parameters, x: &Tensor, settle: Settle<'_>) -> Result<Tensor> {
        let h = x.rms_norm(&NormOptions::new().weight(p.get("norm")))?;
        let [q, k, v] =
            ["wq", "wk", "wv"].map(|w| Tensor::einsum("bsi,hdi->bhsd", &[&h, p.get(w)]));
        let seen = q?.attention(&k?, &v?, &AttentionOptions::causal())?.out;
        settle(x.add(&Tensor::einsum("bhsd,ohd->bso", &[&seen, p.get("wo")])?)?)
    }
}

/// Weights as Megatron cuts them: the first product of a pair by its outputs, the second by its
/// inputs.
pub(crate) const MEGATRON: &Layout = &[
    ("qkv", "[@tp, _]"),
    ("qkv_bias", "[@tp]"),
    ("out", "[_, @tp]"),
    ("wq", "[@tp, _]"),
    ("wk", "[@tp, _]"),
    ("wv", "[@tp, _]"),
    ("wo", "[_, @tp]"),
    ("gate", "[@tp, _]"),
    ("up", "[@tp, _]"),
    ("up_bias", "[@tp]"),
    ("down", "[_, @tp]"),
];

/// The same, with the other dimension of each matrix cut over dp and gathered for use.
pub(crate) const MEGATRON_OVER_DP: &Layout = &[
    ("qkv", "[@tp, @dp]"),
    ("qkv_bias", "[@tp]"),
    ("out", "[@dp, @tp]"),
    ("wq", "[@tp, @dp]"),
    ("wk", "[@tp, @dp]"),
    ("wv", "[@tp, @dp]"),
    ("wo", "[@dp, @tp]"),
    ("gate", "[@tp, @dp]"),
    ("up", "[@tp, @dp]"),
    ("up_bias", "[@tp]"),
    ("down", "[@dp, @tp]"),
];

/// Every matrix cut over dp alone.
pub(crate) const FULLY_SHARDED: &Layout = &[
    ("qkv", "[@dp, _]"),
    ("out", "[@dp, _]"),
    ("wq", "[@dp, _]"),
    ("wk", "[@dp, _]"),
    ("wv", "[@dp, _]"),
    ("wo", "[@dp, _]"),
    ("gate", "[@dp, _]"),
    ("up", "[@dp, _]"),
    ("down", "[@dp, _]"),
];

//! Attention.

use super::context::{self, ContextAttention};
use crate::{
    Build, Error, Init, Module, Result,
    nn::{Linear, RmsNorm},
};
use anymesh_core::{
    DType, Sharding, Tensor,
    ops::{AttentionOptions, Rng, RopeStyle, SequenceOrder},
};

/// How many heads there are, and how large they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Heads of queries.
    pub queries: usize,
    /// Heads of keys and values, each read by an equal number of query heads.
    pub keys: usize,
    /// The size of a head.
    pub size: usize,
}

impl Heads {
    /// As many heads of keys as of queries, `width` values in all.
    pub fn of(width: usize, heads: usize) -> Result<Self> {
        if heads == 0 || !width.is_multiple_of(heads) {
            let detail = format!("{width} values do not divide into {heads} heads");
            return Err(Error::config("heads", detail));
        }
        Ok(Self {
            queries: heads,
            keys: heads,
            size: width / heads,
        })
    }
}

/// What queries see, and where they are.
#[derive(Clone, Debug, Default)]
pub struct Attend {
    /// Each query sees the keys up to its own position.
    pub causal: bool,
    /// Cosines and sines to rotate queries and keys by, and in which style.
    pub rope: Option<(Tensor, Tensor, RopeStyle)>,
    /// Broadcasts to `[b, heads, s, t]`; a bool says which keys are seen.
    pub mask: Option<Tensor>,
    /// The document of each position, `[b, s]`: positions see those of their own. Unlike a
    /// [mask](same_document) it needs no memory for pairs of positions, and no time for those of
    /// different documents.
    pub documents: Option<Tensor>,
    /// The order that the sequence is in.
    pub order: SequenceOrder,
    /// How attention looks along a sequence that is cut over `cp`.
    pub context: ContextAttention,
    /// The share of attention that is dropped in training, and the key of what is dropped. With it
    /// the scores of all pairs are kept for the backward pass.
    pub dropout: Option<(f64, Rng)>,
}

/// The keys `[b, heads, t, d]` and values of the positions so far. They lie as the heads do: a cache
/// is sharded like the model. Where heads of keys do not divide evenly over the ranks, every rank
/// has all of them, so that a step sends its own keys and not those of all steps before it.
#[derive(Clone, Debug, Default)]
pub struct Cache {
    kept: Option<(Tensor, Tensor)>,
}

impl Cache {
    /// How many positions there are.
    pub fn len(&self) -> usize {
        self.kept.as_ref().map_or(0, |(k, _)| k.dims()[2])
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.kept.is_none()
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.kept = None;
    }

    /// Adds the next positions, and gives all of them.
    #[track_caller]
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let (k, v) = (k.reshard(even_heads(k))?, v.reshard(even_heads(v))?);
        let all = match self.kept.take() {
            None => (k, v),
            Some((before_k, before_v)) => (
                Tensor::concat(&[&before_k, &k], 2)?,
                Tensor::concat(&[&before_v, &v], 2)?,
            ),
        };
        self.kept = Some(all.clone());
        Ok(all)
    }
}

/// The sharding of `[b, heads, t, d]` without the cut of heads that do not divide by it.
fn even_heads(x: &Tensor) -> Sharding {
    let (mesh, sharding) = (x.mesh(), x.sharding());
    let parts: usize = sharding.axes_of(1).map(|axis| mesh.size(axis)).product();
    match x.dims()[1].is_multiple_of(parts) {
        true => sharding.clone(),
        false => sharding
            .axes_of(1)
            .fold(sharding.clone(), |s, axis| s.without(axis)),
    }
}

/// Attention of queries `[b, s, heads * size]` over keys and values of the same form, whose
/// projections are done and whose output projection is not: `[b, s, heads * size]`.
#[track_caller]
pub fn attend(
    [q, k, v]: [&Tensor; 3],
    heads: Heads,
    options: &Attend,
    cache: Option<&mut Cache>,
) -> Result<Tensor> {
    let split = |x: &Tensor, n: usize| -> Result<Tensor> {
        let (b, s) = (x.dims()[0], x.dims()[1]);
        Ok(x.reshape([b, s, n, heads.size])?.transpose(1, 2)?)
    };
    let (b, s) = (q.dims()[0], q.dims()[1]);
    let (mut q, mut k) = (split(q, heads.queries)?, split(k, heads.keys)?);
    let mut v = split(v, heads.keys)?;
    if let Some((cos, sin, style)) = &options.rope {
        q = q.rope(cos, sin, *style)?;
        k = k.rope(cos, sin, *style)?;
    }
    let long = context::is_cut(&q, 2) || options.order != SequenceOrder::Straight;
    if let Some(cache) = cache {
        if long {
            let detail = "keys and values are kept of whole sequences: give tokens that are not cut over cp, in straight order";
            return Err(Error::config("context", detail));
        }
        (k, v) = cache.append(&k, &v)?;
    }
    let out = match long {
        true => context::across([&q, &k, &v], heads, options)?,
        false => attend_whole([&q, &k, &v], options)?,
    };
    let width = heads.queries * heads.size;
    Ok(out.transpose(1, 2)?.reshape([b, s, width])?)
}

/// Attention of `[b, heads, s, size]` in straight order.
#[track_caller]
pub(super) fn attend_whole([q, k, v]: [&Tensor; 3], options: &Attend) -> Result<Tensor> {
    if let Some(dropout) = options.dropout {
        return with_dropout([q, k, v], &with_documents(options)?, dropout);
    }
    let documents = options.documents.as_ref();
    let seen = AttentionOptions {
        causal: options.causal,
        mask: options.mask.clone(),
        documents: documents.map(|own| [own.clone(), own.clone()]),
        scale: None,
    };
    Ok(q.attention(k, v, &seen)?.out)
}

/// The options with documents as a part of the mask.
#[track_caller]
fn with_documents(options: &Attend) -> Result<Attend> {
    let mut options = options.clone();
    if let Some(documents) = options.documents.take() {
        let same = same_document(&documents)?;
        options.mask = Some(match &options.mask {
            None => same,
            Some(mask) => mask.logical_and(&same)?,
        });
    }
    Ok(options)
}

/// Attention out of its parts, some of whose weights are dropped.
#[track_caller]
fn with_dropout(
    [q, k, v]: [&Tensor; 3],
    options: &Attend,
    (share, rng): (f64, Rng),
) -> Result<Tensor> {
    let (s, t, size) = (q.dims()[2], k.dims()[2], q.dims()[3]);
    let group = q.dims()[1] / k.dims()[1];
    let repeated = |x: &Tensor| match group {
        1 => Ok(x.clone()),
        n => x.repeat_interleave(n, 1),
    };
    let (k, v) = (repeated(k)?, repeated(v)?);
    let scores = q.matmul(&k.transpose(2, 3)?)?;
    let mut scores = scores.mul(1.0 / (size as f64).sqrt())?;
    let lowest = match scores.dtype() {
        DType::F16 => -6e4,
        _ => -1e30,
    };
    if options.causal {
        let seen = Tensor::causal_mask(s, t, (q.mesh(), Sharding::replicated()))?;
        scores = seen.where_(&scores, lowest)?;
    }
    match &options.mask {
        Some(mask) if mask.dtype() == DType::Bool => scores = mask.where_(&scores, lowest)?,
        Some(mask) => scores = scores.add(mask)?,
        None => {}
    }
    Ok(scores.softmax(-1)?.dropout(share, rng)?.matmul(&v)?)
}

/// The mask of packed documents: a position sees those of its own document. `documents` are ids
/// `[b, s]`; the mask is `[b, 1, s, s]`.
#[track_caller]
pub fn same_document(documents: &Tensor) -> Result<Tensor> {
    let rows = documents.unsqueeze(1)?.unsqueeze(3)?;
    let columns = documents.unsqueeze(1)?.unsqueeze(2)?;
    Ok(rows.eq(&columns)?)
}

/// Which projections of attention have a bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionBias {
    /// None has.
    #[default]
    None,
    /// Those to queries, keys and values.
    Inputs,
    /// All have.
    All,
}

/// Multi-head attention with separate projections, whose heads are cut over `tp`.
#[derive(Clone, Debug, Module)]
pub struct Attention {
    /// To queries.
    pub q_proj: Linear,
    /// To keys.
    pub k_proj: Linear,
    /// To values.
    pub v_proj: Linear,
    /// Back to the width.
    pub o_proj: Linear,
    /// Of each head of queries, where there is one.
    pub q_norm: Option<RmsNorm>,
    /// Of each head of keys, where there is one.
    pub k_norm: Option<RmsNorm>,
    #[skip]
    heads: Heads,
}

impl Attention {
    /// For vectors of `width` values; the projection back begins as `out` says.
    pub fn new(
        b: &Build,
        width: usize,
        heads: Heads,
        bias: AttentionBias,
        init: Init,
        out: Init,
    ) -> Result<Self> {
        let linear = |name: &str, sizes, sharding, init, bias: bool| -> Result<Linear> {
            let at = b.at(name);
            let linear = Linear::new(&at, sizes, sharding, init)?;
            match bias {
                true => linear.with_bias(&at),
                false => Ok(linear),
            }
        };
        let (queries, keys) = (heads.queries * heads.size, heads.keys * heads.size);
        let read = |name: &str, size: usize| {
            let biased = bias != AttentionBias::None;
            linear(name, [width, size], "[@tp?, _]", init, biased)
        };
        let biased = bias == AttentionBias::All;
        Ok(Self {
            q_proj: read("q_proj", queries)?,
            k_proj: read("k_proj", keys)?,
            v_proj: read("v_proj", keys)?,
            o_proj: linear("o_proj", [queries, width], "[_, @tp?]", out, biased)?,
            q_norm: None,
            k_norm: None,
            heads,
        })
    }

    /// With a norm of each head of queries and of keys, before they are rotated.
    pub fn with_head_norms(mut self, b: &Build, eps: f64) -> Result<Self> {
        let norm = |name| RmsNorm::new(&b.at(name), self.heads.size, eps);
        (self.q_norm, self.k_norm) = (Some(norm("q_norm")?), Some(norm("k_norm")?));
        Ok(self)
    }

    /// Heads `[b, s, heads * size]` through a norm of each.
    #[track_caller]
    fn normed(&self, x: &Tensor, norm: Option<&RmsNorm>) -> Result<Tensor> {
        let Some(norm) = norm else {
            return Ok(x.clone());
        };
        let (b, s, width, size) = (x.dims()[0], x.dims()[1], x.dims()[2], self.heads.size);
        let heads = norm.forward(&x.reshape([b, s, width / size, size])?)?;
        Ok(heads.reshape([b, s, width])?)
    }

    /// The layer's output for `[b, s, width]`, a partial sum where heads are cut.
    #[track_caller]
    pub fn forward(
        &self,
        x: &Tensor,
        options: &Attend,
        cache: Option<&mut Cache>,
    ) -> Result<Tensor> {
        let qkv = Linear::forward_each(x, &[&self.q_proj, &self.k_proj, &self.v_proj])?;
        let q = self.normed(&qkv[0], self.q_norm.as_ref())?;
        let k = self.normed(&qkv[1], self.k_norm.as_ref())?;
        let out = attend([&q, &k, &qkv[2]], self.heads, options, cache)?;
        self.o_proj.forward(&out)
    }
}

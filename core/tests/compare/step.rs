//! A step of training: a transformer block between an embedding and a classifier, forward and
//! backward, and AdamW. Every op has a line of its own and is called once a step, so that what is
//! named can be told from everything else.

use anymesh_core::{
    DType, Mesh, Result, Tensor,
    grad::{Gradients, checkpoint, custom, no_grad},
    ops::{AttentionOptions, CrossEntropyOptions, Expr, NormOptions, Rng, RopeOptions, RopeStyle},
    spmd,
};
use std::cell::Cell;

const BATCH: usize = 4;
const LENGTH: usize = 6;
const WIDTH: usize = 8;
const HEADS: usize = 4;
const HIDDEN: usize = 12;
const VOCABULARY: usize = 11;

/// Meshes of all kinds: some whose ranks divide nothing evenly.
pub(crate) const MESHES: [&str; 8] = [
    "dp=2",
    "tp=2",
    "dp=2, tp=2",
    "dp=3",
    "tp=3",
    "dp=4, tp=2",
    "tp=4",
    "dp=2, tp=3",
];

/// Where a program is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Makes parameters and data.
    Setup,
    /// In the forward pass of this step.
    Forward(u32),
    /// In the backward pass of this step.
    Backward(u32),
    /// At the update with this number, of all there are.
    Update(u32),
}

thread_local! {
    pub(crate) static PHASE: Cell<Phase> = const { Cell::new(Phase::Setup) };
}

/// How a step is run.
#[derive(Clone, Copy)]
pub(crate) struct Program<'a> {
    pub(crate) steps: u32,
    /// Computes the block again for the backward pass.
    pub(crate) recompute: bool,
    pub(crate) dtype: DType,
    /// The rules of the ops that the program brings itself.
    pub(crate) rules: [&'a str; 3],
}

/// What those rules are.
pub(crate) const RULES: [&str; 3] = [
    "...rc -> ...rc ; replicate c ; linear 0",
    "...rc, c -> ...rc",
    "...rc -> ...r ; reduce c sum",
];

impl Default for Program<'_> {
    fn default() -> Self {
        Self {
            steps: 2,
            recompute: false,
            dtype: DType::F32,
            rules: RULES,
        }
    }
}

const WEIGHTS: [(&str, &[usize], &str); 13] = [
    ("embedding", &[VOCABULARY, WIDTH], "[@tp?, _]"),
    ("norm 1", &[WIDTH], "[_]"),
    ("shift 1", &[WIDTH], "[_]"),
    ("q", &[WIDTH, WIDTH], "[@tp?, _]"),
    ("k", &[WIDTH, WIDTH], "[@tp?, _]"),
    ("v", &[WIDTH, WIDTH], "[@tp?, @dp?]"),
    ("o", &[WIDTH, WIDTH], "[_, @tp?]"),
    ("norm 2", &[WIDTH], "[@dp?]"),
    ("gate", &[HIDDEN, WIDTH], "[@tp?, _]"),
    ("up", &[HIDDEN, WIDTH], "[@tp?, _]"),
    ("down", &[WIDTH, HIDDEN], "[_, @tp?]"),
    ("bias", &[WIDTH], "[@tp?]"),
    ("head", &[VOCABULARY, WIDTH], "[@tp?, _]"),
];

/// How many parameters there are.
pub(crate) const PARAMETERS: u32 = WEIGHTS.len() as u32;

/// Rows that are centred: an op of the program's own, whose rule must keep rows whole.
fn centred(x: &Tensor, rule: &str) -> Result<Tensor> {
    let run = |rule: &str, x: &Tensor| {
        let centre = |x: &[Tensor]| Ok(vec![x[0].sub(&x[0].mean(&[-1], true)?)?]);
        Ok(spmd::apply("centred", rule, &[x], centre)?.remove(0))
    };
    let (forward, backward) = (rule.to_string(), rule.to_string());
    Ok(custom(
        "centred",
        &[x],
        move |x| Ok(vec![run(&forward, &x[0])?]),
        move |_, _, g| Ok(vec![Some(run(&backward, &g[0])?)]),
    )?
    .remove(0))
}

/// Columns that are scaled and squashed: an op of the program's own that is not linear.
fn squashed(x: &Tensor, by: &Tensor, rule: &str) -> Result<Tensor> {
    let rule = rule.to_string();
    let run = move |x: &[Tensor]| {
        let squash = |x: &[Tensor]| Ok(vec![x[0].mul(&x[1])?.tanh()?]);
        spmd::apply("squashed", &rule, &[&x[0], &x[1]], squash)
    };
    let by = by.detach();
    Ok(custom("squashed", &[x, &by], run, |x, y, g| {
        let slope = y[0].square()?.neg()?.add(1.0)?;
        Ok(vec![Some(slope.mul(&x[1])?.mul(&g[0])?), None])
    })?
    .remove(0))
}

/// The power of each row: an op of the program's own that adds up.
fn powers(x: &Tensor, rule: &str) -> Result<Tensor> {
    let rule = rule.to_string();
    let run = move |x: &[Tensor]| {
        let power = |x: &[Tensor]| Ok(vec![x[0].square()?.sum(&[-1], false)?]);
        spmd::apply("powers", &rule, &[&x[0]], power)
    };
    Ok(custom("powers", &[x], run, |x, _, g| {
        Ok(vec![Some(x[0].mul(2.0)?.mul(&g[0].unsqueeze(-1)?)?)])
    })?
    .remove(0))
}

fn block(p: &[Tensor], x: &Tensor, step: u32, rules: [&str; 3]) -> Result<Tensor> {
    let normed = x.layer_norm(&NormOptions::new().weight(&p[1]).bias(&p[2]))?;
    let q = normed.linear(&p[3], None)?;
    let k = normed.linear(&p[4], None)?;
    let v = normed.linear(&p[5], None)?;
    let q = q.reshape([BATCH, LENGTH, HEADS, WIDTH / HEADS])?;
    let k = k.reshape([BATCH, LENGTH, HEADS, WIDTH / HEADS])?;
    let v = v.reshape([BATCH, LENGTH, HEADS, WIDTH / HEADS])?;
    let q = q.transpose(1, 2)?;
    let k = k.transpose(1, 2)?;
    let v = v.transpose(1, 2)?;
    let options = RopeOptions {
        base: 100.0,
        ..Default::default()
    };
    let (cos, sin) = Tensor::rope_tables(LENGTH, WIDTH / HEADS, &options, x.mesh())?;
    let (cos, sin) = (cos.cast(x.dtype())?, sin.cast(x.dtype())?);
    let q = q.rope(&cos, &sin, RopeStyle::Half)?;
    let k = k.rope(&cos, &sin, RopeStyle::Half)?;
    let seen = q.attention(&k, &v, &AttentionOptions::causal())?.out;
    let seen = seen.transpose(1, 2)?;
    let seen = seen.reshape([BATCH, LENGTH, WIDTH])?;
    let mixed = seen.linear(&p[6], None)?;
    let mixed = centred(&mixed, rules[0])?;
    let x = mixed.dropout_add(x, 0.1, Rng::new(u64::from(step)))?;
    let x = x.reshard("[@dp?, _, _]")?;
    let normed = x.rms_norm(&NormOptions::new().weight(&p[7]))?;
    let gate = normed.linear(&p[8], None)?;
    let up = normed.linear(&p[9], None)?;
    let power = powers(&up, rules[2])?;
    let power = power.unsqueeze(-1)?;
    let power = power.mul(0.01)?;
    let gated = gate.swiglu2(&up)?;
    let down = gated.linear(&p[10], None)?;
    let down = squashed(&down, &p[11], rules[1])?;
    let down = down.add(&p[11])?;
    let down = down.add(&power)?;
    x.add(&down)
}

/// The loss of a batch.
fn loss(program: &Program<'_>, p: &[Tensor], tokens: &Tensor, step: u32) -> Result<Tensor> {
    let ids = tokens.narrow(1, 0, LENGTH)?;
    let x = p[0].embedding(&ids)?;
    let y = if program.recompute {
        let (p, rules) = (p.to_vec(), program.rules.map(String::from));
        let again = move |x: &[Tensor]| {
            let rules = [&rules[0][..], &rules[1], &rules[2]];
            Ok(vec![block(&p, &x[0], step, rules)?])
        };
        checkpoint(again, &[&x])?.remove(0)
    } else {
        block(p, &x, step, program.rules)?
    };
    let logits = y.linear(&p[12], None)?;
    let logits = logits.reshape([BATCH * LENGTH, VOCABULARY])?;
    let target = tokens.narrow(1, 1, LENGTH)?;
    let target = target.reshape([BATCH * LENGTH])?;
    let options = CrossEntropyOptions {
        label_smoothing: 0.05,
        ..Default::default()
    };
    let loss = logits.cross_entropy(&target, &options)?;
    let regular = y.softmax(-1)?;
    let regular = regular.square()?;
    let regular = regular.sum(&[], false)?;
    let regular = regular.mul(0.01)?;
    loss.add(&regular)
}

/// The new values of a parameter and its two averages.
fn adamw(w: &Tensor, g: &Tensor, m: &Tensor, v: &Tensor) -> Result<[Tensor; 3]> {
    let dtypes = [w.dtype(), m.dtype(), v.dtype()];
    Expr::new("adamw", &[w, g, m, v])
        .params(&[0.9, 0.1, 0.99, 0.01, 0.01, 0.001])
        .maps(dtypes, |a| {
            let (w, g) = (a.x[0], a.x[1]);
            let m = a.x[2] * a.p[0] + g * a.p[1];
            let v = a.x[3] * a.p[2] + g * g * a.p[3];
            let next = w - (m / (v.sqrt() + 1e-4) + w * a.p[5]) * a.p[4];
            [next, m, v]
        })
}

/// Trains, and gives the parameters at the end.
pub(crate) fn train(program: &Program<'_>, mesh: &Mesh) -> Result<Vec<Tensor>> {
    PHASE.set(Phase::Setup);
    let token = |at: &[usize]| ((at[0] * 5 + at[1] * 3 + at[0] * at[1]) % VOCABULARY) as i32;
    let tokens = Tensor::from_fn([BATCH, LENGTH + 1], (mesh, "[@dp?, _]"), token)?;
    let mut p = Vec::new();
    for (i, (name, shape, sharding)) in WEIGHTS.iter().enumerate() {
        let centre = if name.starts_with("norm") { 1.0 } else { 0.0 };
        let (place, rng) = ((mesh, *sharding), Rng::new(100 + i as u64));
        let w = Tensor::normal(shape.to_vec(), centre, 0.5, DType::F32, place, rng)?;
        p.push(w.cast(program.dtype)?.require_grad()?);
    }
    let zeros = |w: &Tensor| Tensor::zeros(w.shape(), DType::F32, w);
    let mut m = p.iter().map(zeros).collect::<Result<Vec<_>>>()?;
    let mut v = p.iter().map(zeros).collect::<Result<Vec<_>>>()?;
    for step in 0..program.steps {
        PHASE.set(Phase::Forward(step));
        let loss = loss(program, &p, &tokens, step)?;
        PHASE.set(Phase::Backward(step));
        let gradients: Gradients = loss.backward()?;
        for i in 0..p.len() {
            PHASE.set(Phase::Backward(step));
            let g = gradients.of(&p[i])?;
            PHASE.set(Phase::Update(step * PARAMETERS + i as u32));
            let [w, next_m, next_v] = no_grad(|| adamw(&p[i], &g, &m[i], &v[i]))?;
            p[i] = p[i].with_values(&w)?;
            (m[i], v[i]) = (next_m, next_v);
        }
    }
    Ok(p)
}

//! A step of a small transformer: what is compared where nothing else is given.

use anymesh::{
    DType, Mesh, Result, Tensor,
    grad::no_grad,
    ops::{AttentionOptions, CrossEntropyOptions, Expr, NormOptions, Rng},
};

const BATCH: usize = 4;
const LENGTH: usize = 16;
const WIDTH: usize = 32;
const HEADS: usize = 4;
const VOCABULARY: usize = 64;

const WEIGHTS: [(&[usize], &str); 10] = [
    (&[VOCABULARY, WIDTH], "[@tp?, _]"),
    (&[WIDTH], "[_]"),
    (&[WIDTH, WIDTH], "[@tp?, _]"),
    (&[WIDTH, WIDTH], "[@tp?, _]"),
    (&[WIDTH, WIDTH], "[@tp?, _]"),
    (&[WIDTH, WIDTH], "[_, @tp?]"),
    (&[WIDTH], "[_]"),
    (&[4 * WIDTH, WIDTH], "[@tp?, _]"),
    (&[WIDTH, 4 * WIDTH], "[_, @tp?]"),
    (&[VOCABULARY, WIDTH], "[@tp?, _]"),
];

fn loss(p: &[Tensor], tokens: &Tensor) -> Result<Tensor> {
    let x = p[0].embedding(&tokens.narrow(1, 0, LENGTH)?)?;
    let normed = x.rms_norm(&NormOptions::new().weight(&p[1]))?;
    let heads = [BATCH, LENGTH, HEADS, WIDTH / HEADS];
    let q = normed
        .linear(&p[2], None)?
        .reshape(heads)?
        .transpose(1, 2)?;
    let k = normed
        .linear(&p[3], None)?
        .reshape(heads)?
        .transpose(1, 2)?;
    let v = normed
        .linear(&p[4], None)?
        .reshape(heads)?
        .transpose(1, 2)?;
    let seen = q.attention(&k, &v, &AttentionOptions::causal())?.out;
    let seen = seen.transpose(1, 2)?.reshape([BATCH, LENGTH, WIDTH])?;
    let x = x.add(&seen.linear(&p[5], None)?)?;
    let normed = x.rms_norm(&NormOptions::new().weight(&p[6]))?;
    let hidden = normed.linear(&p[7], None)?.gelu()?;
    let x = x.add(&hidden.linear(&p[8], None)?)?;
    let logits = x.linear(&p[9], None)?;
    let logits = logits.reshape([BATCH * LENGTH, VOCABULARY])?;
    let target = tokens.narrow(1, 1, LENGTH)?.reshape([BATCH * LENGTH])?;
    logits.cross_entropy(&target, &CrossEntropyOptions::default())
}

/// A step of AdamW.
fn adamw(w: &Tensor, g: &Tensor, m: &Tensor, v: &Tensor) -> Result<[Tensor; 3]> {
    Expr::new("adamw", &[w, g, m, v])
        .params(&[0.9, 0.1, 0.95, 0.05, 0.01, 0.1])
        .maps([DType::F32; 3], |a| {
            let m = a.x[2] * a.p[0] + a.x[1] * a.p[1];
            let v = a.x[3] * a.p[2] + a.x[1] * a.x[1] * a.p[3];
            let step = m / (v.sqrt() + 1e-6) + a.x[0] * a.p[5];
            [a.x[0] - step * a.p[4], m, v]
        })
}

/// Trains for some steps.
pub(super) fn train(mesh: &Mesh, steps: u32) -> Result<()> {
    let token = |at: &[usize]| ((at[0] * 31 + at[1] * 7 + at[0] * at[1]) % VOCABULARY) as i32;
    let tokens = Tensor::from_fn([BATCH, LENGTH + 1], (mesh, "[@dp?, _]"), token)?;
    let mut p = vec![];
    for (i, (shape, sharding)) in WEIGHTS.iter().enumerate() {
        let (place, rng) = ((mesh, *sharding), Rng::new(i as u64));
        let w = match shape.len() {
            1 => Tensor::ones(shape.to_vec(), DType::F32, place)?,
            _ => Tensor::normal(shape.to_vec(), 0.0, 0.1, DType::F32, place, rng)?,
        };
        p.push(w.require_grad()?);
    }
    let zeros = |w: &Tensor| w.detach().zeros_like();
    let mut m = p.iter().map(zeros).collect::<Result<Vec<_>>>()?;
    let mut v = p.iter().map(zeros).collect::<Result<Vec<_>>>()?;
    for _ in 0..steps {
        let gradients = loss(&p, &tokens)?.backward()?;
        for i in 0..p.len() {
            let g = gradients.of(&p[i])?;
            let next = no_grad(|| adamw(&p[i], &g, &m[i], &v[i]))?;
            let [w, next_m, next_v] = next;
            (p[i], m[i], v[i]) = (p[i].with_values(&w)?, next_m, next_v);
        }
    }
    Ok(())
}

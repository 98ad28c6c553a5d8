//! A small transformer block between an embedding and a classifier over the vocabulary.

use super::{Layout, Parameters, STEPS, same_losses, same_over_processes, weights};
use anymesh_core::{
    DType, Result, Tensor,
    grad::checkpoint,
    ops::{AttentionOptions, CrossEntropyOptions, NormOptions, Rng, RopeOptions, RopeStyle},
};

const BATCH: usize = 4;
const LENGTH: usize = 6;
const WIDTH: usize = 8;
const HEADS: usize = 4;
const VOCABULARY: usize = 11;

fn block(p: &Parameters, x: &Tensor, step: usize) -> Result<Tensor> {
    let h = x.layer_norm(&NormOptions::new().weight(p.get("n1")).bias(p.get("c1")))?;
    let heads = |w: &str| {
        h.linear(p.get(w), None)?
            .reshape([BATCH, LENGTH, HEADS, WIDTH / HEADS])?
            .transpose(1, 2)
    };
    let (cos, sin) = Tensor::rope_tables(
        LENGTH,
        WIDTH / HEADS,
        &RopeOptions {
            base: 100.0,
            ..Default::default()
        },
        x.mesh(),
    )?;
    let turned = |w: &str| heads(w)?.rope(&cos, &sin, RopeStyle::Half);
    let seen = turned("wq")?
        .attention(
            &turned("wk")?,
            &heads("wv")?,
            &AttentionOptions {
                causal: true,
                ..Default::default()
            },
        )?
        .out;
    let mixed = seen
        .transpose(1, 2)?
        .reshape([BATCH, LENGTH, WIDTH])?
        .linear(p.get("wo"), None)?;
    let x = mixed.dropout_add(x, 0.1, Rng::new(step as u64))?;
    let h = x.rms_norm(&NormOptions::new().weight(p.get("n2")))?;
    let gated = h
        .linear(p.get("gate"), None)?
        .swiglu2(&h.linear(p.get("up"), None)?)?;
    x.add(&gated.linear(p.get("down"), None)?)
}

fn train(layout: &Layout<'_>, recompute: bool) -> Result<Vec<f64>> {
    let device = anymesh_backend_cpu::device();
    let token = |at: &[usize]| ((at[0] * 5 + at[1] * 3 + at[0] * at[1]) % VOCABULARY) as i32;
    let tokens = layout.place(
        "tokens",
        Tensor::from_fn([BATCH, LENGTH + 1], &device, token)?,
    )?;
    let (w, hidden) = (WIDTH, 2 * WIDTH);
    let shapes: [(&'static str, Vec<usize>, f64); 12] = [
        ("embedding", vec![VOCABULARY, w], 1.0),
        ("n1", vec![w], 1.0),
        ("c1", vec![w], 0.1),
        ("wq", vec![w, w], 1.0),
        ("wk", vec![w, w], 1.0),
        ("wv", vec![w, w], 1.0),
        ("wo", vec![w, w], 1.0),
        ("n2", vec![w], 1.0),
        ("gate", vec![hidden, w], 1.0),
        ("up", vec![hidden, w], 1.0),
        ("down", vec![w, hidden], 1.0),
        ("head", vec![VOCABULARY, w], 1.0),
    ];
    let make = |(i, (name, shape, scale)): (usize, (&'static str, Vec<usize>, f64))| {
        let value = weights(&shape, 20 + i, scale * 0.6)?;
        let value = if name.starts_with('n') {
            value.add(1.0)?
        } else {
            value
        };
        Ok((name, layout.place(name, value)?.require_grad()?))
    };
    let mut p = Parameters(
        shapes
            .into_iter()
            .enumerate()
            .map(make)
            .collect::<Result<_>>()?,
    );
    let mut losses = vec![];
    for step in 0..layout.steps {
        let x = p
            .get("embedding")
            .embedding(&tokens.narrow(1, 0, LENGTH)?)?;
        let y = if recompute {
            let captured = Parameters(p.0.clone());
            checkpoint(move |x| Ok(vec![block(&captured, &x[0], step)?]), &[&x])?.remove(0)
        } else {
            block(&p, &x, step)?
        };
        let logits = y
            .linear(p.get("head"), None)?
            .reshape([BATCH * LENGTH, VOCABULARY])?;
        let target = tokens
            .narrow(1, 1, LENGTH)?
            .reshape([BATCH * LENGTH])?
            .cast(DType::I32)?;
        let loss = logits.cross_entropy(
            &target,
            &CrossEntropyOptions {
                label_smoothing: 0.05,
                ..Default::default()
            },
        )?;
        losses.push(loss.item()?.to_f64());
        p.step(&loss, 0.05)?;
    }
    Ok(losses)
}

const TENSOR: &[(&str, &str)] = &[
    ("embedding", "[@tp, _]"),
    ("wq", "[@tp, _]"),
    ("wk", "[@tp, _]"),
    ("wv", "[@tp, _]"),
    ("wo", "[_, @tp]"),
    ("gate", "[@tp, _]"),
    ("up", "[@tp, _]"),
    ("down", "[_, @tp]"),
    ("head", "[@tp, _]"),
];

#[test]
fn a_transformer_block_trains_alike_on_every_layout() -> Result<()> {
    let mixed: Vec<(&str, &str)> = TENSOR
        .iter()
        .copied()
        .chain([("tokens", "[@dp, _]")])
        .collect();
    // Parameters cut over both axes and gathered for use.
    let zero: &[(&str, &str)] = &[
        ("tokens", "[@dp@tp, _]"),
        ("embedding", "[@dp@tp, _]"),
        ("gate", "[@dp, @tp]"),
        ("down", "[@tp, @dp]"),
        ("n1", "[@dp]"),
    ];
    let layouts: [(&str, &[(&str, &str)]); 4] = [
        ("batch", &[("tokens", "[@dp@tp, _]")]),
        ("tensor", TENSOR),
        ("mixed", &mixed),
        ("sharded parameters", zero),
    ];
    same_losses(|layout| train(layout, false), &layouts)?;
    same_over_processes(|layout| train(layout, false), &layouts)?;
    // Passes inside of passes.
    same_over_processes(|layout| train(layout, true), &layouts[3..])
}

#[test]
fn recompute_changes_no_bit_of_the_losses() -> Result<()> {
    let layout = Layout {
        mesh: None,
        shardings: &[],
        steps: STEPS,
    };
    assert_eq!(train(&layout, true)?, train(&layout, false)?);
    Ok(())
}

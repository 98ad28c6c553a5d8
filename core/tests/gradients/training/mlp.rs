//! A three-layer perceptron.

use super::{Layout, Parameters, same_losses, same_over_processes, weights};
use anymesh_core::{Result, Tensor, ops::LossReduction};

fn train(layout: &Layout<'_>) -> Result<Vec<f64>> {
    // Sizes that the mesh does not divide, too.
    let (batch, inputs, hidden, outputs) = (10, 6, 9, 3);
    let x = layout.place("x", weights(&[batch, inputs], 1, 2.0)?)?;
    let target = layout.place("target", weights(&[batch, outputs], 2, 2.0)?)?;
    let shapes: [(&'static str, Vec<usize>, f64); 6] = [
        ("w1", vec![hidden, inputs], 1.0),
        ("b1", vec![hidden], 0.1),
        ("w2", vec![hidden, hidden], 1.0),
        ("b2", vec![hidden], 0.1),
        ("w3", vec![outputs, hidden], 1.0),
        ("b3", vec![outputs], 0.1),
    ];
    let make = |(i, (name, shape, scale)): (usize, (&'static str, Vec<usize>, f64))| {
        Ok((
            name,
            layout
                .place(name, weights(&shape, 10 + i, scale)?)?
                .require_grad()?,
        ))
    };
    let mut p = Parameters(
        shapes
            .into_iter()
            .enumerate()
            .map(make)
            .collect::<Result<_>>()?,
    );
    let mut losses = vec![];
    for _ in 0..layout.steps {
        let layer = |x: &Tensor, w: &str, b: &str| x.linear(p.get(w), Some(p.get(b)));
        let h = layer(&x, "w1", "b1")?.tanh()?;
        let h = layer(&h, "w2", "b2")?.gelu()?;
        let loss = layer(&h, "w3", "b3")?.mse_loss(&target, LossReduction::Mean)?;
        losses.push(loss.item()?.to_f64());
        p.step(&loss, 0.5)?;
    }
    Ok(losses)
}

#[test]
fn a_perceptron_trains_alike_on_every_layout() -> Result<()> {
    let batch: &[_] = &[("x", "[@dp@tp, _]"), ("target", "[@dp@tp, _]")];
    let tensor: &[_] = &[
        ("w1", "[@tp, _]"),
        ("b1", "[@tp]"),
        ("w2", "[_, @tp]"),
        ("w3", "[@dp, @tp]"),
        ("b3", "[@dp]"),
    ];
    let mixed: &[_] = &[
        ("x", "[@dp, _]"),
        ("target", "[@dp, _]"),
        ("w1", "[@tp, _]"),
        ("b1", "[@tp]"),
        ("w2", "[_, @tp]"),
        ("w3", "[@tp, _]"),
        ("b3", "[@tp]"),
    ];
    let layouts = [("batch", batch), ("tensor", tensor), ("mixed", mixed)];
    same_losses(train, &layouts)?;
    same_over_processes(train, &layouts)
}

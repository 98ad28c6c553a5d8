//! The ledger names lines of the program, never lines of the library.

use anymesh_conformance::registry::{Attrs, entries};
use anymesh_core::{
    Mesh, Result, Tensor,
    ops::{AttentionOptions, CrossEntropyOptions, LossReduction, NormOptions},
    spmd::Ledger,
};
use std::collections::BTreeSet;

/// A training step with what a transformer has, on a mesh that cuts batch, heads and vocabulary.
#[test]
fn every_step_of_training_is_under_a_line_of_the_program() -> Result<()> {
    let device = anymesh_backend_cpu::device();
    let mesh = Mesh::new("dp=2, tp=2", &device)?;
    let weights = |shape: &[usize], seed: usize, sharding: &str| {
        Tensor::from_fn(shape, &device, |at| {
            let hash = at.iter().fold(seed, |h, i| (h * 31 + i * 17 + 7) % 1009);
            hash as f32 / 1009.0 - 0.5
        })?
        .to_mesh(&mesh, sharding)
    };
    let mut parameters = vec![
        weights(&[12, 8], 1, "[@tp, _]")?.require_grad()?,
        weights(&[8, 8], 2, "[@tp, _]")?.require_grad()?,
        weights(&[8, 8], 3, "[_, @tp]")?.require_grad()?,
        weights(&[8], 4, "[@dp]")?.require_grad()?,
        weights(&[12, 8], 5, "[@tp, @dp]")?.require_grad()?,
    ];
    let tokens = Tensor::from_fn([4, 6], &device, |at| ((at[0] * 5 + at[1]) % 12) as i32)?
        .to_mesh(&mesh, "[@dp, _]")?;
    let mut step = || -> Result<()> {
        let [table, qkv, out, scale, head] = &parameters[..] else {
            unreachable!("five parameters")
        };
        let x = table.embedding(&tokens)?;
        let h = x.rms_norm(&NormOptions::new().weight(scale).eps(1e-6))?;
        let heads = h
            .linear(qkv, None)?
            .reshape([4, 6, 2, 4])?
            .transpose(1, 2)?;
        let options = AttentionOptions {
            causal: true,
            ..Default::default()
        };
        let seen = heads.attention(&heads, &heads, &options)?.out;
        let seen = seen.transpose(1, 2)?.reshape([4, 6, 8])?;
        let x = x
            .add(&seen.linear(out, Some(scale))?)?
            .layer_norm(&NormOptions::new().eps(1e-6))?;
        let logits = x.linear(head, None)?.transpose(1, 2)?;
        let entropy = logits.cross_entropy(&tokens, &CrossEntropyOptions::default())?;
        let loss = entropy.add(&x.mse_loss(&x.detach().mul(0.5)?, LossReduction::Mean)?)?;
        assert!(loss.item()?.to_f64() > 0.0);
        let mut grads = loss.backward_retain()?;
        grads.add(loss.backward()?)?;
        for w in &mut parameters {
            let g = grads.take(w)?;
            let norm = g.norm(2.0, &[], false)?;
            assert!(!norm.isnan()?.any(&[], false)?.item()?.to_bool());
            w.update(|w| w.sub(&g.div(&norm)?.mul(0.01)?))?;
        }
        Ok(())
    };
    let (result, ledger) = Ledger::record(&mut step);
    result?;
    assert!(ledger.entries.len() > 10, "{ledger}");
    for entry in &ledger.entries {
        assert!(
            entry.caller.starts_with(file!()),
            "{} at {}\n{ledger}",
            entry.op,
            entry.caller
        );
    }
    Ok(())
}

/// Every way to lay a tensor of this rank on one axis that needs no more than its rank.
fn layouts(rank: usize, float: bool) -> Vec<String> {
    let dims = |cut: Option<usize>| {
        let each: Vec<&str> = (0..rank)
            .map(|d| if Some(d) == cut { "@a" } else { "_" })
            .collect();
        format!("[{}]", each.join(", "))
    };
    let mut all: Vec<String> = (0..rank).map(|d| dims(Some(d))).collect();
    if float {
        all.push(dims(None) + "{sum:a}");
    }
    all.push(dims(None));
    all
}

/// Each op of the library, forward and backward, with operands that lie crosswise.
#[test]
fn every_op_names_its_caller() -> Result<()> {
    let device = anymesh_backend_cpu::device();
    let mesh = Mesh::new("a=2", &device)?;
    let (mut wrong, mut entered) = (BTreeSet::new(), 0);
    for entry in entries() {
        for sample in entry.samples() {
            let attrs = Attrs::new(entry, &sample.attrs)?;
            let inputs = sample.make(1, &device)?;
            for turn in 0..4 {
                let placed = inputs.iter().enumerate().map(|(i, x)| {
                    x.as_ref()
                        .map(|x| {
                            let all = layouts(x.rank(), x.dtype().is_float());
                            let x = x.to_mesh(&mesh, all[(turn + i) % all.len()].as_str())?;
                            if x.dtype().is_float() {
                                x.require_grad()
                            } else {
                                Ok(x)
                            }
                        })
                        .transpose()
                });
                let placed = placed.collect::<Result<Vec<_>>>()?;
                let (_, ledger) = Ledger::record(|| -> Result<()> {
                    for out in entry.call(&placed, &attrs, &mesh)? {
                        if out.requires_grad() {
                            let grads = out.backward_with(&out.ones_like()?)?;
                            for x in placed.iter().flatten().filter(|x| x.requires_grad()) {
                                grads.get(x)?;
                            }
                        }
                    }
                    Ok(())
                });
                entered += ledger.entries.len();
                for e in ledger.entries {
                    let known = ["core/tests/", "conformance/src/registry/"];
                    if !known.iter().any(|start| e.caller.starts_with(start)) {
                        wrong.insert(format!("{} ({}): {}", entry.name, e.op, e.caller));
                    }
                }
            }
        }
    }
    assert!(entered > 1000, "{entered}");
    let wrong: Vec<String> = wrong.into_iter().collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

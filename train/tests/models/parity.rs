//! The same numbers on every mesh.

use crate::{assert_close, build, configs, mesh, numbers, texts, tokens};
use anymesh_core::{Tensor, grad::no_grad, ops::Rng};
use anymesh_train::{
    Module, Pass, Result,
    models::{Model, ModelConfig, Tokens},
};
use std::collections::BTreeMap;

const MESHES: [&str; 7] = [
    "tp=2",
    "tp=3",
    "tp=4",
    "dp=2, tp=2",
    "dp=3",
    "ep=2",
    "ep=3, tp=2",
];

/// What the model gives, as one number.
fn loss(model: &Model, tokens: &Tokens, pass: &Pass) -> Result<Tensor> {
    let hidden = model.hidden(tokens, pass, None)?;
    let out = match model {
        Model::Bert(_) => hidden,
        _ => model.head(&hidden)?,
    };
    Ok(out.sin()?.mean_all()?)
}

/// The loss and all gradients.
fn step(model: &Model, tokens: &Tokens, pass: &Pass) -> Result<(f64, BTreeMap<String, Vec<f64>>)> {
    let loss = loss(model, tokens, pass)?;
    let gradients = loss.backward()?;
    let mut out = BTreeMap::new();
    let mut found: Vec<(String, Tensor)> = vec![];
    model.visit("", &mut |name, p| {
        if let Ok(Some(g)) = p.partial_gradient(&gradients)
            && let Ok(g) = p.place_gradient(&g)
        {
            found.push((name.into(), g));
        }
    });
    for (name, g) in found {
        out.insert(name, numbers(&g)?);
    }
    Ok((loss.item()?.to_f64(), out))
}

#[test]
fn losses_and_gradients_are_the_same_on_every_mesh_whole_or_cut_stream() -> Result<()> {
    for (name, config) in configs() {
        let pass = Pass::train(Rng::new(5));
        let one = mesh("")?;
        let (expected, gradients) = step(&build(&config, &one, false)?, &tokens(&one)?, &pass)?;
        assert!(gradients.len() >= 20, "{name}: {}", gradients.len());
        for axes in MESHES {
            for cut in [false, true] {
                let mesh = mesh(axes)?;
                let (loss, found) = step(&build(&config, &mesh, cut)?, &tokens(&mesh)?, &pass)?;
                let what = format!("{name} on {axes}, cut {cut}");
                assert_close(&what, &[loss], &[expected], 1e-12);
                assert_eq!(found.len(), gradients.len(), "{what}");
                for (parameter, g) in &found {
                    let what = format!("{what}: {parameter}");
                    let scale = gradients[parameter]
                        .iter()
                        .fold(0f64, |m, x| m.max(x.abs()));
                    // The gradient of a key's bias is zero but for rounding.
                    if scale > 1e-15 {
                        assert_close(&what, g, &gradients[parameter], 1e-10);
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn layers_that_run_again_give_the_same_gradients_and_leave_frozen_ones_alone() -> Result<()> {
    for (name, config) in configs() {
        let (mesh, pass) = (mesh("tp=2")?, Pass::train(Rng::new(9)));
        let mut model = build(&config, &mesh, true)?;
        model.freeze(
            "*norm*, *ln_*, *LayerNorm*"
                .split(", ")
                .filter(|p| {
                    let pattern = p.trim_matches('*').to_string();
                    model.names().iter().any(|n| n.contains(&pattern))
                })
                .collect::<Vec<_>>()
                .join(", ")
                .as_str(),
        )?;
        let kept = step(&model, &tokens(&mesh)?, &pass)?;
        model.set_recompute(true);
        let again = step(&model, &tokens(&mesh)?, &pass)?;
        assert_eq!(kept, again, "{name}");
        assert!(
            !kept
                .1
                .keys()
                .any(|n| n.contains("norm") || n.contains("ln_"))
        );
        assert!(kept.1.len() > 10, "{name}");
    }
    Ok(())
}

#[test]
fn a_cache_gives_what_the_whole_text_gives() -> Result<()> {
    for (name, config) in configs() {
        if matches!(config, ModelConfig::Bert(_)) {
            continue;
        }
        for axes in ["", "tp=2", "tp=4", "dp=2, tp=3"] {
            let mesh = mesh(axes)?;
            let model = build(&config, &mesh, false)?;
            no_grad(|| -> Result<()> {
                let whole = model.logits(&tokens(&mesh)?, &Pass::eval(), None)?;
                let mut caches = model.caches();
                let mut parts = vec![];
                for range in [0..4, 4..5, 5..7] {
                    let rows: Vec<Vec<u32>> =
                        texts().iter().map(|t| t[range.clone()].to_vec()).collect();
                    let tokens = Tokens::of_rows(&mesh, &rows)?;
                    parts.push(model.logits(&tokens, &Pass::eval(), Some(&mut caches))?);
                }
                let joined = Tensor::concat(&parts.iter().collect::<Vec<_>>(), 1)?;
                let what = format!("{name} on {axes}");
                assert_close(&what, &numbers(&joined)?, &numbers(&whole)?, 1e-13);
                Ok(())
            })?;
        }
    }
    Ok(())
}

#[test]
fn packed_documents_do_not_see_each_other() -> Result<()> {
    for (name, config) in configs() {
        if matches!(config, ModelConfig::Bert(_)) {
            continue;
        }
        for axes in ["", "dp=2, tp=2"] {
            let mesh = mesh(axes)?;
            let model = build(&config, &mesh, true)?;
            let row =
                |f: fn(usize) -> i32| Tensor::from_fn([2, 7], (&mesh, "[@dp?, _]"), |at| f(at[1]));
            let documents = row(|i| i32::from(i >= 3))?;
            let positions =
                row(|i| (i as i32 - 3).max(0) * i32::from(i >= 3) + i as i32 * i32::from(i < 3))?;
            let packed = Tokens::packed(tokens(&mesh)?.ids, &documents, positions)?;
            let packed = numbers(
                &model
                    .logits(&packed, &Pass::eval(), None)?
                    .narrow(1, 3, 4)?,
            )?;
            let rows: Vec<Vec<u32>> = texts().iter().map(|t| t[3..].to_vec()).collect();
            let alone = model.logits(&Tokens::of_rows(&mesh, &rows)?, &Pass::eval(), None)?;
            let what = format!("{name} on {axes}");
            assert_close(&what, &packed, &numbers(&alone)?, 1e-13);
        }
    }
    Ok(())
}

#[test]
fn texts_that_are_too_long_are_refused() -> Result<()> {
    for (name, config) in configs() {
        let mesh = mesh("")?;
        let model = build(&config, &mesh, false)?;
        let tokens = Tokens::of_rows(&mesh, &[vec![1; 33]])?;
        let error = model.hidden(&tokens, &Pass::eval(), None).expect_err(name);
        let text = error.to_string();
        assert!(text.contains("33") && text.contains("at most 32"), "{text}");
    }
    Ok(())
}

//! Mixtures of experts: recorded routings, a computation without dispatch, every mesh, and what is
//! wrong.

use anymesh_core::{DType, Mesh, Result as CoreResult, Tensor, ops::Rng, spmd::Ledger};
use anymesh_train::{
    Build, Init, Module, Param, Policy, Result,
    nn::experts::{Capacity, Dispatch, Experts, Routed, Routing, Scoring, balanced_bias},
};
use serde_json::Value;

fn facts() -> Value {
    let text = include_str!("facts/optimizers.json");
    serde_json::from_str::<Value>(text).expect("JSON")["moe"].clone()
}

fn numbers(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(list) => list.iter().flat_map(numbers).collect(),
        other => vec![other.as_f64().expect("a number")],
    }
}

fn logits(mesh: &Mesh) -> CoreResult<Tensor> {
    let all = numbers(&facts()["logits"]);
    Tensor::from_fn([6, 4], (mesh, "[@dp?, _]"), |at| all[at[0] * 4 + at[1]])
}

fn assert_near(what: &str, a: &[f64], b: &[f64]) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (a, b) in a.iter().zip(b) {
        assert!((a - b).abs() <= 1e-12 * b.abs().max(1.0), "{what}: {a} {b}");
    }
}

fn meshes() -> Vec<Mesh> {
    let cpu = anymesh_backend_cpu::device();
    let on = |axes: &str| Mesh::new(axes, &cpu).expect("a mesh");
    let axes = [
        "dp=2",
        "dp=4",
        "ep=2",
        "dp=2, ep=2",
        "ep=4",
        "dp=3",
        "tp=2",
        "ep=2, tp=2",
    ];
    let mut meshes = vec![Mesh::single(&cpu)];
    meshes.extend(axes.map(on));
    meshes
}

#[test]
fn routings_are_the_recorded_ones_on_every_mesh() -> Result<()> {
    let facts = facts();
    for mesh in meshes() {
        let logits = logits(&mesh)?;
        let cases = [
            (
                "softmax_after_topk",
                "prob",
                Scoring::SoftmaxLast,
                false,
                1.0,
            ),
            (
                "softmax_before_topk",
                "prob",
                Scoring::SoftmaxFirst,
                false,
                1.0,
            ),
            (
                "softmax_before_topk",
                "renormalised",
                Scoring::SoftmaxFirst,
                true,
                1.0,
            ),
            ("sigmoid_bias", "prob", Scoring::Sigmoid, true, 2.5),
        ];
        for (case, field, scoring, renormalise, scale) in cases {
            let routing = Routing {
                experts: 4,
                top_k: 2,
                scoring,
                renormalise,
                scale,
                groups: None,
            };
            let bias = match facts[case].get("bias") {
                Some(bias) => Some(Tensor::from_slice(&numbers(bias), [4], mesh.device(0))?),
                None => None,
            };
            let bias = match (bias, mesh.is_single()) {
                (Some(bias), false) => Some(bias.to_mesh(&mesh, "[_]")?),
                (bias, _) => bias,
            };
            let routed = routing.route(&logits, bias.as_ref())?;
            let experts: Vec<f64> = routed
                .experts
                .to_vec::<i32>()?
                .iter()
                .map(|e| f64::from(*e))
                .collect();
            assert_eq!(experts, numbers(&facts[case]["index"]), "{case} on {mesh}");
            assert_near(
                case,
                &routed.weights.to_vec::<f64>()?,
                &numbers(&facts[case][field]),
            );
        }
    }
    Ok(())
}

fn plain(top_k: usize) -> Routing {
    Routing {
        experts: 4,
        top_k,
        ..Routing::default()
    }
}

#[test]
fn losses_counts_and_the_bias_are_the_recorded_ones() -> Result<()> {
    let facts = facts();
    for mesh in meshes() {
        let logits = logits(&mesh)?.require_grad()?;
        let routed = plain(2).route(&logits, None)?;
        let counts: Vec<f64> = routed
            .counts()?
            .to_vec::<i32>()?
            .iter()
            .map(|c| f64::from(*c))
            .collect();
        assert_eq!(counts, numbers(&facts["tokens_per_expert"]));
        for (case, loss) in [
            ("aux_loss", routed.balance_loss()?),
            ("z_loss", routed.z_loss()?),
        ] {
            assert_near(
                case,
                &[loss.item()?.to_f64()],
                &numbers(&facts[case]["value"]),
            );
            let gradient = loss.backward()?.of(&logits)?;
            assert_near(
                case,
                &gradient.to_vec::<f64>()?,
                &numbers(&facts[case]["grad_logits"]),
            );
        }
        let bias = numbers(&facts["sigmoid_bias"]["bias"]);
        let place = (&mesh, "[_]");
        let bias = Tensor::from_fn([4], place, |at| bias[at[0]])?;
        let rate = facts["bias_update"]["rate"].as_f64().expect("a rate");
        let new = balanced_bias(&bias, &routed.counts()?, rate)?;
        assert_near(
            "bias",
            &new.to_vec::<f64>()?,
            &numbers(&facts["bias_update"]["new_bias"]),
        );
    }
    Ok(())
}

#[test]
fn a_full_expert_drops_who_comes_last() -> Result<()> {
    for mesh in meshes() {
        let routed = plain(2).route(&logits(&mesh)?, None)?;
        // Two slots for each of four experts: two thirds of the even share.
        let dispatch = Dispatch::new(&routed, Capacity::Factor(2.0 / 3.0))?;
        assert_eq!(dispatch.capacity(), 2);
        let kept = dispatch
            .kept()
            .expect("some are dropped")
            .cast(DType::I32)?;
        let kept = kept.to_vec::<i32>()?;
        let dropped = kept.iter().enumerate().filter(|(_, k)| **k == 0);
        let mut dropped: Vec<f64> = dropped.map(|(i, _)| i as f64).collect();
        let mut expected = numbers(&facts()["capacity_2"]["dropped"]);
        dropped.sort_by(f64::total_cmp);
        expected.sort_by(f64::total_cmp);
        assert_eq!(dropped, expected, "{mesh}");
    }
    Ok(())
}

const WIDTH: usize = 6;
const INNER: usize = 10;
const TOKENS: usize = 12;

fn layer(mesh: &Mesh, routing: Routing, capacity: Capacity) -> Result<Experts> {
    let b = Build::new(mesh, Policy::all(DType::F64), 3);
    Experts::new(
        &b,
        [WIDTH, INNER],
        routing,
        capacity,
        Some(4),
        [Init::Normal(0.5); 2],
    )
}

fn tokens(mesh: &Mesh) -> CoreResult<Tensor> {
    let place = (mesh, "[@dp?@ep?, _]");
    Tensor::normal([TOKENS, WIDTH], 0.0, 1.0, DType::F64, place, Rng::new(9))?.require_grad()
}

/// All experts for all tokens, weighed.
fn dense(layer: &Experts, x: &Tensor, routed: &Routed) -> Result<Tensor> {
    let mut y = layer
        .shared_experts
        .as_ref()
        .expect("there is one")
        .forward(x)?;
    for e in 0..4usize {
        let of =
            |stack: &Param| -> Result<Tensor> { Ok(stack.get()?.narrow(0, e, 1)?.squeeze(&[0])?) };
        let inner = x
            .linear(&of(&layer.gate_proj)?, None)?
            .swiglu2(&x.linear(&of(&layer.up_proj)?, None)?)?;
        let out = inner.linear(&of(&layer.down_proj)?, None)?;
        let mine = routed.experts.eq(e as i64)?.cast(DType::F64)?;
        let weight = mine.mul(&routed.weights)?.sum(&[1], true)?;
        y = y.add(&out.mul(&weight)?)?;
    }
    Ok(y)
}

type Gradients = std::collections::BTreeMap<String, Vec<f64>>;

fn gradients(layer: &Experts, x: &Tensor, loss: &Tensor) -> Result<Gradients> {
    let found = loss.backward()?;
    let mut all = Gradients::new();
    all.insert("x".into(), found.of(x)?.to_vec()?);
    let mut outcome = Ok(());
    layer.visit("", &mut |name, p| {
        let got = p.partial_gradient(&found).and_then(|g| match g {
            Some(g) => Ok(p.place_gradient(&g)?.to_vec::<f64>()?),
            None => Ok(vec![0.0; p.value().numel()]),
        });
        match got {
            Ok(values) => drop(all.insert(name.into(), values)),
            Err(error) => outcome = Err(error),
        }
    });
    outcome.map(|()| all)
}

#[test]
fn without_drops_it_is_the_dense_computation_on_every_mesh() -> Result<()> {
    let single = &meshes()[0];
    // One whose experts all get tokens, and one in which most get none.
    for top_k in [1, 2, 4] {
        let routing = plain(top_k);
        let (alone, x) = (
            layer(single, routing.clone(), Capacity::All)?,
            tokens(single)?,
        );
        let (_, routed) = alone.forward(&x, None)?;
        let wanted = dense(&alone, &x, &routed)?;
        let wanted_grads = gradients(&alone, &x, &wanted.square()?.sum_all()?)?;
        for mesh in meshes() {
            for capacity in [Capacity::All, Capacity::Factor(4.0)] {
                let (there, x) = (layer(&mesh, routing.clone(), capacity)?, tokens(&mesh)?);
                let (y, _) = there.forward(&x, None)?;
                assert_near("values", &y.to_vec::<f64>()?, &wanted.to_vec::<f64>()?);
                let grads = gradients(&there, &x, &y.square()?.sum_all()?)?;
                for (name, gradient) in &grads {
                    let what = format!("{name} on {mesh}, top {top_k}");
                    assert_near(&what, gradient, &wanted_grads[name]);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn experts_without_tokens_and_batches_without_any() -> Result<()> {
    for mesh in meshes() {
        let layer = layer(&mesh, plain(1), Capacity::All)?;
        let bias = Tensor::from_fn(
            [4],
            (&mesh, "[_]"),
            |at| if at[0] == 2 { 100.0 } else { 0.0 },
        )?;
        let x = tokens(&mesh)?;
        let (y, routed) = layer.forward(&x, Some(&bias))?;
        assert_eq!(routed.counts()?.to_vec::<i32>()?, [0, 0, TOKENS as i32, 0]);
        let found = gradients(&layer, &x, &y.square()?.sum_all()?)?;
        assert!(found.values().flatten().all(|g| g.is_finite()), "{mesh}");
        let part = found["experts.gate_proj"].len() / 4;
        assert!(found["experts.gate_proj"][..part].iter().all(|g| *g == 0.0));
        let place = (&mesh, "[@dp?@ep?, _]");
        let none = Tensor::zeros([0, WIDTH], DType::F64, place)?;
        let (y, _) = layer.forward(&none, None)?;
        assert_eq!(y.dims(), [0, WIDTH]);
    }
    Ok(())
}

#[test]
fn groups_limit_where_a_token_goes() -> Result<()> {
    let cpu = anymesh_backend_cpu::device();
    // The best expert is alone in its group: the other group's two are better together.
    let logits = Tensor::new(&[[3.0f64, -9.0, 2.0, 2.5], [5.0, 1.0, 2.0, 2.5]], &cpu)?;
    let routing = Routing {
        scoring: Scoring::SoftmaxLast,
        groups: Some((2, 1)),
        ..plain(2)
    };
    let routed = routing.route(&logits, None)?;
    assert_eq!(routed.experts.to_vec::<i32>()?, [3, 2, 0, 1]);
    let said = |routing: Routing| routing.check().expect_err("it cannot be").to_string();
    assert!(
        said(Routing {
            groups: Some((3, 1)),
            ..plain(2)
        })
        .contains("groups")
    );
    assert!(said(plain(5)).contains("1 to 4"));
    assert!(Capacity::Factor(f64::NAN).check().is_err());
    Ok(())
}

/// Routed as told: experts of tokens, with random weights that have gradients.
fn told(mesh: &Mesh, experts: usize, choices: &[Vec<i32>]) -> Result<Routed> {
    let (tokens, top_k) = (choices.len(), choices[0].len());
    let place = (mesh, "[@dp?@ep?, _]");
    Ok(Routed {
        experts: Tensor::from_fn([tokens, top_k], place, |at| choices[at[0]][at[1]])?,
        weights: Tensor::uniform([tokens, top_k], 0.1, 1.0, DType::F64, place, Rng::new(4))?
            .require_grad()?,
        logits: Tensor::zeros([tokens, experts], DType::F64, place)?,
        kept: None,
    })
}

/// Bytes of rows that the worst rank received, forward and backward, each way by itself.
fn ways(mesh: &Mesh, experts: usize, choices: &[Vec<i32>], width: usize) -> Result<Vec<u64>> {
    let (tokens, init) = (choices.len(), Init::Normal(0.5));
    let b = Build::new(mesh, Policy::all(DType::F64), 3);
    let routing = Routing {
        experts,
        top_k: choices[0].len(),
        ..Routing::default()
    };
    let layer = Experts::new(&b, [width, 8], routing, Capacity::All, None, [init; 2])?;
    let stacks = [
        layer.gate_proj.get()?,
        layer.up_proj.get()?,
        layer.down_proj.get()?,
    ];
    let place = (mesh, "[@dp?@ep?, _]");
    let x = Tensor::normal([tokens, width], 0.0, 1.0, DType::F64, place, Rng::new(9))?;
    let x = x.require_grad()?;
    let routed = told(mesh, experts, choices)?;
    let (outcome, ledger) = Ledger::record(|| -> Result<()> {
        let dispatch = Dispatch::new(&routed, Capacity::All)?;
        let stacks = [&stacks[0], &stacks[1], &stacks[2]];
        let y = dispatch.through(&x, &routed.weights, stacks)?;
        y.square()?.sum_all()?.backward()?.of(&x)?;
        Ok(())
    });
    outcome?;
    let rows = ledger
        .entries
        .iter()
        .filter(|e| e.op == "exchange_rows" && e.kind == "exchange");
    // Those of vectors, not of the few numbers that go with them.
    let vectors = rows.filter(|e| e.from.contains(&format!(", {width}]")));
    Ok(vectors.map(|e| e.bytes).collect())
}

#[test]
fn tokens_cross_once_for_each_rank_that_has_experts_for_them() -> Result<()> {
    let cpu = anymesh_backend_cpu::device();
    let (tokens, experts, width) = (96, 8, 6);
    let meshes = [
        ("ep=2", 2),
        ("ep=4", 4),
        ("dp=2, ep=2", 2),
        ("ep=2, tp=2", 2),
        ("dp=3, ep=4", 4),
    ];
    for (axes, ep) in meshes {
        let mesh = Mesh::new(axes, &cpu)?;
        let parts = match axes {
            "ep=2, tp=2" => 2,
            _ => mesh.ranks(),
        };
        let local = tokens / parts;
        for top_k in [1, 2, 4, 8] {
            // Each expert gets as many tokens of each rank.
            let even = |t: usize| {
                let spread = |k: usize| ((t + k * (experts / top_k)) % experts) as i32;
                (0..top_k).map(spread).collect::<Vec<_>>()
            };
            let choices: Vec<Vec<i32>> = (0..tokens).map(even).collect();
            let found = ways(&mesh, experts, &choices, width)?;
            // There, back, and both again in the backward pass.
            assert_eq!(found.len(), 4, "{axes}, top {top_k}");
            let most = (local * top_k.min(ep) * width * 8 * (ep - 1) / ep) as u64;
            assert!(
                found.iter().all(|bytes| *bytes <= most),
                "{axes}, top {top_k}: {found:?} of {most}"
            );
            // Two experts of one rank count once, and what stays does not count.
            let there = vec![vec![0, 1]; tokens];
            let one = ways(&mesh, experts, &there, width)?;
            let own = (local * width * 8) as u64;
            let others = own * (ep as u64 - 1);
            assert_eq!(one, [others, own, others, own], "{axes}");
        }
    }
    Ok(())
}

#[test]
fn without_values_the_ledger_has_the_volume_of_the_formula() -> Result<()> {
    let (tokens, width, top_k) = (4096, 1024, 2);
    for (axes, ep, parts) in [("ep=4", 4, 4), ("dp=2, ep=8", 8, 16)] {
        let mesh = Mesh::new(axes, &anymesh_core::meta())?;
        let b = Build::new(&mesh, Policy::f32(), 3);
        let routing = Routing {
            experts: 16,
            top_k,
            ..Routing::default()
        };
        for capacity in [Capacity::Factor(1.0), Capacity::All] {
            let init = Init::Normal(0.5);
            let routing = routing.clone();
            let layer = Experts::new(&b, [width, 2048], routing, capacity, None, [init; 2])?;
            let x = Tensor::zeros([tokens, width], DType::F32, (&mesh, "[@dp?@ep, _]"))?;
            let (y, ledger) = Ledger::record(|| layer.forward(&x, None));
            assert_eq!(y?.0.dims(), [tokens, width]);
            // Each token of a rank to each of its experts but those of the rank itself.
            let way = (tokens / parts * top_k * width * 4 * (ep - 1) / ep) as u64;
            // And the numbers of experts, and weights.
            let bytes = ledger.bytes();
            assert!(
                bytes >= 2 * way && bytes < 2 * way + way / 20,
                "{capacity:?} {ledger}"
            );
        }
    }
    Ok(())
}

#[test]
fn experts_that_do_not_divide_over_ranks_and_ranks_without_any() -> Result<()> {
    let cpu = anymesh_backend_cpu::device();
    let routing = Routing {
        experts: 3,
        top_k: 2,
        ..Routing::default()
    };
    let single = Mesh::single(&cpu);
    let alone = layer(&single, routing.clone(), Capacity::All)?;
    let x = tokens(&single)?;
    let (y, _) = alone.forward(&x, None)?;
    let wanted = (
        y.to_vec::<f64>()?,
        gradients(&alone, &x, &y.square()?.sum_all()?)?,
    );
    for axes in ["ep=2", "ep=4", "dp=2, ep=5"] {
        let mesh = Mesh::new(axes, &cpu)?;
        let there = layer(&mesh, routing.clone(), Capacity::All)?;
        let x = tokens(&mesh)?;
        let (y, _) = there.forward(&x, None)?;
        assert_near(axes, &y.to_vec::<f64>()?, &wanted.0);
        for (name, gradient) in gradients(&there, &x, &y.square()?.sum_all()?)? {
            assert_near(&format!("{name} on {axes}"), &gradient, &wanted.1[&name]);
        }
    }
    Ok(())
}

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
        let kept = dispatch.kept().cast(DType::I32)?.to_vec::<i32>()?;
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
        Init::Normal(0.5),
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

#[test]
fn dispatch_and_combine_send_one_and_a_half_times_the_least() -> Result<()> {
    let (tokens, width, top_k, ep) = (4096, 1024, 2, 4);
    let mesh = Mesh::new("ep=4", &anymesh_core::meta())?;
    let b = Build::new(&mesh, Policy::f32(), 3);
    let routing = Routing {
        experts: 16,
        top_k,
        ..Routing::default()
    };
    let one = Capacity::Factor(1.0);
    let layer = Experts::new(&b, [width, 2048], routing, one, None, Init::Normal(0.5))?;
    let x = Tensor::zeros([tokens, width], DType::F32, (&mesh, "[@ep, _]"))?;
    let (y, ledger) = Ledger::record(|| layer.forward(&x, None));
    assert_eq!(y?.0.type_string(), "f32[4096@ep, 1024]");
    // Each token of a rank to each of its experts but those of the rank itself.
    let least = (tokens / ep * top_k * width * 4 * (ep - 1) / ep) as u64;
    let whole = 2 * least + least;
    // And the numbers of slots.
    assert!(ledger.bytes() < whole + whole / 100, "{ledger}");
    Ok(())
}

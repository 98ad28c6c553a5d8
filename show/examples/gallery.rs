//! One page with everything that shows itself.
//!
//! `cargo run -p anymesh-show --example gallery -- gallery.html`

use anymesh_core::{
    DType, Mesh, Result, Tensor, TensorType,
    cost::{CostModel, estimate},
    meta,
    ops::Rng,
    reshard::{self, Objective},
    spmd::{self, Ledger, PlanOptions},
};
use anymesh_show::{Curve, Figure, Gantt, Lane, Parts, Show, Span, Table, Unit, page};

/// Two layers and their gradients.
fn step(mesh: &Mesh) -> Result<Tensor> {
    let x = Tensor::ones([64, 32], DType::F32, (mesh, "[@dp?, _]"))?;
    let w = Tensor::ones([32, 128], DType::F32, (mesh, "[_, @tp?]"))?.require_grad()?;
    let v = Tensor::ones([128, 32], DType::F32, (mesh, "[@tp?, _]"))?.require_grad()?;
    let loss = x
        .matmul(&w)?
        .gelu()?
        .matmul(&v)?
        .softmax(-1)?
        .square()?
        .mean_all()?;
    let gradients = loss.backward()?;
    gradients.of(&v)?;
    gradients.of(&w)
}

/// A pipeline in which every stage works on micro-batches forwards, then backwards.
fn pipeline(stages: usize, batches: usize) -> Gantt {
    let span = |start: usize, len: usize, batch: usize, kind: usize| Span {
        start: start as f64 * 1e-3,
        end: (start + len) as f64 * 1e-3,
        label: batch.to_string(),
        kind,
    };
    let end = stages + batches - 1;
    let lane = |s: usize| {
        let forward = (0..batches).map(|b| span(s + b, 1, b, 0));
        let backward = (0..batches).map(|b| span(end + 2 * (stages - 1 - s + b), 2, b, 1));
        Lane {
            name: format!("stage {s}"),
            spans: forward.chain(backward).collect(),
        }
    };
    Gantt {
        title: format!("{stages} stages, {batches} micro-batches"),
        unit: Unit::Seconds,
        kinds: vec!["forward".into(), "backward".into()],
        lanes: (0..stages).map(lane).collect(),
    }
}

fn figures() -> Result<Vec<Figure>> {
    let device = anymesh_backend_cpu::device();
    let (mesh, planned) = (
        Mesh::new("dp=2, tp=4", &device)?,
        Mesh::new("dp=2, tp=4", &meta())?,
    );
    let normal = |dims: &[usize]| Tensor::normal(dims, 0.0, 1.0, DType::F32, &device, Rng::new(7));
    let mut out = vec![
        mesh.figure(),
        Mesh::new("pp=2, dp=2, tp=4", &device)?.figure(),
    ];
    out.push(Mesh::new("dp=2048, tp=8", &meta())?.figure());
    for text in [
        "f32[8@dp, 16@tp]",
        "f32[8@dp, 16]{sum:tp}",
        "bf16[7@tp, 3]",
        "f32[4@dp, 6, 8@tp]",
        "f32[5@tp@dp]",
    ] {
        out.push(Parts::new(&TensorType::parse(text, &planned)?, &planned).figure());
    }
    let large = Mesh::new("dp=2048, tp=8", &meta())?;
    out.push(
        Parts::new(
            &TensorType::parse("bf16[1048576@dp, 65536@tp]", &large)?,
            &large,
        )
        .figure(),
    );
    out.push(normal(&[4, 6])?.to_mesh(&mesh, "[@dp, @tp]")?.figure());
    out.push(normal(&[3, 2])?.figure());
    out.push(
        Tensor::new(
            &[
                [1.0f32, f32::NAN, 3.0],
                [f32::INFINITY, 0.0, f32::NEG_INFINITY],
            ],
            &device,
        )?
        .figure(),
    );
    out.push(normal(&[20, 30])?.to_mesh(&mesh, "[@dp, @tp]")?.figure());
    let rows = Tensor::arange(0, 300, 1, DType::F32, &device)?.reshape([300, 1])?;
    let waves = ((&rows / 20.0)?.sin()? * (rows.transpose(0, 1)? / 35.0)?.cos()?)?;
    out.push(waves.to_mesh(&mesh, "[@tp, @dp]")?.figure());
    out.push(
        normal(&[2, 3, 12, 16])?
            .to_mesh(&mesh, "[@dp, _, _, @tp]")?
            .figure(),
    );
    out.push(normal(&[500])?.to_mesh(&mesh, "[@tp]")?.figure());
    out.push(normal(&[1500, 2000])?.square()?.figure());
    out.push(
        normal(&[64, 64])?
            .to_mesh(&mesh, "[@dp, @tp]")?
            .sum(&[1], false)?
            .figure(),
    );
    for (from, to) in [
        ("f32[64@dp, 64]", "f32[64, 64@tp]"),
        ("f32[64, 64]{sum:dp, sum:tp}", "f32[64@tp, 64]"),
    ] {
        let (from, to) = (
            TensorType::parse(from, &planned)?,
            TensorType::parse(to, &planned)?,
        );
        let plan = reshard::plan(
            &planned,
            &from.shape,
            from.dtype,
            &from.sharding,
            &to.sharding,
            Objective::Time,
        )?;
        out.push(plan.figure());
    }
    let (result, ledger) = Ledger::record(|| step(&mesh));
    result?;
    out.push(ledger.figure());
    let ((result, decisions), _) = Ledger::record(|| spmd::trace(|| step(&planned)));
    result?;
    out.extend(decisions.first().map(Show::figure));
    let plan = spmd::plan(&PlanOptions::default(), || step(&planned))?;
    out.push(plan.figure());
    out.push(plan.explain(5).figure());
    out.push(estimate(&planned.with_cost(CostModel::preset("h100")?), step)?.figure());
    let loss = |noise: f64| {
        let at = |i: i32| {
            0.4 + 3.6 * (-f64::from(i) / 90.0).exp() + noise * f64::from(i * 7919 % 101) / 101.0
        };
        (0..400)
            .map(|i| (f64::from(i), if i == 250 { f64::NAN } else { at(i) }))
            .collect()
    };
    let curve = Curve::new("training", "nats")
        .line("train", loss(0.5))
        .line("validation", loss(0.05));
    out.push(curve.clone().log().figure());
    out.push(curve.figure());
    out.push(pipeline(4, 8).figure());
    let mut table = Table::new("a model", &["layer", "shape", "parameters"])
        .numbers(&[2])
        .code(&[0, 1]);
    table.row(["wte.weight", "f32[50257, 768]", "38,597,376"]);
    table.row(["h.0.attn.c_attn.weight", "f32[768, 2304]", "1,769,472"]);
    out.push(table.figure());
    Ok(out)
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let file = std::env::args().nth(1).unwrap_or("gallery.html".into());
    std::fs::write(&file, page("anymesh: a gallery", &figures()?))?;
    println!("{file}");
    Ok(())
}

//! Plans, ledgers, estimates and decisions.

use crate::{cpu, hostile::names, inspect::check, mesh, svg, ty};
use anymesh_core::{
    DType, Mesh, Result, Tensor,
    cost::{CostModel, estimate},
    meta,
    reshard::{Objective, plan, plan_across},
    spmd::{self, Ledger, PlanOptions, StepPlan, trace},
};
use anymesh_show::{Figure, Show};
use serde_json::Value;

/// A step with products, a softmax and a gradient.
fn step(mesh: &Mesh) -> Result<Tensor> {
    let x = Tensor::ones([16, 8], DType::F32, (mesh, "[@dp?, _]"))?;
    let w = Tensor::ones([8, 32], DType::F32, (mesh, "[_, @tp?]"))?.require_grad()?;
    let v = Tensor::ones([32, 8], DType::F32, (mesh, "[@tp?, _]"))?.require_grad()?;
    let loss = x
        .matmul(&w)?
        .softmax(-1)?
        .matmul(&v)?
        .square()?
        .mean_all()?;
    loss.backward()?.of(&w)
}

#[test]
fn reshard_plans_between_all_pairs() {
    let mesh = mesh("dp=2, tp=4");
    let types = [
        "f32[64, 64]",
        "f32[64@dp, 64]",
        "f32[64@tp, 64]",
        "f32[64, 64@tp@dp]",
        "f32[64@dp, 64@tp]",
        "f32[64@dp, 64]{sum:tp}",
        "f32[64, 64]{sum:dp, sum:tp}",
    ];
    for from in types {
        for to in types {
            let (a, b) = (ty(from, &mesh), ty(to, &mesh));
            for objective in [Objective::Bytes, Objective::Time] {
                let Ok(plan) = plan(
                    &mesh,
                    &a.shape,
                    a.dtype,
                    &a.sharding,
                    &b.sharding,
                    objective,
                ) else {
                    continue;
                };
                let picture = svg(&plan);
                for step in &plan.steps {
                    assert!(
                        picture.contains(step.kind.name()),
                        "{from} to {to}: {}",
                        step.kind
                    );
                }
            }
        }
    }
    let other = Mesh::new("x=3", &meta()).unwrap();
    let (a, b) = (
        ty("f32[64@dp, 64]{sum:tp}", &mesh),
        ty("f32[64@x, 64]", &other),
    );
    let across = plan_across(&mesh, &a.sharding, &other, &b.sharding, &a.shape, a.dtype);
    assert!(svg(&across.unwrap()).contains("transfer to mesh(x=3)"));
}

#[test]
fn a_ledger_has_a_bar_for_each_op_and_a_row_for_each_step() {
    let mesh = Mesh::new("dp=2, tp=2", &cpu()).unwrap();
    let (result, ledger) = Ledger::record(|| step(&mesh));
    result.unwrap();
    assert!(ledger.entries.len() > 2);
    let picture = svg(&ledger);
    let html = ledger.html();
    for entry in &ledger.entries {
        assert!(
            picture.contains(&format!(">{}</text>", entry.op)),
            "{}",
            entry.op
        );
    }
    assert_eq!(html.matches("<tr>").count(), ledger.entries.len() + 1);
    assert!(html.contains("plans.rs:"), "the line of the program");
    assert!(check(&Ledger::default()).is_none());
}

#[test]
fn a_line_in_the_file_of_a_cell_is_not_told() {
    let mesh = Mesh::new("dp=2, tp=2", &cpu()).unwrap();
    let (_, mut ledger) = Ledger::record(|| step(&mesh));
    for entry in &mut ledger.entries {
        entry.caller = "src/lib.rs:123:51".into();
    }
    assert!(!ledger.html().contains("src/lib.rs") && ledger.html().contains("matmul"));
    ledger.entries[0].caller = "examples/cluster.rs:7:1".into();
    assert!(ledger.html().contains("examples/cluster.rs:7:1"));
}

#[test]
fn the_bars_of_a_ledger_come_to_its_bytes() {
    let mesh = Mesh::new("dp=2, tp=2", &meta()).unwrap();
    let (_, ledger) = Ledger::record(|| step(&mesh));
    let svg = svg(&ledger);
    let total: u64 = ledger.entries.iter().map(|e| e.bytes).sum();
    let by_axis = |axis: &str| -> u64 {
        ledger
            .entries
            .iter()
            .filter(|e| e.axes.join(", ") == axis)
            .map(|e| e.bytes)
            .sum()
    };
    for axis in ["dp", "tp"] {
        let words = format!(">{axis} {}<", anymesh_show::bytes(by_axis(axis) as f64));
        assert!(svg.contains(&words), "{words}\n{svg}");
    }
    assert!(
        ledger
            .figure()
            .title
            .contains(&anymesh_show::bytes(total as f64))
    );
}

#[test]
fn the_plan_of_a_step_its_explanation_and_a_difference() {
    let mesh = Mesh::new("dp=2, tp=2", &meta()).unwrap();
    let plan = |tries| {
        let options = PlanOptions {
            tries,
            ..PlanOptions::default()
        };
        spmd::plan(&options, || step(&mesh)).unwrap()
    };
    let (eager, planned) = (plan(0), plan(24));
    svg(&planned);
    svg(&eager.explain(5));
    check(&eager.explain_step(0));
    svg(&eager.diff(&planned));
    let again = StepPlan::from_json(&planned.to_json()).unwrap();
    assert_eq!(again.html(), planned.html());
}

/// The plan as a file could have it: every text in it is this one, and every number as large.
fn renamed(plan: &StepPlan, name: &str) -> StepPlan {
    let mut json = plan.to_json();
    let texts = |value: &mut Value| {
        for text in value.as_array_mut().unwrap() {
            *text = name.into();
        }
    };
    for step in json["steps"].as_array_mut().unwrap() {
        for key in ["op", "rule", "caller", "mesh", "choice"] {
            step[key] = name.into();
        }
        for key in ["operands", "targets", "results"] {
            texts(&mut step[key]);
        }
        for key in ["recv_bytes", "memory"] {
            step[key] = (u64::MAX / 1024).into();
        }
        step["seconds"] = 1e300.into();
        // Shardings of the mesh, which is none any more.
        let fields = step.as_object_mut().unwrap();
        for key in ["source", "sources", "holds"] {
            fields.remove(key);
        }
        let choices = fields.get_mut("alternatives");
        for choice in choices.and_then(Value::as_array_mut).into_iter().flatten() {
            choice["choice"] = name.into();
        }
    }
    StepPlan::from_json(&json).unwrap()
}

#[test]
fn plans_decisions_and_estimates_with_every_name() {
    let mesh = Mesh::new("dp=2, tp=2", &meta()).unwrap();
    let plan = spmd::plan(&PlanOptions::default(), || step(&mesh)).unwrap();
    assert!(plan.steps().iter().any(|s| !s.alternatives.is_empty()));
    let (result, decisions) = trace(|| step(&mesh));
    result.unwrap();
    for name in names() {
        let other = renamed(&plan, &name);
        assert_eq!(other.steps()[0].op, name);
        svg(&other);
        svg(&other.explain(5));
        svg(&plan.diff(&other));
        let cost = CostModel {
            name: name.clone(),
            ..CostModel::default()
        };
        let mesh = mesh.with_cost(cost);
        svg(&estimate(&mesh, step).unwrap());
        let mut decision = decisions[0].clone();
        (decision.op, decision.step) = (name.clone().leak(), name.leak());
        svg(&decision);
    }
}

#[test]
fn an_estimate_shows_computing_and_communication() {
    let mesh = Mesh::new("dp=2, tp=4", &meta()).unwrap();
    let mesh = mesh.with_cost(CostModel::preset("h100").unwrap());
    let estimate = estimate(&mesh, step).unwrap();
    let picture = svg(&estimate);
    assert!(picture.contains("computing") && picture.contains(">matmul</text>"));
}

#[test]
fn a_decision_shows_what_was_chosen_first() {
    let mesh = Mesh::new("dp=2, tp=4", &meta()).unwrap();
    let (result, decisions) = trace(|| step(&mesh));
    result.unwrap();
    assert!(!decisions.is_empty());
    for decision in &decisions {
        svg(decision);
        let text = decision.text();
        assert!(text.contains("chosen"), "{text}");
    }
}

#[test]
fn figures_can_be_put_together() {
    let mesh = mesh("dp=2");
    let both = Figure::new("both")
        .append(mesh.figure())
        .append(Figure::default());
    assert_eq!(svg(&both).matches("<svg").count(), 1);
}

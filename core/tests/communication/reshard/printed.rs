//! Plans as a person sees them, and as a program does.

use super::cases::device;
use anymesh_core::{
    DType, Mesh, Reduction, Shape, Sharding, TensorType,
    reshard::{CostModel, Link, Objective, Plan, plan, plan_across},
};

fn planned(cost: CostModel, from: &str, to: &str, objective: Objective) -> Plan {
    let mesh = Mesh::new("dp=2, tp=4", &device())
        .expect("a mesh")
        .with_cost(cost);
    let (from, to) = (
        TensorType::parse(from, &mesh).expect("a type"),
        TensorType::parse(to, &mesh).expect("a type"),
    );
    plan(
        &mesh,
        &from.shape,
        from.dtype,
        &from.sharding,
        &to.sharding,
        objective,
    )
    .expect("a plan")
}

#[track_caller]
fn expect(from: &str, to: &str, objective: Objective, table: &str) {
    assert_eq!(
        planned(CostModel::default(), from, to, objective).to_string(),
        table.trim()
    );
}

#[test]
fn few_bytes_may_take_many_steps() {
    expect(
        "f32[64, 64]{sum:tp}",
        "f32[64, 64]",
        Objective::Bytes,
        "
f32[64, 64]{sum:tp} -> f32[64, 64] on mesh(dp=2, tp=4)
  1  slice       -   f32[64, 64]{sum:tp} -> f32[64@dp, 64]{sum:tp}      0 B  peak 24576 B   0.0 us
  2  all_reduce  tp  f32[64@dp, 64]{sum:tp} -> f32[64@dp, 64]       12288 B  peak 16384 B  11.1 us
  3  all_gather  dp  f32[64@dp, 64] -> f32[64, 64]                   8192 B  peak 24576 B   6.1 us
receives 20480 B (combines partial values), peak 24576 B, 17.2 us",
    );
    expect(
        "f32[64, 64]{sum:tp}",
        "f32[64, 64]",
        Objective::Time,
        "
f32[64, 64]{sum:tp} -> f32[64, 64] on mesh(dp=2, tp=4)
  1  all_reduce  tp  f32[64, 64]{sum:tp} -> f32[64, 64]  24576 B  peak 32768 B  11.2 us
receives 24576 B (combines partial values), peak 32768 B, 11.2 us",
    );
}

#[test]
fn a_partial_product_is_scattered_then_gathered() {
    expect(
        "f32[64@dp, 64]{sum:tp}",
        "f32[64, 64@tp]",
        Objective::Bytes,
        "
f32[64@dp, 64]{sum:tp} -> f32[64, 64@tp] on mesh(dp=2, tp=4)
  1  reduce_scatter  tp  f32[64@dp, 64]{sum:tp} -> f32[64@dp, 64@tp]  6144 B  peak 10240 B  8.1 us
  2  all_gather      dp  f32[64@dp, 64@tp] -> f32[64, 64@tp]          2048 B   peak 6144 B  6.0 us
receives 8192 B (combines partial values), peak 10240 B, 14.1 us",
    );
}

#[test]
fn one_axis_for_another_is_an_exchange() {
    expect(
        "f32[64@tp, 64]",
        "f32[64@dp, 64]",
        Objective::Bytes,
        "
f32[64@tp, 64] -> f32[64@dp, 64] on mesh(dp=2, tp=4)
  1  exchange  tp,dp  f32[64@tp, 64] -> f32[64@dp, 64]  8192 B  peak 12288 B  7.1 us
receives 8192 B (lower bound 8192 B), peak 12288 B, 7.1 us",
    );
}

#[test]
fn slicing_and_filling_sends_nothing() {
    expect(
        "f32[64, 64]",
        "f32[64@tp, 64]{max:dp}",
        Objective::Time,
        "
f32[64, 64] -> f32[64@tp, 64]{max:dp} on mesh(dp=2, tp=4)
  1  slice  -  f32[64, 64] -> f32[64@tp, 64]{max:dp}  0 B  peak 20480 B  0.0 us
receives 0 B (lower bound 0 B), peak 20480 B, 0.0 us",
    );
    expect(
        "f32[5@tp]",
        "f32[5@tp]",
        Objective::Time,
        "
f32[5@tp] -> f32[5@tp] on mesh(dp=2, tp=4)
receives 0 B (lower bound 0 B), peak 8 B, 0.0 us",
    );
}

#[test]
fn a_slow_axis_carries_as_little_as_it_can() {
    let mut cost = CostModel::default();
    cost.axes.insert(
        "dp".into(),
        Link {
            latency: 20e-6,
            bandwidth: 10e9,
        },
    );
    let plan = planned(
        cost,
        "f32[8192, 8192]{sum:dp, sum:tp}",
        "f32[8192, 8192]",
        Objective::Time,
    );
    assert_eq!(
        plan.to_string(),
        "
f32[8192, 8192]{sum:dp, sum:tp} -> f32[8192, 8192] on mesh(dp=2, tp=4)
  1  reduce_scatter  tp  f32[8192, 8192]{sum:dp, sum:tp} -> f32[8192@tp, 8192]{sum:dp}  201326592 B  peak 335544320 B  2.02 ms
  2  all_reduce      dp  f32[8192@tp, 8192]{sum:dp} -> f32[8192@tp, 8192]                67108864 B  peak 134217728 B  6.76 ms
  3  all_gather      tp  f32[8192@tp, 8192] -> f32[8192, 8192]                          201326592 B  peak 335544320 B  2.02 ms
receives 469762048 B (combines partial values), peak 335544320 B, 10.80 ms"
            .trim()
    );
}

#[test]
fn a_transfer_prints_what_happens_on_both_meshes() {
    let (source, mesh) = (
        Mesh::new("dp=2, tp=4", &device()).expect("a mesh"),
        Mesh::new("x=3", &device()).expect("a mesh"),
    );
    let (from, to) = (
        Sharding::replicated().partial_over(1, Reduction::Sum),
        Sharding::replicated().cut(0, 0),
    );
    let plan = plan_across(
        &source,
        &from,
        &mesh,
        &to,
        &Shape::from([64, 64]),
        DType::F32,
    )
    .expect("a plan");
    assert_eq!(
        plan.to_string(),
        "
f32[64, 64]{sum:tp} on mesh(dp=2, tp=4) -> f32[64@x, 64] on mesh(x=3)
  1  slice           -   f32[64, 64]{sum:tp} -> f32[64, 64@dp]{sum:tp}     0 B  peak 24576 B  0.0 us
  2  reduce_scatter  tp  f32[64, 64@dp]{sum:tp} -> f32[64@tp, 64@dp]    6144 B  peak 10240 B  8.1 us
  3  transfer        -   f32[64@tp, 64@dp] -> f32[64@x, 64]             4864 B   peak 7680 B  8.0 us
receives 11008 B (combines partial values), peak 24576 B, 16.1 us"
            .trim()
    );
    assert_eq!(plan.to_json()["recv_bytes"], plan.recv_bytes);
}

#[test]
fn programs_get_the_same_as_json() {
    let plan = planned(
        CostModel::default(),
        "f32[64@dp, 64]{sum:tp}",
        "f32[64, 64@tp]",
        Objective::Bytes,
    )
    .to_json();
    assert_eq!(
        (
            &plan["recv_bytes"],
            &plan["lower_bound"],
            &plan["peak_bytes"]
        ),
        (&8192.into(), &serde_json::Value::Null, &10240.into())
    );
    let step = &plan["steps"][0];
    assert_eq!(
        (&step["kind"], &step["axes"][0], &step["to"]),
        (
            &"reduce_scatter".into(),
            &"tp".into(),
            &"f32[64@dp, 64@tp]".into()
        )
    );
    assert_eq!(
        (&step["dims"], &step["partial"]),
        (&serde_json::json!([[0], [1]]), &serde_json::json!([]))
    );
}

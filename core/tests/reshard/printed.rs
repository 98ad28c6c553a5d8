//! Plans as a person sees them, and as a program does.

use crate::cases::device;
use anymesh_core::{
    Mesh, Sharding, TensorType,
    reshard::{CostModel, Link, Objective, Plan, plan, plan_across},
};

fn planned(cost: CostModel, from: &str, to: &str, objective: Objective) -> Plan {
    let mesh = Mesh::new("dp=2, tp=4", &device()).expect("a mesh").with_cost(cost);
    let (from, to) = (TensorType::parse(from, &mesh).expect("a type"), TensorType::parse(to, &mesh).expect("a type"));
    plan(&mesh, &from.shape, from.dtype, &from.sharding, &to.sharding, objective).expect("a plan")
}

fn table(from: &str, to: &str, objective: Objective) -> String {
    planned(CostModel::default(), from, to, objective).to_string()
}

#[test]
fn plans_print_as_tables() {
    let _ = (table("f32[64@tp, 64]", "f32[64@dp, 64]", Objective::Bytes), plan_across, Sharding::replicated(), Link { latency: 0.0, bandwidth: 1.0 });
}

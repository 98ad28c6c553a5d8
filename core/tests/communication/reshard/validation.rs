//! What the validator refuses.

use super::cases::{mesh, tensor};
use anymesh_core::{
    DType, Reduction, Shape, Sharding,
    reshard::{Collective, Objective, Plan, plan, run},
};

fn sample() -> (Plan, Shape, Sharding, Sharding) {
    let shape = Shape::from([8, 8]);
    let from = Sharding::replicated()
        .cut(0, 0)
        .partial_over(1, Reduction::Sum);
    let to = Sharding::replicated().cut(1, 0).cut(1, 1);
    let plan = plan(
        &mesh(&[2, 4]),
        &shape,
        DType::I32,
        &from,
        &to,
        Objective::Bytes,
    )
    .expect("a plan");
    (plan, shape, from, to)
}

#[test]
fn a_good_plan_is_valid_for_what_it_was_made_for_alone() {
    let (plan, shape, from, to) = sample();
    assert!(plan.steps.len() > 1, "{plan}");
    plan.validate(&mesh(&[2, 4]), &shape, &from, &to)
        .expect("valid");
    assert!(plan.validate(&mesh(&[4, 2]), &shape, &from, &to).is_err());
    assert!(
        plan.validate(&mesh(&[2, 4]), &Shape::from([8, 9]), &from, &to)
            .is_err()
    );
    assert!(plan.validate(&mesh(&[2, 4]), &shape, &to, &to).is_err());
    assert!(plan.validate(&mesh(&[2, 4]), &shape, &from, &from).is_err());
}

#[test]
fn broken_plans_are_refused_with_the_step_that_breaks() {
    let (good, shape, from, to) = sample();
    let error = |plan: &Plan| {
        plan.validate(&mesh(&[2, 4]), &shape, &from, &to)
            .expect_err("a broken plan")
            .to_string()
    };
    let mut plan = good.clone();
    plan.steps.pop();
    assert!(error(&plan).contains("ends at"), "{}", error(&plan));
    let mut plan = good.clone();
    plan.steps.remove(0);
    assert!(
        error(&plan).contains("step 1 starts from"),
        "{}",
        error(&plan)
    );
    let mut plan = good.clone();
    plan.steps[0].kind = Collective::AllGather;
    assert!(
        error(&plan).contains("step 1: no all_gather"),
        "{}",
        error(&plan)
    );
    // An exchange combines nothing.
    let mut plan = good.clone();
    plan.steps[0].kind = Collective::Exchange;
    assert!(
        error(&plan).contains("step 1: no exchange"),
        "{}",
        error(&plan)
    );
    let mut plan = good.clone();
    plan.steps[0].axes.reverse();
    plan.steps[0].axes.push(0);
    assert!(error(&plan).contains("step 1"), "{}", error(&plan));
    let mut plan = good;
    plan.steps[0].to = Sharding::replicated().cut(7, 0);
    assert!(plan.validate(&mesh(&[2, 4]), &shape, &from, &to).is_err());
}

#[test]
fn an_exchange_may_stand_for_any_collective_that_combines_nothing() {
    let mesh = mesh(&[4]);
    let (rows, columns) = (
        Sharding::replicated().cut(0, 0),
        Sharding::replicated().cut(1, 0),
    );
    let x = tensor(&mesh, &[5, 6], &rows);
    let mut plan = plan(
        &mesh,
        x.shape(),
        DType::I32,
        &rows,
        &columns,
        Objective::Bytes,
    )
    .expect("a plan");
    plan.steps[0].kind = Collective::Exchange;
    super::cases::expect_values(
        &run(&x, &plan.valid_for(&x).expect("valid")).expect("runs"),
        &|| "exchange".into(),
    );
}

#[test]
fn a_plan_runs_only_on_the_tensor_it_is_for() {
    let mesh = mesh(&[4]);
    let (rows, whole) = (Sharding::replicated().cut(0, 0), Sharding::replicated());
    let plan = plan(
        &mesh,
        &Shape::from([4, 4]),
        DType::I32,
        &rows,
        &whole,
        Objective::Bytes,
    )
    .expect("a plan");
    let valid = plan
        .validate(&mesh, &Shape::from([4, 4]), &rows, &whole)
        .expect("valid");
    run(&tensor(&mesh, &[4, 4], &rows), &valid).expect("runs");
    assert!(run(&tensor(&mesh, &[4, 4], &whole), &valid).is_err());
    assert!(run(&tensor(&mesh, &[4, 5], &rows), &valid).is_err());
}

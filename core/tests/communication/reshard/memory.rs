//! Plans under a ceiling.

use super::cases::{expect_values, mesh, tensor};
use anymesh_conformance::sweep::shardings;
use anymesh_core::{
    DType, Error, Mesh, Shape, Sharding,
    reshard::{Objective, Plan, plan, run},
};

fn with_memory(sizes: &[usize], memory: u64) -> Mesh {
    let mesh = mesh(sizes);
    let mut cost = mesh.cost().clone();
    cost.memory = Some(memory);
    mesh.with_cost(cost)
}

fn rows_to_columns(mesh: &Mesh, objective: Objective) -> Result<Plan, Error> {
    let (rows, columns) = (
        Sharding::replicated().cut(0, 0),
        Sharding::replicated().cut(1, 0),
    );
    plan(
        mesh,
        &Shape::from([64, 64]),
        DType::F32,
        &rows,
        &columns,
        objective,
    )
}

#[test]
fn a_plan_goes_a_longer_way_round_to_stay_below_the_ceiling() {
    for objective in [Objective::Bytes, Objective::Time] {
        let free = rows_to_columns(&mesh(&[2, 4]), objective).expect("a plan");
        assert_eq!((free.steps.len(), free.peak_bytes), (1, 16384));
        // Half of the tensor before, a slice of it while it moves.
        let tight = rows_to_columns(&with_memory(&[2, 4], 12 << 10), objective).expect("a plan");
        assert!(
            tight.peak_bytes <= 12 << 10
                && tight.recv_bytes > free.recv_bytes
                && tight.steps.len() > 1,
            "{tight}"
        );
    }
}

#[test]
fn the_error_names_the_smallest_peak_and_that_much_is_enough() {
    for objective in [Objective::Bytes, Objective::Time] {
        let error =
            rows_to_columns(&with_memory(&[2, 4], 9000), objective).expect_err("too little memory");
        let Error::Memory {
            needed,
            ceiling: 9000,
            ..
        } = error
        else {
            panic!("{error}")
        };
        assert_eq!(needed, 8192 + 2048);
        assert_eq!(
            rows_to_columns(&with_memory(&[2, 4], needed), objective)
                .expect("enough")
                .peak_bytes,
            needed
        );
        assert!(rows_to_columns(&with_memory(&[2, 4], needed - 1), objective).is_err());
    }
}

#[test]
fn plans_below_a_ceiling_hold_their_values() {
    let dims = [6, 5];
    let all = shardings(2, 2, &[anymesh_core::Reduction::Sum]);
    let mut longer = 0;
    for memory in [60, 120, 160, 200] {
        let mesh = with_memory(&[2, 3], memory);
        for from in &all {
            let x = tensor(&mesh, &dims, from);
            for to in &all {
                match plan(&mesh, x.shape(), DType::I32, from, to, Objective::Bytes) {
                    Ok(plan) => {
                        assert!(plan.steps.is_empty() || plan.peak_bytes <= memory, "{plan}");
                        longer +=
                            usize::from(plan.lower_bound.is_some_and(|b| b < plan.recv_bytes));
                        expect_values(
                            &run(&x, &plan.valid_for(&x).expect("valid")).expect("runs"),
                            &|| plan.to_string(),
                        );
                    }
                    Err(Error::Memory { needed, .. }) => assert!(needed > memory),
                    Err(other) => panic!("{other}"),
                }
            }
        }
    }
    assert!(longer > 0, "the ceiling never mattered");
}

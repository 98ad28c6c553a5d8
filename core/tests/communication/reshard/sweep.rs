//! Every pair of shardings, run and checked.

use super::cases::{expect_values, mesh, tensor};
use anymesh_conformance::sweep::shardings;
use anymesh_core::{
    DType, Reduction, Shape,
    reshard::{Objective, plan, run},
};

/// Reshards between all pairs and checks every element on every rank; returns the number of
/// reshards.
fn sweep(
    sizes: &[usize],
    dims: &[usize],
    reductions: &[Reduction],
    objectives: &[Objective],
) -> usize {
    let mesh = mesh(sizes);
    let shape = Shape::from(dims);
    let all = shardings(dims.len(), sizes.len(), reductions);
    for from in &all {
        let x = tensor(&mesh, dims, from);
        for to in &all {
            for objective in objectives {
                let plan = plan(&mesh, &shape, DType::I32, from, to, *objective).expect("a plan");
                let case = || format!("{objective:?}\n{plan}");
                let valid = plan
                    .validate(&mesh, &shape, from, to)
                    .unwrap_or_else(|e| panic!("{e}: {}", case()));
                let y = run(&x, &valid).unwrap_or_else(|e| panic!("{e}: {}", case()));
                assert_eq!(y.sharding(), to);
                expect_values(&y, &case);
                if let Some(bound) = plan.lower_bound {
                    assert!(plan.recv_bytes >= bound, "below the bound: {}", case());
                    assert!(
                        *objective == Objective::Time || plan.recv_bytes == bound,
                        "not at the bound: {}",
                        case()
                    );
                    assert!(
                        *objective == Objective::Time || plan.steps.len() <= 1,
                        "more than one step: {}",
                        case()
                    );
                }
            }
        }
    }
    all.len() * all.len() * objectives.len()
}

const BOTH: [Objective; 2] = [Objective::Bytes, Objective::Time];
const SUM: [Reduction; 1] = [Reduction::Sum];

#[test]
fn all_pairs_of_one_dimension_hold_their_values() {
    for sizes in [&[2][..], &[3], &[2, 2], &[2, 3], &[2, 2, 2]] {
        // Even, uneven, fewer rows than ranks, none.
        for n in [12, 5, 7, 2, 1, 0] {
            assert!(sweep(sizes, &[n], &SUM, &BOTH) > 0);
        }
    }
}

#[test]
fn all_pairs_of_two_dimensions_hold_their_values() {
    for sizes in [&[2][..], &[3], &[2, 2], &[2, 3]] {
        for dims in [[6, 12], [5, 3], [2, 7], [1, 1], [0, 4]] {
            assert!(sweep(sizes, &dims, &SUM, &BOTH) > 0);
        }
    }
}

#[test]
fn all_pairs_of_two_dimensions_on_three_axes_hold_their_values() {
    assert_eq!(sweep(&[2, 2, 2], &[5, 3], &SUM, &BOTH), 2 * 92 * 92);
    assert_eq!(sweep(&[2, 2, 2], &[8, 4], &[], &BOTH), 2 * 49 * 49);
}

#[test]
fn all_pairs_of_three_dimensions_hold_their_values() {
    for sizes in [&[2][..], &[3], &[2, 2], &[2, 3]] {
        for dims in [[6, 6, 6], [3, 5, 2], [1, 2, 3]] {
            assert!(sweep(sizes, &dims, &SUM, &BOTH) > 0);
        }
    }
}

#[test]
fn all_pairs_of_three_dimensions_on_three_axes_hold_their_values() {
    assert_eq!(sweep(&[2, 2, 2], &[3, 2, 5], &[], &BOTH), 2 * 106 * 106);
    assert_eq!(
        sweep(&[2, 2, 2], &[2, 3, 1], &SUM, &[Objective::Bytes]),
        176 * 176
    );
}

#[test]
fn scalars_are_combined_and_filled() {
    for sizes in [&[2][..], &[3], &[2, 3]] {
        assert!(
            sweep(
                sizes,
                &[],
                &[Reduction::Sum, Reduction::Max, Reduction::Prod],
                &BOTH
            ) > 0
        );
    }
}

#[test]
fn every_reduction_combines_and_fills_and_one_becomes_another() {
    use Reduction::{Max, Min, Prod, Sum};
    for dims in [&[5][..], &[2, 3]] {
        assert!(sweep(&[2, 3], dims, &[Sum, Max, Min, Prod], &BOTH) > 0);
    }
    assert!(sweep(&[2, 2, 2], &[3], &[Sum, Max, Min], &BOTH) > 0);
}

#[test]
fn an_axis_of_one_rank_changes_nothing() {
    assert!(sweep(&[1, 3], &[5], &SUM, &BOTH) > 0);
    assert!(sweep(&[2, 1], &[3, 2], &[Reduction::Max], &BOTH) > 0);
}

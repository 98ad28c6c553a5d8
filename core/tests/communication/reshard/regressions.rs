//! What other systems got wrong, and where this one could.

use super::cases::{device, expect_values, mesh, tensor, value};
use anymesh_core::{
    DType, Mesh, Reduction, Shape, Sharding, Tensor, TensorType,
    reshard::{Collective, Objective, Plan, plan, run},
    transport::{Faulty, InProcess},
};
use std::sync::Arc;

fn sharding(mesh: &Mesh, dims: &[usize], text: &str) -> Sharding {
    TensorType::parse(text, mesh)
        .map(|t| (t.shape == Shape::from(dims)).then_some(t.sharding))
        .expect("a type")
        .expect("the type of this shape")
}

/// Reshards between two types by both objectives and checks every element; answers with the plan of
/// fewest bytes.
#[track_caller]
fn reshard(sizes: &[usize], from: &str, to: &str) -> Plan {
    let mesh = mesh(sizes);
    let dims = TensorType::parse(from, &mesh).expect("a type").shape;
    let (from, to) = (
        sharding(&mesh, dims.dims(), from),
        sharding(&mesh, dims.dims(), to),
    );
    let x = tensor(&mesh, dims.dims(), &from);
    let plan = |objective| plan(&mesh, &dims, DType::I32, &from, &to, objective).expect("a plan");
    for plan in [plan(Objective::Bytes), plan(Objective::Time)] {
        let y = run(&x, &plan.valid_for(&x).expect("a valid plan")).expect("the plan runs");
        expect_values(&y, &|| plan.to_string());
    }
    plan(Objective::Bytes)
}

fn kinds(plan: &Plan) -> Vec<Collective> {
    plan.steps.iter().map(|s| s.kind).collect()
}

/// Paddle crashes: with pieces of ceil(n / p) rows the last rank has none, or less than none.
#[test]
fn five_and_six_rows_over_four_ranks_gather_and_scatter() {
    for n in [5, 6] {
        assert_eq!(
            kinds(&reshard(
                &[4],
                &format!("i32[{n}@a, 3]"),
                &format!("i32[{n}, 3]")
            )),
            [Collective::AllGather]
        );
        assert_eq!(
            kinds(&reshard(
                &[4],
                &format!("i32[{n}, 3]"),
                &format!("i32[{n}@a, 3]")
            )),
            [Collective::Slice]
        );
        assert_eq!(
            kinds(&reshard(
                &[4],
                &format!("i32[{n}, 3]{{sum:a}}"),
                &format!("i32[{n}@a, 3]")
            )),
            [Collective::ReduceScatter]
        );
    }
}

/// Paddle refuses an all-to-all whose dimensions do not divide.
#[test]
fn an_uneven_dimension_becomes_another_uneven_dimension() {
    assert_eq!(
        kinds(&reshard(&[4], "i32[5@a, 7]", "i32[5, 7@a]")),
        [Collective::AllToAll]
    );
    assert_eq!(
        kinds(&reshard(&[2, 3], "i32[5@a@b, 7]", "i32[5, 7@a@b]")),
        [Collective::AllToAll]
    );
    assert_eq!(
        kinds(&reshard(&[2, 2], "i32[3@a, 5@b]", "i32[3@b, 5@a]")),
        [Collective::Permute]
    );
    assert_eq!(
        kinds(&reshard(&[2, 3], "i32[7@a@b, 2]", "i32[7@b@a, 2]")),
        [Collective::Permute]
    );
    assert_eq!(
        kinds(&reshard(&[2, 3], "i32[7@a, 5@b]", "i32[7@b, 5@a]")),
        [Collective::Exchange]
    );
}

/// PyTorch PR 194457: a gather merged over two mesh dimensions loses rows of a (5, 3) tensor on a
/// 2x2 mesh.
#[test]
fn a_gather_merged_over_two_axes_keeps_all_rows_of_an_uneven_dimension() {
    for from in [
        "i32[5@a@b, 3]",
        "i32[5@b@a, 3]",
        "i32[5, 3@a@b]",
        "i32[5@a, 3@b]",
        "i32[5@b, 3@a]",
    ] {
        let plan = reshard(&[2, 2], from, "i32[5, 3]");
        assert_eq!(
            (kinds(&plan), plan.steps[0].axes.len()),
            (vec![Collective::AllGather], 2),
            "{plan}"
        );
    }
}

/// Paddle's reduce-scatter always adds, whatever the reduction.
#[test]
fn partial_maxima_and_minima_scatter_over_uneven_rows() {
    for (reduction, n) in [("max", 5), ("min", 7), ("max", 2), ("min", 3)] {
        let (from, to) = (
            format!("i32[{n}, 2]{{{reduction}:a}}"),
            format!("i32[{n}@a, 2]"),
        );
        assert_eq!(
            kinds(&reshard(&[4], &from, &to)),
            [Collective::ReduceScatter]
        );
        let (from, to) = (
            format!("i32[{n}, 2]{{{reduction}:a, {reduction}:b}}"),
            format!("i32[{n}@b@a, 2]"),
        );
        assert_eq!(
            kinds(&reshard(&[2, 3], &from, &to))[0],
            Collective::ReduceScatter
        );
    }
}

#[test]
fn a_scatter_merged_over_two_axes_cuts_in_the_order_of_the_destination() {
    for to in ["i32[5@a@b]", "i32[5@b@a]"] {
        let plan = reshard(&[2, 3], "i32[5]{max:a, max:b}", to);
        assert_eq!(
            (kinds(&plan), plan.steps[0].axes.len()),
            (vec![Collective::ReduceScatter], 2),
            "{plan}"
        );
    }
}

/// Rows 1 to 2 of 4 over 3 ranks, scattered over 2: the first gets the row, though half of one row
/// is no row.
#[test]
fn a_scatter_into_a_dimension_that_is_cut_already_follows_the_global_cut() {
    for n in [4, 5, 7, 8, 10, 11] {
        for reduction in ["sum", "max"] {
            let plan = reshard(
                &[3, 2],
                &format!("i32[2, {n}@a]{{{reduction}:b}}"),
                &format!("i32[2, {n}@a@b]"),
            );
            assert_eq!(kinds(&plan), [Collective::ReduceScatter]);
        }
    }
}

/// Paddle fills zeros for every reduction, which is wrong for maxima of negative numbers.
#[test]
fn whole_values_become_partial_maxima_with_the_identity_elsewhere() {
    let mesh = mesh(&[3]);
    let x = tensor(&mesh, &[4], &Sharding::replicated());
    let y = x.reshard("[_]{max:a}").expect("a partial maximum");
    assert_eq!(
        y.shards()[0].1.to_vec::<i32>().expect("values"),
        (0..4).map(value).collect::<Vec<_>>()
    );
    assert_eq!(
        y.shards()[2].1.to_vec::<i32>().expect("values"),
        [i32::MIN; 4]
    );
    expect_values(&y.reshard("[@a]").expect("whole again"), &|| "max".into());
}

#[test]
fn a_partial_sum_becomes_a_partial_maximum() {
    let plan = reshard(&[2, 2], "i32[5]{sum:a}", "i32[5]{max:a}");
    assert_eq!(kinds(&plan), [Collective::AllReduce, Collective::Slice]);
    assert_eq!(plan.lower_bound, None);
}

#[test]
fn a_cut_becomes_partial_by_gathering_on_the_first_rank() {
    let plan = reshard(&[4], "i32[6@a]", "i32[6]{sum:a}");
    // Rank 0 has one of six elements.
    assert_eq!((plan.recv_bytes, plan.lower_bound), (20, Some(20)));
}

#[test]
fn bools_combine_by_and_and_or() {
    let mesh = mesh(&[2, 2]);
    for (reduction, expected) in [
        (Reduction::And, [false, false, true]),
        (Reduction::Or, [true, false, true]),
    ] {
        let ty = TensorType {
            dtype: DType::Bool,
            shape: Shape::from([3]),
            sharding: Sharding::replicated()
                .partial_over(0, reduction)
                .partial_over(1, reduction),
        };
        let part =
            |odd: bool| Tensor::from_slice(&[odd, false, true], [3], &device()).expect("a part");
        let x = Tensor::from_shards(
            &ty,
            &mesh,
            &[part(false), part(true), part(true), part(false)],
        )
        .expect("a tensor");
        assert_eq!(
            x.full_tensor()
                .expect("whole")
                .to_vec::<bool>()
                .expect("values"),
            expected
        );
        assert_eq!(
            x.reshard("[@b@a]")
                .expect("cut")
                .to_vec::<bool>()
                .expect("values"),
            expected
        );
    }
}

#[test]
fn copies_of_a_result_are_not_made_again() {
    // What one rank's group needs, although there are two of each.
    let cases = [
        ("[@a, _]", "[_, _]", 1, 4 * 24),
        ("[_, _]{sum:a}", "[_, _]", 1, 2 * 96),
        ("[@a, _]", "[_, @a]", 1, 2 * 24),
        ("[_, _]{max:a}", "[@a, _]", 1, 2 * 48),
    ];
    for (from, to, calls, bytes) in cases {
        let transport = Arc::new(Faulty::new(Arc::new(InProcess), []));
        let mesh = mesh(&[2, 2]).with_transport(transport.clone());
        let x = Tensor::from_fn([4, 6], &device(), |at| (at[0] * 6 + at[1]) as i32)
            .and_then(|x| x.to_mesh(&mesh, from))
            .expect("a tensor");
        let before = transport.counts();
        x.reshard(to).expect("a reshard");
        let after = transport.counts();
        assert_eq!(
            (after.calls - before.calls, after.bytes - before.bytes),
            (calls, bytes),
            "{from} to {to}"
        );
    }
}

#[test]
fn a_mesh_of_many_axes_is_planned_in_bounded_time() {
    let axes: Vec<String> = ('a'..='p').map(|name| format!("{name}=2")).collect();
    for (axes, n) in [(axes[..10].join(", "), 10), (axes.join(", "), 16)] {
        let mesh = Mesh::new(&axes, &device()).expect("a mesh");
        let shape = Shape::from([1 << 20, 1 << 10, 64]);
        let partial = (0..n).fold(Sharding::replicated(), |s, a| {
            s.partial_over(a, Reduction::Sum)
        });
        let (mut rows, mut columns) = (Sharding::replicated(), Sharding::replicated());
        for a in 0..n {
            (rows, columns) = (rows.cut(0, a), columns.cut(1, n - 1 - a));
        }
        for objective in [Objective::Bytes, Objective::Time] {
            let plan =
                |from, to| plan(&mesh, &shape, DType::F32, from, to, objective).expect("a plan");
            assert_eq!(kinds(&plan(&partial, &rows)), [Collective::ReduceScatter]);
            assert_eq!(plan(&rows, &columns).lower_bound.map(|b| b > 0), Some(true));
            plan(
                &Sharding::replicated().partial_over(3, Reduction::Max),
                &columns,
            );
        }
    }
}

#[test]
fn bad_input_is_refused() {
    let mesh = mesh(&[2]);
    let whole = Sharding::replicated();
    let huge = Shape::from([usize::MAX, 2]);
    assert!(
        plan(
            &mesh,
            &huge,
            DType::F32,
            &whole,
            &whole.clone().cut(0, 0),
            Objective::Time
        )
        .is_err()
    );
    // One of no elements is fine, whatever its other sizes.
    let none = Shape::from([usize::MAX, usize::MAX, 0]);
    assert_eq!(
        plan(
            &mesh,
            &none,
            DType::F32,
            &whole.clone().cut(0, 0),
            &whole,
            Objective::Time
        )
        .expect("a plan")
        .recv_bytes,
        0
    );
    let mut cost = mesh.cost().clone();
    cost.link.bandwidth = 0.0;
    let error = plan(
        &mesh.with_cost(cost),
        &Shape::from([4]),
        DType::F32,
        &whole,
        &whole.clone().cut(0, 0),
        Objective::Time,
    );
    assert!(error.is_err_and(|e| e.to_string().contains("bandwidth")));
}

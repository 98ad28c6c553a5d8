//! How few bytes plans need, against other planners and against all there is.

use super::cases::mesh;
use anymesh_conformance::sweep::shardings;
use anymesh_core::{
    DType, Mesh, Placement, Reduction, Shape, Sharding,
    reshard::{Objective, plan},
};
use std::collections::HashMap;

fn placements(text: &str) -> Sharding {
    let placements: Vec<Placement> = text
        .split(' ')
        .map(|p| match p {
            "R" => Placement::Replicate,
            "P" => Placement::Partial(Reduction::Sum),
            shard => Placement::Shard(shard[1..].parse().expect("a dimension")),
        })
        .collect();
    Sharding::from_placements(&placements)
}

#[test]
fn no_pair_needs_more_bytes_than_the_best_sequence_of_collectives() {
    let facts: serde_json::Value =
        serde_json::from_str(include_str!("../../facts/reshard_plans.json"))
            .expect("the recorded plans");
    let rows = facts["rows"].as_array().expect("rows");
    let mesh = mesh(&[2, 4]);
    let (mut better, mut pairs) = (0, 0);
    for row in rows {
        let n = row[0].as_u64().expect("a size") as usize;
        let (from, to) = (
            placements(row[1].as_str().expect("a source")),
            placements(row[2].as_str().expect("a destination")),
        );
        let plan = plan(
            &mesh,
            &Shape::from([n, n]),
            DType::F32,
            &from,
            &to,
            Objective::Bytes,
        )
        .expect("a plan");
        let recorded = row[3].as_u64().expect("bytes");
        assert_eq!(plan.lower_bound, row[4].as_u64(), "{plan}");
        assert!(
            plan.recv_bytes <= recorded,
            "{plan}\nwhere {recorded} B would do"
        );
        assert!(
            row[4].is_null() || Some(plan.recv_bytes) == plan.lower_bound,
            "{plan}"
        );
        better += usize::from(plan.recv_bytes < recorded);
        pairs += 1;
    }
    assert_eq!(pairs, 270);
    println!("{pairs} pairs, {better} with fewer bytes than any sequence of collectives");
    assert!(
        better > 60,
        "exchanges beat collectives in about a third of the pairs"
    );
}

#[test]
fn pairs_that_are_not_partial_need_exactly_what_ranks_lack() {
    for (sizes, shapes) in [
        (&[2, 4][..], [&[64, 64][..], &[13, 7, 5]]),
        (&[2, 2, 2], [&[64, 64], &[13, 7, 5]]),
    ] {
        let mesh = mesh(sizes);
        for dims in shapes {
            let all = shardings(dims.len(), sizes.len(), &[]);
            for (from, to) in all
                .iter()
                .flat_map(|from| all.iter().map(move |to| (from, to)))
            {
                let plan = plan(
                    &mesh,
                    &Shape::from(dims),
                    DType::BF16,
                    from,
                    to,
                    Objective::Bytes,
                )
                .expect("a plan");
                assert_eq!(
                    plan.recv_bytes,
                    2 * lacking(&mesh, &Shape::from(dims), from, to),
                    "{plan}"
                );
                assert_eq!(plan.lower_bound, Some(plan.recv_bytes));
            }
        }
    }
}

/// Elements that the worst rank lacks, from first principles.
fn lacking(mesh: &Mesh, shape: &Shape, from: &Sharding, to: &Sharding) -> u64 {
    let new: Vec<usize> = to
        .partial()
        .filter(|p| !from.partial().any(|q| q == *p))
        .map(|(a, _)| a)
        .collect();
    (0..mesh.ranks())
        .filter(|rank| new.iter().all(|a| mesh.coordinate(*rank, *a) == 0))
        .map(|rank| {
            let (have, want) = (from.region(mesh, rank, shape), to.region(mesh, rank, shape));
            (want.numel() - have.intersect(&want).map_or(0, |r| r.numel())) as u64
        })
        .max()
        .expect("a mesh has ranks")
}

/// The shardings that combining some partial axes in one step leads to, with the elements received.
fn reductions(mesh: &Mesh, shape: &Shape, from: &Sharding) -> Vec<(Sharding, u64)> {
    let axes: Vec<usize> = from.partial().map(|(a, _)| a).collect();
    let mut out = vec![];
    for order in orders(&axes).into_iter().filter(|o| !o.is_empty()) {
        let k: u64 = order.iter().map(|a| mesh.size(*a) as u64).product();
        let whole = order.iter().fold(from.clone(), |s, a| s.without(*a));
        let elements = |s: &Sharding| {
            (0..mesh.ranks())
                .map(|r| s.region(mesh, r, shape).numel() as u64)
                .max()
                .expect("ranks")
        };
        out.push((whole.clone(), 2 * (k - 1) * elements(from) / k));
        for d in 0..shape.rank() {
            let cut = order.iter().fold(whole.clone(), |s, a| s.cut(d, *a));
            let received = (k - 1) * elements(&cut);
            out.push((cut, received));
        }
    }
    out
}

/// Every subset of `axes` in every order.
fn orders(axes: &[usize]) -> Vec<Vec<usize>> {
    let mut all = vec![vec![]];
    for i in 0..axes.len() {
        let rest: Vec<usize> = axes.iter().copied().filter(|a| *a != axes[i]).collect();
        all.extend(
            orders(&rest)
                .into_iter()
                .map(|tail| [&[axes[i]][..], &tail].concat()),
        );
    }
    all
}

#[test]
fn partial_sources_take_the_fewest_bytes_that_any_path_takes() {
    for (sizes, dims) in [
        (&[2, 4][..], &[16, 16][..]),
        (&[4, 2], &[16, 16, 8]),
        (&[2, 2, 2], &[16, 8]),
        (&[2, 2, 2], &[8, 8, 8]),
        (&[3, 2], &[36]),
    ] {
        let (mesh, shape) = (mesh(sizes), Shape::from(dims));
        let all = shardings(dims.len(), sizes.len(), &[Reduction::Sum]);
        let number: HashMap<&Sharding, usize> =
            all.iter().enumerate().map(|(i, s)| (s, i)).collect();
        // Any step at all: moving everything anywhere, partial or not, and combining.
        let mut steps: Vec<Vec<(usize, u64)>> = vec![];
        for from in &all {
            let kept = |to: &Sharding| from.partial().all(|p| to.partial().any(|q| q == p));
            let mut edges: Vec<(usize, u64)> = all
                .iter()
                .enumerate()
                .filter(|(_, to)| kept(to))
                .map(|(i, to)| (i, lacking(&mesh, &shape, from, to)))
                .collect();
            edges.extend(
                reductions(&mesh, &shape, from)
                    .into_iter()
                    .map(|(to, elements)| (number[&to], elements)),
            );
            steps.push(edges);
        }
        for (i, from) in all.iter().enumerate().filter(|(_, s)| s.is_partial()) {
            let least = shortest(&steps, i);
            for (j, to) in all.iter().enumerate() {
                let plan =
                    plan(&mesh, &shape, DType::I32, from, to, Objective::Bytes).expect("a plan");
                assert_eq!(plan.recv_bytes, 4 * least[j], "{plan}");
            }
        }
    }
}

fn shortest(steps: &[Vec<(usize, u64)>], from: usize) -> Vec<u64> {
    let mut least = vec![u64::MAX; steps.len()];
    let mut open = vec![true; steps.len()];
    least[from] = 0;
    while let Some(i) = (0..steps.len())
        .filter(|i| open[*i] && least[*i] < u64::MAX)
        .min_by_key(|i| least[*i])
    {
        open[i] = false;
        for (j, elements) in &steps[i] {
            least[*j] = least[*j].min(least[i] + elements);
        }
    }
    least
}

#[test]
fn the_fastest_plan_is_never_slower_than_the_leanest_and_never_lighter() {
    for sizes in [&[2, 4][..], &[2, 2, 2]] {
        let mesh = mesh(sizes);
        for dims in [[64, 64], [8192, 8192]] {
            let all = shardings(2, sizes.len(), &[Reduction::Sum]);
            for (from, to) in all
                .iter()
                .flat_map(|from| all.iter().map(move |to| (from, to)))
            {
                let plan = |objective| {
                    plan(&mesh, &Shape::from(dims), DType::F32, from, to, objective)
                        .expect("a plan")
                };
                let (lean, fast) = (plan(Objective::Bytes), plan(Objective::Time));
                assert!(
                    fast.seconds <= lean.seconds && fast.recv_bytes >= lean.recv_bytes,
                    "{fast}\n{lean}"
                );
                assert_eq!(
                    fast,
                    plan(Objective::Time),
                    "the same question has the same answer"
                );
            }
        }
    }
}

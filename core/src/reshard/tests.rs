//! Prices against what ranks hold, one by one, and against the plans that they promise.

use super::{
    Held, Objective, Price,
    grid::{Geometry, Traffic, bits},
    plan,
};
use crate::{DType, Mesh, Reduction, Shape, Sharding, meta};

/// Numbers that look random and are the same every time.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
        (self.0 >> 33) as usize % n
    }

    fn mesh(&mut self) -> Mesh {
        let sizes = [1, 2, 2, 3, 4];
        let axes: Vec<String> = (0..=self.below(3))
            .map(|a| format!("m{a}={}", sizes[self.below(5)]))
            .collect();
        Mesh::new(&axes.join(","), &meta()).expect("a mesh")
    }

    fn shape(&mut self) -> Shape {
        let sizes = [1, 2, 3, 4, 5, 6, 7, 8, 12, 24];
        (0..=self.below(3)).map(|_| sizes[self.below(10)]).collect()
    }

    fn sharding(&mut self, mesh: &Mesh, rank: usize, partial: bool) -> Sharding {
        let mut order: Vec<usize> = (0..mesh.axes().len()).collect();
        for i in 1..order.len() {
            order.swap(i, self.below(i + 1));
        }
        order
            .into_iter()
            .fold(Sharding::replicated(), |s, axis| match self.below(4) {
                0 => s,
                3 if partial => s.partial_over(axis, Reduction::Sum),
                _ => s.cut(self.below(rank), axis),
            })
    }
}

/// What the worst rank lacks and holds, from a look at every rank.
fn looked_at(mesh: &Mesh, shape: &Shape, from: &Sharding, to: &Sharding) -> Traffic {
    let idle = to.partial_mask() & !from.partial_mask();
    let mut worst = Traffic::default();
    for rank in 0..mesh.ranks() {
        let (have, want) = (from.region(mesh, rank, shape), to.region(mesh, rank, shape));
        let common = have.intersect(&want).map_or(0, |both| both.numel());
        worst.both = worst.both.max((have.numel() + want.numel()) as u64);
        if bits(idle).all(|axis| mesh.coordinate(rank, axis) == 0) {
            worst.missing = worst.missing.max((want.numel() - common) as u64);
        }
    }
    worst
}

#[test]
fn what_ranks_lack_is_known_without_looking_at_each() {
    let mut dice = Dice(1);
    let (mut even, mut uneven) = (0, 0);
    for _ in 0..20_000 {
        let (mesh, shape) = (dice.mesh(), dice.shape());
        let geometry = Geometry::new(&mesh, &shape);
        let (from, to) = (
            dice.sharding(&mesh, shape.rank(), true),
            dice.sharding(&mesh, shape.rank(), true),
        );
        let idle = to.partial_mask() & !from.partial_mask();
        let expected = looked_at(&mesh, &shape, &from, &to);
        let compared = geometry.compare(&geometry.grid(&from), &geometry.grid(&to), idle);
        let what = || format!("{shape} on {mesh} from {from:?} to {to:?}");
        assert_eq!(compared, expected, "{}", what());
        match geometry.even(&from, &to) {
            Some(found) => {
                assert_eq!(found, expected, "{}", what());
                even += 1;
            }
            None => uneven += 1,
        }
    }
    assert!(even > 2_000 && uneven > 2_000, "{even} and {uneven}");
}

#[test]
fn a_price_is_what_the_plan_takes() {
    let mut dice = Dice(2);
    let (mut bounds, mut reached) = (0, 0);
    for _ in 0..4_000 {
        let (mesh, shape) = (dice.mesh(), dice.shape());
        let (from, to) = (
            dice.sharding(&mesh, shape.rank(), true),
            dice.sharding(&mesh, shape.rank(), true),
        );
        let planned = plan(&mesh, &shape, DType::F32, &from, &to, Objective::Bytes);
        let planned = planned.expect("a plan").recv_bytes;
        let held = Held::new(&mesh, &shape, DType::F32, &from);
        let what = || format!("{shape} on {mesh} from {from:?} to {to:?}");
        assert_eq!(held.exact(&to), Ok(planned), "{}", what());
        match held.price(&to) {
            Price::Exact(bytes) => assert_eq!(bytes, planned, "{}", what()),
            Price::AtLeast(bytes) => {
                assert!(bytes <= planned, "{}", what());
                bounds += 1;
                reached += usize::from(bytes == planned);
            }
        }
    }
    assert!(
        bounds > 500 && reached * 3 > bounds,
        "{reached} of {bounds}"
    );
}

#[test]
fn settling_a_value_takes_no_more_than_any_plan_that_cuts_by_its_partial_axes() {
    let mut dice = Dice(3);
    for _ in 0..2_000 {
        let (mesh, shape) = (dice.mesh(), dice.shape());
        let from = dice.sharding(&mesh, shape.rank(), true);
        let settled = Held::new(&mesh, &shape, DType::F32, &from).settled();
        let settled = settled.expect("bytes");
        let all_used = (0..mesh.axes().len())
            .all(|a| mesh.size(a) == 1 || (from.cut_mask() | from.partial_mask()) & 1 << a != 0);
        let mut ends = vec![];
        cut_further(from.whole(), from.partial_mask(), shape.rank(), &mut ends);
        let bytes = |to: &Sharding| {
            let plan = plan(&mesh, &shape, DType::F32, &from, to, Objective::Bytes);
            plan.expect("a plan").recv_bytes
        };
        let least = ends.iter().map(bytes).min().expect("an end");
        let what = || format!("{shape} on {mesh}: {from:?}");
        // Axes that are not used could cut first, for nothing.
        assert!(settled >= least, "{settled}, {least}: {}", what());
        assert!(
            !all_used || settled == least,
            "{settled}, {least}: {}",
            what()
        );
    }
}

/// All ways to cut a sharding further by some or none of these axes.
fn cut_further(at: Sharding, axes: u32, rank: usize, ends: &mut Vec<Sharding>) {
    for axis in bits(axes) {
        for d in 0..rank {
            cut_further(at.clone().cut(d, axis), axes & !(1 << axis), rank, ends);
        }
    }
    ends.push(at);
}

#[test]
fn large_meshes_are_priced_without_a_look_at_their_ranks() {
    for axes in ["dp=2048,tp=8", "dp=128,tp=128"] {
        let mesh = Mesh::new(axes, &meta()).expect("a mesh");
        let replicated = Sharding::replicated;
        // Even in every way, and uneven where it is only gathered or cut further.
        for (dims, shardings) in [
            (
                [1 << 15, 1 << 14],
                vec![
                    replicated().cut(0, 0),
                    replicated().cut(0, 1).cut(1, 0),
                    replicated().cut(1, 0).cut(0, 1),
                    replicated().cut(0, 0).cut(0, 1),
                    replicated().cut(0, 1).cut(0, 0),
                    replicated(),
                ],
            ),
            (
                [50_257, 12_289],
                vec![
                    replicated(),
                    replicated().cut(0, 0),
                    replicated().cut(0, 0).cut(1, 1),
                ],
            ),
        ] {
            let shape = Shape::from(dims);
            for from in &shardings {
                let held = Held::new(&mesh, &shape, DType::BF16, from);
                for to in &shardings {
                    held.price(to);
                }
                assert_eq!(held.walked(), 0, "{shape} on {mesh} from {from:?}");
            }
        }
    }
}

#[test]
fn prices_grow_with_bytes_and_scattering_is_never_dearer_than_reducing() {
    let mut dice = Dice(4);
    for _ in 0..1_500 {
        let (mesh, shape) = (dice.mesh(), dice.shape());
        let (from, to) = (
            dice.sharding(&mesh, shape.rank(), true),
            dice.sharding(&mesh, shape.rank(), false),
        );
        let what = || format!("{shape} on {mesh} from {from:?} to {to:?}");
        let price = |shape: &Shape, to: &Sharding, objective| {
            let plan = plan(&mesh, shape, DType::F32, &from, to, objective).expect("a plan");
            (plan.recv_bytes, plan.seconds)
        };
        let larger = shape.with(0, shape[0] * 2);
        let bytes = price(&shape, &to, Objective::Bytes).0;
        assert!(
            bytes <= price(&larger, &to, Objective::Bytes).0,
            "{}",
            what()
        );
        // Cut by the axes that were partial, or not.
        let whole = from.whole();
        for d in 0..shape.rank() {
            let scattered = from.partial().fold(whole.clone(), |s, (a, _)| s.cut(d, a));
            let by_bytes = |to| price(&shape, to, Objective::Bytes).0;
            assert!(by_bytes(&scattered) <= by_bytes(&whole), "{}", what());
            let by_time = |to| price(&shape, to, Objective::Time).1;
            assert!(by_time(&scattered) <= by_time(&whole), "{}", what());
        }
    }
}

//! Slices, flips, rolls, paddings and joins along dimensions that are cut: each rank fetches what it
//! lacks and nothing else. What it lacks is counted here element by element.

use crate::support::{mesh, same, tensor};
use anymesh_core::{
    Error, Mesh, Result, Sharding, Tensor,
    grad::{GradOptions, grad},
    ops::PadMode,
    spmd::{Ledger, Policy, trace, with_policy},
};
use std::collections::BTreeSet;

type Op = Box<dyn Fn(&Tensor) -> Result<Tensor>>;

/// Numbers from 1 on, so that each names its place and zero is none of them.
fn numbered(shape: &[usize]) -> Tensor {
    let n: usize = shape.iter().product();
    tensor(&(0..n).map(|i| (i + 1) as f32).collect::<Vec<_>>(), shape)
}

/// For each element of a result the place in the operand that it comes from; none where it is
/// filled in.
fn origins(shape: &[usize], op: &Op) -> (Vec<usize>, Vec<Option<usize>>) {
    let made = op(&numbered(shape)).unwrap();
    let places = made.to_vec::<f32>().unwrap();
    let place = |v: &f32| (*v as usize).checked_sub(1);
    (made.dims().to_vec(), places.iter().map(place).collect())
}

/// The flat places of a tensor that a rank holds, by the definition of a cut.
fn holds(mesh: &Mesh, sharding: &Sharding, rank: usize, shape: &[usize]) -> BTreeSet<usize> {
    let ranges: Vec<(usize, usize)> = (0..shape.len())
        .map(|d| {
            let (mut part, mut parts) = (0, 1);
            for axis in sharding.axes_of(d) {
                part = part * mesh.size(axis) + mesh.coordinate(rank, axis);
                parts *= mesh.size(axis);
            }
            (part * shape[d] / parts, (part + 1) * shape[d] / parts)
        })
        .collect();
    let mut places = vec![0];
    for (d, (start, end)) in ranges.into_iter().enumerate() {
        let further = |p: &usize| (start..end).map(|i| p * shape[d] + i).collect::<Vec<_>>();
        places = places.iter().flat_map(further).collect();
    }
    places.into_iter().collect()
}

/// Bytes that the worst rank lacks where a result of `to` is made of an operand of `from`, both cut
/// alike, and element `o` of the result needs `needs(o)`.
fn lacks(
    (mesh, sharding): (&Mesh, &Sharding),
    from: &[usize],
    to: &[usize],
    needs: impl Fn(usize) -> Vec<usize>,
) -> u64 {
    let missing = |rank| {
        let held = holds(mesh, sharding, rank, from);
        let wanted: BTreeSet<usize> = (holds(mesh, sharding, rank, to).into_iter())
            .flat_map(&needs)
            .collect();
        wanted.difference(&held).count() as u64 * 4
    };
    (0..mesh.ranks()).map(missing).max().unwrap()
}

/// Holds an op on a mesh against the same op on one device, to the bit, and its communication against
/// what ranks lack; the same for its gradient. Gives whether the result is cut as the operand is.
#[track_caller]
fn hold(axes: &str, cut: &str, shape: &[usize], name: &str, op: &Op, exact_gradient: bool) -> bool {
    let mesh = mesh(axes);
    let x = numbered(shape);
    let s = x.to_mesh(&mesh, cut).unwrap().require_grad().unwrap();
    let what = format!("{name} of {} on {mesh}", s.type_string());
    let ((y, ledger), decisions) = {
        let (y, decisions) = trace(|| Ledger::record(|| op(&s)));
        (y, decisions)
    };
    let y = y.unwrap_or_else(|e| panic!("{what}: {e}"));
    let expected = op(&x).unwrap();
    same(&y.detach(), &expected);
    let promised: u64 = decisions.iter().map(|d| d.solution.bytes).sum();
    assert_eq!(ledger.bytes(), promised, "{what}: as the solver said");
    let (to, origin) = origins(shape, op);
    let at = (&mesh, s.sharding());
    let count = lacks(at, shape, &to, |o| origin[o].into_iter().collect());
    let kept = y.sharding() == s.sharding();
    if kept {
        assert_eq!(ledger.bytes(), count, "{what}: what ranks lack");
        assert!(ledger.entries.len() <= 1, "{what}: one exchange");
    } else {
        assert!(ledger.bytes() < count, "{what}: or less");
    }
    // The gradient, of a sum with weights that tell elements apart.
    let weights = numbered(&to);
    let on_mesh = weights.to_mesh(&mesh, y.sharding().clone()).unwrap();
    let of = |y: &Tensor, w: &Tensor, x: &Tensor| {
        let sum = y.mul(w)?.sum(&[], false)?;
        Ok(grad(&[&sum], &[x], &GradOptions::default())?.remove(0))
    };
    let (g, ledger) = Ledger::record(|| of(&y, &on_mesh, &s));
    let g: Tensor = g.unwrap_or_else(|e: Error| panic!("gradient of {what}: {e}"));
    let plain = x.require_grad().unwrap();
    same(&g, &of(&op(&plain).unwrap(), &weights, &plain).unwrap());
    assert_eq!(g.sharding(), s.sharding(), "gradient of {what}");
    if kept && exact_gradient {
        let back = |i: usize| {
            (0..origin.len())
                .filter(|o| origin[*o] == Some(i))
                .collect()
        };
        let count = lacks(at, &to, shape, back);
        // Where its pull found a sharding that takes less, it still owes the way back.
        let own = ledger.entries.iter().filter(|e| e.op != "reshard");
        let own: u64 = own.map(|e| e.bytes).sum();
        let moved = ledger.bytes() != own;
        assert!(
            if moved { own < count } else { own == count },
            "gradient of {what}: {ledger}, {count} suffice"
        );
    }
    kept
}

/// The ways in which two dimensions lie on meshes of one and of two axes.
const LAYOUTS: &[(&str, &str)] = &[
    ("a=2", "[@a, _]"),
    ("a=3", "[@a, _]"),
    ("a=8", "[@a, _]"),
    ("a=2", "[_, @a]"),
    ("a=2, b=2", "[@a, @b]"),
    ("a=2, b=3", "[@b, @a]"),
    ("a=2, b=2", "[@a@b, _]"),
    ("a=2, b=3", "[@b@a, _]"),
];

/// Sizes even, uneven and smaller than the axes.
const SIZES: &[usize] = &[1, 3, 8, 13];

/// Holds an op of the first dimension in every layout and size; it must keep the cut somewhere.
#[track_caller]
fn hold_all(name: &str, exact_gradient: bool, op: impl Fn(usize) -> Option<Op>) {
    let mut kept = 0;
    for (axes, cut) in LAYOUTS {
        for &n in SIZES {
            if let Some(op) = op(n) {
                let name = format!("{name} of {n}");
                kept += usize::from(hold(axes, cut, &[n, 4], &name, &op, exact_gradient));
            }
        }
    }
    assert!(kept > 0, "{name} keeps its cut");
}

#[test]
fn slices_with_every_kind_of_step_fetch_borders() {
    let spans: [(Option<i64>, Option<i64>, i64); 12] = [
        (Some(1), None, 1),
        (None, Some(-1), 1),
        (Some(0), Some(4), 1),
        (Some(2), Some(3), 1),
        (Some(-2), None, 1),
        (Some(4), Some(4), 1),
        (None, None, 2),
        (Some(1), None, 3),
        (None, None, -1),
        (None, None, -2),
        (Some(-2), Some(1), -3),
        (Some(5), Some(1), -1),
    ];
    for (start, stop, step) in spans {
        hold_all(&format!("{start:?}:{stop:?}:{step}"), true, |_| {
            Some(Box::new(move |x| x.slice(0, start, stop, step)))
        });
    }
}

#[test]
fn narrowing_to_every_window_fetches_borders() {
    for n in [5usize, 8] {
        for start in 0..n {
            for len in 0..=n - start {
                let op: Op = Box::new(move |x| x.narrow(0, start, len));
                hold(
                    "a=3",
                    "[@a, _]",
                    &[n, 4],
                    &format!("{start}+{len}"),
                    &op,
                    true,
                );
            }
        }
    }
}

#[test]
fn rolls_by_every_shift_fetch_borders() {
    for shift in -7..=7 {
        let op: Op = Box::new(move |x| x.roll(&[shift], &[0]));
        for n in [6, 7] {
            let name = format!("roll by {shift}");
            hold("a=3", "[@a, _]", &[n, 4], &name, &op, true);
        }
    }
    for shift in [-9, -1, 1, 2, 4] {
        hold_all(&format!("roll by {shift}"), true, |_| {
            Some(Box::new(move |x| x.roll(&[shift], &[0])))
        });
    }
}

#[test]
fn rolls_and_flips_of_both_dimensions_are_one_exchange() {
    hold_all("flip", true, |_| Some(Box::new(|x| x.flip(&[0]))));
    hold_all("flip of both", true, |_| Some(Box::new(|x| x.flip(&[]))));
    for shifts in [[1, 1], [2, -1], [-3, 2]] {
        hold_all(&format!("roll by {shifts:?}"), true, |_| {
            Some(Box::new(move |x| x.roll(&shifts, &[0, 1])))
        });
    }
}

#[test]
fn paddings_fetch_borders() {
    let zero = PadMode::Constant(0.into());
    for pairs in [
        [(1, 0), (0, 0)],
        [(0, 2), (0, 0)],
        [(2, 3), (0, 0)],
        [(7, 1), (1, 2)],
    ] {
        hold_all(&format!("pad {pairs:?}"), true, |_| {
            Some(Box::new(move |x| x.pad(&pairs, zero)))
        });
    }
    for (mode, least) in [
        (PadMode::Reflect, 4),
        (PadMode::Replicate, 1),
        (PadMode::Circular, 3),
    ] {
        for pairs in [[(1, 0), (0, 0)], [(2, 3), (0, 0)], [(1, 2), (2, 1)]] {
            hold_all(&format!("pad {pairs:?} {mode:?}"), false, |n| {
                (n >= least).then(|| Box::new(move |x: &Tensor| x.pad(&pairs, mode)) as Op)
            });
        }
    }
}

#[test]
fn what_is_filled_in_is_not_added_up() {
    let mesh = mesh("a=2, b=2");
    let x = numbered(&[5, 4]);
    let s = x.to_mesh(&mesh, "[@a, _]{sum:b}").unwrap();
    let pad = |x: &Tensor, value: f64| x.pad(&[(1, 2), (0, 0)], PadMode::Constant(value.into()));
    for value in [0.0, 1.0, 2.5] {
        same(&pad(&s, value).unwrap(), &pad(&x, value).unwrap());
    }
    let line = numbered(&[8]);
    let s1 = line.to_mesh(&mesh, "[@a]{sum:b}").unwrap();
    let (rolled, ledger) = Ledger::record(|| s1.roll(&[1], &[0]).unwrap());
    assert_eq!(
        (rolled.type_string().as_str(), ledger.bytes()),
        ("f32[8@a]{sum:b}", 4)
    );
    same(&rolled, &line.roll(&[1], &[0]).unwrap());
    let ones = |x: &Tensor| x.pad(&[(1, 0)], PadMode::Constant(1.into()));
    let padded = ones(&s1).unwrap();
    assert!(!padded.sharding().is_partial(), "{}", padded.type_string());
    same(&padded, &ones(&line).unwrap());
    // A value that the dtype cannot hold is refused before anything is sent.
    let wrong = |x: &Tensor| x.cast(anymesh_core::DType::U8).and_then(|x| pad(&x, -1.0));
    assert_eq!(
        wrong(&s).map(drop).unwrap_err().to_string(),
        wrong(&x).map(drop).unwrap_err().to_string()
    );
}

#[test]
fn joining_and_splitting_a_cut_dimension_keeps_it_cut() {
    for (axes, cut) in LAYOUTS {
        let mesh = mesh(axes);
        for sizes in [[4, 4, 4], [5, 1, 7], [0, 3, 1], [2, 9, 2]] {
            let n = sizes.iter().sum();
            let (x, s) = (
                numbered(&[n, 4]),
                numbered(&[n, 4]).to_mesh(&mesh, *cut).unwrap(),
            );
            let ((parts, ledger), decisions) = trace(|| Ledger::record(|| s.split(&sizes, 0)));
            let parts = parts.unwrap();
            let promised: u64 = decisions.iter().map(|d| d.solution.bytes).sum();
            assert_eq!(ledger.bytes(), promised, "{sizes:?} of {}", s.type_string());
            let plain = x.split(&sizes, 0).unwrap();
            for (part, plain) in parts.iter().zip(&plain) {
                same(part, plain);
            }
            let ((y, ledger), decisions) =
                trace(|| Ledger::record(|| Tensor::concat(&parts.iter().collect::<Vec<_>>(), 0)));
            let y = y.unwrap();
            same(&y, &x);
            let promised: u64 = decisions.iter().map(|d| d.solution.bytes).sum();
            assert_eq!(ledger.bytes(), promised, "{sizes:?} to {}", s.type_string());
        }
    }
    // As many elements as a rank lacks of its part of the joined dimension, counted by hand: rank 1
    // has 2 and 3 of each and makes 4..8 of 0..4 and 0..4, so it lacks the first two of the second.
    let mesh = mesh("a=2");
    let x = numbered(&[4, 4]).to_mesh(&mesh, "[@a, _]").unwrap();
    let (y, ledger) = Ledger::record(|| Tensor::concat(&[&x, &x], 0).unwrap());
    assert_eq!(
        (y.type_string().as_str(), ledger.bytes()),
        ("f32[8@a, 4]", 2 * 4 * 4)
    );
    // A fused projection split in three, each cut as the whole is.
    let x = numbered(&[4, 12]).to_mesh(&mesh, "[_, @a]").unwrap();
    let (parts, ledger) = Ledger::record(|| x.chunk(3, 1).unwrap());
    assert_eq!(parts[1].type_string(), "f32[4, 4@a]");
    assert!(
        ledger.bytes() < 4 * 6 * 4,
        "{ledger}: less than to gather it"
    );
}

#[test]
fn shifted_labels_and_logits_of_a_cut_sequence_cost_a_token() {
    let mesh = mesh("dp=2, sp=4");
    let (tokens, logits) = (numbered(&[4, 16]), numbered(&[4, 16, 8]));
    let t = tokens.to_mesh(&mesh, "[@dp, @sp]").unwrap();
    let l = logits.to_mesh(&mesh, "[@dp, @sp, _]").unwrap();
    let (labels, ledger) = Ledger::record(|| t.get(anymesh_core::i![.., 1..]).unwrap());
    assert_eq!(labels.type_string(), "f32[4@dp, 15@sp]");
    // 16 over 4 are 4 each; 15 are 3, 4, 4, 4 from 0, 3, 7, 11 on, one further along: rank 0 needs
    // 1..4, which it has, rank 3 all of 12..16.
    assert_eq!(ledger.bytes(), 0, "{ledger}");
    same(&labels, &tokens.get(anymesh_core::i![.., 1..]).unwrap());
    let (shifted, ledger) = Ledger::record(|| l.get(anymesh_core::i![.., ..-1]).unwrap());
    assert_eq!(shifted.type_string(), "f32[4@dp, 15@sp, 8]");
    assert_eq!(
        ledger.bytes(),
        2 * 8 * 4,
        "a token of each of two sequences"
    );
    same(&shifted, &logits.get(anymesh_core::i![.., ..-1]).unwrap());
}

#[test]
fn a_window_of_a_long_dimension_moves_what_is_in_it() {
    let mesh = mesh("a=4");
    let x = numbered(&[4096, 3]);
    let s = x.to_mesh(&mesh, "[@a, _]").unwrap();
    let ((y, ledger), decisions) = trace(|| Ledger::record(|| s.narrow(0, 0, 4).unwrap()));
    assert_eq!(
        (y.type_string().as_str(), ledger.bytes()),
        ("f32[4@a, 3]", 3 * 4)
    );
    assert_eq!(ledger.entries[0].kind, "exchange");
    assert_eq!((ledger.entries[0].op, decisions.len()), ("narrow", 1));
    let rule = decisions[0].rule.to_string();
    assert_eq!(rule, "ab -> ab ; borders a 0..3 ; through any 0");
    same(&y, &x.narrow(0, 0, 4).unwrap());
}

#[test]
fn borders_are_refused_where_communication_must_be_explicit() {
    let mesh = mesh("a=2, b=2");
    let x = numbered(&[6, 4]).to_mesh(&mesh, "[@a, @b]").unwrap();
    let under = |axes: &[&str]| with_policy(Policy::Explicit, axes, || x.roll(&[1], &[0]));
    match under(&[]) {
        Err(Error::ImplicitCommunication { op, choices, .. }) => {
            assert_eq!(op, "roll");
            assert!(choices[0].description.contains("borders"), "{choices:?}");
            assert_eq!(choices[0].bytes, 2 * 4);
        }
        other => panic!("{other:?}"),
    }
    assert!(under(&["b"]).is_ok(), "nothing moves along b");
    assert!(under(&["a"]).is_err());
}

#[test]
fn a_flat_roll_takes_no_more_than_gathering_everything() {
    for (axes, cut, shape) in [
        ("a=4", "[@a, _]", [64, 64]),
        ("a=4", "[_, @a]", [64, 64]),
        ("a=2, b=2", "[@a, @b]", [64, 64]),
        ("a=4", "[@a, _]", [63, 5]),
    ] {
        let mesh = mesh(axes);
        let x = numbered(&shape);
        let s = x.to_mesh(&mesh, cut).unwrap();
        for shift in [1, 65, -3] {
            let (y, ledger) = Ledger::record(|| s.roll(&[shift], &[]).unwrap());
            same(&y, &x.roll(&[shift], &[]).unwrap());
            let (_, all) = Ledger::record(|| s.reshard("[_, _]").unwrap());
            assert!(
                ledger.bytes() <= all.bytes(),
                "{}: {ledger}",
                s.type_string()
            );
        }
    }
}

#[test]
fn a_user_cannot_ask_a_local_step_for_borders() {
    let mesh = mesh("a=2");
    let x = numbered(&[4]).to_mesh(&mesh, "[@a]").unwrap();
    let run = |x: &[Tensor]| Ok(vec![x[0].clone()]);
    let wrong = anymesh_core::spmd::apply("mine", "k -> k ; borders k 3..0", &[&x], run);
    assert!(matches!(wrong, Err(Error::Rule { .. })));
}

#[test]
fn of_what_data_selects_only_that_crosses() {
    let few = |n: usize| -> Vec<f32> {
        (0..n)
            .map(|i| if i % 37 == 5 { i as f32 } else { 0.0 })
            .collect()
    };
    for (axes, cut) in LAYOUTS {
        let mesh = mesh(axes);
        let x = tensor(&few(512), &[64, 8]);
        let s = x.to_mesh(&mesh, *cut).unwrap();
        let whole = Ledger::record(|| s.reshard("[_, _]").unwrap()).1.bytes();
        let (found, ledger) = Ledger::record(|| s.nonzero().unwrap());
        same(&found, &x.nonzero().unwrap());
        assert!(ledger.bytes() * 3 < whole, "{ledger}, {whole} to gather it");
        let held = |x: &Tensor| x.masked_select(&x.gt(100.0)?);
        let (found, ledger) = Ledger::record(|| held(&s).unwrap());
        same(&found, &held(&x).unwrap());
        assert!(ledger.bytes() * 3 < whole, "{ledger}, {whole} to gather it");
        let (found, ledger) = Ledger::record(|| s.unique().unwrap());
        let plain = x.unique().unwrap();
        same(&found.values, &plain.values);
        same(&found.inverse, &plain.inverse);
        same(&found.counts, &plain.counts);
        assert!(ledger.bytes() * 2 < whole, "{ledger}, {whole} to gather it");
        assert_eq!(found.inverse.sharding(), s.sharding());
    }
    // Counts and what was selected, and nothing else: rank 1 has one of three.
    let mesh = mesh("a=2");
    let x = tensor(&[0f32, 3.0, 0.0, 4.0, 0.0, 0.0, 0.0, 5.0], &[8]);
    let s = x.to_mesh(&mesh, "[@a]").unwrap();
    let (_, ledger) = Ledger::record(|| s.nonzero().unwrap());
    assert_eq!(ledger.bytes(), 4 + 2 * 4, "{ledger}");
}

#[test]
fn of_equal_values_on_several_ranks_the_first_is_kept() {
    let nan = |payload: u32| f32::from_bits(0x7fc0_0000 | payload);
    let values = [
        0.0,
        -0.0,
        nan(1),
        2.0,
        -0.0,
        0.0,
        2.0,
        nan(2),
        7.0,
        -0.0,
        7.0,
        0.0,
        nan(3),
        2.0,
        7.0,
        7.0,
        2.0,
        2.0,
        2.0,
        2.0,
        2.0,
        2.0,
        2.0,
        2.0,
        2.0,
        2.0,
        2.0,
        2.0,
        2.0,
        2.0,
        2.0,
        2.0,
    ];
    for shape in [[32, 1], [2, 16], [16, 2]] {
        let x = tensor(&values, &shape);
        let plain = x.unique().unwrap();
        for (axes, cut) in LAYOUTS {
            let s = x.to_mesh(&mesh(axes), *cut).unwrap();
            let found = s.unique().unwrap();
            same(&found.values, &plain.values);
            same(&found.inverse, &plain.inverse);
            same(&found.counts, &plain.counts);
        }
    }
}

//! Sorts, extremes and scans.

use super::*;

fn two((a, b): (Tensor, Tensor)) -> Vec<Tensor> {
    vec![a, b]
}

#[test]
fn sorts_of_every_placement_are_right() {
    for (shape, axis) in [
        (vec![5, 4], 0),
        (vec![3, 6], 1),
        (vec![1, 2], 1),
        (vec![0, 2], 0),
        (vec![7], 0),
    ] {
        let x = numbers(&shape);
        for (down, order) in [(false, Order::Ascending), (true, Order::Descending)] {
            sweep("sort", 0.0, &[&x], |t| t[0].sort(axis, order).map(two));
            sweep("argsort", 0.0, &[&x], |t| one(t[0].argsort(axis, order)));
            for k in [0, 1, 2, 5] {
                sweep("topk", 0.0, &[&x], |t| t[0].topk(k, axis, order).map(two));
                sweep("kthvalue", 0.0, &[&x], |t| {
                    t[0].kthvalue(k, axis, down).map(two)
                });
            }
        }
    }
}

#[test]
fn the_first_values_of_a_cut_dimension_come_from_candidates_and_ties_keep_their_order() {
    let mesh = Mesh::new("x=4", &device()).unwrap();
    let values: Vec<f32> = (0..64)
        .map(|i| {
            if i == 37 {
                f32::NAN
            } else {
                ((i * 13) % 4) as f32
            }
        })
        .collect();
    let x = Tensor::from_slice(&values, [64], &device()).unwrap();
    let s = x.to_mesh(&mesh, "[@x]").unwrap();
    for order in [Order::Ascending, Order::Descending] {
        let ((values, places), ledger) = Ledger::record(|| s.topk(5, 0, order).unwrap());
        let (v, p) = x.topk(5, 0, order).unwrap();
        assert_eq!(floats(&places), floats(&p));
        near(&values, &v, 0.0, "values");
        assert_eq!(
            ledger.bytes(),
            3 * 5 * 8,
            "five values and positions from each of the other ranks: {ledger}"
        );
        assert!(
            ledger
                .entries
                .iter()
                .all(|e| e.op == "topk" && e.caller.contains(file!())),
            "{ledger}"
        );
    }
    // The lowest values there are cannot be told from nothing: what fills up an empty rank must
    // never win.
    let low = Tensor::from_slice(&[f32::NEG_INFINITY; 3], [3], &device()).unwrap();
    let (values, places) = low
        .to_mesh(&mesh, "[@x]")
        .unwrap()
        .topk(3, 0, Order::Descending)
        .unwrap();
    assert_eq!(
        (floats(&values), floats(&places)),
        (vec![f32::NEG_INFINITY; 3], vec![0.0, 1.0, 2.0])
    );
}

#[test]
fn extremes_of_equal_values_on_different_ranks_are_the_first() {
    let mesh = Mesh::new("a=2, b=2", &device()).unwrap();
    let x = Tensor::from_slice(&[1i32, 3, 0, 3, 3, 0, 0, 3], [8], &device()).unwrap();
    for how in ["[@a]", "[@a@b]", "[@b@a]"] {
        let s = x.to_mesh(&mesh, how).unwrap();
        assert_eq!(floats(&s.argmax(Some(0), false).unwrap()), [1.0]);
        assert_eq!(floats(&s.argmin(Some(0), false).unwrap()), [2.0]);
        assert_eq!(
            floats(&s.topk(3, 0, Order::Descending).unwrap().1),
            [1.0, 3.0, 4.0]
        );
        assert_eq!(floats(&s.kthvalue(2, 0, false).unwrap().1), [5.0]);
        assert_eq!(
            floats(&s.cummax(0).unwrap().1),
            [0.0, 1.0, 1.0, 3.0, 4.0, 4.0, 4.0, 7.0]
        );
        assert_eq!(
            floats(&s.cummin(0).unwrap().1),
            [0.0, 0.0, 2.0, 2.0, 2.0, 5.0, 6.0, 6.0]
        );
    }
}

#[test]
fn places_of_queries_in_cut_sequences_add_up() {
    let (sorted, queries) = (
        numbers(&[9]).sort(0, Order::Ascending).unwrap().0,
        numbers(&[2, 3]),
    );
    let rows = numbers(&[2, 5]).sort(1, Order::Ascending).unwrap().0;
    for side in [Side::Left, Side::Right] {
        sweep("searchsorted", 0.0, &[&sorted, &queries], |t| {
            one(t[0].searchsorted(t[1], side))
        });
        sweep("searchsorted", 0.0, &[&rows, &queries], |t| {
            one(t[0].searchsorted(t[1], side))
        });
    }
    let none = numbers(&[0]);
    sweep("searchsorted", 0.0, &[&none, &queries], |t| {
        one(t[0].searchsorted(t[1], Side::Left))
    });
}

#[test]
fn scans_of_every_placement_are_right() {
    for (shape, axis) in [
        (vec![5, 3], 0),
        (vec![2, 6], 1),
        (vec![1, 2], 1),
        (vec![0, 3], 0),
        (vec![3, 0], 0),
        (vec![7], 0),
    ] {
        let x = numbers(&shape);
        sweep("cumsum", 0.0, &[&x], |t| one(t[0].cumsum(axis)));
        sweep("cumprod", 0.0, &[&x], |t| one(t[0].cumprod(axis)));
        sweep("cummax", 0.0, &[&x], |t| t[0].cummax(axis).map(two));
        sweep("cummin", 0.0, &[&x], |t| t[0].cummin(axis).map(two));
        sweep(
            "logcumsumexp",
            1e-6,
            &[&x],
            |t| one(t[0].logcumsumexp(axis)),
        );
        for dtype in [DType::I64, DType::U8, DType::Bool, DType::F16] {
            let x = x.abs().unwrap().cast(dtype).unwrap();
            sweep("cumsum", 0.0, &[&x], |t| one(t[0].cumsum(axis)));
            sweep("cummax", 0.0, &[&x], |t| t[0].cummax(axis).map(two));
        }
    }
}

#[test]
fn scans_of_cut_dimensions_exchange_totals_and_keep_nan() {
    let mesh = Mesh::new("x=4", &device()).unwrap();
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let x = Tensor::from_slice(
        &[-inf, -inf, 1.0, 2.0, 2.0, nan, 3.0, inf, nan, -inf],
        [10],
        &device(),
    )
    .unwrap();
    let s = x.to_mesh(&mesh, "[@x]").unwrap();
    for (sharded, whole) in [
        (s.cummax(0).unwrap(), x.cummax(0).unwrap()),
        (s.cummin(0).unwrap(), x.cummin(0).unwrap()),
        (
            s.neg().unwrap().cummax(0).unwrap(),
            x.neg().unwrap().cummax(0).unwrap(),
        ),
    ] {
        assert_eq!(floats(&sharded.1), floats(&whole.1));
        near(&sharded.0, &whole.0, 1e-30, "values");
    }
    near(
        &s.logcumsumexp(0).unwrap(),
        &x.logcumsumexp(0).unwrap(),
        1e-6,
        "logcumsumexp",
    );
    let long = numbers(&[1000]).to_mesh(&mesh, "[@x]").unwrap();
    let (sums, ledger) = Ledger::record(|| long.cumsum(0).unwrap());
    assert_eq!(
        (sums.type_string().as_str(), ledger.bytes()),
        ("f32[1000@x]", 3 * 4)
    );
}

//! Indexing, scattering, sorting, scanning, class losses and Einstein sums on meshes against the
//! same ops on one device.

mod sort;

use crate::support::{device, floats, hold, near, precision, whole_numbers as numbers};
use anymesh_core::{
    DType, Error, Mesh, Result, Tensor,
    backend::ScatterOp,
    ops::{CrossEntropyOptions, LossReduction, Order, Side},
    spmd::Ledger,
};

/// Indices into a dimension of size `len`, some from the end.
fn indices(shape: &[usize], len: usize) -> Tensor {
    let n: usize = shape.iter().product();
    let values: Vec<i32> = (0..n)
        .map(|i| ((i * 5 + 2) % (2 * len).max(1)) as i32 - len as i32)
        .collect();
    Tensor::from_slice(&values, shape, &device()).unwrap()
}

/// Runs `f` on layouts of its operands and compares with the unsharded result, to the bit without a
/// tolerance, or with the unsharded error.
#[track_caller]
fn sweep(
    name: &str,
    tolerance: f64,
    inputs: &[&Tensor],
    f: impl Fn(&[&Tensor]) -> Result<Vec<Tensor>>,
) {
    let inputs: Vec<Tensor> = inputs.iter().map(|x| (*x).clone()).collect();
    hold(name, precision(tolerance), 300, &inputs, |x| {
        f(&x.iter().collect::<Vec<_>>())
    });
}

fn one(result: Result<Tensor>) -> Result<Vec<Tensor>> {
    Ok(vec![result?])
}

#[test]
fn gather_and_take_along_axis_of_every_placement_are_right() {
    for (shape, axis, index) in [
        ([4, 6], 0, [3, 6]),
        ([5, 3], 1, [5, 4]),
        ([1, 3], 0, [2, 3]),
        ([3, 2], 1, [3, 0]),
    ] {
        let (x, i) = (numbers(&shape), indices(&index, shape[axis as usize]));
        sweep("gather", 0.0, &[&x, &i], |t| one(t[0].gather(axis, t[1])));
        sweep("take_along_axis", 0.0, &[&x, &i], |t| {
            one(t[0].take_along_axis(axis, t[1]))
        });
    }
    // The index is shorter than the source, or one of them broadcasts.
    let (x, i) = (numbers(&[5, 4]), indices(&[3, 2], 4));
    sweep("gather", 0.0, &[&x, &i], |t| one(t[0].gather(1, t[1])));
    let (x, i) = (numbers(&[1, 4]), indices(&[3, 2], 4));
    sweep("take_along_axis", 0.0, &[&x, &i], |t| {
        one(t[0].take_along_axis(1, t[1]))
    });
    let (x, i) = (
        numbers(&[3, 4]),
        indices(&[1, 5], 4).cast(DType::I64).unwrap(),
    );
    sweep("take_along_axis", 0.0, &[&x, &i], |t| {
        one(t[0].take_along_axis(1, t[1]))
    });
}

#[test]
fn every_dtype_is_looked_up_exactly() {
    let i = indices(&[7], 5);
    for dtype in [
        DType::F64,
        DType::F16,
        DType::BF16,
        DType::F8E4M3,
        DType::I64,
        DType::I32,
        DType::U32,
        DType::U8,
        DType::Bool,
    ] {
        let x = numbers(&[5, 3]).abs().unwrap().cast(dtype).unwrap();
        sweep("index_select", 0.0, &[&x, &i], |t| {
            one(t[0].index_select(0, t[1]))
        });
    }
    let zeros =
        Tensor::from_slice(&[-0f32, 0.0, -1.0, f32::NAN, f32::INFINITY], [5], &device()).unwrap();
    let mesh = Mesh::new("x=2", &device()).unwrap();
    let (s, i) = (
        zeros.to_mesh(&mesh, "[@x]").unwrap(),
        i.to_mesh(&mesh, "[_]").unwrap(),
    );
    near(
        &s.index_select(0, &i).unwrap(),
        &zeros.index_select(0, &i.full_tensor().unwrap()).unwrap(),
        0.0,
        "signs of zeros",
    );
}

#[test]
fn lookups_by_several_indices_of_every_placement_are_right() {
    let x = numbers(&[3, 4, 2]);
    let (i, j) = (indices(&[2, 1], 3), indices(&[3], 4));
    sweep("index_get", 0.0, &[&x, &i, &j], |t| {
        one(t[0].index_get(&[t[1], t[2]]))
    });
    sweep("gather_axes", 0.0, &[&x, &j, &i], |t| {
        one(t[0].gather_axes(&[(1, t[1]), (0, t[2])]))
    });
    let k = indices(&[3], 2);
    sweep("gather_axes", 0.0, &[&x, &i, &k], |t| {
        one(t[0].gather_axes(&[(0, t[1]), (2, t[2])]))
    });
    sweep("index_select", 0.0, &[&x, &j], |t| {
        one(t[0].index_select(1, t[1]))
    });
    let scalar = indices(&[], 3);
    sweep("index_get", 0.0, &[&x, &scalar], |t| {
        one(t[0].index_get(&[t[1]]))
    });
    for k in 0..4 {
        let nd = indices(&[5, k], 2);
        sweep("gather_nd", 0.0, &[&x, &nd], |t| one(t[0].gather_nd(t[1])));
    }
}

#[test]
fn embeddings_of_every_placement_are_right() {
    for v in [1, 4, 5] {
        let (table, ids) = (numbers(&[v, 3]), indices(&[2, 3], v));
        sweep("embedding", 0.0, &[&table, &ids], |t| {
            one(t[0].embedding(t[1]))
        });
    }
    let (table, none) = (numbers(&[4, 3]), indices(&[0], 4));
    sweep("embedding", 0.0, &[&table, &none], |t| {
        one(t[0].embedding(t[1]))
    });
}

#[test]
fn a_table_cut_along_its_vocabulary_is_looked_up_where_it_lies() {
    let mesh = Mesh::new("dp=2, tp=2", &device()).unwrap();
    let (table, ids) = (numbers(&[10, 4]), indices(&[6], 10));
    let (t, i) = (
        table.to_mesh(&mesh, "[@tp, _]").unwrap(),
        ids.to_mesh(&mesh, "[@dp]").unwrap(),
    );
    let (rows, ledger) = Ledger::record(|| t.embedding(&i).unwrap());
    assert_eq!(rows.type_string(), "f32[6@dp, 4]{sum:tp}");
    assert_eq!(ledger.entries, []);
    near(&rows, &table.embedding(&ids).unwrap(), 0.0, "embedding");
}

#[test]
fn an_indexed_dimension_that_is_cut_gives_what_take_along_axis_gives_whole() {
    let mesh = Mesh::new("x=4", &device()).unwrap();
    let (x, i) = (numbers(&[2, 6]), indices(&[2, 9], 6));
    let (s, r) = (
        x.to_mesh(&mesh, "[_, @x]").unwrap(),
        i.to_mesh(&mesh, "[_, _]").unwrap(),
    );
    let (y, ledger) = Ledger::record(|| s.take_along_axis(1, &r).unwrap());
    assert_eq!(
        (y.type_string().as_str(), ledger.bytes()),
        ("f32[2, 9]{sum:x}", 0)
    );
    near(
        &y,
        &x.take_along_axis(1, &i).unwrap(),
        0.0,
        "take_along_axis",
    );
}

#[test]
fn an_index_outside_the_whole_dimension_is_an_error_on_every_sharding() {
    let mesh = Mesh::new("x=2", &device()).unwrap();
    let x = numbers(&[4, 2]);
    for bad in [4, -5, i32::MAX, i32::MIN] {
        let i = Tensor::from_slice(&[0i32, bad], [2], &device()).unwrap();
        for sharding in ["[@x, _]", "[_, @x]", "[_, _]"] {
            let (s, r) = (
                x.to_mesh(&mesh, sharding).unwrap(),
                i.to_mesh(&mesh, "[_]").unwrap(),
            );
            let expected = |op| Error::IndexOutOfRange {
                op,
                index: bad.into(),
                len: 4,
            };
            assert_eq!(s.index_select(0, &r).unwrap_err(), expected("index_select"));
        }
    }
}

const MODES: [ScatterOp; 5] = [
    ScatterOp::Set,
    ScatterOp::Add,
    ScatterOp::Mul,
    ScatterOp::Min,
    ScatterOp::Max,
];

#[test]
fn scatters_along_an_axis_of_every_placement_are_right() {
    for mode in MODES {
        let (x, i, v) = (numbers(&[4, 3]), indices(&[5, 3], 4), numbers(&[5, 3]));
        sweep("scatter", 0.0, &[&x, &i, &v], |t| {
            one(t[0].scatter(0, t[1], t[2], mode))
        });
        sweep("put_along_axis", 0.0, &[&x, &i, &v], |t| {
            one(t[0].put_along_axis(0, t[1], t[2], mode))
        });
        // Only some rows are written, from only some of the values.
        let (i, v) = (indices(&[2, 4], 3), numbers(&[3, 5]));
        sweep("scatter", 0.0, &[&x, &i, &v], |t| {
            one(t[0].scatter(1, t[1], t[2], mode))
        });
        let (i, v) = (indices(&[1, 4], 3), numbers(&[4, 1]));
        sweep("put_along_axis", 0.0, &[&x, &i, &v], |t| {
            one(t[0].put_along_axis(1, t[1], t[2], mode))
        });
    }
    let bools = numbers(&[4, 3]).gt(0.0).unwrap();
    let (i, v) = (indices(&[2, 3], 4), numbers(&[2, 3]).lt(0.0).unwrap());
    sweep("scatter", 0.0, &[&bools, &i, &v], |t| {
        one(t[0].scatter(0, t[1], t[2], ScatterOp::Set))
    });
}

#[test]
fn writes_by_several_indices_of_every_placement_are_right() {
    let (x, i, j) = (numbers(&[3, 4]), indices(&[2, 1], 3), indices(&[3], 4));
    for mode in [
        ScatterOp::Set,
        ScatterOp::Add,
        ScatterOp::Mul,
        ScatterOp::Min,
        ScatterOp::Max,
    ] {
        for values in [numbers(&[2, 3]), numbers(&[3]), numbers(&[])] {
            sweep("index_put", 0.0, &[&x, &i, &j, &values], |t| {
                one(t[0].index_put(&[t[1], t[2]], t[3], mode))
            });
        }
        let (k, values) = (indices(&[5], 3), numbers(&[5, 4]));
        sweep("index_put", 0.0, &[&x, &k, &values], |t| {
            one(t[0].index_put(&[t[1]], t[2], mode))
        });
        let row = numbers(&[4]);
        sweep("index_put", 0.0, &[&x, &k, &row], |t| {
            one(t[0].index_put(&[t[1]], t[2], mode))
        });
    }
}

#[test]
fn additions_at_indices_of_every_placement_are_right() {
    for (shape, axis) in [([4, 3], 0), ([5, 2], 1), ([1, 3], 0)] {
        let mut from = shape;
        from[axis] = 5;
        let (x, i, v) = (numbers(&shape), indices(&[5], shape[axis]), numbers(&from));
        sweep("index_add", 0.0, &[&x, &i, &v], |t| {
            one(t[0].index_add(axis as i64, t[1], t[2]))
        });
    }
    let x = numbers(&[3, 4]);
    for (k, from) in [(1, vec![5, 4]), (2, vec![5])] {
        let (i, v) = (indices(&[5, k], 3), numbers(&from));
        sweep("scatter_nd_add", 0.0, &[&x, &i, &v], |t| {
            one(t[0].scatter_nd_add(t[1], t[2]))
        });
        sweep("scatter_nd", 0.0, &[&i, &v], |t| {
            one(Tensor::scatter_nd(t[0], t[1], [3, 4]))
        });
    }
    let (none, nothing) = (indices(&[0, 1], 3), numbers(&[0, 4]));
    sweep("scatter_nd_add", 0.0, &[&x, &none, &nothing], |t| {
        one(t[0].scatter_nd_add(t[1], t[2]))
    });
}

#[test]
fn counts_and_one_hot_of_every_placement_are_right() {
    for n in [0, 1, 5] {
        let x = indices(&[n], 4).remainder(4).unwrap();
        let weights = numbers(&[n]);
        sweep("bincount_bins", 0.0, &[&x], |t| {
            one(t[0].bincount_bins(None, 6))
        });
        sweep("bincount", 0.0, &[&x], |t| one(t[0].bincount(None, 2)));
        sweep("bincount_bins", 0.0, &[&x, &weights], |t| {
            one(t[0].bincount_bins(Some(t[1]), 6))
        });
    }
    let x = indices(&[3, 2], 4);
    sweep("one_hot", 0.0, &[&x], |t| one(t[0].one_hot(3)));
    sweep("one_hot", 0.0, &[&x], |t| one(t[0].one_hot(0)));
}

#[test]
fn a_sum_scattered_from_a_cut_index_counts_its_destination_once() {
    let mesh = Mesh::new("x=4", &device()).unwrap();
    let (x, i, v) = (numbers(&[6, 3]), indices(&[8, 1], 6), numbers(&[8, 3]));
    let s = |t: &Tensor, how: &str| t.to_mesh(&mesh, how).unwrap();
    let (y, ledger) = Ledger::record(|| {
        s(&x, "[_, _]")
            .scatter_nd_add(&s(&i, "[@x, _]"), &s(&v, "[@x, _]"))
            .unwrap()
    });
    assert_eq!(
        (y.type_string().as_str(), ledger.bytes()),
        ("f32[6, 3]{sum:x}", 0)
    );
    near(
        &y,
        &x.scatter_nd_add(&i, &v).unwrap(),
        0.0,
        "scatter_nd_add",
    );
    // A value for all positions is added at each of them, also where the positions are cut.
    let number = Tensor::new(2f32, &device()).unwrap();
    let rows = i.reshape([8]).unwrap();
    let y = s(&x, "[_, _]")
        .index_put(&[&s(&rows, "[@x]")], &s(&number, "[]"), ScatterOp::Add)
        .unwrap();
    assert_eq!(y.type_string(), "f32[6, 3]{sum:x}");
    near(
        &y,
        &x.index_put(&[&rows], &number, ScatterOp::Add).unwrap(),
        0.0,
        "index_put",
    );
}

#[test]
fn each_rank_writes_what_falls_into_its_part_of_the_destination() {
    let mesh = Mesh::new("x=3", &device()).unwrap();
    let (x, i, v) = (numbers(&[7, 2]), indices(&[9], 7), numbers(&[9, 2]));
    let s = |t: &Tensor, how: &str| t.to_mesh(&mesh, how).unwrap();
    let (y, ledger) = Ledger::record(|| {
        s(&x, "[@x, _]")
            .index_put(&[&s(&i, "[_]")], &s(&v, "[_, _]"), ScatterOp::Set)
            .unwrap()
    });
    assert_eq!(
        (y.type_string().as_str(), ledger.bytes()),
        ("f32[7@x, 2]", 0)
    );
    near(
        &y,
        &x.index_put(&[&i], &v, ScatterOp::Set).unwrap(),
        0.0,
        "index_put",
    );
    let bad = Tensor::from_slice(&[7i32; 9], [9], &device()).unwrap();
    let error = s(&x, "[@x, _]")
        .index_put(&[&s(&bad, "[_]")], &s(&v, "[_, _]"), ScatterOp::Set)
        .unwrap_err();
    assert_eq!(
        error,
        Error::IndexOutOfRange {
            op: "index_put",
            index: 7,
            len: 7
        }
    );
}

fn options(
    reduction: LossReduction,
    weight: Option<&Tensor>,
    ignore_index: Option<i64>,
    label_smoothing: f64,
) -> CrossEntropyOptions {
    CrossEntropyOptions {
        weight: weight.cloned(),
        ignore_index,
        label_smoothing,
        reduction,
    }
}

/// Classes, some of them ignored.
fn classes(shape: &[usize], count: usize) -> Tensor {
    let n: usize = shape.iter().product();
    let values: Vec<i64> = (0..n)
        .map(|i| {
            if i % 3 == 2 {
                -100
            } else {
                ((i * 5 + 1) % count) as i64
            }
        })
        .collect();
    Tensor::from_slice(&values, shape, &device()).unwrap()
}

#[test]
fn class_losses_of_every_placement_are_right() {
    for (shape, positions) in [
        (vec![4, 6], vec![4]),
        (vec![3, 2], vec![3]),
        (vec![2, 5, 3], vec![2, 3]),
        (vec![5], vec![]),
    ] {
        let c = shape[usize::from(shape.len() > 1)];
        let (x, y) = (numbers(&shape), classes(&positions, c));
        let weight = Tensor::from_slice(
            &(0..c).map(|i| 0.5 + i as f32).collect::<Vec<_>>(),
            [c],
            &device(),
        )
        .unwrap();
        let soft = numbers(&shape).abs().unwrap().mul(0.25).unwrap();
        for reduction in [LossReduction::None, LossReduction::Sum, LossReduction::Mean] {
            for smoothing in [0.0, 0.25] {
                sweep("cross_entropy", 1e-6, &[&x, &y], |t| {
                    one(t[0].cross_entropy(t[1], &options(reduction, None, Some(-100), smoothing)))
                });
                sweep("cross_entropy", 1e-6, &[&x, &soft], |t| {
                    one(t[0].cross_entropy(t[1], &options(reduction, None, None, smoothing)))
                });
            }
            let whole = y.abs().unwrap().remainder(c as i64).unwrap();
            sweep("cross_entropy", 1e-6, &[&x, &whole], |t| {
                one(t[0].cross_entropy(t[1], &options(reduction, None, None, 0.0)))
            });
            sweep("nll_loss", 1e-6, &[&x, &y], |t| {
                one(t[0].nll_loss(t[1], None, Some(-100), reduction))
            });
            if shape.len() == 2 {
                sweep("cross_entropy", 1e-6, &[&x, &y, &weight], |t| {
                    one(t[0].cross_entropy(t[1], &options(reduction, Some(t[2]), Some(-100), 0.25)))
                });
                sweep("cross_entropy", 1e-6, &[&x, &soft, &weight], |t| {
                    one(t[0].cross_entropy(t[1], &options(reduction, Some(t[2]), None, 0.25)))
                });
                sweep("nll_loss", 1e-6, &[&x, &y, &weight], |t| {
                    one(t[0].nll_loss(t[1], Some(t[2]), Some(-100), reduction))
                });
            }
        }
    }
}

#[test]
fn a_loss_over_a_cut_vocabulary_leaves_the_logits_where_they_are() {
    let mesh = Mesh::new("dp=2, tp=4", &device()).unwrap();
    let (n, v) = (16, 1000);
    let (x, y) = (numbers(&[n, v]), classes(&[n], v));
    let (s, t) = (
        x.to_mesh(&mesh, "[@dp, @tp]").unwrap(),
        y.to_mesh(&mesh, "[@dp]").unwrap(),
    );
    let options = CrossEntropyOptions::default();
    let (loss, ledger) = Ledger::record(|| s.cross_entropy(&t, &options).unwrap());
    near(&loss, &x.cross_entropy(&y, &options).unwrap(), 1e-6, "loss");
    let gathering = (n / 2 * v * 3 / 4 * 4) as u64;
    assert!(
        ledger.bytes() * 100 < gathering,
        "{} bytes where the logits are {gathering}: {ledger}",
        ledger.bytes()
    );
    assert!(
        ledger
            .entries
            .iter()
            .all(|e| e.op == "cross_entropy" && e.caller.contains(file!())),
        "{ledger}"
    );
    let bad = Tensor::from_slice(&vec![v as i64; n], [n], &device())
        .unwrap()
        .to_mesh(&mesh, "[@dp]")
        .unwrap();
    assert!(matches!(
        s.cross_entropy(&bad, &options),
        Err(Error::IndexOutOfRange {
            op: "cross_entropy",
            index: 1000,
            len: 1000
        })
    ));
}

#[test]
fn einstein_sums_of_every_placement_are_right() {
    let cases: [(&str, &[&[usize]]); 9] = [
        ("ij,jk->ik", &[&[4, 5], &[5, 3]]),
        ("ij->ji", &[&[3, 4]]),
        ("ij->", &[&[5, 2]]),
        ("ii->i", &[&[4, 4]]),
        ("iij,j", &[&[3, 3, 2], &[2]]),
        ("i,j->ij", &[&[1], &[4]]),
        ("...ij,...jk->...ik", &[&[2, 3, 2], &[1, 2, 3]]),
        ("b...,c...->bc", &[&[3, 4], &[2, 1]]),
        ("ij,jk,kl->il", &[&[2, 3], &[3, 2], &[2, 2]]),
    ];
    for (equation, shapes) in cases {
        let tensors: Vec<Tensor> = shapes.iter().map(|s| numbers(s)).collect();
        sweep(equation, 0.0, &tensors.iter().collect::<Vec<_>>(), |t| {
            one(Tensor::einsum(equation, t))
        });
    }
    let bytes = numbers(&[4, 3]).abs().unwrap().cast(DType::U8).unwrap();
    let ints = numbers(&[3]).cast(DType::I32).unwrap();
    sweep("ij,j->i", 0.0, &[&bytes, &ints], |t| {
        one(Tensor::einsum("ij,j->i", t))
    });
}

#[test]
fn an_equation_is_its_own_rule() {
    let mesh = Mesh::new("dp=2, tp=2", &device()).unwrap();
    let (x, w) = (numbers(&[4, 6, 2]), numbers(&[6, 8]));
    let (a, b) = (
        x.to_mesh(&mesh, "[@dp, @tp, _]").unwrap(),
        w.to_mesh(&mesh, "[@tp, _]").unwrap(),
    );
    let (y, ledger) = Ledger::record(|| Tensor::einsum("bks,kn->bsn", &[&a, &b]).unwrap());
    assert_eq!(
        (y.type_string().as_str(), ledger.bytes()),
        ("f32[4@dp, 2, 8]{sum:tp}", 0)
    );
    near(
        &y,
        &Tensor::einsum("bks,kn->bsn", &[&x, &w]).unwrap(),
        0.0,
        "einsum",
    );
}

//! Indexing against a model of NumPy's semantics, against NumPy's own answers, and one test for
//! each defect seen elsewhere.

#![allow(clippy::unwrap_used)]

use anymesh_conformance::indexing::{run, run_at};
use anymesh_core::{
    DType, Device, Element, Error, Index, Mesh, Result, Shape, Tensor, i, spmd::Ledger,
};

mod defects;
mod gradients;
#[path = "numpy/replay.rs"]
mod replay;

fn cpu() -> Device {
    anymesh_backend_cpu::device()
}

fn tensor<T: Element>(data: &[T], shape: impl Into<Shape>) -> Tensor {
    Tensor::from_slice(data, shape, &cpu()).unwrap()
}

fn iota(shape: &[usize]) -> Tensor {
    Tensor::arange(
        0,
        shape.iter().product::<usize>() as i64,
        1,
        DType::I32,
        &cpu(),
    )
    .unwrap()
    .reshape(shape)
    .unwrap()
}

fn ints(x: &Tensor) -> Vec<i32> {
    x.to_vec::<i32>().unwrap()
}

#[test]
fn ten_thousand_random_expressions_agree_with_the_model() {
    let report = pollster::block_on(run(&cpu(), 10_000, 1));
    assert!(report.failures.is_empty(), "{report}");
    // Most are valid, and some are not.
    assert!(
        report.refused > 50 && report.refused < report.expressions / 5,
        "{report}"
    );
}

#[test]
fn random_expressions_on_meshes_agree_with_the_model() {
    for (axes, seed) in [("a=2", 2), ("a=3", 3), ("a=2, b=2", 4)] {
        let mesh = Mesh::new(axes, &cpu()).unwrap();
        let report = pollster::block_on(run_at(&mesh, 300, seed));
        assert!(report.failures.is_empty(), "{axes}: {report}");
    }
}

#[test]
fn the_macro_takes_every_kind_of_entry() {
    let x = iota(&[4, 5, 6]);
    let (n, mask, places) = (2usize, x.lt(3).unwrap(), tensor(&[1i64, 0], [2]));
    let dims = |index: &[Index]| x.get(index).unwrap().dims().to_vec();
    assert_eq!(dims(&i![]), [4, 5, 6]);
    assert_eq!(dims(&i![...]), [4, 5, 6]);
    assert_eq!(dims(&i![.., .., 1]), [4, 5]);
    assert_eq!(dims(&i![n.., ..n, n..n + 1,]), [2, 2, 1]);
    assert_eq!(dims(&i![-1, ..=-2, 0..=2]), [4, 3]);
    assert_eq!(dims(&i![..;-1, 4..0;-2, ..=0;-1]), [4, 2, 6]);
    assert_eq!(dims(&i![1..;2, ..4;3, -3..-1;1]), [2, 2, 2]);
    assert_eq!(dims(&i![&mask]), [3]);
    assert_eq!(dims(&i![None, &places, ..., None]), [1, 2, 5, 6, 1]);
    assert_eq!(dims(&i![true, x.gt(500).unwrap(), false]), [0]);
}

#[test]
fn an_end_that_is_included_is_the_last_one_in_either_direction() {
    let x = iota(&[5]);
    assert_eq!(ints(&x.get(i![1..=3]).unwrap()), [1, 2, 3]);
    assert_eq!(ints(&x.get(i![..=-1]).unwrap()), [0, 1, 2, 3, 4]);
    assert_eq!(ints(&x.get(i![3..=0;-1]).unwrap()), [3, 2, 1, 0]);
    assert_eq!(ints(&x.get(i![3..=-4;-1]).unwrap()), [3, 2, 1]);
    assert_eq!(ints(&x.get(i![..=i64::MAX]).unwrap()), [0, 1, 2, 3, 4]);
    assert_eq!(ints(&x.get(i![3..usize::MAX]).unwrap()), [3, 4]);
}

#[test]
fn basic_indices_give_views_and_nothing_gives_the_tensor_itself() {
    let x = iota(&[4, 6]);
    assert!(
        x.get(i![]).unwrap().is(&x)
            && x.get(i![...]).unwrap().is(&x)
            && x.get(i![.., ..]).unwrap().is(&x)
    );
    let view = x.get(i![1..;2, None, ..;-2]).unwrap();
    assert_eq!(view.layout().strides.as_slice(), [12, 0, -2]);
    assert_eq!(view.layout().offset, 11);
    assert_eq!(x.get(i![2]).unwrap().layout().offset, 12);
}

#[test]
fn setting_leaves_the_old_tensor_and_its_views_alone() {
    let mut x = iota(&[2, 3]);
    let (before, view) = (x.clone(), x.get(i![.., 1..]).unwrap());
    x.set_(i![0], 9).unwrap();
    assert_eq!(ints(&x), [9, 9, 9, 3, 4, 5]);
    assert_eq!(ints(&before), [0, 1, 2, 3, 4, 5]);
    assert_eq!(ints(&view), [1, 2, 4, 5]);
}

#[test]
fn a_variable_that_gradients_are_for_is_not_replaced_behind_the_tape() {
    let mut w = tensor(&[1f32, 2.0], [2]).require_grad().unwrap();
    assert!(matches!(w.set_(i![0], 0), Err(Error::Gradient { .. })));
    let mut y = w.mul(2).unwrap();
    y.set_(i![0], 0).unwrap();
    let grads = y.backward_with(&tensor(&[1f32, 1.0], [2])).unwrap();
    assert_eq!(grads.of(&w).unwrap().to_vec::<f32>().unwrap(), [0.0, 2.0]);
}

#[test]
fn values_take_every_dtype_that_promotes_and_no_other() {
    let x = Tensor::zeros([2], DType::F32, &cpu()).unwrap();
    assert_eq!(
        x.set(i![0], &tensor(&[true], ()))
            .unwrap()
            .to_vec::<f32>()
            .unwrap(),
        [1.0, 0.0]
    );
    assert_eq!(
        x.set(i![1], &tensor(&[7i64], [1]))
            .unwrap()
            .to_vec::<f32>()
            .unwrap(),
        [0.0, 7.0]
    );
    let message = x.set(i![0], &tensor(&[1f64], ())).unwrap_err().to_string();
    assert!(
        message.contains("f64") && message.contains("cast"),
        "{message}"
    );
    let bytes = Tensor::zeros([2], DType::U8, &cpu()).unwrap();
    for wrong in [256.0, -1.0, 0.5, f64::NAN] {
        assert!(
            matches!(
                bytes.set(i![0], wrong),
                Err(Error::Argument { op: "set", .. })
            ),
            "{wrong}"
        );
    }
    assert_eq!(
        bytes.set(i![0], 255.0).unwrap().to_vec::<u8>().unwrap(),
        [255, 0]
    );
    let bools = tensor(&[false, false], [2]);
    assert_eq!(
        bools.set(i![1], true).unwrap().to_vec::<bool>().unwrap(),
        [false, true]
    );
    assert!(matches!(
        bools.add_at(i![1], true),
        Err(Error::DType { op: "add_at", .. })
    ));
}

/// The message of an error, which names the op.
fn refused(result: Result<Tensor>, words: &[&str]) {
    let message = result
        .and_then(|t| t.to_bytes().map(|_| t))
        .expect_err("must be refused")
        .to_string();
    assert!(words.iter().all(|word| message.contains(word)), "{message}");
}

#[test]
fn what_is_wrong_with_an_expression_is_said() {
    let x = iota(&[2, 3]);
    refused(x.get(i![0, 0, 0]), &["get", "3 axes", "[2, 3]", "None"]);
    refused(x.get(i![&x.lt(9).unwrap(), 0]), &["get", "3 axes"]);
    refused(x.get(i![..., 1, ...]), &["get", "`...` stands 2 times"]);
    refused(x.get(i![..;0]), &["get", "step is zero"]);
    refused(x.get(i![2]), &["get", "index 2", "size 2"]);
    refused(x.set(i![0, -4], 1), &["set", "index -4", "size 3"]);
    refused(
        x.get(i![.., &tensor(&[true, false], [2])]),
        &["get", "mask", "axis 1", "size 2", "has 3"],
    );
    refused(
        x.get(i![&tensor(&[0.0f32], [1])]),
        &["get", "f32", "i32", "bool"],
    );
    refused(
        x.get(i![&tensor(&[0i32, 1], [2]), &tensor(&[0i32, 1, 2], [3])]),
        &["get", "[2]", "[3]", "broadcast"],
    );
    refused(
        x.set(i![0], &tensor(&[1i32, 2], [2])),
        &["set", "[2]", "[3]"],
    );
    refused(
        x.set(i![&tensor(&[true, true], [2])], &tensor(&[1i32; 9], [3, 3])),
        &["set", "[3, 3]", "[2, 3]"],
    );
    refused(
        x.set(i![..0], &tensor(&[1i32; 6], [2, 3])),
        &["set", "[2, 3]", "[0, 3]"],
    );
    refused(
        x.add_at(i![&tensor(&[5i32], [1])], 1),
        &["index 5", "size 2"],
    );
}

#[test]
fn more_index_tensors_than_a_kernel_takes_are_checked_one_by_one() {
    let x = iota(&[2, 3, 2, 3, 2, 3]);
    let index = |last: i32| -> Vec<Index> {
        (0..6)
            .map(|d| tensor(&[0, if d == 5 { last } else { -1 }], [2]).into())
            .collect()
    };
    assert_eq!(ints(&x.get(index(2)).unwrap()), [0, 215]);
    assert_eq!(
        ints(
            &x.set(index(2), &tensor(&[7i32, 8], [2]))
                .unwrap()
                .get(index(-1))
                .unwrap()
        ),
        [7, 8]
    );
    // As a part of one long index this would be a place of its neighbour.
    for wrong in [3, -4] {
        assert!(matches!(
            x.get(index(wrong)),
            Err(Error::IndexOutOfRange { len: 3, .. })
        ));
        assert!(matches!(
            x.set(index(wrong), 0),
            Err(Error::IndexOutOfRange { len: 3, .. })
        ));
    }
    let mask = x.remainder(43).unwrap().eq(0).unwrap();
    assert_eq!(ints(&x.get(i![&mask]).unwrap()), [0, 43, 86, 129, 172, 215]);
}

#[test]
fn one_place_of_a_cut_axis_moves_that_place_and_setting_it_moves_nothing_else() {
    let mesh = Mesh::new("x=4", &cpu()).unwrap();
    let x = iota(&[64, 8]).to_mesh(&mesh, "[@x, _]").unwrap();
    let row = tensor(&[1i32; 8], [8]).to_mesh(&mesh, "[_]").unwrap();
    let (_, ledger) = Ledger::record(|| {
        assert_eq!(
            ints(&x.get(i![17]).unwrap()),
            (136..144).collect::<Vec<_>>()
        );
        assert_eq!(
            x.set(i![10..50;3], &row).unwrap().type_string(),
            "i32[64@x, 8]"
        );
        assert_eq!(
            x.set(i![&x.lt(100).unwrap()], -1).unwrap().type_string(),
            "i32[64@x, 8]"
        );
    });
    assert!(ledger.bytes() < x.numel() as u64, "{ledger}");
}

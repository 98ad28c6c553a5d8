//! Writing at places: scatters, sums of what meets, counts.

use crate::index::{floats, ints, iota, is_dtype_error, is_shape_error};
use crate::support::{device, tensor};
use anymesh_core::{DType, Error, Tensor, backend::ScatterOp};

/// `scatter` along axis 0 of a `[rows, columns]` matrix.
fn naive_scatter(
    dst: &[f32],
    columns: usize,
    index: &[i32],
    src: &[f32],
    combine: impl Fn(f32, f32) -> f32,
) -> Vec<f32> {
    let (mut out, rows) = (dst.to_vec(), dst.len() / columns);
    for (at, (&i, &v)) in index.iter().zip(src).enumerate() {
        let row = i.rem_euclid(rows as i32) as usize;
        let place = row * columns + at % columns;
        out[place] = combine(out[place], v);
    }
    out
}

#[test]
fn scatter_applies_duplicates_in_order_for_every_mode() {
    let dst: Vec<f32> = (0..12).map(|i| (i as f32 - 5.0) / 2.0).collect();
    // Powers of two: products are exact, however they are rounded on the way.
    let src: Vec<f32> = (0..60)
        .map(|i| [0.5, -1.0, 2.0, 1.0, -2.0, 0.25, 4.0][i * 37 % 7])
        .collect();
    let index: Vec<i32> = (0..60).map(|i| (i * 7 % 6) - 3).collect();
    let (x, s, i) = (
        tensor(&dst, &[3, 4]),
        tensor(&src, &[15, 4]),
        tensor(&index, &[15, 4]),
    );
    let modes: [(ScatterOp, fn(f32, f32) -> f32); 5] = [
        (ScatterOp::Set, |_, v| v),
        (ScatterOp::Add, |a, v| a + v),
        (ScatterOp::Mul, |a, v| a * v),
        (ScatterOp::Min, f32::min),
        (ScatterOp::Max, f32::max),
    ];
    for (mode, combine) in modes {
        let expected = naive_scatter(&dst, 4, &index, &src, combine);
        assert_eq!(
            floats(&x.scatter(0, &i, &s, mode).expect("scatters")),
            expected,
            "{mode:?}"
        );
        let (columns, places, values) = (x.t().expect("t"), i.t().expect("t"), s.t().expect("t"));
        if mode == ScatterOp::Min || mode == ScatterOp::Max {
            assert_eq!(
                floats(
                    &columns
                        .scatter(1, &places, &values, mode)
                        .expect("scatters")
                        .t()
                        .expect("t")
                ),
                expected,
                "{mode:?} transposed"
            );
        }
    }
    assert_eq!(floats(&x), dst, "the destination is left alone");
}

#[test]
fn scatter_uses_only_the_part_of_the_source_that_the_index_covers() {
    let x = tensor(&[0f32; 6], &[2, 3]);
    let src = tensor(&[1f32, 2., 3., 4., 5., 6.], &[2, 3]);
    let out = x
        .scatter(1, &tensor(&[2i32, 0], &[1, 2]), &src, ScatterOp::Set)
        .expect("scatters");
    assert_eq!(floats(&out), [2., 0., 1., 0., 0., 0.]);
}

#[test]
fn nan_wins_in_scatter_min_and_max() {
    let x = tensor(&[1f32, f32::NAN, 3.], &[3]);
    let src = tensor(&[f32::NAN, 0., 5.], &[3]);
    let index = tensor(&[0i32, 1, 2], &[3]);
    for mode in [ScatterOp::Min, ScatterOp::Max] {
        let out = floats(&x.scatter(0, &index, &src, mode).expect("scatters"));
        assert!(
            out[0].is_nan() && out[1].is_nan() && !out[2].is_nan(),
            "{out:?}"
        );
    }
}

#[test]
fn put_along_axis_broadcasts_index_and_values() {
    let x = iota(&[2, 3]);
    let out = x
        .put_along_axis(
            1,
            &tensor(&[-1i32], &[1, 1]),
            &tensor(&[9f32], &[1, 1]),
            ScatterOp::Set,
        )
        .expect("puts");
    assert_eq!(floats(&out), [0., 1., 9., 3., 4., 9.]);
    assert!(is_shape_error(x.put_along_axis(
        1,
        &tensor(&[0i32; 3], &[3, 1]),
        &tensor(&[9f32], &[1, 1]),
        ScatterOp::Set
    )));
}

#[test]
fn index_put_accumulates_repeated_indices_only_when_asked() {
    let x = tensor(&[0f32; 6], &[3, 2]);
    let index = tensor(&[1i32, 1, -1], &[3]);
    let values = tensor(&[1f32, 2., 3., 4., 5., 6.], &[3, 2]);
    assert_eq!(
        floats(
            &x.index_put(&[&index], &values, ScatterOp::Set)
                .expect("puts")
        ),
        [0., 0., 3., 4., 5., 6.]
    );
    assert_eq!(
        floats(
            &x.index_put(&[&index], &values, ScatterOp::Add)
                .expect("adds")
        ),
        [0., 0., 4., 6., 5., 6.]
    );
    let (i, j) = (tensor(&[0i32, 2], &[2, 1]), tensor(&[1u32, 0], &[2]));
    let one = Tensor::new(7f32, &device()).expect("scalar");
    assert_eq!(
        floats(
            &x.index_put(&[&i, &j], &one, ScatterOp::Set)
                .expect("a value for all")
        ),
        [7., 7., 0., 0., 7., 7.]
    );
}

#[test]
fn index_add_and_scatter_nd_sum_what_meets() {
    let x = iota(&[2, 3, 2]);
    let index = [2usize, 0, 2, 2];
    let src: Vec<f32> = (0..16).map(|i| i as f32 * 10.0).collect();
    let mut expected = floats(&x);
    for a in 0..2 {
        for (j, &to) in index.iter().enumerate() {
            for c in 0..2 {
                expected[(a * 3 + to) * 2 + c] += src[(a * 4 + j) * 2 + c];
            }
        }
    }
    let out = x
        .index_add(
            1,
            &tensor(&[2i32, 0, -1, 2], &[4]),
            &tensor(&src, &[2, 4, 2]),
        )
        .expect("adds");
    assert_eq!(floats(&out), expected);

    let coordinates = tensor(&[0i32, 1, 1, 0, 0, 1], &[3, 2]);
    let updates = tensor(&[1f32, 2., 4.], &[3]);
    assert_eq!(
        floats(&Tensor::scatter_nd(&coordinates, &updates, [2, 2]).expect("scatters")),
        [0., 5., 2., 0.]
    );
    let rows = tensor(&[1f32, 2., 3., 4.], &[2, 2]);
    assert_eq!(
        floats(
            &iota(&[3, 2])
                .scatter_nd_add(&tensor(&[2i32, 2], &[2, 1]), &rows)
                .expect("adds")
        ),
        [0., 1., 2., 3., 8., 11.]
    );
}

#[test]
fn a_scatter_into_a_view_leaves_the_rest_of_its_memory_out() {
    let whole = iota(&[4, 3]);
    let part = whole.narrow(0, 1, 2).expect("rows 1 and 2");
    let out = part
        .index_put(
            &[&tensor(&[0i32], &[1])],
            &tensor(&[9f32, 9., 9.], &[1, 3]),
            ScatterOp::Set,
        )
        .expect("puts");
    assert_eq!(floats(&out), [9., 9., 9., 6., 7., 8.]);
    let first = whole.narrow(0, 0, 2).expect("rows 0 and 1");
    let out = first
        .index_add(0, &tensor(&[1i32], &[1]), &tensor(&[1f32; 3], &[1, 3]))
        .expect("adds");
    assert_eq!(floats(&out), [0., 1., 2., 4., 5., 6.]);
}

#[test]
fn scatters_that_do_not_fit_are_typed_errors() {
    let x = iota(&[3, 2]);
    let index = tensor(&[0i32, 1], &[2]);
    assert!(is_shape_error(x.scatter(
        0,
        &tensor(&[0i32; 4], &[2, 2]),
        &iota(&[1, 2]),
        ScatterOp::Set
    )));
    assert!(is_shape_error(x.scatter(
        0,
        &index,
        &iota(&[2]),
        ScatterOp::Set
    )));
    assert!(is_dtype_error(x.scatter(
        0,
        &tensor(&[0i32; 2], &[1, 2]),
        &tensor(&[1i32, 2], &[1, 2]),
        ScatterOp::Set
    )));
    assert!(is_dtype_error(tensor(&[true, false], &[2]).scatter(
        0,
        &index,
        &tensor(&[true, true], &[2]),
        ScatterOp::Add
    )));
    assert!(is_shape_error(x.index_add(0, &index, &iota(&[3, 2]))));
    assert!(is_shape_error(x.index_put(
        &[&index],
        &iota(&[3, 2]),
        ScatterOp::Set
    )));
    assert!(is_shape_error(x.index_put(
        &[&index, &index, &index],
        &iota(&[2]),
        ScatterOp::Set
    )));
    assert!(is_shape_error(Tensor::scatter_nd(
        &tensor(&[0i32; 3], &[1, 3]),
        &iota(&[1]),
        [2, 2]
    )));
    assert!(is_shape_error(
        x.scatter_nd_add(&tensor(&[0i32; 2], &[2, 1]), &iota(&[2, 3]))
    ));
    let empty = iota(&[0, 2]);
    assert!(is_shape_error(empty.index_add(0, &index, &iota(&[2, 2]))));
    assert_eq!(
        empty
            .index_add(0, &tensor::<i32>(&[], &[0]), &iota(&[0, 2]))
            .expect("nothing to add")
            .dims(),
        [0, 2]
    );
}

#[test]
fn bincount_counts_weighs_and_refuses_negative_values() {
    let x = tensor(&[1i32, 3, 1, 1], &[4]);
    assert_eq!(ints(&x.bincount(None, 0).expect("counts")), [0, 3, 0, 1]);
    assert_eq!(
        ints(&x.bincount(None, 6).expect("counts")),
        [0, 3, 0, 1, 0, 0]
    );
    let weights = tensor(&[0.5f32, 1., 2., 4.], &[4]);
    assert_eq!(
        floats(&x.bincount(Some(&weights), 0).expect("sums")),
        [0., 6.5, 0., 1.]
    );
    assert_eq!(
        ints(&tensor::<i64>(&[], &[0]).bincount(None, 2).expect("nothing")),
        [0, 0]
    );
    let negative = tensor(&[0i32, -1], &[2]);
    assert!(
        matches!(
            negative
                .bincount_bins(None, 4)
                .and_then(|t| t.to_vec::<i32>()),
            Err(Error::IndexOutOfRange { .. })
        ),
        "not the last bin"
    );
    assert!(matches!(
        x.bincount_bins(None, 3).and_then(|t| t.to_vec::<i32>()),
        Err(Error::IndexOutOfRange {
            index: 3,
            len: 3,
            ..
        })
    ));
    assert!(is_shape_error(
        iota(&[2, 2])
            .cast(DType::I32)
            .expect("cast")
            .bincount_bins(None, 3)
    ));
    assert!(is_dtype_error(iota(&[2]).bincount(None, 3)));
}

#[test]
fn one_hot_is_zero_for_a_value_outside_the_classes() {
    let x = tensor(&[0i64, 2, -1, 3, (1 << 32) + 1], &[5]);
    assert_eq!(
        ints(&x.one_hot(3).expect("one hot")),
        [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    );
    let x = tensor(&[1u32, u32::MAX], &[2, 1]);
    let hot = x.one_hot(2).expect("one hot");
    assert_eq!(
        (hot.dims(), ints(&hot)),
        (&[2usize, 1, 2][..], vec![0, 1, 0, 0])
    );
    assert_eq!(x.one_hot(0).expect("no classes").dims(), [2, 1, 0]);
}

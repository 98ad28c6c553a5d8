//! Gather, scatter, sort and the ops of unknown size, held against loops over plain vectors.

use crate::support::{device, tensor};
use anymesh_core::{
    DType, Device, Error, Result, Tensor,
    backend::ScatterOp,
    bf16,
    ops::{Order, Side, Unique},
};

fn iota(shape: &[usize]) -> Tensor {
    let data: Vec<f32> = (0..shape.iter().product::<usize>())
        .map(|i| i as f32)
        .collect();
    tensor(&data, shape)
}

fn floats(t: &Tensor) -> Vec<f32> {
    t.to_vec::<f32>().expect("f32")
}

fn ints(t: &Tensor) -> Vec<i32> {
    t.to_vec::<i32>().expect("i32")
}

fn is_shape_error<T>(result: Result<T>) -> bool {
    matches!(result, Err(Error::Shape { .. }))
}

fn is_dtype_error<T>(result: Result<T>) -> bool {
    matches!(result, Err(Error::DType { .. }))
}

#[test]
fn gather_follows_pytorch_where_the_index_is_smaller_than_the_tensor() {
    let x = iota(&[3, 4, 2]);
    let index = tensor(&[1i64, 0, -1, 2, 3, 0, 1, -4], &[2, 2, 2]);
    let (data, places) = (floats(&x), index.to_vec::<i64>().expect("i64"));
    let mut expected = vec![];
    for i in 0..2 {
        for j in 0..2 {
            for k in 0..2 {
                let at = places[(i * 2 + j) * 2 + k].rem_euclid(4) as usize;
                expected.push(data[(i * 4 + at) * 2 + k]);
            }
        }
    }
    assert_eq!(floats(&x.gather(1, &index).expect("gathers")), expected);
    assert_eq!(floats(&x.gather(-2, &index).expect("gathers")), expected);
}

#[test]
fn gather_does_not_broadcast_but_take_along_axis_does() {
    let x = iota(&[3, 4]);
    let one_column = tensor(&[2i32, 0, 1], &[3, 1]);
    assert_eq!(
        floats(&x.gather(0, &one_column).expect("uses column 0")),
        [8., 0., 4.]
    );
    let all = x
        .take_along_axis(0, &one_column)
        .expect("uses every column");
    assert_eq!(all.dims(), [3, 4]);
    assert_eq!(
        floats(&all),
        [8., 9., 10., 11., 0., 1., 2., 3., 4., 5., 6., 7.]
    );
    let row = iota(&[1, 4]);
    let index = tensor(&[3i32, 0, 1, 1], &[2, 2]);
    assert_eq!(
        floats(&row.take_along_axis(1, &index).expect("the row repeats")),
        [3., 0., 1., 1.]
    );
}

#[test]
fn gather_reads_transposed_sliced_and_reversed_sources_and_indices() {
    let x = iota(&[5, 6]);
    let index = tensor(&[0i32, 4, 2, 1, 3, 3, 2, 0, 1, 4, 4, 0], &[2, 6]);
    let expected = floats(&x.gather(0, &index).expect("plain"));
    let stored_otherwise = x
        .t()
        .expect("t")
        .contiguous()
        .expect("copy")
        .t()
        .expect("t");
    let reversed = index
        .flip(&[0, 1])
        .expect("flip")
        .contiguous()
        .expect("copy")
        .flip(&[0, 1])
        .expect("flip");
    assert_eq!(
        floats(&stored_otherwise.gather(0, &reversed).expect("views")),
        expected
    );
    let every_second = x.slice(1, Some(1), None, 2).expect("slice");
    let picked = every_second
        .gather(1, &tensor(&[-1i32, 0, 1, 1, 0], &[5, 1]))
        .expect("slice");
    assert_eq!(floats(&picked), [5., 7., 15., 21., 25.]);
}

#[test]
fn index_select_and_embedding_repeat_rows() {
    let x = iota(&[2, 3, 2]);
    assert_eq!(
        floats(
            &x.index_select(1, &tensor(&[2u32, 0, 2], &[3]))
                .expect("selects")
        ),
        [4., 5., 0., 1., 4., 5., 10., 11., 6., 7., 10., 11.]
    );
    let table = iota(&[4, 2]);
    let rows = table
        .embedding(&tensor(&[3i64, 0, -1, 1], &[2, 2]))
        .expect("looks up");
    assert_eq!(rows.dims(), [2, 2, 2]);
    assert_eq!(floats(&rows), [6., 7., 0., 1., 6., 7., 2., 3.]);
    assert_eq!(
        table
            .embedding(&tensor(&[2i32], &[]))
            .expect("one id")
            .dims(),
        [2]
    );
    assert_eq!(
        table
            .embedding(&tensor::<i32>(&[], &[0, 3]))
            .expect("no ids")
            .dims(),
        [0, 3, 2]
    );
}

#[test]
fn advanced_indices_replace_neighbouring_axes_and_move_to_the_front_otherwise() {
    let x = iota(&[2, 3, 4, 5]);
    let (i, j) = (tensor(&[0i32, 1], &[2, 1]), tensor(&[2i64, 0, 1], &[3]));
    let at = |a: usize, b: usize, c: usize, d: usize| (((a * 3 + b) * 4 + c) * 5 + d) as f32;
    let (is, js) = ([0usize, 1], [2usize, 0, 1]);

    let inner = x.gather_axes(&[(1, &i), (2, &j)]).expect("neighbours");
    assert_eq!(inner.dims(), [2, 2, 3, 5]);
    let mut expected = vec![];
    for a in 0..2 {
        for p in is {
            for q in js {
                expected.extend((0..5).map(|d| at(a, p, q, d)));
            }
        }
    }
    assert_eq!(floats(&inner), expected);

    let apart = x.gather_axes(&[(3, &j), (1, &i)]).expect("apart");
    assert_eq!(apart.dims(), [2, 3, 2, 4]);
    let mut expected = vec![];
    for p in is {
        for q in js {
            for a in 0..2 {
                expected.extend((0..4).map(|c| at(a, p, c, q)));
            }
        }
    }
    assert_eq!(floats(&apart), expected);
    assert_eq!(
        x.index_get(&[&i, &j]).expect("leading").dims(),
        [2, 3, 4, 5]
    );
}

#[test]
fn gather_nd_takes_as_many_coordinates_as_the_last_dimension_has() {
    let x = iota(&[2, 3, 4]);
    let index = tensor(&[1i32, 0, 0, -1], &[2, 2]);
    assert_eq!(
        floats(&x.gather_nd(&index).expect("rows")),
        [12., 13., 14., 15., 8., 9., 10., 11.]
    );
    assert_eq!(
        floats(
            &x.gather_nd(&tensor(&[1i32, 2, 3], &[3]))
                .expect("an element")
        ),
        [23.]
    );
    assert_eq!(
        x.gather_nd(&tensor::<i32>(&[], &[5, 0]))
            .expect("no coordinates: all of it")
            .dims(),
        [5, 2, 3, 4]
    );
}

#[test]
fn an_index_out_of_range_is_an_error_that_names_it() {
    let x = iota(&[3, 2]);
    for (bad, n) in [(3i32, 3), (-4, 3), (i32::MAX, 3), (i32::MIN, 3)] {
        let index = tensor(&[0, bad], &[2]);
        let result = x.index_select(0, &index).and_then(|t| t.to_vec::<f32>());
        assert!(
            matches!(result, Err(Error::IndexOutOfRange { index, len, .. }) if index == i64::from(bad) && len == n),
            "{result:?}"
        );
        let result = x
            .index_add(0, &index, &iota(&[2, 2]))
            .and_then(|t| t.to_vec::<f32>());
        assert!(
            matches!(result, Err(Error::IndexOutOfRange { index, .. }) if index == i64::from(bad)),
            "{result:?}"
        );
    }
    let huge = tensor(&[1i64 << 40], &[1]);
    assert!(matches!(
        x.embedding(&huge).and_then(|t| t.to_vec::<f32>()),
        Err(Error::IndexOutOfRange { .. })
    ));
    let unsigned = tensor(&[u32::MAX], &[1]);
    assert!(
        matches!(
            x.embedding(&unsigned).and_then(|t| t.to_vec::<f32>()),
            Err(Error::IndexOutOfRange { .. })
        ),
        "not the last element"
    );
}

#[test]
fn wrong_shapes_axes_and_dtypes_of_indices_are_typed_errors() {
    let x = iota(&[3, 2]);
    let index = tensor(&[0i32, 1], &[2]);
    assert!(is_dtype_error(x.index_select(0, &tensor(&[0u8], &[1]))));
    assert!(is_dtype_error(x.gather(0, &tensor(&[0f32, 0.], &[1, 2]))));
    assert!(is_dtype_error(x.gather_nd(&tensor(&[true], &[1]))));
    assert!(matches!(
        x.index_select(2, &index),
        Err(Error::Axis {
            axis: 2,
            rank: 2,
            ..
        })
    ));
    assert!(matches!(
        x.gather_axes(&[(0, &index), (0, &index)]),
        Err(Error::Axis { .. })
    ));
    assert!(matches!(
        x.gather_axes(&[(5, &index)]),
        Err(Error::Axis { .. })
    ));
    assert!(is_shape_error(x.gather(0, &index)));
    assert!(is_shape_error(x.gather(0, &tensor(&[0i32; 3], &[1, 3]))));
    assert!(is_shape_error(
        x.take_along_axis(0, &tensor(&[0i32; 3], &[1, 3]))
    ));
    assert!(is_shape_error(
        x.index_select(0, &tensor(&[0i32; 2], &[1, 2]))
    ));
    assert!(is_shape_error(x.gather_nd(&tensor(&[0i32; 3], &[1, 3]))));
    assert!(is_shape_error(iota(&[3]).embedding(&index)));
    assert!(
        is_shape_error(iota(&[0, 2]).index_select(0, &index)),
        "nothing can be taken from an empty dimension"
    );
    assert!(matches!(x.index_get(&[]), Err(Error::Argument { .. })));
    let rank_5 = iota(&[1, 1, 1, 1, 1]);
    assert!(matches!(
        rank_5.index_get(&[&index, &index, &index, &index, &index]),
        Err(Error::Argument { .. })
    ));
}

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

#[test]
fn nonzero_lists_coordinates_in_row_major_order() {
    let x = tensor(&[0f32, -0.0, f32::NAN, 4., 0., 5.], &[2, 3]);
    let found = x.nonzero().expect("finds");
    assert_eq!(
        (found.dims(), ints(&found)),
        (&[3usize, 2][..], vec![0, 2, 1, 0, 1, 2])
    );
    assert_eq!(
        x.t()
            .expect("t")
            .nonzero()
            .expect("finds")
            .to_vec::<i32>()
            .expect("i32"),
        [0, 1, 2, 0, 2, 1]
    );
    assert_eq!(
        tensor(&[0i32; 4], &[4]).nonzero().expect("none").dims(),
        [0, 1]
    );
    assert_eq!(
        tensor::<i32>(&[], &[0, 3]).nonzero().expect("empty").dims(),
        [0, 2]
    );
    assert_eq!(
        Tensor::new(3u8, &device())
            .expect("scalar")
            .nonzero()
            .expect("one")
            .dims(),
        [1, 0]
    );
    let long: Vec<bool> = (0..5000).map(|i| i % 7 == 3).collect();
    let expected: Vec<i32> = (0..5000).filter(|i| i % 7 == 3).collect();
    assert_eq!(
        ints(&tensor(&long, &[5000]).nonzero().expect("finds")),
        expected
    );
}

#[test]
fn masked_select_broadcasts_and_keeps_the_order() {
    let x = iota(&[2, 3]);
    let mask = tensor(&[true, false, true], &[3]);
    assert_eq!(
        floats(&x.masked_select(&mask).expect("selects")),
        [0., 2., 3., 5.]
    );
    assert_eq!(
        x.masked_select(&tensor(&[false], &[1]))
            .expect("none")
            .dims(),
        [0]
    );
    assert!(is_dtype_error(
        x.masked_select(&tensor(&[1i32, 0, 1], &[3]))
    ));
    assert!(is_shape_error(
        x.masked_select(&tensor(&[true, false], &[2]))
    ));
}

#[test]
fn unique_gives_sorted_values_their_counts_and_where_each_element_went() {
    let data: Vec<i64> = (0..1000).map(|i| (i * i) % 37 - 18).collect();
    let Unique {
        values,
        inverse,
        counts,
    } = tensor(&data, &[10, 100]).unique().expect("finds");
    let mut expected = data.clone();
    expected.sort_unstable();
    expected.dedup();
    let (values, inverse_values, counts) = (
        values.to_vec::<i64>().expect("i64"),
        ints(&inverse),
        ints(&counts),
    );
    assert_eq!(values, expected);
    assert_eq!(inverse.dims(), [10, 100]);
    assert!(
        data.iter()
            .zip(&inverse_values)
            .all(|(v, i)| values[*i as usize] == *v)
    );
    assert!(
        values
            .iter()
            .zip(&counts)
            .all(|(v, n)| data.iter().filter(|d| *d == v).count() == *n as usize)
    );

    let floats_with_nan = tensor(&[f32::NAN, 1., -0.0, f32::NAN, 0.0], &[5])
        .unique()
        .expect("finds");
    let values = floats(&floats_with_nan.values);
    assert_eq!(values[..2], [0., 1.]);
    assert!(
        values.len() == 3 && values[2].is_nan(),
        "all NaN are one value: {values:?}"
    );
    assert_eq!(ints(&floats_with_nan.counts), [2, 1, 2]);
    assert_eq!(ints(&floats_with_nan.inverse), [2, 1, 0, 2, 0]);
    assert_eq!(
        ints(&tensor(&[5i32], &[1]).unique().expect("one").counts),
        [1]
    );
    assert_eq!(
        tensor::<f32>(&[], &[0, 2])
            .unique()
            .expect("none")
            .inverse
            .dims(),
        [0, 2]
    );
}

#[test]
fn the_futures_of_ops_that_read_a_size_can_change_threads() {
    fn run<T: Send>(future: impl Future<Output = Result<T>> + Send + 'static) {
        std::thread::spawn(|| pollster::block_on(future).map(drop))
            .join()
            .expect("no panic")
            .expect("runs");
    }
    let x = tensor(&[1i32, 0, 1], &[3]);
    let (a, b, c, d) = (x.clone(), x.clone(), x.clone(), x);
    run(async move { a.nonzero_async().await });
    run(async move { b.unique_async().await });
    run(async move { c.bincount_async(None, 0).await });
    run(async move { d.masked_select_async(&d.cast(DType::Bool)?).await });
}

/// The documented order.
fn order(a: f64, b: f64) -> std::cmp::Ordering {
    a.is_nan()
        .cmp(&b.is_nan())
        .then(a.partial_cmp(&b).unwrap_or(std::cmp::Ordering::Equal))
}

#[test]
fn sort_is_stable_with_nan_last_and_equal_zeros() {
    let data: Vec<f64> = (0..700)
        .map(|i| match i * 7919 % 23 {
            0 => f64::NAN,
            1 => f64::INFINITY,
            2 => f64::NEG_INFINITY,
            3 => -0.0,
            4 => 0.0,
            v => v as f64 - 12.0,
        })
        .collect();
    for descending in [false, true] {
        let mut expected: Vec<i32> = (0..700).collect();
        expected.sort_by(|&a, &b| {
            let o = order(data[a as usize], data[b as usize]);
            if descending { o.reverse() } else { o }
        });
        let by = if descending {
            Order::Descending
        } else {
            Order::Ascending
        };
        let (values, indices) = tensor(&data, &[700]).sort(0, by).expect("sorts");
        assert_eq!(ints(&indices), expected);
        let values = values.to_vec::<f64>().expect("f64");
        assert!(
            values
                .iter()
                .zip(&expected)
                .all(|(v, i)| v.to_bits() == data[*i as usize].to_bits()),
            "values are the elements, bit for bit"
        );
        let small: Vec<bf16> = data.iter().map(|v| bf16::from_f64(*v)).collect();
        assert_eq!(
            ints(&tensor(&small, &[700]).argsort(-1, by).expect("sorts")),
            expected
        );
    }
}

#[test]
fn sort_along_an_outer_axis_sorts_columns() {
    let x = tensor(&[3i32, 1, 2, 9, 1, 5], &[3, 2]);
    let (values, indices) = x.sort(0, Order::Ascending).expect("sorts");
    assert_eq!(
        (ints(&values), ints(&indices)),
        (vec![1, 1, 2, 5, 3, 9], vec![2, 0, 1, 2, 0, 1])
    );
    assert_eq!(
        ints(
            &x.t()
                .expect("t")
                .argsort(1, Order::Descending)
                .expect("sorts")
        ),
        [0, 1, 2, 1, 2, 0]
    );
    assert_eq!(
        tensor(&[true, false, true], &[3])
            .argsort(0, Order::Ascending)
            .expect("bools")
            .to_vec::<i32>()
            .expect("i32"),
        [1, 0, 2]
    );
    assert_eq!(
        tensor(&[i64::MAX, i64::MIN, 0], &[3])
            .argsort(0, Order::Ascending)
            .expect("i64")
            .to_vec::<i32>()
            .expect("i32"),
        [1, 2, 0]
    );
    assert_eq!(
        tensor(&[u32::MAX, 0, 1 << 31], &[3])
            .argsort(0, Order::Ascending)
            .expect("u32")
            .to_vec::<i32>()
            .expect("i32"),
        [1, 2, 0]
    );
    assert_eq!(
        tensor::<f32>(&[], &[2, 0])
            .sort(1, Order::Ascending)
            .expect("empty")
            .0
            .dims(),
        [2, 0]
    );
    assert!(matches!(
        x.argsort(2, Order::Ascending),
        Err(Error::Axis { .. })
    ));
}

#[test]
fn topk_takes_the_first_of_equal_values_and_nan_first() {
    let x = tensor(&[2f32, 5., 5., f32::NAN, 1.], &[5]);
    assert_eq!(
        ints(&x.topk(3, 0, Order::Descending).expect("largest").1),
        [3, 1, 2]
    );
    assert_eq!(
        ints(&x.topk(2, 0, Order::Ascending).expect("smallest").1),
        [4, 0]
    );
    assert_eq!(x.topk(0, 0, Order::Descending).expect("none").0.dims(), [0]);
    assert!(matches!(
        x.topk(6, 0, Order::Descending),
        Err(Error::Argument { .. })
    ));
    let (value, index) = x.kthvalue(4, 0, false).expect("the fourth smallest");
    assert_eq!(
        (value.dims(), floats(&value), ints(&index)),
        (&[][..], vec![5.], vec![2])
    );
    assert_eq!(x.kthvalue(1, 0, true).expect("kept").0.dims(), [1]);
    assert!(matches!(
        x.kthvalue(0, 0, false),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        x.kthvalue(6, 0, false),
        Err(Error::Argument { .. })
    ));
}

#[test]
fn searchsorted_goes_left_or_right_of_equal_values() {
    let sorted = tensor(&[1f32, 3., 3., 7.], &[4]);
    let queries = tensor(&[0f32, 1., 3., 4., 7., 9., f32::NAN], &[7]);
    assert_eq!(
        ints(&sorted.searchsorted(&queries, Side::Left).expect("finds")),
        [0, 0, 1, 3, 3, 4, 4]
    );
    assert_eq!(
        ints(&sorted.searchsorted(&queries, Side::Right).expect("finds")),
        [0, 1, 3, 3, 4, 4, 4]
    );
    let rows = tensor(&[1i32, 2, 3, 10, 20, 30], &[2, 3]);
    assert_eq!(
        ints(
            &rows
                .searchsorted(&tensor(&[2i32, 5, 20, 50], &[2, 2]), Side::Left)
                .expect("by rows")
        ),
        [1, 3, 1, 3]
    );
    assert_eq!(
        sorted
            .searchsorted(&tensor(&[2i32; 6], &[3, 2]), Side::Left)
            .expect("any shape, promoted")
            .dims(),
        [3, 2]
    );
    assert_eq!(
        ints(
            &tensor::<f32>(&[], &[0])
                .searchsorted(&queries, Side::Right)
                .expect("nothing to pass")
        ),
        [0; 7]
    );
    assert!(is_shape_error(rows.searchsorted(&queries, Side::Left)));
    assert!(is_shape_error(
        Tensor::new(1f32, &device())
            .expect("scalar")
            .searchsorted(&queries, Side::Left)
    ));
}

#[test]
fn operands_on_two_devices_are_refused() {
    let other = Device::new(anymesh_backend_cpu::CpuBackend::new());
    let index = Tensor::from_slice(&[0i32], [1], &other).expect("fits");
    let x = iota(&[1]);
    assert!(matches!(
        x.index_select(0, &index),
        Err(Error::DeviceMismatch { .. })
    ));
    assert!(matches!(
        x.scatter(0, &index, &x, ScatterOp::Set),
        Err(Error::DeviceMismatch { .. })
    ));
    assert!(matches!(
        x.searchsorted(&index, Side::Left),
        Err(Error::DeviceMismatch { .. })
    ));
}

//! Gathers and lookups, held against loops over plain vectors.

use crate::support::tensor;
use anymesh_core::{Device, Error, Result, Tensor, backend::ScatterOp, ops::Side};

pub(crate) fn iota(shape: &[usize]) -> Tensor {
    let data: Vec<f32> = (0..shape.iter().product::<usize>())
        .map(|i| i as f32)
        .collect();
    tensor(&data, shape)
}

pub(crate) fn floats(t: &Tensor) -> Vec<f32> {
    t.to_vec::<f32>().expect("f32")
}

pub(crate) fn ints(t: &Tensor) -> Vec<i32> {
    t.to_vec::<i32>().expect("i32")
}

pub(crate) fn is_shape_error<T>(result: Result<T>) -> bool {
    matches!(result, Err(Error::Shape { .. }))
}

pub(crate) fn is_dtype_error<T>(result: Result<T>) -> bool {
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

//! Results whose size the data decides, sorts and searches.

use crate::index::{floats, ints, iota, is_dtype_error, is_shape_error};
use crate::support::{device, tensor};
use anymesh_core::{
    DType, Error, Result, Tensor, bf16,
    ops::{Order, Side, Unique},
};

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

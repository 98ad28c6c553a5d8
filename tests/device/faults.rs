//! Faults that only the data shows.

use crate::Suite;
use anymesh::{Device, Error, Result, Tensor};

pub(crate) const SUITE: Suite = &[
    (
        "an_index_out_of_range_is_an_error_by_the_next_read_and_the_device_lives_on",
        an_index_out_of_range_is_an_error_by_the_next_read_and_the_device_lives_on,
    ),
    (
        "an_integer_divided_by_zero_is_an_error_by_the_next_sync",
        an_integer_divided_by_zero_is_an_error_by_the_next_sync,
    ),
    (
        "a_tensor_over_the_limit_of_the_device_is_refused_before_it_is_made",
        a_tensor_over_the_limit_of_the_device_is_refused_before_it_is_made,
    ),
];

fn an_index_out_of_range_is_an_error_by_the_next_read_and_the_device_lives_on(device: &Device) {
    let x = Tensor::from_slice(&[1f32, 2.0, 3.0], [3], device).expect("uploads");
    for bad in [3i32, -4, i32::MAX, i32::MIN] {
        let index = Tensor::from_slice(&[0, bad], [2], device).expect("uploads");
        let error = x
            .index_select(0, &index)
            .and_then(|t| t.to_vec::<f32>())
            .expect_err("out of range");
        assert!(
            matches!(error, Error::IndexOutOfRange { index, len: 3, .. } if index == i64::from(bad)),
            "{device}: {error:?}"
        );
        let values = Tensor::from_slice(&[9f32, 9.0], [2], device).expect("uploads");
        let error = x
            .index_put(&[&index], &values, false)
            .and_then(|t| t.to_vec::<f32>())
            .expect_err("out of range");
        assert!(
            matches!(error, Error::IndexOutOfRange { .. }),
            "{device}: {error:?}"
        );
    }
    assert_eq!(x.to_vec::<f32>().expect("still works"), [1.0, 2.0, 3.0]);
}

fn an_integer_divided_by_zero_is_an_error_by_the_next_sync(device: &Device) {
    let x = Tensor::from_slice(&[7i32, 8, 9], [3], device).expect("uploads");
    let y = Tensor::from_slice(&[2i32, 0, 3], [3], device).expect("uploads");
    let ops: [&dyn Fn() -> Result<Tensor>; 3] = [&|| x.floor_div(&y), &|| x.trunc_div(&y), &|| {
        x.remainder(&y)
    }];
    for op in ops {
        let error = op()
            .and_then(|_| device.sync())
            .expect_err("a zero divisor");
        assert!(
            matches!(error, Error::DivisionByZero { .. }),
            "{device}: {error:?}"
        );
    }
    let fine = x
        .floor_div(&x)
        .and_then(|t| t.to_vec::<i32>())
        .expect("no zero");
    assert_eq!(fine, [1, 1, 1]);
}

fn a_tensor_over_the_limit_of_the_device_is_refused_before_it_is_made(device: &Device) {
    let limit = device.backend().capabilities().max_buffer_bytes;
    let elements = limit as usize / 4 + 1024;
    let error = Tensor::zeros([elements], anymesh::DType::F32, device).expect_err("too large");
    assert!(
        // The host's limit is what can be addressed: there the shape is refused.
        matches!(error, Error::TooLarge { .. } | Error::SizeOverflow { .. }),
        "{device}: {error:?}"
    );
}

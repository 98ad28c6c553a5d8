//! Faults that only the data shows.

use crate::Suite;
use anymesh::{
    DType, Device, Error, Layout, Mesh, Result, Tensor, View,
    backend::{CheckIndexCall, Kernel, ScatterOp},
};

pub(crate) const SUITE: Suite = &[
    (
        "an_index_out_of_range_is_an_error_by_the_next_read_and_the_device_lives_on",
        an_index_out_of_range_is_an_error_by_the_next_read_and_the_device_lives_on,
    ),
    (
        "a_check_of_indices_faults_and_does_nothing_else",
        a_check_of_indices_faults_and_does_nothing_else,
    ),
    (
        "an_index_that_no_rank_holds_is_an_error_by_the_next_read",
        an_index_that_no_rank_holds_is_an_error_by_the_next_read,
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
            .index_put(&[&index], &values, ScatterOp::Set)
            .and_then(|t| t.to_vec::<f32>())
            .expect_err("out of range");
        assert!(
            matches!(error, Error::IndexOutOfRange { .. }),
            "{device}: {error:?}"
        );
    }
    assert_eq!(x.to_vec::<f32>().expect("still works"), [1.0, 2.0, 3.0]);
}

fn a_check_of_indices_faults_and_does_nothing_else(device: &Device) {
    // Every second of a matrix's columns, from the second on, read downwards.
    let layout = Layout::contiguous([4, 6].into())
        .slice(1, 1, 2, 3)
        .permute(&[1, 0]);
    let check = |dtype: DType, value: i64, at: usize| {
        let number = |i: usize| if i == at { value } else { i as i64 % 9 - 5 };
        let bytes: Vec<u8> = (0..24)
            .flat_map(|i| number(i).to_le_bytes()[..dtype.size()].to_vec())
            .collect();
        let kernel = Kernel::from(CheckIndexCall {
            op: "take",
            indices: View {
                buffer: device.upload(&bytes)?,
                dtype,
                layout: layout.clone(),
            },
            len: 5,
        });
        assert!(device.launch(kernel)?.is_empty());
        device.sync()
    };
    let dtypes = [DType::I32, DType::I64];
    for dtype in dtypes.into_iter().filter(|d| device.supports(*d)) {
        assert_eq!(check(dtype, -5, 9), Ok(()), "{device} {dtype}");
        assert_eq!(check(dtype, 77, 8), Ok(()), "{device}: nobody reads there");
        for bad in [5, -6, i64::from(i32::MIN)] {
            let error = check(dtype, bad, 9).expect_err("out of range");
            assert!(
                matches!(error, Error::IndexOutOfRange { index, len: 5, .. } if index == bad),
                "{device} {dtype}: {error:?}"
            );
        }
    }
}

fn an_index_that_no_rank_holds_is_an_error_by_the_next_read(device: &Device) {
    let mesh = Mesh::new("a=2", device).expect("a mesh");
    let table = Tensor::from_slice(&[1f32, 2.0, 3.0], [3], device)
        .and_then(|t| t.to_mesh(&mesh, "[@a]"))
        .expect("a table");
    let index = Tensor::from_slice(&[0i32, 3], [2], device)
        .and_then(|t| t.to_mesh(&mesh, "[_]"))
        .expect("an index");
    let error = table
        .index_select(0, &index)
        .and_then(|t| t.to_vec::<f32>())
        .expect_err("out of range");
    assert!(
        matches!(
            error,
            Error::IndexOutOfRange {
                index: 3,
                len: 3,
                ..
            }
        ),
        "{device}: {error:?}"
    );
    assert_eq!(device.sync(), Ok(()), "{device}: a fault is told once");
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
    let error = Tensor::zeros([elements], DType::F32, device).expect_err("too large");
    assert!(
        // The host's limit is what can be addressed: there the shape is refused.
        matches!(error, Error::TooLarge { .. } | Error::SizeOverflow { .. }),
        "{device}: {error:?}"
    );
}

use super::*;
use anymesh_core::{Error, ops::softmax};

/// Softmax of one row.
fn naive(row: &[f64]) -> Vec<f64> {
    let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = row.iter().map(|x| (x - max).exp()).sum();
    row.iter().map(|x| (x - max).exp() / sum).collect()
}

#[test]
fn softmax_normalises_along_any_axis() {
    let data = values(2 * 3 * 4, -3.0, 3.0, 1);
    let x = tensor(&data, &[2, 3, 4]);
    for axis in 0..3usize {
        let y = x.softmax(axis as i64).expect("valid");
        assert_eq!(y.dims(), [2, 3, 4]);
        let strides = [12, 4, 1];
        let size = [2, 3, 4][axis];
        let mut expected = vec![0.0; 24];
        for start in (0..24).filter(|i| i / strides[axis] % size == 0) {
            let at = |k: usize| start + k * strides[axis];
            let row: Vec<f64> = (0..size).map(|k| data[at(k)]).collect();
            naive(&row)
                .iter()
                .enumerate()
                .for_each(|(k, v)| expected[at(k)] = *v);
        }
        assert_close(&y, &expected, 1e-14);
        let logs: Vec<f64> = expected.iter().map(|v| v.ln()).collect();
        assert_close(
            &x.log_softmax(axis as i64 - 3).expect("valid"),
            &logs,
            1e-14,
        );
    }
}

#[test]
fn log_softmax_stays_precise_where_the_probability_underflows() {
    let x = Tensor::from_slice(&[0f32, -1000.0], [2], &*DEVICE).expect("fits");
    assert_close(&x.log_softmax(0).expect("valid"), &[0.0, -1000.0], 0.0);
}

#[test]
fn a_row_of_only_minus_infinity_is_nan_and_its_neighbours_are_not() {
    let inf = f64::NEG_INFINITY;
    let x = tensor(&[inf, inf, 0.0, inf], &[2, 2]);
    assert_close(
        &x.softmax(1).expect("valid"),
        &[f64::NAN, f64::NAN, 1.0, 0.0],
        0.0,
    );
    assert_close(
        &softmax::decomposed(&x, 1).expect("valid"),
        &[f64::NAN, f64::NAN, 1.0, 0.0],
        0.0,
    );
    assert_close(
        &x.log_softmax(1).expect("valid"),
        &[f64::NAN, f64::NAN, 0.0, inf],
        0.0,
    );
}

#[test]
fn small_floats_keep_their_dtype_and_round_once() {
    let data = values(50, -3.0, 3.0, 2);
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        let x = tensor(&data, &[5, 10]).cast(dtype).expect("castable");
        let y = x.softmax(1).expect("valid");
        assert_eq!(y.dtype(), dtype);
        let wide: Vec<f64> = read(&x).chunks(10).flat_map(naive).collect();
        let rounded = read(&tensor(&wide, &[5, 10]).cast(dtype).expect("castable"));
        let step = if dtype == DType::F32 { 1e-6 } else { 0.01 };
        assert_close(&y, &rounded, step);
    }
}

#[test]
fn empty_inputs_give_empty_results() {
    for shape in [[0, 4], [4, 0]] {
        assert_eq!(tensor(&[], &shape).softmax(1).expect("valid").dims(), shape);
        assert_eq!(
            softmax::decomposed(&tensor(&[], &shape), 1)
                .expect("valid")
                .dims(),
            shape
        );
    }
}

#[test]
fn integers_are_refused() {
    let error = ints(&[1, 2], &[2])
        .softmax(0)
        .expect_err("no softmax of integers");
    assert!(
        matches!(
            error,
            Error::DType {
                op: "softmax",
                dtype: DType::I64,
                ..
            }
        ),
        "{error}"
    );
}

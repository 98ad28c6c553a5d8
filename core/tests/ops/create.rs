//! Constants, ranges and masks.

use crate::support::{device, expect};
use anymesh_core::{DType, Error, F8E4M3, Result, Tensor, bf16};

#[test]
fn constants_hold_in_every_dtype_and_shape() -> Result<()> {
    let d = device();
    for dtype in DType::ALL {
        for dims in [&[][..], &[3], &[2, 0], &[3, 5, 7]] {
            let ones = Tensor::ones(dims, dtype, &d)?;
            assert_eq!((ones.dtype(), ones.dims()), (dtype, dims));
            assert!(
                ones.cast(DType::I32)?
                    .to_vec::<i32>()?
                    .iter()
                    .all(|v| *v == 1),
                "{dtype}"
            );
            assert!(
                ones.zeros_like()?
                    .cast(DType::I32)?
                    .to_vec::<i32>()?
                    .iter()
                    .all(|v| *v == 0),
                "{dtype}"
            );
        }
    }
    assert_eq!(
        Tensor::full([2], u32::MAX, DType::U32, &d)?.to_vec::<u32>()?,
        [u32::MAX; 2]
    );
    assert_eq!(
        Tensor::full([2], i64::MIN, DType::I64, &d)?.to_vec::<i64>()?,
        [i64::MIN; 2]
    );
    assert_eq!(
        Tensor::full((), 0.1, DType::F64, &d)?.to_vec::<f64>()?,
        [0.1]
    );
    assert_eq!(
        Tensor::full((), 0.1, DType::BF16, &d)?.to_vec::<bf16>()?,
        [bf16::from_f32(0.1)]
    );
    let x = Tensor::full([1], 2.5, DType::F8E4M3, &d)?.full_like(-1.0)?;
    assert_eq!(x.to_vec::<F8E4M3>()?, [F8E4M3::from_f32(-1.0)]);
    Ok(())
}

#[test]
fn a_value_the_dtype_cannot_hold_is_an_error() {
    let d = device();
    let full = |value: f64, dtype| Tensor::full([1], value, dtype, &d);
    for (value, dtype) in [
        (256.0, DType::U8),
        (-1.0, DType::U32),
        (0.5, DType::I32),
        (f64::NAN, DType::I64),
        (2.0, DType::Bool),
        (2f64.powi(63), DType::I64),
    ] {
        assert!(
            matches!(full(value, dtype), Err(Error::Argument { .. })),
            "{value} {dtype}"
        );
    }
    assert!(full(255.0, DType::U8).is_ok());
    assert!(matches!(
        Tensor::zeros([1 << 40, 1 << 40], DType::U8, &d),
        Err(Error::SizeOverflow { .. })
    ));
    assert!(
        Tensor::zeros([1 << 58], DType::U8, &d).is_err(),
        "more than any machine has"
    );
}

#[test]
fn integer_ranges_are_exact() -> Result<()> {
    let d = device();
    let range = |start: i64, end: i64, step: i64| -> Result<Vec<i64>> {
        Tensor::arange(start, end, step, DType::I64, &d)?.to_vec()
    };
    for (start, end, step) in [
        (0, 10, 1),
        (0, 10, 3),
        (-5, 6, 4),
        (10, 0, -3),
        (10, 10, 1),
        (0, 5, -1),
        (3, 4, 100),
    ] {
        let mut expected = vec![];
        let mut v = start;
        while if step > 0 { v < end } else { v > end } {
            expected.push(v);
            v += step;
        }
        assert_eq!(range(start, end, step)?, expected, "{start} {end} {step}");
    }
    assert_eq!(
        range(i64::MIN, i64::MAX, i64::MAX)?,
        [i64::MIN, -1, i64::MAX - 1]
    );
    assert_eq!(
        range((1 << 60) + 1, (1 << 60) + 4, 2)?,
        [(1 << 60) + 1, (1 << 60) + 3]
    );
    assert_eq!(
        Tensor::arange(250, 256, 2, DType::U8, &d)?.to_vec::<u8>()?,
        [250, 252, 254]
    );
    assert_eq!(
        Tensor::arange(u32::MAX, 0, -2_000_000_000, DType::U32, &d)?.to_vec::<u32>()?,
        [4_294_967_295, 2_294_967_295, 294_967_295]
    );
    assert_eq!(
        Tensor::arange(
            -2_000_000_000,
            2_000_000_001,
            2_000_000_000i64,
            DType::I32,
            &d
        )?
        .to_vec::<i32>()?,
        [-2_000_000_000, 0, 2_000_000_000]
    );
    Ok(())
}

#[test]
fn float_ranges_have_the_count_of_numpy_and_do_not_drift() -> Result<()> {
    let d = device();
    let count = |start: f64, end: f64, step: f64| -> Result<usize> {
        Ok(Tensor::arange(start, end, step, DType::F64, &d)?.numel())
    };
    assert_eq!(count(0.0, 1.0, 0.1)?, 10);
    assert_eq!(count(0.0, 0.3, 0.1)?, 3);
    assert_eq!(
        count(1.0, 1.3, 0.1)?,
        4,
        "NumPy's well-known surprise: (1.3 - 1) / 0.1 is a little more than 3"
    );
    assert_eq!(count(1.0, 0.0, 0.1)?, 0);
    assert_eq!(count(1.0, 0.0, -0.25)?, 4);
    let values = Tensor::arange(0.0, 100_000.0, 0.1, DType::F32, &d)?.to_vec::<f32>()?;
    assert_eq!(values.len(), 1_000_000);
    for (i, v) in values.iter().enumerate() {
        assert_eq!(*v, (i as f64 * 0.1) as f32, "element {i}");
    }
    Ok(())
}

#[test]
fn ranges_that_never_end_or_do_not_fit_are_errors() {
    let d = device();
    assert!(matches!(
        Tensor::arange(0, 5, 0, DType::I32, &d),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        Tensor::arange(0.0, 5.0, 0.0, DType::F32, &d),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        Tensor::arange(0.0, f64::INFINITY, 1.0, DType::F32, &d),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        Tensor::arange(f64::NAN, 1.0, 1.0, DType::F32, &d),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        Tensor::arange(0.0, 1.0, 1e-300, DType::F32, &d),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        Tensor::arange(0, 300, 1, DType::U8, &d),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        Tensor::arange(0.5, 3.0, 1.0, DType::I32, &d),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        Tensor::arange(0, 1, 1, DType::Bool, &d),
        Err(Error::DType { .. })
    ));
    assert!(Tensor::arange(i64::MIN, i64::MAX, 1, DType::I64, &d).is_err());
}

#[test]
fn linspace_hits_both_ends_exactly() -> Result<()> {
    let d = device();
    for (start, end) in [
        (0.0, 1.0),
        (0.1, 0.7),
        (-3.3, 5.1),
        (1e30, -1e30),
        (-8e307, 8e307),
    ] {
        for n in [2, 3, 7, 1000] {
            let v = Tensor::linspace(start, end, n, DType::F64, &d)?.to_vec::<f64>()?;
            assert_eq!((v.len(), v[0], v[n - 1]), (n, start, end));
            let step = end / (n - 1) as f64 - start / (n - 1) as f64;
            let worst = v
                .windows(2)
                .map(|w| (w[1] / step - w[0] / step - 1.0).abs())
                .fold(0.0, f64::max);
            assert!(worst < 1e-10, "{start} to {end} in {n}: {worst}");
        }
    }
    assert_eq!(
        Tensor::linspace(2.0, 9.0, 1, DType::F32, &d)?.to_vec::<f32>()?,
        [2.0]
    );
    assert_eq!(Tensor::linspace(2.0, 9.0, 0, DType::F32, &d)?.numel(), 0);
    assert_eq!(
        Tensor::linspace(0.0, 1.0, 3, DType::BF16, &d)?.to_vec::<bf16>()?,
        [0.0, 0.5, 1.0].map(bf16::from_f32)
    );
    assert!(matches!(
        Tensor::linspace(0.0, 1.0, 3, DType::I32, &d),
        Err(Error::DType { .. })
    ));
    assert!(matches!(
        Tensor::linspace(0.0, f64::NAN, 3, DType::F32, &d),
        Err(Error::Argument { .. })
    ));
    assert!(
        matches!(
            Tensor::linspace(-f64::MAX, f64::MAX, 2, DType::F64, &d),
            Err(Error::Argument { .. })
        ),
        "no step is that large"
    );
    assert!(matches!(
        Tensor::linspace(0.0, 1.0, usize::MAX, DType::F32, &d),
        Err(Error::SizeOverflow { .. })
    ));
    Ok(())
}

#[test]
fn identities_and_masks_count_diagonals_from_the_main_one() {
    let d = device();
    for (n, m) in [(3, 3), (2, 5), (5, 2), (0, 3), (1, 1)] {
        for k in [i64::MIN, -2, 0, 1, 3, i64::MAX] {
            let distance = |c: &[usize]| c[1] as i64 - c[0] as i64;
            expect(Tensor::eye(n, m, k, DType::I32, &d), &[n, m], |c| {
                i32::from(distance(c) == k)
            });
            expect(
                Tensor::tril_mask(n, m, k, &d).and_then(|t| t.cast(DType::I32)),
                &[n, m],
                |c| i32::from(distance(c) <= k),
            );
            expect(
                Tensor::triu_mask(n, m, k, &d).and_then(|t| t.cast(DType::I32)),
                &[n, m],
                |c| i32::from(distance(c) >= k),
            );
        }
        expect(
            Tensor::causal_mask(n, m, &d).and_then(|t| t.cast(DType::I32)),
            &[n, m],
            |c| i32::from(c[1] + n <= c[0] + m),
        );
    }
    assert!(matches!(
        Tensor::causal_mask(usize::MAX, 1 << 63, &d),
        Err(Error::SizeOverflow { .. })
    ));
    assert_eq!(
        Tensor::causal_mask(0, usize::MAX, &d)
            .expect("empty")
            .numel(),
        0
    );
}

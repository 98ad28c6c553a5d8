//! Reductions and scans against hand-computed values, and the facts about them that can be misread.

use crate::support::{bools, get, i32s, ints};
use anymesh_backend_cpu as cpu;
use anymesh_core::{DType, Error, Result, Tensor, f16};

const NAN: f32 = f32::NAN;
const INF: f32 = f32::INFINITY;

fn f32s(values: &[f32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(values, shape, &cpu::device()).expect("data that fits")
}

#[track_caller]
fn assert_same(actual: Vec<f32>, expected: &[f32]) {
    let same = actual.len() == expected.len()
        && actual
            .iter()
            .zip(expected)
            .all(|(a, e)| a == e || (a.is_nan() && e.is_nan()));
    assert!(same, "{actual:?} instead of {expected:?}");
}

#[track_caller]
fn assert_near(actual: Vec<f32>, expected: &[f32]) {
    let near = actual.len() == expected.len()
        && actual
            .iter()
            .zip(expected)
            .all(|(a, e)| (a - e).abs() <= 4e-7 * e.abs());
    assert!(near, "{actual:?} instead of {expected:?}");
}

fn counted(shape: &[usize]) -> Tensor {
    let values: Vec<f32> = (0..shape.iter().product::<usize>())
        .map(|i| i as f32)
        .collect();
    f32s(&values, shape)
}

#[test]
fn every_set_of_axes_reduces_to_the_right_shape() -> Result<()> {
    let x = counted(&[2, 3, 4]);
    let sets: [(&[i64], &[usize], &[usize]); 5] = [
        (&[], &[], &[1, 1, 1]),
        (&[0], &[3, 4], &[1, 3, 4]),
        (&[-1], &[2, 3], &[2, 3, 1]),
        (&[2, 0], &[3], &[1, 3, 1]),
        (&[0, 1, 2], &[], &[1, 1, 1]),
    ];
    for (axes, shape, kept) in sets {
        assert_eq!(
            (x.sum(axes, false)?.dims(), x.sum(axes, true)?.dims()),
            (shape, kept),
            "{axes:?}"
        );
    }
    assert_eq!(get(x.sum(&[0, 2], false)), [60.0, 92.0, 124.0]);
    assert_eq!(
        get(x.transpose(0, 2)?.sum(&[0, 2], false)),
        [60.0, 92.0, 124.0]
    );
    assert_eq!(get(x.flip(&[1])?.amax(&[0, 2], false)), [23.0, 19.0, 15.0]);
    assert!(matches!(
        x.sum(&[3], false),
        Err(Error::Axis { axis: 3, .. })
    ));
    assert!(matches!(
        x.sum(&[1, -2], false),
        Err(Error::Axis { axis: -2, .. })
    ));
    Ok(())
}

#[test]
fn a_scalar_is_its_own_reduction() -> Result<()> {
    let x = Tensor::new(-3f32, &cpu::device())?;
    let results = [
        x.sum(&[], false)?,
        x.mean(&[], true)?,
        x.prod(&[], false)?,
        x.amax(&[], false)?,
        x.logsumexp(&[], false)?,
    ];
    for result in results {
        assert_eq!((result.rank(), result.to_vec::<f32>()?), (0, vec![-3.0]));
    }
    assert_eq!(ints(x.argmax(None, false)), [0]);
    assert_eq!(get(x.norm(2.0, &[], false)), [3.0]);
    Ok(())
}

#[test]
fn empty_reductions_give_the_neutral_element_or_an_error() -> Result<()> {
    let x = f32s(&[], &[2, 0]);
    assert_eq!(get(x.sum(&[1], false)), [0.0, 0.0]);
    assert_eq!(get(x.prod(&[1], false)), [1.0, 1.0]);
    assert_same(get(x.mean(&[1], true)), &[NAN, NAN]);
    assert_same(get(x.var(&[1], false, 0)), &[NAN, NAN]);
    assert_same(get(x.std(&[], false, 1)), &[NAN]);
    assert_eq!(get(x.logsumexp(&[1], false)), [-INF, -INF]);
    assert_eq!(get(x.norm(2.0, &[1], false)), [0.0, 0.0]);
    assert_eq!(bools(x.any(&[1], false)), [false, false]);
    assert_eq!(bools(x.all(&[1], false)), [true, true]);
    assert_eq!(ints(x.count_nonzero(&[], false)), [0]);
    for result in [
        x.amax(&[1], false),
        x.min(&[], false),
        x.argmax(Some(1), false),
        x.argmin(None, false),
        x.norm(f64::INFINITY, &[1], false),
    ] {
        let error = result.expect_err("nothing to choose from").to_string();
        assert!(error.contains("an empty axis has no m"), "{error}");
    }
    // Reducing the other axis leaves nothing to compute.
    assert_eq!(x.amax(&[0], false)?.dims(), [0]);
    assert_eq!(x.argmax(Some(0), true)?.dims(), [1, 0]);
    Ok(())
}

#[test]
fn sums_of_small_integers_count_in_i32_and_others_wrap() -> Result<()> {
    let device = cpu::device();
    let flags = Tensor::from_slice(&[true, true, false], [3], &device)?;
    assert_eq!(
        (
            ints(flags.sum(&[], false)),
            ints(flags.prod(&[], false)),
            ints(flags.cumsum(0))
        ),
        (vec![2], vec![0], vec![1, 2, 2])
    );
    let bytes = Tensor::from_slice(&[200u8, 100], [2], &device)?;
    assert_eq!(
        (
            ints(bytes.sum(&[], false)),
            ints(bytes.prod(&[], false)),
            ints(bytes.cumprod(0))
        ),
        (vec![300], vec![20_000], vec![200, 20_000])
    );
    assert_eq!(ints(i32s(&[i32::MAX, 1]).sum(&[], false)), [i32::MIN]);
    assert_eq!(
        Tensor::from_slice(&[1i64 << 40, 1], [2], &device)?
            .sum(&[], false)?
            .to_vec::<i64>()?,
        [(1 << 40) + 1]
    );
    assert_eq!(get(i32s(&[1, 2]).mean(&[], false)), [1.5]);
    assert_near(get(flags.var(&[], false, 0)), &[2.0 / 9.0]);
    Ok(())
}

#[test]
fn small_floats_accumulate_in_f32() -> Result<()> {
    // 2048 + 1 is 2048 in f16: a sum kept in f16 would never pass it.
    let x = Tensor::from_slice(&vec![f16::from_f32(1.0); 5000], [5000], &cpu::device())?;
    assert_eq!(x.sum(&[], false)?.to_vec::<f16>()?, [f16::from_f32(5000.0)]);
    assert_eq!(x.mean(&[], false)?.to_vec::<f16>()?, [f16::from_f32(1.0)]);
    // 300^2 is no f16, but the norm is.
    let y = Tensor::from_slice(
        &[f16::from_f32(300.0), f16::from_f32(400.0)],
        [2],
        &cpu::device(),
    )?;
    assert_eq!(
        y.norm(2.0, &[], false)?.to_vec::<f16>()?,
        [f16::from_f32(500.0)]
    );
    Ok(())
}

#[test]
fn variance_divides_by_the_count_less_the_correction() {
    let x = f32s(&[1.0, 2.0, 3.0, 6.0], &[4]);
    assert_near(get(x.var(&[], false, 0)), &[3.5]);
    assert_near(get(x.var(&[], false, 1)), &[14.0 / 3.0]);
    assert_near(get(x.std(&[0], true, 0)), &[3.5f32.sqrt()]);
    assert_same(get(f32s(&[5.0], &[1]).var(&[], false, 1)), &[NAN]);
    // A large mean must not eat the differences.
    assert_near(
        get(f32s(&[10_001.0, 10_002.0, 10_003.0], &[3]).var(&[], false, 0)),
        &[2.0 / 3.0],
    );
}

#[test]
fn norms_cover_every_exponent() {
    let x = f32s(&[3.0, -4.0, 0.0], &[3]);
    for (p, expected) in [
        (0.0, 2.0),
        (1.0, 7.0),
        (2.0, 5.0),
        (3.0, 91f32.cbrt()),
        (0.5, (3f32.sqrt() + 2.0).powi(2)),
        (f64::INFINITY, 4.0),
        (f64::NEG_INFINITY, 0.0),
    ] {
        assert_near(get(x.norm(p, &[], false)), &[expected]);
    }
    assert_near(get(f32s(&[2.0, -2.0], &[2]).norm(-1.0, &[], false)), &[1.0]);
    assert_eq!(get(i32s(&[3, 4]).norm(2.0, &[], false)), [5.0]);
    assert!(matches!(
        x.norm(f64::NAN, &[], false),
        Err(Error::Argument { op: "norm", .. })
    ));
}

#[test]
fn extremes_propagate_nan_and_take_the_first_among_equals() -> Result<()> {
    let x = f32s(&[1.0, 5.0, 5.0, 2.0, NAN, 9.0, NAN, -1.0], &[2, 4]);
    assert_same(get(x.max(&[1], false)), &[5.0, NAN]);
    assert_same(get(x.min(&[1], false)), &[1.0, NAN]);
    assert_eq!(
        (
            ints(x.argmax(Some(1), false)),
            ints(x.argmin(Some(1), false))
        ),
        (vec![1, 0], vec![0, 0])
    );
    assert_eq!(
        (ints(x.argmax(None, false)), ints(x.argmax(Some(-2), false))),
        (vec![4], vec![1, 1, 1, 0])
    );
    let (values, positions) = x.max_with_indices(1, true)?;
    assert_eq!(
        (values.dims(), positions.dims()),
        (&[2, 1][..], &[2, 1][..])
    );
    assert_same(get(Ok(values)), &[5.0, NAN]);
    assert_eq!(ints(Ok(positions)), [1, 0]);
    let (values, positions) = i32s(&[4, -7, 4, -7]).min_with_indices(0, false)?;
    assert_eq!((ints(Ok(values)), ints(Ok(positions))), (vec![-7], vec![1]));
    let flags = i32s(&[0, 1, 1]).cast(DType::Bool)?;
    assert_eq!(
        (
            bools(flags.max(&[], false)),
            bools(flags.amin(&[], false)),
            ints(flags.argmax(None, false))
        ),
        (vec![true], vec![false], vec![1])
    );
    Ok(())
}

#[test]
fn truth_is_anything_but_zero() {
    let x = f32s(&[0.0, -0.0, 0.5, NAN], &[2, 2]);
    assert_eq!(
        (bools(x.any(&[1], false)), bools(x.all(&[1], false))),
        (vec![false, true], vec![false, true])
    );
    assert_eq!(ints(x.count_nonzero(&[1], false)), [0, 2]);
    assert_eq!(ints(i32s(&[256, 0, -1]).count_nonzero(&[], false)), [2]);
}

#[test]
fn logsumexp_neither_overflows_nor_underflows() {
    let ln2 = std::f32::consts::LN_2;
    assert_near(
        get(f32s(&[1000.0, 1000.0, -1000.0, -1000.0], &[2, 2]).logsumexp(&[1], false)),
        &[1000.0 + ln2, -1000.0 + ln2],
    );
    assert_same(
        get(f32s(&[-INF, -INF, INF, 1.0, NAN, 1.0, -INF, 0.0], &[4, 2]).logsumexp(&[1], false)),
        &[-INF, INF, NAN, 0.0],
    );
}

#[test]
fn scans_run_along_any_axis() -> Result<()> {
    let x = counted(&[2, 3]);
    assert_eq!(get(x.cumsum(1)), [0.0, 1.0, 3.0, 3.0, 7.0, 12.0]);
    assert_eq!(get(x.cumsum(-2)), [0.0, 1.0, 2.0, 3.0, 5.0, 7.0]);
    assert_eq!(get(x.add(1)?.cumprod(1)), [1.0, 2.0, 6.0, 4.0, 20.0, 120.0]);
    assert_eq!(get(x.t()?.cumsum(0)), [0.0, 3.0, 1.0, 7.0, 3.0, 12.0]);
    assert_eq!(x.narrow(1, 0, 0)?.cumsum(1)?.dims(), [2, 0]);
    assert!(matches!(x.cumsum(2), Err(Error::Axis { op: "cumsum", .. })));
    Ok(())
}

#[test]
fn running_extremes_keep_the_latest_position_and_stay_nan() -> Result<()> {
    let (values, positions) = f32s(&[1.0, 3.0, 3.0, 2.0, NAN, 9.0], &[6]).cummax(0)?;
    assert_same(get(Ok(values)), &[1.0, 3.0, 3.0, 3.0, NAN, NAN]);
    assert_eq!(ints(Ok(positions))[..5], [0, 1, 2, 2, 4]);
    let (values, positions) = i32s(&[4, 2, 2, 3, 1]).cummin(0)?;
    assert_eq!(
        (ints(Ok(values)), ints(Ok(positions))),
        (vec![4, 2, 2, 2, 1], vec![0, 1, 2, 2, 4])
    );
    let (values, positions) = i32s(&[0, 1, 0]).cast(DType::Bool)?.cummax(0)?;
    assert_eq!(
        (bools(Ok(values)), ints(Ok(positions))),
        (vec![false, true, true], vec![0, 1, 1])
    );
    Ok(())
}

#[test]
fn logcumsumexp_starts_from_minus_infinity() {
    let ln2 = std::f32::consts::LN_2;
    assert_same(
        get(f32s(&[-INF, -INF], &[2]).logcumsumexp(0)),
        &[-INF, -INF],
    );
    let y = get(f32s(&[-INF, 700.0, 700.0], &[3]).logcumsumexp(0));
    assert_eq!(y[..2], [-INF, 700.0]);
    assert_near(y[2..].to_vec(), &[700.0 + ln2]);
    assert_near(get(i32s(&[1, 1]).logcumsumexp(0)), &[1.0, 1.0 + ln2]);
}

#[test]
fn the_median_of_an_even_count_is_the_lower_one() -> Result<()> {
    let (values, positions) =
        f32s(&[4.0, 1.0, 3.0, 2.0, 5.0, NAN, NAN, 0.0], &[2, 4]).median(Some(1), false)?;
    assert_same(get(Ok(values)), &[2.0, NAN]);
    assert_eq!(ints(Ok(positions)), [3, 1]);
    let (values, positions) = i32s(&[7, 9, 8]).median(None, true)?;
    assert_eq!(
        (values.dims(), ints(Ok(values.clone())), ints(Ok(positions))),
        (&[1][..], vec![8], vec![2])
    );
    assert_eq!(
        get(Ok(Tensor::new(5f32, &cpu::device())?
            .median(None, false)?
            .0)),
        [5.0]
    );
    assert!(matches!(
        f32s(&[], &[2, 0]).median(Some(1), false),
        Err(Error::Argument { op: "median", .. })
    ));
    assert_eq!(f32s(&[], &[0, 2]).median(Some(1), false)?.0.dims(), [0]);
    Ok(())
}

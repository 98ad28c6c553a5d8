use super::*;
use crate::testing::{assert_close, coordinates, dense_view, random, read, values, views};
use anymesh_kernel::{
    DType, Dims, Layout, MapProgram, Scalar, View,
    backend::Affine,
    map::{Binary, Builder, Unary, Val},
};

fn run(
    program: &MapProgram,
    shape: &[usize],
    inputs: &[MapInput],
    indices: &[Affine],
    params: &[Scalar],
) -> Result<Vec<Vec<f64>>> {
    let buffers = map(&MapCall {
        op: "test",
        program: program.clone(),
        shape: shape.into(),
        inputs: inputs.into(),
        indices: indices.into(),
        params: params.into(),
        over: Default::default(),
    })?;
    Ok(buffers
        .iter()
        .zip(&program.outputs)
        .map(|(buffer, (_, dtype))| read(buffer, *dtype))
        .collect())
}

fn plain(view: &View) -> MapInput {
    MapInput {
        view: view.clone(),
        window: None,
    }
}

/// The single output of a program of one or two operands of `dtype`.
fn apply(
    dtype: DType,
    out: DType,
    inputs: &[&[f64]],
    f: impl for<'b> Fn(&[Val<'b>]) -> Val<'b>,
) -> Result<Vec<f64>> {
    let b = Builder::new();
    let loaded: Vec<Val<'_>> = inputs.iter().map(|_| b.load(dtype)).collect();
    let result = f(&loaded);
    let program = b.finish(&[(result, out)])?;
    let views: Vec<MapInput> = inputs
        .iter()
        .map(|values| plain(&dense_view(values, dtype, [values.len()])))
        .collect();
    Ok(run(&program, &[inputs[0].len()], &views, &[], &[])?.remove(0))
}

#[test]
fn operands_of_all_layouts_and_dtypes_meet_position_by_position() {
    for shape in [
        vec![],
        vec![7],
        vec![5, 3],
        vec![2, 3, 4],
        vec![3, 700, 2],
        vec![1, 2100],
    ] {
        for dtype in DType::ALL.into_iter().filter(|d| *d != DType::Bool) {
            let b = Builder::new();
            let (x, y) = (b.load(dtype), b.load(dtype));
            let program = b
                .finish(&[(x + y, dtype), (x, dtype), (x.lt(y), DType::Bool)])
                .expect("valid");
            for (i, x) in views(&shape, dtype, 1, true).iter().enumerate() {
                for y in views(&shape, dtype, 2, true).iter().skip(i % 2).step_by(2) {
                    let got = run(&program, &shape, &[plain(x), plain(y)], &[], &[]).expect("runs");
                    let (x, y) = (values(x), values(y));
                    let sum: Vec<f64> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
                    let wrap = |v: f64| match dtype {
                        DType::U8 => f64::from(v as i64 as u8),
                        DType::U32 => f64::from(v as i64 as u32),
                        _ => v,
                    };
                    assert_close(
                        &got[0],
                        &sum.iter().map(|v| wrap(*v)).collect::<Vec<_>>(),
                        0.0,
                        "sum",
                    );
                    assert_close(&got[1], &x, 0.0, "copy");
                    let less: Vec<f64> = x
                        .iter()
                        .zip(&y)
                        .map(|(x, y)| f64::from(u8::from(x < y)))
                        .collect();
                    assert_close(&got[2], &less, 0.0, "less");
                }
            }
        }
    }
}

#[test]
fn windows_read_zero_outside_and_say_so() {
    for (shape, small, start) in [
        (vec![6, 5], vec![3, 2], vec![1isize, 2]),
        (vec![6, 5], vec![6, 2], vec![0, 3]),
        (vec![6, 5], vec![2, 5], vec![2, 0]),
        (vec![4, 3], vec![6, 5], vec![-1, -1]),
        (vec![4, 3], vec![2, 2], vec![9, 0]),
        (vec![1, 4], vec![1, 2], vec![3, 1]),
        (vec![40, 60], vec![30, 70], vec![5, -3]),
        (vec![2, 3, 4], vec![2, 1, 4], vec![0, 1, 0]),
    ] {
        let b = Builder::new();
        let x = b.load(DType::F32);
        let program = b
            .finish(&[(x, DType::F32), (x.inside(), DType::Bool)])
            .expect("valid");
        for view in views(&small, DType::F32, 3, true) {
            let inputs = [MapInput {
                view: view.clone(),
                window: Some(start.iter().copied().collect::<Dims<_>>()),
            }];
            let got = run(&program, &shape, &inputs, &[], &[]).expect("runs");
            let data = values(&view);
            let expected: Vec<Option<f64>> = coordinates(&shape)
                .iter()
                .map(|c| {
                    let inner: Vec<isize> =
                        c.iter().zip(&start).map(|(c, s)| *c as isize - s).collect();
                    let inside = inner
                        .iter()
                        .zip(&small)
                        .all(|(i, n)| *i >= 0 && *i < *n as isize);
                    inside.then(|| {
                        data[inner
                            .iter()
                            .zip(&small)
                            .fold(0, |at, (i, n)| at * n + *i as usize)]
                    })
                })
                .collect();
            assert_close(
                &got[0],
                &expected
                    .iter()
                    .map(|v| v.unwrap_or(0.0))
                    .collect::<Vec<_>>(),
                0.0,
                "values",
            );
            assert_close(
                &got[1],
                &expected
                    .iter()
                    .map(|v| f64::from(u8::from(v.is_some())))
                    .collect::<Vec<_>>(),
                0.0,
                "inside",
            );
        }
    }
}

#[test]
fn indices_are_affine_in_the_position() {
    let b = Builder::new();
    let (i, j) = (b.index(DType::I64), b.index(DType::I32));
    let program = b
        .finish(&[(i, DType::I64), (j, DType::I32)])
        .expect("valid");
    let shape = [30, 4, 50];
    let forms = [
        Affine {
            offset: 1 << 40,
            strides: [200, 50, 1].into_iter().collect(),
        },
        Affine {
            offset: -7,
            strides: [0, -3, 2].into_iter().collect(),
        },
    ];
    let got = run(&program, &shape, &[], &forms, &[]).expect("runs");
    for (c, (a, b)) in coordinates(&shape).iter().zip(got[0].iter().zip(&got[1])) {
        assert_eq!(
            *a,
            ((1i64 << 40) + (c[0] * 200 + c[1] * 50 + c[2]) as i64) as f64
        );
        assert_eq!(*b, -7.0 - 3.0 * c[1] as f64 + 2.0 * c[2] as f64);
    }
}

#[test]
fn every_float_function_is_the_one_of_its_name() {
    type F = fn(f64) -> f64;
    let table: &[(Unary, F)] = &[
        (Unary::Neg, |x| -x),
        (Unary::Abs, f64::abs),
        (Unary::Exp, f64::exp),
        (Unary::Exp2, f64::exp2),
        (Unary::Expm1, f64::exp_m1),
        (Unary::Log, f64::ln),
        (Unary::Log2, f64::log2),
        (Unary::Log10, f64::log10),
        (Unary::Log1p, f64::ln_1p),
        (Unary::Sqrt, f64::sqrt),
        (Unary::Rsqrt, |x| 1.0 / x.sqrt()),
        (Unary::Sin, f64::sin),
        (Unary::Cos, f64::cos),
        (Unary::Tan, f64::tan),
        (Unary::Asin, f64::asin),
        (Unary::Acos, f64::acos),
        (Unary::Atan, f64::atan),
        (Unary::Sinh, f64::sinh),
        (Unary::Cosh, f64::cosh),
        (Unary::Tanh, f64::tanh),
        (Unary::Asinh, f64::asinh),
        (Unary::Acosh, |x| (x + (x * x - 1.0).sqrt()).ln()),
        (Unary::Atanh, |x| 0.5 * (2.0 * x / (1.0 - x)).ln_1p()),
        (Unary::Floor, f64::floor),
        (Unary::Ceil, f64::ceil),
        (Unary::Round, f64::round_ties_even),
        (Unary::Trunc, f64::trunc),
    ];
    let mut x: Vec<f64> = random(3000, 5, false)
        .iter()
        .map(|v| f64::from(*v as f32))
        .collect();
    x.extend([
        0.5,
        1.5,
        2.5,
        -0.5,
        1e-30,
        80.0,
        -80.0,
        f64::INFINITY,
        f64::NEG_INFINITY,
        f64::NAN,
    ]);
    for (op, f) in table {
        let expected: Vec<f64> = x.iter().map(|v| f(*v)).collect();
        let got = apply(DType::F64, DType::F64, &[&x], |v| v[0].unary(*op)).expect("runs");
        assert_close(&got, &expected, 1e-12, &format!("{op:?} f64"));
        let single: Vec<f64> = expected.iter().map(|v| f64::from(*v as f32)).collect();
        let got = apply(DType::F32, DType::F32, &[&x], |v| v[0].unary(*op)).expect("runs");
        for (i, (g, e)) in got.iter().zip(&single).enumerate() {
            assert!(
                g == e || (g - e).abs() <= 1.2e-7 * e.abs() || (g.is_nan() && e.is_nan()),
                "{op:?} f32 of {}: {g}, expected {e}",
                x[i]
            );
        }
    }
    assert_eq!(
        apply(DType::F32, DType::F32, &[&[-2.0, 0.0, 3.0]], |v| v[0]
            .unary(Unary::Sign))
        .expect("runs"),
        [-1.0, 0.0, 1.0]
    );
    assert_close(
        &apply(DType::F32, DType::F32, &[&[0.5]], |v| {
            v[0].unary(Unary::Erf)
        })
        .expect("runs"),
        &[0.520_499_877_8],
        1e-7,
        "erf",
    );
}

#[test]
fn predicates_write_one_byte_for_each_float() {
    let x = [1.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0];
    for dtype in [DType::F32, DType::F64, DType::F16] {
        assert_eq!(
            apply(dtype, DType::Bool, &[&x], |v| v[0].is_nan()).expect("runs"),
            [0.0, 1.0, 0.0, 0.0, 0.0]
        );
        assert_eq!(
            apply(dtype, DType::Bool, &[&x], |v| v[0].is_inf()).expect("runs"),
            [0.0, 0.0, 1.0, 1.0, 0.0]
        );
    }
}

#[test]
fn integers_and_logical_values_have_their_own_arithmetic() {
    let a: &[f64] = &[7.0, -7.0, 7.0, -7.0, 0.0];
    let b: &[f64] = &[2.0, 2.0, -2.0, -2.0, 5.0];
    let ints =
        |op| apply(DType::I32, DType::I32, &[a, b], |v| v[0].binary(op, v[1])).expect("runs");
    assert_eq!(ints(Binary::FloorDiv), [3.0, -4.0, -4.0, 3.0, 0.0]);
    assert_eq!(ints(Binary::TruncDiv), [3.0, -3.0, -3.0, 3.0, 0.0]);
    assert_eq!(ints(Binary::Rem), [1.0, 1.0, -1.0, -1.0, 0.0]);
    assert_eq!(ints(Binary::Pow), [49.0, 49.0, 0.0, 0.0, 0.0]);
    assert_eq!(ints(Binary::Shl), [28.0, -28.0, 0.0, 0.0, 0.0]);
    assert_eq!(ints(Binary::Xor), [5.0, -5.0, -7.0, 7.0, 5.0]);
    assert_eq!(
        apply(DType::I32, DType::I32, &[a], |v| !v[0]).expect("runs"),
        [-8.0, 6.0, -8.0, 6.0, -1.0]
    );
    let (p, q): (&[f64], &[f64]) = (&[0.0, 0.0, 1.0, 1.0], &[0.0, 1.0, 0.0, 1.0]);
    let bools =
        |op| apply(DType::Bool, DType::Bool, &[p, q], |v| v[0].binary(op, v[1])).expect("runs");
    assert_eq!(bools(Binary::And), [0.0, 0.0, 0.0, 1.0]);
    assert_eq!(bools(Binary::Or), [0.0, 1.0, 1.0, 1.0]);
    assert_eq!(bools(Binary::Xor), [0.0, 1.0, 1.0, 0.0]);
    assert_eq!(bools(Binary::Max), [0.0, 1.0, 1.0, 1.0]);
    assert_eq!(
        apply(DType::Bool, DType::Bool, &[p], |v| !v[0]).expect("runs"),
        [1.0, 1.0, 0.0, 0.0]
    );
    assert_eq!(
        apply(DType::U8, DType::U8, &[&[250.0], &[10.0]], |v| v[0] + v[1]).expect("runs"),
        [4.0]
    );
}

#[test]
fn dividing_an_integer_by_zero_is_an_error_wherever_it_happens() {
    for op in [Binary::FloorDiv, Binary::TruncDiv, Binary::Rem] {
        for n in [1, 5000, 200_000] {
            let ones = vec![1.0; n];
            let mut divisor = ones.clone();
            assert!(
                apply(DType::I64, DType::I64, &[&ones, &divisor], |v| v[0]
                    .binary(op, v[1]))
                .is_ok()
            );
            divisor[n - 1] = 0.0;
            let result = apply(DType::I64, DType::I64, &[&ones, &divisor], |v| {
                v[0].binary(op, v[1])
            });
            assert_eq!(result, Err(Error::DivisionByZero { op: "test" }));
            assert!(
                apply(DType::F32, DType::F32, &[&ones, &divisor], |v| v[0]
                    .binary(op, v[1]))
                .is_ok()
            );
        }
    }
}

#[test]
fn casts_wrap_saturate_round_and_test_for_zero() {
    let cast = |from: DType, to: DType, values: &[f64]| {
        apply(from, to, &[values], |v| v[0].cast(to)).expect("runs")
    };
    let wild = [1.9, -1.9, 300.0, -5.0, 1e20, -1e20, f64::NAN, f64::INFINITY];
    assert_eq!(
        cast(DType::F32, DType::U8, &wild),
        [1.0, 0.0, 255.0, 0.0, 255.0, 0.0, 0.0, 255.0]
    );
    assert_eq!(
        cast(DType::F64, DType::I32, &wild)[..6],
        [1.0, -1.0, 300.0, -5.0, 2147483647.0, -2147483648.0]
    );
    assert_eq!(
        cast(DType::F32, DType::Bool, &[0.0, -0.0, 0.1, f64::NAN]),
        [0.0, 0.0, 1.0, 1.0]
    );
    assert_eq!(
        cast(DType::I32, DType::U8, &[-1.0, 256.0, 511.0]),
        [255.0, 0.0, 255.0]
    );
    assert_eq!(
        cast(DType::I64, DType::I32, &[4294967297.0, -4294967297.0]),
        [1.0, -1.0]
    );
    assert_eq!(
        cast(DType::U32, DType::I64, &[4294967295.0]),
        [4294967295.0]
    );
    assert_eq!(cast(DType::Bool, DType::F16, &[1.0, 0.0]), [1.0, 0.0]);
    assert_eq!(
        cast(DType::F32, DType::BF16, &[1.00390625, 1.01171875, 3.4e38]),
        [1.0, 1.015625, f64::INFINITY]
    );
    assert_eq!(
        cast(DType::F32, DType::F16, &[2049.0, 65504.0, 1e6]),
        [2048.0, 65504.0, f64::INFINITY]
    );
    assert_eq!(
        cast(DType::F32, DType::F8E5M2, &[1.125, 1e6]),
        [1.0, f64::INFINITY]
    );
    assert!(cast(DType::F32, DType::F8E4M3, &[1e6])[0].is_nan());
    // A cast inside a program rounds, although the value is still held as f32.
    let rounded = apply(DType::F32, DType::F32, &[&[1.00390625]], |v| {
        v[0].cast(DType::BF16).cast(DType::F32)
    })
    .expect("runs");
    assert_eq!(rounded, [1.0]);
}

#[test]
fn random_words_depend_on_the_index_and_the_key_only() {
    let b = Builder::new();
    let index = b.index(DType::I64);
    let key = [
        b.param(DType::U32),
        b.param(DType::U32),
        b.param(DType::U32),
    ];
    let program = b
        .finish(&[
            (b.philox(index, key, 0), DType::U32),
            (b.philox(index, key, 3), DType::U32),
        ])
        .expect("valid");
    let form = |offset| {
        [Affine {
            offset,
            strides: [1].into_iter().collect(),
        }]
    };
    let params = [3, 4, 5].map(Scalar::Int);
    let whole = run(&program, &[3000], &[], &form(0), &params).expect("runs");
    let part = run(&program, &[100], &[], &form(2000), &params).expect("runs");
    assert_eq!(whole[0][2000..2100], part[0]);
    assert_eq!(
        whole[1][2000],
        f64::from(crate::scalar::philox([2000, 0, 5, 0], [3, 4])[3])
    );
    let high = run(&program, &[1], &[], &form(7 << 32), &params).expect("runs");
    assert_eq!(
        high[0][0],
        f64::from(crate::scalar::philox([0, 7, 5, 0], [3, 4])[0])
    );
}

#[test]
fn select_params_constants_and_shared_outputs_work_in_large_parallel_runs() {
    let n = 300_001;
    let x = random(n, 9, false);
    let b = Builder::new();
    let v = b.load(DType::F32);
    let factor = b.param(DType::F32);
    let scaled = v * factor;
    let picked = v.gt(0.0).select(scaled, v.lit(-1.0));
    let program = b
        .finish(&[
            (scaled, DType::F32),
            (picked, DType::F16),
            (scaled, DType::F32),
        ])
        .expect("valid");
    let got = run(
        &program,
        &[n],
        &[plain(&dense_view(&x, DType::F32, [n]))],
        &[],
        &[Scalar::Float(2.0)],
    )
    .expect("runs");
    assert_eq!(got[0], got[2]);
    for ((x, scaled), picked) in x.iter().zip(&got[0]).zip(&got[1]) {
        let x = *x as f32;
        assert_eq!(*scaled as f32, x * 2.0);
        assert_eq!(
            *picked,
            anymesh_kernel::f16::from_f32(if x > 0.0 { x * 2.0 } else { -1.0 }).to_f64()
        );
    }
}

#[test]
fn one_instruction_has_the_same_bits_over_dense_operands_and_others() {
    let ops = [
        Binary::Add,
        Binary::FloorDiv,
        Binary::Pow,
        Binary::Rem,
        Binary::Max,
        Binary::Lt,
    ];
    for (op, n) in ops.into_iter().flat_map(|op| [(op, 1), (op, 7), (op, 900)]) {
        for dtype in [DType::F32, DType::F64, DType::I32] {
            let b = Builder::new();
            let (x, y) = (b.load(dtype), b.load(dtype));
            let out = if op.is_comparison() {
                DType::Bool
            } else {
                dtype
            };
            let program = b.finish(&[(x.binary(op, y), out)]).expect("valid");
            assert!(Code::of(&program, 0).single.is_some());
            let at_most = |v: &f64| (v.abs() * 3.0).round() + 1.0;
            let [x, y] = [1, 2].map(|seed| random(n, seed, false).iter().map(at_most).collect());
            let dense = |values: &Vec<f64>| plain(&dense_view(values, dtype, [n]));
            // Every other element, from the second on.
            let apart = |values: &Vec<f64>| {
                let spread: Vec<f64> = values.iter().flat_map(|v| [9.0, *v]).collect();
                let mut input = plain(&dense_view(&spread, dtype, [2 * n]));
                input.view.layout = Layout {
                    shape: [n].into(),
                    strides: [2].into_iter().collect(),
                    offset: 1,
                };
                input
            };
            let both = [[dense(&x), dense(&y)], [apart(&x), apart(&y)]];
            let [straight, other] =
                both.map(|inputs| run(&program, &[n], &inputs, &[], &[]).expect("runs"));
            assert_eq!(straight, other, "{op:?} {dtype} {n}");
        }
    }
}

//! Matrix products and einsum, held against loops over plain vectors.

use crate::support::{device, floats, numbers, tensor};
use anymesh_core::{DType, Error, F8E4M3, Result, Tensor, bf16, ops::Baddbmm};

fn naive(a: &[f32], b: &[f32], [m, k, n]: [usize; 3]) -> Vec<f32> {
    let mut out = vec![0f32; m * n];
    for i in 0..m {
        for j in 0..n {
            out[i * n + j] = (0..k).map(|l| a[i * k + l] * b[l * n + j]).sum();
        }
    }
    out
}

fn is_shape_error<T>(result: Result<T>) -> bool {
    matches!(result, Err(Error::Shape { .. }))
}

#[test]
fn matmul_agrees_with_three_loops_for_every_layout_and_dtype() {
    for dims in [
        [1, 1, 1],
        [1, 40, 7],
        [7, 40, 1],
        [5, 1, 6],
        [17, 33, 65],
        [64, 64, 64],
        [70, 3, 66],
    ] {
        let [m, k, n] = dims;
        let (a, b) = (numbers(&[m, k], 1), numbers(&[k, n], 2));
        let expected = naive(&floats(&a), &floats(&b), dims);
        let turned = |t: &Tensor| {
            t.t()
                .expect("t")
                .contiguous()
                .expect("copy")
                .t()
                .expect("t")
        };
        for dtype in [DType::F32, DType::F64, DType::I32, DType::I64] {
            let (a, b) = (a.cast(dtype).expect("casts"), b.cast(dtype).expect("casts"));
            for (left, right) in [
                (&a, &b),
                (&turned(&a), &b),
                (&a, &turned(&b)),
                (&turned(&a), &turned(&b)),
            ] {
                let out = left.matmul(right).expect("multiplies");
                assert_eq!(out.type_string(), format!("{dtype}[{m}, {n}]"));
                assert_eq!(floats(&out), expected, "{dims:?} {dtype}");
            }
        }
    }
}

#[test]
fn vectors_follow_numpy() {
    let (v, w, m) = (
        tensor(&[1f32, 2.], &[2]),
        tensor(&[3f32, 4.], &[2]),
        tensor(&[1f32, 2., 3., 4., 5., 6., 7., 8.], &[2, 2, 2]),
    );
    let dot = v.matmul(&w).expect("multiplies");
    assert_eq!((dot.rank(), floats(&dot)), (0, vec![11.]));
    let right = m.matmul(&v).expect("a column on the right");
    assert_eq!(
        (right.dims(), floats(&right)),
        (&[2usize, 2][..], vec![5., 11., 17., 23.])
    );
    let left = v.matmul(&m).expect("a row on the left");
    assert_eq!(
        (left.dims(), floats(&left)),
        (&[2usize, 2][..], vec![7., 10., 19., 22.])
    );
    assert_eq!(
        floats(&v.outer(&w).expect("all products")),
        [3., 4., 6., 8.]
    );
    assert_eq!(floats(&v.dot(&w).expect("dot")), [11.]);
}

#[test]
fn batches_broadcast() {
    let (a, b) = (numbers(&[2, 1, 3, 4], 3), numbers(&[5, 4, 2], 4));
    let out = a.matmul(&b).expect("multiplies");
    assert_eq!(out.dims(), [2, 5, 3, 2]);
    let (a, b) = (floats(&a), floats(&b));
    let expected: Vec<f32> = (0..10)
        .flat_map(|i| naive(&a[i / 5 * 12..][..12], &b[i % 5 * 8..][..8], [3, 4, 2]))
        .collect();
    assert_eq!(floats(&out), expected);
}

#[test]
fn one_matrix_for_a_whole_batch_gives_the_same_as_one_each() {
    let (a, b) = (numbers(&[3, 4, 5], 5), numbers(&[5, 6], 6));
    let each = a
        .matmul(
            &b.expand([3, 5, 6])
                .expect("expands")
                .contiguous()
                .expect("copies"),
        )
        .expect("multiplies");
    for left in [
        a.clone(),
        a.permute(&[1, 0, 2])
            .expect("permutes")
            .contiguous()
            .expect("copies")
            .permute(&[1, 0, 2])
            .expect("permutes"),
    ] {
        assert_eq!(floats(&left.matmul(&b).expect("multiplies")), floats(&each));
    }
    let repeated = numbers(&[4, 5], 7).expand([3, 4, 5]).expect("expands");
    assert_eq!(
        floats(&repeated.matmul(&b).expect("multiplies"))[..24],
        floats(&repeated.matmul(&b).expect("multiplies"))[24..48]
    );
}

#[test]
fn a_product_over_nothing_is_zero_and_empty_sides_give_empty_results() {
    let out = numbers(&[2, 0], 0)
        .matmul(&numbers(&[0, 3], 0))
        .expect("multiplies");
    assert_eq!((out.dims(), floats(&out)), (&[2usize, 3][..], vec![0.; 6]));
    assert_eq!(
        numbers(&[0, 4], 0)
            .matmul(&numbers(&[4, 3], 0))
            .expect("no rows")
            .dims(),
        [0, 3]
    );
    assert_eq!(
        numbers(&[0, 2, 4], 0)
            .matmul(&numbers(&[4, 3], 0))
            .expect("no batches")
            .dims(),
        [0, 2, 3]
    );
    assert_eq!(
        floats(&numbers(&[0], 0).dot(&numbers(&[0], 0)).expect("dot")),
        [0.]
    );
}

#[test]
fn small_floats_accumulate_in_f32_and_round_once() {
    // 256 + 1 is not a bf16: adding one at a time in bf16 would stay at 256.
    let a = tensor(&[bf16::ONE; 300], &[1, 300]);
    let b = tensor(&[bf16::ONE; 300], &[300, 1]);
    assert_eq!(floats(&a.matmul(&b).expect("multiplies")), [300.]);
    let (a, b) = (
        tensor(&[F8E4M3::from_f32(16.0); 100], &[1, 100]),
        tensor(&[F8E4M3::from_f32(16.0); 100], &[100, 1]),
    );
    assert_eq!(
        a.matmul_as(&b, DType::F32)
            .expect("multiplies")
            .to_vec::<f32>()
            .expect("f32"),
        [25600.]
    );
    assert!(
        floats(&a.matmul(&b).expect("multiplies"))[0].is_nan(),
        "f8e4m3 ends at 448 and overflows to NaN"
    );
}

#[test]
fn integers_wrap() {
    let out = tensor(&[200u8, 100], &[1, 2])
        .matmul(&tensor(&[2u8, 1], &[2, 1]))
        .expect("multiplies");
    assert_eq!(out.to_vec::<u8>().expect("u8"), [(500 % 256) as u8]);
    let out = tensor(&[i64::MAX, 1], &[1, 2])
        .matmul(&tensor(&[1i64, 1], &[2, 1]))
        .expect("multiplies");
    assert_eq!(out.to_vec::<i64>().expect("i64"), [i64::MIN]);
}

#[test]
fn dtypes_promote_and_bool_is_refused() {
    let (i, f) = (
        numbers(&[2, 2], 1).cast(DType::I32).expect("casts"),
        numbers(&[2, 2], 2).cast(DType::BF16).expect("casts"),
    );
    assert_eq!(i.matmul(&f).expect("promotes").dtype(), DType::BF16);
    let mask = tensor(&[true; 4], &[2, 2]);
    for result in [
        mask.matmul(&f),
        f.matmul(&mask),
        mask.t().expect("t").linear(&f, None),
        tensor(&[true], &[1]).outer(&tensor(&[1f32], &[1])),
    ] {
        assert!(
            matches!(
                result,
                Err(Error::DType {
                    dtype: DType::Bool,
                    ..
                })
            ),
            "{result:?}"
        );
    }
    assert!(matches!(
        i.matmul_as(&i, DType::F32),
        Err(Error::DType { .. })
    ));
    assert!(matches!(
        Tensor::einsum("ij->", &[&mask]),
        Err(Error::DType { .. })
    ));
}

#[test]
fn products_that_do_not_fit_are_typed_errors() {
    let (a, s) = (
        numbers(&[2, 3], 1),
        Tensor::new(2f32, &device()).expect("scalar"),
    );
    assert!(is_shape_error(a.matmul(&a)));
    assert!(is_shape_error(a.matmul(&s)));
    assert!(is_shape_error(
        numbers(&[2, 3, 4], 1).matmul(&numbers(&[3, 4, 5], 1))
    ));
    assert!(is_shape_error(a.bmm(&a)));
    assert!(
        is_shape_error(numbers(&[1, 2, 3], 1).bmm(&numbers(&[2, 3, 2], 1))),
        "bmm does not broadcast"
    );
    assert!(is_shape_error(a.dot(&a)));
    assert!(is_shape_error(numbers(&[2], 1).dot(&numbers(&[3], 1))));
    assert!(is_shape_error(a.outer(&numbers(&[3], 1))));
    assert!(is_shape_error(a.linear(&numbers(&[4, 2], 1), None)));
    assert!(is_shape_error(
        a.linear(&numbers(&[4, 3], 1), Some(&numbers(&[3], 1)))
    ));
    assert!(is_shape_error(numbers(&[3, 3], 1).baddbmm(
        &numbers(&[1, 2, 3], 1),
        &numbers(&[1, 3, 2], 1),
        &Baddbmm::default()
    )));
}

#[test]
fn linear_multiplies_by_the_transpose_and_adds_the_bias() {
    let (x, w, bias) = (
        numbers(&[2, 3, 4], 1),
        numbers(&[5, 4], 2),
        numbers(&[5], 3),
    );
    let out = x.linear(&w, Some(&bias)).expect("linear");
    assert_eq!(out.dims(), [2, 3, 5]);
    let product = naive(&floats(&x), &floats(&w.t().expect("t")), [6, 4, 5]);
    let expected: Vec<f32> = product
        .iter()
        .enumerate()
        .map(|(i, v)| v + floats(&bias)[i % 5])
        .collect();
    assert_eq!(floats(&out), expected);
    assert_eq!(
        numbers(&[4], 1).linear(&w, None).expect("a vector").dims(),
        [5]
    );
}

#[test]
fn baddbmm_ignores_its_input_where_beta_is_zero() {
    let (a, b) = (
        tensor(&[1f32, 2.], &[1, 1, 2]),
        tensor(&[3f32, 4.], &[1, 2, 1]),
    );
    let nan = tensor(&[f32::NAN], &[1]);
    assert_eq!(
        floats(
            &nan.baddbmm(
                &a,
                &b,
                &Baddbmm {
                    beta: 0.0,
                    alpha: 2.0
                }
            )
            .expect("ignores")
        ),
        [22.]
    );
    assert_eq!(
        floats(
            &tensor(&[10f32], &[1])
                .baddbmm(
                    &a,
                    &b,
                    &Baddbmm {
                        beta: 0.5,
                        alpha: 2.0
                    }
                )
                .expect("adds")
        ),
        [27.]
    );
}

/// Any einsum over letters, element by element: every assignment of all letters to values.
fn naive_einsum(equation: &str, tensors: &[&Tensor]) -> Vec<f32> {
    let (inputs, output) = equation.split_once("->").expect("explicit");
    let terms: Vec<&str> = inputs.split(',').collect();
    let mut letters: Vec<(char, usize)> = output.chars().map(|c| (c, 0)).collect();
    for (term, t) in terms.iter().zip(tensors) {
        for (c, &n) in term.chars().zip(t.dims()) {
            match letters.iter_mut().find(|(l, _)| *l == c) {
                Some(entry) => entry.1 = n,
                None => letters.push((c, n)),
            }
        }
    }
    let data: Vec<Vec<f32>> = tensors.iter().map(|t| floats(t)).collect();
    let outer: usize = letters[..output.len()].iter().map(|(_, n)| n).product();
    let total: usize = letters.iter().map(|(_, n)| n).product();
    let mut out = vec![0f32; outer];
    for i in 0..total {
        let mut rest = i;
        let mut at = vec![0; letters.len()];
        for d in (0..letters.len()).rev() {
            at[d] = rest % letters[d].1;
            rest /= letters[d].1;
        }
        let value = |c: char| at[letters.iter().position(|(l, _)| *l == c).expect("known")];
        let product: f32 = terms
            .iter()
            .zip(tensors)
            .zip(&data)
            .map(|((term, t), data)| {
                data[term
                    .chars()
                    .zip(t.dims())
                    .fold(0, |p, (c, n)| p * n + value(c))]
            })
            .product();
        out[i / (total / outer)] += product;
    }
    out
}

#[test]
fn einsum_agrees_with_the_sum_over_all_assignments() {
    let equations: &[(&str, &[&[usize]])] = &[
        ("ij,jk->ik", &[&[3, 4], &[4, 5]]),
        ("ij,jk->ki", &[&[3, 4], &[4, 5]]),
        ("bij,bjk->bik", &[&[2, 3, 4], &[2, 4, 5]]),
        ("bij,bkj->kib", &[&[2, 3, 4], &[2, 5, 4]]),
        ("ii->i", &[&[4, 4]]),
        ("iji->j", &[&[4, 3, 4]]),
        ("ii,i->", &[&[4, 4], &[4]]),
        ("ij->ji", &[&[3, 4]]),
        ("ij->", &[&[3, 4]]),
        ("i,j->ij", &[&[3], &[4]]),
        ("i,i->i", &[&[3], &[3]]),
        ("ij,ij->j", &[&[3, 4], &[3, 4]]),
        ("ij,kl->il", &[&[3, 4], &[2, 5]]),
        ("ij,jk,kl->il", &[&[3, 4], &[4, 2], &[2, 5]]),
        ("ab,ac,ad->bcd", &[&[4, 2], &[4, 3], &[4, 2]]),
        ("ab,bc,ca->", &[&[3, 4], &[4, 2], &[2, 3]]),
        ("abc,c,b->a", &[&[2, 3, 4], &[4], &[3]]),
        ("i,,j->ij", &[&[2], &[], &[3]]),
    ];
    for (equation, shapes) in equations {
        let tensors: Vec<Tensor> = shapes
            .iter()
            .enumerate()
            .map(|(i, shape)| numbers(shape, i + 1))
            .collect();
        let tensors: Vec<&Tensor> = tensors.iter().collect();
        assert_eq!(
            floats(&Tensor::einsum(equation, &tensors).expect(equation)),
            naive_einsum(equation, &tensors),
            "{equation}"
        );
    }
}

#[test]
fn einsum_without_a_result_keeps_letters_that_occur_once_in_alphabetical_order() {
    let (a, b) = (numbers(&[3, 4], 1), numbers(&[4, 5], 2));
    let same = |short: &str, long: &str, tensors: &[&Tensor]| {
        let (x, y) = (
            Tensor::einsum(short, tensors).expect(short),
            Tensor::einsum(long, tensors).expect(long),
        );
        assert_eq!((x.dims(), floats(&x)), (y.dims(), floats(&y)), "{short}");
    };
    same("ij,jk", "ij,jk->ik", &[&a, &b]);
    same("ba", "ba->ab", &[&a]);
    same(" i j , j k -> i k ", "ij,jk->ik", &[&a, &b]);
    same("ii", "ii->", &[&numbers(&[4, 4], 1)]);
    same("bz,za", "bz,za->ab", &[&a, &b]);
}

#[test]
fn the_ellipsis_stands_for_leading_dimensions_that_broadcast() {
    let (a, b) = (numbers(&[2, 1, 3, 4], 1), numbers(&[5, 4, 2], 2));
    let out = Tensor::einsum("...ij,...jk->...ik", &[&a, &b]).expect("broadcasts");
    assert_eq!(floats(&out), floats(&a.matmul(&b).expect("multiplies")));
    assert_eq!(
        Tensor::einsum("...ij,...jk", &[&a, &b])
            .expect("implicit")
            .dims(),
        [2, 5, 3, 2]
    );
    assert_eq!(
        Tensor::einsum("i...->...i", &[&numbers(&[2, 3, 4], 1)])
            .expect("moves")
            .dims(),
        [3, 4, 2]
    );
    let summed = Tensor::einsum("i...->i", &[&numbers(&[2, 3, 4], 1)])
        .expect("sums what the result does not have");
    assert_eq!(
        floats(&summed),
        floats(&numbers(&[2, 3, 4], 1).sum(&[1, 2], false).expect("sums"))
    );
    assert_eq!(
        Tensor::einsum("...i,i", &[&numbers(&[4], 1), &numbers(&[4], 2)])
            .expect("nothing hidden")
            .rank(),
        0
    );
}

#[test]
fn einsum_of_u8_wraps_and_of_nothing_is_zero() {
    let out = Tensor::einsum("ij->j", &[&tensor(&[200u8, 1, 100, 2], &[2, 2])]).expect("sums");
    assert_eq!(out.to_vec::<u8>().expect("u8"), [(300 % 256) as u8, 3]);
    assert_eq!(
        floats(
            &Tensor::einsum("ij,jk->ik", &[&numbers(&[2, 0], 1), &numbers(&[0, 1], 1)])
                .expect("zeros")
        ),
        [0., 0.]
    );
    assert_eq!(
        Tensor::einsum("ij,jk->ik", &[&numbers(&[0, 2], 1), &numbers(&[2, 3], 1)])
            .expect("empty")
            .dims(),
        [0, 3]
    );
}

#[test]
fn bad_equations_are_typed_errors() {
    let a = numbers(&[3, 4], 1);
    for text in [
        "ij",
        "ij,jk,kl",
        "i1,jk",
        "ij;jk",
        "i..j,jk",
        "......ij,jk",
        "ij,jk->ii",
        "ij,jk->iz",
        "ij->jk->ik",
        "ijk,jk",
        "i,jk",
    ] {
        let result = Tensor::einsum(text, &[&a, &a]);
        assert!(
            matches!(result, Err(Error::Parse { .. })),
            "{text}: {result:?}"
        );
    }
    assert!(matches!(Tensor::einsum("", &[]), Err(Error::Parse { .. })));
    assert!(
        is_shape_error(Tensor::einsum("ij,jk", &[&a, &a])),
        "j is 4 and 3"
    );
    assert!(is_shape_error(Tensor::einsum("ii", &[&a])));
    assert!(is_shape_error(Tensor::einsum(
        "...i,...i",
        &[&numbers(&[2, 3], 1), &numbers(&[4, 3], 1)]
    )));
    assert!(
        is_shape_error(Tensor::einsum(
            "ij,jk",
            &[&numbers(&[3, 1], 1), &numbers(&[4, 3], 1)]
        )),
        "letters do not broadcast"
    );
}

#[test]
fn groups_without_rows_rows_without_groups_and_nothing_at_all() {
    let device = device();
    let ends = |ends: &[i32]| Tensor::from_slice(ends, [ends.len()], &device).expect("ends");
    let (x, w) = (numbers(&[4, 3], 1), numbers(&[2, 3, 5], 2));
    let all = x.grouped_matmul(&w, &ends(&[0, 4])).expect("multiplies");
    let second = w.narrow(0, 1, 1).and_then(|w| w.squeeze(&[0]));
    let expected = x.matmul(&second.expect("a matrix")).expect("multiplies");
    assert_eq!(floats(&all), floats(&expected));
    let none = x.grouped_matmul(&w, &ends(&[0, 0])).expect("multiplies");
    assert_eq!(floats(&none), [0.0; 20]);
    let sums = x.grouped_outer(&x, &ends(&[0, 0])).expect("multiplies");
    assert_eq!(floats(&sums), [0.0; 18]);
    for [n, groups, k, m] in [[0, 2, 3, 5], [4, 0, 3, 5], [4, 2, 0, 5], [4, 2, 3, 0]] {
        let (x, w) = (numbers(&[n, k], 3), numbers(&[groups, k, m], 4));
        let y = numbers(&[n, m], 5);
        let ends = Tensor::zeros([groups], DType::I32, &device).expect("ends");
        let rows = x.grouped_matmul(&w, &ends).expect("multiplies");
        assert_eq!(floats(&rows), vec![0.0; n * m]);
        let sums = x.grouped_outer(&y, &ends).expect("multiplies");
        assert_eq!(floats(&sums), vec![0.0; groups * k * m]);
    }
    let wrong = x.grouped_matmul(&w, &ends(&[2, 5]));
    assert!(
        matches!(
            wrong,
            Err(Error::IndexOutOfRange {
                index: 5,
                len: 5,
                ..
            })
        ),
        "{wrong:?}"
    );
}

#[test]
fn scaled_products_of_8_bit_floats_are_those_of_what_they_stand_for() {
    let (x, y) = (numbers(&[3, 5, 16], 1), numbers(&[16, 9], 2));
    for [a, b] in [
        [DType::F8E4M3, DType::F8E4M3],
        [DType::F8E5M2, DType::F8E4M3],
        [DType::F8E5M2, DType::F8E5M2],
    ] {
        let (x, x_scale) = x.quantize_f8(a).expect("quantizes");
        let (y, y_scale) = y.quantize_f8(b).expect("quantizes");
        let wide = |codes: &Tensor, scale: &Tensor| {
            let codes = codes.cast(DType::F64).expect("casts");
            codes
                .mul(&scale.cast(DType::F64).expect("casts"))
                .expect("scales")
        };
        let expected = wide(&x, &x_scale).matmul(&wide(&y, &y_scale));
        let expected = expected.expect("multiplies").to_vec::<f64>().expect("f64");
        for (dtype, part) in [(DType::F32, 1e-6), (DType::BF16, 4e-3), (DType::F16, 5e-4)] {
            let out = x
                .matmul_scaled(&y, &x_scale, &y_scale, dtype)
                .expect("multiplies");
            assert_eq!((out.dims(), out.dtype()), (&[3usize, 5, 9][..], dtype));
            let top = expected.iter().fold(0f64, |top, v| top.max(v.abs()));
            for (found, expected) in floats(&out).iter().zip(&expected) {
                let error = (f64::from(*found) - expected).abs();
                assert!(
                    error <= part * top,
                    "{a} {b} {dtype}: {found} for {expected}"
                );
            }
        }
    }
}

#[test]
fn scales_are_the_largest_value_over_that_of_the_dtype() {
    let quantized = |values: &[f32], dtype| {
        let (codes, scale) = tensor(values, &[values.len()])
            .quantize_f8(dtype)
            .expect("ok");
        assert_eq!((codes.dtype(), scale.dims()), (dtype, &[][..]));
        (floats(&codes), scale.item().expect("one").to_f64())
    };
    let (codes, scale) = quantized(&[3.5, -7.0, 0.0], DType::F8E4M3);
    assert_eq!((codes, scale), (vec![224., -448., 0.], 1.0 / 64.0));
    let (codes, scale) = quantized(&[3.5, -7.0, 0.0], DType::F8E5M2);
    assert_eq!((codes, scale), (vec![28672., -57344., 0.], 2f64.powi(-13)));
    let (codes, scale) = quantized(&[0.0, -0.0], DType::F8E4M3);
    assert_eq!(codes, [0., 0.]);
    assert!(scale > 0.0, "nothing is divided by zero");
    // So small that the quotient would be no normal number.
    assert!(quantized(&[1e-38], DType::F8E5M2).0[0].is_finite());
    for odd in [f32::NAN, f32::INFINITY] {
        let (codes, scale) = quantized(&[1.0, odd], DType::F8E4M3);
        assert!(
            (f64::from(codes[0]) * scale).is_nan(),
            "{odd} is not hidden"
        );
    }
    let (codes, scale) = quantized(&[], DType::F8E4M3);
    assert!(codes.is_empty() && scale > 0.0);
}

#[test]
fn scaled_products_refuse_what_is_none() {
    let (x, one) = (
        numbers(&[2, 2], 1),
        Tensor::new(1f32, &device()).expect("scalar"),
    );
    let codes = x.quantize_f8(DType::F8E4M3).expect("quantizes").0;
    let whole = x.cast(DType::I32).expect("casts");
    assert!(is_shape_error(codes.matmul_scaled(
        &numbers(&[3, 2], 1),
        &one,
        &one,
        DType::F32
    )));
    assert!(is_shape_error(codes.matmul_scaled(
        &codes,
        &one,
        &numbers(&[2], 1),
        DType::F32
    )));
    assert!(is_shape_error(one.matmul_scaled(
        &codes,
        &one,
        &one,
        DType::F32
    )));
    for refused in [
        codes.matmul_scaled(&codes, &one, &one, DType::I32),
        codes.matmul_scaled(&whole, &one, &one, DType::F32),
        x.quantize_f8(DType::BF16).map(|(codes, _)| codes),
        whole.quantize_f8(DType::F8E4M3).map(|(codes, _)| codes),
    ] {
        assert!(matches!(refused, Err(Error::DType { .. })), "{refused:?}");
    }
}

#[test]
fn scales_of_a_mesh_are_those_of_the_whole_tensor() {
    let x = numbers(&[6, 8], 3);
    let (codes, scale) = x.quantize_f8(DType::F8E4M3).expect("quantizes");
    let mesh = anymesh_core::Mesh::new("dp=2, tp=3", &device()).expect("a mesh");
    for sharding in ["[@dp, @tp]", "[@tp, _]", "[_, _]"] {
        let cut = x.to_mesh(&mesh, sharding).expect("cuts");
        let (parts, of_all) = cut.quantize_f8(DType::F8E4M3).expect("quantizes");
        assert_eq!(of_all.item().expect("one"), scale.item().expect("one"));
        let parts = parts.full_tensor().expect("gathers");
        assert_eq!(
            parts.to_bytes().expect("reads"),
            codes.to_bytes().expect("reads")
        );
    }
}

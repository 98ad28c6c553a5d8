//! Ops that copy, against naive definitions by coordinates.

use crate::support::{counting, device, expect, flat};
use anymesh_core::{DType, Device, Error, Result, Scalar, Tensor, bf16, ops::PadMode};

const CUBE: [usize; 3] = [2, 3, 4];

#[test]
fn concatenation_places_parts_one_after_another() {
    let x = counting(&CUBE);
    let y = x.slice(1, None, None, -1).expect("view");
    expect(Tensor::concat(&[&x, &y], 1), &[2, 6, 4], |c| {
        if c[1] < 3 {
            flat(&CUBE, c)
        } else {
            flat(&CUBE, &[c[0], 5 - c[1], c[2]])
        }
    });
    expect(Tensor::concat(&[&x, &y], -1), &[2, 3, 8], |c| {
        if c[2] < 4 {
            flat(&CUBE, c)
        } else {
            flat(&CUBE, &[c[0], 2 - c[1], c[2] - 4])
        }
    });
}

#[test]
fn empty_parts_are_skipped_and_many_parts_joined_in_rounds() {
    let parts: Vec<Tensor> = (0..50).map(|i| counting(&[3, i % 4])).collect();
    let joined = Tensor::concat(&parts.iter().collect::<Vec<_>>(), 1).expect("joins");
    let mut expected = vec![];
    for row in 0..3 {
        for i in 0..50 {
            expected.extend((0..i % 4).map(|column| row * (i % 4) + column));
        }
    }
    assert_eq!(joined.dims(), [3, expected.len() / 3]);
    assert_eq!(joined.to_vec::<i32>().expect("values"), expected);
    let nothing = Tensor::concat(&[&counting(&[0, 3]), &counting(&[0, 3])], 0).expect("joins");
    assert_eq!(nothing.dims(), [0, 3]);
}

#[test]
fn packed_elements_straddle_words_without_harm() {
    let d = device();
    let row = |n: usize, start: u8| {
        Tensor::from_slice(
            &(0..3 * n).map(|i| start + i as u8).collect::<Vec<u8>>(),
            [3, n],
            &d,
        )
        .expect("bytes")
    };
    let (a, b, c) = (row(3, 0), row(5, 50), row(7, 100));
    let joined = Tensor::concat(&[&a, &b, &c], 1)
        .expect("joins")
        .to_vec::<u8>()
        .expect("values");
    let expected: Vec<u8> = (0..3u8)
        .flat_map(|r| {
            (0..3)
                .map(move |i| 3 * r + i)
                .chain((0..5).map(move |i| 50 + 5 * r + i))
                .chain((0..7).map(move |i| 100 + 7 * r + i))
        })
        .collect();
    assert_eq!(joined, expected);
}

#[test]
fn joined_dtypes_promote() {
    let d = device();
    let ints = Tensor::from_slice(&[1i32, -2], [2], &d).expect("ints");
    let halves = Tensor::from_slice(&[bf16::from_f32(0.5)], [1], &d).expect("halves");
    let joined = Tensor::concat(&[&ints, &halves], 0).expect("joins");
    assert_eq!(
        joined.to_vec::<bf16>().expect("bf16"),
        [1.0, -2.0, 0.5].map(bf16::from_f32)
    );
    let unsigned = Tensor::from_slice(&[u32::MAX, 3], [2], &d).expect("unsigned");
    assert_eq!(
        Tensor::stack(&[&ints, &unsigned], 0)
            .expect("stacks")
            .to_vec::<i64>()
            .expect("i64"),
        [1, -2, i64::from(u32::MAX), 3]
    );
    // A single part with elements must be converted too.
    let none = Tensor::zeros([0], DType::F32, &d).expect("empty");
    assert_eq!(
        Tensor::concat(&[&ints, &none], 0)
            .expect("joins")
            .to_vec::<f32>()
            .expect("f32"),
        [1.0, -2.0]
    );
}

#[test]
fn stacking_adds_a_dimension_anywhere() {
    let (x, y) = (counting(&[2, 3]), counting(&[3, 2]).t().expect("view"));
    let value = |which: usize, r: usize, c: usize| {
        if which == 0 {
            flat(&[2, 3], &[r, c])
        } else {
            flat(&[3, 2], &[c, r])
        }
    };
    expect(Tensor::stack(&[&x, &y], 0), &[2, 2, 3], |c| {
        value(c[0], c[1], c[2])
    });
    expect(Tensor::stack(&[&x, &y], 1), &[2, 2, 3], |c| {
        value(c[1], c[0], c[2])
    });
    expect(Tensor::stack(&[&x, &y], -1), &[2, 3, 2], |c| {
        value(c[2], c[0], c[1])
    });
    expect(Tensor::stack(&[&counting(&[])], 0), &[1], |_| 0);
}

/// Where a padded position reads along one dimension of size `n`, or `None` for the constant.
fn source(mode: PadMode, n: i64, i: i64) -> Option<usize> {
    let at = match mode {
        PadMode::Constant(_) => i,
        PadMode::Reflect if i < 0 => -i,
        PadMode::Reflect if i >= n => 2 * (n - 1) - i,
        PadMode::Reflect => i,
        PadMode::Replicate => i.clamp(0, n - 1),
        PadMode::Circular => i.rem_euclid(n),
    };
    (0..n).contains(&at).then_some(at as usize)
}

#[test]
fn padding_reads_what_each_mode_says() {
    let x = counting(&CUBE).permute(&[1, 0, 2]).expect("view");
    let pairs = [(2, 1), (1, 0), (0, 3)];
    let dims: Vec<usize> = x
        .dims()
        .iter()
        .zip(pairs)
        .map(|(n, (a, b))| n + a + b)
        .collect();
    for mode in [
        PadMode::Constant(Scalar::Int(-7)),
        PadMode::Reflect,
        PadMode::Replicate,
        PadMode::Circular,
    ] {
        expect(x.pad(&pairs, mode), &dims, |c| {
            let at: Option<Vec<usize>> = (0..3)
                .map(|d| source(mode, x.dims()[d] as i64, c[d] as i64 - pairs[d].0 as i64))
                .collect();
            at.map_or(-7, |at| flat(&CUBE, &[at[1], at[0], at[2]]))
        });
    }
}

#[test]
fn padding_of_nothing_and_by_nothing() {
    let none = counting(&[0, 2]);
    expect(
        none.pad(&[(1, 2), (1, 0)], PadMode::Constant(5.into())),
        &[3, 3],
        |_| 5,
    );
    assert_eq!(
        none.pad(&[(0, 0), (1, 1)], PadMode::Replicate)
            .expect("still empty")
            .dims(),
        [0, 4]
    );
    assert!(matches!(
        none.pad(&[(1, 0), (0, 0)], PadMode::Replicate),
        Err(Error::Argument { .. })
    ));
    expect(
        counting(&[2, 3]).pad(&[(0, 0); 2], PadMode::Constant(5.into())),
        &[2, 3],
        |c| flat(&[2, 3], c),
    );
    expect(counting(&[]).pad(&[], PadMode::Reflect), &[], |_| 0);
    expect(counting(&[1]).pad(&[(0, 0)], PadMode::Reflect), &[1], |_| 0);
    expect(
        counting(&[1]).pad(&[(3, 2)], PadMode::Replicate),
        &[6],
        |_| 0,
    );
}

#[test]
fn padding_past_what_a_mode_can_reach_is_an_error() {
    let x = counting(&[3]);
    assert!(matches!(
        x.pad(&[(3, 0)], PadMode::Reflect),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        x.pad(&[(0, 4)], PadMode::Circular),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        x.pad(&[(0, 0), (0, 0)], PadMode::Reflect),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        x.pad(&[(usize::MAX, 1)], PadMode::Replicate),
        Err(Error::SizeOverflow { .. })
    ));
    assert!(matches!(
        x.pad(&[(0, 1 << 62)], PadMode::Constant(0.into())),
        Err(Error::SizeOverflow { .. })
    ));
    assert!(matches!(
        x.cast(DType::U8)
            .expect("bytes")
            .pad(&[(0, 1)], PadMode::Constant(256.into())),
        Err(Error::Argument { .. })
    ));
}

#[test]
fn rolling_moves_elements_forward() {
    let x = counting(&[5]);
    expect(x.roll(&[2], &[0]), &[5], |c| [3, 4, 0, 1, 2][c[0]]);
    expect(x.roll(&[-1], &[0]), &[5], |c| [1, 2, 3, 4, 0][c[0]]);
    expect(x.roll(&[i64::MIN], &[0]), &[5], |c| {
        (c[0] as i128 - i64::MIN as i128).rem_euclid(5) as i32
    });
    let y = counting(&[3, 4]);
    expect(y.roll(&[1, -6], &[0, 1]), &[3, 4], |c| {
        flat(&[3, 4], &[(c[0] + 2) % 3, (c[1] + 6) % 4])
    });
    expect(y.roll(&[5], &[]), &[3, 4], |c| (flat(&[3, 4], c) + 7) % 12);
    expect(counting(&[0, 2]).roll(&[3], &[0]), &[0, 2], |_| 0);
    assert!(matches!(y.roll(&[1, 2], &[0]), Err(Error::Argument { .. })));
    assert!(matches!(y.roll(&[1, 2], &[0, -2]), Err(Error::Axis { .. })));
}

#[test]
fn tiles_repeat_the_whole_and_interleaving_each_element() {
    let x = counting(&[2, 3]);
    expect(x.tile(&[2, 3]), &[4, 9], |c| {
        flat(&[2, 3], &[c[0] % 2, c[1] % 3])
    });
    expect(x.tile(&[2]), &[2, 6], |c| flat(&[2, 3], &[c[0], c[1] % 3]));
    expect(x.tile(&[2, 1, 1]), &[2, 2, 3], |c| flat(&[2, 3], &c[1..]));
    expect(x.tile(&[]), &[2, 3], |c| flat(&[2, 3], c));
    expect(x.tile(&[0, 2]), &[0, 6], |_| 0);
    expect(counting(&[]).tile(&[3]), &[3], |_| 0);
    expect(x.repeat_interleave(2, 0), &[4, 3], |c| {
        flat(&[2, 3], &[c[0] / 2, c[1]])
    });
    expect(x.repeat_interleave(3, -1), &[2, 9], |c| {
        flat(&[2, 3], &[c[0], c[1] / 3])
    });
    expect(x.repeat_interleave(0, 0), &[0, 3], |_| 0);
    assert!(matches!(x.tile(&[usize::MAX]), Err(Error::Argument { .. })));
    assert!(matches!(
        x.tile(&[1 << 31, 1 << 31]),
        Err(Error::SizeOverflow { .. })
    ));
    assert!(matches!(
        x.repeat_interleave(usize::MAX, 0),
        Err(Error::Argument { .. })
    ));
}

#[test]
fn triangles_keep_their_side_of_diagonal_k() {
    let dims = [2, 3, 5];
    let x = counting(&dims).slice(0, None, None, -1).expect("view");
    let value = |c: &[usize]| flat(&dims, &[1 - c[0], c[1], c[2]]);
    for k in [i64::MIN, -4, -2, -1, 0, 1, 3, 5, i64::MAX] {
        expect(x.triu(k), &dims, |c| {
            if c[2] as i64 - c[1] as i64 >= k {
                value(c)
            } else {
                0
            }
        });
        expect(x.tril(k), &dims, |c| {
            if c[2] as i64 - c[1] as i64 <= k {
                value(c)
            } else {
                0
            }
        });
    }
    let flags = Tensor::ones([2, 2], DType::Bool, &device())
        .and_then(|t| t.tril(0))
        .expect("bools too");
    assert_eq!(
        flags.to_vec::<bool>().expect("values"),
        [true, false, true, true]
    );
    assert!(matches!(counting(&[3]).tril(0), Err(Error::Shape { .. })));
    assert_eq!(counting(&[0, 3]).tril(0).expect("empty").dims(), [0, 3]);
}

#[test]
fn infinities_outside_a_triangle_become_zero() {
    let x = Tensor::full([2, 2], f64::INFINITY, DType::F32, &device())
        .and_then(|t| t.triu(1))
        .expect("triangle");
    assert_eq!(
        x.to_vec::<f32>().expect("values"),
        [0.0, f32::INFINITY, 0.0, 0.0]
    );
}

#[test]
fn diag_goes_both_ways() {
    let x = counting(&[3]).slice(0, None, None, -1).expect("view");
    for k in [-2i64, 0, 1] {
        let n = 3 + k.unsigned_abs() as usize;
        expect(x.diag(k), &[n, n], |c| {
            if c[1] as i64 - c[0] as i64 == k {
                2 - c[0].min(c[1]) as i32
            } else {
                0
            }
        });
        expect(x.diag(k).and_then(|m| m.diag(k)), &[3], |c| 2 - c[0] as i32);
    }
    expect(counting(&[0]).diag(2), &[2, 2], |_| 0);
    assert!(matches!(x.diag(i64::MAX), Err(Error::SizeOverflow { .. })));
    assert!(matches!(counting(&CUBE).diag(0), Err(Error::Shape { .. })));
}

#[test]
fn tensors_that_do_not_fit_together_are_typed_errors() {
    let x = counting(&[2, 3]);
    assert!(matches!(
        Tensor::concat(&[], 0),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(Tensor::stack(&[], 0), Err(Error::Argument { .. })));
    assert!(matches!(
        Tensor::concat(&[&x, &counting(&[3, 3])], 1),
        Err(Error::Shape { .. })
    ));
    assert!(matches!(
        Tensor::concat(&[&x, &counting(&[2])], 0),
        Err(Error::Shape { .. })
    ));
    assert!(matches!(
        Tensor::concat(&[&counting(&[])], 0),
        Err(Error::Axis { .. })
    ));
    assert!(matches!(
        Tensor::stack(&[&x, &counting(&[3, 2])], 0),
        Err(Error::Shape { .. })
    ));
    assert!(matches!(Tensor::stack(&[&x], 3), Err(Error::Axis { .. })));
    let wide = x
        .narrow(0, 0, 1)
        .and_then(|t| t.expand([1 << 58, 3]))
        .expect("view");
    assert!(matches!(
        Tensor::concat(&[&wide, &wide], 0),
        Err(Error::SizeOverflow { .. })
    ));
    let other = Tensor::from_slice(
        &[1i32; 6],
        [2, 3],
        &Device::new(anymesh_backend_cpu::CpuBackend::new()),
    )
    .expect("another device");
    assert!(matches!(
        Tensor::concat(&[&x, &other], 0),
        Err(Error::DeviceMismatch { .. })
    ));
}

#[test]
fn every_dtype_moves_bit_for_bit() -> Result<()> {
    for dtype in DType::ALL {
        let limit = if dtype == DType::Bool { 2 } else { 251 };
        let bytes: Vec<u8> = (0..15 * dtype.size())
            .map(|i| (i * 7 % limit) as u8)
            .collect();
        let x = Tensor::from_bytes(&bytes, dtype, [3, 5], &device())?;
        let y = Tensor::concat(&x.chunk(4, 1)?.iter().collect::<Vec<_>>(), 1)?
            .roll(&[2], &[1])?
            .t()?
            .contiguous()?
            .t()?
            .roll(&[-2], &[1])?;
        // NaNs may change their payload; no such pattern is among the bytes of the wider types.
        if dtype.size() > 1 || !dtype.is_float() {
            assert_eq!(y.to_bytes()?, bytes, "{dtype}");
        }
    }
    Ok(())
}

//! Matrix products and einsum.

use super::{Cases, Fill, View, input};
use anymesh_core::{DType, Device, Result, Tensor};
use anymesh_core::{grad::Gradients, ops::Baddbmm};

const DTYPES: [DType; 8] = [
    DType::F32,
    DType::F64,
    DType::F16,
    DType::BF16,
    DType::F8E4M3,
    DType::I32,
    DType::I64,
    DType::U8,
];

/// Shapes across the edges of tiles: single elements, vectors, partial and whole tiles.
const SHAPES: [[usize; 3]; 12] = [
    [1, 1, 1],
    [1, 300, 65],
    [65, 300, 1],
    [1, 64, 1],
    [5, 1, 7],
    [17, 33, 65],
    [64, 64, 64],
    [65, 16, 63],
    [128, 130, 257],
    [2, 1030, 3],
    [31, 4, 129],
    [33, 257, 32],
];

fn fill(dtype: DType) -> Fill {
    match dtype {
        DType::U8 => Fill::Integers(0, 255),
        d if d.is_int() => Fill::Integers(-100, 100),
        _ => Fill::Uniform(-1.0, 1.0),
    }
}

fn data(device: &Device, dtype: DType, shape: &[usize], view: View, seed: u64) -> Result<Tensor> {
    input(device, dtype, shape, view, fill(dtype), seed)
}

fn products(cases: &mut Cases) {
    use View::*;
    let pairs = [
        (Contiguous, Contiguous),
        (Contiguous, Transposed),
        (Transposed, Contiguous),
        (Transposed, Transposed),
        (Sliced, Contiguous),
        (Contiguous, Sliced),
        (Broadcast, Transposed),
        (Contiguous, Broadcast),
        (Negative, Contiguous),
        (Transposed, Negative),
    ];
    for dtype in DTYPES {
        for (left, right) in pairs {
            cases.add(
                "matmul",
                dtype,
                format!("{dtype} {left:?} x {right:?}"),
                move |d| {
                    Ok(vec![data(d, dtype, &[17, 33], left, 1)?.matmul(&data(
                        d,
                        dtype,
                        &[33, 65],
                        right,
                        2,
                    )?)?])
                },
            );
        }
        for [m, k, n] in SHAPES {
            cases.add("matmul", dtype, format!("{dtype} {m}x{k}x{n}"), move |d| {
                Ok(vec![
                    data(d, dtype, &[m, k], Contiguous, 3)?.matmul(&data(
                        d,
                        dtype,
                        &[k, n],
                        Contiguous,
                        4,
                    )?)?,
                ])
            });
        }
        for (left, right) in [
            (vec![3, 17, 33], vec![3, 33, 9]),
            (vec![2, 1, 17, 33], vec![3, 33, 9]),
            (vec![3, 17, 33], vec![33, 9]),
            (vec![17, 33], vec![2, 33, 9]),
        ] {
            cases.add(
                "matmul",
                dtype,
                format!("{dtype} batches {left:?} x {right:?}"),
                move |d| {
                    Ok(vec![
                        data(d, dtype, &left, Contiguous, 5)?
                            .matmul(&data(d, dtype, &right, Transposed, 6)?)?,
                    ])
                },
            );
        }
    }
    for dtype in [DType::F32, DType::BF16] {
        for (left, right) in [(Contiguous, Transposed), (Transposed, Contiguous)] {
            for [m, k, n] in SHAPES {
                cases.add(
                    "matmul",
                    dtype,
                    format!("{dtype} {m}x{k}x{n} {left:?} x {right:?}"),
                    move |d| {
                        Ok(vec![data(d, dtype, &[m, k], left, 7)?.matmul(&data(
                            d,
                            dtype,
                            &[k, n],
                            right,
                            8,
                        )?)?])
                    },
                );
            }
        }
        cases.add("matmul", dtype, format!("{dtype} 515x96x48"), move |d| {
            Ok(vec![
                data(d, dtype, &[515, 96], Contiguous, 9)?.matmul(&data(
                    d,
                    dtype,
                    &[96, 48],
                    Contiguous,
                    10,
                )?)?,
            ])
        });
        // Large enough for a device to copy what it could not read otherwise.
        if matches!(dtype, DType::F32 | DType::BF16) {
            cases.add(
                "matmul",
                dtype,
                format!("{dtype} of heads that are parts of one tensor"),
                move |d| {
                    let both = data(d, dtype, &[2, 384, 512], Contiguous, 19)?;
                    let heads = both.reshape([2, 384, 8, 64])?.transpose(1, 2)?;
                    let (q, k) = (heads.narrow(1, 0, 4)?, heads.narrow(1, 4, 4)?);
                    let weights = data(d, dtype, &[2, 4, 384, 384], Contiguous, 20)?;
                    Ok(vec![q.matmul(&k.transpose(-2, -1)?)?, weights.matmul(&k)?])
                },
            );
        }
        cases.add(
            "bmm",
            dtype,
            format!("{dtype} 7 of 20x30x10, transposed"),
            move |d| {
                Ok(vec![
                    data(d, dtype, &[7, 20, 30], Transposed, 11)?.bmm(&data(
                        d,
                        dtype,
                        &[7, 30, 10],
                        Sliced,
                        12,
                    )?)?,
                ])
            },
        );
        cases.add("matmul", dtype, format!("{dtype} vectors"), move |d| {
            let (matrix, v, w) = (
                data(d, dtype, &[2, 33, 17], Contiguous, 13)?,
                data(d, dtype, &[17], Sliced, 14)?,
                data(d, dtype, &[33], Negative, 15)?,
            );
            Ok(vec![matrix.matmul(&v)?, w.matmul(&matrix)?])
        });
        cases.add("dot", dtype, format!("{dtype} of 1030"), move |d| {
            Ok(vec![
                data(d, dtype, &[1030], Contiguous, 16)?.dot(&data(
                    d,
                    dtype,
                    &[1030],
                    Negative,
                    17,
                )?)?,
            ])
        });
        cases.add("outer", dtype, format!("{dtype} 33 x 65"), move |d| {
            Ok(vec![
                data(d, dtype, &[33], Contiguous, 18)?.outer(&data(
                    d,
                    dtype,
                    &[65],
                    Sliced,
                    19,
                )?)?,
            ])
        });
        cases.add("linear", dtype, format!("{dtype} without bias"), move |d| {
            Ok(vec![data(d, dtype, &[2, 5, 33], Contiguous, 20)?.linear(
                &data(d, dtype, &[17, 33], Contiguous, 21)?,
                None,
            )?])
        });
        cases.add(
            "baddbmm",
            dtype,
            format!("{dtype} with a row to add"),
            move |d| {
                let (a, b) = (
                    data(d, dtype, &[3, 17, 33], Contiguous, 22)?,
                    data(d, dtype, &[3, 33, 9], Transposed, 23)?,
                );
                let row = data(d, dtype, &[9], Contiguous, 24)?;
                Ok(vec![
                    row.baddbmm(
                        &a,
                        &b,
                        &Baddbmm {
                            beta: 0.5,
                            alpha: 2.0,
                        },
                    )?,
                    row.baddbmm(
                        &a,
                        &b,
                        &Baddbmm {
                            beta: 0.0,
                            alpha: -1.0,
                        },
                    )?,
                    data(d, dtype, &[3, 17, 9], Contiguous, 25)?.baddbmm(
                        &a,
                        &b,
                        &Baddbmm::default(),
                    )?,
                ])
            },
        );
    }
    for (small, wide) in [
        (DType::F8E4M3, DType::F32),
        (DType::F8E5M2, DType::BF16),
        (DType::BF16, DType::F32),
        (DType::F16, DType::F32),
    ] {
        cases.add(
            "matmul_as",
            wide,
            format!("{small} stored as {wide}"),
            move |d| {
                Ok(vec![
                    data(d, small, &[65, 130], Contiguous, 25)?
                        .matmul_as(&data(d, small, &[130, 33], Transposed, 26)?, wide)?,
                ])
            },
        );
    }
    for small in [DType::BF16, DType::F16] {
        cases.add(
            "linear",
            small,
            format!("{small} with an f32 bias"),
            move |d| {
                let x = data(d, small, &[65, 130], Contiguous, 37)?;
                let weight = data(d, small, &[33, 130], Transposed, 38)?;
                let bias = data(d, DType::F32, &[33], Contiguous, 39)?;
                Ok(vec![x.linear(&weight, Some(&bias))?])
            },
        );
    }
    // Small whole numbers are exact in every dtype, so a wrong sum cannot hide behind a tolerance.
    for dtype in [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::F8E5M2,
        DType::U32,
    ] {
        let low = if dtype.is_signed() { -1 } else { 0 };
        let whole = move |d: &Device, shape: &[usize], seed| {
            input(d, dtype, shape, Contiguous, Fill::Integers(low, 1), seed)
        };
        cases.add(
            "matmul",
            dtype,
            format!("{dtype} whole numbers, exact"),
            move |d| {
                Ok(vec![whole(d, &[40, 70], 27)?.matmul(&whole(
                    d,
                    &[70, 50],
                    28,
                )?)?])
            },
        );
        cases.add(
            "linear",
            dtype,
            format!("{dtype} whole numbers with bias, exact"),
            move |d| {
                Ok(vec![whole(d, &[40, 7], 29)?.linear(
                    &whole(d, &[50, 7], 30)?,
                    Some(&whole(d, &[50], 31)?),
                )?])
            },
        );
    }
    cases.add("matmul", DType::F32, "NaN and infinities", |d| {
        let special = |shape: &[usize], seed| {
            input(
                d,
                DType::F32,
                shape,
                Contiguous,
                Fill::Special(-1.0, 1.0),
                seed,
            )
        };
        Ok(vec![
            special(&[40, 3], 32)?.matmul(&special(&[3, 40], 33)?)?,
        ])
    });
    cases.add("matmul", DType::F32, "f32 with i32 and with bf16", |d| {
        let x = data(d, DType::F32, &[5, 6], Contiguous, 34)?;
        Ok(vec![
            x.matmul(&data(d, DType::I32, &[6, 7], Contiguous, 35)?)?,
            x.matmul(&data(d, DType::BF16, &[6, 7], Contiguous, 36)?)?,
        ])
    });
}

/// Products of 8-bit floats with scales: sizes that tensor cores have a kernel for, laid out as they
/// want it and not, and sizes that they have none for.
fn scaled(cases: &mut Cases) {
    use View::*;
    let op = "matmul_scaled";
    let (e4m3, e5m2) = (DType::F8E4M3, DType::F8E5M2);
    let pairs = [[e4m3, e4m3], [e4m3, e5m2], [e5m2, e4m3], [e5m2, e5m2]];
    let shapes: [[&[usize]; 2]; 7] = [
        [&[64, 128], &[128, 32]],
        [&[17, 1040], &[1040, 48]],
        [&[1, 64], &[64, 16]],
        [&[17, 33], &[33, 65]],
        [&[128, 256], &[256, 24]],
        [&[3, 16, 64], &[3, 64, 16]],
        [&[2, 1, 16, 32], &[3, 32, 48]],
    ];
    let layouts = [
        (Contiguous, Transposed),
        (Contiguous, Contiguous),
        (Transposed, Contiguous),
        (Transposed, Transposed),
        (Sliced, Transposed),
        (Negative, Sliced),
    ];
    for (i, [a, b]) in pairs.into_iter().enumerate() {
        for (j, [x, y]) in shapes.into_iter().enumerate() {
            let stored = [DType::BF16, DType::F32, DType::F16][(i + j) % 3];
            for (left, right) in layouts {
                let detail = format!("{a} {x:?} {left:?} x {b} {y:?} {right:?} as {stored}");
                cases.add(op, stored, detail, move |d| {
                    let scale = |value: f32| Tensor::new(value, d);
                    let x = data(d, a, x, left, 40)?;
                    let y = data(d, b, y, right, 41)?;
                    Ok(vec![x.matmul_scaled(
                        &y,
                        &scale(0.37)?,
                        &scale(5.0)?,
                        stored,
                    )?])
                });
            }
        }
        for (left, right) in layouts {
            let detail = format!("{a} {left:?} x {b} {right:?}");
            cases.add("outer_scaled", DType::F32, detail, move |d| {
                let scale = |value: f32| Tensor::new(value, d);
                let x = data(d, a, &[4, 36, 48], left, 45)?;
                let y = data(d, b, &[4, 36, 32], right, 46)?;
                Ok(vec![x.outer_scaled(
                    &y,
                    &scale(0.37)?,
                    &scale(5.0)?,
                    DType::F32,
                )?])
            });
        }
        // Few bits each, so that every way of adding them up gives the same.
        cases.add(
            op,
            DType::I32,
            format!("{a} x {b} whole numbers, exact"),
            move |d| {
                let whole = |dtype, shape: &[usize], seed| {
                    input(d, dtype, shape, Contiguous, Fill::Integers(-2, 2), seed)
                };
                let scale = |value: f32| Tensor::new(value, d);
                let (x, y) = (whole(a, &[48, 272], 42)?, whole(b, &[32, 272], 43)?);
                let (two, half) = (scale(2.0)?, scale(0.5)?);
                let out = x.matmul_scaled(&y.t()?, &two, &half, DType::F32)?;
                Ok(vec![out.cast(DType::I32)?])
            },
        );
    }
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (codes, view) in [(e4m3, Contiguous), (e5m2, Transposed), (e4m3, Sliced)] {
            let detail = format!("{dtype} {view:?} to {codes}");
            cases.add("quantize_f8", codes, detail, move |d| {
                let x = data(d, dtype, &[65, 130], view, 44)?;
                let (codes, scale) = x.quantize_f8(codes)?;
                Ok(vec![codes, scale])
            });
        }
    }
}

/// Gradients of weights that passes add to sums: of the factors' dtype and wider, of one matrix of
/// rows and of several.
fn added(cases: &mut Cases) {
    for (dtype, wide) in [
        (DType::F32, DType::F32),
        (DType::BF16, DType::F32),
        (DType::F16, DType::F32),
        (DType::BF16, DType::BF16),
        (DType::F64, DType::F64),
    ] {
        for rows in [&[40][..], &[3, 17]] {
            let detail = format!("{dtype} {rows:?} rows, gradients added to {wide}");
            cases.add("linear", wide, detail, move |d| {
                let shape = |last: usize| [rows, &[last]].concat();
                let x = data(d, dtype, &shape(48), View::Contiguous, 50)?;
                let seed = data(d, dtype, &shape(24), View::Contiguous, 51)?;
                let w = data(d, dtype, &[24, 48], View::Contiguous, 52)?.require_grad()?;
                let right = data(d, dtype, &[48, 24], View::Contiguous, 53)?.require_grad()?;
                let mut sums = Gradients::default();
                sums.set(&w, data(d, wide, &[24, 48], View::Contiguous, 54)?)?;
                sums.set(&right, data(d, wide, &[48, 24], View::Contiguous, 55)?)?;
                // A sum that was rounded may cancel: small ones are added to once.
                for _ in 0..wide.size().min(4) / 2 {
                    let both =
                        (x.linear(&w, None)?.mul(&seed)?).add(&x.matmul(&right)?.mul(&seed)?)?;
                    sums = both.sum(&[], false)?.backward_onto(sums)?;
                }
                Ok(vec![sums.of(&w)?, sums.of(&right)?])
            });
        }
    }
}

fn einsums(cases: &mut Cases) {
    let equations: &[(&str, &[&[usize]])] = &[
        ("ij,jk->ik", &[&[7, 33], &[33, 9]]),
        ("ij,jk->ki", &[&[7, 33], &[33, 9]]),
        ("bij,bjk->bik", &[&[3, 7, 33], &[3, 33, 9]]),
        ("bhqd,bhkd->bhqk", &[&[2, 3, 5, 8], &[2, 3, 6, 8]]),
        ("ii->i", &[&[7, 7]]),
        ("ii", &[&[7, 7]]),
        ("iij->j", &[&[4, 4, 9]]),
        ("ij->ji", &[&[7, 9]]),
        ("ij->", &[&[7, 33]]),
        ("i,j->ij", &[&[7], &[9]]),
        ("i,i->i", &[&[33], &[33]]),
        ("i,i->", &[&[33], &[33]]),
        ("ij,ij->j", &[&[7, 9], &[7, 9]]),
        ("ij,kl->il", &[&[3, 4], &[5, 6]]),
        ("...ij,...jk->...ik", &[&[2, 1, 3, 4], &[5, 4, 6]]),
        ("i...,i->...", &[&[4, 2, 3], &[4]]),
        ("ij,jk,kl->il", &[&[3, 4], &[4, 5], &[5, 6]]),
        ("ab,ac,ad->bcd", &[&[4, 2], &[4, 3], &[4, 5]]),
        ("ba,a", &[&[3, 4], &[4]]),
    ];
    for &(equation, shapes) in equations {
        for dtype in [DType::F32, DType::I32] {
            cases.add("einsum", dtype, format!("{equation} {dtype}"), move |d| {
                let tensors = shapes
                    .iter()
                    .enumerate()
                    .map(|(i, shape)| {
                        input(
                            d,
                            dtype,
                            shape,
                            View::Transposed,
                            Fill::Integers(-4, 4),
                            i as u64,
                        )
                    })
                    .collect::<Result<Vec<_>>>()?;
                Ok(vec![Tensor::einsum(
                    equation,
                    &tensors.iter().collect::<Vec<_>>(),
                )?])
            });
        }
    }
}

/// Groups of rows: empty ones, ends in the middle of tiles, rows of no group, ends that go back.
fn grouped(cases: &mut Cases) {
    use View::*;
    const ENDS: [(usize, &[i32]); 6] = [
        (1, &[1]),
        (70, &[0, 3, 3, 64, 70]),
        (257, &[0, 0, 130, 130, 200, 200]),
        (300, &[65, 20, 70, 300]),
        (300, &[0, 0, 0]),
        (515, &[128, 256, 384, 515]),
    ];
    let views = [
        (Contiguous, Contiguous),
        (Contiguous, Transposed),
        (Transposed, Contiguous),
        (Transposed, Transposed),
        (Sliced, Negative),
        (Contiguous, Broadcast),
    ];
    // Large enough for what libraries are given.
    for (left, right) in [(Contiguous, Contiguous), (Contiguous, Transposed)] {
        let ends = || [100, 100, 350, 600];
        let what = format!("f32 640x512x640 {left:?} x {right:?}");
        cases.add("grouped_matmul", DType::F32, what.clone(), move |d| {
            let x = data(d, DType::F32, &[640, 512], left, 44)?;
            let w = data(d, DType::F32, &[4, 512, 640], right, 45)?;
            Ok(vec![x.grouped_matmul(&w, &Tensor::new(ends(), d)?)?])
        });
        cases.add("grouped_outer", DType::F32, what, move |d| {
            let x = data(d, DType::F32, &[640, 512], left, 46)?;
            let y = data(d, DType::F32, &[640, 640], right, 47)?;
            Ok(vec![x.grouped_outer(&y, &Tensor::new(ends(), d)?)?])
        });
    }
    for dtype in DTYPES.into_iter().filter(|dtype| dtype.is_float()) {
        for (n, ends) in ENDS {
            for (k, m) in [(1, 1), (33, 65), (64, 128), (136, 72)] {
                for (left, right) in views {
                    let what = format!("{dtype} {n}x{k}x{m} to {ends:?} {left:?} x {right:?}");
                    let groups = ends.len();
                    cases.add("grouped_matmul", dtype, what.clone(), move |d| {
                        let x = data(d, dtype, &[n, k], left, 40)?;
                        let w = data(d, dtype, &[groups, k, m], right, 41)?;
                        let ends = Tensor::from_slice(ends, [groups], d)?;
                        Ok(vec![x.grouped_matmul(&w, &ends)?])
                    });
                    cases.add("grouped_outer", dtype, what, move |d| {
                        let x = data(d, dtype, &[n, k], left, 42)?;
                        let y = data(d, dtype, &[n, m], right, 43)?;
                        let ends = Tensor::from_slice(ends, [groups], d)?;
                        Ok(vec![x.grouped_outer(&y, &ends)?])
                    });
                }
            }
        }
    }
}

pub(super) fn cases() -> Cases {
    let mut cases = Cases::new("linalg");
    products(&mut cases);
    grouped(&mut cases);
    scaled(&mut cases);
    added(&mut cases);
    einsums(&mut cases);
    cases
}

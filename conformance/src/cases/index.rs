//! Gather, scatter and what depends on values for its size.

use super::{Cases, Fill, View, input};
use anymesh_core::{DType, Device, Result, Tensor, backend::ScatterOp};

/// The dtypes that cover every element width and every way of storing one.
const DTYPES: [DType; 7] = [
    DType::F32,
    DType::F64,
    DType::BF16,
    DType::U8,
    DType::Bool,
    DType::I64,
    DType::F8E4M3,
];
const INDEX: [DType; 3] = [DType::I32, DType::I64, DType::U32];
/// Sizes on both sides of the edges of a workgroup and of a block.
const SIZES: [usize; 4] = [1, 7, 257, 1030];

/// Values that every dtype tells apart.
fn data(device: &Device, dtype: DType, shape: &[usize], view: View, seed: u64) -> Result<Tensor> {
    let fill = match dtype {
        DType::Bool => Fill::Integers(0, 1),
        DType::U8 => Fill::Integers(0, 255),
        d if d.is_int() => Fill::Integers(-100_000, 100_000),
        _ => Fill::Uniform(-8.0, 8.0),
    };
    input(device, dtype, shape, view, fill, seed)
}

/// Indices into a dimension of size `n`: also from the end where the dtype has negative values, and
/// with repetitions.
fn indices(device: &Device, dtype: DType, shape: &[usize], view: View, n: usize) -> Result<Tensor> {
    let n = n as i64;
    let low = if dtype.is_signed() { -n } else { 0 };
    input(device, dtype, shape, view, Fill::Integers(low, n - 1), 77)
}

fn gathers(cases: &mut Cases) {
    for dtype in DTYPES {
        for view in View::ALL {
            cases.add(
                "gather",
                dtype,
                format!("{dtype} {view:?} source"),
                move |d| {
                    let x = data(d, dtype, &[7, 33], view, 1)?;
                    Ok(vec![
                        x.gather(1, &indices(d, DType::I32, &[7, 20], View::Contiguous, 33)?)?,
                        x.gather(0, &indices(d, DType::I32, &[9, 33], view, 7)?)?,
                    ])
                },
            );
            cases.add(
                "index_select",
                dtype,
                format!("{dtype} {view:?} source"),
                move |d| {
                    let x = data(d, dtype, &[6, 9, 5], view, 2)?;
                    (0..3)
                        .map(|axis| {
                            x.index_select(
                                axis,
                                &indices(
                                    d,
                                    DType::I32,
                                    &[11],
                                    View::Contiguous,
                                    x.dims()[axis as usize],
                                )?,
                            )
                        })
                        .collect()
                },
            );
        }
        cases.add("embedding", dtype, format!("{dtype} table"), move |d| {
            let table = data(d, dtype, &[50, 17], View::Contiguous, 3)?;
            Ok(vec![
                table.embedding(&indices(d, DType::I64, &[3, 11], View::Contiguous, 50)?)?,
                table.embedding(&indices(d, DType::I32, &[], View::Contiguous, 50)?)?,
            ])
        });
        cases.add(
            "gather_nd",
            dtype,
            format!("{dtype} with 1 to 3 coordinates"),
            move |d| {
                let x = data(d, dtype, &[5, 5, 5], View::Contiguous, 4)?;
                (1..=3)
                    .map(|k| x.gather_nd(&indices(d, DType::I32, &[4, 6, k], View::Contiguous, 5)?))
                    .collect()
            },
        );
        cases.add(
            "index_get",
            dtype,
            format!("{dtype} with two broadcasting indices"),
            move |d| {
                let x = data(d, dtype, &[6, 9, 5], View::Contiguous, 5)?;
                let (i, j) = (
                    indices(d, DType::I32, &[4, 1], View::Contiguous, 6)?,
                    indices(d, DType::U32, &[3], View::Contiguous, 9)?,
                );
                Ok(vec![x.index_get(&[&i, &j])?])
            },
        );
    }
    for dtype in INDEX {
        for view in View::ALL {
            cases.add(
                "take_along_axis",
                DType::F32,
                format!("{dtype} {view:?} index"),
                move |d| {
                    let x = data(d, DType::F32, &[7, 33], View::Contiguous, 6)?;
                    Ok(vec![
                        x.take_along_axis(1, &indices(d, dtype, &[7, 40], view, 33)?)?,
                        x.take_along_axis(0, &indices(d, dtype, &[5, 1], view, 7)?)?,
                    ])
                },
            );
        }
    }
    for n in SIZES {
        for axis in 0..3 {
            cases.add(
                "gather",
                DType::F32,
                format!("size {n} along axis {axis}"),
                move |d| {
                    let mut shape = [3, 4, 5];
                    shape[axis] = n;
                    let x = data(d, DType::F32, &shape, View::Contiguous, 7)?;
                    Ok(vec![x.gather(
                        axis as i64,
                        &indices(d, DType::I32, &shape, View::Contiguous, n)?,
                    )?])
                },
            );
        }
        cases.add(
            "embedding",
            DType::F32,
            format!("{n} ids, rows of 65"),
            move |d| {
                Ok(vec![
                    data(d, DType::F32, &[40, 65], View::Contiguous, 8)?.embedding(&indices(
                        d,
                        DType::I32,
                        &[n],
                        View::Contiguous,
                        40,
                    )?)?,
                ])
            },
        );
    }
    for (name, axes) in [
        ("neighbours", [1, 2]),
        ("apart", [0, 2]),
        ("backwards", [3, 2]),
    ] {
        cases.add(
            "gather_axes",
            DType::F32,
            format!("axes {axes:?}, {name}"),
            move |d| {
                let x = data(d, DType::F32, &[4, 5, 6, 7], View::Transposed, 9)?;
                let i = indices(d, DType::I32, &[2, 3], View::Contiguous, 4)?;
                let j = indices(d, DType::I64, &[3], View::Contiguous, 5)?;
                Ok(vec![x.gather_axes(&[(axes[0], &i), (axes[1], &j)])?])
            },
        );
    }
    cases.add("index_get", DType::I32, "four indices", |d| {
        let x = data(d, DType::I32, &[3, 4, 5, 6, 2], View::Contiguous, 10)?;
        let parts = (0..4)
            .map(|axis| indices(d, DType::I32, &[13], View::Contiguous, 3 + axis))
            .collect::<Result<Vec<_>>>()?;
        Ok(vec![x.index_get(&parts.iter().collect::<Vec<_>>())?])
    });
}

fn scatters(cases: &mut Cases) {
    use ScatterOp::*;
    for dtype in DTYPES {
        for view in View::ALL {
            cases.add(
                "scatter",
                dtype,
                format!("set {dtype} {view:?}"),
                move |d| {
                    let (x, src) = (
                        data(d, dtype, &[7, 33], view, 11)?,
                        data(d, dtype, &[9, 33], view, 12)?,
                    );
                    let index = indices(d, DType::I32, &[9, 33], view, 7)?;
                    Ok(vec![x.scatter(0, &index, &src, Set)?])
                },
            );
        }
        cases.add("index_put", dtype, format!("set {dtype} rows"), move |d| {
            let (x, values) = (
                data(d, dtype, &[6, 9, 5], View::Contiguous, 13)?,
                data(d, dtype, &[4, 3, 5], View::Sliced, 14)?,
            );
            let (i, j) = (
                indices(d, DType::I32, &[4, 1], View::Contiguous, 6)?,
                indices(d, DType::I64, &[3], View::Contiguous, 9)?,
            );
            Ok(vec![
                x.index_put(&[&i, &j], &values, ScatterOp::Set)?,
                x.index_put(
                    &[&i],
                    &values.narrow(0, 0, 1)?.narrow(1, 0, 1)?,
                    ScatterOp::Set,
                )?,
            ])
        });
    }
    for dtype in [DType::F32, DType::F16, DType::I32] {
        // Whole numbers are exact in any order of rounding.
        let fill = if dtype == DType::F32 {
            Fill::Uniform(-1.0, 1.0)
        } else {
            Fill::Integers(-3, 3)
        };
        for mode in [Add, Mul, Min, Max] {
            let values = move |d: &Device, shape: &[usize], view: View, seed: u64| match mode {
                // 1 and -1: no product grows or vanishes, and every factor shows in the sign.
                Mul => input(d, dtype, shape, view, Fill::Integers(0, 1), seed)?
                    .mul(2)?
                    .sub(1),
                Add => input(d, dtype, shape, view, fill, seed),
                _ => input(d, dtype, shape, view, Fill::Integers(-2000, 2000), seed),
            };
            for n in SIZES {
                cases.add(
                    "scatter",
                    dtype,
                    format!("{mode:?} {dtype} {n} values onto 5"),
                    move |d| {
                        let (x, src) = (
                            values(d, &[5, 3], View::Contiguous, 15)?,
                            values(d, &[n, 3], View::Contiguous, 16)?,
                        );
                        Ok(vec![x.scatter(
                            0,
                            &indices(d, DType::I32, &[n, 3], View::Contiguous, 5)?,
                            &src,
                            mode,
                        )?])
                    },
                );
                cases.add(
                    "put_along_axis",
                    dtype,
                    format!("{mode:?} {dtype} {n} values along rows"),
                    move |d| {
                        let (x, src) = (
                            values(d, &[3, 9], View::Contiguous, 17)?,
                            values(d, &[3, n], View::Negative, 18)?,
                        );
                        Ok(vec![x.put_along_axis(
                            1,
                            &indices(d, DType::I32, &[1, n], View::Contiguous, 9)?,
                            &src,
                            mode,
                        )?])
                    },
                );
            }
        }
        for axis in 0..3 {
            cases.add(
                "index_add",
                dtype,
                format!("{dtype} along axis {axis}"),
                move |d| {
                    let mut shape = [6, 9, 5];
                    let x = input(d, dtype, &shape, View::Contiguous, fill, 19)?;
                    let index = indices(d, DType::I32, &[30], View::Contiguous, shape[axis])?;
                    shape[axis] = 30;
                    Ok(vec![x.index_add(
                        axis as i64,
                        &index,
                        &input(d, dtype, &shape, View::Sliced, fill, 20)?,
                    )?])
                },
            );
        }
        for n in SIZES {
            cases.add(
                "index_put",
                dtype,
                format!("add {n} rows of 65 {dtype}"),
                move |d| {
                    let (x, values) = (
                        input(d, dtype, &[40, 65], View::Contiguous, fill, 21)?,
                        input(d, dtype, &[n, 65], View::Contiguous, fill, 22)?,
                    );
                    Ok(vec![x.index_put(
                        &[&indices(d, DType::I32, &[n], View::Contiguous, 40)?],
                        &values,
                        ScatterOp::Add,
                    )?])
                },
            );
        }
        for k in 1..=3 {
            let shape: Vec<usize> = std::iter::once(40).chain((k..3).map(|_| 5)).collect();
            let zeros = shape.clone();
            cases.add(
                "scatter_nd",
                dtype,
                format!("{dtype} with {k} coordinates into zeros"),
                move |d| {
                    let updates = input(d, dtype, &zeros, View::Contiguous, fill, 23)?;
                    Ok(vec![Tensor::scatter_nd(
                        &indices(d, DType::I32, &[40, k], View::Transposed, 5)?,
                        &updates,
                        [5, 5, 5],
                    )?])
                },
            );
            cases.add(
                "scatter_nd_add",
                dtype,
                format!("{dtype} with {k} coordinates"),
                move |d| {
                    let updates = input(d, dtype, &shape, View::Contiguous, fill, 23)?;
                    let index = indices(d, DType::I32, &[40, k], View::Transposed, 5)?;
                    let x = input(d, dtype, &[5, 5, 5], View::Transposed, fill, 24)?;
                    Ok(vec![x.scatter_nd_add(&index, &updates)?])
                },
            );
        }
        cases.add("bincount", dtype, format!("{dtype} weights"), move |d| {
            let x = input(
                d,
                DType::I32,
                &[1030],
                View::Contiguous,
                Fill::Integers(0, 12),
                25,
            )?;
            Ok(vec![x.bincount_bins(
                Some(&input(d, dtype, &[1030], View::Contiguous, fill, 26)?),
                13,
            )?])
        });
    }
    for mode in [Min, Max] {
        cases.add(
            "scatter",
            DType::F32,
            format!("{mode:?} with NaN and infinities"),
            move |d| {
                let special = Fill::Special(-2.0, 2.0);
                let (x, src) = (
                    input(d, DType::F32, &[50], View::Contiguous, special, 27)?,
                    input(d, DType::F32, &[200], View::Contiguous, special, 28)?,
                );
                Ok(vec![x.scatter(
                    0,
                    &indices(d, DType::I32, &[200], View::Contiguous, 50)?,
                    &src,
                    mode,
                )?])
            },
        );
    }
    for dtype in INDEX {
        for view in View::ALL {
            cases.add(
                "scatter",
                DType::F32,
                format!("set by {dtype} {view:?} index"),
                move |d| {
                    let (x, src) = (
                        data(d, DType::F32, &[7, 33], View::Contiguous, 29)?,
                        data(d, DType::F32, &[7, 50], View::Contiguous, 30)?,
                    );
                    Ok(vec![x.scatter(
                        1,
                        &indices(d, dtype, &[7, 50], view, 33)?,
                        &src,
                        Set,
                    )?])
                },
            );
        }
        cases.add(
            "one_hot",
            DType::I32,
            format!("{dtype} classes, some outside"),
            move |d| {
                let low = if dtype.is_signed() { -3 } else { 0 };
                Ok(vec![
                    input(
                        d,
                        dtype,
                        &[5, 7],
                        View::Transposed,
                        Fill::Integers(low, 14),
                        31,
                    )?
                    .one_hot(12)?,
                ])
            },
        );
        cases.add(
            "bincount",
            DType::I32,
            format!("{dtype} values"),
            move |d| {
                Ok(vec![
                    input(d, dtype, &[1030], View::Sliced, Fill::Integers(0, 30), 32)?
                        .bincount_bins(None, 31)?,
                ])
            },
        );
    }
}

/// These read a size from the device while they run, which a browser cannot wait for here.
#[cfg(not(target_family = "wasm"))]
fn dynamic(cases: &mut Cases) {
    for n in SIZES {
        for dtype in [DType::Bool, DType::F32, DType::I32, DType::U8] {
            cases.add("nonzero", dtype, format!("{dtype}, {n} rows"), move |d| {
                Ok(vec![
                    input(
                        d,
                        dtype,
                        &[n, 3],
                        View::Transposed,
                        Fill::Integers(0, 1),
                        33,
                    )?
                    .nonzero()?,
                ])
            });
        }
        for dtype in [DType::F32, DType::I32, DType::BF16, DType::F8E4M3] {
            cases.add(
                "unique",
                dtype,
                format!("{dtype}, {n} elements"),
                move |d| {
                    let unique =
                        input(d, dtype, &[n], View::Contiguous, Fill::Integers(-8, 8), 34)?
                            .unique()?;
                    Ok(vec![unique.values, unique.inverse, unique.counts])
                },
            );
        }
    }
    for dtype in DTYPES {
        cases.add(
            "masked_select",
            dtype,
            format!("{dtype} with a broadcast mask"),
            move |d| {
                let mask = input(
                    d,
                    DType::Bool,
                    &[1, 9, 5],
                    View::Contiguous,
                    Fill::Integers(0, 1),
                    35,
                )?;
                Ok(vec![
                    data(d, dtype, &[6, 9, 5], View::Transposed, 36)?.masked_select(&mask)?,
                ])
            },
        );
    }
}

pub(super) fn cases() -> Cases {
    let mut cases = Cases::new("index");
    gathers(&mut cases);
    scatters(&mut cases);
    #[cfg(not(target_family = "wasm"))]
    dynamic(&mut cases);
    cases
}

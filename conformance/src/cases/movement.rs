//! Views and copies. Nothing is computed, so every case is exact; odd sizes make 8- and 16-bit
//! elements straddle packed words.

use super::{Cases, Fill, View, input};
use anymesh_core::{
    DType, Device, Result, Scalar, Tensor,
    ops::{Indexing, PadMode},
};

const DTYPES: [DType; 6] = [
    DType::F32,
    DType::BF16,
    DType::U8,
    DType::Bool,
    DType::I64,
    DType::F8E5M2,
];

/// Values that are told apart after a move: all bytes, 64-bit integers that need more than 32 bits,
/// special floats.
fn fill(dtype: DType) -> Fill {
    match dtype {
        DType::Bool => Fill::Integers(0, 1),
        DType::U8 => Fill::Integers(0, 255),
        DType::I64 => Fill::Integers(-(1 << 50), 1 << 50),
        _ => Fill::Special(-4.0, 4.0),
    }
}

fn sample(device: &Device, dtype: DType, shape: &[usize], view: View, seed: u64) -> Result<Tensor> {
    input(device, dtype, shape, view, fill(dtype), seed)
}

fn one(t: Result<Tensor>) -> Result<Vec<Tensor>> {
    Ok(vec![t?])
}

/// An op with arguments, and a shape to run it on.
struct Move {
    op: &'static str,
    detail: &'static str,
    shape: &'static [usize],
    run: fn(&Tensor) -> Result<Vec<Tensor>>,
}

const fn case(
    op: &'static str,
    detail: &'static str,
    shape: &'static [usize],
    run: fn(&Tensor) -> Result<Vec<Tensor>>,
) -> Move {
    Move {
        op,
        detail,
        shape,
        run,
    }
}

const CUBE: &[usize] = &[3, 5, 7];

const MOVES: &[Move] = &[
    case("contiguous", "", CUBE, |t| one(t.contiguous())),
    case("contiguous", "of columns, by tiles", &[2, 70, 130], |t| {
        one(t.transpose(1, 2)?.contiguous())
    }),
    case(
        "contiguous",
        "of odd columns, by tiles",
        &[2, 71, 65],
        |t| one(t.transpose(1, 2)?.contiguous()),
    ),
    case(
        "contiguous",
        "of columns after one, by tiles",
        &[70, 132],
        |t| one(t.narrow(1, 1, 66)?.t()?.contiguous()),
    ),
    case("reshape", "[15, 7]", CUBE, |t| one(t.reshape([15, 7]))),
    case("reshape", "of a permutation", CUBE, |t| {
        one(t.permute(&[2, 0, 1])?.reshape_infer(&[7, -1]))
    }),
    case("flatten", "0..=1", CUBE, |t| one(t.flatten(0, 1))),
    case("squeeze", "axis 1", &[5, 1, 7], |t| one(t.squeeze(&[1]))),
    case("unsqueeze", "axis -2", CUBE, |t| one(t.unsqueeze(-2))),
    case("transpose", "0 and 2", CUBE, |t| one(t.transpose(0, 2))),
    case("permute", "[1, 2, 0]", CUBE, |t| one(t.permute(&[1, 2, 0]))),
    case("permute", "of rank 5", &[2, 3, 1, 5, 3], |t| {
        one(t.permute(&[4, 1, 0, 2, 3]))
    }),
    case("movedim", "0 to -1", CUBE, |t| one(t.movedim(&[0], &[-1]))),
    case("expand", "[4, 3, 5, 7]", &[3, 1, 7], |t| {
        one(t.expand([4, 3, 5, 7]))
    }),
    case("slice", "[::-2] of the last", CUBE, |t| {
        one(t.slice(-1, None, None, -2))
    }),
    case("slice", "[1:4] of the middle", CUBE, |t| {
        one(t.slice(1, Some(1), Some(4), 1))
    }),
    case("narrow", "columns 3 to 6", CUBE, |t| one(t.narrow(2, 3, 3))),
    case("split", "[1, 4, 2]", CUBE, |t| t.split(&[1, 4, 2], 2)),
    case("chunk", "3 of 5", CUBE, |t| t.chunk(3, 1)),
    case("unbind", "axis 1", CUBE, |t| t.unbind(1)),
    case("flip", "all axes", CUBE, |t| one(t.flip(&[]))),
    case("diagonal", "offset 1", CUBE, |t| one(t.diagonal(1, 0, 2))),
    case("unfold", "3 every 2", CUBE, |t| one(t.unfold(2, 3, 2))),
    case("pad", "constant", CUBE, |t| {
        one(t.pad(&[(1, 0), (0, 2), (3, 1)], PadMode::Constant(Scalar::Int(1))))
    }),
    case("pad", "constant, around whole rows", &[3, 5, 8], |t| {
        one(t.pad(&[(1, 2), (2, 0), (0, 0)], PadMode::Constant(Scalar::Int(1))))
    }),
    case("pad", "constant, rank 1", &[67], |t| {
        one(t.pad(&[(5, 3)], PadMode::Constant(Scalar::Bool(false))))
    }),
    case("pad", "reflect", CUBE, |t| {
        one(t.pad(&[(0, 0), (2, 4), (5, 3)], PadMode::Reflect))
    }),
    case("pad", "replicate", CUBE, |t| {
        one(t.pad(&[(1, 1), (0, 0), (2, 9)], PadMode::Replicate))
    }),
    case("pad", "circular", CUBE, |t| {
        one(t.pad(&[(3, 1), (0, 5), (2, 2)], PadMode::Circular))
    }),
    case("roll", "by 3 and -1", CUBE, |t| {
        one(t.roll(&[3, -1], &[2, 0]))
    }),
    case("roll", "flat by 40", CUBE, |t| one(t.roll(&[40], &[]))),
    case("tile", "[2, 1, 3]", CUBE, |t| one(t.tile(&[2, 1, 3]))),
    case("tile", "with a new dimension", &[5, 3], |t| {
        one(t.tile(&[2, 1, 3]))
    }),
    case("repeat_interleave", "3 along axis 1", CUBE, |t| {
        one(t.repeat_interleave(3, 1))
    }),
    case("repeat_interleave", "2 along the last", CUBE, |t| {
        one(t.repeat_interleave(2, -1))
    }),
    case("triu", "k = 1", CUBE, |t| one(t.triu(1))),
    case("tril", "k = -1", CUBE, |t| one(t.tril(-1))),
    case("diag", "vector on diagonal -2", &[13], |t| one(t.diag(-2))),
    case("diag", "vector on diagonal 3", &[13], |t| one(t.diag(3))),
    case("diag", "of a matrix", &[5, 7], |t| one(t.diag(2))),
];

/// The views an op is run on: all of them for a 32-bit and an 8-bit type, two for the rest.
fn views(dtype: DType, i: usize) -> Vec<View> {
    match dtype {
        DType::F32 | DType::U8 => View::ALL.to_vec(),
        _ => vec![View::Contiguous, View::ALL[1 + i % 4]],
    }
}

const ROW: &[usize] = &[1, 5];

/// Shapes to join along an axis.
const JOINS: &[(&[&[usize]], i64)] = &[
    (&[&[3, 3], &[3, 5], &[3, 7]], 1),
    (&[&[3, 7], &[5, 7], &[1, 7]], 0),
    // Whole rows of whole chunks, which devices read by vectors.
    (&[&[3, 8], &[5, 8], &[1, 8]], 0),
    (&[&[2, 3, 4], &[2, 2, 4], &[2, 1, 4]], 1),
    (&[&[3], &[5], &[7]], 0),
    (&[&[2, 3, 5], &[2, 0, 5], &[2, 1, 5]], 1),
    (&[ROW; 13], -1),
];

/// The cases of this family.
pub(super) fn cases() -> Cases {
    let mut cases = Cases::new("movement");
    for (i, m) in MOVES.iter().enumerate() {
        for dtype in DTYPES {
            for view in views(dtype, i) {
                cases.add(
                    m.op,
                    dtype,
                    format!("{} {dtype}{:?} {view:?}", m.detail, m.shape),
                    move |d| (m.run)(&sample(d, dtype, m.shape, view, i as u64)?),
                );
            }
        }
    }
    for (shapes, axis) in JOINS {
        for dtype in DTYPES {
            for view in [View::Contiguous, View::Negative] {
                cases.add(
                    "concat",
                    dtype,
                    format!("{dtype} {shapes:?} along {axis} {view:?}"),
                    move |d| {
                        let parts = shapes
                            .iter()
                            .enumerate()
                            .map(|(i, s)| sample(d, dtype, s, view, i as u64))
                            .collect::<Result<Vec<_>>>()?;
                        one(Tensor::concat(&parts.iter().collect::<Vec<_>>(), *axis))
                    },
                );
            }
        }
    }
    for (left, right) in [
        (DType::U8, DType::I32),
        (DType::Bool, DType::BF16),
        (DType::F8E5M2, DType::F32),
        (DType::BF16, DType::F16),
        (DType::I32, DType::U32),
    ] {
        cases.add(
            "concat",
            left.promote(right),
            format!("{left} with {right}"),
            move |d| {
                let part = |dtype, seed| {
                    input(
                        d,
                        dtype,
                        &[3, 5],
                        View::Contiguous,
                        Fill::Integers(0, 7),
                        seed,
                    )
                };
                one(Tensor::concat(
                    &[&part(left, 1)?, &part(right, 2)?, &part(left, 3)?],
                    1,
                ))
            },
        );
    }
    for dtype in DTYPES {
        for (n, axis) in [(2, 0), (3, -1), (7, 1)] {
            cases.add(
                "stack",
                dtype,
                format!("{n} of {dtype}[3, 5] at {axis}"),
                move |d| {
                    let parts = (0..n)
                        .map(|i| sample(d, dtype, &[3, 5], View::Transposed, i))
                        .collect::<Result<Vec<_>>>()?;
                    one(Tensor::stack(&parts.iter().collect::<Vec<_>>(), axis))
                },
            );
        }
        for indexing in [Indexing::Ij, Indexing::Xy] {
            cases.add(
                "meshgrid",
                dtype,
                format!("{dtype} {indexing:?}"),
                move |d| {
                    let (x, y) = (
                        sample(d, dtype, &[5], View::Sliced, 1)?,
                        sample(d, dtype, &[3], View::Contiguous, 2)?,
                    );
                    Tensor::meshgrid(&[&x, &y], indexing)
                },
            );
        }
    }
    cases
}

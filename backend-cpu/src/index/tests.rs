use super::*;
use crate::testing::{assert_close, coordinates, dense_view, random, read, values, views};
use anymesh_kernel::{Layout, Shape, backend::Affine};
use smallvec::smallvec;

fn indices(
    values: &[f64],
    dtype: DType,
    shape: impl Into<Shape>,
    expand: &[usize],
    len: usize,
    stride: isize,
) -> IndexAxis {
    let view = dense_view(values, dtype, shape);
    IndexAxis {
        indices: View {
            layout: view.layout.expand(&expand.into()),
            ..view
        },
        len,
        stride,
    }
}

/// `src` with dimension `axis` replaced by `n` indices.
fn without(src: &View, axis: usize, n: usize) -> View {
    let mut layout = src.layout.clone();
    layout.shape = layout.shape.with(axis, n);
    layout.strides[axis] = 0;
    View {
        layout,
        ..src.clone()
    }
}

#[test]
fn taking_along_any_axis_reads_the_named_rows() {
    for dtype in DType::ALL {
        for src in views(&[4, 3, 5], dtype, 51, true) {
            for axis in 0..3 {
                let (len, stride) = (src.layout.shape[axis], src.layout.strides[axis]);
                let picks = [1.0, -1.0, 0.0, 2.0, 1.0, -3.0];
                let layout = without(&src, axis, picks.len());
                let mut around = [1; 3];
                around[axis] = picks.len();
                let index_dtype = if dtype == DType::F32 {
                    DType::I64
                } else {
                    DType::I32
                };
                let by = indices(
                    &picks,
                    index_dtype,
                    Shape::from(around),
                    layout.layout.shape.dims(),
                    len,
                    stride,
                );
                let got = read(
                    &gather(&GatherCall {
                        op: "take",
                        src: layout.clone(),
                        axes: smallvec![by],
                    })
                    .expect("runs"),
                    dtype,
                );
                let all = values(&src);
                let expected: Vec<f64> = coordinates(layout.layout.shape.dims())
                    .iter()
                    .map(|c| {
                        let mut c = c.clone();
                        let pick = picks[c[axis]];
                        c[axis] = if pick < 0.0 {
                            (pick + len as f64) as usize
                        } else {
                            pick as usize
                        };
                        all[(c[0] * 3 + c[1]) * 5 + c[2]]
                    })
                    .collect();
                assert_close(
                    &got,
                    &expected,
                    0.0,
                    &format!("{dtype} axis {axis} {:?}", src.layout),
                );
            }
        }
    }
}

#[test]
fn several_index_operands_add_up() {
    let src = dense_view(&random(20, 3, true), DType::F32, [4, 5]);
    let flat = View {
        layout: Layout {
            shape: [3].into(),
            strides: [0].into_iter().collect(),
            offset: 0,
        },
        ..src.clone()
    };
    let axes = [
        indices(&[0.0, 3.0, -1.0], DType::I32, [3], &[3], 4, 5),
        indices(&[4.0, 1.0, 2.0], DType::U32, [3], &[3], 5, 1),
    ];
    let got = read(
        &gather(&GatherCall {
            op: "index",
            src: flat,
            axes: axes.iter().cloned().collect(),
        })
        .expect("runs"),
        DType::F32,
    );
    let all = values(&src);
    assert_eq!(got, [all[4], all[16], all[17]]);
}

#[test]
fn the_first_index_out_of_range_is_reported() {
    for (n, bad) in [(3, 1), (200_000, 150_000)] {
        let src = dense_view(&[1.0, 2.0, 3.0, 4.0], DType::F32, [4]);
        for value in [4.0, -5.0] {
            let mut picks = vec![0.0; n];
            picks[bad] = value;
            picks[n - 1] = 77.0;
            let by = indices(&picks, DType::I32, [n], &[n], 4, 1);
            let result = gather(&GatherCall {
                op: "take",
                src: without(&src, 0, n),
                axes: smallvec![by.clone()],
            });
            let fault = Error::IndexOutOfRange {
                op: "take",
                index: value as i64,
                len: 4,
            };
            assert_eq!(result.err(), Some(fault.clone()));
            let checked = check(&CheckIndexCall {
                op: "take",
                indices: by.indices.clone(),
                len: 4,
            });
            assert_eq!(checked.err(), Some(fault));
            let (shape, base) = (
                Shape::from([n]),
                Affine {
                    offset: 0,
                    strides: [0].into_iter().collect(),
                },
            );
            let updates = dense_view(&vec![0.0; n], DType::F32, [n, 1]);
            let call = ScatterCall {
                op: "put",
                dst: src.clone(),
                rows: 4,
                inner: 1,
                shape: shape.clone(),
                base: base.clone(),
                axes: smallvec![by],
                updates: updates.clone(),
                mode: ScatterOp::Set,
            };
            assert_eq!(
                scatter(&call).err(),
                Some(Error::IndexOutOfRange {
                    op: "put",
                    index: value as i64,
                    len: 4
                })
            );
        }
    }
}

#[test]
fn scatter_applies_updates_in_order_for_every_mode_and_dtype() {
    let modes = [
        ScatterOp::Set,
        ScatterOp::Add,
        ScatterOp::Mul,
        ScatterOp::Min,
        ScatterOp::Max,
    ];
    for dtype in DType::ALL {
        for (count, inner) in [(6, 1), (7, 3), (900, 100)] {
            let rows = 5;
            let dst = dense_view(&random(rows * inner, 61, true), dtype, [rows, inner]);
            let picks: Vec<f64> = random(count, 62, true)
                .iter()
                .map(|v| v.rem_euclid(10.0) - 5.0)
                .collect();
            let shape = Shape::from([count]);
            let base = Affine {
                offset: 0,
                strides: [0].into_iter().collect(),
            };
            for updates in views(&[count, inner], dtype, 63, true) {
                for mode in modes {
                    if count > 10 && (mode == ScatterOp::Mul || dtype.size() == 1) {
                        continue;
                    }
                    let axes = [indices(&picks, DType::I64, [count], &[count], rows, 1)];
                    let call = ScatterCall {
                        op: "put",
                        dst: dst.clone(),
                        rows,
                        inner,
                        shape: shape.clone(),
                        base: base.clone(),
                        axes: axes.iter().cloned().collect(),
                        updates: updates.clone(),
                        mode,
                    };
                    let got = read(&scatter(&call).expect("runs"), dtype);
                    let wrap = |v: f64| match dtype {
                        DType::U8 => v.rem_euclid(256.0),
                        DType::U32 => v.rem_euclid(4_294_967_296.0),
                        DType::Bool => f64::from(u8::from(v != 0.0)),
                        _ => v,
                    };
                    let mut expected = values(&dst);
                    for (c, update) in values(&updates).chunks(inner).enumerate() {
                        let row = (picks[c] as i64).rem_euclid(rows as i64) as usize;
                        for (e, u) in expected[row * inner..(row + 1) * inner]
                            .iter_mut()
                            .zip(update)
                        {
                            *e = match mode {
                                ScatterOp::Set => *u,
                                ScatterOp::Add => *e + u,
                                ScatterOp::Mul if dtype == DType::U32 => {
                                    f64::from((*e as u32).wrapping_mul(*u as u32))
                                }
                                ScatterOp::Mul => *e * u,
                                ScatterOp::Min => e.min(*u),
                                ScatterOp::Max => e.max(*u),
                            };
                            *e = wrap(*e);
                        }
                    }
                    let tolerance = match dtype {
                        DType::F8E4M3 | DType::F8E5M2 => 0.13,
                        DType::BF16 => 4e-3,
                        _ => 0.0,
                    };
                    assert_close(
                        &got,
                        &expected,
                        tolerance,
                        &format!("{mode:?} {dtype} {count} {inner}"),
                    );
                }
            }
        }
    }
}

#[test]
fn the_base_of_a_scatter_names_rows_without_an_index() {
    let dst = dense_view(&[0.0; 12], DType::I32, [12]);
    let shape = Shape::from([3, 2]);
    let base = Affine {
        offset: 1,
        strides: [4, 0].into_iter().collect(),
    };
    let axes = [indices(
        &[0.0, 2.0, 1.0, 1.0, 0.0, 2.0],
        DType::I32,
        [3, 2],
        &[3, 2],
        3,
        1,
    )];
    let updates = dense_view(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], DType::I32, [3, 2, 1]);
    let call = ScatterCall {
        op: "put",
        dst: dst.clone(),
        rows: 12,
        inner: 1,
        shape: shape.clone(),
        base: base.clone(),
        axes: axes.iter().cloned().collect(),
        updates: updates.clone(),
        mode: ScatterOp::Add,
    };
    assert_eq!(
        read(&scatter(&call).expect("runs"), DType::I32),
        [0.0, 1.0, 0.0, 2.0, 0.0, 0.0, 7.0, 0.0, 0.0, 5.0, 0.0, 6.0]
    );
}

#[test]
fn small_floats_are_rounded_once_per_row_not_once_per_update() {
    let dst = dense_view(&[0.0], DType::BF16, [1]);
    let (shape, base) = (
        Shape::from([4]),
        Affine {
            offset: 0,
            strides: [0].into_iter().collect(),
        },
    );
    let updates = dense_view(&[256.0, 1.0, 1.0, 1.0], DType::BF16, [4, 1]);
    let call = ScatterCall {
        op: "put",
        dst: dst.clone(),
        rows: 1,
        inner: 1,
        shape: shape.clone(),
        base: base.clone(),
        axes: smallvec![],
        updates: updates.clone(),
        mode: ScatterOp::Add,
    };
    assert_eq!(read(&scatter(&call).expect("runs"), DType::BF16), [260.0]);
}

#[test]
fn rows_that_no_update_names_keep_their_bytes_and_are_not_widened() {
    // A NaN with a payload, which a way through f32 would change.
    let bytes: Vec<u8> = (0..16u16)
        .flat_map(|i| {
            if i < 12 {
                0x7f81u16 + i
            } else {
                half::bf16::from_f32(f32::from(i)).to_bits()
            }
            .to_le_bytes()
        })
        .collect();
    let dst = View {
        buffer: Memory::copy_of(&bytes).expect("fits").buffer(),
        dtype: DType::BF16,
        layout: anymesh_kernel::Layout::contiguous([8, 2].into()),
    };
    let (shape, base) = (
        Shape::from([3]),
        Affine {
            offset: 0,
            strides: [0].into_iter().collect(),
        },
    );
    let axes = [indices(&[7.0, 6.0, 7.0], DType::I32, [3], &[3], 8, 1)];
    let updates = dense_view(&[1.0, 2.0, 10.0, 20.0, 3.0, 4.0], DType::BF16, [3, 2]);
    let call = ScatterCall {
        op: "put",
        dst: dst.clone(),
        rows: 8,
        inner: 2,
        shape: shape.clone(),
        base: base.clone(),
        axes: axes.iter().cloned().collect(),
        updates: updates.clone(),
        mode: ScatterOp::Add,
    };
    let out = scatter(&call).expect("runs");
    assert_eq!(bytes_of(&out).expect("of this backend")[..24], bytes[..24]);
    assert_eq!(read(&out, DType::BF16)[12..], [22.0, 33.0, 18.0, 21.0]);
}

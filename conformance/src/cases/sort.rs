//! Sorting, selection and binary search.

use super::{Cases, Fill, View, input};
use anymesh_core::ops::{Order, Side};
use anymesh_core::{DType, Device, Result, Tensor};

/// Both sides of the edges of a workgroup, of a block and of several blocks.
const LENGTHS: [usize; 8] = [1, 2, 255, 256, 257, 1024, 1025, 3000];

/// Values with repetitions, and with NaN and infinities where they exist.
fn data(device: &Device, dtype: DType, shape: &[usize], view: View, seed: u64) -> Result<Tensor> {
    let fill = match dtype {
        DType::Bool => Fill::Integers(0, 1),
        DType::U8 | DType::U32 => Fill::Integers(0, 200),
        d if d.is_int() => Fill::Integers(-300, 300),
        _ => Fill::Special(-4.0, 4.0),
    };
    input(device, dtype, shape, view, fill, seed)
}

pub(super) fn cases() -> Cases {
    let mut cases = Cases::new("sort");
    for dtype in DType::ALL {
        for (i, n) in LENGTHS.into_iter().enumerate() {
            let rows = [1, 3][i % 2];
            let order = if i % 3 == 1 {
                Order::Descending
            } else {
                Order::Ascending
            };
            cases.add(
                "sort",
                dtype,
                format!("{dtype} {rows} rows of {n}, {order:?}"),
                move |d| {
                    let (values, indices) =
                        data(d, dtype, &[rows, n], View::Contiguous, 1)?.sort(-1, order)?;
                    Ok(vec![values, indices])
                },
            );
        }
        for order in [Order::Ascending, Order::Descending] {
            cases.add(
                "argsort",
                dtype,
                format!("{dtype} along the middle axis, {order:?}"),
                move |d| {
                    Ok(vec![
                        data(d, dtype, &[3, 65, 4], View::Contiguous, 2)?.argsort(1, order)?,
                    ])
                },
            );
        }
        cases.add(
            "topk",
            dtype,
            format!("{dtype} largest and smallest"),
            move |d| {
                let x = data(d, dtype, &[5, 300], View::Contiguous, 3)?;
                let ((a, i), (b, j)) = (
                    x.topk(7, 1, Order::Descending)?,
                    x.topk(2, 0, Order::Ascending)?,
                );
                Ok(vec![a, i, b, j])
            },
        );
        cases.add("kthvalue", dtype, format!("{dtype} median"), move |d| {
            let (values, indices) =
                data(d, dtype, &[4, 33], View::Contiguous, 4)?.kthvalue(17, 1, false)?;
            Ok(vec![values, indices])
        });
        for side in [Side::Left, Side::Right] {
            cases.add(
                "searchsorted",
                dtype,
                format!("{dtype}, {side:?}"),
                move |d| {
                    let (sorted, _) = data(d, dtype, &[3, 257], View::Contiguous, 5)?
                        .sort(1, Order::Ascending)?;
                    let rows =
                        sorted.searchsorted(&data(d, dtype, &[3, 40], View::Sliced, 6)?, side)?;
                    let vector = sorted
                        .narrow(0, 1, 1)?
                        .reshape([257])?
                        .searchsorted(&data(d, dtype, &[2, 3, 5], View::Transposed, 7)?, side)?;
                    Ok(vec![rows, vector])
                },
            );
        }
    }
    for view in View::ALL {
        for (dtype, axis) in [
            (DType::F32, 0),
            (DType::F32, 1),
            (DType::I32, 0),
            (DType::F16, 1),
            (DType::U8, 1),
        ] {
            cases.add(
                "sort",
                dtype,
                format!("{dtype} {view:?} axis {axis}"),
                move |d| {
                    let (values, indices) =
                        data(d, dtype, &[40, 70], view, 8)?.sort(axis, Order::Ascending)?;
                    Ok(vec![values, indices])
                },
            );
        }
    }
    for (rows, n) in [(300, 5), (1000, 1), (1, 20_000), (2, 4097)] {
        cases.add(
            "argsort",
            DType::F32,
            format!("{rows} rows of {n}"),
            move |d| {
                Ok(vec![
                    input(
                        d,
                        DType::F32,
                        &[rows, n],
                        View::Contiguous,
                        Fill::Uniform(-1.0, 1.0),
                        9,
                    )?
                    .argsort(1, Order::Descending)?,
                ])
            },
        );
    }
    cases.add("argsort", DType::I64, "values past 32 bits", |d| {
        let low = input(
            d,
            DType::I64,
            &[500],
            View::Contiguous,
            Fill::Integers(-50, 50),
            10,
        )?;
        let high = input(
            d,
            DType::I64,
            &[500],
            View::Contiguous,
            Fill::Integers(-2, 2),
            11,
        )?;
        Ok(vec![
            high.mul(1i64 << 32)?
                .add(&low)?
                .argsort(0, Order::Ascending)?,
        ])
    });
    cases
}

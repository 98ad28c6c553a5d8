//! Cases for running reductions.

use super::{Cases, Fill, View, input};
use anymesh_core::{DType, Device, Result, Tensor};

type Run = fn(&Tensor, i64) -> Result<Vec<Tensor>>;

fn pair((a, b): (Tensor, Tensor)) -> Result<Vec<Tensor>> {
    Ok(vec![a, b])
}

const OPS: [(&str, Run); 5] = [
    ("cumsum", |x, axis| Ok(vec![x.cumsum(axis)?])),
    ("cumprod", |x, axis| Ok(vec![x.cumprod(axis)?])),
    ("cummax", |x, axis| pair(x.cummax(axis)?)),
    ("cummin", |x, axis| pair(x.cummin(axis)?)),
    ("logcumsumexp", |x, axis| Ok(vec![x.logcumsumexp(axis)?])),
];

fn fill(op: &str, dtype: DType) -> Fill {
    match op {
        // Factors near 1 keep long products in range; factors of ±1 and 2 make exact ones that
        // wrap.
        "cumprod" if dtype.is_float() => Fill::Uniform(0.8, 1.25),
        "cumprod" => Fill::Integers(if dtype.is_signed() { -2 } else { 1 }, 2),
        // Few different values, so that the latest among equals matters.
        "cummax" | "cummin" => Fill::Integers(
            if dtype.is_signed() { -4 } else { 0 },
            if dtype == DType::Bool { 1 } else { 9 },
        ),
        _ if dtype.is_float() => Fill::Uniform(-1.0, 2.0),
        _ => Fill::Integers(
            if dtype.is_signed() { -9 } else { 0 },
            if dtype == DType::Bool { 1 } else { 9 },
        ),
    }
}

pub(super) fn cases() -> Cases {
    let mut cases = Cases::new("scan");
    for (op, run) in OPS {
        let mut add = |dtype: DType, shape: &[usize], view: View, axis: i64, fill: Fill| {
            let shape = shape.to_vec();
            let detail = format!("{dtype}{shape:?} {view:?} along {axis} {fill:?}");
            cases.add(op, dtype, detail, move |device: &Device| {
                run(&input(device, dtype, &shape, view, fill, 13)?, axis)
            });
        };
        let of = |dtype| fill(op, dtype);
        for axis in 0..3 {
            for view in View::ALL {
                add(DType::F32, &[4, 5, 7], view, axis, of(DType::F32));
            }
        }
        for (i, dtype) in DType::ALL.into_iter().enumerate() {
            add(dtype, &[6, 9], View::ALL[i % 5], 0, of(dtype));
            add(dtype, &[6, 9], View::ALL[(i + 1) % 5], -1, of(dtype));
        }
        // The order of multiplication is free, and long products would show it.
        let lengths: &[usize] = if op == "cumprod" {
            &[1, 3, 64, 65]
        } else {
            &[1, 3, 31, 33, 255, 257, 1025, 4099]
        };
        for &n in lengths {
            add(DType::F32, &[n], View::Contiguous, 0, of(DType::F32));
            add(DType::F32, &[3, n], View::Contiguous, 1, of(DType::F32));
            add(DType::F32, &[n, 3], View::Contiguous, 0, of(DType::F32));
            add(DType::I32, &[2, n], View::Sliced, 1, of(DType::I32));
        }
        add(DType::F32, &[3, 0], View::Contiguous, 1, of(DType::F32));
        add(DType::F32, &[0, 3], View::Contiguous, 1, of(DType::F32));
        let turns = &[f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0];
        add(
            DType::F32,
            &[61, 9],
            View::Contiguous,
            1,
            Fill::Mixed(turns, 0.5, 1.5),
        );
        add(
            DType::F32,
            &[61, 9],
            View::Contiguous,
            1,
            Fill::Mixed(&[f64::NEG_INFINITY], 0.5, 1.5),
        );
    }
    // Blocks of blocks.
    cases.add("cumsum", DType::I32, "i32[65541]", |device: &Device| {
        Ok(vec![
            input(
                device,
                DType::I32,
                &[(1 << 16) + 5],
                View::Contiguous,
                Fill::Integers(-9, 9),
                13,
            )?
            .cumsum(0)?,
        ])
    });
    cases
}

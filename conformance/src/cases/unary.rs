//! Cases for functions of one tensor and activations.

use super::{Cases, Fill, View, input};
use crate::functions::{self, TURNS};
use anymesh_core::{
    DType, Device, Result, Tensor,
    ops::{
        activation,
        elementwise::{Arg, Class, Elementwise},
        unary,
    },
};

/// For ops that give bools or bits, which need no range of their own.
const ANYWHERE: (f64, f64) = (-4.0, 4.0);

/// Integers of a dtype, large enough to wrap in products.
pub(super) fn whole(dtype: DType) -> Fill {
    match dtype {
        DType::Bool => Fill::Integers(0, 1),
        DType::U8 => Fill::Integers(0, 255),
        DType::U32 => Fill::Integers(0, 100_000),
        DType::I32 => Fill::Integers(-100_000, 100_000),
        DType::I64 => Fill::Integers(-5_000_000_000, 5_000_000_000),
        _ => Fill::Integers(-8, 8),
    }
}

/// The dtypes a class is tested on beside `f32`.
pub(super) fn dtypes(class: Class) -> &'static [DType] {
    use DType::*;
    match class {
        Class::Float => &[F64, F16, BF16, F8E4M3, I32],
        Class::Number => &[F64, F16, BF16, F8E4M3, F8E5M2, U8, U32, I32, I64],
        Class::Bits => &[Bool, U8, U32, I32, I64],
        Class::Integer => &[U8, U32, I32, I64],
        Class::Any | Class::Compare | Class::Logic | Class::Select | Class::Mask => {
            &[Bool, U8, U32, I32, I64, F8E4M3, F8E5M2, F16, BF16, F64]
        }
    }
}

fn apply(row: &Elementwise, x: &Tensor, params: &[f64]) -> Result<Vec<Tensor>> {
    let args: Vec<Arg<'_>> = [Arg::Tensor(x)]
        .into_iter()
        .chain(params.iter().map(|p| Arg::from(*p)))
        .collect();
    Ok(vec![row.apply(&args)?])
}

pub(super) fn cases() -> Cases {
    let mut cases = Cases::new("unary");
    for row in unary::TABLE.iter().chain(activation::TABLE) {
        add_op(&mut cases, row);
    }
    // Elements smaller than a word are packed: every length of the tail, and lengths around a
    // block.
    for (row, dtype) in [
        (unary::Rows::abs, DType::F16),
        (unary::Rows::abs, DType::BF16),
        (unary::Rows::abs, DType::F8E4M3),
        (unary::Rows::abs, DType::U8),
        (unary::Rows::logical_not, DType::Bool),
        (unary::Rows::neg, DType::I64),
    ] {
        for n in [1, 2, 3, 4, 5, 6, 7, 255, 257, 4099] {
            add(
                &mut cases,
                &row,
                dtype,
                &[n],
                View::Contiguous,
                whole(dtype),
                &[],
            );
        }
    }
    for row in [
        unary::Rows::neg,
        unary::Rows::exp,
        activation::Rows::sigmoid,
    ] {
        add(
            &mut cases,
            &row,
            DType::F32,
            &[(1 << 16) + 5],
            View::Contiguous,
            Fill::Uniform(-4.0, 4.0),
            &[],
        );
    }
    add(
        &mut cases,
        &activation::Rows::logit,
        DType::F32,
        &[31],
        View::Contiguous,
        Fill::Uniform(0.01, 0.99),
        &[f64::NEG_INFINITY],
    );
    cases
}

fn add(
    cases: &mut Cases,
    row: &Elementwise,
    dtype: DType,
    shape: &[usize],
    view: View,
    fill: Fill,
    params: &'static [f64],
) {
    let (row, shape) = (*row, shape.to_vec());
    let detail = format!("{dtype}{shape:?} {view:?} {fill:?} {params:?}");
    cases.add(row.info.name, dtype, detail, move |device: &Device| {
        apply(&row, &input(device, dtype, &shape, view, fill, 7)?, params)
    });
}

fn add_op(cases: &mut Cases, row: &Elementwise) {
    let function = functions::find(row.info.name);
    let (low, high) = function.map_or(ANYWHERE, |f| f.domain);
    let params = function.map_or(&[] as &[f64], |f| f.params);
    let turns = function.map_or(TURNS, |f| f.turns);
    let floats = !matches!(row.class, Class::Bits | Class::Integer);
    let fill = |dtype: DType| match row.class {
        _ if dtype.is_float() => Fill::Uniform(low, high),
        Class::Float => Fill::Integers(low.floor() as i64, high.ceil() as i64),
        _ => whole(dtype),
    };
    for (i, &dtype) in dtypes(row.class).iter().enumerate() {
        add(
            cases,
            row,
            dtype,
            &[3, 5, 7],
            View::ALL[i % 5],
            fill(dtype),
            params,
        );
    }
    let main = if floats { DType::F32 } else { DType::I32 };
    for view in View::ALL {
        add(cases, row, main, &[4, 3, 9], view, fill(main), params);
    }
    for shape in [
        &[] as &[usize],
        &[3, 0, 2],
        &[1],
        &[3],
        &[255],
        &[257],
        &[4099],
    ] {
        add(
            cases,
            row,
            main,
            shape,
            View::Contiguous,
            fill(main),
            params,
        );
    }
    if floats {
        add(
            cases,
            row,
            DType::F32,
            &[301],
            View::Contiguous,
            Fill::Mixed(turns, low, high),
            params,
        );
    }
}

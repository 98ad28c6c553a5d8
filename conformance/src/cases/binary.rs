//! Cases for functions of two operands, and for ops that choose or mix.

use super::{
    Cases, Fill, View, input,
    unary::{dtypes, whole},
};
use crate::functions::TURNS;
use anymesh_core::{
    DType, Device, Result, Scalar, Tensor,
    ops::{
        binary,
        elementwise::{Arg, Class, Elementwise},
        select,
    },
};

/// Without large values: hardware has no exact remainder of a quotient with more digits than the
/// dtype.
const TURNS_SMALL: &[f64] = &[
    f64::NAN,
    f64::INFINITY,
    f64::NEG_INFINITY,
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1.5,
    -2.5,
];

/// The ranges of both sides for floats, where the op is well conditioned, and their special values.
struct Setup {
    left: (f64, f64),
    right: (f64, f64),
    turns: &'static [f64],
}

fn setup(op: &str) -> Setup {
    let ranges = |left, right| Setup {
        left,
        right,
        turns: TURNS,
    };
    match op {
        "div" => ranges((-8.0, 8.0), (0.2, 5.0)),
        "floor_div" | "trunc_div" | "remainder" => Setup {
            left: (-20.0, 20.0),
            right: (0.5, 3.0),
            turns: TURNS_SMALL,
        },
        "pow" => ranges((0.2, 4.0), (-3.0, 3.0)),
        "atan2" | "hypot" => ranges((0.1, 8.0), (-8.0, 8.0)),
        _ => ranges((-4.0, 4.0), (-4.0, 4.0)),
    }
}

/// Integers for both sides: no division by zero, powers that wrap only a little, shifts also beyond
/// the width.
fn whole_sides(op: &str, dtype: DType) -> (Fill, Fill) {
    let signed = dtype.is_signed();
    match op {
        "floor_div" | "trunc_div" | "remainder" if dtype.is_float() => {
            (Fill::Integers(-20, 20), Fill::Integers(1, 4))
        }
        "floor_div" | "trunc_div" | "remainder" => (
            whole(dtype),
            if signed {
                Fill::Integers(-9, -1)
            } else {
                Fill::Integers(1, 9)
            },
        ),
        "div" => (Fill::Integers(-20, 20), Fill::Integers(1, 9)),
        "pow" if dtype.is_float() => (Fill::Integers(1, 4), Fill::Integers(-3, 3)),
        "pow" => (
            Fill::Integers(if signed { -5 } else { 0 }, 5),
            Fill::Integers(if signed { -3 } else { 0 }, 14),
        ),
        "shl" | "shr" => (
            whole(dtype),
            Fill::Integers(if signed { -2 } else { 0 }, 70),
        ),
        _ => (
            if dtype.is_float() {
                Fill::Integers(-4, 4)
            } else {
                whole(dtype)
            },
            if dtype.is_float() {
                Fill::Integers(-4, 4)
            } else {
                whole(dtype)
            },
        ),
    }
}

/// A made-up operand: dtype, shape, layout, values and seed.
#[derive(Clone, Debug)]
struct Side(DType, Vec<usize>, View, Fill, u64);

impl Side {
    fn new(dtype: DType, shape: &[usize], view: View, fill: Fill, seed: u64) -> Self {
        Side(dtype, shape.to_vec(), view, fill, seed)
    }

    fn tensor(&self, device: &Device) -> Result<Tensor> {
        input(device, self.0, &self.1, self.2, self.3, self.4)
    }
}

fn add(cases: &mut Cases, row: &Elementwise, sides: Vec<Side>) {
    let row = *row;
    let detail = sides
        .iter()
        .map(|s| format!("{}{:?} {:?} {:?}", s.0, s.1, s.2, s.3))
        .collect::<Vec<_>>()
        .join(", ");
    cases.add(row.info.name, sides[0].0, detail, move |device: &Device| {
        let tensors = sides
            .iter()
            .map(|s| s.tensor(device))
            .collect::<Result<Vec<_>>>()?;
        Ok(vec![row.apply(
            &tensors.iter().map(Arg::Tensor).collect::<Vec<_>>(),
        )?])
    });
}

/// A case with a number on the right, and one with it on the left.
fn add_numbers(cases: &mut Cases, row: &Elementwise, side: &Side, number: Scalar) {
    for left in [false, true] {
        let (row, side) = (*row, side.clone());
        let detail = format!(
            "{}{:?} and the number {number:?}{}",
            side.0,
            side.1,
            if left { " on the left" } else { "" }
        );
        cases.add(row.info.name, side.0, detail, move |device: &Device| {
            let x = side.tensor(device)?;
            let args = [Arg::Tensor(&x), Arg::Number(number)];
            Ok(vec![row.apply(&if left {
                [args[1], args[0]]
            } else {
                args
            })?])
        });
    }
}

fn add_op(cases: &mut Cases, row: &Elementwise) {
    let op = row.info.name;
    let Setup { left, right, turns } = setup(op);
    let (left, right) = (
        Fill::Uniform(left.0, left.1),
        Fill::Uniform(right.0, right.1),
    );
    let floats = !matches!(row.class, Class::Bits | Class::Integer);
    let fills = |dtype: DType| {
        if dtype.is_float() {
            (left, right)
        } else {
            whole_sides(op, dtype)
        }
    };
    let pair = |cases: &mut Cases,
                dtype: DType,
                a: &[usize],
                av: View,
                b: &[usize],
                bv: View,
                (left, right): (Fill, Fill)| {
        add(
            cases,
            row,
            vec![
                Side::new(dtype, a, av, left, 3),
                Side::new(dtype, b, bv, right, 4),
            ],
        );
    };
    for (i, &dtype) in dtypes(row.class).iter().enumerate() {
        pair(
            cases,
            dtype,
            &[3, 5, 7],
            View::ALL[i % 5],
            &[3, 5, 7],
            View::ALL[(i + 1) % 5],
            fills(dtype),
        );
    }
    let main = if floats { DType::F32 } else { DType::I32 };
    for (i, view) in View::ALL.into_iter().enumerate() {
        pair(
            cases,
            main,
            &[4, 3, 9],
            view,
            &[4, 3, 9],
            View::ALL[(i + 2) % 5],
            fills(main),
        );
    }
    let broadcast: [(&[usize], &[usize]); 5] = [
        (&[3, 1, 7], &[5, 1]),
        (&[], &[2, 3]),
        (&[4, 8], &[8]),
        (&[2, 0], &[2, 1]),
        (&[], &[]),
    ];
    for (a, b) in broadcast {
        pair(
            cases,
            main,
            a,
            View::Contiguous,
            b,
            View::Contiguous,
            fills(main),
        );
    }
    for n in [1, 255, 257, 4099] {
        pair(
            cases,
            main,
            &[n],
            View::Contiguous,
            &[n],
            View::Contiguous,
            fills(main),
        );
    }
    if floats {
        // Whole numbers hit what ranges miss: equal operands, exact quotients, bases and exponents
        // of 0 and 1.
        pair(
            cases,
            DType::F32,
            &[9, 9],
            View::Contiguous,
            &[9, 9],
            View::Contiguous,
            whole_sides(op, DType::F32),
        );
        let Setup { left, right, .. } = setup(op);
        let mixed = (
            Fill::Mixed(turns, left.0, left.1),
            Fill::Mixed(turns, right.0, right.1),
        );
        pair(
            cases,
            DType::F32,
            &[29, 31],
            View::Contiguous,
            &[29, 31],
            View::Contiguous,
            mixed,
        );
        add_numbers(
            cases,
            row,
            &Side::new(DType::F32, &[33], View::Contiguous, fills(DType::F32).1, 5),
            Scalar::Float(1.7),
        );
        add_numbers(
            cases,
            row,
            &Side::new(DType::F16, &[7], View::Contiguous, fills(DType::F16).1, 5),
            Scalar::Int(3),
        );
    }
    if row.class != Class::Float {
        add_numbers(
            cases,
            row,
            &Side::new(
                DType::I32,
                &[33],
                View::Contiguous,
                whole_sides(op, DType::I32).1,
                5,
            ),
            Scalar::Int(5),
        );
    }
}

/// Operands of different dtypes meet by promotion inside the kernel.
fn add_promotions(cases: &mut Cases) {
    use DType::*;
    let pairs = [
        (U8, I32),
        (U32, I32),
        (Bool, F32),
        (I32, F16),
        (F16, BF16),
        (F8E4M3, F8E5M2),
        (I64, F32),
        (BF16, F32),
        (U8, F8E4M3),
        (F32, F64),
        (Bool, U8),
        (U32, I64),
    ];
    for (a, b) in pairs {
        for row in [
            binary::Rows::add,
            binary::Rows::div,
            binary::Rows::lt,
            binary::Rows::maximum,
        ] {
            let sides = vec![
                Side::new(a, &[3, 5], View::Contiguous, Fill::Integers(0, 3), 3),
                Side::new(b, &[3, 5], View::Transposed, Fill::Integers(1, 9), 4),
            ];
            add(cases, &row, sides);
        }
    }
}

fn add_selections(cases: &mut Cases) {
    use DType::*;
    let range = Fill::Uniform(-4.0, 4.0);
    let side = |dtype: DType, shape: &[usize], view, seed| {
        Side::new(
            dtype,
            shape,
            view,
            if dtype.is_float() {
                range
            } else {
                whole(dtype)
            },
            seed,
        )
    };
    let (where_, fill) = (select::Rows::where_, select::Rows::masked_fill);
    for (i, dtype) in DType::ALL.into_iter().enumerate() {
        let (a, b, c) = (
            View::ALL[i % 5],
            View::ALL[(i + 1) % 5],
            View::ALL[(i + 2) % 5],
        );
        add(
            cases,
            &where_,
            vec![
                side(Bool, &[3, 5, 7], a, 1),
                side(dtype, &[3, 5, 7], b, 2),
                side(dtype, &[5, 7], c, 3),
            ],
        );
        add(
            cases,
            &fill,
            vec![
                side(dtype, &[3, 5, 7], a, 1),
                side(Bool, &[3, 1, 7], b, 2),
                side(dtype, &[], c, 3),
            ],
        );
        if dtype == Bool {
            continue;
        }
        add(
            cases,
            &select::Rows::clip,
            vec![
                side(dtype, &[3, 5, 7], b, 1),
                side(dtype, &[7], a, 2),
                side(dtype, &[5, 1], c, 3),
            ],
        );
        add(
            cases,
            &select::Rows::addcmul,
            vec![
                side(dtype, &[3, 5], b, 1),
                side(dtype, &[5], a, 2),
                side(dtype, &[3, 1], c, 3),
                side(dtype, &[], c, 4),
            ],
        );
        if !dtype.is_float() {
            continue;
        }
        let weight = Side::new(dtype, &[3, 1], c, Fill::Uniform(0.0, 1.0), 4);
        add(
            cases,
            &select::Rows::lerp,
            vec![
                side(dtype, &[3, 5], b, 1),
                side(dtype, &[3, 5], a, 2),
                weight,
            ],
        );
    }
    for shape in [&[] as &[usize], &[0], &[255], &[257], &[4099]] {
        let dense = |dtype, seed| side(dtype, shape, View::Contiguous, seed);
        add(
            cases,
            &where_,
            vec![dense(Bool, 1), dense(F32, 2), dense(F32, 3)],
        );
        add(
            cases,
            &fill,
            vec![
                dense(F32, 1),
                dense(Bool, 2),
                side(F32, &[], View::Contiguous, 3),
            ],
        );
        add(
            cases,
            &select::Rows::clip,
            vec![dense(F32, 1), dense(F32, 2), dense(F32, 3)],
        );
        add(
            cases,
            &select::Rows::lerp,
            vec![
                dense(F32, 1),
                dense(F32, 2),
                Side::new(F32, shape, View::Contiguous, Fill::Uniform(0.0, 1.0), 3),
            ],
        );
        add(
            cases,
            &select::Rows::addcmul,
            vec![dense(F32, 1), dense(F32, 2), dense(F32, 3), dense(F32, 4)],
        );
    }
    let turns = |seed| {
        Side::new(
            F32,
            &[29, 31],
            View::Contiguous,
            Fill::Mixed(TURNS, -4.0, 4.0),
            seed,
        )
    };
    add(cases, &where_, vec![turns(1), turns(2), turns(3)]);
    add(
        cases,
        &select::Rows::clip,
        vec![
            turns(1),
            side(F32, &[], View::Contiguous, 2),
            side(F32, &[], View::Contiguous, 3),
        ],
    );
    add(
        cases,
        &select::Rows::clip,
        vec![
            side(F32, &[29, 31], View::Contiguous, 1),
            turns(2),
            turns(3),
        ],
    );
}

pub(super) fn cases() -> Cases {
    let mut cases = Cases::new("binary");
    for row in binary::TABLE {
        add_op(&mut cases, row);
    }
    add_promotions(&mut cases);
    add_selections(&mut cases);
    for row in [binary::Rows::add, binary::Rows::gt] {
        let side = |seed| {
            Side::new(
                DType::F32,
                &[(1 << 16) + 5],
                View::Contiguous,
                Fill::Integers(-4, 4),
                seed,
            )
        };
        add(&mut cases, &row, vec![side(1), side(2)]);
    }
    cases
}

//! The elementwise ops, straight from their tables. An operand that is not given as a tensor is the
//! attribute of its name.

use super::{
    Attr, AttrKind, Call, Entry, Fill, Input, Sample, attr, one,
    sample::{bools, floats, integers},
};
use crate::functions;
use anymesh_core::{
    DType, Error, Result, Tensor,
    ops::{
        activation, binary,
        elementwise::{Arg, Class, Elementwise, Parameter},
        select, unary,
    },
};
use serde_json::{Map, Value, json};

fn rows() -> impl Iterator<Item = &'static Elementwise> {
    [
        unary::TABLE,
        activation::TABLE,
        binary::TABLE,
        select::TABLE,
    ]
    .into_iter()
    .flatten()
}

pub(super) fn entries() -> Vec<Entry> {
    rows()
        .map(|row| Entry {
            name: row.info.name,
            operands: operands(row),
            attrs: attrs(row),
            run,
            samples,
        })
        .collect()
}

/// Built once, for the one table of entries: what it leaks lives as long as that.
fn operands(row: &Elementwise) -> &'static str {
    let tensors: Vec<&str> = row
        .operands
        .iter()
        .filter(|p| !p.number)
        .map(|p| p.name)
        .collect();
    match tensors[..] {
        [only] => only,
        _ => tensors
            .iter()
            .map(|name| format!("{name}?"))
            .collect::<Vec<_>>()
            .join(", ")
            .leak(),
    }
}

/// The numbers that an op takes, and those that may stand in for one of several tensors.
fn attrs(row: &Elementwise) -> &'static [Attr] {
    let several = row.operands.iter().filter(|p| !p.number).count() > 1;
    let attr = |p: &Parameter| {
        let doc = if p.number {
            "a number of the formula"
        } else {
            "a number in place of the operand of this name"
        };
        attr(p.name, AttrKind::Number, usual(row.info.name, p.name), doc)
    };
    row.operands
        .iter()
        .filter(|p| p.number || several)
        .map(attr)
        .collect::<Vec<_>>()
        .leak()
}

/// The usual value of a parameter of a function, where there is one.
fn usual(op: &str, name: &str) -> &'static str {
    match (op, name) {
        ("leaky_relu", "slope") => "0.01",
        ("elu" | "celu", "alpha")
        | ("softplus", "beta")
        | ("addcmul", "value")
        | ("hardtanh", "high") => "1",
        ("hardtanh", "low") => "-1",
        ("softshrink" | "hardshrink", "lambda") => "0.5",
        ("softplus", "threshold") => "20",
        _ => "null",
    }
}

fn run(call: &Call<'_>) -> Result<Vec<Tensor>> {
    let op = call.op;
    let wrong = |detail: String| Error::argument(op, "attrs", detail);
    let row = rows()
        .find(|row| row.info.name == op)
        .ok_or_else(|| wrong("is not elementwise".into()))?;
    let arg = |(at, parameter): (usize, &Parameter)| -> Result<Arg<'_>> {
        let name = parameter.name;
        // All tensors come before the parameters that are always numbers.
        if let Some(tensor) = call.maybe(at) {
            return if call.attrs.is_given(name) {
                Err(wrong(format!(
                    "'{name}' is given as a tensor and as an attribute"
                )))
            } else {
                Ok(tensor.into())
            };
        }
        let number = call.attrs.opt_number(name)?;
        match parameter.check {
            Some(check) => Ok(check(number.map(|n| n.to_f64()))?.into()),
            None => number.map(Arg::Number).ok_or_else(|| {
                wrong(format!(
                    "'{name}' is missing: give it as a tensor, or as a number under this name"
                ))
            }),
        }
    };
    let args = row
        .operands
        .iter()
        .enumerate()
        .map(arg)
        .collect::<Result<Vec<_>>>()?;
    one(row.apply(&args))
}

/// Values inside the domain of a function.
fn fill(op: &str, name: &str) -> Fill {
    match (op, name) {
        ("logit", _) | ("lerp", "weight") => Fill::Unit,
        // Whole quotients stay exact when a sum is divided part by part.
        ("div", "y") => Fill::Pick(&[1, 2, 4, -2]),
        ("floor_div" | "trunc_div" | "remainder", "y") => Fill::Pick(&[1, 2, 3, -2]),
        ("pow", "x") => Fill::Pick(&[1, 2, 3]),
        ("pow" | "shl" | "shr", "y") => Fill::Int { lo: 0, hi: 3 },
        ("relu6", _) => Fill::Int { lo: -4, hi: 9 },
        ("abs" | "neg" | "sign" | "square", _) => Fill::Int { lo: -4, hi: 4 },
        _ if binary::TABLE
            .iter()
            .chain(select::TABLE)
            .any(|row| row.info.name == op) =>
        {
            Fill::Int { lo: -4, hi: 4 }
        }
        _ => {
            // Within 4 of zero: values and slopes stay moderate.
            let (low, high) = functions::find(op).map_or((-4.0, 4.0), |f| f.domain);
            Fill::Eighths {
                lo: (low.max(-4.0) * 8.0).ceil() as i64,
                hi: (high.min(4.0) * 8.0).floor() as i64,
            }
        }
    }
}

/// A number for a parameter.
fn number(op: &str, name: &str) -> Value {
    match (op, name) {
        ("hardtanh" | "clip", "low") => json!(-2),
        ("hardtanh" | "clip" | "softplus" | "where_", "high" | "threshold" | "yes") => json!(3),
        ("logit", "eps") | ("lerp", "weight") => json!(0.25),
        ("leaky_relu" | "elu" | "celu" | "softshrink" | "hardshrink", _) => json!(0.5),
        _ => json!(2),
    }
}

/// Whether operand `at` is a condition.
fn is_condition(row: &Elementwise, at: usize) -> bool {
    matches!((row.class, at), (Class::Select, 0) | (Class::Mask, 1))
}

/// A call with tensors of these shapes in front and numbers for the parameters behind them.
fn sample(row: &Elementwise, shapes: &[&[usize]], dtype: DType) -> Sample {
    let op = row.info.name;
    let operand = |(at, shape): (usize, &&[usize])| match fill(op, row.operands[at].name) {
        _ if is_condition(row, at) => bools(shape),
        Fill::Eighths { .. } if !dtype.is_float() => integers(shape),
        fill => Input::new(dtype, shape, fill),
    };
    let numbers: Map<String, Value> = row.operands[shapes.len()..]
        .iter()
        .map(|p| (p.name.into(), number(op, p.name)))
        .collect();
    Sample::new(shapes.iter().enumerate().map(operand), numbers.into())
}

fn samples(op: &'static str) -> Vec<Sample> {
    let Some(row) = rows().find(|row| row.info.name == op) else {
        return vec![];
    };
    let tensors = row.operands.iter().filter(|p| !p.number).count();
    let main = if matches!(row.class, Class::Bits | Class::Integer) {
        DType::I32
    } else {
        DType::F32
    };
    let other = if row.class == Class::Float {
        DType::F32
    } else {
        DType::I32
    };
    let mut all = vec![sample(row, &vec![&[5, 7][..]; tensors], main)];
    if tensors == 1 {
        all.extend([
            sample(row, &[&[4, 2, 3]], main),
            sample(row, &[&[8]], other),
        ]);
    } else {
        let broadcast: [[&[usize]; 4]; 2] = [
            [&[4, 1, 3], &[5, 1], &[3], &[]],
            [&[2], &[8, 2], &[8, 1], &[2]],
        ];
        all.extend(broadcast.map(|shapes| sample(row, &shapes[..tensors], main)));
        let needed = (0..tensors)
            .rev()
            .find(|at| is_condition(row, *at))
            .map_or(1, |at| at + 1);
        all.push(sample(row, &vec![&[3, 4][..]; needed], other));
    }
    if matches!(row.class, Class::Bits | Class::Logic) {
        all.push(Sample::new(vec![bools(&[3, 4]); tensors], json!({})));
    }
    match op {
        // The number on the left.
        "sub" | "div" | "le" => {
            all.push(Sample::new([floats(&[5, 2], fill(op, "y"))], json!({"x": 3})).without(0))
        }
        "isnan" | "isinf" | "isfinite" => {
            all.push(Sample::new([floats(&[6], Fill::Special)], json!({})))
        }
        _ => {}
    }
    all
}

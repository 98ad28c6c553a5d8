//! What an op takes beside tensors: names, types, defaults, and how JSON is read as each type.

use anymesh_core::{DType, Scalar};
use serde_json::Value;

/// What an attribute holds. A list may be given as its only element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttrKind {
    /// An integer.
    Int,
    /// A number of things: an integer that is not negative.
    Size,
    /// A float. JSON has no infinities: they are the strings `"inf"` and `"-inf"`.
    Float,
    /// True or false.
    Bool,
    /// An integer, float or bool, whose class matters: numbers lift integers to floats.
    Number,
    /// Any text.
    Str,
    /// The name of a dtype, such as `"f32"`.
    DType,
    /// A list of integers.
    Ints,
    /// A list of sizes.
    Sizes,
    /// A list of pairs of sizes.
    Pairs,
    /// One of these words.
    Choice(&'static [&'static str]),
}

impl std::fmt::Display for AttrKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            AttrKind::Int => f.write_str("int"),
            AttrKind::Size => f.write_str("size"),
            AttrKind::Float => f.write_str("float"),
            AttrKind::Bool => f.write_str("bool"),
            AttrKind::Number => f.write_str("number"),
            AttrKind::Str => f.write_str("str"),
            AttrKind::DType => f.write_str("dtype"),
            AttrKind::Ints => f.write_str("ints"),
            AttrKind::Sizes => f.write_str("sizes"),
            AttrKind::Pairs => f.write_str("pairs"),
            AttrKind::Choice(words) => f.write_str(&words.join("|")),
        }
    }
}

impl AttrKind {
    /// What would have been right.
    pub(super) fn expected(self) -> String {
        match self {
            AttrKind::Int => "an integer".into(),
            AttrKind::Size => "an integer that is not negative".into(),
            AttrKind::Float => "a number, \"inf\" or \"-inf\"".into(),
            AttrKind::Bool => "true or false".into(),
            AttrKind::Number => "a number, true or false".into(),
            AttrKind::Str => "a string".into(),
            AttrKind::DType => format!(
                "one of {}",
                DType::ALL.map(|d| format!("\"{d}\"")).join(", ")
            ),
            AttrKind::Ints => "a list of integers".into(),
            AttrKind::Sizes => "a list of integers that are not negative".into(),
            AttrKind::Pairs => {
                "a list of pairs of integers that are not negative, such as [[1, 0], [2, 2]]".into()
            }
            AttrKind::Choice(words) => format!(
                "one of {}",
                words
                    .iter()
                    .map(|w| format!("\"{w}\""))
                    .collect::<Vec<_>>()
                    .join(", ")
            ),
        }
    }

    /// Whether a value can be read as this.
    fn accepts(self, value: &Value) -> bool {
        match self {
            AttrKind::Int => value.as_i64().is_some(),
            AttrKind::Size => size(value).is_some(),
            AttrKind::Float => float(value).is_some(),
            AttrKind::Bool => value.is_boolean(),
            AttrKind::Number => scalar(value).is_some(),
            AttrKind::Str => value.is_string(),
            AttrKind::DType => dtype(value).is_some(),
            AttrKind::Ints => list(value, Value::as_i64).is_some(),
            AttrKind::Sizes => list(value, size).is_some(),
            AttrKind::Pairs => pairs(value).is_some(),
            AttrKind::Choice(words) => value.as_str().is_some_and(|word| words.contains(&word)),
        }
    }
}

/// An attribute that an op takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    /// The name of the method's parameter or option.
    pub name: &'static str,
    /// What it holds.
    pub kind: AttrKind,
    /// What it is where it is not given, as JSON. `None` for an attribute that must be given;
    /// `null` means absent.
    pub default: Option<&'static str>,
    /// Whether it may be given as `null`, which means absent.
    pub nullable: bool,
    /// What it means.
    pub doc: &'static str,
}

impl Attr {
    /// Whether it may have this value.
    pub(super) fn accepts(&self, value: &Value) -> bool {
        (self.nullable && value.is_null()) || self.kind.accepts(value)
    }
}

impl std::fmt::Display for Attr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.default {
            Some("null") => write!(f, "{} ({}, optional)", self.name, self.kind),
            Some(default) => write!(f, "{} ({}, {default} by default)", self.name, self.kind),
            None => write!(f, "{} ({})", self.name, self.kind),
        }
    }
}

pub(super) fn size(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|n| usize::try_from(n).ok())
}

pub(super) fn float(value: &Value) -> Option<f64> {
    match value.as_str() {
        Some("inf") => Some(f64::INFINITY),
        Some("-inf") => Some(f64::NEG_INFINITY),
        Some(_) => None,
        None => value.as_f64(),
    }
}

pub(super) fn scalar(value: &Value) -> Option<Scalar> {
    match value {
        Value::Bool(b) => Some(Scalar::Bool(*b)),
        _ => value
            .as_i64()
            .map(Scalar::Int)
            .or_else(|| float(value).map(Scalar::Float)),
    }
}

pub(super) fn dtype(value: &Value) -> Option<DType> {
    value.as_str().and_then(|name| name.parse().ok())
}

/// The items of a list, or of what stands for a list of one.
pub(super) fn list<T>(value: &Value, item: impl Fn(&Value) -> Option<T>) -> Option<Vec<T>> {
    match value {
        Value::Array(items) => items.iter().map(item).collect(),
        _ => item(value).map(|only| vec![only]),
    }
}

pub(super) fn pairs(value: &Value) -> Option<Vec<(usize, usize)>> {
    let pair = |value: &Value| match value.as_array().map(Vec::as_slice) {
        Some([before, after]) => Some((size(before)?, size(after)?)),
        _ => None,
    };
    value.as_array()?.iter().map(pair).collect()
}

//! Attributes of a call: what an op takes beside tensors, as JSON, read with the types that the op declares.

use super::Entry;
use crate::{DType, Error, Result, Scalar, ops::Rng};
use serde_json::{Map, Value};

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
    fn expected(self) -> String {
        match self {
            AttrKind::Int => "an integer".into(),
            AttrKind::Size => "an integer that is not negative".into(),
            AttrKind::Float => "a number, \"inf\" or \"-inf\"".into(),
            AttrKind::Bool => "true or false".into(),
            AttrKind::Number => "a number, true or false".into(),
            AttrKind::Str => "a string".into(),
            AttrKind::DType => format!("one of {}", DType::ALL.map(|d| format!("\"{d}\"")).join(", ")),
            AttrKind::Ints => "a list of integers".into(),
            AttrKind::Sizes => "a list of integers that are not negative".into(),
            AttrKind::Pairs => "a list of pairs of integers that are not negative, such as [[1, 0], [2, 2]]".into(),
            AttrKind::Choice(words) => format!("one of {}", words.iter().map(|w| format!("\"{w}\"")).collect::<Vec<_>>().join(", ")),
        }
    }

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
    /// What it is where it is not given, as JSON. `None` for an attribute that must be given; `null` means "absent", which may then also be given.
    pub default: Option<&'static str>,
    /// What it means.
    pub doc: &'static str,
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

/// The attributes of one call, checked against what the op takes.
#[derive(Clone, Debug)]
pub struct Attrs {
    op: &'static str,
    accepted: &'static [Attr],
    given: Map<String, Value>,
}

fn size(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|n| usize::try_from(n).ok())
}

fn float(value: &Value) -> Option<f64> {
    match value.as_str() {
        Some("inf") => Some(f64::INFINITY),
        Some("-inf") => Some(f64::NEG_INFINITY),
        Some(_) => None,
        None => value.as_f64(),
    }
}

fn scalar(value: &Value) -> Option<Scalar> {
    match value {
        Value::Bool(b) => Some(Scalar::Bool(*b)),
        _ => value.as_i64().map(Scalar::Int).or_else(|| float(value).map(Scalar::Float)),
    }
}

fn dtype(value: &Value) -> Option<DType> {
    value.as_str().and_then(|name| name.parse().ok())
}

/// The items of a list, or of what stands for a list of one.
fn list<T>(value: &Value, item: impl Fn(&Value) -> Option<T>) -> Option<Vec<T>> {
    match value {
        Value::Array(items) => items.iter().map(item).collect(),
        _ => item(value).map(|only| vec![only]),
    }
}

fn pairs(value: &Value) -> Option<Vec<(usize, usize)>> {
    let pair = |value: &Value| match value.as_array().map(Vec::as_slice) {
        Some([before, after]) => Some((size(before)?, size(after)?)),
        _ => None,
    };
    value.as_array()?.iter().map(pair).collect()
}

impl Attrs {
    /// Attributes for an op from a JSON object (`null` is an empty one). Refuses names that the op does not take, values of another type, and
    /// missing ones without a default.
    pub fn new(entry: &Entry, given: &Value) -> Result<Self> {
        let op = entry.name;
        let given = match given {
            Value::Null => Map::new(),
            Value::Object(map) => map.clone(),
            other => return Err(Error::Argument { op, detail: format!("attributes are a JSON object, got {other}") }),
        };
        let attrs = Self { op, accepted: entry.attrs, given };
        if let Some(name) = attrs.given.keys().find(|name| attrs.accepted.iter().all(|a| a.name != **name)) {
            let takes = match attrs.accepted {
                [] => "it takes none".into(),
                all => format!("it takes {}", all.iter().map(Attr::to_string).collect::<Vec<_>>().join(", ")),
            };
            return Err(Error::Argument { op, detail: format!("has no attribute '{name}': {takes}") });
        }
        for attr in attrs.accepted {
            let Some(value) = attrs.given.get(attr.name) else {
                if attr.default.is_none() {
                    return Err(Error::Argument { op, detail: format!("the attribute '{}' is missing: give {}", attr.name, attr.kind.expected()) });
                }
                continue;
            };
            let absent = value.is_null() && attr.default == Some("null");
            if !absent && !attr.kind.accepts(value) {
                return Err(attrs.wrong(attr.name, value, &attr.kind.expected()));
            }
        }
        Ok(attrs)
    }

    fn wrong(&self, name: &str, value: &Value, expected: &str) -> Error {
        Error::Argument { op: self.op, detail: format!("the attribute '{name}' is {value}, expected {expected}") }
    }

    /// Whether the caller gave this attribute (and not as `null`).
    pub fn is_given(&self, name: &str) -> bool {
        self.given.get(name).is_some_and(|value| !value.is_null())
    }

    /// The attribute as JSON: as given, or its default; `null` where it is absent.
    pub fn value(&self, name: &str) -> Result<Value> {
        if let Some(value) = self.given.get(name) {
            return Ok(value.clone());
        }
        let default = self.accepted.iter().find(|a| a.name == name).and_then(|a| a.default);
        default
            .and_then(|text| serde_json::from_str(text).ok())
            .ok_or_else(|| Error::Argument { op: self.op, detail: format!("the attribute '{name}' is missing") })
    }

    fn read<T>(&self, name: &str, kind: AttrKind, read: impl Fn(&Value) -> Option<T>) -> Result<T> {
        let value = self.value(name)?;
        read(&value).ok_or_else(|| self.wrong(name, &value, &kind.expected()))
    }

    fn read_optional<T>(&self, name: &str, kind: AttrKind, read: impl Fn(&Value) -> Option<T>) -> Result<Option<T>> {
        let value = self.value(name)?;
        if value.is_null() { Ok(None) } else { read(&value).map(Some).ok_or_else(|| self.wrong(name, &value, &kind.expected())) }
    }

    /// An integer.
    pub fn int(&self, name: &str) -> Result<i64> {
        self.read(name, AttrKind::Int, Value::as_i64)
    }

    /// An integer that may be absent.
    pub fn opt_int(&self, name: &str) -> Result<Option<i64>> {
        self.read_optional(name, AttrKind::Int, Value::as_i64)
    }

    /// A number of things.
    pub fn size(&self, name: &str) -> Result<usize> {
        self.read(name, AttrKind::Size, size)
    }

    /// A float.
    pub fn float(&self, name: &str) -> Result<f64> {
        self.read(name, AttrKind::Float, float)
    }

    /// A float that may be absent.
    pub fn opt_float(&self, name: &str) -> Result<Option<f64>> {
        self.read_optional(name, AttrKind::Float, float)
    }

    /// True or false.
    pub fn bool(&self, name: &str) -> Result<bool> {
        self.read(name, AttrKind::Bool, Value::as_bool)
    }

    /// A number of any class.
    pub fn number(&self, name: &str) -> Result<Scalar> {
        self.read(name, AttrKind::Number, scalar)
    }

    /// A number of any class that may be absent.
    pub fn opt_number(&self, name: &str) -> Result<Option<Scalar>> {
        self.read_optional(name, AttrKind::Number, scalar)
    }

    /// Text.
    pub fn str(&self, name: &str) -> Result<String> {
        self.read(name, AttrKind::Str, |value| value.as_str().map(String::from))
    }

    /// A dtype.
    pub fn dtype(&self, name: &str) -> Result<DType> {
        self.read(name, AttrKind::DType, dtype)
    }

    /// A list of integers.
    pub fn ints(&self, name: &str) -> Result<Vec<i64>> {
        self.read(name, AttrKind::Ints, |value| list(value, Value::as_i64))
    }

    /// A list of sizes.
    pub fn sizes(&self, name: &str) -> Result<Vec<usize>> {
        self.read(name, AttrKind::Sizes, |value| list(value, size))
    }

    /// `N` sizes; one stands for `N` equal ones.
    pub fn array<const N: usize>(&self, name: &str) -> Result<[usize; N]> {
        let sizes = self.sizes(name)?;
        if let [only] = sizes[..] {
            return Ok([only; N]);
        }
        <[usize; N]>::try_from(sizes).map_err(|sizes| self.wrong(name, &Value::from(sizes), &format!("one size, or one for each of {N} dimensions")))
    }

    /// A list of pairs of sizes.
    pub fn pairs(&self, name: &str) -> Result<Vec<(usize, usize)>> {
        self.read(name, AttrKind::Pairs, pairs)
    }

    /// The meaning of a word, from a list of all words with theirs.
    pub fn choice<T: Copy>(&self, name: &str, meanings: &[(&'static str, T)]) -> Result<T> {
        let word = self.str(name)?;
        let found = meanings.iter().find(|(w, _)| *w == word).map(|(_, meaning)| *meaning);
        found.ok_or_else(|| {
            let words: Vec<String> = meanings.iter().map(|(w, _)| format!("\"{w}\"")).collect();
            self.wrong(name, &Value::from(word), &format!("one of {}", words.join(", ")))
        })
    }

    /// The key of a random draw: the attributes `seed` and `stream`.
    pub fn rng(&self) -> Result<Rng> {
        let stream = self.size("stream")?;
        let stream = u32::try_from(stream).map_err(|_| self.wrong("stream", &Value::from(stream), "an integer below 2^32"))?;
        Ok(Rng { seed: self.read("seed", AttrKind::Size, Value::as_u64)?, stream })
    }
}

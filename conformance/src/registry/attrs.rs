//! The attributes of a call, as JSON, read with the types that the op declares.

use super::{
    Entry,
    attr::{Attr, AttrKind, dtype, float, list, pairs, scalar, size},
};
use anymesh_core::{DType, Error, Result, Scalar, ops::Rng};
use serde_json::{Map, Value};

/// The attributes of one call, checked against what the op takes.
#[derive(Clone, Debug)]
pub struct Attrs {
    op: &'static str,
    accepted: &'static [Attr],
    given: Map<String, Value>,
}

impl Attrs {
    /// Attributes for an op from a JSON object (`null` is an empty one). Refuses names that the op
    /// does not take, values of another type, and missing ones without a default.
    pub fn new(entry: &Entry, given: &Value) -> Result<Self> {
        let op = entry.name;
        let given = match given {
            Value::Null => Map::new(),
            Value::Object(map) => map.clone(),
            other => {
                return Err(Error::argument(
                    op,
                    "attrs",
                    format!("attributes are a JSON object, got {other}"),
                ));
            }
        };
        let attrs = Self {
            op,
            accepted: entry.attrs,
            given,
        };
        if let Some(name) = attrs
            .given
            .keys()
            .find(|name| attrs.accepted.iter().all(|a| a.name != **name))
        {
            let takes = match attrs.accepted {
                [] => "it takes none".into(),
                all => format!(
                    "it takes {}",
                    all.iter()
                        .map(Attr::to_string)
                        .collect::<Vec<_>>()
                        .join(", ")
                ),
            };
            return Err(Error::argument(
                op,
                "attrs",
                format!("has no attribute '{name}': {takes}"),
            ));
        }
        for attr in attrs.accepted {
            let Some(value) = attrs.given.get(attr.name) else {
                if attr.default.is_none() {
                    return Err(Error::argument(
                        op,
                        "attrs",
                        format!(
                            "the attribute '{}' is missing: give {}",
                            attr.name,
                            attr.kind.expected()
                        ),
                    ));
                }
                continue;
            };
            if !attr.accepts(value) {
                return Err(attrs.wrong(attr.name, value, &attr.kind.expected()));
            }
        }
        Ok(attrs)
    }

    fn wrong(&self, name: &str, value: &Value, expected: &str) -> Error {
        Error::argument(
            self.op,
            "attrs",
            format!("the attribute '{name}' is {value}, expected {expected}"),
        )
    }

    /// Whether the caller gave this attribute (and not as `null`).
    pub fn is_given(&self, name: &str) -> bool {
        self.given.get(name).is_some_and(|value| !value.is_null())
    }

    /// The largest number among those that the caller gave, or 0.
    pub fn largest(&self) -> f64 {
        fn largest<'a>(values: impl IntoIterator<Item = &'a Value>) -> f64 {
            values.into_iter().fold(0.0, |most, value| {
                most.max(match value {
                    Value::Array(items) => largest(items),
                    _ => float(value).unwrap_or(0.0),
                })
            })
        }
        largest(self.given.values())
    }

    /// The attribute as JSON: as given, or its default; `null` where it is absent.
    pub fn value(&self, name: &str) -> Result<Value> {
        if let Some(value) = self.given.get(name) {
            return Ok(value.clone());
        }
        let default = self
            .accepted
            .iter()
            .find(|a| a.name == name)
            .and_then(|a| a.default);
        default
            .and_then(|text| serde_json::from_str(text).ok())
            .ok_or_else(|| {
                Error::argument(
                    self.op,
                    "attrs",
                    format!("the attribute '{name}' is missing"),
                )
            })
    }

    fn read<T>(&self, name: &str, kind: AttrKind, read: impl Fn(&Value) -> Option<T>) -> Result<T> {
        let value = self.value(name)?;
        read(&value).ok_or_else(|| self.wrong(name, &value, &kind.expected()))
    }

    fn read_optional<T>(
        &self,
        name: &str,
        kind: AttrKind,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let value = self.value(name)?;
        if value.is_null() {
            Ok(None)
        } else {
            read(&value)
                .map(Some)
                .ok_or_else(|| self.wrong(name, &value, &kind.expected()))
        }
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
        self.read(name, AttrKind::Str, |value| {
            value.as_str().map(String::from)
        })
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
        <[usize; N]>::try_from(sizes).map_err(|sizes| {
            self.wrong(
                name,
                &Value::from(sizes),
                &format!("one size, or one for each of {N} dimensions"),
            )
        })
    }

    /// A list of pairs of sizes.
    pub fn pairs(&self, name: &str) -> Result<Vec<(usize, usize)>> {
        self.read(name, AttrKind::Pairs, pairs)
    }

    /// The meaning of a word, from a list of all words with theirs.
    pub fn choice<T: Copy>(&self, name: &str, meanings: &[(&'static str, T)]) -> Result<T> {
        let word = self.str(name)?;
        let found = meanings
            .iter()
            .find(|(w, _)| *w == word)
            .map(|(_, meaning)| *meaning);
        found.ok_or_else(|| {
            let words: Vec<String> = meanings.iter().map(|(w, _)| format!("\"{w}\"")).collect();
            self.wrong(
                name,
                &Value::from(word),
                &format!("one of {}", words.join(", ")),
            )
        })
    }

    /// The key of a random draw: the attributes `seed` and `stream`.
    pub fn rng(&self) -> Result<Rng> {
        let stream = self.size("stream")?;
        let stream = u32::try_from(stream)
            .map_err(|_| self.wrong("stream", &Value::from(stream), "an integer below 2^32"))?;
        Ok(Rng {
            seed: self.read("seed", AttrKind::Size, Value::as_u64)?,
            stream,
        })
    }
}

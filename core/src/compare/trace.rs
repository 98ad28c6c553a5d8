//! A run as hashes, to compare it with one in another process.

use super::{Given, elements::hash};
use crate::{DType, Error, Result, Shape};
use serde_json::{Value, json};

/// A value of a run: what it is known by, and its type.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) given: Given,
    pub(super) op: String,
    pub(super) line: String,
    /// Which call of the op from the line.
    pub(super) nth: u32,
    /// Which of several values of the call, where passes go back over it again.
    pub(super) again: u32,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Entry {
    pub(super) key: Key,
    pub(super) within: Option<String>,
    pub(super) dtype: DType,
    pub(super) shape: Shape,
    pub(super) ty: String,
    pub(super) operands: Vec<String>,
    pub(super) hash: u64,
    /// Whether it is what the op was given: another run may have had no need of it.
    pub(super) moves: bool,
}

/// The values of a run as hashes, with the ops and lines that they are of.
///
/// Where two runs have to be the same to the bit, this is all that one needs of the other: it is
/// written to a file by one process and read by another. See [`Compare::record`](super::Compare::record).
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// Where it ran, in words.
    pub place: String,
    pub(super) entries: Vec<Entry>,
}

/// What the first line of a file says.
const FORMAT: &str = "anymesh trace 1";

impl Trace {
    /// How many values it has.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// A number for all values in their order: equal for runs that are the same to the bit.
    pub fn hash(&self) -> u64 {
        let all: Vec<u8> = (self.entries.iter())
            .flat_map(|entry| entry.hash.to_le_bytes())
            .collect();
        hash(&all)
    }

    /// As text: JSON lines, a head and one line for each value.
    pub fn to_text(&self) -> String {
        let mut text = json!({ "format": FORMAT, "place": self.place }).to_string();
        text.push('\n');
        for entry in &self.entries {
            text.push_str(&entry.to_json().to_string());
            text.push('\n');
        }
        text
    }

    /// From what [`to_text`](Self::to_text) gave.
    pub fn parse(text: &str) -> Result<Self> {
        let wrong = |line: usize, detail: &str| {
            let detail = format!("line {} of the trace {detail}", line + 1);
            Error::argument("compare", "trace", detail)
        };
        let mut lines = text.lines().enumerate();
        let head: Value = match lines.next() {
            Some((_, line)) => serde_json::from_str(line).unwrap_or_default(),
            None => Value::Null,
        };
        if head["format"] != FORMAT {
            return Err(wrong(
                0,
                "is no head: is this a file of `anymesh diff-run --record`?",
            ));
        }
        let place = head["place"].as_str().unwrap_or("another place").into();
        let entries = lines
            .filter(|(_, line)| !line.trim().is_empty())
            .map(|(i, line)| {
                let value: Value = serde_json::from_str(line)
                    .map_err(|e| wrong(i, &format!("is no JSON: {e}")))?;
                Entry::from_json(&value).ok_or_else(|| wrong(i, "is not a value of a run"))
            })
            .collect::<Result<_>>()?;
        Ok(Self { place, entries })
    }
}

impl Entry {
    fn to_json(&self) -> Value {
        let (given, number) = match self.key.given {
            Given::Result(i) => ("result", i),
            Given::Gradient(i) => ("gradient", i),
            Given::Sum(i) => ("sum", i),
            Given::Total => ("total", 0),
        };
        json!({
            "op": self.key.op, "given": given, "number": number, "caller": self.key.line, "nth": self.key.nth, "again": self.key.again, "within": self.within, "dtype": self.dtype.name(), "shape": self.shape.dims(), "type": self.ty, "operands": self.operands, "hash": format!("{:016x}", self.hash), "moves": self.moves,
        })
    }

    fn from_json(value: &Value) -> Option<Self> {
        let text = |name: &str| value[name].as_str().map(String::from);
        let count = |name: &str| u32::try_from(value[name].as_u64()?).ok();
        let number = usize::try_from(value["number"].as_u64()?).ok()?;
        let sizes = value["shape"].as_array()?.iter();
        let sizes: Vec<usize> = sizes
            .map(|n| usize::try_from(n.as_u64()?).ok())
            .collect::<Option<_>>()?;
        let operands = value["operands"].as_array()?.iter();
        Some(Self {
            key: Key {
                given: match value["given"].as_str()? {
                    "result" => Given::Result(number),
                    "gradient" => Given::Gradient(number),
                    "sum" => Given::Sum(number),
                    "total" => Given::Total,
                    _ => return None,
                },
                op: text("op")?,
                line: text("caller")?,
                nth: count("nth")?,
                again: count("again")?,
            },
            within: text("within"),
            dtype: text("dtype")?.parse().ok()?,
            shape: Shape::from(&sizes[..]),
            ty: text("type")?,
            operands: operands
                .map(|o| o.as_str().map(String::from))
                .collect::<Option<_>>()?,
            hash: u64::from_str_radix(value["hash"].as_str()?, 16).ok()?,
            moves: value["moves"].as_bool()?,
        })
    }
}

//! The metadata of a file: values by key, of thirteen types.

use super::Defect;
use super::cursor::Cursor;
use crate::Result;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Arrays are nested at most so deep. Real files do not nest them.
const DEPTH: usize = 32;

/// The type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Type {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    Array,
    U64,
    I64,
    F64,
}

impl Type {
    /// In the order of their numbers.
    const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::Text,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    fn of(id: u32) -> Option<Self> {
        Self::ALL.get(id as usize).copied()
    }

    /// The bytes of a value, where all values of the type have as many.
    fn size(self) -> Option<usize> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::Text | Self::Array => None,
        }
    }

    /// The fewest bytes of a value: an empty text is its length, an empty array a type and a
    /// length.
    fn least(self) -> u64 {
        match self {
            Self::Text => 8,
            Self::Array => 12,
            _ => self.size().unwrap_or(1) as u64,
        }
    }
}

/// The metadata of a file.
///
/// It is kept as the file has it, and values are made when they are asked for: the list of a
/// tokenizer's tokens costs no more memory than in the file unless somebody wants it.
///
/// Whole numbers become JSON's whole numbers, floats the shortest decimal that leads back to them
/// (an `f32` that was written as 1e-5 is 1e-5); those that JSON has none for become the texts
/// `NaN`, `inf` and `-inf`.
///
/// ```
/// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/gguf/types.gguf");
/// let file = anymesh_checkpoint::gguf::File::open(path)?;
/// let metadata = file.metadata();
/// assert_eq!(metadata.get("value.f32"), Some(1e-5.into()));
/// assert_eq!(metadata.get("value.nested"), Some(serde_json::json!([[1, 2], [3]])));
/// assert_eq!(metadata.count("value.u8"), Some(200));
/// # Ok::<(), anymesh_checkpoint::Error>(())
/// ```
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Metadata {
    bytes: Vec<u8>,
    entries: BTreeMap<String, Entry>,
}

/// Where in the bytes a value is.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Entry {
    kind: Type,
    at: usize,
}

/// The keys; the values may be long.
impl std::fmt::Debug for Metadata {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.entries.keys()).finish()
    }
}

impl Metadata {
    /// The keys, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<Value> {
        let entry = self.entries.get(key)?;
        Reader::new(&self.bytes, entry.at).value(entry.kind, usize::MAX)
    }

    /// The value of a key; an array of more than `most` elements becomes an object with its
    /// `length` and its `first` elements.
    pub fn shortened(&self, key: &str, most: usize) -> Option<Value> {
        let entry = self.entries.get(key)?;
        Reader::new(&self.bytes, entry.at).value(entry.kind, most)
    }

    /// All values, whole.
    pub fn to_json(&self) -> Map<String, Value> {
        let value = |key: &String| Some((key.clone(), self.get(key)?));
        self.entries.keys().filter_map(value).collect()
    }

    /// The text of a key, where it has one.
    pub fn text(&self, key: &str) -> Option<&str> {
        let entry = self.entries.get(key).filter(|e| e.kind == Type::Text)?;
        Reader::new(&self.bytes, entry.at).text()
    }

    /// The texts of a key, where it has an array of them.
    pub fn texts(&self, key: &str) -> Option<impl Iterator<Item = &str>> {
        let entry = self.entries.get(key).filter(|e| e.kind == Type::Array)?;
        let mut reader = Reader::new(&self.bytes, entry.at);
        let (kind, count) = reader.array()?;
        (kind == Type::Text || count == 0).then(|| (0..count).map_while(move |_| reader.text()))
    }

    /// The whole number of a key that is not negative, where it has one, of any width.
    pub fn count(&self, key: &str) -> Option<u64> {
        self.get(key)?.as_u64()
    }

    /// The alignment: a power of two, 32 where the file does not say.
    fn alignment(&self, key: &str) -> Result<u64, String> {
        let Some(entry) = self.entries.get(key) else {
            return Ok(32);
        };
        let value = self.shortened(key, 4).unwrap_or_default();
        match value.as_u64() {
            Some(n) if entry.kind == Type::U32 && n.is_power_of_two() => Ok(n),
            _ => Err(value.to_string()),
        }
    }
}

/// Metadata that is being read: where its values are, and the bytes not yet.
#[derive(Default)]
pub(super) struct Unfinished(BTreeMap<String, Entry>);

impl Unfinished {
    /// Reads and checks `count` values.
    pub(super) fn read(cursor: &mut Cursor<'_>, count: u64) -> Result<Self> {
        let mut entries = BTreeMap::new();
        for _ in 0..count {
            let offset = cursor.offset();
            let key = cursor.text("the key of a metadata value")?.to_string();
            if entries.contains_key(&key) {
                return cursor.wrong(offset, Defect::DuplicateKey { key });
            }
            let kind = read_type(cursor, &key)?;
            let at = cursor.offset() as usize;
            check(cursor, &key, kind, 0)?;
            entries.insert(key, Entry { kind, at });
        }
        Ok(Self(entries))
    }

    /// The metadata with the bytes of the file from its beginning on, and its alignment.
    pub(super) fn finish(self, cursor: Cursor<'_>) -> (Metadata, Result<u64, (u64, Defect)>) {
        let metadata = Metadata {
            bytes: cursor.into_bytes(),
            entries: self.0,
        };
        let key = "general.alignment";
        let offset = metadata.entries.get(key).map_or(0, |e| e.at as u64);
        let alignment = metadata
            .alignment(key)
            .map_err(|found| (offset, Defect::Alignment { found }));
        (metadata, alignment)
    }
}

fn read_type(cursor: &mut Cursor<'_>, key: &str) -> Result<Type> {
    let offset = cursor.offset();
    let id = cursor.u32("the type of a metadata value")?;
    match Type::of(id) {
        Some(kind) => Ok(kind),
        None => cursor.wrong(
            offset,
            Defect::ValueType {
                key: key.into(),
                id,
            },
        ),
    }
}

/// Passes over a value, once, so that it can be trusted afterwards.
fn check(cursor: &mut Cursor<'_>, key: &str, kind: Type, depth: usize) -> Result<()> {
    let offset = cursor.offset();
    match kind {
        Type::Text => cursor.text("a text of the metadata").map(drop),
        Type::Bool => match cursor.u8("a logical value of the metadata")? {
            0 | 1 => Ok(()),
            value => cursor.wrong(
                offset,
                Defect::NotBool {
                    key: key.into(),
                    value,
                },
            ),
        },
        Type::Array if depth == DEPTH => cursor.wrong(
            offset,
            Defect::TooDeep {
                key: key.into(),
                limit: DEPTH,
            },
        ),
        Type::Array => {
            let of = read_type(cursor, key)?;
            let offset = cursor.offset();
            let count = cursor.u64("the length of an array of the metadata")?;
            let (left, what) = (cursor.left(), "elements of an array of the metadata");
            if count > left / of.least() {
                return cursor.wrong(offset, Defect::Count { what, count, left });
            }
            match of.size() {
                Some(size) if of != Type::Bool => cursor.take(count * size as u64, what).map(drop),
                _ => (0..count).try_for_each(|_| check(cursor, key, of, depth + 1)),
            }
        }
        _ => {
            let size = kind.size().unwrap_or(0) as u64;
            cursor.take(size, "a number of the metadata").map(drop)
        }
    }
}

/// Reads values that were checked. Everything is there, so `None` never comes out; saying so in the
/// types is cheaper than panicking if that were wrong.
struct Reader<'m> {
    bytes: &'m [u8],
    at: usize,
}

impl<'m> Reader<'m> {
    fn new(bytes: &'m [u8], at: usize) -> Self {
        Self { bytes, at }
    }

    fn take(&mut self, n: usize) -> Option<&'m [u8]> {
        let taken = self.bytes.get(self.at..self.at.checked_add(n)?)?;
        self.at += n;
        Some(taken)
    }

    fn fixed<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn text(&mut self) -> Option<&'m str> {
        let length = u64::from_le_bytes(self.fixed()?);
        std::str::from_utf8(self.take(usize::try_from(length).ok()?)?).ok()
    }

    /// The type and the number of the elements that follow.
    fn array(&mut self) -> Option<(Type, usize)> {
        let kind = Type::of(u32::from_le_bytes(self.fixed()?))?;
        let count = u64::from_le_bytes(self.fixed()?);
        Some((kind, usize::try_from(count).ok()?))
    }

    fn value(&mut self, kind: Type, most: usize) -> Option<Value> {
        Some(match kind {
            Type::U8 => json!(u8::from_le_bytes(self.fixed()?)),
            Type::I8 => json!(i8::from_le_bytes(self.fixed()?)),
            Type::U16 => json!(u16::from_le_bytes(self.fixed()?)),
            Type::I16 => json!(i16::from_le_bytes(self.fixed()?)),
            Type::U32 => json!(u32::from_le_bytes(self.fixed()?)),
            Type::I32 => json!(i32::from_le_bytes(self.fixed()?)),
            Type::U64 => json!(u64::from_le_bytes(self.fixed()?)),
            Type::I64 => json!(i64::from_le_bytes(self.fixed()?)),
            Type::F32 => decimal(f32::from_le_bytes(self.fixed()?)),
            Type::F64 => number(f64::from_le_bytes(self.fixed()?)),
            Type::Bool => json!(self.take(1)? == [1]),
            Type::Text => json!(self.text()?),
            Type::Array => {
                let (kind, count) = self.array()?;
                let shown = count.min(most);
                let first: Vec<Value> = (0..shown).map_while(|_| self.value(kind, most)).collect();
                if shown == count {
                    return Some(Value::Array(first));
                }
                (shown..count).try_for_each(|_| self.skip(kind))?;
                json!({"length": count, "first": first})
            }
        })
    }

    fn skip(&mut self, kind: Type) -> Option<()> {
        match (kind, kind.size()) {
            (_, Some(size)) => self.take(size).map(drop),
            (Type::Text, _) => self.text().map(drop),
            _ => {
                let (kind, count) = self.array()?;
                (0..count).try_for_each(|_| self.skip(kind))
            }
        }
    }
}

/// The shortest decimal that leads back to a float, as a double.
fn decimal(x: f32) -> Value {
    match x.to_string().parse() {
        Ok(decimal) if x.is_finite() => number(decimal),
        _ => number(x.into()),
    }
}

fn number(x: f64) -> Value {
    match serde_json::Number::from_f64(x) {
        Some(number) => Value::Number(number),
        None => json!(x.to_string()),
    }
}

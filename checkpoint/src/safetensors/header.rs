//! The header of a safetensors file: read and checked once, trusted afterwards.

use crate::file_format::{FileFormat, LOOKED_AT};
use crate::positioned::Positioned;
use crate::regions::checked_numel;
use crate::{Error, Result, TensorInfo};
use anymesh_core::DType;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// The longest header that is read. The reference implementation has the same limit.
pub(super) const MAX_HEADER: u64 = 100_000_000;

pub(super) const WHAT: &str = "safetensors file";

/// What the header of a safetensors file says.
///
/// [`File`](super::File) reads it by itself. Where the bytes come from elsewhere, such as ranges of
/// an object store, it is parsed on its own:
///
/// ```
/// # use anymesh_checkpoint::safetensors::Header;
/// let text = br#"{"bias": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}"#;
/// let file = [&63u64.to_le_bytes()[..], text, b"ab"].concat();
/// let length = file.len() as u64;
/// let size = Header::size(file[..8].try_into()?, length, "bias.safetensors")?;
/// let header = Header::parse(&file[8..8 + size as usize], length, "bias.safetensors")?;
/// assert_eq!(header.tensors["bias"].shape, [2]);
/// assert_eq!(header.offsets["bias"], 71);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Header {
    /// The tensors by name. Each lies in the file with all of its bytes, and none overlaps another.
    pub tensors: BTreeMap<String, TensorInfo>,
    /// Where in the file each of [`tensors`](Self::tensors) starts.
    pub offsets: BTreeMap<String, u64>,
    /// Tensors of types that this library has none for, with the name of the type.
    pub foreign: BTreeMap<String, String>,
    /// The free-form strings.
    pub metadata: BTreeMap<String, String>,
    /// The bytes of all tensors, also of those of foreign types.
    pub bytes: u64,
}

/// The types of the format with their bits, and ours where there is one. A name that is not here is
/// taken at its word about its size.
const TYPES: [(&str, u64, Option<DType>); 21] = [
    ("BOOL", 8, Some(DType::Bool)),
    ("U8", 8, Some(DType::U8)),
    ("U32", 32, Some(DType::U32)),
    ("I32", 32, Some(DType::I32)),
    ("I64", 64, Some(DType::I64)),
    ("F8_E4M3", 8, Some(DType::F8E4M3)),
    ("F8_E5M2", 8, Some(DType::F8E5M2)),
    ("F16", 16, Some(DType::F16)),
    ("BF16", 16, Some(DType::BF16)),
    ("F32", 32, Some(DType::F32)),
    ("F64", 64, Some(DType::F64)),
    ("F4", 4, None),
    ("F6_E2M3", 6, None),
    ("F6_E3M2", 6, None),
    ("F8_E8M0", 8, None),
    ("I8", 8, None),
    ("I16", 16, None),
    ("U16", 16, None),
    ("U64", 64, None),
    ("C64", 64, None),
    ("C128", 128, None),
];

/// The name of a type in a header.
pub(super) fn type_name(dtype: DType) -> &'static str {
    TYPES
        .iter()
        .find(|(.., ours)| *ours == Some(dtype))
        .map_or("", |(name, ..)| name)
}

/// Reads and checks the header of a file. Where it has none, the error says what the file is.
pub(super) fn read(file: &Positioned) -> Result<Header> {
    match read_header(file) {
        Err(error @ Error::Format { .. }) => {
            let mut first = vec![0; file.len().min(LOOKED_AT as u64) as usize];
            file.read_at(0, &mut first)?;
            Err(match FileFormat::of(&first) {
                Some(found) => Error::OtherFormat {
                    path: file.path().into(),
                    wanted: WHAT,
                    found,
                },
                None => error,
            })
        }
        read => read,
    }
}

fn read_header(file: &Positioned) -> Result<Header> {
    let mut first = [0; 8];
    let there = file.len().min(8) as usize;
    file.read_at(0, &mut first[..there])?;
    let mut text = vec![0; Header::size(first, file.len(), file.path())? as usize];
    file.read_at(8, &mut text)?;
    Header::parse(&text, file.len(), file.path())
}

impl Header {
    /// How many bytes of a file's `length` the header has: they follow the `first` eight. `path` is
    /// for errors.
    pub fn size(first: [u8; 8], length: u64, path: impl AsRef<Path>) -> Result<u64> {
        let wrong = |detail: String| Err(Error::format(path.as_ref(), WHAT, detail));
        let size = u64::from_le_bytes(first);
        match length.checked_sub(8) {
            None => wrong(format!("{length} bytes are too few for a header")),
            Some(available) if size > available => wrong(format!(
                "a header of {size} bytes does not fit into a file of {length}"
            )),
            _ if size > MAX_HEADER => wrong(format!(
                "a header of {size} bytes is longer than the {MAX_HEADER} that are allowed"
            )),
            _ => Ok(size),
        }
    }

    /// Checks the text of the header of a file of `length` bytes. `path` is for errors.
    pub fn parse(text: &[u8], length: u64, path: impl AsRef<Path>) -> Result<Header> {
        let wrong = |detail: String| Error::format(path.as_ref(), WHAT, detail);
        let start = 8 + text.len() as u64;
        let data = length.checked_sub(start).ok_or_else(|| {
            wrong(format!(
                "a header of {} bytes does not fit into a file of {length}",
                text.len()
            ))
        })?;
        if text.first() != Some(&b'{') {
            return Err(wrong("the header does not start with '{'".into()));
        }
        let json: Value = serde_json::from_slice(text)
            .map_err(|e| wrong(format!("the header is not JSON: {e}")))?;
        let Value::Object(entries) = json else {
            return Err(wrong("the header is not a JSON object".into()));
        };

        let mut header = Header::default();
        let mut ranges = vec![];
        for (name, entry) in entries {
            if name == "__metadata__" {
                header.metadata = metadata(entry).map_err(wrong)?;
                continue;
            }
            let Entry {
                dtype,
                shape,
                begin,
                end,
            } = parse(&entry).map_err(|detail| wrong(format!("tensor '{name}': {detail}")))?;
            match dtype {
                Ok(dtype) => {
                    header
                        .tensors
                        .insert(name.clone(), TensorInfo { dtype, shape });
                    header.offsets.insert(name.clone(), begin);
                }
                Err(foreign) => {
                    header.foreign.insert(name.clone(), foreign);
                }
            }
            ranges.push((begin, end, name));
        }
        // Every byte belongs to one tensor.
        ranges.sort();
        let mut at = 0;
        for (begin, end, name) in ranges {
            if begin != at {
                let problem = if begin < at {
                    "overlap with those of another tensor"
                } else {
                    "leave a hole before them"
                };
                return Err(wrong(format!(
                    "tensor '{name}': its bytes {begin}..{end} {problem} (expected to start at {at})"
                )));
            }
            at = end;
        }
        if at != data {
            return Err(wrong(format!(
                "the tensors have {at} bytes, the file has {data} after its header"
            )));
        }
        // All of them lie in the file, so that this cannot overflow.
        header
            .offsets
            .values_mut()
            .for_each(|offset| *offset += start);
        header.bytes = data;
        Ok(header)
    }
}

fn metadata(value: Value) -> std::result::Result<BTreeMap<String, String>, String> {
    let Value::Object(entries) = value else {
        return Err("__metadata__ is not an object".into());
    };
    entries
        .into_iter()
        .map(|(key, value)| match value {
            Value::String(text) => Ok((key, text)),
            _ => Err(format!("__metadata__: '{key}' is not a string")),
        })
        .collect()
}

struct Entry {
    /// The type, or the name of one that this library does not have.
    dtype: std::result::Result<DType, String>,
    shape: Vec<usize>,
    begin: u64,
    end: u64,
}

fn parse(entry: &Value) -> std::result::Result<Entry, String> {
    let numbers = |key: &str| -> std::result::Result<Vec<u64>, String> {
        let list = entry
            .get(key)
            .and_then(Value::as_array)
            .ok_or_else(|| format!("{key} is not a list"))?;
        list.iter()
            .map(|n| {
                n.as_u64()
                    .ok_or_else(|| format!("{key} holds {n}, not a size"))
            })
            .collect()
    };
    let name = entry
        .get("dtype")
        .and_then(Value::as_str)
        .ok_or("dtype is not a string")?;
    let shape = numbers("shape")?;
    let &[begin, end] = numbers("data_offsets")?.as_slice() else {
        return Err("data_offsets are not two numbers".into());
    };
    if begin > end {
        return Err(format!("it ends at {end}, before its start at {begin}"));
    }
    let sizes: Option<Vec<usize>> = shape.iter().map(|&d| usize::try_from(d).ok()).collect();
    let (shape, numel) = sizes
        .and_then(|s| checked_numel(&s).map(|n| (s, n as u64)))
        .ok_or_else(|| format!("the shape {shape:?} is too large"))?;
    let Some((_, bits, ours)) = TYPES.iter().find(|(known, ..)| *known == name) else {
        return Ok(Entry {
            dtype: Err(name.into()),
            shape,
            begin,
            end,
        });
    };
    // `numel` leaves room for the widest type, in bytes; in bits it may not.
    if numel
        .checked_mul(*bits)
        .is_none_or(|bits| bits.div_ceil(8) != end - begin)
    {
        return Err(format!("{} bytes cannot hold {name}{shape:?}", end - begin));
    }
    Ok(Entry {
        dtype: ours.ok_or_else(|| name.into()),
        shape,
        begin,
        end,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_near_the_largest_number_are_refused_and_do_not_overflow() {
        let parse = |text: &str| {
            Header::parse(text.as_bytes(), 8 + text.len() as u64, "x")
                .expect_err("no file has so many bytes")
                .to_string()
        };
        let last = u64::MAX;
        let error = parse(&format!(
            r#"{{"a":{{"dtype":"U8","shape":[0],"data_offsets":[{last},{last}]}}}}"#
        ));
        assert!(error.contains("leave a hole before them"), "{error}");
        // A type that nobody knows is taken at its word about its size.
        let error = parse(&format!(
            r#"{{"a":{{"dtype":"X","shape":[],"data_offsets":[0,{last}]}},"b":{{"dtype":"U8","shape":[0],"data_offsets":[{last},{last}]}}}}"#
        ));
        assert!(error.contains("the file has 0 after its header"), "{error}");
    }
}

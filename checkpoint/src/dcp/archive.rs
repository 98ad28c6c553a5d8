//! One item of a `.distcp` file: a tensor as `torch.save` writes it, which is a zip archive of
//! stored files.

use super::pickle::{self, Id, Node, Pickle};
use crate::positioned::Positioned;
use crate::regions::{checked_numel, row_major};
use crate::{Error, Result};

const WHAT: &str = "tensor of torch.save";

/// The longest description of a tensor that is read; real ones have some hundred bytes.
const MAX_PICKLE: u64 = 1 << 20;

/// Where the elements of a stored tensor are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stored {
    /// The name torch gives to the element type.
    pub(super) dtype: String,
    pub(super) shape: Vec<usize>,
    /// Where in the file the first element is.
    pub(super) base: u64,
    /// Bytes from one index to the next.
    pub(super) strides: Vec<u64>,
    /// The CRC-32 of the elements as they lie in the file, where that is known: of a tensor that is
    /// all of its storage.
    pub(super) sum: Option<u32>,
}

/// Finds the tensor in the item of `length` bytes at `offset`, both of which lie in the file.
pub(super) fn read(file: &Positioned, offset: u64, length: u64) -> Result<Stored> {
    let archive = Archive {
        file,
        offset,
        length,
    };
    let entries = archive.entries()?;
    let find = |name: &str| {
        entries.iter().find(|entry| {
            entry
                .name
                .split_once('/')
                .is_some_and(|(_, rest)| rest == name)
        })
    };
    let order = find("byteorder")
        .map(|entry| archive.bytes(entry, 16).map(|bytes| (entry, bytes)))
        .transpose()?;
    let entry = find("data.pkl").ok_or_else(|| archive.wrong("it has no data.pkl"))?;
    let text = archive.bytes(entry, MAX_PICKLE)?;
    // torch can be told not to compute sums: then none of an archive is right.
    let records = [
        Some((entry, &text)),
        order.as_ref().map(|(entry, bytes)| (*entry, bytes)),
    ];
    let right = |(entry, bytes): &(&Entry, &Vec<u8>)| crc32fast::hash(bytes) == entry.sum;
    let summed = records.iter().flatten().any(right);
    if let Some((entry, _)) = records
        .iter()
        .flatten()
        .find(|record| summed && !right(record))
    {
        return Err(archive.wrong(format!(
            "'{}' is damaged: it does not have its checksum",
            entry.name
        )));
    }
    if order.is_some_and(|(_, bytes)| bytes != b"little") {
        return Err(archive.wrong("its bytes are not in little-endian order"));
    }
    let pickle = pickle::read(&text, file.path())?;
    let view = View::from(&pickle, pickle.root)
        .ok_or_else(|| archive.wrong("data.pkl does not describe a tensor"))?;
    let entry = find(&format!("data/{}", view.key))
        .ok_or_else(|| archive.wrong(format!("it has no storage data/{}", view.key)))?;
    let (start, available) = archive.data(entry)?;
    let size = element_size(&view.dtype)
        .ok_or_else(|| archive.wrong(format!("{} has no size that is known", view.dtype)))?;

    // The last element must lie in the storage; then all of them do.
    let bytes = |n: usize| (n as u64).checked_mul(size);
    let wrong = || archive.wrong("the tensor reaches beyond its storage");
    let first = bytes(view.offset).ok_or_else(wrong)?;
    let strides = view
        .strides
        .iter()
        .map(|&s| bytes(s))
        .collect::<Option<Vec<u64>>>()
        .ok_or_else(wrong)?;
    let numel = checked_numel(&view.shape)
        .filter(|_| strides.len() == view.shape.len())
        .ok_or_else(wrong)?;
    if numel > 0 {
        let last = view
            .shape
            .iter()
            .zip(&strides)
            .try_fold(first, |at, (&n, &s)| {
                at.checked_add(s.checked_mul(n as u64 - 1)?)
            });
        last.and_then(|at| at.checked_add(size))
            .filter(|&end| end <= available)
            .ok_or_else(wrong)?;
    }
    let whole =
        numel as u64 * size == available && strides == row_major(&view.shape, size as usize);
    let sum = (summed && whole && numel > 0).then_some(entry.sum);
    Ok(Stored {
        dtype: view.dtype,
        shape: view.shape,
        base: start + if numel > 0 { first } else { 0 },
        strides,
        sum,
    })
}

/// The bytes of an element of a type of torch, also of those that this library does not have.
fn element_size(dtype: &str) -> Option<u64> {
    let digits: String = dtype
        .chars()
        .skip_while(|c| !c.is_ascii_digit())
        .take_while(char::is_ascii_digit)
        .collect();
    if dtype == "bool" {
        Some(1)
    } else {
        digits
            .parse::<u64>()
            .ok()
            .filter(|bits| [8, 16, 32, 64, 128].contains(bits))
            .map(|bits| bits / 8)
    }
}

/// A view of a storage, as it is pickled.
struct View {
    dtype: String,
    key: String,
    offset: usize,
    shape: Vec<usize>,
    strides: Vec<usize>,
}

impl View {
    fn from(pickle: &Pickle, id: Id) -> Option<View> {
        if let Some((args, _)) = pickle.object(id, "_rebuild_parameter") {
            // A parameter is a tensor with a flag; one of a parameter is not written.
            let &inner = args.first()?;
            return pickle
                .object(inner, "_rebuild_parameter")
                .is_none()
                .then(|| View::from(pickle, inner))?;
        }
        let (args, typed) = match pickle.object(id, "_rebuild_tensor_v2") {
            Some((args, _)) => (args, None),
            None => {
                let (args, _) = pickle.object(id, "_rebuild_tensor_v3")?;
                (
                    args,
                    Some(
                        pickle
                            .global(*args.get(6)?)?
                            .strip_prefix("torch.")?
                            .to_string(),
                    ),
                )
            }
        };
        let &[storage, offset, shape, strides, ..] = args else {
            return None;
        };
        let Node::Persistent(storage) = pickle.node(storage) else {
            return None;
        };
        let &[kind, class, key, _location, _count] = pickle.list(*storage)? else {
            return None;
        };
        if pickle.text(kind) != Some("storage") {
            return None;
        }
        let dtype = match typed {
            Some(dtype) => dtype,
            None => storage_dtype(pickle.global(class)?)?.into(),
        };
        let offset = usize::try_from(pickle.int(offset)?).ok()?;
        Some(View {
            dtype,
            key: pickle.text(key)?.into(),
            offset,
            shape: pickle.sizes(shape)?,
            strides: pickle.sizes(strides)?,
        })
    }
}

fn storage_dtype(class: &str) -> Option<&'static str> {
    Some(match class {
        "torch.FloatStorage" => "float32",
        "torch.DoubleStorage" => "float64",
        "torch.HalfStorage" => "float16",
        "torch.BFloat16Storage" => "bfloat16",
        "torch.BoolStorage" => "bool",
        "torch.ByteStorage" => "uint8",
        "torch.CharStorage" => "int8",
        "torch.ShortStorage" => "int16",
        "torch.IntStorage" => "int32",
        "torch.LongStorage" => "int64",
        _ => return None,
    })
}

/// A zip archive inside a file.
struct Archive<'f> {
    file: &'f Positioned,
    offset: u64,
    length: u64,
}

/// A file in an archive.
struct Entry {
    name: String,
    /// Where its local header is, from the start of the archive.
    header: u64,
    size: u64,
    /// The CRC-32 of its bytes.
    sum: u32,
}

/// A little-endian number of two, four or eight bytes at a place that may not be there.
fn number(bytes: &[u8], at: usize, width: usize) -> Option<u64> {
    Some(
        bytes
            .get(at..at.checked_add(width)?)?
            .iter()
            .rev()
            .fold(0, |n, &b| n << 8 | u64::from(b)),
    )
}

impl Archive<'_> {
    fn wrong(&self, detail: impl Into<String>) -> Error {
        Error::format(
            self.file.path(),
            WHAT,
            format!("item at byte {}: {}", self.offset, detail.into()),
        )
    }

    fn part(&self, at: u64, length: u64) -> Result<Vec<u8>> {
        if at.checked_add(length).is_none_or(|end| end > self.length) {
            return Err(self.wrong("it points beyond its end"));
        }
        let mut out = vec![0; length as usize];
        self.file.read_at(self.offset + at, &mut out)?;
        Ok(out)
    }

    /// The directory, found from the end. torch writes the 64-bit form and no comment.
    fn entries(&self) -> Result<Vec<Entry>> {
        const END: u64 = 22;
        const LOCATOR: u64 = 20;
        let end_at = self
            .length
            .checked_sub(END)
            .ok_or_else(|| self.wrong("it is too short for an archive"))?;
        let end = self.part(end_at, END)?;
        if !end.starts_with(b"PK\x05\x06") {
            return Err(self.wrong("it does not end as a zip archive does"));
        }
        let field = |at, width| number(&end, at, width).unwrap_or(0);
        let (mut count, mut size, mut start) = (field(10, 2), field(12, 4), field(16, 4));
        if let Some(at) = end_at.checked_sub(LOCATOR) {
            let locator = self.part(at, LOCATOR)?;
            if locator.starts_with(b"PK\x06\x07") {
                let wide = self.part(number(&locator, 8, 8).unwrap_or(u64::MAX), 56)?;
                if !wide.starts_with(b"PK\x06\x06") {
                    return Err(
                        self.wrong("the 64-bit end of its directory is not where it should be")
                    );
                }
                let field = |at| number(&wide, at, 8).unwrap_or(0);
                (count, size, start) = (field(32), field(40), field(48));
            }
        }
        let directory = self.part(start, size)?;
        let mut entries = vec![];
        let mut rest = directory.as_slice();
        while !rest.is_empty() {
            let (entry, length) = self
                .entry(rest)
                .ok_or_else(|| self.wrong("its directory is damaged"))??;
            entries.push(entry);
            rest = &rest[length..];
        }
        if entries.len() as u64 != count {
            return Err(self.wrong(format!(
                "its directory has {} entries instead of {count}",
                entries.len()
            )));
        }
        Ok(entries)
    }

    /// The first entry of a directory and its length there; `None` where it is not one.
    fn entry(&self, bytes: &[u8]) -> Option<Result<(Entry, usize)>> {
        if !bytes.starts_with(b"PK\x01\x02") {
            return None;
        }
        let (flags, method, sum) = (
            number(bytes, 8, 2)?,
            number(bytes, 10, 2)?,
            number(bytes, 16, 4)? as u32,
        );
        let (mut packed, mut size, mut header) = (
            number(bytes, 20, 4)?,
            number(bytes, 24, 4)?,
            number(bytes, 42, 4)?,
        );
        let (name, extra, comment) = (
            number(bytes, 28, 2)? as usize,
            number(bytes, 30, 2)? as usize,
            number(bytes, 32, 2)? as usize,
        );
        let name_bytes = bytes.get(46..46 + name)?;
        let mut fields = bytes.get(46 + name..46 + name + extra)?;
        let length = 46 + name + extra + comment;
        bytes.get(..length)?;
        // The 64-bit values of those that did not fit, in this order.
        while let (Some(kind), Some(count)) = (number(fields, 0, 2), number(fields, 2, 2)) {
            let content = fields.get(4..4 + count as usize)?;
            if kind == 1 {
                let mut at = 0;
                for value in [&mut size, &mut packed, &mut header] {
                    if *value == 0xffff_ffff {
                        *value = number(content, at, 8)?;
                        at += 8;
                    }
                }
            }
            fields = &fields[4 + count as usize..];
        }
        let name = String::from_utf8_lossy(name_bytes).into_owned();
        if method != 0 || packed != size || flags & 1 != 0 {
            return Some(Err(
                self.wrong(format!("'{name}' is compressed or encrypted"))
            ));
        }
        Some(Ok((
            Entry {
                name,
                header,
                size,
                sum,
            },
            length,
        )))
    }

    /// Where in the file an entry's bytes are, and how many.
    fn data(&self, entry: &Entry) -> Result<(u64, u64)> {
        let local = self.part(entry.header, 30)?;
        let (Some(name), Some(extra), true) = (
            number(&local, 26, 2),
            number(&local, 28, 2),
            local.starts_with(b"PK\x03\x04"),
        ) else {
            return Err(self.wrong(format!("'{}' is not where the directory says", entry.name)));
        };
        let start = entry.header + 30 + name + extra;
        if start
            .checked_add(entry.size)
            .is_none_or(|end| end > self.length)
        {
            return Err(self.wrong(format!("'{}' reaches beyond its end", entry.name)));
        }
        Ok((self.offset + start, entry.size))
    }

    fn bytes(&self, entry: &Entry, limit: u64) -> Result<Vec<u8>> {
        let (start, size) = self.data(entry)?;
        if size > limit {
            return Err(self.wrong(format!(
                "'{}' has {size} bytes, more than {limit}",
                entry.name
            )));
        }
        self.part(start - self.offset, size)
    }
}

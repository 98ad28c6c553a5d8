//! What a file says before its data: read and checked once, trusted afterwards.

use super::blocks::TensorType;
use super::cursor::Cursor;
use super::metadata::{Metadata, Unfinished};
use super::{Defect, WHAT};
use crate::file_format::{FileFormat, LOOKED_AT};
use crate::positioned::Positioned;
use crate::regions::checked_numel;
use crate::{Error, Result, TensorInfo};
use std::collections::{BTreeMap, BTreeSet};

/// As many dimensions tensors of ggml have at most.
const RANK: u32 = 4;

/// The fewest bytes of a metadata value: the length of an empty key, a type, a byte.
const LEAST_VALUE: u64 = 8 + 4 + 1;

/// The fewest bytes that say what a tensor is: the length of an empty name, a number of dimensions,
/// a type, a place.
const LEAST_TENSOR: u64 = 8 + 4 + 4 + 8;

/// What a file says before its data.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) version: u32,
    pub(super) metadata: Metadata,
    /// The tensors by name, in row-major shapes. All of their bytes lie in the file.
    pub(super) tensors: BTreeMap<String, TensorInfo>,
    /// How each of them is stored.
    pub(super) stored: BTreeMap<String, Stored>,
    /// Tensors of types that are not read here, with the name of the type.
    pub(super) foreign: BTreeMap<String, String>,
}

/// How a tensor is stored.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stored {
    pub(super) kind: &'static TensorType,
    /// Where in the file it begins.
    pub(super) offset: u64,
}

/// Reads and checks the header of a file. Where it is of another format, the error says which.
pub(super) fn read(file: &Positioned) -> Result<Header> {
    match read_header(file) {
        Err(
            error @ Error::Gguf {
                defect: Defect::Magic | Defect::Truncated { .. },
                offset: 0,
                ..
            },
        ) => {
            let mut first = vec![0; file.len().min(LOOKED_AT as u64) as usize];
            file.read_at(0, &mut first)?;
            Err(match FileFormat::of(&first) {
                Some(found) if found != FileFormat::Gguf => Error::OtherFormat {
                    path: file.path().into(),
                    wanted: WHAT,
                    found,
                },
                _ => error,
            })
        }
        read => read,
    }
}

fn read_header(file: &Positioned) -> Result<Header> {
    let mut cursor = Cursor::new(file);
    if cursor.u32("the beginning")? != u32::from_le_bytes(*b"GGUF") {
        return cursor.wrong(0, Defect::Magic);
    }
    let version = cursor.u32("the version")?;
    match version {
        2 | 3 => {}
        // A version is a small number, so that its bytes tell in which order they are.
        _ if version & 0xffff == 0 && version != 0 => {
            let version = version.swap_bytes();
            return cursor.wrong(4, Defect::BigEndian { version });
        }
        _ => return cursor.wrong(4, Defect::Version { version }),
    }
    let tensors = count(&mut cursor, "tensors", LEAST_TENSOR)?;
    let values = count(&mut cursor, "metadata values", LEAST_VALUE)?;
    let metadata = Unfinished::read(&mut cursor, values)?;
    let mut entries = vec![];
    for _ in 0..tensors {
        entries.push(Entry::read(&mut cursor)?);
    }
    let end = cursor.offset();
    let wrong = |offset: u64, defect: Defect| Error::Gguf {
        path: file.path().into(),
        offset,
        defect,
    };
    let (metadata, alignment) = metadata.finish(cursor);
    let alignment = alignment.map_err(|(offset, defect)| wrong(offset, defect))?;
    // Padding that is not there is missed by no tensor if there is none.
    let start = end.next_multiple_of(alignment);
    let available = file.len().saturating_sub(start);

    let mut header = Header {
        version,
        metadata,
        tensors: BTreeMap::new(),
        stored: BTreeMap::new(),
        foreign: BTreeMap::new(),
    };
    let mut names = BTreeSet::new();
    for entry in entries {
        let at = entry.offset;
        let wrong = |defect: Defect| wrong(at, defect);
        if !names.insert(entry.name.clone()) {
            return Err(wrong(Defect::DuplicateTensor { tensor: entry.name }));
        }
        let shape = entry.shape().map_err(wrong)?;
        let Some(kind) = TensorType::of(entry.kind) else {
            // Its bytes are not counted; where it begins can still be held against the file.
            entry.place(0, alignment, available).map_err(wrong)?;
            let name = TensorType::foreign(entry.kind);
            header.foreign.insert(entry.name, name);
            continue;
        };
        let info = entry.info(shape, kind).map_err(wrong)?;
        // Rows are whole blocks, and elements leave room for the widest type.
        let bytes = (info.numel() / kind.block() * kind.bytes()) as u64;
        entry.place(bytes, alignment, available).map_err(wrong)?;
        let offset = start + entry.at;
        header.tensors.insert(entry.name.clone(), info);
        header.stored.insert(entry.name, Stored { kind, offset });
    }
    Ok(header)
}

/// How many of something there are, which have at least `least` bytes each.
fn count(cursor: &mut Cursor<'_>, what: &'static str, least: u64) -> Result<u64> {
    let offset = cursor.offset();
    let count = cursor.u64("the number of tensors or of metadata values")?;
    let left = cursor.left();
    if count > left / least {
        return cursor.wrong(offset, Defect::Count { what, count, left });
    }
    Ok(count)
}

/// What a file says about a tensor.
struct Entry {
    /// Where it says so.
    offset: u64,
    name: String,
    /// The fastest dimension first.
    sizes: Vec<u64>,
    kind: u32,
    /// Where the tensor begins, counted from the beginning of the data.
    at: u64,
}

impl Entry {
    fn read(cursor: &mut Cursor<'_>) -> Result<Self> {
        let offset = cursor.offset();
        let name = cursor.text("the name of a tensor")?.to_string();
        let rank = cursor.u32("the number of dimensions of a tensor")?;
        if rank > RANK {
            let limit = RANK;
            return cursor.wrong(
                offset,
                Defect::Rank {
                    tensor: name,
                    rank,
                    limit,
                },
            );
        }
        let sizes = (0..rank)
            .map(|_| cursor.u64("the shape of a tensor"))
            .collect::<Result<_>>()?;
        Ok(Self {
            offset,
            name,
            sizes,
            kind: cursor.u32("the type of a tensor")?,
            at: cursor.u64("the place of a tensor")?,
        })
    }

    /// The shape, the fastest dimension last.
    fn shape(&self) -> Result<Vec<usize>, Defect> {
        self.sizes
            .iter()
            .rev()
            .map(|&n| usize::try_from(n).ok())
            .collect::<Option<Vec<usize>>>()
            .filter(|shape| checked_numel(shape).is_some())
            .ok_or_else(|| Defect::TooLarge {
                tensor: self.name.clone(),
                shape: self.sizes.iter().rev().copied().collect(),
            })
    }

    /// What it is read as, if its rows are whole blocks.
    fn info(&self, shape: Vec<usize>, kind: &TensorType) -> Result<TensorInfo, Defect> {
        let row = shape.last().copied().unwrap_or(1);
        if row % kind.block() != 0 {
            return Err(Defect::Row {
                tensor: self.name.clone(),
                row,
                kind: kind.name(),
                block: kind.block(),
            });
        }
        let dtype = kind.dtype();
        Ok(TensorInfo { dtype, shape })
    }

    /// Whether so many bytes lie where they may, inside the data.
    fn place(&self, bytes: u64, alignment: u64, available: u64) -> Result<(), Defect> {
        let at = self.at;
        if !at.is_multiple_of(alignment) {
            return Err(Defect::Misaligned {
                tensor: self.name.clone(),
                at,
                alignment,
            });
        }
        match at.checked_add(bytes) {
            Some(end) if end <= available => Ok(()),
            _ => Err(Defect::Outside {
                tensor: self.name.clone(),
                at,
                bytes,
                available,
            }),
        }
    }
}

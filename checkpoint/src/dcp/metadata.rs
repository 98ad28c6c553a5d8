//! What the `.metadata` pickle of a checkpoint says, as plain data.

use super::pickle::{self, Id, Pickle};
use crate::regions::checked_numel;
use crate::{Error, Result};
use anymesh_core::{DType, Region};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Component, Path};

const WHAT: &str = "metadata of torch.distributed.checkpoint";

/// A stored region of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Which part of the tensor it is. It lies inside and has elements.
    pub region: Region,
    /// The file, relative to the folder, in which it lies.
    pub file: String,
    /// Its first byte there. Whether there is such a byte only the file says.
    pub offset: u64,
    /// How many bytes it takes, all in all.
    pub length: u64,
}

/// A tensor and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// The name torch gives to the element type.
    pub dtype: String,
    /// The global shape.
    pub shape: Vec<usize>,
    /// Regions that fill it exactly.
    pub chunks: Vec<Chunk>,
}

/// What a checkpoint has, by its `.metadata` alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Metadata {
    /// The tensors by name.
    pub tensors: BTreeMap<String, Tensor>,
    /// The names of values that are not tensors, in order.
    pub objects: Vec<String>,
}

/// Our type for one of torch.
pub(super) fn dtype(name: &str) -> Option<DType> {
    Some(match name {
        "bool" => DType::Bool,
        "uint8" => DType::U8,
        "uint32" => DType::U32,
        "int32" => DType::I32,
        "int64" => DType::I64,
        "float8_e4m3fn" => DType::F8E4M3,
        "float8_e5m2" => DType::F8E5M2,
        "float16" => DType::F16,
        "bfloat16" => DType::BF16,
        "float32" => DType::F32,
        "float64" => DType::F64,
        _ => return None,
    })
}

/// Where items are: file, offset and length by the name of the tensor and the start of the region.
/// Texts are borrowed: a pickle names one as often as it likes.
type Places<'p> = HashMap<(&'p str, Vec<usize>), (&'p str, u64, u64)>;

/// Names of files that are longer than any system has are refused, so that many chunks in one file
/// do not take much memory.
const LONGEST_PATH: usize = 4096;

impl Metadata {
    /// Reads and checks the bytes of a `.metadata` file. `path` is for errors.
    pub fn parse(bytes: &[u8], path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let pickle = pickle::read(bytes, path)?;
        let wrong = |detail: String| Error::format(path, WHAT, detail);
        let field = |name: &str| {
            pickle
                .field(pickle.root, "Metadata", name)
                .and_then(|id| pickle.pairs(id))
        };
        let items = field("state_dict_metadata")
            .ok_or_else(|| wrong("it has no dictionary 'state_dict_metadata'".into()))?;
        let stored = field("storage_data")
            .ok_or_else(|| wrong("it has no dictionary 'storage_data'".into()))?;
        let places = places(&pickle, stored).map_err(wrong)?;
        let mut out = Metadata::default();
        let mut objects = BTreeSet::new();
        // Every chunk is written out, so that there are fewer than bytes. A pickle in which many
        // tensors share many chunks would take hours to check.
        let mut most = bytes.len();
        for &(key, item) in items {
            let name = pickle
                .text(key)
                .ok_or_else(|| wrong("the name of a tensor is not a text".into()))?;
            if pickle.object(item, "BytesStorageMetadata").is_some() {
                objects.insert(name);
                continue;
            }
            let tensor = tensor(&pickle, name, item, &places, &mut most)
                .map_err(|detail| wrong(format!("tensor '{name}': {detail}")))?;
            out.tensors.insert(name.into(), tensor);
        }
        out.objects = objects.into_iter().map(String::from).collect();
        Ok(out)
    }
}

fn places<'p>(pickle: &'p Pickle, stored: &[(Id, Id)]) -> std::result::Result<Places<'p>, String> {
    let mut places = Places::new();
    for &(index, info) in stored {
        let name = pickle
            .field(index, "MetadataIndex", "fqn")
            .and_then(|id| pickle.text(id))
            .ok_or("a key of 'storage_data' has no name")?;
        let Some(start) = pickle
            .field(index, "MetadataIndex", "offset")
            .and_then(|id| pickle.sizes(id))
        else {
            continue;
        };
        let field = |field: &str| pickle.field(info, "_StorageInfo", field);
        if field("transform_descriptors")
            .and_then(|id| pickle.list(id))
            .is_some_and(|list| !list.is_empty())
        {
            return Err(format!(
                "tensor '{name}' is compressed or otherwise transformed; save it without that"
            ));
        }
        let number = |name| {
            field(name)
                .and_then(|id| pickle.int(id))
                .and_then(|n| u64::try_from(n).ok())
        };
        let file = field("relative_path").and_then(|id| pickle.text(id));
        let (Some(file), Some(offset), Some(length)) = (file, number("offset"), number("length"))
        else {
            return Err(format!("tensor '{name}' has no file, offset and length"));
        };
        if file.is_empty()
            || file.len() > LONGEST_PATH
            || !Path::new(file)
                .components()
                .all(|part| matches!(part, Component::Normal(_)))
        {
            return Err(format!(
                "tensor '{name}' is in '{file}', which does not lie in the folder"
            ));
        }
        places.insert((name, start), (file, offset, length));
    }
    Ok(places)
}

fn tensor(
    pickle: &Pickle,
    name: &str,
    item: Id,
    places: &Places<'_>,
    most: &mut usize,
) -> std::result::Result<Tensor, String> {
    const CLASS: &str = "TensorStorageMetadata";
    let properties = pickle
        .field(item, CLASS, "properties")
        .ok_or("it has no properties")?;
    // The state is a tuple that starts with the type; some versions write it as a dictionary.
    let state = pickle
        .object(properties, "TensorProperties")
        .and_then(|(_, state)| state);
    let first = state
        .and_then(|id| pickle.list(id))
        .and_then(|list| list.first().copied());
    let id = first.or_else(|| pickle.field(properties, "TensorProperties", "dtype"));
    let dtype = id
        .and_then(|id| pickle.global(id))
        .and_then(|name| name.strip_prefix("torch."))
        .ok_or("it has no element type")?;
    let shape = pickle
        .field(item, CLASS, "size")
        .and_then(|id| pickle.sizes(id))
        .ok_or("it has no size")?;
    let numel = checked_numel(&shape).ok_or_else(|| format!("the size {shape:?} is too large"))?;
    let listed = pickle
        .field(item, CLASS, "chunks")
        .and_then(|id| pickle.list(id))
        .ok_or("it has no chunks")?;
    *most = most
        .checked_sub(listed.len())
        .ok_or("the file is too short for so many chunks")?;
    let mut chunks = vec![];
    for &chunk in listed {
        let sizes = |field| {
            pickle
                .field(chunk, "ChunkStorageMetadata", field)
                .and_then(|id| pickle.sizes(id))
        };
        let (start, size) = sizes("offsets")
            .zip(sizes("sizes"))
            .ok_or("a chunk has no offsets and sizes")?;
        let inside = start.len() == shape.len()
            && size.len() == shape.len()
            && (0..shape.len())
                .all(|d| start[d].checked_add(size[d]).is_some_and(|e| e <= shape[d]));
        if !inside {
            return Err(format!(
                "a chunk of {size:?} at {start:?} does not lie in {shape:?}"
            ));
        }
        if size.contains(&0) {
            continue;
        }
        let key = (name, start);
        let (file, offset, length) = places
            .get(&key)
            .copied()
            .ok_or_else(|| format!("nothing says where its chunk at {:?} is stored", key.1))?;
        chunks.push(Chunk {
            region: Region {
                start: key.1.into(),
                shape: size.into(),
            },
            file: file.into(),
            offset,
            length,
        });
    }
    // Chunks that together have as many elements as the tensor and do not overlap leave no holes.
    let total = chunks
        .iter()
        .try_fold(0usize, |n, chunk| n.checked_add(chunk.region.numel()));
    if total != Some(numel) {
        return Err(format!("its chunks have {total:?} of its {numel} elements"));
    }
    no_overlap(&mut chunks, shape.len())?;
    Ok(Tensor {
        dtype: dtype.into(),
        shape,
        chunks,
    })
}

/// Sorts chunks along the dimension with the most different starts, where only near neighbours can
/// overlap.
fn no_overlap(chunks: &mut [Chunk], rank: usize) -> std::result::Result<(), String> {
    let starts = |d: usize| {
        chunks
            .iter()
            .map(|chunk| chunk.region.start[d])
            .collect::<BTreeSet<_>>()
            .len()
    };
    let Some(d) = (0..rank).max_by_key(|&d| starts(d)) else {
        return Ok(());
    };
    chunks.sort_by_key(|chunk| chunk.region.start[d]);
    for (i, chunk) in chunks.iter().enumerate() {
        let end = chunk.region.start[d] + chunk.region.shape[d];
        let near = chunks[i + 1..]
            .iter()
            .take_while(|other| other.region.start[d] < end);
        if let Some(other) = near
            .into_iter()
            .find(|other| chunk.region.intersect(&other.region).is_some())
        {
            return Err(format!(
                "its chunks at {:?} and {:?} overlap",
                &chunk.region.start[..],
                &other.region.start[..]
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODULE: &str = "ctorch.distributed.checkpoint.metadata\n";

    fn text(text: &str) -> Vec<u8> {
        [
            b"X",
            &(text.len() as u32).to_le_bytes()[..],
            text.as_bytes(),
        ]
        .concat()
    }

    /// An object with fields.
    fn object(class: &str, fields: &[(&str, Vec<u8>)]) -> Vec<u8> {
        let fields: Vec<u8> = fields
            .iter()
            .flat_map(|(name, value)| [text(name), value.clone()].concat())
            .collect();
        [
            format!("{MODULE}{class}\n)\u{81}}}(")
                .chars()
                .map(|c| c as u8)
                .collect(),
            fields,
            b"ub".to_vec(),
        ]
        .concat()
    }

    /// Metadata of tensors that are all the same one, remembered as 1, whose sizes are `size`.
    fn metadata(tensors: usize, chunks: usize, size: &[u8]) -> Vec<u8> {
        let properties = object(
            "TensorProperties",
            &[("dtype", b"ctorch\nfloat32\n".to_vec())],
        );
        let chunk = object(
            "ChunkStorageMetadata",
            &[("offsets", size.to_vec()), ("sizes", size.to_vec())],
        );
        let list = [b"(", &chunk[..], b"q\0", &b"h\0".repeat(chunks - 1), b"l"].concat();
        let tensor = object(
            "TensorStorageMetadata",
            &[
                ("properties", properties),
                ("size", size.to_vec()),
                ("chunks", list),
            ],
        );
        let items: Vec<u8> = (0..tensors)
            .flat_map(|i| {
                [
                    text(&i.to_string()),
                    if i == 0 {
                        [&tensor[..], b"q\x01"].concat()
                    } else {
                        b"h\x01".to_vec()
                    },
                ]
                .concat()
            })
            .collect();
        let items = [b"}(", &items[..], b"u"].concat();
        [
            b"\x80\x02",
            &object(
                "Metadata",
                &[
                    ("state_dict_metadata", items),
                    ("storage_data", b"}".to_vec()),
                ],
            )[..],
            b".",
        ]
        .concat()
    }

    #[test]
    fn tensors_that_share_chunks_and_sizes_without_end_are_refused() {
        let nothing = b"(K\0t";
        let parse = |bytes: &[u8]| Metadata::parse(bytes, ".metadata");
        assert_eq!(
            parse(&metadata(3, 2, nothing)).map(|metadata| metadata.tensors.len()),
            Ok(3)
        );
        let error = parse(&metadata(3000, 3000, nothing))
            .expect_err("nine million chunks of some kilobytes")
            .to_string();
        assert!(error.contains("too short for so many chunks"), "{error}");
        let error = parse(&metadata(
            1,
            1,
            &[b"(", &b"K\0".repeat(65)[..], b"t"].concat(),
        ))
        .expect_err("65 dimensions")
        .to_string();
        assert!(error.contains("it has no size"), "{error}");
    }
}

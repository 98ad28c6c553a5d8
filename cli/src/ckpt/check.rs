//! Commands that answer yes or no: `ckpt verify` and `ckpt diff`.

use super::{
    Answer, Outcome, count,
    gguf::Names,
    human,
    input::{Opened, Select},
    memory::Memory,
    ui::Ui,
};
use anymesh::{
    Region,
    checkpoint::{
        Checkpoint, Error, Result, Source, SourceFormat, TensorInfo, content_sum, hugging_face,
        number, open, select, split,
    },
};
use clap::Args;
use serde_json::{Value, json};
use std::{collections::BTreeSet, path::PathBuf};

/// Arguments of `ckpt verify`.
#[derive(Args)]
pub(crate) struct Verify {
    /// A checkpoint, a Hugging Face, torch or split folder, or a safetensors or GGUF file. Only
    /// checkpoints have sums; of the others headers, sizes and indices are checked.
    path: PathBuf,
    #[command(flatten)]
    select: Select,
}

/// What was looked at.
struct Verified {
    damaged: Vec<Error>,
    tensors: usize,
    bytes: usize,
    /// What could be checked, where that is less than every byte.
    less: Option<&'static str>,
}

impl Verify {
    pub(crate) fn run(&self, ui: &Ui) -> Answer {
        let kind = SourceFormat::of(&self.path)?;
        let found = match self.look(ui, kind) {
            Ok(found) => found,
            // That something is damaged is an answer, not a failure to answer.
            Err(error) if is_damage(&error) => Verified {
                damaged: vec![error],
                tensors: 0,
                bytes: 0,
                less: None,
            },
            Err(error) => return Err(error),
        };
        let Verified {
            damaged,
            tensors,
            bytes,
            less,
        } = found;
        let mut text = String::new();
        damaged
            .iter()
            .for_each(|error| text += &format!("{error}\n"));
        let verdict = if damaged.is_empty() {
            "0 damaged".to_string()
        } else {
            format!("{} damaged", damaged.len())
        };
        let what = if tensors == 0 {
            String::new()
        } else {
            format!("{}, {}: ", count(tensors, "tensor"), human(bytes))
        };
        text += &format!("{kind}, {what}{verdict}\n");
        if let Some(less) = less {
            text += &format!("{less}\n");
        }
        let errors: Vec<Value> = damaged.iter().map(damage).collect();
        let json = json!({
            "path": self.path, "kind": kind.to_string(), "whole": damaged.is_empty(), "damaged": errors, "tensors": tensors, "bytes": bytes, "sums": kind == SourceFormat::Checkpoint
        });
        Ok(Outcome {
            yes: damaged.is_empty(),
            text,
            json,
        })
    }

    fn look(&self, ui: &Ui, kind: SourceFormat) -> Result<Verified> {
        if kind == SourceFormat::Checkpoint {
            let checkpoint = Checkpoint::open(&self.path)?;
            let wanted = self.select.of(&checkpoint)?;
            let bytes = wanted.tensors().values().map(TensorInfo::bytes).sum();
            let bar = ui.bar("checking", bytes);
            let damaged = checkpoint
                .verify_with(&|name| wanted.tensors().contains_key(name), &mut |n| {
                    bar.inc(n as u64)
                });
            bar.finish_and_clear();
            return Ok(Verified {
                damaged,
                tensors: wanted.tensors().len(),
                bytes,
                less: None,
            });
        }
        let mut damaged = vec![];
        let (source, less): (Box<dyn Source>, _) = match kind {
            SourceFormat::HuggingFace => {
                let folder = hugging_face::Folder::open(&self.path)?;
                damaged.extend(folder.check_total().err());
                (
                    Box::new(folder),
                    "checked: headers, sizes and the index; not checked: values, since safetensors files have no sums",
                )
            }
            SourceFormat::Split => (
                Box::new(split::Folder::open(&self.path)?),
                "checked: headers, sizes, and that ranks hold the same where they should; not checked: other values, since safetensors files have no sums",
            ),
            SourceFormat::Torch => (
                open(&self.path)?,
                "checked: metadata and sizes; not checked: values, since torch folders have no sums",
            ),
            SourceFormat::Gguf => (
                open(&self.path)?,
                "checked: metadata and sizes; not checked: values, since GGUF files have no sums",
            ),
            _ => (
                open(&self.path)?,
                "checked: the header and sizes; not checked: values, since safetensors files have no sums",
            ),
        };
        let wanted = self.select.of(source.as_ref())?;
        if kind == SourceFormat::Split {
            let watched = ui.watch("comparing ranks", &wanted);
            damaged.extend(
                wanted
                    .tensors()
                    .keys()
                    .filter_map(|name| content_sum(&watched, name, 8 << 20).err()),
            );
        }
        let bytes = wanted.tensors().values().map(TensorInfo::bytes).sum();
        Ok(Verified {
            damaged,
            tensors: wanted.tensors().len() + wanted.foreign().len(),
            bytes,
            less: Some(less),
        })
    }
}

/// Whether an error says that something is not what it should be.
fn is_damage(error: &Error) -> bool {
    match error {
        Error::Format { .. } | Error::Damaged { .. } | Error::Index { .. } => true,
        // A file of a version that is not read here may be whole.
        Error::Gguf { defect, .. } => defect.is_damage(),
        // A whole file of another format is not damaged, only not what was meant.
        Error::OtherFormat { found, .. } => found.is_failed_download(),
        // A file that the checkpoint should have.
        Error::Io { path, .. } => !path.exists(),
        _ => false,
    }
}

fn damage(error: &Error) -> Value {
    let mut out = json!({"error": error.to_string()});
    match error {
        Error::Damaged {
            path,
            tensor,
            start,
            shape,
            offset,
        } => {
            (out["file"], out["tensor"]) = (json!(path), json!(tensor));
            (out["box"], out["offset"]) = (json!(format!("{start:?}+{shape:?}")), json!(offset));
        }
        Error::Index { path, tensor, .. } => {
            (out["file"], out["tensor"]) = (json!(path), json!(tensor))
        }
        Error::Gguf { path, offset, .. } => {
            (out["file"], out["offset"]) = (json!(path), json!(offset))
        }
        Error::Format { path, .. } | Error::OtherFormat { path, .. } | Error::Io { path, .. } => {
            out["file"] = json!(path)
        }
        _ => {}
    }
    out
}

/// Arguments of `ckpt diff`.
#[derive(Args)]
pub(crate) struct Diff {
    /// A checkpoint, a Hugging Face, torch or split folder, or a safetensors or GGUF file.
    left: PathBuf,
    /// Another one, of any format and layout.
    right: PathBuf,
    /// Compare values too, part by part.
    #[arg(long)]
    values: bool,
    #[command(flatten)]
    names: Names,
    #[command(flatten)]
    select: Select,
    #[command(flatten)]
    memory: Memory,
}

impl Diff {
    pub(crate) fn run(&self, ui: &Ui) -> Answer {
        let open = |path| Opened::model(path, &self.names);
        let (left, right) = (open(&self.left)?, open(&self.right)?);
        let (left, right) = (left.source(), right.source());
        let all: BTreeSet<&str> = left
            .tensors()
            .keys()
            .chain(right.tensors().keys())
            .map(String::as_str)
            .collect();
        let names = select(&all, &self.select.filter, &self.select.remove)?;
        let same = |name: &&&str| {
            left.tensors()
                .get(**name)
                .is_some_and(|a| right.tensors().get(**name) == Some(a))
        };
        let total = if self.values {
            names
                .iter()
                .filter(same)
                .map(|name| left.tensors()[*name].bytes())
                .sum()
        } else {
            0
        };
        let (chunk, watched) = (
            self.memory.chunk()?,
            ui.watch("comparing", left).expecting(total),
        );
        let (mut text, mut differences) = (String::new(), vec![]);
        for name in &names {
            let found = match (left.tensors().get(*name), right.tensors().get(*name)) {
                (Some(a), Some(b)) if a != b => {
                    let (a, b) = (
                        format!("{}{:?}", a.dtype, a.shape),
                        format!("{}{:?}", b.dtype, b.shape),
                    );
                    Some((
                        format!("{a} and {b}"),
                        json!({"what": "type", "left": a, "right": b}),
                    ))
                }
                (Some(_), None) => Some(("only in the first".into(), json!({"what": "only_left"}))),
                (None, _) => Some(("only in the second".into(), json!({"what": "only_right"}))),
                (Some(info), _) if self.values => {
                    values(&watched, right, name, info, chunk)?.map(|d| (d.text(info), d.json()))
                }
                _ => None,
            };
            if let Some((said, mut json)) = found {
                text += &format!("{name}: {said}\n");
                json["name"] = (*name).into();
                differences.push(json);
            }
        }
        drop(watched);
        let compared = if self.values {
            "names, types and values"
        } else {
            "names and types"
        };
        let verb = if names.len() == 1 {
            "differs"
        } else {
            "differ"
        };
        text += &format!(
            "{} of {} {verb} in {compared}\n",
            differences.len(),
            count(names.len(), "tensor")
        );
        let json = json!({"equal": differences.is_empty(), "compared": names.len(), "values": self.values, "differences": differences});
        Ok(Outcome {
            yes: json["equal"] == true,
            text,
            json,
        })
    }
}

/// How the elements of a tensor differ.
struct Difference {
    count: usize,
    /// Among those that are numbers on both sides.
    largest: f64,
    at: Vec<usize>,
    first: (f64, f64),
}

impl Difference {
    fn text(&self, info: &TensorInfo) -> String {
        let Self {
            count,
            largest,
            at,
            first: (a, b),
        } = self;
        format!(
            "{count} of {} elements, the largest difference is {largest:e}, the first at {at:?}: {a:?} and {b:?}",
            info.numel()
        )
    }

    fn json(&self) -> Value {
        // JSON has no infinities: those are text.
        let number = |x: f64| {
            if x.is_finite() {
                json!(x)
            } else {
                json!(x.to_string())
            }
        };
        let first =
            json!({"at": self.at, "left": number(self.first.0), "right": number(self.first.1)});
        json!({"what": "values", "elements": self.count, "largest": number(self.largest), "first": first})
    }
}

/// How the elements of one tensor differ in two sources; bits that differ count, also of NaNs.
fn values(
    left: &dyn Source,
    right: &dyn Source,
    name: &str,
    info: &TensorInfo,
    chunk: usize,
) -> Result<Option<Difference>> {
    let size = info.dtype.size();
    let mut found: Option<Difference> = None;
    let (mut a, mut b) = (vec![], vec![]);
    for part in info.slabs(chunk) {
        a.resize(part.numel() * size, 0);
        b.resize(part.numel() * size, 0);
        left.read(name, &part, &mut a)?;
        right.read(name, &part, &mut b)?;
        if a == b {
            continue;
        }
        for (i, (x, y)) in a
            .chunks_exact(size)
            .zip(b.chunks_exact(size))
            .enumerate()
            .filter(|(_, (x, y))| x != y)
        {
            let (x, y) = (number(x, info.dtype), number(y, info.dtype));
            let found = found.get_or_insert_with(|| Difference {
                count: 0,
                largest: 0.0,
                at: index(&part, i),
                first: (x, y),
            });
            found.count += 1;
            found.largest = found.largest.max((x - y).abs());
        }
    }
    Ok(found)
}

/// The index in the tensor of the `i`th element of a region.
fn index(part: &Region, mut i: usize) -> Vec<usize> {
    let mut at = part.start.to_vec();
    for d in (0..at.len()).rev() {
        at[d] += i % part.shape[d];
        i /= part.shape[d];
    }
    at
}

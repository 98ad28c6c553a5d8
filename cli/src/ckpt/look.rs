//! Commands that read.

use super::{Answer, human};
use anymesh::{
    DType, Region, bf16,
    checkpoint::{Checkpoint, Result, Source, TensorInfo, manifest, matches, open},
    f16,
};
use clap::Args;
use serde_json::{Value, json};
use std::{collections::BTreeSet, path::PathBuf};

/// Arguments of `ckpt inspect`.
#[derive(Args)]
pub(crate) struct Inspect {
    /// A checkpoint, Hugging Face or torch folder, or a safetensors file.
    path: PathBuf,
    /// Only tensors whose names match; `*` stands for anything.
    #[arg(long, default_value = "*")]
    filter: String,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

impl Inspect {
    pub(crate) fn run(&self) -> Answer {
        if !self.path.join(manifest::NAME).exists() {
            let source = open(&self.path)?;
            return self.print(source.as_ref(), None);
        }
        let checkpoint = Checkpoint::open(&self.path)?;
        self.print(&checkpoint, Some(checkpoint.manifest()))
    }

    fn print(&self, source: &dyn Source, manifest: Option<&manifest::Manifest>) -> Answer {
        let stored = |name: &str| manifest.and_then(|m| m.tensors.get(name));
        let layout = |name: &str, info: &TensorInfo| stored(name).map_or_else(|| format!("{}{:?}", info.dtype, info.shape), |s| s.layout.clone());
        let shown: Vec<(&String, &TensorInfo)> = source.tensors().iter().filter(|(name, _)| matches(&self.filter, name)).collect();
        let total: usize = shown.iter().map(|(_, info)| info.bytes()).sum();
        if self.json {
            let tensor = |(name, info): &(&String, &TensorInfo)| {
                let boxes = stored(name).map_or(1, |s| s.boxes.len());
                json!({"name": name, "dtype": info.dtype.name(), "shape": info.shape, "layout": layout(name, info), "bytes": info.bytes(), "boxes": boxes})
            };
            let tensors: Vec<Value> = shown.iter().map(tensor).collect();
            let mut out = json!({"tensors": tensors, "bytes": total});
            if let Some(m) = manifest {
                out["step"] = m.step.into();
                out["mesh"] = json!(m.mesh);
                out["state"] = Value::Object(m.state.clone());
            }
            println!("{out:#}");
            return Ok(true);
        }
        let width = shown.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        for (name, info) in &shown {
            let boxes = stored(name).map_or(String::new(), |s| format!("  {} boxes", s.boxes.len()));
            println!("{name:width$}  {:32}  {:>10}{boxes}", layout(name, info), human(info.bytes()));
        }
        println!("{} tensors, {}", shown.len(), human(total));
        if let Some(m) = manifest {
            let axes: Vec<String> = m.mesh.iter().map(|(name, size)| format!("{name}={size}")).collect();
            let from = if axes.is_empty() { "one device".into() } else { axes.join(", ") };
            println!("step {}, saved from {from}, {} files", m.step, m.files.len());
            m.state.iter().for_each(|(key, value)| println!("  {key}: {value}"));
        }
        Ok(true)
    }
}

/// Arguments of `ckpt verify`.
#[derive(Args)]
pub(crate) struct Verify {
    /// A checkpoint folder.
    path: PathBuf,
}

impl Verify {
    pub(crate) fn run(&self) -> Answer {
        let checkpoint = Checkpoint::open(&self.path)?;
        let wrong = checkpoint.verify();
        wrong.iter().for_each(|error| println!("{error}"));
        let total: usize = checkpoint.tensors().values().map(TensorInfo::bytes).sum();
        println!("{} tensors, {}: {} damaged", checkpoint.tensors().len(), human(total), wrong.len());
        Ok(wrong.is_empty())
    }
}

/// Arguments of `ckpt diff`.
#[derive(Args)]
pub(crate) struct Diff {
    /// A checkpoint, Hugging Face or torch folder, or a safetensors file.
    left: PathBuf,
    /// Another one.
    right: PathBuf,
    /// Compare values too, part by part.
    #[arg(long)]
    values: bool,
}

impl Diff {
    pub(crate) fn run(&self) -> Answer {
        let (left, right) = (open(&self.left)?, open(&self.right)?);
        let names: BTreeSet<&String> = left.tensors().keys().chain(right.tensors().keys()).collect();
        let mut different = 0;
        for name in &names {
            let what = match (left.tensors().get(*name), right.tensors().get(*name)) {
                (Some(a), Some(b)) if a != b => Some(format!("{}{:?} and {}{:?}", a.dtype, a.shape, b.dtype, b.shape)),
                (Some(_), None) => Some("only in the first".into()),
                (None, _) => Some("only in the second".into()),
                (Some(info), _) if self.values => values(left.as_ref(), right.as_ref(), name, info)?,
                _ => None,
            };
            if let Some(what) = what {
                println!("{name}: {what}");
                different += 1;
            }
        }
        let compared = if self.values { "names, types and values" } else { "names and types" };
        println!("{different} of {} tensors differ in {compared}", names.len());
        Ok(different == 0)
    }
}

/// Bytes that are compared at once.
const PART: usize = 16 << 20;

/// How the elements of one tensor differ in two sources.
fn values(left: &dyn Source, right: &dyn Source, name: &str, info: &TensorInfo) -> Result<Option<String>> {
    let size = info.dtype.size();
    let (mut count, mut largest, mut first) = (0usize, 0.0f64, None);
    for part in parts(info, PART) {
        let (mut a, mut b) = (vec![0; part.numel() * size], vec![0; part.numel() * size]);
        left.read(name, &part, &mut a)?;
        right.read(name, &part, &mut b)?;
        if a == b {
            continue;
        }
        for (i, (x, y)) in a.chunks_exact(size).zip(b.chunks_exact(size)).enumerate().filter(|(_, (x, y))| x != y) {
            count += 1;
            largest = largest.max((number(x, info.dtype) - number(y, info.dtype)).abs());
            first.get_or_insert_with(|| format!("at {i} of the part from {:?}: {} and {}", part.start.to_vec(), number(x, info.dtype), number(y, info.dtype)));
        }
    }
    Ok(first.map(|first| format!("{count} of {} elements, the largest difference is {largest:e}, first {first}", info.numel())))
}

/// A tensor in parts of about so many bytes, cut along its first dimension.
fn parts(info: &TensorInfo, largest: usize) -> Vec<Region> {
    let whole = info.whole();
    let Some(&rows) = info.shape.first().filter(|_| info.bytes() > largest) else { return vec![whole] };
    let step = (largest / (info.bytes() / rows).max(1)).max(1);
    let part = |start: usize| {
        let mut part = whole.clone();
        part.start[0] = start;
        part.shape[0] = step.min(rows - start);
        part
    };
    (0..rows).step_by(step).map(part).collect()
}

/// A stored element as a number.
fn number(bytes: &[u8], dtype: DType) -> f64 {
    let word = |n: usize| {
        let mut word = [0; 8];
        word[..n].copy_from_slice(&bytes[..n]);
        u64::from_le_bytes(word)
    };
    match dtype {
        DType::F64 => f64::from_bits(word(8)),
        DType::F32 => f32::from_bits(word(4) as u32).into(),
        DType::F16 => f16::from_bits(word(2) as u16).into(),
        DType::BF16 => bf16::from_bits(word(2) as u16).into(),
        DType::F8E4M3 => anymesh::F8E4M3(bytes[0]).to_f32().into(),
        DType::F8E5M2 => anymesh::F8E5M2(bytes[0]).to_f32().into(),
        DType::I64 => word(8) as i64 as f64,
        DType::I32 => f64::from(word(4) as u32 as i32),
        DType::U32 => word(4) as f64,
        DType::U8 | DType::Bool => f64::from(bytes[0]),
    }
}

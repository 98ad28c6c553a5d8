//! `ckpt inspect`.

use super::{
    Answer, Outcome, count, gguf, human,
    input::{Opened, Select},
    memory::Memory,
    tree::{self, Row},
    ui::Ui,
};
use crate::picture::PictureArgs;
use anymesh::{
    checkpoint::{Source, SourceFormat, TensorInfo, content_sum},
    show::{Inventory, Show, StoredTensor},
};
use clap::Args;
use serde_json::{Value, json};
use std::{collections::BTreeMap, path::PathBuf};

/// Arguments of `ckpt inspect`.
#[derive(Args)]
pub(crate) struct Inspect {
    /// A checkpoint, a Hugging Face, torch or split folder, or a safetensors or GGUF file.
    path: PathBuf,
    #[command(flatten)]
    select: Select,
    /// Print a sum of what each tensor holds: the same for equal tensors, however they are laid out
    /// and in whatever format. Reads everything.
    #[arg(long)]
    sums: bool,
    /// Show every numbered layer, also those that are alike.
    #[arg(long)]
    all: bool,
    /// List whole names instead of a tree.
    #[arg(long)]
    flat: bool,
    #[command(flatten)]
    picture: PictureArgs,
    #[command(flatten)]
    memory: Memory,
}

impl Inspect {
    pub(crate) fn run(&self, ui: &Ui) -> Answer {
        let from = Opened::open(&self.path)?;
        let shown = self.select.of(from.source())?;
        let mut sums = BTreeMap::new();
        if self.sums {
            let (chunk, watched) = (self.memory.chunk()?, ui.watch("summing", &shown));
            for name in shown.tensors().keys() {
                sums.insert(name.clone(), content_sum(&watched, name, chunk)?);
            }
        }
        if self
            .picture
            .write(|| vec![self.inventory(&from, &shown, &sums).figure()])?
        {
            return Ok(Outcome::shown());
        }
        let text = if ui.json {
            String::new()
        } else {
            self.text(&from, &shown, &sums)
        };
        Ok(Outcome::done(text, self.json(&from, &shown, &sums)?))
    }

    fn json(
        &self,
        from: &Opened,
        shown: &dyn Source,
        sums: &BTreeMap<String, String>,
    ) -> anymesh::checkpoint::Result<Value> {
        let tensor = |(name, info): (&String, &TensorInfo)| {
            let mut tensor = json!({"name": name, "dtype": info.dtype.name(), "shape": info.shape, "layout": layout(from, name, info), "bytes": info.bytes()});
            if let Some(stored) = stored(from, name) {
                tensor["boxes"] = stored.regions.len().into();
            }
            if let Some(file) = from.gguf() {
                gguf::describe(file, name, &mut tensor);
            }
            if let Some(sum) = sums.get(name) {
                tensor["sum"] = sum.as_str().into();
            }
            tensor
        };
        let tensors: Vec<Value> = shown.tensors().iter().map(tensor).collect();
        let foreign: Vec<Value> = shown
            .foreign()
            .into_iter()
            .map(|(name, dtype)| json!({"name": name, "dtype": dtype}))
            .collect();
        let kind = SourceFormat::of(&self.path)?.to_string();
        let mut out = json!({"path": self.path, "kind": kind, "tensors": tensors, "foreign": foreign, "bytes": total(shown)});
        if let Some(m) = from.manifest() {
            (out["step"], out["mesh"], out["files"]) =
                (m.step.into(), json!(m.mesh), json!(m.files));
            out["state"] = Value::Object(m.state.clone());
        }
        if let Some(file) = from.gguf() {
            gguf::metadata(file, &mut out);
        }
        Ok(out)
    }

    /// The same for a picture or a page.
    fn inventory(
        &self,
        from: &Opened,
        shown: &dyn Source,
        sums: &BTreeMap<String, String>,
    ) -> Inventory {
        let mut held = from
            .manifest()
            .map_or_else(Inventory::default, Inventory::from);
        if held.title.is_empty() {
            held.title = self.path.display().to_string();
        }
        let tensor = |(name, info): (&String, &TensorInfo)| {
            let kind = from.gguf().and_then(|file| file.tensor_type(name));
            let stored = stored(from, name);
            StoredTensor {
                name: name.clone(),
                dtype: kind.map_or(info.dtype.name(), |kind| kind.name()).into(),
                shape: info.shape.clone(),
                layout: stored.map_or(String::new(), |s| s.layout.clone()),
                bytes: info.bytes() as u64,
                pieces: stored.map_or(0, |s| s.regions.len()),
            }
        };
        held.tensors = shown.tensors().iter().map(tensor).collect();
        for (name, dtype) in shown.foreign() {
            held.facts
                .push((name, format!("{dtype}, which cannot be read here")));
        }
        for (name, sum) in sums {
            held.facts.push((format!("sum of {name}"), sum.clone()));
        }
        held
    }

    fn text(&self, from: &Opened, shown: &dyn Source, sums: &BTreeMap<String, String>) -> String {
        let row = |name: &String, info: &TensorInfo| {
            let how = match from.gguf().and_then(|file| file.tensor_type(name)) {
                Some(kind) => kind.name().to_string(),
                None => {
                    stored(from, name).map_or(String::new(), |s| count(s.regions.len(), "region"))
                }
            };
            let mut more = vec![how];
            more.extend(sums.get(name).cloned());
            Row {
                layout: layout(from, name, info),
                bytes: info.bytes(),
                more,
            }
        };
        let mut out = if self.flat {
            let line = |(name, info)| {
                let row: Row = row(name, info);
                [vec![name.clone(), row.layout, human(row.bytes)], row.more].concat()
            };
            tree::table(&shown.tensors().iter().map(line).collect::<Vec<_>>())
        } else {
            // Layers have sums of their own, so none are alike.
            tree::draw(
                shown
                    .tensors()
                    .iter()
                    .map(|(name, info)| (name.as_str(), row(name, info))),
                !self.all && !self.sums,
            )
        };
        for (name, dtype) in shown.foreign() {
            out += &format!("{name}  {dtype}, which cannot be read here\n");
        }
        out += &format!(
            "{}, {}\n",
            count(shown.tensors().len(), "tensor"),
            human(total(shown))
        );
        if let Some(m) = from.manifest() {
            let axes: Vec<String> = m
                .mesh
                .iter()
                .map(|(name, size)| format!("{name}={size}"))
                .collect();
            let mesh = if axes.is_empty() {
                "one device".into()
            } else {
                axes.join(", ")
            };
            out += &format!(
                "step {}, saved from {mesh}, {}\n",
                m.step,
                count(m.files.len(), "file")
            );
            m.state
                .iter()
                .for_each(|(key, value)| out += &format!("  {key}: {value}\n"));
        }
        out += &from.gguf().map(gguf::metadata_text).unwrap_or_default();
        out
    }
}

fn total(source: &dyn Source) -> usize {
    source.tensors().values().map(TensorInfo::bytes).sum()
}

fn stored<'m>(from: &'m Opened, name: &str) -> Option<&'m anymesh::checkpoint::manifest::Stored> {
    from.manifest().and_then(|m| m.tensors.get(name))
}

/// Dtype, shape and, where it is known, sharding.
fn layout(from: &Opened, name: &str, info: &TensorInfo) -> String {
    stored(from, name).map_or_else(
        || format!("{}{:?}", info.dtype, info.shape),
        |s| s.layout.clone(),
    )
}

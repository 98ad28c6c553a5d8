//! What commands read: a source, which of its tensors, and how they lie.

use super::wrong;
use anymesh::{
    IntoSharding, Mesh, Sharding,
    checkpoint::{
        Checkpoint, Kind, Result, Source, TensorInfo, Without, manifest::Manifest, matches, open,
        plan::Placed,
    },
    meta,
};
use clap::Args;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

/// Something that holds tensors.
pub(crate) enum Opened {
    /// A checkpoint of ours.
    Checkpoint(Checkpoint),
    /// Another format.
    Other(Box<dyn Source>),
}

impl Opened {
    /// Opens what is at a path.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        Ok(match Kind::of(path)? {
            Kind::Checkpoint => Self::Checkpoint(Checkpoint::open(path)?),
            _ => Self::Other(open(path)?),
        })
    }

    pub(crate) fn source(&self) -> &dyn Source {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint,
            Self::Other(source) => source.as_ref(),
        }
    }

    pub(crate) fn manifest(&self) -> Option<&Manifest> {
        match self {
            Self::Checkpoint(checkpoint) => Some(checkpoint.manifest()),
            Self::Other(_) => None,
        }
    }
}

/// Which tensors.
#[derive(Args)]
pub(crate) struct Select {
    /// Keep only tensors whose names match; `*` stands for anything. May be given several times.
    #[arg(long, value_name = "NAMES")]
    pub(crate) filter: Vec<String>,
    /// Leave out tensors whose names match; `*` stands for anything. May be given several times.
    #[arg(long, value_name = "NAMES")]
    pub(crate) remove: Vec<String>,
}

impl Select {
    pub(crate) fn of<'s>(&self, source: &'s dyn Source) -> Result<Without<'s>> {
        Without::selected(source, &self.filter, &self.remove)
    }
}

/// Rules of how tensors lie: patterns of names with shardings, of which the first that matches
/// counts.
pub(crate) struct Rules<'r> {
    mesh: Mesh,
    rules: Vec<(&'r str, &'r str)>,
    used: Vec<bool>,
}

impl<'r> Rules<'r> {
    pub(crate) fn new(mesh: &str, layouts: &'r [String]) -> Result<Self> {
        let mesh = Mesh::new(mesh, &meta()).map_err(|e| {
            wrong(format!(
                "--mesh {mesh}: {e}; write axes and sizes, such as dp=2,tp=4"
            ))
        })?;
        let rule = |layout: &'r String| {
            layout.split_once('=').ok_or_else(|| {
                wrong(format!(
                    "'{layout}' is no layout: write NAMES=SHARDING, such as \"*.weight=[@tp, _]\""
                ))
            })
        };
        let rules: Vec<_> = layouts.iter().map(rule).collect::<Result<_>>()?;
        let used = vec![false; rules.len()];
        Ok(Self { mesh, rules, used })
    }

    pub(crate) fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// How a tensor of so many dimensions lies.
    pub(crate) fn sharding(&mut self, name: &str, rank: usize) -> Result<Sharding> {
        let Some(at) = self
            .rules
            .iter()
            .position(|(pattern, _)| matches(pattern, name))
        else {
            return Ok(Sharding::replicated());
        };
        self.used[at] = true;
        let (pattern, text) = self.rules[at];
        text.into_sharding(&self.mesh, rank).map_err(|e| {
            let first = format!(
                "@{}",
                self.mesh.axes().first().map_or("x", |(name, _)| name)
            );
            let example = std::iter::once(first.as_str())
                .chain(std::iter::repeat("_"))
                .take(rank)
                .collect::<Vec<_>>()
                .join(", ");
            let hint = match rank {
                0 => "it has no dimensions to cut: give a pattern that does not match it".into(),
                _ => format!("write an entry for each of its dimensions, such as [{example}]"),
            };
            wrong(format!(
                "--layout \"{pattern}={text}\" does not fit tensor '{name}': {e}; {hint}"
            ))
        })
    }

    /// How all tensors of a source lie.
    pub(crate) fn place(&mut self, source: &dyn Source) -> Result<BTreeMap<String, Placed>> {
        let mut layout = BTreeMap::new();
        for (name, info) in source.tensors() {
            let sharding = self.sharding(name, info.shape.len())?;
            layout.insert(
                name.clone(),
                Placed::new(info.clone(), &self.mesh, sharding),
            );
        }
        self.all_used()?;
        Ok(layout)
    }

    /// A rule that was never used is a typing mistake.
    pub(crate) fn all_used(&self) -> Result<()> {
        match self.rules.iter().zip(&self.used).find(|(_, used)| !**used) {
            Some(((pattern, text), _)) => Err(wrong(format!(
                "--layout \"{pattern}={text}\" matches no tensor, or only tensors that a layout before it matches"
            ))),
            None => Ok(()),
        }
    }
}

/// All tensors whole, on one device.
pub(crate) fn whole(source: &dyn Source) -> Result<BTreeMap<String, Placed>> {
    let mesh = Mesh::new("x=1", &meta())?;
    let placed = |info: &TensorInfo| Placed::new(info.clone(), &mesh, Sharding::replicated());
    Ok(source
        .tensors()
        .iter()
        .map(|(name, info)| (name.clone(), placed(info)))
        .collect())
}

/// The folder above a path.
pub(crate) fn above(path: &Path) -> PathBuf {
    path.parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
        .into()
}

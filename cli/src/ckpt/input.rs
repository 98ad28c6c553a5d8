//! What commands read: a source, which of its tensors, and how they lie.

use super::{
    gguf::{Names, is_known},
    wrong,
};
use anymesh::{
    Mesh, Sharding,
    checkpoint::{
        Checkpoint, Error, Layouts, Result, Source, SourceFormat, TensorInfo, Without, gguf,
        manifest::Manifest, open, plan::Placed,
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
    /// A GGUF file under its own names.
    Gguf(gguf::File),
    /// A GGUF file under Hugging Face's names.
    Model(gguf::Model),
    /// Another format.
    Other(Box<dyn Source>),
}

impl Opened {
    /// Opens what is at a path, as it is.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        Ok(match SourceFormat::of(path)? {
            SourceFormat::Checkpoint => Self::Checkpoint(Checkpoint::open(path)?),
            SourceFormat::Gguf => Self::Gguf(gguf::File::open(path)?),
            _ => Self::Other(open(path)?),
        })
    }

    /// Opens what is at a path as a model: a GGUF file under Hugging Face's names, where they are
    /// known and wanted.
    pub(crate) fn model(path: &Path, names: &Names) -> Result<Self> {
        Ok(match Self::open(path)? {
            Self::Gguf(file) if !names.raw_names && is_known(&file) => {
                let hint = |error| match error {
                    Error::GgufModel { path, item, detail } => {
                        let detail = match detail.ends_with("under its own names") {
                            true => format!("{detail} (--raw-names)"),
                            false => format!("{detail}; --raw-names takes the tensors as they are"),
                        };
                        Error::GgufModel { path, item, detail }
                    }
                    other => other,
                };
                Self::Model(gguf::Model::new(file).map_err(hint)?)
            }
            other => other,
        })
    }

    pub(crate) fn source(&self) -> &dyn Source {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint,
            Self::Gguf(file) => file,
            Self::Model(model) => model,
            Self::Other(source) => source.as_ref(),
        }
    }

    pub(crate) fn manifest(&self) -> Option<&Manifest> {
        match self {
            Self::Checkpoint(checkpoint) => Some(checkpoint.manifest()),
            _ => None,
        }
    }

    /// The GGUF file, if it is one.
    pub(crate) fn gguf(&self) -> Option<&gguf::File> {
        match self {
            Self::Gguf(file) => Some(file),
            Self::Model(model) => Some(model.file()),
            _ => None,
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

/// The layouts of `--layout` on the mesh of `--mesh`.
pub(crate) fn layouts(mesh: &str, layouts: &[String]) -> Result<Layouts> {
    let mesh = Mesh::new(mesh, &meta()).map_err(|e| {
        wrong(format!(
            "--mesh {mesh}: {e}; write axes and sizes, such as dp=2,tp=4"
        ))
    })?;
    Layouts::new(&mesh, layouts)
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

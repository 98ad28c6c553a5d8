//! How the tensors of a model lie on a mesh, in a few lines: patterns of names with shardings.

use crate::{
    Error, Result, Source,
    names::{examples, matches},
    plan::Placed,
};
use anymesh_core::{Mesh, Sharding, ShardingSpec};
use std::collections::BTreeMap;

/// Layouts such as `*.weight=[@tp, _]`: which tensors lie on a mesh how.
///
/// A layout is for tensors whose names match (`*` stands for anything) and that have as many
/// dimensions as its sharding has entries; `...` in it stands for any number of uncut ones. Of
/// several that are for a tensor, the first counts; a tensor that none is for is replicated. A
/// layout that is for no tensor is an error, since it is a typing mistake.
///
/// ```
/// # use anymesh_checkpoint::{Layouts, Memory, TensorInfo};
/// # use anymesh_core::{DType, Mesh, meta};
/// let mut model = Memory::default();
/// for (name, shape) in [
///     ("embed.weight", vec![32, 8]),
///     ("layers.0.norm.weight", vec![8]),
///     ("layers.0.up.weight", vec![16, 8]),
///     ("layers.0.up.bias", vec![16]),
/// ] {
///     let info = TensorInfo { dtype: DType::U8, shape };
///     model.insert(name, info.clone(), vec![0; info.bytes()])?;
/// }
/// let mesh = Mesh::new("dp=2, tp=4", &meta())?;
/// let layouts = Layouts::new(&mesh, ["*.up.*=[@tp, ...]", "*.weight=[@tp, @dp]"])?;
/// let placed = layouts.place(&model)?;
/// assert_eq!(placed["layers.0.up.weight"].layout(), "u8[16@tp, 8]");
/// assert_eq!(placed["layers.0.up.bias"].layout(), "u8[16@tp]");
/// assert_eq!(placed["embed.weight"].layout(), "u8[32@tp, 8@dp]");
/// assert_eq!(placed["layers.0.norm.weight"].layout(), "u8[8]");
/// # Ok::<(), anymesh_checkpoint::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Layouts {
    mesh: Mesh,
    layouts: Vec<Layout>,
}

/// One of them.
#[derive(Clone, Debug)]
struct Layout {
    /// As it was written.
    text: String,
    pattern: String,
    sharding: ShardingSpec,
}

impl Layout {
    fn error(&self, detail: impl Into<String>) -> Error {
        Error::Layout {
            layout: self.text.clone(),
            detail: detail.into(),
        }
    }

    fn new(text: &str, mesh: &Mesh) -> Result<Self> {
        let wrong = |detail: String| Error::Layout {
            layout: text.into(),
            detail,
        };
        let first = mesh.axes().first().map_or("x", |(name, _)| name);
        let example = format!("write NAMES=SHARDING, such as \"*.weight=[@{first}, _]\"");
        let (pattern, sharding) = text
            .rsplit_once('=')
            .ok_or_else(|| wrong(format!("is no layout: {example}")))?;
        if !(sharding.contains('[') && sharding.contains(']')) {
            return Err(wrong(format!("has no sharding in brackets: {example}")));
        }
        let unreadable = |e: anymesh_core::Error| {
            let axes: Vec<&str> = mesh.axes().iter().map(|(name, _)| name.as_str()).collect();
            let axes = axes.join(", @");
            wrong(format!(
                "cannot be read: {e}; the axes are @{axes}: {example}"
            ))
        };
        let sharding: ShardingSpec = sharding.parse().map_err(unreadable)?;
        // Axes that the mesh does not have are wrong for every tensor.
        let least = sharding.on(mesh, *sharding.ranks().start());
        let is_partial = least.map_err(unreadable)?.is_partial();
        let layout = Self {
            text: text.into(),
            pattern: pattern.into(),
            sharding,
        };
        if is_partial {
            return Err(layout.error("asks for partial values, which are not stored"));
        }
        Ok(layout)
    }
}

/// What became of a layout when all tensors were looked at.
#[derive(Clone, Default)]
struct Use {
    /// Tensors that lie so.
    tensors: usize,
    /// Tensors that would, had a layout before it not been for them.
    taken: usize,
    /// Tensors whose names match and that have another number of dimensions.
    other_ranks: Vec<(String, usize)>,
}

impl Layouts {
    /// Reads layouts, each `NAMES=SHARDING`, for a mesh.
    pub fn new<T: AsRef<str>>(mesh: &Mesh, layouts: impl IntoIterator<Item = T>) -> Result<Self> {
        Ok(Self {
            mesh: mesh.clone(),
            layouts: layouts
                .into_iter()
                .map(|text| Layout::new(text.as_ref(), mesh))
                .collect::<Result<_>>()?,
        })
    }

    /// The mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// How tensors lie, each given by its name and its number of dimensions.
    pub fn shardings<'n>(
        &self,
        tensors: impl IntoIterator<Item = (&'n str, usize)>,
    ) -> Result<BTreeMap<String, Sharding>> {
        let mut uses = vec![Use::default(); self.layouts.len()];
        let mut out = BTreeMap::new();
        for (name, rank) in tensors {
            let mut chosen = None;
            for (layout, found) in self.layouts.iter().zip(&mut uses) {
                if !matches(&layout.pattern, name) {
                    continue;
                }
                if !layout.sharding.ranks().contains(&rank) {
                    found.other_ranks.push((name.into(), rank));
                } else if chosen.is_some() {
                    found.taken += 1;
                } else {
                    found.tensors += 1;
                    let sharding = layout.sharding.on(&self.mesh, rank);
                    chosen =
                        Some(sharding.map_err(|e| {
                            layout.error(format!("does not fit tensor '{name}': {e}"))
                        })?);
                }
            }
            out.insert(name.into(), chosen.unwrap_or_default());
        }
        for (layout, found) in self.layouts.iter().zip(uses) {
            if found.tensors == 0 {
                return Err(layout.error(unused(layout, &found, out.keys())));
            }
        }
        Ok(out)
    }

    /// How all tensors of a source lie.
    pub fn place(&self, source: &dyn Source) -> Result<BTreeMap<String, Placed>> {
        let tensors = source.tensors();
        let ranks = tensors
            .iter()
            .map(|(name, info)| (name.as_str(), info.shape.len()));
        let mut shardings = self.shardings(ranks)?;
        Ok(tensors
            .iter()
            .map(|(name, info)| {
                let sharding = shardings.remove(name).unwrap_or_default();
                let placed = Placed::new(info.clone(), &self.mesh, sharding);
                (name.clone(), placed)
            })
            .collect())
    }
}

/// Why no tensor has a use for a layout, and what to do.
fn unused<'n>(layout: &Layout, found: &Use, names: impl Iterator<Item = &'n String>) -> String {
    let dimensions = |n: usize| format!("{n} dimension{}", if n == 1 { "" } else { "s" });
    if found.taken > 0 {
        return "matches only tensors that a layout before it matches: put it first".into();
    }
    let Some((name, rank)) = found.other_ranks.first() else {
        let names = examples(names.map(String::as_str));
        return format!("matches no tensor: {names}; `*` stands for anything");
    };
    let (least, most) = layout.sharding.ranks().into_inner();
    let wanted = if least == most {
        dimensions(least)
    } else {
        format!("at least {}", dimensions(least))
    };
    let hint = if least == most {
        "; `...` stands for any number of uncut dimensions"
    } else {
        ""
    };
    format!(
        "is for tensors of {wanted}, and none of the {} whose names match is one: '{name}' has {rank}{hint}",
        found.other_ranks.len()
    )
}

//! A part of a source.

use crate::{Error, Result, Source, TensorInfo, load::matches, source::find};
use anymesh_core::Region;
use std::collections::{BTreeMap, BTreeSet};

/// A source without some of its tensors, such as a checkpoint to be written again without its
/// optimizer state.
#[derive(Clone)]
pub struct Without<'s> {
    source: &'s dyn Source,
    tensors: BTreeMap<String, TensorInfo>,
    removed: BTreeSet<String>,
}

impl std::fmt::Debug for Without<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Without")
            .field("tensors", &self.tensors)
            .field("removed", &self.removed)
            .finish_non_exhaustive()
    }
}

impl<'s> Without<'s> {
    /// Leaves out the tensors with these names, each of which must be there. Tensors of foreign
    /// types can be left out too.
    pub fn new(source: &'s dyn Source, names: &[&str]) -> Result<Self> {
        let foreign = source.foreign();
        for name in names {
            if !foreign.iter().any(|(other, _)| other == name) {
                find(source.tensors(), name)?;
            }
        }
        Ok(Self::removing(
            source,
            names.iter().map(|name| name.to_string()).collect(),
        ))
    }

    /// Keeps the tensors that one of the patterns of `keep` matches (all where there is none) and
    /// none of `remove` does; `*` stands for anything. Tensors of foreign types too. A pattern that
    /// matches nothing is an error, since it is a typing mistake.
    ///
    /// ```
    /// # use anymesh_checkpoint::{Memory, Source, TensorInfo, Without};
    /// # use anymesh_core::DType;
    /// let mut source = Memory::default();
    /// for name in ["a.weight", "a.moment", "b.weight"] {
    ///     source.insert(name, TensorInfo { dtype: DType::U8, shape: vec![1] }, vec![0])?;
    /// }
    /// let part = Without::selected(&source, &["a.*"], &["*.moment"])?;
    /// assert_eq!(part.tensors().keys().collect::<Vec<_>>(), ["a.weight"]);
    /// assert!(Without::selected(&source, &["c.*"], &[]).is_err());
    /// # Ok::<(), anymesh_checkpoint::Error>(())
    /// ```
    pub fn selected<T: AsRef<str>>(
        source: &'s dyn Source,
        keep: &[T],
        remove: &[T],
    ) -> Result<Self> {
        let foreign: Vec<String> = source.foreign().into_iter().map(|(name, _)| name).collect();
        let names: BTreeSet<&str> = source
            .tensors()
            .keys()
            .chain(&foreign)
            .map(String::as_str)
            .collect();
        let kept = select(&names, keep, remove)?;
        Ok(Self::removing(
            source,
            names
                .difference(&kept)
                .map(|name| name.to_string())
                .collect(),
        ))
    }

    fn removing(source: &'s dyn Source, removed: BTreeSet<String>) -> Self {
        let tensors = source
            .tensors()
            .iter()
            .filter(|(name, _)| !removed.contains(*name))
            .map(|(name, info)| (name.clone(), info.clone()))
            .collect();
        Self {
            source,
            tensors,
            removed,
        }
    }
}

/// The names that one of the patterns of `keep` matches (all where there is none) and none of
/// `remove` does; `*` stands for anything. A pattern that matches nothing is an error, and so are
/// patterns that leave nothing.
pub fn select<'n, T: AsRef<str>>(
    names: &BTreeSet<&'n str>,
    keep: &[T],
    remove: &[T],
) -> Result<BTreeSet<&'n str>> {
    let any = |patterns: &[T], name: &str| {
        patterns
            .iter()
            .any(|pattern| matches(pattern.as_ref(), name))
    };
    for pattern in keep.iter().chain(remove).map(AsRef::as_ref) {
        if !names.iter().any(|name| matches(pattern, name)) {
            let some: Vec<&str> = names.iter().take(3).copied().collect();
            let there = if some.is_empty() {
                "there are no tensors".into()
            } else {
                format!("names are such as '{}'", some.join("', '"))
            };
            return Err(Error::Argument(format!(
                "'{pattern}' matches no tensor: {there}; `*` stands for anything"
            )));
        }
    }
    let left: BTreeSet<&str> = names
        .iter()
        .copied()
        .filter(|name| (keep.is_empty() || any(keep, name)) && !any(remove, name))
        .collect();
    if left.is_empty() && !names.is_empty() {
        return Err(Error::Argument(
            "no tensor is left: what is kept is removed too".into(),
        ));
    }
    Ok(left)
}

impl Source for Without<'_> {
    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    fn foreign(&self) -> Vec<(String, String)> {
        self.source
            .foreign()
            .into_iter()
            .filter(|(name, _)| !self.removed.contains(name))
            .collect()
    }

    fn info(&self, name: &str) -> Result<&TensorInfo> {
        if self.removed.contains(name) {
            find(&self.tensors, name)
        } else {
            self.source.info(name)
        }
    }

    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()> {
        self.info(name)?;
        self.source.read(name, region, out)
    }

    fn read_many(&self, name: &str, boxes: &mut [(Region, Vec<u8>)]) -> Result<()> {
        self.info(name)?;
        self.source.read_many(name, boxes)
    }
}

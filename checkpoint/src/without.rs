//! A part of a source.

use crate::{Result, Source, TensorInfo, names::select, source::find};
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

    fn read_many(&self, name: &str, regions: &mut [(Region, Vec<u8>)]) -> Result<()> {
        self.info(name)?;
        self.source.read_many(name, regions)
    }
}

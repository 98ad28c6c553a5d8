//! Anything that holds tensors and can be read region by region.

use crate::{Error, Result, TensorInfo, regions::copy_region};
use anymesh_core::Region;
use std::{collections::BTreeMap, ops::Deref};

/// Anything that holds tensors and can be read region by region, from several threads at once.
pub trait Source: Send + Sync {
    /// The tensors by name.
    fn tensors(&self) -> &BTreeMap<String, TensorInfo>;

    /// Reads a region of a tensor: little-endian elements in row-major order, as many bytes as the
    /// region has. Callers ask for regions that lie inside the tensor.
    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()>;

    /// Tensors that are there but whose element type this library has none for: names, and the
    /// types as the file calls them. Whoever copies a source whole refuses to leave them out
    /// silently.
    fn foreign(&self) -> Vec<(String, String)> {
        vec![]
    }

    /// Reads several regions of a tensor, each into its buffer. A source that can read what they
    /// share once does so.
    fn read_many(&self, name: &str, regions: &mut [(Region, Vec<u8>)]) -> Result<()> {
        regions
            .iter_mut()
            .try_for_each(|(region, out)| self.read(name, region, out))
    }

    /// The type of a tensor.
    fn info(&self, name: &str) -> Result<&TensorInfo> {
        find(self.tensors(), name)
    }

    /// All bytes of a tensor.
    fn read_all(&self, name: &str) -> Result<Vec<u8>> {
        let info = self.info(name)?;
        let mut out = vec![0; info.bytes()];
        self.read(name, &info.whole(), &mut out)?;
        Ok(out)
    }
}

/// Whether a region lies inside a tensor and the buffer has its size.
pub(crate) fn check_region(
    name: &str,
    info: &TensorInfo,
    region: &Region,
    out: &[u8],
) -> Result<()> {
    let inside = region.start.len() == info.shape.len()
        && region.shape.len() == info.shape.len()
        && info
            .shape
            .iter()
            .zip(region.start.iter().zip(&region.shape))
            .all(|(&n, (&start, &count))| start.checked_add(count).is_some_and(|end| end <= n));
    if !inside {
        return Err(Error::OutOfBounds {
            tensor: name.into(),
            whole: info.shape.clone(),
            start: region.start.to_vec(),
            shape: region.shape.to_vec(),
        });
    }
    check_bytes(name, region.numel() * info.dtype.size(), out.len())
}

/// Whether as many bytes were given for a tensor as are needed.
pub(crate) fn check_bytes(tensor: &str, expected: usize, given: usize) -> Result<()> {
    if expected == given {
        return Ok(());
    }
    Err(Error::ByteCount {
        tensor: tensor.into(),
        expected,
        given,
    })
}

/// The type of a tensor by its name.
pub(crate) fn find<'t>(
    tensors: &'t BTreeMap<String, TensorInfo>,
    name: &str,
) -> Result<&'t TensorInfo> {
    tensors.get(name).ok_or_else(|| Error::Missing {
        name: name.into(),
        near: near(name, tensors.keys()),
    })
}

/// Whatever points to a source is one: a reference, a `Box`, an `Arc`.
impl<P: Deref<Target: Source> + Send + Sync> Source for P {
    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        (**self).tensors()
    }

    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()> {
        (**self).read(name, region, out)
    }

    fn read_many(&self, name: &str, regions: &mut [(Region, Vec<u8>)]) -> Result<()> {
        (**self).read_many(name, regions)
    }

    fn foreign(&self) -> Vec<(String, String)> {
        (**self).foreign()
    }

    fn info(&self, name: &str) -> Result<&TensorInfo> {
        (**self).info(name)
    }
}

/// The name that shares the longest end with the one that was asked for, if that is long.
fn near<'n>(name: &str, names: impl Iterator<Item = &'n String>) -> Option<String> {
    let shared = |other: &str| {
        name.bytes()
            .rev()
            .zip(other.bytes().rev())
            .take_while(|(a, b)| a == b)
            .count()
    };
    names
        .max_by_key(|other| shared(other))
        .filter(|best| shared(best) > name.len() / 3)
        .cloned()
}

/// Tensors in memory.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    tensors: BTreeMap<String, TensorInfo>,
    bytes: BTreeMap<String, Vec<u8>>,
}

impl Memory {
    /// Adds a tensor from its stored bytes.
    pub fn insert(
        &mut self,
        name: impl Into<String>,
        info: TensorInfo,
        bytes: Vec<u8>,
    ) -> Result<()> {
        let name = name.into();
        check_bytes(&name, info.bytes(), bytes.len())?;
        self.tensors.insert(name.clone(), info);
        self.bytes.insert(name, bytes);
        Ok(())
    }
}

impl Source for Memory {
    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()> {
        let info = self.info(name)?;
        let bytes = self.bytes.get(name).map_or(&[][..], Vec::as_slice);
        copy_region(bytes, &info.whole(), out, region, region, info.dtype.size());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anymesh_core::DType;

    #[test]
    fn a_name_that_is_not_there_gets_a_hint() {
        let mut memory = Memory::default();
        memory
            .insert(
                "model.layers.0.weight",
                TensorInfo {
                    dtype: DType::U8,
                    shape: vec![1],
                },
                vec![1],
            )
            .expect("fits");
        let error = memory
            .read_all("layers.0.weight")
            .expect_err("another name");
        assert!(
            error.to_string().contains("model.layers.0.weight"),
            "{error}"
        );
    }
}

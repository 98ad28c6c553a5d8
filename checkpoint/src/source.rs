//! Anything that holds tensors and can be read box by box.

use crate::{Error, Result, boxes::copy_box};
use anymesh_core::{DType, Region};
use std::{collections::BTreeMap, ops::Deref};

/// The type of a stored tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The element type.
    pub dtype: DType,
    /// The global shape.
    pub shape: Vec<usize>,
}

impl TensorInfo {
    /// The number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// The number of bytes.
    pub fn bytes(&self) -> usize {
        self.numel() * self.dtype.size()
    }

    /// The box that is all of it.
    pub fn whole(&self) -> Region {
        Region {
            start: self.shape.iter().map(|_| 0).collect(),
            shape: self.shape.iter().copied().collect(),
        }
    }
}

/// Anything that holds tensors and can be read box by box, from several threads at once.
pub trait Source: Send + Sync {
    /// The tensors by name.
    fn tensors(&self) -> &BTreeMap<String, TensorInfo>;

    /// Reads a box of a tensor: little-endian elements in row-major order, as many bytes as the box
    /// has. Callers ask for boxes that lie inside the tensor.
    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()>;

    /// Tensors that are there but whose element type this library has none for: names, and the
    /// types as the file calls them. Whoever copies a source whole refuses to leave them out
    /// silently.
    fn foreign(&self) -> Vec<(String, String)> {
        vec![]
    }

    /// Reads several boxes of a tensor, each into its buffer. A source that can read what they
    /// share once does so.
    fn read_many(&self, name: &str, boxes: &mut [(Region, Vec<u8>)]) -> Result<()> {
        boxes
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

/// The type of a tensor by its name.
pub(crate) fn find<'t>(
    tensors: &'t BTreeMap<String, TensorInfo>,
    name: &str,
) -> Result<&'t TensorInfo> {
    tensors.get(name).ok_or_else(|| Error::Missing {
        name: name.into(),
        hint: near(name, tensors.keys()),
    })
}

/// What leads to a source is one: a reference, a box.
impl<P: Deref<Target: Source> + Send + Sync> Source for P {
    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        (**self).tensors()
    }

    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()> {
        (**self).read(name, region, out)
    }

    fn read_many(&self, name: &str, boxes: &mut [(Region, Vec<u8>)]) -> Result<()> {
        (**self).read_many(name, boxes)
    }

    fn foreign(&self) -> Vec<(String, String)> {
        (**self).foreign()
    }

    fn info(&self, name: &str) -> Result<&TensorInfo> {
        (**self).info(name)
    }
}

/// A hint at names that share the longest end with the one that was asked for.
fn near<'n>(name: &str, names: impl Iterator<Item = &'n String>) -> String {
    let shared = |other: &str| {
        name.bytes()
            .rev()
            .zip(other.bytes().rev())
            .take_while(|(a, b)| a == b)
            .count()
    };
    match names.max_by_key(|other| shared(other)) {
        Some(best) if shared(best) > name.len() / 3 => format!(": did you mean '{best}'?"),
        _ => String::new(),
    }
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
        if bytes.len() != info.bytes() {
            return Err(Error::Argument(format!(
                "tensor '{name}' of {} bytes was given {}",
                info.bytes(),
                bytes.len()
            )));
        }
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
        copy_box(bytes, &info.whole(), out, region, region, info.dtype.size());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

//! GGUF files by hand.

use crate::common::{Temporary, rewrite};
use anymesh_checkpoint::gguf::File;
use anymesh_checkpoint::{Error, gguf};
use std::path::PathBuf;

/// A value of metadata, with its type in front.
#[derive(Clone)]
pub(crate) struct Value(u32, Vec<u8>);

impl Value {
    pub(crate) fn u8(x: u8) -> Self {
        Self(0, vec![x])
    }

    pub(crate) fn u32(x: u32) -> Self {
        Self(4, x.to_le_bytes().to_vec())
    }

    pub(crate) fn i32(x: i32) -> Self {
        Self(5, x.to_le_bytes().to_vec())
    }

    pub(crate) fn f32(x: f32) -> Self {
        Self(6, x.to_le_bytes().to_vec())
    }

    pub(crate) fn f64(x: f64) -> Self {
        Self(12, x.to_le_bytes().to_vec())
    }

    pub(crate) fn bool(x: bool) -> Self {
        Self(7, vec![x.into()])
    }

    pub(crate) fn text(x: &str) -> Self {
        Self(8, text(x))
    }

    /// All of them are of the type of the first.
    pub(crate) fn array(values: &[Value]) -> Self {
        let kind = values.first().map_or(0, |value| value.0);
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend((values.len() as u64).to_le_bytes());
        values.iter().for_each(|value| bytes.extend(&value.1));
        Self(9, bytes)
    }

    pub(crate) fn texts(values: &[&str]) -> Self {
        Self::array(&values.iter().map(|x| Self::text(x)).collect::<Vec<_>>())
    }

    /// Bytes that claim to be of a type.
    pub(crate) fn raw(kind: u32, bytes: Vec<u8>) -> Self {
        Self(kind, bytes)
    }
}

pub(crate) fn text(x: &str) -> Vec<u8> {
    [&(x.len() as u64).to_le_bytes()[..], x.as_bytes()].concat()
}

/// A tensor: sizes in the order of the file, which is the fastest first.
#[derive(Clone)]
pub(crate) struct Stored {
    pub(crate) name: String,
    pub(crate) sizes: Vec<u64>,
    pub(crate) kind: u32,
    pub(crate) data: Vec<u8>,
    /// Where it claims to be; else where it is.
    pub(crate) at: Option<u64>,
}

/// What a file is made of.
#[derive(Clone)]
pub(crate) struct Build {
    pub(crate) version: u32,
    pub(crate) alignment: usize,
    pub(crate) values: Vec<(String, Value)>,
    pub(crate) tensors: Vec<Stored>,
}

impl Build {
    pub(crate) fn new() -> Self {
        Self {
            version: 3,
            alignment: 32,
            values: vec![],
            tensors: vec![],
        }
    }

    pub(crate) fn value(mut self, key: &str, value: Value) -> Self {
        self.values.push((key.into(), value));
        self
    }

    pub(crate) fn tensor(mut self, name: &str, sizes: &[u64], kind: u32, data: Vec<u8>) -> Self {
        self.tensors.push(Stored {
            name: name.into(),
            sizes: sizes.to_vec(),
            kind,
            data,
            at: None,
        });
        self
    }

    /// A tensor of floats, in a row-major shape.
    pub(crate) fn floats(self, name: &str, shape: &[usize], data: &[f32]) -> Self {
        let sizes: Vec<u64> = shape.iter().rev().map(|n| *n as u64).collect();
        let data = data.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.tensor(name, &sizes, 0, data)
    }

    /// The file; its last byte is the last of its last tensor.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.values.len() as u64).to_le_bytes());
        for (key, value) in &self.values {
            out.extend(text(key));
            out.extend(value.0.to_le_bytes());
            out.extend(&value.1);
        }
        let mut data: Vec<u8> = vec![];
        for tensor in &self.tensors {
            data.resize(data.len().next_multiple_of(self.alignment), 0);
            out.extend(text(&tensor.name));
            out.extend((tensor.sizes.len() as u32).to_le_bytes());
            tensor
                .sizes
                .iter()
                .for_each(|n| out.extend(n.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend(tensor.at.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend(&tensor.data);
        }
        if !self.tensors.is_empty() {
            out.resize(out.len().next_multiple_of(self.alignment), 0);
        }
        out.extend(data);
        out
    }

    pub(crate) fn write(&self, folder: &Temporary) -> PathBuf {
        let path = folder.join("built.gguf");
        rewrite(&path, &self.bytes());
        path
    }

    pub(crate) fn open(&self, folder: &Temporary) -> Result<File, Error> {
        gguf::File::open(self.write(folder))
    }
}

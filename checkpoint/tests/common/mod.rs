//! What the tests share.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "every test file uses a part of it"
)]

use anymesh_checkpoint::{Memory, Source, TensorInfo, copy_region};
use anymesh_core::{DType, Region, Tensor};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

/// The recorded files.
pub fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(path)
}

/// The bytes of every tensor that the scripts make.
pub fn pattern(count: usize, dtype: DType) -> Vec<u8> {
    (0..count)
        .map(|k| {
            if dtype == DType::Bool {
                (k % 2) as u8
            } else {
                (37 * k + 11) as u8
            }
        })
        .collect()
}

/// A folder that is removed again.
pub struct Temporary(pub PathBuf);

impl Temporary {
    /// A folder that is called like the line that asks for it.
    #[track_caller]
    pub fn here() -> Self {
        let place = std::panic::Location::caller();
        let file = Path::new(place.file()).with_extension("");
        let names = file.iter().rev().take(2).map(|name| name.to_string_lossy());
        let name = names.collect::<Vec<_>>().join("-");
        Self::new(&format!("{name}-{}", place.line()))
    }

    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("anymesh-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).expect("a temporary folder");
        Self(path)
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl std::ops::Deref for Temporary {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Puts a file in the place of another. Cutting and rewriting it would make some file systems write
/// to the disk each time.
pub fn rewrite(path: impl AsRef<Path>, bytes: &[u8]) {
    let _ = std::fs::remove_file(path.as_ref());
    std::fs::write(path, bytes).expect("a file can be written");
}

/// Tensors by their names, as a checkpoint takes them.
pub fn named<const N: usize>(tensors: [(&str, Tensor); N]) -> BTreeMap<String, Tensor> {
    tensors.map(|(name, x)| (name.to_string(), x)).into()
}

/// Numbers that are the same in every run.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }

    pub fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n.max(1)
    }

    pub fn region(&mut self, shape: &[usize]) -> Region {
        let start: Vec<usize> = shape.iter().map(|&n| self.below(n + 1)).collect();
        let size: Vec<usize> = shape
            .iter()
            .zip(&start)
            .map(|(&n, &s)| self.below(n - s + 1))
            .collect();
        Region {
            start: start.into(),
            shape: size.into(),
        }
    }
}

/// Every type in several shapes, without elements and without dimensions among them.
pub fn every_type() -> Memory {
    let mut memory = Memory::default();
    for dtype in DType::ALL {
        for (i, shape) in [vec![3, 5], vec![], vec![0, 4], vec![2, 3, 4]]
            .into_iter()
            .enumerate()
        {
            let info = TensorInfo { dtype, shape };
            let bytes = pattern(info.bytes(), dtype);
            memory
                .insert(format!("{dtype}.{i}"), info, bytes)
                .expect("as many bytes as the type says");
        }
    }
    memory
}

/// Holds a source against another: names, types, bytes, and random regions of each tensor.
pub fn assert_same(source: &dyn Source, expected: &dyn Source) {
    assert_eq!(source.tensors(), expected.tensors());
    let mut random = Random(42);
    for (name, info) in expected.tensors() {
        let whole = expected.read_all(name).expect("it is there");
        assert_eq!(source.read_all(name).expect("it is there"), whole, "{name}");
        for _ in 0..20 {
            let part = random.region(&info.shape);
            let (mut got, mut want) = (
                vec![0; part.numel() * info.dtype.size()],
                vec![0; part.numel() * info.dtype.size()],
            );
            copy_region(
                &whole,
                &info.whole(),
                &mut want,
                &part,
                &part,
                info.dtype.size(),
            );
            source.read(name, &part, &mut got).expect("inside");
            assert_eq!(got, want, "{name} {part:?}");
        }
    }
}

/// Reads everything a source has. Only what is right about it may succeed; nothing may panic.
pub fn read_everything(source: &dyn Source) -> Result<(), anymesh_checkpoint::Error> {
    source
        .tensors()
        .keys()
        .try_for_each(|name| source.read_all(name).map(drop))
}

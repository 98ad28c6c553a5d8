//! What tests of this folder share.

use super::{Sample, Source};
use crate::Result;
use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

/// A temporary folder of one test.
#[derive(Debug)]
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("anymesh-data-{name}-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).expect("a temporary folder");
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, bytes).expect("a temporary file");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Samples that are their own number, three positions long and the last of them one; notes which
/// were asked for.
#[derive(Clone, Debug)]
pub(crate) struct Numbers {
    pub(crate) count: u64,
    pub(crate) asked: Arc<Mutex<Vec<u64>>>,
    /// A sample that cannot be read.
    pub(crate) broken: Option<u64>,
    /// A sample that panics.
    pub(crate) panics: Option<u64>,
}

impl Numbers {
    pub(crate) fn new(count: u64) -> Self {
        Self {
            count,
            asked: Arc::default(),
            broken: None,
            panics: None,
        }
    }

    /// What was asked for since the last time, sorted.
    pub(crate) fn asked(&self) -> Vec<u64> {
        let mut asked = std::mem::take(&mut *self.asked.lock().expect("nobody panicked"));
        asked.sort_unstable();
        asked
    }
}

impl Source for Numbers {
    fn count(&self) -> u64 {
        self.count
    }

    fn length(&self) -> usize {
        3
    }

    fn sample(&self, index: u64) -> Result<Sample> {
        if self.broken == Some(index) {
            return Err(crate::Error::config("test", format!("{index} is broken")));
        }
        assert_ne!(self.panics, Some(index), "as the test wants");
        self.asked.lock().expect("nobody panicked").push(index);
        let len = if index + 1 == self.count { 1 } else { 3 };
        let number = index as i32;
        Ok(Sample {
            ids: vec![number; len],
            labels: vec![number + 1; len],
            documents: vec![0; len],
            positions: (0..len as i32).collect(),
        })
    }

    fn has_documents(&self) -> bool {
        true
    }
}

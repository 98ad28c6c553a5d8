//! Compiled kernels on disk: a file for each, named by everything it depends on.
//!
//! `ANYMESH_KERNEL_CACHE` names the folder or says `off`; otherwise it is `anymesh/kernels` in the
//! user's cache folder. Nothing here is ever an error: what cannot be read is compiled, what cannot
//! be written is compiled again the next time.

use cubecl_common::hash::StableHasher;
use std::{
    fs,
    hash::Hasher,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::SystemTime,
};

/// Bytes of all files together; the oldest go.
const LIMIT: u64 = 512 << 20;

/// What a file begins with: whose it is, and in which format.
const MAGIC: &[u8; 8] = b"anymesh1";

/// A folder of compiled kernels.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    folder: PathBuf,
    limit: u64,
}

/// The name of what depends on these texts.
pub(crate) fn key(texts: &[&str]) -> String {
    let mut hasher = StableHasher::new();
    for text in texts {
        hasher.write_u64(text.len() as u64);
        hasher.write(text.as_bytes());
    }
    format!("{:032x}", hasher.finalize())
}

/// What stands in front of the contents, so that half a file is not taken for a whole one.
fn header(contents: &[u8]) -> [u8; 32] {
    let mut hasher = StableHasher::new();
    hasher.write(contents);
    let mut header = [0; 32];
    header[..8].copy_from_slice(MAGIC);
    header[8..16].copy_from_slice(&(contents.len() as u64).to_le_bytes());
    header[16..].copy_from_slice(&hasher.finalize().to_le_bytes());
    header
}

/// The folder that the environment asks for, if any.
fn folder(variable: impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty());
    match set("ANYMESH_KERNEL_CACHE") {
        Some(off) if off.eq_ignore_ascii_case("off") => None,
        Some(folder) => Some(folder.into()),
        None => {
            let home = set("HOME").or_else(|| set("USERPROFILE"));
            let caches = set("XDG_CACHE_HOME")
                .map(PathBuf::from)
                .filter(|p| p.is_absolute());
            let caches = caches.or_else(|| home.map(|home| Path::new(&home).join(".cache")));
            Some(caches?.join("anymesh").join("kernels"))
        }
    }
}

impl Store {
    /// The folder that the environment asks for; nothing where it asks for none.
    pub(crate) fn of_user() -> Option<Self> {
        folder(|name| std::env::var(name).ok()).map(|folder| Self::at(folder, LIMIT))
    }

    /// A folder, which need not be there yet, for so many bytes.
    pub(crate) fn at(folder: PathBuf, limit: u64) -> Self {
        Self { folder, limit }
    }

    fn path(&self, key: &str) -> PathBuf {
        self.folder.join(format!("{key}.cubin"))
    }

    /// What was kept under a key, if all of it is there.
    pub(crate) fn get(&self, key: &str) -> Option<Vec<u8>> {
        let path = self.path(key);
        let mut all = fs::read(&path).ok()?;
        if all.len() < 32 || all[..32] != header(&all[32..]) {
            let _ = fs::remove_file(&path);
            return None;
        }
        // What is used is young. Where that cannot be said it will be compiled again some day.
        if let Ok(file) = fs::File::options().append(true).open(&path) {
            let _ = file.set_modified(SystemTime::now());
        }
        all.drain(..32);
        Some(all)
    }

    /// Keeps contents under a key: other processes see all of it or nothing.
    pub(crate) fn put(&self, key: &str, contents: &[u8]) {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        if fs::create_dir_all(&self.folder).is_err() {
            return;
        }
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let part = self
            .folder
            .join(format!("{key}.{}.{number}.part", std::process::id()));
        let all = [&header(contents)[..], contents].concat();
        if fs::write(&part, all).is_err() || fs::rename(&part, self.path(key)).is_err() {
            let _ = fs::remove_file(&part);
        }
        self.shrink();
    }

    /// Removes the oldest files until the rest fits.
    fn shrink(&self) {
        let Ok(entries) = fs::read_dir(&self.folder) else {
            return;
        };
        let mut files: Vec<_> = (entries.flatten())
            .filter(|entry| {
                let name = entry.file_name();
                let name = name.to_string_lossy();
                name.ends_with(".cubin") || name.ends_with(".part")
            })
            .filter_map(|entry| {
                let about = entry.metadata().ok()?;
                Some((about.modified().ok()?, about.len(), entry.path()))
            })
            .collect();
        let mut total: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
        if total <= self.limit {
            return;
        }
        files.sort();
        for (_, bytes, path) in files {
            if total <= self.limit {
                break;
            }
            if fs::remove_file(path).is_ok() {
                total -= bytes;
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::time::Duration;

    /// A folder of this test alone.
    pub(crate) fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("anymesh-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        folder
    }

    #[test]
    fn the_environment_says_where() {
        let of = |set: &[(&str, &str)]| {
            let set: Vec<_> = set
                .iter()
                .map(|(k, v)| (k.to_string(), v.to_string()))
                .collect();
            super::folder(|name| set.iter().find(|(k, _)| k == name).map(|(_, v)| v.clone()))
        };
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[("HOME", "/h"), ("ANYMESH_KERNEL_CACHE", "off")]), None);
        assert_eq!(
            of(&[("HOME", "/h")]),
            Some("/h/.cache/anymesh/kernels".into())
        );
        assert_eq!(
            of(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/c")]),
            Some("/c/anymesh/kernels".into())
        );
        assert_eq!(
            of(&[("HOME", "/h"), ("XDG_CACHE_HOME", "not/absolute")]),
            Some("/h/.cache/anymesh/kernels".into())
        );
        assert_eq!(of(&[("ANYMESH_KERNEL_CACHE", "/k")]), Some("/k".into()));
    }

    #[test]
    fn what_is_kept_comes_back_and_half_of_it_does_not() {
        let folder = folder("half");
        let store = Store::at(folder.clone(), 1 << 20);
        assert_eq!(store.get("a"), None);
        store.put("a", b"a kernel");
        assert_eq!(store.get("a"), Some(b"a kernel".to_vec()));
        let whole = fs::read(store.path("a")).expect("a file");
        for len in [0, 31, 32, whole.len() - 1] {
            fs::write(store.path("a"), &whole[..len]).expect("a file");
            assert_eq!(store.get("a"), None, "{len} bytes of it");
            assert!(!store.path("a").exists(), "a bad file goes");
        }
        let mut turned = whole.clone();
        turned[33] ^= 1;
        fs::write(store.path("a"), turned).expect("a file");
        assert_eq!(store.get("a"), None);
        store.put("a", b"again");
        assert_eq!(store.get("a"), Some(b"again".to_vec()));
        let _ = fs::remove_dir_all(folder);
    }

    #[test]
    fn the_oldest_go_where_there_is_no_room() {
        let folder = folder("old");
        let store = Store::at(folder.clone(), 3 * 132);
        for (age, name) in [(30, "a"), (20, "b"), (10, "c")] {
            store.put(name, &[0; 100]);
            let file = fs::File::options()
                .append(true)
                .open(store.path(name))
                .expect("a file");
            file.set_modified(SystemTime::now() - Duration::from_secs(age))
                .expect("a time");
        }
        // Reading makes it young again.
        assert!(store.get("a").is_some());
        store.put("d", &[0; 100]);
        let left = ["a", "b", "c", "d"].map(|name| store.path(name).exists());
        assert_eq!(left, [true, false, true, true]);
        let _ = fs::remove_dir_all(folder);
    }

    #[test]
    fn a_folder_that_cannot_be_is_no_error() {
        let file = folder("file");
        fs::write(&file, b"not a folder").expect("a file");
        let store = Store::at(file.join("kernels"), 1 << 20);
        store.put("a", b"a kernel");
        assert_eq!(store.get("a"), None);
        let _ = fs::remove_file(file);
    }

    #[test]
    fn keys_tell_texts_apart_by_where_they_end() {
        assert_ne!(key(&["ab", "c"]), key(&["a", "bc"]));
        assert_eq!(key(&["ab", "c"]), key(&["ab", "c"]));
    }
}

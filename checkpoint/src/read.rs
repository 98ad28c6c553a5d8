//! Reading a checkpoint: only the byte ranges that are needed, each block checked against its sum.

use crate::{
    Error, Result, Source, TensorInfo,
    manifest::{self, BLOCK, Manifest, StoredBox, checksum},
};
use anymesh_core::{Element, Place, Region, Tensor};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    path::{Path, PathBuf},
    sync::OnceLock,
};

/// Bytes that are read at once.
const WINDOW: u64 = 8 << 20;

/// A checkpoint on disk. Its tensors are read box by box, from any number of threads.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    tensors: BTreeMap<String, TensorInfo>,
    files: BTreeMap<String, OnceLock<File>>,
}

impl Checkpoint {
    /// Opens a checkpoint: reads its manifest, and checks that every file is there with its size.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let at = path.join(manifest::NAME);
        let text = fs::read(&at).map_err(|e| Error::io(&at, "read", &e))?;
        let manifest = Manifest::parse(&text, &at)?;
        for (name, bytes) in &manifest.files {
            let file = path.join(name);
            let found = fs::metadata(&file).map_err(|e| Error::io(&file, "open", &e))?.len();
            if found != *bytes {
                let detail = format!("it has {found} bytes, the manifest says {bytes}: the file was cut short or replaced");
                return Err(Error::Format { path: file, what: "data file of this checkpoint", detail });
            }
        }
        let tensors = manifest.tensors.iter().map(|(name, stored)| (name.clone(), stored.info())).collect();
        let files = manifest.files.keys().map(|name| (name.clone(), OnceLock::new())).collect();
        Ok(Self { path, manifest, tensors, files })
    }

    /// What it holds.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A tensor, cut up over a mesh or on one device, whatever it was saved from. Reads what this process holds, each box once.
    pub fn load(&self, name: &str, place: impl Into<Place>) -> Result<Tensor> {
        crate::load(self, name, place)
    }

    /// The elements of a tensor on the host.
    pub fn values<T: Element>(&self, name: &str) -> Result<Vec<T>> {
        let info = self.info(name)?;
        if info.dtype != T::DTYPE {
            return Err(Error::Argument(format!("tensor '{name}' holds {}, not {}", info.dtype, T::DTYPE)));
        }
        Ok(T::from_bytes(&self.read_all(name)?))
    }

    /// Reads everything; the errors of all boxes that are damaged.
    pub fn verify(&self) -> Vec<Error> {
        let mut wrong = vec![];
        for (name, stored) in &self.manifest.tensors {
            let size = self.tensors[name].dtype.size();
            for b in &stored.boxes {
                let (mut at, end) = (0, b.region().numel() as u64 * size as u64);
                while at < end {
                    let to = (at + WINDOW).min(end);
                    if let Err(error) = self.blocks(name, b, at, to) {
                        wrong.push(error);
                        break;
                    }
                    at = to;
                }
            }
        }
        wrong
    }

    fn file(&self, name: &str) -> Result<(PathBuf, &File)> {
        let path = self.path.join(name);
        let Some(slot) = self.files.get(name) else {
            return Err(Error::Format { path, what: "checkpoint", detail: "a box names a file that the manifest does not have".into() });
        };
        if slot.get().is_none() {
            let file = File::open(&path).map_err(|e| Error::io(&path, "open", &e))?;
            // Another thread may have been faster; both handles are the same file.
            let _ = slot.set(file);
        }
        match slot.get() {
            Some(file) => Ok((path, file)),
            None => Err(Error::Format { path, what: "data file", detail: "it could not be opened".into() }),
        }
    }

    /// Bytes `from..to` of a box, which begin at a block and end at one or at the end of the box, checked.
    fn blocks(&self, tensor: &str, b: &StoredBox, from: u64, to: u64) -> Result<Vec<u8>> {
        let (path, file) = self.file(&b.file)?;
        let mut bytes = vec![0; (to - from) as usize];
        read_at(file, &mut bytes, b.offset + from).map_err(|e| Error::io(&path, "read", &e))?;
        for (i, block) in bytes.chunks(BLOCK as usize).enumerate() {
            let index = (from / BLOCK) as usize + i;
            if b.sums.get(index) != Some(&checksum(block)) {
                let region = format!("{:?}+{:?}", b.start, b.shape);
                let detail = format!("bytes from {} on do not have their checksum", b.offset + from + i as u64 * BLOCK);
                return Err(Error::Damaged { path, tensor: tensor.into(), region, detail });
            }
        }
        Ok(bytes)
    }

    /// Reads several boxes of a tensor.
    fn read_parts(&self, name: &str, mut parts: Vec<(&Region, &mut [u8])>) -> Result<()> {
        let size = self.info(name)?.dtype.size();
        for b in &self.manifest.tensors[name].boxes {
            let of = b.region();
            let mut wanted = vec![];
            for (region, out) in &mut parts {
                if let Some(part) = of.intersect(region).filter(|part| part.numel() > 0) {
                    wanted.push(Wanted { runs: runs(&part, &of, region, size), next: 0, done: 0, out });
                }
            }
            self.read_box(name, b, &mut wanted, of.numel() as u64 * size as u64)?;
        }
        Ok(())
    }

    /// Copies what several buffers need of a box. Every block is read and checked once, and blocks that are near each other together.
    fn read_box(&self, tensor: &str, b: &StoredBox, wanted: &mut [Wanted<'_>], total: u64) -> Result<()> {
        while let Some(at) = wanted.iter().filter_map(Wanted::at).min() {
            let begin = at / BLOCK * BLOCK;
            let mut end = at + 1;
            for run in wanted.iter().flat_map(Wanted::runs_left) {
                // As far as runs follow each other closely.
                if run.0 < begin + WINDOW && run.0 <= end + BLOCK {
                    end = end.max(run.0 + run.2);
                }
            }
            let end = end.min(begin + WINDOW).div_ceil(BLOCK).saturating_mul(BLOCK).min(total);
            let window = self.blocks(tensor, b, begin, end)?;
            wanted.iter_mut().for_each(|w| w.take(begin, end, &window));
        }
        Ok(())
    }
}

/// What a buffer needs of a box: runs of bytes, of which some are there.
struct Wanted<'a> {
    runs: Vec<(u64, u64, u64)>,
    next: usize,
    /// Bytes of the next run that are there.
    done: u64,
    out: &'a mut [u8],
}

impl Wanted<'_> {
    /// The first byte of the box that is missing.
    fn at(&self) -> Option<u64> {
        self.runs.get(self.next).map(|run| run.0 + self.done)
    }

    /// The next runs, as many as a window may meet.
    fn runs_left(&self) -> &[(u64, u64, u64)] {
        &self.runs[self.next..self.runs.len().min(self.next + 4096)]
    }

    /// Takes what bytes `begin..end` of the box have.
    fn take(&mut self, begin: u64, end: u64, window: &[u8]) {
        while let Some(&(from, to, length)) = self.runs.get(self.next) {
            let at = from + self.done;
            if at >= end {
                return;
            }
            let n = (length - self.done).min(end - at) as usize;
            let (source, target) = ((at - begin) as usize, (to + self.done) as usize);
            self.out[target..target + n].copy_from_slice(&window[source..source + n]);
            self.done += n as u64;
            if self.done < length {
                return;
            }
            (self.next, self.done) = (self.next + 1, 0);
        }
    }
}

impl Source for Checkpoint {
    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()> {
        self.read_parts(name, vec![(region, out)])
    }

    fn read_many(&self, name: &str, boxes: &mut [(Region, Vec<u8>)]) -> Result<()> {
        self.read_parts(name, boxes.iter_mut().map(|(region, out)| (&*region, out.as_mut_slice())).collect())
    }
}

/// The contiguous runs of bytes of `part`: offset in the box `of`, offset in the box `to`, length.
pub(crate) fn runs(part: &Region, of: &Region, to: &Region, size: usize) -> Vec<(u64, u64, u64)> {
    let rank = part.shape.len();
    let (mut outer, mut length) = (rank, size);
    while outer > 0 {
        outer -= 1;
        length *= part.shape[outer];
        if part.shape[outer] != of.shape[outer] || part.shape[outer] != to.shape[outer] {
            break;
        }
    }
    let offset = |at: &[usize], of: &Region| ((0..rank).fold(0, |o, d| o * of.shape[d] + at[d] - of.start[d]) * size) as u64;
    let mut at = part.start.to_vec();
    let count: usize = part.shape[..outer].iter().product();
    let mut runs = Vec::with_capacity(count);
    for _ in 0..count {
        runs.push((offset(&at, of), offset(&at, to), length as u64));
        for d in (0..outer).rev() {
            at[d] += 1;
            if at[d] < part.start[d] + part.shape[d] {
                break;
            }
            at[d] = part.start[d];
        }
    }
    runs
}

/// Reads exactly these bytes of a file, wherever its cursor is.
#[cfg(unix)]
fn read_at(file: &File, out: &mut [u8], offset: u64) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, offset)
}

/// Reads exactly these bytes of a file, through a handle of its own.
#[cfg(not(unix))]
fn read_at(file: &File, out: &mut [u8], offset: u64) -> std::io::Result<()> {
    use std::io::{Read, Seek, SeekFrom};
    let mut file = file.try_clone()?;
    file.seek(SeekFrom::Start(offset))?;
    file.read_exact(out)
}

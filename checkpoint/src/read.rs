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

    /// Copies `part` of a box to the buffer of `region`. Runs of bytes that are near each other are read together.
    fn read_part(&self, tensor: &str, b: &StoredBox, part: &Region, region: &Region, out: &mut [u8], size: usize) -> Result<()> {
        let (of, total) = (b.region(), b.region().numel() as u64 * size as u64);
        let runs = runs(part, &of, region, size);
        let mut window: (u64, Vec<u8>) = (0, vec![]);
        let mut i = 0;
        while i < runs.len() {
            let (from, to, length) = runs[i];
            let mut done = 0;
            while done < length {
                let at = from + done;
                if !(window.0..window.0 + window.1.len() as u64).contains(&at) {
                    let begin = at / BLOCK * BLOCK;
                    // As far as runs follow each other closely.
                    let mut end = from + length;
                    for (next, _, more) in &runs[i + 1..] {
                        if *next > end + BLOCK || next + more > begin + WINDOW {
                            break;
                        }
                        end = next + more;
                    }
                    let end = end.min(begin + WINDOW).div_ceil(BLOCK).saturating_mul(BLOCK).min(total);
                    window = (begin, self.blocks(tensor, b, begin, end)?);
                }
                let inside = (at - window.0) as usize;
                let n = ((length - done) as usize).min(window.1.len() - inside);
                let target = to as usize + done as usize;
                out[target..target + n].copy_from_slice(&window.1[inside..inside + n]);
                done += n as u64;
            }
            i += 1;
        }
        Ok(())
    }
}

impl Source for Checkpoint {
    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()> {
        let info = self.info(name)?;
        let size = info.dtype.size();
        if region.numel() == 0 {
            return Ok(());
        }
        for b in &self.manifest.tensors[name].boxes {
            if let Some(part) = b.region().intersect(region) {
                self.read_part(name, b, &part, region, out, size)?;
            }
        }
        Ok(())
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

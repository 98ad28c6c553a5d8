//! Reading a checkpoint: only the byte ranges that are needed, each block checked against its sum.

use crate::{
    Error, ReadAt, Result, Source, TensorInfo,
    manifest::{self, BLOCK, Manifest, StoredRegion, checksum},
    positioned::Positioned,
    regions::runs,
    source::check_region,
};
use anymesh_core::{Element, IntoPlace, Region, Tensor};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Bytes that are read at once.
const WINDOW: usize = 8 << 20;

/// A checkpoint on disk. Its tensors are read region by region, from any number of threads.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    tensors: BTreeMap<String, TensorInfo>,
    files: BTreeMap<String, Positioned>,
}

impl Checkpoint {
    /// Opens a checkpoint: reads its manifest, and checks that every file is there with its size.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let at = path.join(manifest::NAME);
        let text = fs::read(&at).map_err(|e| Error::io(&at, "read", &e))?;
        Self::with_files(path, &text, |at, _| Positioned::open(at))
    }

    /// A checkpoint whose files are elsewhere than in a folder: `manifest` is the text of its
    /// manifest, `file` finds what stands for the data file of a name. `path` is for errors.
    ///
    /// ```
    /// # use anymesh_checkpoint::{Checkpoint, Contents, Source, save};
    /// # use anymesh_core::Tensor;
    /// # use std::{collections::BTreeMap, sync::Arc};
    /// # let name = format!("anymesh-doc-reading-{}", std::process::id());
    /// # let folder = std::env::temp_dir().join(name);
    /// # let bias = Tensor::new(&[1f32, 2.0], &anymesh_backend_cpu::device())?;
    /// # let contents = Contents::new(0, BTreeMap::from([("bias".to_string(), bias)]));
    /// # let saved = save(&folder, "first", &contents)?;
    /// let manifest = std::fs::read(saved.join("manifest.json"))?;
    /// let read = Checkpoint::reading("first", &manifest, |name| {
    ///     Some(Arc::new(std::fs::read(saved.join(name)).ok()?))
    /// })?;
    /// assert_eq!(read.values::<f32>("bias")?, [1.0, 2.0]);
    /// # std::fs::remove_dir_all(&folder)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn reading(
        path: impl Into<PathBuf>,
        manifest: &[u8],
        file: impl Fn(&str) -> Option<Arc<dyn ReadAt>>,
    ) -> Result<Self> {
        Self::with_files(path.into(), manifest, |at, name| match file(name) {
            Some(reader) => Ok(Positioned::reading(at, reader)),
            None => Err(Error::Io {
                path: at.into(),
                action: "open",
                reason: "it is not among the files that were given".into(),
            }),
        })
    }

    fn with_files(
        path: PathBuf,
        text: &[u8],
        open: impl Fn(&Path, &str) -> Result<Positioned>,
    ) -> Result<Self> {
        let manifest = Manifest::parse(text, &path.join(manifest::NAME))?;
        let mut files = BTreeMap::new();
        for (name, bytes) in &manifest.files {
            let mut file = open(&path.join(name), name)?;
            if file.len() != *bytes {
                let detail = format!(
                    "it has {} bytes, the manifest says {bytes}: the file was cut short or replaced",
                    file.len()
                );
                return Err(Error::format(
                    file.path(),
                    "data file of this checkpoint",
                    detail,
                ));
            }
            // A folder may have more files than a process may hold open.
            file.close();
            files.insert(name.clone(), file);
        }
        let tensors = manifest
            .tensors
            .iter()
            .map(|(name, stored)| (name.clone(), stored.info()))
            .collect();
        Ok(Self {
            path,
            manifest,
            tensors,
            files,
        })
    }

    /// What it holds.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A tensor, cut up over a mesh or on one device, whatever it was saved from. Reads what this
    /// process holds, each region once.
    pub fn load(&self, name: &str, place: impl IntoPlace) -> Result<Tensor> {
        crate::load(self, name, place)
    }

    /// The elements of a tensor on the host.
    pub fn values<T: Element>(&self, name: &str) -> Result<Vec<T>> {
        let info = self.info(name)?;
        if info.dtype != T::DTYPE {
            return Err(Error::ElementType {
                tensor: name.into(),
                stored: info.dtype,
                asked: T::DTYPE,
            });
        }
        Ok(T::from_bytes(&self.read_all(name)?))
    }

    /// Reads everything; the errors of all regions that are damaged.
    pub fn verify(&self) -> Vec<Error> {
        self.verify_with(&|_| true, &mut |_| ())
    }

    /// Reads the tensors whose names are wanted; the errors of all regions that are damaged. `read`
    /// is told how many bytes were read, in parts.
    pub fn verify_with(
        &self,
        wanted: &dyn Fn(&str) -> bool,
        read: &mut dyn FnMut(usize),
    ) -> Vec<Error> {
        let (mut wrong, mut window) = (vec![], vec![]);
        for (name, stored) in self
            .manifest
            .tensors
            .iter()
            .filter(|(name, _)| wanted(name))
        {
            let size = self.tensors[name].dtype.size();
            for b in &stored.regions {
                let (mut at, end) = (0, b.region().numel() * size);
                while at < end {
                    let to = (at + WINDOW).min(end);
                    read(to - at);
                    if let Err(error) = self.blocks(name, b, at, to, &mut window) {
                        wrong.push(error);
                        break;
                    }
                    at = to;
                }
            }
        }
        wrong
    }

    /// Reads bytes `from..to` of a region into `window`, which begin at a block and end at one or
    /// at the end of the region, and checks them.
    fn blocks<'w>(
        &self,
        tensor: &str,
        b: &StoredRegion,
        from: usize,
        to: usize,
        window: &'w mut Vec<u8>,
    ) -> Result<&'w [u8]> {
        let none = || {
            Error::format(
                &self.path,
                "checkpoint",
                format!(
                    "a region is in '{}', which the manifest does not list",
                    b.file
                ),
            )
        };
        let file = self.files.get(&b.file).ok_or_else(none)?;
        if window.len() < to - from {
            window.resize(to - from, 0);
        }
        let bytes = &mut window[..to - from];
        file.read_at(b.offset + from as u64, bytes)?;
        for (i, block) in bytes.chunks(BLOCK).enumerate() {
            if b.sums.get(from / BLOCK + i) != Some(&checksum(block)) {
                return Err(Error::Damaged {
                    path: file.path().into(),
                    tensor: tensor.into(),
                    start: b.start.clone(),
                    shape: b.shape.clone(),
                    offset: b.offset + (from + i * BLOCK) as u64,
                });
            }
        }
        Ok(bytes)
    }

    /// Reads several regions of a tensor.
    fn read_parts(&self, name: &str, mut parts: Vec<(&Region, &mut [u8])>) -> Result<()> {
        let info = self.info(name)?;
        parts
            .iter()
            .try_for_each(|(region, out)| check_region(name, info, region, out))?;
        let (size, mut window) = (info.dtype.size(), vec![]);
        for b in &self.manifest.tensors[name].regions {
            let of = b.region();
            let mut wanted = vec![];
            for (region, out) in &mut parts {
                if let Some(part) = of.intersect(region).filter(|part| part.numel() > 0) {
                    wanted.push(Wanted {
                        runs: runs(&part, &of, region, size).collect(),
                        next: 0,
                        done: 0,
                        out,
                    });
                }
            }
            self.read_region(name, b, &mut wanted, of.numel() * size, &mut window)?;
        }
        Ok(())
    }

    /// Copies what several buffers need of a region. Every block is read and checked once, and
    /// blocks that are near each other together.
    fn read_region(
        &self,
        tensor: &str,
        b: &StoredRegion,
        wanted: &mut [Wanted<'_>],
        total: usize,
        window: &mut Vec<u8>,
    ) -> Result<()> {
        while let Some(at) = wanted.iter().filter_map(Wanted::at).min() {
            let begin = at / BLOCK * BLOCK;
            let mut end = at + 1;
            for run in wanted.iter().flat_map(Wanted::runs_left) {
                // On as long as the next run is at most a block away.
                if run.0 < begin + WINDOW && run.0 <= end + BLOCK {
                    end = end.max(run.0 + run.2);
                }
            }
            let end = end
                .min(begin + WINDOW)
                .div_ceil(BLOCK)
                .saturating_mul(BLOCK)
                .min(total);
            let bytes = self.blocks(tensor, b, begin, end, window)?;
            wanted.iter_mut().for_each(|w| w.take(begin, end, bytes));
        }
        Ok(())
    }
}

/// What a buffer needs of a stored region: runs of bytes, of which the first ones are copied.
struct Wanted<'a> {
    runs: Vec<(usize, usize, usize)>,
    next: usize,
    /// Bytes of the next run that are copied.
    done: usize,
    out: &'a mut [u8],
}

impl Wanted<'_> {
    /// The first byte of the stored region that is not copied yet.
    fn at(&self) -> Option<usize> {
        self.runs.get(self.next).map(|run| run.0 + self.done)
    }

    /// The next runs, as many as a window may meet.
    fn runs_left(&self) -> &[(usize, usize, usize)] {
        &self.runs[self.next..self.runs.len().min(self.next + 4096)]
    }

    /// Takes what bytes `begin..end` of the region have.
    fn take(&mut self, begin: usize, end: usize, window: &[u8]) {
        while let Some(&(from, to, length)) = self.runs.get(self.next) {
            let at = from + self.done;
            if at >= end {
                return;
            }
            let n = (length - self.done).min(end - at);
            let (source, target) = (at - begin, to + self.done);
            self.out[target..target + n].copy_from_slice(&window[source..source + n]);
            self.done += n;
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

    fn read_many(&self, name: &str, regions: &mut [(Region, Vec<u8>)]) -> Result<()> {
        self.read_parts(
            name,
            regions
                .iter_mut()
                .map(|(region, out)| (&*region, out.as_mut_slice()))
                .collect(),
        )
    }
}

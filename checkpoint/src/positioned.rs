//! Files that are read at positions, by several threads at once.

use crate::{Error, Result};
use anymesh_core::Region;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Bytes that are read at positions, where there is no path to open: a file that a browser was
/// given, ranges of an object store, memory. See [`gguf::File::reading`](crate::gguf::File::reading)
/// and [`safetensors::File::reading`](crate::safetensors::File::reading).
pub trait ReadAt: std::fmt::Debug + Send + Sync {
    /// How many bytes there are. Always the same number.
    fn length(&self) -> u64;

    /// Fills `out` with the bytes from `offset` on, all of which are there.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()>;
}

impl ReadAt for Vec<u8> {
    fn length(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let end = start.saturating_add(out.len());
        let bytes = self
            .get(start..end)
            .ok_or(std::io::ErrorKind::UnexpectedEof)?;
        out.copy_from_slice(bytes);
        Ok(())
    }
}

/// Pieces of a file that lie at most this far apart are read in one call: a copy of two pages costs
/// about as much as the call it saves. So at most this much is read too much for each piece.
pub(crate) const GAP: u64 = 8 << 10;

/// One call that joins pieces spans at most this much: so much memory a read needs besides its
/// target.
pub(crate) const SPAN: u64 = 1 << 20;

/// One call joins at most this many pieces.
const PIECES: usize = 8 << 10;

/// A file of known length, opened when it is first read; or what stands for one.
#[derive(Debug)]
pub(crate) struct Positioned {
    path: PathBuf,
    length: u64,
    handle: OnceLock<Handle>,
    /// What is read instead of a file.
    reader: Option<Arc<dyn ReadAt>>,
}

#[cfg(unix)]
type Handle = File;
#[cfg(not(unix))]
type Handle = std::sync::Mutex<File>;

impl Positioned {
    /// Opens a file and notes its length.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| Error::io(path, "open", &e))?;
        let data = file.metadata().map_err(|e| Error::io(path, "open", &e))?;
        // A folder can be opened, and some devices have no end.
        if !data.is_file() {
            return Err(Error::Io {
                path: path.into(),
                action: "open",
                reason: "not an ordinary file".into(),
            });
        }
        let out = Self {
            path: path.into(),
            length: data.len(),
            handle: OnceLock::new(),
            reader: None,
        };
        out.set(file);
        Ok(out)
    }

    /// What `reader` has; `path` is for errors.
    pub(crate) fn reading(path: &Path, reader: Arc<dyn ReadAt>) -> Self {
        Self {
            path: path.into(),
            length: reader.length(),
            handle: OnceLock::new(),
            reader: Some(reader),
        }
    }

    /// Closes the file until it is read again, so that a folder of many files does not hold as many
    /// open.
    pub(crate) fn close(&mut self) {
        self.handle = OnceLock::new();
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn len(&self) -> u64 {
        self.length
    }

    /// Reads exactly the bytes at `offset`.
    pub(crate) fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        match &self.reader {
            Some(reader) => reader.read_at(offset, out),
            None => read_exact(self.handle()?, offset, out),
        }
        .map_err(|e| Error::io(&self.path, "read", &e))
    }

    /// Reads the elements of a region of a tensor that starts at `base` and whose neighbours along
    /// each dimension lie `strides` bytes apart, in row-major order.
    ///
    /// Falling strides are read as they come; others in the order of the file and then put into
    /// place, a slab of at most [`SPAN`] (or one index of the dimension that is outermost in the
    /// file) at a time.
    pub(crate) fn read_strided(
        &self,
        base: u64,
        strides: &[u64],
        region: &Region,
        size: usize,
        out: &mut [u8],
    ) -> Result<()> {
        let rank = strides.len();
        let mut order: Vec<usize> = (0..rank).filter(|&d| region.shape[d] != 1).collect();
        let in_order = order.windows(2).all(|w| strides[w[0]] >= strides[w[1]]);
        let base = (0..rank).fold(base, |at, d| at + strides[d] * region.start[d] as u64);
        let dims = |order: &[usize]| {
            order
                .iter()
                .map(|&d| (strides[d], region.shape[d]))
                .collect::<Vec<_>>()
        };
        if region.numel() == 0 || in_order {
            return self.read_runs(base, &dims(&order), size, out);
        }
        // Where an index of each dimension leads in `out`.
        let mut steps = vec![size; rank];
        for d in (0..rank.saturating_sub(1)).rev() {
            steps[d] = steps[d + 1] * region.shape[d + 1];
        }
        order.sort_by_key(|&d| std::cmp::Reverse(strides[d]));
        let outer = order[0];
        let row = region.numel() / region.shape[outer] * size;
        let rows = (SPAN as usize / row).clamp(1, region.shape[outer]);
        let mut slab = vec![0; rows * row];
        for first in (0..region.shape[outer]).step_by(rows) {
            let count = rows.min(region.shape[outer] - first);
            let mut slab_dims = dims(&order);
            slab_dims[0].1 = count;
            let slab = &mut slab[..count * row];
            self.read_runs(base + strides[outer] * first as u64, &slab_dims, size, slab)?;
            let mut odometer = Odometer::new(
                &order
                    .iter()
                    .zip(&slab_dims)
                    .map(|(&d, &(_, n))| (steps[d] as u64, n))
                    .collect::<Vec<_>>(),
            );
            for element in slab.chunks_exact(size) {
                let at = first * steps[outer] + odometer.at as usize;
                out[at..at + size].copy_from_slice(element);
                odometer.next();
            }
        }
        Ok(())
    }

    /// Reads what `dims` (bytes from one index to the next, number of indices) lead to, one after
    /// the other, into `out`.
    fn read_runs(
        &self,
        base: u64,
        dims: &[(u64, usize)],
        size: usize,
        out: &mut [u8],
    ) -> Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        // Trailing dimensions that leave no holes are one run.
        let (mut run, mut outer) = (size, dims.len());
        while outer > 0 && dims[outer - 1].0 == run as u64 {
            run *= dims[outer - 1].1;
            outer -= 1;
        }
        let mut odometer = Odometer::new(&dims[..outer]);
        let mut scratch = vec![];
        // The runs that the next call reads: where they begin, what they span, and where in `out`
        // they start.
        let mut starts: Vec<u64> = vec![];
        let mut span: Range<u64> = 0..0;
        let mut done = 0;
        loop {
            let (start, end) = (base + odometer.at, base + odometer.at + run as u64);
            let joins = start >= span.start
                && start <= span.end.saturating_add(GAP)
                && end.max(span.end) - span.start <= SPAN;
            if starts.len() == PIECES || (!starts.is_empty() && !joins) {
                done += self.read_group(&span, &starts, run, &mut scratch, &mut out[done..])?;
                starts.clear();
            }
            span = if starts.is_empty() {
                start..end
            } else {
                span.start..end.max(span.end)
            };
            starts.push(start);
            if !odometer.next() {
                self.read_group(&span, &starts, run, &mut scratch, &mut out[done..])?;
                return Ok(());
            }
        }
    }

    /// Reads one span and copies its runs out; returns how many bytes those are.
    fn read_group(
        &self,
        span: &Range<u64>,
        starts: &[u64],
        run: usize,
        scratch: &mut Vec<u8>,
        out: &mut [u8],
    ) -> Result<usize> {
        let out = &mut out[..starts.len() * run];
        if let [start] = starts {
            self.read_at(*start, out)?;
            return Ok(run);
        }
        scratch.resize((span.end - span.start) as usize, 0);
        self.read_at(span.start, scratch)?;
        for (target, start) in out.chunks_exact_mut(run).zip(starts) {
            let from = (start - span.start) as usize;
            target.copy_from_slice(&scratch[from..from + run]);
        }
        Ok(out.len())
    }

    fn handle(&self) -> Result<&Handle> {
        if let Some(handle) = self.handle.get() {
            return Ok(handle);
        }
        let again = Self::open(&self.path)?;
        if again.length != self.length {
            let reason = format!(
                "it had {} bytes when it was first opened and has {} now",
                self.length, again.length
            );
            return Err(Error::Io {
                path: self.path.clone(),
                action: "open",
                reason,
            });
        }
        Ok(match again.handle.into_inner() {
            Some(handle) => self.handle.get_or_init(|| handle),
            None => {
                return Err(Error::Io {
                    path: self.path.clone(),
                    action: "open",
                    reason: "it was closed meanwhile".into(),
                });
            }
        })
    }

    #[cfg(unix)]
    fn set(&self, file: File) {
        self.handle.get_or_init(|| file);
    }

    #[cfg(not(unix))]
    fn set(&self, file: File) {
        self.handle.get_or_init(|| std::sync::Mutex::new(file));
    }
}

#[cfg(unix)]
fn read_exact(handle: &Handle, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(handle, out, offset)
}

#[cfg(not(unix))]
fn read_exact(handle: &Handle, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
    use std::io::{Read, Seek, SeekFrom};
    let mut file = handle
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    file.seek(SeekFrom::Start(offset))?;
    file.read_exact(out)
}

/// Counts through dimensions, the last fastest, and knows the offset it is at.
struct Odometer {
    dims: Vec<(u64, usize)>,
    index: Vec<usize>,
    at: u64,
}

impl Odometer {
    fn new(dims: &[(u64, usize)]) -> Self {
        Self {
            dims: dims.to_vec(),
            index: vec![0; dims.len()],
            at: 0,
        }
    }

    /// The next index; `false` when it was the last.
    fn next(&mut self) -> bool {
        for d in (0..self.dims.len()).rev() {
            let (step, count) = self.dims[d];
            self.index[d] += 1;
            if self.index[d] < count {
                self.at += step;
                return true;
            }
            self.at -= step * (count - 1) as u64;
            self.index[d] = 0;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_order_of_strides_is_read_to_the_same_elements() {
        let path = std::env::temp_dir().join(format!("anymesh-positioned-{}", std::process::id()));
        let bytes: Vec<u8> = (0..40_000u32)
            .flat_map(|i| (i as u16).to_le_bytes())
            .collect();
        std::fs::write(&path, &bytes).expect("a temporary file");
        let mut file = Positioned::open(&path).expect("it was just written");
        let region = |start: &[usize], shape: &[usize]| Region {
            start: start.iter().copied().collect(),
            shape: shape.iter().copied().collect(),
        };
        for (strides, part) in [
            ([2000, 100, 2], region(&[1, 2, 3], &[5, 6, 7])),
            ([2, 100, 2000], region(&[1, 2, 3], &[7, 6, 5])),
            ([100, 2, 2000], region(&[0, 2, 3], &[6, 50, 1])),
            ([20_000, 2, 100], region(&[1, 0, 0], &[2, 50, 9])),
            ([0, 4, 2], region(&[3, 2, 3], &[5, 6, 7])),
            ([6, 4, 0], region(&[0, 2, 3], &[4, 3, 2])),
            ([2000, 100, 2], region(&[1, 2, 3], &[5, 0, 7])),
        ] {
            file.close();
            let mut out = vec![0; part.numel() * 2];
            file.read_strided(4, &strides, &part, 2, &mut out)
                .expect("inside the file");
            let mut expected = vec![];
            for i in 0..part.shape[0] {
                for j in 0..part.shape[1] {
                    for k in 0..part.shape[2] {
                        let at = 4 + [i, j, k]
                            .iter()
                            .zip(&part.start)
                            .zip(&strides)
                            .map(|((x, s), step)| (x + s) * *step as usize)
                            .sum::<usize>();
                        expected.extend_from_slice(&bytes[at..at + 2]);
                    }
                }
            }
            assert_eq!(out, expected, "{strides:?} {part:?}");
        }
        std::fs::remove_file(&path).expect("it is ours");
    }
}

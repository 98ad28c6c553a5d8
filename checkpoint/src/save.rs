//! Writing a checkpoint: into a temporary folder, synced, then renamed in one step.

use crate::{
    Error, Result, Source, TensorInfo,
    files::{Disk, Files, Output},
    manifest::{self, BLOCK, Manifest, Stored, StoredBox, checksum},
    plan::{self, Piece, Placed},
};
use anymesh_core::{DType, Region, Tensor};
use serde_json::{Map, Value, json};
use std::{
    collections::BTreeMap,
    fs::File,
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

/// How a checkpoint is saved.
pub struct Saver<'a> {
    /// The file system.
    pub files: &'a dyn Files,
    /// Threads that write at the same time.
    pub threads: usize,
    /// Bytes that may be held in memory at once, over all threads, beside the tensors themselves. Boxes are cut so that they fit.
    pub memory: usize,
    /// Called from the writing threads with the bytes done and all there are.
    pub progress: Option<&'a (dyn Fn(usize, usize) + Sync)>,
}

impl std::fmt::Debug for Saver<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Saver({:?}, {} threads)", self.files, self.threads)
    }
}

impl Default for Saver<'_> {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        Self { files: &Disk, threads, memory: threads * plan::LARGEST_BOX, progress: None }
    }
}

/// Saves tensors as the checkpoint `name` in the folder `root`. See [`Saver::save`].
pub fn save(root: &Path, name: &str, step: u64, tensors: &BTreeMap<String, Tensor>, state: &Map<String, Value>) -> Result<PathBuf> {
    Saver::default().save(root, name, step, tensors, state)
}

impl Saver<'_> {
    /// Saves tensors, however they lie, and state as the checkpoint `name` in the folder `root`, and returns its path. A crash at any instant leaves what was there before, or the
    /// new checkpoint whole. Another process that writes to the same root is an error.
    pub fn save(&self, root: &Path, name: &str, step: u64, tensors: &BTreeMap<String, Tensor>, state: &Map<String, Value>) -> Result<PathBuf> {
        for (tensor, x) in tensors {
            if x.sharding().is_partial() {
                return Err(Error::Argument(format!("tensor '{tensor}' is {}, a partial value: reshard it first, which says what it sends", x.type_string())));
            }
            if x.mesh().addressable().len() != x.mesh().ranks() {
                return Err(Error::Argument(format!("tensor '{tensor}' lies on ranks of other processes: saving from several processes is not supported yet")));
            }
        }
        let placed = tensors.iter().map(|(name, x)| (name.clone(), Placed::of(x))).collect();
        self.commit(root, name, step, &placed, &|piece| bytes_of(&tensors[&piece.tensor], &piece.region), state)
    }

    /// Saves the tensors of any source, laid out in files as tensors that lie so would be, in bounded memory.
    pub fn save_source(
        &self,
        root: &Path,
        name: &str,
        step: u64,
        source: &dyn Source,
        layout: &BTreeMap<String, Placed>,
        state: &Map<String, Value>,
    ) -> Result<PathBuf> {
        if let Some((tensor, dtype)) = source.foreign().first() {
            return Err(Error::Argument(format!("tensor '{tensor}' has the type {dtype}, which this library has none for: remove it from the source first")));
        }
        for (tensor, placed) in layout {
            if *source.info(tensor)? != placed.info {
                return Err(Error::Argument(format!("tensor '{tensor}' is {:?}, to be stored as {:?}", source.info(tensor)?, placed.info)));
            }
            placed.sharding.check(&placed.mesh, placed.info.shape.len())?;
        }
        let read = |piece: &Piece| {
            let mut bytes = vec![0; piece.region.numel() * layout[&piece.tensor].info.dtype.size()];
            source.read(&piece.tensor, &piece.region, &mut bytes)?;
            Ok(bytes)
        };
        self.commit(root, name, step, layout, &read, state)
    }

    /// Writes everything into a temporary folder and renames it.
    pub(crate) fn commit(
        &self,
        root: &Path,
        name: &str,
        step: u64,
        placed: &BTreeMap<String, Placed>,
        read: &Read<'_>,
        state: &Map<String, Value>,
    ) -> Result<PathBuf> {
        if name.is_empty() || name.starts_with('.') || name.contains(['/', '\\', '\0']) {
            return Err(Error::Argument(format!("'{name}' cannot name a checkpoint: use a file name that does not begin with a dot")));
        }
        self.files.create_folder(root)?;
        let _lock = lock(root)?;
        let (path, temporary) = (root.join(name), root.join(format!(".tmp-{name}")));
        if path.exists() {
            return Err(Error::Argument(format!("{} exists already: remove it or choose another name", path.display())));
        }
        if temporary.exists() {
            // What a crash left behind: nobody else writes here, since we have the lock.
            self.files.remove_folder(&temporary)?;
        }
        self.files.create_folder(&temporary)?;
        let written = self.write(&temporary, step, placed, read, state).and_then(|()| {
            self.files.rename(&temporary, &path)?;
            self.files.sync_folder(root)
        });
        match written {
            Ok(()) => Ok(path),
            Err(error) => {
                // Best effort: what is left is not a checkpoint, and the next save removes it.
                let _ = self.files.remove_folder(&temporary);
                Err(error)
            }
        }
    }

    /// Writes data files, then the manifest.
    fn write(&self, folder: &Path, step: u64, placed: &BTreeMap<String, Placed>, read: &Read<'_>, state: &Map<String, Value>) -> Result<()> {
        let threads = self.threads.max(1);
        let largest = (self.memory / threads).min(plan::LARGEST_BOX);
        let work: Vec<(usize, Vec<Piece>)> = plan::owners(placed, largest).into_iter().collect();
        let total: usize = placed.values().map(|p| p.info.bytes()).sum();
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let results: Mutex<Vec<Result<DataFile>>> = Mutex::new(vec![]);
        let run = || {
            while let Some((rank, pieces)) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
                let tell = |bytes: usize| {
                    let done = done.fetch_add(bytes, Ordering::Relaxed) + bytes;
                    if let Some(progress) = self.progress {
                        progress(done, total);
                    }
                };
                let file = write_file(self.files, folder, *rank, pieces, placed, read, &tell);
                results.lock().unwrap_or_else(PoisonError::into_inner).push(file);
            }
        };
        std::thread::scope(|scope| {
            (1..threads.min(work.len())).for_each(|_| drop(scope.spawn(run)));
            run();
        });
        let mesh = placed.values().map(|p| &p.mesh).find(|m| m.ranks() > 1);
        let mut manifest = Manifest {
            format: "anymesh-checkpoint".into(),
            version: manifest::VERSION,
            step,
            mesh: mesh.map(|m| m.axes().iter().map(|(name, size)| (name.to_string(), *size)).collect()).unwrap_or_default(),
            tensors: BTreeMap::new(),
            files: BTreeMap::new(),
            state: state.clone(),
        };
        for (name, Placed { info, mesh, sharding }) in placed {
            let layout = sharding.type_string(info.dtype, &info.shape.as_slice().into(), mesh);
            manifest.tensors.insert(name.clone(), Stored { dtype: info.dtype.name().into(), shape: info.shape.clone(), layout, boxes: vec![] });
        }
        for file in results.into_inner().unwrap_or_else(PoisonError::into_inner) {
            let DataFile { name, bytes, boxes } = file?;
            manifest.files.insert(name, bytes);
            for (tensor, stored) in boxes {
                if let Some(to) = manifest.tensors.get_mut(&tensor) {
                    to.boxes.push(stored);
                }
            }
        }
        manifest.tensors.values_mut().for_each(|t| t.boxes.sort_by(|a, b| a.start.cmp(&b.start)));
        let mut out = self.files.create(&folder.join(manifest::NAME))?;
        out.write(manifest.to_text().as_bytes())?;
        out.sync()?;
        drop(out);
        self.files.sync_folder(folder)
    }
}

/// Gives the bytes of a box.
pub(crate) type Read<'a> = dyn Fn(&Piece) -> Result<Vec<u8>> + Sync + 'a;

/// Keeps other writers out of a folder for as long as it lives; the system releases it when the process ends, however that happens.
pub(crate) fn lock(root: &Path) -> Result<File> {
    let path = root.join(".lock");
    let file = File::options().create(true).truncate(false).write(true).open(&path).map_err(|e| Error::io(&path, "open", &e))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(_) => Err(Error::Io { path, action: "lock", reason: "another process is writing checkpoints here: wait for it, or use another folder".into() }),
    }
}

/// What one data file holds.
struct DataFile {
    name: String,
    bytes: u64,
    boxes: Vec<(String, StoredBox)>,
}

/// The name of a dtype in safetensors files.
pub(crate) fn safetensors_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "F64",
        DType::F32 => "F32",
        DType::F16 => "F16",
        DType::BF16 => "BF16",
        DType::F8E4M3 => "F8_E4M3",
        DType::F8E5M2 => "F8_E5M2",
        DType::I64 => "I64",
        DType::I32 => "I32",
        DType::U32 => "U32",
        DType::U8 => "U8",
        DType::Bool => "BOOL",
    }
}

/// The name of a box in its file: that of the tensor, with the ranges where it is not all of it.
fn entry_name(piece: &Piece, info: &TensorInfo) -> String {
    if piece.region == info.whole() {
        return piece.tensor.clone();
    }
    let ranges: Vec<String> = piece.region.start.iter().zip(&piece.region.shape).map(|(start, n)| format!("{start}:{}", start + n)).collect();
    format!("{}@{}", piece.tensor, ranges.join(","))
}

/// Writes the boxes of a rank as one safetensors file.
fn write_file(
    files: &dyn Files,
    folder: &Path,
    rank: usize,
    pieces: &[Piece],
    placed: &BTreeMap<String, Placed>,
    read: &Read<'_>,
    tell: &dyn Fn(usize),
) -> Result<DataFile> {
    let name = format!("rank-{rank:05}.safetensors");
    let mut header = Map::new();
    let mut end = 0usize;
    for piece in pieces {
        let info = &placed[&piece.tensor].info;
        let (begin, shape) = (end, piece.region.shape.to_vec());
        end += piece.region.numel() * info.dtype.size();
        header.insert(entry_name(piece, info), json!({"dtype": safetensors_name(info.dtype), "shape": shape, "data_offsets": [begin, end]}));
    }
    let mut text = Value::Object(header).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut out = files.create(&folder.join(&name))?;
    out.write(&(text.len() as u64).to_le_bytes())?;
    out.write(&text)?;
    let mut offset = 8 + text.len() as u64;
    let mut boxes = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let bytes = read(piece)?;
        let sums = bytes.chunks(BLOCK as usize).map(checksum).collect();
        write_in_blocks(&mut *out, &bytes)?;
        tell(bytes.len());
        let (start, shape) = (piece.region.start.to_vec(), piece.region.shape.to_vec());
        boxes.push((piece.tensor.clone(), StoredBox { start, shape, file: name.clone(), offset, sums }));
        offset += bytes.len() as u64;
    }
    out.sync()?;
    Ok(DataFile { name, bytes: offset, boxes })
}

/// Large writes in pieces, so that a failure in between is tested like any other.
fn write_in_blocks(out: &mut dyn Output, bytes: &[u8]) -> Result<()> {
    bytes.chunks(16 * BLOCK as usize).try_for_each(|block| out.write(block))
}

/// The bytes of a box of a tensor, from a rank that holds it.
pub(crate) fn bytes_of(x: &Tensor, region: &Region) -> Result<Vec<u8>> {
    let holds = |of: &Region| (0..region.start.len()).all(|d| of.start[d] <= region.start[d] && region.start[d] + region.shape[d] <= of.start[d] + of.shape[d]);
    for (rank, part) in x.shards() {
        let of = x.sharding().region(x.mesh(), rank, x.shape());
        if holds(&of) {
            let cut = |part: Tensor, d: usize| part.narrow(d as i64, region.start[d] - of.start[d], region.shape[d]);
            return Ok((0..region.start.len()).try_fold(part, cut)?.to_bytes()?);
        }
    }
    Err(Error::Argument(format!("no rank of this process holds the box {region:?} of {}", x.type_string())))
}

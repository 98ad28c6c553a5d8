//! Writing a checkpoint: the data files of this process. What makes them a checkpoint is in
//! `commit`.

use crate::{
    Contents, Error, Result, Source, TensorInfo,
    commit::{Begun, Head, Written},
    files::{Disk, Files},
    manifest::{BLOCK, StoredBox, checksum},
    plan::{self, Piece, Placed},
    safetensors::header_of,
    world::World,
};
use anymesh_core::Mesh;
use serde_json::{Map, Value};
use std::{
    collections::{BTreeMap, HashSet},
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
    /// Bytes that may be held in memory at once, over all threads, beside the tensors themselves.
    /// Boxes are cut so that they fit.
    pub memory: usize,
    /// Called from the writing threads with the bytes done and all that this process writes.
    pub progress: Option<&'a (dyn Fn(usize, usize) + Sync)>,
    /// A mesh over all processes that save together. `None` takes the largest mesh of the tensors
    /// that has ranks in other processes, if any has.
    pub world: Option<Mesh>,
}

impl std::fmt::Debug for Saver<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Saver({:?}, {} threads)", self.files, self.threads)
    }
}

impl Default for Saver<'_> {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        Self {
            files: &Disk,
            threads,
            memory: threads * plan::TILE,
            progress: None,
            world: None,
        }
    }
}

/// Saves what a program keeps as the checkpoint `name` in the folder `root`. See [`Saver::save`].
pub fn save(root: &Path, name: &str, contents: &Contents) -> Result<PathBuf> {
    Saver::default().save(root, name, contents)
}

impl Saver<'_> {
    /// Saves what a program keeps, however it lies, as the checkpoint `name` in the folder `root`,
    /// and returns its path. A crash at any instant leaves what was there before, or the new
    /// checkpoint whole. Somebody else who writes to the same root is an error.
    ///
    /// Where tensors lie on ranks of several processes, every process makes this call with the same
    /// names and layouts, and `root` is a folder that all of them see. Each writes what its ranks
    /// hold; the first one commits when all are done. Where one fails, all get an error and nothing
    /// is committed.
    pub fn save(&self, root: &Path, name: &str, contents: &Contents) -> Result<PathBuf> {
        let (world, kept) = (self.world_of(contents), contents.stored());
        let begun = Begun::new(
            self.files,
            root,
            name,
            world,
            kept.as_ref().map(|_| ()).map_err(Error::clone),
        )?;
        let kept = kept?;
        let placed: BTreeMap<String, Placed> = kept
            .iter()
            .map(|(name, k)| (name.clone(), k.placed.clone()))
            .collect();
        let work = begun.world.share(plan::owners(&placed, self.largest()));
        let written = self.write(&begun.folder, &work, &placed, &|piece, out| {
            kept[&piece.tensor].copy(&piece.region, out)
        });
        begun.complete(
            self.files,
            written,
            &Head {
                step: contents.step,
                state: &contents.state,
                placed: &placed,
            },
        )
    }

    /// Saves the tensors of any source, laid out in files as tensors that lie so would be, in
    /// bounded memory.
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
            return Err(Error::Argument(format!(
                "tensor '{tensor}' has the type {dtype}, which this library has none for: remove it from the source first"
            )));
        }
        for (tensor, placed) in layout {
            if *source.info(tensor)? != placed.info {
                return Err(Error::Argument(format!(
                    "tensor '{tensor}' is {:?}, to be stored as {:?}",
                    source.info(tensor)?,
                    placed.info
                )));
            }
            placed
                .sharding
                .check(&placed.mesh, placed.info.shape.len())?;
        }
        let begun = Begun::new(self.files, root, name, World::of([].into_iter()), Ok(()))?;
        let work = begun.world.share(plan::owners(layout, self.largest()));
        let written = self.write(&begun.folder, &work, layout, &|piece, out| {
            source.read(&piece.tensor, &piece.region, out)
        });
        begun.complete(
            self.files,
            written,
            &Head {
                step,
                state,
                placed: layout,
            },
        )
    }

    /// The processes that save some contents together.
    pub(crate) fn world_of(&self, contents: &Contents) -> World {
        match &self.world {
            Some(mesh) => World::of([mesh].into_iter()),
            None => World::of(
                contents
                    .tensors
                    .values()
                    .chain(contents.fused.iter().map(|f| &f.buffer))
                    .map(|t| t.mesh()),
            ),
        }
    }

    /// The largest box: what a thread may hold.
    fn largest(&self) -> usize {
        (self.memory / self.threads.max(1)).min(plan::TILE)
    }

    /// Writes the data files of this process.
    pub(crate) fn write(
        &self,
        folder: &Path,
        work: &[(usize, Vec<Piece>)],
        placed: &BTreeMap<String, Placed>,
        read: &Read<'_>,
    ) -> Result<Written> {
        let size = |piece: &Piece| piece.region.numel() * placed[&piece.tensor].info.dtype.size();
        let total: usize = work.iter().flat_map(|(_, pieces)| pieces).map(size).sum();
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let results: Mutex<Vec<Result<DataFile>>> = Mutex::new(vec![]);
        let run = || {
            while let Some((id, pieces)) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
                let tell = |bytes: usize| {
                    let done = done.fetch_add(bytes, Ordering::Relaxed) + bytes;
                    if let Some(progress) = self.progress {
                        progress(done, total);
                    }
                };
                let file = write_file(self.files, folder, *id, pieces, placed, read, &tell);
                results
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(file);
            }
        };
        std::thread::scope(|scope| {
            (1..self.threads.min(work.len())).for_each(|_| drop(scope.spawn(run)));
            run();
        });
        let mut written = Written::of(placed);
        for file in results.into_inner().unwrap_or_else(PoisonError::into_inner) {
            let DataFile { name, bytes, boxes } = file?;
            written.files.insert(name, bytes);
            boxes
                .into_iter()
                .for_each(|(tensor, stored)| written.boxes.entry(tensor).or_default().push(stored));
        }
        self.files.sync_folder(folder)?;
        Ok(written)
    }
}

/// Gives the bytes of a box.
pub(crate) type Read<'a> = dyn Fn(&Piece, &mut [u8]) -> Result<()> + Sync + 'a;

/// What one data file holds.
struct DataFile {
    name: String,
    bytes: u64,
    boxes: Vec<(String, StoredBox)>,
}

/// The name of a box in its file: that of the tensor, with the ranges where it is not all of it.
fn entry_name(piece: &Piece, info: &TensorInfo) -> String {
    if piece.region == info.whole() {
        return piece.tensor.clone();
    }
    let ranges: Vec<String> = piece
        .region
        .start
        .iter()
        .zip(&piece.region.shape)
        .map(|(start, n)| format!("{start}:{}", start + n))
        .collect();
    format!("{}@{}", piece.tensor, ranges.join(","))
}

/// Writes the boxes of a rank as one safetensors file.
fn write_file(
    files: &dyn Files,
    folder: &Path,
    id: usize,
    pieces: &[Piece],
    placed: &BTreeMap<String, Placed>,
    read: &Read<'_>,
    tell: &dyn Fn(usize),
) -> Result<DataFile> {
    let name = format!("rank-{id:05}.safetensors");
    let mut taken = HashSet::new();
    let entry = |piece: &Piece| {
        let info = &placed[&piece.tensor].info;
        let mut name = entry_name(piece, info);
        // A tensor may be called what a box of another one is: readers of the file need names that
        // differ.
        while !taken.insert(name.clone()) {
            name.push('\'');
        }
        (
            name,
            TensorInfo {
                dtype: info.dtype,
                shape: piece.region.shape.to_vec(),
            },
        )
    };
    let entries: Vec<(String, TensorInfo)> = pieces.iter().map(entry).collect();
    let header = header_of(
        entries.iter().map(|(name, info)| (name, info)),
        &BTreeMap::new(),
    )?;
    let mut out = files.create(&folder.join(&name))?;
    out.write(&(header.len() as u64).to_le_bytes())?;
    out.write(&header)?;
    let mut offset = 8 + header.len() as u64;
    let mut boxes = Vec::with_capacity(pieces.len());
    let sizes = pieces
        .iter()
        .zip(&entries)
        .map(|(piece, (_, info))| (piece, info.bytes()));
    let mut memory = vec![0; sizes.clone().map(|(_, bytes)| bytes).max().unwrap_or(0)];
    for (piece, size) in sizes {
        let bytes = &mut memory[..size];
        read(piece, bytes)?;
        let sums = bytes.chunks(BLOCK).map(checksum).collect();
        out.write(bytes)?;
        tell(bytes.len());
        let (start, shape) = (piece.region.start.to_vec(), piece.region.shape.to_vec());
        boxes.push((
            piece.tensor.clone(),
            StoredBox {
                start,
                shape,
                file: name.clone(),
                offset,
                sums,
            },
        ));
        offset += bytes.len() as u64;
    }
    out.sync()?;
    Ok(DataFile {
        name,
        bytes: offset,
        boxes,
    })
}

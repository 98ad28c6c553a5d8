//! Writing a checkpoint: the data files of this process. What makes them a checkpoint is in
//! `commit`.

use crate::{
    Contents, Error, Result, Source, TensorInfo,
    commit::{Head, PendingCheckpoint, Written},
    files::{Disk, Files},
    manifest::{BLOCK, StoredRegion, checksum},
    plan::{self, Placed, Tile},
    safetensors::{header_of, refuse_foreign},
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
    /// Regions are cut so that they fit.
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
        let (world, tensors) = (self.world_of(contents)?, contents.stored_tensors());
        let pending = PendingCheckpoint::new(
            self.files,
            root,
            name,
            world,
            tensors.as_ref().map(|_| ()).map_err(Error::clone),
        )?;
        let tensors = tensors?;
        let placed: BTreeMap<String, Placed> = tensors
            .iter()
            .map(|(name, k)| (name.clone(), k.placed.clone()))
            .collect();
        let work = pending.world.share(plan::owners(&placed, self.largest()));
        let written = self.write(&pending.folder, &work, &placed, &|tile, out| {
            tensors[&tile.tensor].copy(&tile.region, out)
        });
        pending.complete(
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
        refuse_foreign(source, &root.join(name))?;
        for (tensor, placed) in layout {
            let found = source.info(tensor)?;
            if *found != placed.info {
                return Err(Error::TypeMismatch {
                    tensor: tensor.clone(),
                    found: found.clone(),
                    expected: placed.info.clone(),
                });
            }
            if placed.sharding.is_partial() {
                return Err(Error::Partial {
                    tensor: tensor.clone(),
                    layout: placed.layout(),
                });
            }
            placed
                .sharding
                .check(&placed.mesh, placed.info.shape.len())?;
        }
        let pending =
            PendingCheckpoint::new(self.files, root, name, World::of([].into_iter())?, Ok(()))?;
        let work = pending.world.share(plan::owners(layout, self.largest()));
        let written = self.write(&pending.folder, &work, layout, &|tile, out| {
            source.read(&tile.tensor, &tile.region, out)
        });
        pending.complete(
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
    pub(crate) fn world_of(&self, contents: &Contents) -> Result<World> {
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

    /// The largest region: what a thread may hold.
    fn largest(&self) -> usize {
        (self.memory / self.threads.max(1)).min(plan::TILE)
    }

    /// Writes the data files of this process.
    pub(crate) fn write(
        &self,
        folder: &Path,
        work: &[(usize, Vec<Tile>)],
        placed: &BTreeMap<String, Placed>,
        read: &Read<'_>,
    ) -> Result<Written> {
        let size = |tile: &Tile| tile.region.numel() * placed[&tile.tensor].info.dtype.size();
        let total: usize = work.iter().flat_map(|(_, tiles)| tiles).map(size).sum();
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let results: Mutex<Vec<Result<DataFile>>> = Mutex::new(vec![]);
        let run = || {
            while let Some((id, tiles)) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
                let tell = |bytes: usize| {
                    let done = done.fetch_add(bytes, Ordering::Relaxed) + bytes;
                    if let Some(progress) = self.progress {
                        progress(done, total);
                    }
                };
                let file = write_file(self.files, folder, *id, tiles, placed, read, &tell);
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
            let DataFile {
                name,
                bytes,
                regions,
            } = file?;
            written.files.insert(name, bytes);
            regions.into_iter().for_each(|(tensor, stored)| {
                written.regions.entry(tensor).or_default().push(stored)
            });
        }
        self.files.sync_folder(folder)?;
        Ok(written)
    }
}

/// Gives the bytes of a region.
pub(crate) type Read<'a> = dyn Fn(&Tile, &mut [u8]) -> Result<()> + Sync + 'a;

/// What one data file holds.
struct DataFile {
    name: String,
    bytes: u64,
    regions: Vec<(String, StoredRegion)>,
}

/// The name of a region in its file: that of the tensor, with the ranges where it is not all of it.
fn entry_name(tile: &Tile, info: &TensorInfo) -> String {
    if tile.region == info.whole() {
        return tile.tensor.clone();
    }
    let ranges: Vec<String> = tile
        .region
        .start
        .iter()
        .zip(&tile.region.shape)
        .map(|(start, n)| format!("{start}:{}", start + n))
        .collect();
    format!("{}@{}", tile.tensor, ranges.join(","))
}

/// Writes the regions of a rank as one safetensors file.
fn write_file(
    files: &dyn Files,
    folder: &Path,
    id: usize,
    tiles: &[Tile],
    placed: &BTreeMap<String, Placed>,
    read: &Read<'_>,
    tell: &dyn Fn(usize),
) -> Result<DataFile> {
    let name = format!("rank-{id:05}.safetensors");
    let mut taken = HashSet::new();
    let entry = |tile: &Tile| {
        let info = &placed[&tile.tensor].info;
        let mut name = entry_name(tile, info);
        // A tensor may be called what a region of another one is: readers of the file need names
        // that differ.
        while !taken.insert(name.clone()) {
            name.push('\'');
        }
        (
            name,
            TensorInfo {
                dtype: info.dtype,
                shape: tile.region.shape.to_vec(),
            },
        )
    };
    let entries: Vec<(String, TensorInfo)> = tiles.iter().map(entry).collect();
    let header = header_of(
        entries.iter().map(|(name, info)| (name, info)),
        &BTreeMap::new(),
    )?;
    let mut out = files.create(&folder.join(&name))?;
    out.write(&(header.len() as u64).to_le_bytes())?;
    out.write(&header)?;
    let mut offset = 8 + header.len() as u64;
    let mut regions = Vec::with_capacity(tiles.len());
    let sizes = tiles
        .iter()
        .zip(&entries)
        .map(|(tile, (_, info))| (tile, info.bytes()));
    let mut memory = vec![0; sizes.clone().map(|(_, bytes)| bytes).max().unwrap_or(0)];
    for (tile, size) in sizes {
        let bytes = &mut memory[..size];
        read(tile, bytes)?;
        let sums = bytes.chunks(BLOCK).map(checksum).collect();
        out.write(bytes)?;
        tell(bytes.len());
        let (start, shape) = (tile.region.start.to_vec(), tile.region.shape.to_vec());
        regions.push((
            tile.tensor.clone(),
            StoredRegion {
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
        regions,
    })
}

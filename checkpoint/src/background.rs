//! Saving while the program goes on.
//!
//! Tensors are values, so a snapshot is their handles: what the program computes next makes new
//! tensors and cannot leak into the file. The copies to the host are made tile by tile, when the
//! program says so ([`Background::advance`]); when the last is made, a thread writes them.
//!
//! Where several processes save together, the thread writes only what this process holds. The
//! processes meet in [`Background::begin`] and [`Background::finish`], which all of them call at
//! the same place of the program; no thread ever talks to another process.

use crate::{
    Checkpoint, Contents, Error, Result, Saver, TensorInfo,
    average::{Averages, average_name},
    commit::{Head, PendingCheckpoint, Written},
    contents::PlacedTensor,
    files::Disk,
    plan::{self, Placed, Tile},
};
use anymesh_core::{DType, Mesh};
use serde_json::{Map, Value};
use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    thread::JoinHandle,
};

/// Saves checkpoints in the background, one at a time.
///
/// ```
/// # use anymesh_checkpoint::{Background, Contents, latest};
/// # use anymesh_core::{DType, Tensor};
/// # use std::collections::BTreeMap;
/// # let name = format!("anymesh-doc-background-{}", std::process::id());
/// # let root = std::env::temp_dir().join(name);
/// # let device = anymesh_backend_cpu::device();
/// let mut w = Tensor::ones([1000], DType::F32, &device)?;
/// let mut saver = Background::new(&root);
/// saver.begin("step-1", &Contents::new(1, BTreeMap::from([("w".to_string(), w.clone())])))?;
/// while !saver.advance(1 << 20)? {
///     w = w.mul(0.9)?; // goes on while it is copied
/// }
/// saver.finish()?;
/// assert_eq!(latest(&root)?.expect("saved").values::<f32>("w")?, [1.0; 1000]);
/// # std::fs::remove_dir_all(&root).ok();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Background {
    root: PathBuf,
    world: Option<Mesh>,
    copying: Option<Copying>,
    writer: Option<JoinHandle<WriterOutcome>>,
    /// Whether the save that is under way is one of several processes.
    together: bool,
    averages: Option<Averages>,
    /// The last checkpoint that is whole.
    saved: Option<PathBuf>,
}

/// A snapshot on its way to the host.
#[derive(Debug)]
struct Copying {
    snapshot: Snapshot,
    tensors: BTreeMap<String, PlacedTensor>,
    /// What this process writes, file by file.
    work: Vec<(usize, Vec<Tile>)>,
    /// What is still to be copied, the next last.
    left: Vec<Tile>,
    copied: HashMap<Tile, Vec<u8>>,
}

/// What the manifest needs when all is written.
#[derive(Debug)]
struct Snapshot {
    pending: PendingCheckpoint,
    step: u64,
    state: Map<String, Value>,
    placed: BTreeMap<String, Placed>,
}

impl Snapshot {
    fn complete(self, written: Result<Written>) -> Result<PathBuf> {
        self.pending.complete(
            &Disk,
            written,
            &Head {
                step: self.step,
                state: &self.state,
                placed: &self.placed,
            },
        )
    }
}

/// What the thread that writes leaves.
#[derive(Debug)]
enum WriterOutcome {
    /// A checkpoint, or why there is none.
    Whole(Result<PathBuf>),
    /// The files of this process: the processes have yet to agree.
    Files(Box<Snapshot>, Result<Written>),
}

impl Background {
    /// Saves into this folder.
    pub fn new(root: impl AsRef<Path>) -> Self {
        Self {
            root: root.as_ref().into(),
            world: None,
            copying: None,
            writer: None,
            together: false,
            averages: None,
            saved: None,
        }
    }

    /// Saves together with all processes of this mesh. Without it, with those of the largest mesh
    /// of the tensors that has ranks in other processes, if any has.
    pub fn with_world(mut self, mesh: &Mesh) -> Self {
        self.world = Some(mesh.clone());
        self
    }

    /// Also keeps, on the host, an average of every float tensor:
    /// `decay * average + (1 - decay) * tensor` at each save, beginning with the first tensors as
    /// they are. It is saved beside them in f32, as `ema.` and the name. A run that goes on from a
    /// checkpoint gives it as `before`, and the averages in it go on too.
    pub fn with_average(mut self, decay: f64, before: Option<Checkpoint>) -> Result<Self> {
        self.averages = Some(Averages::new(decay, before)?);
        Ok(self)
    }

    /// Takes a snapshot, which costs handles and an empty folder. A save that is still being copied
    /// is completed first, and one that is still being written is waited for: there is never more
    /// than one snapshot in memory. The error of an earlier save comes out here.
    pub fn begin(&mut self, name: &str, contents: &Contents) -> Result<()> {
        self.finish()?;
        let world = Saver {
            world: self.world.clone(),
            ..Saver::default()
        }
        .world_of(contents)?;
        let ready = contents.stored_tensors().and_then(|tensors| {
            let placed: BTreeMap<String, Placed> = tensors
                .iter()
                .map(|(name, k)| (name.clone(), k.placed.clone()))
                .collect();
            let work = world.share(plan::owners(&placed, plan::TILE));
            if let Some(averages) = &mut self.averages {
                averages.begin(work.iter().flat_map(|(_, tiles)| tiles), &placed)?;
            }
            let taken = |name: &&String| {
                self.averages.is_some() && tensors.contains_key(&average_name(name))
            };
            match tensors.keys().find(taken) {
                Some(name) => Err(Error::DuplicateName {
                    name: average_name(name),
                    detail: format!(
                        "it is also the average of '{name}'; give the tensor another name"
                    ),
                }),
                None => Ok((tensors, placed, work)),
            }
        });
        let pending = PendingCheckpoint::new(
            &Disk,
            &self.root,
            name,
            world,
            ready.as_ref().map(|_| ()).map_err(Error::clone),
        )?;
        let (tensors, placed, work) = ready?;
        self.together = pending.world.is_shared();
        let left = work
            .iter()
            .flat_map(|(_, tiles)| tiles)
            .rev()
            .cloned()
            .collect();
        let snapshot = Snapshot {
            pending,
            step: contents.step,
            state: contents.state.clone(),
            placed,
        };
        self.copying = Some(Copying {
            snapshot,
            tensors,
            work,
            left,
            copied: HashMap::new(),
        });
        Ok(())
    }

    /// Copies about this many bytes to the host (at least one tile), and tells whether all are
    /// copied: then the writing has begun, or there was nothing to do. For calls between pieces of
    /// computation. The error of a save that has ended meanwhile comes out here, too.
    pub fn advance(&mut self, bytes: usize) -> Result<bool> {
        let Some(copying) = &mut self.copying else {
            // Where several processes save together, all of them learn of it in `finish`.
            if self.writer.as_ref().is_some_and(|w| w.is_finished()) && !self.together {
                self.wait()?;
            }
            return Ok(true);
        };
        let mut done = 0;
        let mut failed = None;
        while let Some(tile) = copying.left.pop() {
            let tensor = &copying.tensors[&tile.tensor];
            let mut data = vec![0; tile.region.numel() * tensor.placed.info.dtype.size()];
            match tensor.copy(&tile.region, &mut data) {
                Ok(()) => {
                    done += data.len();
                    if let Some(averages) = &mut self.averages {
                        averages.add(&tile, tensor.placed.info.dtype, &data);
                    }
                    copying.copied.insert(tile, data);
                }
                Err(error) => {
                    copying.left.clear();
                    failed = Some(error);
                }
            }
            if done >= bytes {
                break;
            }
        }
        if !copying.left.is_empty() {
            return Ok(false);
        }
        if let Some(copying) = self.copying.take() {
            self.write(copying, failed);
        }
        Ok(true)
    }

    /// Waits until everything is written, and returns the path of the last checkpoint.
    pub fn finish(&mut self) -> Result<Option<PathBuf>> {
        while !self.advance(usize::MAX)? {}
        self.wait()?;
        Ok(self.saved.clone())
    }

    /// Waits for the thread that writes.
    fn wait(&mut self) -> Result<()> {
        if let Some(writer) = self.writer.take() {
            let panicked = |_| {
                WriterOutcome::Whole(Err(Error::Argument(
                    "the thread that wrote the checkpoint panicked".into(),
                )))
            };
            self.saved = Some(match writer.join().unwrap_or_else(panicked) {
                WriterOutcome::Whole(result) => result?,
                WriterOutcome::Files(snapshot, written) => snapshot.complete(written)?,
            });
        }
        Ok(())
    }

    /// Starts to write.
    fn write(&mut self, copying: Copying, failed: Option<Error>) {
        let Copying {
            mut snapshot,
            mut work,
            copied,
            ..
        } = copying;
        let averages = self
            .averages
            .as_ref()
            .map(Averages::snapshot)
            .unwrap_or_default();
        if self.averages.is_some() {
            let floats: Vec<(String, Placed)> = snapshot
                .placed
                .iter()
                .filter(|(_, p)| p.info.dtype.is_float())
                .map(|(n, p)| (n.clone(), p.clone()))
                .collect();
            for (tensor, of) in floats {
                let info = TensorInfo {
                    dtype: DType::F32,
                    shape: of.info.shape.clone(),
                };
                snapshot
                    .placed
                    .insert(average_name(&tensor), Placed { info, ..of });
            }
            for (_, tiles) in &mut work {
                let named = |p: &Tile| Tile {
                    tensor: average_name(&p.tensor),
                    region: p.region.clone(),
                };
                let more: Vec<Tile> = tiles
                    .iter()
                    .map(named)
                    .filter(|p| averages.contains_key(p))
                    .collect();
                tiles.extend(more);
            }
        }
        let copied = Mutex::new(copied);
        self.writer = Some(std::thread::spawn(move || {
            let read = |tile: &Tile, out: &mut [u8]| {
                if let Some(values) = averages.get(tile) {
                    out.chunks_exact_mut(4)
                        .zip(values.iter())
                        .for_each(|(to, value)| to.copy_from_slice(&value.to_le_bytes()));
                    return Ok(());
                }
                // Taken out, so that its memory is freed as soon as it is written.
                let found = copied
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .remove(tile);
                out.copy_from_slice(&found.ok_or_else(|| {
                    Error::Argument(format!("a tile of '{}' was not copied", tile.tensor))
                })?);
                Ok(())
            };
            let saver = Saver {
                threads: 1,
                ..Saver::default()
            };
            let written = failed.map_or_else(
                || saver.write(&snapshot.pending.folder, &work, &snapshot.placed, &read),
                Err,
            );
            if snapshot.pending.world.is_shared() {
                WriterOutcome::Files(Box::new(snapshot), written)
            } else {
                WriterOutcome::Whole(snapshot.complete(written))
            }
        }));
    }
}

/// Completes what was pending. An error that nobody asked for is printed: there is no other way
/// left.
impl Drop for Background {
    fn drop(&mut self) {
        if let Err(error) = self.finish() {
            eprintln!(
                "a checkpoint in {} was not saved: {error}",
                self.root.display()
            );
        }
    }
}

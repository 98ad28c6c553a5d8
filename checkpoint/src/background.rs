//! Saving while the program goes on.
//!
//! Tensors are values, so a snapshot is their handles: what the program computes next makes new tensors and cannot leak into the file. The copies to the host
//! are made piece by piece, when the program says so ([`Background::advance`]); when the last is made, a thread writes them.

use crate::{
    Error, Result, Saver, TensorInfo,
    average::Averages,
    plan::{self, Piece, Placed},
    save::bytes_of,
};
use anymesh_core::Tensor;
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
/// # use anymesh_checkpoint::{Background, latest};
/// # use anymesh_core::{DType, Tensor};
/// # use std::collections::BTreeMap;
/// # let root = std::env::temp_dir().join(format!("anymesh-doc-background-{}", std::process::id()));
/// # let device = anymesh_backend_cpu::device();
/// let mut w = Tensor::ones([1000], DType::F32, &device)?;
/// let mut saver = Background::new(&root);
/// saver.begin("step-1", 1, &BTreeMap::from([("w".to_string(), w.clone())]), &Default::default())?;
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
    copying: Option<Copying>,
    writer: Option<JoinHandle<Result<PathBuf>>>,
    averages: Option<Averages>,
    /// The last checkpoint that is whole.
    saved: Option<PathBuf>,
}

/// A snapshot on its way to the host.
#[derive(Debug)]
struct Copying {
    name: String,
    step: u64,
    state: Map<String, Value>,
    tensors: BTreeMap<String, Tensor>,
    placed: BTreeMap<String, Placed>,
    /// What is still to be copied, the next last.
    left: Vec<Piece>,
    copied: HashMap<Piece, Vec<u8>>,
}

impl Background {
    /// Saves into this folder.
    pub fn new(root: impl AsRef<Path>) -> Self {
        Self { root: root.as_ref().into(), copying: None, writer: None, averages: None, saved: None }
    }

    /// Also keeps, on the host, an average of every float tensor: `decay * average + (1 - decay) * tensor` at each save, beginning with the first tensors as they are. It is
    /// saved beside them in f32, as `ema.` and the name.
    pub fn with_average(mut self, decay: f64) -> Result<Self> {
        self.averages = Some(Averages::new(decay)?);
        Ok(self)
    }

    /// Takes a snapshot. Costs nothing but handles; a save that is still being copied is completed first, and one that is still being written is waited for.
    /// The error of an earlier save comes out here.
    pub fn begin(&mut self, name: &str, step: u64, tensors: &BTreeMap<String, Tensor>, state: &Map<String, Value>) -> Result<()> {
        self.finish()?;
        if let Some((tensor, x)) = tensors.iter().find(|(_, x)| x.sharding().is_partial()) {
            return Err(Error::Argument(format!("tensor '{tensor}' is {}, a partial value: reshard it first, which says what it sends", x.type_string())));
        }
        let placed: BTreeMap<String, Placed> = tensors.iter().map(|(name, x)| (name.clone(), Placed::of(x))).collect();
        let left = plan::owners(&placed, CHUNK).into_values().flatten().rev().collect();
        self.copying = Some(Copying { name: name.into(), step, state: state.clone(), tensors: tensors.clone(), placed, left, copied: HashMap::new() });
        Ok(())
    }

    /// Copies about this many bytes to the host (at least one piece), and tells whether all are copied: then the writing has begun, or there was nothing to do. For calls
    /// between pieces of computation.
    pub fn advance(&mut self, bytes: usize) -> Result<bool> {
        let Some(copying) = &mut self.copying else { return Ok(true) };
        let mut done = 0;
        while let Some(piece) = copying.left.pop() {
            let data = bytes_of(&copying.tensors[&piece.tensor], &piece.region)?;
            done += data.len();
            if let Some(averages) = &mut self.averages {
                averages.add(&piece, &copying.placed[&piece.tensor].info, &data);
            }
            copying.copied.insert(piece, data);
            if done >= bytes {
                break;
            }
        }
        if !copying.left.is_empty() {
            return Ok(false);
        }
        self.wait()?;
        if let Some(copying) = self.copying.take() {
            self.write(copying);
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
            let panicked = |_| Err(Error::Argument("the thread that wrote the checkpoint panicked".into()));
            self.saved = Some(writer.join().unwrap_or_else(panicked)?);
        }
        Ok(())
    }

    /// Starts to write.
    fn write(&mut self, copying: Copying) {
        let Copying { name, step, state, mut placed, copied, .. } = copying;
        let averages = self.averages.as_mut().map(|a| a.snapshot(&placed)).unwrap_or_default();
        for (tensor, values) in &averages {
            let of = &placed[tensor];
            let info = TensorInfo { dtype: anymesh_core::DType::F32, shape: of.info.shape.clone() };
            debug_assert_eq!(info.numel(), values.len());
            let placed_average = Placed { info, ..of.clone() };
            placed.insert(average_name(tensor), placed_average);
        }
        let (root, copied) = (self.root.clone(), Mutex::new(copied));
        self.writer = Some(std::thread::spawn(move || {
            let read = |piece: &Piece| {
                if let Some((tensor, values)) = averages.iter().find(|(tensor, _)| average_name(tensor) == piece.tensor) {
                    return Ok(crate::average::part(values, &placed[tensor].info, &piece.region));
                }
                // Given away: memory is free again as the file grows.
                let found = copied.lock().unwrap_or_else(PoisonError::into_inner).remove(piece);
                found.ok_or_else(|| Error::Argument(format!("a piece of '{}' was not copied", piece.tensor)))
            };
            let saver = Saver { threads: 1, memory: CHUNK, ..Saver::default() };
            saver.commit(&root, &name, step, &placed, &read, &state)
        }));
    }
}

/// What is copied at once.
const CHUNK: usize = 4 << 20;

fn average_name(tensor: &str) -> String {
    format!("ema.{tensor}")
}

/// Completes what was begun. An error that nobody asked for is printed: there is no other way left.
impl Drop for Background {
    fn drop(&mut self) {
        if let Err(error) = self.finish() {
            eprintln!("a checkpoint in {} was not saved: {error}", self.root.display());
        }
    }
}

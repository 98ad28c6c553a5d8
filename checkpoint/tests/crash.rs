//! A save that dies at every operation, in several ways: before it, or with it half done, and with
//! what was not synced lost. The previous or the new checkpoint is always there, whole.

mod common;

use anymesh_checkpoint::{
    Checkpoint, Contents, Error, Keep, Result, Saver,
    files::{Disk, Files, Output},
    latest, rotate_with, save,
};
use anymesh_core::{DType, Mesh, Tensor};
use common::Temporary;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

/// What becomes of data that no sync has confirmed when the machine dies.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Loss {
    /// It reached the disk all the same (the process died, the machine did not).
    None,
    /// It is gone: files end at their last sync.
    Unsynced,
    /// Every other byte run of it is gone: files end in the middle.
    Half,
}

#[derive(Debug, Default)]
struct State {
    operations: usize,
    /// The operation at which everything stops.
    dies_at: usize,
    dead: bool,
    /// For each file the bytes written and the bytes synced.
    files: BTreeMap<PathBuf, (u64, u64)>,
}

/// The disk, until it dies.
#[derive(Clone, Debug)]
struct Mortal {
    state: Arc<Mutex<State>>,
}

impl Mortal {
    fn new(dies_at: usize) -> Self {
        Self {
            state: Arc::new(Mutex::new(State {
                dies_at,
                ..State::default()
            })),
        }
    }

    /// Counts an operation; an error where it is the last.
    fn step(&self, path: &Path) -> Result<()> {
        let mut state = self.state.lock().expect("not poisoned");
        state.operations += 1;
        state.dead |= state.operations >= state.dies_at;
        if state.dead {
            Err(Error::Io {
                path: path.into(),
                action: "anything",
                reason: "the machine died".into(),
            })
        } else {
            Ok(())
        }
    }

    /// What the disk has when the machine is up again.
    fn reboot(&self, loss: Loss, moved: impl Fn(&Path) -> PathBuf) {
        for (path, (written, synced)) in &self.state.lock().expect("not poisoned").files {
            let left = match loss {
                Loss::None => continue,
                Loss::Unsynced => *synced,
                Loss::Half => synced + (written - synced) / 2,
            };
            let path = if path.exists() {
                path.clone()
            } else {
                moved(path)
            };
            if let Ok(file) = std::fs::File::options().write(true).open(&path) {
                file.set_len(left).expect("a file can be cut");
            }
        }
    }
}

struct MortalFile {
    inner: Box<dyn Output>,
    path: PathBuf,
    disk: Mortal,
}

impl Output for MortalFile {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let alive = self.disk.step(&self.path);
        // The write that it dies in is half done.
        let bytes = if alive.is_err() {
            &bytes[..bytes.len() / 2]
        } else {
            bytes
        };
        self.inner.write(bytes)?;
        self.disk
            .state
            .lock()
            .expect("not poisoned")
            .files
            .entry(self.path.clone())
            .or_default()
            .0 += bytes.len() as u64;
        alive
    }

    fn sync(&mut self) -> Result<()> {
        self.disk.step(&self.path)?;
        let mut state = self.disk.state.lock().expect("not poisoned");
        if let Some((written, synced)) = state.files.get_mut(&self.path) {
            *synced = *written;
        }
        Ok(())
    }
}

impl Files for Mortal {
    fn create(&self, path: &Path) -> Result<Box<dyn Output>> {
        self.step(path)?;
        self.state
            .lock()
            .expect("not poisoned")
            .files
            .insert(path.into(), (0, 0));
        Ok(Box::new(MortalFile {
            inner: Disk.create(path)?,
            path: path.into(),
            disk: self.clone(),
        }))
    }

    fn create_folder(&self, path: &Path) -> Result<()> {
        self.step(path)?;
        Disk.create_folder(path)
    }

    fn sync_folder(&self, path: &Path) -> Result<()> {
        self.step(path)?;
        Disk.sync_folder(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.step(to)?;
        Disk.rename(from, to)
    }

    fn remove_folder(&self, path: &Path) -> Result<()> {
        if let Err(error) = self.step(path) {
            // The removal that it dies in is half done.
            if let Some(Ok(first)) = std::fs::read_dir(path)
                .ok()
                .and_then(|mut entries| entries.next())
            {
                std::fs::remove_file(first.path()).ok();
            }
            return Err(error);
        }
        Disk.remove_folder(path)
    }
}

fn model(value: f64) -> Result<BTreeMap<String, Tensor>> {
    let device = anymesh_backend_cpu::device();
    let mesh = Mesh::new("dp=2, tp=2", &device)?;
    let w = Tensor::full([64, 48], value, DType::F32, &device)?.to_mesh(&mesh, "[@dp, @tp]")?;
    let b = Tensor::full([300_000], value, DType::F64, &device)?.to_mesh(&mesh, "[@dp]")?;
    Ok(BTreeMap::from([
        ("w".into(), w),
        ("b".into(), b),
        (
            "scalar".into(),
            Tensor::full((), value, DType::BF16, &device)?,
        ),
    ]))
}

/// The value that all tensors of a checkpoint have, after reading all of it.
fn value(checkpoint: &Checkpoint) -> f64 {
    assert_eq!(checkpoint.verify(), [], "{:?}", checkpoint.path());
    let w = checkpoint.values::<f32>("w").expect("whole");
    let b = checkpoint.values::<f64>("b").expect("whole");
    assert!(w.iter().all(|v| f64::from(*v) == b[0]) && b.iter().all(|v| *v == b[0]));
    b[0]
}

#[test]
fn a_save_that_dies_anywhere_leaves_the_previous_or_the_new_checkpoint() {
    let (mut points, mut old, mut new) = (0, 0, 0);
    for loss in [Loss::None, Loss::Unsynced, Loss::Half] {
        for dies_at in 1.. {
            let root = Temporary::here();
            save(
                &root,
                "one",
                &Contents::new(1, model(1.0).expect("a model")),
            )
            .expect("a good disk");
            let disk = Mortal::new(dies_at);
            let saver = Saver {
                files: &disk,
                threads: 1,
                ..Saver::default()
            };
            let result = saver.save(
                &root,
                "two",
                &Contents::new(2, model(2.0).expect("a model")),
            );
            disk.reboot(loss, |path| {
                root.join("two").join(path.file_name().expect("a file"))
            });
            let found = latest(&root)
                .expect("readable")
                .expect("a checkpoint is left");
            match value(&found) {
                1.0 => old += 1,
                2.0 => new += 1,
                other => panic!("{other} after dying at {dies_at} with {loss:?}"),
            }
            if result.is_ok() {
                assert_eq!(value(&found), 2.0, "what was reported as saved is there");
                break;
            }
            points += 1;
            // The next save, by a machine that lives, is not in the way of what was left.
            save(
                &root,
                "three",
                &Contents::new(3, model(3.0).expect("a model")),
            )
            .expect("what was left does not matter");
            assert_eq!(
                value(&latest(&root).expect("readable").expect("a checkpoint")),
                3.0
            );
        }
    }
    println!(
        "{points} points of death, {old} times the previous checkpoint, {new} times the new one, 0 lost"
    );
    assert!(points > 40 && old > 40 && new >= 3);
}

#[test]
fn a_rotation_that_dies_anywhere_leaves_what_it_was_to_keep() {
    for dies_at in 1.. {
        let root = Temporary::here();
        for step in 1..=3 {
            save(
                &root,
                &format!("s{step}"),
                &Contents::new(step, model(step as f64).expect("a model")),
            )
            .expect("a good disk");
        }
        let result = rotate_with(
            &Mortal::new(dies_at),
            &root,
            &Keep {
                last: 1,
                ..Keep::default()
            },
        );
        assert_eq!(
            value(&latest(&root).expect("readable").expect("the newest")),
            3.0
        );
        for found in anymesh_checkpoint::list(&root).expect("readable") {
            assert!(
                found.step.is_ok(),
                "half removed and still in sight: {found:?}"
            );
        }
        if result.is_ok() {
            assert!(dies_at > 4);
            break;
        }
    }
}

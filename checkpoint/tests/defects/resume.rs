//! Going on with a run: random numbers, counters, moments, memory.

use super::start;
use crate::common::{Temporary, named};
use anymesh_checkpoint::{
    Checkpoint, Contents, Load, Memory, Result, Source, TensorInfo, Training, Weights, latest, save,
};
use anymesh_core::{DType, Mesh, Region, Sharding, Tensor, ops::Rng};
use serde_json::json;
use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

/// Paddle drops the state of its random generators when the number of ranks has changed. Random
/// keys are a seed and a counter here, and draw the same on any mesh.
#[test]
fn random_numbers_go_on_where_they_were_on_another_number_of_ranks() -> Result<()> {
    let (device, root) = start();
    let (eight, three) = (
        Mesh::new("dp=2, tp=4", &device)?,
        Mesh::new("x=3", &device)?,
    );
    let draw = |mesh: &Mesh, dim: usize, key: Rng| {
        Tensor::uniform(
            [7, 9],
            0.0,
            1.0,
            DType::F32,
            (mesh, &Sharding::replicated().cut(dim, 0)),
            key,
        )?
        .to_vec::<f32>()
    };
    // The counter runs out on the way: the key after the last is another seed's.
    let mut rng = Rng {
        seed: u64::MAX - 5,
        stream: u32::MAX - 3,
    };
    draw(&eight, 0, rng.split())?;
    let mut training = Training::default();
    training.set_rng("dropout", rng);
    let expected = (0..5)
        .map(|_| draw(&eight, 1, rng.split()))
        .collect::<Result<Vec<_>, _>>()?;
    save(
        &root,
        "one",
        &Contents {
            state: training.to_state(),
            ..Contents::new(1, BTreeMap::new())
        },
    )?;
    let state = latest(&root)?.expect("saved").manifest().state.clone();
    let mut again = Training::from_state(&state)?
        .rng("dropout")
        .expect("it was kept");
    for values in expected {
        assert_eq!(draw(&three, 0, again.split())?, values);
    }
    Ok(())
}

/// Paddle computes the consumed samples from the step and today's batch size, which is wrong as
/// soon as the batch changed. A load on more ranks failed on the state of the data loader
/// (torchtitan #811). Both are numbers of the whole run here, kept exactly.
#[test]
fn consumed_samples_and_the_place_in_the_data_are_numbers_that_were_saved() -> Result<()> {
    let root = Temporary::here();
    let mut training = Training::default();
    for (step, batch) in [(1, 32), (2, 32), (3, 7), (4, 1024)] {
        training.consumed_samples += batch;
        training.loader =
            json!({"shard": step, "offset": (1u64 << 53) + training.consumed_samples})
                .as_object()
                .cloned()
                .expect("an object");
        save(
            &root,
            &format!("s{step}"),
            &Contents {
                state: training.to_state(),
                ..Contents::new(step, BTreeMap::new())
            },
        )?;
    }
    let again = Training::from_state(&latest(&root)?.expect("saved").manifest().state)?;
    assert_eq!(
        (again.consumed_samples, &again.loader["offset"]),
        (1095, &json!(9_007_199_254_742_087u64))
    );
    assert_eq!(again, training);
    Ok(())
}

/// Optimizer moments were dropped without a word when saving and loading (AReaL #1468).
#[test]
fn moments_of_the_optimizer_are_never_dropped_in_silence() -> Result<()> {
    let (device, root) = start();
    let x = |v: f64, dtype| Tensor::full([4], v, dtype, &device);
    let all = named([
        ("w", x(1.0, DType::BF16)?),
        ("master.w", x(1.0, DType::F32)?),
        ("w.moment1", x(2.0, DType::F32)?),
        ("w.moment2", x(3.0, DType::F32)?),
    ]);
    for (weights, stored) in [
        (
            Weights::Both,
            vec!["master.w", "w", "w.moment1", "w.moment2"],
        ),
        (Weights::Model, vec!["w", "w.moment1", "w.moment2"]),
        (Weights::Masters, vec!["master.w", "w.moment1", "w.moment2"]),
    ] {
        let path = save(
            &root,
            &format!("{weights:?}"),
            &Contents {
                weights,
                ..Contents::new(1, all.clone())
            },
        )?;
        let checkpoint = Checkpoint::open(path)?;
        assert_eq!(
            checkpoint.tensors().keys().collect::<Vec<_>>(),
            stored,
            "{weights:?}"
        );
        // One that nobody asks for is told, and so is one that is not there.
        let mut less = all.clone();
        less.remove("w.moment2");
        let load = Load {
            rebuild: true,
            ..Load::default()
        };
        let error = load
            .replace(&checkpoint, &Contents::new(1, less))
            .expect_err("somebody forgot one");
        assert!(
            error.to_string().contains("'w.moment2' are in the source"),
            "{error}"
        );
        let more: BTreeMap<_, _> = all
            .clone()
            .into_iter()
            .chain(named([("w.moment3", x(0.0, DType::F32)?)]))
            .collect();
        let error = load
            .replace(&checkpoint, &Contents::new(1, more))
            .expect_err("it is not there");
        assert!(
            error
                .to_string()
                .contains("'w.moment3' are not in the source"),
            "{error}"
        );
        let loaded = load.replace(&checkpoint, &Contents::new(1, all.clone()))?;
        assert_eq!(loaded.tensors["w.moment2"].to_vec::<f32>()?, [3.0; 4]);
    }
    Ok(())
}

/// The most bytes that were asked for at the same time.
struct Watched {
    memory: Memory,
    now: AtomicUsize,
    most: AtomicUsize,
}

impl Source for Watched {
    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        self.memory.tensors()
    }

    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()> {
        let now = self.now.fetch_add(out.len(), Ordering::SeqCst) + out.len();
        self.most.fetch_max(now, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(1));
        let read = self.memory.read(name, region, out);
        self.now.fetch_sub(out.len(), Ordering::SeqCst);
        read
    }
}

/// A resume held 230 GiB on the host of each rank (marin #8480).
#[test]
fn a_load_keeps_the_limit_of_memory_it_was_given() -> Result<()> {
    let device = anymesh_backend_cpu::device();
    let mesh = Mesh::new("x=2", &device)?;
    let (mut memory, mut there) = (Memory::default(), BTreeMap::new());
    for i in 0..12 {
        let info = TensorInfo {
            dtype: DType::U8,
            shape: vec![100, 100 + 10 * i],
        };
        memory.insert(format!("w{i}"), info.clone(), vec![i as u8; info.bytes()])?;
        let x = Tensor::zeros(&info.shape[..], DType::U8, &device)?;
        there.insert(
            format!("w{i}"),
            if i % 2 == 0 {
                x
            } else {
                x.to_mesh(&mesh, "[_, @x]")?
            },
        );
    }
    let source = Watched {
        memory,
        now: AtomicUsize::new(0),
        most: AtomicUsize::new(0),
    };
    for limit in [1000, 15_000, 40_000] {
        source.most.store(0, Ordering::SeqCst);
        let loaded = Load {
            memory: limit,
            threads: 4,
            ..Load::default()
        }
        .replace(&source, &Contents::new(0, there.clone()))?;
        for (name, x) in loaded.tensors {
            assert_eq!(x.to_vec::<u8>()?, source.memory.read_all(&name)?);
        }
        let most = source.most.load(Ordering::SeqCst);
        assert!(most <= limit && most > limit / 3, "{most} of {limit}");
    }
    Ok(())
}

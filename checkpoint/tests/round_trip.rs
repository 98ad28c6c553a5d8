//! What was saved from one layout is loaded into any other, to the bit.

mod common;

use anymesh_checkpoint::{
    Checkpoint, Contents, Error, Keep, Load, Source, latest, list, matches, rotate, save,
};
use anymesh_core::{DType, Device, Mesh, Place, Sharding, Tensor};
use common::{Random, Temporary};
use serde_json::json;
use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicUsize, Ordering},
};

const MESHES: [&str; 7] = [
    "dp=2, tp=4",
    "dp=1, tp=8",
    "dp=4, tp=2",
    "x=1",
    "a=2, b=2, c=2",
    "x=3",
    "x=7",
];

/// A random way to lie on a mesh.
fn sharding(dice: &mut Random, mesh: &Mesh, rank: usize) -> Sharding {
    (0..mesh.axes().len()).fold(Sharding::replicated(), |s, axis| {
        match dice.below(rank + 1) {
            d if d < rank => s.cut(d, axis),
            _ => s,
        }
    })
}

/// Random bytes are every kind of number, NaN and infinities among them; a bool has only two.
fn tensor(dice: &mut Random, dtype: DType, shape: &[usize], device: &Device) -> (Tensor, Vec<u8>) {
    let n = shape.iter().product::<usize>() * dtype.size();
    let bytes: Vec<u8> = (0..n)
        .map(|_| dice.next() as u8)
        .map(|b| if dtype == DType::Bool { b & 1 } else { b })
        .collect();
    (
        Tensor::from_bytes(&bytes, dtype, shape, device).expect("fits"),
        bytes,
    )
}

#[test]
fn random_layouts_of_every_dtype_are_bit_equal_on_every_mesh() -> Result<(), Error> {
    let device = anymesh_backend_cpu::device();
    let mut dice = Random(1);
    let mut loaded = 0;
    for round in 0..60 {
        let root = Temporary::here();
        let from = Mesh::new(MESHES[round % MESHES.len()], &device)?;
        let (mut tensors, mut expected) = (BTreeMap::new(), BTreeMap::new());
        for i in 0..6 {
            let rank = dice.below(5);
            let shape: Vec<usize> = (0..rank).map(|_| dice.below(9)).collect();
            let (x, bytes) = tensor(
                &mut dice,
                DType::ALL[(round + i * 5) % DType::ALL.len()],
                &shape,
                &device,
            );
            let name = format!("layers.{i}.weight");
            let layout = sharding(&mut dice, &from, rank);
            tensors.insert(
                name.clone(),
                if dice.below(5) == 0 {
                    x
                } else {
                    x.to_mesh(&from, layout)?
                },
            );
            expected.insert(name, bytes);
        }
        let path = save(&root, "one", &Contents::new(round as u64, tensors.clone()))?;
        let checkpoint = Checkpoint::open(path)?;
        assert_eq!(checkpoint.verify(), []);
        let stored: usize = checkpoint
            .manifest()
            .tensors
            .values()
            .flat_map(|t| &t.regions)
            .map(|b| b.region().numel())
            .sum();
        assert_eq!(
            stored,
            tensors.values().map(Tensor::numel).sum::<usize>(),
            "replicas are stored once"
        );
        for axes in MESHES {
            let to = Mesh::new(axes, &device)?;
            for (name, bytes) in &expected {
                let layout = sharding(&mut dice, &to, checkpoint.info(name)?.shape.len());
                let x = checkpoint.load(
                    name,
                    Place {
                        mesh: to.clone(),
                        sharding: layout,
                    },
                )?;
                // Rank by rank: joining the parts would compute, and might make one NaN of another.
                for (rank, part) in x.shards() {
                    let region = x.sharding().region(&to, rank, x.shape());
                    let (size, whole) = (x.dtype().size(), checkpoint.info(name)?.whole());
                    let mut right = vec![0; region.numel() * size];
                    anymesh_checkpoint::copy_region(
                        bytes, &whole, &mut right, &region, &region, size,
                    );
                    assert_eq!(
                        part.to_bytes()?,
                        right,
                        "{name} from {} as {}, rank {rank}",
                        tensors[name].type_string(),
                        x.type_string()
                    );
                }
                loaded += 1;
            }
        }
        for (name, bytes) in &expected {
            assert_eq!(&checkpoint.load(name, &device)?.to_bytes()?, bytes);
            let info = checkpoint.info(name)?.clone();
            for _ in 0..4 {
                // Any region, also an empty one.
                let mut region = info.whole();
                for d in 0..info.shape.len() {
                    region.start[d] = dice.below(info.shape[d] + 1);
                    region.shape[d] = dice.below(info.shape[d] - region.start[d] + 1);
                }
                let (mut out, mut right) = (
                    vec![0; region.numel() * info.dtype.size()],
                    vec![0; region.numel() * info.dtype.size()],
                );
                checkpoint.read(name, &region, &mut out)?;
                anymesh_checkpoint::copy_region(
                    bytes,
                    &info.whole(),
                    &mut right,
                    &region,
                    &region,
                    info.dtype.size(),
                );
                assert_eq!(out, right);
            }
        }
    }
    assert_eq!(loaded, 60 * 6 * MESHES.len());
    Ok(())
}

#[test]
fn tensors_of_many_blocks_and_regions_are_read_in_parts() -> Result<(), Error> {
    let device = anymesh_backend_cpu::device();
    let root = Temporary::here();
    let mesh = Mesh::new("x=2", &device)?;
    // 80 MB on each rank: over one region and many blocks.
    let x = Tensor::arange(0, 40_000_000, 1, DType::I32, &device)?.reshape([8000, 5000])?;
    let tensors = BTreeMap::from([("w".to_string(), x.to_mesh(&mesh, "[@x, _]")?)]);
    let checkpoint = Checkpoint::open(save(&root, "one", &Contents::new(0, tensors.clone()))?)?;
    assert!(checkpoint.manifest().tensors["w"].regions.len() >= 4);
    let columns = checkpoint.load("w", (&mesh, &Sharding::replicated().cut(1, 0)))?;
    assert_eq!(columns.shards()[1].1.dims(), [8000, 2500]);
    assert_eq!(
        columns
            .eq(&x.to_mesh(&mesh, "[_, @x]")?)?
            .all(&[], false)?
            .to_vec::<bool>()?,
        [true]
    );
    Ok(())
}

#[test]
fn state_and_steps_are_found_again_and_the_newest_is_by_manifest_not_by_name() -> Result<(), Error>
{
    let device = anymesh_backend_cpu::device();
    let root = Temporary::here();
    assert!(latest(&root)?.is_none());
    let state = json!({"consumed_samples": 12_345_678_901u64, "rng": {"seed": 7, "stream": 3}, "lr": 1e-4, "config": {"architectures": ["Some"]}});
    let one = BTreeMap::from([("w".to_string(), Tensor::ones([2], DType::BF16, &device)?)]);
    save(&root, "zebra", &Contents::new(10, one.clone()))?;
    save(
        &root,
        "apple",
        &Contents {
            step: 20,
            state: state.as_object().expect("an object").clone(),
            ..Contents::default()
        },
    )?;
    save(&root, "middle", &Contents::new(15, one.clone()))?;
    std::fs::create_dir(root.join("not-a-checkpoint")).expect("a folder");
    std::fs::create_dir(root.join(".tmp-zebra2")).expect("a folder");
    let newest = latest(&root)?.expect("three were saved");
    assert_eq!(
        (
            newest.manifest().step,
            &serde_json::Value::Object(newest.manifest().state.clone())
        ),
        (20, &state)
    );
    let found = list(&root)?;
    assert_eq!(
        found
            .iter()
            .filter_map(|f| f.step.as_ref().ok())
            .collect::<Vec<_>>(),
        [&20, &15, &10]
    );
    assert!(
        found[3]
            .step
            .as_ref()
            .expect_err("no manifest")
            .to_string()
            .contains("manifest.json")
    );

    // A name that is taken, and names that are none.
    let refused = |name: &str| save(&root, name, &Contents::new(30, one.clone()));
    assert!(matches!(refused("zebra"), Err(Error::Exists { path }) if path == root.join("zebra")));
    for bad in ["", ".hidden", "a/b"] {
        assert!(matches!(refused(bad), Err(Error::BadName { name, .. }) if name == bad));
    }
    let partial = Tensor::ones([2], DType::F32, &device)?
        .to_mesh(&Mesh::new("x=2", &device)?, "[_]{sum:x}")?;
    let error = save(
        &root,
        "partial",
        &Contents::new(30, BTreeMap::from([("p".to_string(), partial)])),
    )
    .expect_err("partial");
    assert!(error.to_string().contains("reshard it first"), "{error}");
    assert_eq!(list(&root)?.len(), 4, "what was refused left nothing");
    Ok(())
}

#[test]
fn rotation_keeps_what_it_is_told_and_never_removes_the_only_good_one() -> Result<(), Error> {
    let device = anymesh_backend_cpu::device();
    let root = Temporary::here();
    let one = BTreeMap::from([("w".to_string(), Tensor::ones([2], DType::F32, &device)?)]);
    for step in 1..=10 {
        save(
            &root,
            &format!("s{step}"),
            &Contents::new(step, one.clone()),
        )?;
    }
    // The two newest lose their data: they are not counted, and not touched.
    for name in ["s9", "s10"] {
        std::fs::remove_file(root.join(name).join("rank-00000.safetensors")).expect("there");
    }
    let removed = rotate(
        &root,
        &Keep {
            last: 2,
            every: Some(3),
            names: vec!["s1".into()],
        },
    )?;
    let names: Vec<String> = removed
        .iter()
        .map(|p| {
            p.file_name()
                .expect("a name")
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    assert_eq!(names, ["s5", "s4", "s2"]);
    let left: Vec<u64> = list(&root)?
        .iter()
        .filter_map(|f| f.step.as_ref().ok().copied())
        .collect();
    assert_eq!(left, [8, 7, 6, 3, 1]);
    rotate(&root, &Keep::default())?;
    assert_eq!(latest(&root)?.expect("the newest stays").manifest().step, 8);
    assert_eq!(list(&root)?.iter().filter(|f| f.step.is_err()).count(), 2);
    Ok(())
}

#[test]
fn two_writers_do_not_meet() -> Result<(), Error> {
    let root = Temporary::here();
    let lock = std::fs::File::create(root.join(".lock")).expect("a file");
    lock.try_lock().expect("free");
    let error = save(&root, "one", &Contents::new(1, BTreeMap::new())).expect_err("locked");
    assert!(error.to_string().contains("somebody else"), "{error}");
    drop(lock);
    save(&root, "one", &Contents::new(1, BTreeMap::new()))?;
    Ok(())
}

#[test]
fn what_cannot_be_loaded_is_said() -> Result<(), Error> {
    let device = anymesh_backend_cpu::device();
    let root = Temporary::here();
    let x = Tensor::ones([2, 3], DType::F32, &device)?;
    let checkpoint = Checkpoint::open(save(
        &root,
        "one",
        &Contents::new(1, BTreeMap::from([("model.w".to_string(), x)])),
    )?)?;
    assert!(
        checkpoint
            .load("w", &device)
            .expect_err("another name")
            .to_string()
            .contains("model.w")
    );
    let mesh = Mesh::new("x=2", &device)?;
    assert!(matches!(
        checkpoint.load("model.w", (&mesh, &Sharding::replicated().cut(5, 0))),
        Err(Error::Core(_))
    ));
    assert!(checkpoint.values::<i64>("model.w").is_err());
    assert_eq!(checkpoint.values::<f32>("model.w")?, [1.0; 6]);
    Ok(())
}

#[test]
fn names_and_types_that_do_not_fit_are_told_together_and_passed_over_where_that_is_allowed()
-> Result<(), Error> {
    let device = anymesh_backend_cpu::device();
    let mesh = Mesh::new("x=2", &device)?;
    let root = Temporary::here();
    let full = |shape: &[usize], value: f64, dtype| Tensor::full(shape, value, dtype, &device);
    let saved = BTreeMap::from([
        ("a.w".to_string(), full(&[4], 1.0, DType::F32)?),
        ("a.b".to_string(), full(&[3], 2.0, DType::F32)?),
        ("old.w".to_string(), full(&[1], 3.0, DType::F32)?),
    ]);
    let checkpoint = Checkpoint::open(save(&root, "one", &Contents::new(1, saved.clone()))?)?;
    let there = BTreeMap::from([
        (
            "a.w".to_string(),
            full(&[4], 9.0, DType::BF16)?.to_mesh(&mesh, "[@x]")?,
        ),
        ("a.b".to_string(), full(&[5], 9.0, DType::F32)?),
        ("new.w".to_string(), full(&[2], 9.0, DType::F32)?),
    ]);
    let error = Load::default()
        .replace(&checkpoint, &Contents::new(0, there.clone()))
        .expect_err("nothing fits")
        .to_string();
    for part in ["'new.w'", "'old.w'", "'a.b'", "allow a cast"] {
        assert!(error.contains(part), "{part} in {error}");
    }
    let lenient = Load {
        allow_missing: true,
        allow_mismatched: true,
        cast: true,
        ignore: vec!["old.*".into()],
        ..Load::default()
    };
    let loaded = lenient.replace(&checkpoint, &Contents::new(0, there.clone()))?;
    assert_eq!(
        (loaded.missing, loaded.mismatched, loaded.unexpected),
        (vec!["new.w".to_string()], vec!["a.b".to_string()], vec![])
    );
    assert_eq!(loaded.tensors["a.w"].type_string(), "bf16[4@x]");
    assert_eq!(
        loaded.tensors["a.w"].cast(DType::F32)?.to_vec::<f32>()?,
        [1.0; 4]
    );
    assert_eq!(loaded.tensors["new.w"].to_vec::<f32>()?, [9.0; 2]);
    assert!(matches("a.*.w", "a.b.c.w") && matches("*", "") && !matches("a.*.w", "a.w"));
    Ok(())
}

#[test]
fn a_load_keeps_to_its_memory_its_names_and_tells_its_progress() -> Result<(), Error> {
    let device = anymesh_backend_cpu::device();
    let mesh = Mesh::new("x=2", &device)?;
    let root = Temporary::here();
    let x = Tensor::arange(0, 300_000, 1, DType::I32, &device)?.reshape([100, 3000])?;
    let names = ["a.w", "a.b", "c.w"];
    let saved: BTreeMap<String, Tensor> = names
        .iter()
        .map(|n| Ok((n.to_string(), x.to_mesh(&mesh, "[@x, _]")?)))
        .collect::<Result<_, Error>>()?;
    let checkpoint = Checkpoint::open(save(&root, "one", &Contents::new(1, saved))?)?;
    let there: BTreeMap<String, Tensor> = names
        .iter()
        .map(|n| Ok((n.to_string(), x.zeros_like()?.to_mesh(&mesh, "[_, @x]")?)))
        .collect::<Result<_, Error>>()?;
    let counted = Counted {
        inner: checkpoint,
        largest: AtomicUsize::new(0),
    };
    let (calls, last) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let progress = |done: usize, total: usize| {
        assert_eq!(total, 2 * 1_200_000);
        calls.fetch_add(1, Ordering::Relaxed);
        last.fetch_max(done, Ordering::Relaxed);
    };
    let load = Load {
        memory: 100_000,
        only: vec!["*.w".into()],
        progress: Some(&progress),
        ..Load::default()
    };
    let loaded = load.replace(&counted, &Contents::new(0, there))?;
    for name in ["a.w", "c.w"] {
        assert_eq!(loaded.tensors[name].type_string(), "i32[100, 3000@x]");
        assert_eq!(
            loaded.tensors[name].to_vec::<i32>()?,
            (0..300_000).collect::<Vec<_>>()
        );
    }
    assert_eq!(
        loaded.tensors["a.b"].to_vec::<i32>()?,
        vec![0; 300_000],
        "as it was"
    );
    assert_eq!(
        (loaded.missing, loaded.unexpected),
        (vec![], vec![]),
        "names that were not asked for are not missed"
    );
    assert!(
        counted.largest.load(Ordering::Relaxed) <= 100_000,
        "one read had {:?} bytes",
        counted.largest
    );
    assert_eq!((calls.into_inner(), last.into_inner()), (2, 2 * 1_200_000));
    Ok(())
}

/// Tells how much was asked for at once.
struct Counted {
    inner: Checkpoint,
    largest: AtomicUsize,
}

impl Source for Counted {
    fn tensors(&self) -> &BTreeMap<String, anymesh_checkpoint::TensorInfo> {
        self.inner.tensors()
    }

    fn read(&self, name: &str, region: &anymesh_core::Region, out: &mut [u8]) -> Result<(), Error> {
        self.largest.fetch_max(out.len(), Ordering::Relaxed);
        self.inner.read(name, region, out)
    }
}

#[test]
fn what_is_asked_for_wrongly_is_an_error() -> Result<(), Error> {
    let device = anymesh_backend_cpu::device();
    let root = Temporary::here();
    let checkpoint = Checkpoint::open(save(
        &root,
        "one",
        &Contents::new(
            1,
            BTreeMap::from([("w".to_string(), Tensor::ones([4, 4], DType::F32, &device)?)]),
        ),
    )?)?;
    let region = |start: [usize; 2], shape: [usize; 2]| anymesh_core::Region {
        start: start[..].into(),
        shape: shape[..].into(),
    };
    let read = |part, bytes| checkpoint.read("w", &part, &mut vec![0; bytes]);
    for (part, bytes) in [
        (region([0, 2], [4, 3]), 48),
        (region([usize::MAX, 0], [2, 1]), 8),
    ] {
        assert!(matches!(read(part, bytes), Err(Error::OutOfBounds { .. })));
    }
    assert!(matches!(
        read(region([0, 0], [4, 4]), 63),
        Err(Error::ByteCount {
            expected: 64,
            given: 63,
            ..
        })
    ));
    Ok(())
}

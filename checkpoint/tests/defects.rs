//! Defects that checkpoints of other systems are known to have, each named with the test that shows
//! that ours has it not. Those that have their own test elsewhere are named here:
//!
//! - Metadata before data, no sync, no rename, no sums (Paddle); a crash between the removal of the
//!   old metadata and the rename (torch DCP): `kill`, `crash`, `damage`.
//! - A folder that was not completed is resumed from because its number is the highest (PaddleNLP):
//!   `kill::damage`, `round_trip`.
//! - A lock that is the presence of a file, and outlives its process (Paddle): `kill`.
//! - Tensors that changed during an asynchronous save are stored changed (torch #144657); a shape
//!   that changes crashes the helper, averages begin at zero (PaddleNLP): `background`.
//! - Pickles that run code (Paddle, torch): `dcp`. Element types without an entry in a table, 8-bit
//!   floats above all (Paddle, PaddleNLP): `round_trip`, `hugging_face`.
//! - A save that is joined for 60 seconds at exit and then lost (Paddle): `background`.
//! - Dimensions that do not divide (jax #27808), other numbers of devices (orbax #648):
//!   `round_trip`.
//! - An index that is missing after files were joined (torchtitan #2137), a total size that still
//!   counts removed tensors (PaddleNLP #10693): `hugging_face`.
//! - Old states that only a dummy run can convert (Megatron): `damage`, with a stored sample of
//!   each version.

mod common;

use anymesh_checkpoint::{
    Background, Checkpoint, Contents, Error, Load, Memory, Result, Source, TensorInfo, Training,
    Weights,
    hugging_face::{Export, Folder, INDEX, export},
    latest, list,
    manifest::{Manifest, Stored, StoredBox},
    map::{Mapped, Mapping, Options},
    rotate, safetensors, save,
};
use anymesh_core::{DType, Mesh, Region, Sharding, Tensor, ops::Rng};
use common::Temporary;
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, SystemTime},
};

fn named<const N: usize>(tensors: [(&str, Tensor); N]) -> BTreeMap<String, Tensor> {
    tensors
        .into_iter()
        .map(|(name, x)| (name.to_string(), x))
        .collect()
}

/// Saves tensors and opens what was saved.
fn saved(
    root: &Path,
    name: &str,
    step: u64,
    tensors: BTreeMap<String, Tensor>,
) -> Result<Checkpoint> {
    Checkpoint::open(save(root, name, &Contents::new(step, tensors))?)
}

/// Paddle drops the state of its random generators when the number of ranks has changed. Random
/// keys are a seed and a counter here, and draw the same on any mesh.
#[test]
fn random_numbers_go_on_where_they_were_on_another_number_of_ranks() -> Result<()> {
    let (device, root) = (
        anymesh_backend_cpu::device(),
        Temporary::new(&format!("defects-{}", line!())),
    );
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
    let root = Temporary::new(&format!("defects-{}", line!()));
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

/// Paddle's merge splits tensors by count, needs as many tensors as ranks, builds its index from
/// the names before renaming, and has no sizes of integers.
#[test]
fn fewer_tensors_than_ranks_renamed_integers_are_merged_with_the_right_index() -> Result<()> {
    let (device, root) = (
        anymesh_backend_cpu::device(),
        Temporary::new(&format!("defects-{}", line!())),
    );
    let mesh = Mesh::new("x=8", &device)?;
    let ids = Tensor::arange(0, 33, 1, DType::I32, &device)?.reshape([11, 3])?;
    let mask = Tensor::ones([5], DType::Bool, &device)?;
    let checkpoint = saved(
        &root,
        "one",
        1,
        named([
            ("ids", ids.to_mesh(&mesh, "[@x, _]")?),
            ("mask", mask.to_mesh(&mesh, "[@x]")?),
        ]),
    )?;
    let mapping = Mapping::from_lines([
        "ids -> model.ids, permute = \"[1, 0]\"",
        "mask -> model.mask",
    ])?;
    let mapped = Mapped::new(checkpoint, &mapping, &Options::default())?;
    let names = export(
        &mapped,
        root.join("merged"),
        &Export {
            max_file_bytes: 100,
            ..Export::default()
        },
    )?;
    assert_eq!(names.len(), 2, "by bytes: one file for each");
    let index: Value =
        serde_json::from_slice(&fs::read(root.join("merged").join(INDEX)).expect("an index"))
            .expect("JSON");
    assert_eq!(index["metadata"]["total_size"], json!(33 * 4 + 5));
    assert_eq!(
        index["weight_map"]
            .as_object()
            .expect("names")
            .keys()
            .collect::<Vec<_>>(),
        ["model.ids", "model.mask"]
    );
    let folder = Folder::open(root.join("merged"))?;
    assert_eq!(
        folder.read_all("model.ids")?,
        ids.transpose(0, 1)?.to_bytes()?
    );
    Ok(())
}

/// In Paddle all of a state dict is sharded or nothing. Scalars of experts had no identity of their
/// own in another layout (Model-Optimizer #2209).
#[test]
fn sharded_and_plain_tensors_and_scalars_by_name_lie_in_one_checkpoint() -> Result<()> {
    let (device, root) = (
        anymesh_backend_cpu::device(),
        Temporary::new(&format!("defects-{}", line!())),
    );
    let (four, two) = (Mesh::new("ep=4", &device)?, Mesh::new("ep=2", &device)?);
    let mut tensors = named([("plain", Tensor::full([3], 5.0, DType::F32, &device)?)]);
    for expert in 0..16 {
        let scale = Tensor::full((), expert as f64, DType::F32, &device)?;
        tensors.insert(
            format!("experts.{expert}.scale"),
            if expert % 3 == 0 {
                scale
            } else {
                scale.to_mesh(&four, "[]")?
            },
        );
    }
    let checkpoint = saved(&root, "one", 1, tensors)?;
    for expert in 0..16 {
        let scale = checkpoint.load(
            &format!("experts.{expert}.scale"),
            (&two, &Sharding::replicated()),
        )?;
        assert_eq!(scale.to_vec::<f32>()?, [expert as f32]);
    }
    assert_eq!(checkpoint.values::<f32>("plain")?, [5.0; 3]);
    Ok(())
}

/// A checkpoint of four pipeline stages did not load with four expert ranks (Megatron #1517).
#[test]
fn what_pipeline_stages_saved_is_loaded_by_expert_ranks() -> Result<()> {
    let (device, root) = (
        anymesh_backend_cpu::device(),
        Temporary::new(&format!("defects-{}", line!())),
    );
    let pipeline = Mesh::new("stage=4, tp=2", &device)?;
    let mut tensors = BTreeMap::new();
    for layer in 0..8 {
        let stage = pipeline.at("stage", layer / 2)?;
        let w = Tensor::full([4, 6, 5], layer as f64, DType::BF16, &device)?;
        tensors.insert(
            format!("layers.{layer}.experts"),
            w.to_mesh(&stage, "[_, @tp, _]")?,
        );
    }
    let checkpoint = saved(&root, "one", 1, tensors)?;
    let experts = Mesh::new("ep=4", &device)?;
    for layer in 0..8 {
        let w = checkpoint.load(
            &format!("layers.{layer}.experts"),
            (&experts, &Sharding::replicated().cut(0, 0)),
        )?;
        assert_eq!(w.shards()[3].1.dims(), [1, 6, 5]);
        assert!(
            w.cast(DType::F32)?
                .to_vec::<f32>()?
                .iter()
                .all(|v| *v == layer as f32)
        );
    }
    Ok(())
}

/// Rotation of PaddleNLP goes by the times of folders: a copy, or a file that was touched, changes
/// what is removed.
#[test]
fn rotation_goes_by_steps_and_not_by_times() -> Result<()> {
    let (device, root) = (
        anymesh_backend_cpu::device(),
        Temporary::new(&format!("defects-{}", line!())),
    );
    for step in 1..=4 {
        saved(
            &root,
            &format!("s{step}"),
            step,
            named([("w", Tensor::ones([2], DType::F32, &device)?)]),
        )?;
    }
    for (i, step) in [4, 3, 2, 1].into_iter().enumerate() {
        let time = SystemTime::now() + Duration::from_secs(i as u64 * 1000);
        for entry in fs::read_dir(root.join(&format!("s{step}")))
            .expect("a folder")
            .chain(fs::read_dir(&*root).expect("a folder"))
        {
            let path = entry.expect("an entry").path();
            if path.is_file() {
                fs::File::options()
                    .write(true)
                    .open(path)
                    .and_then(|f| f.set_modified(time))
                    .expect("ours");
            }
        }
        #[cfg(unix)]
        fs::File::open(root.join(&format!("s{step}")))
            .and_then(|f| f.set_modified(time))
            .expect("ours");
    }
    rotate(
        &root,
        &anymesh_checkpoint::Keep {
            last: 2,
            ..Default::default()
        },
    )?;
    assert_eq!(
        list(&root)?
            .into_iter()
            .filter_map(|f| f.step.ok())
            .collect::<Vec<_>>(),
        [4, 3]
    );
    Ok(())
}

/// PaddleNLP's helper saw an empty state dict as nothing to save; its zero-cost save hung with one
/// accumulation step (PaddleFleet #2050), since the copies were spread over the others.
#[test]
fn a_save_in_the_background_needs_no_tensors_and_no_particular_number_of_calls() -> Result<()> {
    let (device, root) = (
        anymesh_backend_cpu::device(),
        Temporary::new(&format!("defects-{}", line!())),
    );
    let mut saver = Background::new(&*root);
    saver.begin("empty", &Contents::new(1, BTreeMap::new()))?;
    assert!(saver.advance(1)?, "there is nothing to copy");
    assert_eq!(
        Checkpoint::open(saver.finish()?.expect("written"))?
            .tensors()
            .len(),
        0
    );
    // 12 tiles; none, one, few, more calls than tiles between one save and the next.
    let w = Tensor::ones([12, 1 << 20], DType::F32, &device)?;
    for (step, calls) in [(2, 0), (3, 1), (4, 2), (5, 5), (6, 20), (7, 0)] {
        saver.begin(
            &format!("s{step}"),
            &Contents::new(step, named([("w", w.clone())])),
        )?;
        assert_eq!(
            latest(&root)?.expect("the one before").manifest().step,
            step - 1,
            "beginning completes the one before"
        );
        for _ in 0..calls {
            saver.advance(1)?;
        }
    }
    drop(saver);
    assert_eq!(
        (
            latest(&root)?.expect("the last").manifest().step,
            list(&root)?.len()
        ),
        (7, 7)
    );
    Ok(())
}

/// Memory that grows with every asynchronous save (torch #170163, orbax #2090).
#[cfg(target_os = "linux")]
#[test]
fn saves_in_the_background_give_their_memory_back() -> Result<()> {
    let resident = || -> usize {
        let pages = fs::read_to_string("/proc/self/statm")
            .expect("Linux")
            .split(' ')
            .nth(1)
            .and_then(|n| n.parse::<usize>().ok());
        pages.expect("a number") * 4096
    };
    let (device, root) = (
        anymesh_backend_cpu::device(),
        Temporary::new(&format!("defects-{}", line!())),
    );
    let w = Tensor::ones([8 << 20], DType::F32, &device)?;
    let mut saver = Background::new(&*root).with_average(0.5, None)?;
    let mut after = vec![];
    for step in 0..16 {
        saver.begin("same", &Contents::new(step, named([("w", w.clone())])))?;
        fs::remove_dir_all(saver.finish()?.expect("written")).expect("ours");
        after.push(resident());
    }
    // 32 MiB were copied each time; other tests of this process need a little, too.
    let grown = after[15].saturating_sub(after[3]) >> 20;
    assert!(
        grown < 150,
        "{grown} MiB more after 12 more saves of 32 MiB"
    );
    Ok(())
}

/// Flattened names are ambiguous (Paddle's `a.b.c`), and ours add a range to the name of a box. A
/// name is only a name, and files stay files that any reader opens.
#[test]
fn names_are_only_names_whatever_is_in_them() -> Result<()> {
    let (device, root) = (
        anymesh_backend_cpu::device(),
        Temporary::new(&format!("defects-{}", line!())),
    );
    let mesh = Mesh::new("x=2", &device)?;
    let names = [
        "a.b",
        "a",
        "a.b.c",
        "",
        " ",
        "a/b",
        "../a",
        "a\\b",
        "\"quoted\"",
        "line\nline",
        "\u{0}",
        "ü\u{1f600}",
        "w",
        "w@0:2",
        "w@2:4",
        "w@0:2'",
        "manifest.json",
        "*",
    ];
    let mut tensors = BTreeMap::new();
    for (i, name) in names.iter().enumerate() {
        let x = Tensor::full([4], i as f64, DType::F32, &device)?;
        tensors.insert(
            name.to_string(),
            if i % 2 == 0 {
                x.to_mesh(&mesh, "[@x]")?
            } else {
                x
            },
        );
    }
    let checkpoint = saved(&root, "one", 1, tensors)?;
    assert_eq!(checkpoint.verify(), []);
    for (i, name) in names.iter().enumerate() {
        assert_eq!(checkpoint.values::<f32>(name)?, [i as f32; 4], "{name:?}");
    }
    let mut entries = 0;
    for file in checkpoint.manifest().files.keys() {
        entries += safetensors::File::open(checkpoint.path().join(file))?
            .tensors()
            .len();
    }
    assert_eq!(
        entries,
        checkpoint
            .manifest()
            .tensors
            .values()
            .map(|t| t.boxes.len())
            .sum::<usize>(),
        "an entry for each box"
    );
    // The one name that files have another use for.
    let error = saved(
        &root,
        "two",
        2,
        named([("__metadata__", Tensor::ones([2], DType::F32, &device)?)]),
    )
    .expect_err("reserved");
    assert!(
        matches!(&error, Error::Argument(text) if text.contains("__metadata__")),
        "{error}"
    );
    assert_eq!(
        (
            list(&root)?.len(),
            fs::read_dir(&*root).expect("a folder").count()
        ),
        (1, 2),
        "nothing is left but the lock"
    );
    Ok(())
}

/// Scalars made every rank read the files of all others (torch #125740). A box is read from the
/// files it is in, and no other is opened.
#[test]
fn a_read_needs_only_the_files_that_hold_its_boxes() -> Result<()> {
    let (device, root) = (
        anymesh_backend_cpu::device(),
        Temporary::new(&format!("defects-{}", line!())),
    );
    let mesh = Mesh::new("x=4", &device)?;
    let w = Tensor::arange(0, 32, 1, DType::I64, &device)?.reshape([8, 4])?;
    let checkpoint = saved(
        &root,
        "one",
        1,
        named([
            ("w", w.to_mesh(&mesh, "[@x, _]")?),
            ("step", Tensor::full((), 9.0, DType::F32, &device)?),
        ]),
    )?;
    let of = |tensor: &str, row: usize| {
        let boxes = &checkpoint.manifest().tensors[tensor].boxes;
        boxes
            .iter()
            .find(|b| {
                b.start
                    .first()
                    .is_none_or(|s| (*s..s + b.shape[0]).contains(&row))
            })
            .expect("a box")
            .file
            .clone()
    };
    let (scalar, rows) = (of("step", 0), of("w", 5));
    for file in checkpoint
        .manifest()
        .files
        .keys()
        .filter(|f| **f != scalar && **f != rows)
    {
        fs::remove_file(checkpoint.path().join(file)).expect("ours");
    }
    assert_eq!(checkpoint.values::<f32>("step")?, [9.0]);
    let (region, mut bytes) = (
        Region {
            start: [4, 0].into_iter().collect(),
            shape: [2, 4].into_iter().collect(),
        },
        vec![0; 64],
    );
    checkpoint.read("w", &region, &mut bytes)?;
    assert_eq!(
        bytes,
        (16..24i64).flat_map(i64::to_le_bytes).collect::<Vec<_>>()
    );
    assert!(
        matches!(checkpoint.values::<i64>("w"), Err(Error::Io { .. })),
        "the rest is gone"
    );
    Ok(())
}

fn manifest_of(shape: Vec<usize>, boxes: Vec<StoredBox>, bytes: u64) -> Manifest {
    let stored = Stored {
        dtype: "u8".into(),
        layout: String::new(),
        shape,
        boxes,
    };
    Manifest {
        format: "anymesh-checkpoint".into(),
        version: 1,
        step: 1,
        mesh: vec![],
        tensors: [("w".to_string(), stored)].into(),
        files: [("f".to_string(), bytes)].into(),
        state: Default::default(),
    }
}

fn stored_box(start: Vec<usize>, shape: Vec<usize>, offset: u64) -> StoredBox {
    StoredBox {
        start,
        shape,
        file: "f".into(),
        offset,
        sums: vec!["0000000000000000".into()],
    }
}

/// The time that this thread has computed, whatever else the machine does.
#[cfg(target_os = "linux")]
fn computed() -> u64 {
    let text = fs::read_to_string("/proc/thread-self/schedstat").expect("Linux");
    text.split(' ')
        .next()
        .and_then(|ns| ns.parse().ok())
        .expect("nanoseconds")
}

/// Checking the boxes of a plan took time with the square of their number (torch #169113).
#[cfg(target_os = "linux")]
#[test]
fn checking_boxes_takes_no_time_with_the_square_of_their_number() {
    let parse = |manifest: &Manifest| {
        Manifest::parse(manifest.to_text().as_bytes(), Path::new("manifest.json"))
    };
    let check = |shape: &[usize], step: &[usize]| {
        let cells =
            shape
                .iter()
                .zip(step)
                .fold(vec![vec![]], |cells: Vec<Vec<usize>>, (n, step)| {
                    cells
                        .iter()
                        .flat_map(|cell| {
                            (0..*n)
                                .step_by(*step)
                                .map(|i| [cell.as_slice(), &[i]].concat())
                                .collect::<Vec<_>>()
                        })
                        .collect()
                });
        let volume: usize = step.iter().product();
        let boxes = cells
            .into_iter()
            .enumerate()
            .map(|(i, start)| stored_box(start, step.to_vec(), (i * volume) as u64))
            .collect();
        let mut manifest = manifest_of(shape.to_vec(), boxes, 1 << 20);
        let begun = computed();
        assert!(parse(&manifest).is_ok(), "{shape:?}");
        let took = computed() - begun;
        // The same number of elements, one of them twice and one not at all.
        let boxes = &mut manifest.tensors.get_mut("w").expect("it is there").boxes;
        boxes[999].start = boxes[17].start.clone();
        assert!(
            parse(&manifest)
                .expect_err("overlap")
                .to_string()
                .contains("overlap"),
            "{shape:?}"
        );
        took
    };
    for (small, large, step) in [
        (vec![10_000], vec![40_000], vec![1]),
        (vec![1, 10_000], vec![1, 40_000], vec![1, 1]),
        (vec![2, 5, 1000], vec![2, 5, 4000], vec![1, 1, 1]),
        (vec![100, 100], vec![200, 200], vec![1, 1]),
        (vec![4, 10_000], vec![4, 40_000], vec![4, 1]),
    ] {
        let few = (0..3).map(|_| check(&small, &step)).min().unwrap_or(0);
        let many = (0..3).map(|_| check(&large, &step)).min().unwrap_or(0);
        // Four times as many boxes: four times the time and a little, not sixteen times.
        assert!(
            many < 9 * few,
            "{large:?}: {many} ns for 40000 boxes, {few} ns for 10000"
        );
    }
}

/// Offsets and sizes of different ranks (Megatron #7162) were taken for a box.
#[test]
fn boxes_of_another_rank_than_the_tensor_are_refused() {
    for (start, shape) in [
        (vec![0], vec![2, 3]),
        (vec![0, 0, 0], vec![2, 3]),
        (vec![0, 0], vec![6]),
        (vec![0, 0], vec![2, 3, 1]),
        (vec![], vec![]),
    ] {
        let manifest = manifest_of(
            vec![2, 3],
            vec![stored_box(start.clone(), shape.clone(), 0)],
            6,
        );
        let error = Manifest::parse(manifest.to_text().as_bytes(), Path::new("manifest.json"))
            .expect_err("another rank");
        assert!(
            error.to_string().contains("not inside"),
            "{start:?} {shape:?}: {error}"
        );
    }
}

/// Optimizer moments were dropped without a word when saving and loading (AReaL #1468).
#[test]
fn moments_of_the_optimizer_are_never_dropped_in_silence() -> Result<()> {
    let (device, root) = (
        anymesh_backend_cpu::device(),
        Temporary::new(&format!("defects-{}", line!())),
    );
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

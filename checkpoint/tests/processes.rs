//! Several processes save together, here threads that each address some of the ranks: what they
//! write is one checkpoint, or none.

mod common;

use anymesh_checkpoint::{
    Background, Checkpoint, Contents, Error, Fused, Load, Saver, latest, list, save,
};
use anymesh_core::{DType, Mesh, Sharding, Tensor, TensorType, transport::Threads};
use common::Temporary;
use std::{collections::BTreeMap, path::Path, time::Duration};

/// Runs a program in as many threads as there are groups of ranks, each with its view of the mesh.
fn run<T: Send>(
    axes: &str,
    groups: &[&[usize]],
    limit: Duration,
    program: impl Fn(usize, Mesh) -> T + Sync,
) -> Vec<T> {
    let whole = Mesh::new(axes, &anymesh_backend_cpu::device())
        .expect("a mesh")
        .with_transport(Threads::new(limit));
    std::thread::scope(|scope| {
        let start = |(i, ranks): (usize, &&[usize])| {
            let (mesh, program) = (whole.addressing(ranks).expect("ranks"), &program);
            scope.spawn(move || program(i, mesh))
        };
        let threads: Vec<_> = groups.iter().enumerate().map(start).collect();
        threads
            .into_iter()
            .map(|t| t.join().expect("no panic"))
            .collect()
    })
}

const LONG: Duration = Duration::from_secs(30);

/// Values that tell where they are.
fn counting(shape: &[usize], mesh: &Mesh, layout: &str) -> Result<Tensor, Error> {
    let whole = Tensor::arange(
        0,
        shape.iter().product::<usize>() as i64,
        1,
        DType::F32,
        mesh.device(0),
    )?
    .reshape(shape)?;
    let sharding = anymesh_core::IntoSharding::into_sharding(layout, mesh, shape.len())?;
    let part = |rank: usize| {
        let region = sharding.region(mesh, rank, whole.shape());
        (0..shape.len()).try_fold(whole.clone(), |x, d| {
            x.narrow(d as i64, region.start[d], region.shape[d])
        })
    };
    let parts = mesh
        .addressable()
        .map(part)
        .collect::<Result<Vec<_>, _>>()?;
    Ok(Tensor::from_shards(
        &TensorType {
            dtype: DType::F32,
            shape: shape.into(),
            sharding: sharding.clone(),
        },
        mesh,
        &parts,
    )?)
}

fn contents(step: u64, mesh: &Mesh) -> Result<Contents, Error> {
    let tensors = BTreeMap::from([
        ("cut".to_string(), counting(&[7, 5], mesh, "[@a, @b]")?),
        ("half".to_string(), counting(&[6, 4], mesh, "[_, @b]")?),
        ("whole".to_string(), counting(&[3, 3], mesh, "[_, _]")?),
        // The same in every process.
        (
            "local".to_string(),
            Tensor::full([2], 8.0, DType::F64, mesh.device(0))?,
        ),
    ]);
    let (parts, length) = Fused::places([("m.cut", &[7usize, 5][..]), ("m.half", &[6, 4])], 16);
    Ok(Contents {
        step,
        tensors,
        fused: vec![Fused {
            buffer: counting(&[length], mesh, "[@a@b]")?,
            parts,
        }],
        ..Contents::default()
    })
}

fn check(path: &Path) -> Result<(), Error> {
    let checkpoint = Checkpoint::open(path)?;
    assert_eq!(checkpoint.verify(), []);
    let count = |n: usize, from: usize| (from..from + n).map(|i| i as f32).collect::<Vec<_>>();
    for (name, n, from) in [
        ("cut", 35, 0),
        ("half", 24, 0),
        ("whole", 9, 0),
        ("m.cut", 35, 0),
        ("m.half", 24, 48),
    ] {
        assert_eq!(checkpoint.values::<f32>(name)?, count(n, from), "{name}");
    }
    assert_eq!(checkpoint.values::<f64>("local")?, [8.0, 8.0]);
    Ok(())
}

const GROUPS: [&[&[usize]]; 3] = [
    &[&[0], &[1], &[2], &[3]],
    &[&[0, 1], &[2, 3]],
    &[&[0, 3], &[1], &[2]],
];

#[test]
fn every_process_writes_its_part_of_one_checkpoint_and_loads_its_part_of_it() {
    for groups in GROUPS {
        let root = Temporary::here();
        let paths = run("a=2, b=2", groups, LONG, |_, mesh| {
            let there = contents(3, &mesh)?;
            let path = save(&root, "one", &there)?;
            // Every process has the whole manifest, and reads its own regions of whatever layout it
            // likes.
            let checkpoint = Checkpoint::open(&path)?;
            let loaded = Load::default().replace(&checkpoint, &there)?;
            for (name, x) in &there.tensors {
                for ((rank, a), (_, b)) in x.shards().iter().zip(loaded.tensors[name].shards()) {
                    assert_eq!(a.to_bytes()?, b.to_bytes()?, "{name} of rank {rank}");
                }
            }
            for ((_, a), (_, b)) in there.fused[0]
                .buffer
                .shards()
                .iter()
                .zip(loaded.fused[0].buffer.shards())
            {
                assert_eq!(a.to_bytes()?, b.to_bytes()?);
            }
            let turned =
                checkpoint.load("cut", (&mesh, &Sharding::replicated().cut(0, 1).cut(1, 0)))?;
            assert_eq!(turned.type_string(), "f32[7@b, 5@a]");
            Ok::<_, Error>(path)
        });
        let paths = paths
            .into_iter()
            .collect::<Result<Vec<_>, _>>()
            .expect("saved");
        assert!(paths.iter().all(|p| *p == paths[0]));
        check(&paths[0]).expect("whole");
        let files = Checkpoint::open(&paths[0])
            .expect("whole")
            .manifest()
            .files
            .len();
        assert_eq!(files, 4, "each rank has a file");
    }
}

#[test]
fn a_background_save_of_several_processes_is_committed_where_they_meet() {
    for groups in GROUPS {
        let root = Temporary::here();
        let saved = run("a=2, b=2", groups, LONG, |process, mesh| {
            let mut saver = Background::new(&*root).with_average(0.5, None)?;
            for step in 1..=3 {
                saver.begin(&format!("s{step}"), &contents(step, &mesh)?)?;
                // At its own pace.
                while !saver.advance(1 + 100 * process)? {}
            }
            saver.finish()
        });
        for path in saved {
            let path = path.expect("saved").expect("a path");
            check(&path).expect("whole");
            // The weights did not change, so they are their average.
            assert_eq!(
                Checkpoint::open(path)
                    .expect("whole")
                    .values::<f32>("ema.cut")
                    .expect("kept")
                    .len(),
                35
            );
        }
        assert_eq!(
            list(&root)
                .expect("readable")
                .iter()
                .filter(|f| f.step.is_ok())
                .count(),
            3
        );
    }
}

#[test]
fn where_one_process_fails_all_get_an_error_and_nothing_is_committed() {
    let root = Temporary::here();
    let groups = GROUPS[1];
    let good = |step: u64| {
        let results = run("a=2, b=2", groups, LONG, |_, mesh| {
            save(&root, &format!("s{step}"), &contents(step, &mesh)?)
        });
        results
            .into_iter()
            .for_each(|r| check(&r.expect("saved")).expect("whole"));
    };
    good(1);
    // One that cannot begin, one that cannot write, one that saves something else.
    type Program<'p> = &'p (dyn Fn(usize, Mesh) -> Result<(), Error> + Sync);
    let partial = |process: usize, mesh: Mesh| {
        let mut contents = contents(2, &mesh)?;
        if process == 1 {
            contents.fused[0].parts[1].offset = 1;
        }
        save(&root, "s2", &contents).map(drop)
    };
    let disk = Broken;
    let unwritten = |process: usize, mesh: Mesh| {
        let good = Saver::default();
        let bad = Saver {
            files: &disk,
            ..Saver::default()
        };
        (if process == 1 { bad } else { good })
            .save(&root, "s2", &contents(2, &mesh)?)
            .map(drop)
    };
    let other = |process: usize, mesh: Mesh| {
        let mut contents = contents(2, &mesh)?;
        if process == 1 {
            contents.tensors.remove("whole");
        }
        save(&root, "s2", &contents).map(drop)
    };
    let programs: [(Program<'_>, &str); 3] = [
        (&partial, "begins before"),
        (&unwritten, "no space left"),
        (&other, "must make the same call"),
    ];
    for (program, words) in programs {
        let results = run("a=2, b=2", groups, LONG, program);
        let errors: Vec<String> = results
            .into_iter()
            .map(|r| r.expect_err("it failed").to_string())
            .collect();
        assert!(errors[1].contains(words), "{errors:?}");
        assert!(
            errors[0].contains("ranks [2]") || errors[0].contains(words),
            "{errors:?}"
        );
        assert_eq!(
            latest(&root)
                .expect("readable")
                .expect("the first")
                .manifest()
                .step,
            1
        );
    }
    assert!(
        !root.join(".tmp-s2").exists(),
        "what was written is removed"
    );
    good(5);
}

/// A disk that is full.
#[derive(Debug)]
struct Broken;

impl anymesh_checkpoint::files::Files for Broken {
    fn create(&self, path: &Path) -> Result<Box<dyn anymesh_checkpoint::files::Output>, Error> {
        Err(Error::Io {
            path: path.into(),
            action: "create",
            reason: "no space left".into(),
        })
    }

    fn create_folder(&self, path: &Path) -> Result<(), Error> {
        anymesh_checkpoint::files::Disk.create_folder(path)
    }

    fn sync_folder(&self, path: &Path) -> Result<(), Error> {
        anymesh_checkpoint::files::Disk.sync_folder(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<(), Error> {
        anymesh_checkpoint::files::Disk.rename(from, to)
    }

    fn remove_folder(&self, path: &Path) -> Result<(), Error> {
        anymesh_checkpoint::files::Disk.remove_folder(path)
    }
}

#[test]
fn a_process_that_never_comes_is_named_and_the_next_save_is_not_in_the_way() {
    let root = Temporary::here();
    let results = run(
        "a=2, b=2",
        &GROUPS[1][..1],
        Duration::from_millis(200),
        |_, mesh| save(&root, "one", &contents(1, &mesh)?),
    );
    let error = results
        .into_iter()
        .next()
        .expect("one process")
        .expect_err("the other is not there");
    assert!(
        matches!(&error, Error::Core(anymesh_core::Error::Timeout { missing, .. }) if **missing == [2, 3]),
        "{error}"
    );
    assert!(latest(&root).expect("readable").is_none());
    for result in run("a=2, b=2", GROUPS[1], LONG, |_, mesh| {
        save(&root, "one", &contents(1, &mesh)?)
    }) {
        check(&result.expect("saved")).expect("whole");
    }
}

/// A stage of a pipeline for each index along `a`, and something that lies on all ranks.
fn stages(step: u64, mesh: &Mesh) -> Result<Contents, Error> {
    let (first, second) = (mesh.at("a", 0)?, mesh.at("a", 1)?);
    let tensors = BTreeMap::from([
        ("first".to_string(), counting(&[7, 5], &first, "[@b, _]")?),
        ("second".to_string(), counting(&[6, 4], &second, "[_, @b]")?),
        ("norm".to_string(), counting(&[3], &second, "[_]")?),
        ("all".to_string(), counting(&[9], mesh, "[@a@b]")?),
    ]);
    let (parts, length) = Fused::places([("m.first", &[7usize, 5][..])], 16);
    Ok(Contents {
        step,
        tensors,
        fused: vec![Fused {
            buffer: counting(&[length], &first, "[@b]")?,
            parts,
        }],
        ..Contents::default()
    })
}

#[test]
fn stages_on_different_processes_are_one_checkpoint_that_any_number_of_them_loads() {
    for groups in GROUPS {
        let root = Temporary::here();
        let saved = run("a=2, b=2", groups, LONG, |_, mesh| {
            let there = stages(3, &mesh)?;
            let path = save(&root, "one", &there)?;
            // Each process has its parts again, and none of the stages that are elsewhere.
            let again = Load::default().replace(&Checkpoint::open(&path)?, &there)?;
            for (name, x) in &there.tensors {
                let (a, b) = (x.shards(), again.tensors[name].shards());
                assert_eq!(a.len(), b.len(), "{name}");
                for ((rank, a), (_, b)) in a.iter().zip(b) {
                    assert_eq!(a.to_bytes()?, b.to_bytes()?, "{name} of rank {rank}");
                }
            }
            Ok::<_, Error>(path)
        });
        let saved: Result<Vec<_>, Error> = saved.into_iter().collect();
        let path = saved.expect("saved").remove(0);
        let checkpoint = Checkpoint::open(&path).expect("whole");
        assert_eq!(checkpoint.verify(), []);
        let count = |n: usize| (0..n).map(|i| i as f32).collect::<Vec<_>>();
        let sizes = [
            ("first", 35),
            ("second", 24),
            ("norm", 3),
            ("all", 9),
            ("m.first", 35),
        ];
        // Two processes, three with one rank each, and one.
        let others: [(&str, &[&[usize]]); 3] = [
            ("x=2", &[&[0], &[1]]),
            ("x=3", &[&[0], &[1], &[2]]),
            ("x=2", &[&[0, 1]]),
        ];
        for (axes, groups) in others {
            let loaded = run(axes, groups, LONG, |_, mesh| {
                for (name, n) in sizes {
                    let cut = Sharding::replicated().cut(0, 0);
                    let x = checkpoint.load(name, (&mesh, &cut))?;
                    assert_eq!(x.to_vec::<f32>()?, count(n), "{name} on {axes}");
                }
                Ok::<_, Error>(())
            });
            loaded.into_iter().for_each(|r| r.expect("loaded"));
        }
    }
}

#[test]
fn a_stage_that_one_process_has_alone_is_saved_by_it() {
    let root = Temporary::here();
    let results = run("a=2, b=2", GROUPS[1], LONG, |process, mesh| {
        let stage = mesh.at("a", 1)?;
        let x = counting(&[6, 4], &stage, "[_, @b]")?;
        let contents = Contents::new(4, BTreeMap::from([("second".to_string(), x)]));
        save(&root, &format!("of-{process}"), &contents)
    });
    // The other one has nothing of it and makes nothing.
    let path = results[1].as_ref().expect("saved");
    let checkpoint = Checkpoint::open(path).expect("whole");
    assert_eq!(
        checkpoint.values::<f32>("second").expect("stored").len(),
        24
    );
    let whole = list(&root).expect("readable");
    assert_eq!(whole.iter().filter(|f| f.step.is_ok()).count(), 1);
}

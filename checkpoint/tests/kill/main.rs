//! Real deaths: this test binary runs itself as a child that saves, and kills it with a signal that
//! runs no destructor. The previous or the new checkpoint is always there, whole, and the next save
//! works.
//!
//! `crash.rs` dies within the process instead, which also shows what a machine loses that had not
//! synced.

#[path = "../common/mod.rs"]
mod common;
mod damage;
mod process;
mod refused;
mod watched;

use anymesh_checkpoint::{
    Background, Checkpoint, Contents, Error, Keep, Result, Saver, latest, list, rotate, rotate_with,
};
use anymesh_core::{DType, Mesh, Tensor};
use common::{Random, Temporary};
use process::{Child, say};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    time::{Duration, Instant},
};
use watched::Watched;

/// Tensors that all have the step as their values, in four files.
fn model(step: u64, length: usize) -> Result<BTreeMap<String, Tensor>> {
    let (device, value) = (anymesh_backend_cpu::device(), step as f64);
    let mesh = Mesh::new("dp=2, tp=2", &device)?;
    let w = Tensor::full([64, 48], value, DType::F32, &device)?.to_mesh(&mesh, "[@dp, @tp]")?;
    let b = Tensor::full([length], value, DType::F64, &device)?.to_mesh(&mesh, "[@dp]")?;
    let scalar = Tensor::full((), value, DType::I64, &device)?;
    Ok(BTreeMap::from([
        ("w".into(), w),
        ("b".into(), b),
        ("scalar".into(), scalar),
    ]))
}

/// The one place that knows how a checkpoint is saved.
fn save_step(
    saver: &Saver<'_>,
    root: &Path,
    name: &str,
    step: u64,
    length: usize,
) -> Result<PathBuf> {
    saver.save(root, name, &Contents::new(step, model(step, length)?))
}

/// The one place that knows how a checkpoint is begun in the background.
fn begin_step(saver: &mut Background, name: &str, step: u64, length: usize) -> Result<()> {
    saver.begin(name, &Contents::new(step, model(step, length)?))
}

fn save(root: &Path, name: &str, step: u64) -> Result<PathBuf> {
    save_step(&Saver::default(), root, name, step, SMALL)
}

const SMALL: usize = 5_000;
/// Enough that a save takes a while.
const LARGE: usize = 400_000;

/// The step of a checkpoint, after reading all of it: its sums are right and every value is of that
/// step.
fn whole(checkpoint: &Checkpoint) -> u64 {
    let step = checkpoint.manifest().step;
    assert_eq!(checkpoint.verify(), [], "{:?}", checkpoint.path());
    let w = checkpoint.values::<f32>("w").expect("whole");
    assert!(w.iter().all(|v| *v == step as f32), "one step in all of w");
    let b = checkpoint.values::<f64>("b").expect("whole");
    assert!(b.iter().all(|v| *v == step as f64), "one step in all of b");
    assert_eq!(
        checkpoint.values::<i64>("scalar").expect("whole"),
        [step as i64]
    );
    step
}

/// The newest step. Everything in sight is a whole checkpoint, whatever died.
fn newest(root: &Path) -> u64 {
    for found in list(root).expect("readable") {
        let step = found.step.expect("nothing in sight is torn");
        assert_eq!(whole(&Checkpoint::open(found.path).expect("listed")), step);
    }
    whole(
        &latest(root)
            .expect("readable")
            .expect("a checkpoint is left"),
    )
}

/// What deaths left behind.
fn leftovers(root: &Path) -> usize {
    let names = std::fs::read_dir(root).expect("a folder").map(|e| {
        e.expect("an entry")
            .file_name()
            .to_string_lossy()
            .into_owned()
    });
    names
        .filter(|name| name.starts_with(".tmp-") || name.starts_with(".old-"))
        .count()
}

fn is_lock(error: &Error) -> bool {
    matches!(error, Error::Locked { .. })
}

/// What a child does: the binary was started with one test, [`process::TEST`], which calls this
/// instead.
fn child((part, root, numbers): (String, String, Vec<usize>)) {
    let (root, number) = (Path::new(&root), |i: usize| {
        numbers.get(i).copied().unwrap_or(0)
    });
    match part.as_str() {
        // Saves and rotates, and stands still in the middle of operation n until somebody kills it.
        "stand" => {
            let (at, threads) = (number(0), number(1));
            let disk = Watched::new(move |n, kind, _| {
                if n == at {
                    say(&format!("at {kind}"));
                    process::stand();
                }
                Ok(())
            });
            let saver = Saver {
                files: &disk,
                threads,
                ..Saver::default()
            };
            save_step(&saver, root, "two", 2, SMALL).expect("a good disk");
            say("saved 2");
            rotate_with(
                &disk,
                root,
                &Keep {
                    last: 1,
                    ..Keep::default()
                },
            )
            .expect("a good disk");
            say("rotated");
        }
        // Stands still in a save until it may go on.
        "wait" => {
            let disk = Watched::new(|n, _, _| {
                if n == 9 {
                    say("inside");
                    process::hear();
                }
                Ok(())
            });
            save_step(
                &Saver {
                    files: &disk,
                    ..Saver::default()
                },
                root,
                "slow",
                2,
                SMALL,
            )
            .expect("a good disk");
        }
        "loop" => {
            for step in number(0) as u64.. {
                save_step(&Saver::default(), root, &format!("s{step}"), step, LARGE)
                    .expect("a good disk");
                say(&format!("saved {step}"));
                rotate(
                    root,
                    &Keep {
                        last: 2,
                        ..Keep::default()
                    },
                )
                .expect("a good disk");
            }
        }
        "background" => {
            let mut saver = Background::new(root);
            for step in number(0) as u64.. {
                begin_step(&mut saver, &format!("s{step}"), step, LARGE).expect("a good disk");
                while !saver.advance(1 << 20).expect("a good disk") {}
                saver.finish().expect("a good disk");
                say(&format!("saved {step}"));
                rotate(
                    root,
                    &Keep {
                        last: 2,
                        ..Keep::default()
                    },
                )
                .expect("a good disk");
            }
        }
        // Saves so many checkpoints beside another process that does the same.
        "compete" => {
            let mut busy = 0;
            for i in 0..number(1) {
                let step = (number(0) + i) as u64;
                while let Err(error) = save(root, &format!("s{step}"), step) {
                    assert!(is_lock(&error), "{error}");
                    busy += 1;
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            say(&format!("busy {busy}"));
        }
        other => panic!("{other} is no part"),
    }
}

/// A killed process at every create, write (with half of it written), sync, rename and removal of a
/// save over the leftovers of an earlier death, and of a rotation.
#[test]
fn a_process_killed_at_any_operation_leaves_the_previous_or_the_new_checkpoint() {
    if let Some(part) = process::part() {
        return child(part);
    }
    let (mut kinds, mut old, mut new) = (BTreeMap::<String, usize>::new(), 0, 0);
    for threads in [1, 3] {
        for n in 1.. {
            let root = Temporary::here();
            save(&root, "one", 1).expect("a good disk");
            std::fs::create_dir(root.join(".tmp-two")).expect("a folder");
            for name in ["manifest.json", "rank-00000.safetensors"] {
                std::fs::write(root.join(".tmp-two").join(name), b"left behind").expect("a file");
            }
            let mut child = Child::start("stand", &root, &[n, threads]);
            let said = child.until(|line| line.starts_with("at ") || line == "rotated");
            let standing = said.last().is_some_and(|line| line.starts_with("at "));
            if standing {
                child.kill()
            } else {
                child.succeed()
            }
            let saved = said.iter().any(|line| line == "saved 2");
            let step = newest(&root);
            assert!(
                if saved {
                    step == 2
                } else {
                    (1..=2).contains(&step)
                },
                "{step} after {said:?}"
            );
            if !standing {
                assert_eq!(
                    (step, list(&root).expect("readable").len(), leftovers(&root)),
                    (2, 1, 0),
                    "a child that lives does everything"
                );
                break;
            }
            *kinds
                .entry(said[said.len() - 1][3..].to_string())
                .or_default() += 1;
            *(if step == 1 { &mut old } else { &mut new }) += 1;
            // The lock is free again and what was left is not in the way: not of another name, and
            // not of the same.
            save(&root, "three", 3).expect("the next save");
            assert_eq!(newest(&root), 3);
            if step == 1 {
                save(&root, "two", 4).expect("the name is still free");
                assert_eq!(newest(&root), 4);
            }
        }
    }
    let points: usize = kinds.values().sum();
    println!(
        "killed at every operation: {points} deaths {kinds:?}, {old} times the previous checkpoint, {new} times the new one, 0 lost"
    );
    for kind in [
        "create",
        "write",
        "sync",
        "create folder",
        "sync folder",
        "rename",
        "remove folder",
    ] {
        assert!(
            kinds.get(kind).is_some_and(|n| *n >= 2),
            "{kind} in {kinds:?}"
        );
    }
    assert!(
        points >= 60 && old >= 50 && new >= 6,
        "{points} {old} {new}"
    );
}

/// Kills a child that saves again and again, at random instants.
fn killed_at_random(part: &str, seed: u64, deaths: usize) {
    let root = Temporary::new(&format!("kill-{part}"));
    save(&root, "s0", 0).expect("a good disk");
    let (mut dice, mut next, mut inside, mut reported, mut beyond) = (Random(seed), 1, 0, 0, 0);
    for _ in 0..deaths {
        let mut child = Child::start(part, &root, &[next as usize]);
        let first = child.until(|line| line.starts_with("saved "));
        // Somewhere in the next two saves, however long one takes on this machine.
        let begun = Instant::now();
        let second = child.until(|line| line.starts_with("saved "));
        let two = 2 * begun.elapsed().as_micros() as usize;
        std::thread::sleep(Duration::from_micros(dice.below(two) as u64));
        child.kill();
        let said: Vec<u64> = first
            .iter()
            .chain(&second)
            .chain(&child.rest())
            .filter_map(|line| line.strip_prefix("saved ")?.parse().ok())
            .collect();
        let last = *said.last().expect("it said one");
        let found = newest(&root);
        assert!(
            found == last || found == last + 1,
            "{found} found, {last} was reported as saved"
        );
        *(if found == last {
            &mut reported
        } else {
            &mut beyond
        }) += 1;
        inside += usize::from(leftovers(&root) > 0);
        next = found + 1;
        save(&root, &format!("s{next}"), next).expect("the next save");
        assert_eq!(newest(&root), next);
        next += 1;
        rotate(
            &root,
            &Keep {
                last: 1,
                ..Keep::default()
            },
        )
        .expect("a good disk");
        assert_eq!(
            (newest(&root), leftovers(&root)),
            (next - 1, 0),
            "a rotation clears up after the dead"
        );
    }
    println!(
        "killed at random instants ({part}): {deaths} deaths, {inside} of them inside of a save or a rotation, {reported} times the last checkpoint that was \
         reported, {beyond} times the one after it, 0 lost"
    );
    assert!(inside > deaths / 4, "{inside} of {deaths}");
}

#[test]
fn a_process_killed_at_random_instants_loses_nothing_it_reported() {
    killed_at_random("loop", 11, 40);
}

#[test]
fn a_process_killed_while_it_saves_in_the_background_loses_nothing_it_reported() {
    killed_at_random("background", 12, 40);
}

#[test]
fn two_processes_do_not_write_at_the_same_time_and_neither_loses_anything() {
    let root = Temporary::here();
    save(&root, "one", 1).expect("a good disk");
    let mut child = Child::start("wait", &root, &[]);
    child.until(|line| line == "inside");
    // The other process is in the middle of a save.
    for error in [
        save(&root, "mine", 3).expect_err("locked"),
        rotate(&root, &Keep::default()).expect_err("locked"),
    ] {
        assert!(is_lock(&error), "{error}");
    }
    assert!(is_lock(
        &begin_step(&mut Background::new(&*root), "mine", 3, SMALL).expect_err("locked")
    ));
    assert_eq!(newest(&root), 1, "reading needs no lock");
    child.answer();
    child.succeed();
    assert_eq!(newest(&root), 2, "it was not disturbed");
    save(&root, "mine", 3).expect("free again");
    assert_eq!(newest(&root), 3);
    // Two that save as fast as they can and ask again where the other was first.
    let each = 20;
    let children = [10, 100].map(|first| Child::start("compete", &root, &[first, each]));
    let counted = AtomicUsize::new(0);
    for mut child in children {
        let said = child.until(|line| line.starts_with("busy "));
        counted.fetch_add(
            said[said.len() - 1][5..].parse().expect("a number"),
            Ordering::Relaxed,
        );
        child.succeed();
    }
    assert_eq!(list(&root).expect("readable").len(), 3 + 2 * each);
    assert_eq!(newest(&root), 100 + each as u64 - 1);
    println!(
        "two writers: {} checkpoints by two processes at once, {} times the other had the lock, 0 lost",
        2 * each,
        counted.into_inner()
    );
}

/// A process that another thread starts shares every open file until it has become another program,
/// and would hold on to the lock of a save that has ended.
#[test]
fn the_lock_is_free_after_a_save_also_while_the_process_starts_others() {
    let root = Temporary::here();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let other =
                        std::process::Command::new(std::env::current_exe().expect("this binary"))
                            .arg("--list")
                            .output();
                    assert!(other.expect("a child").status.success());
                }
            });
        }
        let ended: Result<()> = (0..60).try_for_each(|step| {
            save(&root, &format!("s{step}"), step)?;
            rotate(
                &root,
                &Keep {
                    last: 1,
                    ..Keep::default()
                },
            )
            .map(drop)
        });
        done.store(true, Ordering::Relaxed);
        ended.expect("nobody else writes");
    });
    assert_eq!(newest(&root), 59);
}

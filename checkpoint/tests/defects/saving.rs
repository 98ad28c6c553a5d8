//! Saves in the background, and rotation.

use super::{saved, start};
use crate::common::named;
use anymesh_checkpoint::{
    Background, Checkpoint, Contents, Keep, Result, Source, latest, list, rotate,
};
use anymesh_core::{DType, Tensor};
use std::{
    collections::BTreeMap,
    fs,
    time::{Duration, SystemTime},
};

/// Rotation of PaddleNLP goes by the times of folders: a copy, or a file that was touched, changes
/// what is removed.
#[test]
fn rotation_goes_by_steps_and_not_by_times() -> Result<()> {
    let (device, root) = start();
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
        &Keep {
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
    let (device, root) = start();
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
    let (device, root) = start();
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

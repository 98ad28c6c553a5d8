//! A committed checkpoint whose files are cut short or lost is passed over with a reason, and the
//! one before it loads.

use crate::{common::rewrite, newest, save, whole};
use anymesh_checkpoint::{Checkpoint, Error, Keep, latest, list, rotate};
use std::{collections::BTreeSet, fs, path::Path};

/// The previous checkpoint is what is found, and the damaged one is told with the file that is
/// wrong.
fn passed_over(root: &Path, file: &Path, how: &str) {
    assert_eq!(
        whole(&latest(root).expect("readable").expect("the previous one")),
        1,
        "{how}"
    );
    let found = list(root).expect("readable");
    assert_eq!(
        found.iter().map(|f| f.step.is_ok()).collect::<Vec<_>>(),
        [true, false],
        "{how}"
    );
    let reason = found[1].step.as_ref().expect_err("damaged");
    assert!(
        matches!(reason, Error::Format { path, .. } | Error::Io { path, .. } if path == file),
        "{how}: {reason}"
    );
    // A rotation does not count it, so that the only good one stays.
    assert_eq!(
        rotate(
            root,
            &Keep {
                last: 1,
                ..Keep::default()
            }
        )
        .expect("a good disk"),
        Vec::<std::path::PathBuf>::new(),
        "{how}"
    );
}

/// Every length at which something begins or ends, and its neighbours.
fn lengths(checkpoint: &Checkpoint, name: &str, bytes: &[u8]) -> BTreeSet<usize> {
    let mut at = vec![0, 8, bytes.len() / 2, bytes.len()];
    if name.ends_with(".safetensors") {
        at.push(8 + u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize);
        at.extend(
            checkpoint
                .manifest()
                .tensors
                .values()
                .flat_map(|t| &t.regions)
                .filter(|b| b.file == name)
                .map(|b| b.offset as usize),
        );
    } else {
        // Wherever the text might look as if it were complete.
        at.extend(
            bytes
                .iter()
                .enumerate()
                .filter(|(_, b)| b"{}[],".contains(b))
                .map(|(i, _)| i),
        );
    }
    at.into_iter()
        .flat_map(|n| [n.saturating_sub(1), n, n + 1])
        .filter(|n| *n < bytes.len())
        .collect()
}

#[test]
fn files_cut_short_or_lost_are_passed_over_with_a_reason_and_the_previous_checkpoint_loads() {
    let root = crate::common::Temporary::here();
    save(&root, "one", 1).expect("a good disk");
    let checkpoint = Checkpoint::open(save(&root, "two", 2).expect("a good disk")).expect("whole");
    let (mut cut, mut lost) = (0, 0);
    for entry in fs::read_dir(checkpoint.path()).expect("a folder") {
        let file = entry.expect("an entry").path();
        let (name, good) = (
            file.file_name()
                .expect("a name")
                .to_string_lossy()
                .into_owned(),
            fs::read(&file).expect("a file"),
        );
        for length in lengths(&checkpoint, &name, &good) {
            rewrite(&file, &good[..length]);
            passed_over(&root, &file, &format!("{name} cut to {length}"));
            cut += 1;
        }
        if name.ends_with(".safetensors") {
            rewrite(&file, &[&good[..], b"more"].concat());
            passed_over(&root, &file, &format!("{name} with more at its end"));
        }
        fs::remove_file(&file).expect("removed");
        passed_over(&root, &file, &format!("{name} removed"));
        fs::create_dir(&file).expect("a folder");
        passed_over(&root, &file, &format!("{name} is a folder"));
        fs::remove_dir(&file).expect("removed");
        lost += 2;
        fs::write(&file, good).expect("written");
        assert_eq!(newest(&root), 2, "whole again");
    }
    println!(
        "files cut short: {cut} lengths; lost or replaced: {lost}; each passed over with a reason, the previous checkpoint loads"
    );
    assert!(cut > 100 && lost >= 10);
}

//! Disks that refuse: full, failing, read-only. Errors have types and say where; nothing
//! half-written stays in sight, and the next save works.

use crate::{
    SMALL, begin_step, common::Temporary, leftovers, newest, save, save_step, watched::Watched,
};
use anymesh_checkpoint::{Background, Error, Saver, latest, list};
use std::{
    fs, io,
    path::Path,
    sync::{Arc, Mutex},
};

/// A disk on which operation `n` fails for want of space.
fn full_at(n: usize) -> Watched {
    Watched::new(move |i, kind, path| {
        // What needs no space does not fail.
        if i >= n && !["sync folder", "remove folder"].contains(&kind) {
            return Err(Error::io(
                path,
                "write",
                &io::Error::from(io::ErrorKind::StorageFull),
            ));
        }
        Ok(())
    })
}

#[test]
fn a_disk_that_is_full_at_any_operation_is_a_typed_error_and_leaves_nothing_behind() {
    let root = Temporary::here();
    save(&root, "one", 1).expect("a good disk");
    let mut failures = 0;
    for n in 1.. {
        let disk = full_at(n);
        match save_step(
            &Saver {
                files: &disk,
                ..Saver::default()
            },
            &root,
            "two",
            2,
            SMALL,
        ) {
            Ok(_) => break,
            Err(Error::Io {
                path,
                action: "write",
                reason,
            }) => {
                assert!(
                    path.starts_with(&*root) && reason.to_lowercase().contains("no s"),
                    "{reason}"
                );
            }
            Err(other) => panic!("{other:?} at {n}"),
        }
        assert_eq!(
            (
                newest(&root),
                list(&root).expect("readable").len(),
                leftovers(&root)
            ),
            (1, 1, 0),
            "full at {n}"
        );
        failures += 1;
    }
    assert_eq!(newest(&root), 2);
    println!("full disk: {failures} operations, each a typed error, nothing left behind");
    assert!(failures > 25, "{failures}");
}

#[test]
fn a_sync_that_fails_is_not_a_checkpoint() {
    let root = Temporary::here();
    save(&root, "one", 1).expect("a good disk");
    let mut failures = 0;
    for n in 1.. {
        let disk = Watched::new(move |i, kind, path| {
            let fails = i == n
                && (kind == "sync"
                    || (kind == "sync folder"
                        && path.file_name().is_some_and(|name| name == ".tmp-two")));
            if fails {
                Err(Error::io(
                    path,
                    "sync",
                    &io::Error::other("the disk does not answer"),
                ))
            } else {
                Ok(())
            }
        });
        match save_step(
            &Saver {
                files: &disk,
                threads: 1,
                ..Saver::default()
            },
            &root,
            "two",
            2,
            SMALL,
        ) {
            Err(Error::Io { action: "sync", .. }) => failures += 1,
            Err(other) => panic!("{other:?}"),
            Ok(path) if n <= disk.count() => fs::remove_dir_all(path).expect("to try again"),
            Ok(_) => break,
        }
        assert_eq!((newest(&root), leftovers(&root)), (1, 0), "failed at {n}");
    }
    assert_eq!(
        (failures, newest(&root)),
        (7, 2),
        "four data files and their folder, the manifest and the folder again"
    );
}

/// Saves in the foreground and in the background are refused with the path.
fn refused(root: &Path) {
    let told = |error: Error| match error {
        Error::Io { path, .. } => assert!(path.starts_with(root), "{path:?}"),
        other => panic!("{other:?}"),
    };
    told(save(root, "two", 2).expect_err("refused"));
    let mut background = Background::new(root);
    told(begin_step(&mut background, "two", 2, SMALL).expect_err("refused"));
    assert_eq!(background.finish().expect("an error is told once"), None);
}

#[test]
fn a_folder_that_cannot_be_written_to_is_a_typed_error() {
    let root = Temporary::here();
    // Below an ordinary file there can be no folder, whoever asks.
    fs::write(root.join("file"), b"ordinary").expect("a file");
    refused(&root.join("file"));
    refused(&root.join("file").join("checkpoints"));
    assert!(matches!(latest(&root.join("file")), Err(Error::Io { .. })));
    assert!(matches!(list(&root.join("nowhere")), Err(Error::Io { .. })));

    let closed = root.join("closed");
    save(&closed, "one", 1).expect("a good disk");
    let (before, mut permissions) = (
        fs::metadata(&closed).expect("a folder").permissions(),
        fs::metadata(&closed).expect("a folder").permissions(),
    );
    permissions.set_readonly(true);
    fs::set_permissions(&closed, permissions).expect("it is ours");
    // Some users may write anywhere; then there is nothing to see.
    if fs::write(closed.join("probe"), b"").is_err() {
        refused(&closed);
        assert_eq!(newest(&closed), 1, "reading goes on");
    }
    fs::set_permissions(&closed, before).expect("it is ours");
}

#[test]
fn folders_that_are_made_for_the_first_checkpoint_are_synced_before_it_counts() {
    let root = Temporary::here();
    let synced = Arc::new(Mutex::new(vec![]));
    let notes = synced.clone();
    let disk = Watched::new(move |_, kind, path| {
        if kind == "sync folder" {
            notes.lock().expect("not poisoned").push(path.to_path_buf());
        }
        Ok(())
    });
    let deep = root.join("runs").join("first");
    save_step(
        &Saver {
            files: &disk,
            ..Saver::default()
        },
        &deep,
        "one",
        1,
        SMALL,
    )
    .expect("a good disk");
    let synced = synced.lock().expect("not poisoned");
    for folder in [root.to_path_buf(), root.join("runs"), deep.join(".tmp-one")] {
        assert!(synced.contains(&folder), "{folder:?} in {synced:?}");
    }
    assert_eq!(
        synced.last(),
        Some(&deep),
        "the rename comes before it, and nothing after"
    );
}

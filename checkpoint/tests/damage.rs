//! Flipped bits and files cut short are always found, located, and never a panic.

mod common;

use anymesh_checkpoint::{Checkpoint, Contents, Error, manifest::Manifest, save};
use anymesh_core::{DType, Mesh, Tensor};
use common::{Random, Temporary, rewrite};
use std::{collections::BTreeMap, fs, path::Path};

fn saved(root: &Path) -> Checkpoint {
    let device = anymesh_backend_cpu::device();
    let mesh = Mesh::new("x=2", &device).expect("a mesh");
    let on = |x: Tensor| x.to_mesh(&mesh, "[@x, _]").expect("fits");
    let a = on(Tensor::arange(0, 60, 1, DType::F32, &device)
        .and_then(|t| t.reshape([6, 10]))
        .expect("a tensor"));
    let b = on(Tensor::arange(0, 40, 1, DType::U8, &device)
        .and_then(|t| t.reshape([4, 10]))
        .expect("a tensor"));
    let path = save(
        root,
        "one",
        &Contents::new(1, BTreeMap::from([("a".into(), a), ("b".into(), b)])),
    )
    .expect("saved");
    Checkpoint::open(path).expect("whole")
}

#[test]
fn every_flipped_byte_of_the_data_is_found_and_located() {
    let root = Temporary::here();
    let checkpoint = saved(&root);
    for name in ["rank-00000.safetensors", "rank-00001.safetensors"] {
        let path = checkpoint.path().join(name);
        let good = fs::read(&path).expect("a file");
        let data = 8 + u64::from_le_bytes(good[..8].try_into().expect("eight bytes")) as usize;
        for i in data..good.len() {
            let mut bad = good.clone();
            bad[i] ^= 1 << (i % 8);
            rewrite(&path, &bad);
            let again = Checkpoint::open(checkpoint.path()).expect("the manifest is good");
            let wrong = again.verify();
            let [Error::Damaged { tensor, .. }] = &wrong[..] else {
                panic!("byte {i} of {name}: {wrong:?}")
            };
            assert!(["a", "b"].contains(&tensor.as_str()));
            // The other tensor still loads; this one says which region.
            let other = if tensor == "a" { "b" } else { "a" };
            assert!(again.load(other, &anymesh_backend_cpu::device()).is_ok());
            assert!(matches!(
                again.load(tensor, &anymesh_backend_cpu::device()),
                Err(Error::Damaged { .. })
            ));
        }
        rewrite(&path, &good);
    }
    assert_eq!(checkpoint.verify(), []);
}

#[test]
fn files_cut_short_are_found() {
    let root = Temporary::here();
    let checkpoint = saved(&root);
    for entry in fs::read_dir(checkpoint.path()).expect("a folder") {
        let path = entry.expect("an entry").path();
        let good = fs::read(&path).expect("a file");
        for length in 0..good.len() {
            rewrite(&path, &good[..length]);
            let error = Checkpoint::open(checkpoint.path()).expect_err("cut short");
            assert!(matches!(error, Error::Format { .. }), "{error}");
        }
        fs::remove_file(&path).expect("removed");
        assert!(matches!(
            Checkpoint::open(checkpoint.path()),
            Err(Error::Io { .. })
        ));
        rewrite(&path, &good);
    }
}

#[test]
fn manifests_that_lie_are_refused_and_none_makes_it_panic() {
    let root = Temporary::here();
    let checkpoint = saved(&root);
    let text = checkpoint.manifest().to_text();
    let parse = |text: &str| Manifest::parse(text.as_bytes(), Path::new("manifest.json"));
    assert!(parse(&text).is_ok());
    for (from, to, why) in [
        ("\"version\":1", "\"version\":99", "newer library"),
        ("anymesh-checkpoint", "other", "format"),
        ("\"dtype\":\"f32\"", "\"dtype\":\"q7\"", "unknown dtype"),
        ("\"shape\":[6,10]", "\"shape\":[7,10]", "fill it exactly"),
        (
            "\"shape\":[6,10]",
            "\"shape\":[18446744073709551615,10]",
            "too large",
        ),
        ("\"start\":[3,0]", "\"start\":[2,0]", "overlap"),
        (
            "\"start\":[3,0]",
            "\"start\":[18446744073709551615,0]",
            "not inside",
        ),
        (
            "rank-00001.safetensors\":",
            "../secret\":",
            "no name of a file",
        ),
        ("\"offset\":", "\"offset\":9", "past the end"),
    ] {
        let changed = text.replacen(from, to, 1);
        assert_ne!(changed, text, "{from}");
        let error = parse(&changed).expect_err(to).to_string();
        assert!(error.contains(why), "{to}: {error}");
    }
    // Random changes: refused, or a manifest that fits together; never a panic.
    let mut dice = Random(5);
    for _ in 0..50_000 {
        let mut bytes = text.clone().into_bytes();
        for _ in 0..1 + dice.below(3) {
            let at = dice.below(bytes.len());
            match dice.below(3) {
                0 => bytes[at] = dice.next() as u8,
                1 => drop(bytes.remove(at)),
                _ => bytes.insert(at, b"0123456789[]{},\"-"[dice.below(17)]),
            }
        }
        let _ = Manifest::parse(&bytes, Path::new("manifest.json"));
    }
}

/// A stored folder of every version of the format: what was written once is read for ever.
#[test]
fn checkpoints_of_every_version_are_read() {
    let original =
        anymesh_checkpoint::open(common::data("safetensors/types.safetensors")).expect("a file");
    for version in ["version-1"] {
        let checkpoint = Checkpoint::open(common::data(version)).expect("a checkpoint");
        assert_eq!(checkpoint.verify(), [], "{version}");
        common::assert_same(&checkpoint, original.as_ref());
    }
}

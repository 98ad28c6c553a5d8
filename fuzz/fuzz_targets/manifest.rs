//! The manifest of a checkpoint, and a folder that fits it.

#![no_main]

use anymesh_checkpoint::manifest::{BLOCK, Manifest, NAME, checksum};
use anymesh_checkpoint::{Checkpoint, Source, copy_region};
use anymesh_fuzz::{SMALL, assert_filled, assert_regions_agree, scratch};
use libfuzzer_sys::fuzz_target;
use std::collections::BTreeMap;
use std::path::Path;

fuzz_target!(|data: &[u8]| {
    let path = Path::new(NAME);
    let Ok(manifest) = Manifest::parse(data, path) else {
        return;
    };
    let again =
        Manifest::parse(manifest.to_text().as_bytes(), path).expect("what was written is read");
    assert_eq!(manifest, again);
    for stored in manifest.tensors.values() {
        let regions: Vec<_> = stored.regions.iter().map(|b| b.region()).collect();
        assert_filled(&stored.shape, regions.iter());
    }
    let bytes = manifest
        .files
        .values()
        .try_fold(0u64, |sum, n| sum.checked_add(*n));
    if manifest.files.len() <= 4 && bytes.is_some_and(|n| n <= 1 << 14) {
        open(manifest);
    }
});

/// Writes a folder for a manifest and reads it. The sums become those of the files.
fn open(mut manifest: Manifest) {
    let folder = scratch().join("checkpoint");
    std::fs::create_dir_all(&folder).expect("creates");
    let file = |(at, (name, size)): (usize, (&String, &u64))| {
        (
            name.clone(),
            (0..*size)
                .map(|i| (i * 31 + i / 256 + at as u64 * 7) as u8)
                .collect(),
        )
    };
    let files: BTreeMap<String, Vec<u8>> = manifest.files.iter().enumerate().map(file).collect();
    for stored in manifest.tensors.values_mut() {
        let size = stored.info().dtype.size();
        for b in &mut stored.regions {
            let start = b.offset as usize;
            b.sums = files[&b.file][start..start + b.region().numel() * size]
                .chunks(BLOCK as usize)
                .map(checksum)
                .collect();
        }
    }
    // Not every name is one that the system takes.
    let written = files
        .iter()
        .all(|(name, bytes)| std::fs::write(folder.join(name), bytes).is_ok());
    if written {
        std::fs::write(folder.join(NAME), manifest.to_text()).expect("writes");
        let checkpoint = Checkpoint::open(&folder).expect("a folder as the manifest says");
        assert_eq!(checkpoint.verify(), []);
        for (name, stored) in &manifest.tensors {
            let info = stored.info();
            if info.numel() > SMALL {
                continue;
            }
            let mut expected = vec![0; info.bytes()];
            for b in &stored.regions {
                let (part, size) = (b.region(), info.dtype.size());
                let bytes = &files[&b.file][b.offset as usize..][..part.numel() * size];
                copy_region(bytes, &part, &mut expected, &info.whole(), &part, size);
            }
            assert_eq!(
                checkpoint.read_all(name).expect("reads"),
                expected,
                "'{name}' {info:?}"
            );
            assert_regions_agree(&checkpoint, name, &info, &expected);
        }
    }
    std::fs::remove_dir_all(&folder).expect("it is ours");
}

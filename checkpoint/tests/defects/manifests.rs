//! What a manifest may say.

use anymesh_checkpoint::manifest::{Manifest, Stored, StoredRegion};
use std::path::Path;

fn manifest_of(shape: Vec<usize>, regions: Vec<StoredRegion>, bytes: u64) -> Manifest {
    let stored = Stored {
        dtype: "u8".into(),
        layout: String::new(),
        shape,
        regions,
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

fn stored_region(start: Vec<usize>, shape: Vec<usize>, offset: u64) -> StoredRegion {
    StoredRegion {
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
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux");
    text.split(' ')
        .next()
        .and_then(|ns| ns.parse().ok())
        .expect("nanoseconds")
}

/// Checking the regions of a plan took time with the square of their number (torch #169113).
#[cfg(target_os = "linux")]
#[test]
fn checking_regions_takes_no_time_with_the_square_of_their_number() {
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
        let regions = cells
            .into_iter()
            .enumerate()
            .map(|(i, start)| stored_region(start, step.to_vec(), (i * volume) as u64))
            .collect();
        let mut manifest = manifest_of(shape.to_vec(), regions, 1 << 20);
        let begun = computed();
        assert!(parse(&manifest).is_ok(), "{shape:?}");
        let took = computed() - begun;
        // The same number of elements, one of them twice and one not at all.
        let regions = &mut manifest.tensors.get_mut("w").expect("it is there").regions;
        regions[999].start = regions[17].start.clone();
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
        // Four times as many regions: four times the time and a little, not sixteen times.
        assert!(
            many < 9 * few,
            "{large:?}: {many} ns for 40000 regions, {few} ns for 10000"
        );
    }
}

/// Offsets and sizes of different ranks (Megatron #7162) were taken for a region.
#[test]
fn regions_of_another_rank_than_the_tensor_are_refused() {
    for (start, shape) in [
        (vec![0], vec![2, 3]),
        (vec![0, 0, 0], vec![2, 3]),
        (vec![0, 0], vec![6]),
        (vec![0, 0], vec![2, 3, 1]),
        (vec![], vec![]),
    ] {
        let manifest = manifest_of(
            vec![2, 3],
            vec![stored_region(start.clone(), shape.clone(), 0)],
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

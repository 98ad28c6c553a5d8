//! What the fuzz targets share.

pub mod dcp;
pub mod expected;

use anymesh_checkpoint::{Source, TensorInfo, copy_region};
use anymesh_core::Region;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Tensors of more elements than this are not read whole.
pub const SMALL: usize = 2048;

/// A folder for the files of one process, in memory where the system has such a place.
pub fn scratch() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let shared = Path::new("/dev/shm");
        let parent = if shared.is_dir() {
            shared.into()
        } else {
            std::env::temp_dir()
        };
        let folder = parent.join(format!("anymesh-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a temporary folder");
        folder
    })
}

/// A region from its parts.
pub fn region(start: &[usize], shape: &[usize]) -> Region {
    Region {
        start: start.iter().copied().collect(),
        shape: shape.iter().copied().collect(),
    }
}

/// Regions of many kinds: halves and middles along each dimension, a corner, single elements,
/// nothing.
pub fn regions(shape: &[usize]) -> Vec<Region> {
    let zeros = vec![0; shape.len()];
    let mut out = vec![region(
        &zeros,
        &shape.iter().map(|n| n.div_ceil(2)).collect::<Vec<_>>(),
    )];
    out.push(region(
        &shape.iter().map(|n| n / 3).collect::<Vec<_>>(),
        &shape
            .iter()
            .map(|n| n.div_ceil(3).min(n - n / 3))
            .collect::<Vec<_>>(),
    ));
    out.push(region(
        &shape
            .iter()
            .map(|n| n.saturating_sub(1))
            .collect::<Vec<_>>(),
        &shape.iter().map(|n| 1.min(*n)).collect::<Vec<_>>(),
    ));
    // Ranks without end are one more thing that a file can say.
    for d in 0..shape.len().min(4) {
        let (mut start, mut part) = (zeros.clone(), shape.to_vec());
        (start[d], part[d]) = (shape[d] / 2, shape[d] - shape[d] / 2);
        out.push(region(&start, &part));
        (start[d], part[d]) = (shape[d], 0);
        out.push(region(&start, &part));
    }
    out
}

/// Reading region by region must give what reading the whole gave.
pub fn assert_regions_agree(source: &impl Source, name: &str, info: &TensorInfo, whole: &[u8]) {
    let size = info.dtype.size();
    let mut parts: Vec<(Region, Vec<u8>)> = vec![];
    for part in regions(&info.shape) {
        let mut expected = vec![0; part.numel() * size];
        copy_region(whole, &info.whole(), &mut expected, &part, &part, size);
        let mut found = vec![0xaa; expected.len()];
        source
            .read(name, &part, &mut found)
            .expect("a region of what was read whole");
        assert_eq!(found, expected, "'{name}' {info:?} {part:?}");
        parts.push((part, expected));
    }
    let mut together: Vec<(Region, Vec<u8>)> = parts
        .iter()
        .map(|(part, bytes)| (part.clone(), vec![0xaa; bytes.len()]))
        .collect();
    source
        .read_many(name, &mut together)
        .expect("regions that were read one by one");
    assert_eq!(together, parts, "'{name}' {info:?}");
}

/// Regions of a tensor must lie inside, not overlap, and leave no element out.
pub fn assert_filled<'r>(shape: &[usize], regions: impl Iterator<Item = &'r Region>) {
    let whole = region(&vec![0; shape.len()], shape);
    let small = whole.numel() <= SMALL;
    let mut seen = vec![0u8; if small { whole.numel() } else { 0 }];
    let mut count = 0;
    for part in regions {
        assert_eq!(
            (part.start.len(), part.shape.len()),
            (shape.len(), shape.len())
        );
        assert!(
            (0..shape.len()).all(|d| part.start[d]
                .checked_add(part.shape[d])
                .is_some_and(|end| end <= shape[d])),
            "{part:?} in {shape:?}"
        );
        count += part.numel();
        if small {
            let mut mark = vec![0u8; whole.numel()];
            copy_region(&vec![1; part.numel()], part, &mut mark, &whole, part, 1);
            seen.iter_mut()
                .zip(mark)
                .for_each(|(seen, mark)| *seen += mark);
        }
    }
    assert_eq!(count, whole.numel(), "{shape:?}");
    assert!(seen.iter().all(|times| *times == 1), "{shape:?}: {seen:?}");
}

//! A tensor as torch.distributed.checkpoint stores it: an archive of torch.save, with metadata that
//! leads to it.
//!
//! The input is an element type, a rank, as many sizes, and the archive.

#![no_main]

use anymesh_checkpoint::Source;
use anymesh_checkpoint::dcp::{Folder, METADATA};
use anymesh_fuzz::{SMALL, assert_regions_agree, dcp, scratch};
use libfuzzer_sys::fuzz_target;

const TYPES: [&str; 11] = [
    "bool",
    "uint8",
    "uint32",
    "int32",
    "int64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float16",
    "bfloat16",
    "float32",
    "float64",
];

fuzz_target!(|data: &[u8]| {
    let [dtype, rank, rest @ ..] = data else {
        return;
    };
    let (Some(dtype), Some((shape, archive))) = (
        TYPES.get(usize::from(*dtype)),
        rest.split_at_checked(usize::from(*rank)),
    ) else {
        return;
    };
    let shape: Vec<usize> = shape.iter().map(|n| usize::from(*n)).collect();
    let archive = dcp::with_sums(archive.to_vec());
    let folder = scratch();
    std::fs::write(
        folder.join(METADATA),
        dcp::metadata(dtype, &shape, archive.len()),
    )
    .expect("writes");
    std::fs::write(folder.join("f"), &archive).expect("writes");
    let Ok(folder) = Folder::open(folder) else {
        return;
    };
    let info = folder.tensors()["x"].clone();
    assert_eq!(info.shape, shape);
    if info.numel() > SMALL {
        return;
    }
    let Ok(whole) = folder.read_all("x") else {
        return;
    };
    assert_regions_agree(&folder, "x", &info, &whole);
    // Every element is one of the archive's.
    let size = info.dtype.size();
    assert!(
        whole
            .chunks_exact(size)
            .take(64)
            .all(|element| archive.windows(size).any(|there| there == element))
    );
});

//! The metadata pickle of torch.distributed.checkpoint.

#![no_main]

use anymesh_checkpoint::dcp::Metadata;
use anymesh_fuzz::assert_filled;
use libfuzzer_sys::fuzz_target;
use std::path::{Component, Path};

fuzz_target!(|data: &[u8]| {
    let Ok(metadata) = Metadata::parse(data, ".metadata") else {
        return;
    };
    for tensor in metadata.tensors.values() {
        assert_filled(
            &tensor.shape,
            tensor.chunks.iter().map(|chunk| &chunk.region),
        );
        for chunk in &tensor.chunks {
            assert!(
                Path::new(&chunk.file)
                    .components()
                    .all(|part| matches!(part, Component::Normal(_))),
                "{}",
                chunk.file
            );
        }
    }
    assert!(metadata.objects.is_sorted());
    // What follows the end of a pickle is not looked at.
    let longer = [data, &b"\x80\x02N."[..]].concat();
    assert_eq!(Metadata::parse(&longer, ".metadata"), Ok(metadata));
});

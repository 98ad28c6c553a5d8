//! Safetensors files: the header, and the tensors that it promises.

#![no_main]

use anymesh_checkpoint::Source;
use anymesh_checkpoint::safetensors::{File, Header};
use anymesh_fuzz::{SMALL, assert_regions_agree, scratch};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    check(data);
    // A mutation that changes the length of the text rarely changes the number before it too.
    if let Some(end) = data
        .iter()
        .rposition(|b| *b == b'}')
        .filter(|end| *end >= 8)
    {
        let mut repaired = data.to_vec();
        repaired[..8].copy_from_slice(&(end as u64 - 7).to_le_bytes());
        if repaired != data {
            check(&repaired);
        }
    }
});

fn check(data: &[u8]) {
    let Some(first) = data.first_chunk::<8>() else {
        return;
    };
    let length = data.len() as u64;
    let Ok(size) = Header::size(*first, length, "x") else {
        return;
    };
    let start = 8 + size as usize;
    let Ok(header) = Header::parse(&data[8..start], length, "x") else {
        return;
    };

    let mut ranges = vec![];
    for (name, info) in &header.tensors {
        let at = header.offsets[name] as usize;
        assert!(
            at >= start
                && at
                    .checked_add(info.bytes())
                    .is_some_and(|end| end <= data.len()),
            "'{name}' {info:?} at {at}"
        );
        ranges.push((at, at + info.bytes()));
    }
    ranges.sort();
    assert!(ranges.windows(2).all(|w| w[0].1 <= w[1].0), "{ranges:?}");

    let path = scratch().join("x.safetensors");
    std::fs::write(&path, data).expect("writes");
    let file = File::open(&path).expect("a header that was read before");
    assert_eq!(*file.header(), header);
    for (name, info) in header
        .tensors
        .iter()
        .take(32)
        .filter(|(_, info)| info.numel() <= SMALL)
    {
        let whole = file.read_all(name).expect("it lies in the file");
        assert_eq!(
            whole,
            data[header.offsets[name] as usize..][..info.bytes()],
            "'{name}' {info:?}"
        );
        assert_regions_agree(&file, name, info, &whole);
    }
}

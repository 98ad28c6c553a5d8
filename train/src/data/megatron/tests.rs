use super::*;
use crate::data::tests::Folder;

/// An index by hand: lengths and offsets of sequences, and document borders.
fn index(code: u8, lengths: &[i32], offsets: &[i64], borders: &[i64]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(1u64.to_le_bytes());
    bytes.push(code);
    bytes.extend((lengths.len() as u64).to_le_bytes());
    bytes.extend((borders.len() as u64).to_le_bytes());
    bytes.extend(lengths.iter().flat_map(|x| x.to_le_bytes()));
    bytes.extend(offsets.iter().flat_map(|x| x.to_le_bytes()));
    bytes.extend(borders.iter().flat_map(|x| x.to_le_bytes()));
    bytes
}

fn tokens(count: u16) -> Vec<u8> {
    (0..count).flat_map(u16::to_le_bytes).collect()
}

fn open(folder: &Folder, bin: &[u8], idx: &[u8]) -> Result<Megatron> {
    folder.write("t.bin", bin);
    Megatron::open(folder.write("t.idx", idx), 1000)
}

fn refused(folder: &Folder, bin: &[u8], idx: &[u8], file: &str, at: u64, said: &str) {
    let error = open(folder, bin, idx).expect_err(said);
    match &error {
        Error::Data {
            path,
            offset,
            detail,
        } => {
            let name = path.file_name().and_then(|n| n.to_str());
            assert_eq!((name, *offset), (Some(file), at), "{error}");
            assert!(detail.contains(said), "{error}");
        }
        _ => panic!("{error}"),
    }
}

#[test]
fn what_is_written_is_what_megatron_writes() {
    let folder = Folder::new("written");
    let mut writer = MegatronWriter::create(folder.path().join("t"), TokenType::U16).expect("new");
    for document in [&[0, 1, 2][..], &[], &[3, 4]] {
        writer.document(document).expect("fits");
    }
    writer.finish().expect("written");
    let read = |name: &str| std::fs::read(folder.path().join(name)).expect("written");
    assert_eq!(read("t.bin"), tokens(5));
    assert_eq!(
        read("t.idx"),
        index(8, &[3, 0, 2], &[0, 6, 6], &[0, 1, 2, 3])
    );
    let left = std::fs::read_dir(folder.path()).expect("ours").count();
    assert_eq!(left, 2, "no temporary file is left");
}

#[test]
fn a_pair_that_was_not_finished_is_not_there() {
    let folder = Folder::new("unfinished");
    let mut writer = MegatronWriter::create(folder.path().join("t"), TokenType::I32).expect("new");
    writer.document(&[1]).expect("fits");
    drop(writer);
    assert_eq!(std::fs::read_dir(folder.path()).expect("ours").count(), 0);
}

#[test]
fn documents_are_read_by_number_and_as_one_row() {
    let folder = Folder::new("row");
    // Documents of one, two, no and one sequences; the third sequence is empty.
    let idx = index(8, &[3, 2, 0, 4], &[0, 6, 10, 10], &[0, 1, 3, 3, 4]);
    let pair = open(&folder, &tokens(9), &idx).expect("whole");
    assert_eq!((pair.count(), pair.total()), (4, 9));
    let documents: Vec<_> = (0..4)
        .map(|i| pair.document(i).expect("there").tokens)
        .collect();
    assert_eq!(
        documents,
        [vec![0, 1, 2], vec![3, 4], vec![], vec![5, 6, 7, 8]]
    );
    let lengths: Vec<_> = (0..4).map(|i| pair.length(i).expect("there")).collect();
    assert_eq!(lengths, [3, 2, 0, 4]);
    assert!(pair.document(4).is_err());
    for start in 0..9usize {
        for len in 0..=9 - start {
            let (found, borders) = pair.read(start as u64, len).expect("inside");
            let expected: Vec<u32> = (start as u32..(start + len) as u32).collect();
            assert_eq!(found, expected);
            let inside = [3, 5]
                .into_iter()
                .filter(|b| *b > start && *b < start + len);
            assert_eq!(
                borders,
                inside.map(|b| b - start).collect::<Vec<_>>(),
                "{start} {len}"
            );
        }
    }
    assert!(pair.read(5, 5).is_err());
}

#[test]
fn borders_are_found_among_many_documents() {
    let folder = Folder::new("many");
    let mut writer = MegatronWriter::create(folder.path().join("t"), TokenType::U16).expect("new");
    let mut starts = vec![];
    let mut next = 0u32;
    for document in 0..3000u32 {
        starts.push(next);
        let tokens: Vec<u32> = (next..next + document % 7).map(|t| t % 1000).collect();
        writer.document(&tokens).expect("fits");
        next += document % 7;
    }
    writer.finish().expect("written");
    let pair = Megatron::open(folder.path().join("t.bin"), 1000).expect("whole");
    assert_eq!(pair.total(), u64::from(next));
    for start in (0..next - 50).step_by(37) {
        let (found, borders) = pair.read(start.into(), 50).expect("inside");
        assert_eq!(found[0], start % 1000);
        let mut expected: Vec<usize> = starts
            .iter()
            .filter(|s| **s > start && **s < start + 50)
            .map(|s| (s - start) as usize)
            .collect();
        expected.dedup();
        assert_eq!(borders, expected, "from {start}");
    }
}

#[test]
fn sequences_may_lie_anywhere_where_documents_are_read_by_number() {
    let folder = Folder::new("anywhere");
    let idx = index(8, &[2, 3], &[6, 0], &[0, 1, 2]);
    let pair = open(&folder, &tokens(5), &idx).expect("whole");
    assert_eq!(pair.document(0).expect("there").tokens, [3, 4]);
    let error = pair.read(0, 2).expect_err("not one row");
    assert!(
        error.to_string().contains("pack these files by documents"),
        "{error}"
    );
    assert!(matches!(error, Error::Data { offset: 42, .. }), "{error}");
}

#[test]
fn damaged_indices_are_errors_with_file_and_offset() {
    let folder = Folder::new("damaged");
    let bin = tokens(5);
    let good = index(8, &[3, 2], &[0, 6], &[0, 1, 2]);
    open(&folder, &bin, &good).expect("whole");
    let mut modes = good.clone();
    modes.extend([0, 0]);
    open(&folder, &bin, &modes).expect("with a byte for every sequence");
    let changed = |at: usize, to: &[u8]| {
        let mut bytes = good.clone();
        bytes[at..at + to.len()].copy_from_slice(to);
        bytes
    };
    let refuse = |idx: &[u8], file, at, said: &str| refused(&folder, &bin, idx, file, at, said);
    refuse(&changed(0, b"X"), "t.idx", 0, "no index of Megatron's");
    refuse(b"MMID", "t.idx", 0, "no index of Megatron's");
    refuse(b"", "t.idx", 0, "empty");
    refuse(&changed(9, &[2]), "t.idx", 9, "version 2");
    for code in [0, 2, 6, 7, 9] {
        refuse(
            &changed(17, &[code]),
            "t.idx",
            17,
            &format!("the type of tokens is {code}"),
        );
    }
    for at in [18, 26] {
        for count in [4, u64::MAX, u64::MAX / 12, 1 << 60] {
            refuse(&changed(at, &count.to_le_bytes()), "t.idx", 18, "take");
        }
    }
    let mut longer = modes.clone();
    longer.push(0);
    refuse(&longer, "t.idx", 18, "damaged");
    refuse(
        &index(8, &[], &[], &[0]),
        "t.idx",
        18,
        "nothing is in these files",
    );
    refuse(
        &index(8, &[0], &[0], &[0, 1]),
        "t.idx",
        34,
        "nothing is in these files",
    );
    refuse(
        &index(8, &[3, -2], &[0, 6], &[0, 1, 2]),
        "t.idx",
        38,
        "a length of -2",
    );
    refuse(
        &index(8, &[3, 2], &[0, -6], &[0, 1, 2]),
        "t.idx",
        50,
        "begins at byte -6",
    );
    refuse(
        &index(8, &[3, 2], &[0, i64::MAX], &[0, 1, 2]),
        "t.bin",
        10,
        "sequence 1",
    );
    refuse(
        &index(8, &[3, i32::MAX], &[0, 6], &[0, 1, 2]),
        "t.bin",
        10,
        "sequence 1",
    );
    refuse(
        &index(4, &[3, 2], &[0, 6], &[0, 1, 2]),
        "t.bin",
        10,
        "sequence 0",
    );
    refuse(
        &index(8, &[3, 2], &[0, 6], &[1, 1, 2]),
        "t.idx",
        58,
        "border 0 is 1",
    );
    refuse(
        &index(8, &[3, 2], &[0, 6], &[0, 3, 2]),
        "t.idx",
        66,
        "border 1 is 3 after 0",
    );
    refuse(
        &index(8, &[3, 2], &[0, 6], &[0, -1, 2]),
        "t.idx",
        66,
        "border 1 is -1",
    );
    refuse(
        &index(8, &[3, 2], &[0, 6], &[0, 1, 1]),
        "t.idx",
        74,
        "border 2 is 1",
    );
    // A truncated index and truncated tokens, at every length.
    for len in 0..good.len() {
        assert!(
            open(&folder, &bin, &good[..len]).is_err(),
            "{len} bytes of the index"
        );
    }
    for len in 0..bin.len() {
        let error = open(&folder, &bin[..len], &good).expect_err("truncated");
        assert!(
            matches!(&error, Error::Data { offset, .. } if *offset == len as u64),
            "{error}"
        );
    }
}

#[test]
fn files_that_change_after_they_were_opened_give_errors() {
    let folder = Folder::new("change");
    let good = index(8, &[3, 2], &[0, 6], &[0, 1, 2]);
    let pair = open(&folder, &tokens(5), &good).expect("whole");
    for (what, bytes) in [
        ("borders", index(8, &[3, 2], &[0, 6], &[9, -1, 2])),
        ("lengths", index(8, &[-3, -2], &[0, 6], &[0, 1, 2])),
        ("offsets", index(8, &[3, 2], &[-1, i64::MAX], &[0, 1, 2])),
        ("all of it", vec![1]),
    ] {
        folder.write("t.idx", &bytes);
        assert!(
            pair.document(0).is_err() && pair.document(1).is_err(),
            "{what}"
        );
        // The row is where it was; only borders are asked of the index.
        let _ = pair.read(0, 5);
    }
    folder.write("t.idx", &good);
    folder.write("t.bin", &tokens(3));
    assert_eq!(pair.document(0).expect("still there").tokens, [0, 1, 2]);
    let error = pair.document(1).expect_err("gone");
    assert!(matches!(error, Error::Data { offset: 6, .. }), "{error}");
}

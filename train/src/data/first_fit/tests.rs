use super::*;
use crate::data::{Document, IGNORED, Memory, tests::Folder};
use std::fs;

/// Documents with tokens that are all different; lengths from a formula.
fn documents(count: u32, longest: u32) -> Vec<Document> {
    let mut next = 0;
    let one = |i: u32| {
        let len = i.wrapping_mul(2_654_435_761) % (longest + 1);
        let document = Document::new((next..next + len).collect::<Vec<_>>());
        next += len;
        document
    };
    (0..count).map(one).collect()
}

#[test]
fn every_token_is_in_one_row_and_every_pair_is_predicted_once() {
    for (count, longest, length) in [
        (1, 5, 8),
        (50, 8, 8),
        (200, 30, 16),
        (300, 100, 32),
        (40, 3, 1),
    ] {
        let all = documents(count, longest);
        let tokens: usize = all.iter().map(|d| d.tokens.len()).sum();
        if tokens == 0 {
            continue;
        }
        let rows = FirstFit::new(Memory::new(all.clone()), length, None).expect("tokens");
        let (mut read, mut predicted) = (vec![], vec![]);
        for index in 0..rows.count() {
            let row = rows.sample(index).expect("a row");
            assert!(!row.ids.is_empty() && row.ids.len() <= length);
            for (i, label) in row.labels.iter().enumerate() {
                if *label != IGNORED {
                    assert_eq!(*label, row.ids[i] + 1);
                    predicted.push(*label as u32);
                }
                let begins = i == 0 || row.documents[i] != row.documents[i - 1];
                assert_eq!(
                    row.positions[i],
                    if begins { 0 } else { row.positions[i - 1] + 1 }
                );
            }
            read.extend(row.ids);
        }
        read.sort_unstable();
        predicted.sort_unstable();
        assert_eq!(read, (0..tokens as i32).collect::<Vec<_>>());
        let inside = all.iter().flat_map(|d| d.tokens.iter().skip(1).copied());
        assert_eq!(predicted, inside.collect::<Vec<_>>());
    }
}

#[test]
fn documents_go_into_the_first_row_with_room() {
    let all = documents(500, 60);
    let length = 64;
    let rows = FirstFit::new(Memory::new(all.clone()), length, None).expect("tokens");
    // The same, row after row.
    let mut expected: Vec<Vec<u32>> = vec![];
    for document in all.iter().filter(|d| !d.tokens.is_empty()) {
        let fits = |row: &&mut Vec<u32>| row.len() + document.tokens.len() <= length;
        match expected.iter_mut().find(fits) {
            Some(row) => row.extend(&document.tokens),
            None => expected.push(document.tokens.clone()),
        }
    }
    assert_eq!(rows.count(), expected.len() as u64);
    for (index, row) in (0..).zip(expected) {
        let found = rows.sample(index).expect("a row").ids;
        assert_eq!(found, row.into_iter().map(|t| t as i32).collect::<Vec<_>>());
    }
}

/// Documents that count how often they are asked for.
#[derive(Debug)]
struct Asked<'a>(Memory, &'a std::sync::atomic::AtomicU64);

impl Documents for Asked<'_> {
    fn count(&self) -> u64 {
        self.0.count()
    }

    fn document(&self, index: u64) -> Result<Document> {
        self.1.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        self.0.document(index)
    }

    fn describe(&self) -> String {
        self.0.describe()
    }
}

#[test]
fn the_index_is_built_once_and_again_where_its_file_is_not_whole() {
    let folder = Folder::new("rows");
    let cache = folder.path().join("cache");
    let asked = std::sync::atomic::AtomicU64::new(0);
    let pack = |count, length| {
        asked.store(0, std::sync::atomic::Ordering::Relaxed);
        let documents = Asked(Memory::new(documents(count, 30)), &asked);
        let rows = FirstFit::new(documents, length, Some(&cache)).expect("tokens");
        let file = rows
            .cached()
            .expect("asked for")
            .as_ref()
            .expect("kept")
            .clone();
        let built = asked.load(std::sync::atomic::Ordering::Relaxed);
        let samples: Vec<Sample> = (0..rows.count())
            .map(|i| rows.sample(i).expect("a row"))
            .collect();
        (file, built, samples)
    };
    let (file, built, samples) = pack(100, 32);
    assert_eq!(built, 100);
    assert_eq!(pack(100, 32), (file.clone(), 0, samples.clone()));
    // Other documents or lengths are other files.
    let (other, built, _) = pack(101, 32);
    assert!(other != file && built == 101);
    let (other, built, _) = pack(100, 33);
    assert!(other != file && built == 100);
    // A damaged file, at every length and with every byte changed, is built again.
    let good = fs::read(&file).expect("kept");
    for at in (0..good.len()).step_by(61) {
        let mut bytes = good.clone();
        bytes[at] ^= 4;
        for damaged in [&good[..at], &bytes] {
            fs::write(&file, damaged).expect("ours");
            assert_eq!(
                pack(100, 32),
                (file.clone(), 100, samples.clone()),
                "byte {at}"
            );
            assert_eq!(fs::read(&file).expect("kept again"), good);
        }
    }
    // So is a whole file of something else under the same name.
    fs::copy(&other, &file).expect("ours");
    assert_eq!(pack(100, 32).1, 100);
}

#[test]
fn an_index_that_cannot_be_kept_is_in_memory() {
    let folder = Folder::new("rows-not");
    let no_folder = folder.write("file", b"x");
    let rows = FirstFit::new(Memory::new(documents(20, 30)), 32, Some(&no_folder)).expect("tokens");
    assert!(
        matches!(rows.cached(), Some(Err(Error::Io { .. }))),
        "{:?}",
        rows.cached()
    );
    assert!(rows.sample(0).is_ok());
}

#[test]
fn what_cannot_be_packed_is_an_error() {
    assert!(FirstFit::new(Memory::new([]), 8, None).is_err());
    assert!(FirstFit::new(Memory::new([Document::default()]), 8, None).is_err());
    assert!(FirstFit::new(Memory::new(documents(9, 9)), 0, None).is_err());
    let mut class = Document::new([1, 2]);
    class.class = Some(1);
    let rows = FirstFit::new(Memory::new([class]), 8, None).expect("tokens");
    assert!(rows.sample(0).is_err() && rows.sample(1).is_err() && rows.sample(u64::MAX).is_err());
}

//! Files that are wrong: each wrong in one way, cut short everywhere, with any byte changed.

use crate::build::{Build, Value, text};
use crate::common::{Random, Temporary, read_everything, rewrite};
use anymesh_checkpoint::gguf::{self, Defect};
use anymesh_checkpoint::{Error, open};

/// Where something is wrong and what, after a file was opened that cannot be.
fn defect(folder: &Temporary, build: &Build) -> (u64, Defect) {
    defect_of(folder, &build.bytes())
}

fn defect_of(folder: &Temporary, bytes: &[u8]) -> (u64, Defect) {
    let path = folder.join("wrong.gguf");
    rewrite(&path, bytes);
    match gguf::File::open(&path) {
        Err(Error::Gguf {
            path: at,
            offset,
            defect,
        }) => {
            assert_eq!(at, path);
            assert!(offset <= bytes.len() as u64);
            (offset, defect)
        }
        other => panic!("{other:?}"),
    }
}

/// One of everything.
fn small() -> Build {
    Build::new()
        .value("general.architecture", Value::text("toy"))
        .value("flag", Value::bool(true))
        .value("list", Value::array(&[Value::u8(1), Value::u8(2)]))
        .value("texts", Value::texts(&["a", "bc"]))
        .value(
            "nested",
            Value::array(&[Value::array(&[Value::f32(1.0)]), Value::array(&[])]),
        )
        .tensor("w", &[32, 2], 8, vec![3; 68])
        .floats("b", &[2], &[1.0, 2.0])
}

#[test]
fn each_thing_that_is_wrong_has_its_error_with_its_place() {
    let folder = Temporary::here();
    let wrong = |build: Build| defect(&folder, &build);
    let versioned = |version| Build {
        version,
        ..Build::new()
    };
    assert_eq!(wrong(versioned(1)), (4, Defect::Version { version: 1 }));
    assert_eq!(wrong(versioned(4)), (4, Defect::Version { version: 4 }));
    let version = 3;
    assert_eq!(
        wrong(versioned(3u32.swap_bytes())),
        (4, Defect::BigEndian { version })
    );
    assert_eq!(
        defect_of(&folder, &[&b"GGML"[..], &[3, 0, 0, 0]].concat()),
        (0, Defect::Magic)
    );

    // Keys begin at 24; the value of "k" is at 24 + 9 + 4.
    let key = |value: Value| Build::new().value("k", value);
    let id = 13;
    assert_eq!(
        wrong(key(Value::raw(id, vec![0; 8]))),
        (
            33,
            Defect::ValueType {
                key: "k".into(),
                id
            }
        )
    );
    let bad = Value::raw(9, [77u32.to_le_bytes().to_vec(), vec![0; 8]].concat());
    assert_eq!(
        wrong(key(bad)),
        (
            37,
            Defect::ValueType {
                key: "k".into(),
                id: 77
            }
        )
    );
    let not = Defect::NotBool {
        key: "k".into(),
        value: 2,
    };
    assert_eq!(wrong(key(Value::raw(7, vec![2]))), (37, not));
    let twice = key(Value::u8(1)).value("k", Value::u8(2));
    assert_eq!(wrong(twice), (38, Defect::DuplicateKey { key: "k".into() }));
    let what = "a text of the metadata";
    let text = Value::raw(8, [&2u64.to_le_bytes()[..], &[b'a', 0xff]].concat());
    assert_eq!(wrong(key(text)), (46, Defect::NotText { what }));
    for found in ["0", "24", "\"32\""] {
        let value = match found.parse() {
            Ok(n) => Value::u32(n),
            Err(_) => Value::text("32"),
        };
        let build = Build::new().value("general.alignment", value);
        let found = found.into();
        assert_eq!(wrong(build), (53, Defect::Alignment { found }));
    }

    // Without metadata tensors begin at 24.
    let tensor = "w".to_string();
    let one = Build::new().floats("w", &[2], &[1.0, 2.0]);
    let twice = one.clone().floats("w", &[1], &[0.0]);
    assert_eq!(
        wrong(twice).1,
        Defect::DuplicateTensor {
            tensor: tensor.clone()
        }
    );
    let rank = Build::new().tensor("w", &[1; 5], 0, vec![0; 4]);
    let (rank, limit) = (wrong(rank), 4);
    assert_eq!(
        rank,
        (
            24,
            Defect::Rank {
                tensor: tensor.clone(),
                rank: 5,
                limit
            }
        )
    );
    let shape = [1 << 40, 1 << 40];
    let large = Build::new().tensor("w", &shape, 0, vec![]);
    assert_eq!(
        wrong(large),
        (
            24,
            Defect::TooLarge {
                tensor: tensor.clone(),
                shape: shape.into()
            }
        )
    );
    let row = Build::new().tensor("w", &[48], 2, vec![0; 27]);
    let (row, kind, block) = (wrong(row), "Q4_0", 32);
    assert_eq!(
        row,
        (
            24,
            Defect::Row {
                tensor: tensor.clone(),
                row: 48,
                kind,
                block
            }
        )
    );
    let mut moved = one.clone();
    moved.tensors[0].at = Some(4);
    let (at, alignment) = (4, 32);
    assert_eq!(
        wrong(moved.clone()),
        (
            24,
            Defect::Misaligned {
                tensor: tensor.clone(),
                at,
                alignment
            }
        )
    );
    for at in [32, u64::MAX - 31] {
        moved.tensors[0].at = Some(at);
        let (bytes, available) = (8, 8);
        let tensor = tensor.clone();
        let expected = Defect::Outside {
            tensor,
            at,
            bytes,
            available,
        };
        assert_eq!(wrong(moved.clone()), (24, expected));
    }
}

/// A file of a few bytes that says it has billions of something is refused before room is made for
/// them.
#[test]
fn numbers_that_the_file_has_no_bytes_for_are_refused() {
    let folder = Temporary::here();
    for (at, what) in [(8, "tensors"), (16, "metadata values")] {
        for count in [3, 1 << 40, u64::MAX] {
            let mut bytes = Build::new().bytes();
            bytes[at..at + 8].copy_from_slice(&count.to_le_bytes());
            let left = 24 - at as u64 - 8;
            let expected = Defect::Count { what, count, left };
            assert_eq!(defect_of(&folder, &bytes), (at as u64, expected));
        }
    }
    for (kind, count) in [(0u32, 1u64 << 40), (10, 1 << 61), (8, 100), (9, 100)] {
        let array = [&kind.to_le_bytes()[..], &count.to_le_bytes(), &[0; 16]].concat();
        let (offset, found) = defect(&folder, &Build::new().value("k", Value::raw(9, array)));
        assert!(
            offset == 41 && matches!(found, Defect::Count { left: 16, .. }),
            "{offset} {found:?}"
        );
    }
    let long = [&u64::MAX.to_le_bytes()[..], b"abc"].concat();
    let (offset, found) = defect(&folder, &Build::new().value("k", Value::raw(8, long)));
    let expected = Defect::Truncated {
        what: "a text of the metadata",
        needed: u64::MAX,
        left: 3,
    };
    assert_eq!((offset, found), (45, expected));
}

#[test]
fn arrays_of_arrays_without_end_do_not_overflow_the_stack() {
    let folder = Temporary::here();
    let level = [9u32.to_le_bytes().to_vec(), 1u64.to_le_bytes().to_vec()].concat();
    let deep = Build::new().value("k", Value::raw(9, level.repeat(100_000)));
    let (offset, found) = defect(&folder, &deep);
    let (key, limit) = ("k".to_string(), 32);
    assert_eq!(
        (offset, found),
        (37 + 32 * 12, Defect::TooDeep { key, limit })
    );
    let mut value = Value::u8(1);
    for _ in 0..32 {
        value = Value::array(&[value]);
    }
    let file = Build::new().value("k", value).open(&folder).expect("opens");
    let shown = file.metadata().get("k").expect("it is there").to_string();
    assert_eq!(shown, format!("{}1{}", "[".repeat(32), "]".repeat(32)));
}

#[test]
fn a_file_that_is_cut_short_anywhere_is_an_error() {
    let folder = Temporary::here();
    let bytes = small().bytes();
    let path = folder.join("cut.gguf");
    rewrite(&path, &bytes);
    let file = gguf::File::open(&path).expect("whole");
    read_everything(&file).expect("whole");
    for length in 0..bytes.len() {
        rewrite(&path, &bytes[..length]);
        let error = open(&path)
            .err()
            .unwrap_or_else(|| panic!("{length} of {} bytes", bytes.len()));
        match error {
            Error::Gguf { offset, .. } => assert!(offset <= length as u64),
            Error::OtherFormat { .. } => assert_eq!(length, 0),
            other => panic!("{length}: {other}"),
        }
    }
}

#[test]
fn changed_bytes_are_an_error_or_a_file_that_can_be_read() {
    let folder = Temporary::here();
    let whole = small().bytes();
    let path = folder.join("changed.gguf");
    let mut random = Random(5);
    let mut opened = 0;
    for _ in 0..20_000 {
        let mut bytes = whole.clone();
        for _ in 0..=random.below(3) {
            let at = random.below(bytes.len());
            bytes[at] = match random.below(3) {
                0 => bytes[at] ^ 1 << random.below(8),
                1 => 0xff,
                _ => random.below(256) as u8,
            };
        }
        rewrite(&path, &bytes);
        if let Ok(file) = gguf::File::open(&path) {
            opened += 1;
            read_everything(&file).expect("what was checked can be read");
            drop(file.metadata().to_json());
            drop(file.tokenizer());
            drop(gguf::Model::new(file));
        }
    }
    assert!(opened > 1000 && opened < 20_000, "{opened}");
}

/// Names and keys may be anything that is text.
#[test]
fn odd_names_are_names() {
    let folder = Temporary::here();
    let file = Build::new()
        .value("", Value::i32(-1))
        .floats("", &[1], &[1.0])
        .floats("a\n\u{0}ü", &[1], &[2.0])
        .open(&folder)
        .expect("opens");
    assert_eq!(file.metadata().keys().collect::<Vec<_>>(), [""]);
    read_everything(&file).expect("reads");
    let mut bytes = Build::new().floats("ab", &[1], &[1.0]).bytes();
    let at = 24 + text("").len();
    bytes[at] = 0xc3;
    let what = "the name of a tensor";
    assert_eq!(
        defect_of(&folder, &bytes),
        (at as u64, Defect::NotText { what })
    );
}

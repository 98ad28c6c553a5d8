//! Safetensors files: round trips, files from Python and for Python, and files that are wrong.

mod common;

use anymesh_checkpoint::{Error, FileFormat, Memory, Source, TensorInfo, open, safetensors};
use anymesh_core::{DType, Region};
use common::{Random, Temporary, assert_same, data, every_type, pattern, read_everything, rewrite};
use std::collections::BTreeMap;

fn strings(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs
        .iter()
        .map(|(k, v)| (k.to_string(), v.to_string()))
        .collect()
}

#[test]
fn every_type_comes_back_bit_for_bit() {
    let folder = Temporary::new("round-trip");
    let metadata = strings(&[("format", "pt"), ("note", "ä \"quoted\"\n")]);
    safetensors::write_source(
        folder.join("a.safetensors"),
        &every_type(),
        &metadata,
        safetensors::CHUNK,
    )
    .expect("writes");
    let file = safetensors::File::open(folder.join("a.safetensors")).expect("opens");
    assert_eq!(file.metadata(), &metadata);
    assert_same(&file, &every_type());
    assert_eq!(
        std::fs::read_dir(&folder.0).expect("a folder").count(),
        1,
        "nothing temporary is left"
    );
    // The length of the header keeps the data aligned.
    let bytes = std::fs::read(folder.join("a.safetensors")).expect("reads");
    assert_eq!(bytes[0] % 8, 0);
}

#[test]
fn no_tensors_at_all_are_a_file_too() {
    let folder = Temporary::new("none");
    safetensors::write_source(
        folder.join("a.safetensors"),
        &Memory::default(),
        &BTreeMap::new(),
        safetensors::CHUNK,
    )
    .expect("writes");
    assert!(
        safetensors::File::open(folder.join("a.safetensors"))
            .expect("opens")
            .tensors()
            .is_empty()
    );
}

#[test]
fn random_regions_of_random_tensors_are_those_of_memory() {
    let folder = Temporary::new("boxes");
    let mut random = Random(7);
    let mut memory = Memory::default();
    for i in 0..40 {
        let shape: Vec<usize> = (0..random.below(5)).map(|_| random.below(9)).collect();
        let info = TensorInfo {
            dtype: DType::ALL[random.below(11)],
            shape,
        };
        let bytes = (0..info.bytes()).map(|_| random.below(256) as u8).collect();
        memory.insert(format!("t{i}"), info, bytes).expect("fits");
    }
    // Rows farther apart than what is read in one call, and more than one call holds.
    let info = TensorInfo {
        dtype: DType::F32,
        shape: vec![300, 3000],
    };
    let bytes = (0..info.bytes()).map(|_| random.below(256) as u8).collect();
    memory.insert("large", info, bytes).expect("fits");
    safetensors::write_source(
        folder.join("a.safetensors"),
        &memory,
        &BTreeMap::new(),
        safetensors::CHUNK,
    )
    .expect("writes");
    let file = safetensors::File::open(folder.join("a.safetensors")).expect("opens");
    assert_same(&file, &memory);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_same(&file, &memory));
        }
    });
}

#[test]
fn a_file_from_python_is_read() {
    let file = safetensors::File::open(data("safetensors/types.safetensors")).expect("opens");
    assert_eq!(
        file.metadata(),
        &strings(&[("format", "pt"), ("note", "ä \"quoted\"")])
    );
    assert_eq!(file.tensors().len(), 44);
    for (name, info) in file.tensors() {
        assert_eq!(
            file.read_all(name).expect("reads"),
            pattern(info.bytes(), info.dtype),
            "{name}"
        );
    }
    let types: std::collections::BTreeSet<DType> =
        file.tensors().values().map(|info| info.dtype).collect();
    assert_eq!(types.len(), DType::ALL.len());
    assert_eq!(
        file.tensors()["float8_e4m3fn.3"],
        TensorInfo {
            dtype: DType::F8E4M3,
            shape: vec![2, 3, 4]
        }
    );
}

#[test]
fn types_we_do_not_have_are_named_when_asked_for_and_only_then() {
    let file = safetensors::File::open(data("safetensors/foreign.safetensors")).expect("opens");
    assert_eq!(
        file.read_all("float32.0").expect("reads"),
        pattern(60, DType::F32)
    );
    assert_eq!(file.foreign().len(), 16);
    let error = file.read_all("uint16.3").expect_err("no such type here");
    assert!(
        matches!(&error, Error::ForeignType { tensor, dtype, .. } if tensor == "uint16.3" && dtype == "U16"),
        "{error}"
    );
    let folder = Temporary::new("foreign");
    let error = safetensors::write_source(
        folder.join("copy"),
        &file,
        &BTreeMap::new(),
        safetensors::CHUNK,
    )
    .expect_err("would lose tensors");
    assert!(matches!(error, Error::ForeignType { .. }), "{error}");
}

#[test]
fn regions_outside_and_buffers_of_another_size_are_refused() {
    let file = safetensors::File::open(data("safetensors/types.safetensors")).expect("opens");
    let region = |start: &[usize], shape: &[usize]| Region {
        start: start.into(),
        shape: shape.into(),
    };
    for (part, length) in [
        (region(&[0, 0], &[4, 5]), 80),
        (region(&[3, 0], &[1, 1]), 4),
        (region(&[usize::MAX, 0], &[1, 1]), 4),
        (region(&[0], &[3]), 12),
        (region(&[0, 0], &[3, 5]), 59),
    ] {
        let error = file
            .read("float32.0", &part, &mut vec![0; length])
            .expect_err("refused");
        assert!(
            matches!(&error, Error::OutOfBounds { tensor, .. } | Error::ByteCount { tensor, .. } if tensor == "float32.0"),
            "{error}"
        );
    }
}

#[test]
fn too_few_and_too_many_bytes_leave_no_file() {
    let folder = Temporary::new("count");
    let tensors = BTreeMap::from([(
        "a".to_string(),
        TensorInfo {
            dtype: DType::F32,
            shape: vec![2],
        },
    )]);
    for count in [7, 9] {
        let error = safetensors::write(folder.join("f"), &tensors, &BTreeMap::new(), |_, out| {
            out.write(&vec![0; count])
        })
        .expect_err("wrong count");
        let expected = Error::ByteCount {
            tensor: "a".into(),
            expected: 8,
            given: count,
        };
        assert_eq!(error, expected);
    }
    assert_eq!(std::fs::read_dir(&folder.0).expect("a folder").count(), 0);
}

fn with_header(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

#[test]
fn headers_that_lie_are_refused_with_the_reason() {
    let folder = Temporary::new("lies");
    let refused = |bytes: &[u8], reason: &str| {
        rewrite(folder.join("f"), bytes);
        let error = safetensors::File::open(folder.join("f")).expect_err(reason);
        assert!(
            matches!(&error, Error::Format { detail, .. } if detail.contains(reason)),
            "{reason}: {error}"
        );
    };
    refused(&[1, 2, 3], "too few");
    refused(&u64::MAX.to_le_bytes(), "does not fit");
    for (header, data, reason) in [
        ("[]", 0, "does not start with"),
        ("{", 0, "not JSON"),
        (
            r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#,
            4,
            "cannot hold",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#,
            8,
            "leave a hole",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}"#,
            6,
            "overlap",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#,
            5,
            "after its header",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#,
            4,
            "before its start",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[1099511627776,1099511627776,0],"data_offsets":[0,0]}}"#,
            0,
            "too large",
        ),
        (
            r#"{"a":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]}}"#,
            0,
            "too large",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#,
            4,
            "not a size",
        ),
        (r#"{"a":{"dtype":"F32","shape":[1]}}"#, 4, "data_offsets"),
        (r#"{"a":7}"#, 4, "dtype"),
        (r#"{"__metadata__":{"a":1}}"#, 0, "not a string"),
    ] {
        refused(&with_header(header, data), reason);
    }
    assert!(
        matches!(safetensors::File::open(&folder.0), Err(Error::Io { .. })),
        "a folder is not a file"
    );
    assert!(matches!(
        safetensors::File::open(folder.join("nothing")),
        Err(Error::Io { .. })
    ));
}

#[test]
fn truncated_and_flipped_files_never_panic() {
    let folder = Temporary::new("hostile");
    let bytes = std::fs::read(data("safetensors/foreign.safetensors")).expect("reads");
    let path = folder.join("f");
    for length in 0..bytes.len() {
        rewrite(&path, &bytes[..length]);
        assert!(
            safetensors::File::open(&path).is_err(),
            "{length} of {} bytes",
            bytes.len()
        );
    }
    let mut random = Random(3);
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("eight")) as usize;
    for _ in 0..3_000 {
        let mut bytes = bytes.clone();
        for _ in 0..=random.below(3) {
            // Where the data is, a flip cannot be noticed.
            bytes[random.below(header)] = random.below(256) as u8;
        }
        rewrite(&path, &bytes);
        if let Ok(file) = safetensors::File::open(&path) {
            read_everything(&file).expect("what was checked can be read");
        }
    }
}

#[test]
fn our_files_load_in_python() {
    let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/make_safetensors.py");
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    if !std::process::Command::new(&python)
        .args(["-c", "import safetensors, numpy"])
        .output()
        .is_ok_and(|out| out.status.success())
    {
        println!("skipped: {python} with safetensors and numpy is not there");
        return;
    }
    let folder = Temporary::new("python");
    safetensors::write_source(
        folder.join("a.safetensors"),
        &every_type(),
        &strings(&[("format", "pt")]),
        safetensors::CHUNK,
    )
    .expect("writes");
    let out = std::process::Command::new(&python)
        .arg(script)
        .arg("check")
        .arg(folder.join("a.safetensors"))
        .output()
        .expect("runs");
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(
        out.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&out.stderr)
    );
    assert_eq!(text.lines().count(), 45, "{text}");
    assert!(
        text.contains("f8e4m3.3 F8_E4M3 [2, 3, 4]")
            && text.contains("i64.1 I64 []")
            && text.contains("bool.2 BOOL [0, 4]"),
        "{text}"
    );
    assert!(text.contains(r#"metadata {"format": "pt"}"#), "{text}");
}

/// Files of other programs, and what stays of downloads that failed, are called what they are.
#[test]
fn a_file_of_another_format_is_named_and_says_what_to_do() {
    let folder = Temporary::new("other-formats");
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
    // Items of torch.save, one after the other.
    let items = std::fs::read(data("dcp/one/__0_0.distcp")).expect("recorded");
    let cases: [(&str, &[u8], FileFormat); 7] = [
        ("pytorch_model.bin", &items, FileFormat::TorchArchive),
        ("model.h5", b"\x89HDF\r\n\x1a\n\0\0\0\0", FileFormat::Hdf5),
        (
            "old.pt",
            b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",
            FileFormat::Pickle,
        ),
        ("model.onnx", b"\x08\x08\x12\x07pytorch", FileFormat::Onnx),
        (
            "pointer.safetensors",
            pointer.as_bytes(),
            FileFormat::GitLfsPointer,
        ),
        (
            "page.safetensors",
            b"<!doctype html><p>Sign in",
            FileFormat::WebPage,
        ),
        ("none.safetensors", b"", FileFormat::Empty),
    ];
    for (name, bytes, expected) in cases {
        let path = folder.join(name);
        rewrite(&path, bytes);
        let error = safetensors::File::open(&path).expect_err("another format");
        assert!(
            matches!(&error, Error::OtherFormat { found, path: at, .. } if *found == expected && *at == path),
            "{name}: {error}"
        );
        assert!(error.to_string().contains(expected.advice()), "{error}");
        // The folder of such a file says so too.
        let alone = folder.join("alone");
        std::fs::create_dir(&alone).expect("creates");
        rewrite(alone.join(name), bytes);
        let error = open(&alone).err().expect("no checkpoint").to_string();
        assert!(
            error.contains(name) && error.contains(expected.advice()),
            "{error}"
        );
        std::fs::remove_dir_all(&alone).expect("removes");
    }
    rewrite(folder.join("text.safetensors"), b"hello");
    let error = safetensors::File::open(folder.join("text.safetensors")).expect_err("no header");
    assert!(matches!(error, Error::Format { .. }), "{error}");
}

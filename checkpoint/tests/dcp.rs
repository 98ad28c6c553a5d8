//! Folders that torch.distributed.checkpoint wrote, and damaged ones.

mod common;

use anymesh_checkpoint::{Error, Memory, Source, TensorInfo, dcp};
use anymesh_core::DType;
use common::{Random, Temporary, assert_same, data, pattern, read_everything, rewrite};
use std::path::Path;

fn expected(tensors: &[(&str, DType, &[usize])]) -> Memory {
    let mut memory = Memory::default();
    for (name, dtype, shape) in tensors {
        let info = TensorInfo {
            dtype: *dtype,
            shape: shape.to_vec(),
        };
        let bytes = pattern(info.bytes(), *dtype);
        memory.insert(*name, info, bytes).expect("fits");
    }
    memory
}

#[test]
fn a_checkpoint_of_one_process_is_read_whatever_its_types_and_strides() {
    let folder = dcp::Folder::open(data("dcp/one")).expect("opens");
    let want = expected(&[
        ("types.bool", DType::Bool, &[3, 5]),
        ("types.uint8", DType::U8, &[3, 5]),
        ("types.uint32", DType::U32, &[3, 5]),
        ("types.int32", DType::I32, &[3, 5]),
        ("types.int64", DType::I64, &[3, 5]),
        ("types.float8_e4m3fn", DType::F8E4M3, &[3, 5]),
        ("types.float8_e5m2", DType::F8E5M2, &[3, 5]),
        ("types.float16", DType::F16, &[3, 5]),
        ("types.bfloat16", DType::BF16, &[3, 5]),
        ("types.float32", DType::F32, &[3, 5]),
        ("types.float64", DType::F64, &[3, 5]),
        ("scalar", DType::F32, &[]),
        ("empty", DType::F32, &[0, 4]),
        ("transposed", DType::F32, &[4, 6]),
        ("permuted", DType::I32, &[2, 3, 4]),
        ("parameter", DType::BF16, &[2, 2]),
        ("nested.list.0", DType::U8, &[3]),
    ]);
    assert_same(&folder, &want);
    assert_eq!(folder.objects(), ["nested.list.1", "nested.step"]);
    assert_eq!(
        folder.foreign(),
        [("foreign".to_string(), "int16".to_string())]
    );
    assert!(
        matches!(folder.read_all("foreign"), Err(Error::ForeignType { dtype, .. }) if dtype == "int16")
    );
    assert!(matches!(
        folder.read_all("scalars"),
        Err(Error::Missing { .. })
    ));
}

#[test]
fn a_checkpoint_of_four_ranks_is_read_across_its_shards() {
    let folder = dcp::Folder::open(data("dcp/mesh")).expect("opens");
    let want = expected(&[
        ("rows", DType::F32, &[5, 7]),
        ("columns", DType::F32, &[5, 7]),
        ("both", DType::F32, &[5, 7]),
        ("whole", DType::F32, &[5, 7]),
        ("twice", DType::BF16, &[13, 2]),
        ("plain", DType::I64, &[3]),
    ]);
    assert_same(&folder, &want);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_same(&folder, &want));
        }
    });
}

fn copy_of(folder: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("creates");
    for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
        std::fs::copy(entry.path(), to.join(entry.file_name())).expect("copies");
    }
}

fn read_folder(path: &Path) -> Result<(), Error> {
    read_everything(&dcp::Folder::open(path)?)
}

#[test]
fn truncated_files_are_errors_and_flipped_bytes_never_panic() {
    let parent = Temporary::new("dcp-hostile");
    let folder = parent.join("mesh");
    copy_of(&data("dcp/mesh"), &folder);
    let metadata = std::fs::read(folder.join(".metadata")).expect("reads");
    for length in 0..metadata.len() {
        rewrite(folder.join(".metadata"), &metadata[..length]);
        assert!(read_folder(&folder).is_err(), "{length} bytes of metadata");
    }
    let mut random = Random(11);
    for _ in 0..2_000 {
        let mut bytes = metadata.clone();
        for _ in 0..=random.below(3) {
            bytes[random.below(metadata.len())] = random.below(256) as u8;
        }
        rewrite(folder.join(".metadata"), &bytes);
        let _ = read_folder(&folder);
    }
    rewrite(folder.join(".metadata"), &metadata);

    let file = folder.join("__0_0.distcp");
    let bytes = std::fs::read(&file).expect("reads");
    for length in 0..bytes.len() {
        rewrite(&file, &bytes[..length]);
        assert!(
            read_folder(&folder).is_err(),
            "{length} of {} bytes",
            bytes.len()
        );
    }
    for _ in 0..2_000 {
        let mut bytes = bytes.clone();
        for _ in 0..=random.below(3) {
            let at = random.below(bytes.len());
            bytes[at] = random.below(256) as u8;
        }
        rewrite(&file, &bytes);
        let _ = read_folder(&folder);
    }
    std::fs::remove_file(&file).expect("removes");
    assert!(
        matches!(read_folder(&folder), Err(Error::Index { file, .. }) if file == "__0_0.distcp")
    );
}

#[test]
fn a_pickle_that_asks_for_anything_else_is_refused_by_name() {
    let parent = Temporary::new("dcp-pickle");
    for (pickle, global) in [
        (
            &b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R."[..],
            "posix.system",
        ),
        (
            b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
            "builtins.eval",
        ),
        (b"\x80\x02ctorch\nload\n.", "torch.load"),
        (
            b"\x80\x02ctorch.distributed.checkpoint.metadata\nos.system\n.",
            "torch.distributed.checkpoint.metadata.os.system",
        ),
    ] {
        rewrite(parent.join(".metadata"), pickle);
        let error = dcp::Folder::open(&parent.0).expect_err(global);
        assert!(
            matches!(&error, Error::ForbiddenGlobal { global: named, .. } if named == global),
            "{error}"
        );
    }
    for pickle in [
        &b""[..],
        b".",
        b"\x80\x02",
        b"\x80\x07N.",
        b"\x80\x02N.",
        b"\x80\x02(.",
        b"\x80\x02t.",
        b"\x80\x02NNR.",
        b"\x80\x02i.",
    ] {
        rewrite(parent.join(".metadata"), pickle);
        let error = dcp::Folder::open(&parent.0).expect_err("not metadata");
        assert!(matches!(&error, Error::Format { .. }), "{error}");
    }
    // A text that claims more bytes than there are, and a list that holds itself.
    for pickle in [
        &b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f."[..],
        b"\x80\x04]\x94h\x00a.",
    ] {
        rewrite(parent.join(".metadata"), pickle);
        assert!(matches!(
            dcp::Folder::open(&parent.0),
            Err(Error::Format { .. })
        ));
    }
}

#[test]
fn a_flipped_element_is_found_by_its_sum_where_a_chunk_is_read_whole() {
    let parent = Temporary::new("dcp-sums");
    let folder = parent.join("one");
    copy_of(&data("dcp/one"), &folder);
    let file = folder.join("__0_0.distcp");
    let mut bytes = std::fs::read(&file).expect("reads");
    let elements = pattern(120, DType::F64);
    // Those of types.int64 are the same bytes.
    let places: Vec<usize> = (0..bytes.len() - 120)
        .filter(|&at| bytes[at..].starts_with(&elements))
        .collect();
    assert_eq!(places.len(), 2);
    places.iter().for_each(|at| bytes[at + 7] ^= 1);
    std::fs::write(&file, &bytes).expect("writes");
    let read = |name: &str| dcp::Folder::open(&folder).and_then(|folder| folder.read_all(name));
    assert!(
        matches!(read("types.float64"), Err(Error::Damaged { tensor, .. }) if tensor == "types.float64")
    );
    assert_eq!(
        read("types.float32").expect("it is whole"),
        pattern(60, DType::F32)
    );

    // torch can be told not to compute sums, and reads such files: so do we.
    let entries: Vec<usize> = (0..bytes.len() - 4)
        .filter(|&at| bytes[at..].starts_with(b"PK\x01\x02"))
        .collect();
    entries
        .iter()
        .for_each(|at| bytes[at + 16..at + 20].fill(0));
    std::fs::write(&file, &bytes).expect("writes");
    assert_ne!(
        read("types.float64").expect("nothing says that it is damaged"),
        elements
    );
}

#[test]
fn a_flipped_byte_of_an_items_description_is_found_by_its_sum() {
    let parent = Temporary::new("dcp-sums-pickle");
    let folder = parent.join("one");
    copy_of(&data("dcp/one"), &folder);
    let file = folder.join("__0_0.distcp");
    let mut bytes = std::fs::read(&file).expect("reads");
    let places: Vec<usize> = (0..bytes.len() - 6)
        .filter(|&at| bytes[at..].starts_with(b"little"))
        .collect();
    places.iter().for_each(|&at| bytes[at] = b'L');
    std::fs::write(&file, &bytes).expect("writes");
    let error = dcp::Folder::open(&folder)
        .and_then(|folder| folder.read_all("scalar"))
        .expect_err("of the order there is a sum")
        .to_string();
    assert!(error.contains("'archive/byteorder' is damaged"), "{error}");
}

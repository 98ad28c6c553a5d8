//! Files that the Python package wrote, regions of them, metadata, and how files are opened.

use crate::build::{Build, Value};
use crate::common::{Temporary, assert_same, data, rewrite};
use anymesh_checkpoint::{
    Error, FileFormat, Memory, Source, SourceFormat, TensorInfo, gguf, open, safetensors,
};
use anymesh_core::{DType, bf16, f16};
use serde_json::json;

/// What the package makes of the tensors of `types.gguf`, in the types that we keep.
fn expected() -> Memory {
    let bytes = std::fs::read(data("gguf/types.f32")).expect("recorded");
    let floats: Vec<f32> = bytes
        .as_chunks()
        .0
        .iter()
        .map(|x| f32::from_le_bytes(*x))
        .collect();
    let mut names = [
        "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "cube",
    ];
    names.sort();
    let mut memory = Memory::default();
    let mut rest = &floats[..];
    for name in names {
        let shape = if name == "cube" {
            vec![2, 3, 64]
        } else {
            vec![3, 512]
        };
        let (these, more) = rest.split_at(shape.iter().product());
        rest = more;
        let (dtype, bytes): (DType, Vec<u8>) = match name {
            "F16" => {
                let bits = |x: &f32| f16::from_f32(*x).to_le_bytes();
                (DType::F16, these.iter().flat_map(bits).collect())
            }
            "BF16" => {
                let bits = |x: &f32| bf16::from_f32(*x).to_le_bytes();
                (DType::BF16, these.iter().flat_map(bits).collect())
            }
            _ => {
                let bits = |x: &f32| x.to_le_bytes();
                (DType::F32, these.iter().flat_map(bits).collect())
            }
        };
        memory
            .insert(name, TensorInfo { dtype, shape }, bytes)
            .expect("as many as the shape says");
    }
    assert!(rest.is_empty());
    memory
}

#[test]
fn tensors_are_what_the_python_package_makes_of_them_whole_and_in_regions() {
    let file = gguf::File::open(data("gguf/types.gguf")).expect("opens");
    assert_same(&file, &expected());
    for (name, kind) in [("Q4_K", "Q4_K"), ("cube", "Q8_0"), ("BF16", "BF16")] {
        let found = file.tensor_type(name).expect("it is there");
        assert_eq!(found.name(), kind);
    }
}

#[test]
fn several_regions_are_read_as_one_by_one() {
    let file = gguf::File::open(data("gguf/types.gguf")).expect("opens");
    let info = file.info("Q6_K").expect("it is there");
    let mut regions: Vec<_> = info
        .slabs(1000)
        .map(|slab| {
            let bytes = vec![0; slab.numel() * 4];
            (slab, bytes)
        })
        .collect();
    assert!(regions.len() > 6);
    file.read_many("Q6_K", &mut regions).expect("reads");
    let joined: Vec<u8> = regions.into_iter().flat_map(|(_, bytes)| bytes).collect();
    assert_eq!(joined, file.read_all("Q6_K").expect("reads"));
}

#[test]
fn metadata_of_every_type_becomes_json() {
    let file = gguf::File::open(data("gguf/types.gguf")).expect("opens");
    assert_eq!((file.version(), file.architecture()), (3, Some("types")));
    let all = file.metadata().to_json();
    let expected = json!({
        "general.architecture": "types",
        "value.u8": 200, "value.i8": -100, "value.u16": 60000, "value.i16": -30000,
        "value.u32": 4_000_000_000u64, "value.i32": -2_000_000_000i64,
        "value.u64": u64::MAX, "value.i64": i64::MIN,
        "value.f32": 1e-5, "value.f64": 0.1, "value.bool": true, "value.text": "Ä \"quoted\"\n",
        "value.numbers": [1, 2, 3], "value.texts": ["a", "", "ü"], "value.bools": [true, false],
        "value.nested": [[1, 2], [3]],
    });
    assert_eq!(serde_json::Value::Object(all), expected);
    let metadata = file.metadata();
    assert_eq!(
        metadata.shortened("value.texts", 2),
        Some(json!({"length": 3, "first": ["a", ""]}))
    );
    assert_eq!(
        metadata.shortened("value.nested", 1),
        Some(json!({"length": 2, "first": [{"length": 2, "first": [1]}]}))
    );
    assert_eq!(
        metadata.shortened("value.texts", 3),
        metadata.get("value.texts")
    );
    assert_eq!(metadata.get("value.none"), None);
    assert_eq!(metadata.count("value.u8"), Some(200));
    assert_eq!(metadata.count("value.i8"), None);
    assert_eq!(metadata.text("value.u8"), None);
    let texts = metadata.texts("value.texts").expect("texts");
    assert_eq!(texts.collect::<Vec<_>>(), ["a", "", "ü"]);
    assert!(metadata.texts("value.numbers").is_none());
}

#[test]
fn what_json_has_no_numbers_for_becomes_text() {
    let folder = Temporary::here();
    let file = Build::new()
        .value("a", Value::f32(f32::NAN))
        .value("b", Value::f32(f32::NEG_INFINITY))
        .value("c", Value::f64(f64::INFINITY))
        .value("d", Value::f32(3.0e38))
        .value("e", Value::array(&[]))
        .open(&folder)
        .expect("opens");
    let all = serde_json::Value::Object(file.metadata().to_json());
    let expected = json!({"a": "NaN", "b": "-inf", "c": "inf", "d": 3.0e38, "e": []});
    assert_eq!(all, expected);
}

#[test]
fn version_2_and_other_alignments_are_read() {
    let folder = Temporary::here();
    for (version, alignment) in [(2, 32), (3, 8), (3, 64), (2, 4096), (3, 1)] {
        let mut build = Build::new()
            .value("general.alignment", Value::u32(alignment))
            .floats("a", &[3], &[1.0, 2.0, 3.0])
            .floats("b", &[1, 2], &[4.0, 5.0]);
        (build.version, build.alignment) = (version, alignment as usize);
        let file = build.open(&folder).expect("opens");
        assert_eq!(file.version(), version);
        let bytes = [4.0f32, 5.0].map(f32::to_le_bytes).concat();
        assert_eq!(file.read_all("b").expect("reads"), bytes);
    }
}

#[test]
fn a_file_without_anything_is_a_file_too() {
    let folder = Temporary::here();
    let file = Build::new().open(&folder).expect("opens");
    assert!(file.tensors().is_empty() && file.metadata().keys().next().is_none());
}

/// The rest of the file can be read.
#[test]
fn a_tensor_of_another_type_is_named_with_its_type() {
    let folder = Temporary::here();
    let file = Build::new()
        .tensor("old", &[256], 10, vec![0; 84])
        .tensor("new", &[256], 1234, vec![0; 4])
        .floats("w", &[1], &[1.5])
        .open(&folder)
        .expect("opens");
    let foreign = [("new", "number 1234"), ("old", "Q2_K")];
    assert_eq!(
        file.foreign(),
        foreign.map(|(a, b)| (a.to_string(), b.to_string()))
    );
    let error = file.read_all("old").expect_err("not read here");
    assert!(
        matches!(&error, Error::ForeignType { tensor, dtype, .. } if tensor == "old" && dtype == "Q2_K"),
        "{error}"
    );
    assert_eq!(file.read_all("w").expect("reads"), 1.5f32.to_le_bytes());
    // Whoever copies all of it does not leave it out silently.
    let to = folder.join("all.safetensors");
    let copied = safetensors::write_source(&to, &file, &Default::default(), 1 << 20);
    assert!(matches!(copied, Err(Error::ForeignType { .. })));
    assert!(!to.exists());
}

#[test]
fn files_are_opened_by_how_they_begin_or_are_called() {
    let folder = Temporary::here();
    let build = Build::new().floats("w", &[1], &[1.5]);
    for name in ["model.gguf", "model", "model.safetensors"] {
        rewrite(folder.join(name), &build.bytes());
        let path = folder.join(name);
        assert_eq!(SourceFormat::of(&path), Ok(SourceFormat::Gguf), "{name}");
        let source = open(&path).expect("opens");
        assert_eq!(source.tensors().keys().collect::<Vec<_>>(), ["w"]);
    }
    // Its folder leads to it.
    let folder = Temporary::new("gguf-folder");
    rewrite(folder.join("model.gguf"), &build.bytes());
    let error = open(&folder.0).err().expect("a folder").to_string();
    assert!(
        error.contains("give its file") && error.contains("model.gguf"),
        "{error}"
    );
    // What is called like one and is another is named.
    rewrite(folder.join("page.gguf"), b"<!doctype html><p>Sign in");
    rewrite(folder.join("none.gguf"), b"");
    for (name, expected) in [
        ("page.gguf", FileFormat::WebPage),
        ("none.gguf", FileFormat::Empty),
    ] {
        let error = open(folder.join(name)).err().expect("another format");
        assert!(
            matches!(&error, Error::OtherFormat { found, wanted: "GGUF file", .. } if *found == expected),
            "{error}"
        );
    }
    // A reader of another format knows it too.
    let error = safetensors::File::open(folder.join("model.gguf")).expect_err("GGUF");
    assert!(
        matches!(
            &error,
            Error::OtherFormat {
                found: FileFormat::Gguf,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn regions_outside_and_buffers_of_other_sizes_are_refused() {
    let file = gguf::File::open(data("gguf/types.gguf")).expect("opens");
    let mut region = file.info("Q4_K").expect("it is there").whole();
    let error = file.read("Q4_K", &region, &mut [0; 8]).expect_err("small");
    assert!(matches!(error, Error::ByteCount { .. }), "{error}");
    region.start[1] = 1;
    let mut out = vec![0; region.numel() * 4];
    let error = file.read("Q4_K", &region, &mut out).expect_err("outside");
    assert!(matches!(error, Error::OutOfBounds { .. }), "{error}");
    assert!(matches!(file.read_all("Q4_k"), Err(Error::Missing { .. })));
}

//! Hugging Face folders, in and out.

mod common;

use anymesh_checkpoint::Without;
use anymesh_checkpoint::hugging_face::{Export, Folder, INDEX, export};
use anymesh_checkpoint::{Error, Memory, Source, TensorInfo, safetensors};
use anymesh_core::DType;
use common::{Temporary, assert_same, data, every_type, pattern};
use std::collections::BTreeMap;
use std::path::Path;

/// Tensors of 100, 200, ... bytes.
fn model(count: usize) -> Memory {
    let mut memory = Memory::default();
    for i in 1..=count {
        memory
            .insert(
                format!("layer.{i}"),
                TensorInfo {
                    dtype: DType::U8,
                    shape: vec![i, 100],
                },
                pattern(i * 100, DType::U8),
            )
            .expect("fits");
    }
    memory
}

fn index(folder: &Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(folder.join(INDEX)).expect("there is an index"))
        .expect("JSON")
}

fn copy_of(folder: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("creates");
    for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
        std::fs::copy(entry.path(), to.join(entry.file_name())).expect("copies");
    }
}

#[test]
fn a_folder_of_the_hugging_face_library_is_read() {
    let folder = Folder::open(data("hugging_face")).expect("opens");
    assert_eq!(folder.tensors().len(), 7);
    for (name, info) in folder.tensors() {
        assert_eq!(
            folder.read_all(name).expect("reads"),
            pattern(info.bytes(), info.dtype),
            "{name}"
        );
    }
    assert!(
        folder
            .text("config.json")
            .expect("reads")
            .is_some_and(|text| text.contains("Tiny"))
    );
    assert_eq!(folder.text("tokenizer.json").expect("is not there"), None);
    assert!(matches!(
        folder.text("../secret"),
        Err(Error::BadName { .. })
    ));
}

#[test]
fn every_size_limit_gives_a_folder_with_the_same_tensors() {
    let parent = Temporary::new("limits");
    for (limit, files) in [(1, 6), (300, 5), (600, 4), (1000, 3), (2100, 1)] {
        let folder = parent.join(&format!("limit-{limit}"));
        let names = export(
            &model(6),
            &folder,
            &Export {
                max_file_bytes: limit,
                ..Export::default()
            },
        )
        .expect("writes");
        assert_eq!(names.len(), files, "{limit}");
        assert_same(&Folder::open(&folder).expect("opens"), &model(6));
        if files > 1 {
            assert_eq!(index(&folder)["metadata"]["total_size"], 2100);
        } else {
            assert!(!folder.join(INDEX).exists());
        }
        for name in names {
            let file = safetensors::File::open(folder.join(name)).expect("opens");
            assert_eq!(file.metadata()["format"], "pt");
            let bytes: usize = file.tensors().values().map(TensorInfo::bytes).sum();
            assert!(
                bytes as u64 <= limit || file.tensors().len() == 1,
                "{limit}"
            );
        }
    }
}

#[test]
fn every_type_and_an_empty_model_are_exported() {
    let parent = Temporary::new("types");
    export(
        &every_type(),
        parent.join("a"),
        &Export {
            max_file_bytes: 100,
            ..Export::default()
        },
    )
    .expect("writes");
    assert_same(
        &Folder::open(parent.join("a")).expect("opens"),
        &every_type(),
    );
    export(&Memory::default(), parent.join("b"), &Export::default()).expect("writes");
    assert!(
        Folder::open(parent.join("b"))
            .expect("opens")
            .tensors()
            .is_empty()
    );
}

#[test]
fn configs_are_copied_and_can_be_replaced() {
    let parent = Temporary::new("configs");
    let options = Export {
        configs_from: Some(data("hugging_face")),
        files: BTreeMap::from([
            ("generation_config.json".into(), b"{}".to_vec()),
            ("README.md".into(), b"hello".to_vec()),
        ]),
        ..Export::default()
    };
    export(&model(1), parent.join("a"), &options).expect("writes");
    let folder = Folder::open(parent.join("a")).expect("opens");
    assert!(
        folder
            .text("config.json")
            .expect("reads")
            .is_some_and(|text| text.contains("Tiny"))
    );
    assert_eq!(
        folder
            .text("generation_config.json")
            .expect("reads")
            .as_deref(),
        Some("{}")
    );
    assert_eq!(
        folder.text("README.md").expect("reads").as_deref(),
        Some("hello")
    );
    for name in ["../a", INDEX, "b/c", "", "model.safetensors"] {
        let options = Export {
            files: BTreeMap::from([(name.into(), vec![])]),
            ..Export::default()
        };
        assert!(
            matches!(
                export(&model(1), parent.join("b"), &options),
                Err(Error::BadName { .. })
            ),
            "{name}"
        );
    }
}

#[test]
fn removed_keys_do_not_count() {
    let parent = Temporary::new("removed");
    let model = model(6);
    let less = Without::new(&model, &["layer.2", "layer.6"]).expect("they are there");
    export(
        &less,
        parent.join("a"),
        &Export {
            max_file_bytes: 500,
            ..Export::default()
        },
    )
    .expect("writes");
    assert_eq!(index(&parent.join("a"))["metadata"]["total_size"], 1300);
    assert!(
        index(&parent.join("a"))["weight_map"]
            .get("layer.2")
            .is_none()
    );
    let folder = Folder::open(parent.join("a")).expect("opens");
    assert_same(&folder, &less);
    assert!(matches!(
        less.read_all("layer.2"),
        Err(Error::Missing { .. })
    ));
    assert!(
        matches!(Without::new(&model, &["layer.9"]), Err(Error::Missing { name, .. }) if name == "layer.9")
    );
    // What cannot be read can still be removed, and then the rest can be written.
    let foreign = safetensors::File::open(data("safetensors/foreign.safetensors")).expect("opens");
    assert!(matches!(
        export(&foreign, parent.join("b"), &Export::default()),
        Err(Error::ForeignType { .. })
    ));
    let names: Vec<String> = foreign
        .foreign()
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    export(
        &Without::new(&foreign, &names).expect("they are there"),
        parent.join("b"),
        &Export::default(),
    )
    .expect("writes");
    assert_eq!(
        Folder::open(parent.join("b"))
            .expect("opens")
            .tensors()
            .len(),
        4
    );
}

/// A source that fails in the middle.
struct Failing(Memory);

impl Source for Failing {
    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        self.0.tensors()
    }

    fn read(&self, name: &str, region: &anymesh_core::Region, out: &mut [u8]) -> Result<(), Error> {
        if name == "layer.4" {
            Err(Error::Argument("the source failed".into()))
        } else {
            self.0.read(name, region, out)
        }
    }
}

#[test]
fn a_failed_export_leaves_nothing_and_a_full_folder_is_not_touched() {
    let parent = Temporary::new("failed");
    let error = export(
        &Failing(model(6)),
        parent.join("a"),
        &Export {
            max_file_bytes: 500,
            ..Export::default()
        },
    )
    .expect_err("fails");
    assert_eq!(error, Error::Argument("the source failed".into()));
    assert_eq!(std::fs::read_dir(&parent.0).expect("a folder").count(), 0);
    std::fs::create_dir(parent.join("empty")).expect("creates");
    export(&model(2), parent.join("empty"), &Export::default())
        .expect("an empty folder is as good as none");
    let error = export(&model(1), parent.join("empty"), &Export::default())
        .expect_err("not empty any more");
    assert!(
        matches!(&error, Error::Exists { path } if *path == parent.join("empty")),
        "{error}"
    );
    assert_same(
        &Folder::open(parent.join("empty")).expect("opens"),
        &model(2),
    );
}

#[test]
fn an_index_that_does_not_agree_names_the_key_and_the_file() {
    let parent = Temporary::new("index");
    let edit = |name: &str, change: &dyn Fn(&mut serde_json::Map<String, serde_json::Value>)| {
        let folder = parent.join(name);
        copy_of(&data("hugging_face"), &folder);
        let mut json = index(&folder);
        change(json["weight_map"].as_object_mut().expect("an object"));
        std::fs::write(folder.join(INDEX), json.to_string()).expect("writes");
        match Folder::open(&folder).expect_err(name) {
            Error::Index { tensor, file, .. } => (tensor, file),
            other => panic!("{other}"),
        }
    };
    let (tensor, file) = edit("missing", &|map| {
        drop(map.insert(
            "new.weight".into(),
            "model-00001-of-00004.safetensors".into(),
        ))
    });
    assert_eq!(
        (tensor.as_str(), file.as_str()),
        ("new.weight", "model-00001-of-00004.safetensors")
    );
    let (tensor, file) = edit("extra", &|map| drop(map.remove("model.layers.5.weight")));
    assert!(
        tensor == "model.layers.5.weight" && file.starts_with("model-0000"),
        "{tensor} {file}"
    );
    let (tensor, file) = edit("no-file", &|map| {
        drop(map.insert("a.weight".into(), "model-00009-of-00004.safetensors".into()))
    });
    assert_eq!(
        (tensor.as_str(), file.as_str()),
        ("a.weight", "model-00009-of-00004.safetensors")
    );
    let (tensor, file) = edit("outside", &|map| {
        drop(map.insert("a.weight".into(), "../other/model.safetensors".into()))
    });
    assert_eq!(
        (tensor.as_str(), file.as_str()),
        ("a.weight", "../other/model.safetensors")
    );
    for (text, reason) in [
        ("", "not JSON"),
        ("{}", "weight_map"),
        (r#"{"weight_map": {"a": 1}}"#, "not a string"),
    ] {
        std::fs::write(parent.join("extra").join(INDEX), text).expect("writes");
        let error = Folder::open(parent.join("extra")).expect_err(reason);
        assert!(
            matches!(&error, Error::Format { detail, .. } if detail.contains(reason)),
            "{error}"
        );
    }
    assert!(matches!(
        Folder::open(parent.join("nothing")),
        Err(Error::Format { .. })
    ));
}

#[test]
fn every_kind_of_folder_is_known_by_its_files() {
    for (path, count) in [
        ("hugging_face", 7),
        ("dcp/one", 17),
        ("dcp/mesh", 6),
        ("safetensors/types.safetensors", 44),
    ] {
        assert_eq!(
            anymesh_checkpoint::open(data(path))
                .expect(path)
                .tensors()
                .len(),
            count,
            "{path}"
        );
    }
    // What a folder cannot read is still known when it is held as any source.
    let one = anymesh_checkpoint::open(data("dcp/one")).expect("opens");
    let held: &dyn Source = &one;
    assert_eq!(held.foreign().len(), 1);
    assert!(matches!(
        held.read_all("foreign"),
        Err(Error::ForeignType { .. })
    ));
    assert!(matches!(
        anymesh_checkpoint::open(data("safetensors")),
        Err(Error::Format { .. })
    ));
}

//! Folders with files for each rank.

mod common;

use anymesh_checkpoint::{
    Error, Layouts, Source, SourceFormat, TensorInfo,
    hugging_face::Export,
    map::{Mapped, Mapping, Options},
    open, safetensors, split,
};
use anymesh_core::{DType, Mesh, meta};
use common::{Temporary, assert_same, every_type, pattern};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

/// How all tensors lie that have a first dimension: cut over it.
fn by_rows(mesh: &Mesh) -> Layouts {
    let axes: String = mesh
        .axes()
        .iter()
        .map(|(name, _)| format!("@{name}"))
        .collect();
    Layouts::new(mesh, [format!("*=[{axes}, ...]")]).expect("a layout")
}

fn written(parent: &Temporary, axes: &str) -> PathBuf {
    let (source, mesh, folder) = (
        every_type(),
        Mesh::new(axes, &meta()).expect("a mesh"),
        parent.join("split"),
    );
    split::write(
        &source,
        &folder,
        &mesh,
        &by_rows(&mesh).place(&source).expect("places"),
        &Export::default(),
    )
    .expect("writes");
    folder
}

#[test]
fn every_type_is_split_and_put_together_on_any_mesh() {
    for axes in ["x=1", "x=3", "a=2,b=2", "x=7"] {
        let parent = Temporary::new(&format!("split-{}", axes.replace(',', "-")));
        let folder = written(&parent, axes);
        assert_eq!(SourceFormat::of(&folder), Ok(SourceFormat::Split));
        assert_same(open(&folder).expect("opens").as_ref(), &every_type());
    }
}

#[test]
fn files_that_do_not_say_how_they_lie_are_put_together_by_layouts() {
    let parent = Temporary::new("split-as");
    let folder = written(&parent, "x=3");
    let mesh = Mesh::new("x=3", &meta()).expect("a mesh");
    let opened = split::Folder::open_as(&folder, &by_rows(&mesh)).expect("opens");
    assert_same(&opened, &every_type());
    let other = Layouts::new(&mesh, ["rows.*=[@x, ...]"]).expect("a layout");
    let error = split::Folder::open_as(&folder, &other).expect_err("no such name");
    assert!(matches!(error, Error::Layout { .. }), "{error}");
}

#[test]
fn files_that_do_not_fit_together_are_refused_with_what_is_wrong() {
    let parent = Temporary::new("split-wrong");
    let folder = written(&parent, "x=3");
    let name = |rank: usize| folder.join(split::file_name(rank, 0));
    let error = |part: &str| {
        let error = split::Folder::open(&folder)
            .expect_err("is wrong")
            .to_string();
        assert!(error.contains(part), "'{part}' in '{error}'");
    };
    std::fs::rename(name(2), parent.join("aside")).expect("renames");
    error("there are files of 2 ranks");
    // A rank's file in the place of another's: here the shapes tell.
    std::fs::copy(name(0), name(2)).expect("copies");
    error("rank 2 holds");
    std::fs::copy(parent.join("aside"), name(2)).expect("copies");
    std::fs::copy(name(0), name(3)).expect("copies");
    error("files of 4 ranks");
}

#[test]
fn a_header_that_lies_is_refused_before_memory_is_taken() {
    let parent = Temporary::new("split-lies");
    let folder = parent.join("split");
    let write = |mesh: &str, types: &str| {
        std::fs::create_dir_all(&folder).expect("creates");
        let metadata = BTreeMap::from([
            ("anymesh.mesh".into(), mesh.into()),
            ("anymesh.types".into(), types.into()),
        ]);
        let info = BTreeMap::from([(
            "w".to_string(),
            TensorInfo {
                dtype: DType::U8,
                shape: vec![0, 4],
            },
        )]);
        safetensors::write(
            Path::new(&folder).join(split::file_name(0, 0)),
            &info,
            &metadata,
            |_, _| Ok(()),
        )
        .expect("writes");
        split::Folder::open(&folder).expect_err("lies")
    };
    for (mesh, types) in [
        ("x=1000000000000", "{}"),
        ("x=99999999999,y=99999999999,z=99999999999", "{}"),
        ("x", "{}"),
        ("x=1", "no JSON"),
        ("x=1", r#"{"w": "u8[0, 18446744073709551615]"}"#),
        ("x=1", r#"{"w": "u8[0, 5]"}"#),
        ("x=1", r#"{"w": "u9[0, 4]"}"#),
        ("x=1", r#"{"v": "u8[0, 4]"}"#),
    ] {
        let error = write(mesh, types);
        assert!(
            !matches!(error, Error::Io { .. }),
            "{mesh} {types}: {error}"
        );
    }
}

#[test]
fn a_mapping_within_little_memory_gives_the_same_bytes() {
    let mut source = anymesh_checkpoint::Memory::default();
    source
        .insert(
            "w",
            TensorInfo {
                dtype: DType::F32,
                shape: vec![6, 5, 4],
            },
            pattern(480, DType::F32),
        )
        .expect("fits");
    for statement in [
        "w -> v, permute=\"[2, 0, 1]\"",
        "w -> v, dtype=\"bf16\"",
        "w -> v, reshape=\"[10, 12]\", dtype=\"f64\"",
        "w -> v",
    ] {
        let mapped = Mapped::new(
            &source,
            &Mapping::parse(statement).expect("parses"),
            &Options::default(),
        )
        .expect("fits");
        let expected = mapped.read_all("v").expect("reads");
        for memory in [0, 1, 50, 100, 333, 10_000] {
            assert_eq!(
                mapped.clone().within(memory).read_all("v").expect("reads"),
                expected,
                "{statement} within {memory}"
            );
        }
    }
}

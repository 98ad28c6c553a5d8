//! Small pictures, whole, for reviewers to read. `ANYMESH_UPDATE_DOCS=1` writes them anew.

use crate::{cpu, mesh, svg, ty};
use anymesh_core::{DType, Mesh, Tensor};
use anymesh_show::{Parts, STYLE};

#[track_caller]
fn same(name: &str, picture: &str) {
    let path = format!("{}/tests/pictures/{name}.svg", env!("CARGO_MANIFEST_DIR"));
    // The style sheet is the same in all of them, and has a test of its own.
    let picture = picture.replace(STYLE, "…");
    if std::env::var_os("ANYMESH_UPDATE_DOCS").is_some() {
        std::fs::write(&path, &picture).unwrap();
    }
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        stored == picture,
        "{name}.svg is another one now:\n{picture}"
    );
}

#[test]
fn a_mesh() {
    same("mesh", &svg(&mesh("dp=2, tp=2")));
}

#[test]
fn who_holds_what() {
    let mesh = mesh("dp=2, tp=2");
    same(
        "parts",
        &svg(&Parts::new(&ty("f32[5@dp, 4]{sum:tp}", &mesh), &mesh)),
    );
}

#[test]
fn a_tensor() {
    let mesh = Mesh::new("tp=2", &cpu()).unwrap();
    let x = Tensor::arange(0, 6, 1, DType::F32, &cpu())
        .unwrap()
        .reshape([2, 3])
        .unwrap();
    same("tensor", &svg(&x.to_mesh(&mesh, "[_, @tp]").unwrap()));
}

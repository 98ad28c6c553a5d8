//! The notebooks as programs: the cells of each, one after the other, without the kernel that runs
//! them in Jupyter. What a cell prints and shows must be what the notebook has kept.
//!
//! The programs beside this file are written from the notebooks: `ANYMESH_UPDATE=1 cargo test --test
//! notebooks` writes them again. `scripts/notebook --update` executes the notebooks themselves and
//! keeps what they show.

mod shown;
mod written;

#[rustfmt::skip]
mod n1_tensors;
#[rustfmt::skip]
mod n2_meshes;
#[rustfmt::skip]
mod n3_checkpoints;
#[rustfmt::skip]
mod n4_training;
#[rustfmt::skip]
mod n5_real_model;

use std::path::Path;

#[test]
fn programs_are_those_of_the_notebooks() {
    for (notebook, program) in written::NOTEBOOKS {
        let text = written::program(notebook);
        if std::env::var_os("ANYMESH_UPDATE").is_some() {
            std::fs::write(program, &text).expect("written");
        }
        let kept = std::fs::read_to_string(program).unwrap_or_default();
        assert!(
            kept == text,
            "{program} is not {notebook}: ANYMESH_UPDATE=1 cargo test --test notebooks writes it again"
        );
    }
}

#[test]
fn tensors() {
    shown::hold(0, n1_tensors::run);
}

#[test]
fn meshes() {
    shown::hold(1, n2_meshes::run);
}

#[test]
fn checkpoints() {
    shown::hold(2, n3_checkpoints::run);
}

#[test]
fn training() {
    shown::hold(3, n4_training::run);
}

#[test]
fn real_model() {
    let models = std::env::var("ANYMESH_MODELS");
    let models = models.unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/target/models").into());
    match Path::new(&models).join("minilm").exists() {
        true => shown::hold(4, n5_real_model::run),
        false => eprintln!("not run, because there is no {models}/minilm: scripts/models"),
    }
}

//! Real models, on one device and on meshes: MiniLM's vectors, SmolLM2's words.
//!
//! They are read from `target/models`, where `scripts/models` puts them, or from `$ANYMESH_MODELS`.
//! Where a model is not there, its tests count as ignored, not as passed. `ANYMESH_TEST_DEVICE`
//! names the device, the CPU unless told.

mod minilm;
mod smollm2;

use anymesh::{Device, Mesh};
use libtest_mimic::{Arguments, Trial};
use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

/// A test of the model at a path on a device, and its name.
type Suite = &'static [(&'static str, fn(&Path, &Device))];

fn models() -> PathBuf {
    match std::env::var_os("ANYMESH_MODELS") {
        Some(path) => path.into(),
        None => PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target/models"),
    }
}

/// Ranks on a device; one without any where no axes are named.
fn mesh(axes: &str, device: &Device) -> Mesh {
    match axes {
        "" => Mesh::single(device),
        axes => Mesh::new(axes, device).expect("a mesh"),
    }
}

/// The tests of a suite; ignored where its model is not there.
fn trials<'a>(
    suite: Suite,
    model: PathBuf,
    device: &'a Device,
) -> impl Iterator<Item = Trial> + 'a {
    suite.iter().map(move |&(name, test)| {
        let (is_there, path, device) = (model.exists(), model.clone(), device.clone());
        Trial::test(name, move || match path.exists() {
            true => {
                test(&path, &device);
                Ok(())
            }
            false => Err(format!("there is no {}: run scripts/models", path.display()).into()),
        })
        .with_ignored_flag(!is_there)
    })
}

fn main() -> ExitCode {
    let name = std::env::var("ANYMESH_TEST_DEVICE").unwrap_or("cpu".into());
    let device = match anymesh::device(&name) {
        Ok(device) => device,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let models = models();
    let mut all: Vec<Trial> = trials(minilm::SUITE, models.join("minilm"), &device).collect();
    let smollm2 = models.join("smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    all.extend(trials(smollm2::SUITE, smollm2, &device));
    let mut arguments = Arguments::from_args();
    // Each takes all cores and a copy of the weights.
    arguments.test_threads.get_or_insert(1);
    libtest_mimic::run(&arguments, all).exit_code()
}

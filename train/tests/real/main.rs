//! Real models, on one device and on meshes: MiniLM's vectors, SmolLM2's words.
//!
//! They are read from `target/models`, where `scripts/models` puts them, or from
//! `$ANYMESH_MODELS`. Where a model is not there, its tests count as ignored, not as passed.

mod minilm;
mod smollm2;

use libtest_mimic::{Arguments, Trial};
use std::{path::PathBuf, process::ExitCode};

/// A test of the model at a path, and its name.
type Suite = &'static [(&'static str, fn(&std::path::Path))];

fn models() -> PathBuf {
    match std::env::var_os("ANYMESH_MODELS") {
        Some(path) => path.into(),
        None => PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/models"),
    }
}

/// The tests of a suite; ignored where its model is not there.
fn trials(suite: Suite, model: PathBuf) -> impl Iterator<Item = Trial> {
    suite.iter().map(move |&(name, test)| {
        let (is_there, path) = (model.exists(), model.clone());
        Trial::test(name, move || match path.exists() {
            true => {
                test(&path);
                Ok(())
            }
            false => Err(format!("there is no {}: run scripts/models", path.display()).into()),
        })
        .with_ignored_flag(!is_there)
    })
}

fn main() -> ExitCode {
    let models = models();
    let mut all: Vec<Trial> = trials(minilm::SUITE, models.join("minilm")).collect();
    let smollm2 = models.join("smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    all.extend(trials(smollm2::SUITE, smollm2));
    let mut arguments = Arguments::from_args();
    // Each takes all cores and a copy of the weights.
    arguments.test_threads.get_or_insert(1);
    libtest_mimic::run(&arguments, all).exit_code()
}

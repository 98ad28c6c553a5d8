//! The sharding sweep with ranks in different processes.

use crate::run::all_succeed_with;
use anymesh_conformance::sweep::Options;
use libtest_mimic::{Failed, Trial};

/// A few cases of every op. Every run looks at others.
pub(crate) fn sample() -> Vec<(&'static str, String)> {
    vec![
        ("ANYMESH_SWEEP_SEED", Options::default().seed.to_string()),
        ("ANYMESH_SWEEP_LIMIT", "1".into()),
        ("ANYMESH_SWEEP_EVERY", "5".into()),
    ]
}

pub(crate) fn trials() -> Vec<Trial> {
    vec![Trial::test("sweep_over_4_processes", over_tcp)]
}

fn over_tcp() -> Result<(), Failed> {
    let said = all_succeed_with("sweep", 4, &sample())?;
    for (process, output) in said.iter().enumerate() {
        let counts = output.lines().last().unwrap_or_default();
        println!("process {process}: {counts}");
    }
    Ok(())
}

//! Those who are left go on: from the last checkpoint, on a smaller mesh.

use crate::{
    fault::FAULT,
    faults::{Root, Said, is_whole},
    run::start,
    train::simulated,
};
use anymesh_checkpoint::{Checkpoint, list};
use libtest_mimic::{Failed, Trial};
use std::time::{Duration, Instant};

pub(crate) fn trials() -> Vec<Trial> {
    let trial = |name: &str, faults: &'static str, left: usize| {
        Trial::test(format!("those_who_are_left_go_on_{name}"), move || {
            go_on(faults, left)
        })
    };
    vec![
        trial("without_the_first", "kill 0 9", 3),
        trial("without_one", "kill 2 14", 3),
        trial("without_the_last_in_the_first_call", "kill 3 0", 3),
        trial("without_one_that_was_stopped", "stop 1 9", 3),
        // The other one dies in the first call after the first rebuild.
        trial("without_two_one_after_the_other", "kill 1 9;kill 3 10", 2),
        trial("without_the_first_and_the_next", "kill 0 12;kill 1 13", 2),
    ]
}

/// Faults come one after the other; then `left` processes are there.
fn go_on(faults: &str, left: usize) -> Result<(), Failed> {
    let root = Root::new("rebuild")?;
    let now = Instant::now();
    let mut processes = start(
        "rebuild",
        4,
        &[
            (FAULT, faults.into()),
            ("ANYMESH_TEST_ROOT", root.0.display().to_string()),
            ("ANYMESH_TIMEOUT", "3".into()),
        ],
    )?;
    let dead: Vec<usize> = faults
        .split(';')
        .filter_map(|f| f.split(' ').nth(1)?.parse().ok())
        .collect();
    for (p, process) in processes.iter_mut().enumerate() {
        if dead.contains(&p) {
            continue;
        }
        let ended = process.end(now + Duration::from_secs(60))?;
        let said = Said::of(&ended.output);
        let from = said.all("from");
        let bad = |what: &str| -> Failed { format!("process {p}: {what}: {ended:#?}").into() };
        let Some((_, step)) = from
            .last()
            .filter(|_| ended.code == Some(0) && from.len() > 1)
        else {
            return Err(bad("did not go on"));
        };
        let step: u64 = step.parse()?;
        let checkpoint = list(&root.0)?.into_iter().find(|f| f.step == Ok(step));
        let checkpoint = Checkpoint::open(checkpoint.ok_or_else(|| bad("no checkpoint"))?.path)?;
        let expected = simulated(left, &checkpoint)?;
        if expected.is_empty() || !said.losses().ends_with(&expected) {
            return Err(bad(&format!("other losses than {expected:?}")));
        }
        let place = said.all("process").last().map(|(_, text)| text.to_string());
        if !place.is_some_and(|text| text.ends_with(&format!("of {left}"))) {
            return Err(bad("not in the smaller cluster"));
        }
    }
    is_whole(&root.0, crate::train::STEPS)
}

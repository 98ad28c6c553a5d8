//! Programs that differ: one process goes another way, and all are told where.

use crate::{
    faults::Said,
    run::start,
    train::{kind, say},
};
use anymesh_checkpoint::Error;
use anymesh_core::{DType, Mesh, Result, Tensor};
use libtest_mimic::{Failed, Trial};
use std::time::{Duration, Instant};

const WAY: &str = "ANYMESH_TEST_WAY";
/// The process that goes another way.
const ODD: usize = 2;

/// The ways, and what the others are told.
const WAYS: [(&str, &str); 6] = [
    ("skips", "diverged"),
    ("another", "diverged"),
    ("reduction", "diverged"),
    ("shape", "diverged"),
    ("order", "diverged"),
    ("leaves", "lost [2]"),
];

pub(crate) fn trials() -> Vec<Trial> {
    let trial = |(way, told): (&'static str, &'static str)| {
        Trial::test(format!("programs_that_differ_{way}"), move || {
            differ(way, told)
        })
    };
    WAYS.map(trial).into()
}

/// Runs the program of [`play`]; the odd one is told to go a way.
fn differ(way: &str, told: &str) -> std::result::Result<(), Failed> {
    let now = Instant::now();
    let mut processes = start("diverge", 4, &[(WAY, way.into())])?;
    for (p, process) in processes.iter_mut().enumerate() {
        let ended = process.end(now + Duration::from_secs(60))?;
        let said = Said::of(&ended.output);
        let error = said.all("error").first().map(|(_, kind)| *kind);
        let because = said.all("because").first().map_or("", |(_, text)| *text);
        let right = match (way, p) {
            ("leaves", ODD) => ended.code == Some(0),
            ("leaves", _) => error == Some(told),
            // Both are named, each with the line of the program.
            _ => {
                error.is_some_and(|kind| kind.starts_with(told) && kind.contains("2"))
                    && because.matches("divergence.rs:").count() == 2
            }
        };
        if !right {
            return Err(format!("{way}: process {p}: {ended:#?}").into());
        }
    }
    Ok(())
}

/// The role.
pub(crate) fn play() -> i32 {
    let way = std::env::var(WAY).unwrap_or_default();
    let run = || -> Result<()> {
        let cluster = crate::roles::cluster()?;
        let way = match cluster.rank() {
            ODD => way.as_str(),
            _ => "straight",
        };
        cluster.run(|cluster| program(&Mesh::new("x=4", cluster)?, way))
    };
    match run() {
        Ok(()) => 0,
        Err(e) => {
            let e = Error::from(e);
            say(&format!("error {}", kind(&e)));
            say(&format!("because {}", e.to_string().replace('\n', " ")));
            1
        }
    }
}

fn program(mesh: &Mesh, way: &str) -> Result<()> {
    let x = Tensor::ones([8, 3], DType::F32, (mesh, "[@x, _]"))?;
    let y = Tensor::ones([12], DType::F32, (mesh, "[@x]"))?;
    x.sum(&[], false)?.item()?;
    if way == "leaves" {
        return Ok(());
    }
    if way == "order" {
        y.full_tensor()?;
    }
    match way {
        "skips" => {}
        "another" => drop(x.full_tensor()?),
        "reduction" => drop(x.max(&[0], false)?.full_tensor()?),
        "shape" => drop(y.sum(&[0], false)?.item()?),
        _ => drop(x.sum(&[0], false)?.full_tensor()?),
    }
    if way != "order" {
        y.full_tensor()?;
    }
    x.sum(&[], false)?.item().map(|_| ())
}

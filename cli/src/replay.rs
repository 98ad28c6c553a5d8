//! `anymesh replay`: an op at which two runs parted, alone.

use crate::diff_run::{device_and_axes, place};
use anymesh::{
    Mesh,
    checkpoint::reproduction,
    compare::{Difference, Given, Reproduction},
    conformance::replay::{check, replay},
};
use clap::Args;
use serde_json::{Value, json};
use std::{path::PathBuf, process::ExitCode};

/// Calls the op of a file of `anymesh diff-run --dump` alone, and tells where the difference shows
/// again.
///
/// Ends with 0 where it shows nowhere, 1 where it does, 2 where the op cannot be called.
#[derive(Args)]
pub(crate) struct Replay {
    /// The file.
    file: PathBuf,
    /// A place to call it in, such as cpu, wgpu or cpu:tp=2; may be given several times. Where none
    /// is given: the cpu, and the mesh of the second run simulated on it.
    #[arg(long, value_name = "PLACE")]
    device: Vec<String>,
    /// The axes of a mesh for devices that are given without, such as tp=2; those of the second run
    /// where it is not given and the op lay on one.
    #[arg(long, value_name = "AXES")]
    mesh: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// What can go wrong, in words.
type Failure = Box<dyn std::error::Error>;

impl Replay {
    pub(crate) fn run(&self) -> ExitCode {
        match self.outcome() {
            Ok(shows) => ExitCode::from(u8::from(shows)),
            Err(error) => {
                match self.json {
                    true => println!("{}", json!({ "ok": false, "error": error.to_string() })),
                    false => eprintln!("{error}"),
                }
                ExitCode::from(2)
            }
        }
    }

    /// Whether it shows anywhere.
    fn outcome(&self) -> Result<bool, Failure> {
        let alone = reproduction::open(&self.file)?;
        let what = what(&alone);
        if !self.json {
            println!("{what}, called at {}", alone.caller);
            let operands = alone.operands.iter().chain(&alone.gradients);
            let types: Vec<String> = operands
                .map(|s| format!("{}{} {}", s.dtype, s.shape, s.sharding))
                .map(|s| s.trim_end().to_string())
                .collect();
            println!("  of {}", types.join(", "));
            println!("  it differed between {} and {}", alone.a, alone.b);
        }
        // Whether this is the same call is found where nobody doubts the arithmetic.
        check(&alone, &anymesh::device("cpu")?)?;
        let (mut shows, mut places) = (false, vec![]);
        for (name, mesh) in self.places(&alone)? {
            let difference = replay(&alone, &mesh)?;
            shows |= difference.is_some();
            if !self.json {
                println!("  {name}: {}", in_words(difference.as_ref()));
            }
            places.push(json!({ "place": name, "shows": difference.is_some(), "difference": difference.as_ref().map(as_json) }));
        }
        if self.json {
            let out = json!({ "ok": true, "op": alone.op, "what": what, "caller": alone.caller, "shows": shows, "places": places });
            println!("{out}");
        }
        Ok(shows)
    }

    fn places(&self, alone: &Reproduction) -> Result<Vec<(String, Mesh)>, Failure> {
        let axes = self.mesh.as_deref().unwrap_or(&alone.mesh);
        if self.device.is_empty() {
            let cpu = anymesh::device("cpu")?;
            let mut places = vec![("cpu".to_string(), Mesh::single(&cpu))];
            if !axes.is_empty() {
                places.push((format!("cpu:{axes}"), Mesh::new(axes, &cpu)?));
            }
            return Ok(places);
        }
        let mut places = vec![];
        for text in &self.device {
            match device_and_axes(text)? {
                (device, None) if !axes.is_empty() => {
                    places.push((text.clone(), Mesh::single(&device)));
                    places.push((format!("{text}:{axes}"), Mesh::new(axes, &device)?));
                }
                _ => places.push((text.clone(), place(text)?)),
            }
        }
        Ok(places)
    }
}

fn what(alone: &Reproduction) -> String {
    match alone.given {
        Given::Gradient(i) => format!("the gradient of operand {i} of {}", alone.op),
        Given::Result(i) if i > 0 => format!("result {i} of {}", alone.op),
        _ => alone.op.clone(),
    }
}

fn in_words(difference: Option<&Difference>) -> String {
    match difference {
        None => "the difference does not show".into(),
        Some(d) => format!(
            "the difference shows: {} at {:?} where {} is right (rank {}), {} of {} elements",
            d.b, d.index, d.a, d.rank, d.wrong, d.of
        ),
    }
}

fn as_json(d: &Difference) -> Value {
    let number = |x: f64| match x.is_finite() {
        true => json!(x),
        false => json!(x.to_string()),
    };
    json!({ "index": d.index, "expected": number(d.a), "found": number(d.b), "largest": number(d.largest), "rank": d.rank, "wrong": d.wrong, "of": d.of })
}

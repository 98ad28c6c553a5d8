//! What kind of file was given: a training run, or the simulator's own settings.

use crate::request::bad;
use anymesh::Result;
use serde_json::{Map, Value};
use std::path::Path;

/// What a file holds.
pub(super) enum Read {
    /// A training run, as TOML.
    Run(Run),
    /// The simulator's own settings.
    Case(Value),
}

/// A training run.
pub(super) struct Run {
    /// As TOML.
    pub(super) text: String,
    /// Whether it says what it learns from, which does not matter to what it costs.
    pub(super) has_data: bool,
}

/// What only a training run has.
const RUN: [&str; 14] = [
    "tokenizer",
    "freeze",
    "logs",
    "run",
    "mesh",
    "pipeline",
    "batch",
    "optimizer",
    "groups",
    "clip",
    "schedule",
    "lora",
    "data",
    "evaluation",
];

/// What only the simulator's own files have.
const CASE: [&str; 3] = ["layout", "machine", "ranks"];

/// Reads a file; nothing where it is the name of a model.
pub(super) fn read(what: &str) -> Result<Option<Read>> {
    let path = Path::new(what);
    let ending = path.extension().and_then(|e| e.to_str());
    if !matches!(ending, Some("toml" | "json")) {
        return Ok(None);
    }
    let text = std::fs::read_to_string(path)
        .map_err(|error| bad(format!("cannot read {what}: {error}")))?;
    let wrong = |error: String| bad(format!("{what}: {error}"));
    let value: Value = match ending {
        Some("json") => serde_json::from_str(&text).map_err(|e| wrong(e.to_string()))?,
        _ => toml::from_str(&text).map_err(|e| wrong(e.to_string()))?,
    };
    let is_run = match &value {
        Value::Object(fields) => is_run(fields).map_err(wrong)?,
        _ => false,
    };
    if !is_run {
        return Ok(Some(Read::Case(value)));
    }
    let text = match ending {
        Some("json") => toml::to_string(&value).map_err(|e| wrong(e.to_string()))?,
        _ => text,
    };
    let has_data = value.get("data").is_some();
    Ok(Some(Read::Run(Run { text, has_data })))
}

/// Told by keys: only `model` is in both kinds of files.
fn is_run(fields: &Map<String, Value>) -> std::result::Result<bool, String> {
    let first = |of: &[&'static str]| of.iter().find(|k| fields.contains_key(**k)).copied();
    let model = match fields.get("model") {
        Some(Value::Object(model)) => {
            if model.contains_key("model_type") {
                Some("model.model_type")
            } else if model.contains_key("path") {
                Some("model.path")
            } else {
                None
            }
        }
        _ => None,
    };
    match (first(&RUN).or(model), first(&CASE)) {
        (Some(run), Some(case)) => Err(format!(
            "`{run}` is of a training run, `{case}` of a file of the simulator: it cannot be both. A training run says its axes as mesh.axes, and takes --ranks and --machine; a file of the simulator has model, machine, layout and ranks"
        )),
        (run, _) => Ok(run.is_some()),
    }
}

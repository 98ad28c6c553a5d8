//! What the page runs, in a worker of its own: see `index.html` and `worker.js`.

mod console;
mod files;
mod model;
mod rule;
mod self_test;
mod training;

use anymesh_show::{Curve, Show};
use serde_json::{Value, json};
use wasm_bindgen::prelude::*;

/// What the page gets: an error is a text for its reader.
type Answer<T> = Result<T, String>;

fn text(error: anymesh_core::Error) -> String {
    error.to_string()
}

#[wasm_bindgen(start)]
fn start() {
    console::install();
}

fn answered(request: &str, answer: fn(&Value) -> Answer<Value>) -> Answer<String> {
    let request = serde_json::from_str(request).map_err(|e| format!("not JSON: {e}"))?;
    answer(&request).map(|answer| answer.to_string())
}

/// What the page needs to begin: ops, and the style of pictures.
#[wasm_bindgen]
pub fn prepare() -> String {
    json!({ "ops": rule::ops(), "style": anymesh_show::STYLE }).to_string()
}

/// What an op does on a mesh.
#[wasm_bindgen]
pub fn rule(request: &str) -> Answer<String> {
    answered(request, rule::rule)
}

/// What a reshard takes.
#[wasm_bindgen]
pub fn plan(request: &str) -> Answer<String> {
    answered(request, rule::plan)
}

/// A curve of losses, one for each step.
#[wasm_bindgen]
pub fn curve(losses: &str) -> Answer<String> {
    let losses: Vec<f64> = serde_json::from_str(losses).map_err(|e| e.to_string())?;
    let points = losses
        .iter()
        .enumerate()
        .map(|(n, y)| ((n + 1) as f64, *y))
        .collect();
    let curve = Curve::new("loss", "nats a letter").line("training", points);
    Ok(curve.svg().unwrap_or_default())
}

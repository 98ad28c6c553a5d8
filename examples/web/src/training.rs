//! A run of the model: its device, and what the page shows of a step.

use crate::{
    Answer,
    model::{Model, Options, Text},
    self_test, text,
};
use anymesh_core::{Device, Mesh, spmd::Ledger};
use anymesh_show::Show;
use serde_json::{Value, json};
use std::cell::RefCell;
use wasm_bindgen::prelude::*;

/// As many ranks the page trains on.
const MAX_RANKS: usize = 64;

thread_local! {
    /// The GPU, once it was opened and found right.
    static GPU: RefCell<Option<Device>> = const { RefCell::new(None) };
}

/// The GPU, if a few kernels give what they must: a shader that a browser rejects leaves what was
/// in memory before, and no error.
async fn gpu() -> Answer<Device> {
    if let Some(device) = GPU.with_borrow(Clone::clone) {
        return Ok(device);
    }
    let device = anymesh_backend_wgpu::device_async().await.map_err(text)?;
    self_test::check(&device).await?;
    GPU.set(Some(device.clone()));
    Ok(device)
}

/// A run.
#[wasm_bindgen]
pub struct Training {
    model: Model,
    learnt: Text,
    device: String,
}

#[wasm_bindgen]
impl Training {
    /// Starts a run from the fields of the form, as JSON.
    pub async fn create(options: String) -> Result<Training, String> {
        let form: Value = serde_json::from_str(&options).map_err(|e| e.to_string())?;
        let field = |name: &str| {
            let text = form[name].as_str().unwrap_or("").trim().to_string();
            if text.is_empty() {
                Err(format!("'{name}' is empty"))
            } else {
                Ok(text)
            }
        };
        let number = |name: &str, most: usize| {
            let text = field(name)?;
            match text.parse() {
                Ok(n) if (1..=most).contains(&n) => Ok(n),
                _ => Err(format!(
                    "'{name}' must be a number from 1 to {most}, got {text}"
                )),
            }
        };
        let options = Options {
            layers: number("layers", 8)?,
            width: number("width", 512)?,
            heads: number("heads", 16)?,
            context: number("context", 256)?,
            batch: number("batch", 64)?,
            ..Options::default()
        };
        let device = match field("device")?.as_str() {
            "gpu" => gpu().await?,
            _ => anymesh_backend_cpu::device(),
        };
        let mesh = Mesh::new(&field("mesh")?, &device).map_err(text)?;
        if mesh.ranks() > MAX_RANKS {
            return Err(format!(
                "a mesh of {} ranks: the page trains on at most {MAX_RANKS}",
                mesh.ranks()
            ));
        }
        let learnt = Text::new(&field("text")?, options.context).map_err(text)?;
        let model = Model::new(options, learnt.vocabulary(), &mesh).map_err(text)?;
        let device = format!("{mesh} of {}", device.name());
        Ok(Self {
            model,
            learnt,
            device,
        })
    }

    /// How many numbers it learns.
    pub fn size(&self) -> usize {
        self.model.size()
    }

    /// A step: its loss, and what it sent, as JSON.
    pub async fn step(&mut self) -> Result<String, String> {
        let first = self.model.steps() < 2;
        let (loss, ledger) = Ledger::record(|| self.model.step(&self.learnt));
        let loss = loss
            .map_err(text)?
            .item_async()
            .await
            .map_err(text)?
            .to_f64();
        // What a step sends is the same each time; the first one also brings what later ones have.
        let drawn = if first { ledger.svg() } else { None };
        Ok(json!({ "loss": loss, "bytes": ledger.bytes(), "ledger": drawn, "device": self.device }).to_string())
    }

    /// What the model says after the text: the likeliest letter, so many times.
    pub async fn say(&mut self, letters: usize) -> Result<String, String> {
        let mut said = vec![];
        for _ in 0..letters {
            let scores = self.model.next(&self.learnt, &said).map_err(text)?;
            let scores = scores.to_vec_async::<f32>().await.map_err(text)?;
            let best = scores.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
            said.push(best.map_or(0, |(token, _)| token as i32));
        }
        Ok(said
            .iter()
            .map(|t| self.learnt.letter(*t as usize))
            .collect())
    }
}

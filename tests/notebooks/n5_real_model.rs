//! Written from examples/notebooks/5-real-model.ipynb: `ANYMESH_UPDATE=1 cargo test --test notebook_programs` writes it again.

#![allow(unused, unreachable_pub, clippy::all)]

use crate::shown::{Outcome, begin, line, show};

macro_rules! println {
    ($($t:tt)*) => { line(format_args!($($t)*)) };
}

pub(crate) fn run() -> Outcome {
    begin(0);
    // Builds the library, for the first notebook on a machine: some minutes. Run the cells in order.
    begin(1);
    use anymesh::{prelude::*, train::{Build, Encoder, Policy as Precision, models::ModelFiles}};

    let cpu = device("cpu")?;
    let folder: String = std::env::var("ANYMESH_MODELS").unwrap_or("../../target/models".into()) + "/minilm";

    /// The model on a mesh, with its tokenizer: weights are read as the ranks need them.
    fn open(folder: &str, mesh: &Mesh) -> anymesh::train::Result<Encoder> {
        let files = ModelFiles::open(folder)?;
        Encoder::new(files.load(&Build::new(mesh, Precision::f32(), 0))?, &files)
    }

    let encoder: Encoder = open(&folder, &Mesh::single(&cpu))?;
    let sentences: [&'static str; 6] = [
        "A cat sleeps on the sofa.", "The kitten is napping on the couch.", "Dogs like to chase balls.",
        "The stock market fell sharply today.", "Shares dropped across all exchanges.", "I would like a cup of tea.",
    ];
    let vectors: Vec<Vec<f32>> = encoder.encode(&sentences)?;
    println!("{} vectors of {} numbers", vectors.len(), vectors[0].len());
    begin(2);
    fn table(vectors: &[Vec<f32>], device: &Device) -> Result<Tensor> {
        let all: Vec<f32> = vectors.iter().flatten().copied().collect();
        let x = Tensor::from_slice(&all, [vectors.len(), vectors[0].len()], device)?;
        (x.matmul(&x.t()?)? * 1000.0)?.round()? / 1000.0
    }

    show(&(
    table(&vectors, &cpu)?
    ));
    begin(3);
    for axes in ["tp=2", "tp=3", "dp=2, tp=2"] {
        let sharded = open(&folder, &Mesh::new(axes, &cpu)?)?.encode(&sentences)?;
        let apart = vectors.iter().flatten().zip(sharded.iter().flatten()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        println!("{axes:12} within 1e-6: {}", apart < 1e-6);
    };
    Ok(())
}

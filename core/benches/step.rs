//! How long it takes to plan a step: llama layers forward and backward without values.
//! `cargo bench -p anymesh-core --bench step`.

#[allow(dead_code)]
#[path = "../tests/programs/layers.rs"]
mod layers;

use anymesh_core::{
    DType, Mesh, Result, Tensor, meta,
    spmd::{OnDifference, PlanOptions, plan, with_plan},
};
use layers::{FULLY_SHARDED, Layer, Llama, MEGATRON, Parameters, Sizes, zeros};
use std::time::Instant;

const LLAMA: Llama = Llama(Sizes {
    width: 8192,
    heads: 64,
    kv_heads: 64,
    d: 128,
    ffn: 3 * 8192,
});

fn step(parameters: &[Parameters], x: &Tensor) -> Result<()> {
    let run = |x: Tensor, p: &Parameters| LLAMA.forward(p, &x, &|x| Ok(x));
    let y = parameters.iter().try_fold(x.clone(), run)?;
    let grads = y.sum(&[], false)?.backward()?;
    let weights = parameters.iter().flat_map(Parameters::trained);
    weights.chain([x]).try_for_each(|w| grads.of(w).map(drop))
}

fn main() -> Result<()> {
    for (name, layout, stream) in [
        ("whole", MEGATRON, "[@dp, _, _]"),
        ("cut", MEGATRON, "[@dp, @tp, _]"),
        ("fully sharded", FULLY_SHARDED, "[@dp, _, _]"),
    ] {
        for layers in [2, 32] {
            let mesh = Mesh::new("dp=8, tp=8", &meta())?;
            let make = |_| zeros(&LLAMA, &mesh, layout, DType::BF16, |_| true);
            let parameters = (0..layers).map(make).collect::<Result<Vec<_>>>()?;
            let x = Tensor::zeros([8, 4096, 8192], DType::BF16, (&mesh, stream))?;
            let x = x.require_grad()?;
            let start = Instant::now();
            let made = plan(&PlanOptions::default(), || step(&parameters, &x))?;
            let planning = start.elapsed().as_secs_f64() * 1e3;
            let time = |f: &dyn Fn() -> Result<()>| -> Result<f64> {
                f()?;
                let start = Instant::now();
                f()?;
                Ok(start.elapsed().as_secs_f64() * 1e3)
            };
            let free = time(&|| step(&parameters, &x))?;
            let under = time(&|| with_plan(&made, OnDifference::Error, || step(&parameters, &x)))?;
            println!(
                "{name:>14}, {layers:>2} layers: {:>5} steps planned in {planning:8.2} ms; a step {free:7.2} ms, under the plan {under:7.2} ms; {} bytes, {} without",
                made.steps().len(),
                made.bytes(),
                made.eager().bytes
            );
        }
    }
    Ok(())
}

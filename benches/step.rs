//! A whole training step: loss, gradients and AdamW, of the models that `anymesh_bench::step::Spec`
//! has a name for.
//!
//! Prints one JSON object: the losses of all steps, the ms of those after the first few until the
//! device was done (`ms`) and until the host had launched everything (`host_ms`), and the most bytes
//! that tensors held (`peak`). `benches/peers/torch_step.py` runs this and the same step in PyTorch on
//! a GPU, `benches/peers/step.py` that of a small model in JAX and PyTorch on a CPU. `profile` instead
//! of a number of steps prints where the time goes, kernel by kernel.
//!
//! ```text
//! cargo bench --bench step --features cuda,train -- cuda:0 gpt2 bf16 16x1024 20
//! cargo bench --bench step --features cuda,train -- cuda:0 gpt2 bf16 profile
//! cargo bench --bench step --features cuda,train -- cuda:0 llama bf16 20
//! cargo bench --bench step --no-default-features --features cpu,train -- cpu small dp=2,tp=4 20
//! cargo bench --bench step --no-default-features --features cpu,train -- idle gpt2 bf16 dp=2,tp=4 20
//! ```
//!
//! The device `idle` (and `deferred:idle`) has every kernel and makes none: a step on it takes what the
//! host takes.

use anymesh_bench::{Result, step::Spec};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with("--"))
        .collect();
    let mut words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let device = match words.is_empty() {
        true => "cpu",
        false => words.remove(0),
    };
    let device = match device {
        "idle" => anymesh_bench::idle(),
        "deferred:idle" => anymesh_engine::deferred(&anymesh_bench::idle()),
        name => anymesh::device(name)?,
    };
    let profile = words.contains(&"profile");
    let steps = words.iter().find_map(|word| word.parse().ok());
    words.retain(|word| *word != "profile" && word.parse::<usize>().is_err());
    let spec = Spec::parse(&words)?;
    if profile {
        println!("{}", spec.profile(&device, steps.unwrap_or(10))?);
    } else {
        println!("{}", spec.measure(&device, steps.unwrap_or(20))?);
    }
    Ok(())
}

//! A tour in one run: one attention block written once, on one device and on a mesh of eight ranks, with the same numbers and every byte that crossed; then
//! what a reshard costs, and the same program on every device of this machine.
//!
//! `cargo run --release --example quickstart`

use anymesh::{
    DType, Device, Mesh, Place, Result, Tensor, TensorType,
    ops::{AttentionOptions, Rng, RopeStyle, attention::attention, rope::rope_tables},
    reshard::{Objective, plan},
    spmd::Ledger,
};
use std::time::Instant;

/// Where the tensors of a program go: all on a device, or each over a mesh as its text says.
enum On {
    Device(Device),
    Mesh(Mesh),
}

impl On {
    fn place(&self, ty: &str) -> Result<Place> {
        match self {
            On::Device(device) => Ok(device.into()),
            On::Mesh(mesh) => Ok((mesh, &TensorType::parse(ty, mesh)?.sharding).into()),
        }
    }
}

/// One transformer-style step: norm, projections, rotary positions, causal attention with grouped heads, swiglu. Nothing in it knows of meshes:
/// the batch is cut over `dp` and the heads over `tp` because the inputs are.
fn block(on: &On) -> Result<Tensor> {
    let (batch, heads, groups, length, size) = (2, 8, 4, 64, 32);
    let width = heads * size;
    let mut rng = Rng::new(42);
    let mut draw = |shape: &[usize], std: f64, ty: &str| Tensor::normal(shape, 0.0, std, DType::F32, &on.place(ty)?, rng.split());
    let x = draw(&[batch, length, width], 1.0, "f32[2@dp, 64, 256]")?;
    let query = draw(&[width, width], 0.06, "f32[256, 256@tp]")?;
    let key = draw(&[width, groups * size], 0.06, "f32[256, 128@tp]")?;
    let value = draw(&[width, groups * size], 0.06, "f32[256, 128@tp]")?;
    let gate = draw(&[width, 2 * width], 0.15, "f32[256@tp, 512]")?;

    let x = x.rms_norm(1, None, 1e-6)?;
    let heads_of = |weight: &Tensor, n: usize| x.matmul(weight)?.reshape([batch, length, n, size])?.permute(&[0, 2, 1, 3]);
    let (cos, sin) = rope_tables(length, size, 10_000.0, 0, &on.place("f32[64, 16]")?)?;
    let q = heads_of(&query, heads)?.rope(&cos, &sin, RopeStyle::Half)?;
    let k = heads_of(&key, groups)?.rope(&cos, &sin, RopeStyle::Half)?;
    let v = heads_of(&value, groups)?;
    let attended = attention(&q, &k, &v, &AttentionOptions { causal: true, ..Default::default() })?.out;
    let joined = attended.permute(&[0, 2, 1, 3])?.reshape([batch, length, width])?;
    joined.matmul(&gate)?.swiglu()?.softmax(-1)
}

/// A row as bars, the highest for its largest value.
fn picture(row: &[f32]) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let top = row.iter().copied().fold(f32::MIN_POSITIVE, f32::max);
    row.iter().map(|v| BARS[(v / top * 7.0).round().clamp(0.0, 7.0) as usize]).collect()
}

fn difference(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn main() -> Result<()> {
    let device = anymesh::default_device()?;
    println!("anymesh on {device}: {}\n", device.backend().capabilities().description);

    let out = block(&On::Device(device.clone()))?;
    let values = out.to_vec::<f32>()?;
    println!("norm → projections → rope → causal grouped attention → swiglu → softmax gives {}", out.type_string());
    for position in [0, 21, 42, 63] {
        println!("  token {position:>2}  {}", picture(&values[position * 256..position * 256 + 64]));
    }

    let mesh = Mesh::new("dp=2, tp=4", &device)?;
    let (sharded, ledger) = Ledger::record(|| block(&On::Mesh(mesh.clone())));
    let sharded = sharded?;
    println!("\nThe same program on {mesh} gives {}, largest difference {:.1e}. What crossed:", sharded.type_string(), difference(&values, &sharded.to_vec()?));
    println!("{}", ledger.to_string().lines().map(|line| format!("  {line}\n")).collect::<String>());

    let (from, to) = (TensorType::parse("f32[4096@dp, 4096@tp]", &mesh)?, TensorType::parse("f32[4096@tp@dp, 4096]", &mesh)?);
    println!("{}", plan(&mesh, &from.shape, from.dtype, &from.sharding, &to.sharding, Objective::Time)?);

    println!("\nThe same program on every device here (difference from the first):");
    for found in anymesh::found() {
        let device = match anymesh::device(&found.name) {
            Ok(device) => On::Device(device),
            Err(error) => {
                println!("  {:<8} {error}", found.name);
                continue;
            }
        };
        block(&device)?.to_vec::<f32>()?;
        let start = Instant::now();
        let theirs = block(&device)?.to_vec::<f32>()?;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        println!("  {:<8} {ms:>8.2} ms  largest difference {:.1e}  {}", found.name, difference(&values, &theirs), found.description);
    }

    println!("\nBad input is an error that says what to do:");
    println!("  {}", sharded.add(&out).expect_err("one lies on a mesh, the other does not"));
    Ok(())
}

//! A tour in one run: a device, tensors, a small attention block, random numbers that do not depend on the device, and the
//! same numbers on every device of this machine.
//!
//! `cargo run --release --example quickstart`

use anymesh::{
    DType, Device, Result, Tensor,
    ops::{AttentionOptions, Rng, RopeStyle, attention::attention, rope::rope_tables},
};
use std::time::Instant;

/// One transformer-style step: norm, projection, rotary positions, causal attention with grouped heads, swiglu.
fn block(device: &Device) -> Result<Tensor> {
    let (batch, heads, groups, length, size) = (2, 8, 2, 64, 32);
    let mut rng = Rng::new(42);
    let mut draw = |shape: &[usize]| Tensor::normal(shape, 0.0, 1.0, DType::F32, device, rng.split());
    let x = draw(&[batch, length, heads * size])?;
    let weight = draw(&[heads * size, (heads + 2 * groups) * size])?.mul(0.06)?;
    let gate = draw(&[heads * size, 2 * heads * size])?.mul(0.15)?;

    let qkv = x.rms_norm(1, None, 1e-6)?.matmul(&weight)?.reshape([batch, length, heads + 2 * groups, size])?.permute(&[0, 2, 1, 3])?;
    let part = |start: usize, n: usize| qkv.narrow(1, start, n);
    let (cos, sin) = rope_tables(length, size, 10_000.0, 0, device)?;
    let q = part(0, heads)?.rope(&cos, &sin, RopeStyle::Half)?;
    let k = part(heads, groups)?.rope(&cos, &sin, RopeStyle::Half)?;
    let v = part(heads + groups, groups)?;
    let attended = attention(&q, &k, &v, &AttentionOptions { causal: true, ..Default::default() })?.out;
    let joined = attended.permute(&[0, 2, 1, 3])?.reshape([batch, length, heads * size])?;
    joined.matmul(&gate)?.swiglu()?.softmax(-1)
}

/// A row as bars, the highest for its largest value.
fn picture(row: &[f32]) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let top = row.iter().copied().fold(f32::MIN_POSITIVE, f32::max);
    row.iter().map(|v| BARS[(v / top * 7.0).round().clamp(0.0, 7.0) as usize]).collect()
}

fn main() -> Result<()> {
    let device = anymesh::default_device()?;
    println!("anymesh on {device}: {}\n", device.backend().capabilities().description);

    let out = block(&device)?;
    println!("norm → projection → rope → causal grouped attention → swiglu → softmax gives {}", out.type_string());
    for position in [0, 21, 42, 63] {
        let row = out.narrow(0, 0, 1)?.narrow(1, position, 1)?.narrow(2, 0, 64)?.to_vec::<f32>()?;
        println!("  token {position:>2}  {}", picture(&row));
    }

    println!("\nThe same program on every device here (difference from the first):");
    for found in anymesh::found() {
        let device = match anymesh::device(&found.name) {
            Ok(device) => device,
            Err(error) => {
                println!("  {:<8} {error}", found.name);
                continue;
            }
        };
        block(&device)?.to_vec::<f32>()?;
        let start = Instant::now();
        let theirs = block(&device)?.to_vec::<f32>()?;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        let worst = out.to_vec::<f32>()?.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        println!("  {:<8} {ms:>8.2} ms  largest difference {worst:.1e}  {}", found.name, found.description);
    }

    println!("\nBad input is an error that says what to do:");
    let wrong = out.matmul(&Tensor::zeros([3, 3], DType::F32, &device)?);
    println!("  {}", wrong.expect_err("256 and 3 do not fit"));
    Ok(())
}

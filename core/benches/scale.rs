//! What a step costs on many ranks: a transformer layer forward and backward without values on 8 to
//! 16,384 ranks, which should take the same time, and a small one with values, which should take
//! time in proportion to the ranks.
//!
//! `cargo bench -p anymesh-core --bench scale`

#[path = "../tests/support/layer.rs"]
mod layer;

use anymesh_core::{DType, Mesh, Result, meta};
use layer::{LAYOUTS, Layout, Sizes, parameters, step};
use std::time::Instant;

/// Milliseconds of a step whose rules and plans are new, and of one where they are known.
fn times(mesh: impl Fn() -> Result<Mesh>, sizes: &Sizes, layout: &Layout) -> Result<(f64, f64)> {
    let (mut cold, mut warm) = (f64::MAX, f64::MAX);
    for _ in 0..3 {
        let start = Instant::now();
        let p = parameters(sizes, layout, &mesh()?)?;
        step(sizes, layout, &p)?;
        cold = cold.min(start.elapsed().as_secs_f64() * 1e3);
        for _ in 0..5 {
            let start = Instant::now();
            step(sizes, layout, &p)?;
            warm = warm.min(start.elapsed().as_secs_f64() * 1e3);
        }
    }
    Ok((cold, warm))
}

fn main() -> Result<()> {
    for layout in &LAYOUTS {
        println!("h=8192, 4096 tokens per dp rank, bf16, {}", layout.name);
        for ranks in [8, 64, 512, 4096, 16_384] {
            let sizes = Sizes {
                sequences: ranks / 8,
                length: 4096,
                width: 8192,
                heads: 64,
                hidden: 28_672,
                dtype: DType::BF16,
            };
            let mesh = || Mesh::new(&format!("dp={}, tp=8", ranks / 8), &meta());
            let (cold, warm) = times(mesh, &sizes, layout)?;
            println!("{ranks:>7} ranks: new {cold:9.3} ms, known {warm:9.3} ms");
        }
    }
    let cpu = anymesh_backend_cpu::device();
    for layout in &LAYOUTS {
        println!(
            "h=32, 16 tokens per dp rank, f32 on the CPU, {}",
            layout.name
        );
        for ranks in [8, 64, 256] {
            let sizes = Sizes {
                sequences: ranks / 8,
                length: 16,
                width: 32,
                heads: 8,
                hidden: 64,
                dtype: DType::F32,
            };
            let mesh = || Mesh::new(&format!("dp={}, tp=8", ranks / 8), &cpu);
            let (cold, warm) = times(mesh, &sizes, layout)?;
            println!(
                "{ranks:>7} ranks: new {:9.1} us, known {:9.1} us for each rank",
                cold * 1e3 / ranks as f64,
                warm * 1e3 / ranks as f64
            );
        }
    }
    Ok(())
}

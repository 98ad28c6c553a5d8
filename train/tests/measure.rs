//! The real step without values against the simulator's closed forms.

use anymesh_simulate::{Layout, Model, compare, estimate, machine, preset};
use anymesh_train::{
    Result,
    measure::{Layers, measure, run_of},
};

fn tiny(gated: bool) -> Model {
    Model {
        name: "tiny".into(),
        layers: 8,
        hidden: 1024,
        heads: 16,
        kv_heads: if gated { 8 } else { 16 },
        head_size: 64,
        ffn: 4096,
        gated,
        vocabulary: 32_768,
        tied: !gated,
        positions: if gated { 0 } else { 512 },
        biases: !gated,
        dropout: false,
        experts: None,
        latent: None,
    }
}

#[test]
fn explore() -> Result<()> {
    let h100 = machine("h100").unwrap();
    let base = Layout {
        sequence: 512,
        batch: 32,
        micro: 2,
        ..Layout::default()
    };
    for gated in [true, false] {
        for layout in [
            Layout { dp: 4, zero: 0, ..base.clone() },
            Layout { dp: 4, zero: 1, ..base.clone() },
            Layout { dp: 4, zero: 2, ..base.clone() },
            Layout { dp: 4, zero: 3, ..base.clone() },
            Layout { tp: 4, sequence_parallel: false, ..base.clone() },
            Layout { tp: 4, ..base.clone() },
            Layout { tp: 4, recompute: anymesh_simulate::Recompute::Full, ..base.clone() },
            Layout { pp: 4, dp: 2, tp: 2, ..base.clone() },
            Layout { pp: 4, schedule: "zbh1".into(), ..base.clone() },
        ] {
            let model = tiny(gated);
            let began = std::time::Instant::now();
            let step = measure(&run_of(&model, &layout)?, None, &h100, Layers::Alike)?;
            let took = began.elapsed();
            let closed = estimate(&model, &h100, &layout).unwrap();
            println!("== gated {gated} {} in {took:?}\n{}", layout.summary(), compare(&closed, &step.estimate));
        }
    }
    let layout = Layout { tp: 4, ..base.clone() };
    let step = measure(&run_of(&tiny(true), &layout)?, None, &h100, Layers::Alike)?;
    println!("{step}");
    for part in &step.parts {
        if part.amount.bytes > 0.0 && !part.item.axes.is_empty() {
            println!("{:?}", part);
        }
    }
    let all = measure(&run_of(&tiny(true), &layout)?, None, &h100, Layers::Each)?;
    println!("{}", compare(&all.estimate, &step.estimate));
    let big = preset("llama-3-405b").unwrap();
    let layout = Layout { dp: 128, tp: 8, pp: 16, sequence: 8192, batch: 2048, ..Layout::default() };
    let began = std::time::Instant::now();
    let step = measure(&run_of(&big.model, &layout)?, None, &h100, Layers::Alike)?;
    let took = began.elapsed();
    let closed = estimate(&big.model, &h100, &layout).unwrap();
    println!("== 405B in {took:?}\n{}{step}", compare(&closed, &step.estimate));
    Ok(())
}

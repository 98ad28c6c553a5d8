//! What a list of launches that comes again costs the host on a deferred device: to write its launches
//! down, and to run it.
//!
//! Prints one JSON object: how many launches a list has, and medians over lists of the microseconds
//! that one launch took to be written down by an op of tensors (`op_us`) and by itself (`record_us`), the
//! milliseconds that the list took to be handed to the device (`run_ms`), and those until the device was
//! done (`done_ms`). The launches are softmaxes of 64x64, each of the one before, which nothing can be
//! fused with.
//!
//! ```text
//! cargo bench --bench again --features cuda -- cuda:0 1500
//! ```

use anymesh::{DType, Device, Result, Tensor};
use anymesh_kernel::{
    Layout, View,
    backend::{RowCall, RowOp},
};
use std::time::Instant;

const ROUNDS: usize = 30;
/// Rounds until everything is known.
const FIRST: usize = 10;

fn softmax(device: &Device, input: View) -> Result<View> {
    let op = "softmax";
    let call = RowCall {
        op,
        input,
        residual: None,
        mode: RowOp::Softmax,
    };
    Ok(device.launch(call)?.swap_remove(0))
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.drain(..FIRST);
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

fn main() -> Result<()> {
    let arguments: Vec<String> = (std::env::args().skip(1))
        .filter(|a| !a.starts_with("--"))
        .collect();
    let device = anymesh::device(arguments.first().map_or("cpu", String::as_str))?;
    let count = arguments.get(1).and_then(|n| n.parse().ok());
    let count: usize = count.unwrap_or(1500);
    let mut options = anymesh_engine::Options::of(&device);
    (options.launches, options.ramp) = (2 * count, false);
    let device = anymesh_engine::deferred_with(device.innermost(), options);

    let values: Vec<f32> = (0..64 * 64).map(|k| (k % 97) as f32 / 97.0).collect();
    let tensor = Tensor::from_slice(&values, [64, 64], &device)?;
    let first = View {
        buffer: device.upload(
            &values
                .iter()
                .flat_map(|x| x.to_le_bytes())
                .collect::<Vec<_>>(),
        )?,
        dtype: DType::F32,
        layout: Layout::contiguous([64, 64].into()),
    };
    let ms = |start: Instant| start.elapsed().as_secs_f64() * 1e3;
    let [mut op, mut record, mut run, mut done] = [(); 4].map(|()| Vec::with_capacity(ROUNDS));
    for _ in 0..ROUNDS {
        let start = Instant::now();
        let mut x = tensor.clone();
        for _ in 0..count {
            x = x.softmax(-1)?;
        }
        op.push(1e3 * ms(start) / count as f64);
        drop(x);
        device.sync()?;

        let start = Instant::now();
        let mut view = first.clone();
        for _ in 0..count {
            view = softmax(&device, view)?;
        }
        record.push(1e3 * ms(start) / count as f64);
        let start = Instant::now();
        device.backend().resolve(&view.buffer)?;
        run.push(ms(start));
        device.sync()?;
        done.push(ms(start));
    }
    let [op, record, run, done] = [op, record, run, done].map(median);
    println!(
        "{{\"device\":\"{}\",\"launches\":{count},\"op_us\":{op:.3},\"record_us\":{record:.3},\"run_ms\":{run:.3},\"done_ms\":{done:.3}}}",
        device.name()
    );
    Ok(())
}

//! `anymesh doctor --measure`: the cost model of the machine at hand.

use anymesh::{
    DType, Device, Mesh, Result, Tensor,
    cost::{CostModel, Curve, Link},
};
use std::time::Instant;

/// What is measured takes at least so long in all, so that the clock and other programs matter
/// little.
const LEAST: f64 = 0.05;
/// Sizes stop growing where one run takes longer than this.
const MOST: f64 = 0.5;

/// Seconds of one run of `f`: the best of three rounds, each of which waits for the device once.
fn seconds(device: &Device, mut f: impl FnMut() -> Result<Tensor>) -> Result<f64> {
    let mut round = |runs: usize| -> Result<f64> {
        let start = Instant::now();
        let mut last = None;
        for _ in 0..runs {
            last = Some(f()?);
        }
        device.sync()?;
        drop(last);
        Ok(start.elapsed().as_secs_f64() / runs as f64)
    };
    round(1)?;
    let once = round(1)?;
    if once > MOST {
        return Ok(once);
    }
    let runs = (LEAST / once.max(1e-7)).ceil().clamp(1.0, 10_000.0) as usize;
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        best = best.min(round(runs)?);
    }
    Ok(best)
}

/// The best rate of (amount, seconds), and the fraction of it that each amount reaches. What noise
/// made faster than a smaller amount counts as slow as that.
fn rate_and_curve(measured: &[(f64, f64)]) -> Result<(f64, Curve)> {
    let rate = measured.iter().map(|(n, t)| n / t).fold(0.0, f64::max);
    let mut slowest = 0f64;
    let points = measured.iter().map(|(amount, seconds)| {
        slowest = slowest.max(*seconds);
        (*amount, (amount / (slowest * rate)).clamp(1e-9, 1.0))
    });
    Ok((rate, Curve::new(points.collect::<Vec<_>>())?))
}

/// Measures amounts that grow until a run takes long; `launch` is not theirs.
fn growing(
    device: &Device,
    launch: f64,
    sizes: &[usize],
    amount: impl Fn(usize) -> f64,
    mut run: impl FnMut(usize) -> Result<f64>,
) -> Result<Vec<(f64, f64)>> {
    let mut measured = vec![];
    for size in sizes {
        let seconds = run(*size)?;
        measured.push((amount(*size), (seconds - launch).max(seconds * 0.01)));
        if seconds > MOST {
            break;
        }
    }
    device.sync()?;
    Ok(measured)
}

/// Products by dtype and size, memory, launches, and what the transport within a process carries.
pub(crate) fn measure(device: &Device) -> Result<CostModel> {
    let ones = |n: usize, dtype| Tensor::ones([n], dtype, device);
    let tiny = ones(1, DType::F32)?;
    let launch = seconds(device, || tiny.add(&tiny))?;
    let memory = growing(
        device,
        launch,
        &[1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 24, 1 << 26],
        |n| 8.0 * n as f64,
        |n| {
            let x = ones(n, DType::F32)?;
            seconds(device, || x.neg())
        },
    )?;
    let (bandwidth, touches) = rate_and_curve(&memory)?;
    let mut cost = CostModel {
        name: device.name().into(),
        start: 0.0,
        ..CostModel::default()
    };
    cost.device.launch = launch;
    cost.device.bandwidth = bandwidth;
    cost.device.touches = touches;
    cost.device.rates.clear();
    let mut fastest = 0.0;
    for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
        if !device.supports(dtype) {
            continue;
        }
        let products = growing(
            device,
            launch,
            &[64, 128, 256, 512, 1024, 2048, 4096, 8192],
            |n| 2.0 * (n as f64).powi(3),
            |n| {
                let x = Tensor::ones([n, n], dtype, device)?;
                seconds(device, || x.matmul(&x))
            },
        )?;
        let (rate, curve) = rate_and_curve(&products)?;
        cost.device.rates.insert(dtype, rate);
        // One curve serves all: that of the dtype which loses most by being small.
        if rate > fastest {
            (fastest, cost.device.products) = (rate, curve);
        }
    }
    let mesh = Mesh::new("rank=2", device)?;
    let gather = |n: usize| {
        let x = Tensor::ones([n], DType::F32, (&mesh, "[@rank]"))?;
        seconds(device, || x.reshard("[_]"))
    };
    cost.start = gather(2)?;
    let sent = growing(
        device,
        cost.start,
        &[1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 24],
        |n| 2.0 * n as f64,
        gather,
    )?;
    let (bandwidth, transfers) = rate_and_curve(&sent)?;
    cost.link = Link {
        latency: 0.0,
        bandwidth,
    };
    cost.transfers = transfers;
    Ok(cost)
}

//! Throughput of kernels on one device, and the host's cost of a small op.
//!
//! Prints one JSON object a line: `{"name": .., "us": .., "bytes": .., "flops": ..}`.
//! `benches/peers/` runs this and the peer in one go and prints the ratios:
//!
//! ```text
//! cargo bench --bench kernels --features cuda -- cuda:0
//! python3 benches/peers/torch_gpu.py target/release/deps/kernels-*
//! python3 benches/peers/numpy_cpu.py target/release/deps/kernels-*
//! ```

use anymesh::{
    DType, Device, Result, Tensor,
    ops::{NormOptions, Rng},
};
use std::time::Instant;

/// Median time of one call in microseconds, over batches that end in a sync.
fn time(device: &Device, batch: usize, mut f: impl FnMut() -> Result<()>) -> Result<f64> {
    for _ in 0..batch.min(5) {
        f()?;
    }
    device.sync()?;
    let mut samples = Vec::new();
    for _ in 0..9 {
        let start = Instant::now();
        for _ in 0..batch {
            f()?;
        }
        device.sync()?;
        samples.push(start.elapsed().as_secs_f64() * 1e6 / batch as f64);
    }
    samples.sort_by(f64::total_cmp);
    Ok(samples[samples.len() / 2])
}

struct Bench<'a> {
    device: &'a Device,
    batch: usize,
    filter: Option<&'a str>,
}

impl Bench<'_> {
    fn run(
        &self,
        name: &str,
        bytes: usize,
        flops: f64,
        f: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        if self.filter.is_some_and(|text| !name.contains(text)) {
            return Ok(());
        }
        let us = time(self.device, self.batch, f)?;
        println!(
            "{{\"name\": \"{name}\", \"us\": {us:.3}, \"bytes\": {bytes}, \"flops\": {flops}}}"
        );
        Ok(())
    }

    fn kernels(&self, n: usize, dtype: DType) -> Result<()> {
        let rng = Rng::new(1);
        let normal = |shape: &[usize], stream| {
            Tensor::normal(
                shape,
                0.0,
                1.0,
                DType::F32,
                self.device,
                Rng { stream, ..rng },
            )?
            .cast(dtype)
        };
        let (x, y) = (normal(&[n, n], 0)?, normal(&[n, n], 1)?);
        let (w, b) = (normal(&[n], 2)?, normal(&[n], 3)?);
        let size = n * n * dtype.size();
        let name = |op: &str| format!("{op} {dtype} {n}x{n}");
        let nothing = |_: Tensor| ();
        self.run(&name("copy"), 2 * size, 0.0, || {
            x.t()?.t()?.mul(1.0).map(nothing)
        })?;
        self.run(&name("add"), 3 * size, 0.0, || (&x + &y).map(nothing))?;
        self.run(&name("gelu"), 2 * size, 0.0, || x.gelu().map(nothing))?;
        self.run(&name("exp"), 2 * size, 0.0, || x.exp().map(nothing))?;
        self.run(&name("sum last"), size, 0.0, || {
            x.sum(&[1], false).map(nothing)
        })?;
        self.run(&name("sum first"), size, 0.0, || {
            x.sum(&[0], false).map(nothing)
        })?;
        self.run(&name("sum all"), size, 0.0, || {
            x.sum(&[], false).map(nothing)
        })?;
        self.run(&name("amax last"), size, 0.0, || {
            x.amax(&[1], false).map(nothing)
        })?;
        self.run(&name("softmax"), 2 * size, 0.0, || {
            x.softmax(-1).map(nothing)
        })?;
        self.run(&name("layer_norm"), 2 * size, 0.0, || {
            x.layer_norm(&NormOptions::new().weight(&w).bias(&b))
                .map(nothing)
        })?;
        self.run(&name("rms_norm"), 2 * size, 0.0, || {
            x.rms_norm(&NormOptions::new().weight(&w)).map(nothing)
        })?;
        self.run(&name("transpose copy"), 2 * size, 0.0, || {
            x.t()?.contiguous().map(nothing)
        })
    }

    fn matmul(&self, n: usize, dtype: DType) -> Result<()> {
        let normal = |stream| {
            Tensor::normal(
                [n, n],
                0.0,
                1.0,
                DType::F32,
                self.device,
                Rng { seed: 1, stream },
            )?
            .cast(dtype)
        };
        let (a, b) = (normal(0)?, normal(1)?);
        self.run(
            &format!("matmul {dtype} {n}"),
            0,
            2.0 * (n as f64).powi(3),
            || a.matmul(&b).map(|_| ()),
        )
    }

    /// Products of groups of rows, as experts have them: forward, and the gradients of rows and of
    /// matrices.
    fn grouped(&self, [groups, n, k, m]: [usize; 4], dtype: DType) -> Result<()> {
        let normal = |shape: &[usize], stream| {
            let rng = Rng { seed: 1, stream };
            Tensor::normal(shape, 0.0, 1.0, DType::F32, self.device, rng)?.cast(dtype)
        };
        let name = |what: &str| format!("{what} {dtype} {groups}x{n}x{k}x{m}");
        let names = ["grouped", "grouped dx", "grouped dw"].map(name);
        if let Some(text) = self.filter
            && !names.iter().any(|name| name.contains(text))
        {
            return Ok(());
        }
        // Groups of unequal sizes, the same as in the peer's script.
        let sizes = (0..groups).scan(0, |sum, g| {
            *sum += 8 + g * 37 % 16;
            Some(*sum)
        });
        let sums: Vec<usize> = sizes.collect();
        let all = sums.last().copied().unwrap_or(1);
        let ends: Vec<i32> = sums.iter().map(|sum| (n * sum / all) as i32).collect();
        let ends = Tensor::from_slice(&ends, [groups], self.device)?;
        let (x, w, y) = (
            normal(&[n, k], 0)?,
            normal(&[groups, m, k], 1)?,
            normal(&[n, m], 2)?,
        );
        let turned = w.transpose(1, 2)?;
        let flops = 2.0 * (n * k * m) as f64;
        self.run(&names[0], 0, flops, || {
            x.grouped_matmul(&turned, &ends).map(|_| ())
        })?;
        self.run(&names[1], 0, flops, || {
            y.grouped_matmul(&w, &ends).map(|_| ())
        })?;
        self.run(&names[2], 0, flops, || {
            y.grouped_outer(&x, &ends).map(|_| ())
        })
    }

    /// What a call costs the host: a tiny op, queued without waiting.
    fn overhead(&self) -> Result<()> {
        let x = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0], [4], self.device)?;
        for _ in 0..100 {
            x.exp()?;
        }
        self.device.sync()?;
        let mut samples = Vec::new();
        for _ in 0..9 {
            let start = Instant::now();
            for _ in 0..200 {
                let _ = &x + &x;
            }
            samples.push(start.elapsed().as_secs_f64() * 1e6 / 200.0);
            self.device.sync()?;
        }
        samples.sort_by(f64::total_cmp);
        println!(
            "{{\"name\": \"host cost of a small add\", \"us\": {:.3}, \"bytes\": 0, \"flops\": 0}}",
            samples[4]
        );
        Ok(())
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with("--"))
        .collect();
    let device = anymesh::device(arguments.first().map_or("cpu", String::as_str))?;
    let filter = arguments.get(1).map(String::as_str);
    let gpu = device.name() != "cpu";
    eprintln!("{device}: {}", device.backend().capabilities().description);
    let bench = Bench {
        device: &device,
        batch: if gpu { 100 } else { 5 },
        filter,
    };
    bench.overhead()?;
    if gpu {
        bench.kernels(4096, DType::F32)?;
        bench.kernels(8192, DType::BF16)?;
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            bench.matmul(4096, dtype)?;
        }
        bench.matmul(8192, DType::BF16)?;
        for sizes in [
            [8, 16384, 4096, 14336],
            [8, 4096, 4096, 14336],
            [32, 16384, 7168, 2048],
            [64, 32768, 2048, 1408],
            [64, 8192, 2048, 1408],
            [128, 65536, 2048, 768],
            [128, 16384, 2048, 768],
        ] {
            bench.grouped(sizes, DType::BF16)?;
        }
        Ok(())
    } else {
        bench.matmul(1024, DType::F32)?;
        let x = Tensor::normal([1 << 24], 0.0, 1.0, DType::F32, &device, Rng::new(1))?;
        let y = Tensor::normal([1 << 24], 0.0, 1.0, DType::F32, &device, Rng::new(2))?;
        bench.run("add f32 2^24", 3 * (4 << 24), 0.0, || (&x + &y).map(|_| ()))?;
        bench.run("exp f32 2^24", 2 * (4 << 24), 0.0, || x.exp().map(|_| ()))?;
        bench.run("sum f32 2^24", 4 << 24, 0.0, || {
            x.sum(&[], false).map(|_| ())
        })
    }
}

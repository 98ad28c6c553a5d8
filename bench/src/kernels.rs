//! Kernels by themselves: how long ops take on one device, and what a small one costs the host.

mod rows;

use anymesh_core::{DType, Device, Tensor, ops::Rng};
use serde::{Deserialize, Serialize};
use std::{cell::RefCell, time::Instant};

use crate::Result;

/// How long one op took.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The op, its dtype and its sizes, such as `add bf16 8192x8192`: what peers know it by.
    pub name: String,
    /// The median time of a call, in microseconds.
    pub us: f64,
    /// How much of that the host took at least, until the call was queued.
    #[serde(default)]
    pub host_us: f64,
    /// Bytes that it must at least read and write; 0 where that is not what bounds it.
    pub bytes: usize,
    /// Its multiplications and additions; 0 where these are not what bounds it.
    pub flops: f64,
}

impl Row {
    /// GB/s or TFLOP/s, of whichever bounds it.
    pub fn rate(&self) -> Option<String> {
        match (self.bytes, self.flops) {
            (0, flops) if flops > 0.0 => Some(format!("{:.1} TFLOP/s", flops / self.us / 1e6)),
            (0, _) => None,
            (bytes, _) => Some(format!("{:.0} GB/s", bytes as f64 / self.us / 1e3)),
        }
    }
}

/// One JSON object.
impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Numbers and texts always have a form in JSON.
        f.write_str(&serde_json::to_string(self).unwrap_or_default())
    }
}

/// Which sizes are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// Those that fill a GPU.
    Gpu,
    /// Those that a few cores do in some ms.
    Cpu,
    /// Everything once, to see that it runs.
    Tiny,
}

impl Sizes {
    /// Those that fit a device.
    pub fn of(device: &Device) -> Self {
        match device.name() == "cpu" {
            true => Self::Cpu,
            false => Self::Gpu,
        }
    }
}

/// The name of the row that says what an op costs the host.
pub const HOST_COST: &str = "host cost of a small add";

/// Measures every row whose name has `filter` in it, and shows each to `seen` when it is done. Kernels
/// are launched one by one, also on a device that would put them off.
///
/// ```
/// use anymesh_bench::kernels::{Sizes, measure};
/// # let device = anymesh_backend_cpu::device();
/// let mut rows = vec![];
/// measure(&device, Sizes::Tiny, Some("softmax"), &mut |row| rows.push(row))?;
/// assert_eq!(rows[0].name, "softmax f32 16x16");
/// # Ok::<(), anymesh_bench::Error>(())
/// ```
pub fn measure(
    device: &Device,
    sizes: Sizes,
    filter: Option<&str>,
    seen: &mut dyn FnMut(Row),
) -> Result<()> {
    let (batch, samples) = match sizes {
        Sizes::Gpu => (100, 9),
        Sizes::Cpu => (5, 9),
        Sizes::Tiny => (1, 1),
    };
    let mut bench = Bench {
        device: device.innermost(),
        sizes,
        batch,
        samples,
        filter,
        names: None,
        seen,
    };
    bench.host_cost()?;
    bench.all()
}

/// The names of all rows.
pub fn names(device: &Device, sizes: Sizes) -> Result<Vec<String>> {
    let mut bench = Bench {
        device,
        sizes,
        batch: 0,
        samples: 0,
        filter: None,
        names: Some(RefCell::default()),
        seen: &mut |_| (),
    };
    bench.host_cost()?;
    bench.all()?;
    Ok(bench.names.take().unwrap_or_default().into_inner())
}

/// How many GB/s a device reads and writes when it copies: what bounds rows that have bytes.
pub fn copy_rate(device: &Device, sizes: Sizes) -> Result<f64> {
    let n = match sizes {
        Sizes::Gpu => 1 << 27,
        Sizes::Cpu => 1 << 24,
        Sizes::Tiny => 64,
    };
    let device = device.innermost();
    let x = Tensor::normal([n], 0.0, 1.0, DType::F32, device, Rng::new(1))?;
    let copy = || -> Result<f64> {
        let start = Instant::now();
        x.mul(1.0)?;
        device.sync()?;
        Ok(8e-9 * n as f64 / start.elapsed().as_secs_f64())
    };
    copy()?;
    let rates = (0..9).map(|_| copy()).collect::<Result<Vec<f64>>>()?;
    Ok(median(rates))
}

struct Bench<'a> {
    device: &'a Device,
    sizes: Sizes,
    /// Calls before each sync.
    batch: usize,
    samples: usize,
    filter: Option<&'a str>,
    /// Where names go instead of being measured.
    names: Option<RefCell<Vec<String>>>,
    seen: &'a mut dyn FnMut(Row),
}

impl Bench<'_> {
    /// Whether any of these rows is asked for.
    fn wants<S: AsRef<str>>(&self, names: &[S]) -> bool {
        let names_of = || names.iter().map(|name| name.as_ref().to_string());
        if let Some(list) = &self.names {
            list.borrow_mut().extend(names_of());
            return false;
        }
        let filter = self.filter.unwrap_or("");
        names.iter().any(|name| name.as_ref().contains(filter))
    }

    fn tell(&mut self, name: &str, [us, host_us]: [f64; 2], bytes: usize, flops: f64) {
        (self.seen)(Row {
            name: name.into(),
            us,
            host_us,
            bytes,
            flops,
        });
    }

    /// Measures a row, if it is asked for.
    fn row(
        &mut self,
        name: &str,
        bytes: usize,
        flops: f64,
        f: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        if self.wants(&[name]) {
            let us = self.time(self.batch, f)?;
            self.tell(name, us, bytes, flops);
        }
        Ok(())
    }

    /// [`row`](Self::row) of something large: fewer calls before each sync.
    fn long_row(
        &mut self,
        name: &str,
        bytes: usize,
        flops: f64,
        f: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let batch = self.batch;
        self.batch = batch.div_ceil(5);
        let done = self.row(name, bytes, flops, f);
        self.batch = batch;
        done
    }

    /// Median time of one call in microseconds, over batches that end in a sync, and the least time
    /// until one is queued.
    fn time(&self, batch: usize, mut f: impl FnMut() -> Result<()>) -> Result<[f64; 2]> {
        for _ in 0..batch.min(5) {
            f()?;
        }
        self.device.sync()?;
        let (mut samples, mut host) = (Vec::with_capacity(self.samples), f64::INFINITY);
        let us = |start: Instant| start.elapsed().as_secs_f64() * 1e6 / batch as f64;
        for _ in 0..self.samples {
            let start = Instant::now();
            for _ in 0..batch {
                f()?;
            }
            host = host.min(us(start));
            self.device.sync()?;
            samples.push(us(start));
        }
        Ok([median(samples), host])
    }

    /// What a call costs the host: a tiny op, queued without waiting.
    fn host_cost(&mut self) -> Result<()> {
        if !self.wants(&[HOST_COST]) {
            return Ok(());
        }
        let x = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0], [4], self.device)?;
        let calls = match self.sizes {
            Sizes::Tiny => 1,
            _ => 200,
        };
        for _ in 0..calls {
            x.exp()?;
        }
        self.device.sync()?;
        let mut samples = Vec::new();
        for _ in 0..self.samples {
            let start = Instant::now();
            for _ in 0..calls {
                (&x + &x)?;
            }
            samples.push(start.elapsed().as_secs_f64() * 1e6 / calls as f64);
            self.device.sync()?;
        }
        let us = median(samples);
        self.tell(HOST_COST, [us, us], 0, 0.0);
        Ok(())
    }

    /// Numbers of a normal distribution.
    fn normal(&self, shape: &[usize], dtype: DType, stream: u32) -> Result<Tensor> {
        let rng = Rng { seed: 1, stream };
        Ok(Tensor::normal(shape, 0.0, 1.0, DType::F32, self.device, rng)?.cast(dtype)?)
    }
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples.get(samples.len() / 2).copied().unwrap_or(f64::NAN)
}

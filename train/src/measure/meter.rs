//! A device without values that prices its kernels, and what was sent beside them.

use crate::Result;
use anymesh_core::{DType, Device, backend::Kernel, meta, spmd::Ledger};
use anymesh_simulate::{Bytes, Machine, Spent};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Kernels of an op, or what was sent for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Amount {
    /// Launches, or messages.
    pub count: f64,
    /// Additions and multiplications of products.
    pub operations: f64,
    /// Bytes that kernels touch, or that a rank receives.
    pub bytes: f64,
    /// Seconds on the machine, if nothing hid them.
    pub seconds: f64,
}

impl Amount {
    pub(crate) fn plus(self, other: Amount, times: f64) -> Amount {
        Amount {
            count: self.count + times * other.count,
            operations: self.operations + times * other.operations,
            bytes: self.bytes + times * other.bytes,
            seconds: self.seconds + times * other.seconds,
        }
    }
}

/// Who did what: an op's kernels, or a kind of communication along axes on its behalf.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Item {
    /// The op.
    pub op: String,
    /// `kernel`, `products`, or what was sent, such as `all-gather`.
    pub kind: String,
    /// The axes that it was sent along; none for kernels and between stages.
    pub axes: String,
}

/// What was done, by who did it.
pub(crate) type Items = BTreeMap<Item, Amount>;

/// What a part of a step did.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counted {
    pub(crate) items: Items,
    /// Seconds: products, traffic, and communication as if nothing hid it.
    pub(crate) spent: Spent,
    pub(crate) bytes: Bytes,
    pub(crate) operations: f64,
    /// Bytes in use before and after it, and at most.
    pub(crate) before: f64,
    pub(crate) after: f64,
    pub(crate) peak: f64,
    /// The op that ran when most was in use.
    pub(crate) op: &'static str,
}

#[derive(Default)]
struct Log {
    kernels: BTreeMap<(&'static str, bool), Amount>,
    most: u64,
    op: &'static str,
}

/// A device that counts for one rank.
pub(crate) struct Meter {
    device: Device,
    machine: Machine,
    /// Names, sizes, and how far apart neighbours are.
    axes: Vec<(String, usize, usize)>,
    log: Arc<Mutex<Log>>,
    /// The device itself, for whoever launches on it.
    own: Arc<Mutex<Option<Device>>>,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a GPU reaches at most in products of a dtype: data sheets have half of bf16 for f32 on
/// tensor cores, and about a sixteenth for f64.
fn peak(machine: &Machine, dtype: DType) -> f64 {
    match dtype.size() {
        1 => machine.fp8,
        2 => machine.bf16,
        4 => machine.bf16 / 2.0,
        _ => machine.bf16 / 16.0,
    }
}

impl Meter {
    pub(crate) fn new(machine: &Machine, axes: &[(String, usize)]) -> Meter {
        let log: Arc<Mutex<Log>> = Arc::default();
        let own: Arc<Mutex<Option<Device>>> = Arc::default();
        let (seen, prices, this) = (log.clone(), machine.clone(), own.clone());
        let device = meta().decorated(move |backend, kernel| {
            let (op, work) = (kernel.op(), kernel.work());
            let flash = matches!(kernel, Kernel::Attention(_) | Kernel::AttentionBackward(_));
            let multiplies = work.products > 0.0;
            let c = &prices.coefficients;
            let share = if flash { c.flash } else { c.products };
            let seconds = match multiplies {
                true => prices.product(work.products, work.bytes, peak(&prices, work.dtype), share),
                false => prices.traffic(work.bytes),
            };
            let made = kernel.outputs().into_iter();
            let made: usize = made.map(|(d, shape)| shape.numel() * d.size()).sum();
            let held = lock(&this).as_ref().map_or(0, |d| d.memory().in_use) + made as u64;
            let mut log = lock(&seen);
            if held > log.most {
                (log.most, log.op) = (held, op);
            }
            let amount = Amount {
                count: 1.0,
                operations: work.products,
                bytes: work.bytes,
                seconds,
            };
            let all = log.kernels.entry((op, multiplies)).or_default();
            *all = all.plus(amount, 1.0);
            drop(log);
            backend.launch(kernel)
        });
        *lock(&own) = Some(device.clone());
        let apart = |at: usize| axes[at + 1..].iter().map(|a| a.1).product();
        Meter {
            device,
            machine: machine.clone(),
            axes: (axes.iter().enumerate())
                .map(|(at, (name, size))| (name.clone(), *size, apart(at)))
                .collect(),
            log,
            own,
        }
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Runs something, and counts what it does.
    pub(crate) fn count<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<(T, Counted)> {
        *lock(&self.log) = Log::default();
        self.device.reset_peak();
        let before = self.device.memory().in_use as f64;
        let (result, ledger) = Ledger::record(f);
        let result = result?;
        let memory = self.device.memory();
        let log = std::mem::take(&mut *lock(&self.log));
        let mut counted = Counted {
            before,
            after: memory.in_use as f64,
            peak: memory.peak as f64,
            op: log.op,
            ..Counted::default()
        };
        for ((op, multiplies), amount) in log.kernels {
            let item = Item {
                op: op.into(),
                kind: if multiplies { "products" } else { "kernel" }.into(),
                axes: String::new(),
            };
            match multiplies {
                true => counted.spent.products += amount.seconds,
                false => counted.spent.traffic += amount.seconds,
            }
            counted.operations += amount.operations;
            counted.items.insert(item, amount);
        }
        for entry in &ledger.entries {
            let bytes = entry.bytes as f64;
            let seconds = self.seconds(&entry.axes, bytes);
            let item = Item {
                op: entry.op.into(),
                kind: entry.kind.into(),
                axes: entry.axes.join(" "),
            };
            let amount = Amount {
                count: 1.0,
                operations: 0.0,
                bytes,
                seconds,
            };
            let all = counted.items.entry(item).or_default();
            *all = all.plus(amount, 1.0);
            let (spent, sum) = (&mut counted.spent, &mut counted.bytes);
            match column(&entry.axes) {
                "pp" => sum.pp += bytes,
                "tp" => (spent.tp, sum.tp) = (spent.tp + seconds, sum.tp + bytes),
                "cp" => (spent.cp, sum.cp) = (spent.cp + seconds, sum.cp + bytes),
                "ep" => (spent.ep, sum.ep) = (spent.ep + seconds, sum.ep + bytes),
                _ => (spent.dp, sum.dp) = (spent.dp + seconds, sum.dp + bytes),
            }
        }
        Ok((result, counted))
    }

    /// Seconds of what a rank receives along axes, or from a stage to another.
    pub(crate) fn seconds(&self, axes: &[String], bytes: f64) -> f64 {
        let of = |name: &str| self.axes.iter().find(|a| a.0 == name);
        if axes.is_empty() {
            return of("pp").map_or(0.0, |(_, n, apart)| {
                self.machine.transfer(bytes, *apart, *n)
            });
        }
        let group = axes.iter().filter_map(|name| of(name));
        let size = group.clone().map(|a| a.1).product();
        let stride = group.map(|a| a.2).min().unwrap_or(1);
        self.machine.collective(bytes, stride, size)
    }
}

/// Devices hold what they launch with: here that is the device itself.
impl Drop for Meter {
    fn drop(&mut self) {
        *lock(&self.own) = None;
    }
}

/// Which axis something along several counts for: what reaches farthest.
fn column(axes: &[String]) -> &'static str {
    let has = |name: &str| axes.iter().any(|a| a == name);
    match axes.len() {
        0 => "pp",
        _ if has("dp") => "dp",
        _ => ["cp", "ep", "tp", "pp"]
            .into_iter()
            .find(|name| has(name))
            .unwrap_or("dp"),
    }
}

//! What a step would take, from running it without values.

use crate::{
    DType, Mesh, Result,
    backend::Work,
    meta,
    spmd::{Entry, Ledger},
};
use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use super::CostModel;

/// What one op costs over a whole step: on one rank, under the cost model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OpEstimate {
    /// Launches.
    pub kernels: u64,
    /// Additions and multiplications of products.
    pub products: f64,
    /// Bytes that kernels read and write.
    pub touched: f64,
    /// Seconds of its kernels.
    pub compute: f64,
    /// Bytes that the worst rank receives on its behalf.
    pub received: u64,
    /// Seconds of that.
    pub communication: f64,
}

impl OpEstimate {
    fn add(&mut self, other: &OpEstimate) {
        self.kernels += other.kernels;
        self.products += other.products;
        self.touched += other.touched;
        self.compute += other.compute;
        self.received += other.received;
        self.communication += other.communication;
    }
}

/// What a step costs one rank: time under a cost model, and memory. It prints as a table.
#[derive(Clone, Debug)]
pub struct Estimate {
    /// The model.
    pub cost: CostModel,
    /// Everything together.
    pub total: OpEstimate,
    /// By the name of the op.
    pub by_op: BTreeMap<&'static str, OpEstimate>,
    /// What was communicated, step by step.
    pub ledger: Ledger,
    /// The most bytes that the rank held at any time, with what it held at the end.
    pub memory: u64,
}

/// What `step` costs a rank of `mesh`, under the mesh's cost model.
///
/// The step runs once on a mesh with the same axes and no memory, which it gets; it makes its
/// tensors there. Kernels and memory are those of the last rank, which stands for all on a device
/// without values: it holds the largest parts of what does not divide evenly.
///
/// ```
/// # use anymesh_core::{DType, Mesh, Tensor, cost::{CostModel, estimate}, meta};
/// let mesh = Mesh::new("dp=2, tp=8", &meta())?.with_cost(CostModel::preset("h100")?);
/// let estimate = estimate(&mesh, |mesh| {
///     let x = Tensor::zeros([8192, 8192], DType::BF16, (mesh, "[@dp, _]"))?;
///     let w = Tensor::zeros([8192, 8192], DType::BF16, (mesh, "[@dp, @tp]"))?;
///     x.matmul(&w)
/// })?;
/// assert_eq!(estimate.total.products, 2.0 * 4096.0 * 8192.0 * 1024.0);
/// assert_eq!(estimate.total.received, 4096 * 1024 * 2, "the other half of the weight");
/// // Parameters can be gathered while something else is computed.
/// let hidden = |entry: &anymesh_core::spmd::Entry| entry.axes == ["dp"];
/// assert!(estimate.exposed(hidden) < estimate.total.communication);
/// # Ok::<(), anymesh_core::Error>(())
/// ```
pub fn estimate<T>(mesh: &Mesh, step: impl FnOnce(&Mesh) -> Result<T>) -> Result<Estimate> {
    let cost = mesh.cost().clone();
    cost.check()?;
    let counts: Arc<Mutex<BTreeMap<&'static str, OpEstimate>>> = Arc::default();
    let (seen, prices) = (counts.clone(), cost.clone());
    let counted = meta().decorated(move |backend, kernel| {
        let (op, work) = (kernel.op(), kernel.work());
        let launch = OpEstimate {
            kernels: 1,
            products: work.products,
            touched: work.bytes,
            compute: prices.seconds_of(&work),
            ..OpEstimate::default()
        };
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.entry(op).or_default().add(&launch);
        drop(seen);
        backend.launch(kernel)
    });
    let mesh = if mesh.is_single() {
        Mesh::single(&counted)
    } else {
        mesh.on(&counted)?
    };
    let (result, ledger) = Ledger::record(|| step(&mesh));
    drop(result?);
    let mut by_op = std::mem::take(&mut *counts.lock().unwrap_or_else(PoisonError::into_inner));
    for entry in &ledger.entries {
        by_op.entry(entry.op).or_default().add(&OpEstimate {
            received: entry.bytes,
            communication: entry.modelled,
            ..OpEstimate::default()
        });
    }
    let mut total = OpEstimate::default();
    by_op.values().for_each(|op| total.add(op));
    Ok(Estimate {
        cost,
        total,
        by_op,
        ledger,
        memory: counted.memory().peak,
    })
}

impl CostModel {
    /// Seconds of a kernel: its launch, and the longest of what it multiplies, computes and
    /// touches. What is no product computes in f32, or in f64.
    pub fn seconds_of(&self, work: &Work) -> f64 {
        let plain = match work.dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let seconds = self.kernel_seconds(work.dtype, work.products, work.bytes);
        seconds.max(self.device.launch + work.scalars / self.rate(plain))
    }
}

impl Estimate {
    /// Seconds where nothing overlaps: every step waits for the one before it.
    pub fn seconds(&self) -> f64 {
        self.total.compute + self.total.communication
    }

    /// Seconds of communication that computing does not hide, where what `hidden` says may run
    /// at the same time.
    pub fn exposed(&self, hidden: impl Fn(&Entry) -> bool) -> f64 {
        let under: f64 = (self.ledger.entries.iter())
            .filter(|entry| hidden(entry))
            .map(|entry| entry.modelled)
            .sum();
        let together = self.cost.overlapped(self.total.compute, under);
        (self.total.communication - under).max(0.0) + together - self.total.compute
    }

    /// As JSON, in seconds and bytes.
    pub fn to_json(&self) -> serde_json::Value {
        let op = |o: &OpEstimate| {
            serde_json::json!({
                "kernels": o.kernels, "products": o.products, "touched_bytes": o.touched, "compute_seconds": o.compute,
                "recv_bytes": o.received, "communication_seconds": o.communication,
            })
        };
        serde_json::json!({
            "cost": self.cost.name, "seconds": self.seconds(), "peak_bytes": self.memory, "total": op(&self.total),
            "ops": self.by_op.iter().map(|(name, o)| (name.to_string(), op(o))).collect::<serde_json::Map<_, _>>(),
        })
    }
}

/// Ops by what they take, longest first.
impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ops: Vec<_> = self.by_op.iter().collect();
        let time = |o: &OpEstimate| o.compute + o.communication;
        ops.sort_by(|a, b| time(b.1).total_cmp(&time(a.1)));
        writeln!(
            f,
            "{:24} {:>8} {:>12} {:>12} {:>12} {:>14} {:>12}",
            "op", "kernels", "TFLOP", "MB touched", "compute ms", "MB received", "waits ms"
        )?;
        let total = (&"total", &self.total);
        for (name, o) in ops.into_iter().chain([total]) {
            writeln!(
                f,
                "{name:24} {:>8} {:>12.3} {:>12.1} {:>12.3} {:>14.1} {:>12.3}",
                o.kernels,
                o.products / 1e12,
                o.touched / 1e6,
                o.compute * 1e3,
                o.received as f64 / 1e6,
                o.communication * 1e3
            )?;
        }
        write!(
            f,
            "{:.3} ms on {}, at most {:.1} MB held",
            self.seconds() * 1e3,
            self.cost.name,
            self.memory as f64 / 1e6
        )
    }
}

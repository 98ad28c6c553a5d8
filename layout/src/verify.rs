//! The closed form held against the model itself, run without values.

use crate::{Candidate, Received, Search};
use anymesh_core::{
    Result,
    cost::{Estimate, estimate},
    meta,
    spmd::Ledger,
};
use std::fmt;

/// What the closed form says of a micro-batch, and what the model did.
#[derive(Clone, Debug)]
pub struct Check {
    /// The closed form's bytes by axis.
    pub closed: Received,
    /// The ledger's.
    pub ledger: Received,
    /// Seconds of computing of the closed form.
    pub compute: f64,
    /// Bytes of parameters, gradients and activations of the closed form, without an optimizer.
    pub memory: f64,
    /// The model's step, counted.
    pub run: Estimate,
}

impl Search<'_> {
    /// Runs the model's step for one micro-batch as a candidate lays it out, on a mesh without values,
    /// and counts.
    pub fn verify(&self, candidate: &Candidate) -> Result<Check> {
        let layout = &candidate.layout;
        let mesh = layout.mesh(&meta())?.with_cost(self.cost.clone());
        let sequences = self.sequences / layout.microbatches;
        let run = estimate(&mesh, |mesh| self.model.step(mesh, layout, sequences))?;
        let price = &candidate.price;
        let mut closed = price.received;
        if layout.recompute {
            closed.tp += price.received_again;
        }
        let size = self.model.dtype().size() as f64;
        let gradients_and_parameters = 2.0 * size * price.parameters;
        Ok(Check {
            closed,
            ledger: by_axis(&run.ledger),
            compute: candidate.compute / layout.microbatches as f64,
            memory: candidate.memory - candidate.state + gradients_and_parameters,
            run,
        })
    }
}

/// Bytes by axis; what goes along several counts for the innermost.
fn by_axis(ledger: &Ledger) -> Received {
    let mut received = Received::default();
    for entry in &ledger.entries {
        let along = |axis: &str| entry.axes.iter().any(|a| a == axis);
        let bytes = entry.bytes as f64;
        match () {
            () if along("tp") => received.tp += bytes,
            () if along("fsdp") => received.fsdp += bytes,
            () => received.dp += bytes,
        }
    }
    received
}

impl Check {
    /// The larger of the two for the axis on which ledger and closed form differ most, over the
    /// smaller; 1 where they agree.
    pub fn ratio(&self) -> f64 {
        let pairs = [
            (self.closed.tp, self.ledger.tp),
            (self.closed.fsdp, self.ledger.fsdp),
            (self.closed.dp, self.ledger.dp),
        ];
        let ratio = |(a, b): (f64, f64)| match a == b {
            true => 1.0,
            false => a.max(b) / a.min(b).max(1.0),
        };
        pairs.map(ratio).into_iter().fold(1.0, f64::max)
    }
}

impl Check {
    /// As JSON, in bytes and seconds.
    pub fn to_json(&self) -> serde_json::Value {
        let received = |r: &Received| serde_json::json!({"tp": r.tp, "fsdp": r.fsdp, "dp": r.dp});
        serde_json::json!({
            "closed": {"recv_bytes": received(&self.closed), "compute_seconds": self.compute, "memory_bytes": self.memory},
            "run": {"recv_bytes": received(&self.ledger), "compute_seconds": self.run.total.compute, "memory_bytes": self.run.memory},
        })
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:24} {:>14} {:>14} {:>7}",
            "a micro-batch", "closed form", "run", "ratio"
        )?;
        let mut row = |name: &str, closed: f64, run: f64| {
            let ratio = if closed == run { 1.0 } else { run / closed };
            writeln!(f, "{name:24} {closed:>14.3} {run:>14.3} {ratio:>7.3}")
        };
        row("MB along tp", self.closed.tp / 1e6, self.ledger.tp / 1e6)?;
        row(
            "MB along fsdp",
            self.closed.fsdp / 1e6,
            self.ledger.fsdp / 1e6,
        )?;
        row("MB along dp", self.closed.dp / 1e6, self.ledger.dp / 1e6)?;
        row(
            "ms of computing",
            self.compute * 1e3,
            self.run.total.compute * 1e3,
        )?;
        row(
            "GB held, no optimizer",
            self.memory / 1e9,
            self.run.memory as f64 / 1e9,
        )
    }
}

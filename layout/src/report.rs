//! The result of a search as a table.

use crate::{Candidate, Layout};
use anymesh_core::cost::CostModel;
use std::fmt;

/// All candidates, fastest first; those that do not fit into memory come last. It prints as a table
/// with the reason why each is not the best.
#[derive(Clone, Debug)]
pub struct Report {
    /// The machine.
    pub cost: CostModel,
    /// Ranks of the mesh.
    pub ranks: usize,
    /// Sequences of a step.
    pub sequences: usize,
    /// Tokens of a sequence.
    pub length: usize,
    /// In order.
    pub candidates: Vec<Candidate>,
}

/// Rows of each kind that a table shows.
const SHOWN: usize = 12;

impl Report {
    /// The fastest that fits.
    pub fn best(&self) -> Option<&Candidate> {
        self.candidates.first().filter(|c| c.fits)
    }

    /// The best of each mesh and stream that differ: fastest first, then those that do not fit.
    pub fn of_each_kind(&self) -> Vec<&Candidate> {
        let mut seen: Vec<(&[(String, usize)], String)> = vec![];
        let mut found = vec![];
        for candidate in &self.candidates {
            let kind = (
                candidate.layout.mesh.as_slice(),
                candidate.layout.stream.to_string(),
            );
            if !seen.contains(&kind) {
                seen.push(kind);
                found.push(candidate);
            }
        }
        found
    }

    /// Why a candidate is not the best, in numbers.
    pub fn why(&self, candidate: &Candidate) -> String {
        let gb = |bytes: f64| format!("{:.1} GB", bytes / 1e9);
        if !candidate.fits {
            let there = self.cost.device.memory.unwrap_or(u64::MAX) as f64;
            let rest = candidate.memory - candidate.state;
            return format!(
                "needs {} ({} of state, {} of activations) of {}",
                gb(candidate.memory),
                gb(candidate.state),
                gb(rest),
                gb(there)
            );
        }
        let Some(best) = self.best().filter(|best| *best != candidate) else {
            return "the fastest that fits".into();
        };
        let (compute, exposed) = (
            candidate.compute - best.compute,
            candidate.exposed - best.exposed,
        );
        let slower = (candidate.seconds / best.seconds - 1.0) * 100.0;
        let sign = |seconds: f64| format!("{:+.1} ms", seconds * 1e3);
        format!(
            "{slower:.1}% slower: {} computing, {} waiting",
            sign(compute),
            sign(exposed)
        )
    }

    /// As JSON: a list of objects.
    pub fn to_json(&self) -> serde_json::Value {
        self.candidates
            .iter()
            .map(|c| {
                let r = &c.price.received;
                serde_json::json!({
                    "layout": c.layout.to_string(), "seconds": c.seconds, "compute_seconds": c.compute,
                    "exposed_seconds": c.exposed, "memory_bytes": c.memory, "state_bytes": c.state, "fits": c.fits,
                    "recv_bytes": {"tp": r.tp, "fsdp": r.fsdp, "dp": r.dp}, "why": self.why(c),
                })
            })
            .collect()
    }
}

impl Layout {
    /// The mesh and what is done on it, in a few words.
    pub fn summary(&self) -> String {
        let axis = |(name, size): &(String, usize)| format!("{name}={size}");
        let mut words: Vec<String> = self.mesh.iter().map(axis).collect();
        if self.stream.to_string().contains("@tp") {
            words.push("stream@tp".into());
        }
        if self.microbatches > 1 {
            words.push(format!("micro={}", self.microbatches));
        }
        if self.recompute {
            words.push("recompute".into());
        }
        words.join(" ")
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} ranks of {}, {} sequences of {} tokens a step; {} layouts",
            self.ranks,
            self.cost.name,
            self.sequences,
            self.length,
            self.candidates.len()
        )?;
        let kinds = self.of_each_kind();
        let (fit, rest): (Vec<_>, Vec<_>) = kinds.into_iter().partition(|c| c.fits);
        let shown: Vec<&Candidate> = (fit.iter().take(SHOWN))
            .chain(rest.iter().take(SHOWN / 2))
            .copied()
            .collect();
        let names = shown.iter().map(|c| c.layout.summary());
        let width = names.map(|n| n.len()).max().unwrap_or(0).max(6);
        writeln!(
            f,
            "{:width$}  {:>10}  {:>10}  {:>10}  {:>10}  {:>9}  {:>9}  why",
            "layout", "memory GB", "compute ms", "waits ms", "step ms", "MB tp", "MB fsdp,dp"
        )?;
        for c in shown {
            let received = &c.price.received;
            let m = c.layout.microbatches as f64;
            writeln!(
                f,
                "{:width$}  {:>10.1}  {:>10.1}  {:>10.1}  {:>10.1}  {:>9.0}  {:>9.0}  {}",
                c.layout.summary(),
                c.memory / 1e9,
                c.compute * 1e3,
                c.exposed * 1e3,
                c.seconds * 1e3,
                m * received.tp / 1e6,
                (m * received.fsdp + received.dp) / 1e6,
                self.why(c)
            )?;
        }
        match self.best() {
            Some(best) => write!(f, "\n{}", best.layout),
            None => write!(f, "\nnothing fits: take more ranks or shorter sequences"),
        }
    }
}

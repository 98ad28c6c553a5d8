//! What a sweep found, and how much of what there is it looked at.

use super::Options;
use std::{
    fmt::{Display, Formatter},
    time::Duration,
};

/// The cases of one op.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coverage {
    /// The op.
    pub op: String,
    /// Cases that ran.
    pub cases: u64,
    /// Cases there are: the ways in which the operands of each sample can lie on each mesh.
    pub possible: u64,
}

/// What a sweep found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// How many cases of each op ran, by name.
    pub ops: Vec<Coverage>,
    /// Cases whose gradients were compared too.
    pub gradients: u64,
    /// How many cases went wrong.
    pub failed: u64,
    /// What went wrong, the first few of each op.
    pub failures: Vec<String>,
    /// Samples that the device says it cannot run, once for each mesh.
    pub unsupported: u64,
    /// The [seed](super::Options::seed) by which cases were chosen.
    pub seed: u64,
    /// From beginning to end.
    pub time: Duration,
}

impl Report {
    /// What a sweep that could not begin found.
    pub(super) fn failed(options: &Options, failure: String) -> Self {
        Self {
            seed: options.seed,
            failed: 1,
            failures: vec![failure],
            ..Self::default()
        }
    }

    /// Panics with the report if something was wrong or nothing ran.
    #[track_caller]
    pub fn assert_right(&self) {
        assert!(self.failed == 0 && self.cases() > 0, "{self}");
    }

    /// Cases that ran.
    pub fn cases(&self) -> u64 {
        self.ops.iter().map(|op| op.cases).sum()
    }

    /// Cases there are.
    pub fn possible(&self) -> u64 {
        self.ops
            .iter()
            .fold(0, |sum, op| sum.saturating_add(op.possible))
    }

    /// What another thread found, added to this.
    pub(super) fn join(&mut self, other: Report) {
        self.ops.extend(other.ops);
        self.gradients += other.gradients;
        self.failed += other.failed;
        self.unsupported += other.unsupported;
        self.failures.extend(other.failures);
    }

    /// A line for each op: cases that ran, cases there are, and their share.
    pub fn coverage(&self) -> impl Display + '_ {
        CoverageTable(self)
    }
}

struct CoverageTable<'a>(&'a Report);

impl Display for CoverageTable<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "{:<28} {:>12} {:>18} {:>10}",
            "op", "cases", "possible", "share"
        )?;
        let mut line = |op: &str, cases: u64, possible: u64| {
            writeln!(
                f,
                "{op:<28} {cases:>12} {possible:>18} {:>10}",
                share(cases, possible)
            )
        };
        for op in &self.0.ops {
            line(&op.op, op.cases, op.possible)?;
        }
        line("all", self.0.cases(), self.0.possible())
    }
}

/// A part of a whole in percent, never rounded up to all of it.
fn share(part: u64, whole: u64) -> String {
    if part == whole {
        return "100 %".into();
    }
    let percent = (100.0 * part as f64 / whole as f64).min(99.99);
    if percent < 0.01 {
        "< 0.01 %".into()
    } else {
        format!("{percent:.2} %")
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let (cases, possible, seconds) = (self.cases(), self.possible(), self.time.as_secs_f64());
        write!(
            f,
            "{} ops, {cases} of {possible} cases ({}), seed {}, {} of them with gradients, {} wrong, {seconds:.1} s, {:.0} cases/s",
            self.ops.len(),
            share(cases, possible),
            self.seed,
            self.gradients,
            self.failed,
            cases as f64 / seconds.max(1e-9)
        )?;
        self.failures
            .iter()
            .try_for_each(|failure| write!(f, "\n{failure}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_says_all_only_of_all() {
        assert_eq!(share(7, 7), "100 %");
        assert_eq!(share(999_999, 1_000_000), "99.99 %");
        assert_eq!(share(1, 4), "25.00 %");
        assert_eq!(share(1, u64::MAX), "< 0.01 %");
    }
}

//! Plans for people.

use super::{PlannedStep, StepPlan, Totals};
use std::fmt::{Display, Formatter, Result};

/// A time in the unit that suits it.
fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.1} us", s * 1e6),
    }
}

impl Display for Totals {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let Totals {
            bytes,
            seconds,
            memory,
        } = self;
        write!(
            f,
            "{bytes} bytes received by the worst rank, {}, {memory} bytes held at most",
            time(*seconds)
        )
    }
}

/// A line: what the step takes and does.
impl Display for PlannedStep {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let takes = match self.bytes {
            0 => "-".to_string(),
            bytes => format!("{bytes} B {}", time(self.seconds)),
        };
        write!(f, "{takes:>24}  {:>14} B  {:<16}", self.memory, self.op)?;
        let mut before = "";
        for (from, to) in self.operands.iter().zip(&self.targets) {
            match from == to {
                true => write!(f, "{before}{from}")?,
                false => write!(f, "{before}{from} -> {to}")?,
            }
            before = ", ";
        }
        if !self.results.is_empty() {
            write!(f, " => {}", self.results.join(", "))?;
        }
        if !self.choice.is_empty() {
            write!(f, "  ({})", self.choice)?;
        }
        for (operand, _, until) in self.holds() {
            write!(f, "  [operand {operand} held until {until}]")?;
        }
        write!(f, "  {}", self.caller)
    }
}

/// A table, one line for each step: what it receives and how long that takes, what a rank holds
/// after it, the op, its operands and where they go, its results, the choice, the line.
impl Display for StepPlan {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        for (number, step) in self.steps.iter().enumerate() {
            writeln!(f, "{number:>5}  {step}")?;
        }
        writeln!(f, "{} steps: {}", self.steps.len(), self.totals)?;
        write!(f, "without a plan: {}", self.eager)
    }
}

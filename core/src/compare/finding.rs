//! What a comparison found, as data, text and JSON.

use super::{Difference, Given, Reproduction};
use serde_json::{Value, json};
use std::fmt;

/// One of the two runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    /// The first, which says what is right.
    A,
    /// The second.
    B,
}

/// Why an op is named.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Why {
    /// It gave other values in the second run.
    Values(Difference),
    /// It only moves values, and they were others before: `a` is what went in.
    Moved(Difference),
    /// Ranks that should have the same value do not.
    Ranks(Difference),
    /// The bits are others; more is not known, because the first run left hashes only.
    Bits,
    /// The result has another dtype or shape.
    Type,
    /// The other run never came here: the programs are not the same.
    NotInOther,
}

/// An op at which two runs part.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// The run in which it was seen.
    pub run: Run,
    /// The op.
    pub op: String,
    /// The op that the program called, where that is made of several.
    pub within: Option<String>,
    /// Which of its values.
    pub given: Given,
    /// The line that called it.
    pub caller: String,
    /// How many calls of the op from that line were before this one.
    pub nth: u32,
    /// The types of what it read: of its operands, or of the gradients of its results.
    pub operands: Vec<String>,
    /// The type of the value in this run.
    pub ty: String,
    /// The type of the value in the other run, where there is one.
    pub other: Option<String>,
    /// Why it is named.
    pub why: Why,
}

/// What two runs of a program gave.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Where the first ran.
    pub a: String,
    /// Where the second ran.
    pub b: String,
    /// How many values were compared.
    pub values: usize,
    /// How many values could not be, because they are on other processes or on a device without
    /// values.
    pub unread: usize,
    /// Where they part, in the order of the second run. The first is the cause; those after it may
    /// follow from it, unless the runs went in step.
    pub findings: Vec<Finding>,
    /// The first of them with its operands, where that was asked for.
    pub reproduction: Option<Reproduction>,
}

impl Comparison {
    /// Whether nothing was found.
    pub fn is_same(&self) -> bool {
        self.findings.is_empty()
    }

    /// The first op at which the runs part.
    pub fn first(&self) -> Option<&Finding> {
        self.findings.first()
    }

    /// As JSON: an object.
    pub fn to_json(&self) -> Value {
        let findings: Vec<Value> = self.findings.iter().map(Finding::to_json).collect();
        json!({
            "a": self.a, "b": self.b, "same": self.is_same(), "values": self.values, "unread": self.unread, "findings": findings,
        })
    }
}

/// What happened in a sentence, and each finding.
impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { a, b, values, .. } = self;
        if self.is_same() {
            write!(f, "{a} and {b} agree in all {values} values")?;
        }
        for (i, finding) in self.findings.iter().enumerate() {
            if i > 0 {
                writeln!(f)?;
            }
            finding.write(f, a, b)?;
        }
        if !self.is_same() {
            write!(f, "\n  {values} values before it are the same")?;
            if self.findings.len() > 1 {
                write!(f, " or were found too")?;
            }
        }
        if self.unread > 0 {
            write!(f, "\n  {} values could not be read here", self.unread)?;
        }
        Ok(())
    }
}

/// A number as short as it can be told from others.
struct Number(f64);

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let magnitude = self.0.abs();
        if magnitude == 0.0 || !magnitude.is_finite() || (1e-4..1e7).contains(&magnitude) {
            write!(f, "{}", self.0 as f32)
        } else {
            write!(f, "{:e}", self.0 as f32)
        }
    }
}

/// A number for JSON, which has no infinities.
fn number(x: f64) -> Value {
    match x.is_finite() {
        true => json!(x),
        false => json!(x.to_string()),
    }
}

impl Finding {
    /// The op and which of its values, in words: `matmul`, `gradient of operand 1 of matmul`.
    pub fn what(&self) -> String {
        let op = match &self.within {
            Some(within) => format!("{} within {within}", self.op),
            None => self.op.clone(),
        };
        match self.given {
            Given::Result(0) => op,
            Given::Result(i) => format!("result {i} of {op}"),
            Given::Gradient(i) => format!("the gradient of operand {i} of {op}"),
            Given::Sum(i) => format!("the sum of the gradients of result {i} of {op}"),
            Given::Total => "the gradient of the parameter".into(),
        }
    }

    /// As JSON: an object.
    pub fn to_json(&self) -> Value {
        let (why, difference) = match &self.why {
            Why::Values(d) => ("values", Some(d)),
            Why::Moved(d) => ("moved", Some(d)),
            Why::Ranks(d) => ("ranks", Some(d)),
            Why::Bits => ("bits", None),
            Why::Type => ("type", None),
            Why::NotInOther => ("not_in_other", None),
        };
        let (given, index) = match self.given {
            Given::Result(i) => ("result", Some(i)),
            Given::Gradient(i) => ("gradient", Some(i)),
            Given::Sum(i) => ("sum", Some(i)),
            Given::Total => ("total", None),
        };
        let difference = difference.map(|d| {
            json!({
                "largest": number(d.largest), "allowed": number(d.allowed), "index": d.index, "a": number(d.a), "b": number(d.b), "rank": d.rank, "wrong": d.wrong, "of": d.of,
            })
        });
        json!({
            "run": match self.run { Run::A => "a", Run::B => "b" },
            "op": self.op, "within": self.within, "given": given, "number": index, "caller": self.caller, "nth": self.nth, "operands": self.operands, "type": self.ty, "other_type": self.other, "why": why, "difference": difference,
        })
    }

    fn write(&self, f: &mut fmt::Formatter<'_>, a: &str, b: &str) -> fmt::Result {
        let (here, other) = match self.run {
            Run::A => (a, b),
            Run::B => (b, a),
        };
        // Of two places with one name.
        let (first, second) = match a == b {
            true => (format!("{a} (A)"), format!("{b} (B)")),
            false => (a.to_string(), b.to_string()),
        };
        let what = self.what();
        let line = match (self.given, self.nth) {
            (Given::Total, n) => format!("made at {} (number {} there)", self.caller, n + 1),
            (_, 0) => format!("at {}", self.caller),
            (_, n) => format!("at {} (call {} from there)", self.caller, n + 1),
        };
        let outcome = match &self.why {
            Why::Values(_) => format!("differs between {first} and {second}"),
            Why::Moved(_) => format!("changed the value that it moved on {here}"),
            Why::Ranks(_) => format!("is not the same on the ranks of {here}"),
            Why::Bits => format!("has other bits on {second} than were recorded on {first}"),
            Why::Type => format!("has another type on {second} than on {first}"),
            Why::NotInOther => format!("is in the run on {here} only, not in that on {other}"),
        };
        write!(f, "{what} {line}\n  {outcome}")?;
        let from = match self.operands.is_empty() {
            true => String::new(),
            false => format!(", from {}", self.operands.join(", ")),
        };
        write!(f, "\n  it is {}{from}", self.ty)?;
        if let Some(other) = self.other.as_ref().filter(|other| **other != self.ty) {
            write!(
                f,
                "\n  on {other_place} it is {other}",
                other_place = match self.run {
                    Run::A => &second,
                    Run::B => &first,
                }
            )?;
        }
        let (Why::Values(d) | Why::Moved(d) | Why::Ranks(d)) = &self.why else {
            return Ok(());
        };
        let (before, after) = match self.why {
            Why::Values(_) => (first.as_str(), second.as_str()),
            Why::Moved(_) => ("before", "after"),
            _ => ("another rank", "this rank"),
        };
        write!(
            f,
            "\n  largest difference {} at {:?}: {} {on}{before}, {} {on}{after} (rank {}); {} is allowed",
            Number(d.largest),
            d.index,
            Number(d.a),
            Number(d.b),
            d.rank,
            Number(d.allowed),
            on = if matches!(self.why, Why::Moved(_)) {
                ""
            } else {
                "on "
            },
        )?;
        write!(f, "\n  {} of {} elements differ", d.wrong, d.of)
    }
}

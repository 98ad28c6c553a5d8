//! What is known about an op beside its code: above all by which rule it runs on a mesh.
//!
//! A rule exists once. [`Call`](super::Call) takes an [`OpInfo`], so what runs stands in a table;
//! and `core/tests/sharding/rules.rs` runs every op on meshes and holds the table against what it saw, so
//! what stands in the table runs.

use super::rule::{Operands, Rule};
use crate::{Result, Shape};
use std::fmt;

/// An op: its name and how it runs on a mesh.
#[derive(Clone, Copy, Debug)]
pub struct OpInfo {
    /// The name of the method or function.
    pub name: &'static str,
    /// The sharding rule.
    pub rule: RuleForm,
    /// Which others it runs on a mesh, by name: before and after its own step, as its decomposition
    /// where a factor marked `stats` is cut, or instead of a step of its own.
    pub runs: &'static [&'static str],
    /// Why it has no gradient, if it has none.
    pub no_gradient: Option<&'static str>,
}

/// Where the rule of an op comes from.
#[derive(Clone, Copy, Debug)]
pub enum RuleForm {
    /// This text, in the notation of [`rule`](super::rule).
    Text(&'static str),
    /// One of these texts; the call says which.
    Variants(&'static [&'static str]),
    /// A function makes it from the operands and from numbers that are part of the call.
    Built(Built),
    /// There is none: on a mesh the op runs as others.
    Composed,
    /// There is none: nothing comes in, and every rank computes its part from where it lies.
    Creates,
}

/// A function that makes rules.
#[derive(Clone, Copy, Debug)]
pub struct Built {
    /// Its name.
    pub name: &'static str,
    pub(super) build: Build,
}

/// Functions that capture nothing: what a rule depends on is in their arguments, and the arguments
/// are what a solved call is known by.
#[derive(Clone, Copy, Debug)]
pub(super) enum Build {
    /// From the operands' ranks and dimensions of size 1.
    Ranks(fn(&Operands<'_>, &[i64]) -> Result<Rule>),
    /// From the operands' shapes.
    Sizes(fn(&[&Shape], &[i64]) -> Result<Rule>),
}

impl RuleForm {
    /// A rule that depends on the operands' ranks, on which of their dimensions have size 1, and on
    /// the numbers that the call gives. The function names factors; their sizes are filled in.
    pub(crate) const fn built(
        name: &'static str,
        build: fn(&Operands<'_>, &[i64]) -> Result<Rule>,
    ) -> Self {
        RuleForm::Built(Built {
            name,
            build: Build::Ranks(build),
        })
    }

    /// A rule that depends on the operands' shapes and on the numbers that the call gives.
    pub(crate) const fn built_of_sizes(
        name: &'static str,
        build: fn(&[&Shape], &[i64]) -> Result<Rule>,
    ) -> Self {
        RuleForm::Built(Built {
            name,
            build: Build::Sizes(build),
        })
    }

    /// Its texts; none where a function makes the rule, or there is no rule.
    pub fn texts(&self) -> &[&'static str] {
        match self {
            RuleForm::Text(text) => std::slice::from_ref(text),
            RuleForm::Variants(texts) => texts,
            RuleForm::Built(_) | RuleForm::Composed | RuleForm::Creates => &[],
        }
    }
}

impl OpInfo {
    pub(crate) const fn new(name: &'static str, rule: RuleForm) -> Self {
        Self {
            name,
            rule,
            runs: &[],
            no_gradient: None,
        }
    }

    /// An op that runs as others.
    pub(crate) const fn composed(name: &'static str, runs: &'static [&'static str]) -> Self {
        Self::new(name, RuleForm::Composed).runs(runs)
    }

    /// With what it runs beside its own step.
    pub(crate) const fn runs(self, runs: &'static [&'static str]) -> Self {
        Self { runs, ..self }
    }

    /// With the reason why it has no gradient.
    pub(crate) const fn without_gradient(self, why: &'static str) -> Self {
        Self {
            no_gradient: Some(why),
            ..self
        }
    }

    /// The same for an op of another name.
    pub(crate) const fn named(self, name: &'static str) -> Self {
        Self { name, ..self }
    }
}

/// The rule as a table shows it.
impl fmt::Display for OpInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rule {
            RuleForm::Text(text) => f.write_str(text)?,
            RuleForm::Variants(texts) => f.write_str(&texts.join("  |  "))?,
            RuleForm::Built(built) => write!(f, "made for the operands ({})", built.name)?,
            RuleForm::Composed => {}
            RuleForm::Creates => f.write_str("has no operand: each rank computes its part")?,
        }
        match (self.rule, self.runs) {
            (_, []) => Ok(()),
            (RuleForm::Composed, runs) => write!(f, "runs as {}", runs.join(", ")),
            (_, runs) => write!(f, "  (also runs {})", runs.join(", ")),
        }
    }
}

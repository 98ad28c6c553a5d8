//! A mapping: its statements, read from text and expanded.

use super::expand::Macro;
use super::names::Names;
use super::parse::parse;
use super::program::Program;
use super::statement::Statement;
use crate::Result;
use std::sync::Arc;

/// Statements as they were written.
#[derive(Clone, Debug, Default)]
pub struct Mapping {
    /// In their order.
    pub statements: Vec<Arc<Statement>>,
}

impl Mapping {
    /// Reads a text, a statement on each line. A line that ends in `,`, `->` or `=` goes on in the
    /// next.
    pub fn parse(text: &str) -> Result<Self> {
        parse(text, None).map(|statements| Self { statements })
    }

    /// Reads a list of statements; errors count them as lines.
    pub fn from_lines<T: AsRef<str>>(lines: impl IntoIterator<Item = T>) -> Result<Self> {
        let mut statements = Vec::new();
        for (index, line) in lines.into_iter().enumerate() {
            statements.extend(parse(line.as_ref(), Some(index + 1))?);
        }
        Ok(Self { statements })
    }

    /// Expands all macros over the names of both sides.
    pub fn expand(&self, names: &Names) -> Result<Program> {
        let mut statements = self.statements.clone();
        for step in Macro::ORDER {
            statements = step.apply(&statements, names)?;
        }
        Program::new(&statements)
    }
}

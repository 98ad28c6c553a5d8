//! A statement as data, and where it came from.

use super::token::in_name;
use crate::Error;
use anymesh_core::DType;
use std::fmt::{self, Display};
use std::sync::Arc;

/// The words that are macros.
pub(super) const WORDS: [&str; 3] = ["fused_qkv", "fused_qkv_old", "fused_ffn"];

/// More names than this in one statement are a typing mistake.
pub(super) const MOST_NAMES: u64 = 1 << 16;

/// Characters of a statement that a trace shows.
const LONGEST_LINE: usize = 2000;

/// A tensor as a statement names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Var {
    /// The name, with macros in it until they are expanded; `_` is no tensor.
    pub name: String,
    /// The numbers of `NAME[first:end]`.
    pub range: Option<(u64, u64)>,
    /// Whether `^T` follows.
    pub transpose: bool,
    /// Whether it was written in quotes, so that nothing in it is a macro.
    pub quoted: bool,
}

impl Var {
    /// A name that is meant as it stands.
    pub(super) fn plain(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            range: None,
            transpose: false,
            quoted: false,
        }
    }

    /// A name that is meant as it stands, in quotes where it would say something else.
    pub(super) fn exact(name: impl Into<String>) -> Self {
        let name = name.into();
        Self {
            quoted: name == "_" || name.contains(['$', '*']) || WORDS.contains(&name.as_str()),
            ..Self::plain(name)
        }
    }

    /// How many names it stands for, as far as a range says; a range that is too long has an error
    /// of its own.
    pub(super) fn count(&self) -> u64 {
        self.range
            .map_or(1, |(first, end)| end.saturating_sub(first).min(MOST_NAMES))
    }

    /// The same under another name.
    pub(super) fn named(&self, name: String) -> Self {
        Self {
            name,
            ..self.clone()
        }
    }

    /// Whether this is `_`, the tensor that is none.
    pub fn is_none(&self) -> bool {
        self.name == "_" && !self.quoted
    }
}

impl Display for Var {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&quote(&self.name, self.quoted))?;
        if let Some((first, end)) = self.range {
            write!(f, "[{first}:{end}]")?;
        }
        f.write_str(if self.transpose { "^T" } else { "" })
    }
}

/// A name as the language reads it back.
fn quote(name: &str, always: bool) -> String {
    let number = name.bytes().all(|b| b.is_ascii_digit());
    let plain = !always
        && !number
        && !name.starts_with('-')
        && name.chars().all(|c| in_name(c) || c == '-');
    match plain {
        true => name.into(),
        false if name.contains('"') => format!("'{name}'"),
        false => format!("\"{name}\""),
    }
}

/// What an attribute is set to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// A number.
    Int(i64),
    /// Numbers: `"[1, 0]"`.
    List(Vec<i64>),
    /// An element type: `"bf16"` or `"bfloat16"`.
    DType(DType),
}

impl Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(i) => write!(f, "{i}"),
            Self::List(list) => write!(f, "\"{list:?}\""),
            Self::DType(dtype) => write!(f, "\"{dtype}\""),
        }
    }
}

/// What follows the names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attr {
    /// A macro's word, such as `fused_qkv`.
    Word(&'static str),
    /// `key=value`.
    Set(&'static str, Value),
}

impl Attr {
    /// `key=number`.
    pub(super) fn int(key: &'static str, value: usize) -> Self {
        Self::Set(key, Value::Int(value as i64))
    }
}

impl Display for Attr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Word(word) => f.write_str(word),
            Self::Set(key, value) => write!(f, "{key}={value}"),
        }
    }
}

/// One statement, as it was written or as a macro made it.
#[derive(Clone, Debug)]
pub struct Statement {
    /// What is read.
    pub left: Vec<Var>,
    /// What is written.
    pub right: Vec<Var>,
    /// How.
    pub attrs: Vec<Attr>,
    /// The user's line, from 1.
    pub line: usize,
    /// What made it of which statement; `None` for the user's own.
    pub from: Option<(&'static str, Arc<Statement>)>,
}

impl Statement {
    /// A statement that `by` makes of this one.
    pub(super) fn derive(
        self: &Arc<Self>,
        by: &'static str,
        left: Vec<Var>,
        right: Vec<Var>,
        attrs: Vec<Attr>,
    ) -> Arc<Self> {
        Arc::new(Self {
            left,
            right,
            attrs,
            line: self.line,
            from: Some((by, self.clone())),
        })
    }

    /// The statement of the user and what became of it, a line each.
    pub fn trace(&self) -> String {
        let mut chain = vec![];
        let mut at = self;
        while let Some((by, parent)) = &at.from {
            chain.push(shortened(format!("  by {by}: {at}")));
            at = parent;
        }
        chain.push(shortened(format!("  written: {at}")));
        chain.reverse();
        chain.join("\n")
    }

    /// How many names it has, those of ranges counted out.
    pub(super) fn names(&self) -> u64 {
        self.left
            .iter()
            .chain(&self.right)
            .fold(0, |sum, var| sum.saturating_add(var.count()))
    }

    /// An error about this statement.
    pub(super) fn error(&self, detail: impl Display) -> Error {
        Error::Mapping {
            line: self.line,
            detail: detail.to_string(),
            trace: self.trace(),
        }
    }

    /// The value of an attribute that is a number.
    pub(super) fn int(&self, key: &str) -> Option<i64> {
        self.attrs.iter().find_map(|attr| match attr {
            Attr::Set(k, Value::Int(i)) if *k == key => Some(*i),
            _ => None,
        })
    }
}

/// A line of a trace: a statement may have thousands of names.
fn shortened(mut line: String) -> String {
    if let Some((at, _)) = line.char_indices().nth(LONGEST_LINE) {
        line.truncate(at);
        line.push_str(" ...");
    }
    line
}

impl Display for Statement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |vars: &[Var]| {
            vars.iter()
                .map(Var::to_string)
                .collect::<Vec<_>>()
                .join(", ")
        };
        write!(f, "{} -> {}", list(&self.left), list(&self.right))?;
        self.attrs.iter().try_for_each(|attr| write!(f, ", {attr}"))
    }
}

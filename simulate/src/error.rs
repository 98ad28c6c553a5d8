//! What can be wrong with what was asked for.

use thiserror::Error;

/// Why there is no estimate.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum Error {
    /// A name that nothing has.
    #[error("there is no {what} {name:?}: there are {}", .known.join(", "))]
    Unknown {
        /// What was looked for.
        what: &'static str,
        /// Its name.
        name: String,
        /// What there is.
        known: Vec<String>,
    },
    /// A number that cannot be.
    #[error("{what} is {got}: {valid}")]
    Number {
        /// Which one.
        what: String,
        /// Its value.
        got: String,
        /// What would be valid.
        valid: String,
    },
    /// The axes do not make the ranks.
    #[error("dp {dp} * tp {tp} * pp {pp} * cp {cp} is {product} ranks, not {ranks}: {instead}")]
    Product {
        /// Data parallel ranks.
        dp: usize,
        /// Tensor parallel ranks.
        tp: usize,
        /// Pipeline ranks.
        pp: usize,
        /// Context parallel ranks.
        cp: usize,
        /// What they make.
        product: String,
        /// How many ranks there are.
        ranks: usize,
        /// The nearest that would do.
        instead: String,
    },
    /// Something does not divide.
    #[error("{count} {what} do not divide by {by} {divisor}: {}", near(.nearest, divisor))]
    Divide {
        /// What should be cut.
        what: String,
        /// How much of it there is.
        count: usize,
        /// By what.
        by: String,
        /// Its value.
        divisor: usize,
        /// The nearest values that would do, the smaller one first.
        nearest: Vec<usize>,
    },
    /// Settings that exclude each other.
    #[error("{what}: {instead}")]
    Conflict {
        /// What was asked for.
        what: String,
        /// What to do.
        instead: String,
    },
    /// The schedule does not exist for these numbers.
    #[error(transparent)]
    Schedule(#[from] anymesh_schedule::Error),
    /// A text or a value that is not what it should be.
    #[error("{what}: {detail}")]
    Parse {
        /// What was read.
        what: String,
        /// What is wrong.
        detail: String,
    },
    /// No layout fits into memory.
    #[error(
        "nothing fits: of {candidates} layouts the smallest needs {needs:.1} GiB of {has:.1} GiB ({layout}): {instead}"
    )]
    NothingFits {
        /// How many were tried.
        candidates: usize,
        /// What the smallest needs, in GiB.
        needs: f64,
        /// What there is, in GiB.
        has: f64,
        /// The smallest, as text.
        layout: String,
        /// What to do.
        instead: String,
    },
}

fn near(nearest: &[usize], divisor: &usize) -> String {
    let others: Vec<String> = (nearest.iter())
        .filter(|n| *n != divisor)
        .map(usize::to_string)
        .collect();
    match others.is_empty() {
        true => "nothing near it does".into(),
        false => format!("{} would do", others.join(" or ")),
    }
}

/// `Result` with this crate's [`enum@Error`].
pub type Result<T> = std::result::Result<T, Error>;

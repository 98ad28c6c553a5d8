//! What a source of data gives: samples, and the documents they are made of.

use crate::Result;
use std::{fmt, sync::Arc};

/// The label of a position that no loss is taken on.
pub const IGNORED: i32 = -100;

/// The document of positions that are padding.
pub const PADDING: i32 = -1;

/// A row of a batch, before it is padded: for each position a token, what is to be predicted
/// there, which document of the row it belongs to, and where in that it is. All four are equally
/// long.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// The tokens that the model reads.
    pub ids: Vec<i32>,
    /// The token that comes next, or [`IGNORED`].
    pub labels: Vec<i32>,
    /// Counts the documents of the row from zero.
    pub documents: Vec<i32>,
    /// Counts from zero in each document.
    pub positions: Vec<i32>,
}

impl Sample {
    /// Appends a piece of a document: its tokens, what comes after each of them, and a document
    /// number of its own.
    pub(crate) fn push(&mut self, ids: &[u32], labels: impl Iterator<Item = Option<u32>>) {
        let document = self.documents.last().map_or(0, |d| d + 1);
        self.ids.extend(ids.iter().map(|t| *t as i32));
        let label = |t: Option<u32>| t.map_or(IGNORED, |t| t as i32);
        self.labels.extend(labels.map(label));
        self.documents.extend(ids.iter().map(|_| document));
        self.positions.extend(0..ids.len() as i32);
        debug_assert_eq!(self.ids.len(), self.labels.len());
    }

    /// How many positions have a label.
    pub fn valid(&self) -> usize {
        self.labels.iter().filter(|l| **l != IGNORED).count()
    }
}

/// Samples by number: whoever asks for the same number gets the same sample, in any order and from
/// any thread.
pub trait Source: fmt::Debug + Send + Sync {
    /// How many samples there are.
    fn count(&self) -> u64;

    /// The positions of the longest sample: the length of a batch's rows.
    fn length(&self) -> usize;

    /// One of the samples.
    fn sample(&self, index: u64) -> Result<Sample>;

    /// Whether rows have several documents or padding, so that a model must be told which
    /// positions belong together.
    fn has_documents(&self) -> bool;
}

impl<S: Source + ?Sized> Source for Arc<S> {
    fn count(&self) -> u64 {
        (**self).count()
    }

    fn length(&self) -> usize {
        (**self).length()
    }

    fn sample(&self, index: u64) -> Result<Sample> {
        (**self).sample(index)
    }

    fn has_documents(&self) -> bool {
        (**self).has_documents()
    }
}

/// A text as tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Document {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// How many of the first tokens are given and not to be learned: a prompt.
    pub prompt: usize,
    /// What the whole document is, where it is to be classified.
    pub class: Option<u32>,
}

impl Document {
    /// A document all of which is to be learned.
    pub fn new(tokens: impl Into<Vec<u32>>) -> Self {
        Self {
            tokens: tokens.into(),
            ..Self::default()
        }
    }

    /// What is to be predicted at each of `len` positions from `start`: the tokens after them, as
    /// far as there are any and they are not given.
    pub(crate) fn labels(
        &self,
        start: usize,
        len: usize,
    ) -> impl Iterator<Item = Option<u32>> + '_ {
        (start + 1..=start + len).map(|next| match next < self.prompt {
            true => None,
            false => self.tokens.get(next).copied(),
        })
    }
}

/// Documents by number, from any thread.
pub trait Documents: fmt::Debug + Send + Sync {
    /// How many there are.
    fn count(&self) -> u64;

    /// One of them.
    fn document(&self, index: u64) -> Result<Document>;

    /// How many tokens one of them has.
    fn length(&self, index: u64) -> Result<u64> {
        Ok(self.document(index)?.tokens.len() as u64)
    }

    /// What they are made from, in words: files with sizes and times, the tokenizer, settings. An
    /// index built for other words is built again.
    fn describe(&self) -> String;
}

impl<D: Documents + ?Sized> Documents for Arc<D> {
    fn count(&self) -> u64 {
        (**self).count()
    }

    fn document(&self, index: u64) -> Result<Document> {
        (**self).document(index)
    }

    fn length(&self, index: u64) -> Result<u64> {
        (**self).length(index)
    }

    fn describe(&self) -> String {
        (**self).describe()
    }
}

/// One long row of tokens, read at any place, from any thread.
pub trait Tokens: fmt::Debug + Send + Sync {
    /// How many tokens there are.
    fn total(&self) -> u64;

    /// `len` tokens from `start`, and where among them documents begin (not counting the first,
    /// where a document may begin or not).
    fn read(&self, start: u64, len: usize) -> Result<(Vec<u32>, Vec<usize>)>;

    /// Whether it is known where documents begin.
    fn has_documents(&self) -> bool;
}

impl<T: Tokens + ?Sized> Tokens for Arc<T> {
    fn total(&self) -> u64 {
        (**self).total()
    }

    fn read(&self, start: u64, len: usize) -> Result<(Vec<u32>, Vec<usize>)> {
        (**self).read(start, len)
    }

    fn has_documents(&self) -> bool {
        (**self).has_documents()
    }
}

/// Several lots of documents, one after the other: a data set that comes in many files.
#[derive(Clone, Debug)]
pub struct Joined {
    parts: Vec<Arc<dyn Documents>>,
    /// How many documents there are up to and with each part.
    ends: Vec<u64>,
}

impl Joined {
    /// In this order.
    pub fn new(parts: Vec<Arc<dyn Documents>>) -> Self {
        let mut end = 0;
        let ends = parts.iter().map(|part| {
            end += part.count();
            end
        });
        Self {
            ends: ends.collect(),
            parts,
        }
    }

    /// The part that has a document, and which of its documents that is.
    fn of(&self, index: u64) -> Result<(&dyn Documents, u64)> {
        let part = self.ends.partition_point(|end| *end <= index);
        match self.parts.get(part) {
            Some(found) => {
                let before = if part == 0 { 0 } else { self.ends[part - 1] };
                Ok((&**found, index - before))
            }
            None => Err(no_such("document", index, self.count())),
        }
    }
}

impl Documents for Joined {
    fn count(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    fn document(&self, index: u64) -> Result<Document> {
        let (part, index) = self.of(index)?;
        part.document(index)
    }

    fn length(&self, index: u64) -> Result<u64> {
        let (part, index) = self.of(index)?;
        part.length(index)
    }

    fn describe(&self) -> String {
        let parts: Vec<String> = self.parts.iter().map(|p| p.describe()).collect();
        parts.join("; ")
    }
}

/// What is answered to a number beyond the last.
pub(crate) fn no_such(what: &str, index: u64, count: u64) -> crate::Error {
    crate::Error::config(
        "data",
        format!("there is no {what} {index}: there are {count}"),
    )
}

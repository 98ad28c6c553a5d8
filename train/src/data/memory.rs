//! Documents in memory: for small data, and for tests.

use super::{Document, Documents, Tokens, file::hash, sample::no_such};
use crate::Result;

/// Documents that are all in memory. They can be read one by one, and as one long row of tokens.
///
/// ```
/// # use anymesh_train::data::{Documents, Memory, Tokenizer};
/// let tokenizer = Tokenizer::bytes();
/// let documents = Memory::texts(["to be", "or not"], &tokenizer)?;
/// assert_eq!(documents.count(), 2);
/// assert_eq!(documents.document(0)?.tokens, [116, 111, 32, 98, 101, 256]);
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Memory {
    documents: Vec<Document>,
    /// How many tokens there are up to and with each document.
    ends: Vec<u64>,
}

impl Memory {
    /// These documents.
    pub fn new(documents: impl IntoIterator<Item = Document>) -> Self {
        let documents: Vec<Document> = documents.into_iter().collect();
        let mut end = 0;
        let ends = documents.iter().map(|d| {
            end += d.tokens.len() as u64;
            end
        });
        Self {
            ends: ends.collect(),
            documents,
        }
    }

    /// Texts, each a document that ends with the tokenizer's end of text.
    pub fn texts<T: AsRef<str>>(
        texts: impl IntoIterator<Item = T>,
        tokenizer: &super::Tokenizer,
    ) -> Result<Self> {
        let document = |text: T| -> Result<Document> {
            let mut tokens = tokenizer.encode(text.as_ref())?;
            tokens.extend(tokenizer.special().eos);
            Ok(Document::new(tokens))
        };
        let documents: Result<Vec<_>> = texts.into_iter().map(document).collect();
        Ok(Self::new(documents?))
    }
}

impl Documents for Memory {
    fn count(&self) -> u64 {
        self.documents.len() as u64
    }

    fn document(&self, index: u64) -> Result<Document> {
        let document = usize::try_from(index)
            .ok()
            .and_then(|i| self.documents.get(i));
        document
            .cloned()
            .ok_or_else(|| no_such("document", index, self.count()))
    }

    fn describe(&self) -> String {
        let bytes: Vec<u8> = self
            .documents
            .iter()
            .flat_map(|d| {
                let class = d.class.map_or(u64::MAX, u64::from);
                let head = [d.tokens.len() as u64, d.prompt as u64, class];
                let tokens = d.tokens.iter().map(|t| u64::from(*t));
                head.into_iter().chain(tokens).flat_map(u64::to_le_bytes)
            })
            .collect();
        format!(
            "{} documents in memory, {:016x}",
            self.documents.len(),
            hash(&bytes)
        )
    }
}

impl Tokens for Memory {
    fn total(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    fn read(&self, start: u64, len: usize) -> Result<(Vec<u32>, Vec<usize>)> {
        let all = self.total();
        if start.checked_add(len as u64).is_none_or(|end| end > all) {
            return Err(no_such("token", start.saturating_add(len as u64), all));
        }
        let (mut tokens, mut borders) = (Vec::with_capacity(len), vec![]);
        let first = self.ends.partition_point(|end| *end <= start);
        for (document, end) in self.documents.iter().zip(&self.ends).skip(first) {
            if tokens.len() == len {
                break;
            }
            let begin = end - document.tokens.len() as u64;
            if begin > start && !document.tokens.is_empty() {
                borders.push(tokens.len());
            }
            let skip = start.saturating_sub(begin) as usize;
            let wanted = len - tokens.len();
            tokens.extend(document.tokens[skip..].iter().take(wanted));
        }
        Ok((tokens, borders))
    }

    fn has_documents(&self) -> bool {
        true
    }
}

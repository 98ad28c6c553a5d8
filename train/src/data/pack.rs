//! Rows of one length from documents of any.
//!
//! | | rows | needs |
//! |---|---|---|
//! | [`Concat`] | cut from one long row of tokens: no padding, documents are cut where a row ends | nothing |
//! | [`FirstFit`](super::FirstFit) | whole documents, as many as fit: only those longer than a row are cut | an index, built once |
//! | [`Each`] | a document each: padding | nothing |

use super::{Documents, IGNORED, Sample, Source, Tokens, sample::no_such};
use crate::{Error, Result};

/// Rows cut from one long row of tokens, one after the other. What is to be predicted in a row's
/// last position is the first token of the next, so that each token but the first is predicted
/// exactly once; not where a document begins, which nothing before it tells.
///
/// ```
/// # use anymesh_train::data::{Concat, Document, Memory, Source};
/// let tokens = Memory::new([Document::new([10, 11, 12]), Document::new([20, 21, 22, 23])]);
/// let rows = Concat::new(tokens, 4)?;
/// assert_eq!(rows.count(), 2);
/// let row = rows.sample(0)?;
/// assert_eq!(row.ids, [10, 11, 12, 20]);
/// assert_eq!(row.labels, [11, 12, -100, 21]);
/// assert_eq!(row.documents, [0, 0, 0, 1]);
/// assert_eq!(row.positions, [0, 1, 2, 0]);
/// assert_eq!(rows.sample(1)?.ids, [21, 22]);
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Debug)]
pub struct Concat<T> {
    tokens: T,
    length: usize,
}

impl<T: Tokens> Concat<T> {
    /// Rows of `length` tokens.
    pub fn new(tokens: T, length: usize) -> Result<Self> {
        check_length(length)?;
        if tokens.total() < 2 {
            let detail = format!(
                "there are {} tokens: one to read and one to predict are needed",
                tokens.total()
            );
            return Err(Error::config("data", detail));
        }
        Ok(Self { tokens, length })
    }
}

impl<T: Tokens> Source for Concat<T> {
    fn count(&self) -> u64 {
        // The last token is only predicted.
        (self.tokens.total() - 1).div_ceil(self.length as u64)
    }

    fn length(&self) -> usize {
        self.length
    }

    fn sample(&self, index: u64) -> Result<Sample> {
        if index >= self.count() {
            return Err(no_such("sample", index, self.count()));
        }
        let start = index * self.length as u64;
        let left = self.tokens.total() - 1 - start;
        let len = left.min(self.length as u64) as usize;
        let (tokens, borders) = self.tokens.read(start, len + 1)?;
        let mut sample = Sample::default();
        let mut begin = 0;
        let inside = borders.into_iter().filter(|b| (1..=len).contains(b));
        for end in inside.chain([len + 1]) {
            // The document goes on to `end`; the row ends before its last token. Borders ascend,
            // unless the file that they come from changed meanwhile.
            let stop = end.min(len).max(begin);
            let next = |i: usize| (i + 1 < end).then(|| tokens[i + 1]);
            sample.push(&tokens[begin..stop], (begin..stop).map(next));
            begin = stop;
        }
        Ok(sample)
    }

    fn has_documents(&self) -> bool {
        self.tokens.has_documents()
    }
}

/// A document a row; what is longer than a row is cut off.
///
/// For documents with a prompt only what follows it has labels; for those with a class, the class
/// is the label of the first position, and no other has one.
#[derive(Debug)]
pub struct Each<D> {
    documents: D,
    length: usize,
}

impl<D: Documents> Each<D> {
    /// Rows of at most `length` tokens.
    pub fn new(documents: D, length: usize) -> Result<Self> {
        check_length(length)?;
        if documents.count() == 0 {
            return Err(Error::config("data", "there are no documents"));
        }
        Ok(Self { documents, length })
    }
}

impl<D: Documents> Source for Each<D> {
    fn count(&self) -> u64 {
        self.documents.count()
    }

    fn length(&self) -> usize {
        self.length
    }

    fn sample(&self, index: u64) -> Result<Sample> {
        let document = self.documents.document(index)?;
        let len = document.tokens.len().min(self.length);
        let mut sample = Sample::default();
        sample.push(&document.tokens[..len], document.labels(0, len));
        if let Some(class) = document.class {
            sample.labels.fill(IGNORED);
            if let Some(first) = sample.labels.first_mut() {
                *first = class as i32;
            }
        }
        Ok(sample)
    }

    fn has_documents(&self) -> bool {
        true
    }
}

pub(crate) fn check_length(length: usize) -> Result<()> {
    match (1..=i32::MAX as usize).contains(&length) {
        true => Ok(()),
        false => Err(Error::config(
            "data.length",
            format!("rows of {length} tokens: 1 to 2^31-1 will do"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Document, Memory, TokenFile, TokenType, tests::Folder};

    /// Documents with tokens that are all different.
    fn documents(lengths: &[usize]) -> Vec<Document> {
        let mut next = 0;
        let one = |len: &usize| {
            let tokens: Vec<u32> = (next..next + *len as u32).collect();
            next += *len as u32;
            Document::new(tokens)
        };
        lengths.iter().map(one).collect()
    }

    #[test]
    fn every_token_is_predicted_once_and_none_across_documents() {
        for lengths in [
            &[3, 4][..],
            &[1, 1, 1, 1, 1],
            &[20],
            &[5, 0, 0, 5, 10, 1],
            &[8, 8],
            &[2],
        ] {
            for length in 1..25 {
                let all = documents(lengths);
                let rows = Concat::new(Memory::new(all.clone()), length).expect("tokens");
                let total: usize = lengths.iter().sum();
                let (mut read, mut predicted) = (vec![], vec![]);
                for index in 0..rows.count() {
                    let row = rows.sample(index).expect("a row");
                    let last = index + 1 == rows.count();
                    assert!(row.ids.len() == length || last && !row.ids.is_empty());
                    for (i, label) in row.labels.iter().enumerate() {
                        if *label != IGNORED {
                            assert_eq!(*label, row.ids[i] + 1);
                            predicted.push(*label as u32);
                        }
                        let begins = i == 0 || row.documents[i] != row.documents[i - 1];
                        let position = if begins { 0 } else { row.positions[i - 1] + 1 };
                        assert_eq!(row.positions[i], position);
                    }
                    read.extend(row.ids);
                }
                assert_eq!(read, (0..total as i32 - 1).collect::<Vec<_>>());
                let inside = all.iter().flat_map(|d| d.tokens.iter().skip(1).copied());
                assert_eq!(
                    predicted,
                    inside.collect::<Vec<_>>(),
                    "{lengths:?} {length}"
                );
            }
        }
    }

    #[test]
    fn a_file_of_tokens_without_borders_is_one_document() {
        let folder = Folder::new("concat-file");
        let bytes: Vec<u8> = (0..10u16).flat_map(u16::to_le_bytes).collect();
        let open = || {
            let path = folder.write("t.bin", &bytes);
            TokenFile::open(path, TokenType::U16, 10).expect("whole")
        };
        let rows = Concat::new(open(), 4).expect("tokens");
        assert!(!rows.has_documents());
        assert_eq!(rows.sample(1).expect("a row").labels, [5, 6, 7, 8]);
        // A token ends documents: it is predicted, what follows it is not.
        let rows = Concat::new(open().ends_with(Some(6)), 4).expect("tokens");
        let row = rows.sample(1).expect("a row");
        assert_eq!(
            (row.labels, row.documents),
            (vec![5, 6, -100, 8], vec![0, 0, 0, 1])
        );
        // One that ends a row begins a document with the next.
        let rows = Concat::new(open().ends_with(Some(3)), 4).expect("tokens");
        let row = rows.sample(0).expect("a row");
        assert_eq!(
            (row.labels, row.documents),
            (vec![1, 2, 3, -100], vec![0; 4])
        );
    }

    #[test]
    fn prompts_are_read_and_not_learned() {
        let mut document = Document::new([1, 2, 3, 4, 5]);
        document.prompt = 3;
        let rows = |length| Each::new(Memory::new([document.clone()]), length).expect("one");
        let row = rows(8).sample(0).expect("a row");
        assert_eq!(
            (row.ids, row.labels),
            (vec![1, 2, 3, 4, 5], vec![-100, -100, 4, 5, -100])
        );
        let row = rows(3).sample(0).expect("a row");
        assert_eq!((row.ids, row.labels), (vec![1, 2, 3], vec![-100, -100, 4]));
    }

    #[test]
    fn a_class_is_the_label_of_the_first_position() {
        let mut document = Document::new([1, 2, 3]);
        document.class = Some(7);
        let rows = Each::new(Memory::new([document, Document::default()]), 8).expect("two");
        assert_eq!(rows.sample(0).expect("a row").labels, [7, -100, -100]);
        assert_eq!(rows.sample(1).expect("a row"), Sample::default());
    }

    #[test]
    fn nothing_to_learn_is_an_error() {
        assert!(Concat::new(Memory::new([]), 4).is_err());
        assert!(Concat::new(Memory::new(documents(&[1])), 4).is_err());
        assert!(Concat::new(Memory::new(documents(&[2])), 0).is_err());
        assert!(Each::new(Memory::new([]), 4).is_err());
        assert!(Each::new(Memory::new(documents(&[2])), usize::MAX).is_err());
        let rows = Concat::new(Memory::new(documents(&[9])), 4).expect("tokens");
        assert!(rows.sample(2).is_err() && rows.sample(u64::MAX).is_err());
    }
}

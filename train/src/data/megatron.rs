//! Megatron's pairs of files: tokens in `.bin`, an index of sequences and documents in `.idx`.
//!
//! The index, little endian: `MMIDIDX\0\0`, a u64 1, a byte for the type of tokens, the number of
//! sequences and of document borders as u64, then the length of every sequence (i32), where each
//! begins in the other file in bytes (i64), and the document borders as numbers of sequences (i64),
//! the first of which is 0. A byte for every sequence may follow, which is not read here.

mod write;

use super::{
    Document, Documents, Tokens,
    file::DataFile,
    sample::no_such,
    token_file::{TokenType, read_tokens},
};
use crate::{Error, Result};
use std::path::{Path, PathBuf};

pub use write::MegatronWriter;

const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
const VERSION: u64 = 1;
/// Where the arrays begin.
const HEADER: u64 = 9 + 8 + 1 + 8 + 8;
/// Every so many documents, it is held in memory where one begins.
const MARK: u64 = 256;
/// Entries of an array that are read at once when an index is checked.
const CHUNK: u64 = 8192;

/// The types that tokens have in these files, with their codes. Codes 2, 6 and 7 (i8, f64, f32) are
/// no tokens.
const CODES: [(u8, TokenType); 5] = [
    (1, TokenType::U8),
    (3, TokenType::I16),
    (4, TokenType::I32),
    (5, TokenType::I64),
    (8, TokenType::U16),
];

/// A pair of files as Megatron writes them: documents by number, and one long row of tokens.
///
/// The index is checked when the files are opened, every entry against the files; afterwards it is
/// read where it is needed, and only a few numbers of it are in memory.
#[derive(Debug)]
pub struct Megatron {
    bin: DataFile,
    idx: DataFile,
    ty: TokenType,
    vocabulary: usize,
    sequences: u64,
    documents: u64,
    tokens: u64,
    /// Where every [`MARK`]th document begins, in tokens.
    marks: Vec<u64>,
    /// The first sequence that does not begin where the one before it ends.
    apart: Option<u64>,
}

/// The two files of a pair, by either of them or by what their names have in common.
fn names(path: &Path) -> (PathBuf, PathBuf) {
    let prefix = match path.extension().and_then(|e| e.to_str()) {
        Some("bin" | "idx") => path.with_extension(""),
        _ => path.into(),
    };
    let with = |suffix: &str| {
        let mut name = prefix.clone().into_os_string();
        name.push(suffix);
        PathBuf::from(name)
    };
    (with(".bin"), with(".idx"))
}

impl Megatron {
    /// Opens a pair by the name of either file or by what their names have in common; tokens must
    /// be below `vocabulary`.
    pub fn open(path: impl AsRef<Path>, vocabulary: usize) -> Result<Self> {
        let (bin, idx) = names(path.as_ref());
        let (idx, bin) = (DataFile::open(idx)?, DataFile::open(bin)?);
        if vocabulary == 0 {
            return Err(Error::config("data.vocabulary", "is 0: no token is in it"));
        }
        let mut head = [0; HEADER as usize];
        let known = idx.len().min(HEADER) as usize;
        idx.read_at(0, &mut head[..known])?;
        if known < 9 || head[..9] != MAGIC[..] {
            let detail = "does not begin with MMIDIDX: this is no index of Megatron's";
            return Err(idx.error(0, detail));
        }
        if known < HEADER as usize {
            return Err(idx.error(
                idx.len(),
                "the file ends inside of its header: it is truncated",
            ));
        }
        let number = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&head[at..at + 8]);
            u64::from_le_bytes(bytes)
        };
        if number(9) != VERSION {
            let detail = format!("version {}, but only {VERSION} is known", number(9));
            return Err(idx.error(9, detail));
        }
        let code = head[17];
        let Some((_, ty)) = CODES.into_iter().find(|(c, _)| *c == code) else {
            let detail = format!(
                "the type of tokens is {code}: 1 (u8), 3 (i16), 4 (i32), 5 (i64) and 8 (u16) hold tokens"
            );
            return Err(idx.error(17, detail));
        };
        let (sequences, borders) = (number(18), number(26));
        let arrays = u128::from(sequences) * 12 + u128::from(borders) * 8 + u128::from(HEADER);
        let len = u128::from(idx.len());
        if len != arrays && len != arrays + u128::from(sequences) {
            let detail = format!(
                "{sequences} sequences and {borders} document borders take {arrays} bytes (or one more for each sequence), but the file has {len}: it is truncated or damaged"
            );
            return Err(idx.error(18, detail));
        }
        if sequences == 0 || borders < 2 {
            let detail = format!(
                "there are {sequences} sequences and {borders} document borders: nothing is in these files"
            );
            return Err(idx.error(18, detail));
        }
        let mut pair = Self {
            bin,
            idx,
            ty,
            vocabulary,
            sequences,
            documents: borders - 1,
            tokens: 0,
            marks: vec![],
            apart: None,
        };
        pair.check_sequences()?;
        pair.check_documents()?;
        if pair.tokens == 0 {
            let detail = "all sequences are empty: nothing is in these files";
            return Err(pair.idx.error(HEADER, detail));
        }
        Ok(pair)
    }

    /// Where in the index the length of a sequence is.
    fn at_length(&self, sequence: u64) -> u64 {
        HEADER + 4 * sequence
    }

    /// Where in the index the offset of a sequence is.
    fn at_offset(&self, sequence: u64) -> u64 {
        self.at_length(self.sequences) + 8 * sequence
    }

    /// Where in the index a document border is.
    fn at_border(&self, document: u64) -> u64 {
        self.at_offset(self.sequences) + 8 * document
    }

    /// That every sequence lies in the other file.
    fn check_sequences(&mut self) -> Result<()> {
        let mut end = 0;
        for first in (0..self.sequences).step_by(CHUNK as usize) {
            let count = CHUNK.min(self.sequences - first);
            let lengths = self.idx.read(self.at_length(first), 4 * count)?;
            let offsets = self.idx.read(self.at_offset(first), 8 * count)?;
            let pairs = lengths.chunks_exact(4).zip(offsets.chunks_exact(8));
            for (i, (length, offset)) in (first..).zip(pairs) {
                let (length, offset) = (i32_of(length), i64_of(offset));
                if length < 0 {
                    let detail = format!("sequence {i} has a length of {length}");
                    return Err(self.idx.error(self.at_length(i), detail));
                }
                if offset < 0 {
                    let detail = format!("sequence {i} begins at byte {offset}");
                    return Err(self.idx.error(self.at_offset(i), detail));
                }
                // Neither overflows: both are below 2^63 and a sequence has less than 2^34 bytes.
                let (begin, bytes) = (offset as u64, length as u64 * self.ty.size() as u64);
                if begin + bytes > self.bin.len() {
                    let detail = format!(
                        "sequence {i} takes bytes {begin} to {} and the file ends here: it is truncated, or the index belongs to another file",
                        begin + bytes
                    );
                    return Err(self.bin.error(self.bin.len(), detail));
                }
                if begin != end && self.apart.is_none() {
                    self.apart = Some(i);
                }
                end = begin + bytes;
                self.tokens += length as u64;
            }
        }
        Ok(())
    }

    /// That document borders ascend from the first sequence to the last.
    fn check_documents(&mut self) -> Result<()> {
        let mut last = 0;
        for first in (0..=self.documents).step_by(CHUNK as usize) {
            let count = CHUNK.min(self.documents + 1 - first);
            let borders = self.idx.read(self.at_border(first), 8 * count)?;
            for (i, border) in (first..).zip(borders.chunks_exact(8)) {
                let border = i64_of(border);
                let all = self.sequences as i64;
                if !(last..=all).contains(&border)
                    || (i == 0 && border != 0)
                    || (i == self.documents && border != all)
                {
                    let detail = format!(
                        "document border {i} is {border} after {last}: borders ascend from 0 to the {} sequences",
                        self.sequences
                    );
                    return Err(self.idx.error(self.at_border(i), detail));
                }
                last = border;
                if i % MARK == 0 && i < self.documents && self.apart.is_none() {
                    let begins = self.token_at(border as u64)?;
                    self.marks.push(begins);
                }
            }
        }
        Ok(())
    }

    fn number(&self, at: u64) -> Result<u64> {
        let mut bytes = [0; 8];
        self.idx.read_at(at, &mut bytes)?;
        // A file that changes after it was checked gives errors further on, not panics.
        Ok(u64::from_le_bytes(bytes))
    }

    /// Which token of the row a sequence begins with, where sequences follow each other.
    fn token_at(&self, sequence: u64) -> Result<u64> {
        match sequence == self.sequences {
            true => Ok(self.tokens),
            false => Ok(self.number(self.at_offset(sequence))? / self.ty.size() as u64),
        }
    }

    /// The sequence that a document begins with.
    fn border(&self, document: u64) -> Result<u64> {
        let at = self.at_border(document);
        match self.number(at)? {
            border if border <= self.sequences => Ok(border),
            _ => Err(self
                .idx
                .error(at, "this border changed after the file was opened")),
        }
    }

    /// Which token of the row a document begins with.
    fn document_at(&self, document: u64) -> Result<u64> {
        self.token_at(self.border(document)?)
    }

    /// The sequences of a document.
    fn sequences_of(&self, document: u64) -> Result<std::ops::Range<u64>> {
        if document >= self.documents {
            return Err(no_such("document", document, self.documents));
        }
        Ok(self.border(document)?..self.border(document + 1)?)
    }

    fn length_of(&self, sequence: u64) -> Result<usize> {
        let at = self.at_length(sequence);
        let mut bytes = [0; 4];
        self.idx.read_at(at, &mut bytes)?;
        let changed = |_| {
            self.idx
                .error(at, "this length changed after the file was opened")
        };
        usize::try_from(i32::from_le_bytes(bytes)).map_err(changed)
    }
}

fn i32_of(bytes: &[u8]) -> i32 {
    bytes.try_into().map_or(-1, i32::from_le_bytes)
}

fn i64_of(bytes: &[u8]) -> i64 {
    bytes.try_into().map_or(-1, i64::from_le_bytes)
}

impl Documents for Megatron {
    fn count(&self) -> u64 {
        self.documents
    }

    fn document(&self, index: u64) -> Result<Document> {
        let mut tokens = vec![];
        for sequence in self.sequences_of(index)? {
            let (offset, len) = (
                self.number(self.at_offset(sequence))?,
                self.length_of(sequence)?,
            );
            tokens.extend(read_tokens(
                &self.bin,
                self.ty,
                offset,
                len,
                self.vocabulary,
            )?);
        }
        Ok(Document::new(tokens))
    }

    fn length(&self, index: u64) -> Result<u64> {
        let lengths = self.sequences_of(index)?.map(|s| self.length_of(s));
        lengths.sum::<Result<usize>>().map(|n| n as u64)
    }

    fn describe(&self) -> String {
        format!("megatron {}, {}", self.bin.describe(), self.idx.describe())
    }
}

impl Tokens for Megatron {
    fn total(&self) -> u64 {
        self.tokens
    }

    fn read(&self, start: u64, len: usize) -> Result<(Vec<u32>, Vec<usize>)> {
        let end = start
            .checked_add(len as u64)
            .filter(|end| *end <= self.tokens);
        let Some(end) = end else {
            return Err(no_such(
                "token",
                start.saturating_add(len as u64),
                self.tokens,
            ));
        };
        if let Some(sequence) = self.apart {
            let detail = "this sequence does not begin where the one before it ends: pack these files by documents, not as one row";
            return Err(self.idx.error(self.at_offset(sequence), detail));
        }
        let offset = start * self.ty.size() as u64;
        let tokens = read_tokens(&self.bin, self.ty, offset, len, self.vocabulary)?;
        // The first document that begins after `start`: from the last mark before it on.
        let mark = self.marks.partition_point(|begin| *begin <= start) as u64;
        let (mut low, mut high) = (
            mark.saturating_sub(1) * MARK,
            (mark * MARK).min(self.documents),
        );
        while low < high {
            let middle = low + (high - low) / 2;
            match self.document_at(middle)? <= start {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        let mut borders: Vec<usize> = vec![];
        while low < self.documents {
            let begin = self.document_at(low)?;
            if begin >= end {
                break;
            }
            // Documents may be empty, so that several begin at one place.
            let at = begin.saturating_sub(start) as usize;
            if borders.last() != Some(&at) {
                borders.push(at);
            }
            low += 1;
        }
        Ok((tokens, borders))
    }

    fn has_documents(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests;

//! Which documents lie in which row.
//!
//! In a file, little endian: `ANYMROWS`, the length of what it was built from and that text, the
//! number of pieces and of rows, the pieces (document u64, first token u32, tokens u32), for each
//! row and the end the number of its first piece (u64), and the CRC-32C of all that.

use crate::data::{Documents, file::replace, parallel::in_order};
use crate::{Error, Result};
use std::{fs, path::Path};

const MAGIC: &[u8; 8] = b"ANYMROWS";

/// A run of tokens of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) document: u64,
    pub(super) start: u32,
    pub(super) len: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Index {
    /// Row by row, in the order in which they were put there.
    pieces: Vec<Piece>,
    /// The first piece of each row, and the end.
    rows: Vec<u64>,
}

impl Index {
    pub(super) fn count(&self) -> u64 {
        self.rows.len() as u64 - 1
    }

    pub(super) fn pieces(&self, row: u64) -> Option<&[Piece]> {
        let row = usize::try_from(row).ok()?;
        let (start, end) = (*self.rows.get(row)?, *self.rows.get(row.checked_add(1)?)?);
        self.pieces.get(start as usize..end as usize)
    }

    pub(super) fn build(documents: &impl Documents, length: usize) -> Result<Self> {
        let mut pieces = vec![];
        let mut document = 0;
        let lengths = |index| documents.length(index);
        in_order(documents.count(), lengths, |tokens| {
            if tokens > u64::from(u32::MAX) {
                let detail = format!("document {document} has {tokens} tokens: less than 2^32 fit");
                return Err(Error::config("data", detail));
            }
            for start in (0..tokens).step_by(length) {
                let len = (tokens - start).min(length as u64);
                pieces.push(Piece {
                    document,
                    start: start as u32,
                    len: len as u32,
                });
            }
            document += 1;
            Ok(())
        })?;
        let mut rooms = Rooms::new(pieces.len(), length as u32);
        let row_of: Vec<usize> = pieces.iter().map(|piece| rooms.take(piece.len)).collect();
        // Piece by piece into place: counted, then put there.
        let count = row_of.iter().map(|row| row + 1).max().unwrap_or(0);
        let mut rows = vec![0u64; count + 1];
        row_of.iter().for_each(|row| rows[row + 1] += 1);
        for row in 0..count {
            rows[row + 1] += rows[row];
        }
        let mut next = rows.clone();
        let mut placed = pieces.clone();
        for (piece, row) in pieces.into_iter().zip(row_of) {
            placed[next[row] as usize] = piece;
            next[row] += 1;
        }
        Ok(Self {
            pieces: placed,
            rows,
        })
    }

    pub(super) fn save(&self, path: &Path, said: &str) -> Result<()> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(|e| Error::io(folder, "create", &e))?;
        }
        let mut bytes = MAGIC.to_vec();
        bytes.extend((said.len() as u64).to_le_bytes());
        bytes.extend(said.as_bytes());
        bytes.extend((self.pieces.len() as u64).to_le_bytes());
        bytes.extend(self.count().to_le_bytes());
        for piece in &self.pieces {
            bytes.extend(piece.document.to_le_bytes());
            bytes.extend(piece.start.to_le_bytes());
            bytes.extend(piece.len.to_le_bytes());
        }
        for row in &self.rows {
            bytes.extend(row.to_le_bytes());
        }
        bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
        replace(path, &bytes)
    }

    /// The index in a file, if it is whole and was built from what is said.
    pub(super) fn load(path: &Path, said: &str) -> Option<Self> {
        let bytes = fs::read(path).ok()?;
        let (content, crc) = bytes.split_last_chunk::<4>()?;
        if crc32c::crc32c(content) != u32::from_le_bytes(*crc) {
            return None;
        }
        let mut rest = content.strip_prefix(MAGIC)?;
        let length = number(&mut rest)?;
        if length != said.len() as u64 {
            return None;
        }
        rest = rest.strip_prefix(said.as_bytes())?;
        let (pieces, rows) = (number(&mut rest)?, number(&mut rest)?);
        let needed = u128::from(pieces) * 16 + (u128::from(rows) + 1) * 8;
        if rest.len() as u128 != needed {
            return None;
        }
        let mut index = Self {
            pieces: Vec::with_capacity(pieces as usize),
            rows: Vec::with_capacity(rows as usize + 1),
        };
        for _ in 0..pieces {
            let (document, both) = (number(&mut rest)?, number(&mut rest)?);
            index.pieces.push(Piece {
                document,
                start: both as u32,
                len: (both >> 32) as u32,
            });
        }
        for _ in 0..=rows {
            index.rows.push(number(&mut rest)?);
        }
        let ascends = index.rows.windows(2).all(|w| w[0] <= w[1]);
        let ends = index.rows.first() == Some(&0) && index.rows.last() == Some(&pieces);
        (ascends && ends).then_some(index)
    }
}

fn number(rest: &mut &[u8]) -> Option<u64> {
    let (bytes, after) = rest.split_first_chunk::<8>()?;
    *rest = after;
    Some(u64::from_le_bytes(*bytes))
}

/// How much room rows have, in a tree whose nodes have the most of what is below them, so that the
/// first row with enough is found in a few steps.
struct Rooms {
    leaves: usize,
    tree: Vec<u32>,
}

impl Rooms {
    fn new(rows: usize, length: u32) -> Self {
        let leaves = rows.max(1).next_power_of_two();
        Self {
            leaves,
            tree: vec![length; 2 * leaves],
        }
    }

    /// Takes room in the first row that has it: there is one, for there are as many rows as pieces.
    fn take(&mut self, len: u32) -> usize {
        let mut at = 1;
        while at < self.leaves {
            at *= 2;
            if self.tree[at] < len {
                at += 1;
            }
        }
        let row = at - self.leaves;
        self.tree[at] = self.tree[at].saturating_sub(len);
        while at > 1 {
            at /= 2;
            self.tree[at] = self.tree[2 * at].max(self.tree[2 * at + 1]);
        }
        row
    }
}

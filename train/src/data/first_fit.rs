//! Packing whole documents into rows.

mod index;

use super::{Documents, Sample, Source, file::hash, pack::check_length, sample::no_such};
use crate::{Error, Result};
use index::Index;
use std::path::{Path, PathBuf};

/// Rows of whole documents: each goes into the first row that has room for it. A document that is
/// longer than a row is cut into rows of its own, and what is left of it goes where it fits.
///
/// Which documents a row has is an index that is built once and kept in a file, known by what it
/// was built from; a file that is damaged or of something else is built anew.
///
/// ```
/// # use anymesh_train::data::{Document, FirstFit, Memory, Source};
/// let of = |token, len| Document::new(vec![token; len]);
/// let documents = Memory::new([of(1, 5), of(2, 4), of(3, 3), of(4, 2)]);
/// let rows = FirstFit::new(documents, 8, None)?;
/// assert_eq!(rows.count(), 2);
/// assert_eq!(rows.sample(0)?.ids, [1, 1, 1, 1, 1, 3, 3, 3]);
/// assert_eq!(rows.sample(0)?.labels, [1, 1, 1, 1, -100, 3, 3, -100]);
/// assert_eq!(rows.sample(1)?.documents, [0, 0, 0, 0, 1, 1]);
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Debug)]
pub struct FirstFit<D> {
    documents: D,
    length: usize,
    index: Index,
    cached: Option<Result<PathBuf>>,
}

impl<D: Documents> FirstFit<D> {
    /// Rows of at most `length` tokens; the index is kept in the folder `cache`, which is often
    /// that of the data.
    pub fn new(documents: D, length: usize, cache: Option<&Path>) -> Result<Self> {
        check_length(length)?;
        let said = format!("first fit in rows of {length}: {}", documents.describe());
        let file = cache.map(|folder| folder.join(format!("rows-{:016x}", hash(said.as_bytes()))));
        let found = file.as_deref().and_then(|file| Index::load(file, &said));
        let (index, cached) = match found {
            Some(index) => (index, file.map(Ok)),
            None => {
                let index = Index::build(&documents, length)?;
                // What cannot be kept is in memory all the same.
                let keep = |file: PathBuf| index.save(&file, &said).map(|()| file);
                let cached = file.map(keep);
                (index, cached)
            }
        };
        if index.count() == 0 {
            let detail = format!(
                "none of {} documents has a token: there is nothing to learn",
                documents.count()
            );
            return Err(Error::config("data", detail));
        }
        Ok(Self {
            documents,
            length,
            index,
            cached,
        })
    }

    /// The file that the index is kept in, if it is; why it could not be.
    pub fn cached(&self) -> Option<&Result<PathBuf>> {
        self.cached.as_ref()
    }
}

impl<D: Documents> Source for FirstFit<D> {
    fn count(&self) -> u64 {
        self.index.count()
    }

    fn length(&self) -> usize {
        self.length
    }

    fn sample(&self, index: u64) -> Result<Sample> {
        let Some(pieces) = self.index.pieces(index) else {
            return Err(no_such("sample", index, self.count()));
        };
        let mut sample = Sample::default();
        for piece in pieces {
            let document = self.documents.document(piece.document)?;
            let (start, len) = (piece.start as usize, piece.len as usize);
            let changed = |detail: &str| {
                let detail = format!("document {} {detail}", piece.document);
                Err(Error::config("data", detail))
            };
            let Some(tokens) = document.tokens.get(start..start + len) else {
                return changed("became shorter after its rows were packed: start again");
            };
            if document.class.is_some() {
                return changed("has a class: a row of several documents has none");
            }
            sample.push(tokens, document.labels(start, len));
        }
        Ok(sample)
    }

    fn has_documents(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests;

//! Records with text in them: plain text, JSON lines, Parquet.

use crate::{Error, Result};
use std::{fmt, path::Path, sync::Arc};

/// What a record has under a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Field {
    /// Text.
    Text(String),
    /// A whole number, such as that of a class.
    Number(i64),
}

/// Records by number, from any thread. Plain text has one field, `text`.
pub trait Records: fmt::Debug + Send + Sync {
    /// How many there are.
    fn count(&self) -> u64;

    /// Fields of a record. One that the record does not have, or that is neither text nor a whole
    /// number, is an error.
    fn fields(&self, index: u64, names: &[&str]) -> Result<Vec<Field>>;

    /// An error about a record, at the place where it is.
    fn error(&self, index: u64, detail: String) -> Error;

    /// What they are read from: files with sizes and times.
    fn describe(&self) -> String;
}

impl<R: Records + ?Sized> Records for Arc<R> {
    fn count(&self) -> u64 {
        (**self).count()
    }

    fn fields(&self, index: u64, names: &[&str]) -> Result<Vec<Field>> {
        (**self).fields(index, names)
    }

    fn error(&self, index: u64, detail: String) -> Error {
        (**self).error(index, detail)
    }

    fn describe(&self) -> String {
        (**self).describe()
    }
}

/// The records of a file, by the end of its name: `.txt` and `.md` (one record), `.jsonl`, `.ndjson`
/// and `.json` (a record a line), `.parquet`.
pub fn open_records(path: impl AsRef<Path>) -> Result<Arc<dyn Records>> {
    let path = path.as_ref();
    match path.extension().and_then(|e| e.to_str()) {
        Some("txt" | "md") => Ok(Arc::new(super::Text::open(path, super::Split::Whole)?)),
        Some("jsonl" | "ndjson" | "json") => Ok(Arc::new(super::JsonLines::open(path)?)),
        #[cfg(feature = "parquet")]
        Some("parquet") => Ok(Arc::new(super::Parquet::open(path)?)),
        #[cfg(not(feature = "parquet"))]
        Some("parquet") => Err(Error::config(
            "data",
            format!("{}: Parquet needs the feature `parquet`", path.display()),
        )),
        _ => Err(Error::config(
            "data",
            format!(
                "{}: no known kind of file: names end with .txt, .jsonl or .parquet",
                path.display()
            ),
        )),
    }
}

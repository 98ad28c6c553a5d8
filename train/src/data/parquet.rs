//! Parquet: columns of text and whole numbers.

use super::{Field, Records, file::DataFile, sample::no_such};
use crate::{Error, Result};
use parquet::{
    column::reader::{ColumnReader, ColumnReaderImpl},
    data_type::{ByteArray, DataType},
    errors::ParquetError,
    file::{
        metadata::{ColumnChunkMetaData, ParquetMetaData},
        reader::{FileReader, SerializedFileReader},
    },
};
use std::{
    collections::VecDeque,
    fmt, fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

/// Columns that were decoded are held up to so many bytes of values, the latest ones.
const HELD: usize = 256 << 20;

/// A Parquet file with columns of text (or whole numbers) that are neither nested nor null.
///
/// A file is decoded a column of a row group at a time, and the latest of those are held: reading
/// in order is fast, and in any order where the columns that are read fit into 256 MiB. Tokenize
/// larger files before they are shuffled.
pub struct Parquet {
    file: DataFile,
    reader: SerializedFileReader<fs::File>,
    /// How many rows there are up to and with each row group.
    ends: Vec<u64>,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    columns: VecDeque<((usize, usize), Arc<Column>)>,
    bytes: usize,
}

/// A column of a row group.
struct Column {
    values: Vec<Field>,
    bytes: usize,
}

impl fmt::Debug for Parquet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parquet")
            .field("file", &self.file)
            .field("ends", &self.ends)
            .finish_non_exhaustive()
    }
}

/// Runs code of the Parquet crate, which may panic on a damaged file: that is an error too.
fn tried<T>(run: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(_) => Err("the file is damaged".into()),
    }
}

impl Parquet {
    /// Opens a file and reads what it says of itself.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let file = DataFile::open(&path)?;
        let handle = fs::File::open(&path).map_err(|e| Error::io(path.as_ref(), "open", &e))?;
        let reader = tried(|| SerializedFileReader::new(handle)).map_err(|said| {
            let detail = format!("no Parquet file, or truncated: {said}");
            file.error(file.len(), detail)
        })?;
        let (mut ends, mut end) = (vec![], 0u64);
        for group in reader.metadata().row_groups() {
            let rows = u64::try_from(group.num_rows()).ok();
            end = rows.and_then(|n| end.checked_add(n)).ok_or_else(|| {
                let detail = format!("a row group of {} rows", group.num_rows());
                file.error(file.len(), detail)
            })?;
            ends.push(end);
        }
        if end == 0 {
            return Err(file.error(0, "the file has no rows"));
        }
        Ok(Self {
            file,
            reader,
            ends,
            held: Mutex::default(),
        })
    }

    fn metadata(&self) -> &ParquetMetaData {
        self.reader.metadata()
    }

    /// The row group of a row, and which of its rows it is.
    fn group(&self, row: u64) -> Result<(usize, usize)> {
        let group = self.ends.partition_point(|end| *end <= row);
        if group == self.ends.len() {
            return Err(no_such("record", row, self.count()));
        }
        let before = if group == 0 { 0 } else { self.ends[group - 1] };
        Ok((group, (row - before) as usize))
    }

    /// The number of a column, by name.
    fn column(&self, name: &str) -> Result<usize> {
        let schema = self.metadata().file_metadata().schema_descr();
        let columns = schema.columns();
        let Some(at) = columns.iter().position(|c| c.path().string() == name) else {
            let there: Vec<String> = columns.iter().map(|c| c.path().string()).collect();
            let detail = format!(
                "there is no column '{name}': there are {}",
                there.join(", ")
            );
            return Err(self.file.error(0, detail));
        };
        if columns[at].max_rep_level() != 0 || columns[at].max_def_level() > 1 {
            let detail = format!("column '{name}' is nested: only plain columns are read");
            return Err(self.file.error(0, detail));
        }
        Ok(at)
    }

    /// Where a column of a row group lies.
    fn offset(&self, group: usize, column: usize) -> u64 {
        let chunks = self.metadata().row_group(group).columns();
        let first = |chunk: &ColumnChunkMetaData| {
            let dictionary = chunk.dictionary_page_offset();
            dictionary.unwrap_or(chunk.data_page_offset())
        };
        let first = chunks.get(column).map_or(0, first);
        u64::try_from(first).unwrap_or(0)
    }

    fn values(&self, group: usize, column: usize) -> Result<Arc<Column>> {
        let lock = || self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (group, column);
        if let Some((_, found)) = lock().columns.iter().find(|(k, _)| *k == key) {
            return Ok(found.clone());
        }
        let wrong = |said: String| {
            let schema = self.metadata().file_metadata().schema_descr();
            let name = schema.column(column).path().string();
            let detail = format!("column '{name}' of row group {group}: {said}");
            self.file.error(self.offset(group, column), detail)
        };
        let rows = self.ends[group] - if group == 0 { 0 } else { self.ends[group - 1] };
        let decoded = self.decode(group, column, rows as usize).map_err(wrong)?;
        let decoded = Arc::new(decoded);
        let mut held = lock();
        held.bytes += decoded.bytes;
        held.columns.push_back((key, decoded.clone()));
        while held.bytes > HELD && held.columns.len() > 1 {
            if let Some((_, old)) = held.columns.pop_front() {
                held.bytes -= old.bytes;
            }
        }
        Ok(decoded)
    }

    fn decode(&self, group: usize, column: usize, rows: usize) -> Result<Column, String> {
        let column = tried(|| self.reader.get_row_group(group)?.get_column_reader(column))?;
        let number = |n: i64| Ok((Field::Number(n), 16));
        match column {
            ColumnReader::ByteArrayColumnReader(r) => all(r, rows, |bytes: ByteArray| {
                // A value that was never set has no bytes to ask for.
                let text = if bytes.is_empty() { &[] } else { bytes.data() };
                match std::str::from_utf8(text) {
                    Ok(text) => Ok((Field::Text(text.into()), 32 + text.len())),
                    Err(_) => Err("a value is no UTF-8".into()),
                }
            }),
            ColumnReader::Int32ColumnReader(r) => all(r, rows, |n| number(n.into())),
            ColumnReader::Int64ColumnReader(r) => all(r, rows, number),
            _ => Err("is neither text nor whole numbers".into()),
        }
    }
}

/// All values of a column of a row group.
fn all<T: DataType>(
    mut reader: ColumnReaderImpl<T>,
    rows: usize,
    field: impl Fn(T::T) -> Result<(Field, usize), String>,
) -> Result<Column, String> {
    let mut column = Column {
        values: vec![],
        bytes: 0,
    };
    while column.values.len() < rows {
        // A few at a time: the number of rows is only what the file says.
        let wanted = (rows - column.values.len()).min(4096);
        let (mut levels, mut values) = (vec![], vec![]);
        let (records, count, _) =
            tried(|| reader.read_records(wanted, Some(&mut levels), None, &mut values))?;
        if records == 0 {
            return Err(format!("ends after {} of {rows} rows", column.values.len()));
        }
        if count != records {
            return Err("has a null, which no document is made of".into());
        }
        for value in values {
            let (field, bytes) = field(value)?;
            column.values.push(field);
            column.bytes += bytes;
        }
    }
    Ok(column)
}

impl Records for Parquet {
    fn count(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    fn fields(&self, index: u64, names: &[&str]) -> Result<Vec<Field>> {
        let (group, row) = self.group(index)?;
        let field = |name: &&str| {
            let column = self.values(group, self.column(name)?)?;
            let value = column.values.get(row).cloned();
            value.ok_or_else(|| self.error(index, format!("row {index} is missing")))
        };
        names.iter().map(field).collect()
    }

    fn error(&self, index: u64, detail: String) -> Error {
        let offset = self
            .group(index)
            .map_or(0, |(group, _)| self.offset(group, 0));
        self.file.error(offset, format!("row {index}: {detail}"))
    }

    fn describe(&self) -> String {
        format!("parquet {}", self.file.describe())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::tests::Folder;
    use parquet::{
        basic::Compression,
        data_type::{ByteArrayType, Int64Type},
        file::{properties::WriterProperties, writer::SerializedFileWriter},
        schema::parser::parse_message_type,
    };

    /// Row groups with texts and classes, 100 rows each.
    fn file(compression: Compression) -> Vec<u8> {
        let schema =
            "message m { required binary text (UTF8); optional int64 label; optional double x; }";
        let schema = Arc::new(parse_message_type(schema).expect("a schema"));
        let properties = WriterProperties::builder().set_compression(compression);
        let mut out = vec![];
        let mut writer =
            SerializedFileWriter::new(&mut out, schema, Arc::new(properties.build())).expect("new");
        for group in 0..3i64 {
            let mut rows = writer.next_row_group().expect("a row group");
            let texts: Vec<ByteArray> = (0..100)
                .map(|i| ByteArray::from(format!("text {}", 100 * group + i).into_bytes()))
                .collect();
            let mut column = rows.next_column().expect("text").expect("text");
            column
                .typed::<ByteArrayType>()
                .write_batch(&texts, None, None)
                .expect("written");
            column.close().expect("written");
            // The last label is null.
            let count = if group == 2 { 99 } else { 100 };
            let levels: Vec<i16> = (0..100).map(|i| i16::from(i < count)).collect();
            let labels: Vec<i64> = (0..count.into()).map(|i: i64| i % 7).collect();
            let mut column = rows.next_column().expect("label").expect("label");
            column
                .typed::<Int64Type>()
                .write_batch(&labels, Some(&levels), None)
                .expect("written");
            column.close().expect("written");
            let mut column = rows.next_column().expect("x").expect("x");
            let typed = column.typed::<parquet::data_type::DoubleType>();
            typed
                .write_batch(&[0.5; 100], Some(&[1; 100]), None)
                .expect("written");
            column.close().expect("written");
            rows.close().expect("written");
        }
        writer.close().expect("written");
        out
    }

    #[test]
    fn rows_are_read_in_any_order_from_any_compression() {
        let folder = Folder::new("parquet");
        for compression in [
            Compression::UNCOMPRESSED,
            Compression::SNAPPY,
            Compression::ZSTD(Default::default()),
            Compression::GZIP(Default::default()),
            Compression::LZ4_RAW,
        ] {
            let path = folder.write("a.parquet", &file(compression));
            let parquet = Parquet::open(path).expect("whole");
            assert_eq!(parquet.count(), 300);
            for row in [299, 0, 150, 99, 100, 298] {
                let text = parquet.fields(row, &["text"]).expect("there");
                assert_eq!(text, [Field::Text(format!("text {row}"))]);
            }
            let both = parquet.fields(108, &["label", "text"]).expect("there");
            assert_eq!(both, [Field::Number(1), Field::Text("text 108".into())]);
        }
    }

    #[test]
    fn what_is_not_there_or_damaged_is_an_error() {
        let folder = Folder::new("parquet-damaged");
        let good = file(Compression::SNAPPY);
        let parquet = Parquet::open(folder.write("a.parquet", &good)).expect("whole");
        let refused = |row, name: &str, said: &str| {
            let error = parquet.fields(row, &[name]).expect_err(said);
            assert!(error.to_string().contains(said), "{error}");
        };
        refused(0, "title", "no column 'title': there are text, label, x");
        refused(0, "x", "neither text nor whole numbers");
        refused(250, "label", "null");
        refused(300, "text", "there are 300");
        for len in (0..good.len()).step_by(7) {
            let path = folder.write("b.parquet", &good[..len]);
            assert!(
                matches!(Parquet::open(path), Err(Error::Data { .. })),
                "{len} bytes"
            );
        }
    }

    #[test]
    fn no_damaged_byte_ends_the_program() {
        let folder = Folder::new("parquet-bytes");
        let good = file(Compression::UNCOMPRESSED);
        let mut errors = 0;
        for at in (0..good.len()).step_by(41) {
            for flip in [0xff, 0x80, 1] {
                let mut bytes = good.clone();
                bytes[at] ^= flip;
                let Ok(parquet) = Parquet::open(folder.write("c.parquet", &bytes)) else {
                    errors += 1;
                    continue;
                };
                for row in [0, 150, 299] {
                    errors += usize::from(parquet.fields(row, &["text", "label"]).is_err());
                }
            }
        }
        assert!(errors > 0);
    }
}

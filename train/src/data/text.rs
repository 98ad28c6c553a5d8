//! Plain text.

use super::{Field, Records, file::DataFile, sample::no_such};
use crate::{Error, Result};
use std::path::Path;

/// The most bytes that one record may have: a file that is not what it is taken for should not
/// fill the memory.
pub(crate) const LONGEST: u64 = 1 << 30;

/// What is one record in a file of text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Split {
    /// All of it.
    #[default]
    Whole,
    /// Every line that has something in it.
    Lines,
    /// What blank lines part.
    Paragraphs,
    /// What this text parts, such as `<|endoftext|>`.
    At(String),
}

/// A file of plain text in UTF-8, as records with the field `text`.
#[derive(Debug)]
pub struct Text {
    file: DataFile,
    split: Split,
    /// Where each record begins and ends.
    ranges: Vec<(u64, u64)>,
}

impl Text {
    /// Opens a file and finds out where its records are.
    pub fn open(path: impl AsRef<Path>, split: Split) -> Result<Self> {
        let file = DataFile::open(path)?;
        let ranges = match &split {
            Split::Whole => vec![(0, file.len())],
            Split::Lines => lines(&file)?,
            Split::Paragraphs => paragraphs(lines(&file)?),
            Split::At(text) if text.is_empty() => {
                let detail = "is empty: give the text that parts records";
                return Err(Error::config("data.split", detail));
            }
            Split::At(text) => parts(&file, text.as_bytes())?,
        };
        if ranges.is_empty() {
            return Err(file.error(0, "nothing but blanks is in the file"));
        }
        Ok(Self {
            file,
            split,
            ranges,
        })
    }
}

impl Records for Text {
    fn count(&self) -> u64 {
        self.ranges.len() as u64
    }

    fn fields(&self, index: u64, names: &[&str]) -> Result<Vec<Field>> {
        let (start, end) = find(&self.ranges, index)?;
        let text = utf8(&self.file, start, end)?;
        let field = |name: &&str| match *name {
            "text" => Ok(Field::Text(text.clone())),
            name => Err(self.file.error(
                start,
                format!("plain text has the field 'text' and no '{name}'"),
            )),
        };
        names.iter().map(field).collect()
    }

    fn error(&self, index: u64, detail: String) -> Error {
        let start = find(&self.ranges, index).map_or(0, |(start, _)| start);
        self.file.error(start, detail)
    }

    fn describe(&self) -> String {
        format!("text {:?} {}", self.split, self.file.describe())
    }
}

/// The range of a record.
pub(crate) fn find(ranges: &[(u64, u64)], index: u64) -> Result<(u64, u64)> {
    let range = usize::try_from(index).ok().and_then(|i| ranges.get(i));
    range
        .copied()
        .ok_or_else(|| no_such("record", index, ranges.len() as u64))
}

/// A range of a file as text.
pub(crate) fn utf8(file: &DataFile, start: u64, end: u64) -> Result<String> {
    if end - start > LONGEST {
        let detail = format!(
            "a record of {} bytes: the longest has {LONGEST}",
            end - start
        );
        return Err(file.error(start, detail));
    }
    let bytes = file.read(start, end - start)?;
    String::from_utf8(bytes).map_err(|e| {
        let error = e.utf8_error();
        let byte = e.as_bytes()[error.valid_up_to()];
        let detail = format!(
            "the byte {byte:#04x} is no UTF-8: the file is damaged, or in another encoding"
        );
        file.error(start + error.valid_up_to() as u64, detail)
    })
}

/// Shows every byte of a file with its offset.
fn each_byte(file: &DataFile, mut f: impl FnMut(u64, u8)) -> Result<()> {
    let mut buffer = vec![0; 1 << 16];
    let mut at = 0;
    while at < file.len() {
        let len = (file.len() - at).min(buffer.len() as u64) as usize;
        file.read_at(at, &mut buffer[..len])?;
        buffer[..len].iter().zip(at..).for_each(|(b, at)| f(at, *b));
        at += len as u64;
    }
    Ok(())
}

/// The lines of a file that are not blank, without their ends.
pub(crate) fn lines(file: &DataFile) -> Result<Vec<(u64, u64)>> {
    let (mut lines, mut start, mut blank) = (vec![], 0, true);
    each_byte(file, |at, byte| {
        blank &= byte.is_ascii_whitespace();
        if byte == b'\n' {
            if !blank {
                lines.push((start, at));
            }
            (start, blank) = (at + 1, true);
        }
    })?;
    if !blank {
        lines.push((start, file.len()));
    }
    Ok(lines)
}

/// Lines with nothing blank between them, as one.
fn paragraphs(lines: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    let mut out: Vec<(u64, u64)> = vec![];
    for (start, end) in lines {
        match out.last_mut() {
            Some(last) if last.1 + 1 == start => last.1 = end,
            _ => out.push((start, end)),
        }
    }
    out
}

/// What a text parts a file into, without what is blank.
fn parts(file: &DataFile, separator: &[u8]) -> Result<Vec<(u64, u64)>> {
    // Knuth, Morris and Pratt's way, because a separator may lie across what is read at once. For
    // each length of a beginning of the separator: the longest shorter beginning that it ends with.
    let mut shorter = vec![0; separator.len()];
    let next = |shorter: &[usize], mut seen: usize, byte: u8| {
        while seen > 0 && separator[seen] != byte {
            seen = shorter[seen - 1];
        }
        seen + usize::from(separator[seen] == byte)
    };
    for i in 1..separator.len() {
        shorter[i] = next(&shorter, shorter[i - 1], separator[i]);
    }
    let (mut parts, mut start, mut seen) = (vec![], 0, 0);
    each_byte(file, |at, byte| {
        seen = next(&shorter, seen, byte);
        if seen == separator.len() {
            parts.push((start, at + 1 - seen as u64));
            (start, seen) = (at + 1, 0);
        }
    })?;
    parts.push((start, file.len()));
    let mut kept = vec![];
    for (start, end) in parts {
        // Blanks between two separators are few.
        let blank = end - start < 256 && file.read(start, end - start)?.trim_ascii().is_empty();
        if !blank {
            kept.push((start, end));
        }
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::tests::Folder;

    fn texts(bytes: &[u8], split: Split) -> Vec<String> {
        let folder = Folder::new("texts");
        let text = Text::open(folder.write("a.txt", bytes), split).expect("it is text");
        let field = |i| match &text.fields(i, &["text"]).expect("it is text")[0] {
            Field::Text(text) => text.clone(),
            Field::Number(_) => panic!("text is no number"),
        };
        (0..text.count()).map(field).collect()
    }

    #[test]
    fn text_is_split_as_told() {
        let text = "one\ntwo\r\n \n\nthree\n".as_bytes();
        assert_eq!(texts(text, Split::Whole), ["one\ntwo\r\n \n\nthree\n"]);
        assert_eq!(texts(text, Split::Lines), ["one", "two\r", "three"]);
        assert_eq!(texts(text, Split::Paragraphs), ["one\ntwo\r", "three"]);
        let at = |s: &str| Split::At(s.into());
        assert_eq!(texts(b"a<>b<><>\n<> c", at("<>")), ["a", "b", " c"]);
        assert_eq!(texts(b"xaabaaaby", at("aab")), ["x", "a", "y"]);
        assert_eq!(texts(b"abababc", at("ababc")), ["ab"]);
    }

    #[test]
    fn a_separator_may_lie_across_what_is_read_at_once() {
        for offset in 0..4 {
            let mut bytes = vec![b'x'; (1 << 16) - offset];
            bytes.extend(b"<end>tail");
            let found = texts(&bytes, Split::At("<end>".into()));
            assert_eq!((found[0].len(), &*found[1]), ((1 << 16) - offset, "tail"));
        }
    }

    #[test]
    fn what_is_not_text_is_an_error_with_its_offset() {
        let folder = Folder::new("not-text");
        let path = folder.write("a.txt", b"fine\nf\xff\n");
        let text = Text::open(&path, Split::Lines).expect("bytes are read later");
        text.fields(0, &["text"]).expect("fine");
        let error = text.fields(1, &["text"]).expect_err("no UTF-8");
        assert!(
            error
                .to_string()
                .contains("byte 6: the byte 0xff is no UTF-8"),
            "{error}"
        );
        let error = text.fields(0, &["title"]).expect_err("no such field");
        assert!(error.to_string().contains("no 'title'"), "{error}");
        assert!(text.fields(2, &["text"]).is_err());
        // A character cut off at the end.
        let path = folder.write("a.txt", &"aé".as_bytes()[..2]);
        let error = Text::open(&path, Split::Whole).and_then(|t| t.fields(0, &["text"]));
        assert!(
            matches!(error, Err(Error::Data { offset: 1, .. })),
            "{error:?}"
        );
        for blank in [Split::Lines, Split::Paragraphs, Split::At("|".into())] {
            let error = Text::open(folder.write("a.txt", b" \n | \n"), blank.clone());
            assert_eq!(error.is_err(), blank == Split::At("|".into()), "{error:?}");
        }
        assert!(Text::open(&path, Split::At(String::new())).is_err());
    }
}

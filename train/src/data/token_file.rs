//! Files of nothing but tokens: `.bin` as nanoGPT and many scripts write them.

use super::{Tokens, file::DataFile, sample::no_such};
use crate::{Error, Result};
use std::path::Path;

/// How a file holds tokens, little endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenType {
    /// A byte each.
    U8,
    /// Two bytes each.
    U16,
    /// Four bytes each.
    U32,
    /// Two bytes each, with a sign that tokens do not use.
    I16,
    /// Four bytes each, with a sign that tokens do not use.
    I32,
    /// Eight bytes each, with a sign that tokens do not use.
    I64,
}

impl TokenType {
    /// The type that Megatron's tools would write for a vocabulary.
    pub fn for_vocabulary(vocabulary: usize) -> Self {
        match vocabulary < 65_500 {
            true => Self::U16,
            false => Self::I32,
        }
    }

    /// Bytes of a token.
    pub fn size(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 => 4,
            Self::I64 => 8,
        }
    }

    /// A stored token; those with a sign keep it, so that a negative one is seen.
    fn decode(self, bytes: &[u8]) -> i64 {
        match *bytes {
            [a] => i64::from(a),
            [a, b] if self == Self::I16 => i64::from(i16::from_le_bytes([a, b])),
            [a, b] => i64::from(u16::from_le_bytes([a, b])),
            [a, b, c, d] if self == Self::I32 => i64::from(i32::from_le_bytes([a, b, c, d])),
            [a, b, c, d] => i64::from(u32::from_le_bytes([a, b, c, d])),
            _ => bytes.try_into().map_or(-1, i64::from_le_bytes),
        }
    }

    /// The largest token that fits.
    pub(crate) fn largest(self) -> u32 {
        match self {
            Self::U8 => u8::MAX.into(),
            Self::U16 => u16::MAX.into(),
            Self::I16 => i16::MAX as u32,
            Self::U32 | Self::I32 | Self::I64 => i32::MAX as u32,
        }
    }

    /// Appends a token that [fits](Self::largest).
    pub(crate) fn encode(self, token: u32, out: &mut Vec<u8>) {
        let bytes = u64::from(token).to_le_bytes();
        out.extend_from_slice(&bytes[..self.size()]);
    }
}

/// Tokens that lie in a file, from a byte on.
pub(crate) fn read_tokens(
    file: &DataFile,
    ty: TokenType,
    offset: u64,
    len: usize,
    vocabulary: usize,
) -> Result<Vec<u32>> {
    // Lengths were checked against the file when it was opened.
    let bytes = file.read(offset, len as u64 * ty.size() as u64)?;
    let limit = vocabulary.min(i32::MAX as usize + 1) as i64;
    let token = |(i, bytes): (usize, &[u8])| match ty.decode(bytes) {
        token if (0..limit).contains(&token) => Ok(token as u32),
        token => {
            let at = offset + (i * ty.size()) as u64;
            let detail = match token < 0 {
                true => format!("the token {token} is negative: is the file of another type?"),
                false => format!(
                    "the token {token} is not in a vocabulary of {vocabulary}: is the file of another tokenizer or type?"
                ),
            };
            Err(file.error(at, detail))
        }
    };
    bytes
        .chunks_exact(ty.size())
        .enumerate()
        .map(token)
        .collect()
}

/// A file of nothing but tokens.
#[derive(Debug)]
pub struct TokenFile {
    file: DataFile,
    ty: TokenType,
    vocabulary: usize,
    end: Option<u32>,
}

impl TokenFile {
    /// A file with tokens below `vocabulary`.
    pub fn open(path: impl AsRef<Path>, ty: TokenType, vocabulary: usize) -> Result<Self> {
        let file = DataFile::open(path)?;
        let size = ty.size() as u64;
        if file.len() % size != 0 {
            let detail = format!(
                "the file has {} bytes, which is no multiple of the {size} of a token: it is truncated, or of another type",
                file.len()
            );
            return Err(file.error(file.len() / size * size, detail));
        }
        if vocabulary == 0 {
            return Err(Error::config("data.vocabulary", "is 0: no token is in it"));
        }
        Ok(Self {
            file,
            ty,
            vocabulary,
            end: None,
        })
    }

    /// With a token that ends documents.
    pub fn ends_with(mut self, end: Option<u32>) -> Self {
        self.end = end;
        self
    }
}

impl Tokens for TokenFile {
    fn total(&self) -> u64 {
        self.file.len() / self.ty.size() as u64
    }

    fn read(&self, start: u64, len: usize) -> Result<(Vec<u32>, Vec<usize>)> {
        let all = self.total();
        if start.checked_add(len as u64).is_none_or(|end| end > all) {
            return Err(no_such("token", start.saturating_add(len as u64), all));
        }
        let offset = start * self.ty.size() as u64;
        let tokens = read_tokens(&self.file, self.ty, offset, len, self.vocabulary)?;
        let ends = tokens.iter().enumerate();
        let borders = ends
            .filter(|(i, token)| Some(**token) == self.end && i + 1 < len)
            .map(|(i, _)| i + 1)
            .collect();
        Ok((tokens, borders))
    }

    fn has_documents(&self) -> bool {
        self.end.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::tests::Folder;

    #[test]
    fn tokens_of_every_type_are_read_at_any_place() {
        let folder = Folder::new("types");
        for ty in [
            TokenType::U8,
            TokenType::U16,
            TokenType::U32,
            TokenType::I16,
            TokenType::I32,
            TokenType::I64,
        ] {
            let mut bytes = vec![];
            (0..100).for_each(|t| ty.encode(t, &mut bytes));
            let path = folder.write("tokens.bin", &bytes);
            let file = TokenFile::open(&path, ty, 100).expect("it is whole");
            assert_eq!(file.total(), 100);
            let (tokens, borders) = file.read(40, 5).expect("inside");
            assert_eq!((tokens, borders), (vec![40, 41, 42, 43, 44], vec![]));
            let file = file.ends_with(Some(42));
            assert_eq!(file.read(40, 5).expect("inside").1, [3]);
            assert_eq!(file.read(40, 3).expect("inside").1, [0usize; 0]);
            assert!(file.read(98, 3).is_err() && file.read(u64::MAX, 3).is_err());
        }
    }

    #[test]
    fn a_truncated_file_and_foreign_tokens_are_errors_with_their_offset() {
        let folder = Folder::new("foreign");
        let path = folder.write("tokens.bin", &[1, 0, 2, 0, 9, 0, 3]);
        let error = TokenFile::open(&path, TokenType::U16, 8).expect_err("truncated");
        assert!(matches!(error, Error::Data { offset: 6, .. }), "{error}");
        let path = folder.write("tokens.bin", &[1, 0, 2, 0, 9, 0, 3, 0]);
        let file = TokenFile::open(&path, TokenType::U16, 9).expect("it is whole");
        file.read(0, 2).expect("both are in the vocabulary");
        let error = file.read(1, 2).expect_err("9 is not in a vocabulary of 9");
        assert!(
            matches!(&error, Error::Data { offset: 4, detail, .. } if detail.contains("the token 9")),
            "{error}"
        );
        let path = folder.write("tokens.bin", &[0xff; 4]);
        for (ty, said) in [
            (TokenType::I32, "-1 is negative"),
            (TokenType::U32, "4294967295"),
        ] {
            let file = TokenFile::open(&path, ty, usize::MAX).expect("it is whole");
            let error = file.read(0, 1).expect_err("no token");
            assert!(error.to_string().contains(said), "{error}");
        }
    }
}

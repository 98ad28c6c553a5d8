//! Writing a pair of files.

use super::{CODES, MAGIC, VERSION, names};
use crate::data::{file::beside, token_file::TokenType};
use crate::{Error, Result};
use std::{
    fs::{self, File},
    io::{BufWriter, Write},
    path::{Path, PathBuf},
};

/// Writes a pair of files, document by document. Nothing has its name until all of it is written:
/// first the tokens get theirs, then the index.
///
/// ```
/// # use anymesh_train::data::{Documents, Megatron, MegatronWriter, TokenType};
/// # let folder = std::env::temp_dir().join(format!("anymesh-doc-megatron-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder).expect("a temporary folder");
/// let mut writer = MegatronWriter::create(folder.join("text"), TokenType::U16)?;
/// writer.document(&[5, 6, 7])?;
/// writer.document(&[8])?;
/// writer.finish()?;
/// let pair = Megatron::open(folder.join("text"), 10)?;
/// assert_eq!(pair.document(1)?.tokens, [8]);
/// # std::fs::remove_dir_all(&folder).ok();
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Debug)]
pub struct MegatronWriter {
    ty: TokenType,
    code: u8,
    bin: Fresh,
    idx: PathBuf,
    out: BufWriter<File>,
    lengths: Vec<i32>,
    buffer: Vec<u8>,
}

/// A file under a name of its own until it is complete; removed if it never is.
#[derive(Debug)]
struct Fresh {
    fresh: PathBuf,
    path: PathBuf,
}

impl Fresh {
    fn create(path: PathBuf) -> Result<(Self, BufWriter<File>)> {
        let fresh = beside(&path);
        let file = File::create_new(&fresh).map_err(|e| Error::io(&fresh, "create", &e))?;
        Ok((Self { fresh, path }, BufWriter::new(file)))
    }

    fn complete(&self, mut out: BufWriter<File>) -> Result<()> {
        let io = |action| move |e| Error::io(&self.path, action, &e);
        out.flush().map_err(io("write"))?;
        out.get_ref().sync_all().map_err(io("sync"))?;
        fs::rename(&self.fresh, &self.path).map_err(io("rename"))
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        // There is none where it was completed.
        let _ = fs::remove_file(&self.fresh);
    }
}

impl MegatronWriter {
    /// A new pair with what its names have in common; a pair that is there is replaced in the end.
    pub fn create(path: impl AsRef<Path>, ty: TokenType) -> Result<Self> {
        let Some((code, _)) = CODES.into_iter().find(|(_, t)| *t == ty) else {
            return Err(Error::config(
                "data.type",
                "these files cannot hold u32: use i32",
            ));
        };
        let (bin, idx) = names(path.as_ref());
        let (bin, out) = Fresh::create(bin)?;
        Ok(Self {
            ty,
            code,
            bin,
            idx,
            out,
            lengths: vec![],
            buffer: vec![],
        })
    }

    /// Appends a document, as one sequence.
    pub fn document(&mut self, tokens: &[u32]) -> Result<()> {
        if let Some(token) = tokens.iter().find(|t| **t > self.ty.largest()) {
            let detail = format!("the token {token} does not fit into {:?}", self.ty);
            return Err(Error::config("data.type", detail));
        }
        let length = i32::try_from(tokens.len()).map_err(|_| {
            let detail = format!(
                "a document of {} tokens: these files hold less than 2^31",
                tokens.len()
            );
            Error::config("data", detail)
        })?;
        self.buffer.clear();
        let (ty, buffer) = (self.ty, &mut self.buffer);
        tokens.iter().for_each(|t| ty.encode(*t, buffer));
        (self.out.write_all(&self.buffer)).map_err(|e| Error::io(&self.bin.path, "write", &e))?;
        self.lengths.push(length);
        Ok(())
    }

    /// Writes the index and gives both files their names.
    pub fn finish(self) -> Result<()> {
        let (idx, mut out) = Fresh::create(self.idx)?;
        let count = self.lengths.len() as u64;
        let mut write = |bytes: &[u8]| {
            out.write_all(bytes)
                .map_err(|e| Error::io(&idx.path, "write", &e))
        };
        write(MAGIC)?;
        write(&VERSION.to_le_bytes())?;
        write(&[self.code])?;
        write(&count.to_le_bytes())?;
        write(&(count + 1).to_le_bytes())?;
        for length in &self.lengths {
            write(&length.to_le_bytes())?;
        }
        let mut offset = 0i64;
        for length in &self.lengths {
            write(&offset.to_le_bytes())?;
            offset += i64::from(*length) * self.ty.size() as i64;
        }
        for border in 0..=count {
            write(&border.to_le_bytes())?;
        }
        // An index that is there speaks of other tokens.
        match fs::remove_file(&idx.path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::io(&idx.path, "remove", &e));
            }
            _ => {}
        }
        self.bin.complete(self.out)?;
        idx.complete(out)
    }
}

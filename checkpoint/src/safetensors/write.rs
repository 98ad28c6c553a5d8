//! Writing safetensors files as a stream.

use super::header::type_name;
use crate::regions::checked_numel;
use crate::{Error, Result, Source, TensorInfo};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// How much of a tensor is in memory at a time while a source is written, where nobody says
/// otherwise.
pub const CHUNK: usize = 4 << 20;

/// Takes the bytes of one tensor, in as many pieces as it pleases the caller.
#[derive(Debug)]
pub struct TensorWriter<'f> {
    file: &'f mut BufWriter<File>,
    path: &'f Path,
    name: &'f str,
    bytes: usize,
    left: usize,
}

impl TensorWriter<'_> {
    /// Writes the next bytes: little-endian elements in row-major order.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.left = self
            .left
            .checked_sub(bytes.len())
            .ok_or_else(|| self.wrong(self.bytes - self.left + bytes.len()))?;
        self.file
            .write_all(bytes)
            .map_err(|e| Error::io(self.path, "write", &e))
    }

    fn finish(self) -> Result<()> {
        if self.left == 0 {
            Ok(())
        } else {
            Err(self.wrong(self.bytes - self.left))
        }
    }

    fn wrong(&self, given: usize) -> Error {
        Error::ByteCount {
            tensor: self.name.into(),
            expected: self.bytes,
            given,
        }
    }
}

/// Writes a file: `fill` is asked for the bytes of each tensor in turn. The file appears at `path`
/// whole or not at all; one that was there is replaced.
///
/// Tensors of wider elements come first and else by name, so that every tensor is aligned to its
/// elements. What is in memory is what `fill` holds.
pub fn write(
    path: impl AsRef<Path>,
    tensors: &BTreeMap<String, TensorInfo>,
    metadata: &BTreeMap<String, String>,
    fill: impl FnMut(&str, &mut TensorWriter<'_>) -> Result<()>,
) -> Result<()> {
    let path = path.as_ref();
    let name = path.file_name().ok_or_else(|| {
        Error::Argument(format!("'{}' is not the path of a file", path.display()))
    })?;
    let part = path.with_file_name(format!(
        ".{}.{}.part",
        name.to_string_lossy(),
        std::process::id()
    ));
    let written = write_in_place(&part, tensors, metadata, fill)
        .and_then(|()| std::fs::rename(&part, path).map_err(|e| Error::io(path, "rename", &e)));
    if written.is_err() {
        // The first error is the one to report; a file that was never made cannot be removed.
        let _ = std::fs::remove_file(&part);
        return written;
    }
    sync_folder(
        path.parent()
            .filter(|p| !p.as_os_str().is_empty())
            .unwrap_or(Path::new(".")),
    )
}

/// Writes all tensors of a source into one file, at most `chunk` bytes of them in memory at a time;
/// [`CHUNK`] is a good number. Larger ones read less twice where the source is cut along other
/// dimensions than the first.
pub fn write_source(
    path: impl AsRef<Path>,
    source: &dyn Source,
    metadata: &BTreeMap<String, String>,
    chunk: usize,
) -> Result<()> {
    refuse_foreign(source, path.as_ref())?;
    write(path, source.tensors(), metadata, |name, out| {
        copy_tensor(source, name, chunk, out)
    })
}

/// Refuses to leave out what cannot be read.
pub(crate) fn refuse_foreign(source: &dyn Source, path: &Path) -> Result<()> {
    match source.foreign().into_iter().next() {
        Some((tensor, dtype)) => Err(Error::ForeignType {
            path: path.into(),
            tensor,
            dtype,
        }),
        None => Ok(()),
    }
}

/// Copies a tensor slab by slab.
pub(crate) fn copy_tensor(
    source: &dyn Source,
    name: &str,
    chunk: usize,
    out: &mut TensorWriter<'_>,
) -> Result<()> {
    let info = source.info(name)?;
    let mut buffer = vec![0; chunk.max(info.dtype.size()).min(info.bytes())];
    for slab in info.slabs(chunk) {
        let buffer = &mut buffer[..slab.numel() * info.dtype.size()];
        source.read(name, &slab, buffer)?;
        out.write(buffer)?;
    }
    Ok(())
}

/// Writes a file where it is to stay, and waits until it is on the disk.
pub(crate) fn write_in_place(
    path: &Path,
    tensors: &BTreeMap<String, TensorInfo>,
    metadata: &BTreeMap<String, String>,
    mut fill: impl FnMut(&str, &mut TensorWriter<'_>) -> Result<()>,
) -> Result<()> {
    let mut order: Vec<(&String, &TensorInfo)> = tensors.iter().collect();
    order.sort_by_key(|(_, info)| std::cmp::Reverse(info.dtype.size()));
    let failed = |e: std::io::Error| Error::io(path, "write", &e);
    let header = header_of(order.iter().copied(), metadata)?;
    let mut file = BufWriter::with_capacity(
        1 << 16,
        File::create(path).map_err(|e| Error::io(path, "create", &e))?,
    );
    file.write_all(&(header.len() as u64).to_le_bytes())
        .map_err(failed)?;
    file.write_all(&header).map_err(failed)?;
    for (name, info) in order {
        let mut tensor = TensorWriter {
            file: &mut file,
            path,
            name,
            bytes: info.bytes(),
            left: info.bytes(),
        };
        fill(name, &mut tensor)?;
        tensor.finish()?;
    }
    file.into_inner()
        .map_err(|e| failed(e.into_error()))?
        .sync_all()
        .map_err(|e| Error::io(path, "sync", &e))
}

/// The header of tensors that follow each other, padded so that the data after its 8 bytes of
/// length is aligned.
pub(crate) fn header_of<'t>(
    order: impl Iterator<Item = (&'t String, &'t TensorInfo)>,
    metadata: &BTreeMap<String, String>,
) -> Result<Vec<u8>> {
    // Written entry by entry: a map would forget the order of the data.
    let mut entries = vec![];
    if !metadata.is_empty() {
        entries.push(format!("\"__metadata__\":{}", json!(metadata)));
    }
    let mut at = 0usize;
    for (name, info) in order {
        if name.as_str() == "__metadata__" {
            return Err(Error::BadName {
                name: name.clone(),
                what: "the name of a tensor: safetensors files have their own use for it",
            });
        }
        let end = checked_numel(&info.shape).and_then(|n| at.checked_add(n * info.dtype.size()));
        let end = end.ok_or_else(|| Error::TooLarge {
            tensor: name.clone(),
            shape: info.shape.clone(),
        })?;
        let entry =
            json!({"dtype": type_name(info.dtype), "shape": info.shape, "data_offsets": [at, end]});
        entries.push(format!("{}:{entry}", Value::from(name.as_str())));
        at = end;
    }
    let mut header = format!("{{{}}}", entries.join(",")).into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    if header.len() as u64 > super::header::MAX_HEADER {
        return Err(Error::Argument(format!(
            "{} entries need a header of {} bytes, which readers refuse; write several files",
            entries.len(),
            header.len()
        )));
    }
    Ok(header)
}

/// Waits until the names in a folder are on the disk. Elsewhere than on Unix folders cannot be
/// opened for that, and need not be.
pub(crate) fn sync_folder(path: &Path) -> Result<()> {
    if cfg!(unix) {
        File::open(path)
            .and_then(|folder| folder.sync_all())
            .map_err(|e| Error::io(path, "sync", &e))?;
    }
    Ok(())
}

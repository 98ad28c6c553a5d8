//! Files that people take for others, by how they begin.

use std::fmt;

/// What a file is that is not what it was read as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileFormat {
    /// Nothing at all.
    Empty,
    /// The note that Git keeps in the place of a large file that was not fetched.
    GitLfsPointer,
    /// A page, most often the error page of a server.
    WebPage,
    /// An XML document, most often the error of an object store.
    Xml,
    /// A JSON document, such as the index of a Hugging Face folder.
    Json,
    /// A model of llama.cpp.
    Gguf,
    /// What `torch.save` writes: a zip archive with a pickle in it.
    TorchArchive,
    /// A pickle, which is what `torch.save` wrote before it wrote archives.
    Pickle,
    /// An array of NumPy.
    Npy,
    /// Several arrays of NumPy: a zip archive of them.
    Npz,
    /// A model of ONNX.
    Onnx,
    /// HDF5, as Keras and others use it.
    Hdf5,
    /// A model of Keras 3: a zip archive with HDF5 in it.
    Keras,
    /// A zip archive of something else.
    Zip,
    /// Something that was compressed or packed: gzip, zstd, bzip2, xz, 7z or tar.
    Compressed,
}

/// How much of a file [`FileFormat::of`] looks at.
pub(crate) const LOOKED_AT: usize = 512;

impl FileFormat {
    /// What begins so; `None` where that is not known. `first` are the first bytes of the file, 512
    /// of them where it has as many.
    ///
    /// A safetensors file may begin with almost anything, since its first eight bytes are a number.
    /// So this tells what a file is of which it is known that it is none.
    ///
    /// ```
    /// # use anymesh_checkpoint::FileFormat;
    /// assert_eq!(FileFormat::of(b"GGUF\x03\0\0\0"), Some(FileFormat::Gguf));
    /// assert_eq!(FileFormat::of(b"\0\0\0\0"), None);
    /// ```
    pub fn of(first: &[u8]) -> Option<Self> {
        const LFS: &[u8] = b"version https://git-lfs.github.com/";
        const MAGIC: [(&[u8], FileFormat); 8] = [
            (b"GGUF", FileFormat::Gguf),
            (b"\x89HDF\r\n\x1a\n", FileFormat::Hdf5),
            (b"\x93NUMPY", FileFormat::Npy),
            (LFS, FileFormat::GitLfsPointer),
            (b"\x28\xb5\x2f\xfd", FileFormat::Compressed),
            (b"\xfd7zXZ\0", FileFormat::Compressed),
            (b"7z\xbc\xaf\x27\x1c", FileFormat::Compressed),
            // An archive without files.
            (b"PK\x05\x06", FileFormat::Zip),
        ];
        if first.is_empty() {
            return Some(Self::Empty);
        }
        if first.starts_with(b"PK\x03\x04") {
            return Some(Self::of_archive(first));
        }
        if let Some((_, format)) = MAGIC.iter().find(|(magic, _)| first.starts_with(magic)) {
            return Some(*format);
        }
        if first.get(257..262) == Some(b"ustar") {
            return Some(Self::Compressed);
        }
        // Shorter marks may also be the length of a header, which begins with '{' behind it.
        match first {
            [_, _, _, _, _, _, _, _, b'{', ..] => None,
            [0x80, 2..=5, ..] => Some(Self::Pickle),
            [0x1f, 0x8b, ..] | [b'B', b'Z', b'h', ..] => Some(Self::Compressed),
            _ if is_onnx(first) => Some(Self::Onnx),
            _ => Self::of_text(first),
        }
    }

    /// What a zip archive is, by the name of its first file.
    fn of_archive(first: &[u8]) -> Self {
        let length = first
            .get(26..28)
            .map_or(0, |n| usize::from(u16::from_le_bytes([n[0], n[1]])));
        let name = first.get(30..30 + length).unwrap_or_default();
        // torch puts everything into a folder, and the pickle first. Newer versions begin with
        // `.format_version` or `.data/`, in the same folder.
        let inner = name.split(|b| *b == b'/').next_back().unwrap_or_default();
        match name {
            _ if [&b"data.pkl"[..], b".format_version", b"byteorder"].contains(&inner) => {
                Self::TorchArchive
            }
            name if name.ends_with(b".npy") => Self::Npz,
            b"metadata.json" | b"config.json" | b"model.weights.h5" => Self::Keras,
            _ => Self::Zip,
        }
    }

    fn of_text(first: &[u8]) -> Option<Self> {
        let text = first.trim_ascii_start();
        let begins = |with: &str| {
            text.get(..with.len())
                .is_some_and(|t| t.eq_ignore_ascii_case(with.as_bytes()))
        };
        if begins("<!doctype html") || begins("<html") {
            Some(Self::WebPage)
        } else if begins("<?xml") {
            Some(Self::Xml)
        } else if first[0] == b'{' {
            // A header begins with '{' too, but in front of it stands its length.
            Some(Self::Json)
        } else {
            None
        }
    }

    /// Whether this is what stays of a download that did not succeed, so that the right file is
    /// still to be had.
    pub fn is_failed_download(self) -> bool {
        matches!(
            self,
            Self::Empty | Self::GitLfsPointer | Self::WebPage | Self::Xml
        )
    }

    /// What to do with such a file.
    pub fn advice(self) -> &'static str {
        match self {
            Self::Empty => "fetch or write it again",
            Self::GitLfsPointer => {
                "run `git lfs pull` in its folder, which fetches the file itself"
            }
            Self::WebPage | Self::Xml => {
                "a server sent it instead of the file; look into it, then fetch the file again (you may have to log in)"
            }
            Self::Json => {
                "give the safetensors file itself, or the folder that this file describes"
            }
            Self::Gguf => "open it as one (`gguf::File`, `gguf::Model`), or by its path (`open`)",
            Self::TorchArchive | Self::Pickle => {
                "opening it would run code; load it in Python with torch.load(path, weights_only=True) and write it with safetensors.torch.save_file, or use the model's safetensors files"
            }
            Self::Npy | Self::Npz => {
                "load it in Python with numpy.load and write it with safetensors.numpy.save_file"
            }
            Self::Onnx => {
                "read its initializers in Python (onnx.numpy_helper.to_array) and write them with safetensors.numpy.save_file"
            }
            Self::Hdf5 | Self::Keras => {
                "load it in Python (h5py or Keras) and write its arrays with safetensors.numpy.save_file"
            }
            Self::Zip | Self::Compressed => "unpack it, and give what is in it",
        }
    }
}

/// Whether a file begins as ONNX models do. Such a file has no magic number: it is a protocol
/// buffer whose first field is the version, a small number, and whose next ones are texts or
/// models.
fn is_onnx(first: &[u8]) -> bool {
    // Field 1 as a number; then field 2 (the producer), 3 (its version), 7 (the graph) or 8 (the
    // operators), each of which has a length.
    matches!(first, [0x08, 1..=30, 0x12 | 0x1a | 0x3a | 0x42, ..])
}

impl fmt::Display for FileFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Empty => "an empty file",
            Self::GitLfsPointer => {
                "a Git LFS pointer, which stands for a file that was not fetched"
            }
            Self::WebPage => "a web page (HTML)",
            Self::Xml => "an XML document",
            Self::Json => "a JSON document",
            Self::Gguf => "a GGUF file (llama.cpp)",
            Self::TorchArchive => "a file of torch.save (a zip archive with a pickle)",
            Self::Pickle => "a pickle, as torch.save once wrote it",
            Self::Npy => "an array of NumPy (.npy)",
            Self::Npz => "arrays of NumPy (.npz)",
            Self::Onnx => "an ONNX model",
            Self::Hdf5 => "an HDF5 file",
            Self::Keras => "a Keras model",
            Self::Zip => "a zip archive",
            Self::Compressed => "a compressed file or an archive",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A zip archive whose first file has this name.
    fn archive(name: &str) -> Vec<u8> {
        let mut out = b"PK\x03\x04".to_vec();
        out.resize(26, 0);
        out.extend((name.len() as u16).to_le_bytes());
        out.extend([0, 0]);
        out.extend(name.as_bytes());
        out
    }

    #[test]
    fn files_are_told_by_how_they_begin() {
        let mut tar = vec![b'x'; 257];
        tar.extend(b"ustar\x0000");
        let cases: [(&[u8], Option<FileFormat>); 29] = [
            (b"", Some(FileFormat::Empty)),
            (b"GGUF\x03\0\0\0", Some(FileFormat::Gguf)),
            (b"\x89HDF\r\n\x1a\n\0", Some(FileFormat::Hdf5)),
            (b"\x93NUMPY\x01\0", Some(FileFormat::Npy)),
            (
                b"version https://git-lfs.github.com/spec/v1\noid sha256:",
                Some(FileFormat::GitLfsPointer),
            ),
            (b"\n  <!DOCTYPE HTML>\n<head>", Some(FileFormat::WebPage)),
            (b"<html lang=en>", Some(FileFormat::WebPage)),
            (b"<?xml version=\"1.0\"?><Error>", Some(FileFormat::Xml)),
            (b"{\"weight_map\": {}}", Some(FileFormat::Json)),
            (b"\x80\x02\x8a\x0al\xfc", Some(FileFormat::Pickle)),
            (b"\x80\x04\x95", Some(FileFormat::Pickle)),
            (b"\x08\x07\x12\x07pytorch", Some(FileFormat::Onnx)),
            (b"\x08\x0a:\x90\x01", Some(FileFormat::Onnx)),
            (b"\x1f\x8b\x08", Some(FileFormat::Compressed)),
            (&tar, Some(FileFormat::Compressed)),
            (&archive("archive/data.pkl"), Some(FileFormat::TorchArchive)),
            (
                &archive("model/.format_version"),
                Some(FileFormat::TorchArchive),
            ),
            (&archive("weight.npy"), Some(FileFormat::Npz)),
            (&archive("metadata.json"), Some(FileFormat::Keras)),
            (&archive("readme.txt"), Some(FileFormat::Zip)),
            (b"PK\x03\x04", Some(FileFormat::Zip)),
            (b"PK\x05\x06", Some(FileFormat::Zip)),
            (b"\0\0\0\0\0\0\0\0", None),
            (b"hello", None),
            // Lengths of headers: these are safetensors files, whole or cut short.
            (b"\x08\0\0\0\0\0\0\0{}", None),
            (b"\x40\0\0\0\0\0\0\0{\"a\":", None),
            (b"\x08\x07\x12\0\0\0\0\0{\"a\":", None),
            (b"\x80\x02\0\0\0\0\0\0{\"a\":", None),
            (b"\x08", None),
        ];
        for (first, expected) in cases {
            assert_eq!(FileFormat::of(first), expected, "{first:?}");
        }
    }
}

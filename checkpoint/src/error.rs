//! What can go wrong with a checkpoint.

use crate::{TensorInfo, file_format::FileFormat, gguf::Defect};
use anymesh_core::DType;
use std::path::{Path, PathBuf};

/// Everything that can go wrong. Each variant says where, and what to do.
///
/// What a program may want to act on stands in fields: which file, which tensor, which types.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file system refused.
    #[error("{path}: {action} failed: {reason}", path = path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was being done, such as `read`.
        action: &'static str,
        /// The system's words.
        reason: String,
    },
    /// Another process, or another part of this one, is saving into the same folder.
    #[error(
        "{root}: somebody else is writing checkpoints here: wait for that to end, or use another folder",
        root = root.display()
    )]
    Locked {
        /// The folder that holds checkpoints.
        root: PathBuf,
    },
    /// What is to be written is there already. Nothing is ever written over.
    #[error("{path} exists already: remove it or choose another name", path = path.display())]
    Exists {
        /// The file or folder.
        path: PathBuf,
    },
    /// A file that is not what it should be.
    #[error("{path}: not a valid {what}: {detail}", path = path.display())]
    Format {
        /// The file or folder.
        path: PathBuf,
        /// What it was read as, such as `safetensors file`.
        what: &'static str,
        /// What is wrong.
        detail: String,
    },
    /// A file of another format than the one it was read as.
    #[error("{path}: this is {found}, not a {wanted}: {advice}", path = path.display(), advice = found.advice())]
    OtherFormat {
        /// The file.
        path: PathBuf,
        /// What it was read as, such as `safetensors file`.
        wanted: &'static str,
        /// What it is.
        found: FileFormat,
    },
    /// A GGUF file whose bytes are not what they should be.
    #[error("{path}: not a valid GGUF file: at byte {offset}: {defect}", path = path.display())]
    Gguf {
        /// The file.
        path: PathBuf,
        /// Where in the file.
        offset: u64,
        /// What is wrong there.
        defect: Defect,
    },
    /// A GGUF file of a model or with a tokenizer that has no counterpart in Hugging Face's terms,
    /// or none that is known here. Its tensors can be read under their own names.
    #[error("{path}: {item}: {detail}", path = path.display())]
    GgufModel {
        /// The file.
        path: PathBuf,
        /// The key of the metadata or the tensor.
        item: String,
        /// What is wrong with it.
        detail: String,
    },
    /// Bytes that are not those that were written.
    #[error(
        "{path}: tensor '{tensor}', region {start:?}+{shape:?}: the stored bytes are damaged (those from {offset} on do not have their checksum); load an older checkpoint or a replica",
        path = path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The first element of the damaged region of the tensor.
        start: Vec<usize>,
        /// The sizes of that region.
        shape: Vec<usize>,
        /// Where in the file the damaged bytes begin.
        offset: u64,
    },
    /// A tensor that is not there.
    #[error("there is no tensor '{name}'{hint}", hint = near.as_ref().map_or(String::new(), |near| format!(": did you mean '{near}'?")))]
    Missing {
        /// The name asked for.
        name: String,
        /// A name that is like it, where there is one.
        near: Option<String>,
    },
    /// A tensor that is asked of a mapping and that no statement makes.
    #[error(
        "there is no tensor '{name}': no statement writes it; `_ -> {name}` leaves it as it is"
    )]
    NotMade {
        /// Its name.
        name: String,
    },
    /// A tensor of a mapping's source that is asked for nowhere.
    #[error(
        "the source's tensor '{name}' is used by no statement and is no destination; `{name} -> _` says that this is meant"
    )]
    NotUsed {
        /// Its name.
        name: String,
    },
    /// Two tensors of one name.
    #[error("there are two tensors '{name}': {detail}")]
    DuplicateName {
        /// The name.
        name: String,
        /// Where they come from, or what to do.
        detail: String,
    },
    /// A name that a tensor, a file or a checkpoint cannot have.
    #[error("'{name}' cannot be {what}")]
    BadName {
        /// The name.
        name: String,
        /// Of what, and which names can.
        what: &'static str,
    },
    /// A tensor whose element type this library has none for. The rest of the file can be read.
    #[error("{path}: tensor '{tensor}' has elements of type {dtype}, which has no counterpart here; remove it or convert it first", path = path.display())]
    ForeignType {
        /// The file it is in, or the one that it was to be written to.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The type as the file names it.
        dtype: String,
    },
    /// Elements that were asked for as another type than they have.
    #[error("tensor '{tensor}' holds {stored}, not {asked}")]
    ElementType {
        /// The tensor.
        tensor: String,
        /// What it holds.
        stored: DType,
        /// What was asked for.
        asked: DType,
    },
    /// A tensor that is of another type than it is said to be.
    #[error("tensor '{tensor}' is {found}, and is said to be {expected}")]
    TypeMismatch {
        /// The tensor.
        tensor: String,
        /// Its type.
        found: TensorInfo,
        /// What was said.
        expected: TensorInfo,
    },
    /// A part of a tensor that it does not have.
    #[error("tensor '{tensor}' of shape {whole:?} has no region of shape {shape:?} at {start:?}")]
    OutOfBounds {
        /// The tensor.
        tensor: String,
        /// Its shape.
        whole: Vec<usize>,
        /// The first element that was asked for.
        start: Vec<usize>,
        /// How many elements along each dimension.
        shape: Vec<usize>,
    },
    /// A number of bytes that does not fit a tensor or a region of one.
    #[error("tensor '{tensor}' was given {given} bytes where {expected} are needed")]
    ByteCount {
        /// The tensor.
        tensor: String,
        /// As many as it has.
        expected: usize,
        /// As many as were given.
        given: usize,
    },
    /// A tensor whose size is more than can be addressed or stored.
    #[error("tensor '{tensor}' of shape {shape:?} is too large")]
    TooLarge {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A partial value: neither stored nor loaded, because it is not yet the tensor.
    #[error(
        "tensor '{tensor}' as {layout} is a partial value, which is neither stored nor loaded: reshard it first, which says what it sends, or load it whole or cut"
    )]
    Partial {
        /// The tensor.
        tensor: String,
        /// Its dtype, shape and sharding.
        layout: String,
    },
    /// A fused buffer that cannot hold what it is said to hold.
    #[error("fused buffer {layout}: {detail}")]
    FusedBuffer {
        /// The dtype, shape and sharding of the buffer.
        layout: String,
        /// What is wrong.
        detail: String,
    },
    /// Tensors of a source and tensors that they are to replace that do not fit each other.
    /// [`Load`](crate::Load) says for each of these lists how to allow it.
    #[error(
        "the tensors do not fit: {}",
        misfits(missing, unexpected, shapes, dtypes)
    )]
    Misfit {
        /// Names that the source lacks.
        missing: Vec<String>,
        /// Names of the source that nobody asked for.
        unexpected: Vec<String>,
        /// Tensors whose shapes differ.
        shapes: Vec<Difference>,
        /// Tensors whose element types differ.
        dtypes: Vec<Difference>,
    },
    /// A list of tensors and the files they are in that does not agree with the files.
    #[error("{path}: tensor '{tensor}' and file '{file}': {detail}", path = path.display())]
    Index {
        /// The list.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The file it is said to be in, or is in.
        file: String,
        /// What does not agree.
        detail: String,
    },
    /// A layout (`NAMES=SHARDING`) that cannot be read, or that no tensor has a use for.
    #[error("layout \"{layout}\" {detail}")]
    Layout {
        /// The layout as it was written.
        layout: String,
        /// What is wrong with it.
        detail: String,
    },
    /// A tensor of a LoRA adapter that cannot be merged.
    #[error("adapter: '{tensor}': {detail}")]
    Adapter {
        /// The tensor or the module.
        tensor: String,
        /// Why not.
        detail: String,
    },
    /// A pickle that asks for something that is not plain checkpoint data. Nothing of a pickle is
    /// ever executed.
    #[error("{path}: the pickle asks for '{global}', which is not one of the plain data types of a checkpoint; nothing was executed", path = path.display())]
    ForbiddenGlobal {
        /// The file.
        path: PathBuf,
        /// Module and name.
        global: String,
    },
    /// A statement of a mapping that cannot be carried out.
    #[error("mapping line {line}: {detail}\n{trace}")]
    Mapping {
        /// The user's line, from 1.
        line: usize,
        /// What is wrong.
        detail: String,
        /// The statement and what it was expanded to on the way, a line each.
        trace: String,
    },
    /// Another process failed while several saved together.
    #[error(
        "saving failed in the processes of ranks {ranks:?}, whose errors say why: nothing was committed"
    )]
    Elsewhere {
        /// The first rank of each process that failed.
        ranks: Vec<usize>,
    },
    /// An argument outside its domain.
    #[error("{0}")]
    Argument(String),
    /// An error of the tensor library.
    #[error(transparent)]
    Core(#[from] anymesh_core::Error),
}

/// A tensor that is of one type in a program and of another in a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// Its name.
    pub name: String,
    /// Its type in the program.
    pub here: TensorInfo,
    /// Its type in the source.
    pub stored: TensorInfo,
}

/// What does not fit, in words. Of long lists the first names are told.
fn misfits(
    missing: &[String],
    unexpected: &[String],
    shapes: &[Difference],
    dtypes: &[Difference],
) -> String {
    let quoted = |name: &String| format!("'{name}'");
    let with_types = |d: &Difference| format!("'{}' ({} here, {} there)", d.name, d.here, d.stored);
    let cast = |d: &Difference| {
        format!(
            "'{}' is stored as {} and is {} here: allow a cast",
            d.name, d.stored.dtype, d.here.dtype
        )
    };
    let list = |count: usize, names: Vec<String>, what: &str| {
        (count > 0).then(|| format!("{count} {} {what}", names.join(", ")))
    };
    const TOLD: usize = 8;
    let lists = [
        list(
            missing.len(),
            missing.iter().take(TOLD).map(quoted).collect(),
            "are not in the source",
        ),
        list(
            unexpected.len(),
            unexpected.iter().take(TOLD).map(quoted).collect(),
            "are in the source and nobody asked for them",
        ),
        list(
            shapes.len(),
            shapes.iter().take(TOLD).map(with_types).collect(),
            "have another shape in the source",
        ),
    ];
    dtypes
        .iter()
        .take(TOLD)
        .map(cast)
        .chain(lists.into_iter().flatten())
        .collect::<Vec<_>>()
        .join("; ")
}

impl Error {
    /// An error of the file system.
    pub fn io(path: impl AsRef<Path>, action: &'static str, error: &std::io::Error) -> Self {
        Self::Io {
            path: path.as_ref().into(),
            action,
            reason: error.to_string(),
        }
    }

    /// A file that is not what it should be.
    pub fn format(path: impl AsRef<Path>, what: &'static str, detail: impl Into<String>) -> Self {
        Self::Format {
            path: path.as_ref().into(),
            what,
            detail: detail.into(),
        }
    }
}

/// Shorthand used by every fallible function of the crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

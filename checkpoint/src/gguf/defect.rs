//! What can be wrong with the bytes of a GGUF file.

/// What is wrong with the bytes of a GGUF file; [`Error::Gguf`](crate::Error::Gguf) says where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Defect {
    /// The file does not begin as one.
    #[error("it does not begin with \"GGUF\"")]
    Magic,
    /// It was written for machines of the other byte order.
    #[error(
        "it is big-endian (version {version}), which is not read here: convert it to little-endian, or use the little-endian file of the model"
    )]
    BigEndian {
        /// The version of the format, once its bytes are turned around.
        version: u32,
    },
    /// A version of the format that is not read here.
    #[error(
        "it has version {version} of the format, and versions 2 and 3 are read here: make it again with a current converter"
    )]
    Version {
        /// The version.
        version: u32,
    },
    /// The file ends before what it announces.
    #[error("{what} needs {needed} bytes and the file has {left} more: fetch or write it again")]
    Truncated {
        /// What is cut off.
        what: &'static str,
        /// How many bytes it has.
        needed: u64,
        /// How many bytes are left.
        left: u64,
    },
    /// More things than the file has bytes for.
    #[error("it announces {count} {what}, for which the {left} bytes that follow are too few")]
    Count {
        /// What there are said to be.
        what: &'static str,
        /// How many of them.
        count: u64,
        /// How many bytes are left.
        left: u64,
    },
    /// A text that is not one.
    #[error("{what} is not UTF-8")]
    NotText {
        /// Which text.
        what: &'static str,
    },
    /// A value of a type that does not exist.
    #[error("metadata '{key}' has a value of type {id}, which does not exist")]
    ValueType {
        /// The key.
        key: String,
        /// The number of the type.
        id: u32,
    },
    /// A logical value that is neither 0 nor 1.
    #[error("metadata '{key}' has the logical value {value}, which is neither 0 nor 1")]
    NotBool {
        /// The key.
        key: String,
        /// The byte.
        value: u8,
    },
    /// Arrays inside of arrays without end.
    #[error("metadata '{key}' nests arrays deeper than {limit}")]
    TooDeep {
        /// The key.
        key: String,
        /// As deep is allowed.
        limit: usize,
    },
    /// Two values of one key.
    #[error("there are two metadata values '{key}'")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// An alignment that is not one.
    #[error("general.alignment is {found}, not a power of two that is stored as u32")]
    Alignment {
        /// What it is.
        found: String,
    },
    /// Two tensors of one name.
    #[error("there are two tensors '{tensor}'")]
    DuplicateTensor {
        /// The name.
        tensor: String,
    },
    /// More dimensions than tensors of this format have.
    #[error("tensor '{tensor}' has {rank} dimensions, more than {limit}")]
    Rank {
        /// The tensor.
        tensor: String,
        /// Its dimensions.
        rank: u32,
        /// As many are allowed.
        limit: u32,
    },
    /// A shape of more elements than can be addressed.
    #[error("tensor '{tensor}' of shape {shape:?} is too large")]
    TooLarge {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// Rows that are not whole blocks of their type.
    #[error(
        "tensor '{tensor}' has rows of {row} elements, not a multiple of the {block} of a block of {kind}"
    )]
    Row {
        /// The tensor.
        tensor: String,
        /// The length of its rows.
        row: usize,
        /// Its type.
        kind: &'static str,
        /// How many elements a block has.
        block: usize,
    },
    /// A tensor that begins where none may.
    #[error("tensor '{tensor}' begins at {at} of the data, not at a multiple of {alignment}")]
    Misaligned {
        /// The tensor.
        tensor: String,
        /// Where it begins.
        at: u64,
        /// The alignment of the file.
        alignment: u64,
    },
    /// A tensor that ends behind the end of the file.
    #[error(
        "tensor '{tensor}' begins at {at} of the data and has {bytes} bytes, and the file has {available} bytes of data: fetch or write it again"
    )]
    Outside {
        /// The tensor.
        tensor: String,
        /// Where it begins.
        at: u64,
        /// How many bytes it has.
        bytes: u64,
        /// How many bytes the data of the file has.
        available: u64,
    },
}

impl Defect {
    /// Whether the file is damaged, and not just of a kind that is not read here.
    pub fn is_damage(&self) -> bool {
        !matches!(self, Self::BigEndian { .. } | Self::Version { .. })
    }
}

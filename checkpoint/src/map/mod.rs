//! A language that says how the tensors of one model become those of another.
//!
//! ```text
//! embed.weight -> model.embed_tokens.weight                          # rename; a second statement copies
//! a, b -> c, axis=0                                                  # join
//! c -> a, b, axis=0, sizes="[3, 5]"                                  # cut; without sizes into equal parts
//! w -> w, permute="[1, 0]", dtype="bf16"                             # several attributes act in the order they are written
//! w -> w, reshape="[8, -1, 64]"
//! w -> w, src_dtype="bf16", dst_dtype="f32"                          # a cast that can be undone
//! old -> _                                                           # not needed any more
//! _ -> new                                                           # left at its initial value
//! layers.$LAYER_ID.up^T -> model.layers.$LAYER_ID.up.weight          # for every layer; ^T transposes
//! layers.$LAYER_ID_OFFSET.up -> layers.$LAYER_ID_OFFSET.up           # one less on the right
//! experts.*.w -> experts, axis=0                                     # all numbers, counting up
//! part[0:3] -> whole, axis=1                                         # part_0, part_1, part_2
//! q, k, v -> qkv, fused_qkv, num_heads=32, num_key_value_groups=8    # interleaved by key-value group
//! gate, up -> gate_up, fused_ffn, axis=0
//! ```
//!
//! Statements run one after the other, so that a name may be a temporary one: what is written and
//! not read again is a destination. Macros are expanded over the names that are there
//! ([`Mapping::expand`]), in the order of [`Macro::ORDER`]; an error in what they yield shows the
//! way back to the line. The result is a [`Program`], which has an inverse ([`Program::reverse`]).
//! Over the types of the source tensors it becomes a [`Recipe`], and that over a source is a source
//! again ([`Mapped`]).
//!
//! ```
//! use anymesh_checkpoint::map::{Mapped, Mapping, Options};
//! use anymesh_checkpoint::{Memory, Source, TensorInfo};
//! use anymesh_core::DType;
//!
//! let mut source = Memory::default();
//! for layer in 0..2u8 {
//!     let info = TensorInfo { dtype: DType::U8, shape: vec![2, 3] };
//!     source.insert(format!("h.{layer}.w"), info, (0..6).map(|i| 10 * layer + i).collect())?;
//! }
//! let mapping = Mapping::parse("h.$LAYER_ID.w^T -> layers.$LAYER_ID.weight")?;
//! let mapped = Mapped::new(source, &mapping, &Options::default())?;
//! assert_eq!(mapped.info("layers.1.weight")?.shape, [3, 2]);
//! assert_eq!(mapped.read_all("layers.1.weight")?, [10, 13, 11, 14, 12, 15]);
//!
//! let back = Mapped::new(mapped, &mapping, &Options { reverse: true, ..Options::default() })?;
//! assert_eq!(back.read_all("h.1.w")?, [10, 11, 12, 13, 14, 15]);
//! # Ok::<(), anymesh_checkpoint::Error>(())
//! ```

mod dtype;
mod expand;
mod expr;
mod fused;
mod mapped;
mod names;
mod parse;
mod pieces;
mod program;
mod recipe;
mod reverse;
mod statement;
mod token;

pub use dtype::dtype_by_name;
pub use expand::Macro;
pub use expr::{Expr, Kind};
pub use mapped::{Mapped, Options};
pub use names::{Names, STATES};
pub use pieces::{Piece, PieceOp};
pub use program::{Op, Program, Step};
pub use recipe::Recipe;
pub use statement::{Attr, Statement, Value, Var};

use crate::Result;
use std::sync::Arc;

/// Statements as they were written.
#[derive(Clone, Debug, Default)]
pub struct Mapping {
    /// In their order.
    pub statements: Vec<Arc<Statement>>,
}

impl Mapping {
    /// Reads a text, a statement on each line. A line that ends in `,`, `->` or `=` goes on in the
    /// next.
    pub fn parse(text: &str) -> Result<Self> {
        parse::parse(text, None).map(|statements| Self { statements })
    }

    /// Reads a list of statements; errors count them as lines.
    pub fn from_lines<T: AsRef<str>>(lines: impl IntoIterator<Item = T>) -> Result<Self> {
        let mut statements = Vec::new();
        for (index, line) in lines.into_iter().enumerate() {
            statements.extend(parse::parse(line.as_ref(), Some(index + 1))?);
        }
        Ok(Self { statements })
    }

    /// Expands all macros over the names of both sides.
    pub fn expand(&self, names: &Names) -> Result<Program> {
        let mut statements = self.statements.clone();
        for step in Macro::ORDER {
            statements = step.apply(&statements, names)?;
        }
        Program::new(&statements)
    }
}

//! A language that says how the tensors of one model become those of another.
//!
//! ```text
//! embed.weight -> model.embed_tokens.weight                  # rename; a second statement copies
//! a, b -> c, axis=0                                          # join
//! c -> a, b, axis=0, sizes="[3, 5]"                          # cut; without sizes in equal parts
//! w -> w, permute="[1, 0]", dtype="bf16"                     # attributes act in their order
//! w -> w, reshape="[8, -1, 64]"
//! w -> w, src_dtype="bf16", dst_dtype="f32"                  # a cast that can be undone
//! ids -> ids, dtype="float32"                                # any type to any other
//! old -> _                                                   # not needed any more
//! _ -> new                                                   # left at its initial value
//! layers.$LAYER_ID.up^T -> h.$LAYER_ID.up.weight             # for every layer; ^T transposes
//! layers.$LAYER_ID_OFFSET.up -> layers.$LAYER_ID_OFFSET.up   # one less on the right
//! experts.*.w -> experts, axis=0                             # all numbers, counting up
//! part[0:3] -> whole, axis=1                                 # part_0, part_1, part_2
//! # interleaved by key-value group:
//! q, k, v -> qkv, fused_qkv, num_heads=32, num_key_value_groups=8
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
mod mapping;
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
pub use expr::{Derivation, Expr};
pub use mapped::{Mapped, Options};
pub use mapping::Mapping;
pub use names::{Names, STATES};
pub use pieces::{Piece, PieceOp};
pub use program::{Op, Program, Step};
pub use recipe::Recipe;
pub use statement::{Attr, Statement, Value, Var};

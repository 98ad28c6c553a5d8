//! The configuration of a run as one struct: what `anymesh train` reads.

mod text;

pub use text::{parse, print, read};

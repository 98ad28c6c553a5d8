//! x
pub use anymesh_core::*;

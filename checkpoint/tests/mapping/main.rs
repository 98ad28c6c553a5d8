//! The mapping language: recorded cases, primitives against loops, random mappings, errors.

mod array;
mod errors;
mod facts;
mod primitives;
mod random;
mod states;

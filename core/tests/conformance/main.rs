//! The suites that backends are held to, held to themselves.

mod bits;
mod elementwise;
mod registry;

//! Sharded execution.

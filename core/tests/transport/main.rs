//! What carries data between ranks: values, sharing, failure.

mod collectives;
#[cfg(feature = "conformance")]
mod conformance;
mod faults;
mod support;
mod threads;

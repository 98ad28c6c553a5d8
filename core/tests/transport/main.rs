//! What carries data between ranks: values, sharing, failure.

mod collectives;
mod conformance;
mod faults;
mod support;
mod threads;

//! What carries data between ranks: values, sharing, failure.

mod collectives;
mod conformance;
mod devices;
mod faults;
mod threads;

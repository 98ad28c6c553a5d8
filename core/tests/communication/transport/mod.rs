//! What carries data between ranks: values, sharing, failure.

mod background;
mod collectives;
mod conformance;
mod devices;
mod faults;
mod threads;

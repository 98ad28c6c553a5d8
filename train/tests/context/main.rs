//! Long sequences: attention over a sequence that is cut over `cp`, in every way and order, gives what
//! one device gives; what each rank computes, receives and holds is what the formulas say.

mod attention;
mod bytes;
mod parity;
mod processes;
mod run;
mod support;

//! What a program sees: tensors and places, parameters, scopes, lines in the ledger, dtypes, and the
//! kernels that it launches.

mod imports;
mod kernels;
mod ledger_callers;
mod mixed_precision;
mod parameters;
mod scopes;
mod tensors;

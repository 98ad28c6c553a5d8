//! Two runs of one program, held against each other op by op.

mod api;
mod faults;
mod lossy;
mod ops;
mod same;
mod step;

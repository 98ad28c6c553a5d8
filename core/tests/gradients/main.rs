//! Gradients: the tape, every op against differences, places where they are easily wrong, and whole
//! models.

#[path = "../support/gate.rs"]
mod gate;

mod autograd;
mod cases;
mod differences;
mod extremes;
mod halves;
mod nn;
mod overlap;
mod training;

//! Gradients: the tape, every op against differences, places where they are easily wrong, and whole
//! models.

mod autograd;
mod cases;
mod differences;
mod extremes;
mod nn;
mod training;

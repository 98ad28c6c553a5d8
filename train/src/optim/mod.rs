//! Optimizers, and what a step of training takes beside them.
//!
//! A [`Rule`] is a pure function of a parameter's value, its gradient and its state. [`Groups`] say
//! which parameters follow which rule, an [`Accumulator`] adds up gradients, and an [`Optimizer`]
//! clips them, applies the rules and keeps the state by name. A [`Schedule`] is a function of the
//! step. None of them knows how many ranks there are: values, gradients and states lie alike, so the
//! elementwise rules send nothing, and the others reshard.
//!
//! | rule | state of a parameter | sends |
//! |---|---|---|
//! | [`Sgd`] | momentum, if any | nothing |
//! | [`AdamW`] | `m`, `v` | nothing |
//! | [`Lion`] | `m` | nothing |
//! | [`Adafactor`] | means of rows and columns | sums over what is cut |
//! | [`Muon`] | momentum | each matrix to one rank and back |
//! | [`Adam8`] | `m`, `v` in 8 bits, a scale for each 256 | blocks that a cut goes through |

mod accumulate;
mod adafactor;
mod adam8;
mod adamw;
mod clip;
mod codes;
mod ema;
mod groups;
mod lion;
mod muon;
mod optimizer;
mod rounding;
mod rule;
mod scaler;
mod schedule;
mod sgd;

pub use accumulate::{Accumulator, Sums};
pub use adafactor::Adafactor;
pub use adam8::Adam8;
pub use adamw::AdamW;
pub use clip::{Clip, Norm, norm_of};
pub use ema::Ema;
pub use groups::{Group, Groups};
pub use lion::Lion;
pub use muon::{Adjust, Muon, newton_schulz};
pub use optimizer::{Optimizer, Outcome, Progress};
pub use rounding::{Rounding, round_by_chance};
pub use rule::{Rule, Step, Updated, wide};
pub use scaler::LossScaler;
pub use schedule::{Fall, Schedule};
pub use sgd::Sgd;

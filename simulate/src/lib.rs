//! What a training step of a transformer costs on a cluster that nobody here has.
//!
//! A [`Model`], a [`Machine`] and a [`Layout`] are numbers; [`estimate`] prices them in closed form:
//! each product by what a GPU reaches, each collective by the bytes of its formula ([`bytes`]) and the
//! links that its group crosses, the pipeline by the timing of its real
//! [schedule](anymesh_schedule). [`search()`] does so for all layouts of so many ranks.
//!
//! ```
//! use anymesh_simulate::{Limits, machine, preset, search};
//! let preset = preset("llama-3-8b")?;
//! let limits = Limits::new(preset.sequence, preset.batch);
//! let found = search(&preset.model, &machine("h100")?, 16, &limits)?;
//! let best = &found.ranked[0];
//! assert!(best.estimate.fits && best.estimate.ranks == 16);
//! println!("{}\n{}", best.estimate, best.why.join("\n"));
//! # Ok::<(), anymesh_simulate::Error>(())
//! ```
//!
//! What is fitted and what is assumed stands in one place, [`Coefficients`].

#![forbid(unsafe_code)]

pub mod bytes;
mod case;
mod compare;
mod error;
mod estimate;
mod layout;
mod machine;
mod memory;
mod model;
mod presets;
mod report;
mod search;
mod stages;
mod work;

pub use case::{Case, machine_with};
pub use compare::{Comparison, Measure, Row, compare};
pub use error::{Error, Result};
pub use estimate::{Estimate, Memory, Source, Subject, assemble, estimate};
pub use layout::{Attention, Context, Layout, Plan, Precision, Recompute};
pub use machine::{Coefficients, Link, Machine, machine, machines};
pub use memory::{Kept, kept, state};
pub use model::{Experts, Latent, Model, Weights};
pub use presets::{Preset, Published, preset, presets, published};
pub use report::{Event, KINDS, Lane, bytes_text, seconds_text};
pub use search::{Found, Limits, Ranked, search};
pub use stages::{Bytes, Priced, Rank, Stage};
pub use work::{Passes, Spent};

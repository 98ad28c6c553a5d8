//! From one sharding to another: plans as data, and how they run.
//!
//! A [`Plan`] is a path of shardings; each of its steps is one collective, whose kind follows from
//! the shardings at its ends. [`plan`] looks for the best path under the mesh's [`CostModel`],
//! [`Plan::validate`] checks a path, wherever it comes from, and [`run`] takes a tensor along it.
//! Nothing runs unchecked. [`plan_across`] does the same between meshes.
//!
//! Why not only collectives? Because for half of all pairs even the best sequence of them sends
//! more than ranks lack. An exchange sends the missing boxes and nothing else; the cost model
//! decides when fewer messages are worth more bytes.

mod across;
mod assemble;
mod boxes;
mod edge;
mod execute;
mod fewest;
mod grid;
mod held;
mod known;
mod moves;
mod plan;
mod recipe;
mod regroup;
mod report;
mod search;
mod start;
#[cfg(test)]
mod tests;
mod valid;
mod way;

pub use crate::cost::{CostModel, Link};
pub use across::{Transfer, plan_across};
pub use edge::Collective;
pub use execute::run;
pub use plan::{Objective, Plan, Step, plan};
pub use recipe::Recipe;
pub use valid::ValidPlan;

pub(crate) use across::HandOver;
pub(crate) use assemble::{Fetched, assemble};
pub(crate) use execute::{filled, slice};
pub(crate) use held::{Held, Price};
pub(crate) use known::known;
pub(crate) use recipe::lacked;
pub(crate) use regroup::Groups;
pub(crate) use start::{Begin, Packed, Ready};
pub(crate) use way::{start_to_mesh, to_mesh};

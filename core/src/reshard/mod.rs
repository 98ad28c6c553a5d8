//! From one sharding to another: plans as data, and how they run.

mod cost;
mod execute;
mod plan;

pub use cost::{CostModel, Link};
pub use plan::{Kind, Objective, Plan, Step, plan};

pub(crate) use cost::received;
pub(crate) use execute::{run, to_mesh};

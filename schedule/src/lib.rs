//! Pipeline schedules as data: what each rank does with which stage and micro-batch, and in what order.
//!
//! A [`Schedule`] is lists of [`Action`]s. [`build`] makes the known ones by name, [`Search`] looks for
//! one under a limit of memory, and an own one is written down or read from
//! [JSON](Schedule::from_json), from [torch's CSV](Schedule::from_csv) or from
//! [Paddle's job lists](Schedule::from_paddle). Whatever it is made of,
//! [`prove`](Schedule::prove) says whether it can run, and an executor takes that [`Proof`];
//! [`timing`](Schedule::timing) says when everything happens and who waits for whom.
//!
//! ```
//! use anymesh_schedule::{Costs, Limits, Search, build};
//! let costs = Costs::default();
//! let known = build("1f1b", 4, 1, 8)?;
//! let found = Search { live: 4, ..Search::new(4, 1, 8) }.run()?;
//! assert!(found.timing(&costs)?.makespan < known.timing(&costs)?.makespan);
//! // What an executor takes: transfers are in, and the proof holds the schedule.
//! let proof = found.with_transfers()?.prove(&Limits::live(4))?;
//! assert!(proof.schedule().has_transfers());
//! # Ok::<(), anymesh_schedule::Error>(())
//! ```

#![forbid(unsafe_code)]

mod action;
mod bound;
mod build;
mod chart;
mod costs;
mod error;
mod prove;
mod schedule;
mod search;
mod text;
mod timing;

pub use action::{Action, Kind};
pub use build::{
    NAMES, Name, build, dual_pipe_v, eager_one_f_one_b, f_then_b, interleaved,
    interleaved_zero_bubble, looped_bfs, one_f_one_b, zero_bubble_h1, zero_bubble_v,
};
pub use costs::{Cost, Costs};
pub use error::{Error, Fault, Result, Stuck};
pub use prove::{Limits, Proof};
pub use schedule::{Placement, Schedule};
pub use search::Search;
pub use text::paddle::Job;
pub use timing::{Span, Timing, Wait, digits};

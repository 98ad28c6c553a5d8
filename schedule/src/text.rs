//! Schedules as text: our JSON, torch's CSV, Paddle's job lists.

mod csv;
mod json;
pub(crate) mod paddle;

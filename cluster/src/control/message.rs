//! What a process and the hub say to each other.

use crate::{frame::Card, recorder::Record};
use anymesh_core::{Error, RankCall};
use serde::{Deserialize, Serialize};

/// From a process to the hub.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum ToHub {
    /// This process has all its connections.
    Ready,
    /// A value that others may ask for.
    Set { key: String, value: Vec<u8> },
    /// Asks for a value, as soon as there is one.
    Get { key: String },
    /// This process has an error that the others have not.
    Failed { error: String },
    /// Something did not arrive.
    Trouble(Trouble),
    /// The answer to an inquiry.
    Status { inquiry: u64, record: Box<Record> },
    /// The process ends as it should.
    Goodbye,
}

/// What is wrong, as one process sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Trouble {
    /// Nothing came from these for so long.
    Late { from: Vec<usize>, seconds: f64 },
    /// This one sent something else than was expected.
    Differs { from: usize },
    /// The connection to this one broke.
    Gone { who: usize, detail: String },
}

/// From the hub to a process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum ToMember {
    /// Everybody is here.
    Start { cards: Vec<Card> },
    /// These did not come in time.
    NotAll { missing: Vec<usize>, seconds: f64 },
    /// Everybody has all connections.
    Go,
    /// A value that was asked for.
    Value { key: String, value: Vec<u8> },
    /// A process ended as it should.
    Left { process: usize },
    /// What are you doing?
    Inquiry { inquiry: u64 },
    /// It is over, and why.
    Verdict(Verdict),
}

/// Why a cluster has failed: the same for everybody.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Verdict {
    /// A process is gone.
    Died { process: usize, detail: String },
    /// A process has an error that the others have not.
    Failed { process: usize, error: String },
    /// Processes that should have sent something have not.
    Missing {
        processes: Vec<usize>,
        seconds: f64,
        detail: String,
    },
    /// Two processes went different ways.
    Diverged { calls: Box<[Step; 2]> },
}

/// A call of one process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Step {
    pub(crate) process: usize,
    pub(crate) op: String,
    pub(crate) caller: String,
}

impl Verdict {
    /// The error of somebody who called `op`; `ranks` are the ranks of a process in their mesh.
    pub(crate) fn error(&self, op: &'static str, ranks: impl Fn(usize) -> Vec<usize>) -> Error {
        let all = |processes: &[usize]| -> Box<[usize]> {
            processes.iter().flat_map(|p| ranks(*p)).collect()
        };
        let first = |process: usize| ranks(process).first().copied().unwrap_or(process);
        match self {
            Self::Died { process, detail } => Error::Lost {
                op,
                ranks: all(&[*process]),
                detail: detail.clone(),
            },
            Self::Failed { process, error } => Error::Elsewhere {
                op,
                rank: first(*process),
                error: error.clone(),
            },
            Self::Missing {
                processes,
                seconds,
                detail,
            } => Error::Timeout {
                op,
                seconds: *seconds,
                missing: all(processes),
                detail: detail.clone(),
            },
            Self::Diverged { calls } => Error::Diverged {
                calls: Box::new(calls.as_ref().clone().map(|step| RankCall {
                    rank: first(step.process),
                    op: step.op,
                    caller: step.caller,
                })),
            },
        }
    }
}

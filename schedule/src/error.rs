//! What can be wrong with a schedule, or with what was asked for.

use crate::Action;
use thiserror::Error;

/// Why there is no schedule, no proof or no timing.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no built-in schedule of this name.
    #[error("there is no schedule {name:?}: the built-in ones are {}", crate::NAMES.join(", "))]
    UnknownName {
        /// What was asked for.
        name: String,
    },
    /// A number that no schedule has.
    #[error("{what} is {got}: {valid}")]
    Number {
        /// Which number.
        what: &'static str,
        /// Its value.
        got: String,
        /// What would be valid.
        valid: String,
    },
    /// The schedule does not exist for these numbers.
    #[error("{name} does not go with {what}: {instead}")]
    Refused {
        /// The schedule.
        name: &'static str,
        /// What it was asked for.
        what: String,
        /// What it needs, and what to do.
        instead: String,
    },
    /// A text that is not what it should be.
    #[error("{text:?} is no {what}: expected {expected}")]
    Parse {
        /// What it was read as.
        what: &'static str,
        /// The text.
        text: String,
        /// What would be right.
        expected: String,
    },
    /// An action that is wrong where it stands.
    #[error("rank {rank}, position {position}, {action}: {fault}")]
    Invalid {
        /// Whose list.
        rank: usize,
        /// Index in the list; its length if the action is missing.
        position: usize,
        /// The action.
        action: Action,
        /// What is wrong.
        fault: Fault,
    },
    /// Ranks wait for each other for ever.
    #[error("deadlock: {}", .cycle.iter().map(Stuck::to_string).collect::<Vec<_>>().join("; "))]
    Deadlock {
        /// Who waits for whom; the last waits for the first.
        cycle: Vec<Stuck>,
    },
}

/// A rank that waits for another one, which waits itself.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("rank {rank} at position {position} ({action}) waits for rank {peer} to reach {needs}")]
pub struct Stuck {
    /// Who waits.
    pub rank: usize,
    /// Where in its list.
    pub position: usize,
    /// With which action.
    pub action: Action,
    /// For whom.
    pub peer: usize,
    /// To do what.
    pub needs: Action,
}

/// What is wrong with an action.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum Fault {
    /// The stage does not exist.
    #[error("there are only {stages} stages")]
    Stage {
        /// How many there are.
        stages: usize,
    },
    /// The micro-batch does not exist.
    #[error("there are only {micros} micro-batches")]
    Micro {
        /// How many there are.
        micros: usize,
    },
    /// Another rank has the stage.
    #[error("the stage is rank {owner}'s")]
    Owner {
        /// Which one.
        owner: usize,
    },
    /// It was done before.
    #[error("already done at position {first} ({as_})")]
    Twice {
        /// Where.
        first: usize,
        /// As what: a whole backward pass and half of one exclude each other.
        as_: Action,
    },
    /// It is nowhere.
    #[error("missing: nothing in the list does it")]
    Missing,
    /// What it needs comes later in the same list, or not at all.
    #[error("needs {needs} before it")]
    Before {
        /// What it needs.
        needs: Action,
    },
    /// More activations are alive than allowed.
    #[error("{live} activations are alive after it, at most {limit} are allowed")]
    Live {
        /// With this one.
        live: usize,
        /// The limit of the rank.
        limit: usize,
    },
    /// There is nobody to send to or to receive from, or it is the rank itself.
    #[error("no other rank is on the other side")]
    Needless,
    /// A send without a receive or a receive without a send.
    #[error("its other half, {needs} of rank {peer}, is missing")]
    Unmatched {
        /// The other half.
        needs: Action,
        /// Whose list it should be in.
        peer: usize,
    },
    /// The last action of a list cannot run together with the next one.
    #[error("joined to an action that is not there or is no forward or backward pass")]
    Joined,
}

/// `Result` with this crate's [`Error`](enum@Error).
pub type Result<T> = std::result::Result<T, Error>;

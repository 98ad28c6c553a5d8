//! What a rank of a pipeline does, one step at a time.

use crate::Error;
use std::{fmt, str::FromStr};

/// What is done with a micro-batch in a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// The forward pass.
    F,
    /// The whole backward pass: gradients of inputs and of weights.
    B,
    /// The first half of a backward pass: gradients of the stage's inputs, which the stage before
    /// waits for.
    I,
    /// The second half: gradients of the weights, which nobody waits for.
    W,
    /// Gives the stage's output to the stage after it.
    SendF,
    /// Takes the output of the stage before as this stage's input.
    RecvF,
    /// Gives the gradient of the stage's input to the stage before it.
    SendB,
    /// Takes the gradient of this stage's output from the stage after it.
    RecvB,
    /// Nothing: a slot that a list leaves free, as lists of other programs do. It takes no time, but
    /// [`Schedule::with_transfers`](crate::Schedule::with_transfers) counts it as a turn.
    Idle,
}

impl Kind {
    /// All that do something.
    pub const ALL: [Kind; 8] = [
        Kind::F,
        Kind::B,
        Kind::I,
        Kind::W,
        Kind::SendF,
        Kind::RecvF,
        Kind::SendB,
        Kind::RecvB,
    ];

    /// Whether it is `F`, `B`, `I` or `W`.
    pub fn computes(self) -> bool {
        matches!(self, Kind::F | Kind::B | Kind::I | Kind::W)
    }

    /// Whether it sends or receives.
    pub fn transfers(self) -> bool {
        matches!(self, Kind::SendF | Kind::RecvF | Kind::SendB | Kind::RecvB)
    }

    fn text(self) -> &'static str {
        match self {
            Kind::F => "F",
            Kind::B => "B",
            Kind::I => "I",
            Kind::W => "W",
            Kind::SendF => "SEND_F",
            Kind::RecvF => "RECV_F",
            Kind::SendB => "SEND_B",
            Kind::RecvB => "RECV_B",
            Kind::Idle => "",
        }
    }
}

/// A step of a rank. Its text is stage, kind, micro-batch: `2F0`, `1SEND_B3`.
///
/// ```
/// use anymesh_schedule::{Action, Kind};
/// let action: Action = "2RECV_F7".parse()?;
/// assert_eq!((action.stage, action.kind, action.micro), (2, Kind::RecvF, 7));
/// assert_eq!(Action::i(3, 1).to_string(), "3I1");
/// assert!("2X7".parse::<Action>().is_err());
/// # Ok::<(), anymesh_schedule::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// What is done.
    pub kind: Kind,
    /// In which stage.
    pub stage: usize,
    /// With which micro-batch.
    pub micro: usize,
    /// Whether it may run at the same time as the action after it, which then is of another
    /// micro-batch: DualPipe's pairs of a forward and a backward. One after the other is right too.
    pub joined: bool,
}

impl Action {
    /// An action that is not joined to the next.
    pub fn new(kind: Kind, stage: usize, micro: usize) -> Action {
        Action {
            kind,
            stage,
            micro,
            joined: false,
        }
    }

    /// A forward pass.
    pub fn f(stage: usize, micro: usize) -> Action {
        Action::new(Kind::F, stage, micro)
    }

    /// A whole backward pass.
    pub fn b(stage: usize, micro: usize) -> Action {
        Action::new(Kind::B, stage, micro)
    }

    /// Gradients of inputs.
    pub fn i(stage: usize, micro: usize) -> Action {
        Action::new(Kind::I, stage, micro)
    }

    /// Gradients of weights.
    pub fn w(stage: usize, micro: usize) -> Action {
        Action::new(Kind::W, stage, micro)
    }

    /// A free slot.
    pub fn idle() -> Action {
        Action::new(Kind::Idle, 0, 0)
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::Idle => f.write_str("idle"),
            kind => write!(f, "{}{}{}", self.stage, kind.text(), self.micro),
        }
    }
}

impl FromStr for Action {
    type Err = Error;

    fn from_str(text: &str) -> Result<Action, Error> {
        let bad = || {
            Error::Parse {
            what: "action",
            text: text.into(),
            expected: "stage, then F, B, I, W, SEND_F, RECV_F, SEND_B or RECV_B, then micro-batch, such as 2F0".into(),
        }
        };
        let from = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(bad)?;
        let rest = &text[from..];
        let to = rest.find(|c: char| c.is_ascii_digit()).ok_or_else(bad)?;
        let kind = Kind::ALL.into_iter().find(|k| k.text() == &rest[..to]);
        let stage = text[..from].parse().map_err(|_| bad())?;
        let micro = rest[to..].parse().map_err(|_| bad())?;
        Ok(Action::new(kind.ok_or_else(bad)?, stage, micro))
    }
}

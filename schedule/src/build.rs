//! The built-in schedules, by name and as functions.

mod looped;
mod single;
mod v;

pub use looped::{f_then_b, interleaved, interleaved_zero_bubble, looped_bfs};
pub use single::{eager_one_f_one_b, one_f_one_b, zero_bubble_h1};
pub use v::{dual_pipe_v, zero_bubble_v};

use crate::{Action, Error, Placement, Result, Schedule, Search, schedule::check};

/// Names that [`build`] takes; [`Name`] has them as values.
pub const NAMES: [&str; 10] = [
    "fthenb",
    "1f1b",
    "eager-1f1b",
    "interleaved",
    "looped-bfs",
    "zbh1",
    "interleaved-zb",
    "zbv",
    "dualpipev",
    "searched",
];

/// A built-in schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Name {
    /// All forward passes, then all backward passes (GPipe).
    FThenB,
    /// One forward, one backward: as few activations as a full pipeline can have.
    OneFOneB,
    /// The same with twice the forwards ahead, so that transfers can overlap.
    EagerOneFOneB,
    /// 1F1B with several stages on each rank (VPP).
    Interleaved,
    /// Stage by stage on each rank, all forwards, then all backwards.
    LoopedBfs,
    /// Backward passes in two halves, with late gradients of weights filling the end.
    ZeroBubbleH1,
    /// The same with several stages on each rank.
    InterleavedZeroBubble,
    /// Zero bubble with two stages on each rank, placed as a V.
    ZeroBubbleV,
    /// DualPipe with two stages on each rank, placed as a V: forwards and backwards in pairs.
    DualPipeV,
    /// Looked for under a limit of activations ([`Search`]).
    Searched,
}

impl Name {
    /// All of them, in the order of [`NAMES`].
    pub const ALL: [Name; 10] = [
        Name::FThenB,
        Name::OneFOneB,
        Name::EagerOneFOneB,
        Name::Interleaved,
        Name::LoopedBfs,
        Name::ZeroBubbleH1,
        Name::InterleavedZeroBubble,
        Name::ZeroBubbleV,
        Name::DualPipeV,
        Name::Searched,
    ];

    /// Where its stages lie.
    pub fn placement(self) -> Placement {
        match self {
            Name::ZeroBubbleV | Name::DualPipeV => Placement::V,
            _ => Placement::Loop,
        }
    }

    /// How many stages a rank has if nothing is said.
    pub fn chunks(self) -> usize {
        match self {
            Name::Interleaved
            | Name::LoopedBfs
            | Name::InterleavedZeroBubble
            | Name::ZeroBubbleV
            | Name::DualPipeV => 2,
            _ => 1,
        }
    }

    fn text(self) -> &'static str {
        let at = Name::ALL.iter().position(|n| *n == self);
        at.map_or("", |i| NAMES[i])
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.text())
    }
}

impl std::str::FromStr for Name {
    type Err = Error;

    /// Also takes the names that torch and Paddle have for them.
    fn from_str(text: &str) -> Result<Name> {
        let plain: String = text
            .to_lowercase()
            .chars()
            .filter(|c| c.is_ascii_alphanumeric())
            .collect();
        Ok(match plain.strip_prefix("schedule").unwrap_or(&plain) {
            "fthenb" | "gpipe" => Name::FThenB,
            "1f1b" => Name::OneFOneB,
            "eager1f1b" => Name::EagerOneFOneB,
            "interleaved" | "interleaved1f1b" | "vpp" => Name::Interleaved,
            "loopedbfs" => Name::LoopedBfs,
            "zbh1" => Name::ZeroBubbleH1,
            "interleavedzb" | "interleavedzerobubble" => Name::InterleavedZeroBubble,
            "zbv" | "zbvzerobubble" => Name::ZeroBubbleV,
            "dualpipev" => Name::DualPipeV,
            "searched" => Name::Searched,
            _ => return Err(Error::UnknownName { name: text.into() }),
        })
    }
}

/// The built-in schedule of this name for `ranks` ranks with `chunks` stages each.
///
/// The searched one takes equal costs and at most `ranks * chunks` activations; [`Search`] has
/// more to say.
///
/// ```
/// use anymesh_schedule::{Limits, build};
/// let schedule = build("1f1b", 4, 1, 8)?;
/// assert_eq!(schedule.prove(&Limits::none())?.peak(), [4, 3, 2, 1]);
/// let error = build("1f1d", 4, 1, 8).unwrap_err();
/// assert!(error.to_string().contains("eager-1f1b, interleaved"), "{error}");
/// # Ok::<(), anymesh_schedule::Error>(())
/// ```
pub fn build(name: &str, ranks: usize, chunks: usize, micros: usize) -> Result<Schedule> {
    let name: Name = name.parse()?;
    check(ranks, chunks, micros)?;
    let exactly = |wanted: usize, why: &str| match chunks == wanted {
        true => Ok(()),
        false => Err(Error::Refused {
            name: name.text(),
            what: format!("{chunks} stages on each rank"),
            instead: format!("it has exactly {wanted} {why}"),
        }),
    };
    let one = "(interleaved, looped-bfs, interleaved-zb and searched take several)";
    let two = "(interleaved-zb and searched take any number)";
    match name {
        Name::FThenB => f_then_b(ranks, chunks, micros),
        Name::OneFOneB => exactly(1, one).and_then(|()| one_f_one_b(ranks, micros)),
        Name::EagerOneFOneB => exactly(1, one).and_then(|()| eager_one_f_one_b(ranks, micros)),
        Name::Interleaved => interleaved(ranks, chunks, micros),
        Name::LoopedBfs => looped_bfs(ranks, chunks, micros),
        Name::ZeroBubbleH1 => exactly(1, one).and_then(|()| zero_bubble_h1(ranks, micros)),
        Name::InterleavedZeroBubble => interleaved_zero_bubble(ranks, chunks, micros),
        Name::ZeroBubbleV => exactly(2, two).and_then(|()| zero_bubble_v(ranks, micros)),
        Name::DualPipeV => exactly(2, two).and_then(|()| dual_pipe_v(ranks, micros)),
        Name::Searched => Search::new(ranks, chunks, micros).run(),
    }
}

/// A schedule of which `list` makes the actions of each rank.
fn made(
    name: Name,
    [ranks, chunks, micros]: [usize; 3],
    list: impl Fn(usize) -> Vec<Action>,
) -> Result<Schedule> {
    check(ranks, chunks, micros)?;
    Ok(Schedule {
        name: name.to_string(),
        micros,
        owner: name.placement().owners(ranks, chunks),
        ranks: (0..ranks).map(list).collect(),
    })
}

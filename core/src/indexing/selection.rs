//! What an index expression means for a shape, as plain data.

use super::Index;
use crate::{DType, Error, Result, Shape, Tensor, ops::slice::span};
use std::ops::Bound;

/// What is taken of an axis before index tensors look at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Take {
    /// The first element.
    pub(super) start: usize,
    /// Not zero; 1 where there are fewer than two elements.
    pub(super) step: isize,
    /// How many elements.
    pub(super) len: usize,
    /// One element of an axis that goes away.
    pub(super) dropped: bool,
}

impl Take {
    fn all(size: usize) -> Self {
        Take {
            start: 0,
            step: 1,
            len: size,
            dropped: false,
        }
    }

    /// Whether every element of an axis of this size stays where it is.
    pub(super) fn is_all(&self, size: usize) -> bool {
        self.len == size && self.start == 0 && self.step == 1
    }
}

/// An index tensor, or what stands for one.
#[derive(Clone, Debug)]
pub(super) enum Pick {
    /// Places of an axis.
    Places {
        /// The axis.
        axis: usize,
        /// The places.
        index: Tensor,
    },
    /// A mask for as many axes as it has dimensions, from `axis` on.
    Mask {
        /// The first axis.
        axis: usize,
        /// The mask.
        mask: Tensor,
    },
    /// A mask without dimensions.
    Flag(bool),
}

/// An index expression for one shape, checked but for the values of index tensors.
#[derive(Clone, Debug, Default)]
pub(super) struct Selection {
    /// For each axis what is taken of it; all where an index tensor looks at it.
    pub(super) takes: Vec<Take>,
    /// Index tensors, in the order of the axes.
    pub(super) picks: Vec<Pick>,
    /// The dimensions of the result that do not come from index tensors: an axis of the tensor, or
    /// a new one.
    pub(super) kept: Vec<Option<usize>>,
    /// How many of those stand before the dimensions of the index tensors.
    pub(super) front: usize,
}

/// Where the index tensors and integers stand among the entries: NumPy keeps their dimensions in
/// place only if nothing is between them.
#[derive(PartialEq, Eq)]
enum Seen {
    /// There was none so far.
    None,
    /// The last entry was one.
    Open,
    /// There was a run of them, and another entry ended it.
    Closed,
    /// A second run began: something stands between them.
    Apart,
}

impl Selection {
    pub(super) fn new(op: &'static str, shape: &Shape, entries: &[Index]) -> Result<Self> {
        let rank = shape.rank();
        let wrong = |detail: String| Error::Argument { op, detail };
        let used: usize = entries.iter().map(axes_of).sum();
        let Some(free) = rank.checked_sub(used) else {
            return Err(wrong(format!(
                "{used} axes are indexed, but {shape} has {rank}: leave out entries, or add axes with `None`"
            )));
        };
        let ellipses = entries
            .iter()
            .filter(|entry| matches!(entry, Index::Ellipsis))
            .count();
        if ellipses > 1 {
            return Err(wrong(format!(
                "`...` stands {ellipses} times, and once at most says which axes are meant: use `..` for single axes"
            )));
        }
        let mut selection = Selection::default();
        let (mut seen, mut advanced, mut front) = (Seen::None, false, 0);
        for entry in entries
            .iter()
            .chain([&Index::Ellipsis].into_iter().filter(|_| ellipses == 0))
        {
            let axis = selection.takes.len();
            let before = selection.kept.len();
            match entry {
                Index::At(place) => selection.takes.push(at(op, shape[axis], *place)?),
                Index::Slice { start, end, step } => {
                    selection
                        .takes
                        .push(part(op, shape[axis], *start, *end, *step)?);
                    selection.kept.push(Some(axis));
                }
                Index::Ellipsis => {
                    selection.kept.extend((axis..axis + free).map(Some));
                    selection.takes.extend(
                        shape.dims()[axis..axis + free]
                            .iter()
                            .map(|size| Take::all(*size)),
                    );
                }
                Index::NewAxis => selection.kept.push(None),
                Index::Flag(flag) => selection.picks.push(Pick::Flag(*flag)),
                Index::Tensor(mask) if mask.dtype() == DType::Bool => {
                    check_mask(op, shape, axis, mask)?;
                    selection
                        .takes
                        .extend(mask.dims().iter().map(|size| Take::all(*size)));
                    selection.picks.push(Pick::Mask {
                        axis,
                        mask: mask.clone(),
                    });
                }
                Index::Tensor(index)
                    if matches!(index.dtype(), DType::I32 | DType::I64 | DType::U32) =>
                {
                    selection.takes.push(Take::all(shape[axis]));
                    selection.picks.push(Pick::Places {
                        axis,
                        index: index.clone(),
                    });
                }
                Index::Tensor(other) => {
                    return Err(Error::DType {
                        op,
                        dtype: other.dtype(),
                        expected: "an index of i32, i64 or u32, or a mask of bool: cast it",
                    });
                }
            }
            let places = matches!(entry, Index::At(_) | Index::Flag(_) | Index::Tensor(_));
            // A 0-d index tensor counts as an integer: alone it moves no dimension.
            advanced |= matches!(entry, Index::Flag(_))
                || matches!(entry, Index::Tensor(t) if t.rank() > 0 || t.dtype() == DType::Bool);
            seen = match (seen, places) {
                (Seen::None, true) => {
                    front = before;
                    Seen::Open
                }
                (Seen::Open, false) => Seen::Closed,
                (Seen::Closed, true) => Seen::Apart,
                (seen, _) => seen,
            };
        }
        selection.front = if advanced && seen != Seen::Apart {
            front
        } else {
            0
        };
        Ok(selection)
    }
}

/// How many axes an entry is for.
fn axes_of(entry: &Index) -> usize {
    match entry {
        Index::At(_) | Index::Slice { .. } => 1,
        Index::Ellipsis | Index::NewAxis | Index::Flag(_) => 0,
        Index::Tensor(t) if t.dtype() == DType::Bool => t.rank(),
        Index::Tensor(_) => 1,
    }
}

/// One place of an axis.
fn at(op: &'static str, size: usize, place: i64) -> Result<Take> {
    let resolved = if place < 0 {
        i128::from(place) + size as i128
    } else {
        i128::from(place)
    };
    if !(0..size as i128).contains(&resolved) {
        return Err(Error::IndexOutOfRange {
            op,
            index: place,
            len: size,
        });
    }
    Ok(Take {
        start: resolved as usize,
        step: 1,
        len: 1,
        dropped: true,
    })
}

/// A part of an axis. An end that is included is the one that is not, one step of size 1 further.
fn part(
    op: &'static str,
    size: usize,
    start: Option<i64>,
    end: Bound<i64>,
    step: i64,
) -> Result<Take> {
    let end = match end {
        Bound::Unbounded => None,
        Bound::Excluded(end) => Some(end),
        // One further than these would count from the other end.
        Bound::Included(-1) if step > 0 => None,
        Bound::Included(0) if step < 0 => None,
        Bound::Included(end) => end.checked_add(step.signum()),
    };
    let (start, step, len) = span(op, size, start, end, step)?;
    Ok(Take {
        start,
        step,
        len,
        dropped: false,
    })
}

fn check_mask(op: &'static str, shape: &Shape, axis: usize, mask: &Tensor) -> Result<()> {
    match (0..mask.rank()).find(|d| mask.dims()[*d] != shape[axis + d]) {
        Some(d) => {
            let detail = format!(
                "dimension {d} of a mask of shape {} has size {}, but it stands for axis {} of {shape}, which has {}: a mask has the sizes of the axes it is for",
                mask.shape(),
                mask.dims()[d],
                axis + d,
                shape[axis + d]
            );
            Err(Error::Shape { op, detail })
        }
        None => Ok(()),
    }
}

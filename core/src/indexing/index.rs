//! One entry of an index expression, what converts to it, and the macro that lists them.

use crate::Tensor;
use std::ops::{Bound, Range, RangeFrom, RangeFull, RangeInclusive, RangeTo, RangeToInclusive};

/// One entry of an index expression; [`i!`](crate::i) lists them.
#[derive(Clone, Debug)]
pub enum Index {
    /// One place of an axis, which goes away. Negative places count from the end.
    At(i64),
    /// Some elements of an axis with Python's meaning: negative bounds count from the end, bounds
    /// past an end stop there.
    Slice {
        /// Where to begin: at the end that the step leaves, where it is missing.
        start: Option<i64>,
        /// Where to stop.
        end: Bound<i64>,
        /// How far to go each time: not zero, backwards where negative.
        step: i64,
    },
    /// All of the axes that the other entries leave. At most once; it is meant at the end where it
    /// is missing.
    Ellipsis,
    /// A new axis of size 1.
    NewAxis,
    /// A new axis of size 1, or of size 0 for `false`: what a mask without dimensions is.
    Flag(bool),
    /// A mask (bool) for as many axes as it has dimensions, or places (i32, i64, u32) of one axis.
    Tensor(Tensor),
}

impl Index {
    /// Every `step`-th element of a range, backwards where the step is negative: `range;step` in
    /// [`i!`](crate::i).
    pub fn stepped(range: impl Span, step: impl Into<i64>) -> Self {
        let (start, end) = range.bounds();
        Index::Slice {
            start,
            end,
            step: step.into(),
        }
    }
}

/// A range that selects a part of an axis.
pub trait Span {
    /// Where it starts, if it says so, and where it ends.
    fn bounds(self) -> (Option<i64>, Bound<i64>);
}

/// A number that names a place of an axis.
pub trait Position: Copy {
    /// The place. One that `i64` does not hold is past the end of every axis.
    fn position(self) -> i64;
}

macro_rules! positions {
    ($($t:ty),*) => {$(
        impl Position for $t {
            fn position(self) -> i64 {
                i64::try_from(self).unwrap_or(i64::MAX)
            }
        }

        impl From<$t> for Index {
            fn from(place: $t) -> Self {
                Index::At(place.position())
            }
        }
    )*};
}
positions!(i32, i64, u32, usize);

impl Span for RangeFull {
    fn bounds(self) -> (Option<i64>, Bound<i64>) {
        (None, Bound::Unbounded)
    }
}

macro_rules! spans {
    ($($t:ident $range:ident => $start:expr, $end:expr;)*) => {$(
        impl<T: Position> Span for $t<T> {
            fn bounds(self) -> (Option<i64>, Bound<i64>) {
                let $range = self;
                ($start, $end)
            }
        }
    )*};
}
spans! {
    Range r => Some(r.start.position()), Bound::Excluded(r.end.position());
    RangeFrom r => Some(r.start.position()), Bound::Unbounded;
    RangeTo r => None, Bound::Excluded(r.end.position());
    RangeInclusive r => Some(r.start().position()), Bound::Included(r.end().position());
    RangeToInclusive r => None, Bound::Included(r.end.position());
}

impl<R: Span> From<R> for Index {
    fn from(range: R) -> Self {
        Index::stepped(range, 1)
    }
}

impl From<bool> for Index {
    fn from(flag: bool) -> Self {
        Index::Flag(flag)
    }
}

impl From<&Tensor> for Index {
    fn from(tensor: &Tensor) -> Self {
        Index::Tensor(tensor.clone())
    }
}

impl From<Tensor> for Index {
    fn from(tensor: Tensor) -> Self {
        Index::Tensor(tensor)
    }
}

/// An index expression, as an array of [`Index`]: what [`Tensor::get`] and [`Tensor::set`] take.
///
/// | entry | NumPy | meaning |
/// |---|---|---|
/// | `..` | `:` | all of an axis |
/// | `1..5`, `-3..`, `..4`, `1..=4` | `1:5`, `-3:`, `:4` | a part of it |
/// | `1..9;2`, `..;-1`, `7..2;-2` | `1:9:2`, `::-1`, `7:2:-2` | with a step |
/// | `3`, `-1` | `3`, `-1` | one place; the axis goes away |
/// | `...` | `...` | all axes that the others leave |
/// | `None` | `None` | a new axis of size 1 |
/// | `&mask`, `true` | a bool array, `True` | where the mask holds |
/// | `&places` | an integer array | those places; several such tensors broadcast together |
///
/// ```
/// # use anymesh_core::{DType, Tensor, i};
/// # let device = anymesh_backend_cpu::device();
/// let x = Tensor::arange(0, 24, 1, DType::I32, &device)?.reshape([2, 3, 4])?;
/// assert_eq!(x.get(i![1, .., -1])?.to_vec::<i32>()?, [15, 19, 23]);
/// assert_eq!(x.get(i![..., 3..0;-2])?.dims(), [2, 3, 2]);
/// assert_eq!(x.get(i![.., None, 1])?.dims(), [2, 1, 4]);
///
/// let places = Tensor::from_slice(&[1i32, 2], [2], &device)?;
/// assert_eq!(x.get(i![0, .., &places])?.to_vec::<i32>()?, [1, 5, 9, 2, 6, 10]);
/// let large = x.gt(20)?;
/// assert_eq!(x.get(i![&large])?.to_vec::<i32>()?, [21, 22, 23]);
/// assert_eq!(x.set(i![&large], -1)?.sum(&[], false)?.to_vec::<i32>()?, [207]);
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[macro_export]
macro_rules! i {
    // A range that is walked backwards is not empty.
    (@[$($done:expr,)*]) => { { #[allow(clippy::reversed_empty_ranges)] let list: [$crate::Index; _] = [$($done,)*]; list } };
    (@[$($done:expr,)*] ... $(, $($rest:tt)*)?) => { $crate::i!(@[$($done,)* $crate::Index::Ellipsis,] $($($rest)*)?) };
    (@[$($done:expr,)*] None $(, $($rest:tt)*)?) => { $crate::i!(@[$($done,)* $crate::Index::NewAxis,] $($($rest)*)?) };
    (@[$($done:expr,)*] $range:expr; $step:expr $(, $($rest:tt)*)?) => { $crate::i!(@[$($done,)* $crate::Index::stepped($range, $step),] $($($rest)*)?) };
    (@[$($done:expr,)*] $entry:expr $(, $($rest:tt)*)?) => { $crate::i!(@[$($done,)* $crate::Index::from($entry),] $($($rest)*)?) };
    ($($entries:tt)*) => { $crate::i!(@[] $($entries)*) };
}

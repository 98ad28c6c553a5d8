//! Dimensions that are made of others, as data: of what a result's dimension consists, which part of
//! that each rank needs, and what the worst one lacks.

use crate::{Error, Mesh, Result, Shape, Sharding, split};
use smallvec::SmallVec;
use std::{fmt, ops::Range};

/// How one dimension of a result is made of the same dimension of the operands: places in order,
/// some of them filled.
///
/// As text: `7..7+0..6` is a dimension of 8 rolled by one, `7..0` reverses it, `0..6/2` takes every
/// other element, `_2+0..7+_1` pads it, `0*3` repeats the first element, `0..3~2` puts zeros between
/// four of them, `0..3+1:0..2` joins two operands.
///
/// ```
/// # use anymesh_core::reshard::Recipe;
/// let recipe = Recipe::of(8).take(0, 7, 1, 1).take(0, 0, 1, 7);
/// assert_eq!(recipe.to_string(), "7..7+0..6");
/// assert_eq!(Recipe::parse("7..7+0..6", &[8])?, recipe);
/// assert!(Recipe::parse("0..8", &[8]).is_err(), "there is no element 8");
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Recipe {
    /// The dimension's size in each operand.
    from: SmallVec<[usize; 1]>,
    /// Its size in the result.
    size: usize,
    /// In the order of the result; what no piece covers is filled.
    pieces: SmallVec<[Piece; 3]>,
}

/// Elements of an operand, in places of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) operand: usize,
    /// The place of the first one, and how far apart they lie.
    pub(crate) at: usize,
    pub(crate) apart: usize,
    pub(crate) len: usize,
    /// The first one in the operand, and from one to the next.
    pub(crate) start: usize,
    pub(crate) step: isize,
}

impl Piece {
    fn element(&self, i: usize) -> usize {
        (self.start as isize + i as isize * self.step) as usize
    }

    /// Places up to the last one.
    fn width(&self) -> usize {
        (self.len - 1) * self.apart + 1
    }
}

/// Numbers of a piece in [`Recipe::numbers`].
const PIECE: usize = 6;

impl Recipe {
    /// Nothing yet, of one operand in which the dimension has this size.
    pub fn of(size: usize) -> Self {
        Self::of_each(&[size])
    }

    /// Nothing yet, of operands in which the dimension has these sizes.
    pub fn of_each(sizes: &[usize]) -> Self {
        Self {
            from: sizes.into(),
            ..Self::default()
        }
    }

    /// And then `len` elements of an operand, from `start` on, each `step` after the one before it.
    /// They exist.
    pub fn take(self, operand: usize, start: usize, step: isize, len: usize) -> Self {
        self.spread(operand, start, step, len, 1)
    }

    /// The same with each element `apart` places after the one before it.
    pub fn spread(
        mut self,
        operand: usize,
        start: usize,
        step: isize,
        len: usize,
        apart: usize,
    ) -> Self {
        if len > 0 {
            let piece = Piece {
                operand,
                at: self.size,
                apart: if len > 1 { apart } else { 1 },
                len,
                start,
                step: if len > 1 { step } else { 1 },
            };
            self.size += piece.width();
            self.pieces.push(piece);
        }
        self
    }

    /// And then so many places that are filled.
    pub fn fill(mut self, places: usize) -> Self {
        self.size += places;
        self
    }

    /// The size of the dimension in the result.
    pub fn size(&self) -> usize {
        self.size
    }

    /// As numbers, with which a call is known.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = i64> + '_ {
        let pieces = self.pieces.iter().flat_map(|p| {
            [p.operand, p.at, p.apart, p.len, p.start]
                .map(|n| n as i64)
                .into_iter()
                .chain([p.step as i64])
        });
        [self.from.len(), self.pieces.len(), self.size]
            .into_iter()
            .chain(self.from.iter().copied())
            .map(|n| n as i64)
            .chain(pieces)
    }

    /// From [`numbers`](Self::numbers), and what comes after them.
    pub(crate) fn from_numbers(data: &[i64]) -> Option<(Self, &[i64])> {
        let (head, rest) = data.split_at_checked(3)?;
        let (from, rest) = rest.split_at_checked(head[0] as usize)?;
        let (pieces, rest) = rest.split_at_checked(PIECE * head[1] as usize)?;
        let piece = |n: &[i64]| Piece {
            operand: n[0] as usize,
            at: n[1] as usize,
            apart: n[2] as usize,
            len: n[3] as usize,
            start: n[4] as usize,
            step: n[5] as isize,
        };
        let recipe = Self {
            from: from.iter().map(|n| *n as usize).collect(),
            size: head[2] as usize,
            pieces: pieces.chunks(PIECE).map(piece).collect(),
        };
        Some((recipe, rest))
    }

    /// Reads the text, for operands in which the dimension has these sizes.
    pub fn parse(text: &str, sizes: &[usize]) -> Result<Self> {
        let fail = || Error::Parse {
            what: "recipe of a dimension",
            text: text.into(),
            expected: format!(
                "pieces of dimensions of sizes {sizes:?}, such as _2+0..6/2+7..0+0*3+1:0..2"
            ),
        };
        text.split('+')
            .try_fold(Self::of_each(sizes), |recipe, piece| {
                recipe.read(piece, sizes)
            })
            .ok_or_else(fail)
    }

    fn read(self, piece: &str, sizes: &[usize]) -> Option<Self> {
        let number = |text: &str| text.parse::<usize>().ok();
        if let Some(places) = piece.strip_prefix('_') {
            let places = number(places)?;
            self.size.checked_add(places)?;
            return Some(self.fill(places));
        }
        let (operand, rest) = piece.split_once(':').unwrap_or(("0", piece));
        let (rest, apart) = rest.split_once('~').unwrap_or((rest, "1"));
        let (operand, apart) = (number(operand)?, number(apart)?);
        let (start, step, len) = if let Some((start, len)) = rest.split_once('*') {
            (number(start)?, 0, number(len)?)
        } else {
            let (range, step) = rest.split_once('/').unwrap_or((rest, "1"));
            let (first, last) = range.split_once("..")?;
            let (first, last, step) = (number(first)?, number(last)?, number(step)?);
            let count = first.abs_diff(last).checked_div(step)?.checked_add(1)?;
            let step = isize::try_from(step).ok()?;
            (first, if last < first { -step } else { step }, count)
        };
        let last = (start as isize).checked_add(step.checked_mul(len as isize - 1)?)?;
        let size = *sizes.get(operand)?;
        let inside = len > 0 && start < size && (last as usize) < size;
        let width = (len.max(1) - 1).checked_mul(apart)?.checked_add(1)?;
        self.size.checked_add(width)?;
        (inside && apart > 0).then(|| self.spread(operand, start, step, len, apart))
    }

    /// What the places `range` of the result are made of.
    pub(crate) fn share(&self, range: Range<usize>) -> Share {
        let mut share = Share {
            before: 0,
            after: range.len(),
            pieces: SmallVec::new(),
        };
        for piece in &self.pieces {
            let first = |place: usize| {
                place
                    .saturating_sub(piece.at)
                    .div_ceil(piece.apart)
                    .min(piece.len)
            };
            let (low, high) = (first(range.start), first(range.end));
            if low == high {
                continue;
            }
            let own = Piece {
                at: piece.at + low * piece.apart - range.start,
                len: high - low,
                start: piece.element(low),
                ..*piece
            };
            if share.pieces.is_empty() {
                share.before = own.at;
            }
            share.after = range.len() - own.at - own.width();
            share.pieces.push(own);
        }
        share
    }
}

/// What a part of a result's dimension is made of: filled places, pieces one after the other, filled
/// places. Pieces are counted from the start of the part.
#[derive(Clone, Debug)]
pub(crate) struct Share {
    pub(crate) before: usize,
    pub(crate) after: usize,
    pub(crate) pieces: SmallVec<[Piece; 3]>,
}

/// Elements of a dimension in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) start: usize,
    pub(super) step: usize,
    pub(super) len: usize,
}

impl Run {
    /// How many of them are in a range.
    fn inside(&self, range: &Range<usize>) -> usize {
        let first = |place: usize| {
            place
                .saturating_sub(self.start)
                .div_ceil(self.step)
                .min(self.len)
        };
        first(range.end) - first(range.start)
    }

    /// The same by the part, of `parts` of a dimension of size `n`, that holds them.
    pub(super) fn by_holder(self, n: usize, parts: usize) -> impl Iterator<Item = (usize, Run)> {
        let mut left = self;
        std::iter::from_fn(move || {
            if left.len == 0 {
                return None;
            }
            // The part that ends behind the element; parts may be empty.
            let holder = ((left.start as u128 + 1) * parts as u128 - 1) / n as u128;
            let held = Run {
                len: left.inside(&split(n, holder as usize, parts)),
                ..left
            };
            left = Run {
                start: left.start + held.len * left.step,
                len: left.len - held.len,
                ..left
            };
            Some((holder as usize, held))
        })
    }
}

impl Share {
    /// The elements of an operand that it needs, ascending and each once.
    pub(super) fn runs(&self, operand: usize) -> SmallVec<[Run; 2]> {
        let mut runs: SmallVec<[Run; 2]> = self
            .pieces
            .iter()
            .filter(|p| p.operand == operand)
            .map(|p| match p.step {
                0 => Run {
                    start: p.start,
                    step: 1,
                    len: 1,
                },
                step => Run {
                    start: p.start.min(p.element(p.len - 1)),
                    step: if p.len > 1 { step.unsigned_abs() } else { 1 },
                    len: p.len,
                },
            })
            .collect();
        runs.sort_by_key(|run| run.start);
        let mut out: SmallVec<[Run; 2]> = SmallVec::new();
        for run in runs {
            match out.last_mut() {
                Some(last)
                    if last.step == 1 && run.step == 1 && run.start <= last.start + last.len =>
                {
                    last.len = last.len.max(run.start + run.len - last.start);
                }
                _ => out.push(run),
            }
        }
        out
    }

    /// The same with pieces that count the elements of each operand's [`runs`](Self::runs).
    pub(super) fn of_runs(self) -> Self {
        let counted = |piece: &Piece| {
            let mut before = 0;
            for run in self.runs(piece.operand) {
                let end = run.start + (run.len - 1) * run.step;
                if (run.start..=end).contains(&piece.start) {
                    return Piece {
                        start: before + (piece.start - run.start) / run.step,
                        step: piece.step / run.step as isize,
                        ..*piece
                    };
                }
                before += run.len;
            }
            *piece
        };
        let pieces = self.pieces.iter().map(counted).collect();
        Self { pieces, ..self }
    }
}

/// How many elements of each operand a rank needs along a dimension, and how many of those it has.
type Counts = SmallVec<[(u64, u64); 1]>;

/// Elements that the worst rank lacks of what its part of a result is made of, for operands of which
/// the first has this shape and all have this sharding, which the result has too. Partial axes do
/// not count.
pub(crate) fn lacked(
    mesh: &Mesh,
    shape: &Shape,
    sharding: &Sharding,
    recipes: &[(usize, Recipe)],
) -> u64 {
    let is_made = |d: usize| recipes.iter().any(|(dim, _)| *dim == d);
    let parts = |d: usize| -> usize { sharding.axes_of(d).map(|a| mesh.size(a)).product() };
    let others: u64 = (0..shape.rank())
        .filter(|d| !is_made(*d))
        .map(|d| shape[d].div_ceil(parts(d)) as u64)
        .fold(1, u64::saturating_mul);
    if others == 0 {
        return 0;
    }
    // Dimensions are cut by axes of their own, so every combination of their parts is some rank's.
    let mut ranks: Vec<Counts> = vec![];
    for (n, (dim, recipe)) in recipes.iter().enumerate() {
        let mut along: Vec<Counts> = vec![];
        let parts = parts(*dim);
        for part in 0..parts {
            let share = recipe.share(split(recipe.size, part, parts));
            let counts = |(operand, &size): (usize, &usize)| {
                let held = split(size, part, parts);
                let runs = share.runs(operand);
                let sum = |of: &dyn Fn(&Run) -> usize| runs.iter().map(of).sum::<usize>() as u64;
                (sum(&|run| run.len), sum(&|run| run.inside(&held)))
            };
            let counts: Counts = recipe.from.iter().enumerate().map(counts).collect();
            if !along.contains(&counts) {
                along.push(counts);
            }
        }
        ranks = if n == 0 {
            along
        } else {
            let times = |a: &Counts, b: &Counts| -> Counts {
                let both = a.iter().zip(b);
                both.map(|(a, b)| (a.0.saturating_mul(b.0), a.1.saturating_mul(b.1)))
                    .collect()
            };
            let pairs = ranks.iter().flat_map(|a| along.iter().map(|b| times(a, b)));
            pairs.collect()
        };
    }
    let lacks = |counts: &Counts| counts.iter().map(|(need, have)| need - have).sum::<u64>();
    ranks.iter().map(lacks).max().unwrap_or(0) * others
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut at, mut first) = (0, true);
        let mut plus = |f: &mut fmt::Formatter<'_>| {
            let sign = if std::mem::take(&mut first) { "" } else { "+" };
            f.write_str(sign)
        };
        for piece in &self.pieces {
            if piece.at > at {
                plus(f)?;
                write!(f, "_{}", piece.at - at)?;
            }
            at = piece.at + piece.width();
            plus(f)?;
            if piece.operand > 0 {
                write!(f, "{}:", piece.operand)?;
            }
            match piece.step {
                0 => write!(f, "{}*{}", piece.start, piece.len)?,
                step => {
                    write!(f, "{}..{}", piece.start, piece.element(piece.len - 1))?;
                    if step.unsigned_abs() > 1 {
                        write!(f, "/{}", step.unsigned_abs())?;
                    }
                }
            }
            if piece.apart > 1 {
                write!(f, "~{}", piece.apart)?;
            }
        }
        if self.size > at || self.size == 0 {
            plus(f)?;
            write!(f, "_{}", self.size - at)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_found_at_the_part_that_holds_it() {
        for (n, parts) in [(1, 1), (3, 8), (7, 3), (12, 4), (13, 5)] {
            for (start, step) in [(0, 1), (1, 2), (2, 5)] {
                let len = n.max(start) - start;
                let run = Run {
                    start,
                    step,
                    len: len.div_ceil(step),
                };
                let mut next = start;
                for (holder, held) in run.by_holder(n, parts) {
                    assert_eq!((held.start, held.step), (next, step));
                    let part = split(n, holder, parts);
                    for i in 0..held.len {
                        assert!(part.contains(&(held.start + i * step)));
                    }
                    next += held.len * step;
                }
                assert_eq!(next, start + run.len * step);
            }
        }
    }

    #[test]
    fn a_recipe_prints_itself_as_it_is_read() {
        for text in [
            "_0",
            "_3",
            "0..7",
            "7..0",
            "7..7+0..6",
            "1..7/2",
            "6..0/3",
            "_2+0..7+_1",
            "2..1+0..7+6..5",
            "0*3+0..7+7*2",
            "_1+0..3~2+_1",
            "0..7+1:0..2",
        ] {
            let recipe = Recipe::parse(text, &[8, 3]).expect(text);
            assert_eq!(recipe.to_string(), text);
            let numbers: Vec<i64> = recipe.numbers().chain([5]).collect();
            let (again, rest) = Recipe::from_numbers(&numbers).expect("numbers");
            assert_eq!((again, rest), (recipe, &[5][..]));
        }
        for text in [
            "",
            "8",
            "0..8",
            "0..6/0",
            "8*1",
            "0*0",
            "2:0..1",
            "0..3~0",
            "_x",
            "0..18446744073709551615",
            "_18446744073709551615+_1",
        ] {
            assert!(Recipe::parse(text, &[8, 3]).is_err(), "{text}");
        }
    }

    #[test]
    fn what_the_worst_rank_lacks_of_a_result_is_counted_once() {
        let mesh = Mesh::new("a=4", &crate::meta()).expect("a mesh");
        let lacks = |text: &str, n: usize| {
            let recipe = Recipe::parse(text, &[n]).expect(text);
            let cut = Sharding::replicated().cut(0, 0);
            lacked(&mesh, &[n, 3].into(), &cut, &[(0, recipe)])
        };
        assert_eq!(lacks("7..7+0..6", 8), 3, "a row");
        assert_eq!(lacks("7..0", 8), 6, "all of a part");
        assert_eq!(lacks("_1+0..7+_1", 8), 3);
        assert_eq!(
            lacks("0*9", 8),
            3,
            "one element, however often it stands there"
        );
        assert_eq!(lacks("_5", 8), 0);
        assert_eq!(lacks("0..7", 8), 0);
    }
}

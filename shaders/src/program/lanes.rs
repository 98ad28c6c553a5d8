//! How four positions find their elements: coordinates, addresses, windows and parameters.

use super::{MapPlan, Mode, Source};
use crate::{
    reg::{Raw, Reg},
    words::{self, Q4, U2, U4},
};
use anymesh_kernel::Kind;
use cubecl::prelude::*;

/// The runtime arguments of a kernel that evaluates a program (used through its expansion, which
/// the compiler does not see).
#[derive(CubeType, CubeLaunch)]
#[allow(dead_code)]
pub(crate) struct Inputs {
    pub(super) wide: Sequence<Box<[U4]>>,
    pub(super) pairs: Sequence<Box<[U2]>>,
    pub(super) words: Sequence<Box<[u32]>>,
    pub(super) numbers: Sequence<usize>,
    pub(super) params: Sequence<u32>,
}

/// Coordinates of a position, innermost first.
#[cube]
pub(crate) fn coordinates(
    position: usize,
    numbers: &Sequence<usize>,
    #[comptime] rank: usize,
) -> Sequence<usize> {
    let mut out = Sequence::<usize>::new();
    let mut rest = position;
    #[unroll]
    for k in 0..rank {
        if comptime!(k + 1 == rank) {
            out.push(rest);
        } else {
            let extent = *numbers.index(comptime!(rank - 1 - k));
            out.push(rest % extent);
            rest /= extent;
        }
    }
    out
}

/// `offset + sum(coordinate * stride)` of the affine form whose numbers start at `first`.
#[cube]
pub(crate) fn affine(
    coordinates: &Sequence<usize>,
    numbers: &Sequence<usize>,
    #[comptime] rank: usize,
    #[comptime] first: usize,
) -> usize {
    let mut at = *numbers.index(first);
    #[unroll]
    for k in 0..rank {
        at += *coordinates.index(k) * *numbers.index(comptime!(first + rank - k));
    }
    at
}

/// Whether a position lies in the window whose start and size follow the affine form at `first`.
#[cube]
fn in_window(
    coordinates: &Sequence<usize>,
    numbers: &Sequence<usize>,
    #[comptime] rank: usize,
    #[comptime] first: usize,
) -> bool {
    let mut inside = true;
    #[unroll]
    for k in 0..rank {
        let start = *numbers.index(comptime!(first + 1 + rank + rank - 1 - k));
        let len = *numbers.index(comptime!(first + 1 + 2 * rank + rank - 1 - k));
        inside = inside && (*coordinates.index(k) - start) < len;
    }
    inside
}

/// The place of the parameter of a position in a row: see [`anymesh_kernel::backend::Repeat`], whose numbers start at
/// `first`, after an offset.
#[cube]
fn repeated(
    coordinates: &Sequence<usize>,
    numbers: &Sequence<usize>,
    #[comptime] first: usize,
) -> usize {
    let (column, row) = (*coordinates.index(0usize), *coordinates.index(1usize));
    let groups = *numbers.index(comptime!(first + 1));
    let channels = *numbers.index(comptime!(first + 2));
    let inner = *numbers.index(comptime!(first + 3));
    *numbers.index(first) + row % groups * channels + column / inner
}

#[cube]
pub(super) fn last_position(numbers: &Sequence<usize>, #[comptime] rank: usize) -> usize {
    let mut n = 1usize;
    #[unroll]
    for d in 0..rank {
        n *= *numbers.index(d);
    }
    n - 1usize
}

#[cube]
pub(super) fn add(a: usize, b: usize) -> usize {
    a + b
}

#[cube]
fn step(a: usize, #[comptime] lane: usize, stride: usize) -> usize {
    a + lane * stride
}

#[cube]
fn at_most(a: usize, limit: usize) -> usize {
    min(a, limit)
}

#[cube]
fn or_zero(inside: bool, at: usize) -> usize {
    select(inside, at, 0usize)
}

#[cube]
fn four_bits(words: &[u32], a: usize, b: usize, c: usize, d: usize, #[comptime] size: usize) -> U4 {
    let mut out = U4::empty();
    out.insert(0usize, words::bits_at(words, a, size));
    out.insert(1usize, words::bits_at(words, b, size));
    out.insert(2usize, words::bits_at(words, c, size));
    out.insert(3usize, words::bits_at(words, d, size));
    out
}

#[cube]
fn four_wide(words: &[u32], a: usize, b: usize, c: usize, d: usize) -> Q4 {
    let mut out = Q4::empty();
    out.insert(0usize, words::wide_at(words, a));
    out.insert(1usize, words::wide_at(words, b));
    out.insert(2usize, words::wide_at(words, c));
    out.insert(3usize, words::wide_at(words, d));
    out
}

#[cube]
fn splat_bits(words: &[u32], at: usize, #[comptime] size: usize) -> U4 {
    U4::new(words::bits_at(words, at, size))
}

#[cube]
fn splat_wide(words: &[u32], at: usize) -> Q4 {
    Q4::new(words::wide_at(words, at))
}

#[cube]
pub(super) fn four_positions(a: usize, b: usize, c: usize, d: usize) -> crate::words::I4 {
    let mut out = crate::words::I4::empty();
    out.insert(0usize, a as i32);
    out.insert(1usize, b as i32);
    out.insert(2usize, c as i32);
    out.insert(3usize, d as i32);
    out
}

#[cube]
fn four_wide_positions(a: usize, b: usize, c: usize, d: usize) -> crate::words::L4 {
    let mut out = crate::words::L4::empty();
    out.insert(0usize, a as i64);
    out.insert(1usize, b as i64);
    out.insert(2usize, c as i64);
    out.insert(3usize, d as i64);
    out
}

#[cube]
pub(super) fn four_bools(a: bool, b: bool, c: bool, d: bool) -> crate::words::B4 {
    let mut out = U4::empty();
    out.insert(0usize, u32::cast_from(a));
    out.insert(1usize, u32::cast_from(b));
    out.insert(2usize, u32::cast_from(c));
    out.insert(3usize, u32::cast_from(d));
    out.not_equal(&U4::new(0u32))
}

#[cube]
fn splat_param(low: u32) -> U4 {
    U4::new(low)
}

#[cube]
fn splat_wide_param(low: u32, high: u32) -> Q4 {
    Q4::new(words::join(low, high))
}

/// Work shared by the inputs of one expansion: coordinates are computed once and only where
/// somebody needs them.
pub(super) struct Lanes<'a> {
    pub(super) scope: &'a Scope,
    pub(super) inputs: &'a InputsExpand,
    pub(super) plan: &'a MapPlan,
    pub(super) start: NativeExpand<usize>,
    pub(super) first: Option<SequenceExpand<usize>>,
    pub(super) each: Option<Vec<SequenceExpand<usize>>>,
}

impl Lanes<'_> {
    /// Coordinates of the first lane.
    fn first(&mut self) -> SequenceExpand<usize> {
        let (scope, numbers, rank, start) =
            (self.scope, &self.inputs.numbers, self.plan.rank, self.start);
        self.first
            .get_or_insert_with(|| coordinates::expand(scope, start, numbers, rank))
            .clone()
    }

    /// Coordinates of each lane; lanes past the end repeat the last position.
    fn each(&mut self) -> Vec<SequenceExpand<usize>> {
        let (scope, numbers, rank, start) =
            (self.scope, &self.inputs.numbers, self.plan.rank, self.start);
        self.each
            .get_or_insert_with(|| {
                let limit = last_position::expand(scope, numbers, rank);
                (0..4usize)
                    .map(|lane| {
                        let position = add::expand(scope, start, lane.into_expand(scope));
                        coordinates::expand(
                            scope,
                            at_most::expand(scope, position, limit),
                            numbers,
                            rank,
                        )
                    })
                    .collect()
            })
            .clone()
    }

    fn affine_each(&mut self, first: usize) -> [NativeExpand<usize>; 4] {
        let (scope, rank) = (self.scope, self.plan.rank);
        let each = self.each();
        std::array::from_fn(|l| affine::expand(scope, &each[l], &self.inputs.numbers, rank, first))
    }

    /// Whether each lane is inside the window of an input.
    pub(super) fn inside(&mut self, source: &Source) -> [NativeExpand<bool>; 4] {
        let (scope, rank) = (self.scope, self.plan.rank);
        if source.mode == Mode::Vector {
            let first = self.first();
            let numbers = &self.inputs.numbers;
            return [in_window::expand(scope, &first, numbers, rank, source.first); 4];
        }
        let each = self.each();
        std::array::from_fn(|l| {
            in_window::expand(scope, &each[l], &self.inputs.numbers, rank, source.first)
        })
    }

    pub(super) fn index(&mut self, k: usize) -> Reg {
        let [a, b, c, d] = self.affine_each(self.plan.indices + k * (self.plan.rank + 1));
        match self.plan.program.indices[k] {
            Kind::I64 => Reg::L(four_wide_positions::expand(self.scope, a, b, c, d)),
            _ => Reg::I(four_positions::expand(self.scope, a, b, c, d)),
        }
    }

    /// The elements of an input; zeros outside its window.
    pub(super) fn load(&mut self, source: &Source) -> Raw {
        let (scope, rank, size) = (self.scope, self.plan.rank, source.dtype.size());
        let inputs = self.inputs;
        let numbers = &inputs.numbers;
        let words = || {
            inputs
                .words
                .__expand_index_method(scope, source.binding.into())
        };
        match source.mode {
            Mode::Vector => {
                let first = self.first();
                let at = affine::expand(scope, &first, numbers, rank, source.first);
                if !source.windowed {
                    return dense(scope, inputs, source, at);
                }
                let [a, b, c, d] = self.inside(source);
                let raw = dense(scope, inputs, source, or_zero::expand(scope, a, at));
                let inside = four_bools::expand(scope, a, b, c, d);
                Raw::select(scope, inside, raw, raw.zero(scope))
            }
            Mode::Splat | Mode::RepeatedSplat => {
                let first = self.first();
                let at = match source.mode {
                    Mode::Splat => affine::expand(scope, &first, numbers, rank, source.first),
                    _ => repeated::expand(scope, &first, numbers, source.first),
                };
                match size {
                    8 => Raw::Wide(splat_wide::expand(scope, words(), at)),
                    _ => Raw::Bits(splat_bits::expand(scope, words(), at, size)),
                }
            }
            Mode::Repeated => {
                let each = self.each();
                let [a, b, c, d] = std::array::from_fn(|l| {
                    repeated::expand(scope, &each[l], numbers, source.first)
                });
                match size {
                    8 => Raw::Wide(four_wide::expand(scope, words(), a, b, c, d)),
                    _ => Raw::Bits(four_bits::expand(scope, words(), a, b, c, d, size)),
                }
            }
            Mode::Strided | Mode::Scattered => {
                let mut at = if source.mode == Mode::Strided {
                    let first = self.first();
                    let base = affine::expand(scope, &first, numbers, rank, source.first);
                    let stride =
                        *numbers.__expand_index_method(scope, (source.first + rank).into());
                    std::array::from_fn(|l| step::expand(scope, base, l, stride))
                } else {
                    self.affine_each(source.first)
                };
                let inside = source.windowed.then(|| self.inside(source));
                if let Some(inside) = inside {
                    at = std::array::from_fn(|l| or_zero::expand(scope, inside[l], at[l]));
                }
                let [a, b, c, d] = at;
                let raw = match size {
                    8 => Raw::Wide(four_wide::expand(scope, words(), a, b, c, d)),
                    _ => Raw::Bits(four_bits::expand(scope, words(), a, b, c, d, size)),
                };
                match inside {
                    Some([a, b, c, d]) => {
                        let inside = four_bools::expand(scope, a, b, c, d);
                        Raw::select(scope, inside, raw, raw.zero(scope))
                    }
                    None => raw,
                }
            }
        }
    }

    pub(super) fn param(&self, k: usize) -> Reg {
        let scope = self.scope;
        let words = |kind: &Kind| {
            if matches!(kind, Kind::I64 | Kind::F64) {
                2
            } else {
                1
            }
        };
        let at: usize = self.plan.program.params[..k].iter().map(words).sum();
        let kind = self.plan.program.params[k];
        let word = |i: usize| {
            *self
                .inputs
                .params
                .__expand_index_method(scope, (at + i).into())
        };
        let raw = if words(&kind) == 2 {
            Raw::Wide(splat_wide_param::expand(scope, word(0), word(1)))
        } else {
            Raw::Bits(splat_param::expand(scope, word(0)))
        };
        Reg::from_raw(scope, kind.dtype(), raw)
    }

    /// A runtime zero (see [`super::Bound::new`]): the first, or that of a fence.
    pub(super) fn zero(&self, number: usize) -> NativeExpand<u32> {
        *self
            .inputs
            .params
            .__expand_index_method(self.scope, (self.inputs.params.len() - 1 - number).into())
    }
}

/// Four elements of an input that is dense, from element `at` of its buffer on.
pub(super) fn dense(
    scope: &Scope,
    inputs: &InputsExpand,
    source: &Source,
    at: NativeExpand<usize>,
) -> Raw {
    let binding = source.binding.into();
    let wide = || inputs.wide.__expand_index_method(scope, binding);
    match source.dtype.size() {
        8 => Raw::Wide(words::lanes64::expand(scope, wide(), at)),
        4 => Raw::Bits(words::lanes32::expand(scope, wide(), at)),
        2 => {
            let pairs = inputs.pairs.__expand_index_method(scope, binding);
            Raw::Bits(words::lanes16::expand(scope, pairs, at))
        }
        _ => {
            let words = inputs.words.__expand_index_method(scope, binding);
            Raw::Bits(words::lanes8::expand(scope, words, at))
        }
    }
}

//! The code of a program: it is walked while a kernel is compiled, and each instruction emits its own.

use super::{MapPlan, Mode, Source, coarse::coarse};
use crate::{
    math, nvidia,
    reg::{Raw, Reg},
    words::{self, Q4, U2, U4},
};
use anymesh_kernel::{DType, Kind, Scalar, map::Inst};
use cubecl::prelude::*;

/// The runtime arguments of a kernel that evaluates a program (used through its expansion, which
/// the compiler does not see).
#[derive(CubeType, CubeLaunch)]
#[allow(dead_code)]
pub(crate) struct Inputs {
    wide: Sequence<Box<[U4]>>,
    pairs: Sequence<Box<[U2]>>,
    words: Sequence<Box<[u32]>>,
    numbers: Sequence<usize>,
    params: Sequence<u32>,
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

/// The place of the parameter of a position in a row: see [`super::Repeat`], whose numbers start at
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
fn last_position(numbers: &Sequence<usize>, #[comptime] rank: usize) -> usize {
    let mut n = 1usize;
    #[unroll]
    for d in 0..rank {
        n *= *numbers.index(d);
    }
    n - 1usize
}

/// Flags of lanes that are positions of the iteration space.
#[cube]
fn existing(flags: crate::words::B4, start: usize, last: usize) -> crate::words::B4 {
    let mut counted = U4::empty();
    #[unroll]
    for lane in 0..4usize {
        counted.insert(lane, u32::cast_from(start + lane <= last));
    }
    flags.vec_and(counted.equal(&U4::new(1u32)))
}

#[cube]
fn add(a: usize, b: usize) -> usize {
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
fn four_positions(a: usize, b: usize, c: usize, d: usize) -> crate::words::I4 {
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
fn four_bools(a: bool, b: bool, c: bool, d: bool) -> crate::words::B4 {
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
struct Lanes<'a> {
    scope: &'a Scope,
    inputs: &'a InputsExpand,
    plan: &'a MapPlan,
    start: NativeExpand<usize>,
    first: Option<SequenceExpand<usize>>,
    each: Option<Vec<SequenceExpand<usize>>>,
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
    fn inside(&mut self, source: &Source) -> [NativeExpand<bool>; 4] {
        let (scope, rank) = (self.scope, self.plan.rank);
        let each = self.each();
        std::array::from_fn(|l| {
            in_window::expand(scope, &each[l], &self.inputs.numbers, rank, source.first)
        })
    }

    fn index(&mut self, k: usize) -> Reg {
        let [a, b, c, d] = self.affine_each(self.plan.indices + k * (self.plan.rank + 1));
        match self.plan.program.indices[k] {
            Kind::I64 => Reg::L(four_wide_positions::expand(self.scope, a, b, c, d)),
            _ => Reg::I(four_positions::expand(self.scope, a, b, c, d)),
        }
    }

    /// The elements of an input; zeros outside its window.
    fn load(&mut self, source: &Source) -> Raw {
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
                dense(scope, inputs, source, at)
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

    fn param(&self, k: usize) -> Reg {
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

    /// A runtime zero (see [`Bound::new`]): the first, or that of a fence.
    fn zero(&self, number: usize) -> NativeExpand<u32> {
        *self
            .inputs
            .params
            .__expand_index_method(self.scope, (self.inputs.params.len() - 1 - number).into())
    }
}

/// Four elements of an input that is dense, from element `at` of its buffer on.
fn dense(scope: &Scope, inputs: &InputsExpand, source: &Source, at: NativeExpand<usize>) -> Raw {
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

/// Values that a kernel has already, or finds in another way than from its inputs.
#[derive(Default)]
pub(crate) struct Known {
    /// Of inputs.
    pub(crate) loads: Vec<Option<Reg>>,
    /// Of parameters.
    pub(crate) params: Vec<Option<Reg>>,
    /// Of indices.
    pub(crate) index: Option<Reg>,
}

/// What a program's registers hold for the four positions from `start` on.
struct Evaluation<'a> {
    lanes: Lanes<'a>,
    known: Known,
    /// The elements that each input loads, where a register wanted them.
    loaded: Vec<Option<Raw>>,
    /// The values of registers, where they are computed.
    values: Vec<Option<Reg>>,
    /// Registers whose last digits nobody sees, where there are short ways to compute them.
    coarse: Vec<bool>,
}

/// The registers of a program that may be coarse, if its outputs are `stored`; none of them where
/// the device has no short ways.
fn coarse_of(scope: &Scope, plan: &MapPlan, stored: bool) -> Vec<bool> {
    match plan.native && nvidia::is_target(scope) {
        true => coarse(&plan.program, stored),
        false => vec![],
    }
}

impl<'a> Evaluation<'a> {
    /// Emits the instructions whose values are wanted. Faults are flagged through `fault`.
    fn new(
        scope: &'a Scope,
        inputs: &'a InputsExpand,
        plan: &'a MapPlan,
        start: NativeExpand<usize>,
        stored: bool,
        wanted: impl Fn(usize) -> bool,
        fault: &mut dyn FnMut(NativeExpand<crate::words::B4>),
    ) -> Self {
        let mut evaluation = Evaluation {
            lanes: Lanes {
                scope,
                inputs,
                plan,
                start,
                first: None,
                each: None,
            },
            known: Known::default(),
            loaded: vec![None; plan.sources.len()],
            values: vec![None; plan.program.insts.len()],
            coarse: coarse_of(scope, plan, stored),
        };
        // Lanes past the end hold padding, whose zeros are nobody's fault.
        let last = plan
            .program
            .can_fault()
            .then(|| last_position::expand(scope, &inputs.numbers, plan.rank));
        let mut fault = |flagged| {
            if let Some(last) = last {
                fault(existing::expand(scope, flagged, start, last));
            }
        };
        for i in (0..plan.program.insts.len()).filter(|i| wanted(*i)) {
            evaluation.values[i] = Some(evaluation.compute(i, &mut fault));
        }
        evaluation
    }

    /// The value of register `i`.
    fn compute(&mut self, i: usize, fault: &mut dyn FnMut(NativeExpand<crate::words::B4>)) -> Reg {
        let (scope, plan) = (self.lanes.scope, self.lanes.plan);
        let inst = &plan.program.insts[i];
        let known = match *inst {
            Inst::Load(k) => self.known.loads.get(k as usize).copied().flatten(),
            Inst::Param(k) => self.known.params.get(k as usize).copied().flatten(),
            Inst::Index(_) => self.known.index,
            _ => None,
        };
        if let Some(short) = known.or_else(|| self.short(i)) {
            return short;
        }
        match *inst {
            Inst::Load(k) => {
                Reg::from_raw(scope, plan.sources[k as usize].dtype, self.load(k as usize))
            }
            Inst::Inside(k) => {
                let source = &plan.sources[k as usize];
                if source.windowed {
                    let [a, b, c, d] = self.lanes.inside(source);
                    Reg::B(four_bools::expand(scope, a, b, c, d))
                } else {
                    Reg::constant(scope, Scalar::Bool(true), Kind::Bool, self.lanes.zero(0))
                }
            }
            Inst::Index(k) => self.lanes.index(k as usize),
            Inst::Param(k) => self.lanes.param(k as usize),
            Inst::Const(value, kind) => Reg::constant(scope, value, kind, self.lanes.zero(0)),
            Inst::Unary(op, a) => self.value(a).unary(scope, op, plan.native),
            Inst::Binary(op, a, b) => Reg::binary(scope, op, self.value(a), self.value(b), fault),
            Inst::Select(c, a, b) => {
                Reg::select(scope, self.value(c), self.value(a), self.value(b))
            }
            Inst::Cast(a, dtype) => self.value(a).cast(scope, dtype),
            Inst::Fence(a, number) => {
                let zero = self.lanes.zero(number.into());
                self.value(a).fence(scope, zero)
            }
            Inst::Philox { index, key, word } => {
                Reg::philox(scope, self.value(index), key.map(|k| self.value(k)), word)
            }
        }
    }

    /// The value of register `i` in a way that only some devices have.
    fn short(&self, i: usize) -> Option<Reg> {
        let scope = self.lanes.scope;
        let coarse = *self.coarse.get(i)?;
        match self.lanes.plan.program.insts[i] {
            Inst::Unary(op, a) if coarse => match self.value(a) {
                Reg::F(a) => math::coarse_unary(scope, a, op).map(Reg::F),
                _ => None,
            },
            Inst::Binary(op, a, b) => match (self.value(a), self.value(b)) {
                (Reg::F(a), Reg::F(b)) => math::native_binary(scope, a, b, op, coarse).map(Reg::F),
                _ => None,
            },
            _ => None,
        }
    }

    /// The elements of input `k`, loaded once.
    fn load(&mut self, k: usize) -> Raw {
        let plan = self.lanes.plan;
        let raw = match self.loaded[k] {
            Some(raw) => raw,
            None => self.lanes.load(&plan.sources[k]),
        };
        self.loaded[k] = Some(raw);
        raw
    }

    /// The value of a register that is computed. One that is read and is not is a bug of
    /// [`MapProgram::computed`]; CubeCL turns the panic of an expansion into an error of the launch.
    fn value(&self, reg: u16) -> Reg {
        self.values[reg as usize].expect("a value that is read is computed")
    }

    /// What register `reg` stores as `dtype`: the element itself where it is only moved.
    fn stored(&mut self, reg: u16, dtype: DType) -> Raw {
        let moved = self.lanes.plan.program.moved(dtype);
        let mut known = vec![None; reg as usize + 1];
        self.stored_as(reg, dtype, &moved, &mut known)
    }

    fn stored_as(
        &mut self,
        reg: u16,
        dtype: DType,
        moved: &[bool],
        known: &mut [Option<Raw>],
    ) -> Raw {
        if let Some(raw) = known[reg as usize] {
            return raw;
        }
        let scope = self.lanes.scope;
        let raw = match self.lanes.plan.program.insts[reg as usize] {
            _ if !moved[reg as usize] => self.value(reg).to_raw(scope, dtype),
            Inst::Load(k) => self.load(k as usize),
            Inst::Select(c, yes, no) => {
                let yes = self.stored_as(yes, dtype, moved, known);
                let no = self.stored_as(no, dtype, moved, known);
                Raw::select(scope, self.value(c).condition(), yes, no)
            }
            Inst::Cast(a, _) | Inst::Fence(a, _) => self.stored_as(a, dtype, moved, known),
            _ => self.value(reg).to_raw(scope, dtype),
        };
        known[reg as usize] = Some(raw);
        raw
    }
}

/// Emits the program for the four positions from `start` on and returns the values of its outputs.
/// Faults are flagged through `fault`.
pub(crate) fn eval(
    scope: &Scope,
    inputs: &InputsExpand,
    plan: &MapPlan,
    start: NativeExpand<usize>,
    fault: &mut dyn FnMut(NativeExpand<crate::words::B4>),
) -> Vec<Reg> {
    let evaluation = Evaluation::new(scope, inputs, plan, start, false, |_| true, fault);
    let outputs = plan.program.outputs.iter();
    outputs.map(|(reg, _)| evaluation.value(*reg)).collect()
}

/// As [`eval`], but returns the elements to store: what the program only moves is what was loaded,
/// bit for bit.
pub(crate) fn eval_stored(
    scope: &Scope,
    inputs: &InputsExpand,
    plan: &MapPlan,
    start: NativeExpand<usize>,
    fault: &mut dyn FnMut(NativeExpand<crate::words::B4>),
) -> Vec<Raw> {
    let computed = plan.program.computed();
    let mut evaluation = Evaluation::new(scope, inputs, plan, start, true, |i| computed[i], fault);
    let outputs = plan.program.outputs.iter();
    outputs
        .map(|(reg, dtype)| evaluation.stored(*reg, *dtype))
        .collect()
}

/// As [`eval_stored`], for a plan whose inputs are all dense and that uses no positions: input `k`
/// is read from element `at[k]` of its buffer on.
pub(crate) fn eval_dense(
    scope: &Scope,
    inputs: &InputsExpand,
    plan: &MapPlan,
    at: &[NativeExpand<usize>],
) -> Vec<Raw> {
    let loads = plan.sources.iter().zip(at);
    let loads = loads.map(|(source, at)| Some(dense(scope, inputs, source, *at)));
    let mut evaluation = Evaluation {
        lanes: Lanes {
            scope,
            inputs,
            plan,
            start: 0usize.into_expand(scope),
            first: None,
            each: None,
        },
        known: Known::default(),
        loaded: loads.collect(),
        values: vec![None; plan.program.insts.len()],
        coarse: coarse_of(scope, plan, true),
    };
    let computed = plan.program.computed();
    for i in (0..computed.len()).filter(|i| computed[*i]) {
        evaluation.values[i] = Some(evaluation.compute(i, &mut |_| {}));
    }
    let outputs = plan.program.outputs.iter();
    outputs
        .map(|(reg, dtype)| evaluation.stored(*reg, *dtype))
        .collect()
}

#[cube]
fn row_coordinates(row: usize, column: usize) -> Sequence<usize> {
    let mut out = Sequence::<usize>::new();
    out.push(column);
    out.push(row);
    out
}

/// A column of four, and the last one instead of those past the end.
#[cube]
fn column_of(column: usize, #[comptime] lane: usize, length: usize) -> usize {
    min(column + lane, length - 1usize)
}

/// Four columns of a row, of a plan that [`Bound::rows`] made.
#[derive(Clone, Copy)]
pub(crate) struct InRow {
    pub(crate) row: NativeExpand<usize>,
    pub(crate) column: NativeExpand<usize>,
    pub(crate) length: NativeExpand<usize>,
}

impl InRow {
    fn lanes<'a>(
        &self,
        scope: &'a Scope,
        inputs: &'a InputsExpand,
        plan: &'a MapPlan,
    ) -> Lanes<'a> {
        let each = (0..4usize).map(|lane| {
            let column = column_of::expand(scope, self.column, lane, self.length);
            row_coordinates::expand(scope, self.row, column)
        });
        let own = |s: &Source| matches!(s.mode, Mode::Scattered | Mode::Repeated);
        let scattered = plan.sources.iter().any(own);
        Lanes {
            scope,
            inputs,
            plan,
            start: self.column,
            first: Some(row_coordinates::expand(scope, self.row, self.column)),
            each: scattered.then(|| each.collect()),
        }
    }

    /// The elements of input `k`.
    pub(crate) fn load(
        &self,
        scope: &Scope,
        inputs: &InputsExpand,
        plan: &MapPlan,
        k: usize,
    ) -> Reg {
        let source = &plan.sources[k];
        let raw = self.lanes(scope, inputs, plan).load(source);
        Reg::from_raw(scope, source.dtype, raw)
    }

    /// The numbers of the columns.
    pub(crate) fn columns(&self, scope: &Scope) -> Reg {
        let [a, b, c, d] =
            [0usize, 1, 2, 3].map(|lane| add::expand(scope, self.column, lane.into_expand(scope)));
        Reg::I(four_positions::expand(scope, a, b, c, d))
    }

    /// Emits a program and returns the values of its outputs, which are only `stored`, or else are
    /// computed with.
    pub(crate) fn eval(
        &self,
        scope: &Scope,
        inputs: &InputsExpand,
        plan: &MapPlan,
        known: Known,
        stored: bool,
    ) -> Vec<Reg> {
        let mut evaluation = Evaluation {
            lanes: self.lanes(scope, inputs, plan),
            known,
            loaded: vec![None; plan.sources.len()],
            values: vec![None; plan.program.insts.len()],
            coarse: coarse_of(scope, plan, stored),
        };
        for i in 0..plan.program.insts.len() {
            // No row program divides integers.
            evaluation.values[i] = Some(evaluation.compute(i, &mut |_| {}));
        }
        let outputs = plan.program.outputs.iter();
        outputs.map(|(reg, _)| evaluation.value(*reg)).collect()
    }
}

/// Parameter `k` as an `f32`, of programs whose parameters are such.
#[cube]
pub(crate) fn float_param(inputs: &Inputs, #[comptime] k: usize) -> f32 {
    f32::reinterpret(*inputs.params.index(k))
}

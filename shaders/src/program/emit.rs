//! The code of a program: it is walked while a kernel is compiled, and each instruction emits its own.

use super::{
    MapPlan, Mode, Source,
    coarse::coarse,
    lanes::{
        Inputs, InputsExpand, Lanes, add, coordinates, dense, four_bools, four_positions,
        last_position,
    },
};
use crate::{
    math, nvidia,
    reg::{Raw, Reg},
    words::U4,
};
use anymesh_kernel::{
    DType, Kind, Scalar,
    map::{Binary, Inst, Unary},
};
use cubecl::prelude::*;

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
    /// Products that are kept apart from what is made of them.
    apart: Vec<bool>,
}

/// Where drivers may multiply the constants of several products together, or not, by what else reads
/// them: products with several uses, which joined programs fence, too. CUDA's compiler does not.
fn apart_of(plan: &MapPlan) -> Vec<bool> {
    match plan.native {
        true => vec![],
        false => plan.program.shared_products(),
    }
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
            apart: apart_of(plan),
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
            Inst::Binary(op, a, b) => {
                let mut second = self.value(b);
                if matches!(op, Binary::Add | Binary::Sub)
                    && [a, b].iter().all(|r| self.ends_in_product(*r))
                {
                    second = second.fence(scope, self.lanes.zero(0));
                }
                let value = Reg::binary(scope, op, self.value(a), second, fault);
                match self.apart.get(i) {
                    Some(true) => value.fence(scope, self.lanes.zero(0)),
                    _ => value,
                }
            }
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
            Inst::Binary(Binary::Div, a, b) if coarse && self.is_one(a) => match self.value(b) {
                Reg::F(b) => Some(Reg::F(nvidia::coarse_reciprocal::expand(scope, b))),
                _ => None,
            },
            Inst::Binary(op, a, b) => match (self.value(a), self.value(b)) {
                (Reg::F(a), Reg::F(b)) => math::native_binary(scope, a, b, op, coarse).map(Reg::F),
                _ => None,
            },
            _ => None,
        }
    }

    /// Whether the last step to a register's value may be a product of floats, which a compiler makes
    /// one with a sum that follows. Of two products it takes either, by what else is in the kernel; a
    /// program must give the same bits alone and as a part of another one, so one of the two is kept
    /// from it.
    fn ends_in_product(&self, reg: u16) -> bool {
        let program = &self.lanes.plan.program;
        if !matches!(program.kinds[usize::from(reg)], Kind::F32 | Kind::F64) {
            return false;
        }
        match program.insts[usize::from(reg)] {
            Inst::Unary(Unary::Neg, a) => self.ends_in_product(a),
            Inst::Unary(op, _) => !matches!(op, Unary::Abs),
            Inst::Binary(op, ..) => !matches!(
                op,
                Binary::Add | Binary::Sub | Binary::Max | Binary::Min | Binary::Fmax | Binary::Fmin
            ),
            _ => false,
        }
    }

    /// Whether a register is the number one wherever the program runs.
    fn is_one(&self, reg: u16) -> bool {
        let inst = self.lanes.plan.program.insts[usize::from(reg)];
        matches!(inst, Inst::Const(value, _) if value.to_f64() == 1.0)
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
        apart: apart_of(plan),
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

/// Coordinates of a column of a row, innermost first: all dimensions but the last count rows.
#[cube]
fn row_coordinates(
    row: usize,
    column: usize,
    numbers: &Sequence<usize>,
    #[comptime] rank: usize,
) -> Sequence<usize> {
    let mut out = Sequence::<usize>::new();
    out.push(column);
    let lead = coordinates(row, numbers, comptime!(rank - 1));
    #[unroll]
    for k in 0..comptime!(rank - 1) {
        out.push(*lead.index(k));
    }
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
        let place =
            |column| row_coordinates::expand(scope, self.row, column, &inputs.numbers, plan.rank);
        let each = (0..4usize).map(|lane| {
            let column = column_of::expand(scope, self.column, lane, self.length);
            place(column)
        });
        let own = |s: &Source| matches!(s.mode, Mode::Scattered | Mode::Repeated);
        let scattered = plan.sources.iter().any(own);
        Lanes {
            scope,
            inputs,
            plan,
            start: self.column,
            first: Some(place(self.column)),
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
            apart: apart_of(plan),
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

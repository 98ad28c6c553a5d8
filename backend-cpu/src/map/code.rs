//! What is known of a program before it has operands: made once for each, because a small op takes
//! less time than this.

use crate::{
    element::{Held, is_held_as_stored, with_held},
    formulas::{self, Compiled},
    frame::Place,
    loops::Step,
};
use anymesh_kernel::{
    DType, Kind, MapProgram, Mixed, Scalar,
    map::{Inst, Program, Reg},
};
use smallvec::SmallVec;
use std::{cell::RefCell, sync::Arc};

/// Programs that a thread remembers. A training step has some hundred.
const REMEMBERED: usize = 1024;

pub(crate) struct Code {
    /// The instructions with their loops.
    pub(super) steps: Vec<Step>,
    /// Where the values of each register are before anything ran: constants, and slots. Those of the
    /// call's parameters come with the call.
    places: Vec<Place>,
    /// Registers of the call's parameters, and which those are.
    params: Vec<(Reg, u8)>,
    /// The instructions that run for every block: all but constants and parameters.
    pub(super) order: Vec<u16>,
    /// For each instruction the output that stores its values as they are held, if there is one.
    pub(super) targets: Vec<Option<u8>>,
    /// How many slots there are.
    pub(super) slots: usize,
    /// One loop for the whole program.
    pub(super) compiled: Option<&'static dyn Compiled>,
    /// The one instruction that computes, where the program has no other, and no result but that
    /// one: what small ops mostly are. Inputs and the result are held as they are stored.
    pub(super) single: Option<u16>,
}

/// Where the values of each register are.
pub(super) type Places = SmallVec<[Place; 8]>;

impl Code {
    /// Of a program whose first `given` parameters are those of the call.
    pub(crate) fn new(program: &Program, given: usize) -> Self {
        let (own, slots) = slots(program);
        let (mut order, mut params) = (vec![], vec![]);
        let place = |(i, inst): (usize, &Inst)| match *inst {
            Inst::Const(value, kind) => Place::One(word(value, kind)),
            Inst::Param(k) if usize::from(k) < given => {
                params.push((i as Reg, k));
                Place::One(0)
            }
            _ => {
                order.push(i as u16);
                Place::Slot(own[i])
            }
        };
        let places = program.insts.iter().enumerate().map(place).collect();
        let mut targets = vec![None; program.insts.len()];
        for (o, (reg, dtype)) in program.outputs.iter().enumerate().rev() {
            if is_held_as_stored(*dtype) {
                targets[usize::from(*reg)] = Some(o as u8);
            }
        }
        Self {
            steps: (0..program.insts.len())
                .map(|i| Step::new(program, i))
                .collect(),
            places,
            params,
            order,
            targets,
            slots,
            compiled: None,
            single: single(program),
        }
    }

    /// Where the values of each register are before anything ran, with the call's parameters.
    pub(super) fn places(&self, params: &[Scalar], kinds: &[Kind]) -> Places {
        let mut places = Places::from_slice(&self.places);
        for (reg, k) in &self.params {
            let (reg, value) = (usize::from(*reg), params[usize::from(*k)]);
            places[reg] = Place::One(word(value, kinds[reg]));
        }
        places
    }

    /// Of a program that may have come before.
    pub(crate) fn of(program: &MapProgram, given: usize) -> Arc<Self> {
        type Known = Mixed<(MapProgram, usize), Arc<Code>>;
        thread_local! {
            static KNOWN: RefCell<Known> = RefCell::default();
        }
        KNOWN.with_borrow_mut(|known| {
            let key = (program.clone(), given);
            if let Some(code) = known.get(&key) {
                return code.clone();
            }
            if known.len() >= REMEMBERED {
                known.clear();
            }
            let code = Arc::new(Self {
                compiled: formulas::of(program),
                ..Self::new(program, given)
            });
            known.insert(key, code.clone());
            code
        })
    }
}

/// A parameter or a constant as registers hold it.
fn word(value: Scalar, kind: Kind) -> u64 {
    with_held!(kind, T => T::from_scalar(value).to_word())
}

/// See [`Code::single`].
fn single(program: &Program) -> Option<u16> {
    let [(result, dtype)] = program.outputs[..] else {
        return None;
    };
    let as_held = |dtype: &DType| is_held_as_stored(*dtype) && *dtype != DType::Bool;
    let mut computes = (program.insts.iter().enumerate())
        .filter(|(_, inst)| !matches!(inst, Inst::Load(_) | Inst::Const(..) | Inst::Param(_)));
    let (only, inst) = computes.next()?;
    let reads = !matches!(inst, Inst::Inside(_) | Inst::Index(_));
    let is = reads
        && computes.next().is_none()
        && only == usize::from(result)
        && is_held_as_stored(dtype)
        && program.inputs.iter().all(as_held);
    is.then_some(only as u16)
}

/// A slot for each register, and how many there are. What is needed no more gives its slot to
/// others, so that a long program, too, stays within the first-level cache.
fn slots(program: &Program) -> (SmallVec<[u16; 16]>, usize) {
    let insts = &program.insts;
    // The last instruction that reads each register.
    let mut last: SmallVec<[u16; 16]> = (0..insts.len() as u16).collect();
    for (i, inst) in insts.iter().enumerate() {
        inst.operands(|r| last[usize::from(r)] = i as u16);
    }
    for (reg, _) in &program.outputs {
        last[usize::from(*reg)] = u16::MAX;
    }
    let (mut of, mut free) = (SmallVec::new(), SmallVec::<[u16; 16]>::new());
    let mut count = 0;
    for (i, inst) in insts.iter().enumerate() {
        // Its own slot first: what it reads is not overwritten before it is through.
        let slot = free.pop().unwrap_or_else(|| {
            count += 1;
            count - 1
        });
        of.push(slot);
        let mut done = |r: Reg| {
            if last[usize::from(r)] == i as u16 {
                // Only once, also where it is read twice.
                last[usize::from(r)] = u16::MAX;
                free.push(of[usize::from(r)]);
            }
        };
        inst.operands(&mut done);
        done(i as Reg);
    }
    (of, usize::from(count))
}

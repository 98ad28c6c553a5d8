//! The interpreter of map programs. A program runs over blocks of positions; each instruction is
//! one tight loop over the block.

mod code;
mod single;

pub(crate) use code::Code;

use crate::{
    copy,
    element::{self, Held, Stored, is_held_as_stored, with_held, with_stored},
    formulas::Compiled,
    frame::{BLOCK, Frame, Place, Slot, Src, Words},
    grid::{Fetched, Grid},
    memory::Memory,
    parallel,
};
use anymesh_kernel::{
    DType, Error, Kind, Result,
    backend::{Buffers, MapCall, MapInput},
    map::{Inst, MAX_INPUTS, MAX_OUTPUTS, Program, Reg},
};
use smallvec::{SmallVec, smallvec};
use std::{cell::Cell, ops::Range, sync::Arc};

/// Memory for registers, kept between calls.
#[derive(Default)]
pub(crate) struct Scratch {
    slots: Vec<Slot>,
    places: Vec<Place>,
}

thread_local! {
    static SCRATCH: Cell<Scratch> = const {
        Cell::new(Scratch { slots: Vec::new(), places: Vec::new() })
    };
}

impl Scratch {
    /// Runs `f` with this thread's scratch memory. Nested use gets fresh memory.
    pub(crate) fn with<R>(f: impl FnOnce(&mut Scratch) -> R) -> R {
        let mut scratch = SCRATCH.take();
        let result = f(&mut scratch);
        SCRATCH.set(scratch);
        result
    }
}

/// Values of parameters that are known only when a block runs: those behind the parameters of a call.
#[derive(Clone, Copy, Default)]
pub(crate) struct Late<'a> {
    /// The parameters of the call.
    pub(crate) before: usize,
    /// For each parameter behind those a value for each row of the block.
    pub(crate) values: &'a [u64],
    /// How many rows a block has.
    pub(crate) rows: usize,
}

/// A program bound to its operands.
pub(crate) struct BoundProgram<'a> {
    op: &'static str,
    program: &'a Program,
    code: Arc<Code>,
    grid: Grid<'a>,
    /// Where the values of each register are before anything ran: constants, parameters, and slots.
    places: SmallVec<[Place; 8]>,
}

impl<'a> BoundProgram<'a> {
    /// `inputs` are those of the call, or copies that are easier to read. `order` permutes the axes
    /// of the call's shape; linear positions then count in that order.
    pub(crate) fn new(
        call: &'a MapCall,
        inputs: &'a [MapInput],
        order: Option<&[usize]>,
    ) -> Result<Self> {
        let code = Code::of(&call.program, call.params.len());
        Self::of(call, &call.program, code, inputs, order)
    }

    /// [`new`](Self::new), with another program than the call's.
    pub(crate) fn of(
        call: &'a MapCall,
        program: &'a Program,
        code: Arc<Code>,
        inputs: &'a [MapInput],
        order: Option<&[usize]>,
    ) -> Result<Self> {
        let places = code.places(&call.params, &program.kinds);
        Ok(Self {
            op: call.op,
            program,
            code,
            grid: Grid::new(call.shape.dims(), inputs, &call.indices, order)?,
            places,
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.grid.len
    }

    /// Runs the program over at most [`BLOCK`] positions. Registers that can be written straight to
    /// an output are, the rest stay in the scratch memory.
    fn execute(
        &self,
        range: Range<usize>,
        scratch: &mut Scratch,
        outs: &mut [&mut [u8]],
    ) -> Result<()> {
        self.begin(scratch);
        if self.at_once(&range, scratch, outs) {
            return Ok(());
        }
        self.steps(&self.code.order, range, Late::default(), scratch, outs)
    }

    /// Runs the whole program as one loop. Returns false where there is none, or where an input has
    /// one value for all positions.
    fn at_once(&self, range: &Range<usize>, scratch: &mut Scratch, outs: &mut [&mut [u8]]) -> bool {
        let (Some(compiled), len) = (self.code.compiled, range.len()) else {
            return false;
        };
        // Inputs and numbers are its first instructions.
        let (inputs, outputs) = (self.program.inputs.len(), &self.program.outputs);
        for i in 0..inputs {
            self.read(i, range.clone(), Late::default(), scratch);
        }
        // Results that are not written as they are held have slots behind those of registers.
        let place = |(o, (_, dtype)): (usize, &(Reg, DType))| match is_held_as_stored(*dtype) {
            true if o < outs.len() => Place::Output(o),
            _ => Place::Slot((self.code.slots + o) as u16),
        };
        let places: SmallVec<[Place; MAX_OUTPUTS]> =
            outputs.iter().enumerate().map(place).collect();
        let mut slots: [Slot; MAX_OUTPUTS] = Default::default();
        for (slot, place) in slots.iter_mut().zip(&places) {
            if let Place::Slot(number) = *place {
                *slot = scratch.slots[usize::from(number)].take();
            }
        }
        let done = self.run_compiled(compiled, len, scratch, &mut slots, outs);
        for ((slot, place), (reg, _)) in slots.iter_mut().zip(&places).zip(outputs) {
            if let Place::Slot(number) = *place {
                scratch.slots[usize::from(number)] = slot.take();
            }
            if done {
                scratch.places[usize::from(*reg)] = *place;
            }
        }
        done
    }

    /// Runs the loop of the whole program, whose inputs are there, into slots where these are and
    /// else into outputs. Returns false where an input has one value for all positions.
    fn run_compiled(
        &self,
        compiled: &dyn Compiled,
        len: usize,
        scratch: &Scratch,
        slots: &mut [Slot],
        outs: &mut [&mut [u8]],
    ) -> bool {
        let (inputs, outputs) = (self.program.inputs.len(), self.program.outputs.len());
        let frame = self.frame(scratch, &[], len);
        let mut values = SmallVec::<[&[f32]; MAX_INPUTS]>::new();
        let mut numbers = SmallVec::<[f32; 16]>::new();
        for i in 0..inputs + self.program.params.len() {
            match frame.src(i as Reg) {
                Src::Many(of) => values.push(of),
                Src::One(number) => numbers.push(number),
            }
        }
        if values.len() != inputs {
            return false;
        }
        let mut outs = outs.iter_mut();
        let mut results = SmallVec::<[&mut [f32]; MAX_OUTPUTS]>::new();
        for slot in &mut slots[..outputs] {
            let bytes = match (slot, outs.next()) {
                (Some(words), _) => bytemuck::cast_slice_mut(&mut words.0),
                (None, Some(out)) => &mut **out,
                (None, None) => return false,
            };
            results.push(&mut bytemuck::cast_slice_mut(bytes)[..len]);
        }
        compiled.run(&values, &numbers, &mut results);
        true
    }

    /// Begins with a block: nothing is computed yet.
    pub(crate) fn begin(&self, scratch: &mut Scratch) {
        let slots = match self.code.compiled {
            Some(_) => self.code.slots + MAX_OUTPUTS,
            None => self.code.slots,
        };
        if scratch.slots.len() < slots {
            let slot = || Some(Box::new(Words([0; BLOCK])));
            scratch.slots.resize_with(slots, slot);
        }
        scratch.places.clear();
        scratch.places.extend_from_slice(&self.places);
    }

    /// Runs some instructions over at most [`BLOCK`] positions, the same ones since [`begin`](Self::begin).
    pub(crate) fn steps(
        &self,
        steps: &[u16],
        range: Range<usize>,
        late: Late<'_>,
        scratch: &mut Scratch,
        outs: &mut [&mut [u8]],
    ) -> Result<()> {
        for i in steps {
            // Not a `Result`: to hand on one of those takes as long as a short instruction does.
            if !self.instruction(usize::from(*i), range.clone(), late, scratch, outs) {
                return Err(Error::DivisionByZero { op: self.op });
            }
        }
        Ok(())
    }

    /// Runs instruction `i`. Returns false where an integer was divided by zero.
    fn instruction(
        &self,
        i: usize,
        range: Range<usize>,
        late: Late<'_>,
        scratch: &mut Scratch,
        outs: &mut [&mut [u8]],
    ) -> bool {
        let (step, len) = (&self.code.steps[i], range.len());
        if step.operands().is_empty() {
            self.read(i, range, late, scratch);
            return true;
        }
        let target = self.code.targets[i].map(usize::from);
        let target = target.filter(|target| *target < outs.len());
        let constant =
            target.is_none() && self.frame(scratch, outs, len).is_constant(step.operands());
        if late.rows > 1 && !constant {
            for r in step.operands() {
                self.spread(*r, len, late.rows, scratch);
            }
        }
        if let Some(target) = target {
            let out = std::mem::take(&mut outs[target]);
            let done = step.run(&self.frame(scratch, outs, len), out, len);
            outs[target] = out;
            scratch.places[i] = Place::Output(target);
            return done;
        }
        let Some((number, mut words)) = self.taken(i, scratch) else {
            return true;
        };
        let slot: &mut [u8] = bytemuck::cast_slice_mut(&mut words.0);
        let frame = self.frame(scratch, outs, len);
        let done;
        if !constant {
            done = step.run(&frame, slot, len);
        } else if frame.has_rows(step.operands()) {
            let frame = Frame {
                len: late.rows,
                ..frame
            };
            done = step.run(&frame, slot, late.rows);
            scratch.places[i] = Place::Rows(number);
        } else {
            done = step.run(&frame, slot, 1);
            let kind = self.program.kinds[i];
            let value = with_held!(kind, T => bytemuck::cast_slice::<u8, T>(slot)[0].to_word());
            scratch.places[i] = Place::One(value);
        }
        scratch.slots[usize::from(number)] = Some(words);
        done
    }

    /// The memory of register `i`, taken out, so that it can be written while others are read.
    fn taken(&self, i: usize, scratch: &mut Scratch) -> Option<(u16, Box<Words>)> {
        let Place::Slot(number) = self.places[i] else {
            return None;
        };
        Some((number, scratch.slots[usize::from(number)].take()?))
    }

    /// Runs instruction `i`, which reads no register but memory, positions or parameters.
    fn read(&self, i: usize, range: Range<usize>, late: Late<'_>, scratch: &mut Scratch) {
        let Some((number, mut words)) = self.taken(i, scratch) else {
            return;
        };
        let (slot, len): (&mut [u8], _) = (bytemuck::cast_slice_mut(&mut words.0), range.len());
        match self.code.steps[i].inst {
            Inst::Load(k) => {
                if let Some(place) = self.load(k, range, slot) {
                    scratch.places[i] = place;
                }
            }
            Inst::Inside(k) => {
                let source = &self.grid.sources[usize::from(k)];
                if self.grid.inside(source, range, &mut slot[..len]).is_none() {
                    scratch.places[i] = Place::One(1);
                }
            }
            Inst::Index(k) => {
                let form = usize::from(k);
                match self.program.kinds[i] {
                    Kind::I32 => {
                        (self.grid).form(form, range, bytemuck::cast_slice_mut(slot), |v| v as i32)
                    }
                    _ => (self.grid).form(form, range, bytemuck::cast_slice_mut(slot), |v| v),
                }
            }
            Inst::Param(k) => {
                let first = (usize::from(k) - late.before) * late.rows;
                match late.values[first..first + late.rows] {
                    [value] => scratch.places[i] = Place::One(value),
                    ref values => {
                        with_held!(self.program.kinds[i], T => {
                            let all: &mut [T] = bytemuck::cast_slice_mut(slot);
                            for (row, value) in all.iter_mut().zip(values) {
                                *row = T::from_word(*value);
                            }
                        });
                        scratch.places[i] = Place::Rows(number);
                    }
                }
            }
            _ => {}
        }
        scratch.slots[usize::from(number)] = Some(words);
    }

    /// Makes one value for each row of a register one for each position.
    pub(crate) fn spread(&self, reg: Reg, len: usize, rows: usize, scratch: &mut Scratch) {
        let reg = usize::from(reg);
        let Place::Rows(number) = scratch.places[reg] else {
            return;
        };
        if let Some(words) = &mut scratch.slots[usize::from(number)] {
            with_held!(self.program.kinds[reg], T => {
                let all: &mut [T] = bytemuck::cast_slice_mut(&mut words.0);
                // From the last on: what is read is not written before.
                for row in (0..rows).rev() {
                    let (value, len) = (all[row], len / rows);
                    all[row * len..(row + 1) * len].fill(value);
                }
            });
        }
        scratch.places[reg] = Place::Slot(number);
    }

    /// What an instruction can read. Always inlined: as a result it would be copied right after it
    /// was written.
    #[inline(always)]
    fn frame<'s>(
        &'s self,
        scratch: &'s Scratch,
        outs: &'s [&'s mut [u8]],
        len: usize,
    ) -> Frame<'s> {
        Frame {
            inputs: &self.grid.inputs,
            slots: &scratch.slots,
            places: &scratch.places,
            outs,
            len,
        }
    }

    fn load(&self, k: u8, range: Range<usize>, slot: &mut [u8]) -> Option<Place> {
        let input = usize::from(k);
        with_stored!(self.grid.sources[input].dtype, S => {
            let slot: &mut [<S as Stored>::Held] = bytemuck::cast_slice_mut(slot);
            match self.grid.fetch::<S>(input, range.clone(), &mut slot[..range.len()]) {
                Fetched::One => Some(Place::One(slot[0].to_word())),
                Fetched::InPlace(at) => Some(Place::Input(k, at)),
                Fetched::Filled => None,
            }
        })
    }

    /// Runs the program over `range`, in blocks, into the outputs' bytes for that range.
    pub(crate) fn run(
        &self,
        range: Range<usize>,
        mut outs: [&mut [u8]; MAX_OUTPUTS],
        scratch: &mut Scratch,
    ) -> Result<()> {
        let outputs = &self.program.outputs;
        let mut start = range.start;
        while start < range.end {
            let len = BLOCK.min(range.end - start);
            let mut blocks: [&mut [u8]; MAX_OUTPUTS] = Default::default();
            for (o, (_, dtype)) in outputs.iter().enumerate() {
                (blocks[o], outs[o]) =
                    std::mem::take(&mut outs[o]).split_at_mut(len * dtype.size());
            }
            let own = &mut blocks[..outputs.len()];
            self.execute(start..start + len, scratch, own)?;
            self.store(len, own, scratch);
            start += len;
        }
        Ok(())
    }

    /// Runs the program at one position.
    pub(crate) fn run_at(
        &self,
        at: usize,
        outs: &mut [&mut [u8]],
        late: Late<'_>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        self.begin(scratch);
        self.steps(&self.code.order, at..at + 1, late, scratch, outs)?;
        self.store(1, outs, scratch);
        Ok(())
    }

    /// Stores as many outputs as there are `outs`, of the block that was computed last.
    pub(crate) fn store(&self, len: usize, outs: &mut [&mut [u8]], scratch: &Scratch) {
        for o in 0..outs.len() {
            let (reg, dtype) = self.program.outputs[o];
            if matches!(scratch.places[usize::from(reg)], Place::Output(direct) if direct == o) {
                continue;
            }
            let out = std::mem::take(&mut outs[o]);
            let frame = self.frame(scratch, outs, len);
            with_stored!(dtype, S => match frame.src::<<S as Stored>::Held>(reg) {
                Src::One(value) => bytemuck::cast_slice_mut::<u8, S>(out).fill(S::store(value)),
                Src::Many(values) => element::store(values, dtype, out),
            });
            outs[o] = out;
        }
    }

    /// The values of the program's first output for a block, as they are held.
    pub(crate) fn block<'s, T: Held>(
        &'s self,
        range: Range<usize>,
        scratch: &'s mut Scratch,
    ) -> Result<Src<'s, T>> {
        let len = range.len();
        self.execute(range, scratch, &mut [])?;
        Ok(self.output(0, scratch, &[], len))
    }

    /// The `len` values of output `o` of the block that was computed last, as they are held.
    pub(crate) fn output<'s, T: Held>(
        &'s self,
        o: usize,
        scratch: &'s Scratch,
        outs: &'s [&'s mut [u8]],
        len: usize,
    ) -> Src<'s, T> {
        let frame = self.frame(scratch, outs, len);
        frame.src(self.program.outputs[o].0)
    }

    /// The memory of all positions in order, where the program does no more than read them there.
    pub(crate) fn in_place<T: Held>(&self) -> Option<&[T]> {
        match (self.program.insts.as_slice(), &self.program.outputs[..]) {
            ([Inst::Load(0)], [(0, _)]) => self.grid.in_place(0),
            _ => None,
        }
    }

    /// What the program stores.
    pub(crate) fn outputs(&self) -> &[(Reg, DType)] {
        &self.program.outputs
    }
}

/// The backend's map kernel.
pub(crate) fn map(call: &MapCall) -> Result<Buffers> {
    if let ([Inst::Load(0)], [input], [(_, dtype)]) = (
        call.program.insts.as_slice(),
        call.inputs.as_slice(),
        call.program.outputs.as_slice(),
    ) && input.window.is_none()
        && input.view.dtype == *dtype
        && *dtype != DType::Bool
    {
        return Ok(smallvec![copy::copy(&input.view)?.buffer()]);
    }
    let code = Code::of(&call.program, call.params.len());
    if let Some(done) = single::run(call, &code)? {
        return Ok(smallvec![done.buffer()]);
    }
    let straight = copy::straightened(&call.inputs)?;
    let inputs = straight.as_deref().unwrap_or(&call.inputs);
    let plan = BoundProgram::of(call, &call.program, code, inputs, None)?;
    let outputs = &call.program.outputs;
    let mut memories = SmallVec::<[Memory; 1]>::new();
    for (_, dtype) in outputs {
        memories.push(Memory::new(plan.len().saturating_mul(dtype.size()))?);
    }
    let mut rest: [&mut [u8]; MAX_OUTPUTS] = Default::default();
    for (rest, memory) in rest.iter_mut().zip(&mut memories) {
        *rest = memory.bytes_mut();
    }
    if plan.len() < parallel::THRESHOLD {
        Scratch::with(|scratch| plan.run(0..plan.len(), rest, scratch))?;
    } else {
        let mut tasks = Vec::with_capacity(plan.len().div_ceil(parallel::CHUNK));
        let mut start = 0;
        while start < plan.len() {
            let len = parallel::CHUNK.min(plan.len() - start);
            let mut parts: [&mut [u8]; MAX_OUTPUTS] = Default::default();
            for (o, (_, dtype)) in outputs.iter().enumerate() {
                (parts[o], rest[o]) = std::mem::take(&mut rest[o]).split_at_mut(len * dtype.size());
            }
            tasks.push((start..start + len, parts));
            start += len;
        }
        parallel::try_each(plan.len(), tasks.into_iter(), |_, (range, parts)| {
            Scratch::with(|scratch| plan.run(range, parts, scratch))
        })?;
    }
    Ok(memories.into_iter().map(Memory::buffer).collect())
}

#[cfg(test)]
mod tests;

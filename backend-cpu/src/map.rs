//! The interpreter of map programs. A program runs over blocks of positions; each instruction is
//! one tight loop over the block.

use crate::{
    copy,
    element::{self, Held, Stored, is_held_as_stored, with_held, with_stored},
    frame::{BLOCK, Frame, Place, Slot, Src, Words},
    grid::{Fetched, Grid},
    loops,
    memory::Memory,
    parallel,
};
use anymesh_kernel::{
    DType, Error, Kind, MapProgram, Result, Scalar,
    backend::{Buffers, MapCall, MapInput},
    map::{Inst, Reg},
};
use smallvec::{SmallVec, smallvec};
use std::{cell::Cell, ops::Range};

/// Memory for registers, kept between calls.
#[derive(Default)]
pub(crate) struct Scratch {
    slots: Vec<Slot>,
    places: Vec<Place>,
    /// Values of rows.
    rows: Vec<u64>,
}

thread_local! {
    static SCRATCH: Cell<Scratch> = const {
        Cell::new(Scratch { slots: Vec::new(), places: Vec::new(), rows: Vec::new() })
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

/// Values of parameters that are known only when a block runs, one for each of its rows.
#[derive(Clone, Copy, Default)]
pub(crate) struct Late<'a> {
    /// Instructions that read such a parameter, and which.
    pub(crate) reads: &'a [(u16, usize)],
    /// For each parameter the values of [`per`](Self::per) rows.
    pub(crate) values: &'a [u64],
    pub(crate) per: usize,
    /// The rows of the block.
    pub(crate) first: usize,
    pub(crate) count: usize,
}

/// A program bound to its operands.
#[derive(Debug)]
pub(crate) struct BoundProgram<'a> {
    op: &'static str,
    program: &'a MapProgram,
    grid: Grid<'a>,
    /// Where the values of each register are before anything ran: constants, and slots.
    places: SmallVec<[Place; 16]>,
    /// The instructions that run for every block: all but constants.
    steps: SmallVec<[u16; 16]>,
    /// How many slots there are.
    slots: usize,
}

/// A slot for each register, and how many there are. What is needed no more gives its slot to
/// others, so that a long program, too, stays within the first-level cache.
fn slots(program: &MapProgram) -> (SmallVec<[u16; 16]>, usize) {
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

impl<'a> BoundProgram<'a> {
    /// `inputs` are those of the call, or copies that are easier to read. `order` permutes the axes
    /// of the call's shape; linear positions then count in that order.
    pub(crate) fn new(
        call: &'a MapCall,
        inputs: &'a [MapInput],
        order: Option<&[usize]>,
    ) -> Result<Self> {
        let program = &call.program;
        let (own, slots) = slots(program);
        let mut steps = SmallVec::new();
        let place = |(i, inst): (usize, &Inst)| match *inst {
            Inst::Param(k) => Place::One(word(call.params[usize::from(k)], program.kinds[i])),
            Inst::Const(value, kind) => Place::One(word(value, kind)),
            _ => {
                steps.push(i as u16);
                Place::Slot(own[i])
            }
        };
        Ok(Self {
            op: call.op,
            program,
            grid: Grid::new(call.shape.dims(), inputs, &call.indices, order)?,
            places: program.insts.iter().enumerate().map(place).collect(),
            steps,
            slots,
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.grid.len
    }

    /// Runs the program over at most [`BLOCK`] positions. Registers that can be written straight to
    /// an output are, the rest stay in the scratch memory.
    pub(crate) fn execute(
        &self,
        range: Range<usize>,
        scratch: &mut Scratch,
        outs: &mut [&mut [u8]],
        late: Late<'_>,
    ) -> Result<()> {
        if scratch.slots.len() < self.slots {
            let slot = || Some(Box::new(Words([0; BLOCK])));
            scratch.slots.resize_with(self.slots, slot);
        }
        scratch.places.clear();
        scratch.places.extend_from_slice(&self.places);
        scratch.rows.clear();
        for (inst, k) in late.reads {
            let values = &late.values[k * late.per + late.first..][..late.count];
            scratch.places[usize::from(*inst)] = match values {
                [value] => Place::One(*value),
                _ => Place::Rows(scratch.rows.len()),
            };
            scratch.rows.extend_from_slice(values);
        }
        let rows = late.count.max(1);
        for i in &self.steps {
            // Not a `Result`: to hand on one of those takes as long as a short instruction does.
            if !self.instruction(usize::from(*i), range.clone(), rows, scratch, outs) {
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
        rows: usize,
        scratch: &mut Scratch,
        outs: &mut [&mut [u8]],
    ) -> bool {
        let (inst, len) = (&self.program.insts[i], range.len());
        let reads = matches!(inst, Inst::Load(_) | Inst::Inside(_) | Inst::Index(_));
        if !reads && let Some(o) = self.target(i, outs) {
            let out = std::mem::take(&mut outs[o]);
            let done = self.block_of(i, &mut self.frame(scratch, outs, len), rows, out);
            outs[o] = out;
            scratch.places[i] = Place::Output(o);
            return done;
        }
        let Place::Slot(number) = self.places[i] else {
            return true;
        };
        // Taken out, so that it can be written while others are read.
        let Some(mut words) = scratch.slots[usize::from(number)].take() else {
            return true;
        };
        let slot: &mut [u8] = bytemuck::cast_slice_mut(&mut words.0);
        let mut done = true;
        match *inst {
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
            _ => {
                let mut frame = self.frame(scratch, outs, len);
                if frame.is_constant(inst) {
                    let rows = if frame.reads_rows(inst) { rows } else { 1 };
                    let kind = self.program.kinds[i];
                    let mut values = SmallVec::<[u64; 8]>::new();
                    for row in 0..rows {
                        frame.row = row;
                        done &= self.compute(inst, &frame, slot, 1);
                        values.push(
                            with_held!(kind, T => bytemuck::cast_slice::<u8, T>(slot)[0].to_word()),
                        );
                    }
                    scratch.places[i] = match values[..] {
                        [value] => Place::One(value),
                        _ => Place::Rows(scratch.rows.len()),
                    };
                    scratch.rows.extend_from_slice(&values);
                } else {
                    done = self.block_of(i, &mut frame, rows, slot);
                }
            }
        }
        scratch.slots[usize::from(number)] = Some(words);
        done
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
            sources: &self.grid.sources,
            slots: &scratch.slots,
            places: &scratch.places,
            outs,
            rows: &scratch.rows,
            row: 0,
            first: 0,
            len,
        }
    }

    /// Runs arithmetic instruction `i` into `out` for a whole block: row by row where it reads values
    /// of rows. Returns false where an integer was divided by zero.
    fn block_of(&self, i: usize, frame: &mut Frame<'_>, rows: usize, out: &mut [u8]) -> bool {
        let (inst, len) = (&self.program.insts[i], frame.len);
        if rows == 1 || !frame.reads_rows(inst) {
            return self.compute(inst, frame, out, len);
        }
        frame.len = len / rows;
        let size = with_held!(self.program.kinds[i], T => size_of::<T>());
        (0..rows).all(|row| {
            (frame.row, frame.first) = (row, row * frame.len);
            self.compute(inst, frame, &mut out[frame.first * size..], frame.len)
        })
    }

    /// Runs an arithmetic instruction into `out`, for `len` positions. Returns false where an integer
    /// was divided by zero.
    fn compute(&self, inst: &Inst, frame: &Frame<'_>, out: &mut [u8], len: usize) -> bool {
        let kind = |r: Reg| self.program.kinds[r as usize];
        match *inst {
            Inst::Unary(op, a) => loops::unary(op, kind(a), a, frame, out, len),
            Inst::Binary(op, a, b) => return loops::binary(op, kind(a), [a, b], frame, out, len),
            Inst::Select(c, a, b) => {
                with_held!(kind(a), T => loops::select::<T>([c, a, b], frame, out, len))
            }
            Inst::Cast(a, dtype) => loops::cast(kind(a), dtype, a, frame, out, len),
            // Each instruction is computed by itself anyway.
            Inst::Fence(a, _) => loops::cast(kind(a), kind(a).dtype(), a, frame, out, len),
            Inst::Philox { index, key, word } => {
                loops::philox(kind(index), index, key, word, frame, out, len)
            }
            Inst::Load(_) | Inst::Inside(_) | Inst::Index(_) | Inst::Param(_) | Inst::Const(..) => {
            }
        }
        true
    }

    /// The first output that stores register `i` as it is held.
    fn target(&self, i: usize, outs: &[&mut [u8]]) -> Option<usize> {
        (0..outs.len()).find(|o| {
            self.program.outputs[*o].0 as usize == i
                && is_held_as_stored(self.program.outputs[*o].1)
        })
    }

    fn load(&self, k: u8, range: Range<usize>, slot: &mut [u8]) -> Option<Place> {
        let source = &self.grid.sources[k as usize];
        with_stored!(source.dtype, S => {
            let slot: &mut [<S as Stored>::Held] = bytemuck::cast_slice_mut(slot);
            match self.grid.fetch::<S>(source, range.clone(), &mut slot[..range.len()]) {
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
        mut outs: [&mut [u8]; anymesh_kernel::map::MAX_OUTPUTS],
        scratch: &mut Scratch,
        late: Late<'_>,
    ) -> Result<()> {
        let outputs = &self.program.outputs;
        let mut start = range.start;
        while start < range.end {
            let len = BLOCK.min(range.end - start);
            let mut blocks: [&mut [u8]; anymesh_kernel::map::MAX_OUTPUTS] = Default::default();
            for (o, (_, dtype)) in outputs.iter().enumerate() {
                (blocks[o], outs[o]) =
                    std::mem::take(&mut outs[o]).split_at_mut(len * dtype.size());
            }
            let own = &mut blocks[..outputs.len()];
            self.execute(start..start + len, scratch, own, late)?;
            for (o, (reg, dtype)) in outputs.iter().enumerate() {
                if matches!(scratch.places[*reg as usize], Place::Output(direct) if direct == o) {
                    continue;
                }
                let out = std::mem::take(&mut blocks[o]);
                let mut frame = self.frame(scratch, &blocks, len);
                let rows = match scratch.places[usize::from(*reg)] {
                    Place::Rows(_) => late.count,
                    _ => 1,
                };
                for (row, out) in out.chunks_mut(len / rows * dtype.size()).enumerate() {
                    frame.row = row;
                    with_stored!(*dtype, S => match frame.src::<<S as Stored>::Held>(*reg) {
                        Src::One(value) => bytemuck::cast_slice_mut::<u8, S>(out).fill(S::store(value)),
                        Src::Many(values) => element::store(values, *dtype, out),
                    });
                }
            }
            start += len;
        }
        Ok(())
    }

    /// The values of the program's first output for a block, as they are held.
    pub(crate) fn block<'s, T: Held>(
        &'s self,
        range: Range<usize>,
        scratch: &'s mut Scratch,
    ) -> Result<Src<'s, T>> {
        let len = range.len();
        self.execute(range, scratch, &mut [], Late::default())?;
        Ok(self.output(0, scratch, 0, len))
    }

    /// The values of output `o` for row `row`, `len` positions, of the block that was executed last,
    /// as they are held.
    pub(crate) fn output<'s, T: Held>(
        &'s self,
        o: usize,
        scratch: &'s Scratch,
        row: usize,
        len: usize,
    ) -> Src<'s, T> {
        let mut frame = self.frame(scratch, &[], len);
        (frame.row, frame.first) = (row, row * len);
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

fn word(value: Scalar, kind: Kind) -> u64 {
    with_held!(kind, T => T::from_scalar(value).to_word())
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
    let straight = copy::straightened(&call.inputs)?;
    let plan = BoundProgram::new(call, straight.as_deref().unwrap_or(&call.inputs), None)?;
    let outputs = &call.program.outputs;
    let mut memories = SmallVec::<[Memory; 1]>::new();
    for (_, dtype) in outputs {
        memories.push(Memory::new(plan.len().saturating_mul(dtype.size()))?);
    }
    let mut rest: [&mut [u8]; anymesh_kernel::map::MAX_OUTPUTS] = Default::default();
    for (rest, memory) in rest.iter_mut().zip(&mut memories) {
        *rest = memory.bytes_mut();
    }
    if plan.len() < parallel::THRESHOLD {
        Scratch::with(|scratch| plan.run(0..plan.len(), rest, scratch, Late::default()))?;
    } else {
        let mut tasks = Vec::with_capacity(plan.len().div_ceil(parallel::CHUNK));
        let mut start = 0;
        while start < plan.len() {
            let len = parallel::CHUNK.min(plan.len() - start);
            let mut parts: [&mut [u8]; anymesh_kernel::map::MAX_OUTPUTS] = Default::default();
            for (o, (_, dtype)) in outputs.iter().enumerate() {
                (parts[o], rest[o]) = std::mem::take(&mut rest[o]).split_at_mut(len * dtype.size());
            }
            tasks.push((start..start + len, parts));
            start += len;
        }
        parallel::try_each(plan.len(), tasks.into_iter(), |_, (range, parts)| {
            Scratch::with(|scratch| plan.run(range, parts, scratch, Late::default()))
        })?;
    }
    Ok(memories.into_iter().map(Memory::buffer).collect())
}

#[cfg(test)]
mod tests;

//! Reductions, with a map program in front.
//!
//! Enough rows of moderate length are row programs ([`ReduceCall::as_rows`]), so that a reduction has
//! the same order alone and with others of its rows. Else the iteration space is seen as rows that
//! become one value each. Where the reduced dimensions are
//! innermost in memory, some threads of a cube share a row and meet in a tree in shared memory;
//! where kept dimensions are innermost, threads walk down four neighbouring columns each, some of a
//! cube down the same ones. Long reductions with few results are split over cubes. What they leave is
//! combined by the cube that is ready last, on devices where cubes see each other's writes, else by a
//! second kernel. The order of every combination is fixed by the shape alone, so results are the same
//! bits every time.

mod acc;
mod cut;
mod kernels;

use crate::{CubeBackend, Memory, map::CUBE, program::bind};
use anymesh_kernel::{
    Buffer, DType, Error, Kind, MapProgram, Result,
    backend::{ReduceCall, ReduceOp},
    map::{Inst, Program},
};
use cubecl::{
    ir::{ElemType, FloatKind, IntKind, UIntKind},
    prelude::*,
};
use cut::Cut;
use kernels::{How, ResultsLaunch, finish, reduce_columns, reduce_rows};

/// Counters of cubes that are ready: more than a split reduction has results.
pub(crate) const TICKETS: usize = 1024;

/// Memory for results or for parts of them.
#[derive(Default)]
struct Room {
    values: Vec<Memory>,
    places: Vec<Memory>,
    halves: Vec<Memory>,
}

impl Room {
    fn launch<T: Numeric>(&self) -> ResultsLaunch<T> {
        let list =
            |m: &[Memory]| -> Vec<_> { m.iter().map(|m| (m.handle.clone(), m.bytes)).collect() };
        ResultsLaunch::<T>::new(
            bind(&list(&self.values), size_of::<T>()),
            bind(&list(&self.places), 4),
            bind(&list(&self.halves), 2),
        )
    }
}

impl CubeBackend {
    pub(crate) fn run_reduce(&self, call: &ReduceCall) -> Result<Buffer> {
        if let Some(rows) = call.as_rows() {
            return Ok(self.run_row_program(&rows)?.swap_remove(0));
        }
        let program = without_bools(&call.map.program);
        let kind = program.kinds[program.outputs[0].0 as usize];
        let transcendental = call.mode == ReduceOp::LogSumExp && kind == Kind::F64;
        if transcendental && !self.capabilities.f64_math {
            return Err(Error::Unsupported {
                device: self.name.clone(),
                what: "logsumexp in f64".into(),
                hint: "cast to f32".into(),
            });
        }
        // Infinities saturate to the ends of an integer type.
        let identity = match call.mode {
            ReduceOp::Sum => 0.0,
            ReduceOp::Prod => 1.0,
            ReduceOp::Max | ReduceOp::ArgMax | ReduceOp::LogSumExp => f64::NEG_INFINITY,
            ReduceOp::Min | ReduceOp::ArgMin => f64::INFINITY,
        };
        let (result, stored) = match kind {
            Kind::F32 => self.reduce_as::<f32>(call, &program, identity as f32)?,
            Kind::F64 => self.reduce_as::<f64>(call, &program, identity)?,
            Kind::I32 => self.reduce_as::<i32>(call, &program, identity as i32)?,
            Kind::I64 => self.reduce_as::<i64>(call, &program, identity as i64)?,
            Kind::U32 | Kind::Bool => self.reduce_as::<u32>(call, &program, identity as u32)?,
        };
        let length: usize = call.axes.iter().map(|&d| call.map.shape[d]).product();
        self.convert(result, stored, call.dtype, call.map.shape.numel() / length)
    }

    /// The reduction of what `program` gives, which stands for the call's own, and what it is stored
    /// as.
    fn reduce_as<T: Numeric>(
        &self,
        call: &ReduceCall,
        program: &MapProgram,
        identity: T,
    ) -> Result<(Memory, DType)> {
        let kind = program.kinds[program.outputs[0].0 as usize];
        let elem = elem_of(kind);
        let (identity, scale) = (
            InputScalar::new(identity, elem),
            InputScalar::new(call.scale.unwrap_or(1.0), elem),
        );
        let (cut, order) = Cut::new(call);
        let run = if cut.rows { cut.length } else { cut.kept };
        let mut bound = self.bind_program(&call.map, Some(&order), Some(run))?;
        bound.plan.program = program.clone();
        let arg = matches!(call.mode, ReduceOp::ArgMax | ReduceOp::ArgMin);
        let short = matches!(call.dtype, DType::BF16 | DType::F16) && kind == Kind::F32 && !arg;
        let parts = cut.splits > 1;
        let how = How {
            width: cut.width,
            unroll: cut.unroll(),
            parts,
            at_once: parts && self.tickets.is_some(),
            kind,
            scaled: call.scale.is_some(),
            short: (short && self.tickets.is_some()).then_some(call.dtype),
        };
        let room = |parts: bool, n: usize| -> Result<Room> {
            let short = how.short.filter(|_| !parts);
            let values = match (parts, call.mode) {
                (true, ReduceOp::LogSumExp) => 2,
                (true, _) => 1,
                (false, _) => usize::from(!arg && short.is_none()),
            };
            let dtype = match size_of::<T>() {
                8 => DType::F64,
                _ => DType::F32,
            };
            let some = |dtype: DType, count: usize| -> Result<Vec<Memory>> {
                (0..count).map(|_| self.alloc(dtype, n)).collect()
            };
            Ok(Room {
                values: some(dtype, values)?,
                places: some(DType::I32, usize::from(arg))?,
                halves: some(DType::BF16, usize::from(short.is_some()))?,
            })
        };
        let out = room(parts, cut.kept * cut.splits)?;
        let done = match parts {
            true => room(false, cut.kept)?,
            false => Room::default(),
        };
        let nothing = Room::default();
        let (together, mut tickets) = (&done, SequenceArg::new());
        let together = match &self.tickets {
            Some(memory) if how.at_once => {
                tickets.push(crate::arg(memory, 4));
                together
            }
            _ => &nothing,
        };
        let (client, dim) = (&self.client, CubeDim::new_1d(CUBE));
        let faults = self.fault_if(program.can_fault());
        let (inputs, address) = (bound.launch(), bound.address);
        let plan = self.programs.intern(bound.plan);
        let count = crate::cubes(cut.cubes() * cut.splits, 1);
        // SAFETY: kernels guard rows, columns and chunks; buffers are as long as what is written.
        unsafe {
            let launch = match cut.rows {
                true => reduce_rows::launch_unchecked::<T>,
                false => reduce_columns::launch_unchecked::<T>,
            };
            launch(
                client,
                count,
                dim,
                address,
                inputs,
                out.launch(),
                together.launch(),
                tickets,
                faults,
                cut.kept,
                cut.length,
                cut.per_split(),
                cut.splits,
                identity,
                scale,
                plan,
                call.mode,
                how,
            );
        }
        if parts && !how.at_once {
            let width = cut.splits.next_power_of_two().clamp(32, CUBE as usize) as u32;
            let how = How {
                width,
                parts: false,
                ..how
            };
            // SAFETY: one cube for each result, surplus cubes repeat an earlier one.
            unsafe {
                finish::launch_unchecked::<T>(
                    client,
                    crate::cubes(cut.kept, 1),
                    CubeDim::new_1d(width),
                    AddressType::U32,
                    out.launch(),
                    done.launch(),
                    cut.kept,
                    cut.splits,
                    identity,
                    scale,
                    call.mode,
                    how,
                );
            }
        }
        let mut room = if parts { done } else { out };
        Ok(match how.short {
            Some(dtype) => (room.halves.swap_remove(0), dtype),
            None if arg => (room.places.swap_remove(0), DType::I32),
            None => (room.values.swap_remove(0), kind.dtype()),
        })
    }
}

/// The CubeCL type of a kind.
pub(crate) fn elem_of(kind: Kind) -> ElemType {
    match kind {
        Kind::F32 => ElemType::Float(FloatKind::F32),
        Kind::F64 => ElemType::Float(FloatKind::F64),
        Kind::I32 => ElemType::Int(IntKind::I32),
        Kind::I64 => ElemType::Int(IntKind::I64),
        Kind::U32 | Kind::Bool => ElemType::UInt(UIntKind::U32),
    }
}

/// Bools are reduced as 0 and 1.
fn without_bools(program: &MapProgram) -> MapProgram {
    let (reg, _) = program.outputs[0];
    if program.kinds[reg as usize] != Kind::Bool {
        return program.clone();
    }
    let mut program = Program::clone(program);
    program.insts.push(Inst::Cast(reg, DType::U32));
    program.kinds.push(Kind::U32);
    program.outputs[0] = ((program.insts.len() - 1) as u16, DType::U32);
    program.into()
}

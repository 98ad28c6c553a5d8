//! The host side: how rows are shared out, and the launch.

use super::row_program_kernel;
use crate::{
    CubeBackend, Memory,
    map::{CUBE, Outputs},
    program::{Bound, MapPlan, address_of, bind},
};
use anymesh_kernel::{
    DType, Kind, Result, View,
    backend::{Buffers, MapCall, MapInput, ReduceOp, RowProgramCall},
};
use cubecl::prelude::*;
use smallvec::smallvec;

/// Chunks of four elements that a thread may hold, of all inputs and sums of columns together.
const MAX_HELD: usize = 32;
/// Chunks of a row that a thread may hold.
const MAX_CHUNKS: usize = 16;
/// Cubes from which on more rows go to each instead, where columns are summed: parts have to be
/// read again.
const PARTS: usize = 512;

/// What the kernel is specialised on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RowPlan {
    /// The programs: those of the reductions, then what is stored.
    pub(super) stages: Vec<MapPlan>,
    pub(super) modes: Vec<ReduceOp>,
    /// The parameter that multiplies each result.
    pub(super) scales: Vec<Option<usize>>,
    /// The reductions of each round.
    pub(super) rounds: Vec<Vec<usize>>,
    /// All reductions in the order of rounds.
    pub(super) order: Vec<usize>,
    /// The stage of elements, of rows, of columns.
    pub(super) each: Option<usize>,
    pub(super) rows: Option<usize>,
    pub(super) columns: Option<usize>,
    /// How many parameters come before results.
    pub(super) params: usize,
    /// Inputs that are read once.
    pub(super) held: Vec<usize>,
    /// Threads of a cube, and those that share a row.
    pub(super) threads: u32,
    pub(super) width: u32,
    /// Chunks that each of them holds; none where the row is read again.
    pub(super) chunks: usize,
    /// Rows that the same threads go through, for sums of columns.
    pub(super) steps: u32,
    /// Whether rows are whole chunks.
    pub(super) aligned: bool,
    /// Whether 32 neighbouring threads can exchange values.
    pub(super) planes: bool,
    /// Whether the device's own functions are used.
    pub(super) native: bool,
}

impl RowPlan {
    /// How many sums of columns there are.
    pub(super) fn column_outputs(&self) -> usize {
        (self.columns).map_or(0, |stage| self.stages[stage].program.outputs.len())
    }
}

/// How rows are shared out.
struct Cut {
    threads: usize,
    width: usize,
    chunks: usize,
}

/// Inputs that differ from element to element, and are floats.
fn held(call: &RowProgramCall) -> Vec<usize> {
    let differs = |view: &View| {
        let strides = &view.layout.strides;
        let rows = strides[0] != 0 || call.shape[0] == 1;
        rows && strides[1] != 0 && view.dtype.is_float()
    };
    (call.inputs.iter().enumerate())
        .filter(|(_, view)| differs(view))
        .map(|(k, _)| k)
        .collect()
}

fn column_outputs(call: &RowProgramCall) -> usize {
    let columns = call.program.columns.as_ref();
    columns.map_or(0, |program| program.outputs.len())
}

impl Cut {
    /// With planes a row belongs to few threads, best to one plane, which needs no barrier; without
    /// them to as many as have a chunk each.
    fn new(call: &RowProgramCall, planes: bool, most: usize) -> Self {
        let quarter = call.shape[1].div_ceil(4);
        // Registers of four that each chunk takes.
        let each = (held(call).len() + column_outputs(call)).max(1);
        let limit = (MAX_HELD / each).clamp(1, MAX_CHUNKS);
        let wanted = if planes { limit.min(8) } else { 1 };
        let least = if planes { 32 } else { 1 };
        let width = (quarter.div_ceil(wanted).next_power_of_two()).clamp(least, CUBE as usize);
        let chunks = quarter.div_ceil(width);
        if chunks <= limit {
            let threads = CUBE as usize;
            return Self {
                threads,
                width,
                chunks,
            };
        }
        // More threads before it is read again.
        let width = (quarter.div_ceil(limit).next_power_of_two()).min(most);
        let chunks = quarter.div_ceil(width);
        // A thread of so many has 64 registers in all: what it holds must leave room for the rest.
        let limit = if width > 512 { limit.min(6) } else { limit };
        if width > CUBE as usize && chunks <= limit {
            return Self {
                threads: width,
                width,
                chunks,
            };
        }
        // Fewer rows at a time stay in cache from one pass to the next.
        let passes = call
            .program
            .rounds()
            .iter()
            .max()
            .map_or(0, |last| last + 1)
            + usize::from(call.program.each.is_some());
        let width = if passes > 1 { most } else { CUBE as usize };
        Self {
            threads: width,
            width,
            chunks: 0,
        }
    }
}

/// Whether the kernel can run it: all is computed in f32, rows can be stored in whole words, and
/// sums of columns fit into registers. The widest cube is not asked for: what fits does so in any.
pub(crate) fn fits(call: &RowProgramCall) -> bool {
    let wide = |program: &anymesh_kernel::MapProgram| program.kinds.contains(&Kind::F64);
    if call.program.programs().any(wide) || call.inputs.iter().any(|v| v.dtype == DType::F64) {
        return false;
    }
    let (n, [each, _, columns]) = (call.shape[1], call.program.dtypes());
    let stored = |dtype: &DType| match dtype.size() {
        4 => true,
        2 => n % 2 == 0,
        _ => n % 4 == 0,
    };
    let planeless = Cut::new(call, false, CUBE as usize);
    each.iter().all(stored) && (columns.is_empty() || planeless.chunks > 0)
}

impl CubeBackend {
    pub(crate) fn run_row_program(&self, call: &RowProgramCall) -> Result<Buffers> {
        let (rows, length, program) = (call.shape[0], call.shape[1], &call.program);
        let hardware = &self.client.properties().hardware;
        let planes = self.planes && hardware.plane_size_min == 32 && hardware.plane_size_max == 32;
        let most = match planes {
            true => (hardware.max_units_per_cube as usize).clamp(CUBE as usize, 1024),
            false => CUBE as usize,
        };
        let cut = Cut::new(call, planes, most);
        let lines = cut.threads / cut.width;
        let [each, per_row, columns] = program.dtypes();
        let steps = if columns.is_empty() {
            1
        } else {
            rows.div_ceil(lines * PARTS).next_power_of_two()
        };
        let cubes = rows.div_ceil(lines * steps);

        let inputs: Vec<MapInput> = (call.inputs.iter())
            .map(|view| MapInput {
                view: view.clone(),
                window: None,
            })
            .collect();
        let programs: Vec<_> = program.programs().cloned().collect();
        let first = MapCall {
            op: call.op,
            program: programs[0].clone(),
            shape: call.shape.clone(),
            inputs: inputs.into(),
            // Columns are counted by the kernel.
            indices: smallvec![],
            params: call.params.iter().copied().collect(),
        };
        let handles = (call.inputs.iter())
            .map(|view| crate::memory(view).map(|m| (m.handle.clone(), m.bytes)))
            .collect::<Result<Vec<_>>>()?;
        let address = address_of(&first, handles.iter().map(|(_, bytes)| *bytes));
        let bound = Bound::rows(&first, &handles, address).with_native(self.native);
        let (rounds, folds) = (program.rounds(), program.folds.len());
        let last = rounds.iter().max().map_or(0, |last| last + 1);
        let rounds: Vec<Vec<usize>> = (0..last)
            .map(|round| (0..folds).filter(|k| rounds[*k] == round).collect())
            .collect();
        let mut next = folds;
        let mut stage = |there: bool| {
            let stage = there.then_some(next);
            next += usize::from(there);
            stage
        };
        let plan = RowPlan {
            stages: (programs.iter())
                .map(|program| bound.plan.with_program(program))
                .collect(),
            modes: program.folds.iter().map(|fold| fold.mode).collect(),
            scales: program.folds.iter().map(|fold| fold.scale).collect(),
            order: rounds.iter().flatten().copied().collect(),
            rounds,
            each: stage(program.each.is_some()),
            rows: stage(program.rows.is_some()),
            columns: stage(program.columns.is_some()),
            params: program.params,
            held: held(call),
            threads: cut.threads as u32,
            width: cut.width as u32,
            chunks: cut.chunks,
            steps: steps as u32,
            aligned: length % 4 == 0,
            planes,
            native: bound.plan.native(),
        };
        let of_each = (each.iter())
            .map(|dtype| Ok((self.alloc(*dtype, rows * length)?, *dtype)))
            .collect::<Result<Vec<_>>>()?;
        let of_rows = (per_row.iter())
            .map(|_| self.alloc(DType::F32, rows))
            .collect::<Result<Vec<_>>>()?;
        let parts = (columns.iter())
            .map(|_| self.alloc(DType::F32, cubes * length.next_multiple_of(4)))
            .collect::<Result<Vec<_>>>()?;
        let list = |memory: &[Memory]| -> Vec<_> {
            memory.iter().map(|m| (m.handle.clone(), m.bytes)).collect()
        };
        let elements = match plan.aligned {
            true => Outputs::bound(&of_each),
            false => Outputs::as_words(&of_each),
        };
        // SAFETY: surplus rows, chunks and columns write nothing.
        unsafe {
            row_program_kernel::launch_unchecked(
                &self.client,
                crate::cubes(cubes, 1),
                CubeDim::new_1d(cut.threads as u32),
                bound.address,
                bound.launch(),
                elements,
                bind(&list(&of_rows), 4),
                bind(&list(&parts), 16),
                rows,
                length,
                cubes,
                f32::NEG_INFINITY,
                self.row_programs.intern(plan),
            );
        }
        let mut out: Vec<Memory> = of_each.into_iter().map(|(memory, _)| memory).collect();
        out.extend(of_rows);
        if !columns.is_empty() {
            out.extend(self.add_column_parts(&parts, &columns, length, cubes)?);
        }
        Ok(out.into_iter().map(Memory::buffer).collect())
    }
}

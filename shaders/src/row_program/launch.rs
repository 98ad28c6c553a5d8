//! The host side: how rows are shared out, and the launch.

use super::{
    cut::{Cut, pick},
    row_program_kernel,
};
use crate::{
    CubeBackend, Memory,
    map::{CUBE, Outputs},
    program::{Bound, MapPlan, address_of, bind},
};
use anymesh_kernel::{
    DType, Kind, Result,
    backend::{Buffers, MapCall, MapInput, ReduceOp, Repeat, RowProgramCall},
};
use cubecl::prelude::*;
use smallvec::smallvec;

/// Where columns are summed: rows that are at work together, and cubes, from which on more rows go
/// to each thread instead. Every cube writes a part of each sum, which has to be read again.
const LINES: usize = 2048;
const PARTS: usize = 512;

/// What the kernel is specialised on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RowPlan {
    /// The programs: those of the reductions, then what is stored, then those that name columns.
    pub(super) stages: Vec<MapPlan>,
    pub(super) modes: Vec<ReduceOp>,
    /// The parameter that multiplies each result.
    pub(super) scales: Vec<Option<usize>>,
    /// The stage that names the only column to which a reduction looks.
    pub(super) picks: Vec<Option<usize>>,
    /// The reductions of each round.
    pub(super) rounds: Vec<Vec<usize>>,
    /// All reductions in the order of rounds.
    pub(super) order: Vec<usize>,
    /// The stage of elements, of rows, of columns.
    pub(super) each: Option<usize>,
    pub(super) rows: Option<usize>,
    pub(super) columns: Option<usize>,
    /// The stage of what several others read, and how many values that are.
    pub(super) shared: Option<usize>,
    pub(super) values: usize,
    /// How many parameters come before results.
    pub(super) params: usize,
    /// Inputs that are read once.
    pub(super) held: Vec<usize>,
    /// Threads of a cube, and those that share a row.
    pub(super) threads: u32,
    pub(super) width: u32,
    /// Chunks that each of them holds; none where the row is read again.
    pub(super) chunks: usize,
    /// Chunks that a thread reads before it looks at them, where it holds none.
    pub(super) unroll: usize,
    /// Rows that the same threads go through, for sums of columns.
    pub(super) steps: u32,
    /// Whether rows are whole chunks.
    pub(super) aligned: bool,
    /// Whether every thread has all its chunks in its row.
    pub(super) exact: bool,
    /// Whether every thread has a row at every step.
    pub(super) full: bool,
    /// Whether 32 neighbouring threads can exchange values.
    pub(super) planes: bool,
    /// Whether the device's own functions are used.
    pub(super) native: bool,
}

impl RowPlan {
    /// Whether a round goes through the row.
    pub(super) fn reads(&self, round: usize) -> bool {
        (self.rounds[round].iter()).any(|fold| self.picks[*fold].is_none())
    }

    /// How many sums of columns there are.
    pub(super) fn column_outputs(&self) -> usize {
        (self.columns).map_or(0, |stage| self.stages[stage].program.outputs.len())
    }
}

/// Whether rows of `n` elements of a dtype can be stored in whole words.
pub(crate) fn stores(n: usize, dtype: DType) -> bool {
    match dtype.size() {
        4 => true,
        2 => n % 2 == 0,
        1 => n % 4 == 0,
        _ => false,
    }
}

/// Whether the kernel can run it: all is computed in f32, rows can be stored in whole words, and
/// sums of columns fit into registers. The widest cube is not asked for: what fits does so in any.
pub(crate) fn fits(call: &RowProgramCall) -> bool {
    let wide = |program: &anymesh_kernel::MapProgram| program.kinds.contains(&Kind::F64);
    if call.program.programs().any(wide) || call.inputs.iter().any(|v| v.dtype == DType::F64) {
        return false;
    }
    let (n, [each, _, columns]) = (call.length(), call.program.dtypes());
    each.iter().all(|dtype| stores(n, *dtype))
        && (columns.is_empty() || Cut::new(call, false, CUBE as usize).chunks > 0)
}

/// The stages of a program, and which of them names the only column of each reduction.
fn stages(call: &RowProgramCall, first: &MapPlan) -> (Vec<MapPlan>, Vec<Option<usize>>) {
    let programs = call.program.programs();
    let mut stages: Vec<MapPlan> = programs
        .map(|program| first.with_program(program))
        .collect();
    let picks = (call.program.folds.iter())
        .map(|fold| {
            let named = pick(call, fold)?;
            stages.push(first.with_program(&named));
            Some(stages.len() - 1)
        })
        .collect();
    (stages, picks)
}

impl CubeBackend {
    pub(crate) fn run_row_program(&self, call: &RowProgramCall) -> Result<Buffers> {
        self.run_rows(call, None)
    }

    /// Runs a row program in which inputs but the first repeat as `repeat` says.
    pub(crate) fn run_rows(
        &self,
        call: &RowProgramCall,
        repeat: Option<Repeat>,
    ) -> Result<Buffers> {
        let (rows, length, program) = (call.rows(), call.length(), &call.program);
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
            rows.div_ceil(LINES.min(lines * PARTS)).next_power_of_two()
        };
        let cubes = rows.div_ceil(lines * steps);
        let grid = crate::cubes(cubes, 1);

        let inputs: Vec<MapInput> = (call.inputs.iter())
            .map(|view| MapInput {
                view: view.clone(),
                window: None,
            })
            .collect();
        let first = MapCall {
            op: call.op,
            program: (program.programs().next())
                .ok_or_else(|| self.failed("a row program has no parts"))?
                .clone(),
            shape: call.shape.clone(),
            inputs: inputs.into(),
            // Columns are counted by the kernel.
            indices: smallvec![],
            params: call.params.iter().copied().collect(),
            over: Default::default(),
        };
        let handles = (call.inputs.iter())
            .map(|view| crate::memory(view).map(|m| (m.handle.clone(), m.bytes)))
            .collect::<Result<Vec<_>>>()?;
        let address = address_of(&first, handles.iter().map(|(_, bytes)| *bytes));
        let fences = program.programs().map(|program| program.fences()).max();
        let bound = Bound::rows(&first, repeat, fences.unwrap_or(0), &handles, address)
            .with_native(self.native);
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
        let (stages, picks) = stages(call, &bound.plan);
        let held = cut.held;
        let plan = RowPlan {
            stages,
            modes: program.folds.iter().map(|fold| fold.mode).collect(),
            scales: program.folds.iter().map(|fold| fold.scale).collect(),
            picks,
            order: rounds.iter().flatten().copied().collect(),
            rounds,
            each: stage(program.each.is_some()),
            rows: stage(program.rows.is_some()),
            columns: stage(program.columns.is_some()),
            shared: stage(program.shared.is_some()),
            values: program.shared.as_ref().map_or(0, |p| p.outputs.len()),
            params: program.params,
            // Bytes in flight: narrow elements want more chunks.
            unroll: match held.len() {
                0 | 1 if self.native => 8,
                _ => 4,
            },
            held,
            threads: cut.threads as u32,
            width: cut.width as u32,
            chunks: cut.chunks,
            steps: steps as u32,
            aligned: length % 4 == 0,
            exact: length == 4 * cut.width * cut.chunks,
            full: rows == cubes * lines * steps && launched(&grid) == cubes,
            planes,
            native: bound.plan.native(),
        };
        let taken = match each.first().filter(|_| call.over) {
            Some(dtype) => self.memory_over(&call.inputs[0], *dtype, call.shape.numel())?,
            None => None,
        };
        let mut of_each = Vec::with_capacity(each.len());
        for (k, dtype) in each.iter().enumerate() {
            let memory = match &taken {
                Some((memory, _)) if k == 0 => memory.clone(),
                _ => self.alloc(*dtype, rows * length)?,
            };
            of_each.push((memory, *dtype));
        }
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
                grid,
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
        let mut buffers: Buffers = out.into_iter().map(Memory::buffer).collect();
        if let Some((_, buffer)) = taken {
            buffers[0] = buffer;
        }
        Ok(buffers)
    }
}

/// The cubes of a grid.
fn launched(grid: &CubeCount) -> usize {
    match *grid {
        CubeCount::Static(x, y, z) => x as usize * y as usize * z as usize,
        CubeCount::Dynamic(_) => 0,
    }
}

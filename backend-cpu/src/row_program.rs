//! Row programs: each part is a map program that runs over blocks of a row while that is in cache.
//! Results of reductions are parameters that change from row to row.

use crate::{
    copy,
    element::store,
    fold::{Extreme, Fold, LogSumExp, SumFloat},
    frame::{BLOCK, Src},
    map::{BoundProgram, Late, Scratch},
    memory::Memory,
    parallel,
    scalar::Float,
};
use anymesh_kernel::{
    DType, Error, MapProgram, Result, Scalar,
    backend::{Affine, Buffers, MapCall, MapInput, ReduceOp, RowProgramCall},
    map::{Inst, MAX_OUTPUTS},
};
use smallvec::{SmallVec, smallvec};
use std::ops::Range;

/// At most so many partial sums of a column: each has memory for all columns.
const COLUMN_PARTS: usize = 64;

/// Shorter rows are left to be composed: a part that starts for every row costs more than passes
/// over all of them.
const SHORTEST: usize = 48;

/// Whether rows are worth a kernel that goes through them one by one, and sums of columns are of the
/// kind that is computed in.
pub(crate) fn fits(call: &RowProgramCall) -> bool {
    let wide = call.inputs.iter().any(|view| view.dtype == DType::F64);
    let [_, _, columns] = call.program.dtypes();
    let alike = columns.iter().all(|dtype| (*dtype == DType::F64) == wide);
    call.shape[1] >= SHORTEST && alike
}

/// The backend's kernel for row programs.
pub(crate) fn row_program(call: &RowProgramCall) -> Result<Buffers> {
    let wide = call.inputs.iter().any(|view| view.dtype == DType::F64);
    if wide {
        run::<f64>(call)
    } else {
        run::<f32>(call)
    }
}

/// A part of the program, and where it reads results of reductions: its instruction, and which.
struct Part<'a> {
    bound: BoundProgram<'a>,
    reads: SmallVec<[(u16, usize); 4]>,
}

impl<'a> Part<'a> {
    fn new(map: &'a MapCall, inputs: &'a [MapInput], params: usize) -> Result<Self> {
        let read = |(i, inst): (usize, &Inst)| match *inst {
            Inst::Param(k) => Some((i as u16, usize::from(k).checked_sub(params)?)),
            _ => None,
        };
        Ok(Self {
            bound: BoundProgram::new(map, inputs, None)?,
            reads: (map.program.insts.iter().enumerate())
                .filter_map(read)
                .collect(),
        })
    }

    /// The results of these rows as the program reads them.
    fn late<'r>(&'r self, results: &'r Results, rows: Range<usize>) -> Late<'r> {
        Late {
            reads: &self.reads,
            values: &results.values,
            per: results.rows,
            first: rows.start,
            count: rows.len(),
        }
    }
}

/// Results of reductions of some rows that are computed together: for each reduction one of each row.
#[derive(Default)]
struct Results {
    values: SmallVec<[u64; 16]>,
    rows: usize,
}

/// A map call for one of the programs.
fn map_call(call: &RowProgramCall, program: &MapProgram) -> MapCall {
    let column = Affine {
        offset: 0,
        strides: smallvec![0, 1],
    };
    let mut params: SmallVec<[Scalar; 2]> = call.params.iter().copied().collect();
    params.resize(program.params.len(), Scalar::Float(0.0));
    MapCall {
        op: call.op,
        program: program.clone(),
        shape: call.shape.clone(),
        inputs: smallvec![],
        indices: program.indices.iter().map(|_| column.clone()).collect(),
        params,
        over: Default::default(),
    }
}

/// Rows that are computed together: where their outputs go, and sums of their columns.
struct Task<'m> {
    first: usize,
    count: usize,
    each: [&'m mut [u8]; MAX_OUTPUTS],
    rows: [&'m mut [u8]; MAX_OUTPUTS],
    sums: Vec<f64>,
}

/// The bytes of each.
fn slices(memories: &mut [Memory]) -> [&mut [u8]; MAX_OUTPUTS] {
    let mut slices: [&mut [u8]; MAX_OUTPUTS] = Default::default();
    for (slice, memory) in slices.iter_mut().zip(memories) {
        *slice = memory.bytes_mut();
    }
    slices
}

/// Takes the first bytes of what is left.
fn take<'m>(rest: &mut &'m mut [u8], bytes: usize) -> &'m mut [u8] {
    let (own, later) = std::mem::take(rest).split_at_mut(bytes);
    *rest = later;
    own
}

fn run<T: Float>(call: &RowProgramCall) -> Result<Buffers> {
    let (rows, n, program) = (call.shape[0], call.shape[1], &call.program);
    let given = |view: &anymesh_kernel::View| MapInput {
        view: view.clone(),
        window: None,
    };
    let inputs: SmallVec<[MapInput; 4]> = call.inputs.iter().map(given).collect();
    let straight = copy::straightened(&inputs)?;
    let inputs = straight.as_deref().unwrap_or(&inputs);
    let folds: Vec<MapCall> = (program.folds.iter())
        .map(|fold| map_call(call, &fold.program))
        .collect();
    let [each, per_row, columns] = [&program.each, &program.rows, &program.columns]
        .map(|part| part.as_ref().map(|program| map_call(call, program)));
    let part = |map| Part::new(map, inputs, program.params);
    let work = Work::<T> {
        call,
        folds: folds.iter().map(part).collect::<Result<_>>()?,
        each: each.as_ref().map(part).transpose()?,
        rows: per_row.as_ref().map(part).transpose()?,
        columns: columns.as_ref().map(part).transpose()?,
        sum: SumFloat::new(None),
    };
    let [each, per_row, columns] = program.dtypes();
    let memory =
        |count: usize| move |dtype: &DType| Memory::new(count.saturating_mul(dtype.size()));
    let mut of_each = (each.iter().map(memory(rows * n))).collect::<Result<SmallVec<[_; 2]>>>()?;
    let mut of_rows = (per_row.iter().map(memory(rows))).collect::<Result<SmallVec<[_; 2]>>>()?;

    // Cut by sizes alone, so that sums of columns do not depend on the number of threads.
    let mut group = (parallel::CHUNK / n).max(1);
    if !columns.is_empty() {
        group = group.max(rows.div_ceil(COLUMN_PARTS));
    }
    let (mut rest_each, mut rest_rows) = (slices(&mut of_each), slices(&mut of_rows));
    let mut tasks = Vec::with_capacity(rows.div_ceil(group));
    for first in (0..rows).step_by(group) {
        let count = group.min(rows - first);
        let mut task = Task {
            first,
            count,
            each: Default::default(),
            rows: Default::default(),
            sums: vec![0.0; columns.len() * n],
        };
        for (o, dtype) in each.iter().enumerate() {
            task.each[o] = take(&mut rest_each[o], count * n * dtype.size());
        }
        for (o, dtype) in per_row.iter().enumerate() {
            task.rows[o] = take(&mut rest_rows[o], count * dtype.size());
        }
        tasks.push(task);
    }
    let one = |task: &mut Task<'_>| Scratch::with(|scratch| work.task(task, scratch));
    parallel::try_each(rows * n, tasks.iter_mut(), |_, task| one(task))?;
    // Parts are added in the order of their rows.
    let mut sums = vec![0.0; columns.len() * n];
    for task in &tasks {
        let pairs = sums.iter_mut().zip(&task.sums);
        pairs.for_each(|(sum, part)| *sum += part);
    }
    drop(tasks);
    let mut buffers: Buffers = (of_each.into_iter().chain(of_rows))
        .map(Memory::buffer)
        .collect();
    for (dtype, sums) in columns.iter().zip(sums.chunks(n)) {
        let values: Vec<T> = sums.iter().map(|sum| T::narrow(*sum)).collect();
        let mut out = memory(n)(dtype)?;
        store(&values, *dtype, out.bytes_mut());
        buffers.push(out.buffer());
    }
    Ok(buffers)
}

/// All parts, bound to their inputs.
struct Work<'a, T> {
    call: &'a RowProgramCall,
    folds: Vec<Part<'a>>,
    each: Option<Part<'a>>,
    rows: Option<Part<'a>>,
    columns: Option<Part<'a>>,
    sum: SumFloat<T>,
}

impl<T: Float> Work<'_, T> {
    fn task(&self, task: &mut Task<'_>, scratch: &mut Scratch) -> Result<()> {
        let n = self.call.shape[1];
        // Short rows share a block: an instruction then begins once for several of them.
        let together = (BLOCK / n).max(1);
        let mut results = Results::default();
        for first in (0..task.count).step_by(together) {
            let rows = together.min(task.count - first);
            let start = (task.first + first) * n;
            results.values.clear();
            results.rows = rows;
            for k in 0..self.folds.len() {
                self.fold(k, start, &mut results, scratch)?;
            }
            if let Some(part) = &self.each {
                let mut outs: [&mut [u8]; MAX_OUTPUTS] = Default::default();
                for (o, (_, dtype)) in part.bound.outputs().iter().enumerate() {
                    outs[o] = take(&mut task.each[o], rows * n * dtype.size());
                }
                let late = part.late(&results, 0..rows);
                (part.bound).run(start..start + rows * n, outs, scratch, late)?;
            }
            if let Some(part) = &self.rows {
                for row in 0..rows {
                    let mut outs: [&mut [u8]; MAX_OUTPUTS] = Default::default();
                    for (o, (_, dtype)) in part.bound.outputs().iter().enumerate() {
                        outs[o] = take(&mut task.rows[o], dtype.size());
                    }
                    let (at, late) = (start + row * n, part.late(&results, row..row + 1));
                    part.bound.run(at..at + 1, outs, scratch, late)?;
                }
            }
            if let Some(part) = &self.columns {
                let late = part.late(&results, 0..rows);
                for first in (0..n).step_by(BLOCK) {
                    let len = BLOCK.min(n - first);
                    let range = start + first..start + first + rows * len;
                    part.bound.execute(range, scratch, &mut [], late)?;
                    for (o, sums) in task.sums.chunks_mut(n).enumerate() {
                        let sums = &mut sums[first..first + len];
                        for row in 0..rows {
                            match part.bound.output::<T>(o, scratch, row, len) {
                                Src::Many(values) => self.sum.slab(sums, values, len, 0),
                                Src::One(value) => {
                                    sums.iter_mut().for_each(|sum| *sum += value.wide())
                                }
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// The results of reduction `k` of the rows from `start` on, behind those of earlier ones.
    fn fold(
        &self,
        k: usize,
        start: usize,
        results: &mut Results,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let fold = &self.call.program.folds[k];
        let scale = fold.scale.map(|scale| self.call.params[scale].to_f64());
        match fold.mode {
            ReduceOp::Sum => self.folded(&SumFloat::new(scale), k, start, results, scratch),
            ReduceOp::Max => {
                self.folded(&Extreme::<T, true>::new(scale), k, start, results, scratch)
            }
            ReduceOp::Min => {
                self.folded(&Extreme::<T, false>::new(scale), k, start, results, scratch)
            }
            ReduceOp::LogSumExp => self.folded(&LogSumExp::new(scale), k, start, results, scratch),
            _ => Err(Error::DType {
                op: self.call.op,
                dtype: T::KIND.dtype(),
                expected: "a reduction of rows: sum, max, min or logsumexp",
            }),
        }
    }

    fn folded<F: Fold<In = T, Out = T>>(
        &self,
        fold: &F,
        k: usize,
        start: usize,
        results: &mut Results,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let (n, part, rows) = (self.call.shape[1], &self.folds[k], results.rows);
        let mut accs: SmallVec<[F::Acc; 16]> = smallvec![fold.start(); rows];
        for first in (0..n).step_by(BLOCK) {
            // Rows that share a block are whole.
            let len = BLOCK.min(n - first);
            let range = start + first..start + first + rows * len;
            let late = part.late(results, 0..rows);
            part.bound.execute(range, scratch, &mut [], late)?;
            for (row, acc) in accs.iter_mut().enumerate() {
                match part.bound.output::<T>(0, scratch, row, len) {
                    Src::Many(values) => fold.row(acc, values, first),
                    Src::One(value) => fold.row(acc, &[value; BLOCK][..len], first),
                }
            }
        }
        let done = accs.into_iter().map(|acc| fold.finish(acc).to_word());
        results.values.extend(done);
        Ok(())
    }
}

#[cfg(test)]
mod tests;

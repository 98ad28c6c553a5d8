//! Row programs: their parts are one map program that runs over blocks of rows while these are in cache.
//! Results of reductions are parameters that change from row to row.

mod joined;
mod norm;

use crate::{
    copy,
    element::store,
    fold::{Extreme, Fold, LogSumExp, SumFloat},
    frame::{BLOCK, Src},
    map::{BoundProgram, Code, Late, Scratch},
    memory::Memory,
    parallel,
    scalar::Float,
};
use anymesh_kernel::{
    DType, Dims, Error, MapProgram, Result,
    backend::{Affine, Buffers, MapCall, MapInput, ReduceOp, RowProgramCall},
    map::MAX_OUTPUTS,
};
use joined::{Joined, Part};
use norm::Norm;
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// At most so many partial sums of a column, each of at least so many rows: each has memory for all
/// columns.
const COLUMN_PARTS: [usize; 2] = [64, 16];

/// Shorter rows are left to be composed: a part that starts for every row costs more than passes
/// over all of them.
const SHORTEST: usize = 48;

/// Whether rows are worth a kernel that goes through them one by one, and sums of columns are of the
/// kind that is computed in.
pub(crate) fn fits(call: &RowProgramCall) -> bool {
    let wide = call.inputs.iter().any(|view| view.dtype == DType::F64);
    let [_, _, columns] = call.program.dtypes();
    let alike = columns.iter().all(|dtype| (*dtype == DType::F64) == wide);
    call.length() >= SHORTEST && alike
}

/// The backend's kernel for row programs.
pub(crate) fn row_program(call: &RowProgramCall) -> Result<Buffers> {
    if call.program.shared.is_some() {
        // Parts are joined here, and share what they compute anyway.
        return row_program(&RowProgramCall {
            program: call.program.without_shared().into(),
            ..call.clone()
        });
    }
    let wide = call.inputs.iter().any(|view| view.dtype == DType::F64);
    if wide {
        run::<f64>(call)
    } else {
        run::<f32>(call)
    }
}

/// A map call for the programs of a row program, with the parameters of its own.
fn map_call(call: &RowProgramCall, program: &MapProgram) -> MapCall {
    let mut strides: Dims<i64> = smallvec![0; call.shape.rank()];
    strides[call.shape.rank() - 1] = 1;
    let column = Affine { offset: 0, strides };
    MapCall {
        op: call.op,
        program: program.clone(),
        shape: call.shape.clone(),
        inputs: smallvec![],
        indices: smallvec![column],
        params: call.params.iter().copied().collect(),
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
    if let Some(norm) = Norm::of(call)? {
        return tasks::<T>(call, |task| {
            norm.task(task);
            Ok(())
        });
    }
    interpreted::<T>(call)
}

/// [`run`] of any program.
fn interpreted<T: Float>(call: &RowProgramCall) -> Result<Buffers> {
    let program = &call.program;
    let given = |view: &anymesh_kernel::View| MapInput {
        view: view.clone(),
        window: None,
    };
    let inputs: SmallVec<[MapInput; 4]> = call.inputs.iter().map(given).collect();
    let straight = copy::straightened(&inputs)?;
    let inputs = straight.as_deref().unwrap_or(&inputs);
    let joined = Joined::new(program);
    let some = program.programs().next();
    let Some(map) = some.map(|some| map_call(call, some)) else {
        return Ok(smallvec![]);
    };
    let of_rows = program.rows.as_ref().map(|program| map_call(call, program));
    let of_rows = of_rows
        .as_ref()
        .map(|map| BoundProgram::new(map, inputs, None));
    let code = Arc::new(Code::new(&joined.program, call.params.len()));
    let work = Work::<T> {
        call,
        joined: &joined,
        bound: BoundProgram::of(&map, &joined.program, code, inputs, None)?,
        rows: of_rows.transpose()?,
        sum: SumFloat::new(None),
    };
    tasks::<T>(call, |task| {
        Scratch::with(|scratch| work.task(task, scratch))
    })
}

/// What a call gives, of tasks that are done by `one`.
fn tasks<T: Float>(
    call: &RowProgramCall,
    one: impl Fn(&mut Task<'_>) -> Result<()> + Sync,
) -> Result<Buffers> {
    let (rows, n) = (call.rows(), call.length());
    let [each, per_row, columns] = call.program.dtypes();
    let memory =
        |count: usize| move |dtype: &DType| Memory::new(count.saturating_mul(dtype.size()));
    let mut of_each = (each.iter().map(memory(rows * n))).collect::<Result<SmallVec<[_; 2]>>>()?;
    let mut of_rows = (per_row.iter().map(memory(rows))).collect::<Result<SmallVec<[_; 2]>>>()?;

    // Cut by sizes alone, so that sums of columns do not depend on the number of threads.
    let mut group = (parallel::CHUNK / n).max(1);
    if !columns.is_empty() {
        let [most, least] = COLUMN_PARTS;
        group = group.max(rows.div_ceil(most)).max(least);
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

/// The program, bound to its inputs.
struct Work<'a, T> {
    call: &'a RowProgramCall,
    joined: &'a Joined,
    bound: BoundProgram<'a>,
    /// What is computed for each row, at its first position.
    rows: Option<BoundProgram<'a>>,
    sum: SumFloat<T>,
}

/// Some rows that are computed together, and for each reduction so far its result of each of them.
struct Group {
    start: usize,
    rows: usize,
    results: SmallVec<[u64; 16]>,
}

impl<T: Float> Work<'_, T> {
    fn task(&self, task: &mut Task<'_>, scratch: &mut Scratch) -> Result<()> {
        let n = self.call.length();
        // Short rows share a block: an instruction then begins once for several of them.
        let together = (BLOCK / n).max(1);
        for first in (0..task.count).step_by(together) {
            let mut group = Group {
                start: (task.first + first) * n,
                rows: together.min(task.count - first),
                results: smallvec![],
            };
            self.bound.begin(scratch);
            for k in 0..self.joined.folds.len() {
                self.fold(k, &mut group, scratch)?;
            }
            self.elements(&group, task, scratch)?;
            if let Some(bound) = &self.rows {
                self.numbers(bound, &group, &mut task.rows, scratch)?;
            }
        }
        Ok(())
    }

    /// Computes a part of the program for columns `first..first + len` of some rows. What other parts
    /// have computed is not computed again, where it is still there.
    fn part(
        &self,
        part: &Part,
        group: &Group,
        first: usize,
        scratch: &mut Scratch,
        outs: &mut [&mut [u8]],
    ) -> Result<usize> {
        let n = self.call.length();
        let positions = group.rows * BLOCK.min(n - first);
        let start = group.start + first;
        let steps = match n > BLOCK {
            true => {
                self.bound.begin(scratch);
                &part.all
            }
            false => &part.fresh,
        };
        let (range, late) = (
            start..start + positions,
            self.late(&group.results, group.rows),
        );
        self.bound.steps(steps, range, late, scratch, outs)?;
        if group.rows > 1 {
            for (reg, _) in &self.bound.outputs()[part.outputs.clone()] {
                self.bound.spread(*reg, positions, group.rows, scratch);
            }
        }
        Ok(positions)
    }

    fn late<'r>(&self, values: &'r [u64], rows: usize) -> Late<'r> {
        Late {
            before: self.call.params.len(),
            values,
            rows,
        }
    }

    /// Outputs of elements, and sums of columns.
    fn elements(&self, group: &Group, task: &mut Task<'_>, scratch: &mut Scratch) -> Result<()> {
        let (n, joined) = (self.call.length(), self.joined);
        for first in (0..n).step_by(BLOCK) {
            let len = BLOCK.min(n - first);
            let mut outs: [&mut [u8]; MAX_OUTPUTS] = Default::default();
            let outs = &mut outs[..joined.outputs];
            for (o, out) in outs.iter_mut().enumerate() {
                let (_, dtype) = self.bound.outputs()[o];
                *out = take(&mut task.each[o], group.rows * len * dtype.size());
            }
            if let Some(part) = &joined.each {
                let positions = self.part(part, group, first, scratch, outs)?;
                self.bound.store(positions, outs, scratch);
            }
            let Some(part) = &joined.columns else {
                continue;
            };
            let positions = self.part(part, group, first, scratch, outs)?;
            for (o, sums) in task.sums.chunks_mut(n).enumerate() {
                let sums = &mut sums[first..first + len];
                match (self.bound).output::<T>(part.outputs.start + o, scratch, outs, positions) {
                    Src::Many(values) => self.sum.slab(sums, values, len, 0),
                    Src::One(value) => {
                        let value = value.wide() * group.rows as f64;
                        sums.iter_mut().for_each(|sum| *sum += value)
                    }
                }
            }
        }
        Ok(())
    }

    /// Outputs of rows.
    fn numbers(
        &self,
        bound: &BoundProgram<'_>,
        group: &Group,
        out: &mut [&mut [u8]; MAX_OUTPUTS],
        scratch: &mut Scratch,
    ) -> Result<()> {
        let count = bound.outputs().len();
        for row in 0..group.rows {
            let mut outs: [&mut [u8]; MAX_OUTPUTS] = Default::default();
            for (o, (_, dtype)) in bound.outputs().iter().enumerate() {
                outs[o] = take(&mut out[o], dtype.size());
            }
            let results = group.results.iter().skip(row).step_by(group.rows);
            let results: SmallVec<[u64; 4]> = results.copied().collect();
            let at = group.start + row * self.call.length();
            let late = self.late(&results, 1);
            bound.run_at(at, &mut outs[..count], late, scratch)?;
        }
        Ok(())
    }

    /// The results of reduction `k` of some rows, behind those of earlier ones.
    fn fold(&self, k: usize, group: &mut Group, scratch: &mut Scratch) -> Result<()> {
        let fold = &self.call.program.folds[k];
        let scale = fold.scale.map(|scale| self.call.params[scale].to_f64());
        match fold.mode {
            ReduceOp::Sum => self.folded(&SumFloat::new(scale), k, group, scratch),
            ReduceOp::Max => self.folded(&Extreme::<T, true>::new(scale), k, group, scratch),
            ReduceOp::Min => self.folded(&Extreme::<T, false>::new(scale), k, group, scratch),
            ReduceOp::LogSumExp => self.folded(&LogSumExp::new(scale), k, group, scratch),
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
        group: &mut Group,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let (n, part) = (self.call.length(), &self.joined.folds[k]);
        let mut accs: SmallVec<[F::Acc; 16]> = smallvec![fold.start(); group.rows];
        for first in (0..n).step_by(BLOCK) {
            // Rows that share a block are whole.
            let len = BLOCK.min(n - first);
            let positions = self.part(part, group, first, scratch, &mut [])?;
            match self
                .bound
                .output::<T>(part.outputs.start, scratch, &[], positions)
            {
                Src::Many(values) => {
                    for (acc, values) in accs.iter_mut().zip(values.chunks(len)) {
                        fold.row(acc, values, first);
                    }
                }
                Src::One(value) => {
                    for acc in &mut accs {
                        fold.row(acc, &[value; BLOCK][..len], first);
                    }
                }
            }
        }
        let done = accs.into_iter().map(|acc| fold.finish(acc).to_word());
        group.results.extend(done);
        Ok(())
    }
}

#[cfg(test)]
mod tests;

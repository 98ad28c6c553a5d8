//! The parts of a row program as one program, in which nothing is computed twice.

use anymesh_kernel::{
    DType, Kind,
    backend::RowProgram,
    map::{Inst, Program, Reg},
};
use std::ops::Range;

/// The parts of a row program as one. Its outputs are those of elements, then the values that are reduced,
/// then those that are summed over columns.
pub(super) struct Joined {
    pub(super) program: Program,
    /// How many outputs of elements there are.
    pub(super) outputs: usize,
    pub(super) folds: Vec<Part>,
    pub(super) each: Option<Part>,
    pub(super) columns: Option<Part>,
}

/// The instructions of a part, in order.
pub(super) struct Part {
    pub(super) all: Vec<u16>,
    /// Those that no earlier part has.
    pub(super) fresh: Vec<u16>,
    /// Its outputs.
    pub(super) outputs: Range<usize>,
}

impl Joined {
    pub(super) fn new(row: &RowProgram) -> Self {
        let mut joining = Joining {
            params: row.params,
            ..Joining::default()
        };
        let folds = row.folds.iter().map(|fold| &fold.program);
        let folds: Vec<Added> = folds.map(|program| joining.add(program)).collect();
        let each = row.each.as_ref().map(|program| joining.add(program));
        let columns = row.columns.as_ref().map(|program| joining.add(program));
        // Outputs of elements first: those are written where they go.
        let mut outputs = vec![];
        let mut place = |(mut part, own): Added| {
            part.outputs = outputs.len()..outputs.len() + own.len();
            outputs.extend(own);
            part
        };
        let each = each.map(&mut place);
        let folds = folds.into_iter().map(&mut place).collect();
        let columns = columns.map(&mut place);
        Self {
            outputs: each.as_ref().map_or(0, |each| each.outputs.len()),
            program: joining.finish(outputs),
            folds,
            each,
            columns,
        }
    }
}

/// A part, and what it stores.
type Added = (Part, Vec<(Reg, DType)>);

#[derive(Default)]
struct Joining {
    insts: Vec<Inst>,
    kinds: Vec<Kind>,
    /// Which of them some part has run.
    run: Vec<bool>,
    inputs: Vec<DType>,
    indices: Vec<Kind>,
    /// Parameters of the call; those behind them are results of reductions.
    params: usize,
    all_params: Vec<Kind>,
}

impl Joining {
    /// Adds a part: its instructions, and its outputs.
    fn add(&mut self, program: &Program) -> Added {
        fn longer<T: Clone>(all: &mut Vec<T>, of: &[T]) {
            if of.len() > all.len() {
                *all = of.to_vec();
            }
        }
        longer(&mut self.inputs, &program.inputs);
        longer(&mut self.indices, &program.indices);
        longer(&mut self.all_params, &program.params);
        let mut part = Part {
            all: vec![],
            fresh: vec![],
            outputs: 0..0,
        };
        let mut regs: Vec<Reg> = Vec::with_capacity(program.insts.len());
        for (inst, kind) in program.insts.iter().zip(&program.kinds) {
            let inst = inst.over(|r| regs[usize::from(r)]);
            let known =
                (self.insts.iter().zip(&self.kinds)).position(|known| known == (&inst, kind));
            let at = known.unwrap_or_else(|| {
                self.insts.push(inst);
                self.kinds.push(*kind);
                self.run.push(false);
                self.insts.len() - 1
            });
            regs.push(at as Reg);
            // Constants and parameters of the call are there from the beginning.
            let given = match inst {
                Inst::Const(..) => true,
                Inst::Param(k) => usize::from(k) < self.params,
                _ => false,
            };
            if !given {
                part.all.push(at as u16);
            }
        }
        // In the order in which registers were given memory.
        part.all.sort_unstable();
        part.all.dedup();
        let fresh = part.all.iter().copied();
        part.fresh = fresh.filter(|i| !self.run[usize::from(*i)]).collect();
        for i in &part.fresh {
            self.run[usize::from(*i)] = true;
        }
        let outputs = program.outputs.iter();
        let outputs = outputs.map(|(reg, dtype)| (regs[usize::from(*reg)], *dtype));
        (part, outputs.collect())
    }

    fn finish(self, outputs: Vec<(Reg, DType)>) -> Program {
        Program {
            insts: self.insts,
            kinds: self.kinds,
            inputs: self.inputs,
            indices: self.indices,
            params: self.all_params,
            outputs,
        }
    }
}

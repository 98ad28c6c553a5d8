//! How rows are shared out among threads, and what of a program is found without going through them.

use crate::map::CUBE;
use anymesh_kernel::{
    DType, MapProgram, View,
    backend::{ReduceOp, RowFold, RowProgramCall},
    map::{Binary, Inst, Program},
};

/// Chunks of four elements that a thread may hold, of all inputs and sums of columns together.
const MAX_HELD: usize = 32;
/// The same with shared values among them: what is computed of these needs registers, too.
const MAX_SHARED: usize = 20;
/// Chunks of a row that a thread may hold.
const MAX_CHUNKS: usize = 16;
/// Chunks of a row that a thread of a plane holds before other planes share the row.
const WANTED: usize = 8;

/// Threads of a cube, those that share a row, and the chunks that each of them has; none where
/// the row is read again.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) threads: usize,
    pub(super) width: usize,
    pub(super) chunks: usize,
    /// Inputs that are read once.
    pub(super) held: Vec<usize>,
}

/// Inputs that differ from element to element, and are floats. What nobody but the elements reads is
/// read for them: held through the reductions it would only take their registers.
fn held(call: &RowProgramCall) -> Vec<usize> {
    let program = &call.program;
    let reads = |program: &MapProgram, k: usize| {
        let mut loads = program.insts.iter();
        loads.any(|inst| matches!(inst, Inst::Load(input) if usize::from(*input) == k))
    };
    let early = |k: usize| {
        let folds = program.folds.iter().map(|fold| &fold.program);
        let mut programs = folds.chain(&program.rows).chain(&program.columns);
        program.folds.is_empty() || programs.any(|program| reads(program, k))
    };
    let differs = |view: &View| {
        let (column, rows) = view.layout.strides.split_last().unwrap_or((&0, &[]));
        let differs = call.rows() == 1 || rows.iter().any(|stride| *stride != 0);
        differs && *column != 0 && view.dtype.is_float()
    };
    (call.inputs.iter().enumerate())
        .filter(|(k, view)| differs(view) && early(*k))
        .map(|(k, _)| k)
        .collect()
}

fn column_outputs(call: &RowProgramCall) -> usize {
    let columns = call.program.columns.as_ref();
    columns.map_or(0, |program| program.outputs.len())
}

impl Cut {
    /// With planes a row belongs to few threads, best to one plane or a part of one, which needs no
    /// barrier; without them to as many as have a chunk each.
    ///
    /// Where no columns are summed, rows that threads can have as a whole are shared out by their
    /// length alone: a reduction has the same order whatever else is computed of its rows.
    pub(super) fn new(call: &RowProgramCall, planes: bool, most: usize) -> Self {
        let quarter = call.length().div_ceil(4);
        let (held, columns) = (held(call), column_outputs(call));
        let values = call.program.shared.as_ref().map_or(0, |p| p.outputs.len());
        let limit = match columns {
            0 => MAX_CHUNKS,
            // Registers of four that each chunk takes.
            _ => (MAX_HELD / (held.len() + columns)).clamp(1, MAX_CHUNKS),
        };
        let wanted = if planes { limit.min(WANTED) } else { 1 };
        let least = if planes {
            quarter.next_power_of_two().min(32)
        } else {
            1
        };
        let width = (quarter.div_ceil(wanted).next_power_of_two()).clamp(least, CUBE as usize);
        let chunks = quarter.div_ceil(width);
        if chunks <= limit {
            // Sums of columns and shared values take many registers. So many threads make the
            // compiler leave room for two of the usual cubes.
            let large = columns + values > 0 && planes && most >= 512;
            let threads = if large { 512 } else { CUBE as usize };
            return Self::holding(threads, width, chunks, held, values);
        }
        // More threads before it is read again.
        let limit = (MAX_HELD / (held.len() + columns).max(1)).clamp(1, MAX_CHUNKS);
        let width = (quarter.div_ceil(limit).next_power_of_two()).min(most);
        let chunks = quarter.div_ceil(width);
        // A thread of so many has 64 registers in all: what it holds must leave room for the rest.
        let limit = if width > 512 { limit.min(6) } else { limit };
        if width > CUBE as usize && chunks <= limit {
            return Self::holding(width, width, chunks, held, values);
        }
        // Fewer rows at a time stay in cache from one pass to the next.
        let rounds = call.program.rounds();
        let passes = rounds.iter().max().map_or(0, |last| last + 1)
            + usize::from(call.program.each.is_some());
        let width = if passes > 1 { most } else { CUBE as usize };
        Self {
            threads: width,
            width,
            chunks: 0,
            held,
        }
    }

    /// Threads that have so many chunks each, and hold shared values, and of the inputs what they have
    /// registers for; the others they read again, from cache.
    fn holding(
        threads: usize,
        width: usize,
        chunks: usize,
        mut held: Vec<usize>,
        values: usize,
    ) -> Self {
        let most = match values {
            0 => MAX_HELD,
            _ => MAX_SHARED,
        };
        held.truncate((most / chunks).max(1).saturating_sub(values));
        Self {
            threads,
            width,
            chunks,
            held,
        }
    }
}

/// A sum of `column == t ? x : 0`, where `t` is the same in a whole row, is `x` at that column: the
/// program of `t`. Such a sum needs no reduction.
pub(super) fn pick(call: &RowProgramCall, fold: &RowFold) -> Option<MapProgram> {
    let insts = &fold.program.insts;
    let at = |reg: u16| insts[usize::from(reg)];
    let (out, _) = *fold.program.outputs.first()?;
    let Inst::Select(condition, _, other) = at(out) else {
        return None;
    };
    let zero = matches!(at(other), Inst::Const(value, _) if value.to_f64() == 0.0);
    let Inst::Binary(Binary::Eq, a, b) = at(condition) else {
        return None;
    };
    let named = match (at(a), at(b)) {
        (Inst::Index(_), _) => b,
        (_, Inst::Index(_)) => a,
        _ => return None,
    };
    if fold.mode != ReduceOp::Sum || !zero {
        return None;
    }
    let program: MapProgram = Program {
        outputs: [(named, DType::I32)].into_iter().collect(),
        ..Program::clone(&fold.program)
    }
    .into();
    let program = program.without_unused();
    let same_in_row = |inst: &Inst| match *inst {
        Inst::Load(k) => call.inputs[usize::from(k)].layout.strides.last() == Some(&0),
        Inst::Index(_) | Inst::Inside(_) => false,
        _ => true,
    };
    (program.insts.iter().all(same_in_row)).then_some(program)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anymesh_kernel::{
        Buffer, Layout,
        backend::{RowArgs, RowBuilder},
        map::Val,
    };

    fn call(shape: [usize; 2], fold: impl for<'b> Fn(&RowArgs<'b>) -> Val<'b>) -> RowProgramCall {
        let mut b = RowBuilder::new(&[DType::BF16, DType::I64], 0);
        b.fold(ReduceOp::Sum, None, fold).expect("valid");
        b.rows(|a| [a.r[0]]).expect("valid");
        let view = |dtype, strides: [isize; 2]| View {
            buffer: Buffer::new((), 16),
            dtype,
            layout: Layout {
                shape: shape.into(),
                strides: strides.into_iter().collect(),
                offset: 0,
            },
        };
        let inputs = [
            view(DType::BF16, [shape[1] as isize, 1]),
            view(DType::I64, [1, 0]),
        ];
        RowProgramCall {
            over: false,
            op: "test",
            program: b.finish().expect("valid"),
            shape: shape.into(),
            inputs: inputs.into_iter().collect(),
            params: Default::default(),
        }
    }

    #[test]
    fn short_rows_belong_to_a_plane_and_very_short_ones_to_a_part_of_one() {
        let cut = |n| Cut::new(&call([100, n], |a| a.x[0]), true, 1024);
        let of = |width, chunks| Cut {
            threads: 256,
            width,
            chunks,
            held: vec![0],
        };
        assert_eq!(cut(768), of(32, 6));
        assert_eq!(cut(1024), of(32, 8));
        assert_eq!(cut(64), of(16, 1));
        assert_eq!(cut(1), of(1, 1));
        assert_eq!(cut(4096), of(128, 8));
        // Too long to be held: one pass over it.
        assert_eq!(cut(50_304), of(256, 0));
    }

    #[test]
    fn the_value_at_a_named_column_is_read_and_not_summed_up() {
        let of = |call: &RowProgramCall| pick(call, &call.program.folds[0]);
        let own = call([3, 8], |a| {
            (a.column().eq(a.x[1].cast(DType::I32))).select(a.x[0], a.x[0].lit(0.0))
        });
        let named = of(&own).expect("one column");
        assert!(named.insts.contains(&Inst::Load(1)) && !named.insts.contains(&Inst::Load(0)));
        // Something everywhere, and a column that each element names.
        let all = call([3, 8], |a| {
            (a.column().eq(a.x[1].cast(DType::I32))).select(a.x[0], a.x[0].lit(1.0))
        });
        assert_eq!(of(&all), None);
        let each = call([3, 8], |a| {
            (a.column().eq(a.x[0].cast(DType::I32))).select(a.x[0], a.x[0].lit(0.0))
        });
        assert_eq!(of(&each), None);
    }
}

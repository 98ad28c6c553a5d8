//! Reductions of rows as row programs.
//!
//! A device that runs both takes the row program for every reduction that is one, whether it stands
//! alone or with others of the same rows in one kernel: so its values are added in one order.

use super::{ReduceCall, ReduceOp, RowFold, RowProgram, RowProgramCall, View};
use crate::{
    DType, Dims, Kind, Layout, Scalar, Shape,
    layout::collapse,
    map::{Inst, Program},
};
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// Longer rows are not held by the threads that share one, and their order is the device's affair.
const LONGEST: usize = 16_384;
/// With fewer rows, long ones are cut for several groups of threads.
const FEW: usize = 1024;
const SHORT: usize = 4096;

/// Layouts of one shape, of which the last dimensions from `lead` on are a row, as layouts over as few
/// dimensions as they share with the row as the last one; `None` where a row is no single dimension.
pub fn in_rows(lead: usize, layouts: &[&Layout]) -> Option<(Shape, SmallVec<[Layout; 6]>)> {
    let dims = layouts.first()?.shape.dims();
    let part = |range: std::ops::Range<usize>| {
        let mut strides: SmallVec<[Dims<isize>; 6]> = (layouts.iter())
            .map(|layout| Dims::from_slice(&layout.strides[range.clone()]))
            .collect();
        let shape: Shape = dims[range].into();
        (collapse(&shape, &mut strides), strides)
    };
    let ((lead, before), (row, along)) = (part(0..lead), part(lead..dims.len()));
    if row.rank() > 1 {
        return None;
    }
    // A dimension of one element is dropped above, and is there again.
    let filled = |dims: &[usize]| -> Dims {
        match dims {
            [] => smallvec![1],
            some => some.into(),
        }
    };
    let steps = |strides: &Dims<isize>| -> Dims<isize> {
        match &strides[..] {
            [] => smallvec![0],
            some => some.into(),
        }
    };
    let mut shape = filled(lead.dims());
    shape.extend(filled(row.dims()));
    let shape: Shape = shape.into();
    let layout = |((layout, before), along): ((&&Layout, &Dims<isize>), &Dims<isize>)| Layout {
        shape: shape.clone(),
        strides: steps(before).into_iter().chain(steps(along)).collect(),
        offset: layout.offset,
    };
    let layouts = layouts.iter().zip(&before).zip(&along).map(layout);
    let layouts = layouts.collect();
    Some((shape.clone(), layouts))
}

impl ReduceCall {
    /// Whether it reduces rows, enough of them and none too long, so that some threads share each. What
    /// is reduced may be computed in another way; whether it is one follows from the shape, from how
    /// the first input lies and from what kind of program there is.
    pub fn is_of_rows(&self) -> bool {
        let (map, rank) = (&self.map, self.map.shape.rank());
        let summed = matches!(
            self.mode,
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::Min | ReduceOp::LogSumExp
        );
        let program = &map.program;
        let wide = |kind: &Kind| matches!(kind, Kind::F64 | Kind::I64);
        let plain = map.inputs.iter().all(|input| input.window.is_none())
            && map.indices.is_empty()
            && !program.can_fault()
            && !program.kinds.contains(&Kind::F64)
            && !program.params.iter().any(wide)
            && !map.inputs.is_empty();
        let lead = rank - self.axes.len();
        // The last dimensions, of which one has elements beside each other.
        let last = self.axes.iter().copied().eq(lead..rank)
            && map.shape.dims()[lead..].iter().filter(|n| **n > 1).count() <= 1;
        let computed = program.kinds[usize::from(program.outputs[0].0)] == Kind::F32;
        if !(summed && plain && last && computed && self.dtype == DType::F32) {
            return false;
        }
        let length: usize = map.shape.dims()[lead..].iter().product();
        let rows = map.shape.numel() / length;
        // Memory runs along rows.
        let strides = &map.inputs[0].view.layout.strides;
        let runs = (0..rank)
            .rev()
            .find(|&d| map.shape[d] > 1 && strides[d].abs() == 1);
        let along = runs.is_none_or(|d| d >= lead);
        along && rows > 1 && length <= LONGEST && (rows >= FEW || length <= SHORT)
    }

    /// The reduction as a row program, where it [is one](Self::is_of_rows). Its result is that of the
    /// rows.
    pub fn as_rows(&self) -> Option<RowProgramCall> {
        if !self.is_of_rows() {
            return None;
        }
        let (map, lead) = (&self.map, self.map.shape.rank() - self.axes.len());
        let layouts: SmallVec<[&Layout; 6]> = (map.inputs.iter())
            .map(|input| &input.view.layout)
            .collect();
        let (shape, layouts) = in_rows(lead, &layouts)?;
        let inputs = map.inputs.iter().zip(layouts);
        let mut program = Program::clone(&map.program);
        // What is reduced is a value, and nothing is stored.
        let (result, _) = program.outputs[0];
        program.outputs[0] = (result, DType::F32);
        let mut params: SmallVec<[Scalar; 4]> = map.params.iter().copied().collect();
        let scale = self.scale.map(|scale| {
            program.params.push(Kind::F32);
            params.push(Scalar::Float(scale));
            params.len() - 1
        });
        let mut of_rows = Program {
            insts: vec![Inst::Param(params.len() as u8)],
            kinds: vec![Kind::F32],
            outputs: [(0, DType::F32)].into_iter().collect(),
            ..program.clone()
        };
        of_rows.params.push(Kind::F32);
        Some(RowProgramCall {
            op: map.op,
            program: Arc::new(RowProgram {
                folds: vec![RowFold {
                    program: program.into(),
                    mode: self.mode,
                    scale,
                }],
                each: None,
                rows: Some(of_rows.into()),
                columns: None,
                shared: None,
                params: params.len(),
            }),
            shape,
            inputs: inputs
                .map(|(input, layout)| View {
                    layout,
                    ..input.view.clone()
                })
                .collect(),
            params,
            over: false,
        })
    }
}

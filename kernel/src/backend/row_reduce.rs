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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Buffer,
        backend::{MapCall, MapInput},
        map::Builder,
    };

    /// The sum of `x * p` over the last dimensions of a view.
    fn sum(layout: Layout, axes: &[usize], dtype: DType) -> ReduceCall {
        let b = Builder::new();
        let product = b.load(DType::F32) * b.param(DType::F32);
        let view = View {
            buffer: Buffer::new((), 4 * layout.shape.numel()),
            dtype: DType::F32,
            layout: layout.clone(),
        };
        ReduceCall {
            map: MapCall {
                op: "sum",
                program: b.finish(&[(product, DType::F32)]).expect("valid"),
                shape: layout.shape,
                inputs: smallvec![MapInput { view, window: None }],
                indices: smallvec![],
                params: smallvec![Scalar::Float(3.0)],
                over: Default::default(),
            },
            axes: axes.into(),
            mode: ReduceOp::Sum,
            scale: Some(0.5),
            dtype,
        }
    }

    #[test]
    fn a_reduction_of_rows_is_a_row_program_of_one() {
        let dense = Layout::contiguous([6, 5, 40].into());
        let call = sum(dense.clone(), &[2], DType::F32)
            .as_rows()
            .expect("rows");
        assert_eq!((call.rows(), call.length()), (30, 40));
        // As few dimensions as the operands share.
        assert_eq!(call.shape.dims(), [30, 40]);
        assert_eq!(call.params[..], [Scalar::Float(3.0), Scalar::Float(0.5)]);
        let [fold] = &call.program.folds[..] else {
            panic!("one reduction");
        };
        assert_eq!((fold.mode, fold.scale), (ReduceOp::Sum, Some(1)));
        assert_eq!(call.outputs()[..], [(DType::F32, [30].into())]);
        // Rows that no one stride leads through.
        let turned = dense.permute(&[1, 0, 2]);
        let call = sum(turned, &[2], DType::F32).as_rows().expect("rows");
        assert_eq!(call.shape.dims(), [5, 6, 40]);
        assert_eq!(call.inputs[0].layout.strides[..], [40, 200, 1]);
        // A dimension of one beside the row.
        let flat = Layout::contiguous([6, 1, 40].into());
        let call = sum(flat, &[1, 2], DType::F32).as_rows().expect("rows");
        assert_eq!(call.shape.dims(), [6, 40]);
    }

    #[test]
    fn other_reductions_keep_their_order() {
        let layout = |dims: &[usize]| Layout::contiguous(dims.into());
        let is_one = |layout: Layout, axes: &[usize], dtype| sum(layout, axes, dtype).is_of_rows();
        assert!(is_one(layout(&[64, 48]), &[1], DType::F32));
        // Columns, one row, a small float, memory that runs along what is kept.
        assert!(!is_one(layout(&[64, 48]), &[0], DType::F32));
        assert!(!is_one(layout(&[1, 48]), &[1], DType::F32));
        assert!(!is_one(layout(&[64, 48]), &[1], DType::BF16));
        assert!(!is_one(
            layout(&[48, 64]).permute(&[1, 0]),
            &[1],
            DType::F32
        ));
        // Rows of two dimensions, rows that are too long, and few that are long.
        assert!(!is_one(layout(&[64, 6, 8]), &[1, 2], DType::F32));
        assert!(!is_one(layout(&[2048, LONGEST + 4]), &[1], DType::F32));
        assert!(!is_one(layout(&[FEW - 1, SHORT + 4]), &[1], DType::F32));
        assert!(is_one(layout(&[FEW, SHORT + 4]), &[1], DType::F32));
    }
}

//! Softmax and the norms as row programs.

use crate::{CubeBackend, program::Repeat, row_program::stores};
use anymesh_kernel::{
    Buffer, DType, Layout, Result, View,
    backend::{ReduceOp, RowBuilder, RowCall, RowOp, RowProgramCall},
};
use smallvec::{SmallVec, smallvec};

/// Whether all is computed in f32, and rows can be stored in whole words.
pub(crate) fn fits(call: &RowCall) -> bool {
    let narrow = |view: &View| view.dtype != DType::F64;
    let parameters = match &call.mode {
        RowOp::Softmax | RowOp::LogSoftmax => true,
        RowOp::Norm { weight, bias, .. } => weight.iter().chain(bias).all(narrow),
    };
    stores(call.input.layout.shape[1], call.input.dtype) && narrow(&call.input) && parameters
}

/// A call as a row program. The parameters of a norm are given for every column; where they repeat
/// in another way, that says how.
fn as_program(call: &RowCall) -> Result<(RowProgramCall, Option<Repeat>)> {
    let (shape, dtype) = (&call.input.layout.shape, call.input.dtype);
    let (rows, n) = (shape[0], shape[1]);
    let mut inputs: SmallVec<[View; 4]> = smallvec![call.input.clone()];
    let mut params: SmallVec<[f64; 2]> = smallvec![];
    let (program, repeat) = match &call.mode {
        RowOp::Softmax | RowOp::LogSoftmax => {
            let mut b = RowBuilder::new(&[dtype], 0);
            let top = b.fold(ReduceOp::Max, None, |a| a.x[0])?;
            let sum = b.fold(ReduceOp::Sum, None, |a| (a.x[0] - a.r[top]).exp())?;
            match call.mode {
                RowOp::Softmax => b.each([dtype], |a| {
                    [(a.x[0] - a.r[top]).exp() * (a.r[sum].lit(1.0) / a.r[sum])]
                })?,
                _ => b.each([dtype], |a| [a.x[0] - a.r[top] - a.r[sum].log()])?,
            }
            (b.finish()?, None)
        }
        RowOp::Norm {
            rms,
            eps,
            weight,
            bias,
            groups,
            channels,
            inner,
        } => {
            let mut dtypes = vec![dtype];
            for view in weight.iter().chain(bias) {
                dtypes.push(view.dtype);
                inputs.push(View {
                    layout: Layout {
                        shape: shape.clone(),
                        strides: smallvec![0, 1],
                        offset: view.layout.offset,
                    },
                    ..view.clone()
                });
            }
            params.extend([1.0 / n as f64, *eps]);
            let mut b = RowBuilder::new(&dtypes, 2);
            let mean = match rms {
                true => None,
                false => Some(b.fold(ReduceOp::Sum, Some(0), |a| a.x[0])?),
            };
            let var = b.fold(ReduceOp::Sum, Some(0), |a| {
                let x = mean.map_or(a.x[0], |mean| a.x[0] - a.r[mean]);
                x * x
            })?;
            b.each([dtype], |a| {
                let x = mean.map_or(a.x[0], |mean| a.x[0] - a.r[mean]);
                let mut y = x * (a.r[var] + a.p[1]).rsqrt();
                let mut given = a.x[1..].iter();
                if weight.is_some() {
                    y = given.next().map_or(y, |weight| y * *weight);
                }
                [given.next().map_or(y, |bias| y + *bias)]
            })?;
            let (groups, channels, inner) = (*groups, *channels, *inner);
            let repeat = (groups > 1 || inner > 1).then_some(Repeat {
                groups,
                channels,
                inner,
            });
            (b.finish()?, repeat)
        }
    };
    let call = RowProgramCall {
        over: false,
        op: call.op,
        program,
        shape: [rows, n].into(),
        inputs,
        params: (params.into_iter())
            .map(anymesh_kernel::Scalar::Float)
            .collect(),
    };
    Ok((call, repeat))
}

impl CubeBackend {
    pub(crate) fn run_row(&self, call: &RowCall) -> Result<Buffer> {
        let (program, repeat) = as_program(call)?;
        let made = self.run_rows(&program, repeat)?.into_iter().next();
        made.ok_or_else(|| self.failed("a row program gave nothing"))
    }
}

//! Softmax and the norms as row programs.

use super::{ReduceOp, RowArgs, RowBuilder, RowCall, RowOp, RowProgramCall, View};
use crate::{DType, Layout, Result, Scalar, map::Val};
use smallvec::{SmallVec, smallvec};

/// How parameters belong to the elements of `[rows, n]`: row `r`, column `j` has number
/// `(r % groups) * channels + j / inner`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Repeat {
    pub groups: usize,
    pub channels: usize,
    pub inner: usize,
}

/// What is computed with: the input, or the sum that is stored beside, as it is read from there.
fn element<'b>(call: &RowCall, a: &RowArgs<'b>) -> Val<'b> {
    match call.residual {
        Some(_) => {
            let sum = a.x[0] + a.x[1];
            sum.cast(call.input.dtype).cast(DType::F32)
        }
        None => a.x[0],
    }
}

/// Sets what is stored of each element: what `f` makes of it, after the sum where there is one.
fn set_each(
    b: &mut RowBuilder,
    call: &RowCall,
    f: impl for<'b> Fn(&RowArgs<'b>) -> Val<'b>,
) -> Result<()> {
    let dtype = call.input.dtype;
    match call.residual {
        Some(_) => b.each([dtype; 2], |a| [element(call, a), f(a)]),
        None => b.each([dtype], |a| [f(a)]),
    }
}

/// [`element`] without the mean, where that is taken off.
fn centered<'b>(call: &RowCall, mean: Option<usize>, a: &RowArgs<'b>) -> Val<'b> {
    let x = element(call, a);
    mean.map_or(x, |mean| x - a.r[mean])
}

impl RowCall {
    /// The call as a row program. The parameters of a norm are given for every column; where they repeat
    /// in another way, that says how.
    pub fn as_program(&self) -> Result<(RowProgramCall, Option<Repeat>)> {
        as_program(self)
    }
}

fn as_program(call: &RowCall) -> Result<(RowProgramCall, Option<Repeat>)> {
    let (shape, dtype) = (&call.input.layout.shape, call.input.dtype);
    let (rows, n) = (shape[0], shape[1]);
    let mut inputs: SmallVec<[View; 4]> = smallvec![call.input.clone()];
    inputs.extend(call.residual.clone());
    let added = inputs.len();
    let mut dtypes = vec![dtype; added];
    let mut params: SmallVec<[f64; 2]> = smallvec![];
    let (program, repeat) = match &call.mode {
        RowOp::Softmax | RowOp::LogSoftmax => {
            let mut b = RowBuilder::new(&dtypes, 0);
            let top = b.fold(ReduceOp::Max, None, |a| element(call, a))?;
            let sum = b.fold(ReduceOp::Sum, None, |a| (element(call, a) - a.r[top]).exp())?;
            match call.mode {
                RowOp::Softmax => set_each(&mut b, call, |a| {
                    (element(call, a) - a.r[top]).exp() * (a.r[sum].lit(1.0) / a.r[sum])
                })?,
                _ => set_each(&mut b, call, |a| {
                    element(call, a) - a.r[top] - a.r[sum].log()
                })?,
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
                false => Some(b.fold(ReduceOp::Sum, Some(0), |a| element(call, a))?),
            };
            let var = b.fold(ReduceOp::Sum, Some(0), |a| {
                let x = centered(call, mean, a);
                x * x
            })?;
            set_each(&mut b, call, |a| {
                let mut y = centered(call, mean, a) * (a.r[var] + a.p[1]).rsqrt();
                let mut given = a.x[added..].iter();
                if weight.is_some() {
                    y = given.next().map_or(y, |weight| y * *weight);
                }
                given.next().map_or(y, |bias| y + *bias)
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
        params: (params.into_iter()).map(Scalar::Float).collect(),
    };
    Ok((call, repeat))
}

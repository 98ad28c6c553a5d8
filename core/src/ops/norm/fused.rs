//! The gradients of a norm over whole rows as one row program.

use super::gradient::ForBackward;
use crate::{
    DType, Result, Tensor,
    backend::{ReduceOp, RowArgs, RowBuilder, RowProgram},
    grad::{Back, Pulled},
    map::Val,
    ops::row_program::Rows,
    table::Table,
};
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// The parameters of the program: one over the length of a row, and what is added under the root.
const SHARE: usize = 0;
const EPS: usize = 1;

/// What tells programs apart.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Which {
    inputs: SmallVec<[DType; 4]>,
    rms: bool,
    wanted: Wanted,
    /// The dtypes of weight and bias.
    parameters: [Option<DType>; 2],
    beside: bool,
}

/// Which gradients are wanted.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Wanted {
    input: bool,
    weight: bool,
    bias: bool,
}

/// The results that the gradients are made of.
#[derive(Clone, Copy)]
struct Statistics {
    mean: Option<usize>,
    var: usize,
}

impl Statistics {
    fn root<'b>(&self, a: &RowArgs<'b>) -> Val<'b> {
        (a.r[self.var] + a.p[EPS]).rsqrt()
    }

    /// The input without the mean, where that was taken off.
    fn centered<'b>(mean: Option<usize>, a: &RowArgs<'b>) -> Val<'b> {
        mean.map_or(a.x[0], |mean| a.x[0] - a.r[mean])
    }

    /// The normalised input.
    fn direction<'b>(&self, a: &RowArgs<'b>) -> Val<'b> {
        Self::centered(self.mean, a) * self.root(a)
    }
}

/// The gradient of the normalised input: that of the output, times the weight.
fn scaled<'b>(a: &RowArgs<'b>, weighted: bool) -> Val<'b> {
    let weight = a.x.get(2).filter(|_| weighted);
    weight.map_or(a.x[1], |weight| a.x[1] * *weight)
}

/// `r (g w - mean(g w) - h mean(g w h))` with `h = (x - mean) r`, and the sums of `g h` and `g` over
/// all rows. The inputs are `x`, `g`, the weight where there is one, and last what else is added to
/// the gradient of `x`, once that is rounded, if there is something `beside`.
fn program(which: &Which) -> Result<Arc<RowProgram>> {
    let Which {
        inputs,
        rms,
        wanted,
        parameters,
        beside,
    } = which;
    let (rms, beside, parameters) = (*rms, *beside, *parameters);
    let mut b = RowBuilder::new(inputs, 2);
    let kind = b.kind();
    let weighted = parameters[0].is_some();
    let mean = match rms {
        true => None,
        false => Some(b.fold(ReduceOp::Sum, Some(SHARE), |a| a.x[0])?),
    };
    let var = b.fold(ReduceOp::Sum, Some(SHARE), |a| {
        Statistics::centered(mean, a) * Statistics::centered(mean, a)
    })?;
    let known = Statistics { mean, var };
    if wanted.input {
        let along = b.fold(ReduceOp::Sum, Some(SHARE), |a| {
            scaled(a, weighted) * known.direction(a)
        })?;
        let level = match rms {
            true => None,
            false => Some(b.fold(ReduceOp::Sum, Some(SHARE), |a| scaled(a, weighted))?),
        };
        b.each([inputs[0]], |a| {
            let g = level.map_or(scaled(a, weighted), |level| {
                scaled(a, weighted) - a.r[level]
            });
            let of_norm = (g - known.direction(a) * a.r[along]) * known.root(a);
            let other = a.x.last().filter(|_| beside);
            [other.map_or(of_norm, |other| *other + of_norm.cast(inputs[0]).cast(kind))]
        })?;
    }
    match (wanted.weight, wanted.bias, parameters) {
        (true, true, [Some(weight), Some(bias)]) => {
            b.columns([weight, bias], |a| [a.x[1] * known.direction(a), a.x[1]])?
        }
        (true, _, [Some(weight), _]) => b.columns([weight], |a| [a.x[1] * known.direction(a)])?,
        (_, true, [_, Some(bias)]) => b.columns([bias], |a| [a.x[1]])?,
        _ => {}
    }
    b.finish()
}

/// [`program`], made once: a step of training asks for the same one again and again, and to make it takes
/// longer than to launch it.
fn known(which: Which) -> Result<Arc<RowProgram>> {
    thread_local! {
        static KNOWN: Table<Which, Arc<RowProgram>> = Table::default();
    }
    if let Some(program) = KNOWN.with(|all| all.get(&which)) {
        return Ok(program);
    }
    let program = program(&which)?;
    KNOWN.with(|all| all.insert(which, program.clone()));
    Ok(program)
}

impl ForBackward {
    /// What [`pull`](Self::pull) gives, by one launch; `None` where it is to be composed. What is
    /// `beside` is added to the gradient of the input.
    #[track_caller]
    pub(super) fn fused(
        &self,
        b: &Back<'_>,
        x: &Tensor,
        [weight, bias]: [Option<&Tensor>; 2],
        g: &Tensor,
        beside: Option<&Tensor>,
    ) -> Result<Option<Pulled>> {
        let dims = self.axes.len();
        let first = x.rank() - dims;
        let is_trailing = self.axes.iter().copied().eq(first..x.rank());
        let covers = |p: Option<&Tensor>| p.is_none_or(|p| p.dims() == &x.dims()[first..]);
        let wanted = Wanted {
            input: self.needs_input(b),
            weight: weight.is_some() && b.needs(self.summands),
            bias: bias.is_some() && b.needs(self.summands + usize::from(weight.is_some())),
        };
        // Alone the bias's gradient is one plain sum.
        if !is_trailing || !covers(weight) || !covers(bias) || !(wanted.input || wanted.weight) {
            return Ok(None);
        }
        let beside = beside.filter(|_| wanted.input);
        let given = [x, g].into_iter().chain(weight).chain(bias).chain(beside);
        let operands: Vec<&Tensor> = given.collect();
        let Some(rows) = Rows::new(self.op, x, dims, &operands)? else {
            return Ok(None);
        };
        let mut inputs: SmallVec<[DType; 4]> = smallvec![x.dtype(), g.dtype()];
        inputs.extend(weight.map(|weight| weight.dtype()));
        let parameters = [weight, bias].map(|p| p.map(|p| p.dtype()));
        inputs.extend(beside.map(|beside| beside.dtype()));
        let program = known(Which {
            inputs,
            rms: self.rms,
            wanted,
            parameters,
            beside: beside.is_some(),
        })?;
        let params = [1.0 / rows.length() as f64, self.eps];
        let rows = rows.elements(x)?.elements(g)?;
        let rows = match weight {
            Some(weight) => rows.per_column(weight)?,
            None => rows,
        };
        let rows = match beside {
            Some(beside) => rows.elements(beside)?,
            None => rows,
        };
        let Some(made) = rows.launch(program, &params)? else {
            return Ok(None);
        };
        let mut made = made.into_iter();
        let mut next = |kept: Option<&Tensor>, wanted: bool| {
            let made = if wanted { made.next() } else { None };
            (made.zip(kept))
                .map(|(made, kept)| made.reshape(kept.shape()))
                .transpose()
        };
        let mut pulled = Pulled::new();
        pulled.push(next(Some(&self.x), wanted.input)?);
        if weight.is_some() {
            pulled.push(next(self.weight.as_ref(), wanted.weight)?);
        }
        if bias.is_some() {
            pulled.push(next(self.bias.as_ref(), wanted.bias)?);
        }
        Ok(Some(pulled))
    }
}

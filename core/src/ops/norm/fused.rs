//! The gradients of a norm over whole rows as one row program.

use super::gradient::ForBackward;
use crate::{
    Result, Tensor,
    backend::{NormGradient, RowProgram},
    grad::{Back, Pulled},
    ops::row_program::Rows,
    table::Table,
};
use std::sync::Arc;

/// The program, made once: a step of training asks for the same one again and again, and to make it takes
/// longer than to launch it.
fn known(which: NormGradient) -> Result<Arc<RowProgram>> {
    thread_local! {
        static KNOWN: Table<NormGradient, Arc<RowProgram>> = Table::default();
    }
    if let Some(program) = KNOWN.with(|all| all.get(&which)) {
        return Ok(program);
    }
    let program = which.program()?;
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
        let of_input = self.needs_input(b);
        let of_weight = weight.is_some() && b.needs(self.summands);
        let of_bias = bias.is_some() && b.needs(self.summands + usize::from(weight.is_some()));
        // Alone the bias's gradient is one plain sum.
        if !is_trailing || !covers(weight) || !covers(bias) || !(of_input || of_weight) {
            return Ok(None);
        }
        let beside = beside.filter(|_| of_input);
        let given = [x, g].into_iter().chain(weight).chain(bias).chain(beside);
        let operands: Vec<&Tensor> = given.collect();
        let Some(rows) = Rows::new(self.op, x, dims, &operands)? else {
            return Ok(None);
        };
        let dtype = |tensor: Option<&Tensor>| tensor.map(Tensor::dtype);
        let program = known(NormGradient {
            x: x.dtype(),
            g: g.dtype(),
            weight: dtype(weight),
            bias: dtype(bias),
            beside: dtype(beside),
            rms: self.rms,
            of_input,
            of_weight,
            of_bias,
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
        pulled.push(next(Some(&self.x), of_input)?);
        if weight.is_some() {
            pulled.push(next(self.weight.as_ref(), of_weight)?);
        }
        if bias.is_some() {
            pulled.push(next(self.bias.as_ref(), of_bias)?);
        }
        Ok(Some(pulled))
    }
}

//! The gradients of a norm over whole rows as one row program.

use super::gradient::{ForBackward, Wants};
use crate::{
    Result, Tensor,
    backend::{NormGradient, RowProgram},
    ops::row_program::Rows,
    table::Table,
    tensor::Outputs,
};
use smallvec::SmallVec;
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
    /// The gradients of plain rows that are wanted, by one launch; `None` where they are to be
    /// composed. What is `beside` is added to the gradient of the input.
    pub(super) fn fused(
        &self,
        wants: Wants,
        x: &Tensor,
        [weight, bias]: [Option<&Tensor>; 2],
        g: &Tensor,
        beside: Option<&Tensor>,
    ) -> Result<Option<Outputs>> {
        let beside = beside.filter(|_| wants.input);
        let given = [x, g].into_iter().chain(weight).chain(beside);
        let operands: SmallVec<[&Tensor; 4]> = given.collect();
        let Some(rows) = Rows::new(self.op, x, self.axes.len(), &operands)? else {
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
            of_input: wants.input,
            of_weight: wants.weight,
            of_bias: wants.bias,
        })?;
        let params = [1.0 / rows.length() as f64, self.eps];
        let mut rows = rows.elements(x)?.elements(g)?;
        if let Some(weight) = weight {
            rows = rows.per_column(weight)?;
        }
        if let Some(beside) = beside {
            rows = rows.elements(beside)?;
        }
        let Some(mut made) = rows.launch(program, &params)? else {
            return Ok(None);
        };
        let (of_weight, of_bias) = (weight.filter(|_| wants.weight), bias.filter(|_| wants.bias));
        let parameters = of_weight.into_iter().chain(of_bias);
        for (sum, parameter) in made[usize::from(wants.input)..].iter_mut().zip(parameters) {
            *sum = sum.reshape(parameter.shape())?;
        }
        Ok(Some(made))
    }
}

//! The arithmetic of reductions.

use crate::{
    DType, Error, MapProgram, Reduction, Result, Tensor,
    backend::{MapCall, MapInput},
    launch::launch,
    map::{Binary, Builder, MAX_INPUTS},
};

/// Plain tensors of one shape and dtype on one device, combined in the order given.
///
/// As many as a map program takes are combined by one kernel. What goes from one kernel to the next
/// has the precision of the computation, so floats of 16 and 8 bits are rounded once, however many
/// parts there are.
pub fn reduce(parts: &[Tensor], reduction: Reduction) -> Result<Tensor> {
    let Some((first, rest)) = parts.split_first() else {
        return Err(Error::argument(
            "reduce",
            "parts",
            "there is nothing to reduce: pass at least one tensor",
        ));
    };
    let dtype = first.dtype();
    if let Some(other) = rest
        .iter()
        .find(|t| t.dtype() != dtype || t.shape() != first.shape())
    {
        return Err(Error::shape(
            "reduce",
            [first, other],
            format!(
                "{} and {} must be equal",
                first.type_string(),
                other.type_string()
            ),
        ));
    }
    let logical = matches!(reduction, Reduction::And | Reduction::Or);
    if first.numel() == 0 || (rest.is_empty() && !(logical && dtype != DType::Bool)) {
        return Ok(first.clone());
    }
    // Partial results of logical reductions are bools, those of arithmetic ones as wide as what
    // they are computed in.
    let wide = if logical {
        DType::Bool
    } else {
        dtype.kind().dtype()
    };
    let (mut sum, mut rest) = (first.clone(), rest);
    loop {
        let (now, later) = rest.split_at(rest.len().min(MAX_INPUTS - 1));
        let stored = if later.is_empty() { dtype } else { wide };
        let program = program(reduction, sum.dtype(), dtype, now.len(), stored)?;
        let input = |part: &Tensor| {
            Ok(MapInput {
                view: part.view()?,
                window: None,
            })
        };
        let inputs = std::iter::once(&sum)
            .chain(now)
            .map(input)
            .collect::<Result<_>>()?;
        let call = MapCall {
            op: reduction.name(),
            program,
            shape: first.shape().clone(),
            inputs,
            indices: Default::default(),
            params: Default::default(),
            over: Default::default(),
        };
        (sum, rest) = (launch(first.mesh(), call)?.remove(0), later);
        if rest.is_empty() {
            return Ok(sum);
        }
    }
}

/// The first input combined with `more` further ones.
fn program(
    reduction: Reduction,
    first: DType,
    dtype: DType,
    more: usize,
    stored: DType,
) -> Result<MapProgram> {
    let (op, compute) = match (reduction, dtype) {
        (Reduction::And, _) | (Reduction::Prod | Reduction::Min, DType::Bool) => {
            (Binary::And, DType::Bool)
        }
        (Reduction::Or, _) | (Reduction::Sum | Reduction::Max, DType::Bool) => {
            (Binary::Or, DType::Bool)
        }
        (Reduction::Sum, _) => (Binary::Add, dtype.kind().dtype()),
        (Reduction::Prod, _) => (Binary::Mul, dtype.kind().dtype()),
        (Reduction::Max, _) => (Binary::Max, dtype.kind().dtype()),
        (Reduction::Min, _) => (Binary::Min, dtype.kind().dtype()),
    };
    let b = Builder::new();
    let start = b.load(first).cast(compute);
    let sum = (0..more).fold(start, |sum, _| sum.binary(op, b.load(dtype).cast(compute)));
    b.finish(&[(sum, stored)])
}

//! Several linear maps of one tensor as one product.

use super::gradient::{bias_gradient, einsum_as, product_as};
use crate::{
    DType, Result, Shape, Tensor,
    grad::{Back, Pulled, record},
    tensor::Outputs,
};
use smallvec::{SmallVec, smallvec};

/// The least rows for which weights are brought side by side, on a device that launches kernels and
/// on the host: below, that costs more than it saves.
const LEAST_ROWS: [usize; 2] = [256, 1024];

impl Tensor {
    /// [`linear_each`](Tensor::linear_each) by one product with all weights side by side; `None`
    /// where that is not known to pay, or cannot be.
    ///
    /// The results are parts of one tensor. In the backward pass the gradients of all of them are one
    /// product for this tensor instead of a sum of several, and one for the weights.
    #[track_caller]
    pub(super) fn linear_together(
        &self,
        weights: &[(&Tensor, Option<&Tensor>)],
    ) -> Result<Option<Vec<Tensor>>> {
        if !self.is_together(weights) {
            return Ok(None);
        }
        let op = "linear_each";
        let matrices: SmallVec<[&Tensor; 4]> = weights.iter().map(|(w, _)| *w).collect();
        let biases: SmallVec<[&Tensor; 4]> = weights.iter().filter_map(|(_, b)| *b).collect();
        let sizes: SmallVec<[usize; 4]> = matrices.iter().map(|w| w.dims()[0]).collect();
        let (count, all) = (sizes.len(), sizes.iter().sum::<usize>());
        let forward = || -> Result<Outputs> {
            let bias = match biases.is_empty() {
                true => None,
                false => Some(Tensor::concat(&biases, 0)?),
            };
            let matrix = Tensor::concat(&matrices, 0)?;
            let out = self.transformed(&matrix, bias.as_ref(), self.dtype())?;
            Ok(out.split(&sizes, -1)?.into())
        };
        let inputs: SmallVec<[&Tensor; 8]> = std::iter::once(self)
            .chain(matrices.iter().copied())
            .chain(biases.iter().copied())
            .collect();
        let out = record(op, &inputs, forward, |_| {
            let x = self.kept();
            let matrices: Vec<_> = matrices.iter().map(|w| w.kept()).collect();
            let of_bias: Option<(Shape, DType)> =
                biases.first().map(|b| (Shape::from([all]), b.dtype()));
            let sizes = sizes.clone();
            Ok(move |back: &Back<'_>| {
                let mut parts = Vec::with_capacity(count);
                for (i, size) in sizes.iter().enumerate() {
                    let shape = x.shape().with(x.rank() - 1, *size);
                    parts.push(match back.grad_of(i) {
                        Some(gradient) => gradient.clone(),
                        None => Tensor::zeros(shape, x.dtype(), x.device())?,
                    });
                }
                let gradient = Tensor::concat(&parts.iter().collect::<Vec<_>>(), -1)?;
                drop(parts);
                let of_input = back.wanted(0, || {
                    let matrices: Vec<&Tensor> = matrices.iter().collect();
                    product_as(op, &gradient, &Tensor::concat(&matrices, 0)?, x.dtype())
                })?;
                let mut pulled: Pulled = smallvec![of_input];
                let split = |of: Tensor, from: usize, pulled: &mut Pulled| -> Result<()> {
                    for (i, part) in of.split(&sizes, 0)?.into_iter().enumerate() {
                        pulled.push(back.needs(from + i).then_some(part));
                    }
                    Ok(())
                };
                let any = |from: usize| (from..from + count).any(|i| back.needs(i));
                match any(1) {
                    true => {
                        let dtype = matrices[0].dtype();
                        let of_all = einsum_as("...o,...i->oi", &[&gradient, &x], dtype)?;
                        split(of_all, 1, &mut pulled)?;
                    }
                    false => pulled.extend((0..count).map(|_| None)),
                }
                match &of_bias {
                    Some(bias) if any(1 + count) => {
                        split(bias_gradient(&gradient, bias)?, 1 + count, &mut pulled)?;
                    }
                    Some(_) => pulled.extend((0..count).map(|_| None)),
                    None => {}
                }
                Ok(pulled)
            })
        })?;
        Ok(Some(out.into_vec()))
    }

    /// Whether weights are of one kind, on one device, with enough rows here for a product of all, and
    /// small beside them: gradients have to be brought side by side too.
    fn is_together(&self, weights: &[(&Tensor, Option<&Tensor>)]) -> bool {
        let Some((first, bias)) = weights.first() else {
            return false;
        };
        let (dtype, device) = (self.dtype(), self.device());
        let inner = self.dims().last().copied().unwrap_or(0);
        let fits = |w: &Tensor| w.rank() == 2 && w.dims()[1] == inner && w.dims()[0] > 0;
        let alike = |t: &Tensor| t.dtype() == dtype && t.is_plain() && t.device() == device;
        let same_bias = |b: &Option<&Tensor>, rows: usize| match (b, bias) {
            (Some(b), Some(first)) => b.dims() == [rows] && b.dtype() == first.dtype(),
            (None, None) => true,
            _ => false,
        };
        let each = weights
            .iter()
            .all(|(w, b)| fits(w) && alike(w) && same_bias(b, w.dims()[0]));
        if weights.len() < 2 || !dtype.is_float() || !fits(first) || !self.is_plain() || !each {
            return false;
        }
        let all: usize = weights.iter().map(|(w, _)| w.dims()[0]).sum();
        let rows = self.numel() / inner.max(1);
        let least = LEAST_ROWS[usize::from(!device.runs_kernels())];
        rows >= least.max(all / 8) && all <= 3 * inner && device.has_values()
    }
}

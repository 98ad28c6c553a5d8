//! Several linear maps of one tensor as one product.

use super::{
    LINEAR,
    gradient::{bias_gradient, einsum_as, linear_pull, place, product_as, weight_gradient},
};
use crate::{
    DType, Result, Shape, Sharding, Tensor,
    grad::{Back, Pulled, is_recording, record},
    ops::{OpInfo, RuleForm},
    spmd::{Call, parts_of, shared_operand},
    tensor::Outputs,
};
use smallvec::{SmallVec, smallvec};

/// The least rows for which weights are brought side by side, on a device that launches kernels and
/// on the host: below, that costs more than it saves.
const LEAST_ROWS: [usize; 2] = [256, 1024];

/// Two and three linear maps of one tensor. Their rows are cut alike: `h` is the largest number of
/// parts that they have in common.
pub(super) const EACH: OpInfo = OpInfo::new(
    "linear_each",
    RuleForm::Variants(&[
        "...k, (hx)k, (hy)k, (hx), (hy) -> ...(hx), ...(hy) ; reduce k sum ; replicate x y ; linear 0 3 4 ; linear 1 2 3 4",
        "...k, (hx)k, (hy)k, (hz)k, (hx), (hy), (hz) -> ...(hx), ...(hy), ...(hz) ; reduce k sum ; replicate x y z ; linear 0 4 5 6 ; linear 1 2 3 4 5 6",
    ]),
)
.runs(&["linear", "cast"]);

/// From the gradients of the results, the weights and the input, those of the input, of the weights
/// and, in every second text, where all of a row is in one place, of the biases.
const EACH_PULL: OpInfo = OpInfo::new(
    "linear_each_pull",
    RuleForm::Variants(&[
        "...(hx), ...(hy), (hx)k, (hy)k, ...k -> ...k, (hx)k, (hy)k ; reduce h ... sum ; replicate x y ; linear 0 1",
        "...(hx), ...(hy), (hx)k, (hy)k, ...k -> ...k, (hx)k, (hy)k, (hx), (hy) ; reduce h ... sum ; replicate k x y ; linear 0 1",
        "...(hx), ...(hy), ...(hz), (hx)k, (hy)k, (hz)k, ...k -> ...k, (hx)k, (hy)k, (hz)k ; reduce h ... sum ; replicate x y z ; linear 0 1 2",
        "...(hx), ...(hy), ...(hz), (hx)k, (hy)k, (hz)k, ...k -> ...k, (hx)k, (hy)k, (hz)k, (hx), (hy), (hz) ; reduce h ... sum ; replicate k x y z ; linear 0 1 2",
    ]),
);

impl Tensor {
    /// [`linear_each`](Tensor::linear_each) of operands of one kind as one op; `None` where they are
    /// not.
    ///
    /// On a device the results are parts of one tensor where that pays: in the backward pass the
    /// gradients of all of them are one product for this tensor instead of a sum of several, and one
    /// for the weights. On a mesh it is one call, in which each rank does so, where weights are cut
    /// alike.
    #[track_caller]
    pub(super) fn linear_as_one(
        &self,
        weights: &[(&Tensor, Option<&Tensor>)],
    ) -> Result<Option<Vec<Tensor>>> {
        if !self.are_of_one_kind(weights) {
            return Ok(None);
        }
        let (op, count, common) = ("linear_each", weights.len(), self.common_cut(weights));
        let matrices = weights.iter().map(|(w, _)| *w);
        let biases: SmallVec<[Option<&Tensor>; 4]> = weights.iter().map(|(_, b)| *b).collect();
        let inputs: SmallVec<[&Tensor; 8]> = (std::iter::once(self).chain(matrices.clone()))
            .chain(biases.iter().flatten().copied())
            .collect();
        let forward = || match common {
            None => self.each(weights),
            Some(common) => Call::of(&EACH, &inputs)
                .on_behalf_of(op)
                .variant(count - 2)
                .optional(1 + count, &biases)
                .size('h', common)
                .run(|l| {
                    let (matrices, biases) = l.inputs[1..].split_at(count);
                    let each = (0..count).map(|i| (&matrices[i], biases.get(i)));
                    l[0].each(&each.collect::<SmallVec<[_; 4]>>())
                }),
        };
        let out = record(op, &inputs, forward, |out| {
            let kept = Kept {
                x: self.kept(),
                weights: matrices.map(|w| w.kept()).collect(),
                bias: biases[0].map(|b| b.dtype()),
                places: out.iter().map(|t| t.sharding().whole()).collect(),
                common,
            };
            Ok(move |back: &Back<'_>| kept.pull(op, back))
        })?;
        Ok(Some(out.into_vec()))
    }

    /// The products: as one where that pays.
    #[track_caller]
    fn each(&self, weights: &[(&Tensor, Option<&Tensor>)]) -> Result<Outputs> {
        let dtype = self.dtype();
        let matrices: SmallVec<[&Tensor; 4]> = weights.iter().map(|(w, _)| *w).collect();
        if is_together(self, &matrices) {
            let biases: SmallVec<[&Tensor; 4]> = weights.iter().filter_map(|(_, b)| *b).collect();
            let bias = match biases.is_empty() {
                true => None,
                false => Some(Tensor::concat(&biases, 0)?),
            };
            let matrix = Tensor::concat(&matrices, 0)?;
            let out = self.transformed(&matrix, bias.as_ref(), dtype)?;
            return Ok(out.split(&rows_of(matrices), -1)?.into());
        }
        // At hand as long as this runs: what each product then takes.
        let mut _brought = None;
        if !self.is_plain() {
            let inputs: Vec<[&Tensor; 2]> = matrices.iter().map(|w| [self, *w]).collect();
            let calls: Vec<Call<'_>> = (inputs.iter())
                .map(|inputs| Call::of(&LINEAR, inputs).optional(2, &[None]))
                .collect();
            if let Some(place) = shared_operand(&calls)? {
                _brought = self.brought_to("linear_each", &place)?;
            }
        }
        let mut out = Outputs::new();
        for (weight, bias) in weights {
            out.push(self.transformed(weight, *bias, dtype)?);
        }
        Ok(out)
    }

    /// Whether there are several weights, as matrices that fit, and all operands are floats of one
    /// dtype in one place, with a bias for all or none.
    fn are_of_one_kind(&self, weights: &[(&Tensor, Option<&Tensor>)]) -> bool {
        let ([_, _, ..], Some(inner)) = (weights, self.dims().last()) else {
            return false;
        };
        let (dtype, with_bias) = (self.dtype(), weights[0].1.is_some());
        let alike = |t: &Tensor| t.dtype() == dtype && t.mesh() == self.mesh();
        let fits = |(w, b): &(&Tensor, Option<&Tensor>)| {
            alike(w)
                && w.rank() == 2
                && w.dims()[1] == *inner
                && w.dims()[0] > 0
                && b.is_some() == with_bias
                && b.is_none_or(|b| alike(b) && b.dims() == &w.dims()[..1])
        };
        self.rank() > 1 && dtype.is_float() && weights.iter().all(fits)
    }

    /// The largest number of parts that all weights' rows can be cut into, where the weights lie on a
    /// mesh and are cut alike.
    fn common_cut(&self, weights: &[(&Tensor, Option<&Tensor>)]) -> Option<usize> {
        let first = weights[0].0;
        let alike = weights
            .iter()
            .all(|(w, _)| w.sharding() == first.sharding());
        let known = (2..2 + EACH.rule.texts().len()).contains(&weights.len());
        if self.is_plain() || !alike || !known {
            return None;
        }
        let common = weights
            .iter()
            .fold(0, |common, (w, _)| gcd(common, w.dims()[0]));
        common.is_multiple_of(parts_of(first, 0)).then_some(common)
    }
}

/// What the gradients of several linear maps of one tensor need.
struct Kept {
    x: Tensor,
    weights: SmallVec<[Tensor; 4]>,
    /// The dtype of the biases, where there are any.
    bias: Option<DType>,
    /// How the results lie.
    places: SmallVec<[Sharding; 4]>,
    /// The parts that all weights can be cut into, where it was one call on a mesh.
    common: Option<usize>,
}

impl Kept {
    #[track_caller]
    fn pull(&self, op: &'static str, back: &Back<'_>) -> Result<Pulled> {
        let (x, count) = (&self.x, self.weights.len());
        let mut gradients: SmallVec<[Tensor; 4]> = SmallVec::new();
        for (i, (weight, place)) in self.weights.iter().zip(&self.places).enumerate() {
            gradients.push(match back.grad_of(i) {
                Some(gradient) => gradient.clone(),
                None => {
                    let shape = x.shape().with(x.rank() - 1, weight.dims()[0]);
                    Tensor::zeros(shape, x.dtype(), (x.mesh(), place.clone()))?
                }
            });
        }
        let weights: SmallVec<[&Tensor; 4]> = self.weights.iter().collect();
        if is_together(x, &weights) {
            let parts = [0..1, 1..1 + count, 1 + count..1 + 2 * count];
            let wants = parts.map(|mut operands| operands.any(|i| back.needs(i)));
            let made = together(op, wants, &gradients, &self.weights, x, self.bias)?;
            let needed = |(i, made): (usize, Option<Tensor>)| made.filter(|_| back.needs(i));
            return Ok(made.into_iter().enumerate().map(needed).collect());
        }
        let operands: SmallVec<[&Tensor; 8]> =
            (gradients.iter().chain(&self.weights)).chain([x]).collect();
        let results = 1 + count + if self.bias.is_some() { count } else { 0 };
        let all = (0..results).all(|i| back.needs(i));
        let alike = operands.iter().all(|t| t.dtype() == x.dtype());
        let Some(common) = self
            .common
            .filter(|_| all && alike && !is_recording(&operands))
        else {
            return self.apart(op, Some(back), &gradients);
        };
        // Sums over rows are the same wherever what is summed over by the products is cut: they are not
        // of the same call there.
        let last = x.rank() - 1;
        let is_cut = parts_of(x, last) > 1 || parts_of(&self.weights[0], 1) > 1;
        let bias = self.bias.filter(|_| !is_cut);
        let made = if bias.is_some() { results } else { 1 + count };
        let out = Call::of(&EACH_PULL, &operands)
            .on_behalf_of(op)
            .variant(2 * (count - 2) + usize::from(bias.is_some()))
            .size('h', common)
            .wanted((0..made).map(|i| place(back, i, 1)))
            .run(|l| {
                let (gradients, rest) = l.inputs.split_at(count);
                let (weights, x) = rest.split_at(count);
                let of_rank = Kept {
                    x: x[0].clone(),
                    weights: weights.into(),
                    bias,
                    places: SmallVec::new(),
                    common: None,
                };
                let matrices: SmallVec<[&Tensor; 4]> = weights.iter().collect();
                let made = match is_together(&x[0], &matrices) {
                    true => together(op, [true; 3], gradients, weights, &x[0], bias)?,
                    false => of_rank.apart(op, None, gradients)?,
                };
                Ok(made.into_iter().flatten().collect())
            })?;
        let mut pulled: Pulled = out.into_iter().map(Some).collect();
        if let (Some(dtype), None) = (self.bias, bias) {
            for (gradient, weight) in gradients.iter().zip(&self.weights) {
                let bias = (Shape::from([weight.dims()[0]]), dtype);
                pulled.push(Some(bias_gradient(gradient, &bias)?));
            }
        }
        Ok(pulled)
    }

    /// The gradients that are wanted, of all where there is no pass, product by product.
    #[track_caller]
    fn apart(
        &self,
        op: &'static str,
        back: Option<&Back<'_>>,
        gradients: &[Tensor],
    ) -> Result<Pulled> {
        let (x, count) = (&self.x, self.weights.len());
        let needs = |i: usize| back.is_none_or(|back| back.needs(i));
        let each = || gradients.iter().zip(&self.weights).enumerate();
        let mut of_input: Option<Tensor> = None;
        let (mut of_weights, mut of_biases) = (Pulled::new(), Pulled::new());
        // Terms of one sum first: what they take is free again before weights' gradients are there.
        for (i, (gradient, weight)) in each() {
            let both = match back {
                Some(back) if needs(0) && needs(1 + i) => {
                    let places = [place(back, 0, count as u32), place(back, 1 + i, 1)];
                    linear_pull(op, places, gradient, weight, x)?
                }
                _ => None,
            };
            let (term, of_weight) = match both {
                Some([term, of_weight]) => (Some(term), Some(of_weight)),
                None if needs(0) => (Some(product_as(op, gradient, weight, x.dtype())?), None),
                None => (None, None),
            };
            of_input = match (of_input, term) {
                (Some(sum), Some(term)) => Some(sum.add(&term)?),
                (sum, term) => sum.or(term),
            };
            of_weights.push(of_weight);
        }
        for (i, (gradient, weight)) in each() {
            let (rows, dtype) = (Shape::from([weight.dims()[0]]), weight.dtype());
            if of_weights[i].is_none() && needs(1 + i) {
                of_weights[i] = Some(weight_gradient(op, back, 1 + i, gradient, x, dtype)?);
            }
            if let Some(dtype) = self.bias {
                let wanted = needs(1 + count + i).then(|| bias_gradient(gradient, &(rows, dtype)));
                of_biases.push(wanted.transpose()?);
            }
        }
        let mut pulled: Pulled = smallvec![of_input];
        pulled.extend(of_weights);
        pulled.extend(of_biases);
        Ok(pulled)
    }
}

/// The gradients of a plain input, of all weights and of all biases where there are some, as far as
/// they are wanted: one product for each with everything side by side.
#[track_caller]
fn together(
    op: &'static str,
    [of_input, of_weights, of_biases]: [bool; 3],
    gradients: &[Tensor],
    weights: &[Tensor],
    x: &Tensor,
    bias: Option<DType>,
) -> Result<Pulled> {
    let sizes = rows_of(weights);
    let side_by_side = |all: &[Tensor], dim| Tensor::concat(&all.iter().collect::<Vec<_>>(), dim);
    let gradient = side_by_side(gradients, -1)?;
    let mut pulled = Pulled::new();
    pulled.push(match of_input {
        true => Some(product_as(
            op,
            &gradient,
            &side_by_side(weights, 0)?,
            x.dtype(),
        )?),
        false => None,
    });
    let parts = |of: Result<Tensor>| Ok(of?.split(&sizes, 0)?.into_iter().map(Some));
    match of_weights {
        true => pulled.extend(parts(einsum_as(
            "...o,...i->oi",
            &[&gradient, x],
            weights[0].dtype(),
        ))?),
        false => pulled.extend(weights.iter().map(|_| None)),
    }
    match bias {
        Some(dtype) if of_biases => {
            let all = (Shape::from([sizes.iter().sum::<usize>()]), dtype);
            pulled.extend(parts(bias_gradient(&gradient, &all))?);
        }
        Some(_) => pulled.extend(weights.iter().map(|_| None)),
        None => {}
    }
    Ok(pulled)
}

/// Whether a product of all weights pays: on one device, with enough rows, and where they are small
/// beside the weights, because gradients have to be brought side by side too.
fn is_together(x: &Tensor, weights: &[&Tensor]) -> bool {
    let (inner, device) = (x.dims()[x.rank() - 1], x.device());
    let all: usize = rows_of(weights.iter().copied()).iter().sum();
    let rows = x.numel() / inner.max(1);
    let least = LEAST_ROWS[usize::from(!device.runs_kernels())];
    let is_plain = x.is_plain() && weights.iter().all(|w| w.is_plain());
    is_plain && rows >= least.max(all / 8) && all <= 3 * inner && device.has_values()
}

fn rows_of<'t>(weights: impl IntoIterator<Item = &'t Tensor>) -> SmallVec<[usize; 4]> {
    weights.into_iter().map(|w| w.dims()[0]).collect()
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

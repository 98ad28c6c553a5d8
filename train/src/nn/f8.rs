//! Linear layers that multiply 8-bit floats.

use crate::Result;
use anymesh_core::{DType, Tensor, grad::custom, ops::Expr};

/// Of activations and weights: they need precision more than range.
const FORWARD: DType = DType::F8E4M3;
/// Of gradients: they need range.
const BACKWARD: DType = DType::F8E5M2;

/// `x W^T + b` for each of several weights `[out, in]`, with operands rounded to 8-bit floats: `x`
/// and weights to `f8e4m3`, gradients to `f8e5m2`, each divided by a scale of its own, which is made
/// anew of its largest value at every call. Sums, results and biases have the dtypes that they have
/// in [`Tensor::linear`]; of weights nothing but their rounded copies changes.
///
/// The gradient passes the rounding as if it were not there. On a mesh scales are those of whole
/// tensors, so that every layout rounds alike.
///
/// ```
/// # use anymesh_core::Tensor;
/// # use anymesh_train::nn::linear_f8;
/// # let device = anymesh_backend_cpu::device();
/// let x = Tensor::from_slice(&[7f32, 3.5, 1.75, 7.0], [2, 2], &device)?;
/// let w = Tensor::from_slice(&[7f32, -7.0], [1, 2], &device)?.require_grad()?;
/// let y = linear_f8(&x, &[(&w, None)])?.remove(0);
/// assert_eq!(y.to_vec::<f32>()?, [24.5, -36.75]);
/// let grads = y.mul(7.0)?.sum_all()?.backward()?;
/// assert_eq!(grads.of(&w)?.to_vec::<f32>()?, [61.25, 73.5]);
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[track_caller]
pub fn linear_f8(x: &Tensor, weights: &[(&Tensor, Option<&Tensor>)]) -> Result<Vec<Tensor>> {
    let (codes, scale) = x.quantize_f8(FORWARD)?;
    let mut out = Vec::with_capacity(weights.len());
    for (weight, bias) in weights {
        let y = multiplied(x, (&codes, &scale), weight)?;
        out.push(match bias {
            Some(bias) => y.add(&bias.cast(y.dtype())?)?,
            None => y,
        });
    }
    Ok(out)
}

/// `x W^T` for an `x` of which codes and scale are known.
#[track_caller]
fn multiplied(x: &Tensor, (codes, scale): (&Tensor, &Tensor), weight: &Tensor) -> Result<Tensor> {
    let dtype = x.dtype().promote(weight.dtype());
    let (matrix, matrix_scale) = weight.quantize_f8(FORWARD)?;
    let scales = [scale.clone(), matrix_scale.clone()];
    let mut out = custom(
        "linear_f8",
        &[x, weight],
        |_| {
            let product = codes.matmul_scaled(&matrix.t()?, scale, &matrix_scale, dtype)?;
            Ok(vec![product])
        },
        move |inputs, _, gradients| {
            let [x, weight] = [&inputs[0], &inputs[1]];
            let (gradient, scale) = gradients[0].quantize_f8(BACKWARD)?;
            // Codes are made again and not kept: what they are made of is.
            let matrix = turned_codes(weight, &scales[1])?;
            let of_x = gradient.matmul_scaled(&matrix, &scale, &scales[1], x.dtype())?;
            let rows = turned_codes(x, &scales[0])?;
            let of_weight = gradient.outer_scaled(&rows, &scale, &scales[0], weight.dtype())?;
            Ok(vec![Some(of_x), Some(of_weight)])
        },
    )?;
    Ok(out.remove(0))
}

/// The codes of a tensor for a scale, laid out with its rows as neighbours: sums over rows are then
/// over neighbours, as tensor cores want it.
#[track_caller]
fn turned_codes(x: &Tensor, scale: &Tensor) -> anymesh_core::Result<Tensor> {
    let last = x.rank() as i64 - 1;
    let there: Vec<i64> = std::iter::once(last).chain(0..last).collect();
    let back: Vec<i64> = (1..=last).chain([0]).collect();
    Expr::new("quantize_f8", &[&x.permute(&there)?, scale])
        .map(FORWARD, |a| a.x[0] / a.x[1])?
        .permute(&back)
}

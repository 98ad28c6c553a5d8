//! Cases for the gradients of ops along rows: softmax, the norms and cross-entropy. Devices have
//! them as one kernel for some lengths, dtypes and layouts, and composed of others for the rest.

use super::{Cases, Fill, View, input, nn::plain};
use anymesh_core::{
    DType::{self, *},
    Device, Result, Tensor,
    ops::{CrossEntropyOptions, LossReduction, NormOptions},
};

/// Lengths on both sides of what kernels treat differently: odd and even, no multiple of four, more
/// than threads of a cube have a chunk of, more than they hold.
const LENGTHS: [usize; 9] = [1, 3, 50, 64, 130, 768, 1029, 4100, 20_002];

/// The gradients of tracked tensors, of what `f` makes of them, for a given gradient of that.
fn gradients(
    inputs: &[Tensor],
    weights: &Tensor,
    f: impl Fn(&[Tensor]) -> Result<Tensor>,
) -> Result<Vec<Tensor>> {
    let tracked = inputs
        .iter()
        .map(Tensor::require_grad)
        .collect::<Result<Vec<_>>>()?;
    let found = f(&tracked)?.backward_with(weights)?;
    tracked.iter().map(|x| found.of(x)).collect()
}

/// The gradients of two summands, a weight and a bias, from those of the sum and of its norm.
fn sum_gradients(
    inputs: &[Tensor],
    of_sum: Option<&Tensor>,
    of_norm: &Tensor,
) -> Result<Vec<Tensor>> {
    let tracked = inputs
        .iter()
        .map(Tensor::require_grad)
        .collect::<Result<Vec<_>>>()?;
    let options = NormOptions::new().weight(&tracked[2]).bias(&tracked[3]);
    let (sum, normed) = tracked[0].add_layer_norm(&tracked[1], &options)?;
    let mut loss = normed.mul(of_norm)?.sum(&[], false)?;
    if let Some(of_sum) = of_sum {
        loss = loss.add(&sum.mul(of_sum)?.sum(&[], false)?)?;
    }
    let found = loss.backward()?;
    tracked.iter().map(|x| found.of(x)).collect()
}

/// Gradients of softmax and its logarithm.
pub(super) fn softmax() -> Cases {
    let mut cases = Cases::new("rows");
    type Run = fn(&Tensor, i64) -> Result<Tensor>;
    let ops: [(&'static str, Run); 2] = [
        ("softmax", Tensor::softmax),
        ("log_softmax", Tensor::log_softmax),
    ];
    for (op, run) in ops {
        for dtype in [F32, F16, BF16, F64] {
            for n in LENGTHS {
                cases.add(op, dtype, format!("{dtype} gradient [5, {n}]"), move |d| {
                    let (x, g) = (plain(d, dtype, &[5, n], 1)?, plain(d, dtype, &[5, n], 2)?);
                    gradients(&[x], &g, |x| run(&x[0], -1))
                });
                // The gradient is computed from the result, as that was stored.
                cases.rounds_twice();
            }
        }
        for view in View::ALL {
            cases.add(op, F32, format!("{view:?} gradient"), move |d| {
                let of = |seed| input(d, F32, &[4, 6, 65], view, Fill::Uniform(-3.0, 3.0), seed);
                gradients(&[of(3)?], &of(4)?, |x| run(&x[0], 2))
            });
        }
    }
    cases
}

/// Gradients of norms over the last dimensions, and of their parameters.
pub(super) fn norms() -> Cases {
    let mut cases = Cases::new("rows");
    let norm = |op: &'static str, parameters: DType, dtype: DType, shape: [usize; 2]| {
        let [rows, n] = shape;
        move |d: &Device| {
            let inputs = [
                plain(d, dtype, &[rows, n], 1)?,
                plain(d, parameters, &[n], 2)?,
                plain(d, parameters, &[n], 3)?,
            ];
            let g = plain(d, dtype, &[rows, n], 4)?;
            match op {
                "layer_norm" => gradients(&inputs, &g, |x| {
                    x[0].layer_norm(&NormOptions::new().weight(&x[1]).bias(&x[2]))
                }),
                _ => gradients(&inputs[..2], &g, |x| {
                    x[0].rms_norm(&NormOptions::new().weight(&x[1]))
                }),
            }
        }
    };
    for op in ["layer_norm", "rms_norm"] {
        for dtype in [F32, F16, BF16, F64] {
            let parameters = if dtype == F64 { F64 } else { F32 };
            for n in LENGTHS.into_iter().filter(|n| *n > 1) {
                let detail = format!("{dtype} gradients [7, {n}]");
                cases.add(op, dtype, detail, norm(op, parameters, dtype, [7, n]));
            }
            // Rows that several cubes share, and more than fit one round of them.
            for shape in [[1000, 64], [5000, 192]] {
                let detail = format!("{dtype} gradients {shape:?}");
                cases.add(op, dtype, detail, norm(op, parameters, dtype, shape));
            }
        }
        cases.add(
            op,
            F16,
            "gradients of f16 parameters",
            norm(op, F16, F16, [9, 96]),
        );
    }
    // Of a sum and its norm, with a gradient of each; then of the norm alone.
    for dtype in [F32, F16, BF16, F64] {
        for n in LENGTHS.into_iter().filter(|n| *n > 1) {
            for both in [true, false] {
                let detail = format!("{dtype} gradients [7, {n}], of the sum {both}");
                cases.add("add_layer_norm", dtype, detail, move |d| {
                    let inputs = [
                        plain(d, dtype, &[7, n], 1)?,
                        plain(d, dtype, &[7, n], 2)?,
                        plain(d, F32, &[n], 3)?,
                        plain(d, F32, &[n], 4)?,
                    ];
                    // Larger than the other, so that its rounding does not become all there is.
                    let large = Fill::Uniform(8.0, 16.0);
                    let of_sum = input(d, dtype, &[7, n], View::Contiguous, large, 5)?;
                    let of_norm = plain(d, dtype, &[7, n], 6)?;
                    sum_gradients(&inputs, both.then_some(&of_sum), &of_norm)
                });
                // That of the norm is rounded before that of the sum is added.
                if both {
                    cases.rounds_twice();
                }
            }
        }
    }
    cases.add("layer_norm", F32, "gradients over two dimensions", |d| {
        let inputs = [plain(d, F32, &[6, 8, 10], 5)?, plain(d, F32, &[8, 10], 6)?];
        gradients(&inputs, &plain(d, F32, &[6, 8, 10], 7)?, |x| {
            x[0].layer_norm(&NormOptions::new().dims(2).weight(&x[1]))
        })
    });
    cases.add("layer_norm", F32, "gradient without parameters", |d| {
        let x = input(d, F32, &[30, 65], View::Sliced, Fill::Uniform(-3.0, 3.0), 8)?;
        gradients(&[x], &plain(d, F32, &[30, 65], 9)?, |x| {
            x[0].layer_norm(&NormOptions::new())
        })
    });
    cases
}

/// Cross-entropy of rows of classes, and the gradient of its logits.
pub(super) fn classes() -> Cases {
    let mut cases = Cases::new("rows");
    for dtype in [F32, F16, BF16, F64] {
        for n in LENGTHS {
            for (smoothing, weighted) in [(0.0, false), (0.1, true)] {
                // With one class a smoothed gradient is nothing but rounding.
                if n == 1 && smoothing > 0.0 {
                    continue;
                }
                for reduction in [LossReduction::Mean, LossReduction::None] {
                    let detail = format!(
                        "{dtype} {n} classes, {reduction:?}, smoothing {smoothing}, weights {weighted}: loss and gradient"
                    );
                    cases.add("cross_entropy", dtype, detail, move |d| {
                        let target = input(
                            d,
                            I32,
                            &[9],
                            View::Contiguous,
                            Fill::Integers(0, n as i64 - 1),
                            2,
                        )?;
                        let weight = Fill::Uniform(0.2, 2.0);
                        let weight = input(d, F32, &[n], View::Contiguous, weight, 3)?;
                        let options = CrossEntropyOptions {
                            weight: weighted.then_some(weight),
                            ignore_index: (n > 1).then_some(0),
                            label_smoothing: smoothing,
                            reduction,
                        };
                        let x = plain(d, dtype, &[9, n], 4)?.require_grad()?;
                        let loss = x.cross_entropy(&target, &options)?;
                        let found = loss.backward_with(&loss.ones_like()?)?;
                        Ok(vec![loss.detach(), found.of(&x)?])
                    });
                }
            }
        }
    }
    for n in [64, 5001] {
        let detail = format!("{n} classes with infinities and NaN: loss and gradient");
        cases.add("cross_entropy", F32, detail, move |d| {
            let mut values = super::random_values(6 * n, Fill::Uniform(-3.0, 3.0), 5);
            values[n..2 * n].fill(f64::NEG_INFINITY);
            (values[3], values[2 * n + 1]) = (f64::NEG_INFINITY, f64::INFINITY);
            values[4 * n - 1] = f64::NAN;
            let x = super::nn::exactly(d, F32, &[6, n], &values)?.require_grad()?;
            let target = input(d, I32, &[6], View::Contiguous, Fill::Integers(2, 5), 6)?;
            let options = CrossEntropyOptions {
                reduction: LossReduction::None,
                ..Default::default()
            };
            let loss = x.cross_entropy(&target, &options)?;
            let found = loss.backward_with(&loss.ones_like()?)?;
            Ok(vec![loss.detach(), found.of(&x)?])
        });
    }
    cases
}

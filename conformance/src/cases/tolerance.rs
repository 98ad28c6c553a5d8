//! How far a device may be from the oracle, per op and dtype, with the reason. Float functions of
//! one tensor have theirs in [`crate::functions`].

use crate::functions;
use anymesh_core::DType;

/// An allowed error: `ulps` units of the result's precision relative to the expected value, plus
/// `scale` units relative to the largest value in the result (what cancellation in a sum can leave
/// behind).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// Units in the last place of the expected value.
    pub ulps: f64,
    /// Units in the last place of the largest value.
    pub scale: f64,
}

impl Tolerance {
    /// Bit-for-bit (up to the sign of zero and NaN payloads).
    pub const EXACT: Tolerance = Tolerance {
        ulps: 0.0,
        scale: 0.0,
    };

    /// The allowed absolute error for an expected value.
    pub fn allowed(self, expected: f64, scale: f64, dtype: DType) -> f64 {
        self.ulps * epsilon(dtype) * expected.abs().max(tiny(dtype))
            + self.scale * epsilon(dtype) * scale
    }
}

/// Spacing of the dtype at 1.
fn epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON,
        DType::F32 => f64::from(f32::EPSILON),
        DType::F16 => 2f64.powi(-10),
        DType::BF16 => 2f64.powi(-7),
        DType::F8E4M3 => 2f64.powi(-3),
        DType::F8E5M2 => 2f64.powi(-2),
        _ => 0.0,
    }
}

/// Smallest normal number: below it precision is absolute, and GPUs may flush to zero.
fn tiny(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::MIN_POSITIVE,
        DType::F32 | DType::BF16 => f64::from(f32::MIN_POSITIVE) / f64::from(f32::EPSILON),
        DType::F16 => 2f64.powi(-14),
        DType::F8E4M3 => 2f64.powi(-6),
        DType::F8E5M2 => 2f64.powi(-14),
        _ => 0.0,
    }
}

/// One row of the table: ops, allowed error in f32, and why.
struct Row {
    ops: &'static [&'static str],
    f32: Tolerance,
    #[allow(dead_code)]
    reason: &'static str,
}

const TABLE: &[Row] = &[
    Row {
        ops: &["arange", "linspace"],
        f32: Tolerance {
            ulps: 1.0,
            scale: 2.0,
        },
        reason: "a device without f64 rounds the step and the product to f32",
    },
    Row {
        ops: &["normal"],
        f32: Tolerance {
            ulps: 4.0,
            scale: 4.0,
        },
        reason: "logarithm, root and cosine each round; near its zeros the cosine has only absolute precision",
    },
    Row {
        ops: &["div", "trunc_div"],
        f32: Tolerance {
            ulps: 4.0,
            scale: 0.0,
        },
        reason: "GPU division may be 2.5 ulp off, and the division is the last or last but one step",
    },
    Row {
        ops: &["hypot"],
        f32: Tolerance {
            ulps: 4.0,
            scale: 0.0,
        },
        reason: "GPU inverse roots may be 2 ulp off, and roots are made of them",
    },
    Row {
        ops: &["remainder"],
        f32: Tolerance {
            ulps: 4.0,
            scale: 8.0,
        },
        reason: "x - floor(x / y) * y: the product is rounded in units of x where there is no fused multiply-add",
    },
    Row {
        ops: &["pow"],
        f32: Tolerance {
            ulps: 16.0,
            scale: 0.0,
        },
        reason: "2^(x log2 e): the rounding of the exponent grows with it; WGSL allows 3 + 2|x| ulp, and |x| is at most 8 in the cases",
    },
    Row {
        ops: &["atan2"],
        f32: Tolerance {
            ulps: 8.0,
            scale: 4.0,
        },
        reason: "polynomials on a part of the range; the other parts are differences from a multiple of pi / 2, which are absolute",
    },
    Row {
        ops: &["lerp", "addcmul"],
        f32: Tolerance {
            ulps: 2.0,
            scale: 2.0,
        },
        reason: "a compiler may fuse a product and a sum, and the sum may cancel",
    },
    Row {
        ops: &["sum", "mean", "norm", "var", "std"],
        f32: Tolerance {
            ulps: 16.0,
            scale: 2.0,
        },
        reason: "the order of addition is free, the oracle adds in f64; thousands of terms in a tree of blocks lose a few bits",
    },
    Row {
        ops: &["prod", "cumprod"],
        f32: Tolerance {
            ulps: 32.0,
            scale: 0.0,
        },
        reason: "each of up to 257 factors adds half an ulp of random sign",
    },
    Row {
        ops: &["logsumexp", "logcumsumexp"],
        f32: Tolerance {
            ulps: 8.0,
            scale: 2.0,
        },
        reason: "a sum of exponentials in free order, then a logarithm and the maximum added to it, which may cancel",
    },
    Row {
        ops: &["cumsum"],
        f32: Tolerance {
            ulps: 8.0,
            scale: 8.0,
        },
        reason: "the order of addition is free, and a running sum can return to zero",
    },
    Row {
        ops: &[
            "matmul",
            "matmul_as",
            "bmm",
            "dot",
            "linear",
            "baddbmm",
            "einsum",
            "grouped_matmul",
            "grouped_outer",
        ],
        f32: Tolerance {
            ulps: 4.0,
            scale: 16.0,
        },
        reason: "sums of K products in any order: rounding errors grow with the root of K, and cancellation leaves them in small results, also in the largest one",
    },
    Row {
        ops: &["matmul_scaled", "outer_scaled"],
        f32: Tolerance {
            ulps: 4.0,
            scale: 4096.0,
        },
        reason: "8-bit tensor cores line the products of one instruction up with the largest of them and keep 13 bits below it, so that sums are off by up to 2^-11 of the largest",
    },
    Row {
        ops: &["quantize_f8"],
        f32: Tolerance {
            ulps: 4.0,
            scale: 0.0,
        },
        reason: "GPU division may be 2.5 ulp off, and its result is rounded to the neighbouring code then",
    },
    Row {
        ops: &[
            "conv1d",
            "conv2d",
            "conv3d",
            "conv_transpose1d",
            "conv_transpose2d",
            "conv_transpose3d",
        ],
        f32: Tolerance {
            ulps: 4.0,
            scale: 8.0,
        },
        reason: "sums of channels times window products in any order, as for matrix products",
    },
    Row {
        ops: &[
            "avg_pool1d",
            "avg_pool2d",
            "avg_pool3d",
            "adaptive_avg_pool1d",
            "adaptive_avg_pool2d",
            "adaptive_avg_pool3d",
        ],
        f32: Tolerance {
            ulps: 4.0,
            scale: 2.0,
        },
        reason: "sums over a window in any order, and a division",
    },
    Row {
        ops: &["interpolate"],
        f32: Tolerance {
            ulps: 4.0,
            scale: 2.0,
        },
        reason: "products and sums may be contracted, once for each dimension",
    },
    Row {
        ops: &[
            "scatter",
            "put_along_axis",
            "index_put",
            "index_add",
            "scatter_nd",
            "scatter_nd_add",
            "bincount",
        ],
        f32: Tolerance {
            ulps: 4.0,
            scale: 8.0,
        },
        reason: "values meet in order, but a device may first sum runs of them, and sums of hundreds of values cancel",
    },
    Row {
        ops: &["softmax", "log_softmax"],
        f32: Tolerance {
            ulps: 16.0,
            scale: 4.0,
        },
        reason: "an exponential is as imprecise as its argument is large, and sums run in any order",
    },
    Row {
        ops: &[
            "layer_norm",
            "rms_norm",
            "add_layer_norm",
            "add_rms_norm",
            "group_norm",
            "instance_norm",
            "batch_norm",
            "batch_norm_train",
        ],
        f32: Tolerance {
            ulps: 8.0,
            scale: 64.0,
        },
        reason: "the mean is subtracted: its error, relative to values far from zero, stays in results near zero",
    },
    Row {
        ops: &["attention"],
        f32: Tolerance {
            ulps: 8.0,
            scale: 64.0,
        },
        reason: "scores are sums of products, and an error in a score is a relative error of its exponential",
    },
    Row {
        ops: &["attention_backward"],
        f32: Tolerance {
            ulps: 8.0,
            scale: 256.0,
        },
        reason: "as attention, with differences of like sums multiplied and summed again",
    },
    Row {
        ops: &[
            "mse_loss",
            "l1_loss",
            "smooth_l1_loss",
            "huber_loss",
            "bce_loss",
            "bce_with_logits_loss",
            "kl_div_loss",
            "hinge_loss",
            "hinge_embedding_loss",
            "margin_ranking_loss",
            "cosine_embedding_loss",
            "triplet_margin_loss",
            "gaussian_nll_loss",
            "poisson_nll_loss",
            "cross_entropy",
            "nll_loss",
        ],
        f32: Tolerance {
            ulps: 16.0,
            scale: 16.0,
        },
        reason: "logarithms and exponentials round differently, sums run in any order, and like terms cancel",
    },
    Row {
        ops: &["swiglu", "swiglu2", "glu", "geglu", "geglu2"],
        f32: Tolerance {
            ulps: 16.0,
            scale: 4.0,
        },
        reason: "exponentials and error functions round differently; near one they cancel",
    },
    Row {
        ops: &["rope"],
        f32: Tolerance {
            ulps: 2.0,
            scale: 2.0,
        },
        reason: "two products may be contracted into their sum, which may cancel",
    },
    Row {
        ops: &["normalize", "cosine_similarity"],
        f32: Tolerance {
            ulps: 16.0,
            scale: 16.0,
        },
        reason: "powers and roots round differently, sums of products cancel",
    },
    Row {
        ops: &["dropout_add"],
        f32: Tolerance {
            ulps: 1.0,
            scale: 1.0,
        },
        reason: "the product may be contracted into the sum",
    },
];

/// What small floats lose inside of an op, in units of their precision relative to the largest value.
/// Tensor cores multiply small floats only: the weights of attention and the gradients of its scores
/// are rounded to the operands' dtype, as they would be in memory, by half a unit each; and gradients
/// are computed from the rounded result.
fn inner_rounding(op: &str) -> f64 {
    match op {
        "attention" | "attention_backward" => 1.0,
        _ => 0.0,
    }
}

/// The tolerance of `op` for results of `dtype`. Integers, bools and ops that only move data are
/// exact.
pub fn tolerance(op: &str, dtype: DType) -> Tolerance {
    if !dtype.is_float() {
        return Tolerance::EXACT;
    }
    let function = functions::find(op).map(|f| Tolerance {
        ulps: f.error.ulps,
        scale: f.error.scale,
    });
    let row = || TABLE.iter().find(|row| row.ops.contains(&op));
    let Some(f32) = function.or_else(|| row().map(|row| row.f32)) else {
        return Tolerance::EXACT;
    };
    match dtype {
        // Bit for bit in f32 is bit for bit in all.
        _ if f32 == Tolerance::EXACT => f32,
        DType::F32 | DType::F64 => f32,
        // Small floats compute in f32: a last-bit difference there may round to the neighbouring
        // value here, no more.
        _ => Tolerance {
            ulps: 1.0,
            scale: f32.scale * f64::from(f32::EPSILON) / epsilon(dtype) + inner_rounding(op),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tolerance_belongs_to_one_op_that_exists() {
        let known: Vec<&str> = anymesh_core::ops::catalog()
            .iter()
            .map(|op| op.name)
            .collect();
        let rows = TABLE.iter().flat_map(|row| row.ops).copied();
        let named: Vec<&str> = functions::TABLE
            .iter()
            .map(|f| f.name)
            .chain(rows)
            .collect();
        for (i, op) in named.iter().enumerate() {
            assert!(known.contains(op), "{op} is not an op");
            assert!(!named[..i].contains(op), "{op} has two tolerances");
        }
    }
}

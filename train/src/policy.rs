//! Which dtype is used for what.

use crate::{Error, Result};
use anymesh_core::DType;

/// The dtypes of a model: of its parameters, of what is computed with them, of the gradients that
/// are added up over ranks and micro-batches, and of what the model gives.
///
/// Parameters that stay f32 while products are bf16 *are* the master weights: ten steps of -0.001
/// from 1.0 leave a bf16 weight where it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Of parameters, which the optimizer works on.
    pub parameter: DType,
    /// Of activations and of the weights in products.
    pub compute: DType,
    /// Of gradients, where they are added up.
    pub reduce: DType,
    /// Of logits and losses.
    pub output: DType,
    /// Whether [linear layers](crate::nn::Linear) round what they multiply to floats of 8 bits, with a
    /// scale for each tensor: see [`linear_f8`](crate::nn::linear_f8). Heads, routers and experts do
    /// not.
    pub f8_products: bool,
}

impl Policy {
    /// One dtype for everything.
    pub fn all(dtype: DType) -> Self {
        Self {
            parameter: dtype,
            compute: dtype,
            reduce: dtype,
            output: dtype,
            f8_products: false,
        }
    }

    /// f32 for everything.
    pub fn f32() -> Self {
        Self::all(DType::F32)
    }

    /// bf16 products with f32 parameters, sums and losses.
    pub fn bf16() -> Self {
        Self {
            compute: DType::BF16,
            ..Self::f32()
        }
    }

    /// f16 products with f32 parameters, sums and losses: needs loss scaling.
    pub fn f16() -> Self {
        Self {
            compute: DType::F16,
            ..Self::f32()
        }
    }

    /// [`bf16`](Self::bf16), but linear layers multiply floats of 8 bits.
    pub fn f8() -> Self {
        Self {
            f8_products: true,
            ..Self::bf16()
        }
    }

    /// By name: `f32`, `f64`, `bf16`, `f16`, `f8`.
    pub fn named(name: &str) -> Result<Self> {
        match name {
            "f32" => Ok(Self::f32()),
            "f64" => Ok(Self::all(DType::F64)),
            "bf16" => Ok(Self::bf16()),
            "f16" => Ok(Self::f16()),
            "f8" => Ok(Self::f8()),
            _ => Err(Error::config(
                "policy",
                format!("'{name}' is none of f32, f64, bf16, f16, f8"),
            )),
        }
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self::f32()
    }
}

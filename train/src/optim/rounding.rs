//! Rounding to bf16 by chance.

use crate::{Error, Result, build::key};
use anymesh_core::{
    DType, Tensor,
    ops::{Expr, Rng},
};
use serde::{Deserialize, Serialize};

/// How new values of bf16 parameters are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Rounding {
    /// To the nearest: steps of less than half of the last place are lost.
    Nearest,
    /// To one of the two neighbours, the nearer the more likely, so that on average nothing is lost.
    Stochastic {
        /// What the choices depend on, beside the step, the parameter's name and the element.
        seed: u64,
    },
}

impl Default for Rounding {
    fn default() -> Self {
        Self::Stochastic { seed: 0 }
    }
}

impl Rounding {
    /// New values of a parameter of this dtype, at a step.
    pub(super) fn round(
        self,
        values: &Tensor,
        dtype: DType,
        name: &str,
        step: u64,
    ) -> Result<Tensor> {
        match self {
            Self::Stochastic { seed } if dtype == DType::BF16 => {
                let key = key(seed ^ (step >> 32).rotate_left(32), name);
                let stream = step as u32;
                round_by_chance(values, Rng { stream, ..key })
            }
            _ => Ok(values.cast(dtype)?),
        }
    }
}

/// f32 values as bf16: one of the two neighbours, each with a probability in proportion to how near
/// it is, by a random number of the element's own (its index in the whole tensor), so that every mesh
/// gives the same. What bf16 holds stays; what is below its normal numbers is rounded to the nearest,
/// and what is beyond them is infinite.
///
/// ```
/// # use anymesh_core::{DType, Tensor, bf16, ops::Rng};
/// # use anymesh_train::optim::round_by_chance;
/// # let device = anymesh_backend_cpu::device();
/// // A quarter of the way from 1 to the next number.
/// let x = Tensor::full([4096], 1.0 + 1.0 / 512.0, DType::F32, &device)?;
/// let rounded = round_by_chance(&x, Rng::new(1))?.to_vec::<bf16>()?;
/// let up = rounded.iter().filter(|x| x.to_f32() == 1.0 + 1.0 / 128.0).count();
/// let down = rounded.iter().filter(|x| x.to_f32() == 1.0).count();
/// assert!(up + down == 4096 && (900..1150).contains(&up));
/// # Ok::<(), anymesh_train::Error>(())
/// ```
pub fn round_by_chance(values: &Tensor, rng: Rng) -> Result<Tensor> {
    if values.dtype() != DType::F32 {
        let detail = format!("{} is not f32", values.type_string());
        return Err(Error::config("round_by_chance", detail));
    }
    let place = (values.mesh(), values.sharding().whole());
    let chance = Tensor::uniform(values.shape(), 0.0, 1.0, DType::F32, place, rng)?;
    Ok(
        Expr::new("round_by_chance", &[values, &chance]).map(DType::BF16, |a| {
            let x = a.x[0];
            let near = x.cast(DType::BF16);
            // The neighbour on the other side of x. A number of 8 bits grown by 5/1024 of itself is
            // past the middle to the next one and not past the next middle; made smaller by 1/256
            // it is half a place below a power of two, where places are half as wide, and elsewhere
            // past the middle again.
            let beyond = x.abs().gt(near.abs());
            let toward = beyond.select(x.lit(1.0 + 1.25 / 256.0), x.lit(1.0 - 1.0 / 256.0));
            let far = (near * toward).cast(DType::BF16);
            // Exact: the difference of near numbers by a power of two. Where there is no neighbour
            // it is no number, and nothing is below that.
            let part = ((x - near) / (far - near)).abs();
            a.x[1].lt(part).select(far, near)
        })?,
    )
}

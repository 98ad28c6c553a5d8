//! Lion.

use super::rule::{Step, Updated, fraction, states, wide, zeros};
use crate::Result;
use anymesh_core::{Tensor, ops::Expr};
use serde::{Deserialize, Serialize};

/// `w -= rate (sign(beta1 m + (1 - beta1) g) + decay w)`, then `m = beta2 m + (1 - beta2) g`. The
/// sign of zero is zero.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Lion {
    /// The learning rate.
    pub lr: f64,
    /// How much of the average is in the direction, and how much of it stays.
    pub betas: [f64; 2],
    /// Weight decay.
    pub decay: f64,
}

impl Default for Lion {
    fn default() -> Self {
        Self {
            lr: 1e-4,
            betas: [0.9, 0.99],
            decay: 0.0,
        }
    }
}

impl Lion {
    pub(super) fn check(&self, key: &str) -> Result<()> {
        fraction(key, "betas[0]", self.betas[0])?;
        fraction(key, "betas[1]", self.betas[1])
    }

    pub(super) fn state(&self, value: &Tensor) -> Result<Vec<(&'static str, Tensor)>> {
        Ok(vec![("lion.m", zeros(value)?)])
    }

    pub(super) fn update(
        &self,
        step: &Step,
        value: &Tensor,
        gradient: &Tensor,
        state: &[Tensor],
    ) -> Result<Updated> {
        let ([m], dtype) = (states(state)?, wide(value.dtype()));
        let [beta1, beta2] = self.betas;
        let [next, m] = Expr::new("lion", &[value, gradient, m])
            .params(&[
                step.scale,
                step.rate,
                1.0 - step.rate * self.decay,
                beta1,
                1.0 - beta1,
                beta2,
                1.0 - beta2,
            ])
            .maps([dtype; 2], |a| {
                let (w, g, m) = (a.x[0], a.x[1] * a.p[0], a.x[2]);
                let direction = (m * a.p[3] + g * a.p[4]).sign();
                [w * a.p[2] - a.p[1] * direction, m * a.p[5] + g * a.p[6]]
            })?;
        Ok((next, vec![m]))
    }
}

//! Gradient descent.

use super::rule::{Step, Updated, fraction, states, wide, zeros};
use crate::{Error, Result};
use anymesh_core::{Tensor, ops::Expr};
use serde::{Deserialize, Serialize};

/// `b = momentum b + (1 - dampening) g`, then `w -= rate (nesterov ? g + momentum b : b)`. The first
/// `b` is the gradient itself. Decay is added to the gradient.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sgd {
    /// The learning rate.
    pub lr: f64,
    /// How much of the last direction stays. Without it there is no state.
    pub momentum: f64,
    /// How much of a gradient is left out of the momentum.
    pub dampening: f64,
    /// Whether the direction looks ahead.
    pub nesterov: bool,
    /// Weight decay, as a gradient.
    pub decay: f64,
}

impl Default for Sgd {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            momentum: 0.0,
            dampening: 0.0,
            nesterov: false,
            decay: 0.0,
        }
    }
}

impl Sgd {
    pub(super) fn check(&self, key: &str) -> Result<()> {
        fraction(key, "momentum", self.momentum)?;
        if !(0.0..=1.0).contains(&self.dampening) {
            let detail = format!("{} is not from 0 to 1", self.dampening);
            return Err(Error::config(format!("{key}.dampening"), detail));
        }
        match self.nesterov && (self.momentum == 0.0 || self.dampening != 0.0) {
            true => Err(Error::config(
                format!("{key}.nesterov"),
                "looking ahead needs a momentum, and no dampening",
            )),
            false => Ok(()),
        }
    }

    pub(super) fn state(&self, value: &Tensor) -> Result<Vec<(&'static str, Tensor)>> {
        Ok(match self.momentum == 0.0 {
            true => vec![],
            false => vec![("sgd.momentum", zeros(value)?)],
        })
    }

    pub(super) fn update(
        &self,
        step: &Step,
        value: &Tensor,
        gradient: &Tensor,
        state: &[Tensor],
    ) -> Result<Updated> {
        let dtype = wide(value.dtype());
        if self.momentum == 0.0 {
            let [] = states(state)?;
            let next = Expr::new("sgd", &[value, gradient])
                .params(&[step.scale, step.rate, self.decay])
                .map(dtype, |a| {
                    let (w, [scale, rate, decay]) = (a.x[0], [a.p[0], a.p[1], a.p[2]]);
                    w - rate * (a.x[1] * scale + w * decay)
                })?;
            return Ok((next, vec![]));
        }
        let [momentum] = states(state)?;
        let (keep, add) = match step.number {
            1 => (0.0, 1.0),
            _ => (self.momentum, 1.0 - self.dampening),
        };
        // How much of the gradient and of the momentum the direction has.
        let (own, along) = match self.nesterov {
            true => (1.0, self.momentum),
            false => (0.0, 1.0),
        };
        let [next, momentum] = Expr::new("sgd", &[value, gradient, momentum])
            .params(&[step.scale, step.rate, self.decay, keep, add, own, along])
            .maps([dtype; 2], |a| {
                let (w, [scale, rate, decay]) = (a.x[0], [a.p[0], a.p[1], a.p[2]]);
                let [keep, add, own, along] = [a.p[3], a.p[4], a.p[5], a.p[6]];
                let g = a.x[1] * scale + w * decay;
                let b = a.x[2] * keep + g * add;
                [w - rate * (g * own + b * along), b]
            })?;
        Ok((next, vec![momentum]))
    }
}

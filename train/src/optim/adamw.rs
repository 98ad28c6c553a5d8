//! Adam, with decay beside the gradient (AdamW) or in it.

use super::rule::{Step, Updated, at_least, fraction, states, wide, zeros};
use crate::Result;
use anymesh_core::{
    DType, Tensor,
    map::{Val, formulas::Adam},
    ops::{Args, Expr},
};
use serde::{Deserialize, Serialize};

/// `m` and `v` are averages of the gradient and its square, made up for having begun at zero;
/// `w -= rate (m / (sqrt(v + eps_root) + eps) + decay w)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamW {
    /// The learning rate.
    pub lr: f64,
    /// How much of each average stays.
    pub betas: [f64; 2],
    /// Added to the root.
    pub eps: f64,
    /// Added below the root.
    pub eps_root: f64,
    /// Weight decay.
    pub decay: f64,
    /// Whether decay is added to the gradient (Adam with L2) instead of taken from the value.
    pub coupled: bool,
    /// Whether the largest `v` so far stands below the root.
    pub amsgrad: bool,
}

impl Default for AdamW {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            betas: [0.9, 0.999],
            eps: 1e-8,
            eps_root: 0.0,
            decay: 1e-2,
            coupled: false,
            amsgrad: false,
        }
    }
}

/// The numbers of one step, which a program takes at run time, so that one kernel serves all steps
/// and settings; in the order of [`AdamW::numbers`].
pub(super) fn numbers<'b>(a: &Args<'b>) -> Adam<Val<'b>> {
    Adam::of(std::array::from_fn(|i| a.p[i]))
}

/// The value and the averages after a step, of value, gradient and averages.
fn changed<'b>(a: &Args<'b>) -> [Val<'b>; 3] {
    numbers(a).changed([a.x[0], a.x[1], a.x[2], a.x[3]])
}

impl AdamW {
    pub(super) fn check(&self, key: &str) -> Result<()> {
        fraction(key, "betas[0]", self.betas[0])?;
        fraction(key, "betas[1]", self.betas[1])?;
        at_least(key, "eps", self.eps, 0.0)?;
        at_least(key, "eps_root", self.eps_root, 0.0)
    }

    pub(super) fn state(&self, value: &Tensor) -> Result<Vec<(&'static str, Tensor)>> {
        let names = ["adam.m", "adam.v", "adam.v_max"];
        let names = &names[..2 + usize::from(self.amsgrad)];
        names.iter().map(|n| Ok((*n, zeros(value)?))).collect()
    }

    pub(super) fn numbers(&self, step: &Step) -> [f64; 10] {
        let (coupled, left) = match self.coupled {
            true => (self.decay, 1.0),
            false => (0.0, 1.0 - step.rate * self.decay),
        };
        let [beta1, beta2] = self.betas;
        [
            step.scale,
            coupled,
            1.0 - beta1,
            1.0 - beta2,
            step.rate,
            left,
            step.unbias(beta1),
            step.unbias(beta2),
            self.eps,
            self.eps_root,
        ]
    }

    pub(super) fn update(
        &self,
        step: &Step,
        value: &Tensor,
        gradient: &Tensor,
        state: &[Tensor],
    ) -> Result<Updated> {
        let (dtype, given) = (wide(value.dtype()), self.numbers(step));
        if self.amsgrad {
            let [m, v, most] = states(state)?;
            // All of it would be more tensors than a kernel takes.
            let [m, v, most] = Expr::new("adamw", &[value, gradient, m, v, most])
                .params(&given)
                .maps([dtype; 3], |a| {
                    let n = numbers(a);
                    let g = n.gradient(a.x[1], a.x[0]);
                    let [m, v] = n.moments(g, [a.x[2], a.x[3]]);
                    [m, v, a.x[4].max(v)]
                })?;
            let next = Expr::new("adamw", &[value, &m, &most])
                .params(&given)
                .map(dtype, |a| {
                    let n = numbers(a);
                    n.stepped(a.x[0], n.direction([a.x[1], a.x[2]]))
                })?;
            return Ok((next, vec![m, v, most]));
        }
        let [m, v] = states(state)?;
        let [next, m, v] = Expr::new("adamw", &[value, gradient, m, v])
            .params(&given)
            .maps([dtype; 3], changed)?;
        Ok((next, vec![m, v]))
    }

    /// [`update`](Self::update) of many parameters, without `amsgrad`. Each has a value, its gradient,
    /// its state and, if there is a dtype for one, a rounded copy of the value; the gradient may have
    /// any dtype. The new value, state and copy of each are written over the old ones where nobody
    /// else has those. Where it fails everything is still in `each`.
    pub(super) fn update_all(
        &self,
        step: &Step,
        each: &mut Vec<Vec<Tensor>>,
        dtype: DType,
        copy: Option<DType>,
    ) -> Result<Vec<Vec<Tensor>>> {
        let (op, given) = ("adamw", self.numbers(step));
        let over = [Some(0), Some(2), Some(3)];
        let Some(copy) = copy else {
            let made = Expr::maps_over(op, &given, each, 4, over, [dtype; 3], changed)?;
            return Ok(made.into_iter().map(Vec::from).collect());
        };
        let over = [over[0], over[1], over[2], Some(4)];
        let dtypes = [dtype, dtype, dtype, copy];
        let made = Expr::maps_over(op, &given, each, 4, over, dtypes, |a| {
            let [next, m, v] = changed(a);
            [next, m, v, next]
        })?;
        Ok(made.into_iter().map(Vec::from).collect())
    }
}

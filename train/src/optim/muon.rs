//! Muon: momentum whose singular values are made nearly equal, for matrices.

use super::rule::{Step, Updated, at_least, fraction, states, wide, zeros};
use crate::{Error, Result};
use anymesh_core::{
    DType, Sharding, Tensor,
    ops::{Baddbmm, Expr},
};
use serde::{Deserialize, Serialize};

/// `b = momentum b + (1 - momentum) g`; the direction is the nearest orthogonal matrix of it, found
/// by Newton-Schulz steps, and `w -= rate (adjust direction + decay w)`.
///
/// For the weights of linear layers, which are two-dimensional. Embeddings, heads, norms and biases
/// want another rule; a fused weight of queries, keys and values is better split.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Muon {
    /// The learning rate.
    pub lr: f64,
    /// Weight decay.
    pub decay: f64,
    /// How much of the last direction stays.
    pub momentum: f64,
    /// Whether the direction looks ahead.
    pub nesterov: bool,
    /// Whether averages are made up for having begun at zero, before they are mixed (optax).
    pub bias_correction: bool,
    /// Of the polynomial `a x + b x^3 + c x^5` that a step applies to singular values.
    pub coefficients: [f64; 3],
    /// How many steps.
    pub steps: usize,
    /// The least norm that a matrix is divided by.
    pub eps: f64,
    /// Whether `eps` is added to the norm instead (optax).
    pub add_eps: bool,
    /// How the rate depends on the shape.
    pub adjust: Adjust,
    /// Whether Newton-Schulz steps run in bf16, which is what torch does.
    pub bf16: bool,
}

/// How Muon's rate depends on the shape `[rows, columns]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Adjust {
    /// `sqrt(max(1, rows / columns))`.
    #[default]
    Original,
    /// `0.2 sqrt(max(rows, columns))`: steps as large as AdamW's, whose rate then fits.
    MatchRmsAdamw,
    /// `sqrt(rows / columns)`.
    SpectralUnclamped,
    /// Not at all.
    None,
}

impl Adjust {
    fn factor(self, rows: usize, columns: usize) -> f64 {
        let (rows, columns) = (rows.max(1) as f64, columns.max(1) as f64);
        match self {
            Self::Original => (rows / columns).max(1.0).sqrt(),
            Self::MatchRmsAdamw => 0.2 * rows.max(columns).sqrt(),
            Self::SpectralUnclamped => (rows / columns).sqrt(),
            Self::None => 1.0,
        }
    }
}

impl Default for Muon {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            decay: 0.1,
            momentum: 0.95,
            nesterov: true,
            bias_correction: false,
            coefficients: [3.4445, -4.775, 2.0315],
            steps: 5,
            eps: 1e-7,
            add_eps: false,
            adjust: Adjust::default(),
            bf16: false,
        }
    }
}

/// One parameter of a step: its value, its gradient, its momentum.
pub(super) type Item<'a> = [&'a Tensor; 3];

/// So many values of a stack on each rank at most: what a step takes beside values and momenta.
const STACKED: usize = 1 << 25;

impl Muon {
    pub(super) fn check(&self, key: &str) -> Result<()> {
        fraction(key, "momentum", self.momentum)?;
        at_least(key, "eps", self.eps, f64::MIN_POSITIVE)?;
        match self.coefficients.iter().all(|c| c.is_finite()) {
            true => Ok(()),
            false => Err(Error::config(
                format!("{key}.coefficients"),
                "they must be finite",
            )),
        }
    }

    pub(super) fn state(&self, value: &Tensor) -> Result<Vec<(&'static str, Tensor)>> {
        match value.rank() {
            2 => Ok(vec![("muon.momentum", zeros(value)?)]),
            _ => Err(Error::config(
                "parameter",
                format!(
                    "Muon is for matrices, and this is {}: put it into a group with another rule, such as AdamW",
                    value.type_string()
                ),
            )),
        }
    }

    pub(super) fn update(
        &self,
        step: &Step,
        value: &Tensor,
        gradient: &Tensor,
        state: &[Tensor],
    ) -> Result<Updated> {
        let [momentum] = states(state)?;
        let mut all = self.update_stack(step, &[[value, gradient, momentum]])?;
        // One went in.
        Ok(all.remove(0))
    }

    /// One step of parameters that can be [stacked](Self::stacks).
    ///
    /// Every rank takes whole matrices out of the stack, as many as the others or one more, and
    /// gives them back in the layout of the values: one exchange each way.
    pub(super) fn update_stack(&self, step: &Step, items: &[Item<'_>]) -> Result<Vec<Updated>> {
        let mut momenta = Vec::with_capacity(items.len());
        let mut directions = Vec::with_capacity(items.len());
        for [value, gradient, momentum] in items {
            let [momentum, direction] = self.mixed(step, value, gradient, momentum)?;
            momenta.push(momentum);
            directions.push(direction);
        }
        let value = items[0][0];
        let (mesh, &[rows, columns]) = (value.mesh(), value.dims()) else {
            return Err(Error::config("parameter", "Muon is for matrices"));
        };
        let stack = Tensor::stack(&directions.iter().collect::<Vec<_>>(), 0)?;
        drop(directions);
        let owned = (0..mesh.axes().len()).fold(Sharding::replicated(), |s, axis| s.cut(0, axis));
        let stack = stack.reshard(owned)?;
        let stack = newton_schulz(&stack, self)?;
        // Back: the same cuts, one dimension further.
        let cuts = value.sharding().cuts();
        let back = cuts.fold(Sharding::replicated(), |s, (dim, axis)| {
            s.cut(dim + 1, axis)
        });
        let stack = stack.reshard(back)?;
        let numbers = [
            step.rate * self.adjust.factor(rows, columns),
            1.0 - step.rate * self.decay,
        ];
        let mut updated = Vec::with_capacity(items.len());
        for (i, ([value, ..], momentum)) in items.iter().zip(momenta).enumerate() {
            let direction = stack.narrow(0, i, 1)?.squeeze(&[0])?;
            let next = Expr::new("muon", &[value, &direction])
                .params(&numbers)
                .map(wide(value.dtype()), |a| a.x[0] * a.p[1] - a.x[1] * a.p[0])?;
            updated.push((next, vec![momentum]));
        }
        Ok(updated)
    }

    /// The momentum with another gradient, and what is to be made orthogonal.
    fn mixed(
        &self,
        step: &Step,
        value: &Tensor,
        gradient: &Tensor,
        momentum: &Tensor,
    ) -> Result<[Tensor; 2]> {
        let (mu, rest) = (self.momentum, 1.0 - self.momentum);
        let after = Step {
            number: step.number + 1,
            ..*step
        };
        let (of_gradient, of_momentum) = match (self.nesterov, self.bias_correction) {
            (true, false) => (rest, mu),
            (false, false) => (0.0, 1.0),
            (true, true) => (rest / step.unbias(mu), mu / after.unbias(mu)),
            (false, true) => (0.0, 1.0 / step.unbias(mu)),
        };
        let dtype = wide(value.dtype());
        Ok(Expr::new("muon", &[gradient, momentum])
            .params(&[step.scale, mu, rest, of_gradient, of_momentum])
            .maps([dtype; 2], |a| {
                let g = a.x[0] * a.p[0];
                let b = a.x[1] * a.p[1] + g * a.p[2];
                [b, g * a.p[3] + b * a.p[4]]
            })?)
    }

    /// Which of these values make a stack: those that lie alike, so many at once that no rank has
    /// more than a bounded number of values of it.
    pub(super) fn stacks(values: &[&Tensor]) -> Vec<Vec<usize>> {
        let mut stacks: Vec<Vec<usize>> = vec![];
        for (i, value) in values.iter().enumerate() {
            let most = value.mesh().ranks() * (STACKED / value.numel().max(1)).max(1);
            let alike = |other: &Tensor| {
                other.shape() == value.shape()
                    && other.dtype() == value.dtype()
                    && other.sharding() == value.sharding()
                    && other.mesh() == value.mesh()
            };
            match stacks
                .iter_mut()
                .find(|s| s.len() < most && alike(values[s[0]]))
            {
                Some(stack) => stack.push(i),
                None => stacks.push(vec![i]),
            }
        }
        stacks
    }
}

/// A stack of matrices `[count, rows, columns]`, each with its singular values brought near 1: a
/// polynomial of `x x^T`, applied several times after dividing by the norm.
///
/// ```
/// # use anymesh_core::Tensor;
/// # use anymesh_train::optim::{Muon, newton_schulz};
/// # let device = anymesh_backend_cpu::device();
/// let x = Tensor::new(&[[[3f32, 0.0], [0.0, -2.0]]], &device)?;
/// let y = newton_schulz(&x, &Muon::default())?.to_vec::<f32>()?;
/// assert!((y[0] - 1.0).abs() < 0.3 && (y[3] + 1.0).abs() < 0.3 && y[1] == 0.0);
/// # Ok::<(), anymesh_train::Error>(())
/// ```
pub fn newton_schulz(stack: &Tensor, settings: &Muon) -> Result<Tensor> {
    let &[_, rows, columns] = stack.dims() else {
        let detail = format!("{} is no stack of matrices", stack.type_string());
        return Err(Error::config("newton_schulz", detail));
    };
    let wide = wide(stack.dtype());
    let dtype = if settings.bf16 { DType::BF16 } else { wide };
    // The smaller side has the smaller products.
    let tall = rows > columns;
    let x = match tall {
        true => stack.transpose(-1, -2)?,
        false => stack.clone(),
    };
    let squares =
        Expr::new("newton_schulz", &[&x]).sum(&[-2, -1], true, wide, |a| a.x[0] * a.x[0])?;
    let (floor, added) = match settings.add_eps {
        true => (0.0, settings.eps),
        false => (settings.eps, 0.0),
    };
    let mut x = Expr::new("newton_schulz", &[&x, &squares])
        .params(&[floor, added])
        .map(dtype, |a| a.x[0] / (a.x[1].sqrt().max(a.p[0]) + a.p[1]))?;
    let [a, b, c] = settings.coefficients;
    for _ in 0..settings.steps {
        let gram = x.bmm(&x.transpose(-1, -2)?)?;
        let both = gram.baddbmm(&gram, &gram, &Baddbmm { beta: b, alpha: c })?;
        x = x.baddbmm(
            &both,
            &x,
            &Baddbmm {
                beta: a,
                alpha: 1.0,
            },
        )?;
    }
    let x = x.cast(wide)?;
    Ok(match tall {
        true => x.transpose(-1, -2)?,
        false => x,
    })
}

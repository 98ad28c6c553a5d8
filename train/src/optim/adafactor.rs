//! Adafactor.

use super::rule::{Step, Updated, at_least, settled, states, wide, zeros};
use crate::{Error, Result};
use anymesh_core::{DType, Sharding, Tensor, ops::Expr};
use serde::{Deserialize, Serialize};

/// Second moments of matrices are kept as the means of their rows and columns, `R` and `C`, of which
/// `R C / mean(R)` is an estimate; of vectors they are kept whole. Averages take `t^beta2_decay` of a
/// new square. The step is `g / sqrt(v)`, made smaller where its root mean square is above `d`, times
/// the root mean square of the value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Adafactor {
    /// The learning rate.
    pub lr: f64,
    /// The exponent of the weight of a new square at step `t`: from -1 to 0.
    pub beta2_decay: f64,
    /// The least mean of rows, and the root of the least estimate: the machine's epsilon unless
    /// given.
    pub eps1: Option<f64>,
    /// The least root mean square of a value.
    pub eps2: f64,
    /// Added to squares of gradients; 1e-30 with an `eps1` of 0 is optax's way.
    pub square_eps: f64,
    /// The largest root mean square of `g / sqrt(v)`.
    pub d: f64,
    /// Weight decay.
    pub decay: f64,
    /// Whether the rate is at most `1 / sqrt(t)`.
    pub bound_rate: bool,
    /// Whether steps are scaled by the root mean square of the value.
    pub scale_by_value: bool,
    /// Matrices of which a side is smaller are kept whole.
    pub min_factored: usize,
}

impl Default for Adafactor {
    fn default() -> Self {
        Self {
            lr: 1e-2,
            beta2_decay: -0.8,
            eps1: None,
            eps2: 1e-3,
            square_eps: 0.0,
            d: 1.0,
            decay: 0.0,
            bound_rate: true,
            scale_by_value: true,
            min_factored: 0,
        }
    }
}

impl Adafactor {
    pub(super) fn check(&self, key: &str) -> Result<()> {
        if !(-1.0..=0.0).contains(&self.beta2_decay) {
            let detail = format!("{} is not from -1 to 0", self.beta2_decay);
            return Err(Error::config(format!("{key}.beta2_decay"), detail));
        }
        at_least(key, "eps1", self.eps1.unwrap_or(0.0), 0.0)?;
        at_least(key, "eps2", self.eps2, 0.0)?;
        at_least(key, "square_eps", self.square_eps, 0.0)?;
        if self.eps1 == Some(0.0) && self.square_eps == 0.0 {
            let detail = "a gradient of zero would be divided by zero: give eps1 or square_eps";
            return Err(Error::config(format!("{key}.eps1"), detail));
        }
        at_least(key, "d", self.d, f64::MIN_POSITIVE)
    }

    /// Whether second moments are kept as rows and columns of the last two dimensions.
    fn factors(&self, value: &Tensor) -> bool {
        match value.dims() {
            [.., rows, columns] => rows.min(columns) >= &self.min_factored,
            _ => false,
        }
    }

    pub(super) fn state(&self, value: &Tensor) -> Result<Vec<(&'static str, Tensor)>> {
        if !self.factors(value) {
            return Ok(vec![("adafactor.v", zeros(value)?)]);
        }
        // Cut as the value is in the dimensions that are left.
        let one = |dim: usize| -> Result<Tensor> {
            let mut dims = value.dims().to_vec();
            dims[dim] = 1;
            let cuts = value.sharding().cuts().filter(|(d, _)| *d != dim);
            let sharding = cuts.fold(Sharding::replicated(), |s, (d, axis)| s.cut(d, axis));
            let place = (value.mesh(), sharding);
            Ok(Tensor::zeros(dims, wide(value.dtype()), place)?)
        };
        let rank = value.rank();
        Ok(vec![
            ("adafactor.rows", one(rank - 1)?),
            ("adafactor.columns", one(rank - 2)?),
        ])
    }

    pub(super) fn update(
        &self,
        step: &Step,
        value: &Tensor,
        gradient: &Tensor,
        state: &[Tensor],
    ) -> Result<Updated> {
        let new = (step.number as f64).powf(self.beta2_decay);
        self.update_by(new, step, value, gradient, state)
    }

    /// [`update`](Self::update) with averages that take `new` of a square.
    fn update_by(
        &self,
        new: f64,
        step: &Step,
        value: &Tensor,
        gradient: &Tensor,
        state: &[Tensor],
    ) -> Result<Updated> {
        let dtype = wide(value.dtype());
        let eps1 = self.eps1.unwrap_or(match dtype {
            DType::F64 => f64::EPSILON,
            _ => f64::from(f32::EPSILON),
        });
        let (direction, state) = match self.factors(value) {
            true => self.factored(new, step.scale, eps1, gradient, states(state)?, dtype)?,
            false => self.whole(new, step.scale, eps1, gradient, states(state)?, dtype)?,
        };
        let count = value.numel().max(1) as f64;
        let squares = |x: &Tensor| -> Result<Tensor> {
            settled(Expr::new("adafactor", &[x]).sum(&[], false, dtype, |a| a.x[0] * a.x[0])?)
        };
        let (of_value, of_direction) = (squares(value)?, squares(&direction)?);
        let rate = match self.bound_rate {
            true => step.rate.min((step.number as f64).powf(-0.5)),
            false => step.rate,
        };
        // A value that does not scale its steps counts as one of size 1.
        let by_value = f64::from(u8::from(self.scale_by_value));
        let next = Expr::new("adafactor", &[value, &direction, &of_value, &of_direction])
            .params(&[
                rate,
                1.0 - step.rate * self.decay,
                count,
                self.eps2,
                self.d,
                by_value,
            ])
            .map(dtype, |a| {
                let [rate, left, count] = [a.p[0], a.p[1], a.p[2]];
                let size = (a.x[2] / count).sqrt().max(a.p[3]);
                let size = size * a.p[5] + (a.p[5].lit(1.0) - a.p[5]);
                let over = ((a.x[3] / count).sqrt() / a.p[4]).max(1.0);
                a.x[0] * left - a.x[1] * (rate * size / over)
            })?;
        Ok((next, state))
    }

    /// The direction and the state of a matrix, or of a stack of them.
    fn factored(
        &self,
        new: f64,
        scale: f64,
        eps1: f64,
        gradient: &Tensor,
        [rows, columns]: [&Tensor; 2],
        dtype: DType,
    ) -> Result<(Tensor, Vec<Tensor>)> {
        let averaged = |before: &Tensor, axis: i64| -> Result<Tensor> {
            let count = gradient.shape()[(gradient.rank() as i64 + axis) as usize].max(1) as f64;
            let squares = Expr::new("adafactor", &[gradient]).params(&[scale]).sum(
                &[axis],
                true,
                dtype,
                |a| {
                    let g = a.x[0] * a.p[0];
                    g * g
                },
            )?;
            let squares = settled(squares)?;
            Ok(Expr::new("adafactor", &[before, &squares])
                .params(&[new, count, self.square_eps])
                .map(dtype, |a| {
                    a.x[0] + (a.x[1] / a.p[1] + a.p[2] - a.x[0]) * a.p[0]
                })?)
        };
        let (rows, columns) = (averaged(rows, -1)?, averaged(columns, -2)?);
        let mean = settled(rows.mean(&[-2], true)?)?;
        let direction = Expr::new("adafactor", &[gradient, &rows, &columns, &mean])
            .params(&[scale, eps1, eps1 * eps1])
            .map(dtype, |a| {
                // Divided first: the product of two small means is nothing in f32.
                let v = a.x[1] / a.x[3].max(a.p[1]) * a.x[2];
                a.x[0] * a.p[0] * v.max(a.p[2]).rsqrt()
            })?;
        Ok((direction, vec![rows, columns]))
    }

    /// The same where second moments are kept as they are.
    fn whole(
        &self,
        new: f64,
        scale: f64,
        eps1: f64,
        gradient: &Tensor,
        [v]: [&Tensor; 1],
        dtype: DType,
    ) -> Result<(Tensor, Vec<Tensor>)> {
        let [direction, v] = Expr::new("adafactor", &[gradient, v])
            .params(&[scale, new, self.square_eps, eps1 * eps1])
            .maps([dtype; 2], |a| {
                let g = a.x[0] * a.p[0];
                let v = a.x[1] + (g * g + a.p[2] - a.x[1]) * a.p[1];
                [g * v.max(a.p[3]).rsqrt(), v]
            })?;
        Ok((direction, vec![v]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// optax has no bound on the rate, adds its epsilon to squares, and computes the weights of its
    /// averages in f32 whatever the parameters are: with those weights its steps are ours.
    #[test]
    fn optax_takes_the_same_steps_with_its_weights() -> Result<()> {
        let facts = include_str!("../../tests/facts/optimizers.json");
        let facts: serde_json::Value = serde_json::from_str(facts).expect("JSON");
        let rows = facts["optimizers"].as_array().expect("rows");
        let row = rows.iter().find(|r| r["name"] == "adafactor_optax");
        let (row, device) = (row.expect("is there"), anymesh_backend_cpu::device());
        let matrix = |v: &serde_json::Value| -> Vec<f64> {
            let rows = v.as_array().expect("rows").iter();
            rows.flat_map(|r| r.as_array().expect("a row"))
                .map(|x| x.as_f64().expect("a number"))
                .collect()
        };
        let hyper = &row["hyper"];
        let number = |key: &str| hyper[key].as_f64().expect("a number");
        let rule = Adafactor {
            lr: number("lr"),
            beta2_decay: -number("decay_rate"),
            eps1: Some(0.0),
            square_eps: number("eps"),
            d: number("clipping_threshold"),
            bound_rate: false,
            scale_by_value: hyper["multiply_by_parameter_scale"] == true,
            min_factored: number("min_dim_size_to_factor") as usize,
            ..Adafactor::default()
        };
        rule.check("rule")?;
        let tensor = |v: &serde_json::Value| Tensor::from_slice(&matrix(v), [4, 3], &device);
        let mut value = tensor(&row["param"])?;
        let mut state: Vec<Tensor> = rule.state(&value)?.into_iter().map(|s| s.1).collect();
        assert_eq!(state.len(), 2, "in factors");
        for t in 1..=3u64 {
            let (gradient, after) = (&row["grads"][t as usize - 1], &row["steps"][t as usize - 1]);
            let kept = 1.0 - (t as f32).powf(rule.beta2_decay as f32);
            let (step, new) = (Step::new(t, rule.lr), 1.0 - f64::from(kept));
            (value, state) = rule.update_by(new, &step, &value, &tensor(gradient)?, &state)?;
            for (a, b) in value.to_vec::<f64>()?.iter().zip(matrix(&after["param"])) {
                assert!((a - b).abs() < 1e-12, "step {t}: {a} and {b}");
            }
        }
        Ok(())
    }
}

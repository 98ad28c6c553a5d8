//! Clipping by the norm of all gradients together.

use super::rule::{at_least, wide};
use crate::Result;
use anymesh_core::{DType, Mesh, Sharding, Tensor, compare::as_one, grad::no_grad, ops::Expr};
use serde::{Deserialize, Serialize};

/// Gradients are multiplied with `min(1, max_norm / (norm + eps))`, where the norm is that of all of
/// them as one vector.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Clip {
    /// The largest norm; without one it is measured only.
    pub max_norm: Option<f64>,
    /// Which norm.
    pub norm: Norm,
    /// Added to the norm: 1e-6 as in torch, 0 as in optax.
    pub eps: f64,
}

/// A norm of vectors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Norm {
    /// The root of the sum of squares.
    #[default]
    #[serde(rename = "2")]
    Two,
    /// The largest absolute value.
    #[serde(rename = "inf")]
    Largest,
}

impl Default for Clip {
    fn default() -> Self {
        Self {
            max_norm: None,
            norm: Norm::Two,
            eps: 1e-6,
        }
    }
}

impl Clip {
    /// To a norm of at most this.
    pub fn to(max_norm: f64) -> Self {
        Self {
            max_norm: Some(max_norm),
            ..Self::default()
        }
    }

    /// What gradients of this norm are multiplied with.
    pub fn factor(&self, norm: f64) -> f64 {
        match self.max_norm {
            Some(most) => (most / (norm + self.eps)).min(1.0),
            None => 1.0,
        }
    }

    /// That the settings make sense; `key` is where they come from.
    pub fn check(&self, key: &str) -> Result<()> {
        at_least(key, "max_norm", self.max_norm.unwrap_or(1.0), 0.0)?;
        at_least(key, "eps", self.eps, 0.0)
    }
}

/// What is still to be reduced over the same axes of a mesh.
struct Part {
    mesh: Mesh,
    sharding: Sharding,
    dtype: DType,
    /// 0-d each.
    terms: Vec<Tensor>,
}

/// The norm of all these gradients as one vector, each of them once however it lies. Sums are f32,
/// or f64 where gradients are. What ranks have of it is added up by one reduction for each set of
/// mesh axes that gradients are cut over, and what meshes have of it on the host.
///
/// ```
/// # use anymesh_core::{Mesh, Tensor};
/// # use anymesh_train::optim::{Norm, norm_of};
/// # let device = anymesh_backend_cpu::device();
/// let mesh = Mesh::new("dp=2", &device)?;
/// let a = Tensor::new(&[3f32, -4.0], &device)?.to_mesh(&mesh, "[@dp]")?;
/// let b = Tensor::new(&[[12f32, 0.0], [0.0, -84.0]], &device)?.to_mesh(&mesh, "[_, _]")?;
/// assert_eq!(norm_of([&a, &b], Norm::Two)?, 85.0);
/// assert_eq!(norm_of([&a, &b], Norm::Largest)?, 84.0);
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[track_caller]
pub fn norm_of<'a>(gradients: impl IntoIterator<Item = &'a Tensor>, norm: Norm) -> Result<f64> {
    no_grad(|| {
        let mut parts: Vec<Part> = vec![];
        for gradient in gradients.into_iter().filter(|g| g.numel() > 0) {
            let dtype = wide(gradient.dtype());
            let expr = Expr::new("norm_of", &[gradient]);
            let term = match norm {
                Norm::Two => expr.sum(&[], false, dtype, |a| a.x[0] * a.x[0]),
                Norm::Largest => expr.max(&[], false, dtype, |a| a.x[0].abs()),
            }?;
            let same = parts.iter_mut().find(|p| {
                p.mesh == *term.mesh() && p.sharding == *term.sharding() && p.dtype == dtype
            });
            match same {
                Some(part) => part.terms.push(term),
                None => parts.push(Part {
                    mesh: term.mesh().clone(),
                    sharding: term.sharding().clone(),
                    dtype,
                    terms: vec![term],
                }),
            }
        }
        // What lies alike is another on each mesh, so this is one op to those who compare.
        let terms: Vec<Tensor> = parts.iter().flat_map(|p| p.terms.clone()).collect();
        let terms: Vec<&Tensor> = terms.iter().collect();
        let numbers = as_one("norm_of", &terms, || on_each_mesh(parts, norm))?;
        // Stages of a pipeline may be in other processes: all get all numbers.
        let meshes: Vec<Mesh> = numbers.iter().map(|n| n.mesh().clone()).collect();
        let apart = meshes.iter().any(|mesh| *mesh != meshes[0])
            && meshes.iter().any(|mesh| !mesh.is_local());
        let all = match apart {
            true => Some(Mesh::spanning(&meshes.iter().collect::<Vec<_>>())?),
            false => None,
        };
        let mut total = 0.0f64;
        for number in numbers {
            let number = match &all {
                Some(all) => number.to_mesh(all, Sharding::replicated())?,
                None => number,
            };
            // Without values there is none to read: as if all together were 1.
            let number = match number.device().has_values() {
                true => number.item()?.to_f64(),
                false => 1.0,
            };
            total = match norm {
                Norm::Two => total + number,
                // `max` would pass over NaN.
                Norm::Largest if number.is_nan() => number,
                Norm::Largest if total.is_nan() => total,
                Norm::Largest => total.max(number),
            };
        }
        Ok(match norm {
            Norm::Two => total.sqrt(),
            Norm::Largest => total,
        })
    })
}

/// One number for each set of axes, and then for each mesh.
#[track_caller]
fn on_each_mesh(parts: Vec<Part>, norm: Norm) -> anymesh_core::Result<Vec<Tensor>> {
    let mut numbers: Vec<(Mesh, DType, Vec<Tensor>)> = vec![];
    for part in parts {
        let sum = joined(&part.terms, norm)?;
        let sum = sum.reshard(Sharding::replicated())?;
        match numbers
            .iter_mut()
            .find(|(mesh, dtype, _)| *mesh == part.mesh && *dtype == part.dtype)
        {
            Some((_, _, terms)) => terms.push(sum),
            None => numbers.push((part.mesh, part.dtype, vec![sum])),
        }
    }
    numbers
        .iter()
        .map(|(_, _, terms)| joined(terms, norm))
        .collect()
}

/// Numbers that lie alike as one number that lies so.
#[track_caller]
fn joined(terms: &[Tensor], norm: Norm) -> anymesh_core::Result<Tensor> {
    if let [one] = terms {
        return Ok(one.clone());
    }
    let all = Tensor::stack(&terms.iter().collect::<Vec<_>>(), 0)?;
    Ok(match norm {
        Norm::Two => all.sum(&[], false)?,
        Norm::Largest => all.max(&[], false)?,
    })
}

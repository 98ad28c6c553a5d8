//! A backward pass in two halves: first the gradients of a function's inputs, which somebody waits
//! for, and later those of its parameters, which nobody does until the update.

use super::{
    backward::{Open, Pass},
    gradients::{Gradients, placed, total},
    tape::{Edge, Mode},
};
use crate::{DType, Error, Mesh, NoGradient, Result, Shape, Tensor};

/// Where a backward pass begins: a result without its values. Whoever has one need not keep the
/// tensor, as a stage of a pipeline that has sent it on.
#[derive(Clone)]
pub struct Root {
    edge: Edge,
    dtype: DType,
    shape: Shape,
    mesh: Mesh,
}

impl Root {
    /// That of a result, which must be tracked.
    #[track_caller]
    pub fn of(output: &Tensor) -> Result<Self> {
        Ok(Self {
            edge: tracked("backward_inputs", output)?,
            dtype: output.dtype(),
            shape: output.shape().clone(),
            mesh: output.mesh().clone(),
        })
    }

    /// What a pass begins with here.
    #[track_caller]
    fn seeded(&self, seed: Option<&Tensor>) -> Result<(Edge, Tensor)> {
        let op = "backward_inputs";
        let seed = match seed {
            Some(seed) if *seed.shape() != self.shape => {
                let detail = format!("the seed of a result {} must have its shape", self.shape);
                return Err(Error::shape(op, [seed], detail));
            }
            Some(seed) if *seed.mesh() != self.mesh => {
                return Err(Error::MeshMismatch {
                    op,
                    left: self.mesh.to_string(),
                    right: seed.mesh().to_string(),
                });
            }
            Some(seed) => seed.cast(self.dtype)?,
            None if self.shape.numel() == 1 => {
                Tensor::ones(self.shape.clone(), self.dtype, &self.mesh)?
            }
            None => {
                let detail = format!(
                    "a result {} is not a scalar: pass the gradient to start from",
                    self.shape
                );
                return Err(Error::argument(op, "seeds", detail));
            }
        };
        Ok((self.edge.clone(), seed))
    }
}

impl std::fmt::Debug for Root {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}: {}{}", self.edge.node, self.dtype, self.shape)
    }
}

#[track_caller]
fn tracked(op: &'static str, x: &Tensor) -> Result<Edge> {
    x.edge().cloned().ok_or_else(|| {
        let detail = "it is not tracked: no operand required a gradient, or it was computed under `no_grad`; `require_grad()` makes a tensor that is";
        Error::gradient(op, NoGradient::Untracked, detail).of([x])
    })
}

/// What the first half of a backward pass left to do: see [`backward_inputs`].
#[must_use = "the gradients of parameters are still to be computed"]
pub struct Remaining {
    open: Open,
    flat: Vec<Edge>,
}

impl std::fmt::Debug for Remaining {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a backward pass with {} ops to go", self.open.len())
    }
}

/// The first half of a backward pass: the gradients of `inputs`, and what is left to do for all
/// other tensors. An input that the outputs do not depend on has none.
///
/// Each gradient of an operand is computed once, in one of the halves: in the first those that lead
/// to an input, in the second all others. Until then the ops that have some left keep what they need
/// for them. An op that can only compute all of its gradients together, such as a
/// [checkpoint](super::checkpoint()), does so in the first half.
///
/// The inputs must be tracked, and the graph is used up: neither half can be repeated. Seeds are the
/// gradients of the outputs; a scalar needs none.
///
/// ```
/// # use anymesh_core::{Tensor, grad::{Root, backward_inputs}};
/// # let device = anymesh_backend_cpu::device();
/// let x = Tensor::from_slice(&[1f32, 2.0], [1, 2], &device)?.require_grad()?;
/// let w = Tensor::from_slice(&[3f32, 4.0], [2, 1], &device)?.require_grad()?;
/// let y = x.matmul(&w)?;
/// let (of_inputs, rest) = backward_inputs(&[Root::of(&y)?], Some(&[y.ones_like()?]), &[&x])?;
/// let of_x = of_inputs[0].as_ref().expect("it depends on x");
/// assert_eq!(of_x.to_vec::<f32>()?, [3.0, 4.0]);
/// // A pipeline sends it to the stage before, and does the rest when there is time.
/// assert_eq!(rest.backward()?.of(&w)?.to_vec::<f32>()?, [1.0, 2.0]);
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[track_caller]
pub fn backward_inputs(
    outputs: &[Root],
    seeds: Option<&[Tensor]>,
    inputs: &[&Tensor],
) -> Result<(Vec<Option<Tensor>>, Remaining)> {
    let seeded = all_seeded(outputs, seeds)?;
    let targets = inputs.iter().map(|x| tracked("backward_inputs", x));
    let targets = targets.collect::<Result<Vec<_>>>()?;
    let pass = Pass {
        targets: Some(&targets),
        stop: true,
        defer: true,
        ..Pass::default()
    };
    let found = pass.run(seeded)?;
    let zeros = found.zeros();
    let _off = Mode::Off.enter();
    let of_input = |(x, edge): (&&Tensor, &Edge)| match found.gradients.get(&edge.key()) {
        Some(gradient) => placed(&total(edge, gradient)?, x).map(Some),
        None if zeros.contains(&edge.key()) => x.detach().zeros_like().map(Some),
        None => Ok(None),
    };
    let of_inputs = inputs.iter().zip(&targets).map(of_input);
    let of_inputs = of_inputs.collect::<Result<_>>()?;
    let rest = Remaining {
        open: found.deferred,
        flat: found.flat,
    };
    Ok((of_inputs, rest))
}

/// A whole backward pass from several results: the gradients of all tensors that they are wanted
/// for. Seeds are the gradients of the results; a scalar needs none.
#[track_caller]
pub fn backward_from(outputs: &[Root], seeds: Option<&[Tensor]>) -> Result<Gradients> {
    let pass = Pass::default();
    Ok(Gradients::new(pass.run(all_seeded(outputs, seeds)?)?))
}

/// Where a pass begins at each of several results.
#[track_caller]
fn all_seeded(outputs: &[Root], seeds: Option<&[Tensor]>) -> Result<Vec<(Edge, Tensor)>> {
    if let Some(seeds) = seeds.filter(|s| s.len() != outputs.len()) {
        let detail = format!(
            "{} seeds for {} outputs: give one for each",
            seeds.len(),
            outputs.len()
        );
        return Err(Error::argument("backward_inputs", "seeds", detail));
    }
    (outputs.iter().enumerate())
        .map(|(i, output)| output.seeded(seeds.map(|s| &s[i])))
        .collect()
}

impl Remaining {
    /// The second half: the gradients of all other tensors that they are wanted for.
    #[track_caller]
    pub fn backward(self) -> Result<Gradients> {
        let pass = Pass::default();
        let mut found = pass.go_on(self.open)?;
        found.flat.extend(self.flat);
        Ok(Gradients::new(found))
    }
}

//! Gradients, in reverse mode, through every op that has one.
//!
//! [`Tensor::require_grad`] makes a tensor that ops remember; [`Tensor::backward`] goes back from a
//! loss and gives the gradients of all such tensors, [`grad()`] those of chosen tensors, also of
//! higher order. Gradients of ops are written in tensor ops, in the file of the op; those of
//! elementwise programs follow from the program (`map/derive.rs`).
//!
//! ```
//! # use anymesh_core::Tensor;
//! # let device = anymesh_backend_cpu::device();
//! let mut w = Tensor::from_slice(&[1f32, -2.0, 3.0], [3], &device)?.require_grad()?;
//! let loss = w.square()?.sum(&[], false)?;
//! let grads = loss.backward()?;
//! assert_eq!(grads.of(&w)?.to_vec::<f32>()?, [2.0, -4.0, 6.0]);
//! w.update(|w| w.sub(&grads.of(w)?.mul(0.25)?))?;
//! assert_eq!(w.to_vec::<f32>()?, [0.5, -1.0, 1.5]);
//! # Ok::<(), anymesh_core::Error>(())
//! ```
//!
//! On a mesh a gradient has the global shape of its tensor. It stays a partial sum as long as
//! nobody needs it whole (for a parameter over axes that do not cut it), is added to others as such, and [`Gradients::of`] reduces it once,
//! straight into the sharding of the tensor: for a sharded parameter that is a reduce-scatter.
//!
//! Tensors are values, so nothing that the tape keeps can change under it: an update makes a new
//! tensor. [`Tensor::update`] and [`Tensor::with_values`] make it a parameter in place of the old
//! one. A variable that lost its place on the tape in another way is found out: its gradient is an
//! error ([`Gradients::of`]), and [`Tensor::set_`] refuses to lose it.
//!
//! A gradient has the dtype of its tensor. Whether ops are recorded is a matter of the thread:
//! [`no_grad`] holds for the one that runs its closure, see [`Context`](crate::Context) for others.
//! The tape itself is bound to none: a loss may be computed on one thread and gone back from on
//! another.

mod backward;
mod checkpoint;
mod gradients;
mod halves;
mod horizon;
mod parameter;
mod parts;
mod slices;
mod tape;

pub use crate::overlap::{Overlap, with_overlap};
pub use checkpoint::checkpoint;
pub(crate) use checkpoint::recompute;
pub use gradients::Gradients;
pub use halves::{Remaining, Root, backward_from, backward_inputs};
pub use parts::on_parts;
pub(crate) use slices::Part;
pub use tape::HookHandle;
pub(crate) use tape::{Back, Edge, Pulled, Recording, constant, is_recording, record, record1};

use crate::{
    Error, NoGradient, Result, Tensor,
    promotion::{self, Promotion},
};
use backward::Pass;
use gradients::{placed, total};
use std::cell::LazyCell;
use tape::{LeafSums, Mode, with_mode};

/// What [`grad()`] does beside computing gradients.
#[derive(Clone, Debug, Default)]
pub struct GradOptions {
    /// The gradients of the outputs; ones for scalars where not given.
    pub seeds: Option<Vec<Tensor>>,
    /// Record the pass itself, so that the gradients can be differentiated again. Keeps the graph.
    pub create_graph: bool,
    /// Keep the graph, so that another pass can go through it.
    pub retain_graph: bool,
    /// Give zeros for an input that the outputs do not depend on, instead of an error.
    pub allow_unused: bool,
}

/// The gradients of the outputs, weighted by the seeds and summed, with respect to each input.
/// Inputs may be any tracked tensors.
///
/// ```
/// # use anymesh_core::{Tensor, grad::{GradOptions, grad}};
/// # let device = anymesh_backend_cpu::device();
/// let x = Tensor::new(3f64, &device)?.require_grad()?;
/// let y = x.pow(3.0)?;
/// let again = GradOptions { create_graph: true, ..Default::default() };
/// let first = grad(&[&y], &[&x], &again)?.remove(0);
/// let second = grad(&[&first], &[&x], &again)?.remove(0);
/// let third = grad(&[&second], &[&x], &GradOptions::default())?.remove(0);
/// assert_eq!([first, second, third].map(|g| g.item().unwrap().to_f64()), [27.0, 18.0, 6.0]);
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[track_caller]
pub fn grad(outputs: &[&Tensor], inputs: &[&Tensor], options: &GradOptions) -> Result<Vec<Tensor>> {
    let op = "grad";
    if let Some(seeds) = options.seeds.as_ref().filter(|s| s.len() != outputs.len()) {
        return Err(Error::argument(
            op,
            "seeds",
            format!(
                "{} seeds for {} outputs: give one for each",
                seeds.len(),
                outputs.len()
            ),
        )
        .of(outputs.iter().copied()));
    }
    let mut seeds = Vec::with_capacity(outputs.len());
    for (i, output) in outputs.iter().enumerate() {
        let seed = options.seeds.as_ref().map(|s| &s[i]);
        // An output that is not tracked depends on nothing.
        if output.edge().is_some() || !options.allow_unused {
            seeds.push(seeded(output, seed)?);
        }
    }
    let mut targets = Vec::with_capacity(inputs.len());
    for (i, input) in inputs.iter().enumerate() {
        match input.edge() {
            Some(edge) => targets.push(edge.clone()),
            None if options.allow_unused => {}
            None => {
                return Err(Error::gradient(op, NoGradient::Untracked, format!(
                        "input {i} is not tracked: call `require_grad()` on it and use what that returns"
                    )).of([*input]));
            }
        }
    }
    let pass = Pass {
        targets: Some(&targets),
        retain: options.retain_graph,
        create_graph: options.create_graph,
        ..Pass::default()
    };
    let found = pass.run(seeds)?;
    let roots = outputs
        .iter()
        .filter_map(|t| t.edge())
        .map(|edge| &edge.node);
    let reached = LazyCell::new(|| backward::needed(roots, &targets, false));
    let _off = (!options.create_graph).then(|| Mode::Off.enter());
    let mut picked = Vec::with_capacity(inputs.len());
    for (i, x) in inputs.iter().enumerate() {
        let edge = x.edge();
        let of_edge = |e| Some((e, found.gradients.get(&Edge::key(e))?));
        picked.push(match edge.and_then(of_edge) {
            Some((edge, gradient)) => placed(&total(edge, gradient)?, x)?,
            // Reached, but through a function that is flat.
            None if options.allow_unused || edge.is_some_and(|e| reached.contains(&e.node.id)) => {
                x.zeros_like()?
            }
            None => {
                return Err(Error::gradient(op, NoGradient::Unused, format!(
                        "the outputs do not depend on input {i}: leave it out, or set `allow_unused` to get zeros"
                    )).of([*x]));
            }
        });
    }
    Ok(picked)
}

/// Where a pass begins, and with what.
#[track_caller]
fn seeded(output: &Tensor, seed: Option<&Tensor>) -> Result<(Edge, Tensor)> {
    let op = "backward";
    let Some(edge) = output.edge() else {
        let detail = "the result is not tracked: no operand required a gradient, or it was computed under `no_grad`, or from integers";
        return Err(Error::gradient(op, NoGradient::Untracked, detail).of([output]));
    };
    let seed = match seed {
        Some(seed) if seed.shape() != output.shape() => {
            let detail = format!(
                "the seed of {} must have its shape, got {}",
                output.type_string(),
                seed.type_string()
            );
            return Err(Error::shape(op, [output, seed], detail));
        }
        Some(seed) if seed.mesh() != output.mesh() => {
            return Err(Error::MeshMismatch {
                op,
                left: output.mesh().to_string(),
                right: seed.mesh().to_string(),
            });
        }
        Some(seed) => seed.cast(output.dtype())?,
        None if output.numel() == 1 => output.ones_like()?,
        None => {
            let detail = format!(
                "{} is not a scalar: reduce it to a loss, or pass the gradient to start from to `backward_with`",
                output.type_string()
            );
            return Err(Error::shape(op, [output], detail));
        }
    };
    Ok((edge.clone(), seed))
}

/// Runs `f` without recording: results are not tracked. It holds on this thread until `f` returns
/// or panics; other threads take it along with a [`Context`](crate::Context).
///
/// ```
/// # use anymesh_core::{Tensor, grad::no_grad};
/// # let device = anymesh_backend_cpu::device();
/// let w = Tensor::new(1f32, &device)?.require_grad()?;
/// assert!(!no_grad(|| w.exp())?.requires_grad());
/// # Ok::<(), anymesh_core::Error>(())
/// ```
pub fn no_grad<T>(f: impl FnOnce() -> T) -> T {
    with_mode(Mode::Off, f)
}

/// Runs a function with a gradient of the caller's own: `backward` gets the inputs, the outputs and
/// the gradients of the outputs, and gives that of each input (`None` for zero). Nothing inside
/// `forward` is recorded.
///
/// ```
/// # use anymesh_core::{Tensor, grad::custom};
/// # let device = anymesh_backend_cpu::device();
/// // Rounding that lets gradients pass as if it were not there.
/// let x = Tensor::from_slice(&[0.4f32, 1.6], [2], &device)?.require_grad()?;
/// let y = custom("straight_through", &[&x], |x| Ok(vec![x[0].round()?]), |_, _, g| Ok(vec![Some(g[0].clone())]))?.remove(0);
/// let grads = y.sum(&[], false)?.backward()?;
/// assert_eq!(grads.of(&x)?.to_vec::<f32>()?, [1.0, 1.0]);
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[track_caller]
pub fn custom(
    op: &'static str,
    inputs: &[&Tensor],
    forward: impl FnOnce(&[Tensor]) -> Result<Vec<Tensor>>,
    backward: impl Fn(&[Tensor], &[Tensor], &[Tensor]) -> Result<Vec<Option<Tensor>>>
    + Send
    + Sync
    + 'static,
) -> Result<Vec<Tensor>> {
    let kept: Vec<Tensor> = inputs.iter().map(|t| (*t).clone()).collect();
    let out = record(
        op,
        inputs,
        || Ok(forward(&kept)?.into()),
        |out| {
            let (inputs, results) = (kept.clone(), out.clone());
            Ok(move |back: &Back<'_>| {
                let outputs: Vec<Tensor> = results
                    .iter()
                    .enumerate()
                    .map(|(i, t)| {
                        if t.dtype().is_float() {
                            back.out(i, t)
                        } else {
                            t.clone()
                        }
                    })
                    .collect();
                let grads = outputs
                    .iter()
                    .enumerate()
                    .map(|(i, t)| {
                        back.grad_of(i)
                            .map_or_else(|| t.zeros_like(), |g| Ok(g.clone()))
                    })
                    .collect::<Result<Vec<_>>>()?;
                let pulled = backward(&inputs, &outputs, &grads)?;
                check_custom(op, &inputs, &pulled)?;
                Ok(pulled.into())
            })
        },
    )?;
    Ok(out.into_vec())
}

/// Refuses gradients that do not fit the inputs.
fn check_custom(op: &'static str, inputs: &[Tensor], pulled: &[Option<Tensor>]) -> Result<()> {
    if pulled.len() != inputs.len() {
        return Err(Error::gradient(
            op,
            NoGradient::Mismatch,
            format!(
                "the backward function gave {} gradients for {} inputs",
                pulled.len(),
                inputs.len()
            ),
        ));
    }
    for (i, (x, gradient)) in inputs.iter().zip(pulled).enumerate() {
        if let Some(g) = gradient
            .as_ref()
            .filter(|g| g.shape() != x.shape() || g.mesh() != x.mesh() || g.dtype() != x.dtype())
        {
            let detail = format!(
                "the backward function gave {} for input {i}, which is {} on {}",
                g.type_string(),
                x.type_string(),
                x.mesh()
            );
            return Err(Error::gradient(op, NoGradient::Mismatch, detail).of([x, g]));
        }
    }
    Ok(())
}

impl Tensor {
    /// Goes back from this scalar and gives the gradient of every leaf it depends on. What ops kept
    /// for it is released on the way.
    #[track_caller]
    pub fn backward(&self) -> Result<Gradients> {
        pass_from(self, None, false)
    }

    /// [`backward`](Self::backward) from a tensor of any shape, whose gradient is given.
    #[track_caller]
    pub fn backward_with(&self, gradient: &Tensor) -> Result<Gradients> {
        pass_from(self, Some(gradient), false)
    }

    /// [`backward`](Self::backward) that adds what it finds to gradients that were found before, such
    /// as those of the last micro-batch; they keep their dtype, which may be wider than that of their
    /// tensors. Where a device can, the product that computes the gradient of a matrix adds it to
    /// the sum so far, in its memory if nobody else has that.
    ///
    /// ```
    /// # use anymesh_core::{DType, Tensor, grad::Gradients};
    /// # let device = anymesh_backend_cpu::device();
    /// let w = Tensor::from_slice(&[1f32, -2.0], [1, 2], &device)?.cast(DType::BF16)?.require_grad()?;
    /// let mut sums = Gradients::default();
    /// sums.set(&w, w.detach().cast(DType::F32)?.zeros_like()?)?;
    /// for scale in [1.0, 256.0, 1.0] {
    ///     let x = Tensor::full([3, 2], scale, DType::BF16, &device)?;
    ///     sums = x.linear(&w, None)?.sum(&[], false)?.backward_onto(sums)?;
    /// }
    /// assert_eq!(sums.of(&w)?.to_vec::<f32>()?, [774.0, 774.0]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn backward_onto(&self, so_far: Gradients) -> Result<Gradients> {
        let _off = Mode::Off.enter();
        let (sums, others) = so_far.split();
        let pass = Pass {
            sums: LeafSums::new(sums),
            ..Pass::default()
        };
        let mut found = Gradients::new(pass.run(vec![seeded(self, None)?])?);
        // Sums may be wider than what is added to them.
        let _scope = promotion::enter(Promotion::Auto);
        found.add(Gradients::of_sums(pass.sums.into_inner()))?;
        found.add(others)?;
        Ok(found)
    }

    /// [`backward`](Self::backward) that keeps the graph, so that another pass can go through it.
    #[track_caller]
    pub fn backward_retain(&self) -> Result<Gradients> {
        pass_from(self, None, true)
    }
}

#[track_caller]
fn pass_from(output: &Tensor, seed: Option<&Tensor>, retain: bool) -> Result<Gradients> {
    let _off = Mode::Off.enter();
    let pass = Pass {
        retain,
        ..Pass::default()
    };
    Ok(Gradients::new(pass.run(vec![seeded(output, seed)?])?))
}

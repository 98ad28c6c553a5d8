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
//! let w = Tensor::from_slice(&[1f32, -2.0, 3.0], [3], &device)?.require_grad()?;
//! let loss = w.square()?.sum(&[], false)?;
//! let grads = loss.backward()?;
//! assert_eq!(grads.get(&w)?.expect("used").to_vec::<f32>()?, [2.0, -4.0, 6.0]);
//! # Ok::<(), anymesh_core::Error>(())
//! ```
//!
//! On a mesh a gradient has the global shape of its tensor. It stays a partial sum as long as
//! nobody needs it whole, is added to others as such, and [`Gradients::get`] reduces it once,
//! straight into the sharding of the tensor: for a sharded parameter that is a reduce-scatter.
//!
//! Tensors are values, so nothing that the tape keeps can change under it: an update makes a new
//! tensor. What would go unnoticed is an update of a parameter's handle that loses its place on the
//! tape; [`Tensor::set_`] refuses that.

mod backward;
mod checkpoint;
mod tape;

pub use checkpoint::checkpoint;
pub(crate) use checkpoint::recompute;
pub(crate) use tape::{Edge, Pulled, constant, is_recording, record, record1};

use crate::{Error, Result, Tensor};
use backward::{Found, Pass};
use std::{cell::LazyCell, collections::HashMap, sync::Arc};
pub(crate) use tape::Back;
use tape::{Mode, with_mode};

/// The gradients of a backward pass, by tensor.
#[derive(Clone, Debug, Default)]
pub struct Gradients {
    found: HashMap<u64, Tensor>,
}

impl Gradients {
    /// The gradient of a tensor that required it, in that tensor's sharding; `None` where the loss
    /// does not depend on it.
    #[track_caller]
    pub fn get(&self, x: &Tensor) -> Result<Option<Tensor>> {
        self.partial(x)
            .map(|gradient| placed(gradient, x))
            .transpose()
    }

    /// The gradient as the pass left it, perhaps a partial sum: communicates nothing.
    pub fn partial(&self, x: &Tensor) -> Option<&Tensor> {
        x.edge().and_then(|edge| self.found.get(&edge.node.id))
    }

    /// Adds the gradients of another pass, such as that of the next micro-batch: partial sums are
    /// added as they are and reduced once, by [`get`](Self::get).
    #[track_caller]
    pub fn add(&mut self, other: Gradients) -> Result<()> {
        for (id, gradient) in other.found {
            let sum = match self.found.get(&id) {
                Some(so_far) => no_grad(|| so_far.add(&gradient))?,
                None => gradient,
            };
            self.found.insert(id, sum);
        }
        Ok(())
    }
}

/// A gradient where its tensor lies.
#[track_caller]
fn placed(gradient: &Tensor, x: &Tensor) -> Result<Tensor> {
    if x.is_plain() {
        Ok(gradient.clone())
    } else {
        gradient.reshard(x.sharding().whole())
    }
}

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
/// let x = Tensor::scalar(3f64, &device)?.require_grad()?;
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
        return Err(Error::Argument {
            op,
            detail: format!(
                "{} seeds for {} outputs: give one for each",
                seeds.len(),
                outputs.len()
            ),
        });
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
                return Err(Error::Gradient {
                    op,
                    detail: format!(
                        "input {i} is not tracked: call `require_grad()` on it and use what that returns"
                    ),
                });
            }
        }
    }
    let pass = Pass {
        targets: Some(&targets),
        stop: false,
        retain: options.retain_graph,
        create_graph: options.create_graph,
    };
    let found = pass.run(seeds)?;
    let roots = outputs
        .iter()
        .filter_map(|t| t.edge())
        .map(|edge| &edge.node);
    let reached = LazyCell::new(|| backward::needed(roots, &targets, false));
    let pick = |(i, x): (usize, &&Tensor)| match x
        .edge()
        .and_then(|e| found.get(&(e.node.id, e.slot)))
    {
        Some(gradient) => {
            let place = || placed(gradient, x);
            if options.create_graph {
                place()
            } else {
                no_grad(place)
            }
        }
        // Reached, but through a function that is flat.
        None if options.allow_unused || x.edge().is_some_and(|e| reached.contains(&e.node.id)) => {
            x.zeros_like()
        }
        None => Err(Error::Gradient {
            op,
            detail: format!(
                "the outputs do not depend on input {i}: leave it out, or set `allow_unused` to get zeros"
            ),
        }),
    };
    inputs.iter().enumerate().map(pick).collect()
}

/// Where a pass begins, and with what.
#[track_caller]
fn seeded(output: &Tensor, seed: Option<&Tensor>) -> Result<(Edge, Tensor)> {
    let op = "backward";
    let Some(edge) = output.edge() else {
        let detail = "the result is not tracked: no operand required a gradient, or it was computed under `no_grad`, or from integers".into();
        return Err(Error::Gradient { op, detail });
    };
    let seed = match seed {
        Some(seed) if seed.shape() != output.shape() => {
            let detail = format!(
                "the seed of {} must have its shape, got {}",
                output.type_string(),
                seed.type_string()
            );
            return Err(Error::Shape { op, detail });
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
            return Err(Error::Shape { op, detail });
        }
    };
    Ok((edge.clone(), seed))
}

/// Runs `f` without recording: results are not tracked.
///
/// ```
/// # use anymesh_core::{Tensor, grad::no_grad};
/// # let device = anymesh_backend_cpu::device();
/// let w = Tensor::scalar(1f32, &device)?.require_grad()?;
/// let next = no_grad(|| w.sub(0.1))?.require_grad()?;
/// assert!(next.requires_grad());
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
/// assert_eq!(grads.get(&x)?.expect("used").to_vec::<f32>()?, [1.0, 1.0]);
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
        return Err(Error::Gradient {
            op,
            detail: format!(
                "the backward function gave {} gradients for {} inputs",
                pulled.len(),
                inputs.len()
            ),
        });
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
            return Err(Error::Gradient { op, detail });
        }
    }
    Ok(())
}

impl Tensor {
    /// The same values as a leaf that gradients are computed for. Floats only.
    #[track_caller]
    pub fn require_grad(&self) -> Result<Tensor> {
        if !self.dtype().is_float() {
            return Err(Error::DType {
                op: "require_grad",
                dtype: self.dtype(),
                expected: "floats: integers and bools have no gradient",
            });
        }
        let mut leaf = self.clone();
        leaf.attach(Edge::leaf(self));
        Ok(leaf)
    }

    /// Whether ops on this tensor are recorded.
    pub fn requires_grad(&self) -> bool {
        self.edge().is_some()
    }

    /// Whether [`require_grad`](Self::require_grad) made it, and not an op.
    pub fn is_leaf(&self) -> bool {
        self.edge().is_some_and(|edge| edge.node.is_leaf())
    }

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

    /// [`backward`](Self::backward) that keeps the graph, so that another pass can go through it.
    #[track_caller]
    pub fn backward_retain(&self) -> Result<Gradients> {
        pass_from(self, None, true)
    }

    /// Has `hook` see the gradient of this tensor when it is complete, in every pass, and replace
    /// it where it returns another one.
    ///
    /// ```
    /// # use anymesh_core::Tensor;
    /// # let device = anymesh_backend_cpu::device();
    /// let x = Tensor::scalar(2f32, &device)?.require_grad()?;
    /// x.on_gradient(|g| g.clip(-1, 1).map(Some))?;
    /// let grads = x.pow(3.0)?.backward()?;
    /// assert_eq!(grads.get(&x)?.expect("used").to_vec::<f32>()?, [1.0]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    pub fn on_gradient(
        &self,
        hook: impl Fn(&Tensor) -> Result<Option<Tensor>> + Send + Sync + 'static,
    ) -> Result<()> {
        let Some(edge) = self.edge() else {
            return Err(Error::Gradient {
                op: "on_gradient",
                detail: "the tensor is not tracked: nothing would ever call the hook".into(),
            });
        };
        edge.node.add_hook(edge.slot, Arc::new(hook));
        Ok(())
    }
}

#[track_caller]
fn pass_from(output: &Tensor, seed: Option<&Tensor>, retain: bool) -> Result<Gradients> {
    let seed = no_grad(|| seeded(output, seed))?;
    let found: Found = Pass {
        targets: None,
        stop: false,
        retain,
        create_graph: false,
    }
    .run(vec![seed])?;
    Ok(Gradients {
        found: found
            .into_iter()
            .map(|((id, _), gradient)| (id, gradient))
            .collect(),
    })
}

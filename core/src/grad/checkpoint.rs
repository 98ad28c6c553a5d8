//! Recompute: forget what is inside a function and run it again in the backward pass.

use super::{
    backward::Pass,
    tape::{Back, Edge, Mode, Pulled, collect, mode, record, same_edge, with_mode},
};
use crate::{Error, NoGradient, Result, Tensor, observe, tensor::Outputs};
use std::sync::Arc;

/// The op that a checkpoint is to the tape.
const CHECKPOINT: &str = "checkpoint";

/// Runs `f` without keeping anything but its inputs, and runs it again when its gradient is needed.
///
/// Tracked tensors that `f` captures get their gradients too, as they would without `checkpoint`;
/// those that are not tracked (frozen parameters) get none. Random ops take their key as an
/// argument, so the second run draws the same numbers; `f` must not change state that it depends
/// on. Checkpoints may be nested.
///
/// ```
/// # use anymesh_core::{DType, Tensor, grad::checkpoint, ops::Rng};
/// # let device = anymesh_backend_cpu::device();
/// let x = Tensor::ones([4], DType::F32, &device)?.require_grad()?;
/// let y = checkpoint(|x| Ok(vec![x[0].exp()?.dropout(0.5, Rng::new(3))?]), &[&x])?.remove(0);
/// let gradient = y.sum(&[], false)?.backward()?.of(&x)?;
/// assert_eq!(gradient.to_vec::<f32>()?, y.to_vec::<f32>()?);
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[track_caller]
pub fn checkpoint(
    f: impl Fn(&[Tensor]) -> Result<Vec<Tensor>> + Send + Sync + 'static,
    inputs: &[&Tensor],
) -> Result<Vec<Tensor>> {
    let given: Vec<Tensor> = inputs.iter().map(|t| (*t).clone()).collect();
    if mode() != Mode::On {
        return f(&given);
    }
    let (out, mut used) = collect(|| f(&given));
    let out = out?;
    if used.is_empty() {
        return Ok(out);
    }
    // The inputs first, then what was captured.
    let mut operands: Vec<Tensor> = given
        .iter()
        .filter(|t| t.requires_grad())
        .cloned()
        .collect();
    used.retain(|t| !operands.iter().any(|o| same_edge(o, t)));
    operands.extend(used);
    let again = Arc::new(move |_: &[Tensor]| Ok(f(&given)?.into()));
    let (kept, refs) = (operands.clone(), operands.iter().collect::<Vec<_>>());
    Ok(record(
        CHECKPOINT,
        &refs,
        || Ok(out.into()),
        |_| Ok(pull_again(CHECKPOINT, kept, again)),
    )?
    .into_vec())
}

/// An op whose gradient is that of `again`, which computes the same from the operands in ops that
/// have gradients.
#[track_caller]
pub(crate) fn recompute(
    op: &'static str,
    inputs: &[&Tensor],
    forward: impl FnOnce() -> Result<Outputs>,
    again: impl Fn(&[Tensor]) -> Result<Outputs> + Send + Sync + 'static,
) -> Result<Outputs> {
    let kept = || inputs.iter().map(|t| (*t).clone()).collect();
    record(op, inputs, forward, |_| {
        Ok(pull_again(op, kept(), Arc::new(again)))
    })
}

/// Computes the results of an op once more.
type Again = dyn Fn(&[Tensor]) -> Result<Outputs> + Send + Sync;

/// Runs `again` with recording on, and goes back through it to the operands and no further.
fn pull_again(
    op: &'static str,
    operands: Vec<Tensor>,
    again: Arc<Again>,
) -> impl Fn(&Back<'_>) -> Result<Pulled> + Send + Sync {
    move |back: &Back<'_>| {
        // The pass below stops at the operands, and is recorded where this one is: then it is part
        // of the graph that leads on to what made them.
        let create_graph = mode() == Mode::On;
        // What a user checkpoints are ops of the program, each by itself.
        let _program = (op == CHECKPOINT).then(observe::program);
        let out = with_mode(Mode::On, || again(&operands))?;
        let mut seeds = Vec::with_capacity(out.len());
        for (i, t) in out.iter().enumerate() {
            if let (Some(edge), Some(gradient)) = (t.edge(), back.grad_of(i)) {
                if t.shape() != gradient.shape() {
                    let detail = format!(
                        "the second run gave {}, the first a result of shape {}: it depends on something that changed",
                        t.type_string(),
                        gradient.shape()
                    );
                    return Err(Error::gradient(op, NoGradient::Mismatch, detail).of([t, gradient]));
                }
                seeds.push((edge.clone(), gradient.clone()));
            }
        }
        let targets: Vec<Edge> = operands.iter().filter_map(|t| t.edge().cloned()).collect();
        let mut found = Pass {
            targets: Some(&targets),
            stop: true,
            create_graph,
            ..Pass::default()
        }
        .run(seeds)?;
        let _unseen = observe::unseen();
        // An operand that is there twice gets its gradient once.
        let gradient = |t: &Tensor| t.edge().and_then(|e| found.gradients.remove(&e.key()));
        let gradients = operands.iter().map(gradient);
        gradients.map(|g| g.map(|g| g.wait()).transpose()).collect()
    }
}

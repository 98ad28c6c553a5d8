//! What a backward pass found.

use super::{
    backward::PassGradients,
    tape::{Edge, Mode},
};
use crate::{Error, NoGradient, Result, Tensor, observe, overlap::Coming};
use std::collections::{HashMap, hash_map::Entry};

/// The gradients of a backward pass, or of several that were [added](Self::add), by tensor.
///
/// ```
/// # use anymesh_core::{Tensor, grad::Gradients};
/// # let device = anymesh_backend_cpu::device();
/// let mut w = Tensor::from_slice(&[1f32, -2.0], [2], &device)?.require_grad()?;
/// // Two micro-batches make one step.
/// let mut grads = Gradients::default();
/// for scale in [1.0, 3.0] {
///     grads.add(w.square()?.mul(scale)?.sum(&[], false)?.backward()?)?;
/// }
/// assert_eq!(grads.of(&w)?.to_vec::<f32>()?, [8.0, -16.0]);
/// // The updated parameter is a parameter again, and these gradients are not its own.
/// w.update(|w| w.sub(&grads.of(w)?.mul(0.125)?))?;
/// assert_eq!(w.to_vec::<f32>()?, [0.0, 0.0]);
/// assert!(w.requires_grad() && grads.of(&w).is_err());
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Gradients {
    found: HashMap<(u64, usize), Held>,
}

#[derive(Clone, Debug)]
enum Held {
    /// As the pass left it, perhaps on its way.
    Sum(Coming),
    /// The loss depends on it, but through functions that are flat.
    Zero,
    /// Given away.
    Taken,
}

impl Gradients {
    pub(super) fn new(found: PassGradients) -> Self {
        let zeros = found.zeros();
        let zeros = zeros.into_iter().map(|key| (key, Held::Zero));
        let sums = found.gradients.into_iter();
        let sums = sums.map(|(key, sum)| (key, Held::Sum(sum)));
        Self {
            found: sums.chain(zeros).collect(),
        }
    }

    pub(super) fn of_sums(sums: HashMap<(u64, usize), Tensor>) -> Self {
        let held = |(key, sum)| (key, Held::Sum(Coming::There(sum)));
        Self {
            found: sums.into_iter().map(held).collect(),
        }
    }

    /// The sums that lie on one device, and the others.
    pub(super) fn split(self) -> (HashMap<(u64, usize), Tensor>, Self) {
        let (mut sums, mut others) = (HashMap::new(), Self::default());
        for (key, held) in self.found {
            match held {
                Held::Sum(Coming::There(sum)) if sum.is_plain() => {
                    sums.insert(key, sum);
                }
                held => {
                    others.found.insert(key, held);
                }
            }
        }
        (sums, others)
    }

    /// Puts a sum in the place of a tensor's gradient, in any float dtype: what
    /// [`backward_onto`](Tensor::backward_onto) is to add to.
    #[track_caller]
    pub fn set(&mut self, x: &Tensor, sum: Tensor) -> Result<()> {
        let op = "Gradients::set";
        let edge = x.edge().ok_or_else(|| untracked(op, x))?;
        if sum.shape() != x.shape() || sum.mesh() != x.mesh() || !sum.dtype().is_float() {
            let detail = format!(
                "{} is no gradient of {}",
                sum.type_string(),
                x.type_string()
            );
            return Err(Error::gradient(op, NoGradient::Mismatch, detail).of([x, &sum]));
        }
        let sum = Held::Sum(Coming::There(sum.detach()));
        self.found.insert(edge.key(), sum);
        Ok(())
    }

    /// The gradient of a tensor, in that tensor's sharding. On a mesh this is where partial sums
    /// are reduced. One that is being reduced beside the program is waited for, and no other; what
    /// went wrong with it is returned.
    ///
    /// It is an error where there is none: the tensor is not tracked (as after an update that lost
    /// it, see [`Tensor::update`]), the loss does not depend on it, it was [taken](Self::take), or
    /// it is the result of an op and was not [retained](Tensor::retain_grad).
    #[track_caller]
    pub fn of(&self, x: &Tensor) -> Result<Tensor> {
        placed(&self.held("Gradients::of", x)?, x)
    }

    /// [`of`](Self::of), but `None` where the loss does not depend on the tensor: for parameters
    /// that a step may leave out, such as experts that got no token.
    #[track_caller]
    pub fn get(&self, x: &Tensor) -> Result<Option<Tensor>> {
        match self.find("Gradients::get", x)? {
            Some(gradient) => placed(&gradient, x).map(Some),
            None => Ok(None),
        }
    }

    /// [`of`](Self::of) that also releases the gradient, so that it lives no longer than the update
    /// that uses it.
    #[track_caller]
    pub fn take(&mut self, x: &Tensor) -> Result<Tensor> {
        let gradient = self.held("Gradients::take", x)?;
        if let Some(edge) = x.edge() {
            self.found.insert(edge.key(), Held::Taken);
        }
        placed(&gradient, x)
    }

    /// [`get`](Self::get) as the pass left it, perhaps a partial sum: communicates nothing.
    pub fn get_partial(&self, x: &Tensor) -> Result<Option<Tensor>> {
        self.find("Gradients::get_partial", x)
    }

    /// [`of`](Self::of) as the pass left it, perhaps a partial sum: communicates nothing.
    pub fn partial(&self, x: &Tensor) -> Result<Tensor> {
        self.held("Gradients::partial", x)
    }

    /// Adds the gradients of another pass, such as that of the next micro-batch: partial sums are
    /// added as they are and reduced once, by [`of`](Self::of).
    #[track_caller]
    pub fn add(&mut self, other: Gradients) -> Result<()> {
        let _off = Mode::Off.enter();
        // In no order that a program could know.
        let _unseen = observe::unseen();
        for (key, more) in other.found {
            match self.found.entry(key) {
                Entry::Vacant(place) => {
                    place.insert(more);
                }
                Entry::Occupied(mut place) => match (place.get(), more) {
                    (Held::Sum(so_far), Held::Sum(more)) => {
                        let sum = so_far.wait()?.add(&more.wait()?)?;
                        place.insert(Held::Sum(Coming::There(sum)));
                    }
                    (Held::Zero | Held::Taken, more) => {
                        place.insert(more);
                    }
                    (Held::Sum(_), Held::Zero | Held::Taken) => {}
                },
            }
        }
        Ok(())
    }

    /// Forgets all gradients, for the next step. A new pass never adds to an old one by itself, so
    /// this is for a variable that micro-batches are [added](Self::add) to.
    pub fn clear(&mut self) {
        self.found.clear();
    }

    /// What there is, or why there is nothing.
    fn held(&self, op: &'static str, x: &Tensor) -> Result<Tensor> {
        match (self.find(op, x)?, x.edge()) {
            (Some(gradient), _) => Ok(gradient),
            (None, Some(edge)) => Err(unreached(op, edge)),
            (None, None) => Err(untracked(op, x)),
        }
    }

    /// What there is; `None` where the loss does not depend on the tensor.
    fn find(&self, op: &'static str, x: &Tensor) -> Result<Option<Tensor>> {
        let edge = x.edge().ok_or_else(|| untracked(op, x))?;
        match self.found.get(&edge.key()) {
            Some(Held::Sum(sum)) => total(edge, sum).map(Some),
            Some(Held::Zero) => x.detach().zeros_like().map(Some),
            Some(Held::Taken) => Err(Error::gradient(op, NoGradient::Taken, format!(
                    "that of {} was taken already: keep what `take` returned, or use `of`",
                    x.type_string()
                )).of([x])),
            None if edge.node.is_retained(edge.slot) => Ok(None),
            None => Err(Error::gradient(op, NoGradient::NotRetained, format!(
                    "{} is the result of `{}` at {}, and passes keep the gradients of leaves alone: call `retain_grad()` on it before the pass",
                    x.type_string(),
                    edge.node.op,
                    edge.node.caller
                )).of([x])),
        }
    }
}

fn untracked(op: &'static str, x: &Tensor) -> Error {
    Error::gradient(op, NoGradient::Untracked, format!(
            "{} is not tracked: call `require_grad()` on a parameter when it is made, use what that returns, and change it with `update` or `with_values`",
            x.type_string()
        )).of([x])
}

fn unreached(op: &'static str, edge: &Edge) -> Error {
    Error::gradient(
        op,
        NoGradient::Unused,
        format!(
            "the loss does not depend on the tensor of {}: it was not used, or only detached or under `no_grad`, or it was made (by an update, say) after the loss; `get` gives `None` for it",
            edge.node.caller
        ),
    )
}

/// A complete gradient of a tensor, when it is there.
pub(super) fn total(edge: &Edge, sum: &Coming) -> Result<Tensor> {
    let unseen = observe::unseen();
    let sum = sum.wait()?;
    drop(unseen);
    observe::total(edge.node.call(), sum)
}

/// A gradient where its tensor lies.
#[track_caller]
pub(super) fn placed(gradient: &Tensor, x: &Tensor) -> Result<Tensor> {
    if x.is_plain() {
        Ok(gradient.clone())
    } else {
        gradient.reshard(x.sharding().whole())
    }
}

//! Gradients of several micro-batches as one.

use crate::{Error, Module, Param, Pattern, Result, pipeline::add_type};
use anymesh_core::{
    DType, Tensor,
    grad::{Gradients, no_grad},
};
use std::collections::{BTreeMap, BTreeSet};

/// Adds up the gradients of micro-batches, as they lie: partial sums stay partial, and nothing is
/// sent until [`finish`](Self::finish). Under `Zero::Two` and `Zero::Three` they come added up and
/// cut, and are added as such.
///
/// For the mean over a whole batch, divide each micro-batch's sum by the count of the whole batch:
/// a mean of means weighs a short micro-batch like a long one.
///
/// ```
/// # use anymesh_core::Tensor;
/// # use anymesh_train::{Build, Init, Module, Policy, nn::Linear, optim::Accumulator};
/// # let device = anymesh_backend_cpu::device();
/// let b = Build::new(&device, Policy::f32(), 1);
/// let layer = Linear::new(&b, [1, 1], "[_, _]", Init::Ones)?;
/// let mut sums = Accumulator::default();
/// for batch in [&[2f32, 4.0, 6.0, 8.0][..], &[1.0]] {
///     let x = Tensor::from_slice(batch, [batch.len(), 1], &device)?;
///     let loss = layer.forward(&x)?.sum_all()?.div(5.0)?;
///     sums.add(&layer, &loss.backward()?)?;
/// }
/// let sums = sums.finish(&layer)?;
/// assert_eq!(sums.gradients["weight"].to_vec::<f32>()?, [4.2]);
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Accumulator {
    sums: BTreeMap<String, Tensor>,
    passes: usize,
    may_lack: Option<Pattern>,
}

/// The gradients of a step, each where its parameter lies.
#[derive(Clone, Debug, Default)]
pub struct Sums {
    /// By the names of the parameters.
    pub gradients: BTreeMap<String, Tensor>,
    /// Parameters that no loss depended on and that may do so: a step leaves them alone.
    pub missing: BTreeSet<String>,
}

impl Accumulator {
    /// Parameters of this [`Pattern`] may go without a gradient, such as experts that got no token.
    /// For all others that is an error, because a step would silently not train them.
    pub fn may_lack(mut self, names: &str) -> Result<Self> {
        self.may_lack = Some(names.parse()?);
        Ok(self)
    }

    /// How many passes were added.
    pub fn passes(&self) -> usize {
        self.passes
    }

    /// What was added so far, as it lies.
    pub fn sums(&self) -> &BTreeMap<String, Tensor> {
        &self.sums
    }

    /// Adds what a pass found.
    #[track_caller]
    pub fn add(&mut self, model: &(impl Module + ?Sized), gradients: &Gradients) -> Result<()> {
        self.add_but(model, gradients, &BTreeSet::new())?;
        self.passes += 1;
        Ok(())
    }

    /// Adds what a pass found of all parameters but some.
    #[track_caller]
    fn add_but(
        &mut self,
        model: &(impl Module + ?Sized),
        gradients: &Gradients,
        without: &BTreeSet<String>,
    ) -> Result<()> {
        let mut outcome = Ok(());
        // What is added to sums, or is a part of one, is made wide first: all in few launches.
        let mut wide: BTreeMap<DType, Vec<(String, Tensor)>> = BTreeMap::new();
        model.visit("", &mut |name, p| {
            if outcome.is_err() || without.contains(name) {
                return;
            }
            let gradient = match p.gradient(gradients) {
                Ok(Some(gradient)) => gradient,
                Ok(None) => return,
                Err(error) => return outcome = Err(error),
            };
            // The only one is widened by who reads it.
            if self.sums.contains_key(name) || gradient.sharding().is_partial() {
                let of_dtype = wide.entry(p.policy().reduce).or_default();
                of_dtype.push((name.into(), gradient));
            } else {
                self.sums.insert(name.into(), gradient);
            }
        });
        outcome?;
        for (dtype, gradients) in wide {
            let each: Vec<&Tensor> = gradients.iter().map(|(_, gradient)| gradient).collect();
            let each = no_grad(|| Tensor::cast_each(&each, dtype))?;
            for ((name, _), gradient) in gradients.into_iter().zip(each) {
                if let Some(so_far) = self.sums.get_mut(&name) {
                    *so_far = no_grad(|| so_far.cast(dtype))?;
                }
                self.add_to(&name, gradient)?;
            }
        }
        Ok(())
    }

    /// [`add`](Self::add) of what a pass from a loss finds. On one device the products of the pass
    /// add to the sums so far where they can, so that the gradients of a micro-batch never are apart
    /// from them, and are not rounded before they are added.
    #[track_caller]
    pub fn backward(&mut self, model: &(impl Module + ?Sized), loss: &Tensor) -> Result<()> {
        let (mut so_far, mut given) = (Gradients::default(), BTreeSet::new());
        let mut outcome = Ok(());
        model.visit("", &mut |name, p| {
            if outcome.is_ok() && p.is_trainable() {
                outcome = self.give(name, p, &mut so_far, &mut given);
            }
        });
        outcome?;
        let found = loss.backward_onto(so_far)?;
        let mut outcome = Ok(());
        model.visit("", &mut |name, p| {
            if outcome.is_ok() && given.contains(name) {
                outcome = p.gradient(&found).map(|sum| {
                    self.sums.extend(sum.map(|sum| (name.to_string(), sum)));
                });
            }
        });
        outcome?;
        self.add_but(model, &found, &given)?;
        self.passes += 1;
        Ok(())
    }

    /// Gives a sum that lies on one device away, for a pass to add to.
    fn give(
        &mut self,
        name: &str,
        p: &Param,
        so_far: &mut Gradients,
        given: &mut BTreeSet<String>,
    ) -> Result<()> {
        let on_one = |sum: &Tensor| sum.is_plain() && p.leaf().requires_grad();
        if self.sums.get(name).is_some_and(on_one)
            && let Some(sum) = self.sums.remove(name)
        {
            so_far.set(p.leaf(), no_grad(|| sum.cast(p.policy().reduce))?)?;
            given.insert(name.into());
        }
        Ok(())
    }

    /// Adds to the gradient of one parameter.
    #[track_caller]
    pub(crate) fn add_to(&mut self, name: &str, gradient: Tensor) -> Result<()> {
        let sum = match self.sums.remove(name) {
            None => gradient,
            Some(so_far) => no_grad(|| so_far.add(&gradient))?,
        };
        self.sums.insert(name.into(), sum);
        Ok(())
    }

    /// Adds gradients of which this process has no values: what matters are their types.
    pub(crate) fn add_types(&mut self, gradients: &Accumulator) -> Result<()> {
        for (name, gradient) in &gradients.sums {
            let sum = add_type(self.sums.remove(name), gradient)?;
            self.sums.insert(name.clone(), sum);
        }
        self.passes += 1;
        Ok(())
    }

    /// The sums, added up over ranks and where their parameters lie, and an empty accumulator.
    /// Errors where a trainable parameter has none.
    #[track_caller]
    pub fn finish(&mut self, model: &(impl Module + ?Sized)) -> Result<Sums> {
        let mut sums = Sums::default();
        let mut outcome = Ok(());
        model.visit("", &mut |name, p| {
            if outcome.is_ok() && p.is_trainable() {
                outcome = self.finish_one(name, p, &mut sums);
            }
        });
        self.sums.clear();
        self.passes = 0;
        outcome.map(|()| sums)
    }

    #[track_caller]
    fn finish_one(&mut self, name: &str, p: &Param, sums: &mut Sums) -> Result<()> {
        match self.sums.remove(name) {
            Some(sum) => {
                let placed = p.place_gradient(&sum)?;
                sums.gradients.insert(name.into(), placed);
            }
            None if self.may_lack.as_ref().is_some_and(|m| m.fits(name)) => {
                sums.missing.insert(name.into());
            }
            None => {
                let detail = "the loss does not depend on it, so that training would leave it as \
                              it is: freeze it, or say that it may lack a gradient";
                return Err(Error::parameter(name, detail));
            }
        }
        Ok(())
    }
}

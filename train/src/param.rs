//! A parameter: what the optimizer works on, and the weight that is computed with.

use crate::{Adapter, Error, Policy, Result, Zero};
use anymesh_core::{
    DType, Sharding, Tensor,
    grad::{Gradients, custom, no_grad},
};

/// A parameter of a model: a value in the dtype and the layout that it is stored in, and how it is
/// computed with. The two layouts are all that ZeRO is.
#[derive(Clone, Debug)]
pub struct Param {
    name: String,
    /// What the optimizer works on.
    value: Tensor,
    /// The weight to compute with, kept from step to step where it differs from the value.
    working: Option<Tensor>,
    compute: Sharding,
    policy: Policy,
    zero: Zero,
    trainable: bool,
    /// Whether the layer it is in takes an adapter.
    adaptable: bool,
    /// A low-rank addition, trained in its place.
    pub(crate) adapter: Option<Box<Adapter>>,
}

impl Param {
    /// A trainable parameter of these values; they lie as they are to be stored.
    pub fn new(
        name: impl Into<String>,
        value: Tensor,
        compute: Sharding,
        policy: Policy,
        zero: Zero,
    ) -> Result<Self> {
        let mut param = Self {
            name: name.into(),
            value,
            working: None,
            compute,
            policy,
            zero,
            trainable: true,
            adaptable: false,
            adapter: None,
        };
        param.renew()?;
        Ok(param)
    }

    /// Says that the layer it is in adds an adapter to its output.
    pub(crate) fn adaptable(mut self) -> Self {
        self.adaptable = true;
        self
    }

    /// Whether it can have an adapter: the weights of linear layers can.
    pub fn is_adaptable(&self) -> bool {
        self.adaptable
    }

    /// The full name, under which it is stored.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The value as it is stored: what the optimizer changes and checkpoints keep.
    pub fn value(&self) -> &Tensor {
        &self.value
    }

    /// The weight to compute with, where it is kept from step to step beside the value.
    pub(crate) fn working(&self) -> Option<&Tensor> {
        self.working.as_ref()
    }

    /// How it lies where it is computed with.
    pub fn compute_sharding(&self) -> &Sharding {
        &self.compute
    }

    /// The dtypes.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// The stage of [`Zero`] that it is stored by.
    pub fn zero(&self) -> Zero {
        self.zero
    }

    /// Whether training changes it.
    pub fn is_trainable(&self) -> bool {
        self.trainable
    }

    /// The weight to compute with: in the dtype of computations, gathered to the sharding of
    /// computations. What that takes is recorded, so the gradient finds its way back.
    #[track_caller]
    pub fn get(&self) -> Result<Tensor> {
        if !self.value.requires_grad() || !self.differs() {
            return Ok(match &self.working {
                Some(weight) => weight.clone(),
                None => self.to_compute()?,
            });
        }
        // The value is the leaf: its gradient is added up in the dtype for that, and cut, as soon
        // as there is one.
        let (stored, reduce) = (self.value.sharding().clone(), self.policy.reduce);
        let mut weight = custom(
            "weight",
            &[&self.value],
            |_| match &self.working {
                Some(weight) => Ok(vec![weight.clone()]),
                None => Ok(vec![self.to_compute()?]),
            },
            move |value, _, gradient| {
                let sum = gradient[0].cast(reduce)?.reshard(stored.clone())?;
                Ok(vec![Some(sum.cast(value[0].dtype())?)])
            },
        )?;
        Ok(weight.remove(0))
    }

    /// Whether the weight to compute with is another tensor than the value.
    fn differs(&self) -> bool {
        self.policy.compute != self.value.dtype() || self.compute != *self.value.sharding()
    }

    #[track_caller]
    fn to_compute(&self) -> anymesh_core::Result<Tensor> {
        let weight = self.value.cast(self.policy.compute)?;
        match *weight.sharding() == self.compute {
            true => Ok(weight),
            false => weight.reshard(self.compute.clone()),
        }
    }

    /// The gradient as a pass left it, in the dtype in which gradients are added up: perhaps a
    /// partial sum, nothing is sent. Under [`Zero::Two`] and [`Zero::Three`] it already lies as the
    /// value does. `None` where the loss does not depend on the parameter, or it is frozen.
    pub fn partial_gradient(&self, gradients: &Gradients) -> Result<Option<Tensor>> {
        let gradient = self.gradient(gradients)?;
        let summed = |g: Tensor| no_grad(|| g.cast(self.policy.reduce));
        Ok(gradient.map(summed).transpose()?)
    }

    /// The tensor whose gradient a pass finds.
    pub(crate) fn leaf(&self) -> &Tensor {
        match &self.working {
            Some(weight) if !self.value.requires_grad() => weight,
            _ => &self.value,
        }
    }

    /// [`partial_gradient`](Self::partial_gradient) in the dtype that it has.
    pub(crate) fn gradient(&self, gradients: &Gradients) -> Result<Option<Tensor>> {
        if !self.trainable {
            return Ok(None);
        }
        let leaf = self.leaf();
        // What is there is asked for first: `get` would add it up.
        let gradient = match gradients.partial(leaf) {
            Ok(gradient) => gradient,
            Err(error) => match gradients.get(leaf) {
                Ok(None) => return Ok(None),
                Ok(Some(gradient)) => gradient,
                Err(_) => return Err(error.into()),
            },
        };
        Ok(Some(gradient))
    }

    /// A gradient, or a sum of them, where the value lies: here partial sums are added up.
    pub fn place_gradient(&self, gradient: &Tensor) -> Result<Tensor> {
        let stored = self.value.sharding().whole();
        Ok(no_grad(|| match *gradient.sharding() == stored {
            true => Ok(gradient.clone()),
            false => gradient.reshard(stored),
        })?)
    }

    /// Other values of the same shape, rounded to its dtype and laid out like it.
    pub fn set(&mut self, values: &Tensor) -> Result<()> {
        self.set_own(values.clone())
    }

    /// [`set`](Self::set) of values that the caller does not need.
    pub(crate) fn set_own(&mut self, values: Tensor) -> Result<()> {
        self.check_shape(&values)?;
        self.value = self.value.taking(values)?;
        self.renew()
    }

    /// The dtype of the weight that is computed with, where it is kept and nothing but the rounded
    /// value.
    fn copy_dtype(&self) -> Option<DType> {
        let rounded = self.compute == *self.value.sharding();
        (self.working.as_ref().filter(|_| rounded)).map(Tensor::dtype)
    }

    /// [`set`](Self::set) with the rounded copy that [`copy_dtype`](Self::copy_dtype) asks for.
    pub(crate) fn set_with(&mut self, values: Tensor, copy: Tensor) -> Result<()> {
        self.check_shape(&values)?;
        match &self.working {
            Some(working) if self.copy_dtype() == Some(copy.dtype()) => {
                self.working = Some(working.taking(copy)?);
                self.value = self.value.taking(values)?;
                Ok(())
            }
            _ => self.set_own(values),
        }
    }

    /// Takes the value out of it, and if wanted the weight that [is nothing but the rounded
    /// value](Self::copy_dtype): so nobody else holds them, and what becomes of them can lie in their
    /// place. [`set_with`](Self::set_with) or [`set`](Self::set) has to follow.
    pub(crate) fn take(&mut self, with_copy: bool) -> (Tensor, Option<Tensor>) {
        let copied = with_copy && self.copy_dtype().is_some();
        let taken = |t: &mut Tensor| t.take_values().unwrap_or_else(|| t.detach());
        let copy = self.working.as_mut().filter(|_| copied).map(taken);
        (taken(&mut self.value), copy)
    }

    fn check_shape(&self, values: &Tensor) -> Result<()> {
        if values.shape() != self.value.shape() {
            return Err(Error::parameter(
                &self.name,
                format!(
                    "it is {} and cannot take {}",
                    self.value.type_string(),
                    values.type_string()
                ),
            ));
        }
        Ok(())
    }

    /// Other values of perhaps another shape, which lie as they are to be stored: the parameter
    /// begins anew with them.
    pub fn replace(&mut self, values: Tensor) -> Result<()> {
        self.value = values.detach();
        self.working = None;
        self.renew()
    }

    /// Whether training is to change it from now on.
    pub fn train(&mut self, trainable: bool) -> Result<()> {
        self.trainable = trainable;
        self.working = None;
        self.renew()
    }

    /// Makes the tape's leaf and the weight to compute with fit the value again.
    fn renew(&mut self) -> Result<()> {
        let differs = self.differs();
        let kept = differs && self.zero < Zero::Three;
        // Gradients in a dtype of their own, or that stay where they arise until the step's end,
        // are those of the weight that is kept.
        let cut_early = match self.zero {
            Zero::Off | Zero::One => false,
            Zero::Two => self.policy.reduce == self.value.dtype(),
            Zero::Three => true,
        };
        let tracked = self.trainable && (!differs || cut_early);
        if self.value.requires_grad() != tracked {
            self.value = match tracked {
                true => self.value.detach().require_grad()?,
                false => self.value.detach(),
            };
        }
        if !kept {
            self.working = None;
            return Ok(());
        }
        let fresh = no_grad(|| self.to_compute())?.detach();
        self.working = Some(match &self.working {
            // Keeps what was hooked to it.
            Some(before) => before.with_values(&fresh)?,
            None if self.trainable && !tracked => {
                let leaf = fresh.require_grad()?;
                if self.zero == Zero::Two {
                    let stored = self.value.sharding().clone();
                    leaf.on_gradient(move |g| g.reshard(stored.clone()).map(Some))?;
                }
                leaf
            }
            None => fresh,
        });
        Ok(())
    }
}

//! The rules by which a step changes a parameter.

use super::{Adafactor, Adam8, AdamW, Lion, Muon, Sgd, adam8::Tables};
use crate::{Error, Result};
use anymesh_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

/// Which rule, with its settings. As text it is a table with a `kind`; settings that it does not
/// name have their defaults, and a setting that the rule does not have is an error.
///
/// A rule is a pure function of the step's number, the value, the gradient and the state
/// ([`update`](Self::update)); on a mesh it gives the same numbers.
///
/// ```
/// # use anymesh_train::optim::{AdamW, Rule};
/// let rule: Rule = toml::from_str("kind = 'adamw'\nlr = 3e-4\nbetas = [0.9, 0.95]\ndecay = 0.1")?;
/// assert_eq!(rule, Rule::AdamW(AdamW { lr: 3e-4, betas: [0.9, 0.95], decay: 0.1, ..AdamW::default() }));
/// assert!(toml::from_str::<Rule>("kind = 'adamw'\nmomentum = 0.9").is_err());
/// # Ok::<(), toml::de::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Rule {
    /// Gradient descent, with or without momentum.
    Sgd(Sgd),
    /// Adam with decoupled decay; also Adam itself.
    AdamW(AdamW),
    /// The sign of a momentum.
    Lion(Lion),
    /// Second moments in factors: rows and columns.
    Adafactor(Adafactor),
    /// Orthogonalised momentum, for matrices.
    Muon(Muon),
    /// AdamW with moments of 8 bits.
    Adam8(Adam8),
}

/// What a step has in common for all parameters of a rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Counts the steps that changed parameters, from 1.
    pub number: u64,
    /// The learning rate of this step.
    pub rate: f64,
    /// What gradients are multiplied with before anything else: clipping and loss scaling.
    pub scale: f64,
}

impl Step {
    /// A step with gradients as they are.
    pub fn new(number: u64, rate: f64) -> Self {
        Self {
            number,
            rate,
            scale: 1.0,
        }
    }

    /// `1 - beta^t`, by which averages that began at zero are too small.
    pub(super) fn unbias(&self, beta: f64) -> f64 {
        1.0 - beta.powf(self.number as f64)
    }
}

/// A parameter's new value, in the dtype that steps compute in, and its new state.
pub type Updated = (Tensor, Vec<Tensor>);

/// For each rule: its name in the names of states, and what is delegated to it.
macro_rules! each {
    ($self:expr, $rule:ident => $do:expr) => {
        match $self {
            Rule::Sgd($rule) => $do,
            Rule::AdamW($rule) => $do,
            Rule::Lion($rule) => $do,
            Rule::Adafactor($rule) => $do,
            Rule::Muon($rule) => $do,
            Rule::Adam8($rule) => $do,
        }
    };
}

impl Rule {
    /// The learning rate that schedules scale.
    pub fn lr(&self) -> f64 {
        each!(self, rule => rule.lr)
    }

    /// The same rule with another learning rate.
    pub fn with_lr(mut self, lr: f64) -> Self {
        each!(&mut self, rule => rule.lr = lr);
        self
    }

    /// The weight decay.
    pub fn decay(&self) -> f64 {
        each!(self, rule => rule.decay)
    }

    /// The same rule with another weight decay: 0 for norms and biases.
    pub fn with_decay(mut self, decay: f64) -> Self {
        each!(&mut self, rule => rule.decay = decay);
        self
    }

    /// That the settings make sense; `key` is where they come from, such as `optimizer.rule`.
    pub fn check(&self, key: &str) -> Result<()> {
        at_least(key, "lr", self.lr(), 0.0)?;
        at_least(key, "decay", self.decay(), 0.0)?;
        each!(self, rule => rule.check(key))
    }

    /// The state of a parameter before the first step, in a fixed order: zeros by the name of what
    /// they are, such as `adam.m`. It lies as the value does. Errors where the rule is not for such
    /// a parameter.
    pub fn state(&self, value: &Tensor) -> Result<Vec<(&'static str, Tensor)>> {
        if !value.dtype().is_float() {
            let detail = format!("{} is no float and cannot be trained", value.type_string());
            return Err(Error::config("parameter", detail));
        }
        each!(self, rule => rule.state(value))
    }

    /// One step of one parameter. The gradient lies as the value does. The new value is in
    /// [`wide`] precision, so that it can be rounded as the caller likes.
    ///
    /// ```
    /// # use anymesh_core::Tensor;
    /// # use anymesh_train::optim::{Rule, Sgd, Step};
    /// # let device = anymesh_backend_cpu::device();
    /// let rule = Rule::Sgd(Sgd { lr: 0.1, ..Sgd::default() });
    /// let value = Tensor::new(&[1f32, -0.5], &device)?;
    /// let gradient = Tensor::new(&[0.5f32, -1.0], &device)?;
    /// let (value, state) = rule.update(&Step::new(1, rule.lr()), &value, &gradient, &[])?;
    /// assert_eq!(value.to_vec::<f32>()?, [0.95, -0.4]);
    /// assert!(state.is_empty(), "no momentum, no state");
    /// # Ok::<(), anymesh_train::Error>(())
    /// ```
    pub fn update(
        &self,
        step: &Step,
        value: &Tensor,
        gradient: &Tensor,
        state: &[Tensor],
    ) -> Result<Updated> {
        self.update_with(&mut Tables::default(), step, value, gradient, state)
    }

    /// The rule, if it changes many parameters with few launches.
    pub(super) fn of_many(&self) -> Option<&AdamW> {
        match self {
            Self::AdamW(rule) if !rule.amsgrad => Some(rule),
            _ => None,
        }
    }

    /// [`update`](Self::update) with tables that are kept from step to step.
    pub(super) fn update_with(
        &self,
        tables: &mut Tables,
        step: &Step,
        value: &Tensor,
        gradient: &Tensor,
        state: &[Tensor],
    ) -> Result<Updated> {
        match self {
            Self::Sgd(rule) => rule.update(step, value, gradient, state),
            Self::AdamW(rule) => rule.update(step, value, gradient, state),
            Self::Lion(rule) => rule.update(step, value, gradient, state),
            Self::Adafactor(rule) => rule.update(step, value, gradient, state),
            Self::Muon(rule) => rule.update(step, value, gradient, state),
            Self::Adam8(rule) => rule.update(tables, step, value, gradient, state),
        }
    }
}

/// The dtype that steps compute in and keep state in: f64 for f64, else f32.
pub fn wide(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// Zeros that lie as a value does, in the dtype of states.
pub(super) fn zeros(value: &Tensor) -> Result<Tensor> {
    Ok(Tensor::zeros(
        value.shape(),
        wide(value.dtype()),
        (value.mesh(), value.sharding().whole()),
    )?)
}

/// The tensors of a state, of which there must be as many.
pub(super) fn states<'a, const N: usize>(state: &'a [Tensor]) -> Result<[&'a Tensor; N]> {
    let all: Vec<&'a Tensor> = state.iter().collect();
    let found = all.len();
    all.try_into().map_err(|_| {
        let detail = format!("this rule has {N} tensors for a parameter, not {found}");
        Error::config("state", detail)
    })
}

/// What was left partial, added up.
pub(super) fn settled(t: Tensor) -> Result<Tensor> {
    match t.sharding().is_partial() {
        true => Ok(t.reshard(t.sharding().whole())?),
        false => Ok(t),
    }
}

/// That a setting is a number from `least`.
pub(super) fn at_least(key: &str, name: &str, value: f64, least: f64) -> Result<()> {
    match value.is_finite() && value >= least {
        true => Ok(()),
        false => Err(Error::config(
            format!("{key}.{name}"),
            format!("{value} is not a number from {least}"),
        )),
    }
}

/// That a setting is a weight of averages: from 0 to below 1.
pub(super) fn fraction(key: &str, name: &str, value: f64) -> Result<()> {
    match (0.0..1.0).contains(&value) {
        true => Ok(()),
        false => Err(Error::config(
            format!("{key}.{name}"),
            format!("{value} is not from 0 to below 1"),
        )),
    }
}

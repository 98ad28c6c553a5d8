//! Averages of parameters over a run.

use super::rule::wide;
use crate::{Error, Module, Result};
use anymesh_core::{Tensor, grad::no_grad, ops::Expr};
use std::collections::BTreeMap;

/// Moving averages of the trainable parameters, which often serve better than their last values:
/// `average = decay average + (1 - decay) value`, in f32 (f64 for f64) and cut as the values are.
///
/// ```
/// # use anymesh_core::Tensor;
/// # use anymesh_train::{Build, Init, Module, Policy, nn::Linear, optim::Ema};
/// # let device = anymesh_backend_cpu::device();
/// let b = Build::new(&device, Policy::f32(), 1);
/// let mut layer = Linear::new(&b, [1, 1], "[_, _]", Init::Ones)?;
/// let mut ema = Ema::new(&layer, 0.9)?;
/// layer.weight.set(&Tensor::new(&[[2f32]], &device)?)?;
/// ema.update(&layer)?;
/// layer.set_values(&ema.values)?;
/// assert_eq!(layer.weight.value().to_vec::<f32>()?, [1.1]);
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Ema {
    /// The averages, by the names of the parameters.
    pub values: BTreeMap<String, Tensor>,
    /// How much of an average stays.
    pub decay: f64,
    /// Whether update `t` uses at most `(1 + t) / (10 + t)`, so that the first values are soon
    /// forgotten.
    pub warmup: bool,
    /// How often it was updated.
    pub updates: u64,
}

impl Ema {
    /// Averages that begin at the parameters' values, without warm-up.
    pub fn new(model: &(impl Module + ?Sized), decay: f64) -> Result<Self> {
        if !(0.0..1.0).contains(&decay) {
            let detail = format!("{decay} is not from 0 to below 1");
            return Err(Error::config("ema.decay", detail));
        }
        let mut values = BTreeMap::new();
        let mut outcome = Ok(());
        model.visit("", &mut |name, p| {
            if p.is_trainable() && outcome.is_ok() {
                match no_grad(|| p.value().detach().cast(wide(p.value().dtype()))) {
                    Ok(value) => drop(values.insert(name.to_string(), value)),
                    Err(error) => outcome = Err(error),
                }
            }
        });
        outcome?;
        Ok(Self {
            values,
            decay,
            warmup: false,
            updates: 0,
        })
    }

    /// With a warm-up.
    pub fn with_warmup(mut self) -> Self {
        self.warmup = true;
        self
    }

    /// How much of the averages the next update leaves.
    pub fn next_decay(&self) -> f64 {
        let t = (self.updates + 1) as f64;
        match self.warmup {
            true => self.decay.min((1.0 + t) / (10.0 + t)),
            false => self.decay,
        }
    }

    /// Takes in the parameters' values.
    #[track_caller]
    pub fn update(&mut self, model: &(impl Module + ?Sized)) -> Result<()> {
        let decay = self.next_decay();
        let mut outcome = Ok(());
        model.visit("", &mut |name, p| {
            if let (Some(average), Ok(())) = (self.values.get_mut(name), &outcome) {
                match mixed(average, p.value(), decay) {
                    Ok(next) => *average = next,
                    Err(error) => outcome = Err(error),
                }
            }
        });
        self.updates += 1;
        outcome
    }
}

#[track_caller]
fn mixed(average: &Tensor, value: &Tensor, decay: f64) -> Result<Tensor> {
    Ok(no_grad(|| {
        Expr::new("ema", &[average, value])
            .params(&[decay, 1.0 - decay])
            .map(average.dtype(), |a| a.x[0] * a.p[0] + a.x[1] * a.p[1])
    })?)
}

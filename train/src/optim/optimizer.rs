//! An optimizer: rules for the parameters of a model, and their state by name.

use super::{
    AdamW, Clip, Groups, LossScaler, Muon, Rounding, Rule, Step, Sums,
    adam8::Tables,
    norm_of,
    rule::{Updated, wide},
};
use crate::{Error, Module, Param, Result};
use anymesh_core::{DType, Tensor, grad::no_grad};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap, VecDeque};

/// Changes the parameters of a model, by the rules of [`Groups`].
///
/// Its state is tensors by name, such as `adam.m.model.norm.weight`, which are there from the
/// beginning: [`state`](Self::state) is both what a checkpoint keeps and what a load asks for, on any
/// mesh.
///
/// ```
/// # use anymesh_core::{Mesh, Tensor};
/// # use anymesh_train::{Build, Init, Module, Policy, nn::Linear};
/// use anymesh_train::optim::{Accumulator, AdamW, Clip, Groups, Optimizer, Rule};
/// # let device = anymesh_backend_cpu::device();
/// let mesh = Mesh::new("dp=2", &device)?;
/// let b = Build::new(&mesh, Policy::f32(), 1);
/// let mut layer = Linear::new(&b, [4, 1], "[_, _]", Init::Normal(0.1))?;
/// let adamw = Rule::AdamW(AdamW { lr: 0.05, decay: 0.0, ..AdamW::default() });
/// let mut optimizer = Optimizer::new(&layer, &Groups::all(adamw))?;
/// optimizer.clip = Some(Clip::to(1.0));
/// let (x, mut sums) = (Tensor::uniform([8, 4], -1.0, 1.0, anymesh_core::DType::F32, (&mesh, "[@dp, _]"), anymesh_core::ops::Rng::new(3))?, Accumulator::default());
/// let mut losses = vec![];
/// for _ in 0..60 {
///     let loss = layer.forward(&x)?.sub(1.0)?.square()?.mean_all()?;
///     sums.add(&layer, &loss.backward()?)?;
///     let summed = sums.finish(&layer)?;
///     let outcome = optimizer.step(&mut layer, summed, 1.0)?;
///     assert!(!outcome.skipped && outcome.norm.is_some());
///     losses.push(loss.item()?.to_f64());
/// }
/// assert!(losses[59] < 0.7 * losses[0]);
/// assert!(optimizer.state().keys().eq(["adam.m.weight", "adam.v.weight"]));
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Optimizer {
    /// Limits the norm of gradients; without it (and without a scaler) the norm is not measured, and
    /// gradients that are not finite go into the parameters.
    pub clip: Option<Clip>,
    /// What the loss was multiplied with, for f16.
    pub scaler: Option<LossScaler>,
    /// How bf16 parameters are rounded.
    pub rounding: Rounding,
    /// The rule of each group, with what the group changes of it.
    rules: Vec<Rule>,
    parameters: HashMap<String, Entry>,
    steps: u64,
    tables: Tables,
}

/// What is known of a parameter.
#[derive(Clone, Debug)]
struct Entry {
    group: usize,
    /// Its state with the names of that, in the order of its rule.
    state: Vec<(String, Tensor)>,
}

/// What a step came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// The norm of all gradients before clipping, and without the scale of the loss. Not a number,
    /// or infinite, where a gradient was.
    pub norm: Option<f64>,
    /// Whether nothing was changed because the norm was not finite.
    pub skipped: bool,
    /// What gradients were multiplied with: clipping, and the scale of the loss.
    pub scale: f64,
}

/// What goes on in a run beside tensors: a checkpoint keeps it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps that changed parameters.
    pub steps: u64,
    /// The loss scaler.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaler: Option<LossScaler>,
}

/// A parameter that waits for those that are changed together with it.
struct Waiting {
    name: String,
    /// Its place among those that wait.
    place: usize,
    group: usize,
    /// The value, its gradient and its state, in the order of its rule, and perhaps the copy of the
    /// value that is computed with. They are taken from where they belong.
    tensors: Vec<Tensor>,
    /// The dtype of the copy.
    copy: Option<DType>,
    /// Whether the tensors are the new value, state and copy by now.
    changed: bool,
}

impl Waiting {
    /// What parameters must have in common to be changed together.
    fn kind(&self) -> (DType, Option<DType>) {
        (wide(self.tensors[0].dtype()), self.copy)
    }

    /// The value, the copy and the state, old or new.
    fn into_parts(mut self) -> (Tensor, Option<Tensor>, Vec<Tensor>) {
        let copy = self.copy.and_then(|_| self.tensors.pop());
        let value = self.tensors.remove(0);
        if !self.changed {
            self.tensors.remove(0); // The gradient.
        }
        (value, copy, self.tensors)
    }
}

/// Bytes of values and state that are changed at a time: as much is needed beside them where they are
/// not changed in their place.
const AT_ONCE: usize = 512 << 20;

impl Optimizer {
    /// For the parameters that are trainable now. Gradients that are not finite are noticed, and
    /// nothing is clipped: see [`clip`](Self::clip).
    pub fn new(model: &(impl Module + ?Sized), groups: &Groups) -> Result<Self> {
        let assigned = groups.assign(model)?;
        let rules: Vec<Rule> = groups.groups.iter().map(|g| g.own_rule()).collect();
        let mut parameters = HashMap::new();
        let mut outcome = Ok(());
        model.visit("", &mut |name, p| {
            let (Some(&group), Ok(())) = (assigned.get(name), &outcome) else {
                return;
            };
            match rules[group].state(p.value()) {
                Ok(tensors) => {
                    let state = (tensors.into_iter())
                        .map(|(kind, tensor)| (format!("{kind}.{name}"), tensor))
                        .collect();
                    parameters.insert(name.to_string(), Entry { group, state });
                }
                Err(error) => outcome = Err(of_parameter(name, error)),
            }
        });
        outcome?;
        Ok(Self {
            clip: Some(Clip::default()),
            scaler: None,
            rounding: Rounding::default(),
            rules,
            parameters,
            steps: 0,
            tables: Tables::default(),
        })
    }

    /// What a loss is multiplied with before its backward pass: 1 without a scaler.
    pub fn loss_scale(&self) -> f64 {
        self.scaler.as_ref().map_or(1.0, |s| s.scale)
    }

    /// The steps that changed parameters.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The rules of the groups.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// The group that a parameter is in.
    pub fn group_of(&self, name: &str) -> Option<usize> {
        self.parameters.get(name).map(|entry| entry.group)
    }

    /// One step, with every learning rate times `rate_factor` (that of a
    /// [`Schedule`](super::Schedule)). Where the norm of the gradients is not finite nothing is
    /// changed, and the outcome says so.
    #[track_caller]
    pub fn step(
        &mut self,
        model: &mut dyn Module,
        sums: Sums,
        rate_factor: f64,
    ) -> Result<Outcome> {
        self.check(model, &sums)?;
        let unscale = 1.0 / self.loss_scale();
        let norm = match (&self.clip, &self.scaler) {
            (None, None) => None,
            (clip, _) => {
                let kind = clip.as_ref().map(|c| c.norm).unwrap_or_default();
                Some(norm_of(sums.gradients.values(), kind)? * unscale)
            }
        };
        let skipped = norm.is_some_and(|norm| !norm.is_finite());
        if let Some(scaler) = &mut self.scaler {
            scaler.update(skipped);
        }
        let clipped = match (&self.clip, norm) {
            (Some(clip), Some(norm)) => clip.factor(norm),
            _ => 1.0,
        };
        let outcome = Outcome {
            norm,
            skipped,
            scale: clipped * unscale,
        };
        if !skipped {
            self.steps += 1;
            no_grad(|| self.apply(model, sums, rate_factor, outcome.scale))?;
        }
        Ok(outcome)
    }

    /// A step that is left out because its loss was not finite.
    pub fn skip(&mut self) {
        if let Some(scaler) = &mut self.scaler {
            scaler.update(true);
        }
    }

    /// That parameters, groups and gradients belong together.
    fn check(&self, model: &dyn Module, sums: &Sums) -> Result<()> {
        let (mut wrong, mut known) = (None, 0);
        model.visit("", &mut |name, p| {
            if !p.is_trainable() || wrong.is_some() {
                return;
            }
            let detail = match (self.parameters.get(name), sums.gradients.get(name)) {
                (None, _) => {
                    "it was not trainable when the optimizer was made: make another".to_string()
                }
                (Some(_), None) if sums.missing.contains(name) => return,
                (Some(_), None) => "there is no gradient for it".into(),
                (Some(_), Some(g)) if g.shape() != p.value().shape() => format!(
                    "it is {} and its gradient {}",
                    p.value().type_string(),
                    g.type_string()
                ),
                _ => {
                    known += 1;
                    return;
                }
            };
            wrong = Some(Error::parameter(name, detail));
        });
        match wrong {
            Some(error) => Err(error),
            None if known < sums.gradients.len() => Err(Error::config(
                "gradients",
                format!(
                    "{} of them are of no trainable parameter of the model",
                    sums.gradients.len() - known
                ),
            )),
            None => Ok(()),
        }
    }

    fn apply(
        &mut self,
        model: &mut dyn Module,
        mut sums: Sums,
        rate_factor: f64,
        scale: f64,
    ) -> Result<()> {
        let step = |rule: &Rule, number: u64| Step {
            number,
            rate: rule.lr() * rate_factor,
            scale,
        };
        let mut waiting: Vec<Waiting> = vec![];
        let mut outcome = model.try_each(&mut |name, p| {
            let Some(entry) = self.parameters.get_mut(name).filter(|_| p.is_trainable()) else {
                return Ok(());
            };
            // Taken, so that it lives no longer than it is needed.
            let Some(gradient) = sums.gradients.remove(name) else {
                return Ok(());
            };
            let (rule, group) = (&self.rules[entry.group], entry.group);
            // Together where that saves launches; else each lets go of its old value at once.
            let together = p.value().device().runs_kernels();
            if matches!(rule, Rule::Muon(_)) || together && rule.of_many().is_some() {
                let mut tensors = match rule {
                    Rule::Muon(_) => vec![gradient.cast(p.policy().reduce)?],
                    _ => vec![gradient],
                };
                let states = entry.state.iter_mut().map(|(_, state)| state);
                tensors.extend(states.map(|s| s.take_values().unwrap_or_else(|| s.clone())));
                // A value that is not the wide one is rounded by another rule than its copy.
                let dtype = p.value().dtype();
                let (value, copy) = p.take(dtype == wide(dtype));
                tensors.insert(0, value);
                let of_copy = copy.as_ref().map(Tensor::dtype);
                tensors.extend(copy);
                waiting.push(Waiting {
                    name: name.into(),
                    place: waiting.len(),
                    group,
                    tensors,
                    copy: of_copy,
                    changed: false,
                });
                return Ok(());
            }
            let gradient = gradient.cast(p.policy().reduce)?;
            let value = p.value().detach();
            let state: Vec<Tensor> = entry.state.iter().map(|(_, t)| t.clone()).collect();
            let step = step(rule, self.steps);
            let updated = rule
                .update_with(&mut self.tables, &step, &value, &gradient, &state)
                .map_err(|error| of_parameter(name, error))?;
            self.keep(name, p, updated, None)
        });
        waiting.sort_by_key(|w| w.group);
        for alike in waiting.chunk_by_mut(|a, b| a.group == b.group) {
            let rule = self.rules[alike[0].group].clone();
            let step = step(&rule, self.steps);
            outcome = outcome.and_then(|()| match (&rule, rule.of_many()) {
                (Rule::Muon(muon), _) => change_by_muon(muon, &step, alike),
                (_, Some(adamw)) => change_many(adamw, &step, alike),
                _ => Ok(()),
            });
        }
        // Back to where they belong, whatever came of it.
        waiting.sort_by_key(|w| w.place);
        let mut waiting: VecDeque<Waiting> = waiting.into();
        model.visit_mut("", &mut |name, p| {
            // The next one, if models are visited in one order.
            let place = waiting.iter().position(|w| w.name == name);
            if let Some(w) = place.and_then(|place| waiting.remove(place)) {
                let (value, copy, state) = w.into_parts();
                let kept = self.keep(name, p, (value, state), copy);
                let so_far = std::mem::replace(&mut outcome, Ok(()));
                outcome = so_far.and(kept);
            }
        });
        outcome
    }

    /// The state of a parameter, in the order of its rule.
    pub(crate) fn state_of(&self, name: &str) -> Vec<Tensor> {
        let state = self.parameters.get(name).map(|entry| &entry.state);
        state
            .into_iter()
            .flatten()
            .map(|(_, t)| t.clone())
            .collect()
    }

    /// Gives a parameter its new value and remembers its state.
    fn keep(
        &mut self,
        name: &str,
        p: &mut Param,
        (value, state): Updated,
        copy: Option<Tensor>,
    ) -> Result<()> {
        let dtype = p.value().dtype();
        let value = match value.dtype() == dtype {
            true => value,
            false => self.rounding.round(&value, dtype, name, self.steps)?,
        };
        match copy {
            Some(copy) => p.set_with(value, copy)?,
            None => p.set_own(value)?,
        }
        let own = self.parameters.get_mut(name).map(|entry| &mut entry.state);
        for ((_, own), new) in own.into_iter().flatten().zip(state) {
            *own = new;
        }
        Ok(())
    }

    /// Everything that rules remember, by names such as `adam.m.model.norm.weight`. It is there
    /// before the first step, so it is also what a load has to ask for.
    pub fn state(&self) -> BTreeMap<String, Tensor> {
        let all = self.parameters.values().flat_map(|entry| &entry.state);
        all.cloned().collect()
    }

    /// Takes back what [`state`](Self::state) was, perhaps on another mesh. Names, shapes and dtypes
    /// must be those that the optimizer has.
    pub fn load_state(&mut self, state: BTreeMap<String, Tensor>) -> Result<()> {
        let known = self.state();
        if let Some(name) = state.keys().find(|name| !known.contains_key(*name)) {
            let detail = "the optimizer has no such state: it was saved with other rules or groups";
            return Err(Error::parameter(name, detail));
        }
        let mut loaded = BTreeMap::new();
        for (name, own) in &known {
            let Some(new) = state.get(name) else {
                let detail = "there is no such state: it was saved with other rules or groups";
                return Err(Error::parameter(name, detail));
            };
            if new.shape() != own.shape() || new.dtype() != own.dtype() {
                let detail = format!(
                    "the state is {} and cannot take {}",
                    own.type_string(),
                    new.type_string()
                );
                return Err(Error::parameter(name, detail));
            }
            let new = match new.mesh() == own.mesh() {
                true => own.with_values(new)?,
                false => new.to_mesh(own.mesh(), own.sharding().clone())?,
            };
            loaded.insert(name.clone(), new);
        }
        let all = self.parameters.values_mut().flat_map(|p| &mut p.state);
        for (name, own) in all {
            if let Some(new) = loaded.remove(name) {
                *own = new;
            }
        }
        Ok(())
    }

    /// What a checkpoint keeps beside tensors.
    pub fn progress(&self) -> Progress {
        Progress {
            steps: self.steps,
            scaler: self.scaler.clone(),
        }
    }

    /// Goes on where a run was. A scaler that it had is kept if this optimizer has one.
    pub fn set_progress(&mut self, progress: Progress) {
        self.steps = progress.steps;
        if let (Some(own), Some(saved)) = (&mut self.scaler, progress.scaler) {
            *own = saved;
        }
    }
}

/// Changes parameters by a rule that takes many of them: so many at a time that there is room for
/// others beside them.
fn change_many(rule: &AdamW, step: &Step, waiting: &mut [Waiting]) -> Result<()> {
    waiting.sort_by_key(Waiting::kind);
    for alike in waiting.chunk_by_mut(|a, b| a.kind() == b.kind()) {
        let (dtype, copy) = alike[0].kind();
        let mut rest = alike;
        while !rest.is_empty() {
            let (mut count, mut bytes) = (0, 0);
            while count < rest.len() && bytes < AT_ONCE {
                let all = rest[count].tensors.iter();
                bytes += all.map(|t| t.numel() * t.dtype().size()).sum::<usize>();
                count += 1;
            }
            let (now, later) = rest.split_at_mut(count);
            let mut each: Vec<Vec<Tensor>> =
                (now.iter_mut().map(|w| std::mem::take(&mut w.tensors))).collect();
            let made = rule.update_all(step, &mut each, dtype, copy);
            let changed = made.is_ok();
            let (all, outcome) = match made {
                Ok(made) => (made, Ok(())),
                Err(error) => (each, Err(error)),
            };
            for (w, tensors) in now.iter_mut().zip(all) {
                (w.tensors, w.changed) = (tensors, changed);
            }
            outcome?;
            rest = later;
        }
    }
    Ok(())
}

/// Changes the parameters of a group of Muon, in stacks of those that are alike.
fn change_by_muon(muon: &Muon, step: &Step, waiting: &mut [Waiting]) -> Result<()> {
    let stacks = Muon::stacks(&waiting.iter().map(|w| &w.tensors[0]).collect::<Vec<_>>());
    for stack in stacks {
        let mut items: Vec<[&Tensor; 3]> = Vec::with_capacity(stack.len());
        for &i in &stack {
            let [value, gradient, momentum, ..] = &waiting[i].tensors[..] else {
                let detail = "its momentum is lost";
                return Err(Error::parameter(&waiting[i].name, detail));
            };
            items.push([value, gradient, momentum]);
        }
        let updated = muon
            .update_stack(step, &items)
            .map_err(|error| of_parameter(&waiting[stack[0]].name, error))?;
        for (i, (value, state)) in stack.into_iter().zip(updated) {
            let w = &mut waiting[i];
            (w.copy, w.changed) = (None, true);
            w.tensors = std::iter::once(value).chain(state).collect();
        }
    }
    Ok(())
}

/// An error about a parameter, with its name.
fn of_parameter(name: &str, error: Error) -> Error {
    match error {
        Error::Config { detail, .. } => Error::parameter(name, detail),
        error => error,
    }
}

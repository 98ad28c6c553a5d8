//! A program over the tensors of a source: what each destination is made of.

use super::expr::{Expr, resolve_axis};
use super::names::split_state;
use super::pieces::{Piece, pieces};
use super::program::{Op, Program, Step};
use crate::{Error, Result, TensorInfo};
use anymesh_core::Region;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// What each destination tensor is made of.
#[derive(Clone, Debug)]
pub struct Recipe {
    exprs: BTreeMap<String, Arc<Expr>>,
    tensors: BTreeMap<String, TensorInfo>,
    added: BTreeSet<String>,
}

impl Recipe {
    /// Carries out a program over the types of the source tensors.
    ///
    /// Tensors that no statement names are kept, unless `only_mapped`. With a `destination`,
    /// exactly its names are made: one that nothing makes is an error, and so is a source tensor
    /// that is used by no statement and no destination. Without one, everything that is written and
    /// not read again is a destination.
    ///
    /// What an optimizer keeps beside a weight (see [`STATES`](super::STATES)) goes where the
    /// weight goes, without the casts: master weights and moments keep their type. The accumulated
    /// powers of beta are the same number for all, so those of the first input are taken.
    pub fn new(
        program: &Program,
        sources: &BTreeMap<String, TensorInfo>,
        destination: Option<&BTreeSet<String>>,
        only_mapped: bool,
    ) -> Result<Self> {
        let named: BTreeSet<&str> = program
            .steps
            .iter()
            .flat_map(|s| s.inputs.iter().chain(&s.outputs))
            .map(String::as_str)
            .collect();
        let mut passes: BTreeMap<&'static str, BTreeMap<&str, &TensorInfo>> =
            BTreeMap::from([("", BTreeMap::new())]);
        let mut with_state = BTreeSet::new();
        for (name, info) in sources {
            let (base, state) = split_state(name)
                .filter(|_| !named.contains(name.as_str()))
                .unwrap_or((name, ""));
            passes.entry(state).or_default().insert(base, info);
            if !state.is_empty() {
                with_state.insert(base);
            }
        }
        let mut out = Self {
            exprs: BTreeMap::new(),
            tensors: BTreeMap::new(),
            added: BTreeSet::new(),
        };
        for (state, sources) in passes {
            let mut pass = Pass::new(state, &sources);
            for step in &program.steps {
                pass.step(step, &with_state)?;
            }
            pass.finish(destination, only_mapped, &mut out)?;
        }
        out.tensors = out
            .exprs
            .iter()
            .map(|(name, expr)| (name.clone(), expr.info.clone()))
            .collect();
        if let Some(name) = destination.and_then(|d| {
            d.iter()
                .find(|name| !out.tensors.contains_key(*name) && !out.added.contains(*name))
        }) {
            return Err(Error::NotMade { name: name.clone() });
        }
        Ok(out)
    }

    /// The destination tensors.
    pub fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    /// What a destination is made of.
    pub fn expr(&self, name: &str) -> Option<&Expr> {
        self.exprs.get(name).map(|expr| &**expr)
    }

    /// The names that `_ -> name` leaves at their initial value.
    pub fn added(&self) -> &BTreeSet<String> {
        &self.added
    }

    /// The source regions that a region of a destination is made of.
    pub fn pieces(&self, name: &str, region: &Region) -> Result<Vec<Piece>> {
        let expr = self.exprs.get(name).ok_or_else(|| Error::Missing {
            name: name.into(),
            near: None,
        })?;
        let shape = &expr.info.shape;
        let inside = |d: usize| {
            region.start[d]
                .checked_add(region.shape[d])
                .is_some_and(|end| end <= shape[d])
        };
        if region.start.len() != shape.len()
            || region.shape.len() != shape.len()
            || !(0..shape.len()).all(inside)
        {
            return Err(Error::OutOfBounds {
                tensor: name.into(),
                whole: shape.clone(),
                start: region.start.to_vec(),
                shape: region.shape.to_vec(),
            });
        }
        Ok(pieces(expr, region))
    }
}

/// What a name stands for while the statements run.
#[derive(Clone)]
enum Slot<'p> {
    /// A tensor of the source that none has read yet.
    Source(Arc<Expr>),
    /// A tensor of the source that a statement has read.
    Used(Arc<Expr>),
    /// What a statement wrote, and whether another read it.
    Written {
        expr: Arc<Expr>,
        by: &'p Step,
        read: bool,
    },
    /// Only a name, by `_ -> name`.
    Added(&'p Step),
    /// Gone, by `name -> _`.
    Removed(&'p Step),
}

/// The program over the weights, or over one kind of optimizer state.
struct Pass<'p> {
    state: &'static str,
    slots: HashMap<String, Slot<'p>>,
    /// Outputs of statements none of whose inputs are there in this pass.
    absent: BTreeSet<&'p str>,
}

impl<'p> Pass<'p> {
    fn new(state: &'static str, sources: &BTreeMap<&str, &TensorInfo>) -> Self {
        let slots = sources
            .iter()
            .map(|(name, info)| {
                (
                    name.to_string(),
                    Slot::Source(Expr::source(&format!("{name}{state}"), info)),
                )
            })
            .collect();
        Self {
            state,
            slots,
            absent: BTreeSet::new(),
        }
    }

    fn step(&mut self, step: &'p Step, with_state: &BTreeSet<&str>) -> Result<()> {
        let error = |detail: String| Err(step.statement.error(detail));
        let mut inputs = Vec::with_capacity(step.inputs.len());
        let mut missing = None;
        for name in &step.inputs {
            match self.slots.get(name) {
                Some(Slot::Source(expr) | Slot::Used(expr) | Slot::Written { expr, .. }) => {
                    inputs.push(expr.clone())
                }
                Some(Slot::Added(by)) => {
                    return error(format!(
                        "'{name}' was only added, in line {}, and has no values to read",
                        by.statement.line
                    ));
                }
                Some(Slot::Removed(by)) => {
                    return error(format!(
                        "'{name}' was removed in line {}",
                        by.statement.line
                    ));
                }
                None => missing = Some(name),
            }
        }
        let beta = self.state.ends_with("_pow_acc_0");
        if let Some(name) = missing {
            let may = |name: &String| {
                !self.state.is_empty()
                    || self.absent.contains(name.as_str())
                    || with_state.contains(name.as_str())
            };
            if inputs.is_empty() && step.inputs.iter().all(may) {
                self.absent.extend(step.outputs.iter().map(String::as_str));
                return Ok(());
            }
            if !beta || inputs.is_empty() {
                return error(format!(
                    "there is no tensor '{name}{}': it is not in the source, and no statement before writes it",
                    self.state
                ));
            }
        }
        for name in &step.inputs {
            if let Some(slot) = self.slots.get_mut(name) {
                *slot = match slot.clone() {
                    _ if step.outputs.is_empty() => Slot::Removed(step),
                    Slot::Source(expr) => Slot::Used(expr),
                    Slot::Written { expr, by, .. } => Slot::Written {
                        expr,
                        by,
                        read: true,
                    },
                    other => other,
                };
            }
        }
        if step.inputs.is_empty() {
            // An optimizer state of what is only added is not there either.
            return if self.state.is_empty() {
                step.outputs
                    .iter()
                    .try_for_each(|name| self.write(step, name, Slot::Added(step)))
            } else {
                Ok(())
            };
        }
        let made = match (inputs.first(), beta) {
            (Some(first), true) => vec![first.clone(); step.outputs.len()],
            _ => self.run(step, inputs)?,
        };
        step.outputs.iter().zip(made).try_for_each(|(name, expr)| {
            self.write(
                step,
                name,
                Slot::Written {
                    expr,
                    by: step,
                    read: false,
                },
            )
        })
    }

    /// The operations of a step, one after the other.
    fn run(&self, step: &Step, mut tensors: Vec<Arc<Expr>>) -> Result<Vec<Arc<Expr>>> {
        for op in &step.ops {
            // Master weights and moments keep their type.
            if !self.state.is_empty() && matches!(op, Op::Cast { .. }) {
                continue;
            }
            tensors = apply(op, &tensors, step.outputs.len())
                .map_err(|detail| step.statement.error(self.of_state(detail)))?;
        }
        Ok(tensors)
    }

    fn of_state(&self, detail: String) -> String {
        if self.state.is_empty() {
            detail
        } else {
            format!("optimizer state {}: {detail}", self.state)
        }
    }

    /// Puts a value under a name, under which no value may be that nobody read.
    fn write(&mut self, step: &'p Step, name: &str, slot: Slot<'p>) -> Result<()> {
        let detail = match self.slots.get(name) {
            Some(
                Slot::Written {
                    by, read: false, ..
                }
                | Slot::Added(by),
            ) => {
                format!(
                    "'{name}' is written twice: line {} wrote it, and none read it since",
                    by.statement.line
                )
            }
            Some(Slot::Source(_)) => {
                format!(
                    "the source has a tensor '{name}{}' that no statement read so far, and this would replace it; `{name} -> _` drops it",
                    self.state
                )
            }
            _ => {
                self.slots.insert(name.to_string(), slot);
                return Ok(());
            }
        };
        Err(step.statement.error(detail))
    }

    fn finish(
        self,
        destination: Option<&BTreeSet<String>>,
        only_mapped: bool,
        out: &mut Recipe,
    ) -> Result<()> {
        let mut slots: Vec<_> = self.slots.into_iter().collect();
        slots.sort_by(|a, b| a.0.cmp(&b.0));
        for (base, slot) in slots {
            let name = format!("{base}{}", self.state);
            let wanted = destination.map(|names| names.contains(&name) || names.contains(&base));
            let expr = match slot {
                Slot::Source(_) if only_mapped => continue,
                Slot::Source(_) if wanted == Some(false) => {
                    return Err(Error::NotUsed { name });
                }
                Slot::Used(expr) if wanted == Some(true) => expr,
                Slot::Source(expr) => expr,
                Slot::Written { expr, read, .. } if wanted.unwrap_or(!read) => expr,
                Slot::Added(_) => {
                    out.added.insert(name);
                    continue;
                }
                Slot::Used(_) | Slot::Written { .. } | Slot::Removed(_) => continue,
            };
            // One of them would be lost.
            if out.exprs.contains_key(&name) {
                return Err(Error::DuplicateName {
                    name,
                    detail: format!(
                        "one is written by a statement, the other is what the optimizer keeps beside '{base}'"
                    ),
                });
            }
            out.exprs.insert(name, expr);
        }
        Ok(())
    }
}

/// One operation on the tensors that a step has at hand.
pub(super) fn apply(
    op: &Op,
    tensors: &[Arc<Expr>],
    outputs: usize,
) -> Result<Vec<Arc<Expr>>, String> {
    match op {
        Op::Permute(order) => tensors.iter().map(|t| t.permute(order)).collect(),
        Op::Cast { from, to } => {
            let cast = |t: &Arc<Expr>| match from {
                Some(from) if t.info.dtype != *from => Err(format!(
                    "src_dtype says {from}, the tensor is {}",
                    t.info.dtype
                )),
                _ => t.cast(*to),
            };
            tensors.iter().map(cast).collect()
        }
        Op::Reshape { from, to } => {
            let reshape = |t: &Arc<Expr>| match from {
                Some(from) if t.reshape(from)?.info.shape != t.info.shape => Err(format!(
                    "src_shape says {from:?}, the tensor is {:?}",
                    t.info.shape
                )),
                _ => t.reshape(to),
            };
            tensors.iter().map(reshape).collect()
        }
        Op::Axis { axis, sizes } => {
            let Some(first) = tensors.first() else {
                return Err("nothing to join".into());
            };
            let axis = resolve_axis(&first.info.shape, *axis)?;
            let length = first.info.shape[axis];
            if tensors.len() > 1 || outputs == 1 {
                let joined = Expr::concat(tensors, axis)?;
                let found: Vec<usize> = tensors.iter().map(|t| t.info.shape[axis]).collect();
                return match sizes {
                    Some(sizes) if *sizes != found => Err(format!(
                        "sizes says {sizes:?}, the parts are {found:?} long"
                    )),
                    _ => Ok(vec![joined]),
                };
            }
            let sizes = match sizes {
                Some(sizes) => sizes.clone(),
                None if length % outputs == 0 => vec![length / outputs; outputs],
                None => {
                    return Err(format!(
                        "dimension {axis} of {:?} cannot be cut into {outputs} equal parts; sizes= gives the sizes of uneven ones",
                        first.info.shape
                    ));
                }
            };
            if sizes
                .iter()
                .try_fold(0usize, |n, size| n.checked_add(*size))
                != Some(length)
            {
                return Err(format!(
                    "sizes {sizes:?} do not add up to dimension {axis} of {:?}",
                    first.info.shape
                ));
            }
            let mut at = 0;
            let mut cut = |size: &usize| {
                at += size;
                first.slice(axis, at - size, *size)
            };
            sizes.iter().map(&mut cut).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Mapping, Names};
    use super::*;

    #[test]
    fn a_written_tensor_is_not_replaced_by_an_optimizer_state_of_its_name() {
        let info = |shape: &[usize]| TensorInfo {
            dtype: anymesh_core::DType::F32,
            shape: shape.to_vec(),
        };
        let sources: BTreeMap<_, _> = [("a", info(&[2])), ("a.w_0", info(&[2])), ("b", info(&[3]))]
            .map(|(name, info)| (name.to_string(), info))
            .into();
        let recipe = |text: &str| {
            let program =
                Mapping::parse(text).and_then(|mapping| mapping.expand(&Names::default()))?;
            Recipe::new(&program, &sources, None, false)
        };
        let error = recipe("a -> c\nb -> c.w_0")
            .expect_err("two tensors of one name")
            .to_string();
        assert!(error.contains("'c.w_0'"), "{error}");
        assert_eq!(
            recipe("a -> c\nb -> c.w_1").map(|recipe| recipe.tensors().len()),
            Ok(3)
        );
    }
}

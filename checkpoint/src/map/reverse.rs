//! The inverse of a mapping.

use super::expr::Expr;
use super::program::{Op, Program, Step};
use super::recipe::apply;
use crate::{Result, TensorInfo};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

impl Program {
    /// The inverse: the steps from the last to the first with their sides swapped, orders of
    /// dimensions inverted, casts and reshapes back.
    ///
    /// A cast must say both types (`src_dtype=, dst_dtype=`) and a reshape both shapes
    /// (`src_shape=, dst_shape=`); a join without `sizes=` is undone by a cut into equal parts.
    /// [`complete`](Self::complete) fills all of these in where the tensors are known. What is used
    /// twice, or removed for good, has no inverse.
    pub fn reverse(&self) -> Result<Program> {
        let added: BTreeSet<&String> = self
            .steps
            .iter()
            .filter(|step| step.inputs.is_empty())
            .flat_map(|step| &step.outputs)
            .collect();
        // By which line a value was read that no statement has written anew since.
        let mut read: HashMap<&String, usize> = HashMap::new();
        for step in &self.steps {
            let line = step.statement.line;
            for name in &step.inputs {
                if let Some(before) = read.insert(name, line) {
                    let detail = format!(
                        "this has no inverse: '{name}' is used twice, also by line {before}, so that the inverse would write it twice"
                    );
                    return Err(step.statement.error(detail));
                }
                if step.outputs.is_empty() && !added.contains(name) {
                    let detail = format!(
                        "this has no inverse: the values of '{name}' are not kept; with `_ -> {name}` the other side has a tensor of its own"
                    );
                    return Err(step.statement.error(detail));
                }
            }
            for name in &step.outputs {
                read.remove(name);
            }
        }
        Ok(Program {
            steps: self
                .steps
                .iter()
                .rev()
                .map(inverse)
                .collect::<Result<_>>()?,
        })
    }

    /// The same program with everything said that its inverse needs, as these source tensors have
    /// it: sizes of parts, types and shapes before.
    ///
    /// What is not the same for all inputs of a statement cannot be said in one attribute and is
    /// left out.
    pub fn complete(&self, sources: &BTreeMap<String, TensorInfo>) -> Result<Program> {
        let mut known: HashMap<&str, Arc<Expr>> = sources
            .iter()
            .map(|(name, info)| (name.as_str(), Expr::source(name, info)))
            .collect();
        let mut steps = Vec::with_capacity(self.steps.len());
        for step in &self.steps {
            let inputs: Option<Vec<_>> = step
                .inputs
                .iter()
                .map(|name| known.get(name.as_str()).cloned())
                .collect();
            // Only the states of an optimizer may be there; then nothing is known of the weights.
            let Some(mut tensors) =
                inputs.filter(|inputs| !inputs.is_empty() && !step.outputs.is_empty())
            else {
                steps.push(step.clone());
                continue;
            };
            let mut made = step.clone();
            for op in &mut made.ops {
                let before = tensors.clone();
                tensors = apply(op, &before, step.outputs.len())
                    .map_err(|detail| step.statement.error(detail))?;
                fill(op, &before, &tensors);
            }
            for (name, tensor) in step.outputs.iter().zip(tensors) {
                known.insert(name, tensor);
            }
            steps.push(if made.ops == step.ops {
                made
            } else {
                made.restated("types of the source")
            });
        }
        Ok(Program { steps })
    }
}

/// Says in an operation what its tensors were before it and are after it.
fn fill(op: &mut Op, before: &[Arc<Expr>], after: &[Arc<Expr>]) {
    let Some(first) = before.first() else { return };
    let shape_of = |t: &Expr| t.info.shape.iter().map(|n| *n as i64).collect::<Vec<_>>();
    match op {
        Op::Permute(_) => {}
        Op::Cast { from, .. } => {
            if before.iter().all(|t| t.info.dtype == first.info.dtype) {
                *from = Some(first.info.dtype);
            }
        }
        Op::Reshape { from, to } => {
            if before.iter().all(|t| t.info.shape == first.info.shape) {
                *from = Some(shape_of(first));
                after.iter().take(1).for_each(|t| *to = shape_of(t));
            }
        }
        Op::Axis { axis, sizes } => {
            let along = if *axis < 0 {
                first
                    .info
                    .shape
                    .len()
                    .saturating_sub(axis.unsigned_abs() as usize)
            } else {
                *axis as usize
            };
            let parts = if before.len() > 1 { before } else { after };
            *sizes = Some(
                parts
                    .iter()
                    .filter_map(|t| t.info.shape.get(along).copied())
                    .collect(),
            );
        }
    }
}

fn inverse(step: &Step) -> Result<Step> {
    let mut ops = Vec::with_capacity(step.ops.len());
    for op in step.ops.iter().rev() {
        ops.push(match op {
            Op::Permute(order) => {
                let mut back = vec![0; order.len()];
                order
                    .iter()
                    .enumerate()
                    .for_each(|(d, from)| back[*from] = d);
                Op::Permute(back)
            }
            Op::Axis { .. } => op.clone(),
            Op::Cast {
                from: Some(from),
                to,
            } => Op::Cast {
                from: Some(*to),
                to: *from,
            },
            Op::Reshape {
                from: Some(from),
                to,
            } => Op::Reshape {
                from: Some(to.clone()),
                to: from.clone(),
            },
            Op::Cast { from: None, to } => {
                return Err(step.statement.error(format!(
                    "this has no inverse: it does not say what was cast to {to}; \
                     write src_dtype= and dst_dtype="
                )));
            }
            Op::Reshape { from: None, .. } => {
                return Err(step.statement.error(
                    "this has no inverse: it does not say the shape before; \
                     write src_shape= and dst_shape=",
                ));
            }
        });
    }
    let made = Step {
        inputs: step.outputs.clone(),
        outputs: step.inputs.clone(),
        ops,
        statement: step.statement.clone(),
    };
    Ok(made.restated("reverse"))
}

//! Plans that have been checked, which is what runs.

use super::{Collective, Plan, Step, edge::Space};
use crate::{Error, Mesh, Result, Shape, Sharding, Tensor};
use std::ops::Deref;

/// A plan whose steps follow on each other, can each be done in the way they say, and lead where
/// they should. Only [`Plan::validate`] makes one.
#[derive(Clone, Debug)]
pub struct ValidPlan(Plan);

impl Deref for ValidPlan {
    type Target = Plan;

    fn deref(&self) -> &Plan {
        &self.0
    }
}

impl Plan {
    /// Checks that this plan takes a tensor of `shape` on `mesh` from `from` to `to`.
    pub fn validate(
        &self,
        mesh: &Mesh,
        shape: &Shape,
        from: &Sharding,
        to: &Sharding,
    ) -> Result<ValidPlan> {
        let fail = |argument, detail: String| {
            Err(Error::argument("plan", argument, detail).of([(self.dtype, shape)]))
        };
        let text = |s: &Sharding| s.type_string(self.dtype, &self.shape, &self.mesh);
        if self.mesh != *mesh || self.shape != *shape {
            return fail(
                if self.mesh == *mesh { "shape" } else { "mesh" },
                format!(
                    "the plan is for {} on {}, not for a tensor of shape {shape} on {mesh}",
                    text(&self.from),
                    self.mesh
                ),
            );
        }
        if self.from != *from || self.to != *to {
            return fail(
                if self.from == *from { "to" } else { "from" },
                format!(
                    "the plan leads from {} to {}, not from {} to {}",
                    text(&self.from),
                    text(&self.to),
                    text(from),
                    text(to)
                ),
            );
        }
        let space = Space::new(mesh, shape, self.dtype)?;
        let mut at = from;
        from.check(mesh, shape.rank())?;
        for (i, step) in self.steps.iter().enumerate() {
            if step.from != *at {
                return fail(
                    "steps",
                    format!(
                        "step {} starts from {}, but {} is there",
                        i + 1,
                        text(&step.from),
                        text(at)
                    ),
                );
            }
            step.to.check(mesh, shape.rank())?;
            if !possible(&space, step) {
                return fail(
                    "steps",
                    format!(
                        "step {}: no {} over axes {:?} leads from {} to {}",
                        i + 1,
                        step.kind,
                        step.axes,
                        text(at),
                        text(&step.to)
                    ),
                );
            }
            at = &step.to;
        }
        if at != to {
            return fail(
                "to",
                format!("the plan ends at {}, not at {}", text(at), text(to)),
            );
        }
        Ok(ValidPlan(self.clone()))
    }
}

impl Plan {
    /// Checks that this plan suits a tensor.
    pub fn valid_for(&self, x: &Tensor) -> Result<ValidPlan> {
        self.validate(x.mesh(), x.shape(), x.sharding(), &self.to)
    }
}

impl ValidPlan {
    /// Refuses a tensor that the plan was not checked for.
    pub(super) fn check(&self, x: &Tensor) -> Result<()> {
        if x.mesh() == &self.mesh
            && x.shape() == &self.shape
            && x.sharding() == &self.from
            && x.dtype() == self.dtype
        {
            return Ok(());
        }
        let planned = self.from.type_string(self.dtype, &self.shape, &self.mesh);
        Err(Error::argument(
            "reshard",
            "x",
            format!(
                "the plan starts from {planned} on {}, the tensor is {} on {}",
                self.mesh,
                x.type_string(),
                x.mesh()
            ),
        )
        .of([x]))
    }
}

fn possible(space: &Space, step: &Step) -> bool {
    let (from, to) = (space.strip(&step.from), space.strip(&step.to));
    let traffic = space.traffic(&from, &space.grid(&from), &to, &space.grid(&to));
    match space.classify(&from, &to, traffic) {
        Some((kind, axes)) if kind == step.kind => axes == step.axes,
        // An exchange does whatever combines nothing.
        Some((kind, _)) => {
            step.kind == Collective::Exchange
                && !matches!(kind, Collective::AllReduce | Collective::ReduceScatter)
        }
        None => false,
    }
}

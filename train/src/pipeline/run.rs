//! Goes through a schedule.

use super::{Borrowed, Given, Staged, on_mesh};
use crate::{Error, Pass, Result, trainer::Computed};
use anymesh_core::{
    Tensor,
    grad::{Gradients, Remaining, Root, backward_from, backward_inputs, no_grad},
};
use anymesh_schedule::{Action, Kind, Limits, Proof, Schedule};
use std::collections::{BTreeMap, HashMap};

/// A schedule that was proven, to run models with.
///
/// ```
/// # use anymesh_train::pipeline::Pipeline;
/// # use anymesh_schedule::build;
/// let pipeline = Pipeline::new(&build("1f1b", 4, 1, 8)?)?;
/// assert_eq!(pipeline.proof().peak(), [4, 3, 2, 1]);
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Pipeline {
    proof: Proof,
}

impl Pipeline {
    /// Proves a schedule; its transfers are put in where it has none.
    pub fn new(schedule: &Schedule) -> Result<Self> {
        let schedule = schedule.without_idle();
        let schedule = match schedule.has_transfers() {
            true => schedule,
            false => schedule.with_transfers()?,
        };
        let proof = schedule.prove(&Limits::none())?;
        Ok(Self { proof })
    }

    /// The proof.
    pub fn proof(&self) -> &Proof {
        &self.proof
    }

    /// Computes the gradients of `factor` times the sum of the losses of all micro-batches.
    pub fn run<S: Staged + ?Sized>(
        &self,
        model: &S,
        batches: &[S::Batch],
        factor: f64,
        pass: &dyn Fn(usize) -> Pass,
    ) -> Result<Computed> {
        let schedule = self.proof.schedule();
        if (schedule.stages(), schedule.micros) != (model.stages(), batches.len()) {
            let detail = format!(
                "it is for {} stages and {} micro-batches, there are {} and {}",
                schedule.stages(),
                schedule.micros,
                model.stages(),
                batches.len()
            );
            return Err(Error::config("pipeline.schedule", detail));
        }
        let mut run = Run {
            model,
            factor,
            last: model.stages() - 1,
            lent: (0..model.stages())
                .map(|s| Lent::of(model, s))
                .collect::<Result<_>>()?,
            done: Computed::default(),
            arrived: HashMap::new(),
            gave: HashMap::new(),
            open: HashMap::new(),
            half: HashMap::new(),
            back: HashMap::new(),
            losses: BTreeMap::new(),
        };
        for (rank, at) in self.proof.order() {
            let action = schedule.ranks[*rank][*at];
            run.act(action, &batches[action.micro], &pass(action.micro))?;
        }
        run.finish()
    }
}

/// What a stage borrowed, and the gradients of that.
pub(crate) struct Lent {
    pub(crate) of: Vec<Borrowed>,
    pub(crate) copies: Vec<Tensor>,
    pub(crate) sums: Vec<Option<Tensor>>,
}

impl Lent {
    pub(crate) fn of<S: Staged + ?Sized>(model: &S, stage: usize) -> Result<Self> {
        let of = model.borrows(stage)?;
        let copy = |b: &Borrowed| -> Result<Tensor> {
            let copy = on_mesh(&b.value.detach(), model.mesh_of(stage))?;
            Ok(match b.value.requires_grad() {
                true => copy.require_grad()?,
                false => copy,
            })
        };
        Ok(Self {
            copies: of.iter().map(copy).collect::<Result<_>>()?,
            sums: vec![None; of.len()],
            of,
        })
    }

    pub(crate) fn add(&mut self, found: &Gradients) -> Result<()> {
        for (copy, sum) in self.copies.iter().zip(&mut self.sums) {
            if !copy.requires_grad() {
                continue;
            }
            // As it lies: nothing is sent for it before the end.
            if let Some(more) = found.get_partial(copy)? {
                *sum = Some(match sum.take() {
                    None => more,
                    Some(sum) => no_grad(|| sum.add(&more))?,
                });
            }
        }
        Ok(())
    }
}

/// A stage and a micro-batch.
type At = (usize, usize);

/// A value on its way from stage to stage, and whether a gradient is to come back for it.
type Passed = (Tensor, bool);

/// What a forward pass left for its backward pass.
struct Open {
    /// What came, where it is tracked.
    inputs: Vec<Option<Tensor>>,
    /// What went on, without its values; nothing where it does not depend on anything that is
    /// trained.
    outputs: Vec<Option<Root>>,
}

/// A run through a schedule.
struct Run<'a, S: Staged + ?Sized> {
    model: &'a S,
    factor: f64,
    last: usize,
    lent: Vec<Lent>,
    done: Computed,
    /// What came to a stage.
    arrived: HashMap<At, Vec<Passed>>,
    /// What a stage gave and nobody took yet.
    gave: HashMap<At, Vec<Passed>>,
    open: HashMap<At, Open>,
    half: HashMap<At, Remaining>,
    /// The gradients of what came to a stage, which the stage before has not got yet.
    back: HashMap<At, Vec<Option<Tensor>>>,
    losses: BTreeMap<usize, Tensor>,
}

impl<S: Staged + ?Sized> Run<'_, S> {
    fn act(&mut self, action: Action, batch: &S::Batch, pass: &Pass) -> Result<()> {
        let at = (action.stage, action.micro);
        match action.kind {
            Kind::F => self.forward(at, batch, pass),
            Kind::B => self.backward(at),
            Kind::I => self.inputs(at),
            Kind::W => self.weights(at),
            Kind::RecvF => self.receive(at),
            Kind::RecvB => self.receive_back(at),
            // In one process the one who receives takes what is there.
            Kind::SendF | Kind::SendB | Kind::Idle => Ok(()),
        }
    }

    fn receive(&mut self, (stage, micro): At) -> Result<()> {
        let mesh = self.model.mesh_of(stage);
        let gave = self.gave.remove(&(stage - 1, micro)).ok_or_else(lost)?;
        let moved = gave
            .into_iter()
            .map(|(x, tracked)| Ok((on_mesh(&x, mesh)?, tracked)));
        let moved = moved.collect::<Result<_>>()?;
        self.arrived.insert((stage, micro), moved);
        Ok(())
    }

    fn receive_back(&mut self, (stage, micro): At) -> Result<()> {
        let mesh = self.model.mesh_of(stage);
        let after = (stage + 1, micro);
        let back = self.back.remove(&after).ok_or_else(lost)?;
        let moved = back
            .into_iter()
            .map(|g| g.map(|g| on_mesh(&g, mesh)).transpose());
        let moved = moved.collect::<Result<_>>()?;
        self.back.insert(after, moved);
        Ok(())
    }

    fn forward(&mut self, at: At, batch: &S::Batch, pass: &Pass) -> Result<()> {
        let (stage, micro) = at;
        let came = match stage {
            0 => vec![],
            // What a stage of the same rank gave is there already.
            _ => (self.arrived.remove(&at))
                .or_else(|| self.gave.remove(&(stage - 1, micro)))
                .ok_or_else(lost)?,
        };
        // The tape begins anew here.
        let leaf = |(x, tracked): Passed| match tracked {
            true => x.require_grad(),
            false => Ok(x),
        };
        let came = came.into_iter().map(leaf).collect::<Result<Vec<_>, _>>()?;
        let given = Given {
            inputs: &came,
            borrowed: &self.lent[stage].copies,
        };
        let mut gave = self.model.forward(stage, &given, batch, pass)?;
        if stage == self.last {
            let [loss] = &gave[..] else {
                let detail = format!("the last stage must give one loss, it gave {}", gave.len());
                return Err(Error::config("pipeline", detail));
            };
            self.losses.insert(micro, loss.detach());
            gave = vec![loss.mul(self.factor)?];
        }
        let root = |x: &Tensor| x.requires_grad().then(|| Root::of(x)).transpose();
        let open = Open {
            inputs: came
                .into_iter()
                .map(|x| x.requires_grad().then_some(x))
                .collect(),
            outputs: gave.iter().map(root).collect::<Result<_, _>>()?,
        };
        self.open.insert(at, open);
        if stage != self.last {
            let passed = |x: Tensor| (x.detach(), x.requires_grad());
            self.gave.insert(at, gave.into_iter().map(passed).collect());
        }
        Ok(())
    }

    /// Where the backward pass of a stage begins, and with what.
    fn begin(&mut self, (stage, micro): At) -> Result<(Open, Vec<Root>, Option<Vec<Tensor>>)> {
        let open = self.open.remove(&(stage, micro)).ok_or_else(lost)?;
        if stage == self.last {
            let roots = open.outputs.iter().flatten().cloned().collect();
            return Ok((open, roots, None));
        }
        let back = self.back.remove(&(stage + 1, micro)).ok_or_else(lost)?;
        let (mut roots, mut seeds) = (vec![], vec![]);
        for (output, gradient) in open.outputs.iter().zip(back) {
            // What the next stage did not depend on has none.
            if let (Some(root), Some(gradient)) = (output, gradient) {
                roots.push(root.clone());
                seeds.push(gradient);
            }
        }
        Ok((open, roots, Some(seeds)))
    }

    fn backward(&mut self, at: At) -> Result<()> {
        let (open, roots, seeds) = self.begin(at)?;
        let found = backward_from(&roots, seeds.as_deref())?;
        drop((roots, seeds));
        if at.0 > 0 {
            let of_input = |x: &Option<Tensor>| x.as_ref().map(|x| found.get(x)).transpose();
            let back = open.inputs.iter().map(|x| Ok(of_input(x)?.flatten()));
            let back = back.collect::<Result<_>>()?;
            self.back.insert(at, back);
        }
        self.add(at.0, &found)
    }

    fn inputs(&mut self, at: At) -> Result<()> {
        let (open, roots, seeds) = self.begin(at)?;
        let inputs: Vec<&Tensor> = open.inputs.iter().flatten().collect();
        let (found, rest) = backward_inputs(&roots, seeds.as_deref(), &inputs)?;
        let mut found = found.into_iter();
        let back = open
            .inputs
            .iter()
            .map(|x| x.as_ref().and_then(|_| found.next()?));
        if at.0 > 0 {
            self.back.insert(at, back.collect());
        }
        self.half.insert(at, rest);
        Ok(())
    }

    fn weights(&mut self, at: At) -> Result<()> {
        let rest = self.half.remove(&at).ok_or_else(lost)?;
        let found = rest.backward()?;
        self.add(at.0, &found)
    }

    fn add(&mut self, stage: usize, found: &Gradients) -> Result<()> {
        self.done.gradients.add(self.model.model(), found)?;
        self.lent[stage].add(found)
    }

    fn finish(mut self) -> Result<Computed> {
        for lent in self.lent {
            for (b, sum) in lent.of.iter().zip(lent.sums) {
                if let Some(sum) = sum {
                    let there = on_mesh(&sum, b.value.mesh())?;
                    self.done.gradients.add_to(&b.name, there)?;
                }
            }
        }
        self.done.losses = self.losses.into_values().collect();
        Ok(self.done)
    }
}

/// A proven schedule has everything before it is used.
fn lost() -> Error {
    Error::config(
        "pipeline.schedule",
        "something was to be used before it was there, although the schedule was proven: this is a fault of the pipeline",
    )
}

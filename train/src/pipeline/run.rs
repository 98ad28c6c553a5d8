//! Goes through a schedule.

use super::{
    Borrowed, Given, Staged, add_type,
    elsewhere::{self, Elsewhere},
    on_mesh, start_on_mesh,
};
use crate::{Error, Pass, Result, optim::Accumulator, trainer::Computed};
use anymesh_core::{
    Moving, Tensor,
    grad::{Gradients, Remaining, Root, backward_from, backward_inputs, no_grad},
    spmd::Fingerprint,
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
        let mut run = Run::new(self, model, batches, End::Loss(factor))?;
        run.go(self, batches, pass, |_| true)?;
        run.finish()
    }

    /// What the last stage gives for each micro-batch, without a graph: forward passes alone, in the
    /// order of the schedule.
    pub fn outputs<S: Staged + ?Sized>(
        &self,
        model: &S,
        batches: &[S::Batch],
        pass: &dyn Fn(usize) -> Pass,
    ) -> Result<Vec<Vec<Tensor>>> {
        let mut run = Run::new(self, model, batches, End::Nothing)?;
        let forward = |kind| matches!(kind, Kind::F | Kind::SendF | Kind::RecvF);
        no_grad(|| run.go(self, batches, pass, forward))?;
        let outputs = (0..batches.len()).map(|micro| run.gave.remove(&(run.last, micro)));
        let values = |gave: Vec<Passed>| gave.into_iter().map(|(x, _)| x).collect();
        let outputs = outputs.map(|gave| Ok(values(gave.ok_or_else(lost)?)));
        outputs.collect()
    }

    /// The gradients of all micro-batches where those of what the last stage gives are known, one
    /// tensor for each micro-batch.
    pub fn backward_with<S: Staged + ?Sized>(
        &self,
        model: &S,
        batches: &[S::Batch],
        seeds: &[Tensor],
        pass: &dyn Fn(usize) -> Pass,
    ) -> Result<Accumulator> {
        if seeds.len() != batches.len() {
            let detail = format!(
                "there are {} gradients for {} micro-batches",
                seeds.len(),
                batches.len()
            );
            return Err(Error::config("pipeline", detail));
        }
        let mut run = Run::new(self, model, batches, End::Seeds(seeds))?;
        run.go(self, batches, pass, |_| true)?;
        Ok(run.finish()?.gradients)
    }
}

/// What is done with what the last stage gives.
enum End<'a> {
    /// It is a loss: its gradients, times a factor.
    Loss(f64),
    /// Its gradients are known.
    Seeds(&'a [Tensor]),
    /// It is the result.
    Nothing,
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

    pub(crate) fn copies(&self) -> &[Tensor] {
        &self.copies
    }

    /// The gradients of the copies, as wide as sums are computed: micro-batches are added up.
    fn found(&self, found: &Gradients) -> Result<Vec<Option<Tensor>>> {
        let of = |copy: &Tensor| -> Result<Option<Tensor>> {
            if !copy.requires_grad() {
                return Ok(None);
            }
            // As it lies: nothing is sent for it before the end.
            let gradient = found.get_partial(copy)?;
            let wide = copy.dtype().kind().dtype();
            Ok(gradient.map(|g| no_grad(|| g.cast(wide))).transpose()?)
        };
        self.copies.iter().map(of).collect()
    }

    pub(crate) fn add(&mut self, found: &Gradients) -> Result<()> {
        for (more, sum) in self.found(found)?.into_iter().zip(&mut self.sums) {
            if let Some(more) = more {
                *sum = Some(match sum.take() {
                    None => more,
                    Some(sum) => no_grad(|| sum.add(&more))?,
                });
            }
        }
        Ok(())
    }

    /// Gradients of which this process has no values.
    pub(super) fn add_types(&mut self, found: &[Option<Tensor>]) -> Result<()> {
        for (more, sum) in found.iter().zip(&mut self.sums) {
            if let Some(more) = more {
                *sum = Some(add_type(sum.take(), more)?);
            }
        }
        Ok(())
    }
}

/// A stage and a micro-batch.
type At = (usize, usize);

/// A value on its way from stage to stage, and whether a gradient is to come back for it.
pub(super) type Passed = (Tensor, bool);

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
    end: End<'a>,
    last: usize,
    lent: Vec<Lent>,
    done: Computed,
    /// What comes to a stage, and whether a gradient is to go back for it.
    arrived: HashMap<At, Vec<(Moving, bool)>>,
    /// What a stage gave and nobody took yet.
    gave: HashMap<At, Vec<Passed>>,
    open: HashMap<At, Open>,
    half: HashMap<At, Remaining>,
    /// The gradients of what came to a stage, which the stage before has not got yet.
    back: HashMap<At, Vec<Option<Tensor>>>,
    /// The gradients of what a stage gave, which come to it.
    arrived_back: HashMap<At, Vec<Option<Moving>>>,
    losses: BTreeMap<usize, Tensor>,
    /// Stages of other processes.
    elsewhere: Elsewhere,
    /// Whether some are: then not all processes do the same.
    apart: bool,
}

impl<'a, S: Staged + ?Sized> Run<'a, S> {
    fn new(pipeline: &Pipeline, model: &'a S, batches: &[S::Batch], end: End<'a>) -> Result<Self> {
        let schedule = pipeline.proof.schedule();
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
        Ok(Self {
            model,
            end,
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
            arrived_back: HashMap::new(),
            losses: BTreeMap::new(),
            elsewhere: Elsewhere::default(),
            apart: (0..model.stages()).any(|s| !model.mesh_of(s).is_local()),
        })
    }

    /// Goes through the schedule, through actions of some kinds.
    fn go(
        &mut self,
        pipeline: &Pipeline,
        batches: &[S::Batch],
        pass: &dyn Fn(usize) -> Pass,
        kinds: impl Fn(Kind) -> bool,
    ) -> Result<()> {
        let lists = &pipeline.proof.schedule().ranks;
        let order = pipeline.proof.order().iter();
        for action in order.map(|(rank, at)| lists[*rank][*at]) {
            if kinds(action.kind) {
                self.act(action, &batches[action.micro], &pass(action.micro))?;
            }
        }
        Ok(())
    }

    fn act(&mut self, action: Action, batch: &S::Batch, pass: &Pass) -> Result<()> {
        let at = (action.stage, action.micro);
        if action.kind.computes() && self.apart {
            return Fingerprint::uncounted(|| self.compute(action.kind, at, batch, pass));
        }
        match action.kind {
            Kind::F | Kind::B | Kind::I | Kind::W => self.compute(action.kind, at, batch, pass),
            Kind::RecvF => self.receive(at),
            Kind::RecvB => self.receive_back(at),
            // A receive comes right after its send, and both ends begin there.
            Kind::SendF | Kind::SendB | Kind::Idle => Ok(()),
        }
    }

    fn compute(&mut self, kind: Kind, at: At, batch: &S::Batch, pass: &Pass) -> Result<()> {
        match kind {
            Kind::F => self.forward(at, batch, pass),
            Kind::B => self.backward(at),
            Kind::I => self.inputs(at),
            _ => self.weights(at),
        }
    }

    /// What the types of a pass depend on, of a stage that other processes have.
    fn kind(
        &self,
        at: At,
        came: &[Passed],
        batch: &S::Batch,
        pass: &Pass,
    ) -> Option<elsewhere::Kind> {
        let (stage, micro) = at;
        if self.model.mesh_of(stage).addressable().len() > 0 {
            return None;
        }
        let mut text = self.model.kind_of(batch)?;
        for (x, tracked) in came {
            text += &format!("; {} {tracked}", x.type_string());
        }
        if let End::Seeds(seeds) = self.end {
            text += &format!("; {}", seeds[micro].type_string());
        }
        text += &format!("; {}", pass.is_training());
        Some((stage, text))
    }

    /// What a stage gave sets out for the next: over processes the sender goes on, and the receiver
    /// waits when it needs it. Nobody but who carries it has it any more.
    fn receive(&mut self, (stage, micro): At) -> Result<()> {
        let mesh = self.model.mesh_of(stage);
        let gave = self.gave.remove(&(stage - 1, micro)).ok_or_else(lost)?;
        let moving = gave
            .into_iter()
            .map(|(x, tracked)| Ok((start_on_mesh(&x, mesh)?, tracked)));
        let moving = moving.collect::<Result<_>>()?;
        self.arrived.insert((stage, micro), moving);
        Ok(())
    }

    fn receive_back(&mut self, (stage, micro): At) -> Result<()> {
        let mesh = self.model.mesh_of(stage);
        let back = self.back.remove(&(stage + 1, micro)).ok_or_else(lost)?;
        let moving = back
            .into_iter()
            .map(|g| g.map(|g| start_on_mesh(&g, mesh)).transpose());
        let moving = moving.collect::<Result<_>>()?;
        self.arrived_back.insert((stage, micro), moving);
        Ok(())
    }

    /// What came to a stage; what a stage of the same rank gave is there already.
    fn came(&mut self, (stage, micro): At) -> Result<Vec<Passed>> {
        if stage == 0 {
            return Ok(vec![]);
        }
        match self.arrived.remove(&(stage, micro)) {
            Some(moving) => moving
                .into_iter()
                .map(|(x, tracked)| Ok((x.wait()?, tracked)))
                .collect(),
            None => self.gave.remove(&(stage - 1, micro)).ok_or_else(lost),
        }
    }

    /// The gradients of what a stage gave.
    fn came_back(&mut self, (stage, micro): At) -> Result<Vec<Option<Tensor>>> {
        match self.arrived_back.remove(&(stage, micro)) {
            Some(moving) => moving
                .into_iter()
                .map(|g| Ok(g.map(Moving::wait).transpose()?))
                .collect(),
            None => self.back.remove(&(stage + 1, micro)).ok_or_else(lost),
        }
    }

    fn forward(&mut self, at: At, batch: &S::Batch, pass: &Pass) -> Result<()> {
        let (stage, micro) = at;
        let came = self.came(at)?;
        let kind = self.kind(at, &came, batch, pass);
        let backward = !matches!(self.end, End::Nothing);
        let known = kind
            .as_ref()
            .and_then(|kind| self.elsewhere.forward(at, kind, backward));
        if let Some((gave, loss)) = known {
            self.losses.extend(loss.map(|loss| (micro, loss)));
            if stage != self.last || !backward {
                self.gave.insert(at, gave);
            }
            return Ok(());
        }
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
        if stage == self.last
            && let End::Loss(factor) = self.end
        {
            let [loss] = &gave[..] else {
                let detail = format!("the last stage must give one loss, it gave {}", gave.len());
                return Err(Error::config("pipeline", detail));
            };
            if loss.numel() != 1 {
                let detail = format!(
                    "the last stage gave {}, which is no loss: what a loss over all micro-batches reads goes through run_cached",
                    loss.type_string()
                );
                return Err(Error::config("pipeline", detail));
            }
            self.losses.insert(micro, loss.detach());
            gave = vec![loss.mul(factor)?];
        }
        let passed = |x: &Tensor| (x.detach(), x.requires_grad());
        let passed: Vec<Passed> = gave.iter().map(passed).collect();
        if let Some(kind) = kind {
            let loss = self.losses.get(&micro).filter(|_| stage == self.last);
            self.elsewhere
                .found(at, kind, passed.clone(), loss.cloned());
        }
        if !backward {
            self.gave.insert(at, passed);
            return Ok(());
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
            self.gave.insert(at, passed);
        }
        Ok(())
    }

    /// Where the backward pass of a stage begins, and with what.
    fn begin(&mut self, (stage, micro): At) -> Result<(Open, Vec<Root>, Option<Vec<Tensor>>)> {
        let open = self.open.remove(&(stage, micro)).ok_or_else(lost)?;
        let back = match &self.end {
            End::Seeds(seeds) if stage == self.last => vec![Some(seeds[micro].clone())],
            _ if stage == self.last => {
                let roots = open.outputs.iter().flatten().cloned().collect();
                return Ok((open, roots, None));
            }
            _ => self.came_back((stage, micro))?,
        };
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

    /// The gradients of inputs of a stage of other processes, where they are known.
    fn known_back(&mut self, at: At) -> Result<bool> {
        let Some(back) = self.elsewhere.back(at) else {
            return Ok(false);
        };
        if at.0 != self.last {
            self.came_back(at)?;
        }
        if at.0 > 0 {
            self.back.insert(at, back);
        }
        Ok(true)
    }

    fn backward(&mut self, at: At) -> Result<()> {
        if self.known_back(at)? {
            return self.add(at, None);
        }
        let (open, roots, seeds) = self.begin(at)?;
        let found = backward_from(&roots, seeds.as_deref())?;
        drop((roots, seeds));
        let of_input = |x: &Option<Tensor>| x.as_ref().map(|x| found.get(x)).transpose();
        let back = open.inputs.iter().map(|x| Ok(of_input(x)?.flatten()));
        let back: Vec<Option<Tensor>> = back.collect::<Result<_>>()?;
        self.elsewhere.found_back(at, &back);
        if at.0 > 0 {
            self.back.insert(at, back);
        }
        self.add(at, Some(&found))
    }

    fn inputs(&mut self, at: At) -> Result<()> {
        if self.known_back(at)? {
            return Ok(());
        }
        let (open, roots, seeds) = self.begin(at)?;
        let inputs: Vec<&Tensor> = open.inputs.iter().flatten().collect();
        let (found, rest) = backward_inputs(&roots, seeds.as_deref(), &inputs)?;
        let mut found = found.into_iter();
        let back = open
            .inputs
            .iter()
            .map(|x| x.as_ref().and_then(|_| found.next()?));
        let back: Vec<Option<Tensor>> = back.collect();
        self.elsewhere.found_back(at, &back);
        if at.0 > 0 {
            self.back.insert(at, back);
        }
        self.half.insert(at, rest);
        Ok(())
    }

    fn weights(&mut self, at: At) -> Result<()> {
        match self.half.remove(&at) {
            Some(rest) => {
                let found = rest.backward()?;
                self.add(at, Some(&found))
            }
            None if self.elsewhere.has(at) => self.add(at, None),
            None => Err(lost()),
        }
    }

    /// Adds the gradients of parameters that a pass found; none where those of a stage of other
    /// processes are known.
    fn add(&mut self, at: At, found: Option<&Gradients>) -> Result<()> {
        let (sums, lent) = (&mut self.done.gradients, &mut self.lent[at.0]);
        match found {
            Some(found) if !self.elsewhere.has(at) => {
                sums.add(self.model.model(), found)?;
                lent.add(found)
            }
            _ => {
                let found = found.map(|found| -> Result<_> {
                    let mut own = Accumulator::default();
                    own.add(self.model.model(), found)?;
                    Ok((own, lent.found(found)?))
                });
                self.elsewhere.add(at, found.transpose()?, sums, lent)
            }
        }
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

//! One call of an op on a mesh: its rule is solved, its operands go where the solution wants them,
//! and its local step runs on what each rank holds.

use super::{
    Choice, Decision,
    cache::{self, Solved},
    info::{Build, OpInfo, RuleForm},
    plan::{self, Directions},
    policy,
    rule::{Bind, Given, Operands, Rule, Wanted},
    trace::{self, Source},
};
use crate::{
    Dry, Error, Mesh, NoGradient, Region, Result, Shape, Sharding, Tensor, fingerprint, forms,
    grad, ledger, profile, reshard, split, tensor::Outputs, transport::told,
};
use smallvec::SmallVec;
use std::{collections::HashMap, ops::Range, panic::Location, rc::Rc};

/// Where the rule of a call comes from.
#[derive(Clone, Copy)]
pub(super) enum Form<'a> {
    /// The table of ops.
    Info(&'static OpInfo),
    /// A user.
    Text(&'a str),
}

/// One call of an op: everything its rule is made of.
///
/// What a call is known by in the [table of solved calls](cache) is made of the same fields, so a
/// rule cannot depend on something that the table does not see.
pub(crate) struct Call<'a> {
    /// The op, for messages and the ledger.
    pub(super) op: &'static str,
    pub(super) form: Form<'a>,
    /// The operands that are tensors.
    pub(super) inputs: &'a [&'a Tensor],
    /// Which of several texts holds.
    pub(super) variant: usize,
    pub(super) binds: SmallVec<[Bind<'a>; 2]>,
    pub(super) sizes: SmallVec<[(char, usize); 2]>,
    pub(super) data: &'a [i64],
    /// A bit for each term whose operand is missing.
    pub(super) missing: u32,
    /// A bit for each term whose operand is a number.
    pub(super) numbers: u32,
    /// Whether the clauses on partial values hold.
    pub(super) partials: bool,
    /// Where results are wanted, as far as that is known.
    pub(super) wanted: Vec<Option<Wanted>>,
}

/// A rule knows its operands by a bit each.
const MAX_TERMS: usize = 32;

/// A solved call, its operands where it wants them, and what a plan has it do besides.
type Prepared = (Rc<Solved>, SmallVec<[Tensor; 3]>, Directions);

/// The operands of a call in the order of the terms of its rule.
pub(super) type Terms<'a> = SmallVec<[Given<'a>; 4]>;

impl<'a> Call<'a> {
    /// A call of this op, or of a step that is named like one.
    pub(crate) fn of(info: &'static OpInfo, inputs: &'a [&'a Tensor]) -> Self {
        Self::new(info.name, Form::Info(info), inputs)
    }

    /// A call of a user's op.
    pub(super) fn of_text(op: &'static str, text: &'a str, inputs: &'a [&'a Tensor]) -> Self {
        Self::new(op, Form::Text(text), inputs)
    }

    fn new(op: &'static str, form: Form<'a>, inputs: &'a [&'a Tensor]) -> Self {
        Self {
            op,
            form,
            inputs,
            variant: 0,
            binds: SmallVec::new(),
            sizes: SmallVec::new(),
            data: &[],
            missing: 0,
            numbers: 0,
            partials: true,
            wanted: Vec::new(),
        }
    }

    /// As a step of another op, which messages and the ledger name.
    pub(crate) fn on_behalf_of(self, op: &'static str) -> Self {
        Self { op, ..self }
    }

    /// With the text of this number, of those that the op has.
    pub(crate) fn variant(self, variant: usize) -> Self {
        Self { variant, ..self }
    }

    /// With a letter of the text standing for these dimensions.
    pub(crate) fn bind(mut self, letter: char, axes: &'a [usize]) -> Self {
        self.binds.push((letter, axes));
        self
    }

    /// With the size of a factor in brackets.
    pub(crate) fn size(mut self, letter: char, size: usize) -> Self {
        self.sizes.push((letter, size));
        self
    }

    /// With numbers for the function that makes the rule.
    pub(crate) fn data(self, data: &'a [i64]) -> Self {
        Self { data, ..self }
    }

    /// Where the terms from `first` on are of operands that may be missing.
    pub(crate) fn optional(mut self, first: usize, operands: &[Option<&Tensor>]) -> Self {
        for (i, operand) in operands.iter().enumerate() {
            self.missing |= u32::from(operand.is_none()) << (first + i);
        }
        self
    }

    /// Where the terms with these bits are of numbers.
    pub(crate) fn numbers(self, numbers: u32) -> Self {
        Self { numbers, ..self }
    }

    /// With the clauses on partial values, or without them: where the dtypes would have every part
    /// rounded by itself.
    pub(crate) fn partials(self, partials: bool) -> Self {
        Self { partials, ..self }
    }

    /// With where the results are wanted, as far as that is known.
    pub(crate) fn wanted(self, wanted: impl IntoIterator<Item = Option<Wanted>>) -> Self {
        Self {
            wanted: wanted.into_iter().collect(),
            ..self
        }
    }

    /// A variant of the rule that the op does not have.
    pub(super) fn no_variant(&self, info: &OpInfo) -> Error {
        Error::Rule {
            op: info.name,
            rule: info.rule.texts().join(" | "),
            detail: format!("there is no variant {}", self.variant),
        }
    }

    /// The text of its rule, where it has one.
    pub(super) fn text(&self) -> Result<Option<&'a str>> {
        match self.form {
            Form::Text(text) => Ok(Some(text)),
            Form::Info(info) => match info.rule {
                RuleForm::Built(_) => Ok(None),
                _ => info
                    .rule
                    .texts()
                    .get(self.variant)
                    .map_or_else(|| Err(self.no_variant(info)), |text| Ok(Some(*text))),
            },
        }
    }

    /// The operands in the order of the terms.
    pub(super) fn terms(&self) -> Terms<'a> {
        let mut inputs = self.inputs.iter();
        let given = |i: usize| {
            if self.missing >> i & 1 == 1 {
                Some(Given::Nothing)
            } else if self.numbers >> i & 1 == 1 {
                Some(Given::Number)
            } else {
                inputs.next().map(|t| Given::Shape(t.shape()))
            }
        };
        (0..MAX_TERMS).map_while(given).collect()
    }

    /// Its rule.
    pub(super) fn rule(&self) -> Result<Rule> {
        let rule = match (self.text()?, self.form) {
            (Some(text), form) => {
                let rule = Rule::with_sizes(text, &self.terms(), &self.binds, &self.sizes)?;
                if matches!(form, Form::Text(_)) && !rule.recipes.is_empty() {
                    return Err(Error::Rule {
                        op: self.op,
                        rule: text.into(),
                        detail: "a local step cannot fetch borders".into(),
                    });
                }
                rule
            }
            (
                None,
                Form::Info(OpInfo {
                    rule: RuleForm::Built(built),
                    ..
                }),
            ) => {
                let shapes: SmallVec<[&Shape; 4]> = self.inputs.iter().map(|t| t.shape()).collect();
                match built.build {
                    Build::Ranks(build) => {
                        build(&Operands::new(&self.terms()), self.data)?.with_sizes_of(&shapes)?
                    }
                    Build::Sizes(build) => build(&shapes, self.data)?,
                }
            }
            (None, _) => Rule::default(),
        };
        let rule = if self.partials {
            rule
        } else {
            rule.without_partials()
        };
        Ok(Rule {
            wanted: self.wanted.clone(),
            ..rule
        })
    }

    /// Runs the op on a mesh: `local` computes on one rank. For operands that are not
    /// [`plain`](super::plain).
    #[track_caller]
    pub(crate) fn run(&self, local: impl Fn(&Local<'_>) -> Result<Outputs>) -> Result<Outputs> {
        let (solved, inputs, directions) = self.prepare()?;
        let out = on_each_rank(self.op, &solved, &inputs, local)?;
        plan::made(&directions, &out);
        Ok(out)
    }

    /// [`run`](Self::run) for ops with one result.
    #[track_caller]
    pub(crate) fn run1(&self, local: impl Fn(&Local<'_>) -> Result<Tensor>) -> Result<Tensor> {
        Ok(self.run(|l| Ok(smallvec::smallvec![local(l)?]))?.remove(0))
    }

    /// As [`run`](Self::run), for ops that have a decomposition, which runs where a factor marked
    /// `stats` is cut.
    #[track_caller]
    pub(crate) fn run_or(
        &self,
        local: impl Fn(&Local<'_>) -> Result<Outputs>,
        decomposed: impl FnOnce(&[Tensor]) -> Result<Outputs>,
    ) -> Result<Outputs> {
        let (solved, inputs, directions) = self.prepare()?;
        if solved.solution.decompose {
            let _scope = ledger::enter(self.op, Location::caller());
            return decomposed(&inputs);
        }
        let out = on_each_rank(self.op, &solved, &inputs, local)?;
        plan::made(&directions, &out);
        Ok(out)
    }

    /// [`run_or`](Self::run_or) for ops with one result.
    #[track_caller]
    pub(crate) fn run1_or(
        &self,
        local: impl Fn(&Local<'_>) -> Result<Tensor>,
        decomposed: impl FnOnce(&[Tensor]) -> Result<Tensor>,
    ) -> Result<Tensor> {
        Ok(self
            .run_or(
                |l| Ok(smallvec::smallvec![local(l)?]),
                |inputs| Ok(smallvec::smallvec![decomposed(inputs)?]),
            )?
            .remove(0))
    }

    /// The operands as the solution wants them.
    #[track_caller]
    pub(crate) fn bring(&self) -> Result<SmallVec<[Tensor; 3]>> {
        Ok(self.prepare()?.1)
    }

    /// Solves and reshards the operands.
    #[track_caller]
    fn prepare(&self) -> Result<Prepared> {
        if grad::is_recording(self.inputs) {
            let detail = "it has none on a mesh: `detach()` its operands, use `no_grad`, or give it one with `grad::custom`";
            return Err(
                Error::gradient(self.op, NoGradient::NotDifferentiable, detail)
                    .of(self.inputs.iter().copied()),
            );
        }
        if self.inputs.len() > MAX_TERMS {
            return Err(Error::argument(
                self.op,
                "inputs",
                format!(
                    "{} operands on a mesh: at most {MAX_TERMS} in one call",
                    self.inputs.len()
                ),
            )
            .of(self.inputs.iter().copied()));
        }
        let caller = ledger::outermost().map_or(Location::caller(), |(_, caller)| caller);
        forms::count_call();
        // Where ops may not communicate by themselves, only what they are given counts: what may run
        // must not depend on what others had brought.
        let held: AtHand = match policy::is_explicit() {
            true => self.inputs.iter().map(|_| Vec::new()).collect(),
            false => self.inputs.iter().map(|t| at_hand(t)).collect(),
        };
        let (solved, directions) = match plan::is_on() {
            true => plan::decide(self, &held, caller)?,
            false => (cache::find(self, &held)?, Directions::default()),
        };
        fingerprint::fold(self.op, caller, solved.decision);
        trace::note(|| self.decision(&solved, &held));
        if solved.solution.bytes > 0 {
            policy::check(self, &solved, &held, caller)?;
        }
        if solved.solution.steps == 0 && solved.solution.sources.iter().all(|s| *s == 0) {
            plan::hold(self.inputs, &directions);
            let inputs = self.inputs.iter().map(|t| (*t).clone()).collect();
            return Ok((solved, inputs, directions));
        }
        let _scope = ledger::enter(self.op, caller);
        let bring = |i| self.brought(i, &solved, &held[i], &directions);
        let inputs = (0..self.inputs.len()).map(bring).collect::<Result<_>>()?;
        plan::hold(self.inputs, &directions);
        Ok((solved, inputs, directions))
    }

    /// Where its operands would be brought.
    pub(crate) fn targets(&self) -> Result<SmallVec<[Sharding; 3]>> {
        let held: AtHand = self.inputs.iter().map(|t| at_hand(t)).collect();
        Ok(cache::find(self, &held)?.solution.inputs.clone())
    }

    /// An operand as the solution wants it, from the form that it chose. What had to be sent for it
    /// is kept at hand for the next calls.
    #[track_caller]
    fn brought(
        &self,
        i: usize,
        solved: &Solved,
        held: &[Sharding],
        directions: &Directions,
    ) -> Result<Tensor> {
        let (x, to) = (self.inputs[i], &solved.solution.inputs[i]);
        let source = usize::from(solved.solution.sources[i]);
        let from = match source {
            0 => x.clone(),
            // It was at hand a moment ago, and nothing ran since; else the tensor itself will do.
            form => match x.in_form(&held[form - 1])? {
                Some(form) => form,
                None => return x.reshard(to.clone()),
            },
        };
        let brought = match &solved.plans[i] {
            Some(plan) => {
                let brought = reshard::run(&from, plan)?;
                if plan.recv_bytes == 0 {
                    return Ok(brought);
                }
                x.add_form(brought, true)
            }
            None if from.sharding() != to => return reshard::slice(&from, to),
            None => from,
        };
        let kept = directions.again >> i & 1 == 0 && brought.sharding() != x.sharding();
        if let Some(forms) = x.forms().filter(|_| kept) {
            forms.set_used(Some(brought.sharding()));
        }
        Ok(brought)
    }

    fn decision(&self, solved: &Solved, held: &AtHand) -> Decision {
        let (step, source) = match self.form {
            Form::Text(text) => (self.op, Source::Text(text.into())),
            Form::Info(info) => (
                info.name,
                match info.rule {
                    RuleForm::Built(built) => Source::Built(built.name),
                    rule => {
                        Source::Text(rule.texts().get(self.variant).copied().unwrap_or("").into())
                    }
                },
            ),
        };
        Decision {
            op: self.op,
            step,
            source,
            inputs: self.inputs.iter().map(|t| (*t).clone()).collect(),
            held: held.iter().map(|forms| forms.to_vec()).collect(),
            rule: solved.rule_for(self.inputs),
            solution: solved.solution.clone(),
        }
    }
}

/// The other shardings in which each operand is at hand.
pub(super) type AtHand = SmallVec<[Vec<Sharding>; 3]>;

pub(super) fn at_hand(x: &Tensor) -> Vec<Sharding> {
    x.forms()
        .map_or_else(Vec::new, |forms| forms.others(x.sharding()))
}

/// What one rank works on.
pub(crate) struct Local<'a> {
    /// Its parts of the operands; plain tensors.
    pub(crate) inputs: &'a [Tensor],
    solved: &'a Solved,
    mesh: &'a Mesh,
    rank: usize,
    /// The operands, of which it has parts.
    whole: &'a [Tensor],
}

impl Local<'_> {
    /// The part of a factor that this rank holds, and the whole size: `None` where it holds all.
    pub(crate) fn part(&self, letter: char) -> Option<(Range<usize>, usize)> {
        let f = self.solved.factors.iter().position(|(l, _)| *l == letter)?;
        let axes = self
            .solved
            .solution
            .cuts
            .iter()
            .filter(|(g, _)| *g as usize == f)
            .map(|(_, a)| *a as usize);
        let (part, parts) = self.mesh.part(self.rank, axes);
        let size = self.solved.factors[f].1.size(self.whole);
        (parts > 1).then(|| (split(size, part, parts), size))
    }

    /// Whether operand `i` lies as it was given to the call.
    pub(crate) fn is_as_given(&self, i: usize, given: &Tensor) -> bool {
        self.whole[i].is(given)
    }

    /// The box that this rank computes of result `output`, whose whole shape is `shape`.
    pub(crate) fn region(&self, output: usize, shape: &Shape) -> Region {
        self.solved.solution.outputs[output].region(self.mesh, self.rank, shape)
    }
}

impl std::ops::Index<usize> for Local<'_> {
    type Output = Tensor;

    fn index(&self, i: usize) -> &Tensor {
        &self.inputs[i]
    }
}

/// Runs the local step for every rank that is held. Ranks of one device that hold the same share
/// the result.
fn on_each_rank(
    op: &'static str,
    solved: &Solved,
    inputs: &[Tensor],
    local: impl Fn(&Local<'_>) -> Result<Outputs>,
) -> Result<Outputs> {
    let mesh = inputs[0].mesh();
    let solution = &solved.solution;
    let step = |rank: usize, parts: SmallVec<[Tensor; 3]>| {
        let _rank = profile::for_rank(rank);
        let out = local(&Local {
            inputs: &parts,
            solved,
            mesh,
            rank,
            whole: inputs,
        })?;
        if out.len() < solution.outputs.len() {
            return Err(Error::Rule {
                op,
                rule: solved.rule.to_string(),
                detail: format!(
                    "it has {} results, and the op gave fewer",
                    solution.outputs.len()
                ),
            });
        }
        Ok(out)
    };
    if mesh.stands_for_all() {
        for rank in ranks_with_nothing(solved, inputs) {
            step(rank, inputs.iter().map(|t| t.part(rank)).collect())?;
        }
    }
    let mut results: SmallVec<[Outputs; 8]> = SmallVec::with_capacity(mesh.held().len());
    // By the first of the ranks that differ along unused axes only, which may be elsewhere, the
    // first one that is here.
    let mut first_at: HashMap<usize, usize> = HashMap::new();
    for (i, rank) in mesh.held() {
        let leader = (0..mesh.axes().len())
            .filter(|a| solution.choices[*a] == Choice::Whole)
            .fold(rank, |rank, a| mesh.moved(rank, a, 0));
        let twin = match mesh.is_local() {
            true => leader.min(i),
            false => *first_at.entry(leader).or_insert(i),
        };
        // What is only planned is counted as if every rank had memory of its own.
        if twin < i && mesh.device(twin) == mesh.device(i) && !Dry::is_on() {
            results.push(results[twin].clone());
            continue;
        }
        let result = step(rank, inputs.iter().map(|t| t.held(i)).collect());
        results.push(told(mesh, Some(rank), result)?);
    }
    let mut out = Outputs::new();
    for (o, sharding) in solution.outputs.iter().enumerate() {
        let first = &results[0][o];
        let shape = solved.output_shape(op, o, first.shape(), inputs)?;
        let result = Tensor::from_parts(
            mesh,
            sharding.clone(),
            first.dtype(),
            shape,
            results.iter().map(|r| r[o].clone()),
        );
        // A parameter that was only converted or turned around is still one.
        let same = matches!(inputs, [x] if x.numel() == result.numel() && !x.is_computed());
        out.push(if same { result } else { result.computed() });
    }
    Ok(out)
}

/// Ranks that hold nothing of a factor where the last rank, which stands for all, holds something:
/// an op may refuse what is empty. One for each such factor, and one for all of them at once.
fn ranks_with_nothing(solved: &Solved, inputs: &[Tensor]) -> SmallVec<[usize; 2]> {
    let (mesh, cuts) = (inputs[0].mesh(), &solved.solution.cuts);
    let mut ranks = SmallVec::new();
    let (last, mut all) = (mesh.ranks() - 1, mesh.ranks() - 1);
    for (f, (_, size)) in solved.factors.iter().enumerate() {
        let axes = || {
            let of = cuts.iter().filter(|(g, _)| *g as usize == f);
            of.map(|(_, axis)| *axis as usize)
        };
        let (parts, size) = (axes().map(|a| mesh.size(a)).product(), size.size(inputs));
        if (1..parts).contains(&size) {
            ranks.push(axes().fold(last, |rank, a| mesh.moved(rank, a, 0)));
            all = axes().fold(all, |rank, a| mesh.moved(rank, a, 0));
        }
    }
    if ranks.len() > 1 {
        ranks.push(all);
    }
    ranks
}

//! What a thread does while a step is planned, or runs under its plan.

use super::{
    OnDifference, PlannedStep,
    record::{Did, Record, Seen, value_of},
    steps::Take,
};
use crate::{
    Dry, Error, Mesh, Result, Sharding, Tensor,
    fingerprint::Digest,
    forms::Forms,
    ledger,
    spmd::{
        Call,
        cache::{self, Solved},
        call::{AtHand, Form},
        info::RuleForm,
        solve::Assigned,
    },
    watch::{Watch, set_watcher},
};
use smallvec::SmallVec;
use std::{
    borrow::Cow,
    cell::RefCell,
    collections::{BTreeMap, HashMap},
    panic::Location,
    rc::Rc,
    sync::{Arc, Weak},
};

/// Changes to what ops would decide by themselves, by the [class](Record::class) of their calls, so
/// that one change is for all calls that are alike.
#[derive(Clone, Default)]
pub(super) struct Guide {
    pub(super) choices: BTreeMap<u64, Rc<Assigned>>,
    /// The operands, a bit for each, whose brought form is held to the end of the step.
    pub(super) holds: BTreeMap<u64, u32>,
    /// The operands, a bit for each, that gradients keep as they lie.
    pub(super) again: BTreeMap<u64, u32>,
}

/// By what a session decides.
pub(super) enum Way {
    Guided(Rc<Guide>),
    Planned(Arc<[PlannedStep]>, OnDifference),
}

/// A form that is held until a step.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Hold {
    pub(crate) operand: u8,
    pub(crate) form: Sharding,
    /// The step that is the last to need it.
    pub(crate) until: usize,
}

/// What a call does with its operands beside bringing them.
#[derive(Clone, Default)]
pub(in crate::spmd) struct Directions {
    /// The operands, a bit for each, that gradients keep as they lie.
    pub(in crate::spmd) again: u32,
    holds: SmallVec<[Hold; 1]>,
    /// The number of the record, where one is made.
    record: Option<usize>,
}

/// What is written down of a run.
pub(super) struct Records {
    pub(super) list: Vec<Record>,
    /// By where their forms are in memory, which stays theirs as long as there is a handle.
    values: HashMap<*const Forms, (u32, Weak<Forms>)>,
    dry: Dry,
}

pub(super) struct Session {
    way: Way,
    next: usize,
    records: Option<Records>,
    /// Each with the last step that needs it.
    held: Vec<(usize, Tensor)>,
    pub(super) difference: Option<Error>,
    /// The digests of meshes, by their keys.
    meshes: SmallVec<[(u64, u64); 2]>,
}

thread_local! {
    static NOW: RefCell<Option<Session>> = const { RefCell::new(None) };
}

/// Whether a step is planned or runs under a plan on this thread.
#[inline]
pub(in crate::spmd) fn is_on() -> bool {
    NOW.with_borrow(Option::is_some)
}

impl Session {
    /// A session that writes down what a dry run does, or none.
    pub(super) fn new(way: Way, dry: Option<Dry>) -> Self {
        let records = dry.map(|dry| Records {
            list: vec![],
            values: HashMap::new(),
            dry,
        });
        Self {
            way,
            next: 0,
            records,
            held: vec![],
            difference: None,
            meshes: SmallVec::new(),
        }
    }

    /// Runs `f` in it.
    pub(super) fn run<T>(self, f: impl FnOnce() -> T) -> (T, Option<Self>) {
        struct End;
        impl Drop for End {
            fn drop(&mut self) {
                set_watcher(None);
                // Also after a panic; what is held goes outside of the borrow.
                let left = NOW.try_with(|now| now.take());
                drop(left);
            }
        }
        NOW.set(Some(self));
        set_watcher(Some(&Watcher));
        let end = End;
        let result = f();
        let session = NOW.take();
        drop(end);
        let session = session.map(|mut session| {
            session.close();
            session.held.clear();
            session
        });
        (result, session)
    }

    pub(super) fn records(self) -> Vec<Record> {
        self.records.map_or_else(Vec::new, |records| records.list)
    }

    /// Steps of the plan that were not reached.
    pub(super) fn unreached(&self) -> Option<(usize, String)> {
        match &self.way {
            Way::Planned(steps, _) if self.difference.is_none() => {
                let step = steps.get(self.next)?;
                Some((self.next, step.name()))
            }
            _ => None,
        }
    }

    fn mesh(&mut self, mesh: &Mesh) -> u64 {
        let key = mesh.key();
        if let Some((_, digest)) = self.meshes.iter().find(|(k, _)| *k == key) {
            return *digest;
        }
        let axes = mesh.axes().iter();
        let digest = axes.fold(Digest::default(), |d, (name, size)| {
            d.text(name).word(*size as u64)
        });
        self.meshes.push((key, digest.0));
        digest.0
    }

    /// Everything that a call is known by, on any device and in any process.
    fn key(&mut self, call: &Call<'_>) -> Result<u64> {
        let mesh = self.mesh(call.inputs[0].mesh());
        let mut digest = Digest::default()
            .text(call.op)
            .text(&rule_text(call)?)
            .word(mesh)
            .words([
                u64::from(call.missing) << 32 | u64::from(call.numbers),
                u64::from(call.partials),
                (call.binds.len() << 16 | call.sizes.len()) as u64,
            ]);
        for (letter, axes) in &call.binds {
            digest = digest.word((*letter as u64) << 32 | axes.len() as u64);
            digest = digest.words(axes.iter().map(|a| *a as u64));
        }
        for (letter, size) in &call.sizes {
            digest = digest.words([*letter as u64, *size as u64]);
        }
        digest = digest.words(call.data.iter().map(|n| *n as u64));
        Ok(call.inputs.iter().fold(digest, |d, x| typed(d, x)).0)
    }

    /// Ends the record of the step before.
    fn close(&mut self) {
        if let Some(records) = &mut self.records
            && let Some(last) = records.list.last_mut()
        {
            last.memory = records.dry.memory().in_use;
        }
    }

    /// Begins the next step, and takes what is no longer held.
    fn begin(&mut self) -> (usize, Vec<(usize, Tensor)>) {
        self.close();
        let number = self.next;
        self.next += 1;
        let expired = |(until, _): &mut (usize, Tensor)| *until < number;
        (number, self.held.extract_if(.., expired).collect())
    }

    /// Notes that the program does something else than the plan; an error where it must not.
    fn differs(&mut self, planned: String, found: String, detail: String) -> Result<()> {
        let error = Error::PlanDiffers {
            number: self.next,
            planned,
            found,
            detail,
        };
        let note = error.to_string();
        self.difference = Some(error.clone());
        match &self.way {
            Way::Planned(_, OnDifference::Auto) => {
                ledger::note(note);
                Ok(())
            }
            _ => Err(error),
        }
    }

    /// The step of the plan that a call of this key is; `None` without a plan, or where the program
    /// went another way.
    fn planned(
        &mut self,
        key: u64,
        found: impl FnOnce() -> Found,
    ) -> Result<Option<(Arc<[PlannedStep]>, usize)>> {
        let Way::Planned(steps, _) = &self.way else {
            return Ok(None);
        };
        if self.difference.is_some() {
            return Ok(None);
        }
        let (steps, number) = (steps.clone(), self.next);
        let (planned, detail) = match steps.get(number) {
            Some(step) if step.key == key => return Ok(Some((steps, number))),
            Some(step) => {
                let found = found();
                let detail = found.against(step);
                (step.name(), (found.name(), detail))
            }
            None => {
                let detail = format!("the plan ends after {number} steps");
                ("the end".to_string(), (found().name(), detail))
            }
        };
        let (found, detail) = detail;
        self.differs(planned, found, detail)?;
        Ok(None)
    }

    fn decide(
        &mut self,
        call: &Call<'_>,
        held: &AtHand,
        caller: &'static Location<'static>,
    ) -> Result<(Rc<Solved>, Directions, Vec<(usize, Tensor)>)> {
        let key = self.key(call)?;
        let class = class_of(key, caller);
        let mut directions = Directions::default();
        let mut solved = None;
        if let Way::Guided(guide) = &self.way {
            let guide = guide.clone();
            directions.again = guide.again.get(&class).copied().unwrap_or(0);
            if let Some(assigned) = guide.choices.get(&class) {
                solved = cache::find_assigned(call, held, assigned)?;
            }
        } else if let Some((steps, number)) = self.planned(key, || Found::call(call, caller))? {
            let step = &steps[number];
            match step.assigned(held) {
                Ok(assigned) => solved = cache::find_assigned(call, held, &assigned)?,
                Err(form) => {
                    let detail = format!("an operand is not at hand as {form}");
                    self.differs(step.name(), step.name(), detail)?;
                }
            }
            if let Take::Call { again, holds, .. } = &step.take
                && solved.is_some()
            {
                (directions.again, directions.holds) = (*again, holds.clone());
            } else if self.difference.is_none() {
                let detail = "its choice does not fit the op".to_string();
                self.differs(step.name(), step.name(), detail)?;
            }
        }
        let solved = match solved {
            Some(solved) => solved,
            None => cache::find(call, held)?,
        };
        if let Way::Guided(guide) = &self.way
            && let Some(operands) = guide.holds.get(&class)
        {
            let of = (0..call.inputs.len()).filter(|i| operands >> i & 1 == 1);
            directions.holds = of
                .map(|i| Hold {
                    operand: i as u8,
                    form: solved.solution.inputs[i].clone(),
                    until: usize::MAX,
                })
                .collect();
        }
        let (_, expired) = self.begin();
        if let Some(records) = &mut self.records {
            directions.record = Some(records.list.len());
            let operands = call.inputs.iter().enumerate().map(|(i, x)| Seen {
                value: records.value(x),
                dtype: x.dtype(),
                shape: x.shape().clone(),
                sharding: x.sharding().clone(),
                held: held[i].clone(),
                computed: x.is_computed(),
                bytes: solved.plans[i].as_ref().map_or(0, |plan| plan.recv_bytes),
            });
            let operands = operands.collect();
            records.list.push(Record {
                key,
                class,
                op: call.op,
                caller,
                mesh: call.inputs[0].mesh().clone(),
                operands,
                results: SmallVec::new(),
                did: Did::Call {
                    rule: rule_text(call)?.into_owned(),
                    solved: solved.clone(),
                    again: directions.again,
                },
                bytes: 0,
                seconds: 0.0,
                memory: 0,
            });
        }
        Ok((solved, directions, expired))
    }
}

impl Records {
    /// The number of the value of a tensor.
    fn value(&mut self, x: &Tensor) -> u32 {
        let next = self.values.len() as u32;
        let Some(forms) = x.forms() else {
            return u32::MAX;
        };
        let known = self.values.entry(Arc::as_ptr(forms));
        known.or_insert_with(|| (next, Arc::downgrade(forms))).0
    }
}

/// Calls of one key from one line are alike.
fn class_of(key: u64, caller: &Location<'_>) -> u64 {
    let place = u64::from(caller.line()) << 32 | u64::from(caller.column());
    Digest(key).text(caller.file()).word(place).0
}

fn typed(digest: Digest, x: &Tensor) -> Digest {
    digest
        .text(x.dtype().name())
        .word(x.rank() as u64)
        .words(x.dims().iter().map(|n| *n as u64))
        .sharding(x.sharding())
}

/// What the rule of a call is made from.
fn rule_text<'c>(call: &Call<'c>) -> Result<Cow<'c, str>> {
    Ok(match (call.text()?, call.form) {
        (Some(text), _) => Cow::Borrowed(text),
        (None, Form::Info(info)) => match info.rule {
            RuleForm::Built(built) => Cow::Borrowed(built.name),
            _ => Cow::Borrowed(info.name),
        },
        (None, Form::Text(text)) => Cow::Borrowed(text),
    })
}

/// What a program does where a plan says something else.
struct Found {
    op: &'static str,
    caller: &'static Location<'static>,
    mesh: String,
    rule: String,
    operands: Vec<String>,
}

impl Found {
    fn call(call: &Call<'_>, caller: &'static Location<'static>) -> Self {
        Self {
            op: call.op,
            caller,
            mesh: call.inputs[0].mesh().to_string(),
            rule: rule_text(call).map_or_else(|_| String::new(), Cow::into_owned),
            operands: call.inputs.iter().map(|x| x.type_string()).collect(),
        }
    }

    fn reshard(x: &Tensor, to: String, caller: &'static Location<'static>) -> Self {
        Self {
            op: "reshard",
            caller,
            mesh: x.mesh().to_string(),
            rule: to,
            operands: vec![x.type_string()],
        }
    }

    fn name(&self) -> String {
        format!("{} at {}", self.op, self.caller)
    }

    /// What differs from a step of a plan.
    fn against(&self, step: &PlannedStep) -> String {
        let differ = |what: &str, planned: &str, found: &str| {
            format!("{what}, planned {planned}, found {found}")
        };
        let (planned, found) = (step.operands.join(", "), self.operands.join(", "));
        if self.op != step.op {
            differ("another op", &step.op, self.op)
        } else if self.mesh != step.mesh {
            differ("another mesh", &step.mesh, &self.mesh)
        } else if found != planned {
            differ("other operands", &planned, &found)
        } else if self.rule != step.rule {
            differ("another rule", &step.rule, &self.rule)
        } else {
            "other attributes".into()
        }
    }
}

/// The solution for a call, as the session decides, and what to do beside.
pub(in crate::spmd) fn decide(
    call: &Call<'_>,
    held: &AtHand,
    caller: &'static Location<'static>,
) -> Result<(Rc<Solved>, Directions)> {
    let decided = NOW.with_borrow_mut(|now| match now {
        Some(session) => session.decide(call, held, caller),
        None => Ok((cache::find(call, held)?, Directions::default(), vec![])),
    });
    // What is no longer held goes outside of the borrow.
    decided.map(|(solved, directions, _)| (solved, directions))
}

/// Holds the forms of operands that a plan wants again later.
pub(in crate::spmd) fn hold(inputs: &[&Tensor], directions: &Directions) {
    for hold in &directions.holds {
        let x = inputs.get(usize::from(hold.operand));
        if let Some(form) = x.and_then(|x| x.in_form(&hold.form).ok().flatten()) {
            // Its memory, and not what else is held of the value.
            let form = form.detach().without_holder();
            NOW.with_borrow_mut(|now| {
                if let Some(session) = now {
                    session.held.push((hold.until, form));
                }
            });
        }
    }
}

/// Notes the results of a call.
pub(in crate::spmd) fn made(directions: &Directions, results: &[Tensor]) {
    let Some(number) = directions.record else {
        return;
    };
    NOW.with_borrow_mut(|now| {
        if let Some(records) = now.as_mut().and_then(|s| s.records.as_mut()) {
            let results = results.iter().map(|x| (records.value(x), value_of(x)));
            let results = results.collect();
            if let Some(record) = records.list.get_mut(number) {
                record.results = results;
            }
        }
    });
}

/// Tells the session of this thread.
struct Watcher;

impl Watch for Watcher {
    fn planned_reshard(&self, x: &Tensor, to: &Sharding) -> Result<Option<Tensor>> {
        planned_reshard(x, to)
    }

    fn reshard(&self, x: &Tensor, source: &Sharding, to: &Sharding, mesh: &Mesh) -> Result<()> {
        reshard(x, source, to, mesh)
    }

    fn sent(&self, bytes: u64, seconds: f64) {
        sent(bytes, seconds);
    }
}

/// Notes what is sent, on behalf of the step that runs.
fn sent(bytes: u64, seconds: f64) {
    NOW.with_borrow_mut(|now| {
        let records = now.as_mut().and_then(|s| s.records.as_mut());
        if let Some(last) = records.and_then(|r| r.list.last_mut()) {
            last.bytes += bytes;
            last.seconds += seconds;
        }
    });
}

/// From which form a plan has a tensor resharded; `None` where it does not say.
fn planned_reshard(x: &Tensor, to: &Sharding) -> Result<Option<Tensor>> {
    type Found = (Option<Tensor>, Vec<(usize, Tensor)>);
    let (planned, _expired) = NOW.with_borrow_mut(|now| -> Result<Found> {
        let Some(session) = now else {
            return Ok((None, vec![]));
        };
        let key = session.reshard_key(x, x.mesh(), to);
        let Way::Planned(steps, _) = &session.way else {
            return Ok((None, vec![]));
        };
        let step = steps.get(session.next).filter(|step| step.key == key);
        let Some(Take::Reshard { source }) = step.map(|step| &step.take) else {
            return Ok((None, vec![]));
        };
        let (source, name) = (source.clone(), step.map(|s| s.name()).unwrap_or_default());
        if session.difference.is_some() {
            return Ok((None, vec![]));
        }
        let source = match source {
            Some(source) => x.in_form(&source)?,
            None => Some(x.clone()),
        };
        let Some(source) = source else {
            let detail = "its operand is not at hand in the form that it is resharded from";
            session.differs(name.clone(), name, detail.into())?;
            return Ok((None, vec![]));
        };
        let (_, expired) = session.begin();
        session.record_reshard(key, x, source.sharding(), to, x.mesh());
        Ok((Some(source), expired))
    })?;
    Ok(planned)
}

/// Notes a reshard that sends something, to the same mesh or another one, where no plan said it.
fn reshard(x: &Tensor, source: &Sharding, to: &Sharding, mesh: &Mesh) -> Result<()> {
    let _expired = NOW.with_borrow_mut(|now| {
        let Some(session) = now else {
            return Ok(vec![]);
        };
        let key = session.reshard_key(x, mesh, to);
        let found = || Found::reshard(x, target_text(x, mesh, to), caller());
        session.planned(key, found)?;
        let (_, expired) = session.begin();
        session.record_reshard(key, x, source, to, mesh);
        Ok::<_, Error>(expired)
    })?;
    Ok(())
}

/// Where a reshard goes.
fn target_text(x: &Tensor, mesh: &Mesh, to: &Sharding) -> String {
    let to = to.type_string(x.dtype(), x.shape(), mesh);
    match mesh == x.mesh() {
        true => to,
        false => format!("{to} on {mesh}"),
    }
}

/// The line on whose behalf something runs.
fn caller() -> &'static Location<'static> {
    ledger::outermost().map_or(Location::caller(), |(_, caller)| caller)
}

impl Session {
    fn reshard_key(&mut self, x: &Tensor, mesh: &Mesh, to: &Sharding) -> u64 {
        let (from, there) = (self.mesh(x.mesh()), self.mesh(mesh));
        let digest = Digest::default().text("reshard").words([from, there]);
        typed(digest, x).sharding(to).0
    }

    fn record_reshard(
        &mut self,
        key: u64,
        x: &Tensor,
        source: &Sharding,
        to: &Sharding,
        mesh: &Mesh,
    ) {
        let Some(records) = &mut self.records else {
            return;
        };
        let caller = caller();
        let seen = Seen {
            value: records.value(x),
            dtype: x.dtype(),
            shape: x.shape().clone(),
            sharding: x.sharding().clone(),
            held: Vec::new(),
            computed: x.is_computed(),
            bytes: 0,
        };
        records.list.push(Record {
            key,
            class: class_of(key, caller),
            op: "reshard",
            caller,
            mesh: x.mesh().clone(),
            operands: smallvec::smallvec![seen],
            results: SmallVec::new(),
            did: Did::Reshard {
                target: target_text(x, mesh, to),
                source: (source != x.sharding()).then(|| source.clone()),
                to: to.clone(),
                across: mesh != x.mesh(),
            },
            bytes: 0,
            seconds: 0.0,
            memory: 0,
        });
    }
}

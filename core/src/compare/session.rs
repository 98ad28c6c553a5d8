//! Sees every value of a run: writes it down, or holds it against what was written down.

use super::{
    Compare, Difference, Finding, Given, Run, Saved, Tolerance, Why,
    elements::hash,
    judge::{Judge, magnitude},
    store::{Slot, Store},
    trace::{Entry, Key},
    value::{self, Part, Value},
};
use crate::{
    Error, OperandType, Result, Tensor,
    forms::Forms,
    observe::{Call, Called, Observer},
};
use serde_json::{Value as Json, json};
use std::{
    collections::HashMap,
    panic::Location,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

/// Ops that move values and change none: judged by what they were given, in each run by itself,
/// because a program on one device has nothing to move.
const MOVES: [&str; 3] = ["reshard", "full_tensor", "to_device"];

/// A comparison does not go on for ever where everything differs.
const MOST_FINDINGS: usize = 1000;

/// What a session does with what it sees.
pub(super) enum Mode {
    /// Writes down hashes, and values too.
    Record { values: bool },
    /// Holds values against those written down.
    Compare,
    /// Keeps the operands of one call.
    Capture { op: String, line: String, nth: u32 },
}

/// What a run left.
#[derive(Default)]
pub(super) struct Recorded {
    pub(super) entries: Vec<Entry>,
    /// For each entry, where values were kept.
    pub(super) slots: Vec<Slot>,
}

/// What an op read, beside what it gave.
pub(super) struct Captured {
    pub(super) attributes: Json,
    pub(super) operands: Vec<Saved>,
    /// What it gave in both runs.
    pub(super) values: Option<(Saved, Saved)>,
}

pub(super) struct State {
    pub(super) recorded: Recorded,
    pub(super) store: Store,
    index: HashMap<Key, usize>,
    seen: Vec<bool>,
    numbers: HashMap<(&'static str, Location<'static>), u32>,
    again: HashMap<Key, u32>,
    /// What the last call was told beside its operands.
    told: Option<(Called, Json)>,
    /// Partial values that are the same as those of the other run, by their forms.
    partial: HashMap<usize, (Weak<Forms>, usize)>,
    /// By the call whose result they are for, the scale of gradients that are partial.
    scales: HashMap<Call, f64>,
    /// How the operands of each call lay.
    pub(super) lay: HashMap<(String, String, u32), Vec<String>>,
    pub(super) findings: Vec<Finding>,
    pub(super) captured: Option<Captured>,
    pub(super) values: usize,
    pub(super) unread: usize,
    stopped: bool,
}

pub(super) struct Session {
    mode: Mode,
    settings: Compare,
    state: Mutex<State>,
}

impl State {
    /// Remembers a value that is not put in the place of another, because it is partial: its entry,
    /// and the scale of its rounding where it is a gradient.
    fn note_partial(&mut self, event: &Event<'_>, at: Option<usize>) {
        if let (Some(forms), Some(at)) = (event.value.forms(), at) {
            self.partial
                .retain(|_, (forms, _)| forms.strong_count() > 0);
            let known = (Arc::downgrade(forms), at);
            self.partial.insert(Arc::as_ptr(forms) as usize, known);
        }
        if let Some(to) = event.to {
            let scale = self.scales.entry(to).or_default();
            *scale = scale.max(event.least_scale());
        }
    }

    /// The entry of a partial value.
    fn known(&self, forms: &Arc<Forms>) -> Option<usize> {
        let (known, at) = self.partial.get(&(Arc::as_ptr(forms) as usize))?;
        (known.strong_count() > 0).then_some(*at)
    }

    /// The scale of what a gradient was added up of.
    fn scale(&self, event: &Event<'_>) -> f64 {
        self.scales.get(&event.call()).copied().unwrap_or(0.0)
    }

    /// A value that was written down.
    fn value(&mut self, at: usize) -> Result<Value> {
        let State {
            recorded, store, ..
        } = self;
        let entry = &recorded.entries[at];
        let bytes = match recorded.slots.get(at) {
            Some(slot) => store.get(slot)?.into_owned(),
            None => vec![],
        };
        Ok(Value {
            dtype: entry.dtype,
            shape: entry.shape.clone(),
            bytes,
        })
    }

    /// What a call was told beside its operands, where that is known.
    fn attributes(&self, called: &Called) -> Json {
        let same =
            |of: &Called| (of.op, of.nth, of.caller) == (called.op, called.nth, called.caller);
        match &self.told {
            Some((of, attributes)) if same(of) => attributes.clone(),
            _ => Json::Null,
        }
    }
}

/// How the line of a call is written.
pub(super) fn line(caller: &Location<'_>) -> String {
    caller.to_string()
}

impl Session {
    pub(super) fn new(mode: Mode, settings: &Compare, recorded: Recorded, store: Store) -> Self {
        let entries = recorded.entries.iter().enumerate();
        let index = entries.map(|(i, e)| (e.key.clone(), i)).collect();
        Self {
            mode,
            settings: settings.clone(),
            state: Mutex::new(State {
                index,
                seen: vec![false; recorded.entries.len()],
                recorded,
                store,
                numbers: HashMap::new(),
                again: HashMap::new(),
                told: None,
                partial: HashMap::new(),
                scales: HashMap::new(),
                lay: HashMap::new(),
                findings: vec![],
                captured: None,
                values: 0,
                unread: 0,
                stopped: false,
            }),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How far a value may be off. What is partial is rounded as its terms are stored.
    fn tolerance(&self, event: &Event<'_>) -> Tolerance {
        let partial = event.operands.iter().filter(|t| t.sharding().is_partial());
        let dtypes = partial.map(|t| t.dtype()).chain([event.value.dtype()]);
        dtypes
            .map(|dtype| self.settings.tolerance_of(dtype))
            .fold(Tolerance::BITS, Tolerance::or)
    }

    fn run(&self) -> Run {
        match self.mode {
            Mode::Compare => Run::B,
            _ => Run::A,
        }
    }

    /// Writes a finding down; an error where the program is to end with it.
    fn found(&self, state: &mut State, finding: Finding) -> Result<()> {
        let what = format!("{} at {}", finding.what(), finding.caller);
        state.findings.push(finding);
        if self.settings.all && state.findings.len() < MOST_FINDINGS {
            return Ok(());
        }
        state.stopped = true;
        Err(stop(&what))
    }

    /// The finding that a value is.
    fn finding(&self, event: &Event<'_>, other: Option<&Entry>, why: Why) -> Finding {
        let Event { called, given, .. } = *event;
        Finding {
            run: self.run(),
            op: called.op.into(),
            within: called.within.map(String::from),
            given,
            caller: line(called.caller),
            nth: called.nth,
            operands: event.types(),
            ty: event.value.type_string(),
            other: other.map(|entry| entry.ty.clone()),
            why,
        }
    }

    /// Keeps what the op at which runs part read and gave.
    fn capture(&self, state: &mut State, event: &Event<'_>, expected: &Value) -> Result<()> {
        if !self.settings.reproduce || !state.findings.is_empty() {
            return Ok(());
        }
        let attributes = match event.is_move() {
            true => json!({ "to": OperandType::from(event.value).sharding }),
            false => state.attributes(event.called),
        };
        let expected = Saved {
            dtype: expected.dtype,
            shape: expected.shape.clone(),
            sharding: String::new(),
            bytes: expected.bytes.clone(),
        };
        let operands = event.operands.iter().map(|t| Saved::of(t));
        state.captured = Some(Captured {
            attributes,
            operands: operands.collect::<Result<_>>()?,
            values: Some((expected, Saved::of(event.value)?)),
        });
        Ok(())
    }

    /// How a value differs from one that it should be, somewhere else.
    fn from_given(&self, event: &Event<'_>, given: &Tensor) -> Result<(Value, Option<Difference>)> {
        let before = Value::of(given, &value::parts(given)?);
        let judge = Judge {
            // What only moves has the same bits; what is added up on the way is rounded, and held
            // against a sum of another order.
            tolerance: match given.sharding().is_partial() {
                true => self.tolerance(event).or(Tolerance::of(event.value.dtype())),
                false => Tolerance::BITS,
            },
            least_scale: &|| terms_scale(given),
        };
        let difference = judge.difference(&before, &value::parts(event.value)?);
        Ok((before, difference))
    }

    /// Whether an op that moves by another name gave what it was given.
    fn gives_what_it_got(&self, event: &Event<'_>) -> Result<bool> {
        let alike =
            |t: &&&Tensor| t.dtype() == event.value.dtype() && t.shape() == event.value.shape();
        for given in event.operands.iter().filter(alike) {
            if self.from_given(event, given)?.1.is_none() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Judges an op that only moves.
    fn moved(&self, state: &mut State, event: &Event<'_>) -> Result<Option<Tensor>> {
        let Some(from) = event.operands.first() else {
            return Ok(None);
        };
        let (before, difference) = self.from_given(event, from)?;
        state.values += 1;
        if let Some(difference) = difference {
            self.capture(state, event, &before)?;
            let finding = self.finding(event, None, Why::Moved(difference));
            return self.found(state, finding).map(|()| None);
        }
        // What was partial has the rounding of this run until it is added up.
        let known = from.forms().and_then(|forms| state.known(forms));
        match known.filter(|_| self.settings.in_step) {
            Some(at) => state.value(at)?.in_place_of(event.value).map(Some),
            None => Ok(None),
        }
    }

    /// What a value is known by.
    fn key(&self, state: &mut State, event: &Event<'_>) -> Key {
        let Event { called, given, .. } = *event;
        let mut key = Key {
            given,
            op: called.op.into(),
            line: line(called.caller),
            nth: called.nth,
            again: 0,
        };
        let again = state.again.entry(key.clone()).or_default();
        key.again = *again;
        *again += 1;
        key
    }

    fn record(&self, state: &mut State, event: &Event<'_>, values: bool) -> Result<()> {
        let parts = value::parts(event.value)?;
        let whole = Value::of(event.value, &parts);
        let scale = state.scale(event);
        let judge = Judge {
            tolerance: self.tolerance(event),
            least_scale: &|| event.least_scale().max(scale),
        };
        if let Some(difference) = judge.difference(&whole, &parts) {
            self.capture(state, event, &whole)?;
            let finding = self.finding(event, None, Why::Ranks(difference));
            return self.found(state, finding);
        }
        if event.value.sharding().is_partial() {
            state.note_partial(event, None);
        }
        let key = self.key(state, event);
        let entry = Entry {
            key,
            within: event.called.within.map(String::from),
            dtype: whole.dtype,
            shape: whole.shape,
            ty: event.value.type_string(),
            operands: event.types(),
            hash: hash(&whole.bytes),
            moves: self.gives_what_it_got(event)?,
        };
        state.recorded.entries.push(entry);
        state.values += 1;
        if values {
            let slot = state.store.put(whole.bytes)?;
            state.recorded.slots.push(slot);
        }
        Ok(())
    }

    /// Holds a value against the one of the other run; what to put in its place, where that is
    /// another one.
    fn compare(&self, state: &mut State, event: &Event<'_>) -> Result<Option<Tensor>> {
        let key = self.key(state, event);
        if let Given::Result(0) = event.given {
            let operands = event.operands.iter();
            let lay = operands.map(|t| OperandType::from(*t).sharding);
            let call = (key.op.clone(), key.line.clone(), key.nth);
            state.lay.insert(call, lay.collect());
        }
        let Some(&at) = state.index.get(&key) else {
            // Where gradients meet depends on what was moved, also by an op of another name.
            if matches!(event.given, Given::Sum(_)) || self.gives_what_it_got(event)? {
                return Ok(None);
            }
            let finding = self.finding(event, None, Why::NotInOther);
            return self.found(state, finding).map(|()| None);
        };
        state.seen[at] = true;
        let State {
            recorded,
            store,
            scales,
            ..
        } = &mut *state;
        let entry = recorded.entries[at].clone();
        let x = event.value;
        if entry.dtype != x.dtype() || entry.shape != *x.shape() {
            let finding = self.finding(event, Some(&entry), Why::Type);
            return self.found(state, finding).map(|()| None);
        }
        let parts = value::parts(x)?;
        let Some(slot) = recorded.slots.get(at) else {
            state.values += 1;
            return self.compare_bits(state, event, &entry, &parts);
        };
        let scale = scales.get(&event.call()).copied().unwrap_or(0.0);
        let a = Value {
            dtype: entry.dtype,
            shape: entry.shape.clone(),
            bytes: store.get(slot)?.into_owned(),
        };
        let judge = Judge {
            tolerance: self.tolerance(event),
            least_scale: &|| event.least_scale().max(scale),
        };
        if let Some(difference) = judge.difference(&a, &parts) {
            self.capture(state, event, &a)?;
            let finding = self.finding(event, Some(&entry), Why::Values(difference));
            self.found(state, finding)?;
        } else {
            state.values += 1;
        }
        let same = parts.iter().all(|part| part.is_of(&a));
        if x.sharding().is_partial() {
            // Where it has the same bits, so has what becomes of it.
            state.note_partial(event, (!same).then_some(at));
        }
        match self.settings.in_step && !same {
            true => a.in_place_of(x).map(Some),
            false => Ok(None),
        }
    }

    /// Judges by hashes alone.
    fn compare_bits(
        &self,
        state: &mut State,
        event: &Event<'_>,
        entry: &Entry,
        parts: &[Part],
    ) -> Result<Option<Tensor>> {
        let whole = Value::of(event.value, parts);
        // Ranks that have the same box and other bits.
        if hash(&whole.bytes) == entry.hash && parts.iter().all(|part| part.is_of(&whole)) {
            return Ok(None);
        }
        let finding = self.finding(event, Some(entry), Why::Bits);
        self.found(state, finding).map(|()| None)
    }

    /// What the other run had and this one did not come to, in a run that ended by itself.
    pub(super) fn missing(&self) -> Option<Finding> {
        let state = self.state();
        let entries = state.recorded.entries.iter().zip(&state.seen);
        let mut missing = entries.filter(|(_, seen)| !**seen).map(|(entry, _)| entry);
        let is_needed = |e: &&Entry| !e.moves && !matches!(e.key.given, Given::Sum(_));
        let entry = missing.find(is_needed)?;
        Some(Finding {
            run: Run::A,
            op: entry.key.op.clone(),
            within: entry.within.clone(),
            given: entry.key.given,
            caller: entry.key.line.clone(),
            nth: entry.key.nth,
            operands: entry.operands.clone(),
            ty: entry.ty.clone(),
            other: None,
            why: Why::NotInOther,
        })
    }

    pub(super) fn into_state(self) -> State {
        self.state
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

fn stop(what: &str) -> Error {
    let detail = format!("the runs part at {what}, and the program ends here");
    Error::argument("compare", "program", detail)
}

/// A value that was seen.
struct Event<'a> {
    called: &'a Called,
    given: Given,
    operands: &'a [&'a Tensor],
    /// Of a gradient, the call whose result it is for.
    to: Option<Call>,
    value: &'a Tensor,
}

impl Event<'_> {
    /// Whether it is what was given, somewhere else.
    fn is_move(&self) -> bool {
        MOVES.contains(&self.called.op)
            && matches!(self.given, Given::Result(_) | Given::Gradient(_))
    }

    fn call(&self) -> Call {
        (self.called.op, self.called.caller, self.called.nth)
    }

    fn types(&self) -> Vec<String> {
        self.operands.iter().map(|t| t.type_string()).collect()
    }

    /// The scale of what was added up, where that may be larger than the result.
    fn least_scale(&self) -> f64 {
        let floats = || self.operands.iter().filter(|t| t.dtype().is_float());
        let largest = |t: &Tensor| {
            let parts = value::parts(t).unwrap_or_default();
            let magnitudes = parts.iter().map(|p| magnitude(t.dtype(), &p.bytes));
            magnitudes.fold(0.0, f64::max)
        };
        let elements = floats().map(|t| t.numel()).max().unwrap_or(0);
        let terms = elements as f64 / self.value.numel().max(1) as f64;
        let of_sum = if terms > 1.0 {
            let product = |all: f64, t: &&Tensor| all * largest(t);
            0.1 * terms.sqrt() * floats().fold(1.0, product)
        } else if matches!(self.given, Given::Gradient(_)) {
            // Of a gradient that is the difference of others nothing but rounding may be left.
            0.05 * terms * floats().map(|t| largest(t)).fold(0.0, f64::max)
        } else {
            0.0
        };
        // Terms that are much larger than what they add up to, here or in what the op had to add up.
        let of_operand = |t: &Tensor| match t.sharding().is_partial() {
            true => terms_scale(t) / largest(t).max(f64::MIN_POSITIVE),
            false => 1.0,
        };
        let worse = floats().map(|t| of_operand(t)).fold(1.0, f64::max);
        let own = match self.value.sharding().is_partial() {
            true => terms_scale(self.value),
            false => 0.0,
        };
        let result = match worse > 1.0 {
            true => worse.min(1e6) * largest(self.value),
            false => 0.0,
        };
        of_sum.max(own).max(result)
    }
}

/// The largest magnitude among the terms of a value.
fn terms_scale(x: &Tensor) -> f64 {
    let held = 0..x.mesh().held().len();
    held.filter_map(|i| value::parts(&x.held(i)).ok())
        .flatten()
        .map(|part| magnitude(x.dtype(), &part.bytes))
        .fold(0.0, f64::max)
}

impl Observer for Session {
    fn number(
        &self,
        op: &'static str,
        caller: &'static Location<'static>,
        within: Option<&'static str>,
    ) -> u32 {
        // What is moved for an op is no call of the program, and the other run may have none of it.
        if within.is_some() && MOVES.contains(&op) {
            return 0;
        }
        let mut state = self.state();
        let number = state.numbers.entry((op, *caller)).or_default();
        *number += 1;
        *number - 1
    }

    fn told(&self, called: &Called, attributes: Json) {
        self.state().told = Some((*called, attributes));
    }

    fn see(
        &self,
        called: &Called,
        given: Given,
        operands: &[&Tensor],
        to: Option<Call>,
        value: &mut Tensor,
    ) -> Result<()> {
        let mut state = self.state();
        if state.stopped {
            // The program went on after it was told to end.
            return Err(stop("an op before this one"));
        }
        let event = Event {
            called,
            given,
            operands,
            to,
            value,
        };
        if !value::is_readable(value) || !operands.iter().all(|t| value::is_readable(t)) {
            state.unread += 1;
            return Ok(());
        }
        let result = match &self.mode {
            Mode::Capture { op, line: at, nth } => {
                if given == Given::Result(0)
                    && called.op == op
                    && called.nth == *nth
                    && line(called.caller) == *at
                {
                    state.captured = Some(Captured {
                        attributes: state.attributes(called),
                        operands: operands
                            .iter()
                            .map(|t| Saved::of(t))
                            .collect::<Result<_>>()?,
                        values: None,
                    });
                    state.stopped = true;
                    return Err(stop("what was looked for"));
                }
                Ok(None)
            }
            _ if event.is_move() => self.moved(&mut state, &event),
            Mode::Record { values } => self.record(&mut state, &event, *values).map(|()| None),
            Mode::Compare => self.compare(&mut state, &event),
        };
        if let Some(other) = result? {
            *value = other;
        }
        Ok(())
    }
}

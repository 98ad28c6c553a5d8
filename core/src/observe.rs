//! Who sees the value of every op that a program calls. An op may run others: those are steps of
//! it, and only the outermost is seen. Ops are below those who compare, so they do not know them.
//!
//! An op passes here by [`op`], or by `grad::record`, which does so for all that have a gradient; a
//! backward pass by [`pulled`], [`summed`] and [`total`]. Where nobody looks, all of it is a
//! look at a variable of the thread.

use crate::{Dry, Result, Tensor, ledger, scoped::Scoped, tensor::Outputs};
use serde_json::Value;
use smallvec::{SmallVec, smallvec};
use std::{
    cell::{Cell, RefCell},
    panic::Location,
    sync::Arc,
};

/// What an op gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Given {
    /// Its result of this number.
    Result(usize),
    /// The gradient of its operand of this number, which its own part of a backward pass computed.
    Gradient(usize),
    /// The sum of the gradients that all users of its result of this number gave.
    Sum(usize),
    /// The gradient of a parameter as a program got it: added up, and reduced over the mesh as far
    /// as the pass does that.
    Total,
}

/// A call, as the program made it.
#[derive(Clone, Copy)]
pub(crate) struct Called {
    pub(crate) op: &'static str,
    pub(crate) caller: &'static Location<'static>,
    /// The op that the program called, where that is made of several.
    pub(crate) within: Option<&'static str>,
    /// How many calls of the op from this line were before it.
    pub(crate) nth: u32,
}

/// A node of the tape that nobody saw being made.
pub(crate) const UNSEEN: u32 = u32::MAX;

/// An op, its line and the number of the call: what a node of the tape is known by.
pub(crate) type Call = (&'static str, &'static Location<'static>, u32);

/// Sees values, and may put others in their place.
pub(crate) trait Observer: Send + Sync {
    /// The number of a call of an op from a line, perhaps as a step of another.
    fn number(
        &self,
        op: &'static str,
        caller: &'static Location<'static>,
        within: Option<&'static str>,
    ) -> u32;

    /// A value that was made of `operands`; of a gradient, the call whose result it is for.
    fn see(
        &self,
        called: &Called,
        given: Given,
        operands: &[&Tensor],
        to: Option<Call>,
        value: &mut Tensor,
    ) -> Result<()>;

    /// What a call was told beside its tensors, before its results are seen.
    fn told(&self, called: &Called, attributes: Value);
}

/// The observer of a thread.
pub(crate) type Observing = Option<Arc<dyn Observer>>;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Nobody,
    Looking,
    /// Inside of an op.
    Inside,
}

thread_local! {
    static STATE: Cell<State> = const { Cell::new(State::Nobody) };
    static NOW: RefCell<Observing> = const { RefCell::new(None) };
    static TOLD: RefCell<Option<Value>> = const { RefCell::new(None) };
}

/// Ends what set the state.
pub(crate) struct StateScope(State);

impl StateScope {
    fn set(state: State) -> Self {
        Self(STATE.replace(state))
    }
}

impl Drop for StateScope {
    fn drop(&mut self) {
        let _ = STATE.try_with(|state| state.set(self.0));
    }
}

/// The observer of this thread.
pub(crate) fn capture() -> Observing {
    NOW.with_borrow(Clone::clone)
}

/// Until it is dropped, this thread has this observer.
pub(crate) fn enter(observer: Observing) -> (StateScope, Scoped<Observing>) {
    let state = match &observer {
        Some(_) => State::Looking,
        None => State::Nobody,
    };
    (StateScope::set(state), Scoped::set(&NOW, observer))
}

/// Whether somebody looks, here or at the op that this is a step of.
#[inline]
pub(crate) fn is_observed() -> bool {
    STATE.get() != State::Nobody
}

/// Until it is dropped, what runs is a step of something else and not seen.
#[inline]
pub(crate) fn unseen() -> Option<StateScope> {
    (STATE.get() == State::Looking).then(|| StateScope::set(State::Inside))
}

/// Until it is dropped, what runs is the program's own, although an op runs it: a function that is
/// computed again for its gradient.
pub(crate) fn program() -> Option<(StateScope, Scoped<Vec<ledger::Caller>>)> {
    let observed = STATE.get() == State::Inside && NOW.with_borrow(Option::is_some);
    observed.then(|| (StateScope::set(State::Looking), ledger::on_nobodys_behalf()))
}

/// A call that is being seen.
pub(crate) struct Step {
    caller: &'static Location<'static>,
    within: Option<&'static str>,
    told: Option<Value>,
    _inside: StateScope,
}

/// Begins a call, where somebody looks and it is no step of another.
#[inline]
#[track_caller]
pub(crate) fn begin() -> Option<Step> {
    if STATE.get() != State::Looking {
        return None;
    }
    Step::new(Location::caller())
}

impl Step {
    #[cold]
    fn new(caller: &'static Location<'static>) -> Option<Self> {
        let told = TOLD.take();
        if Dry::is_on() {
            return None;
        }
        let outermost = ledger::outermost();
        Some(Self {
            caller: outermost.map_or(caller, |(_, caller)| caller),
            within: outermost.map(|(op, _)| op),
            told,
            _inside: StateScope::set(State::Inside),
        })
    }

    /// Ends a call: its results are seen. The number of the call.
    pub(crate) fn end(
        self,
        op: &'static str,
        operands: &[&Tensor],
        out: &mut impl Results,
    ) -> Result<u32> {
        let Some(observer) = capture() else {
            return Ok(UNSEEN);
        };
        let called = Called {
            op,
            caller: self.caller,
            within: self.within.filter(|within| *within != op),
            nth: observer.number(op, self.caller, self.within),
        };
        if let Some(attributes) = self.told {
            observer.told(&called, attributes);
        }
        for (i, value) in out.tensors().into_iter().enumerate() {
            observer.see(&called, Given::Result(i), operands, None, value)?;
        }
        Ok(called.nth)
    }
}

/// Whether the results of ops are looked at.
pub(crate) fn is_on() -> bool {
    STATE.get() == State::Looking
}

/// What a call is told beside its tensors, by the names that the op has for it: for whoever wants
/// to make the call again. Said right before the op begins.
#[inline]
pub(crate) fn tell(attributes: impl FnOnce() -> Value) {
    if STATE.get() == State::Looking {
        TOLD.set(Some(attributes()));
    }
}

/// The tensors among what an op gives.
pub(crate) trait Results {
    fn tensors(&mut self) -> SmallVec<[&mut Tensor; 2]>;
}

impl Results for Tensor {
    fn tensors(&mut self) -> SmallVec<[&mut Tensor; 2]> {
        smallvec![self]
    }
}

impl Results for (Tensor, Tensor) {
    fn tensors(&mut self) -> SmallVec<[&mut Tensor; 2]> {
        smallvec![&mut self.0, &mut self.1]
    }
}

impl Results for Outputs {
    fn tensors(&mut self) -> SmallVec<[&mut Tensor; 2]> {
        self.iter_mut().collect()
    }
}

impl Results for Vec<Tensor> {
    fn tensors(&mut self) -> SmallVec<[&mut Tensor; 2]> {
        self.iter_mut().collect()
    }
}

/// Runs an op that passes nowhere else.
#[track_caller]
pub(crate) fn op<R: Results>(
    op: &'static str,
    operands: &[&Tensor],
    run: impl FnOnce() -> Result<R>,
) -> Result<R> {
    let step = begin();
    // Closures do not know who called: what they communicate is on behalf of the op's caller.
    let scope = match (operands.first(), &step) {
        (_, Some(step)) => Some(ledger::enter(op, step.caller)),
        (Some(x), None) => ledger::on_behalf_of(op, x),
        (None, None) => None,
    };
    let mut out = run()?;
    drop(scope);
    if let Some(step) = step {
        step.end(op, operands, &mut out)?;
    }
    Ok(out)
}

/// A call of an op that is awaited.
pub(crate) struct Awaiting {
    op: &'static str,
    step: (&'static Location<'static>, Option<&'static str>),
    operands: SmallVec<[Tensor; 2]>,
}

/// Begins a call that will be awaited. What is done for it at once is not seen, until the scope is
/// dropped.
#[track_caller]
pub(crate) fn awaiting(
    op: &'static str,
    operands: &[&Tensor],
) -> (Option<Awaiting>, Option<StateScope>) {
    let Some(step) = begin() else {
        return (None, None);
    };
    let awaiting = Awaiting {
        op,
        step: (step.caller, step.within),
        operands: operands.iter().map(|t| (*t).clone()).collect(),
    };
    (Some(awaiting), Some(step._inside))
}

/// A call as it goes on: its steps are not seen, its results are.
pub(crate) async fn awaited<R: Results>(
    call: Option<Awaiting>,
    run: impl Future<Output = Result<R>>,
) -> Result<R> {
    let Some(call) = call else {
        return run.await;
    };
    let mut run = std::pin::pin!(run);
    let unseen_steps = std::future::poll_fn(|context| {
        let _unseen = unseen();
        run.as_mut().poll(context)
    });
    let mut out = unseen_steps.await?;
    if let Some(inside) = unseen() {
        let (caller, within) = call.step;
        let step = Step {
            caller,
            within,
            told: None,
            _inside: inside,
        };
        let operands: SmallVec<[&Tensor; 2]> = call.operands.iter().collect();
        step.end(call.op, &operands, &mut out)?;
    }
    Ok(out)
}

/// The number of a tensor that gradients are wanted for, among those of its line.
pub(crate) fn leaf(caller: &'static Location<'static>) -> u32 {
    match (STATE.get(), capture()) {
        (State::Looking, Some(observer)) if !Dry::is_on() => observer.number("leaf", caller, None),
        _ => UNSEEN,
    }
}

/// A value that a backward pass has for a call.
fn of_pass(
    (op, caller, nth): Call,
    given: Given,
    operands: &[&Tensor],
    to: Option<Call>,
    value: &mut Tensor,
) -> Result<()> {
    let Some(observer) = capture().filter(|_| nth != UNSEEN) else {
        return Ok(());
    };
    let called = Called {
        op,
        caller,
        within: None,
        nth,
    };
    let _inside = StateScope::set(State::Inside);
    observer.see(&called, given, operands, to, value)
}

/// The gradients of a call's operands, from those of its results.
pub(crate) fn pulled(
    step: Step,
    call: Call,
    gradients: &[Option<Tensor>],
    to: &[Option<Call>],
    pulled: &mut [Option<Tensor>],
) -> Result<()> {
    let operands: SmallVec<[&Tensor; 2]> = gradients.iter().flatten().collect();
    for (i, value) in pulled.iter_mut().enumerate() {
        if let Some(value) = value {
            let to = to.get(i).copied().flatten();
            of_pass(call, Given::Gradient(i), &operands, to, value)?;
        }
    }
    drop(step);
    Ok(())
}

/// The sum of what all users of a call's result gave.
pub(crate) fn summed(call: Call, slot: usize, value: &mut Tensor) -> Result<()> {
    match STATE.get() {
        State::Looking if !Dry::is_on() => of_pass(call, Given::Sum(slot), &[], None, value),
        _ => Ok(()),
    }
}

/// The gradient of a parameter, as a program gets it.
pub(crate) fn total(call: Call, mut value: Tensor) -> Result<Tensor> {
    if STATE.get() == State::Looking && !Dry::is_on() {
        of_pass(call, Given::Total, &[], None, &mut value)?;
    }
    Ok(value)
}

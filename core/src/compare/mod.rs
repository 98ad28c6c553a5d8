//! Where two runs of one program part: on two devices, or on a device and a mesh.
//!
//! [`compare()`] runs a program in two places, holds the value of every op of the second run against
//! that of the first, and names the first op that is not the same, with the line that called it and
//! the largest difference.
//!
//! ```
//! # use anymesh_core::{Mesh, Tensor, DType, Result, backend::Kernel, compare::compare};
//! # let cpu = anymesh_backend_cpu::device();
//! // A device on which exponentials come out wrong.
//! let broken = cpu.decorated(|cpu, kernel| match kernel.op() {
//!     "exp" => Ok([cpu.upload(&[0; 24])?].into_iter().collect()),
//!     _ => cpu.launch(kernel),
//! });
//! let program = |mesh: &Mesh| {
//!     let x = Tensor::ones([2, 3], DType::F32, mesh)?;
//!     x.mul(2.0)?.exp()?.sum(&[1], false)?.log()
//! };
//! let found = compare(program, &Mesh::single(&cpu), &Mesh::new("x=2", &broken)?)?;
//! let first = found.first().expect("they part");
//! assert_eq!(first.op, "exp");
//! # Ok::<(), anymesh_core::Error>(())
//! ```
//!
//! **What is compared** are the ops that the program calls, by their global values: a softmax that
//! runs as six steps on a mesh and as one kernel on a device is one value in both. In a backward
//! pass it is the gradient that each op gives each of its operands, the sum where several ops used
//! one tensor, and the gradient of each parameter as the program gets it. An update of an optimizer
//! is an op as any other. What only moves values (`reshard`, `full_tensor`, `to_device`) is judged
//! by what was given to it, in each run by itself: a program on one device has nothing to move.
//! Values are read from each rank as it has them, and what is partial is added up on the host, so
//! no transport and no rule has a part in the judgement; ranks that should hold the same and do not
//! are found.
//!
//! **In step.** Rounding adds up along a program, and what is chosen by it (the largest of two
//! equal values) makes small differences large. So the second run goes on from the values of the
//! first: after an op was judged its result is replaced, and each op is judged by what it does with
//! the same operands. [`Compare::in_step`] turns that off. What is partial on a mesh is not replaced,
//! because its terms are not known.
//!
//! **How it is found again.** A call is known by its op, its line and how many calls of the op came
//! from there before; so both runs may differ in what they do between (moving things), and a program
//! that takes another way is told from one that computes another value.
//!
//! What is read to decide in the host program, data that it uploads and random numbers, which are
//! functions of their key, are the same in both runs. The program runs twice, so it must not change
//! what it depends on. Ops that other threads run are seen where those take the
//! [`Context`](crate::Context) along.

mod elements;
mod finding;
mod judge;
mod reproduction;
mod session;
mod store;
mod trace;
mod value;

pub use crate::observe::Given;
pub use finding::{Comparison, Finding, Run, Why};
pub use judge::{Difference, Tolerance};
pub use reproduction::{Reproduction, Saved};
pub use trace::Trace;

use crate::{DType, Error, Mesh, Result, Tensor, observe};
use session::{Mode, Recorded, Session, State};
use std::sync::Arc;
use store::Store;

/// How two runs are compared.
///
/// ```
/// # use anymesh_core::{Mesh, Tensor, DType, Result, compare::Compare};
/// # let cpu = anymesh_backend_cpu::device();
/// let program = |mesh: &Mesh| Tensor::ones([4], DType::F32, mesh)?.exp();
/// let compare = Compare { all: true, ..Compare::default() };
/// let found = compare.run(program, &Mesh::single(&cpu), &Mesh::new("x=2", &cpu)?)?;
/// assert!(found.is_same(), "{found}");
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Compare {
    /// How far values may be apart; where it is not given, by their dtype ([`Tolerance::of`]).
    pub tolerance: Option<Tolerance>,
    /// Whether the second run goes on from the values of the first after each op.
    pub in_step: bool,
    /// Whether the second run goes on after the first finding, to find all.
    pub all: bool,
    /// Whether the first finding is to come with what it takes to call its op alone.
    pub reproduce: bool,
    /// How many bytes of the first run's values are kept in memory; the others go to a file in the
    /// folder for temporary files, which is removed.
    pub memory: u64,
}

impl Default for Compare {
    fn default() -> Self {
        Self {
            tolerance: None,
            in_step: true,
            all: false,
            reproduce: false,
            memory: 2 << 30,
        }
    }
}

/// Runs a program in two places and tells the first op at which it parts, as
/// [`Compare::default`] does.
pub fn compare<T, E: From<Error>>(
    program: impl FnMut(&Mesh) -> Result<T, E>,
    a: &Mesh,
    b: &Mesh,
) -> Result<Comparison, E> {
    Compare::default().run(program, a, b)
}

/// Runs a function as one op of a program that is compared: only what it gives is, by this name and
/// the line of the caller. For functions that go another way on each mesh, such as one that adds up
/// first what lies alike.
///
/// ```
/// # use anymesh_core::{DType, Mesh, Tensor, compare::{as_one, compare}};
/// # let cpu = anymesh_backend_cpu::device();
/// let program = |mesh: &Mesh| {
///     let x = Tensor::ones([4], DType::F32, (mesh, "[@x?]"))?;
///     as_one("doubled", &[&x], || {
///         Ok(vec![if mesh.is_single() { x.add(&x)? } else { x.mul(2.0)? }])
///     })
/// };
/// let found = compare(program, &Mesh::single(&cpu), &Mesh::new("x=2", &cpu)?)?;
/// assert!(found.is_same(), "{found}");
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[track_caller]
pub fn as_one(
    op: &'static str,
    operands: &[&Tensor],
    run: impl FnOnce() -> Result<Vec<Tensor>>,
) -> Result<Vec<Tensor>> {
    observe::op(op, operands, run)
}

impl Compare {
    /// Runs a program in two places and compares. An error of the program is returned, unless the
    /// runs parted before it.
    pub fn run<T, E: From<Error>>(
        &self,
        mut program: impl FnMut(&Mesh) -> Result<T, E>,
        a: &Mesh,
        b: &Mesh,
    ) -> Result<Comparison, E> {
        check(a)?;
        check(b)?;
        let mode = Mode::Record { values: true };
        let store = Store::new(self.memory);
        let (mut first, outcome) = self.observe(mode, Recorded::default(), store, || program(a));
        let mut found = Comparison {
            a: place(a),
            b: place(b),
            values: first.values,
            unread: first.unread,
            findings: std::mem::take(&mut first.findings),
            reproduction: None,
        };
        if !found.is_same() {
            let mesh = a.clone();
            found.reproduction = self.reproduction(&mut program, a, &mesh, &found, first)?;
            return Ok(found);
        }
        outcome?;
        let State {
            recorded, store, ..
        } = first;
        let second = self.second(recorded, store, || program(b), &mut found)?;
        found.reproduction = self.reproduction(&mut program, a, b, &found, second)?;
        Ok(found)
    }

    /// Runs a program and keeps a hash of every value, for a run that must have the same bits: in
    /// another process, on another day, after a change.
    ///
    /// ```
    /// # use anymesh_core::{Mesh, Tensor, DType, Result, compare::{Compare, Trace}};
    /// # let cpu = anymesh_backend_cpu::device();
    /// let program = |mesh: &Mesh| Tensor::ones([4], DType::F32, mesh)?.exp();
    /// let compare = Compare::default();
    /// let text = compare.record(program, &Mesh::single(&cpu))?.to_text();
    /// // In another process:
    /// let found = compare.against(&Trace::parse(&text)?, program, &Mesh::new("x=2", &cpu)?)?;
    /// assert!(found.is_same(), "{found}");
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    pub fn record<T, E: From<Error>>(
        &self,
        mut program: impl FnMut(&Mesh) -> Result<T, E>,
        on: &Mesh,
    ) -> Result<Trace, E> {
        check(on)?;
        let mode = Mode::Record { values: false };
        let (state, outcome) =
            self.observe(mode, Recorded::default(), Store::new(0), || program(on));
        if let Some(finding) = state.findings.first() {
            let detail = format!(
                "{} at {} is wrong in the run that was to be recorded: compare it with another place",
                finding.what(),
                finding.caller
            );
            return Err(Error::argument("compare", "program", detail).into());
        }
        outcome?;
        Ok(Trace {
            place: place(on),
            entries: state.recorded.entries,
        })
    }

    /// Runs a program and holds it, bit by bit, against a [recorded](Self::record) run.
    pub fn against<T, E: From<Error>>(
        &self,
        trace: &Trace,
        mut program: impl FnMut(&Mesh) -> Result<T, E>,
        on: &Mesh,
    ) -> Result<Comparison, E> {
        check(on)?;
        let mut found = Comparison {
            a: trace.place.clone(),
            b: place(on),
            values: 0,
            unread: 0,
            findings: vec![],
            reproduction: None,
        };
        let recorded = Recorded {
            entries: trace.entries.clone(),
            slots: vec![],
        };
        self.second(recorded, Store::new(0), || program(on), &mut found)?;
        Ok(found)
    }

    pub(crate) fn tolerance_of(&self, dtype: DType) -> Tolerance {
        self.tolerance.unwrap_or_else(|| Tolerance::of(dtype))
    }

    /// Runs the program a second time, and adds what it finds.
    fn second<T, E: From<Error>>(
        &self,
        recorded: Recorded,
        store: Store,
        program: impl FnOnce() -> Result<T, E>,
        found: &mut Comparison,
    ) -> Result<State, E> {
        let session = Arc::new(Session::new(Mode::Compare, self, recorded, store));
        let outcome = observed(&session, program);
        // What was not reached matters where the program came to its end.
        let missing = match outcome.is_ok() {
            true => session.missing(),
            false => None,
        };
        let mut state = state_of(session);
        let stopped = !state.findings.is_empty();
        (found.values, found.unread) = (state.values, state.unread);
        found.findings = std::mem::take(&mut state.findings);
        found.findings.extend(missing);
        if !stopped {
            outcome?;
        }
        Ok(state)
    }

    fn observe<T, E>(
        &self,
        mode: Mode,
        recorded: Recorded,
        store: Store,
        program: impl FnOnce() -> Result<T, E>,
    ) -> (State, Result<T, E>) {
        let session = Arc::new(Session::new(mode, self, recorded, store));
        let outcome = observed(&session, program);
        (state_of(session), outcome)
    }

    /// The first finding with what it takes to make it again. The operands of a gradient's op are
    /// found by one more run.
    fn reproduction<T, E: From<Error>>(
        &self,
        program: &mut impl FnMut(&Mesh) -> Result<T, E>,
        a: &Mesh,
        b: &Mesh,
        found: &Comparison,
        mut state: State,
    ) -> Result<Option<Reproduction>, E> {
        let (Some(first), Some(captured)) = (found.first(), state.captured.take()) else {
            return Ok(None);
        };
        let Some((expected, result)) = captured.values else {
            return Ok(None);
        };
        let is_move = matches!(first.why, Why::Moved(_));
        let (attributes, operands, gradients) = match first.given {
            Given::Result(_) => (captured.attributes, captured.operands, vec![]),
            Given::Gradient(_) if is_move => (captured.attributes, captured.operands, vec![]),
            Given::Gradient(_) => {
                let call = (first.op.clone(), first.caller.clone(), first.nth);
                let mode = Mode::Capture {
                    op: call.0.clone(),
                    line: call.1.clone(),
                    nth: call.2,
                };
                let (again, _) =
                    self.observe(mode, Recorded::default(), Store::new(0), || program(a));
                let Some(mut forward) = again.captured else {
                    return Ok(None);
                };
                let lay = state.lay.get(&call).into_iter().flatten();
                for (operand, sharding) in forward.operands.iter_mut().zip(lay) {
                    operand.sharding.clone_from(sharding);
                }
                (forward.attributes, forward.operands, captured.operands)
            }
            // Sums of gradients are no calls of an op.
            Given::Sum(_) | Given::Total => return Ok(None),
        };
        Ok(Some(Reproduction {
            op: first.op.clone(),
            given: match is_move {
                true => Given::Result(0),
                false => first.given,
            },
            caller: first.caller.clone(),
            attributes,
            operands,
            gradients,
            tolerance: self.tolerance_of(expected.dtype),
            expected,
            found: result,
            a: found.a.clone(),
            b: found.b.clone(),
            mesh: reproduction::axes_of(b),
        }))
    }
}

/// Runs a program that a session sees.
fn observed<T>(session: &Arc<Session>, program: impl FnOnce() -> T) -> T {
    let _scope = observe::enter(Some(session.clone()));
    program()
}

/// What a session has when its run is over; a thread that still holds it gets nothing more.
fn state_of(session: Arc<Session>) -> State {
    match Arc::try_unwrap(session) {
        Ok(session) => session.into_state(),
        Err(shared) => {
            let empty = Session::new(
                Mode::Record { values: false },
                &Compare::default(),
                Recorded::default(),
                Store::new(0),
            );
            std::mem::replace(&mut *shared.state(), empty.into_state())
        }
    }
}

/// Refuses a mesh whose values this process cannot read.
fn check(mesh: &Mesh) -> Result<()> {
    let has_values = (0..mesh.held().len()).all(|i| mesh.device(i).has_values());
    if has_values && mesh.is_local() {
        return Ok(());
    }
    let detail = format!(
        "{mesh} has ranks in other processes or no values: compare on simulated ranks of one process"
    );
    Err(Error::argument("compare", "mesh", detail))
}

/// A mesh in words.
fn place(mesh: &Mesh) -> String {
    match mesh.is_single() {
        true => mesh.to_string(),
        false => format!("{mesh} on {}", mesh.device(0)),
    }
}

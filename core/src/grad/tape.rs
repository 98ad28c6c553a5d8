//! What ops remember so that their gradients can be computed: a graph with a node for each op that
//! had a tracked operand.
//!
//! An op calls [`record`] around its computation. Inside, nothing else records, so an op is one
//! node however it is computed. Nodes are numbered as they are made, and an operand is made before
//! the result: going down the numbers visits every result before its operands.

use super::slices;
use crate::{
    Dry, Error, NoGradient, Placement, Result, Sharding, Tensor,
    ledger::{on_behalf_of, outermost},
    observe::{self, UNSEEN},
    overlap, profile,
    scoped::Scoped,
    tensor::Outputs,
};
use smallvec::SmallVec;
use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    fmt,
    panic::Location,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

/// The gradients of an op's operands, in their order; `None` for those that have none or were not
/// asked for.
pub(crate) type Pulled = SmallVec<[Option<Tensor>; 2]>;

/// Computes the gradients of an op's operands from those of its results. Written in tensor ops, so
/// that it can be differentiated again.
type Pull = dyn Fn(&Back<'_>) -> Result<Pulled> + Send + Sync;

/// Sees the gradient of a tensor when it is complete, and may replace it.
pub(super) type Hook = Arc<dyn Fn(&Tensor) -> Result<Option<Tensor>> + Send + Sync>;

/// Who asked for the gradients of a node's results as a pass goes by. A parameter and its updated
/// versions share one.
#[derive(Default)]
struct Watch {
    /// By number, with the result they are for.
    hooks: Vec<(u64, usize, Hook)>,
    /// How many hooks there ever were.
    numbered: u64,
    /// The results whose gradients are kept.
    retained: Vec<usize>,
}

/// A hook that [`Tensor::on_gradient`] set. Dropping the handle leaves the hook in place.
pub struct HookHandle {
    watch: Weak<Mutex<Watch>>,
    number: u64,
}

impl HookHandle {
    /// Takes the hook away again, also from later versions of a parameter that was updated.
    pub fn remove(self) {
        if let Some(watch) = self.watch.upgrade() {
            let mut watch = lock(&watch);
            watch.hooks.retain(|(number, ..)| *number != self.number);
        }
    }
}

impl fmt::Debug for HookHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hook {}", self.number)
    }
}

/// A call of an op, or a tensor that gradients are wanted for.
pub(crate) struct Node {
    pub(super) id: u64,
    pub(super) op: &'static str,
    /// The line that called the op.
    pub(super) caller: &'static Location<'static>,
    /// Which of the calls from there that somebody sees.
    pub(super) nth: u32,
    /// Where each operand came from; `None` for one that is not tracked. Empty for a leaf.
    pub(super) inputs: SmallVec<[Option<Edge>; 2]>,
    /// How each result lies, where it lies on a mesh, and how many ops took it as an operand.
    shardings: SmallVec<[Sharding; 1]>,
    uses: SmallVec<[AtomicU32; 1]>,
    /// Whether it was made while a step was planned.
    planned: bool,
    /// Gone once a backward pass went by, and with it everything it kept in memory.
    pull: Mutex<Option<Arc<Pull>>>,
    /// Parameters that the op read in another form, which a pass gathers again. Gone with the pull.
    again: Mutex<Vec<(Tensor, Sharding)>>,
    /// Made when somebody asks: most nodes have none.
    watch: OnceLock<Arc<Mutex<Watch>>>,
}

/// One result of a node.
#[derive(Clone)]
pub(crate) struct Edge {
    pub(super) node: Arc<Node>,
    pub(super) slot: usize,
}

impl Edge {
    /// A tensor that gradients are wanted for.
    #[track_caller]
    pub(super) fn leaf(x: &Tensor) -> Self {
        Self {
            node: Node::new(
                "leaf",
                SmallVec::new(),
                std::slice::from_ref(x),
                None,
                vec![],
                None,
            ),
            slot: 0,
        }
    }

    /// A leaf in place of this one, with its hooks.
    #[track_caller]
    pub(super) fn renewed(&self, x: &Tensor) -> Self {
        let leaf = Self::leaf(x);
        if let Some(watch) = self.node.watch.get() {
            leaf.node.watch.get_or_init(|| watch.clone());
        }
        leaf
    }

    /// What a gradient is found by.
    pub(super) fn key(&self) -> (u64, usize) {
        (self.node.id, self.slot)
    }

    /// Where a complete gradient goes that is partial over axes that cut the tensor: each rank keeps
    /// its part of the sums. Those over other axes stay, because adding them up would free nothing;
    /// with `whole` they are added up where there are no others.
    pub(super) fn reduced(&self, gradient: &Tensor, whole: bool) -> Option<Sharding> {
        let target = self.node.shardings.get(self.slot)?;
        let cuts = |axis: usize| target.cuts().any(|(_, a)| a == axis);
        let partial = || gradient.sharding().partial();
        if !partial().any(|(axis, _)| cuts(axis)) {
            return (whole && gradient.sharding().is_partial()).then(|| target.whole());
        }
        let stays = partial().filter(|(axis, _)| !cuts(*axis));
        Some(stays.fold(target.whole(), |s, (axis, r)| s.partial_over(axis, r)))
    }

    /// A gradient cut as the tensor is, along axes where that sends nothing: what is whole on every
    /// rank is sliced.
    #[track_caller]
    pub(super) fn sliced(&self, gradient: Tensor) -> Result<Tensor> {
        let Some(target) = self.node.shardings.get(self.slot) else {
            return Ok(gradient);
        };
        let mut sharding = gradient.sharding().clone();
        for d in 0..gradient.rank() {
            let (mut wanted, has) = (target.axes_of(d), gradient.sharding().axes_of(d).count());
            // The cuts it has must be the first ones of those it should have.
            if gradient
                .sharding()
                .axes_of(d)
                .all(|axis| wanted.next() == Some(axis))
            {
                let more: SmallVec<[usize; 4]> = target
                    .axes_of(d)
                    .skip(has)
                    .take_while(|a| gradient.sharding().placement(*a) == Placement::Replicate)
                    .collect();
                sharding = more.into_iter().fold(sharding, |s, axis| s.cut(d, axis));
            }
        }
        if sharding == *gradient.sharding() {
            Ok(gradient)
        } else {
            gradient.reshard(sharding)
        }
    }
}

/// What was poisoned is still whole: nothing is written half under these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Node {
    #[track_caller]
    fn new(
        op: &'static str,
        inputs: SmallVec<[Option<Edge>; 2]>,
        results: &[Tensor],
        pull: Option<Arc<Pull>>,
        again: Vec<(Tensor, Sharding)>,
        nth: Option<u32>,
    ) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let on_mesh = results.first().is_some_and(|t| !t.is_plain());
        // An op that is made of others called this one on behalf of its own caller.
        let caller =
            match outermost().filter(|_| on_mesh || observe::is_observed() || profile::is_on()) {
                Some((_, caller)) => caller,
                None => Location::caller(),
            };
        let (shardings, uses) = if on_mesh {
            let lie = |t: &Tensor| (t.sharding().clone(), AtomicU32::new(0));
            results.iter().map(lie).unzip()
        } else {
            (SmallVec::new(), SmallVec::new())
        };
        for edge in inputs.iter().flatten() {
            if let Some(uses) = edge.node.uses.get(edge.slot) {
                uses.fetch_add(1, Ordering::Relaxed);
            }
        }
        Arc::new(Self {
            id,
            op,
            caller,
            nth: nth.unwrap_or_else(|| observe::leaf(caller)),
            inputs,
            shardings,
            uses,
            planned: Dry::is_on(),
            pull: Mutex::new(pull),
            again: Mutex::new(again),
            watch: OnceLock::new(),
        })
    }

    /// How many ops that are still there took a result on a mesh as an operand.
    pub(super) fn uses(&self, slot: usize) -> Option<u32> {
        Some(self.uses.get(slot)?.load(Ordering::Relaxed))
    }

    /// The call that made it, as those know it who saw it.
    pub(super) fn call(&self) -> (&'static str, &'static Location<'static>, u32) {
        (self.op, self.caller, self.nth)
    }

    pub(super) fn is_leaf(&self) -> bool {
        self.inputs.is_empty()
    }

    /// The function that computes the operands' gradients; the node forgets it unless `keep`.
    pub(super) fn pull(&self, keep: bool) -> Result<Arc<Pull>> {
        let mut pull = lock(&self.pull);
        // A pass that is only planned releases nothing that another one will need.
        let keep = keep || Dry::is_on() && !self.planned;
        let found = if keep { pull.clone() } else { pull.take() };
        if !keep {
            lock(&self.again).clear();
        }
        found.ok_or_else(|| Error::gradient(self.op, NoGradient::Released, format!(
                "what it kept for its gradient was released by an earlier backward pass (called at {}): pass `retain_graph` to all but the last",
                self.caller
            )))
    }

    /// Forgets what it kept for its gradient, where that is not wanted again.
    pub(super) fn release(&self) {
        if !(Dry::is_on() && !self.planned) {
            lock(&self.pull).take();
            lock(&self.again).clear();
        }
    }

    /// What the pull is to read of parameters, in other forms than they lie in.
    pub(super) fn again(&self) -> Vec<(Tensor, Sharding)> {
        lock(&self.again).clone()
    }

    fn watched(&self) -> &Arc<Mutex<Watch>> {
        self.watch.get_or_init(Default::default)
    }

    pub(super) fn add_hook(&self, slot: usize, hook: Hook) -> HookHandle {
        let shared = self.watched();
        let mut watch = lock(shared);
        let number = watch.numbered;
        watch.numbered += 1;
        watch.hooks.push((number, slot, hook));
        HookHandle {
            watch: Arc::downgrade(shared),
            number,
        }
    }

    /// Has passes keep the gradient of a result.
    pub(super) fn retain(&self, slot: usize) {
        let mut watch = lock(self.watched());
        if !watch.retained.contains(&slot) {
            watch.retained.push(slot);
        }
    }

    /// Whether the gradient of a result is to be kept.
    pub(super) fn is_retained(&self, slot: usize) -> bool {
        self.is_leaf()
            || self
                .watch
                .get()
                .is_some_and(|watch| lock(watch).retained.contains(&slot))
    }

    /// Whether there is a hook that the gradient of a result is to be shown to.
    pub(super) fn is_watched(&self, slot: usize) -> bool {
        let watch = self.watch.get();
        watch.is_some_and(|watch| lock(watch).hooks.iter().any(|(_, s, _)| *s == slot))
    }

    /// Shows a complete gradient to the hooks of a result.
    pub(super) fn show(&self, slot: usize, mut gradient: Tensor) -> Result<Tensor> {
        let Some(watch) = self.watch.get() else {
            return Ok(gradient);
        };
        // Not under the lock: a hook may add another one.
        let hooks: Vec<Hook> = lock(watch)
            .hooks
            .iter()
            .filter(|(_, s, _)| *s == slot)
            .map(|(.., hook)| hook.clone())
            .collect();
        for hook in hooks {
            if let Some(other) = hook(&gradient)? {
                if other.shape() != gradient.shape() || other.dtype() != gradient.dtype() {
                    let detail = format!(
                        "a hook replaced the gradient {} by {}",
                        gradient.type_string(),
                        other.type_string()
                    );
                    return Err(Error::gradient(self.op, NoGradient::Mismatch, detail)
                        .of([&gradient, &other]));
                }
                gradient = other;
            }
        }
        Ok(gradient)
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} at {}", self.op, self.id, self.caller)
    }
}

/// What a node holds on to.
type Held = (SmallVec<[Option<Edge>; 2]>, Option<Arc<Pull>>);

/// A long chain of nodes is dropped one by one: dropping each inside the one before it would
/// overflow the stack.
impl Drop for Node {
    fn drop(&mut self) {
        thread_local! {
            static DROPPED: RefCell<Option<Vec<Held>>> = const { RefCell::new(None) };
        }
        // It reads its operands no more: a leaf that step after step reads is read as often in each.
        for edge in self.inputs.iter().flatten() {
            if let Some(uses) = edge.node.uses.get(edge.slot) {
                uses.fetch_sub(1, Ordering::Relaxed);
            }
        }
        let parts = (std::mem::take(&mut self.inputs), lock(&self.pull).take());
        // Where a drop is under way further up, it takes this one over; when the thread is ending
        // there is nobody to do so.
        let outermost = DROPPED.try_with(|dropped| match &mut *dropped.borrow_mut() {
            Some(list) => {
                list.push(parts);
                false
            }
            none => {
                *none = Some(vec![parts]);
                true
            }
        });
        if outermost == Ok(true) {
            while let Ok(Some(next)) =
                DROPPED.try_with(|dropped| dropped.borrow_mut().as_mut().and_then(Vec::pop))
            {
                drop(next);
            }
            let _ = DROPPED.try_with(|dropped| dropped.borrow_mut().take());
        }
    }
}

/// Whether ops remember.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// Yes.
    On,
    /// No: under `no_grad`, inside of an op, in a backward pass.
    Off,
    /// No, but the tracked tensors they use are noted.
    Collect,
}

/// The tracked tensors that were used in [`Mode::Collect`].
type Collected = Arc<Mutex<Vec<Tensor>>>;

thread_local! {
    static MODE: Cell<Mode> = const { Cell::new(Mode::On) };
    static COLLECTED: RefCell<Option<Collected>> = const { RefCell::new(None) };
}

/// Ends the mode that [`Mode::enter`] began.
pub(crate) struct ModeScope(Mode);

impl Drop for ModeScope {
    fn drop(&mut self) {
        let _ = MODE.try_with(|mode| mode.set(self.0));
    }
}

impl Mode {
    /// Until it is dropped, also by a panic, this thread is in the mode.
    pub(super) fn enter(self) -> ModeScope {
        ModeScope(MODE.replace(self))
    }
}

/// Runs `f` in a mode, also where it panics.
pub(super) fn with_mode<T>(mode: Mode, f: impl FnOnce() -> T) -> T {
    let _scope = mode.enter();
    f()
}

/// Runs `f` without remembering anything, and tells which tracked tensors it used: a tensor that
/// `f` makes is not tracked, so all of them are from outside.
pub(super) fn collect<T>(f: impl FnOnce() -> T) -> (T, Vec<Tensor>) {
    let collected = Collected::default();
    let scope = Scoped::set(&COLLECTED, Some(collected.clone()));
    let result = with_mode(Mode::Collect, f);
    drop(scope);
    let found = std::mem::take(&mut *lock(&collected));
    (result, found)
}

/// Whether ops on a thread are remembered, and who notes them.
#[derive(Clone)]
pub(crate) struct Recording {
    mode: Mode,
    collected: Option<Collected>,
}

impl Recording {
    pub(crate) fn capture() -> Self {
        Self {
            mode: mode(),
            collected: COLLECTED.with_borrow(Clone::clone),
        }
    }

    /// Until it is dropped, this thread does the same.
    pub(crate) fn enter(&self) -> (ModeScope, Scoped<Option<Collected>>) {
        (
            self.mode.enter(),
            Scoped::set(&COLLECTED, self.collected.clone()),
        )
    }
}

pub(super) fn mode() -> Mode {
    MODE.get()
}

/// Whether a use of these operands must be remembered.
pub(crate) fn is_recording(inputs: &[&Tensor]) -> bool {
    inputs.iter().any(|t| t.edge().is_some()) && MODE.get() != Mode::Off
}

/// Notes operands that are tracked, where they are collected.
fn note(inputs: &[&Tensor]) {
    COLLECTED.with_borrow(|collected| {
        let Some(collected) = collected else { return };
        let mut found = lock(collected);
        for t in inputs.iter().filter(|t| t.edge().is_some()) {
            if !found.iter().any(|other| same_edge(other, t)) {
                found.push((*t).clone());
            }
        }
    });
}

/// Whether two tensors are the same result of the same node.
pub(super) fn same_edge(a: &Tensor, b: &Tensor) -> bool {
    matches!((a.edge(), b.edge()), (Some(a), Some(b)) if a.node.id == b.node.id && a.slot == b.slot)
}

/// Runs an op and remembers how to compute its gradient, where an operand is tracked. `pull` gets
/// the results (not tracked, so that it may keep them) and gives the function; [`Back::out`] makes
/// a kept result the tracked one again.
#[track_caller]
pub(crate) fn record<P>(
    op: &'static str,
    inputs: &[&Tensor],
    forward: impl FnOnce() -> Result<Outputs>,
    pull: impl FnOnce(&Outputs) -> Result<P>,
) -> Result<Outputs>
where
    P: Fn(&Back<'_>) -> Result<Pulled> + Send + Sync + 'static,
{
    let step = observe::begin();
    // Closures do not know who called: what they communicate is on behalf of the op's caller.
    let _scope = match inputs.first() {
        Some(x) => on_behalf_of(op, x),
        None => None,
    };
    let seen = |mut out: Outputs| -> Result<(Outputs, u32)> {
        match step {
            Some(step) => {
                let nth = step.end(op, inputs, &mut out)?;
                Ok((out, nth))
            }
            None => Ok((out, UNSEEN)),
        }
    };
    if !is_recording(inputs) {
        return Ok(seen(forward()?)?.0);
    }
    if MODE.get() == Mode::Collect {
        note(inputs);
        return Ok(seen(with_mode(Mode::Off, forward)?)?.0);
    }
    // What the pull keeps of an operand is the form that the op reads: see `Tensor::kept`.
    for forms in inputs.iter().filter_map(|t| t.forms()) {
        forms.set_used(None);
    }
    let (mut out, nth) = seen(with_mode(Mode::Off, forward)?)?;
    let _unseen = observe::unseen();
    let pull = with_mode(Mode::Off, || pull(&out))?;
    let edges = inputs.iter().map(|t| t.edge().cloned()).collect();
    // A parameter is read again for the gradients of the other operands, if anybody wants those.
    let others = |t: &Tensor| (inputs.iter()).any(|o| o.edge().is_some() && !std::ptr::eq(*o, t));
    let again = match overlap::capture().ahead {
        0 => vec![],
        _ => (inputs.iter().filter(|t| others(t)))
            .filter_map(|t| read_again(t))
            .collect(),
    };
    let node = Node::new(op, edges, &out, Some(Arc::new(pull)), again, Some(nth));
    for (slot, t) in out.iter_mut().enumerate() {
        if t.dtype().is_float() {
            t.attach(Edge {
                node: node.clone(),
                slot,
            });
        }
    }
    Ok(out)
}

/// The form in which an op read a parameter, where its gradient has to bring that again.
fn read_again(x: &Tensor) -> Option<(Tensor, Sharding)> {
    let used = x.forms()?.used().filter(|_| x.is_leaf())?;
    let kept = with_mode(Mode::Off, || x.kept()).sharding() == &used;
    (!kept).then(|| (x.detach().without_holder(), used))
}

/// [`record`] for ops with one result.
#[track_caller]
pub(crate) fn record1<P>(
    op: &'static str,
    inputs: &[&Tensor],
    forward: impl FnOnce() -> Result<Tensor>,
    pull: impl FnOnce(&Tensor) -> Result<P>,
) -> Result<Tensor>
where
    P: Fn(&Back<'_>) -> Result<Pulled> + Send + Sync + 'static,
{
    Ok(record(
        op,
        inputs,
        || Ok(smallvec::smallvec![forward()?]),
        |out| pull(&out[0]),
    )?
    .remove(0))
}

/// Runs an op whose results have no gradient (positions, comparisons, counts) or a gradient of
/// zero.
#[track_caller]
pub(crate) fn constant<T: observe::Results>(
    op: &'static str,
    inputs: &[&Tensor],
    forward: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let step = observe::begin();
    let _scope = match inputs.first() {
        Some(x) => on_behalf_of(op, x),
        None => None,
    };
    let mut out = if is_recording(inputs) {
        with_mode(Mode::Off, forward)?
    } else {
        forward()?
    };
    if let Some(step) = step {
        step.end(op, inputs, &mut out)?;
    }
    Ok(out)
}

/// What a pull works with.
pub(crate) struct Back<'a> {
    pub(super) node: &'a Arc<Node>,
    pub(super) grads: &'a [Option<Tensor>],
    pub(super) needs: &'a [bool],
    /// Whether what the pull kept is let go after it.
    pub(super) last: bool,
    /// Sums of gradients of leaves that the pass adds to.
    pub(super) sums: &'a LeafSums,
    /// Where gradients of slices are left, if the pass joins them.
    pub(super) left: Option<&'a slices::Left>,
}

/// Sums of gradients of leaves, by node and result, until somebody adds to them.
pub(crate) type LeafSums = RefCell<HashMap<(u64, usize), Tensor>>;

impl Back<'_> {
    /// Whether there is a sum so far, on one device, that [`take_sum`](Self::take_sum) gives.
    pub(crate) fn has_sum(&self, i: usize) -> bool {
        self.edge_of_sum(i)
            .is_some_and(|edge| self.sums.borrow().contains_key(&edge.key()))
    }

    /// The leaf that operand `i` is, where nobody wants to see its gradient as it arises.
    fn edge_of_sum(&self, i: usize) -> Option<&Edge> {
        let edge = self.node.inputs.get(i)?.as_ref()?;
        (edge.node.is_leaf() && !edge.node.is_watched(edge.slot)).then_some(edge)
    }

    /// The sum so far that the gradient of operand `i` is to be added to, for a pull that does so in
    /// the kernel that computes the gradient. It is then the pull's: what it gives is the new sum.
    pub(crate) fn take_sum(&self, i: usize) -> Option<Tensor> {
        let key = self.edge_of_sum(i)?.key();
        self.sums.borrow_mut().remove(&key)
    }

    /// Whether a tensor that the pull kept is read here for the last time: the pass releases it, and
    /// nobody else has it or its memory.
    pub(crate) fn is_last_of(&self, kept: &Tensor) -> bool {
        self.last && kept.is_sole()
    }

    /// The gradient of the only result that has one; of several, the first.
    pub(crate) fn grad(&self) -> Result<&Tensor> {
        self.grads.iter().flatten().next().ok_or_else(|| {
            Error::gradient(self.node.op, NoGradient::Unused, "no result has a gradient")
        })
    }

    /// The gradient of result `i`, where it was used.
    pub(crate) fn grad_of(&self, i: usize) -> Option<&Tensor> {
        self.grads.get(i).and_then(Option::as_ref)
    }

    /// Whether the gradient of operand `i` is wanted.
    pub(crate) fn needs(&self, i: usize) -> bool {
        self.needs.get(i).copied().unwrap_or(false)
    }

    /// How the operand `i` lies, with nothing partial: where its gradient is wanted. And how many
    /// ops took it, whose gradients are added up before they go there.
    pub(crate) fn place(&self, i: usize) -> Option<(Sharding, u32)> {
        let edge = self.node.inputs.get(i)?.as_ref()?;
        let sharding = edge.node.shardings.get(edge.slot)?.whole();
        Some((sharding, edge.node.uses(edge.slot)?))
    }

    /// The gradient of operand `i`, computed only if it is wanted.
    pub(crate) fn wanted(
        &self,
        i: usize,
        f: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Option<Tensor>> {
        if self.needs(i) {
            f().map(Some)
        } else {
            Ok(None)
        }
    }

    /// Result `slot` as the program has it, from what the pull kept of it.
    pub(crate) fn out(&self, slot: usize, kept: &Tensor) -> Tensor {
        let mut out = kept.clone();
        out.attach(Edge {
            node: self.node.clone(),
            slot,
        });
        out
    }
}

//! The shardings in which a value is at hand.
//!
//! A tensor on a mesh and what it was resharded into are one value in several *forms*. They share
//! a table, so that whoever reads the value next can take the form that costs least: a tensor that
//! three products read is gathered once, and a partial sum is added up once.
//!
//! A form is known as long as some tensor has its memory. What an op brought for itself is also
//! held for the next few calls, because its readers tend to follow each other; the number of calls
//! and the bytes that are held so are [bounded](with_held). It is held by the tensors of the
//! program: when the last one of a value goes, all that it held goes too, though a gradient may
//! still keep the value.
//!
//! What is [on its way](Tensor::prefetch) is known too: whoever reads it waits for it.
//!
//! What is known depends on the order of the program and on sizes alone, so that the processes of
//! a cluster, which run the same program, know the same.

use crate::{
    Dry, Result, Sharding, Tensor, ledger, overlap::Shipment, reshard, scoped::Scoped,
    tensor::Shards,
};
use smallvec::SmallVec;
use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
};

/// How long forms that ops brought for themselves are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// For how many calls of ops on meshes. With 0 nothing is held, and no op looks for forms.
    pub calls: u64,
    /// How many bytes of a rank they may take together, on a thread.
    pub bytes: u64,
}

impl Default for Held {
    fn default() -> Self {
        Self {
            calls: 32,
            bytes: 1 << 30,
        }
    }
}

thread_local! {
    static HELD: RefCell<Held> = RefCell::new(Held::default());
    /// Calls of ops on meshes.
    static CALLS: Cell<u64> = const { Cell::new(0) };
    /// What is held, oldest first.
    static WINDOW: RefCell<VecDeque<Holding>> = const { RefCell::new(VecDeque::new()) };
    /// While a step is planned, what was held before.
    static ASIDE: RefCell<VecDeque<Holding>> = const { RefCell::new(VecDeque::new()) };
    /// Of that, what a real run would have let go of by now.
    static STASH: RefCell<Vec<Stashed>> = const { RefCell::new(Vec::new()) };
}

/// Runs `f` with other bounds on the forms that are held: see [`Held`].
///
/// ```
/// # use anymesh_core::{DType, Mesh, Tensor, meta, spmd::{Held, Ledger, with_held}};
/// let mesh = Mesh::new("tp=2", &meta())?;
/// let x = Tensor::zeros([4, 8], DType::F32, (&mesh, "[@tp, _]"))?;
/// let w = Tensor::zeros([8, 8], DType::F32, (&mesh, "[_, @tp]"))?;
/// let twice = || Ledger::record(|| (x.matmul(&w), x.matmul(&w))).1.bytes();
/// assert_eq!(twice(), 64, "gathered once");
/// let none = Held { calls: 0, bytes: 0 };
/// assert_eq!(with_held(none, twice), 128);
/// # Ok::<(), anymesh_core::Error>(())
/// ```
pub fn with_held<T>(held: Held, f: impl FnOnce() -> T) -> T {
    let _scope = enter(held);
    f()
}

/// The bounds of this thread.
pub(crate) fn capture() -> Held {
    HELD.with_borrow(|held| *held)
}

/// Until it is dropped, other bounds.
pub(crate) fn enter(held: Held) -> Scoped<Held> {
    Scoped::set(&HELD, held)
}

/// A form that is held until a call.
struct Holding {
    until: u64,
    by: Weak<Holder>,
    sharding: Sharding,
    bytes: u64,
}

impl Holding {
    /// The bytes that it keeps alive now.
    fn bytes(&self) -> u64 {
        if self.by.strong_count() > 0 {
            self.bytes
        } else {
            0
        }
    }
}

/// What a step that is planned must not see, and others will.
struct Stashed {
    holding: Holding,
    shards: Option<Arc<Shards>>,
}

/// What was held is let go, also where the thread ends.
impl Drop for Holding {
    fn drop(&mut self) {
        if let Some(by) = self.by.upgrade() {
            by.lock().forms.retain(|(s, _)| *s != self.sharding);
        }
    }
}

/// Counts a call, and lets go of what was held long enough.
pub(crate) fn count_call() {
    let now = CALLS.get() + 1;
    CALLS.set(now);
    let expired = |holding: &Holding| holding.until <= now;
    while stash_oldest(expired) {}
    while let Some(holding) = WINDOW.with_borrow_mut(|w| {
        w.front()
            .is_some_and(expired)
            .then(|| w.pop_front())
            .flatten()
    }) {
        drop(holding);
    }
}

/// Puts the oldest of what was held before a step was planned out of sight, if that `is` so; whether
/// it did.
fn stash_oldest(is: impl Fn(&Holding) -> bool) -> bool {
    let oldest = ASIDE.with_borrow_mut(|held| {
        let is = held.front().is_some_and(is);
        is.then(|| held.pop_front()).flatten()
    });
    let Some(holding) = oldest else {
        return false;
    };
    let shards = holding.by.upgrade().and_then(|by| {
        let mut held = by.lock();
        let at = held.forms.iter().position(|(s, _)| *s == holding.sharding);
        at.map(|at| held.forms.remove(at).1)
    });
    STASH.with_borrow_mut(|stash| stash.push(Stashed { holding, shards }));
    true
}

/// Ends what [`aside`] began.
pub(crate) struct Aside {
    calls: u64,
}

/// Until it is dropped, what is held now is seen as it would be, and stays held all the same: for a
/// run that is only planned. What that run holds goes with it.
pub(crate) fn aside() -> Aside {
    ASIDE.set(WINDOW.take());
    Aside { calls: CALLS.get() }
}

impl Drop for Aside {
    fn drop(&mut self) {
        release_all();
        let mut window = VecDeque::new();
        for Stashed { holding, shards } in STASH.take() {
            if let (Some(by), Some(shards)) = (holding.by.upgrade(), shards) {
                by.lock().forms.push((holding.sharding.clone(), shards));
            }
            window.push_back(holding);
        }
        window.append(&mut ASIDE.take());
        WINDOW.set(window);
        CALLS.set(self.calls);
    }
}

/// Lets go of everything that is held on this thread.
pub(crate) fn release_all() {
    drop(WINDOW.take());
}

/// The most forms of a value that are known.
const MOST: usize = 4;

/// Who holds forms of a value: the tensors of the program that are this value share one; what
/// gradients keep of it has another.
#[derive(Default)]
pub(crate) struct Holder(Mutex<HeldForms>);

#[derive(Default)]
struct HeldForms {
    forms: SmallVec<[(Sharding, Arc<Shards>); 1]>,
    /// Of a gradient in a backward pass: how many ops are still to read it as it is.
    readers: u32,
}

impl Holder {
    fn lock(&self) -> MutexGuard<'_, HeldForms> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more op is to read the value, which is a gradient.
    pub(crate) fn add_reader(&self) {
        self.lock().readers += 1;
    }

    /// One of the ops that were to read the value is about to do so.
    pub(crate) fn remove_reader(&self) {
        let mut held = self.lock();
        held.readers = held.readers.saturating_sub(1);
    }

    /// Lets go of what is held of a gradient that no further op reads.
    pub(crate) fn release_read(&self) {
        let mut held = self.lock();
        if held.readers == 0 {
            held.forms.clear();
        }
    }

    /// Holds a form for the next calls, as far as the bounds let it.
    fn hold(self: &Arc<Self>, sharding: &Sharding, shards: &Arc<Shards>, bytes: u64) {
        let bounds = capture();
        if bounds.calls == 0 || bytes > bounds.bytes {
            return;
        }
        {
            let mut held = self.lock();
            held.forms.retain(|(s, _)| s != sharding);
            held.forms.push((sharding.clone(), shards.clone()));
        }
        let holding = Holding {
            until: CALLS.get() + bounds.calls,
            by: Arc::downgrade(self),
            sharding: sharding.clone(),
            bytes,
        };
        WINDOW.with_borrow_mut(|window| window.push_back(holding));
        // The oldest make room.
        loop {
            let of = |window: &VecDeque<Holding>| window.iter().map(Holding::bytes).sum::<u64>();
            let over = ASIDE.with_borrow(of) + WINDOW.with_borrow(of) > bounds.bytes;
            if over && stash_oldest(|_| true) {
                continue;
            }
            let oldest =
                WINDOW.with_borrow_mut(|window| over.then(|| window.pop_front()).flatten());
            match oldest {
                Some(holding) => drop(holding),
                None => break,
            }
        }
    }
}

/// The forms of one value.
#[derive(Default)]
pub(crate) struct Forms {
    known: Mutex<Known>,
    /// Holds what is brought of it for gradients, which keep it.
    kept: OnceLock<Arc<Holder>>,
}

#[derive(Default)]
struct Known {
    list: SmallVec<[Form; 2]>,
    /// The form that the op that is running read, where it is not the tensor that it was given.
    used: Option<Sharding>,
    /// Whether it was computed from other values, unlike a parameter or an input.
    computed: bool,
}

struct Form {
    sharding: Sharding,
    memory: Memory,
    /// Whether it is of a step that was planned, and has no values.
    planned: bool,
}

enum Memory {
    Here(Weak<Shards>),
    /// Known as long as somebody holds what brings it.
    Coming(Weak<Shipment>),
}

/// What there is of a form.
enum Found {
    Here(Arc<Shards>),
    Coming(Arc<Shipment>),
}

impl Form {
    /// Whether there is something to know of.
    fn is_there(&self) -> bool {
        let held = match &self.memory {
            Memory::Here(shards) => shards.strong_count(),
            Memory::Coming(shipment) => shipment.strong_count(),
        };
        held > 0 && (!self.planned || Dry::is_on())
    }

    /// Whether a step that is planned must not see it: nobody but the stash has its memory.
    fn is_stashed(&self) -> bool {
        let Memory::Here(shards) = &self.memory else {
            return false;
        };
        let is = |s: &Arc<Shards>| std::ptr::addr_eq(Arc::as_ptr(s), shards.as_ptr());
        shards.strong_count() == 1
            && Dry::is_on()
            && STASH.with_borrow(|stash| stash.iter().filter_map(|s| s.shards.as_ref()).any(is))
    }

    /// Whether it is at hand.
    fn is_known(&self) -> bool {
        self.is_there() && !self.is_stashed()
    }
}

impl Forms {
    /// Says that the value was computed from others.
    pub(crate) fn set_computed(&self) {
        self.lock().computed = true;
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_computed(&self) -> bool {
        self.lock().computed
    }

    /// The shardings in which the value is at hand beside `own`, in the order in which they came.
    pub(crate) fn others(&self, own: &Sharding) -> Vec<Sharding> {
        let mut known = self.lock();
        if known.list.is_empty() || capture().calls == 0 {
            return Vec::new();
        }
        known.list.retain(|form| form.is_there());
        let others = known.list.iter();
        let others = others.filter(|form| form.sharding != *own && !form.is_stashed());
        others.map(|form| form.sharding.clone()).collect()
    }

    /// What the ranks hold of the value in a sharding.
    fn find(&self, sharding: &Sharding) -> Option<Found> {
        let known = self.lock();
        let found = |form: &&Form| form.sharding == *sharding && form.is_known();
        match &known.list.iter().find(found)?.memory {
            Memory::Here(shards) => shards.upgrade().map(Found::Here),
            Memory::Coming(shipment) => shipment.upgrade().map(Found::Coming),
        }
    }

    /// A form that was on its way has its memory now.
    fn arrived(&self, sharding: &Sharding, shards: &Arc<Shards>) {
        let mut known = self.lock();
        let coming = |form: &&mut Form| {
            form.sharding == *sharding && matches!(form.memory, Memory::Coming(_))
        };
        if let Some(form) = known.list.iter_mut().find(coming) {
            form.memory = Memory::Here(Arc::downgrade(shards));
        }
    }

    /// The form that the op read, where it is another than the tensor's own.
    pub(crate) fn used(&self) -> Option<Sharding> {
        self.lock().used.clone()
    }

    /// Says which form is read; none at the beginning of an op.
    pub(crate) fn set_used(&self, sharding: Option<&Sharding>) {
        self.lock().used = sharding.cloned();
    }

    /// Makes a form known.
    fn add(&self, sharding: &Sharding, memory: Memory) {
        let mut known = self.lock();
        known.list.retain(|form| form.is_there());
        let same = |form: &Form| form.sharding == *sharding && !form.is_stashed();
        let old = known.list.iter().position(same);
        let old = old.map(|at| known.list.remove(at));
        // A step that is only planned leaves what is there to those that will compute.
        let old = old.filter(|form| !form.planned && Dry::is_on());
        if known.list.iter().filter(|form| !form.is_stashed()).count() < MOST {
            known.list.push(old.unwrap_or_else(|| Form {
                sharding: sharding.clone(),
                memory,
                planned: Dry::is_on(),
            }));
        }
    }
}

impl Tensor {
    /// Whether an op computed it from other values; not so parameters and inputs.
    pub(crate) fn is_computed(&self) -> bool {
        self.forms().is_some_and(|forms| forms.is_computed()) && !self.is_leaf()
    }

    /// The value in another sharding in which it is at hand. What is on its way is waited for, and
    /// what went wrong with it is returned.
    pub(crate) fn in_form(&self, sharding: &Sharding) -> Result<Option<Tensor>> {
        if self.sharding() == sharding {
            return Ok(Some(self.clone()));
        }
        let Some(forms) = self.forms() else {
            return Ok(None);
        };
        let shards = match forms.find(sharding) {
            None => return Ok(None),
            Some(Found::Here(shards)) => shards,
            Some(Found::Coming(shipment)) => {
                let brought = shipment.wait()?;
                let Some(shards) = brought.first().and_then(Tensor::shared_shards) else {
                    return Ok(None);
                };
                forms.arrived(sharding, shards);
                shards.clone()
            }
        };
        Ok(Some(self.with_form(sharding.clone(), shards)))
    }

    /// Makes what brings the value into another sharding one of its forms, as long as it is there.
    pub(crate) fn add_coming_form(&self, sharding: &Sharding, shipment: &Arc<Shipment>) {
        if let (Some(forms), Some(own)) = (self.forms(), self.shared_shards())
            && capture().calls > 0
        {
            forms.add(self.sharding(), Memory::Here(Arc::downgrade(own)));
            forms.add(sharding, Memory::Coming(Arc::downgrade(shipment)));
        }
    }

    /// Makes `form`, which is this value in another sharding, one of its forms; with `hold` also
    /// for the next calls.
    pub(crate) fn add_form(&self, form: Tensor, hold: bool) -> Tensor {
        let (Some(forms), Some(own), Some(shards)) =
            (self.forms(), self.shared_shards(), form.shared_shards())
        else {
            return form;
        };
        if capture().calls == 0 {
            return form;
        }
        forms.add(self.sharding(), Memory::Here(Arc::downgrade(own)));
        forms.add(form.sharding(), Memory::Here(Arc::downgrade(shards)));
        if hold {
            let part = form.sharding().largest_part(form.mesh(), form.shape());
            let by = self
                .holder()
                .unwrap_or_else(|| forms.kept.get_or_init(Arc::default));
            by.hold(form.sharding(), shards, part * form.dtype().size() as u64);
        }
        self.with_form(form.sharding().clone(), shards.clone())
    }

    /// The value in another sharding, brought there for ops to come: they find it as long as it
    /// lives. Nothing where ops do not look for forms.
    #[track_caller]
    pub(crate) fn brought_to(
        &self,
        op: &'static str,
        sharding: &Sharding,
    ) -> Result<Option<Tensor>> {
        if capture().calls == 0 {
            return Ok(None);
        }
        let _scope = ledger::on_behalf_of(op, self);
        reshard::to_mesh(&self.detach(), self.mesh(), sharding).map(Some)
    }

    /// The value in another sharding in which it is at hand, with its past.
    fn tracked_form(&self, sharding: &Sharding) -> Option<Tensor> {
        // The op has read it, so it is not on its way.
        let mut form = self.in_form(sharding).ok()??;
        if let Some(edge) = self.edge() {
            form.attach(edge.clone());
        }
        Some(form)
    }

    /// What a gradient keeps of an operand: the form that the op read, so that nothing is brought
    /// again. A parameter is kept as it lies: bringing it again is the point of cutting it. So is
    /// what was gathered along an axis that is to be [gathered again](super::spmd::with_kept).
    pub(crate) fn kept(&self) -> Tensor {
        let Some(forms) = self.forms() else {
            return self.clone();
        };
        let used = forms.used().filter(|used| {
            let parameter = !self.is_computed();
            crate::spmd::policy::keeps(self.mesh(), self.sharding(), used, parameter)
        });
        let form = used.and_then(|used| self.tracked_form(&used));
        form.as_ref().unwrap_or(self).without_holder()
    }
}

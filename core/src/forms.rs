//! The shardings in which a value is at hand.
//!
//! A tensor on a mesh and what it was resharded into are one value in several *forms*. They share
//! a table, so that whoever reads the value next can take the form that costs least: a tensor that
//! three products read is gathered once, and a partial sum is added up once.
//!
//! A form is known as long as some tensor has its memory. What an op brought for itself is also
//! held for the next few calls, because its readers tend to follow each other; the number of calls
//! and the bytes that are held so are [bounded](with_held). When the last tensor of a value goes,
//! its table and all that it held go too.
//!
//! What is known depends on the order of the program and on sizes alone, so that the processes of
//! a cluster, which run the same program, know the same.

use crate::{Dry, Sharding, Tensor, scoped::Scoped, tensor::Shards};
use smallvec::SmallVec;
use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
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
    /// While a step is planned, what was held before, and how many of these a real run would have
    /// let go of by now.
    static ASIDE: RefCell<(VecDeque<Holding>, usize)> = const { RefCell::new((VecDeque::new(), 0)) };
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
    forms: Weak<Forms>,
    sharding: Sharding,
    bytes: u64,
}

impl Holding {
    /// The bytes that it keeps alive now.
    fn bytes(&self) -> u64 {
        if self.forms.strong_count() > 0 {
            self.bytes
        } else {
            0
        }
    }

    /// Lets nobody see it, where nobody else has its memory.
    fn hide(&self, hidden: bool) {
        if let Some(forms) = self.forms.upgrade() {
            let mut table = forms.lock();
            let mut list = table.list.iter_mut();
            if let Some(form) = list.find(|f| f.sharding == self.sharding && !f.planned) {
                form.hidden = hidden && form.shards.strong_count() == 1;
            }
        }
    }

    fn release(self) {
        if let Some(forms) = self.forms.upgrade() {
            let mut table = forms.lock();
            let mut list = table.list.iter_mut();
            if let Some(form) = list.find(|f| f.sharding == self.sharding && !f.hidden) {
                form.held = None;
            }
        }
    }
}

/// Counts a call, and lets go of what was held long enough.
pub(crate) fn count_call() {
    let now = CALLS.get() + 1;
    CALLS.set(now);
    let expired = |holding: &Holding| holding.until <= now;
    while hide_oldest(expired) {}
    while let Some(holding) = WINDOW.with_borrow_mut(|w| {
        w.front()
            .is_some_and(expired)
            .then(|| w.pop_front())
            .flatten()
    }) {
        holding.release();
    }
}

/// Hides the oldest of what was held before a step was planned, if that `is` so; whether it did.
fn hide_oldest(is: impl Fn(&Holding) -> bool) -> bool {
    ASIDE.with_borrow_mut(|(held, hidden)| {
        let oldest = held.get(*hidden).filter(|holding| is(holding));
        if let Some(holding) = oldest {
            holding.hide(true);
            *hidden += 1;
            return true;
        }
        false
    })
}

/// Ends what [`aside`] began.
pub(crate) struct Aside {
    calls: u64,
}

/// Until it is dropped, what is held now is seen as it would be, and stays held all the same: for a
/// run that is only planned. What that run holds goes with it.
pub(crate) fn aside() -> Aside {
    ASIDE.set((WINDOW.take(), 0));
    Aside { calls: CALLS.get() }
}

impl Drop for Aside {
    fn drop(&mut self) {
        release_all();
        let (held, hidden) = ASIDE.take();
        held.iter().take(hidden).for_each(|h| h.hide(false));
        WINDOW.set(held);
        CALLS.set(self.calls);
    }
}

/// Lets go of everything that is held on this thread.
pub(crate) fn release_all() {
    for holding in WINDOW.take() {
        holding.release();
    }
}

/// The most forms of a value that are known.
const MOST: usize = 4;

/// The forms of one value.
#[derive(Default)]
pub(crate) struct Forms(Mutex<Known>);

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
    shards: Weak<Shards>,
    held: Option<Arc<Shards>>,
    /// Whether it is of a step that was planned, and has no values.
    planned: bool,
    /// Whether a step that is planned must not see it.
    hidden: bool,
}

impl Form {
    /// Whether there is something to know of.
    fn is_there(&self) -> bool {
        self.shards.strong_count() > 0 && (!self.planned || Dry::is_on())
    }

    /// Whether it is at hand.
    fn is_known(&self) -> bool {
        self.is_there() && !self.hidden
    }
}

impl Forms {
    /// The forms of a value that was computed.
    pub(crate) fn computed() -> Arc<Self> {
        Arc::new(Self(Mutex::new(Known {
            computed: true,
            ..Known::default()
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_computed(&self) -> bool {
        self.lock().computed
    }

    /// The shardings in which the value is at hand beside `own`, in the order in which they came.
    pub(crate) fn others(&self, own: &Sharding) -> SmallVec<[Sharding; 2]> {
        let mut known = self.lock();
        if known.list.is_empty() || capture().calls == 0 {
            return SmallVec::new();
        }
        known.list.retain(|form| form.is_there());
        let others = known.list.iter();
        let others = others.filter(|form| form.sharding != *own && !form.hidden);
        others.map(|form| form.sharding.clone()).collect()
    }

    /// What the ranks hold of the value in a sharding.
    pub(crate) fn find(&self, sharding: &Sharding) -> Option<Arc<Shards>> {
        let known = self.lock();
        let found = |form: &&Form| form.sharding == *sharding && form.is_known();
        known.list.iter().find(found)?.shards.upgrade()
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
    fn add(&self, sharding: &Sharding, shards: &Arc<Shards>) {
        let mut known = self.lock();
        known.list.retain(|form| form.is_there());
        let same = |form: &Form| form.sharding == *sharding && !form.hidden;
        let old = known.list.iter().position(same);
        // A step that is only planned leaves what is there to those that will compute.
        let old = old.map(|i| known.list.remove(i));
        let old = old.filter(|form| !form.planned && Dry::is_on());
        if known.list.iter().filter(|form| !form.hidden).count() < MOST {
            known.list.push(old.unwrap_or_else(|| Form {
                sharding: sharding.clone(),
                shards: Arc::downgrade(shards),
                held: None,
                planned: Dry::is_on(),
                hidden: false,
            }));
        }
    }

    /// Holds a form that is known for the next calls, as far as the bounds let it.
    fn hold(self: &Arc<Self>, sharding: &Sharding, shards: &Arc<Shards>, bytes: u64) {
        let bounds = capture();
        if bounds.calls == 0 || bytes > bounds.bytes {
            return;
        }
        {
            let mut known = self.lock();
            let mut list = known.list.iter_mut();
            let own = |f: &&mut Form| f.sharding == *sharding && f.planned == Dry::is_on();
            let Some(form) = list.find(own) else {
                return;
            };
            form.held = Some(shards.clone());
        }
        let holding = Holding {
            until: CALLS.get() + bounds.calls,
            forms: Arc::downgrade(self),
            sharding: sharding.clone(),
            bytes,
        };
        WINDOW.with_borrow_mut(|window| window.push_back(holding));
        // The oldest make room.
        loop {
            let before: u64 = ASIDE
                .with_borrow(|(held, hidden)| held.iter().skip(*hidden).map(Holding::bytes).sum());
            let all: u64 = WINDOW.with_borrow(|window| window.iter().map(Holding::bytes).sum());
            let over = before + all > bounds.bytes;
            if over && hide_oldest(|_| true) {
                continue;
            }
            let oldest =
                WINDOW.with_borrow_mut(|window| over.then(|| window.pop_front()).flatten());
            match oldest {
                Some(holding) => holding.release(),
                None => break,
            }
        }
    }
}

impl Tensor {
    /// Whether an op computed it from other values; not so parameters and inputs.
    pub(crate) fn is_computed(&self) -> bool {
        self.forms().is_some_and(|forms| forms.is_computed()) && !self.is_leaf()
    }

    /// The value in another sharding in which it is at hand.
    pub(crate) fn in_form(&self, sharding: &Sharding) -> Option<Tensor> {
        if self.sharding() == sharding {
            return Some(self.clone());
        }
        let shards = self.forms()?.find(sharding)?;
        Some(self.with_form(sharding.clone(), shards))
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
        forms.add(self.sharding(), own);
        forms.add(form.sharding(), shards);
        if hold {
            let part = form.sharding().largest_part(form.mesh(), form.shape());
            forms.hold(form.sharding(), shards, part * form.dtype().size() as u64);
        }
        self.with_form(form.sharding().clone(), shards.clone())
    }

    /// What a gradient keeps of an operand: the form that the op read, so that nothing is brought
    /// again. A parameter is kept as it lies: bringing it again is the point of cutting it. So is
    /// what was gathered along an axis that is to be [gathered again](super::spmd::with_kept).
    pub(crate) fn kept(&self) -> Tensor {
        let Some(forms) = self.forms() else {
            return self.clone();
        };
        let Some(used) = forms.used() else {
            return self.clone();
        };
        let parameter = !self.is_computed();
        if !crate::spmd::policy::keeps(self.mesh(), self.sharding(), &used, parameter) {
            return self.clone();
        }
        match forms.find(&used) {
            Some(shards) => {
                let mut kept = self.with_form(used, shards);
                if let Some(edge) = self.edge() {
                    kept.attach(edge.clone());
                }
                kept
            }
            None => self.clone(),
        }
    }
}

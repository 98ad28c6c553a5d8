//! Who is told of what a program moves: a plan that is made, or that is followed. Reshards are
//! below those who plan, so they do not know them.

use crate::{Mesh, Result, Sharding, Tensor};
use std::cell::Cell;

/// A plan that is made or followed.
pub(crate) trait Watch: Sync {
    /// The form that a tensor is to be resharded from, where the plan has it as the next step.
    fn planned_reshard(&self, x: &Tensor, to: &Sharding) -> Result<Option<Tensor>>;

    /// A reshard is about to send something, to the same mesh or another one, and no plan said it.
    fn reshard(&self, x: &Tensor, source: &Sharding, to: &Sharding, mesh: &Mesh) -> Result<()>;

    /// The worst rank receives so much, in so many seconds under the cost model.
    fn sent(&self, bytes: u64, seconds: f64);
}

thread_local! {
    static NOW: Cell<Option<&'static dyn Watch>> = const { Cell::new(None) };
}

/// Who watches this thread.
#[inline]
pub(crate) fn watcher() -> Option<&'static dyn Watch> {
    NOW.get()
}

/// Has somebody watch this thread, or nobody.
pub(crate) fn set_watcher(watcher: Option<&'static dyn Watch>) {
    // A thread that is ending has nobody to tell.
    let _ = NOW.try_with(|now| now.set(watcher));
}

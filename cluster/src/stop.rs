//! Signals that ask the program to leave: SIGTERM, as schedulers send it before they take a node
//! away, and the first SIGINT.
//!
//! ```
//! anymesh_cluster::stop::install()?;
//! for step in 0..3 {
//!     // train
//!     if anymesh_cluster::stop::stop_requested() {
//!         // save, then leave
//!         break;
//!     }
//! }
//! # std::io::Result::Ok(())
//! ```
//!
//! One process may hear the signal a step before another does. Processes that leave together agree
//! on it first, for example by the maximum of their flags after each step.

use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};
use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicBool, Ordering},
};

/// What the handlers set. The second SIGINT looks only at the first, so that SIGINT after SIGTERM
/// still lets the program save.
struct Flags {
    terminated: Arc<AtomicBool>,
    interrupted: Arc<AtomicBool>,
}

static FLAGS: Mutex<Option<Flags>> = Mutex::new(None);

/// From now on SIGTERM and the first SIGINT do not end the process but are told by
/// [`stop_requested`]. A second SIGINT ends it as usual. Any number of calls are as one.
pub fn install() -> std::io::Result<()> {
    let mut flags = FLAGS.lock().unwrap_or_else(PoisonError::into_inner);
    if flags.is_none() {
        let new = Flags {
            terminated: Arc::default(),
            interrupted: Arc::default(),
        };
        flag::register(SIGTERM, new.terminated.clone())?;
        // Handlers run in this order: the first SIGINT finds its flag down, and raises it.
        flag::register_conditional_default(SIGINT, new.interrupted.clone())?;
        flag::register(SIGINT, new.interrupted.clone())?;
        *flags = Some(new);
    }
    Ok(())
}

/// Whether a signal has asked the program to leave since [`install`].
pub fn stop_requested() -> bool {
    let flags = FLAGS.lock().unwrap_or_else(PoisonError::into_inner);
    flags.as_ref().is_some_and(|flags| {
        flags.terminated.load(Ordering::Relaxed) || flags.interrupted.load(Ordering::Relaxed)
    })
}

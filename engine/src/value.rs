//! What a buffer of a deferred device holds: memory of the device below, or the promise of it.

use anymesh_kernel::{Buffer, Error, Result};
use std::sync::{
    OnceLock,
    atomic::{AtomicU64, Ordering},
};

/// Numbers of queues, by which a value knows its own.
static QUEUES: AtomicU64 = AtomicU64::new(0);

/// A number for a queue.
pub(crate) fn next_queue() -> u64 {
    QUEUES.fetch_add(1, Ordering::Relaxed)
}

/// The result of a launch that was written down. Unset while it waits; then the inner buffer, or
/// why there is none.
pub(crate) struct Value {
    queue: u64,
    state: OnceLock<Result<Buffer>>,
}

/// A buffer with a value that waits.
pub(crate) fn pending(queue: u64, bytes: usize) -> Buffer {
    let state = OnceLock::new();
    Buffer::new(Value { queue, state }, bytes)
}

/// What is known of a buffer that reached a deferred device.
pub(crate) enum State<'b> {
    /// Memory of the device below.
    Ready(&'b Buffer),
    /// It waits in the queue.
    Pending,
    /// Its launch failed.
    Failed(&'b Error),
}

/// The state of a buffer. One that is no value is the inner device's own: an upload, or what a
/// transport filled.
pub(crate) fn state(queue: u64, buffer: &Buffer) -> Result<State<'_>> {
    let Ok(value) = buffer.get::<Value>() else {
        buffer.check_computed()?;
        return Ok(State::Ready(buffer));
    };
    if value.queue != queue {
        let detail = "a buffer of another device was passed in";
        return Err(Error::argument("buffer", "buffer", detail));
    }
    Ok(match value.state.get() {
        Some(Ok(inner)) => State::Ready(inner),
        Some(Err(error)) => State::Failed(error),
        None => State::Pending,
    })
}

/// Ends the waiting.
pub(crate) fn settle(buffer: &Buffer, result: Result<Buffer>) {
    if let Ok(value) = buffer.get::<Value>() {
        // The first result stays: a launch that is repeated gives the same.
        let _ = value.state.set(result);
    }
}

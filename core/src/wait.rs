//! Waiting for what a device computes.

use crate::Result;

/// The result of a future, waited for.
#[cfg(not(target_family = "wasm"))]
pub(crate) fn wait<T>(_op: &'static str, future: impl Future<Output = Result<T>>) -> Result<T> {
    pollster::block_on(future)
}

/// In a browser nothing can be waited for: the result of a future that has it at once, as those of
/// the CPU device do.
#[cfg(target_family = "wasm")]
pub(crate) fn wait<T>(op: &'static str, future: impl Future<Output = Result<T>>) -> Result<T> {
    use std::task::{Context, Poll, Waker};
    match std::pin::pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => Err(crate::Error::Unsupported {
            device: "a browser".into(),
            what: format!("waiting for a GPU, as `{op}` does here"),
            hint: format!("await `{op}_async` instead"),
        }),
    }
}

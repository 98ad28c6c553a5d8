//! What the watch over NCCL's calls tells the flight recorder, and asks the hub.

use crate::{control::Control, recorder::State, wire::Broken};
use anymesh_backend_cuda::nccl::Observer;
use anymesh_core::Error;
use std::{sync::Arc, time::Duration};

/// How long a verdict is waited for where a connection broke: whoever is at its other end died, and
/// the hub sees that too.
const VERDICT: Duration = Duration::from_millis(1500);

pub(super) struct Told {
    control: Arc<Control>,
    deadline: Duration,
}

impl Told {
    pub(super) fn new(control: Arc<Control>, deadline: Duration) -> Self {
        Self { control, deadline }
    }

    /// Who must send something to the oldest call that waits.
    fn awaited(&self) -> Vec<usize> {
        let calls = self.control.recorder.record(usize::MAX).calls;
        let waiting = calls.into_iter().find(|c| c.state == State::Waiting);
        waiting.map(|call| call.waits_for).unwrap_or_default()
    }
}

impl Observer for Told {
    fn finished(&self, ticket: u64) {
        self.control.recorder.end(ticket, State::Done, None);
    }

    fn trouble(&self, error: Error) -> Error {
        let verdict = match &error {
            Error::Timeout { .. } => {
                let late = Broken::Late(self.awaited());
                Some(self.control.conclude(late, self.deadline.as_secs_f64()))
            }
            _ => self.control.alarm.wait(VERDICT),
        };
        match verdict {
            Some(verdict) => verdict.error("communication", |p| vec![p]),
            None => {
                // Nobody died: it is an error of this process alone.
                self.control.failed(&error.to_string());
                error
            }
        }
    }
}

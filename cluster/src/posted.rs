//! Exchanges that go on beside the program.

use crate::{
    carried::{Bytes, Engine, Out, Waiting, describe},
    recorder::State,
    wire::Flying,
};
use anymesh_core::{
    Mesh, Result, Tensor,
    transport::{Arrived, Message, Pending},
};
use std::{
    sync::{Arc, PoisonError},
    time::{Duration, Instant},
};

impl Engine {
    /// Begins an exchange, which goes on by itself.
    pub(crate) fn post(
        self: &Arc<Self>,
        mesh: &Mesh,
        messages: Vec<Message>,
    ) -> Result<Box<dyn Pending>> {
        let op = "exchange";
        let Bytes {
            sends,
            memories,
            receives,
            out,
        } = self.bytes((op, 0), mesh, &messages)?;
        if sends.is_empty() && receives.is_empty() {
            return Ok(Box::new(Done::of(out.filled(vec![])?)));
        }
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.check(op, mesh)?;
        let call = self.begin(op, &sends, &receives, || describe(&messages));
        drop(messages);
        let recorder = &self.control.recorder;
        let (wait, sends_only) = (self.waiting(&receives), receives.is_empty());
        match self.wire.post(sends, memories, receives, &wait) {
            Err(broken) => Err(self.broken(op, mesh, call, broken, &wait)),
            Ok(_) if sends_only => {
                recorder.end(call, State::Done, None);
                Ok(Box::new(Done::of(out.filled(vec![])?)))
            }
            Ok(flying) => {
                recorder.is_now(call, State::Queued);
                Ok(Box::new(Posted {
                    engine: self.clone(),
                    mesh: mesh.clone(),
                    call,
                    awaited: wait.awaited,
                    flying,
                    out,
                }))
            }
        }
    }
}

/// An exchange that is over.
#[derive(Debug)]
pub(crate) struct Done(Arrived);

impl Done {
    pub(crate) fn of(answer: Vec<Option<Tensor>>) -> Self {
        Self(Arrived {
            answer,
            ran: Duration::ZERO,
        })
    }
}

impl Pending for Done {
    fn is_done(&self) -> bool {
        true
    }

    fn wait(self: Box<Self>) -> Result<Arrived> {
        Ok(self.0)
    }
}

/// An exchange that goes on by itself.
#[derive(Debug)]
struct Posted {
    engine: Arc<Engine>,
    mesh: Mesh,
    /// Its number in the recorder.
    call: u64,
    awaited: Vec<usize>,
    flying: Box<dyn Flying>,
    out: Out,
}

impl Pending for Posted {
    fn is_done(&self) -> bool {
        self.flying.is_done()
    }

    fn wait(self: Box<Self>) -> Result<Arrived> {
        let Self {
            engine,
            mesh,
            call,
            awaited,
            flying,
            out,
        } = *self;
        let recorder = &engine.control.recorder;
        recorder.is_now(call, State::Waiting);
        // The time before anybody waited does not count: the other end may have to compute.
        let wait = Waiting {
            until: Instant::now() + engine.deadline,
            control: engine.control.clone(),
            awaited,
        };
        match flying.land(&wait) {
            Ok((memories, ran)) => {
                recorder.end(call, State::Done, None);
                let answer = out.filled(memories)?;
                Ok(Arrived { answer, ran })
            }
            Err(broken) => Err(engine.broken("exchange", &mesh, call, broken, &wait)),
        }
    }
}

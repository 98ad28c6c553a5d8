//! Tensors that communication is to bring.

use crate::{
    Result, Tensor,
    ledger::{Begun, Clock},
    reshard::{Packed, Ready},
    transport::Pending,
};
use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// A tensor that is there, or on its way.
#[derive(Clone, Debug)]
pub(crate) enum Coming {
    There(Tensor),
    /// One of those that a shipment brings.
    Shipped(Arc<Shipment>, usize),
}

impl Coming {
    /// The tensor, when it is there.
    pub(crate) fn wait(&self) -> Result<Tensor> {
        match self {
            Coming::There(tensor) => Ok(tensor.clone()),
            Coming::Shipped(shipment, i) => Ok(shipment.wait()?[*i].clone()),
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        match self {
            Coming::There(_) => true,
            Coming::Shipped(shipment, _) => shipment.is_done(),
        }
    }
}

/// Tensors that started calls bring together.
pub(crate) struct Shipment(Mutex<State>);

enum State {
    Started(Started),
    Landed(Result<Arc<[Tensor]>>),
}

struct Started {
    pending: Vec<Box<dyn Pending>>,
    packed: Packed,
    /// The steps in the ledgers, with what each sends.
    begun: Vec<(Begun, u64)>,
}

impl Shipment {
    /// Starts the calls that bring some tensors, which [go together](Ready::goes_with). What they
    /// are made from is released when it is sent.
    pub(crate) fn start(mut readies: Vec<Ready>) -> Result<Arc<Self>> {
        let step = |ready: &mut Ready| (std::mem::take(&mut ready.begun), ready.recv_bytes());
        let begun: Vec<_> = readies.iter_mut().map(step).collect();
        let mesh = readies.first().map(|ready| ready.mesh().clone());
        let (packed, calls) = Packed::calls(readies)?;
        let clock = Clock::start();
        let mut pending = Vec::with_capacity(calls.len());
        if let Some(mesh) = mesh
            && let Some(transport) = mesh.transport()
        {
            for call in calls {
                pending.push(transport.start(&mesh, call)?);
            }
        }
        share(&begun, Duration::ZERO, clock.elapsed());
        Ok(Arc::new(Self(Mutex::new(State::Started(Started {
            pending,
            packed,
            begun,
        })))))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether nobody would have to wait for it.
    pub(crate) fn is_done(&self) -> bool {
        match &*self.lock() {
            State::Started(started) => started.pending.iter().all(|call| call.is_done()),
            State::Landed(_) => true,
        }
    }

    /// What it brings, when it is there.
    pub(crate) fn wait(&self) -> Result<Arc<[Tensor]>> {
        let mut state = self.lock();
        if let State::Landed(tensors) = &*state {
            return tensors.clone();
        }
        // An error that stays, should what follows panic.
        let lost = State::Landed(Err(crate::Error::Transport {
            op: "wait",
            detail: "what was on its way was lost by a panic".into(),
            ranks: vec![],
        }));
        let tensors = match std::mem::replace(&mut *state, lost) {
            State::Started(started) => started.land(),
            State::Landed(tensors) => tensors,
        };
        *state = State::Landed(tensors.clone());
        tensors
    }
}

impl Started {
    fn land(self) -> Result<Arc<[Tensor]>> {
        let clock = Clock::start();
        let mut ran = Duration::ZERO;
        let mut answers = Vec::with_capacity(self.pending.len());
        for call in self.pending {
            let arrived = call.wait()?;
            ran += arrived.ran;
            answers.push(arrived.answer);
        }
        share(&self.begun, ran, clock.elapsed());
        Ok(self.packed.land(answers)?.into())
    }
}

/// Gives each step of a shipment its share of the time, by what it sends.
fn share(steps: &[(Begun, u64)], ran: Duration, waited: Duration) {
    let all: u64 = steps.iter().map(|(_, bytes)| bytes).sum();
    for (begun, bytes) in steps {
        let part = *bytes as f64 / all.max(1) as f64;
        begun.add(ran.mul_f64(part), waited.mul_f64(part));
    }
}

impl fmt::Debug for Shipment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.is_done() {
            "there"
        } else {
            "on its way"
        };
        write!(f, "Shipment({state})")
    }
}

//! Queues calls: one group for everything that this process does in them.

use super::{
    Call, Communicator, Error, Op, Watch,
    call::Span,
    lane::{Event, Lane},
};
use anymesh_kernel::Buffer;
use std::{
    sync::{Arc, PoisonError},
    time::Duration,
};

/// What one rank of this process does.
#[derive(Debug)]
pub struct Work {
    /// The rank.
    pub communicator: Arc<Communicator>,
    /// What it does.
    pub op: Op,
}

/// A name, the observer's ticket and a deadline.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// For messages.
    pub what: &'static str,
    /// What the observer knows it by.
    pub ticket: u64,
    /// How long the device may work on it, and how long it may take to be queued.
    pub deadline: Duration,
}

/// Queues all of this as one, behind every kernel that this thread has launched. Returns when it is
/// queued: results can be used at once, kernels that read them wait on the device.
///
/// # Errors
/// What the library refuses, and what the watch was told before. In any case the watch gives up,
/// since the other members have the call too.
pub fn submit(watch: &Arc<Watch>, terms: Terms, work: &[Work]) -> Result<Arc<Call>, Error> {
    // One order for all threads, so that two calls over the same devices cannot each have one.
    let mut lanes: Vec<Arc<Lane>> = vec![];
    for lane in work.iter().map(|w| &w.communicator.lane) {
        if !lanes.iter().any(|known| Arc::ptr_eq(known, lane)) {
            lanes.push(lane.clone());
        }
    }
    lanes.sort_by_key(|lane| (lane.ordinal(), Arc::as_ptr(lane) as usize));
    let turns: Vec<_> = lanes
        .iter()
        .map(|lane| lane.turn.lock().unwrap_or_else(PoisonError::into_inner))
        .collect();
    let regions = || work.iter().map(|w| w.op.regions());
    let pins = regions()
        .flat_map(|(from, to)| from.into_iter().chain(to))
        .map(|region| region.pin.clone())
        .collect();
    let written = regions().filter_map(|(_, to)| Some(to?.serial));
    let first = written.min().unwrap_or_else(Buffer::next_serial);
    let call = Call::new(terms.what, terms.ticket, terms.deadline, first, pins);
    watch.add(&call)?;
    let mut begins: Vec<Option<Event>> = lanes.iter().map(|_| None).collect();
    let queued = queue(&lanes, &mut begins, terms, work);
    // Also after a failure: memory stays until the stream has passed what was queued of it.
    let spans = lanes
        .iter()
        .zip(begins)
        .map(|(lane, begin)| {
            lane.bind()?;
            let begin = begin.map_or_else(|| lane.mark(), Ok)?;
            Ok(Span {
                lane: lane.clone(),
                number: lane.number(),
                begin,
                end: Arc::new(lane.mark()?),
            })
        })
        .collect::<Result<Vec<Span>, Error>>();
    let spans = match (queued, spans) {
        (Ok(()), Ok(spans)) => spans,
        (queued, spans) => {
            drop(turns);
            let error = match (queued, spans) {
                (queued, Ok(spans)) => {
                    call.queued(spans);
                    queued.err()
                }
                (queued, Err(e)) => {
                    call.forget();
                    queued.err().or(Some(e))
                }
            };
            let nothing = || Error::Driver {
                call: "submit",
                detail: "the call was not queued".into(),
            };
            return Err(watch.give_up(error.unwrap_or_else(nothing)));
        }
    };
    for span in &spans {
        let serials = work
            .iter()
            .filter(|w| Arc::ptr_eq(&w.communicator.lane, &span.lane))
            .filter_map(|w| Some(w.op.regions().1?.serial))
            .collect();
        span.lane.expect(span.number, serials, &span.end);
    }
    call.queued(spans);
    drop(turns);
    Ok(call)
}

fn queue(
    lanes: &[Arc<Lane>],
    begins: &mut [Option<Event>],
    terms: Terms,
    work: &[Work],
) -> Result<(), Error> {
    let Some(library) = work.first().map(|w| w.communicator.library()) else {
        return Ok(());
    };
    for (lane, begin) in lanes.iter().zip(begins) {
        lane.bind()?;
        *begin = Some(lane.follow()?);
    }
    let mut communicators: Vec<Arc<Communicator>> = vec![];
    for communicator in work.iter().map(|w| &w.communicator) {
        if !communicators.iter().any(|c| Arc::ptr_eq(c, communicator)) {
            communicators.push(communicator.clone());
        }
    }
    let _locks = communicators
        .iter()
        .map(|c| c.lock())
        .collect::<Result<Vec<_>, _>>()?;
    library.group(|| {
        for Work { communicator, op } in work {
            // SAFETY: the regions were made for these counts, and the call keeps them.
            unsafe { op.queue(communicator) }?;
        }
        Ok(())
    })?;
    Communicator::settle(&communicators, terms.what, terms.deadline)
}

//! Launches that are made again, one by one or as a list.

use super::{Launcher, not_run};
use crate::{
    again::Slot,
    lists::Listed,
    log,
    queue::Prepared,
    replay::{Held, kernels},
};
use std::sync::Arc;

impl Launcher {
    /// From here on launches are a list, which is queued when it ends.
    pub(crate) fn begin_list(&mut self) {
        self.whole = self.held.is_none();
        self.held.get_or_insert_default();
    }

    /// Queues the list. Whoever wrote it down is told whether that is all there was.
    pub(crate) fn end_list(&mut self, written: Option<&Listed>) {
        let list = self.held.take().unwrap_or_default();
        if let Some(written) = written {
            written.seen(self.whole && list == written.launches);
        }
        list.iter().for_each(|held| self.queue_one(held));
    }

    /// Queues what is held, because something else comes next.
    pub(super) fn queue_held(&mut self) {
        if let Some(list) = self.held.as_mut().map(std::mem::take) {
            self.whole = false;
            list.iter().for_each(|held| self.queue_one(held));
        }
    }

    /// Queues a list that came before: as one graph, if the driver can.
    pub(crate) fn list_again(&mut self, listed: &Listed) {
        self.queue_held();
        // Garbage is told from values launch by launch, and so are launches that are logged.
        let plain = self.failures.is_empty() && log::level() < 2 && self.bind().is_ok();
        if !plain || !self.replay(listed) {
            listed.launches.iter().for_each(|held| self.queue_one(held));
        }
    }

    fn replay(&mut self, listed: &Listed) -> bool {
        let mut graph = listed.graph();
        if graph.is_none() {
            let written = self.queue.write_down().and_then(|()| {
                let all = (listed.launches.iter()).try_for_each(|held| self.enqueue(held));
                // Ends the writing, whatever came of it.
                let graph = self.queue.written();
                all.and(graph)
            });
            let count = listed.launches.len();
            log::say(1, || match &written {
                Ok(_) => format!("{count} launches are a graph"),
                Err(detail) => format!("{count} launches are no graph: {detail}"),
            });
            *graph = Some(written.map_err(|_| ()));
        }
        match &*graph {
            Some(Ok(graph)) => self.queue.replay(graph).is_ok(),
            _ => false,
        }
    }

    /// Makes a launch again, or holds it where it is one of a list.
    pub(crate) fn again(&mut self, held: Held) {
        match &mut self.held {
            Some(list) => list.push(held),
            None => self.queue_one(&held),
        }
    }

    fn queue_one(&mut self, held: &Held) {
        match held {
            Held::Library(library) => {
                let writes = std::iter::once(library.writes.clone());
                self.perform(library.reads.iter().cloned(), writes, |this| {
                    (library.work)(this.queue.stream()).map_err(|detail| {
                        log::say(1, || detail.clone());
                        Arc::from(detail)
                    })
                });
            }
            Held::Again {
                launches,
                addresses,
            } => {
                for (again, its) in kernels(launches, addresses) {
                    let launch = &again.launch;
                    let used = |of: fn(&Slot) -> bool| {
                        (again.slots.iter().zip(its))
                            .filter(move |(slot, _)| of(slot))
                            .map(|(slot, address)| *address..*address + slot.bytes)
                    };
                    log::say(2, || {
                        format!("{} {:?} {its:x?}, again", launch.name, launch.grid)
                    });
                    self.perform(used(Slot::is_read), used(Slot::is_written), |this| {
                        this.restart(launch, its)
                            .map_err(|detail| not_run(&launch.name, &detail))
                    });
                }
            }
        }
    }

    /// Gives a launch to the driver, without a look at what it reads.
    fn enqueue(&mut self, held: &Held) -> Result<(), String> {
        match held {
            Held::Library(library) => (library.work)(self.queue.stream()),
            Held::Again {
                launches,
                addresses,
            } => kernels(launches, addresses)
                .try_for_each(|(again, its)| self.restart(&again.launch, its)),
        }
    }

    fn restart(&mut self, launch: &Prepared, addresses: &[u64]) -> Result<(), String> {
        let (function, grid, block) = (launch.function, launch.grid, launch.block);
        self.start(
            function,
            grid,
            block,
            launch.shared,
            addresses,
            &launch.info,
        )
    }
}

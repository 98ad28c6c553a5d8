//! Launches that are made again, one by one or as a list.

use super::{Launcher, not_run};
use crate::{
    again::{Again, Slot},
    lists::Listed,
    log,
    order::Order,
    queue::Launch,
    replay::{Held, kernels},
};
use std::sync::Arc;

/// Which launches of a list may run beside others: where those that take long come one after the other,
/// and some of them do the same in other memory, as for simulated ranks. The driver needs longer for
/// launches that it keeps apart, and what is short gains less than that.
fn side_by_side(launches: &[Held]) -> Vec<bool> {
    let mut all = Vec::with_capacity(launches.len());
    for row in launches.chunk_by(|a, b| a.takes_long() == b.takes_long()) {
        let came = |k: usize| row[..k].iter().any(|other| other.does_as(&row[k]));
        let beside = row[0].takes_long() && (1..row.len()).any(came);
        all.resize(all.len() + row.len(), beside);
    }
    all
}

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
                let mut order = Order::default();
                let mut launches = listed.launches.iter().zip(side_by_side(&listed.launches));
                let all = launches
                    .try_for_each(|(held, beside)| self.write_down(held, beside, &mut order));
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
                        this.restart(again, its)
                            .map_err(|detail| not_run(&launch.name, &detail))
                    });
                }
            }
        }
    }

    /// Gives a launch of a graph to the driver.
    fn write_down(&mut self, held: &Held, beside: bool, order: &mut Order) -> Result<(), String> {
        match held {
            Held::Library(library) => {
                self.queue
                    .wait_for(&order.next(&library.accesses(), beside))?;
                (library.work)(self.queue.stream())
            }
            Held::Again {
                launches,
                addresses,
            } => kernels(launches, addresses).try_for_each(|(again, its)| {
                self.queue
                    .wait_for(&order.next(&again.accesses(its), beside))?;
                self.restart(again, its)
            }),
        }
    }

    fn restart(&mut self, again: &Again, addresses: &[u64]) -> Result<(), String> {
        let launch = &again.launch;
        self.places.clear();
        self.places.extend(again.places(addresses));
        let launch = Launch {
            function: launch.function,
            grid: launch.grid,
            block: launch.block,
            shared: launch.shared,
            places: &self.places,
            info: &launch.info,
        };
        // SAFETY: the places of its first launch, moved to where its memory lies now; whoever launches
        // holds that.
        unsafe { self.queue.launch(launch) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        queue::{Function, Prepared},
        replay::Library,
    };
    use smallvec::SmallVec;

    fn product(problem: u64) -> Held {
        Held::Library(Arc::new(Library {
            identity: [problem, 0, 0, 0, 0, 0, 0, 0],
            reads: SmallVec::new(),
            writes: 0..1,
            workspace: None,
            work: Box::new(|_| Ok(())),
        }))
    }

    fn call(long: bool) -> Held {
        let launch = Prepared {
            name: "kernel".into(),
            function: Function(0),
            grid: [1; 3],
            block: [1; 3],
            shared: 0,
            info: vec![],
        };
        let slots = vec![];
        Held::Again {
            launches: Arc::new([Again {
                launch,
                slots,
                long,
            }]),
            addresses: SmallVec::new(),
        }
    }

    #[test]
    fn equal_work_of_ranks_runs_side_by_side_and_other_work_does_not() {
        let attention = call(true);
        let short = call(false);
        let list = [
            product(1),
            product(2),
            short.clone(),
            product(1),
            product(2),
            product(1),
            short.clone(),
            short,
            attention.clone(),
            attention,
            call(false),
            product(1),
        ];
        let beside: Vec<usize> = (side_by_side(&list).iter().enumerate())
            .filter_map(|(k, beside)| beside.then_some(k))
            .collect();
        assert_eq!(beside, [3, 4, 5, 8, 9]);
    }
}

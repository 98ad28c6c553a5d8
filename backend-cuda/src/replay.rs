//! Lists of launches that came before, with the same addresses, as one graph of the driver.
//!
//! Where a list of launches is known before any of them must run (deferred execution runs such lists),
//! the thread that launches holds them until the list ends. A list that comes for the second time is
//! written down as a graph while it is queued, and from then on is one call of the driver instead of
//! one for each kernel. A training step takes and gives back its memory in the same order every time,
//! so its lists come with the same few sets of addresses again and again.

use crate::{
    again::Again,
    queue::{Graph, Stream},
};
use smallvec::SmallVec;
use std::{collections::HashMap, ops::Range, sync::Arc};

/// Shorter lists are queued one by one.
const SHORTEST: usize = 8;

/// Launches of all lists that are kept; those that were not used for longest go.
const LIMIT: usize = 1 << 15;

/// One launch of a list, with its addresses.
#[derive(Clone)]
pub(crate) enum Held {
    /// The kernels of a call.
    Again {
        launches: Arc<[Again]>,
        addresses: SmallVec<[u64; 12]>,
    },
    /// A library's product.
    Library(Arc<Library>),
}

/// What a library does on the stream, the same every time.
pub(crate) struct Library {
    /// What tells it apart from others: its problem and its addresses.
    pub(crate) identity: [u64; 8],
    pub(crate) reads: SmallVec<[Range<u64>; 3]>,
    pub(crate) writes: Range<u64>,
    #[allow(clippy::type_complexity)]
    pub(crate) work: Box<dyn Fn(Stream) -> Result<(), String> + Send + Sync>,
}

impl PartialEq for Held {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (
                Held::Again {
                    launches: a,
                    addresses: at_a,
                },
                Held::Again {
                    launches: b,
                    addresses: at_b,
                },
            ) => Arc::ptr_eq(a, b) && at_a == at_b,
            (Held::Library(a), Held::Library(b)) => a.identity == b.identity,
            _ => false,
        }
    }
}

/// The kernels of a call, each with its addresses.
pub(crate) fn kernels<'h>(
    launches: &'h [Again],
    mut addresses: &'h [u64],
) -> impl Iterator<Item = (&'h Again, &'h [u64])> {
    launches.iter().map(move |launch| {
        let (its, rest) = addresses.split_at(launch.slots.len());
        addresses = rest;
        (launch, its)
    })
}

impl Held {
    fn words(&self, mix: &mut impl FnMut(u64)) {
        match self {
            Held::Again {
                launches,
                addresses,
            } => {
                mix(launches.as_ptr() as u64);
                addresses.iter().for_each(|address| mix(*address));
            }
            Held::Library(library) => library.identity.iter().for_each(|word| mix(*word)),
        }
    }
}

/// The lists that came before.
#[derive(Default)]
pub(crate) struct Graphs {
    lists: HashMap<u64, Kept>,
    launches: usize,
    clock: u64,
}

struct Kept {
    list: Vec<Held>,
    /// Once it came twice; `Err` where the driver could not write it down.
    graph: Option<Result<Graph, ()>>,
    used: u64,
}

/// What to do with a list.
pub(crate) enum Known<'g> {
    /// One call of the driver.
    Graph(&'g Graph),
    /// It came before: it is to be written down, and kept under this number.
    Write(u64),
    /// One by one.
    Queue,
}

impl Graphs {
    /// What is known of a list, which counts as having come.
    pub(crate) fn find(&mut self, list: &[Held]) -> Known<'_> {
        if list.len() < SHORTEST {
            return Known::Queue;
        }
        let mut number = list.len() as u64;
        for held in list {
            held.words(&mut |word| {
                number = (number.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            });
        }
        self.clock += 1;
        let clock = self.clock;
        let same = self.lists.get(&number).map(|kept| kept.list == list);
        if same != Some(true) {
            self.forget(number);
            self.make_room(list.len());
            self.launches += list.len();
            let kept = Kept {
                list: list.to_vec(),
                graph: None,
                used: clock,
            };
            self.lists.insert(number, kept);
            return Known::Queue;
        }
        match self.lists.get_mut(&number) {
            Some(kept) => {
                kept.used = clock;
                match &kept.graph {
                    None => Known::Write(number),
                    Some(Ok(graph)) => Known::Graph(graph),
                    Some(Err(())) => Known::Queue,
                }
            }
            None => Known::Queue,
        }
    }

    /// Keeps what came of writing a list down.
    pub(crate) fn keep(&mut self, number: u64, graph: Result<Graph, ()>) {
        if let Some(kept) = self.lists.get_mut(&number) {
            kept.graph = Some(graph);
        }
    }

    fn forget(&mut self, number: u64) {
        if let Some(gone) = self.lists.remove(&number) {
            self.launches -= gone.list.len();
        }
    }

    fn make_room(&mut self, launches: usize) {
        while self.launches + launches > LIMIT {
            let oldest = self.lists.iter().min_by_key(|(_, kept)| kept.used);
            match oldest.map(|(number, _)| *number) {
                Some(number) => self.forget(number),
                None => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product(identity: [u64; 8]) -> Held {
        Held::Library(Arc::new(Library {
            identity,
            reads: SmallVec::new(),
            writes: 0..1,
            work: Box::new(|_| Ok(())),
        }))
    }

    fn list(first: u64, len: usize) -> Vec<Held> {
        (0..len as u64)
            .map(|k| product([first, k, 0, 0, 0, 0, 0, 0]))
            .collect()
    }

    #[test]
    fn a_list_is_written_down_the_second_time_and_replayed_from_then_on() {
        let mut graphs = Graphs::default();
        assert!(matches!(graphs.find(&list(1, 9)), Known::Queue));
        let Known::Write(number) = graphs.find(&list(1, 9)) else {
            panic!("it came twice");
        };
        assert!(matches!(graphs.find(&list(2, 9)), Known::Queue), "another");
        graphs.keep(number, Ok(Graph(std::ptr::null_mut())));
        assert!(matches!(graphs.find(&list(1, 9)), Known::Graph(_)));
        let Known::Write(number) = graphs.find(&list(2, 9)) else {
            panic!("it came twice");
        };
        graphs.keep(number, Err(()));
        assert!(matches!(graphs.find(&list(2, 9)), Known::Queue), "for good");
        for _ in 0..3 {
            assert!(matches!(graphs.find(&list(3, 7)), Known::Queue), "short");
        }
    }

    #[test]
    fn what_was_not_used_for_longest_goes() {
        let mut graphs = Graphs::default();
        let count = LIMIT / 1024;
        for k in 0..count as u64 {
            graphs.find(&list(k, 1024));
        }
        assert!(matches!(graphs.find(&list(0, 1024)), Known::Write(_)));
        graphs.find(&list(1 << 32, 1024));
        assert_eq!(graphs.launches, LIMIT);
        assert!(matches!(graphs.find(&list(0, 1024)), Known::Write(_)));
        assert!(matches!(graphs.find(&list(1, 1024)), Known::Queue), "gone");
    }
}

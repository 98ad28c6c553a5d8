//! A launch that can be made any number of times: what is launched, with its addresses.

use crate::{again::Again, order::Access, queue::Stream};
use smallvec::SmallVec;
use std::{ops::Range, sync::Arc};

/// One launch, with its addresses.
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
pub struct Library {
    /// What tells it apart from others: its problem, and then its addresses.
    pub identity: [u64; 8],
    /// Memory that it reads.
    pub reads: SmallVec<[Range<u64>; 3]>,
    /// Memory that it fills.
    pub writes: Range<u64>,
    /// Memory that it needs meanwhile and shares with others.
    pub workspace: Option<Range<u64>>,
    /// Queues it.
    #[allow(clippy::type_complexity)]
    pub work: Box<dyn Fn(Stream) -> Result<(), String> + Send + Sync>,
}

impl Held {
    /// Whether it is a product or attention.
    pub(crate) fn takes_long(&self) -> bool {
        match self {
            Self::Again { launches, .. } => launches.iter().any(|again| again.long),
            Self::Library(_) => true,
        }
    }

    /// Whether it does the same, wherever its operands lie.
    pub(crate) fn does_as(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Again { launches: a, .. }, Self::Again { launches: b, .. }) => Arc::ptr_eq(a, b),
            (Self::Library(a), Self::Library(b)) => a.identity[0] == b.identity[0],
            _ => false,
        }
    }
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Library({:x?})", self.identity)
    }
}

impl Library {
    /// The memory that it uses.
    pub(crate) fn accesses(&self) -> SmallVec<[Access; 8]> {
        let access = |place: &Range<u64>, written| Access {
            place: place.clone(),
            written,
        };
        let reads = self.reads.iter().map(|place| access(place, false));
        let writes = std::iter::once(&self.writes).chain(&self.workspace);
        reads
            .chain(writes.map(|place| access(place, true)))
            .collect()
    }
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

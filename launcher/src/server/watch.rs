//! Which kernels a thread launches, for whoever wants to make them again.

use super::{Launcher, Loaded, place};
use crate::{memory::STANDING, queue::Prepared};
use cubecl::{
    CubeCount,
    server::{BufferBinding, KernelArguments},
};
use cubecl_environment::stream::StreamId;
use std::ops::Range;

/// A launch that was watched.
pub(crate) struct Taped {
    pub(crate) launch: Prepared,
    pub(crate) arguments: Vec<Argument>,
}

/// Memory that a launch was given.
pub(crate) struct Argument {
    pub(crate) place: Range<u64>,
    pub(crate) read: bool,
    pub(crate) written: bool,
    /// Whether it is the same at every launch.
    pub(crate) standing: bool,
}

impl Launcher {
    /// From here on the launches of a thread are watched.
    pub(crate) fn watch(&mut self, thread: StreamId) {
        self.queue_held();
        self.tapes.insert(thread, Some(vec![]));
    }

    /// What a thread launched since it is watched, if that is all it did.
    pub(crate) fn watched(&mut self, thread: StreamId) -> Option<Vec<Taped>> {
        self.tapes.remove(&thread)?
    }

    /// A thread that may be watched did something that is no launch.
    pub(super) fn spoil(&mut self, thread: StreamId) {
        if let Some(tape) = self.tapes.get_mut(&thread) {
            *tape = None;
        }
    }

    pub(super) fn tape(
        &mut self,
        thread: StreamId,
        name: &str,
        loaded: &Loaded,
        count: &CubeCount,
        arguments: &KernelArguments,
    ) {
        let Some(Some(tape)) = self.tapes.get_mut(&thread) else {
            return;
        };
        let CubeCount::Static(x, y, z) = *count else {
            return self.spoil(thread);
        };
        // Binding for binding: which of them CubeCL says are read, and which are written.
        let all: Vec<&BufferBinding> = arguments.buffers().collect();
        let among = |some: Vec<&BufferBinding>| -> Vec<bool> {
            let same = |a: &&BufferBinding| some.iter().any(|b| std::ptr::eq(*a, *b));
            all.iter().map(same).collect()
        };
        let read = among(arguments.buffers_read(Some(&loaded.io)).collect());
        let written = among(arguments.buffers_written(Some(&loaded.io)).collect());
        // In kernels with instructions of their own CubeCL takes everything for written, also what the
        // kernel declares that it only reads. Of memory that stands (tickets, faults) its word counts:
        // launches that share it are never to run beside each other.
        let declared = among(arguments.buffers_written(None).collect());
        let given = (all.iter().zip(read).zip(written.into_iter().zip(declared))).map(
            |((binding, read), (written, declared))| Argument {
                place: place(binding),
                read,
                written: written && (declared || binding.stream == STANDING),
                standing: binding.stream == STANDING,
            },
        );
        tape.push(Taped {
            launch: Prepared {
                name: name.into(),
                function: loaded.function,
                grid: [x, y, z],
                block: loaded.block,
                shared: loaded.shared,
                info: arguments.info.data.clone(),
            },
            arguments: given.collect(),
        });
    }
}

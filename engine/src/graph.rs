//! A flushed list of launches as a graph of values, and what its plan is known by.

use anymesh_kernel::{
    Buffer, Kernel, Mix, Mixed,
    backend::{Buffers, Form, MapCall},
};
use smallvec::SmallVec;
use std::hash::Hasher;

/// A launch that was written down.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) kernel: Kernel,
    /// A handle on each result, so that it can be filled.
    pub(crate) outputs: Buffers,
}

/// A value: the result of a launch of the list, or a buffer from before it, by number of first
/// appearance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    Result { node: u32, output: u8 },
    Outside(u32),
}

/// What is known of a value.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    pub(crate) bytes: u64,
    /// Whether anybody but the list has a handle on it.
    pub(crate) held: bool,
}

/// The list as a graph.
#[derive(Debug)]
pub(crate) struct Graph<'n> {
    pub(crate) nodes: &'n [Node],
    /// The operands of each launch.
    pub(crate) operands: Vec<SmallVec<[Source; 4]>>,
    /// The results of each launch.
    pub(crate) results: Vec<SmallVec<[Known; 1]>>,
    /// Buffers from before the list.
    pub(crate) outside: Vec<Known>,
    pub(crate) buffers: Vec<&'n Buffer>,
}

/// The map call of a launch that can be fused: the launch itself, or what a reduction reduces. What
/// may fault is not.
pub(crate) fn fusable(kernel: &Kernel) -> Option<&MapCall> {
    let call = match kernel {
        Kernel::Map(call) => call,
        Kernel::Reduce(call) => &call.map,
        _ => return None,
    };
    (!call.program.can_fault()).then_some(call)
}

impl<'n> Graph<'n> {
    pub(crate) fn new(nodes: &'n [Node]) -> Self {
        struct Seen<'n> {
            source: Source,
            buffer: &'n Buffer,
            handles: usize,
        }
        let mut seen = Mixed::<u64, Seen<'_>>::default();
        seen.reserve(2 * nodes.len());
        let mut buffers = vec![];
        let mut operands = Vec::with_capacity(nodes.len());
        for (n, node) in nodes.iter().enumerate() {
            let mut of_node = SmallVec::new();
            for view in node.kernel.operands() {
                let known = seen.entry(view.buffer.serial()).or_insert_with(|| {
                    buffers.push(&view.buffer);
                    Seen {
                        source: Source::Outside(buffers.len() as u32 - 1),
                        buffer: &view.buffer,
                        handles: 0,
                    }
                });
                known.handles += 1;
                of_node.push(known.source);
            }
            operands.push(of_node);
            for (k, buffer) in node.outputs.iter().enumerate() {
                let source = Source::Result {
                    node: n as u32,
                    output: k as u8,
                };
                let known = Seen {
                    source,
                    buffer,
                    handles: 1,
                };
                seen.insert(buffer.serial(), known);
            }
        }
        let known = |seen: &Seen<'_>| Known {
            bytes: seen.buffer.bytes(),
            held: seen.buffer.handles() > seen.handles,
        };
        let nothing = Known {
            bytes: 0,
            held: true,
        };
        let mut of_outside = vec![nothing.clone(); buffers.len()];
        let mut results: Vec<SmallVec<[Known; 1]>> = nodes
            .iter()
            .map(|node| SmallVec::from_elem(nothing.clone(), node.outputs.len()))
            .collect();
        for seen in seen.values() {
            match seen.source {
                Source::Result { node, output } => {
                    results[node as usize][usize::from(output)] = known(seen);
                }
                Source::Outside(k) => of_outside[k as usize] = known(seen),
            }
        }
        Self {
            nodes,
            operands,
            results,
            outside: of_outside,
            buffers,
        }
    }

    pub(crate) fn known(&self, source: Source) -> &Known {
        match source {
            Source::Result { node, output } => &self.results[node as usize][usize::from(output)],
            Source::Outside(k) => &self.outside[k as usize],
        }
    }

    /// What the plan of this list is known by: everything that the plan depends on, and all that makes
    /// its launches what they are. Numbers that programs are given, seeds among them, are no part of it.
    pub(crate) fn key(&self) -> Key {
        let mut links = Vec::with_capacity(4 * self.nodes.len() + self.outside.len());
        let known = |known: &Known| known.bytes << 1 | u64::from(known.held);
        for (operands, results) in self.operands.iter().zip(&self.results) {
            links.extend(operands.iter().map(|source| match *source {
                Source::Result { node, output } => u64::from(node) << 9 | u64::from(output) << 1,
                Source::Outside(k) => u64::from(k) << 1 | 1,
            }));
            links.extend(results.iter().map(known));
        }
        links.extend(self.outside.iter().map(known));
        let form = Form::of(self.nodes.iter().map(|node| &node.kernel));
        let mut hash = Mix::default();
        links.iter().for_each(|link| hash.write_u64(*link));
        hash.write_u64(form.number());
        Key {
            hash: hash.finish(),
            links,
            form,
        }
    }
}

/// What a plan is known by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    hash: u64,
    /// Who reads what, and who is held.
    links: Vec<u64>,
    form: Form,
}

impl Key {
    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }

    /// The memory it takes, about.
    pub(crate) fn bytes(&self) -> usize {
        self.links.len() * 8 + self.form.bytes()
    }
}

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
    /// Whether somebody waits for it.
    pub(crate) needed: bool,
}

/// The values that have to be there after a list.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Need<'b> {
    /// Those that the list reads.
    None,
    All,
    Of(&'b [&'b Buffer]),
}

impl Need<'_> {
    fn is(self, buffer: &Buffer) -> bool {
        match self {
            Need::None => false,
            Need::All => true,
            Need::Of(buffers) => buffers.iter().any(|needed| needed.same(buffer)),
        }
    }
}

/// The list as a graph.
#[derive(Debug)]
pub(crate) struct Graph<'n> {
    pub(crate) kernels: Vec<&'n Kernel>,
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
    /// Of launches of which none is gone.
    pub(crate) fn new(nodes: &'n [Option<Node>], need: Need<'_>) -> Self {
        struct Seen<'n> {
            source: Source,
            buffer: &'n Buffer,
            handles: usize,
        }
        let outputs = nodes.iter().flatten().flat_map(|node| &node.outputs);
        let mut places = Places::new(outputs.map(Buffer::serial));
        let mut seen: Vec<Seen<'_>> = Vec::with_capacity(2 * nodes.len());
        let mut buffers = vec![];
        let mut operands = Vec::with_capacity(nodes.len());
        for (n, node) in nodes.iter().flatten().enumerate() {
            let mut of_node = SmallVec::new();
            for view in node.kernel.operands() {
                let place = places.of(view.buffer.serial());
                if *place == Places::NONE {
                    *place = seen.len() as u32;
                    buffers.push(&view.buffer);
                    seen.push(Seen {
                        source: Source::Outside(buffers.len() as u32 - 1),
                        buffer: &view.buffer,
                        handles: 0,
                    });
                }
                let known = &mut seen[*place as usize];
                known.handles += 1;
                of_node.push(known.source);
            }
            operands.push(of_node);
            for (k, buffer) in node.outputs.iter().enumerate() {
                let source = Source::Result {
                    node: n as u32,
                    output: k as u8,
                };
                *places.of(buffer.serial()) = seen.len() as u32;
                seen.push(Seen {
                    source,
                    buffer,
                    handles: 1,
                });
            }
        }
        let known = |seen: &Seen<'_>| Known {
            bytes: seen.buffer.bytes(),
            held: seen.buffer.handles() > seen.handles,
            needed: need.is(seen.buffer),
        };
        let nothing = Known {
            bytes: 0,
            held: true,
            needed: false,
        };
        let mut of_outside = vec![nothing.clone(); buffers.len()];
        let mut results: Vec<SmallVec<[Known; 1]>> = (nodes.iter().flatten())
            .map(|node| SmallVec::from_elem(nothing.clone(), node.outputs.len()))
            .collect();
        for seen in &seen {
            match seen.source {
                Source::Result { node, output } => {
                    results[node as usize][usize::from(output)] = known(seen);
                }
                Source::Outside(k) => of_outside[k as usize] = known(seen),
            }
        }
        Self {
            kernels: nodes.iter().flatten().map(|node| &node.kernel).collect(),
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

    /// Has a value be held, by launches that stay for the next list.
    pub(crate) fn hold(&mut self, source: Source) {
        match source {
            Source::Result { node, output } => {
                self.results[node as usize][usize::from(output)].held = true;
            }
            Source::Outside(k) => self.outside[k as usize].held = true,
        }
    }

    /// What the plan of this list is known by: everything that the plan depends on, and all that makes
    /// its launches what they are (`form`). Numbers that programs are given, seeds among them, are no part
    /// of it. The first launches stayed of an earlier list, and are of a form of their own.
    pub(crate) fn key(&self, stayed: (usize, Option<Form>), form: Form) -> Key {
        let mut links = Vec::with_capacity(4 * self.kernels.len() + self.outside.len());
        let known =
            |known: &Known| known.bytes << 2 | u64::from(known.needed) << 1 | u64::from(known.held);
        links.push(stayed.0 as u64);
        for (operands, results) in self.operands.iter().zip(&self.results) {
            links.extend(operands.iter().map(|source| match *source {
                Source::Result { node, output } => u64::from(node) << 9 | u64::from(output) << 1,
                Source::Outside(k) => u64::from(k) << 1 | 1,
            }));
            links.extend(results.iter().map(known));
        }
        links.extend(self.outside.iter().map(known));
        let mut hash = Mix::default();
        links.iter().for_each(|link| hash.write_u64(*link));
        let stayed = stayed.1;
        hash.write_u64(stayed.as_ref().map_or(0, Form::number));
        hash.write_u64(form.number());
        Key {
            hash: hash.finish(),
            links,
            stayed,
            form,
        }
    }
}

/// A number for each buffer of a list, by its serial: for those of its results, which were made one
/// after the other, in a row, for others in a table.
struct Places {
    first: u64,
    row: Vec<u32>,
    others: Mixed<u64, u32>,
}

impl Places {
    /// Of a buffer that has no number yet.
    const NONE: u32 = u32::MAX;

    fn new(results: impl Iterator<Item = u64> + Clone) -> Self {
        let (count, first) = (results.clone().count(), results.clone().min().unwrap_or(0));
        let span = results.max().map_or(0, |last| last - first + 1);
        // Many more where others made buffers meanwhile.
        let row = if span <= 8 * count as u64 {
            span as usize
        } else {
            0
        };
        Self {
            first,
            row: vec![Self::NONE; row],
            others: Mixed::default(),
        }
    }

    fn of(&mut self, serial: u64) -> &mut u32 {
        let at = serial.wrapping_sub(self.first);
        match self.row.get_mut(at as usize) {
            Some(place) if at <= usize::MAX as u64 => place,
            _ => self.others.entry(serial).or_insert(Self::NONE),
        }
    }
}

/// What a plan is known by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    hash: u64,
    /// Who reads what, and who is held.
    links: Vec<u64>,
    /// Of launches that stayed of an earlier list.
    stayed: Option<Form>,
    form: Form,
}

impl Key {
    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }

    /// What its launches are, whoever holds what, and whatever stayed before them.
    pub(crate) fn form(&self) -> u64 {
        self.form.number()
    }

    /// The memory it takes, about.
    pub(crate) fn bytes(&self) -> usize {
        self.links.len() * 8 + self.form.bytes() + self.stayed.as_ref().map_or(0, Form::bytes)
    }
}

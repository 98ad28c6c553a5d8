//! A flushed list of launches as a graph of values, and what its plan is known by.

use anymesh_kernel::{
    Buffer, Kernel, Layout, MapProgram, Mix, Mixed,
    backend::{Buffers, MapCall},
};
use smallvec::SmallVec;
use std::hash::{Hash, Hasher};

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
        let mut outside = 0;
        let mut operands = Vec::with_capacity(nodes.len());
        for (n, node) in nodes.iter().enumerate() {
            let mut of_node = SmallVec::new();
            for view in node.kernel.operands() {
                let known = seen.entry(view.buffer.serial()).or_insert_with(|| {
                    outside += 1;
                    Seen {
                        source: Source::Outside(outside - 1),
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
        let mut of_outside = vec![nothing.clone(); outside as usize];
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
        }
    }

    pub(crate) fn known(&self, source: Source) -> &Known {
        match source {
            Source::Result { node, output } => &self.results[node as usize][usize::from(output)],
            Source::Outside(k) => &self.outside[k as usize],
        }
    }

    /// What the plan of this list is known by: everything that the plan depends on. Numbers that
    /// programs are given, seeds among them, are no part of it.
    pub(crate) fn key(&self) -> Key {
        let mut key = Key {
            tokens: Vec::with_capacity(self.nodes.len() * 24),
            programs: Vec::with_capacity(self.nodes.len()),
            hash: 0,
        };
        for (n, node) in self.nodes.iter().enumerate() {
            key.node(node, &self.operands[n], &self.results[n]);
        }
        for known in &self.outside {
            key.push(known.bytes << 1 | u64::from(known.held));
        }
        key.close();
        key
    }
}

/// Everything that a plan depends on, as numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    hash: u64,
    tokens: Vec<u64>,
    programs: Vec<MapProgram>,
}

impl Key {
    fn push(&mut self, token: u64) {
        self.tokens.push(token);
    }

    fn node(&mut self, node: &Node, operands: &[Source], results: &[Known]) {
        let fusable = fusable(&node.kernel);
        let kind = match (&node.kernel, fusable) {
            (_, None) => u64::from(!node.kernel.effects().is_pure()),
            (Kernel::Map(_), _) => 2,
            _ => 3,
        };
        self.push(kind << 32 | (operands.len() as u64) << 8 | results.len() as u64);
        for source in operands {
            self.push(match *source {
                Source::Result { node, output } => u64::from(node) << 9 | u64::from(output) << 1,
                Source::Outside(k) => u64::from(k) << 1 | 1,
            });
        }
        for known in results {
            self.push(known.bytes << 1 | u64::from(known.held));
        }
        let Some(call) = fusable else { return };
        self.push(call.op.as_ptr() as u64);
        self.push(call.op.len() as u64);
        self.dims(call.shape.dims());
        for input in &call.inputs {
            self.layout(&input.view.layout);
            self.push(u64::from(input.window.is_some()));
            let starts = input.window.iter().flatten();
            starts.for_each(|start| self.push(*start as u64));
        }
        for form in &call.indices {
            self.push(form.offset as u64);
            form.strides.iter().for_each(|s| self.push(*s as u64));
        }
        if let Kernel::Reduce(call) = &node.kernel {
            self.dims(&call.axes);
        }
        self.programs.push(call.program.clone());
    }

    fn layout(&mut self, layout: &Layout) {
        self.dims(layout.shape.dims());
        layout.strides.iter().for_each(|s| self.push(*s as u64));
        self.push(layout.offset as u64);
    }

    fn dims(&mut self, dims: &[usize]) {
        self.push(dims.len() as u64);
        dims.iter().for_each(|d| self.push(*d as u64));
    }

    fn close(&mut self) {
        let mut hash = Mix::default();
        self.tokens.iter().for_each(|token| hash.write_u64(*token));
        self.programs.iter().for_each(|p| p.hash(&mut hash));
        self.hash = hash.finish();
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }

    /// The memory it takes, about.
    pub(crate) fn bytes(&self) -> usize {
        self.tokens.len() * 8 + self.programs.len() * 16
    }
}

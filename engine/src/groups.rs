//! Which launches become one.
//!
//! Every launch begins as a group of its own. In the order of the program, each elementwise launch
//! and each reduction takes in the groups that made its operands, where that is allowed and pays:
//! - a group whose results nobody else needs moves in;
//! - one that is cheap, and whose result only others like it read, is computed again in each of them;
//! - else, where both go through the same positions, the two become one with several outputs.

use crate::{
    Options,
    casts::Casts,
    coordinates::{Coordinates, is_whole},
    graph::{Graph, Source, fusable},
    recipes::Recipes,
};
use anymesh_kernel::{
    DType, Dims, Kernel, Layout, Shape,
    backend::{Affine, MapInput},
    layout::collapse,
    map::{Binary, Inst, Unary},
};
use smallvec::SmallVec;
use std::collections::HashMap;

/// Instructions of a joined program at most.
const MAX_INSTRUCTIONS: usize = 192;
/// Programs in a joined one at most.
const MAX_SEGMENTS: usize = 48;
/// Launches that compute something cheap again at most.
const MAX_COPIES: usize = 4;
/// Instructions of what is cheap at most, without loads.
const CHEAP: usize = 6;

/// Launches that become one.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    /// The program of each, producers first. Empty for a launch that stays as it is.
    pub(crate) segments: Vec<Segment>,
    /// The last launch, at whose place it runs.
    pub(crate) node: usize,
    /// The positions that it goes through.
    pub(crate) shape: Shape,
    /// Whether the last launch is a reduction, whose result is all that is stored.
    pub(crate) reduces: bool,
    /// Of a group that reduces rows, and may store more than the result of one reduction: how many
    /// dimensions count the rows; the others are a row.
    pub(crate) rows: Option<usize>,
    /// Another group does its work.
    pub(crate) gone: bool,
}

/// The program of a launch within a group.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) node: usize,
    /// One for each input of the program.
    pub(crate) feeds: SmallVec<[Feed; 2]>,
    /// One for each index of the program.
    pub(crate) indices: SmallVec<[Affine; 1]>,
    /// Whether its results are numbers of rows, in a group that goes through these.
    pub(crate) of_rows: bool,
}

/// Where an input of a program comes from.
#[derive(Clone, Debug)]
pub(crate) enum Feed {
    Memory(Reading),
    /// An output of an earlier segment.
    Register {
        segment: usize,
        output: usize,
    },
}

/// An input in memory.
#[derive(Clone, Debug)]
pub(crate) struct Reading {
    pub(crate) source: Source,
    /// A launch that has a handle on it, and as which operand.
    pub(crate) at: (u32, u8),
    pub(crate) dtype: DType,
    pub(crate) layout: Layout,
    pub(crate) window: Option<Dims<isize>>,
    /// The size of the memory.
    pub(crate) bytes: u64,
}

impl Reading {
    /// Whether two inputs are one.
    pub(crate) fn same(&self, other: &Self) -> bool {
        self.source == other.source
            && self.dtype == other.dtype
            && self.layout == other.layout
            && self.window == other.window
    }
}

impl Segment {
    /// What it reads from memory.
    pub(crate) fn readings(&self) -> impl Iterator<Item = &Reading> {
        self.feeds.iter().filter_map(|feed| match feed {
            Feed::Memory(reading) => Some(reading),
            Feed::Register { .. } => None,
        })
    }

    /// Whether two segments compute the same.
    fn same(&self, other: &Self) -> bool {
        let fed = |(a, b): (&Feed, &Feed)| match (a, b) {
            (Feed::Memory(a), Feed::Memory(b)) => a.same(b),
            (
                Feed::Register { segment, output },
                Feed::Register {
                    segment: s,
                    output: o,
                },
            ) => (segment, output) == (s, o),
            _ => false,
        };
        (self.node, self.of_rows) == (other.node, other.of_rows)
            && self.indices == other.indices
            && self.feeds.iter().zip(&other.feeds).all(fed)
    }
}

impl Group {
    pub(crate) fn readings(&self) -> impl Iterator<Item = &Reading> {
        self.segments.iter().flat_map(Segment::readings)
    }
}

/// The groups of a graph.
pub(crate) struct Groups<'g> {
    pub(crate) graph: &'g Graph<'g>,
    pub(crate) options: &'g Options,
    /// By launch; those that moved in with another are gone.
    pub(crate) list: Vec<Group>,
    /// The group that stores the results of each launch.
    pub(crate) home: Vec<usize>,
    /// The groups that read each result, and each buffer from before.
    readers: Vec<SmallVec<[SmallVec<[u32; 2]>; 1]>>,
    outside: Vec<SmallVec<[u32; 2]>>,
    /// The launch with effects before each one that has some.
    pub(crate) before: Vec<Option<usize>>,
    /// The row kernels that make conversions around them.
    pub(crate) casts: HashMap<usize, Casts>,
    /// What is left to the next list.
    pub(crate) recipes: Recipes,
}

/// How a group takes in another.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum How {
    Move,
    Copy,
    Join,
}

impl<'g> Groups<'g> {
    pub(crate) fn new(graph: &'g Graph<'g>, recipes: Recipes, options: &'g Options) -> Self {
        let count = graph.kernels.len();
        let mut groups = Self {
            graph,
            options,
            list: Vec::with_capacity(count),
            home: (0..count).collect(),
            readers: (graph.results.iter())
                .map(|results| SmallVec::from_elem(SmallVec::new(), results.len()))
                .collect(),
            outside: vec![SmallVec::new(); graph.outside.len()],
            before: Vec::with_capacity(count),
            casts: HashMap::new(),
            recipes,
        };
        let mut last = None;
        for n in 0..count {
            let effects = !graph.kernels[n].effects().is_pure();
            groups.before.push(if effects { last } else { None });
            if effects {
                last = Some(n);
            }
            for k in 0..graph.operands[n].len() {
                groups.add_reader(graph.operands[n][k], n);
            }
            let group = groups.alone(n);
            groups.list.push(group);
        }
        for n in 0..count {
            if !groups.list[n].segments.is_empty() {
                groups.grow(n);
            }
        }
        groups
    }

    /// A launch as a group of its own.
    fn alone(&self, n: usize) -> Group {
        let kernel = self.graph.kernels[n];
        let segment = fusable(kernel).map(|call| {
            let reading = |(k, input): (usize, &MapInput)| {
                Feed::Memory(Reading {
                    source: self.graph.operands[n][k],
                    at: (n as u32, k as u8),
                    dtype: input.view.dtype,
                    layout: input.view.layout.clone(),
                    window: input.window.clone(),
                    bytes: input.view.buffer.bytes(),
                })
            };
            Segment {
                node: n,
                feeds: call.inputs.iter().enumerate().map(reading).collect(),
                indices: call.indices.clone(),
                of_rows: self.rows_of(kernel).is_some(),
            }
        });
        Group {
            segments: segment.into_iter().collect(),
            node: n,
            shape: fusable(kernel).map_or_else(Shape::scalar, |call| call.shape.clone()),
            reduces: matches!(kernel, Kernel::Reduce(_)),
            rows: self.rows_of(kernel),
            gone: false,
        }
    }

    /// How many dimensions count the rows, of a reduction that is one of rows.
    fn rows_of(&self, kernel: &Kernel) -> Option<usize> {
        match kernel {
            Kernel::Reduce(call) if self.options.rows && call.is_of_rows() => {
                Some(call.map.shape.rank() - call.axes.len())
            }
            _ => None,
        }
    }

    /// Whether somebody needs a value after the list.
    pub(crate) fn held(&self, source: Source) -> bool {
        let unstored = |node: u32| self.recipes.unstored.contains(&node);
        let left = matches!(source, Source::Result { node, .. } if unstored(node));
        self.graph.known(source).held && !left || self.recipes.reads.contains(&source)
    }

    fn readers_mut(&mut self, source: Source) -> &mut SmallVec<[u32; 2]> {
        match source {
            Source::Result { node, output } => {
                &mut self.readers[node as usize][usize::from(output)]
            }
            Source::Outside(k) => &mut self.outside[k as usize],
        }
    }

    pub(crate) fn readers(&self, source: Source) -> &[u32] {
        match source {
            Source::Result { node, output } => &self.readers[node as usize][usize::from(output)],
            Source::Outside(k) => &self.outside[k as usize],
        }
    }

    pub(crate) fn add_reader(&mut self, source: Source, group: usize) {
        let readers = self.readers_mut(source);
        if !readers.contains(&(group as u32)) {
            readers.push(group as u32);
        }
    }

    pub(crate) fn remove_reader(&mut self, source: Source, group: usize) {
        self.readers_mut(source).retain(|g| *g != group as u32);
    }

    /// The results that a group stores if anybody needs them.
    fn results(&self, group: usize) -> impl Iterator<Item = Source> + '_ {
        let own = move |segment: &&Segment| self.home[segment.node] == group;
        let nodes = self.list[group].segments.iter().filter(own);
        nodes.flat_map(|segment| {
            (0..self.graph.results[segment.node].len()).map(|output| Source::Result {
                node: segment.node as u32,
                output: output as u8,
            })
        })
    }

    /// The groups that must run before a group.
    pub(crate) fn needs(&self, group: usize) -> SmallVec<[usize; 8]> {
        let made = |source: Source| match source {
            Source::Result { node, .. } => Some(self.home[node as usize]),
            Source::Outside(_) => None,
        };
        let list = &self.list[group];
        let mut needs: SmallVec<[usize; 8]> = if list.segments.is_empty() {
            let operands = self.operands(list.node).into_iter();
            operands.filter_map(made).collect()
        } else {
            list.readings().filter_map(|r| made(r.source)).collect()
        };
        needs.extend(self.before[list.node].map(|n| self.home[n]));
        needs
    }

    /// Takes in what made the operands of a group, and what made theirs.
    fn grow(&mut self, group: usize) {
        let mut tried: SmallVec<[Source; 8]> = SmallVec::new();
        loop {
            let next = self.list[group].readings().find(|reading| {
                let Source::Result { node, .. } = reading.source else {
                    return false;
                };
                let maker = &self.list[self.home[node as usize]];
                let taken = !maker.reduces || maker.rows.is_some();
                !maker.segments.is_empty() && taken && !tried.contains(&reading.source)
            });
            let Some(reading) = next.cloned() else { return };
            tried.push(reading.source);
            (self.take_in(group, &reading)).or_else(|| self.take_in_rows(group, &reading));
        }
    }

    /// Takes in what made an operand, if that is allowed and pays.
    fn take_in(&mut self, group: usize, reading: &Reading) -> Option<()> {
        let Source::Result { node, .. } = reading.source else {
            return None;
        };
        let maker = self.home[node as usize];
        if maker == group || self.list[maker].rows.is_some() {
            return None;
        }
        let made = |source: Source| matches!(source, Source::Result { node, .. } if self.home[node as usize] == maker);
        // All that it reads of the maker must be seen in one way: memory cannot be read by the
        // kernel that writes it.
        let other = |r: &Reading| r.window.is_some() || r.layout != reading.layout;
        if (self.list[group].readings()).any(|r| made(r.source) && other(r)) {
            return None;
        }
        let whole = is_whole(&reading.layout, self.list[maker].shape.numel());
        let cheap = self.is_cheap(maker);
        let how = self.how(group, maker, reading.source, whole, cheap)?;
        if how == How::Join && self.reaches(maker, group) {
            return None;
        }
        let (segments, shape) = self.joined(group, maker, &reading.layout, whole)?;
        let after = Group {
            segments,
            shape,
            ..self.list[group].clone()
        };
        if !self.fits(&after, group, maker, how) || !self.saves_memory(group, maker, how) {
            return None;
        }
        self.commit(after, group, maker, how);
        Some(())
    }

    fn how(
        &self,
        group: usize,
        maker: usize,
        source: Source,
        whole: bool,
        cheap: bool,
    ) -> Option<How> {
        let others = |source: Source| {
            let read = |g: &u32| *g as usize != group && *g as usize != maker;
            self.held(source) || self.readers(source).iter().any(read)
        };
        let mut needed = self.results(maker).filter(|source| others(*source));
        let first = needed.next();
        if first.is_none() {
            return (whole || cheap).then_some(How::Move);
        }
        let readers = self.readers(source);
        let copies = cheap
            && first == Some(source)
            && needed.next().is_none()
            && self.results(maker).count() == 1
            && !self.held(source)
            && readers.len() <= MAX_COPIES
            && (readers.iter()).all(|g| !self.list[*g as usize].segments.is_empty());
        if copies {
            return Some(How::Copy);
        }
        let own = &self.list[group];
        (whole && !own.reduces && own.rows.is_none()).then_some(How::Join)
    }

    /// Whether computing it again costs less than storing it.
    fn is_cheap(&self, group: usize) -> bool {
        let mut count = 0;
        for segment in &self.list[group].segments {
            let Some(call) = fusable(self.graph.kernels[segment.node]) else {
                return false;
            };
            for inst in &call.program.insts {
                count += match inst {
                    Inst::Load(_) | Inst::Const(..) | Inst::Param(_) => 0,
                    Inst::Inside(_)
                    | Inst::Index(_)
                    | Inst::Select(..)
                    | Inst::Cast(..)
                    | Inst::Fence(..)
                    | Inst::Unary(Unary::Neg | Unary::Abs | Unary::Not, _) => 1,
                    Inst::Binary(op, ..)
                        if op.is_comparison()
                            || matches!(
                                op,
                                Binary::Add
                                    | Binary::Sub
                                    | Binary::Mul
                                    | Binary::Max
                                    | Binary::Min
                                    | Binary::And
                                    | Binary::Or
                                    | Binary::Xor
                            ) =>
                    {
                        1
                    }
                    _ => return false,
                };
            }
        }
        count <= CHEAP
    }

    /// Whether a group needs another one by way of a third.
    pub(crate) fn reaches(&self, from: usize, to: usize) -> bool {
        let mut seen = vec![false; self.list.len()];
        let mut stack: Vec<usize> = self.needs(to).into_iter().filter(|g| *g != from).collect();
        while let Some(group) = stack.pop() {
            if group == from {
                return true;
            }
            // What ran before the first of it cannot need it.
            let early = self.list[from].segments.iter().map(|s| s.node).min();
            if std::mem::replace(&mut seen[group], true)
                || early.is_some_and(|early| self.list[group].node < early)
            {
                continue;
            }
            stack.extend(self.needs(group));
        }
        false
    }

    /// The segments of both, over one space of positions.
    fn joined(
        &self,
        group: usize,
        maker: usize,
        view: &Layout,
        whole: bool,
    ) -> Option<(Vec<Segment>, Shape)> {
        let (own, made) = (&self.list[group], &self.list[maker]);
        let (mut first, second, shape);
        if let Some(moved) = made.seen_through(view) {
            (first, second, shape) = (moved, own.segments.clone(), own.shape.clone());
        } else if whole && !own.reduces && own.rows.is_none() {
            // The other way round: the same positions in the same order.
            let moved = own.seen_through(&Layout::contiguous(made.shape.clone()))?;
            (first, second, shape) = (made.segments.clone(), moved, made.shape.clone());
        } else {
            return None;
        }
        self.chain(&mut first, second, maker)?;
        Some((first, shape))
    }

    /// Puts segments after others, of group `maker`, over the same positions. What they read of that
    /// group stays in registers, and a segment that is there already is not there twice.
    pub(crate) fn chain(
        &self,
        first: &mut Vec<Segment>,
        second: Vec<Segment>,
        maker: usize,
    ) -> Option<()> {
        let mut places: SmallVec<[usize; 16]> = SmallVec::with_capacity(second.len());
        for mut segment in second {
            for feed in &mut segment.feeds {
                match feed {
                    Feed::Register { segment, .. } => *segment = places[*segment],
                    Feed::Memory(reading) => {
                        let Source::Result { node, output } = reading.source else {
                            continue;
                        };
                        if self.home[node as usize] != maker {
                            continue;
                        }
                        let segment = first.iter().position(|s| s.node == node as usize)?;
                        *feed = Feed::Register {
                            segment,
                            output: usize::from(output),
                        };
                    }
                }
            }
            let known = first.iter().position(|known| known.same(&segment));
            places.push(known.unwrap_or(first.len()));
            if known.is_none() {
                first.push(segment);
            }
        }
        Some(())
    }

    /// Whether the limits of a program are kept.
    pub(crate) fn fits(&self, after: &Group, group: usize, maker: usize, how: How) -> bool {
        if after.rows.is_some() && !self.fits_rows(after, group, maker, how) {
            return false;
        }
        let mut inputs: SmallVec<[&Reading; 8]> = SmallVec::new();
        for reading in after.readings() {
            if inputs.iter().any(|known| known.same(reading)) {
                continue;
            }
            // A kernel binds a buffer once, and then reads it word by word.
            let twice = inputs.iter().any(|known| known.source == reading.source);
            if twice && self.options.compiles {
                return false;
            }
            inputs.push(reading);
        }
        let instructions: usize = (after.segments.iter())
            .filter_map(|segment| fusable(self.graph.kernels[segment.node]))
            .map(|call| call.program.insts.len())
            .sum();
        let outputs = if after.reduces {
            1
        } else if after.rows.is_some() {
            // Counted above.
            0
        } else {
            let stored = after.segments.iter().flat_map(|segment| {
                let own = self.home[segment.node];
                let here = own == group || own == maker && how != How::Copy;
                let count = if here {
                    self.graph.results[segment.node].len()
                } else {
                    0
                };
                (0..count).map(|output| (segment.node, output))
            });
            stored
                .filter(|(node, output)| self.is_needed(*node, *output, &[group, maker]))
                .count()
        };
        let (most_inputs, most_outputs) = self.options.most();
        inputs.len() <= most_inputs
            && outputs <= most_outputs
            && inputs.len() + outputs <= self.options.buffers
            && instructions <= MAX_INSTRUCTIONS
            && after.segments.len() <= MAX_SEGMENTS
            && (!after.reduces || self.first_input(after).is_some())
    }

    /// Whether a result is to be stored, apart from those who read it within these groups.
    pub(crate) fn is_needed(&self, node: usize, output: usize, within: &[usize]) -> bool {
        let source = Source::Result {
            node: node as u32,
            output: output as u8,
        };
        // A compiler may treat a value that is stored differently from one that is not, so what was
        // stored with another result stays so.
        let with_others = self.options.compiles && self.graph.results[node].len() > 1;
        let read = |g: &u32| !within.contains(&(*g as usize));
        with_others || self.held(source) || self.readers(source).iter().any(read)
    }

    /// The input that a fused reduction names first: one that steps through memory as the first
    /// input of the reduction did, because devices choose the order of a reduction by that.
    pub(crate) fn first_input<'r>(&self, group: &'r Group) -> Option<&'r Reading> {
        let Kernel::Reduce(call) = self.graph.kernels[group.node] else {
            return None;
        };
        let before = &call.map.inputs.first()?.view.layout;
        let steps = |layout: &Layout| -> Dims<bool> {
            let dims = layout.shape.dims().iter().zip(&layout.strides);
            dims.map(|(n, s)| *n > 1 && s.abs() == 1).collect()
        };
        let before = steps(before);
        group
            .readings()
            .find(|r| r.window.is_none() && steps(&r.layout) == before)
    }

    /// Whether operands that have to stay for longer take no more memory than results that are
    /// stored no more, but for some slack.
    pub(crate) fn saves_memory(&self, group: usize, maker: usize, how: How) -> bool {
        let mut seen: SmallVec<[Source; 8]> = SmallVec::new();
        let mut longer = 0;
        for reading in self.list[maker].readings() {
            let known = self.graph.known(reading.source);
            if self.held(reading.source) || seen.contains(&reading.source) {
                continue;
            }
            seen.push(reading.source);
            let until = (self.readers(reading.source).iter())
                .filter(|g| **g as usize != maker)
                .map(|g| self.list[*g as usize].node)
                .max();
            if until.is_none_or(|until| until < group) {
                longer += known.bytes;
            }
        }
        let unstored = |source: &Source| match (how, source) {
            (How::Copy, _) => true,
            (_, Source::Result { node, output }) => {
                !self.is_needed(*node as usize, usize::from(*output), &[group, maker])
            }
            _ => false,
        };
        let saved: u64 = (self.results(maker).filter(unstored))
            .map(|source| self.graph.known(source).bytes)
            .sum();
        longer <= saved + self.options.slack
    }

    pub(crate) fn commit(&mut self, after: Group, group: usize, maker: usize, how: How) {
        let sources: SmallVec<[Source; 8]> =
            self.list[maker].readings().map(|r| r.source).collect();
        let results: SmallVec<[Source; 4]> = self.results(maker).collect();
        self.list[group] = after;
        for source in &sources {
            self.add_reader(*source, group);
        }
        for source in &results {
            self.remove_reader(*source, group);
        }
        let unread = |source: &Source| self.readers(*source).is_empty() && !self.held(*source);
        if how == How::Copy && !results.iter().all(unread) {
            return;
        }
        for source in sources {
            self.remove_reader(source, maker);
        }
        let gone = &mut self.list[maker];
        gone.gone = true;
        for segment in std::mem::take(&mut gone.segments) {
            if self.home[segment.node] == maker {
                self.home[segment.node] = group;
            }
        }
    }
}

impl Group {
    /// Its segments over the positions of a view of its (dense) results; `None` where that is no
    /// affine form.
    pub(crate) fn seen_through(&self, view: &Layout) -> Option<Vec<Segment>> {
        if view.shape == self.shape && is_whole(view, self.shape.numel()) {
            return Some(self.segments.clone());
        }
        if self.readings().any(|reading| reading.window.is_some()) {
            return None;
        }
        let forms = |segment: &Segment| -> Vec<Dims<isize>> {
            let readings = segment.feeds.iter().filter_map(|feed| match feed {
                Feed::Memory(reading) => Some(reading.layout.strides.clone()),
                Feed::Register { .. } => None,
            });
            let indices = segment.indices.iter();
            readings
                .chain(indices.map(|form| form.strides.iter().map(|s| *s as isize).collect()))
                .collect()
        };
        let mut strides: Vec<Dims<isize>> = self.segments.iter().flat_map(forms).collect();
        let shape = collapse(&self.shape, &mut strides);
        let map = Coordinates::new(&shape, view)?;
        let mut strides = strides.into_iter();
        let mut segments = self.segments.clone();
        for segment in &mut segments {
            for feed in &mut segment.feeds {
                let Feed::Memory(reading) = feed else {
                    continue;
                };
                let form = map.of(reading.layout.offset as i64, &strides.next()?);
                reading.layout = Layout {
                    shape: view.shape.clone(),
                    strides: form.strides.iter().map(|s| *s as isize).collect(),
                    offset: usize::try_from(form.offset).ok()?,
                };
            }
            for index in &mut segment.indices {
                *index = map.of(index.offset, &strides.next()?);
            }
        }
        Some(segments)
    }
}

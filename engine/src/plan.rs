//! The launches that a list becomes, in order, as data.
//!
//! A plan says nothing about memory or addresses: it is for every list with the same key. What
//! replays launches faster than one by one (a graph of the driver's) starts from here.

use crate::{
    Options,
    graph::{Graph, Source, fusable},
    groups::{Group, Groups, Reading},
    over::{self, Pairs},
    program::{Joined, join},
    recipes::Recipes,
    rows,
};
use anymesh_kernel::{
    Kernel, MapProgram, Mixed, Scalar, Shape,
    backend::{RowProgram, Wanted},
};
use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashSet},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// How often other values are left to be made again, where some have to be stored after all.
const TRIES: usize = 3;

/// Numbers of plans, of all devices.
static PLANS: AtomicU64 = AtomicU64::new(0);

/// What a list of launches becomes.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(crate) steps: Vec<Step>,
    /// Launches that are let go after each step, and before the first one.
    pub(crate) after: Vec<Vec<u32>>,
    pub(crate) dead: Vec<u32>,
    /// Launches that stay for the next list, and what they read.
    pub(crate) stay: Vec<u32>,
    pub(crate) kept: Vec<Source>,
    /// For each step the results that take the memory of an operand.
    pub(crate) over: Vec<Pairs>,
    /// The results of steps that somebody holds.
    pub(crate) wanted: Vec<Wanted>,
    /// The most bytes that were in use beside what was before, when its steps were run one by one.
    pub(crate) most: AtomicU64,
    /// What lists of this plan are known by, where the plan is for more than one.
    pub(crate) number: Option<u64>,
    /// Whether everything was fused that may be.
    pub(crate) complete: bool,
}

/// One launch of the device below.
#[derive(Debug)]
pub(crate) enum Step {
    /// A launch as it was written down.
    Single(u32),
    /// Several as one.
    Fused(Box<Fused>),
}

impl Step {
    /// The launch and output that its result `k` is. Of a launch as it was written down it may have
    /// no such output.
    pub(crate) fn result(&self, k: u8) -> Option<(u32, u8)> {
        match self {
            Step::Single(node) => Some((*node, k)),
            Step::Fused(fused) => fused.outputs.get(usize::from(k)).copied(),
        }
    }
}

/// Several launches as one.
#[derive(Debug)]
pub(crate) struct Fused {
    /// What errors and profiles call it.
    pub(crate) op: &'static str,
    pub(crate) body: Body,
    pub(crate) shape: Shape,
    /// The results that it stores: launch and output.
    pub(crate) outputs: Vec<(u32, u8)>,
    /// The launches that it stands for, in order.
    pub(crate) nodes: Vec<u32>,
}

/// What several launches are as one.
#[derive(Debug)]
pub(crate) enum Body {
    /// Elementwise launches, with a reduction at their end.
    Map { joined: Joined, reduce: Option<u32> },
    /// A row kernel that makes conversions around it, or reductions of rows and what is around them.
    Rows {
        program: Arc<RowProgram>,
        inputs: Vec<Reading>,
        numbers: Vec<Number>,
        /// Whether the first result may take the memory of the first input.
        over: bool,
    },
}

/// A number that a row program is given.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Number {
    /// Of a launch, and which of its numbers.
    Of(u32, usize),
    Known(Scalar),
}

impl Fused {
    /// Its operands.
    pub(crate) fn inputs(&self) -> &[Reading] {
        match &self.body {
            Body::Map { joined, .. } => &joined.inputs,
            Body::Rows { inputs, .. } => inputs,
        }
    }
}

impl Plan {
    /// The launches as they were written down.
    pub(crate) fn unfused(graph: &Graph<'_>) -> Self {
        let steps = (0..graph.kernels.len()).map(|n| Step::Single(n as u32));
        let mut plan = Self {
            steps: steps.collect(),
            ..Self::default()
        };
        release(&mut plan, graph, (0, 0));
        plan.over = over::pairs(&plan, graph);
        plan
    }

    /// The memory it takes, about.
    pub(crate) fn bytes(&self) -> usize {
        let step = |step: &Step| match step {
            Step::Single(_) => 8,
            Step::Fused(fused) => {
                let insts: usize = match &fused.body {
                    Body::Map { joined, .. } => joined.program.insts.len(),
                    Body::Rows { program, .. } => program.programs().map(|p| p.insts.len()).sum(),
                };
                512 + insts * 48 + fused.inputs().len() * 256
            }
        };
        self.steps.iter().map(step).sum::<usize>()
            + self.steps.len() * 64
            + self.wanted.len() * 8
            + self.kept.len() * 16
    }
}

/// Makes plans, and knows which programs it made before.
#[derive(Debug, Default)]
pub(crate) struct Planner {
    programs: HashSet<MapProgram>,
}

impl Planner {
    /// The plan of a list, of whose launches the first `old` stayed of an earlier one.
    pub(crate) fn plan(
        &mut self,
        graph: &mut Graph<'_>,
        old: usize,
        options: &Options,
        supports: &dyn Fn(&Kernel) -> bool,
    ) -> Plan {
        let (mut must, mut tries) = (HashSet::new(), 0);
        let mut plan = loop {
            tries += 1;
            let recipes = match tries > TRIES {
                true => Recipes::default(),
                false => Recipes::new(graph, old, &must, options),
            };
            match self.steps(graph, recipes, options, supports) {
                Ok(plan) => break plan,
                Err(stored) => must.extend(stored),
            }
        };
        plan.kept.iter().for_each(|source| graph.hold(*source));
        release(&mut plan, graph, options.lag);
        plan.over = over::pairs(&plan, graph);
        plan.wanted = wanted(&plan, graph);
        plan.number = Some(PLANS.fetch_add(1, Ordering::Relaxed));
        plan
    }

    /// The launches of a list with these recipes; or those of which the results have to be stored.
    fn steps(
        &mut self,
        graph: &Graph<'_>,
        recipes: Recipes,
        options: &Options,
        supports: &dyn Fn(&Kernel) -> bool,
    ) -> std::result::Result<Plan, HashSet<u32>> {
        let mut groups = Groups::new(graph, recipes, options);
        if options.rows {
            groups.take_casts(supports);
        }
        let alive = alive(&groups);
        // What is read from memory after all has to be there.
        let unstored = &groups.recipes.unstored;
        let read = |node: &&u32| {
            let home = groups.home[**node as usize];
            alive[home] && groups.is_needed(**node as usize, 0, &[home])
        };
        let stored: HashSet<u32> = unstored.iter().filter(read).copied().collect();
        if !stored.is_empty() {
            return Err(stored);
        }
        let mut plan = Plan {
            complete: true,
            ..Plan::default()
        };
        let mut launched = vec![false; graph.kernels.len()];
        let mut new: Vec<MapProgram> = vec![];
        for g in order(&groups, &alive) {
            let group = &groups.list[g];
            if let Some(fused) = with_casts(&groups, g) {
                fused
                    .nodes
                    .iter()
                    .for_each(|n| launched[*n as usize] = true);
                plan.steps.push(Step::Fused(Box::new(fused)));
                continue;
            }
            if group.segments.len() <= 1 {
                push_single(&mut plan, &mut launched, group.node);
                continue;
            }
            let made = match group.rows.is_some() && !group.reduces {
                true => rows::fused(&groups, g, &alive, options.compiles),
                false => fused(&groups, g, &alive, options),
            };
            let fused = made.filter(|(_, program)| {
                let known = self.programs.contains(program) || new.contains(program);
                !options.compiles || known || new.len() < options.new_programs
            });
            match fused {
                Some((fused, program)) => {
                    if options.compiles && !self.programs.contains(&program) {
                        new.push(program);
                    }
                    plan.steps.push(Step::Fused(Box::new(fused)));
                }
                None => {
                    // One by one, with what others may have computed again.
                    plan.complete = false;
                    for node in nodes(group) {
                        push_single(&mut plan, &mut launched, node as usize);
                    }
                }
            }
        }
        if !plan.complete && !groups.recipes.unstored.is_empty() {
            // What is not fused is stored.
            return Err(groups.recipes.unstored);
        }
        self.programs.extend(new);
        plan.stay = groups.recipes.launches;
        plan.kept = groups.recipes.reads.into_iter().collect();
        Ok(plan)
    }
}

fn push_single(plan: &mut Plan, launched: &mut [bool], node: usize) {
    if !std::mem::replace(&mut launched[node], true) {
        plan.steps.push(Step::Single(node as u32));
    }
}

/// The launches of a group in the order of the program.
pub(crate) fn nodes(group: &Group) -> Vec<u32> {
    let mut nodes: Vec<u32> = group.segments.iter().map(|s| s.node as u32).collect();
    nodes.sort_unstable();
    nodes.dedup();
    nodes
}

/// The groups that are needed: those with effects, those with a result that is held or that no launch
/// reads, and all that these need. What is left are those that others compute again.
fn alive(groups: &Groups<'_>) -> Vec<bool> {
    let graph = groups.graph;
    let mut alive = vec![false; groups.list.len()];
    let mut read = vec![false; graph.kernels.len()];
    for source in graph.operands.iter().flatten() {
        if let Source::Result { node, .. } = source {
            read[*node as usize] = true;
        }
    }
    let needed = |n: &usize| {
        let left = groups.recipes.unstored.contains(&(*n as u32));
        let source = |output: usize| Source::Result {
            node: *n as u32,
            output: output as u8,
        };
        let held = (0..graph.results[*n].len()).any(|output| groups.held(source(output)));
        held || !read[*n] && !left || !graph.kernels[*n].effects().is_pure()
    };
    let needed = (0..graph.kernels.len()).filter(needed);
    let mut stack: Vec<usize> = needed.map(|n| groups.home[n]).collect();
    while let Some(g) = stack.pop() {
        if !std::mem::replace(&mut alive[g], true) {
            stack.extend(groups.needs(g));
        }
    }
    alive
}

/// The groups in an order in which each comes after what it needs, as near to the program's as that
/// allows.
fn order(groups: &Groups<'_>, alive: &[bool]) -> Vec<usize> {
    let count = groups.list.len();
    let mut waits = vec![0usize; count];
    let mut wanted: Vec<Vec<usize>> = vec![vec![]; count];
    let mut ready = BinaryHeap::new();
    for g in (0..count).filter(|g| alive[*g]) {
        let mut needs = groups.needs(g);
        needs.sort_unstable();
        needs.dedup();
        waits[g] = needs.len();
        needs.iter().for_each(|n| wanted[*n].push(g));
        if needs.is_empty() {
            ready.push(Reverse((groups.list[g].node, g)));
        }
    }
    let mut order = vec![];
    while let Some(Reverse((_, g))) = ready.pop() {
        order.push(g);
        for next in &wanted[g] {
            waits[*next] -= 1;
            if waits[*next] == 0 {
                ready.push(Reverse((groups.list[*next].node, *next)));
            }
        }
    }
    order
}

/// A row kernel with the conversions that it makes.
fn with_casts(groups: &Groups<'_>, g: usize) -> Option<Fused> {
    let (graph, casts) = (groups.graph, groups.casts.get(&g)?);
    let kernel = graph.kernels[g];
    let call = casts.call(kernel)?;
    let mut inputs: Vec<Reading> = (call.inputs.iter().enumerate())
        .map(|(k, view)| Reading {
            source: graph.operands[g][k],
            at: (g as u32, k as u8),
            dtype: view.dtype,
            layout: view.layout.clone(),
            window: None,
            bytes: view.buffer.bytes(),
        })
        .collect();
    let mut nodes = vec![g as u32];
    for (k, node, reading) in &casts.inputs {
        let layout = inputs[*k].layout.clone();
        inputs[*k] = Reading {
            layout,
            ..reading.clone()
        };
        nodes.push(*node);
    }
    let mut outputs: Vec<(u32, u8)> = (0..graph.results[g].len())
        .map(|output| (g as u32, output as u8))
        .collect();
    for (k, node, _) in &casts.outputs {
        outputs[*k] = (*node, 0);
        nodes.push(*node);
    }
    nodes.sort_unstable();
    Some(Fused {
        op: name(nodes.iter().map(|n| graph.kernels[*n as usize].op())),
        shape: call.shape.clone(),
        body: Body::Rows {
            program: call.program,
            inputs,
            numbers: match kernel {
                Kernel::Row(_) => call.params.iter().copied().map(Number::Known).collect(),
                _ => (0..call.params.len())
                    .map(|k| Number::Of(g as u32, k))
                    .collect(),
            },
            over: call.over,
        },
        outputs,
        nodes,
    })
}

/// What a group stores: segments and outputs.
pub(crate) fn stored(groups: &Groups<'_>, g: usize, alive: &[bool]) -> Vec<(usize, usize)> {
    let (group, graph) = (&groups.list[g], groups.graph);
    if group.reduces {
        return vec![(group.segments.len() - 1, 0)];
    }
    let mut stored = vec![];
    for (s, segment) in group.segments.iter().enumerate() {
        if groups.home[segment.node] != g {
            continue;
        }
        for output in 0..graph.results[segment.node].len() {
            let source = Source::Result {
                node: segment.node as u32,
                output: output as u8,
            };
            let dead: Vec<usize> = (groups.readers(source).iter())
                .map(|r| *r as usize)
                .filter(|r| !alive[*r] || *r == g)
                .collect();
            if groups.is_needed(segment.node, output, &dead) {
                stored.push((s, output));
            }
        }
    }
    stored
}

/// Several launches as one, and their program.
fn fused(
    groups: &Groups<'_>,
    g: usize,
    alive: &[bool],
    options: &Options,
) -> Option<(Fused, MapProgram)> {
    let (group, graph) = (&groups.list[g], groups.graph);
    let stored = stored(groups, g, alive);
    let outputs = (stored.iter())
        .map(|(s, output)| (group.segments[*s].node as u32, *output as u8))
        .collect();
    let first = groups.first_input(group);
    if group.reduces && first.is_none() || stored.is_empty() {
        return None;
    }
    let joined = join(graph, group, &stored, first, options.compiles)?;
    let program = joined.program.clone();
    let nodes = nodes(group);
    let op = |node: &u32| fusable(graph.kernels[*node as usize]).map_or("", |call| call.op);
    let fused = Fused {
        op: name(nodes.iter().map(op)),
        body: Body::Map {
            joined,
            reduce: group.reduces.then_some(group.node as u32),
        },
        shape: group.shape.clone(),
        outputs,
        nodes,
    };
    Some((fused, program))
}

/// Ops that became one, such as `cast+mul+add`.
pub(crate) fn name(of: impl Iterator<Item = &'static str>) -> &'static str {
    const SHOWN: usize = 6;
    static NAMES: Mutex<Option<HashSet<&'static str>>> = Mutex::new(None);
    const KEPT: usize = 4096;
    let mut ops: Vec<&str> = vec![];
    for op in of {
        if ops.last() != Some(&op) {
            ops.push(op);
        }
    }
    if ops.len() > SHOWN {
        ops.truncate(SHOWN);
        ops.push("..");
    }
    let text = ops.join("+");
    // Kernels are named by words that live for ever, so there is a limit to new ones.
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    let names = names.get_or_insert_default();
    match names.get(text.as_str()) {
        Some(name) => name,
        None if names.len() >= KEPT => "fused",
        None => {
            let name: &'static str = Box::leak(text.into_boxed_str());
            names.insert(name);
            name
        }
    }
}

/// The results of steps that somebody holds.
fn wanted(plan: &Plan, graph: &Graph<'_>) -> Vec<Wanted> {
    let mut wanted = vec![];
    for (launch, step) in plan.steps.iter().enumerate() {
        for result in 0..=u8::MAX {
            let known = step.result(result).and_then(|(node, output)| {
                let of_node = &graph.results[node as usize];
                of_node.get(usize::from(output))
            });
            match known {
                Some(known) if known.held => wanted.push(Wanted {
                    launch: launch as u32,
                    result,
                }),
                Some(_) => {}
                None => break,
            }
        }
    }
    wanted
}

/// Says after which step each launch, and with it its operands, is let go: at most so many steps and
/// bytes [later](Options::lag) than it could be.
fn release(plan: &mut Plan, graph: &Graph<'_>, (lag, bytes): (usize, u64)) {
    let mut last: Vec<Option<usize>> = vec![None; graph.kernels.len()];
    for (i, step) in plan.steps.iter().enumerate() {
        match step {
            Step::Single(node) => last[*node as usize] = Some(i),
            Step::Fused(fused) => {
                for node in &fused.nodes {
                    last[*node as usize] = Some(i);
                }
            }
        }
    }
    let mut done: Vec<Vec<u32>> = vec![vec![]; plan.steps.len()];
    for (node, last) in last.iter().enumerate() {
        match last {
            Some(_) if plan.stay.binary_search(&(node as u32)).is_ok() => {}
            Some(step) => done[*step].push(node as u32),
            None if plan.stay.binary_search(&(node as u32)).is_ok() => {}
            None => plan.dead.push(node as u32),
        }
    }
    if lag == 0 {
        plan.after = done;
        return;
    }
    let freed = freed(&last, graph, plan.steps.len());
    let (mut waiting, mut first) = (0, 0);
    for step in 0..done.len() {
        waiting += freed[step];
        let mut gone = vec![];
        while first <= step && (step - first >= lag || waiting > bytes || step + 1 == done.len()) {
            gone.append(&mut done[first]);
            waiting -= freed[first];
            first += 1;
        }
        plan.after.push(gone);
    }
}

/// The bytes of what nobody needs any more, after each step.
fn freed(last: &[Option<usize>], graph: &Graph<'_>, steps: usize) -> Vec<u64> {
    let mut until = Mixed::<Source, usize>::default();
    for (node, step) in last.iter().enumerate() {
        let Some(step) = *step else { continue };
        let results = (0..graph.results[node].len()).map(|output| Source::Result {
            node: node as u32,
            output: output as u8,
        });
        for source in graph.operands[node].iter().copied().chain(results) {
            let until = until.entry(source).or_default();
            *until = step.max(*until);
        }
    }
    let mut freed = vec![0; steps];
    for (source, step) in until {
        let known = graph.known(source);
        if !known.held {
            freed[step] += known.bytes;
        }
    }
    freed
}

//! The backward pass: from results down to what they were made of.

use super::{
    horizon::Horizon,
    slices::{self, Part},
    tape::{Back, Edge, LeafSums, Mode, Node, with_mode},
};
use crate::{
    Error, NoGradient, Result, Tensor,
    forms::Holder,
    ledger, observe,
    overlap::{self, Coming, Reductions},
    profile,
    promotion::{self, Promotion},
};
use smallvec::SmallVec;
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, Weak},
};

/// How a pass goes; by default once, to all leaves.
#[derive(Default)]
pub(super) struct Pass<'a> {
    /// The tensors whose gradients are wanted; `None` for all leaves.
    pub(super) targets: Option<&'a [Edge]>,
    /// Do not go on below a target.
    pub(super) stop: bool,
    /// Keep what ops remember, for another pass.
    pub(super) retain: bool,
    /// Record the pass itself, so that gradients have gradients.
    pub(super) create_graph: bool,
    /// Put off what does not lead to a target, for another pass to go on with.
    pub(super) defer: bool,
    /// Sums of gradients of leaves so far. What is added to one is left out of it.
    pub(super) sums: LeafSums,
}

/// Nodes that a pass has not gone by, by their numbers.
pub(super) type Open = BTreeMap<u64, Pending>;

/// A node whose results got gradients.
pub(super) struct Pending {
    node: Arc<Node>,
    grads: SmallVec<[Option<Tensor>; 1]>,
    /// What of these came in parts and is not yet in them.
    parts: Vec<(usize, Part)>,
    /// How many ops gave to each.
    given: SmallVec<[u32; 1]>,
    /// Whether one of them is part of an op that somebody sees as a whole.
    of_part: bool,
    /// Whether a pass has been here, and left the operands that are not yet done to another.
    visited: bool,
    /// The operands that have their gradients.
    done: SmallVec<[bool; 4]>,
}

impl Pending {
    fn new(node: &Arc<Node>) -> Self {
        Self {
            node: node.clone(),
            grads: SmallVec::new(),
            parts: vec![],
            given: SmallVec::new(),
            of_part: false,
            visited: false,
            done: SmallVec::new(),
        }
    }

    fn is_done(&self, operand: usize) -> bool {
        self.done.get(operand).copied().unwrap_or(false)
    }

    /// Counts a gradient of a result. Once all ops that took the result have given theirs, the next
    /// op reads what there is: until then forms of it are worth holding.
    fn count(&mut self, slot: usize) {
        self.given[slot] += 1;
        if self.is_complete(slot)
            && let Some(holder) = self.grads[slot].as_ref().and_then(|g| g.holder())
        {
            holder.add_reader();
        }
    }

    /// Whether all ops that took a result have given theirs.
    fn is_complete(&self, slot: usize) -> bool {
        Some(self.given[slot]) == self.node.uses(slot)
    }

    /// Makes a place for the gradient of a result.
    fn reserve(&mut self, slot: usize) {
        if self.grads.len() <= slot {
            self.grads.resize(slot + 1, None);
            self.given.resize(slot + 1, 0);
        }
    }

    /// Adds a gradient to what a result has already got.
    fn add(&mut self, slot: usize, gradient: Tensor) -> Result<()> {
        let sum = match self.grads[slot].take() {
            None => gradient,
            Some(so_far) if so_far.shape() != gradient.shape() => {
                let detail = format!(
                    "gradients {} and {} of one tensor do not have one shape",
                    so_far.type_string(),
                    gradient.type_string()
                );
                return Err(Error::gradient(self.node.op, NoGradient::Mismatch, detail)
                    .of([&so_far, &gradient]));
            }
            Some(so_far) => {
                let _unseen = observe::unseen();
                so_far.add(&gradient)?
            }
        };
        self.grads[slot] = Some(sum);
        Ok(())
    }

    /// Adds what came in parts.
    fn join(&mut self) -> Result<()> {
        while let Some((slot, _)) = self.parts.first() {
            let _scope = ledger::enter(self.node.op, self.node.caller);
            let slot = *slot;
            let (own, others) = self.parts.drain(..).partition(|(of, _)| *of == slot);
            self.parts = others;
            let own: Vec<_> = own;
            let parts = own.into_iter().map(|(_, part)| part).collect();
            if let Some(gradient) = slices::joined(parts)? {
                self.add(slot, gradient)?;
            }
        }
        Ok(())
    }

    /// The complete gradients are about to be read.
    fn begin(&self) {
        for (slot, grad) in self.grads.iter().enumerate() {
            if self.is_complete(slot)
                && let Some(holder) = grad.as_ref().and_then(|g| g.holder())
            {
                holder.remove_reader();
            }
        }
    }
}

/// The gradients that a pass found.
#[derive(Default)]
pub(super) struct PassGradients {
    /// By node and result; those of parameters may be on their way.
    pub(super) gradients: HashMap<(u64, usize), Coming>,
    /// What results depend on, but through a function that is flat.
    pub(super) flat: Vec<Edge>,
    /// What was put off.
    pub(super) deferred: Open,
}

impl PassGradients {
    /// The tensors whose gradient is wanted and zero, because all ways to them are flat.
    pub(super) fn zeros(&self) -> HashSet<(u64, usize)> {
        let (mut seen, mut zeros) = (HashSet::new(), HashSet::new());
        let mut open: Vec<&Edge> = self.flat.iter().collect();
        while let Some(edge) = open.pop() {
            let key = edge.key();
            if edge.node.is_retained(edge.slot) && !self.gradients.contains_key(&key) {
                zeros.insert(key);
            }
            if seen.insert(edge.node.id) {
                open.extend(edge.node.inputs.iter().flatten());
            }
        }
        zeros
    }
}

impl Pass<'_> {
    /// The gradients of the targets, from those of some results.
    pub(super) fn run(&self, seeds: Vec<(Edge, Tensor)>) -> Result<PassGradients> {
        let mut open = Open::new();
        with_mode(self.mode(), || {
            let mut seeds = seeds.into_iter();
            seeds.try_for_each(|(edge, gradient)| add(&mut open, None, &edge, gradient).map(drop))
        })?;
        self.go_on(open)
    }

    fn mode(&self) -> Mode {
        match self.create_graph {
            true => Mode::On,
            false => Mode::Off,
        }
    }

    /// The gradients of the targets, from where another pass or nobody has been.
    pub(super) fn go_on(&self, mut pending: Open) -> Result<PassGradients> {
        let needed = self
            .targets
            .map(|targets| needed(pending.values().map(|p| &p.node), targets, self.stop));
        let is_needed = |node: &Node| needed.as_ref().is_none_or(|ids| ids.contains(&node.id));
        let overlap = overlap::capture();
        let mut leaves = Leaves {
            reductions: (!self.create_graph).then(Reductions::new),
            whole: overlap.whole,
        };
        let roots = pending.values().map(|p| &p.node);
        let mut horizon =
            (overlap.ahead > 0 && !self.create_graph).then(|| Horizon::new(overlap.ahead, roots));
        // The products of a gradient are not the program's to cast.
        let _scope = promotion::enter(Promotion::Auto);
        with_mode(self.mode(), || {
            for entry in pending.values_mut().filter(|p| p.node.is_leaf()) {
                leaves.settle(entry)?;
            }
            let mut found = PassGradients::default();
            // The highest number first: everything that used a node's results has been visited
            // by then.
            while let Some((id, mut next)) = pending.pop_last() {
                if self.defer && !is_needed(&next.node) {
                    found.deferred.insert(id, next);
                    continue;
                }
                next.join()?;
                if !next.visited {
                    next.begin();
                    self.complete(&mut next, &mut leaves)?;
                }
                let node = next.node.clone();
                if self.take(&node, &next.grads, &mut found) || node.is_leaf() {
                    continue;
                }
                let open = |(i, e): (usize, &Option<Edge>)| e.is_some() && !next.is_done(i);
                let mut needs: SmallVec<[bool; 4]> =
                    node.inputs.iter().enumerate().map(open).collect();
                let mut later = needs.clone();
                for (i, edge) in node.inputs.iter().enumerate() {
                    let now = edge.as_ref().is_some_and(|e| is_needed(&e.node));
                    needs[i] &= now;
                    later[i] &= !now && self.defer;
                }
                if !needs.contains(&true) {
                    continue;
                }
                if let Some(horizon) = &mut horizon {
                    horizon.advance(node.id, is_needed)?;
                }
                let defers = later.contains(&true);
                let keep = self.retain || self.create_graph || defers;
                let pull = node.pull(keep)?;
                let _scope = ledger::enter(node.op, node.caller);
                let _backward = profile::backward();
                let step = observe::begin();
                let left = slices::Left::default();
                let mut pulled = pull(&Back {
                    node: &node,
                    grads: &next.grads,
                    needs: &needs,
                    last: !keep,
                    sums: &self.sums,
                    left: (!self.create_graph).then_some(&left),
                })?;
                let left = left.take();
                if let Some(step) = step {
                    let to = |e: &Option<Edge>| e.as_ref().map(|e| e.node.call());
                    let to: SmallVec<[_; 4]> = node.inputs.iter().map(to).collect();
                    observe::pulled(step, node.call(), &next.grads, &to, &mut pulled)?;
                }
                if let (Some(part), Some(Some(edge))) = (left, node.inputs.first()) {
                    drop((pull, next));
                    add_part(&mut pending, edge, part)?;
                    continue;
                }
                // What the node kept goes before the next one allocates, but for what others
                // will read.
                drop(pull);
                let read: SmallVec<[Weak<Holder>; 1]> = (next.grads.iter().flatten())
                    .filter_map(|g| g.holder().map(Arc::downgrade))
                    .collect();
                // What came unasked, because an op computes all at once, is not computed again.
                let given: SmallVec<[bool; 4]> = pulled.iter().map(Option::is_some).collect();
                if (0..later.len()).any(|i| later[i] && given.get(i) != Some(&true)) {
                    let is_done = |i| needs[i] || given.get(i) == Some(&true) || next.is_done(i);
                    next.done = (0..needs.len()).map(is_done).collect();
                    next.visited = true;
                    found.deferred.insert(id, next);
                } else {
                    if defers {
                        node.release();
                    }
                    drop(next);
                }
                for (i, (edge, gradient)) in node.inputs.iter().zip(pulled).enumerate() {
                    match (edge, gradient) {
                        (Some(edge), Some(gradient)) if needs[i] => {
                            let entry = add(&mut pending, Some(&node), edge, gradient)?;
                            leaves.settle(entry)?;
                        }
                        (Some(edge), Some(gradient)) if later[i] => {
                            add(&mut found.deferred, Some(&node), edge, gradient)?;
                        }
                        (Some(edge), None) if needs[i] => found.flat.push(edge.clone()),
                        _ => {}
                    }
                }
                for holder in read.iter().filter_map(Weak::upgrade) {
                    holder.release_read();
                }
            }
            if let Some(reductions) = leaves.reductions {
                let _unseen = observe::unseen();
                found.gradients.extend(reductions.finish()?);
            }
            Ok(found)
        })
    }

    /// The gradients of a node's results are complete: whoever watches sees them.
    fn complete(&self, next: &mut Pending, leaves: &mut Leaves) -> Result<()> {
        let Pending {
            node, grads, given, ..
        } = next;
        // Those of parameters are seen when the program asks for them.
        for (slot, given) in given.iter().enumerate() {
            if let Some(Some(grad)) = grads.get_mut(slot)
                && (*given > 1 || next.of_part)
                && !node.is_leaf()
            {
                observe::summed(node.call(), slot, grad)?;
            }
        }
        for (slot, grad) in grads.iter_mut().enumerate() {
            if grad.is_none() && node.is_leaf() && node.is_watched(slot) {
                *grad = leaves.take((node.id, slot))?;
            }
        }
        // Where a pass stops, more may come to the gradient from elsewhere.
        if !(self.stop && self.is_target(node)) {
            for (slot, grad) in grads.iter_mut().enumerate() {
                if let Some(gradient) = grad.take() {
                    *grad = Some(node.show(slot, gradient)?);
                }
            }
        }
        Ok(())
    }

    fn is_target(&self, node: &Node) -> bool {
        self.targets
            .is_some_and(|targets| targets.iter().any(|t| t.node.id == node.id))
    }

    /// Keeps the gradients of a node that was asked for; whether the pass is to stop there.
    fn take(&self, node: &Arc<Node>, grads: &[Option<Tensor>], found: &mut PassGradients) -> bool {
        let Some(targets) = self.targets else {
            for (slot, gradient) in grads.iter().enumerate() {
                if let (Some(gradient), true) = (gradient, node.is_retained(slot)) {
                    let gradient = Coming::There(gradient.clone());
                    found.gradients.insert((node.id, slot), gradient);
                }
            }
            return false;
        };
        let mut any = false;
        for target in targets.iter().filter(|t| t.node.id == node.id) {
            if let Some(Some(gradient)) = grads.get(target.slot) {
                let gradient = Coming::There(gradient.clone());
                found.gradients.insert(target.key(), gradient);
            }
            any = true;
        }
        any && self.stop
    }
}

/// What becomes of the complete gradients of leaves.
struct Leaves {
    /// Those that are being reduced. None where the pass is recorded, which what goes on beside it
    /// cannot be.
    reductions: Option<Reductions<(u64, usize)>>,
    whole: bool,
}

impl Leaves {
    /// Reduces a complete gradient; nothing where it comes later.
    #[track_caller]
    fn reduce(&mut self, edge: &Edge, gradient: Tensor) -> Result<Option<Tensor>> {
        // What comes of it is seen when the program asks for it.
        let _unseen = observe::unseen();
        match (edge.reduced(&gradient, self.whole), &mut self.reductions) {
            (None, _) => Ok(Some(gradient)),
            (Some(to), Some(reductions)) => reductions.reduce(edge.key(), gradient, &to),
            (Some(to), None) => gradient.reshard(to).map(Some),
        }
    }

    /// Reduces the complete gradients of a leaf. That of a parameter that is cut is as large as the
    /// parameter whole, until it is added up: that does not wait for the end of the pass.
    fn settle(&mut self, entry: &mut Pending) -> Result<()> {
        for slot in 0..entry.grads.len() {
            if entry.node.is_leaf()
                && entry.is_complete(slot)
                && let Some(gradient) = entry.grads[slot].take()
            {
                let edge = Edge {
                    node: entry.node.clone(),
                    slot,
                };
                let _scope = ledger::enter(edge.node.op, edge.node.caller);
                entry.grads[slot] = self.reduce(&edge, gradient)?;
            }
        }
        Ok(())
    }

    /// Waits for one that is being reduced.
    fn take(&mut self, key: (u64, usize)) -> Result<Option<Tensor>> {
        let _unseen = observe::unseen();
        match &mut self.reductions {
            Some(reductions) => reductions.take(&key),
            None => Ok(None),
        }
    }
}

/// Adds a gradient to what a tensor has already got: partial values stay partial where both are.
fn add<'p>(
    open: &'p mut Open,
    by: Option<&Node>,
    edge: &Edge,
    gradient: Tensor,
) -> Result<&'p mut Pending> {
    // Where several gradients of a tensor meet is nobody's line but that of the op that made it.
    let _scope = ledger::enter(edge.node.op, edge.node.caller);
    let (slot, gradient) = (edge.slot, edge.sliced(gradient)?);
    let entry = open
        .entry(edge.node.id)
        .or_insert_with(|| Pending::new(&edge.node));
    entry.of_part |= by.is_some_and(|node| node.nth == observe::UNSEEN);
    entry.reserve(slot);
    entry.add(slot, gradient)?;
    entry.count(slot);
    Ok(entry)
}

/// Keeps the gradient of a slice for when all are there, or until they are more than the tensor.
fn add_part(open: &mut Open, edge: &Edge, part: Part) -> Result<()> {
    let entry = open
        .entry(edge.node.id)
        .or_insert_with(|| Pending::new(&edge.node));
    entry.reserve(edge.slot);
    entry.parts.push((edge.slot, part));
    entry.count(edge.slot);
    match slices::overlap(
        entry
            .parts
            .iter()
            .filter(|(slot, _)| *slot == edge.slot)
            .map(|(_, part)| part),
    ) {
        true => entry.join(),
        false => Ok(()),
    }
}

/// The nodes from which a target can be reached.
pub(super) fn needed<'n>(
    roots: impl Iterator<Item = &'n Arc<Node>>,
    targets: &[Edge],
    stop: bool,
) -> HashSet<u64> {
    let wanted: HashSet<u64> = targets.iter().map(|t| t.node.id).collect();
    let mut seen: BTreeMap<u64, &Node> = BTreeMap::new();
    let mut open: Vec<&Node> = roots.map(|n| &**n).collect();
    while let Some(node) = open.pop() {
        if seen.insert(node.id, node).is_none() && !(stop && wanted.contains(&node.id)) {
            open.extend(node.inputs.iter().flatten().map(|e| &*e.node));
        }
    }
    let mut needed = HashSet::new();
    // Operands come before results.
    for (id, node) in seen {
        if wanted.contains(&id)
            || node
                .inputs
                .iter()
                .flatten()
                .any(|e| needed.contains(&e.node.id))
        {
            needed.insert(id);
        }
    }
    needed
}

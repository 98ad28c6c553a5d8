//! Parameters that a backward pass gathers ahead of the ops that read them.

use super::tape::Node;
use crate::{Ahead, Result, Sharding, Tensor, ledger};
use std::{collections::BTreeMap, sync::Arc};

/// Goes through the nodes in the order in which the pass will, some way ahead of it. How far depends
/// on sizes alone.
pub(super) struct Horizon {
    /// How many bytes it may have brought.
    limit: u64,
    /// Nodes that the pass will come to, and that this has not been at.
    open: BTreeMap<u64, Arc<Node>>,
    /// What it brought for each node that the pass has not gone by, with its size.
    brought: BTreeMap<u64, (Vec<Ahead>, u64)>,
}

impl Horizon {
    /// From where a pass begins.
    pub(super) fn new<'a>(limit: u64, roots: impl Iterator<Item = &'a Arc<Node>>) -> Self {
        let roots = roots.map(|node| (node.id, node.clone()));
        Self {
            limit,
            open: roots.collect(),
            brought: BTreeMap::new(),
        }
    }

    /// The pass is at a node: lets go of what was for those before, and brings what fits for those
    /// to come.
    pub(super) fn advance(&mut self, now: u64, is_needed: impl Fn(&Node) -> bool) -> Result<()> {
        self.brought.split_off(&(now + 1));
        while let Some((id, node)) = self.open.last_key_value() {
            let (id, node) = (*id, node.clone());
            let again = if id > now { vec![] } else { node.again() };
            let bytes = again.iter().map(size).sum::<u64>();
            let held = self.brought.values().map(|(_, bytes)| bytes).sum::<u64>();
            if held >= self.limit || (held > 0 && held + bytes > self.limit) {
                break;
            }
            self.open.pop_last();
            let inputs = node.inputs.iter().flatten();
            let inputs = inputs.filter(|e| !e.node.is_leaf() && is_needed(&e.node));
            self.open
                .extend(inputs.map(|e| (e.node.id, e.node.clone())));
            if bytes > 0 && bytes <= self.limit {
                let _scope = ledger::enter(node.op, node.caller);
                let brought = again.iter().map(|(x, to)| x.prefetch(to.clone()));
                let brought = brought.collect::<Result<_>>()?;
                self.brought.insert(id, (brought, bytes));
            }
        }
        Ok(())
    }
}

fn size((x, to): &(Tensor, Sharding)) -> u64 {
    to.largest_part(x.mesh(), x.shape()) * x.dtype().size() as u64
}

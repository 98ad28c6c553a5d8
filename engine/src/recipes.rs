//! Values that somebody holds and no launch of a list reads, such as what a tape keeps for the backward
//! pass. Where one is made of no more bytes than it has itself, it is not stored: its launches stay
//! written down for the next list, which computes it where it is read, or when it is asked for.

use crate::{
    Options,
    graph::{Graph, Source, fusable},
};
use anymesh_kernel::{Kernel, backend::MapCall};
use std::collections::HashSet;

/// Launches that stay for the next list at most.
const MAX_LAUNCHES: usize = 512;
/// Instructions of what is computed again at most.
const MAX_INSTRUCTIONS: usize = 64;

/// What a list leaves to the next one.
#[derive(Debug, Default)]
pub(crate) struct Recipes {
    /// The launches whose results are not stored though somebody holds them.
    pub(crate) unstored: HashSet<u32>,
    /// The launches that stay, in order.
    pub(crate) launches: Vec<u32>,
    /// What they read, which is stored for them.
    pub(crate) reads: HashSet<Source>,
}

/// How to make a value.
#[derive(Default)]
struct Recipe {
    launches: Vec<usize>,
    reads: Vec<Source>,
}

/// A launch that is computed again where its result is read: elementwise, with one result.
fn elementwise(kernel: &Kernel) -> Option<&MapCall> {
    fusable(kernel)
        .filter(|call| matches!(kernel, Kernel::Map(_)) && call.program.outputs.len() == 1)
}

impl Recipes {
    /// Chooses the values that are not stored, but for some that `must` be. The first `old` launches
    /// stayed of an earlier list: they may stay on, but no other value is left to be made of theirs, or
    /// what changes step by step would grow without end.
    pub(crate) fn new(
        graph: &Graph<'_>,
        old: usize,
        must: &HashSet<u32>,
        options: &Options,
    ) -> Self {
        let mut recipes = Self::default();
        // Read by launches that read memory.
        let mut read = vec![false; graph.kernels.len()];
        for (kernel, operands) in graph.kernels.iter().zip(&graph.operands) {
            for source in operands {
                if let (Source::Result { node, .. }, None) = (source, fusable(kernel)) {
                    read[*node as usize] = true;
                }
            }
        }
        let mut stay = vec![false; graph.kernels.len()];
        for n in 0..graph.kernels.len() {
            let known = match &graph.results[n][..] {
                [known] => known,
                _ => continue,
            };
            let kept = known.held && !known.needed && known.bytes >= options.recipes;
            if !kept || read[n] || must.contains(&(n as u32)) {
                continue;
            }
            let Some(recipe) = recipes.recipe(graph, n, old, &read) else {
                continue;
            };
            let new = recipe.launches.iter().filter(|n| !stay[**n]).count();
            if recipes.launches.len() + new > MAX_LAUNCHES {
                break;
            }
            recipes.unstored.insert(n as u32);
            for n in recipe.launches {
                if !std::mem::replace(&mut stay[n], true) {
                    recipes.launches.push(n as u32);
                }
            }
            recipes.reads.extend(recipe.reads);
        }
        recipes.launches.sort_unstable();
        recipes
    }

    /// How to make the result of a launch later, where that is allowed and takes no more than to read it.
    fn recipe(&self, graph: &Graph<'_>, n: usize, old: usize, read: &[bool]) -> Option<Recipe> {
        let most = graph.results[n].first()?.bytes;
        let mut recipe = Recipe::default();
        let (mut instructions, mut bytes) = (0, 0);
        let mut stack = vec![n];
        while let Some(m) = stack.pop() {
            if recipe.launches.contains(&m) {
                continue;
            }
            let call = elementwise(graph.kernels[m])?;
            instructions += call.program.insts.len();
            if (m < old) != (n < old) || instructions > MAX_INSTRUCTIONS {
                return None;
            }
            recipe.launches.push(m);
            for source in &graph.operands[m] {
                match *source {
                    Source::Result { node, .. } if self.again(graph, node as usize, read) => {
                        stack.push(node as usize);
                    }
                    source if !recipe.reads.contains(&source) => {
                        bytes += graph.known(source).bytes;
                        recipe.reads.push(source);
                    }
                    _ => {}
                }
            }
        }
        // Numbers of rows beside their elements.
        (bytes <= most + most / 8).then_some(recipe)
    }

    /// Whether the result of a launch is computed again for others that are. What has memory anyway is
    /// read from there, unless it is only a wider form of something else.
    fn again(&self, graph: &Graph<'_>, n: usize, read: &[bool]) -> bool {
        let Some(call) = elementwise(graph.kernels[n]) else {
            return false;
        };
        let known = &graph.results[n][0];
        let stored = read[n] || known.held && !self.unstored.contains(&(n as u32));
        let widens = matches!(&graph.operands[n][..], [one] if graph.known(*one).bytes < known.bytes)
            && call.program.insts.len() <= 2;
        !stored || widens
    }
}

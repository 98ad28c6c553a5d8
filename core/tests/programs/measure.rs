//! What a step sends: ledgers by phase and by mesh axis.

use crate::layers::{Layer, Layout, Parameters, zeros};
use anymesh_core::{DType, Mesh, Result, Tensor, spmd::Ledger};
use std::collections::{BTreeMap, BTreeSet};

/// How a type's text treats each axis: `@tp` behind a dimension, `sum:tp` behind all.
fn placements(text: &str) -> BTreeSet<(String, String)> {
    let (dims, partial) = text.split_once('{').unwrap_or((text, ""));
    let mut found = BTreeSet::new();
    for (i, dim) in dims.split(',').enumerate() {
        for axis in dim.split('@').skip(1) {
            found.insert((axis.trim_end_matches([']', ' ']).into(), format!("dim {i}")));
        }
    }
    for part in partial.trim_end_matches('}').split(',') {
        if let Some((reduction, axis)) = part.split_once(':') {
            found.insert((axis.trim().into(), reduction.trim().into()));
        }
    }
    found
}

/// The mesh axes that a step of the ledger goes along: those that lie differently after it.
pub fn axes_of(from: &str, to: &str) -> String {
    let (from, to) = (placements(from), placements(to));
    let moved: BTreeSet<&str> = from.symmetric_difference(&to).map(|(a, _)| &**a).collect();
    moved.into_iter().collect::<Vec<_>>().join("+")
}

/// The bytes along one axis.
pub fn along(ledger: &Ledger, axis: &str) -> u64 {
    let steps = ledger.entries.iter();
    let steps = steps.filter(|e| axes_of(&e.from, &e.to) == axis);
    steps.map(|e| e.bytes).sum()
}

/// The ledger by op, kind and axis, dearest first: where the bytes go.
pub fn explain(ledger: &Ledger) -> String {
    let mut groups: BTreeMap<(String, &str, &str, &str), (u64, usize)> = BTreeMap::new();
    for e in &ledger.entries {
        let group = (axes_of(&e.from, &e.to), e.op, e.kind, e.from.as_str());
        let (bytes, steps) = groups.entry(group).or_default();
        *bytes += e.bytes;
        *steps += 1;
    }
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by_key(|(_, (bytes, _))| std::cmp::Reverse(*bytes));
    let line = |((axes, op, kind, from), (bytes, steps)): ((String, &str, &str, &str), _)| {
        format!("    {bytes:>14} B {steps:>3} x {axes:<6} {kind:<14} {op:<14} {from}\n")
    };
    groups.into_iter().map(line).collect()
}

/// What one forward and backward pass sends, by phase.
#[derive(Default)]
pub struct Traffic {
    pub forward: Ledger,
    /// The pass itself, and bringing the gradient of the input to where the input lies.
    pub backward: Ledger,
    /// Bringing the gradients of the parameters to where they lie.
    pub parameters: Ledger,
}

impl Traffic {
    /// Along one axis, for activations: what is sent before parameters' gradients are asked for.
    pub fn activations(&self, axis: &str) -> u64 {
        along(&self.forward, axis) + along(&self.backward, axis)
    }

    pub fn bytes(&self) -> u64 {
        self.forward.bytes() + self.backward.bytes() + self.parameters.bytes()
    }

    /// All along one axis.
    pub fn all(&self, axis: &str) -> u64 {
        self.activations(axis) + along(&self.parameters, axis)
    }

    pub fn explain(&self) -> String {
        format!(
            "  forward {}\n{}  backward {}\n{}  parameters {}\n{}",
            self.forward.bytes(),
            explain(&self.forward),
            self.backward.bytes(),
            explain(&self.backward),
            self.parameters.bytes(),
            explain(&self.parameters),
        )
    }
}

/// Where a program brings the residual stream back to its sharding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Flow {
    /// By a `reshard` after each addition to it.
    EachAdd,
    /// By one `reshard` behind the last layer.
    AtEnd,
    /// Nowhere: the rules of the ops decide.
    Never,
}

/// A stack of equal layers.
pub struct Program<'a> {
    pub layer: &'a dyn Layer,
    pub layout: &'a Layout,
    pub mesh: &'a Mesh,
    pub stream: &'a str,
    pub flow: Flow,
    pub layers: usize,
}

impl Program<'_> {
    /// Runs it without values from an input `[batch, length, width]`.
    pub fn measure(&self, input: [usize; 3], dtype: DType) -> Result<Traffic> {
        let make = |_| zeros(self.layer, self.mesh, self.layout, dtype);
        let parameters = (0..self.layers).map(make).collect::<Result<Vec<_>>>()?;
        let x = Tensor::zeros(input, dtype, (self.mesh, self.stream))?.require_grad()?;
        let seed = Tensor::zeros(input, dtype, (self.mesh, self.stream))?;
        self.run(&parameters, &x, &seed)
    }

    fn run(&self, parameters: &[Parameters], x: &Tensor, seed: &Tensor) -> Result<Traffic> {
        let settle = |y: Tensor| match self.flow {
            Flow::EachAdd => y.reshard(self.stream),
            _ => Ok(y),
        };
        let run = |x: Tensor, p: &Parameters| self.layer.forward(p, &x, &settle);
        let (y, forward) = Ledger::record(|| {
            let y = parameters.iter().try_fold(x.clone(), run)?;
            match self.flow {
                Flow::Never => Ok(y),
                _ => y.reshard(self.stream),
            }
        });
        let y = y?;
        let (grads, backward) = Ledger::record(|| {
            let grads = y.backward_with(seed)?;
            grads.of(x)?;
            Ok::<_, anymesh_core::Error>(grads)
        });
        let grads = grads?;
        let (done, settled) = Ledger::record(|| {
            let mut all = parameters.iter().flat_map(|p| &p.0);
            all.try_for_each(|(_, w)| grads.of(w).map(|_| ()))
        });
        done?;
        Ok(Traffic {
            forward,
            backward,
            parameters: settled,
        })
    }
}

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
pub(crate) fn axes_of(from: &str, to: &str) -> String {
    let (from, to) = (placements(from), placements(to));
    let moved: BTreeSet<&str> = from.symmetric_difference(&to).map(|(a, _)| &**a).collect();
    moved.into_iter().collect::<Vec<_>>().join("+")
}

/// The ledger by op, kind and axis, dearest first: where the bytes go.
pub(crate) fn explain(ledger: &Ledger) -> String {
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
pub(crate) struct Traffic {
    pub(crate) forward: Ledger,
    /// The pass itself, and bringing the gradient of the input to where the input lies.
    pub(crate) backward: Ledger,
    /// Bringing the gradients of the parameters to where they lie.
    pub(crate) parameters: Ledger,
}

impl Traffic {
    pub(crate) fn bytes(&self) -> u64 {
        self.activations() + self.parameters.bytes()
    }

    /// What is sent before the gradients of parameters are asked for.
    pub(crate) fn activations(&self) -> u64 {
        self.forward.bytes() + self.backward.bytes()
    }

    pub(crate) fn explain(&self) -> String {
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
pub(crate) enum Flow {
    /// By a `reshard` after each addition to it.
    EachAdd,
    /// By one `reshard` behind the last layer.
    AtEnd,
    /// Nowhere: the rules of the ops decide.
    Never,
}

/// A stack of equal layers.
pub(crate) struct Program<'a> {
    pub(crate) layer: &'a dyn Layer,
    pub(crate) layout: &'a Layout,
    pub(crate) mesh: &'a Mesh,
    pub(crate) stream: &'a str,
    pub(crate) flow: Flow,
    pub(crate) layers: usize,
    /// Whether the norms' weights and shifts are trained.
    pub(crate) norms: bool,
}

impl Program<'_> {
    /// Runs it without values from an input of this shape.
    pub(crate) fn measure(&self, input: &[usize], dtype: DType) -> Result<Traffic> {
        let trained =
            |name: &str| self.norms || !(name.starts_with("norm") || name.starts_with("shift"));
        let make = |_| zeros(self.layer, self.mesh, self.layout, dtype, trained);
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
        let forward = || {
            let y = parameters.iter().try_fold(x.clone(), run)?;
            match self.flow {
                Flow::Never => Ok(y),
                _ => y.reshard(self.stream),
            }
        };
        let weights: Vec<&Tensor> = parameters.iter().flat_map(Parameters::trained).collect();
        traffic(&[x], &weights, Some(seed), forward)
    }
}

/// What a function and its backward pass send. The gradients of inputs belong to the pass.
pub(crate) fn traffic(
    inputs: &[&Tensor],
    parameters: &[&Tensor],
    seed: Option<&Tensor>,
    forward: impl FnOnce() -> Result<Tensor>,
) -> Result<Traffic> {
    let (y, forward) = Ledger::record(forward);
    let y = y?;
    let (grads, backward) = Ledger::record(|| -> Result<_> {
        let grads = match seed {
            Some(seed) => y.backward_with(seed)?,
            None => y.backward()?,
        };
        inputs.iter().try_for_each(|x| grads.of(x).map(drop))?;
        Ok(grads)
    });
    let grads = grads?;
    let settle = || parameters.iter().try_for_each(|w| grads.of(w).map(drop));
    let (done, parameters) = Ledger::record(settle);
    done?;
    Ok(Traffic {
        forward,
        backward,
        parameters,
    })
}

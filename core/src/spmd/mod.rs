//! One program on many ranks: how an op runs when its operands lie on a mesh.
//!
//! Every op goes through [`run`] with its rule and a local step. For plain tensors the local step
//! is the op. On a mesh the [solver](solve) picks how each mesh axis is used, operands are
//! resharded (the [policy] may forbid it, the [ledger] sees it), the local step runs on what each
//! addressable rank holds, and the results carry the shardings that follow from the rule.

pub(crate) mod cache;
pub mod ledger;
mod notation;
pub mod policy;
pub mod rule;
pub mod solve;
mod trace;

pub(crate) use cache::{Table, hash};
pub use ledger::{Entry, Ledger};
pub use policy::{Policy, with_policy};
pub use rule::Rule;
pub use solve::{Choice, Solution};
pub use trace::{Decision, trace};

use crate::{Error, Mesh, Region, Result, Shape, Tensor, grad, reshard, split};
use cache::Known;
use smallvec::SmallVec;
use std::{ops::Range, panic::Location};

/// The most operands of a rule, which has a bit for each.
const MAX_OPERANDS: usize = 31;

/// The results of an op.
pub(crate) type Outputs = SmallVec<[Tensor; 1]>;

/// One call of an op.
pub(crate) struct Call<'a> {
    pub(crate) op: &'static str,
    pub(crate) inputs: &'a [&'a Tensor],
    /// Everything beside operands' ranks and broadcast dimensions that the rule depends on.
    pub(crate) attrs: &'a [i64],
}

/// What one rank works on.
pub(crate) struct Local<'a> {
    /// Its parts of the operands; plain tensors.
    pub(crate) inputs: &'a [Tensor],
    known: Option<(&'a Known, &'a Mesh, usize, &'a [Tensor])>,
}

impl Local<'_> {
    /// The part of a factor that this rank holds, and the whole size: `None` where it holds all.
    pub(crate) fn part(&self, letter: char) -> Option<(Range<usize>, usize)> {
        let (known, mesh, rank, globals) = self.known?;
        let f = known.factors.iter().position(|(l, _)| *l == letter)?;
        let axes = known
            .solution
            .cuts
            .iter()
            .filter(|(g, _)| *g as usize == f)
            .map(|(_, a)| *a as usize);
        let (part, parts) = axes.fold((0, 1), |(part, parts), axis| {
            (
                part * mesh.size(axis) + mesh.coordinate(rank, axis),
                parts * mesh.size(axis),
            )
        });
        let size = known.factors[f].1.size(globals);
        (parts > 1).then(|| (split(size, part, parts), size))
    }

    /// The box that this rank computes of result `output`, whose whole shape is `shape`.
    pub(crate) fn region(&self, output: usize, shape: &Shape) -> Region {
        match self.known {
            Some((known, mesh, rank, _)) => {
                known.solution.outputs[output].region(mesh, rank, shape)
            }
            None => Region {
                start: smallvec::smallvec![0; shape.rank()],
                shape: shape.dims().into(),
            },
        }
    }
}

impl std::ops::Index<usize> for Local<'_> {
    type Output = Tensor;

    fn index(&self, i: usize) -> &Tensor {
        &self.inputs[i]
    }
}

/// Whether all operands are plain; an error where they lie on different meshes.
#[inline]
pub(crate) fn plain(op: &'static str, inputs: &[&Tensor]) -> Result<bool> {
    let Some((first, rest)) = inputs.split_first() else {
        return Ok(true);
    };
    let mesh = first.mesh();
    for other in rest {
        if other.mesh() != mesh {
            if other.mesh().is_single() && mesh.is_single() {
                return Err(Error::DeviceMismatch {
                    op,
                    left: mesh.to_string(),
                    right: other.mesh().to_string(),
                });
            }
            return Err(Error::MeshMismatch {
                op,
                left: mesh.to_string(),
                right: other.mesh().to_string(),
            });
        }
    }
    Ok(mesh.is_single())
}

/// Until it is dropped, what ops communicate is on behalf of this one: for ops that are composed of
/// others. Nothing for plain tensors.
#[track_caller]
pub(crate) fn composed(op: &'static str, x: &Tensor) -> Option<ledger::Scope> {
    composed_at(op, x, Location::caller())
}

/// [`composed`] for an op that was called from `caller` and runs later.
pub(crate) fn composed_at(
    op: &'static str,
    x: &Tensor,
    caller: &'static Location<'static>,
) -> Option<ledger::Scope> {
    (!x.is_plain()).then(|| ledger::enter(op, caller))
}

/// A tensor with nothing partial, so that what several steps of a decomposition read is combined
/// once.
pub(crate) fn settled(x: Tensor) -> Result<Tensor> {
    if x.sharding().is_partial() {
        x.reshard(x.sharding().whole())
    } else {
        Ok(x)
    }
}

/// How many parts a dimension is cut into.
pub(crate) fn parts_of(x: &Tensor, dim: usize) -> usize {
    x.sharding()
        .axes_of(dim)
        .map(|axis| x.mesh().size(axis))
        .product()
}

/// What the parts of a dimension of `x` that is cut each gave, gathered along it: `each` elements
/// from every part, one tensor for each addressable rank.
#[track_caller]
pub(crate) fn join_parts(
    x: &Tensor,
    dim: usize,
    each: usize,
    given: Vec<Tensor>,
) -> Result<Tensor> {
    let shape = x.shape().with(dim, each * parts_of(x, dim));
    let gathered = x
        .sharding()
        .axes_of(dim)
        .fold(x.sharding().clone(), |s, axis| s.without(axis));
    let dtype = given.first().map_or(x.dtype(), |t| t.dtype());
    Tensor::from_parts(x.mesh(), x.sharding().clone(), dtype, shape, given).reshard(gathered)
}

impl Call<'_> {
    /// Runs the op on a mesh: `rule` gives the rule, `local` computes on one rank. For operands
    /// that are not [`plain`].
    #[track_caller]
    pub(crate) fn run(
        &self,
        rule: impl FnOnce() -> Result<Rule>,
        local: impl Fn(&Local<'_>) -> Result<Outputs>,
    ) -> Result<Outputs> {
        let (known, inputs) = self.prepare(rule)?;
        on_each_rank(self.op, &known, &inputs, local)
    }

    /// As [`run`](Self::run), for ops that have a decomposition, which runs where a factor marked
    /// `stats` is cut.
    #[track_caller]
    pub(crate) fn run_or(
        &self,
        rule: impl FnOnce() -> Result<Rule>,
        local: impl Fn(&Local<'_>) -> Result<Outputs>,
        decomposed: impl FnOnce(&[Tensor]) -> Result<Outputs>,
    ) -> Result<Outputs> {
        let (known, inputs) = self.prepare(rule)?;
        if known.solution.decompose {
            let _scope = ledger::enter(self.op, Location::caller());
            return decomposed(&inputs);
        }
        on_each_rank(self.op, &known, &inputs, local)
    }

    /// Solves and reshards the operands.
    #[track_caller]
    fn prepare(
        &self,
        rule: impl FnOnce() -> Result<Rule>,
    ) -> Result<(std::rc::Rc<Known>, SmallVec<[Tensor; 3]>)> {
        if grad::is_recording(self.inputs) {
            let detail = "it has none on a mesh: `detach()` its operands, use `no_grad`, or give it one with `grad::custom`".into();
            return Err(Error::Gradient {
                op: self.op,
                detail,
            });
        }
        let caller = ledger::outermost().map_or(Location::caller(), |(_, caller)| caller);
        let known = cache::find(self, rule)?;
        trace::note(|| Decision {
            op: self.op,
            inputs: self.inputs.iter().map(|t| (*t).clone()).collect(),
            rule: known.rule.clone(),
            solution: known.solution.clone(),
        });
        let mut inputs: SmallVec<[Tensor; 3]> = self.inputs.iter().map(|t| (*t).clone()).collect();
        if known.solution.bytes > 0 {
            policy::check(self, &known, caller)?;
        }
        if known.solution.steps > 0 {
            let _scope = ledger::enter(self.op, caller);
            for (i, x) in inputs.iter_mut().enumerate() {
                match &known.plans[i] {
                    Some(plan) => *x = reshard::run(x, plan)?,
                    None if x.sharding() != &known.solution.inputs[i] => {
                        *x = reshard::slice(x, &known.solution.inputs[i])?
                    }
                    None => {}
                }
            }
        }
        Ok((known, inputs))
    }
}

/// Runs the local step for every addressable rank. Ranks of one device that hold the same share the
/// result.
fn on_each_rank(
    op: &'static str,
    known: &Known,
    inputs: &[Tensor],
    local: impl Fn(&Local<'_>) -> Result<Outputs>,
) -> Result<Outputs> {
    let mesh = inputs[0].mesh();
    let solution = &known.solution;
    let used: SmallVec<[usize; 4]> = (0..mesh.axes().len())
        .filter(|a| solution.choices[*a] != Choice::Whole)
        .collect();
    let count = mesh.addressable().len();
    let mut results: SmallVec<[Outputs; 8]> = SmallVec::with_capacity(count);
    // The first addressable rank at each place along the used axes.
    let places = used.iter().map(|a| mesh.size(*a)).product();
    let mut first_at: SmallVec<[usize; 8]> = smallvec::smallvec![usize::MAX; places];
    for (i, rank) in mesh.addressable().enumerate() {
        let place = used
            .iter()
            .fold(0, |at, a| at * mesh.size(*a) + mesh.coordinate(rank, *a));
        first_at[place] = first_at[place].min(i);
        let twin = first_at[place];
        if twin < i && mesh.device(twin) == mesh.device(i) {
            results.push(results[twin].clone());
            continue;
        }
        let parts: SmallVec<[Tensor; 3]> = inputs.iter().map(|t| t.part(i)).collect();
        results.push(local(&Local {
            inputs: &parts,
            known: Some((known, mesh, rank, inputs)),
        })?);
    }
    let mut out = Outputs::new();
    for (o, sharding) in solution.outputs.iter().enumerate() {
        let first = results
            .first()
            .and_then(|r| r.get(o))
            .ok_or_else(|| Error::Argument {
                op,
                detail: format!("the rule has {} results", solution.outputs.len()),
            })?;
        let shape = known.output_shape(op, o, first.shape(), inputs)?;
        out.push(Tensor::from_parts(
            mesh,
            sharding.clone(),
            first.dtype(),
            shape,
            results.iter().map(|r| r[o].clone()),
        ));
    }
    Ok(out)
}

/// Runs a user's own op, given as a rule in text and a function of one rank's parts; see [`rule`]
/// for the notation.
///
/// ```
/// # use anymesh_core::{Mesh, Tensor, spmd};
/// # let device = anymesh_backend_cpu::device();
/// let mesh = Mesh::new("x=2", &device)?;
/// let a = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0], [2, 2], &device)?.to_mesh(&mesh, "[_, @x]")?;
/// // Sums of rows: ranks that hold different columns give partial sums.
/// let rows = spmd::apply("rows", "mk -> m ; reduce k sum ; linear 0", &[&a], |x| Ok(vec![x[0].sum(&[1], false)?]))?;
/// assert_eq!(rows[0].type_string(), "f32[2]{sum:x}");
/// assert_eq!(rows[0].to_vec::<f32>()?, [3.0, 7.0]);
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[track_caller]
pub fn apply(
    op: &'static str,
    rule: &str,
    inputs: &[&Tensor],
    local: impl Fn(&[Tensor]) -> Result<Vec<Tensor>>,
) -> Result<Vec<Tensor>> {
    if inputs.is_empty() {
        return Err(Error::Argument {
            op,
            detail: "a rule needs at least one operand".into(),
        });
    }
    if inputs.len() > MAX_OPERANDS {
        return Err(Error::Argument {
            op,
            detail: format!("{} operands: at most {MAX_OPERANDS}", inputs.len()),
        });
    }
    if plain(op, inputs)? {
        return local(&inputs.iter().map(|t| (*t).clone()).collect::<Vec<_>>());
    }
    let shapes: SmallVec<[rule::Given<'_>; 4]> = inputs.iter().map(|t| (*t).into()).collect();
    // Two ops may share a name but not a rule.
    let text = hash(rule);
    let out = Call {
        op,
        inputs,
        attrs: &[text as i64],
    }
    .run(
        || Rule::new(rule, &shapes, &[]),
        |l| Ok(local(l.inputs)?.into_iter().collect()),
    )?;
    Ok(out.into_vec())
}

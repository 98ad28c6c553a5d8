//! One program on many ranks: how an op runs when its operands lie on a mesh.
//!
//! For plain tensors the local step of an op is the op. On a mesh an op makes a [`Call`], from its
//! entry in the [table of ops](info) and its operands: the [solver](solve) picks how each mesh axis
//! is used, operands are resharded (the [policy] may forbid it, the [`Ledger`] sees it), the local
//! step runs on what each addressable rank holds, and the results carry the shardings that follow
//! from the rule.

pub(crate) mod assemble;
pub(crate) mod built;
mod cache;
mod call;
pub mod info;
mod notation;
pub mod plan;
pub mod policy;
pub mod rule;
pub mod solve;
mod together;
pub(crate) mod trace;

pub use crate::fingerprint::{Decided, Fingerprint};
pub use crate::forms::{Held, with_held};
#[cfg(not(target_family = "wasm"))]
pub use crate::gathered::{GatheredEntry, GatheredLedger};
pub use crate::grad::on_parts;
pub use crate::ledger::{Entry, Ledger};
pub(crate) use crate::tensor::plain;
pub(crate) use call::{Call, Local};
pub use info::{OpInfo, RuleForm};
pub use plan::{OnDifference, PlanOptions, PlannedStep, StepPlan, plan, with_plan};
pub use policy::{Keep, Policy, with_kept, with_policy};
pub use rule::Rule;
pub use solve::{Choice, Solution};
pub(crate) use together::shared_operand;
pub use trace::{Decision, Source, trace};

use crate::{Error, Result, Tensor, observe};

/// The most operands of a rule, which has a bit for each.
const MAX_OPERANDS: usize = 31;

/// A tensor with nothing partial, so that what several steps of a decomposition read is combined
/// once.
pub(crate) fn without_partials(x: Tensor) -> Result<Tensor> {
    if x.sharding().is_partial() {
        x.reshard(x.sharding().whole())
    } else {
        Ok(x)
    }
}

/// What brings a partial gradient and the value it belongs to together: the dimensions `r` are read
/// as rows, by statistics that would cross where they are cut.
const SETTLE: OpInfo = OpInfo::new("settle", RuleForm::Text("...r, ...r -> ...r ; stats r 2"));

/// A gradient with nothing partial, for steps that read it several times beside `x`, row by row
/// along `rows`: what is partial is added up straight into a cut that these steps take.
#[track_caller]
pub(crate) fn settled(op: &'static str, g: &Tensor, x: &Tensor, rows: &[usize]) -> Result<Tensor> {
    if !g.sharding().is_partial() {
        return Ok(g.clone());
    }
    let call = Call::of(&SETTLE, &[g, x])
        .on_behalf_of(op)
        .bind('r', rows)
        .bring()?;
    call.into_iter()
        .next()
        .map_or_else(|| Ok(g.clone()), without_partials)
}

/// How many parts a dimension is cut into.
pub(crate) fn parts_of(x: &Tensor, dim: usize) -> usize {
    x.sharding()
        .axes_of(dim)
        .map(|axis| x.mesh().size(axis))
        .product()
}

/// What the parts of a dimension of `x` that is cut each gave, gathered along it: `each` elements
/// from every part, one tensor for each rank that is held.
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
        return Err(Error::argument(
            op,
            "inputs",
            "a rule needs at least one operand",
        ));
    }
    if inputs.len() > MAX_OPERANDS {
        return Err(Error::argument(
            op,
            "inputs",
            format!("{} operands: at most {MAX_OPERANDS}", inputs.len()),
        )
        .of(inputs.iter().copied()));
    }
    observe::op(op, inputs, || {
        if plain(op, inputs)? {
            return local(&inputs.iter().map(|t| (*t).clone()).collect::<Vec<_>>());
        }
        let out =
            Call::of_text(op, rule, inputs).run(|l| Ok(local(l.inputs)?.into_iter().collect()))?;
        Ok(out.into_vec())
    })
}

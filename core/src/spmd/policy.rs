//! Whether ops may communicate by themselves.

use super::{Call, Choice, cache::Solved, call::AtHand, rule::FactorKind, solve};
use crate::{Alternative, Error, Mesh, Placement, Result, Sharding, Tensor, scoped::Scoped};
use std::{cell::RefCell, panic::Location};

/// What an op does when its operands do not lie as it needs them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Policy {
    /// It reshards them, and the ledger sees it.
    #[default]
    Auto,
    /// It fails with the list of choices. Slicing what a rank already has is allowed; so is
    /// `reshard`, which says it in the program. Ops see the operands as they are given, and not
    /// what others had brought of them.
    Explicit,
}

/// What the gradient of an op keeps of the operands that were brought for it, beside how they lie.
///
/// A tensor that an op had gathered is wanted gathered again by the gradient of the op. Keeping it
/// costs memory from the forward to the backward pass; gathering it again costs what it cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Keep {
    /// Activations are kept as the op used them. Parameters (leaves, and what was put on the mesh
    /// and at most converted since) are kept as they lie, and brought again.
    #[default]
    Activations,
    /// Parameters too.
    Everything,
    /// What was gathered is gathered again: less memory, more traffic. Partial sums that were
    /// added up stay so, because that takes less of both.
    Nothing,
}

/// Settings in force, innermost last, with the axes they are for (none means all).
pub(crate) type PerAxis<T> = Vec<(T, Vec<String>)>;

/// What ops may do by themselves, and what their gradients keep.
#[derive(Clone, Default)]
pub(crate) struct Policies {
    policies: PerAxis<Policy>,
    kept: PerAxis<Keep>,
}

thread_local! {
    static POLICIES: RefCell<Policies> = RefCell::default();
}

/// The setting for a mesh axis.
fn of<T: Copy + Default>(settings: &PerAxis<T>, axis: &str) -> T {
    let holds = |axes: &[String]| axes.is_empty() || axes.iter().any(|a| a == axis);
    let found = settings.iter().rev().find(|(_, axes)| holds(axes));
    found.map_or(T::default(), |(setting, _)| *setting)
}

/// Runs `f` under a policy, for some mesh axes or (with an empty list) for all. Inner policies
/// override outer ones. It holds on this thread until `f` returns or panics; other threads take it
/// along with a [`Context`](crate::Context).
///
/// ```
/// # use anymesh_core::{Error, Mesh, Tensor, spmd::{Policy, with_policy}};
/// # let device = anymesh_backend_cpu::device();
/// let mesh = Mesh::new("tp=2", &device)?;
/// let x = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0], [2, 2], &device)?.to_mesh(&mesh, "[@tp, _]")?;
/// with_policy(Policy::Explicit, &[], || {
///     assert!(x.exp().is_ok(), "nothing moves");
///     assert!(matches!(x.cumsum(0), Err(Error::ImplicitCommunication { .. })));
/// });
/// # Ok::<(), anymesh_core::Error>(())
/// ```
pub fn with_policy<T>(policy: Policy, axes: &[&str], f: impl FnOnce() -> T) -> T {
    let mut settings = capture();
    settings.policies.push((policy, names(axes)));
    let _scope = enter(settings);
    f()
}

/// Runs `f` with another choice of what gradients keep of what was brought for their ops, for some
/// mesh axes or (with an empty list) for all. It holds for what is recorded in `f`, like
/// [`with_policy`].
///
/// ```
/// # use anymesh_core::{DType, Mesh, Tensor, meta, spmd::{Keep, Ledger, with_kept}};
/// let mesh = Mesh::new("tp=2", &meta())?;
/// let x = Tensor::zeros([4, 8], DType::F32, (&mesh, "[@tp, _]"))?;
/// let w = Tensor::zeros([64, 8], DType::F32, (&mesh, "[@tp, _]"))?.require_grad()?;
/// let step = || {
///     let loss = x.add(&x)?.linear(&w, None)?.sum(&[], false)?;
///     loss.backward()
/// };
/// let bytes = || Ledger::record(step).1.bytes();
/// let kept = bytes();
/// assert_eq!(with_kept(Keep::Nothing, &["tp"], bytes), kept + 64, "x + x is gathered again");
/// # Ok::<(), anymesh_core::Error>(())
/// ```
pub fn with_kept<T>(keep: Keep, axes: &[&str], f: impl FnOnce() -> T) -> T {
    let mut settings = capture();
    settings.kept.push((keep, names(axes)));
    let _scope = enter(settings);
    f()
}

fn names(axes: &[&str]) -> Vec<String> {
    axes.iter().map(|a| a.to_string()).collect()
}

/// Whether a gradient keeps a value in the sharding that its op used, or as it lies.
pub(crate) fn keeps(mesh: &Mesh, lies: &Sharding, used: &Sharding, is_parameter: bool) -> bool {
    POLICIES.with_borrow(|settings| {
        (0..mesh.axes().len()).all(|axis| {
            let (before, after) = (lies.placement(axis), used.placement(axis));
            before == after
                || match of(&settings.kept, &mesh.axes()[axis].0) {
                    Keep::Activations => !is_parameter,
                    Keep::Everything => true,
                    Keep::Nothing => !is_parameter && !matches!(before, Placement::Shard(_)),
                }
        })
    })
}

/// The policies of this thread.
pub(crate) fn capture() -> Policies {
    POLICIES.with_borrow(Clone::clone)
}

/// Until it is dropped, other policies.
pub(crate) fn enter(policies: Policies) -> Scoped<Policies> {
    Scoped::set(&POLICIES, policies)
}

/// Whether some axis has an explicit policy.
pub(crate) fn is_explicit() -> bool {
    POLICIES.with_borrow(|settings| {
        settings
            .policies
            .iter()
            .any(|(p, _)| *p == Policy::Explicit)
    })
}

/// Refuses a solution that communicates along an axis whose policy is explicit.
pub(crate) fn check(
    call: &Call<'_>,
    solved: &Solved,
    held: &AtHand,
    caller: &'static Location<'static>,
) -> Result<()> {
    let policies = POLICIES.with_borrow(|settings| settings.policies.clone());
    if policies.is_empty() {
        return Ok(());
    }
    let mesh = call.inputs[0].mesh();
    let statistics = |axis: usize| match solved.solution.choices[axis] {
        Choice::Cut(f) => matches!(
            solved.rule.factors[f].kind,
            FactorKind::Stats(_) | FactorKind::Borders
        ),
        _ => false,
    };
    let moves = |axis: usize| {
        (0..call.inputs.len()).any(|i| {
            let from = (solved.solution).source(i, call.inputs[i].sharding(), &held[i]);
            changes(from, &solved.solution.inputs[i], axis)
        }) || statistics(axis)
    };
    if (0..mesh.axes().len())
        .any(|axis| of(&policies, &mesh.axes()[axis].0) == Policy::Explicit && moves(axis))
    {
        return Err(Error::ImplicitCommunication {
            op: call.op,
            caller: caller.to_string(),
            choices: choices(call, solved, held, mesh)?,
        });
    }
    Ok(())
}

/// Whether a reshard sends something along an axis.
fn changes(from: &Sharding, to: &Sharding, axis: usize) -> bool {
    let before = from.placement(axis);
    before != Placement::Replicate && before != to.placement(axis)
}

/// The cheapest few assignments, as the reshards a program could write.
fn choices(
    call: &Call<'_>,
    solved: &Solved,
    held: &AtHand,
    mesh: &Mesh,
) -> Result<Box<[Alternative]>> {
    let operands: Vec<_> = call
        .inputs
        .iter()
        .zip(held)
        .map(|(t, held)| solve::Operand::of(t, held))
        .collect();
    let mut choices = vec![];
    for solution in solve::alternatives(mesh, &solved.rule, &operands)?
        .iter()
        .take(4)
    {
        let reshards: Vec<String> = (call.inputs.iter().zip(&solution.inputs).enumerate())
            .filter(|(_, (x, to))| x.sharding() != *to)
            .map(|(i, (x, to))| {
                format!(
                    "reshard operand {i} from {} to {}",
                    x.type_string(),
                    ty(x, to)
                )
            })
            .collect();
        let inside = if solved.rule.recipes.is_empty() {
            "exchange statistics inside the op"
        } else {
            "exchange borders inside the op"
        };
        let what = if reshards.is_empty() {
            inside.to_string()
        } else {
            reshards.join(", ")
        };
        choices.push(Alternative {
            description: what,
            bytes: solution.bytes,
        });
    }
    Ok(choices.into())
}

fn ty(x: &Tensor, sharding: &Sharding) -> String {
    sharding.type_string(x.dtype(), x.shape(), x.mesh())
}

//! Whether ops may communicate by themselves.

use super::{Call, cache::Solved, solve};
use crate::{Alternative, Error, Mesh, Placement, Result, Sharding, Tensor, scoped::Scoped};
use std::{cell::RefCell, panic::Location};

/// What an op does when its operands do not lie as it needs them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Policy {
    /// It reshards them, and the ledger sees it.
    #[default]
    Auto,
    /// It fails with the list of choices. Slicing what a rank already has is allowed; so is
    /// `reshard`, which says it in the program.
    Explicit,
}

/// Policies in force, innermost last, with the axes they are for (none means all).
pub(crate) type Policies = Vec<(Policy, Vec<String>)>;

thread_local! {
    static POLICIES: RefCell<Policies> = const { RefCell::new(Vec::new()) };
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
    let mut policies = capture();
    policies.push((policy, axes.iter().map(|a| a.to_string()).collect()));
    let _scope = enter(policies);
    f()
}

/// The policies of this thread.
pub(crate) fn capture() -> Policies {
    POLICIES.with_borrow(Vec::clone)
}

/// Until it is dropped, other policies.
pub(crate) fn enter(policies: Policies) -> Scoped<Policies> {
    Scoped::set(&POLICIES, policies)
}

/// The policy for a mesh axis.
fn policy_of(axis: &str) -> Policy {
    POLICIES.with_borrow(|p| {
        p.iter()
            .rev()
            .find(|(_, axes)| axes.is_empty() || axes.iter().any(|a| a == axis))
            .map_or(Policy::Auto, |(policy, _)| *policy)
    })
}

/// Refuses a solution that communicates along an axis whose policy is explicit.
pub(crate) fn check(
    call: &Call<'_>,
    solved: &Solved,
    caller: &'static Location<'static>,
) -> Result<()> {
    if POLICIES.with_borrow(|p| p.is_empty()) {
        return Ok(());
    }
    let mesh = call.inputs[0].mesh();
    let statistics = |axis: usize| {
        solved.solution.decompose && matches!(solved.solution.choices[axis], super::Choice::Cut(_))
    };
    let moves = |axis: usize| {
        call.inputs
            .iter()
            .zip(&solved.solution.inputs)
            .any(|(x, to)| changes(x.sharding(), to, axis))
            || statistics(axis)
    };
    if (0..mesh.axes().len())
        .any(|axis| policy_of(&mesh.axes()[axis].0) == Policy::Explicit && moves(axis))
    {
        return Err(Error::ImplicitCommunication {
            op: call.op,
            caller: caller.to_string(),
            choices: choices(call, solved, mesh)?,
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
fn choices(call: &Call<'_>, solved: &Solved, mesh: &Mesh) -> Result<Box<[Alternative]>> {
    let operands: Vec<_> = call
        .inputs
        .iter()
        .map(|t| solve::Operand {
            shape: t.shape(),
            dtype: t.dtype(),
            sharding: t.sharding(),
            held: &[],
        })
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
        let what = if reshards.is_empty() {
            "exchange statistics inside the op".to_string()
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

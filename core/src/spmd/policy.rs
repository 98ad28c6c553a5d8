//! Whether ops may communicate by themselves.

use super::{Call, cache::Solved, solve};
use crate::{Error, Mesh, Placement, Result, Sharding, Tensor};
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

thread_local! {
    /// Policies in force, innermost last, with the axes they are for (none means all).
    static POLICIES: RefCell<Vec<(Policy, Vec<String>)>> = const { RefCell::new(Vec::new()) };
}

/// Runs `f` under a policy, for some mesh axes or (with an empty list) for all. Inner policies
/// override outer ones.
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
    struct Pop;
    impl Drop for Pop {
        fn drop(&mut self) {
            POLICIES.with_borrow_mut(|p| {
                p.pop();
            });
        }
    }
    POLICIES.with_borrow_mut(|p| p.push((policy, axes.iter().map(|a| a.to_string()).collect())));
    let _pop = Pop;
    f()
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
fn choices(call: &Call<'_>, solved: &Solved, mesh: &Mesh) -> Result<String> {
    let operands: Vec<_> = call
        .inputs
        .iter()
        .map(|t| solve::Operand {
            shape: t.shape(),
            dtype: t.dtype(),
            sharding: t.sharding(),
        })
        .collect();
    let mut lines = vec![];
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
        lines.push(format!("  {what}: {} bytes a rank", solution.bytes));
    }
    lines.push("  or allow it with `with_policy(Policy::Auto, ..)`".into());
    Ok(lines.join("\n"))
}

fn ty(x: &Tensor, sharding: &Sharding) -> String {
    sharding.type_string(x.dtype(), x.shape(), x.mesh())
}

//! How a tensor gets where it is wanted.

use super::{Objective, ValidPlan, across, execute::run, known};
use crate::{
    Mesh, Result, Sharding, Tensor,
    fingerprint::{self, Digest},
    ledger,
    overlap::Moving,
    watch::watcher,
};
use std::rc::Rc;

/// A tensor on another mesh, or in another sharding of its own.
#[track_caller]
pub(crate) fn to_mesh(x: &Tensor, mesh: &Mesh, sharding: &Sharding) -> Result<Tensor> {
    let _unseen = crate::observe::unseen();
    let _scope = ledger::enter("reshard", std::panic::Location::caller());
    if x.mesh() != mesh {
        return across::transfer(x, mesh, sharding);
    }
    let (source, plan) = match Way::find(x, sharding)? {
        Way::There(form) => return Ok(form),
        Way::By(source, plan) => (source, plan),
    };
    let brought = run(&source, &plan)?;
    Ok(if plan.recv_bytes > 0 {
        x.add_form(brought, false)
    } else {
        brought
    })
}

/// The same beside the program, where the tensor goes to another mesh.
#[track_caller]
pub(crate) fn start_to_mesh(x: &Tensor, mesh: &Mesh, sharding: &Sharding) -> Result<Moving> {
    if x.mesh() == mesh {
        return Ok(Moving::there(to_mesh(x, mesh, sharding)?));
    }
    let _unseen = crate::observe::unseen();
    let _scope = ledger::enter("reshard", std::panic::Location::caller());
    across::start(x, mesh, sharding)
}

/// How a tensor gets into a sharding of its mesh.
pub(super) enum Way {
    /// It is at hand.
    There(Tensor),
    /// A plan takes it there from one of its forms.
    By(Tensor, Rc<ValidPlan>),
}

impl Way {
    /// The best one, which is then taken: it is part of the fingerprint, and whoever watches knows.
    pub(super) fn find(x: &Tensor, sharding: &Sharding) -> Result<Way> {
        let mesh = x.mesh();
        if x.sharding() == sharding {
            return Ok(Way::There(x.clone()));
        }
        let planned = match watcher() {
            Some(watcher) => watcher.planned_reshard(x, sharding)?,
            None => None,
        };
        if planned.is_none()
            && let Some(form) = x.in_form(sharding)?
        {
            return Ok(Way::There(form));
        }
        let plan =
            |from: &Sharding| known(mesh, x.shape(), x.dtype(), from, sharding, Objective::Time);
        let first = planned.clone().unwrap_or_else(|| x.clone());
        let (mut source, mut best) = (first.clone(), plan(first.sharding())?);
        let others = x.forms().filter(|_| planned.is_none());
        let others = others.map(|forms| forms.others(x.sharding()));
        for other in others.iter().flatten() {
            let other_plan = plan(other)?;
            if other_plan.seconds < best.seconds
                && let Some(form) = x.in_form(other)?
            {
                (source, best) = (form, other_plan);
            }
        }
        if best.recv_bytes > 0 {
            let decision = Digest::default().sharding(source.sharding());
            fingerprint::fold("reshard", ledger::caller(), decision.sharding(sharding).0);
            if let Some(watcher) = watcher().filter(|_| planned.is_none()) {
                watcher.reshard(x, source.sharding(), sharding, mesh)?;
            }
        }
        Ok(Way::By(source, best))
    }
}

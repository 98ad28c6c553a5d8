//! Plans: a list of steps from one sharding to another, with what each costs.

use super::received;
use crate::{DType, Error, Mesh, Result, Shape, Sharding};
use smallvec::SmallVec;

/// What a step does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Ranks keep a part of what they have, or fill in the identity of a reduction: nothing is sent.
    Slice,
    /// Ranks along some axes join what they have.
    AllGather,
    /// An axis leaves one dimension and cuts another.
    AllToAll,
    /// Partial values are combined and cut.
    ReduceScatter,
    /// Partial values are combined.
    AllReduce,
    /// Ranks swap whole parts.
    Permute,
    /// Every rank gets exactly the boxes it lacks.
    Exchange,
}

impl Kind {
    /// The name in plans and ledgers.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Slice => "slice",
            Kind::AllGather => "all-gather",
            Kind::AllToAll => "all-to-all",
            Kind::ReduceScatter => "reduce-scatter",
            Kind::AllReduce => "all-reduce",
            Kind::Permute => "permute",
            Kind::Exchange => "exchange",
        }
    }
}

/// One step of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// What it does.
    pub kind: Kind,
    /// The mesh axes it moves data along.
    pub axes: SmallVec<[usize; 3]>,
    /// The sharding before.
    pub from: Sharding,
    /// The sharding after.
    pub to: Sharding,
    /// Bytes that the worst rank receives.
    pub recv_bytes: u64,
}

/// What to make small.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Objective {
    /// Bytes received by the worst rank, as if latency were free.
    Bytes,
    /// Seconds under the mesh's cost model.
    #[default]
    Time,
}

/// How to get from one sharding to another.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// In order; none where nothing is to do.
    pub steps: Vec<Step>,
    /// Bytes that the worst rank receives.
    pub recv_bytes: u64,
}

/// The best plan from `from` to `to` for a tensor of this shape.
pub fn plan(mesh: &Mesh, shape: &Shape, dtype: DType, from: &Sharding, to: &Sharding, _objective: Objective) -> Result<Plan> {
    from.check(mesh, shape.rank())?;
    to.check(mesh, shape.rank())?;
    let mut steps = vec![];
    let mut at = from.clone();
    for (axis, reduction) in from.partial() {
        if let Some((_, other)) = to.partial().find(|(a, _)| *a == axis) {
            if other != reduction {
                return Err(Error::Sharding { detail: format!("a partial {reduction} cannot become a partial {other}: reshard to a whole tensor first") });
            }
            continue;
        }
        let next = at.without(axis);
        let k = mesh.size(axis) as u64;
        let local = at.region(mesh, 0, shape).numel() as u64 * dtype.size() as u64;
        steps.push(Step { kind: Kind::AllReduce, axes: [axis].into_iter().collect(), from: at, to: next.clone(), recv_bytes: 2 * (k - 1) * local / k });
        at = next;
    }
    if at != *to {
        let bytes = received(mesh, shape, &at, to) * dtype.size() as u64;
        let kind = if bytes == 0 { Kind::Slice } else { Kind::Exchange };
        steps.push(Step { kind, axes: SmallVec::new(), from: at, to: to.clone(), recv_bytes: bytes });
    }
    let recv_bytes = steps.iter().map(|s| s.recv_bytes).sum();
    Ok(Plan { steps, recv_bytes })
}

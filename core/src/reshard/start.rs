//! Plans whose communication is started and finished later, alone or several as one.

use super::{
    Collective, Step,
    boxes::lost,
    execute::{Group, Ranks, only_dim, reduction_of, run, run_steps},
    way::Way,
};
use crate::{
    DType, Mesh, Reduction, Result, Shape, Sharding, Tensor,
    ledger::{self, Begun},
    transport::{Call, Part},
};
use smallvec::SmallVec;

/// A tensor that is to get into another sharding of its mesh.
pub(crate) enum Begin {
    /// It is there.
    There(Tensor),
    /// What is left to do is one collective in each group of ranks.
    Ready(Ready),
}

/// What every group of ranks does.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    AllReduce(Reduction),
    AllGather { dim: usize },
    ReduceScatter { reduction: Reduction, dim: usize },
}

/// The last step of a plan, the only one that sends something.
pub(crate) struct Ready {
    x: Tensor,
    step: Step,
    kind: Kind,
    groups: Vec<Group>,
    /// Where ledgers have it.
    pub(crate) begun: Begun,
}

impl Begin {
    /// Takes a tensor as far as it gets without sending something. Where the transport does nothing
    /// beside the program, or not as a collective of its own, it is taken there at once.
    #[track_caller]
    pub(crate) fn to(x: &Tensor, sharding: &Sharding) -> Result<Begin> {
        let _unseen = crate::observe::unseen();
        let _scope = ledger::enter("reshard", std::panic::Location::caller());
        let (source, plan) = match Way::find(x, sharding)? {
            Way::There(form) => return Ok(Begin::There(form)),
            Way::By(source, plan) => (source, plan),
        };
        let mesh = x.mesh();
        let beside = mesh.has_values() && mesh.transport().is_some_and(|t| t.overlaps());
        if let Some((last, before)) = plan.steps.split_last()
            && beside
            && last.recv_bytes > 0
            && before.iter().all(|step| step.recv_bytes == 0)
            && let Some(ready) = Ready::of(run_steps(&source, before)?, last)
        {
            return Ok(Begin::Ready(ready));
        }
        let brought = run(&source, &plan)?;
        Ok(Begin::There(match plan.recv_bytes {
            0 => brought,
            _ => x.add_form(brought, false),
        }))
    }
}

impl Ready {
    fn of(x: Tensor, step: &Step) -> Option<Self> {
        let ranks = Ranks::of(&x);
        let groups: Vec<Group> = ranks.groups(&x, step).collect();
        let kind = match step.kind {
            Collective::AllGather => Kind::AllGather {
                dim: only_dim(&step.from, &step.axes)?,
            },
            Collective::AllReduce | Collective::ReduceScatter => {
                let reduction = reduction_of(step);
                match only_dim(&step.to, &step.axes) {
                    None => Kind::AllReduce(reduction),
                    Some(dim) => {
                        let mut all = groups.iter();
                        if !all.all(|(group, _)| ranks.splits(&x, step, group, dim)) {
                            return None;
                        }
                        Kind::ReduceScatter { reduction, dim }
                    }
                }
            }
            _ => return None,
        };
        let ty = |s: &Sharding| s.type_string(x.dtype(), x.shape(), x.mesh());
        let sent = ledger::Sent {
            kind: step.kind.name(),
            mesh: x.mesh(),
            axes: &step.axes,
            bytes: step.recv_bytes,
            seconds: step.seconds,
        };
        let begun = ledger::begin(sent, || (ty(&step.from), ty(&step.to)));
        Some(Self {
            step: step.clone(),
            kind,
            groups,
            begun,
            x,
        })
    }

    pub(crate) fn mesh(&self) -> &Mesh {
        self.x.mesh()
    }

    /// Bytes that the worst rank receives.
    pub(crate) fn recv_bytes(&self) -> u64 {
        self.step.recv_bytes
    }

    /// Bytes that the worst rank holds until it is sent.
    pub(crate) fn held_bytes(&self) -> u64 {
        let part = (self.x.sharding()).largest_part(self.x.mesh(), self.x.shape());
        part * self.x.dtype().size() as u64
    }

    /// Whether it is a reduction of which several can go as one: what they send and how they are
    /// added up is then the same, element by element. Every process answers the same.
    pub(crate) fn is_packable(&self) -> bool {
        let (mesh, to) = (self.x.mesh(), &self.step.to);
        let even = |d: usize| {
            let parts: usize = to.axes_of(d).map(|a| mesh.size(a)).product();
            self.x.dims()[d].is_multiple_of(parts)
        };
        // Copies only share where all ranks are here.
        !mesh.is_local()
            && match self.kind {
                Kind::AllGather { .. } => false,
                Kind::AllReduce(_) => true,
                Kind::ReduceScatter { .. } => (0..self.x.rank()).all(even),
            }
    }

    /// Whether two can go as one.
    pub(crate) fn goes_with(&self, other: &Self) -> bool {
        let kind = |ready: &Self| match ready.kind {
            Kind::ReduceScatter { reduction, .. } => (true, reduction),
            Kind::AllReduce(reduction) => (false, reduction),
            Kind::AllGather { .. } => (false, Reduction::Sum),
        };
        self.x.mesh() == other.x.mesh()
            && self.x.dtype() == other.x.dtype()
            && self.step.axes == other.step.axes
            && kind(self) == kind(other)
    }

    /// How it will lie when it is there.
    fn lands(&self) -> Landing {
        let (mesh, shape, to) = (self.x.mesh(), self.x.shape(), &self.step.to);
        let parts = mesh.addressable();
        Landing {
            mesh: mesh.clone(),
            dtype: self.x.dtype(),
            parts: parts
                .map(|rank| Shape::from(to.region(mesh, rank, shape).shape))
                .collect(),
            shape: shape.clone(),
            sharding: to.clone(),
        }
    }
}

/// A tensor of which the parts are still to come.
struct Landing {
    mesh: Mesh,
    sharding: Sharding,
    dtype: DType,
    shape: Shape,
    /// What each addressable rank will hold.
    parts: Vec<Shape>,
}

/// One or several, as calls.
pub(crate) struct Packed {
    mesh: Mesh,
    groups: Vec<Group>,
    landings: Vec<Landing>,
}

impl Packed {
    /// The calls to start, in this order, and what makes tensors of their answers. What is sent is
    /// held by the calls alone. All must [go together](Ready::goes_with).
    pub(crate) fn calls(readies: Vec<Ready>) -> Result<(Self, Vec<Call>)> {
        let _unseen = crate::observe::unseen();
        let Some(first) = readies.first() else {
            return Err(lost());
        };
        let packed = Self {
            mesh: first.mesh().clone(),
            groups: first.groups.clone(),
            landings: readies.iter().map(Ready::lands).collect(),
        };
        let mut calls = vec![];
        for (group, twins) in &packed.groups {
            if twins.is_none() {
                calls.push(call(&readies, group)?);
            }
        }
        Ok((packed, calls))
    }

    /// The tensors, from the answers to the calls.
    pub(crate) fn land(self, answers: Vec<Vec<Option<Tensor>>>) -> Result<Vec<Tensor>> {
        let _unseen = crate::observe::unseen();
        let mut out: Vec<Option<Tensor>> = vec![None; self.mesh.addressable().len()];
        let mut answers = answers.into_iter();
        for (group, twins) in &self.groups {
            let answer = match twins {
                Some(twins) => twins.iter().map(|rank| out[*rank].clone()).collect(),
                None => answers.next().ok_or_else(lost)?,
            };
            for (rank, part) in group.iter().zip(answer) {
                if let Some(at) = self.mesh.position_of(*rank) {
                    out[at] = part;
                }
            }
        }
        let parts = out.into_iter().collect::<Option<Vec<_>>>();
        let parts = parts.ok_or_else(lost)?;
        let several = self.landings.len() > 1;
        let mut at: SmallVec<[usize; 8]> = smallvec::smallvec![0; parts.len()];
        let mut tensors = vec![];
        for landing in self.landings {
            let mut mine = vec![];
            for (i, (part, shape)) in parts.iter().zip(&landing.parts).enumerate() {
                mine.push(match several {
                    true => part.narrow(0, at[i], shape.numel())?.reshape(shape)?,
                    false => part.clone(),
                });
                at[i] += shape.numel();
            }
            let (mesh, sharding) = (&landing.mesh, landing.sharding);
            let made = Tensor::from_parts(mesh, sharding, landing.dtype, landing.shape, mine);
            tensors.push(made.computed());
        }
        Ok(tensors)
    }
}

/// What a group of ranks does for all of them.
fn call(readies: &[Ready], group: &[usize]) -> Result<Call> {
    let parts = |ready: &Ready| -> Vec<Part> {
        let ranks = Ranks::of(&ready.x);
        group.iter().map(|r| ranks.part(&ready.x, *r)).collect()
    };
    let parts = match readies {
        [only] => parts(only),
        several => {
            let all: Vec<Vec<Part>> = several.iter().map(parts).collect();
            let pack = |member| packed(several, &all, member, group.len());
            (0..group.len()).map(pack).collect::<Result<_>>()?
        }
    };
    Ok(match (readies[0].kind, readies.len()) {
        (Kind::AllReduce(reduction), _) => Call::AllReduce { parts, reduction },
        (Kind::AllGather { dim }, _) => Call::AllGather { parts, dim },
        (Kind::ReduceScatter { reduction, dim }, n) => Call::ReduceScatter {
            parts,
            reduction,
            dim: if n == 1 { dim } else { 0 },
        },
    })
}

/// What a member of a group of `n` gives, in a row: first what the first member is to keep of each,
/// then what the second is.
fn packed(readies: &[Ready], parts: &[Vec<Part>], member: usize, n: usize) -> Result<Part> {
    let mut rows = vec![];
    for (ready, parts) in readies.iter().zip(parts) {
        let part = &parts[member];
        let Some(data) = &part.data else {
            continue;
        };
        let dims = part.shape.dims();
        rows.push(match ready.kind {
            Kind::ReduceScatter { dim, .. } => {
                let before: usize = dims[..dim].iter().product();
                let after: usize = dims[dim + 1..].iter().product();
                data.reshape([before, n, dims[dim] / n, after])?
                    .permute(&[1, 0, 2, 3])?
                    .reshape([n, part.shape.numel() / n])?
            }
            _ => data.reshape([1, part.shape.numel()])?,
        });
    }
    let (rank, dtype) = (parts[0][member].rank, parts[0][member].dtype);
    let len: usize = parts.iter().map(|p| p[member].shape.numel()).sum();
    if rows.is_empty() {
        return Ok(Part::elsewhere(rank, dtype, [len]));
    }
    let whole = Tensor::concat(&rows.iter().collect::<Vec<_>>(), 1)?;
    Ok(Part::new(rank, &whole.reshape([len])?))
}

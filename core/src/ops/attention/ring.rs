//! Ranks in a ring: what each has goes to the next one, while it computes with what it has.

use crate::{
    DType, Error, Mesh, Result, Shape, Sharding, Tensor,
    ledger::{self, Begun, Clock},
    transport::{Call, Message, Part, Pending, told},
};
use smallvec::SmallVec;

/// What a rank has of several tensors.
pub(super) type Block = SmallVec<[Tensor; 3]>;

/// How a tensor lies that goes around: it tells how large the part of every rank is.
pub(super) struct Lies {
    dtype: DType,
    shape: Shape,
    sharding: Sharding,
}

impl Lies {
    /// As a tensor does, with elements of this dtype.
    pub(super) fn like(x: &Tensor, dtype: DType) -> Self {
        Self {
            dtype,
            shape: x.shape().clone(),
            sharding: x.sharding().whole(),
        }
    }

    /// The shape of a rank's own part.
    fn part(&self, mesh: &Mesh, rank: usize) -> Shape {
        self.sharding.region(mesh, rank, &self.shape).shape.into()
    }
}

/// The ranks that have different parts of a dimension.
pub(super) struct Ring<'a> {
    op: &'static str,
    mesh: &'a Mesh,
    axes: SmallVec<[usize; 2]>,
    pub(super) parts: usize,
}

impl<'a> Ring<'a> {
    /// Those over which a dimension of a tensor is cut, in the order of its parts.
    pub(super) fn of(op: &'static str, x: &'a Tensor, dim: usize) -> Self {
        let axes: SmallVec<[usize; 2]> = x.sharding().axes_of(dim).collect();
        let mesh = x.mesh();
        Self {
            op,
            parts: axes.iter().map(|axis| mesh.size(*axis)).product(),
            axes,
            mesh,
        }
    }

    /// The part that a rank has by itself.
    pub(super) fn own(&self, rank: usize) -> usize {
        self.mesh.part(rank, self.axes.iter().copied()).0
    }

    /// The part that a rank has after so many turns.
    pub(super) fn from(&self, rank: usize, turns: usize) -> usize {
        (self.own(rank) + self.parts - turns % self.parts) % self.parts
    }

    fn with(&self, rank: usize, part: usize) -> usize {
        self.mesh.with_part(rank, &self.axes, part % self.parts)
    }

    /// The shape of what a rank has after so many turns.
    fn shape(&self, lies: &Lies, rank: usize, turns: usize) -> Shape {
        lies.part(self.mesh, self.with(rank, self.from(rank, turns)))
    }

    /// Begins to send what every rank has after `turns` turns to the next one. `blocks` are those of
    /// the ranks that are held.
    pub(super) fn turn(&self, lies: &[Lies], turns: usize, blocks: &[Block]) -> Result<Turning> {
        let mesh = self.mesh;
        let size = |l: &Lies| l.sharding.largest_part(mesh, &l.shape) * l.dtype.size() as u64;
        let bytes = lies.iter().map(size).sum();
        let sent = ledger::Sent::along("exchange", mesh, &self.axes, 1, bytes);
        let begun = ledger::begin(sent, || {
            let text = lies.first().map_or_else(String::new, |l| {
                l.sharding.type_string(l.dtype, &l.shape, mesh)
            });
            (text.clone(), text)
        });
        if !mesh.has_values() {
            let mut come = vec![];
            for (i, rank) in mesh.held() {
                let block = lies.iter().map(|l| {
                    let shape = self.shape(l, rank, turns + 1);
                    Tensor::placeholder(l.dtype, &shape, mesh.local_mesh(i))
                });
                come.push(block.collect::<Result<Block>>()?);
            }
            return Ok(Turning {
                op: self.op,
                begun,
                come: Come::There(come),
            });
        }
        let (mut messages, mut slots) = (vec![], vec![]);
        for rank in 0..mesh.ranks() {
            let to = self.with(rank, self.own(rank) + 1);
            let (from, there) = (mesh.position_of(rank), mesh.position_of(to));
            if from.is_none() && there.is_none() {
                continue;
            }
            for (n, l) in lies.iter().enumerate() {
                let part = Part {
                    rank,
                    dtype: l.dtype,
                    shape: self.shape(l, rank, turns),
                    data: from.map(|i| blocks[i][n].clone()),
                };
                messages.push(Message { part, to });
                slots.push(there.map(|i| (i, n)));
            }
        }
        let transport = mesh.transport().ok_or_else(|| lost(self.op))?;
        let pending = told(
            mesh,
            None,
            transport.start(mesh, Call::Exchange { messages }),
        )?;
        Ok(Turning {
            op: self.op,
            begun,
            come: Come::Pending {
                mesh: mesh.clone(),
                pending,
                slots,
                tensors: lies.len(),
            },
        })
    }
}

fn lost(op: &'static str) -> Error {
    Error::Transport {
        op,
        detail: "the transport did not deliver what was sent to a rank of this process".into(),
        ranks: vec![],
    }
}

enum Come {
    There(Vec<Block>),
    Pending {
        mesh: Mesh,
        pending: Box<dyn Pending>,
        /// For each message the rank here and the tensor that it is for.
        slots: Vec<Option<(usize, usize)>>,
        tensors: usize,
    },
}

/// What is on its way to the next ranks.
pub(super) struct Turning {
    op: &'static str,
    begun: Begun,
    come: Come,
}

impl Turning {
    /// What the ranks that are held have got.
    pub(super) fn wait(self) -> Result<Vec<Block>> {
        let (op, begun) = (self.op, self.begun);
        let (mesh, pending, slots, tensors) = match self.come {
            Come::There(blocks) => return Ok(blocks),
            Come::Pending {
                mesh,
                pending,
                slots,
                tensors,
            } => (mesh, pending, slots, tensors),
        };
        let clock = Clock::start();
        let arrived = told(&mesh, None, pending.wait())?;
        begun.add(arrived.ran, clock.elapsed());
        let mut blocks = vec![vec![None; tensors]; mesh.addressable().len()];
        for (slot, data) in slots.into_iter().zip(arrived.answer) {
            if let Some((i, n)) = slot {
                blocks[i][n] = data;
            }
        }
        let block = |parts: Vec<Option<Tensor>>| parts.into_iter().collect::<Option<Block>>();
        let blocks: Option<Vec<Block>> = blocks.into_iter().map(block).collect();
        blocks.ok_or_else(|| lost(op))
    }
}

//! Rows on their way between the ranks of an axis.

use super::{OP, Routes};
use crate::{
    Error, Result, Shape, Tensor, ledger,
    transport::{Message, Part},
};

/// Rows on their way there or back.
pub(super) struct Way<'a> {
    pub(super) routes: &'a Routes,
    /// How many rows the result has.
    pub(super) rows: usize,
    pub(super) returns: bool,
}

impl Way<'_> {
    /// How many rows one rank gives to another.
    fn count(&self, from: usize, to: usize) -> usize {
        match self.returns {
            true => self.routes.count(to, from),
            false => self.routes.count(from, to),
        }
    }

    /// The rows that `give` has of each held rank at the other ends; `take` makes a rank's part of
    /// the result of the pieces that it got, in the order of the ranks they came from. Nothing means
    /// zeros.
    pub(super) fn run(
        &self,
        x: &Tensor,
        give: impl Fn(usize) -> Result<Tensor>,
        take: impl Fn(usize, usize, Vec<Tensor>) -> Result<Option<Tensor>>,
    ) -> Result<Tensor> {
        let (routes, mesh) = (self.routes, x.mesh());
        let (dtype, shape) = (x.dtype(), x.shape().with(0, self.rows));
        let sharding = x.sharding();
        let local = |rank: usize| Shape::from(sharding.region(mesh, rank, &shape).shape);
        // What a rank's rows are, without their number.
        let row = |rank: usize| local(rank).dims()[1..].iter().product::<usize>();
        let lacked = |rank: usize| {
            let others = routes.group(rank).filter(|from| *from != rank);
            others.map(|from| self.count(from, rank)).sum::<usize>() * row(rank)
        };
        let worst = (0..mesh.ranks()).map(lacked).max().unwrap_or(0);
        let bytes = (worst * dtype.size()) as u64;
        let axes = [routes.axis];
        let sent = ledger::Sent::along("exchange", mesh, &axes, 1, bytes);
        let types = || (x.type_string(), sharding.type_string(dtype, &shape, mesh));
        ledger::write(sent, types, || {
            let parts = if mesh.has_values() {
                let given = (0..mesh.addressable().len()).map(give);
                let given = given.collect::<Result<Vec<_>>>()?;
                let mut got = self.exchange(x, &given, &local)?.into_iter();
                let mut parts = vec![];
                for (i, rank) in mesh.addressable().enumerate() {
                    let made = take(rank, i, got.next().unwrap_or_default())?;
                    parts.push(match made {
                        Some(part) => part,
                        None => Tensor::zeros(local(rank), dtype, mesh.device(i))?,
                    });
                }
                parts
            } else {
                let part = |(i, rank)| Tensor::placeholder(dtype, &local(rank), mesh.local_mesh(i));
                mesh.held().map(part).collect::<Result<_>>()?
            };
            Ok(Tensor::from_parts(
                mesh,
                sharding.clone(),
                dtype,
                shape.clone(),
                parts,
            ))
        })
    }

    /// For each addressable rank the pieces that it gets, by the ranks they come from.
    fn exchange(
        &self,
        x: &Tensor,
        given: &[Tensor],
        local: &dyn Fn(usize) -> Shape,
    ) -> Result<Vec<Vec<Tensor>>> {
        let (routes, mesh) = (self.routes, x.mesh());
        let mut pieces: Vec<Vec<Option<Tensor>>> = vec![vec![]; given.len()];
        let (mut messages, mut slots) = (vec![], vec![]);
        for to in 0..mesh.ranks() {
            let receiver = mesh.position_of(to);
            for from in routes.group(to) {
                let (count, sender) = (self.count(from, to), mesh.position_of(from));
                if count == 0 || (sender, receiver) == (None, None) {
                    continue;
                }
                let before = routes.group(from).take_while(|other| *other != to);
                let start = before.map(|other| self.count(from, other)).sum();
                let data = sender
                    .map(|i| given[i].narrow(0, start, count))
                    .transpose()?;
                if let (true, Some(i)) = (from == to, receiver) {
                    pieces[i].push(data);
                    continue;
                }
                if let Some(i) = receiver {
                    slots.push(Some((i, pieces[i].len())));
                    pieces[i].push(None);
                } else {
                    slots.push(None);
                }
                messages.push(Message {
                    part: Part {
                        rank: from,
                        dtype: x.dtype(),
                        shape: local(to).with(0, count),
                        data,
                    },
                    to,
                });
            }
        }
        let lost = || Error::Transport {
            op: OP,
            detail: "the transport did not deliver what was sent to a rank of this process".into(),
            ranks: vec![],
        };
        if let Some(transport) = mesh.transport().filter(|_| !messages.is_empty()) {
            let delivered = transport.exchange(mesh, messages)?;
            for (slot, data) in slots.into_iter().zip(delivered) {
                if let Some((i, piece)) = slot {
                    pieces[i][piece] = data;
                }
            }
        }
        let whole = |pieces: Vec<Option<Tensor>>| pieces.into_iter().collect::<Option<Vec<_>>>();
        let all = pieces.into_iter().map(whole).collect::<Option<Vec<_>>>();
        all.ok_or_else(lost)
    }
}

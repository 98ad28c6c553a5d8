//! A dimension that is taken apart into groups of elements, or put together of them, where ranks
//! have different numbers of groups: 9 heads on 4 ranks. Parts of the dimension are then not parts
//! of the groups, and ranks exchange what lies between the bounds of the one and the other.

use super::boxes::{Inbox, lost, window};
use crate::{
    Dims, Mesh, Region, Result, Shape, Sharding, Tensor,
    fingerprint::{self, Digest},
    ledger, split,
};
use smallvec::SmallVec;
use std::ops::Range;

/// A dimension of `count * each` elements, cut over mesh axes: by elements or by groups of `each`.
/// There are at least as many groups as parts, so that a rank lacks less than a group on either
/// side, which its neighbours have.
pub(crate) struct Groups {
    /// Where the dimension is in the flat tensor, and where the groups are in the other.
    pub(crate) dim: usize,
    /// How many groups there are.
    pub(crate) count: usize,
    /// The dimensions of a group: all behind the first of those that it is taken apart into.
    pub(crate) inner: Dims,
    /// Whether the tensor that is given is the flat one.
    pub(crate) apart: bool,
}

impl Groups {
    fn each(&self) -> usize {
        self.inner.iter().product()
    }

    /// Elements of the dimension that part `part` of `parts` has, cut by elements or by groups.
    fn bounds(&self, part: usize, parts: usize, by_groups: bool) -> Range<usize> {
        let each = self.each();
        if by_groups {
            let groups = split(self.count, part, parts);
            groups.start * each..groups.end * each
        } else {
            split(self.count * each, part, parts)
        }
    }

    /// The sharding of the result: the same axes, whose dimensions have moved.
    fn sharding(&self, from: &Sharding) -> Sharding {
        let more = self.inner.len();
        let to = |d: usize| match d <= self.dim {
            true => d,
            false if self.apart => d + more,
            false => d - more,
        };
        let cut = from
            .cuts()
            .fold(Sharding::replicated(), |s, (d, axis)| s.cut(to(d), axis));
        from.partial()
            .fold(cut, |s, (axis, r)| s.partial_over(axis, r))
    }

    /// A tensor of this shape, whose dimension is taken apart or put together.
    #[track_caller]
    pub(crate) fn regroup(&self, x: &Tensor, shape: &Shape) -> Result<Tensor> {
        let (mesh, dtype) = (x.mesh(), x.dtype());
        let sharding = self.sharding(x.sharding());
        let (flat, flat_sharding) = match self.apart {
            true => (x.shape(), x.sharding()),
            false => (shape, &sharding),
        };
        // Where a rank's part lies in the flat tensor before and after.
        let region = |rank: usize, by_groups: bool| {
            let mut region = flat_sharding.region(mesh, rank, flat);
            let (part, parts) = mesh.part(rank, flat_sharding.axes_of(self.dim));
            let bounds = self.bounds(part, parts, by_groups);
            (region.start[self.dim], region.shape[self.dim]) = (bounds.start, bounds.len());
            region
        };
        let axes: SmallVec<[usize; 3]> = flat_sharding.axes_of(self.dim).collect();
        let bytes = self.lacked(mesh, flat, flat_sharding) * dtype.size() as u64;
        let sent = ledger::Sent::along("exchange", mesh, &axes, 1, bytes);
        let decision = Digest::default().sharding(x.sharding());
        let caller = ledger::caller();
        fingerprint::fold("reshape", caller, decision.sharding(&sharding).0);
        let types = || (x.type_string(), sharding.type_string(dtype, shape, mesh));
        let result = ledger::write(sent, types, || {
            let parts: Vec<Tensor> = if mesh.has_values() {
                let wanted = self.exchange(x, &axes, &region)?;
                let whole =
                    |(rank, t): (usize, Tensor)| t.reshape(self.local(&region(rank, self.apart)));
                mesh.addressable()
                    .zip(wanted)
                    .map(whole)
                    .collect::<Result<_>>()?
            } else {
                let part = |(i, rank)| {
                    let shape = self.local(&region(rank, self.apart));
                    Tensor::placeholder(dtype, &shape, mesh.local_mesh(i))
                };
                mesh.held().map(part).collect::<Result<_>>()?
            };
            Ok(Tensor::from_parts(
                mesh,
                sharding.clone(),
                dtype,
                shape.clone(),
                parts,
            ))
        })?;
        Ok(if x.is_computed() {
            result.computed()
        } else {
            result
        })
    }

    /// The shape of a rank's part of the result.
    fn local(&self, region: &Region) -> Shape {
        let mut dims: Dims = region.shape.iter().copied().collect();
        if self.apart {
            dims[self.dim] /= self.each().max(1);
            dims.insert_many(self.dim + 1, self.inner.iter().copied());
        }
        dims.into()
    }

    /// Elements that the worst rank lacks.
    fn lacked(&self, mesh: &Mesh, flat: &Shape, sharding: &Sharding) -> u64 {
        let parts: usize = sharding.axes_of(self.dim).map(|a| mesh.size(a)).product();
        let lacks = |part| {
            let (want, held) = (
                self.bounds(part, parts, self.apart),
                self.bounds(part, parts, !self.apart),
            );
            let both = want
                .end
                .min(held.end)
                .saturating_sub(want.start.max(held.start));
            (want.len() - both) as u64
        };
        let worst = (0..parts).map(lacks).max().unwrap_or(0);
        let along = sharding.largest_part(mesh, flat);
        let own = flat[self.dim].div_ceil(parts).max(1) as u64;
        worst * (along / own)
    }

    /// What each addressable rank wants of the flat tensor.
    fn exchange(
        &self,
        x: &Tensor,
        axes: &[usize],
        region: &dyn Fn(usize, bool) -> Region,
    ) -> Result<Vec<Tensor>> {
        let (mesh, mut inbox) = (x.mesh(), Inbox::new(x.dtype()));
        let mut out: Vec<Option<Tensor>> = vec![None; mesh.addressable().len()];
        let mut opened = vec![];
        // What a rank has, flat.
        let flat = |i: usize, held: &Region| x.part(i).reshape(Shape::from(held.shape.clone()));
        for rank in 0..mesh.ranks() {
            let (want, here) = (region(rank, self.apart), mesh.position_of(rank));
            if want.numel() == 0 {
                if let Some(i) = here {
                    let shape = Shape::from(want.shape);
                    out[i] = Some(Tensor::nothing(x.dtype(), shape, mesh.device(i)));
                }
                continue;
            }
            let number = here.map(|i| {
                let number = inbox.open();
                opened.push((i, number));
                number
            });
            let (part, parts) = mesh.part(rank, axes.iter().copied());
            for near in part.saturating_sub(1)..(part + 2).min(parts) {
                let source = mesh.with_part(rank, axes, near);
                let held = region(source, !self.apart);
                let Some(common) = held.intersect(&want).filter(|r| r.numel() > 0) else {
                    continue;
                };
                let at = mesh.position_of(source);
                let data = at
                    .map(|i| window(&flat(i, &held)?, &held, &common))
                    .transpose()?;
                match (number, data) {
                    (Some(number), Some(data)) if source == rank => {
                        inbox.have(number, common, data)
                    }
                    (None, None) => {}
                    (number, data) => inbox.ask(number, common, source, rank, data),
                }
            }
        }
        let transport = mesh.transport().ok_or_else(lost)?;
        let mut parts: Vec<Option<Tensor>> = (inbox.deliver(mesh, &**transport)?.into_iter())
            .map(Some)
            .collect();
        for (i, number) in opened {
            out[i] = parts[number].take();
        }
        out.into_iter().collect::<Option<_>>().ok_or_else(lost)
    }
}

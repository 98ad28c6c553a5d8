//! The passes of attention over a sequence that is cut over ranks: turn by turn, rank by rank.

use super::{
    Attention,
    blocks::{Keys, Queries, added},
    heads::KeyHeads,
    long::{Brought, Long},
    order::{Looks, SequenceOrder},
    ring::{Block, Lies, Ring, Turning},
};
use crate::{
    DType, Reduction, Result, Shape, Sharding, Tensor, grad::Pulled, ops::expr::compute_type,
    tensor::Outputs, transport::told,
};
use smallvec::{SmallVec, smallvec};

/// A rank that is held: its slot, and which it is.
type Held = (usize, usize);

/// What the looks of a rank add to the gradients of its queries, of keys and of values.
type Found = [Option<Tensor>; 3];

impl Long {
    /// What the rank in slot `i` looks with.
    fn queries(&self, b: &Brought, (i, rank): Held) -> Queries {
        let mesh = b.q.mesh();
        let own = b.q.sharding().range(mesh, rank, 1, self.sizes.heads);
        let keys = b.k.sharding().range(mesh, rank, 1, self.sizes.key_heads);
        let group = self.sizes.group();
        let read = keys.start * group..keys.end * group;
        Queries {
            op: self.info.name,
            q: b.q.held(i),
            documents: b.documents.as_ref().map(|[own, _]| own.held(i)),
            scale: self.sizes.scale,
            heads: KeyHeads {
                all: keys.len(),
                group,
                queries: (own != read).then(|| {
                    let from = |head: usize| head.saturating_sub(read.start);
                    from(own.start)..from(own.end)
                }),
            },
        }
    }

    /// The keys that the rank in slot `i` has by itself: those of its part, or all, in straight
    /// order.
    fn keys(&self, b: &Brought, i: usize) -> Result<Keys> {
        let order = match self.rotates() {
            true => SequenceOrder::Straight,
            false => self.order,
        };
        let documents = b.documents.as_ref().map(|[_, keys]| keys.held(i));
        Ok(Keys {
            k: b.k.held(i).from_order(2, order)?,
            v: b.v.held(i).from_order(2, order)?,
            documents: documents.map(|d| d.from_order(1, order)).transpose()?,
        })
    }

    /// What a rank looks at after so many turns of the ring.
    fn looks(&self, ring: &Ring<'_>, b: &Brought, at: (usize, usize), keys: &Keys) -> Looks {
        let (rank, turns) = at;
        let places = b.q.sharding().range(b.q.mesh(), rank, 2, self.sizes.s);
        if !self.rotates() {
            return self.order.looks_at_all(self.causal, places, self.sizes.s);
        }
        let parts = (ring.own(rank), ring.from(rank, turns));
        let sizes = (places.len(), keys.k.dims()[2]);
        let mut looks = self.order.looks_at_part(self.causal, parts, sizes);
        // What is empty is only looked at where there must be a result.
        looks.retain(|look| turns == 0 || !look.queries.is_empty() && !look.keys.is_empty());
        looks
    }

    /// The keys that came to each rank.
    fn next_keys(&self, blocks: Vec<Block>) -> Result<Vec<Keys>> {
        let keys = |block: Block| {
            let mut tensors = block.into_iter();
            let (k, v, documents) = (tensors.next()?, tensors.next()?, tensors.next());
            Some(Keys { k, v, documents })
        };
        let all: Option<Vec<Keys>> = blocks.into_iter().map(keys).collect();
        all.ok_or_else(|| self.unbrought())
    }

    /// How often keys are looked at, each time others.
    fn turns(&self, ring: &Ring<'_>) -> usize {
        match self.rotates() {
            true => ring.parts,
            false => 1,
        }
    }

    pub(super) fn forward(&self, b: &Brought) -> Result<Outputs> {
        let (mesh, wide) = (b.q.mesh(), compute_type([&b.q]));
        let ring = Ring::of(self.info.name, &b.q, 2);
        let held: Vec<Held> = mesh.held().collect();
        let lies = lies(b);
        let own = held.iter().map(|(i, _)| self.keys(b, *i));
        let mut keys = own.collect::<Result<Vec<_>>>()?;
        let mut seen: Vec<Option<Attention>> = vec![None; held.len()];
        for turn in 0..self.turns(&ring) {
            let turning = match turn + 1 < self.turns(&ring) {
                true => Some(ring.turn(&lies, turn, &blocks(&keys))?),
                false => None,
            };
            for (n, (i, rank)) in held.iter().enumerate() {
                let looks = self.looks(&ring, b, (*rank, turn), &keys[n]);
                let queries = self.queries(b, (*i, *rank));
                let found = look(&queries, &keys[n], &looks, seen[n].take(), wide);
                seen[n] = told(mesh, Some(*rank), found)?;
            }
            if let Some(turning) = turning {
                keys = self.next_keys(turning.wait()?)?;
            }
        }
        let all = seen.into_iter().collect::<Option<Vec<Attention>>>();
        let all = all.ok_or_else(|| self.unbrought())?;
        let narrow = |a: &Attention| a.out.cast(b.q.dtype());
        let outs = all.iter().map(narrow).collect::<Result<Vec<_>>>()?;
        let sizes = &self.sizes;
        let shape = Shape::from([sizes.batch, sizes.heads, sizes.s, sizes.dv]);
        let rows = Shape::from([sizes.batch, sizes.heads, sizes.s]);
        let lses = all.into_iter().map(|a| a.lse);
        let sharding = b.q.sharding();
        let tensor = |dtype, shape, parts: Vec<Tensor>| {
            Tensor::from_parts(mesh, sharding.clone(), dtype, shape, parts).computed()
        };
        Ok(smallvec![
            tensor(b.q.dtype(), shape, outs),
            tensor(wide, rows, lses.collect())
        ])
    }

    pub(super) fn backward(
        &self,
        b: &Brought,
        forward: &Attention,
        grad: &Tensor,
    ) -> Result<Pulled> {
        let (mesh, wide) = (b.q.mesh(), compute_type([&b.q]));
        let grad = grad
            .cast(b.q.dtype())?
            .reshard(forward.out.sharding().clone())?;
        let ring = Ring::of(self.info.name, &b.q, 2);
        let held: Vec<Held> = mesh.held().collect();
        let (lies, back) = (lies(b), [Lies::like(&b.k, wide), Lies::like(&b.v, wide)]);
        let own = held.iter().map(|(i, _)| self.keys(b, *i));
        let mut keys = own.collect::<Result<Vec<_>>>()?;
        let mut of_queries: Vec<Option<Tensor>> = vec![None; held.len()];
        // What a rank's own queries add stays; what others add goes around and comes home at last.
        let mut home: Vec<Block> = vec![];
        let mut coming: Option<Turning> = None;
        let turns = self.turns(&ring);
        for turn in 0..turns {
            let turning = match turn + 1 < turns {
                true => Some(ring.turn(&lies, turn, &blocks(&keys))?),
                false => None,
            };
            let mut found: Vec<[Option<Tensor>; 2]> = vec![];
            for (n, (i, rank)) in held.iter().enumerate() {
                let looks = self.looks(&ring, b, (*rank, turn), &keys[n]);
                let (seen, grad) = (part_of(forward, *i), grad.held(*i));
                let queries = self.queries(b, (*i, *rank));
                let before = of_queries[n].take();
                let outcome = look_back(&queries, &keys[n], &looks, (&seen, &grad), before);
                let [dq, dk, dv] = told(mesh, Some(*rank), outcome)?;
                of_queries[n] = dq;
                found.push([dk, dv]);
            }
            // Added in the order in which ranks looked, whoever was late.
            let before: Option<Vec<Block>> = coming.take().map(Turning::wait).transpose()?;
            let mut sums = vec![];
            for (n, new) in found.into_iter().enumerate() {
                let old = before.as_ref().map(|blocks| &blocks[n]);
                sums.push(sum(old, new, &keys[n], wide)?);
            }
            match turn {
                0 => home = sums,
                _ => coming = Some(ring.turn(&back, turn, &sums)?),
            }
            if let Some(turning) = turning {
                keys = self.next_keys(turning.wait()?)?;
            }
        }
        if let Some(last) = coming {
            for (own, others) in home.iter_mut().zip(last.wait()?) {
                let both = own.iter().zip(&others).map(|(a, b)| a.add(b));
                *own = both.collect::<Result<_>>()?;
            }
        }
        self.gradients(b, of_queries, home)
    }

    /// The gradients as tensors on the mesh.
    fn gradients(
        &self,
        b: &Brought,
        of_queries: Vec<Option<Tensor>>,
        of_keys: Vec<Block>,
    ) -> Result<Pulled> {
        let mesh = b.q.mesh();
        let dq = of_queries.into_iter().collect::<Option<Vec<Tensor>>>();
        let dq = dq.ok_or_else(|| self.unbrought())?;
        let make = |like: &Tensor, sharding: Sharding, parts: Vec<Tensor>| -> Result<Tensor> {
            let parts = parts.iter().map(|p| p.cast(like.dtype()));
            let parts = parts.collect::<Result<Vec<_>>>()?;
            let shape = like.shape().clone();
            Ok(Tensor::from_parts(mesh, sharding, like.dtype(), shape, parts).computed())
        };
        let order = match self.rotates() {
            true => SequenceOrder::Straight,
            false => self.order,
        };
        // Ranks with other queries and the same keys each have a term of their gradient.
        let with_terms = |x: &Tensor| {
            let shared = |axis: &usize| !x.sharding().cuts().any(|(_, a)| a == *axis);
            let queries = b.q.sharding().cuts().filter(|(dim, _)| *dim != 0);
            let axes = queries.map(|(_, axis)| axis).filter(shared);
            axes.fold(x.sharding().clone(), |s, axis| {
                s.partial_over(axis, Reduction::Sum)
            })
        };
        let of = |n: usize, like: &Tensor| -> Result<Tensor> {
            let parts = of_keys.iter().map(|block| block[n].in_order(2, order));
            let parts = parts.collect::<Result<Vec<_>>>()?;
            make(like, with_terms(like), parts)
        };
        Ok(smallvec![
            Some(make(&b.q, b.q.sharding().clone(), dq)?),
            Some(of(0, &b.k)?),
            Some(of(1, &b.v)?),
            None
        ])
    }
}

/// What goes around: keys, values, and their documents where there are any.
fn lies(b: &Brought) -> SmallVec<[Lies; 3]> {
    let documents = b.documents.as_ref().map(|[_, keys]| keys);
    let all = [&b.k, &b.v].into_iter().chain(documents);
    all.map(|x| Lies::like(x, x.dtype())).collect()
}

fn blocks(keys: &[Keys]) -> Vec<Block> {
    let block = |keys: &Keys| {
        let all = [&keys.k, &keys.v].into_iter().chain(&keys.documents);
        all.cloned().collect()
    };
    keys.iter().map(block).collect()
}

/// The gradients of a block so far, with what a rank adds to them; zeros where nobody has looked.
fn sum(old: Option<&Block>, new: [Option<Tensor>; 2], keys: &Keys, wide: DType) -> Result<Block> {
    let like = [&keys.k, &keys.v];
    let mut sums = Block::new();
    for (n, new) in new.into_iter().enumerate() {
        sums.push(match (old.map(|old| &old[n]), new) {
            (Some(old), Some(new)) => old.add(&new)?,
            (Some(old), None) => old.clone(),
            (None, Some(new)) => new,
            (None, None) => Tensor::zeros(like[n].shape().clone(), wide, like[n].device())?,
        });
    }
    Ok(sums)
}

/// What a rank has seen so far, with some looks more.
fn look(
    queries: &Queries,
    keys: &Keys,
    looks: &Looks,
    seen: Option<Attention>,
    wide: DType,
) -> Result<Option<Attention>> {
    let mut seen = seen;
    let mut tiles = vec![];
    for look in looks {
        let found = queries.look(keys, look)?;
        let new = Attention {
            out: found.out.cast(wide)?,
            lse: found.lse,
        };
        match seen.take() {
            Some(before) => seen = Some(queries.merged(before, new, look)?),
            None => tiles.push(new),
        }
    }
    // The looks of a first time are at all keys, each with queries of its own.
    Ok(match (seen, &tiles[..]) {
        (Some(seen), _) => Some(seen),
        (None, []) => None,
        (None, [one]) => Some(one.clone()),
        (None, several) => {
            let outs: Vec<&Tensor> = several.iter().map(|a| &a.out).collect();
            let lses: Vec<&Tensor> = several.iter().map(|a| &a.lse).collect();
            Some(Attention {
                out: Tensor::concat(&outs, 2)?,
                lse: Tensor::concat(&lses, 2)?,
            })
        }
    })
}

/// What looks add to the gradients: to that of queries so far, and those of the keys they look at.
fn look_back(
    queries: &Queries,
    keys: &Keys,
    looks: &Looks,
    (seen, grad): (&Attention, &Tensor),
    before: Option<Tensor>,
) -> Result<Found> {
    let (s, t) = (queries.q.dims()[2], keys.k.dims()[2]);
    let (mut dq, mut dk, mut dv) = (before, None, None);
    for look in looks {
        let [q, k, v] = queries.look_back(keys, look, seen, grad)?;
        dq = Some(added(dq, q, &look.queries, s)?);
        dk = Some(added(dk, k, &look.keys, t)?);
        dv = Some(added(dv, v, &look.keys, t)?);
    }
    Ok([dq, dk, dv])
}

/// What a rank that is held has seen.
fn part_of(all: &Attention, i: usize) -> Attention {
    Attention {
        out: all.out.held(i),
        lse: all.lse.held(i),
    }
}

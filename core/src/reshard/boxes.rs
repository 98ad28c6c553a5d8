//! Parts of tensors put together from boxes that lie here and there.

use super::grid::{At, bits};
use crate::{
    DType, Error, Mesh, Region, Result, Shape, Sharding, Tensor, split,
    transport::{Call, Message, Part, Pending, Transport},
};
use smallvec::SmallVec;
use std::ops::Range;

/// A box of a part, and what is in it once that has arrived.
type Piece = (Region, Option<Tensor>);

/// What ranks of this process wait for, and what is sent for it. Every process fills it in the same
/// order.
pub(super) struct Inbox {
    dtype: DType,
    messages: Vec<Message>,
    /// For each message the part and the piece that it is for, where the receiver is here.
    slots: Vec<Option<(usize, usize)>>,
    /// Pieces of each part that is put together here; they tile it.
    parts: Vec<SmallVec<[Piece; 4]>>,
}

impl Inbox {
    pub(super) fn new(dtype: DType) -> Self {
        Self {
            dtype,
            messages: vec![],
            slots: vec![],
            parts: vec![],
        }
    }

    /// Opens a part; the number is for [`have`](Inbox::have) and [`ask`](Inbox::ask).
    pub(super) fn open(&mut self) -> usize {
        self.parts.push(SmallVec::new());
        self.parts.len() - 1
    }

    /// Whether nobody here waits for anything or sends anything.
    pub(super) fn is_empty(&self) -> bool {
        self.parts.is_empty() && self.messages.is_empty()
    }

    /// A piece that is here already.
    pub(super) fn have(&mut self, part: usize, region: Region, piece: Tensor) {
        self.parts[part].push((region, Some(piece)));
    }

    /// A piece that rank `from` sends to rank `to`: `data` is there if the sender is here, `part`
    /// if the receiver is.
    pub(super) fn ask(
        &mut self,
        part: Option<usize>,
        region: Region,
        from: usize,
        to: usize,
        data: Option<Tensor>,
    ) {
        let shape = Shape::from(region.shape.clone());
        self.messages.push(Message {
            part: Part {
                rank: from,
                dtype: self.dtype,
                shape,
                data,
            },
            to,
        });
        self.slots.push(part.map(|p| (p, self.parts[p].len())));
        if let Some(part) = part {
            self.parts[part].push((region, None));
        }
    }

    /// Sends what is to be sent, and puts the parts together.
    pub(super) fn deliver(mut self, mesh: &Mesh, transport: &dyn Transport) -> Result<Vec<Tensor>> {
        let delivered = transport.exchange(mesh, std::mem::take(&mut self.messages))?;
        self.join(delivered)
    }

    /// Begins to send what is to be sent; what it brings is for [`join`](Inbox::join).
    pub(super) fn start(
        &mut self,
        mesh: &Mesh,
        transport: &dyn Transport,
    ) -> Result<Box<dyn Pending>> {
        let messages = std::mem::take(&mut self.messages);
        transport.start(mesh, Call::Exchange { messages })
    }

    /// Whether nobody here waits for anything.
    pub(super) fn is_complete(&self) -> bool {
        let mut pieces = self.parts.iter().flatten();
        pieces.all(|(_, data)| data.is_some())
    }

    /// Puts the parts together, with what was delivered for each message.
    pub(super) fn join(mut self, delivered: Vec<Option<Tensor>>) -> Result<Vec<Tensor>> {
        for (slot, data) in self.slots.into_iter().zip(delivered) {
            if let Some((part, piece)) = slot {
                self.parts[part][piece].1 = data;
            }
        }
        self.parts
            .into_iter()
            .map(|pieces| {
                join(
                    pieces
                        .into_iter()
                        .map(|(region, data)| data.map(|d| (region, d)))
                        .collect::<Option<Vec<_>>>()
                        .ok_or_else(lost)?,
                )
            })
            .collect()
    }
}

pub(super) fn lost() -> Error {
    Error::Transport {
        op: "exchange",
        detail: "the transport did not deliver what was sent to a rank of this process".into(),
        ranks: vec![],
    }
}

/// The coordinates of a rank.
pub(super) fn place_of(mesh: &Mesh, rank: usize) -> At {
    std::array::from_fn(|axis| match axis < mesh.axes().len() {
        true => mesh.coordinate(rank, axis),
        false => 0,
    })
}

/// The rank with these coordinates.
pub(super) fn rank_at(mesh: &Mesh, at: &At) -> usize {
    (0..mesh.axes().len()).fold(0, |rank, axis| rank * mesh.size(axis) + at[axis])
}

/// The ranks that differ from `at` along the axes of `vary` and may hold something of `want`.
///
/// The axes of `vary` cut each dimension after the others, so the parts that have something in
/// common with a box lie next to each other, and nobody else is looked at.
pub(super) fn holders(
    mesh: &Mesh,
    from: &Sharding,
    vary: u32,
    mut at: At,
    want: &Region,
    shape: &Shape,
) -> Vec<usize> {
    bits(vary).for_each(|axis| at[axis] = 0);
    let mut ranks = vec![rank_at(mesh, &at)];
    for d in 0..shape.rank() {
        let axes: SmallVec<[usize; 3]> = from.axes_of(d).filter(|a| vary & 1 << a != 0).collect();
        if axes.is_empty() {
            continue;
        }
        let place = |rank: usize, mut part: usize| {
            axes.iter().rev().fold(rank, |rank, a| {
                let at = part % mesh.size(*a);
                part /= mesh.size(*a);
                mesh.moved(rank, *a, at)
            })
        };
        let (first, parts) = from.axes_of(d).fold((0, 1), |(part, parts), a| {
            (part * mesh.size(a) + at[a], parts * mesh.size(a))
        });
        let count: usize = axes.iter().map(|a| mesh.size(*a)).product();
        let near = overlapping(shape[d], parts, first..first + count, want, d);
        ranks = ranks
            .iter()
            .flat_map(|rank| near.clone().map(|part| place(*rank, part - first)))
            .collect();
    }
    ranks
}

/// How many parts that are not empty have something in common with a box.
pub(super) fn boxes_in(mesh: &Mesh, from: &Sharding, want: &Region, shape: &Shape) -> usize {
    let along = |d: usize| {
        let (n, parts) = (shape[d], from.axes_of(d).map(|a| mesh.size(a)).product());
        match n < parts {
            // Every element has a part of its own.
            true => want.shape[d],
            false => overlapping(n, parts, 0..parts, want, d).len(),
        }
    };
    (0..shape.rank()).map(along).product()
}

/// Which of some neighbouring parts of a dimension have something in common with a box; empty ones
/// may be among them.
fn overlapping(
    n: usize,
    parts: usize,
    among: Range<usize>,
    want: &Region,
    d: usize,
) -> Range<usize> {
    let first_that = |holds: &dyn Fn(Range<usize>) -> bool| {
        let (mut low, mut high) = (among.start, among.end);
        while low < high {
            let middle = (low + high) / 2;
            if holds(split(n, middle, parts)) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        low
    };
    let (start, end) = (want.start[d], want.start[d] + want.shape[d]);
    first_that(&|part| part.end > start)..first_that(&|part| part.start >= end)
}

/// The box `region` of a tensor of which `x` is the box `held`.
pub(super) fn window(x: &Tensor, held: &Region, region: &Region) -> Result<Tensor> {
    let start = region
        .start
        .iter()
        .zip(&held.start)
        .map(|(a, b)| a - b)
        .collect();
    x.window(&Region {
        start,
        shape: region.shape.clone(),
    })
}

/// Joins boxes that tile a larger one: along the last dimension first, then the one before.
pub(super) fn join(mut pieces: Vec<(Region, Tensor)>) -> Result<Tensor> {
    let rank = pieces.first().map_or(0, |(r, _)| r.start.len());
    for d in (0..rank).rev() {
        if pieces.len() == 1 {
            break;
        }
        // Pieces that differ only in where they start along `d` become neighbours.
        let key = |r: &Region| -> SmallVec<[usize; 7]> {
            (0..rank)
                .filter(|i| *i != d)
                .chain([d])
                .map(|i| r.start[i])
                .collect()
        };
        pieces.sort_by_cached_key(|(region, _)| key(region));
        let row = |a: &Region, b: &Region| (0..rank).all(|i| i == d || a.start[i] == b.start[i]);
        let rows = pieces.chunk_by(|(a, _), (b, _)| row(a, b)).map(|row| {
            let mut region = row[0].0.clone();
            if let [(_, only)] = row {
                return Ok((region, only.clone()));
            }
            region.shape[d] = row.iter().map(|(r, _)| r.shape[d]).sum();
            let tensors: SmallVec<[&Tensor; 8]> = row.iter().map(|(_, t)| t).collect();
            Ok((region, Tensor::concat(&tensors, d as i64)?))
        });
        pieces = rows.collect::<Result<Vec<_>>>()?;
    }
    pieces.pop().map(|(_, tensor)| tensor).ok_or_else(lost)
}

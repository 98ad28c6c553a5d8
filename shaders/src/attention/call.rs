//! What a call is to the kernels: sizes, buffers and numbers.

use super::{Goal, How, OUTPUTS, Operand, Tile, WIDEST};
use crate::{
    Memory,
    program::{bind, wrap},
    tile::{address, distinct},
};
use anymesh_kernel::{
    DType, Kind, Result, View,
    backend::{AttentionBackwardCall, AttentionCall, AttentionOrder},
};
use cubecl::prelude::*;

/// Sizes of a call.
pub(super) struct Sizes {
    pub(super) batch: usize,
    pub(super) heads: usize,
    pub(super) key_heads: usize,
    pub(super) queries: usize,
    pub(super) keys: usize,
    pub(super) size: usize,
    pub(super) value_size: usize,
}

impl Sizes {
    pub(super) fn new(call: &AttentionCall) -> Self {
        let (q, k, v) = (
            call.q.layout.shape.dims(),
            call.k.layout.shape.dims(),
            call.v.layout.shape.dims(),
        );
        Self {
            batch: q[0],
            heads: q[1],
            key_heads: k[1],
            queries: q[2],
            keys: k[2],
            size: q[3],
            value_size: v[3],
        }
    }

    /// Elements of the buffer that a goal's output is in, and where it is there: offset and strides of
    /// batches, heads and rows.
    pub(super) fn place(&self, goal: Goal, order: AttentionOrder) -> (usize, [usize; 4]) {
        let (rows, lines, features) = self.of(goal);
        let heads = lines / self.batch;
        let (all, first) = match (order, goal) {
            (AttentionOrder::Heads, _) => {
                let head = rows * features;
                return (lines * head, [0, heads * head, head, features]);
            }
            (AttentionOrder::Positions, _) | (_, Goal::Result) => (heads, 0),
            (AttentionOrder::Packed, _) => (
                self.heads + 2 * self.key_heads,
                match goal {
                    Goal::Result | Goal::Query => 0,
                    Goal::Key => self.heads,
                    Goal::Value => self.heads + self.key_heads,
                },
            ),
        };
        let row = all * features;
        (
            self.batch * rows * row,
            [first * features, rows * row, features, row],
        )
    }

    /// Rows, heads in all, and features of what a goal computes.
    pub(super) fn of(&self, goal: Goal) -> (usize, usize, usize) {
        match goal {
            Goal::Result => (self.queries, self.batch * self.heads, self.value_size),
            Goal::Query => (self.queries, self.batch * self.heads, self.size),
            Goal::Key => (self.keys, self.batch * self.key_heads, self.size),
            Goal::Value => (self.keys, self.batch * self.key_heads, self.value_size),
        }
    }
}

/// Whether the kernel is for such operands. With a few queries, plain products keep more of the
/// device busy: they spread the keys over it.
pub(crate) fn fits(call: &AttentionCall) -> bool {
    let sizes = Sizes::new(call);
    call.q.dtype.kind() == Kind::F32 && sizes.value_size <= WIDEST && sizes.queries > 4
}

/// [`fits`] for the gradients.
pub(crate) fn fits_backward(call: &AttentionBackwardCall) -> bool {
    let sizes = Sizes::new(&call.forward);
    call.forward.q.dtype.kind() == Kind::F32 && sizes.size.max(sizes.value_size) <= WIDEST
}

/// A launch laid out: buffers, numbers and what it is specialised on.
pub(super) struct Bound<'a> {
    pub(super) buffers: Vec<&'a Memory>,
    pub(super) numbers: Vec<usize>,
    pub(super) address: AddressType,
    pub(super) count: CubeCount,
    pub(super) how: How,
    /// Elements of the buffer of the output.
    pub(super) elements: usize,
}

impl<'a> Bound<'a> {
    pub(super) fn new(
        call: &'a AttentionCall,
        [grad, out]: [&'a View; 2],
        goal: Goal,
        documents: Option<&'a Memory>,
        dtype: DType,
        (native, room): (bool, usize),
    ) -> Result<Self> {
        let sizes = Sizes::new(call);
        let (rows, lines, features) = sizes.of(goal);
        // Only what the goal reads is bound; the others borrow a place that is never used.
        let views = match goal {
            Goal::Result => [&call.q, &call.k, &call.v, &call.q, &call.q],
            Goal::Value => [&call.q, &call.k, &call.q, grad, &call.q],
            Goal::Query => [&call.q, &call.k, &call.v, grad, out],
            Goal::Key => [&call.q, &call.k, &call.v, grad, &call.q],
        };
        let (mut buffers, places) = distinct(views)?;
        let (elements, place) = sizes.place(goal, call.order);
        let smallest = views
            .iter()
            .map(|v| v.dtype)
            .min_by_key(|d| d.size())
            .unwrap_or(DType::F32);
        let address = address(&buffers, smallest, &[elements]);
        buffers.extend(documents);
        let mut numbers = vec![
            sizes.heads,
            sizes.heads / sizes.key_heads,
            sizes.queries,
            sizes.keys,
            sizes.size,
            sizes.value_size,
            lines,
        ];
        let mut operands = places.into_iter().zip(views).map(|(buffer, view)| {
            let first = numbers.len();
            numbers.push(view.layout.offset);
            numbers.extend(view.layout.strides.iter().map(|&s| wrap(s as i64, address)));
            Operand {
                buffer,
                dtype: view.dtype,
                first,
            }
        });
        let mut next = || {
            operands.next().unwrap_or(Operand {
                buffer: 0,
                dtype,
                first: 0,
            })
        };
        let (q, k, v, grad, out) = (next(), next(), next(), next(), next());
        drop(operands);
        debug_assert_eq!(numbers.len(), OUTPUTS, "outputs follow the operands");
        numbers.extend(place);
        if goal == Goal::Key {
            // Some launches give the gradients for values, too.
            numbers.extend(sizes.place(Goal::Value, call.order).1);
        }
        let whole = features.is_multiple_of(4);
        let stored = if whole { dtype } else { DType::F32 };
        let tile = Tile::new(goal, sizes.size.max(sizes.value_size), room);
        let how = How {
            goal,
            tile,
            both: goal == Goal::Key && tile.held > 0 && sizes.size == sizes.value_size,
            apart: false,
            causal: call.causal,
            documents: documents.map(|_| buffers.len() - 1),
            native,
            q,
            k,
            v,
            grad,
            out,
            groups: features.div_ceil(32),
            stored,
            whole,
        };
        Ok(Self {
            buffers,
            numbers,
            address,
            count: crate::cubes(rows.div_ceil(tile.rows()) * lines, 1),
            how,
            elements,
        })
    }

    pub(super) fn inputs(&self) -> SequenceArg<Box<[u32]>> {
        bind(
            &self
                .buffers
                .iter()
                .map(|m| (m.handle.clone(), m.bytes))
                .collect::<Vec<_>>(),
            4,
        )
    }

    pub(super) fn numbers(&self) -> SequenceArg<usize> {
        self.numbers.iter().copied().collect()
    }
}

//! Rows of heads: where they are read, and where they go.

use crate::{
    element::is_held_as_stored,
    grid::dense,
    matmul::Matrix,
    memory::{Dense, Memory, bytes_of, typed},
    parallel,
    scalar::Float,
};
use anymesh_kernel::{Result, View};

/// Some `[batch, heads, rows, columns]` of which each row is a slice.
pub(super) struct Rows<'a, T> {
    pub(super) data: Dense<'a, T>,
    pub(super) start: usize,
    pub(super) heads: usize,
    /// From one to the next of a batch, a head, a row.
    pub(super) strides: [usize; 3],
    pub(super) columns: usize,
}

impl<'a, T: Float> Rows<'a, T> {
    /// Read where they lie, unless rows are not slices there: heads next to each other in each
    /// position are the rule.
    pub(super) fn new(view: &'a View) -> Result<Self> {
        let dims = view.layout.shape.dims();
        let (heads, rows, columns) = (dims[1], dims[2], dims[3]);
        let strides = &view.layout.strides;
        let in_place = is_held_as_stored(view.dtype)
            && (strides[3] == 1 && columns > 1)
            && strides[..3].iter().all(|s| *s > 0);
        if in_place {
            return Ok(Self {
                data: Dense::Borrowed(typed(bytes_of(&view.buffer)?)),
                start: view.layout.offset,
                heads,
                strides: [0, 1, 2].map(|d| strides[d].unsigned_abs()),
                columns,
            });
        }
        Ok(Self {
            data: dense(view)?,
            start: 0,
            heads,
            strides: [heads * rows * columns, rows * columns, columns],
            columns,
        })
    }

    /// Where a row begins; heads count through all batches.
    pub(super) fn at(&self, head: usize, row: usize) -> usize {
        let [batch, own, down] = self.strides;
        self.start + head / self.heads * batch + head % self.heads * own + row * down
    }

    pub(super) fn row(&self, head: usize, row: usize) -> &[T] {
        let at = self.at(head, row);
        &self.data[at..at + self.columns]
    }

    /// Brings the rows of a head nearer.
    pub(super) fn fetch(&self, head: usize, rows: usize) {
        if let (Some(tiles), Some(data)) = (T::tiles(), self.data.get(self.at(head, 0)..)) {
            tiles.fetch(data, self.strides[2], [rows, self.columns]);
        }
    }

    /// The rows of a head from `first` on.
    pub(super) fn matrix(&self, head: usize, first: usize) -> Matrix<'_, T> {
        Matrix {
            data: &self.data,
            start: self.at(head, first),
            rows: self.strides[2] as isize,
            cols: 1,
        }
    }
}

/// Where rows of heads go: row `i` of head `j` begins at `start + j * head + i * row`.
#[derive(Clone, Copy)]
pub(super) struct Places {
    pub(super) start: usize,
    pub(super) head: usize,
    pub(super) row: usize,
}

impl Places {
    /// Rows of `size` elements of heads that lie one after the other.
    pub(super) fn by_head(rows: usize, size: usize) -> Self {
        Self {
            start: 0,
            head: rows * size,
            row: size,
        }
    }

    /// Rows of `size` elements from head `first` of `heads` on, which are neighbours in every
    /// position.
    pub(super) fn by_position(first: usize, heads: usize, size: usize) -> Self {
        Self {
            start: first * size,
            head: size,
            row: heads * size,
        }
    }

    pub(super) fn at(&self, head: usize, row: usize) -> usize {
        self.start + head * self.head + row * self.row
    }
}

/// What is made for the heads of these operands, `[batch, heads, length, size]` each, as
/// `[batch, length, all their heads, size]`; `row` is the bytes of one head at one position.
pub(super) fn in_positions(parts: &[(Memory, &View)], row: usize) -> Result<Memory> {
    let shape = &parts[0].1.layout.shape;
    let (batch, length) = (shape[0], shape[2]);
    let heads: usize = parts.iter().map(|(_, of)| of.layout.shape[1]).sum();
    let mut out = Memory::new(batch * length * heads * row)?;
    let group = (parallel::CHUNK / (heads * row)).max(1);
    parallel::chunks(out.bytes_mut(), group * heads * row, |start, out| {
        for (i, out) in out.chunks_mut(heads * row).enumerate() {
            let (at, mut rows) = (start / (heads * row) + i, out.chunks_mut(row));
            for (part, of) in parts {
                let heads = of.layout.shape[1];
                for (head, to) in (0..heads).zip(rows.by_ref()) {
                    let from = ((at / length * heads + head) * length + at % length) * row;
                    to.copy_from_slice(&part.bytes()[from..from + row]);
                }
            }
        }
    });
    Ok(out)
}

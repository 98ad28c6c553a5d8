//! Which regions of the sources a region of a destination is made of.

use super::expr::{Derivation, Expr, region};
use crate::element::cast;
use anymesh_core::{DType, Region};
use std::sync::Arc;

/// Bytes that a source needs to note a row.
const ROW: usize = 24;

/// A region of a destination that comes from one region of one source tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The region of the destination.
    pub target: Region,
    /// The source tensor.
    pub source: String,
    /// Its element type.
    pub dtype: DType,
    /// The region of it.
    pub region: Region,
    /// What is done with its elements, in order.
    pub ops: Vec<PieceOp>,
}

/// What is done with the elements of a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PieceOp {
    /// Dimension `d` becomes what was dimension `order[d]`.
    Permute(Vec<usize>),
    /// The region has another shape; its elements stay where they are.
    Reshape(Vec<usize>),
    /// Another element type.
    Cast(DType),
}

impl Piece {
    /// About how many bytes it takes to read it, besides its target.
    pub(super) fn memory(&self) -> usize {
        let mut size = self.dtype.size();
        let mut most = size;
        for op in &self.ops {
            // What comes out stands beside what goes in.
            match op {
                PieceOp::Permute(_) => most = most.max(2 * size),
                PieceOp::Reshape(_) => {}
                PieceOp::Cast(to) => {
                    most = most.max(size + to.size());
                    size = to.size();
                }
            }
        }
        // A source lists the rows it has to gather.
        let rows = self.region.numel() / self.region.shape.last().copied().unwrap_or(1).max(1);
        self.region.numel() * most + rows * ROW
    }

    /// Makes the bytes of the target of those of the source.
    pub(super) fn finish(&self, mut bytes: Vec<u8>) -> Vec<u8> {
        let mut dtype = self.dtype;
        let mut shape = self.region.shape.to_vec();
        for op in &self.ops {
            match op {
                PieceOp::Permute(order) => {
                    bytes = permute(&bytes, &shape, order, dtype.size());
                    shape = order.iter().map(|d| shape[*d]).collect();
                }
                PieceOp::Reshape(to) => shape.clone_from(to),
                PieceOp::Cast(to) => {
                    bytes = cast(&bytes, dtype, *to);
                    dtype = *to;
                }
            }
        }
        bytes
    }
}

/// The pieces of a region of a described tensor, which lies inside it. Together they are the
/// region, and none reads more than it writes.
pub(super) fn pieces(expr: &Expr, wanted: &Region) -> Vec<Piece> {
    if wanted.numel() == 0 {
        return vec![];
    }
    match &expr.derivation {
        Derivation::Source(name) => {
            vec![Piece {
                target: wanted.clone(),
                source: name.clone(),
                dtype: expr.info.dtype,
                region: wanted.clone(),
                ops: vec![],
            }]
        }
        Derivation::Slice { of, start } => {
            let inner = region(
                wanted.start.iter().zip(start).map(|(w, s)| w + s),
                wanted.shape.iter().copied(),
            );
            let mut out = pieces(of, &inner);
            for piece in &mut out {
                piece
                    .target
                    .start
                    .iter_mut()
                    .zip(start)
                    .for_each(|(t, s)| *t -= s);
            }
            out
        }
        Derivation::Concat { parts, axis } => concat_pieces(parts, *axis, wanted),
        Derivation::Permute { of, order } => {
            let mut inner = wanted.clone();
            for (d, from) in order.iter().enumerate() {
                (inner.start[*from], inner.shape[*from]) = (wanted.start[d], wanted.shape[d]);
            }
            let mut out = pieces(of, &inner);
            for piece in &mut out {
                let t = &piece.target;
                piece.target = region(
                    order.iter().map(|d| t.start[*d]),
                    order.iter().map(|d| t.shape[*d]),
                );
                piece.ops.push(PieceOp::Permute(order.clone()));
            }
            out
        }
        Derivation::Reshape(of) => {
            let mut out = Vec::new();
            reshape_pieces(of, &expr.info.shape, wanted, &mut out);
            out
        }
        Derivation::Cast(of) => {
            let mut out = pieces(of, wanted);
            out.iter_mut()
                .for_each(|piece| piece.ops.push(PieceOp::Cast(expr.info.dtype)));
            out
        }
    }
}

fn concat_pieces(parts: &[Arc<Expr>], axis: usize, wanted: &Region) -> Vec<Piece> {
    let mut out = Vec::new();
    let mut first = 0;
    for part in parts {
        let length = part.info.shape[axis];
        let start = wanted.start[axis].max(first);
        let end = (wanted.start[axis] + wanted.shape[axis]).min(first + length);
        if start < end {
            let mut inner = wanted.clone();
            (inner.start[axis], inner.shape[axis]) = (start - first, end - start);
            out.extend(pieces(part, &inner).into_iter().map(|mut piece| {
                piece.target.start[axis] += first;
                piece
            }));
        }
        first += length;
    }
    out
}

/// A region of the new shape is cut into regions that are regions in the old shape too. Where such
/// a region of the old shape comes in several pieces, each of them is taken back to the new shape,
/// in which it need not be one region, and looked at on its own.
fn reshape_pieces(of: &Expr, shape: &[usize], wanted: &Region, out: &mut Vec<Piece>) {
    for (target, inner) in common_regions(shape, &of.info.shape, wanted) {
        let found = pieces(of, &inner);
        if let [piece] = &found[..] {
            let mut piece = piece.clone();
            piece.ops.push(PieceOp::Reshape(target.shape.to_vec()));
            piece.target = target;
            out.push(piece);
            continue;
        }
        for piece in found {
            for (_, part) in common_regions(&of.info.shape, shape, &piece.target) {
                reshape_pieces(of, shape, &part, out);
            }
        }
    }
}

/// Cuts a region of shape `a` into regions that are regions of shape `b` as well, with the elements
/// in the same order. Both shapes have the same elements, at least one.
fn common_regions(a: &[usize], b: &[usize], wanted: &Region) -> Vec<(Region, Region)> {
    let mut out = vec![(region([], []), region([], []))];
    // Dimensions that are only regrouped among themselves are cut on their own; a region is a
    // product of such cuts.
    let (mut i, mut j) = (0, 0);
    while i < a.len() || j < b.len() {
        let (first, second) = (i, j);
        let mut sizes = (1, 1);
        let take = |from: &[usize], at: &mut usize, size: &mut usize| {
            *size *= from.get(*at).copied().unwrap_or(1);
            *at = (*at + 1).min(from.len());
        };
        take(a, &mut i, &mut sizes.0);
        take(b, &mut j, &mut sizes.1);
        while sizes.0 != sizes.1 && (i < a.len() || j < b.len()) {
            if sizes.0 < sizes.1 {
                take(a, &mut i, &mut sizes.0)
            } else {
                take(b, &mut j, &mut sizes.1)
            }
        }
        let within = region(
            wanted.start[first..i].iter().copied(),
            wanted.shape[first..i].iter().copied(),
        );
        let cuts = group_regions(&a[first..i], &b[second..j], &within);
        let join = |x: &Region, y: &Region| {
            region(
                x.start.iter().chain(&y.start).copied(),
                x.shape.iter().chain(&y.shape).copied(),
            )
        };
        out = out
            .iter()
            .flat_map(|(x, y)| cuts.iter().map(move |(u, v)| (join(x, u), join(y, v))))
            .collect();
    }
    out
}

/// The same for dimensions that belong together: runs of consecutive elements, each cut greedily
/// into the longest regions of both shapes.
fn group_regions(a: &[usize], b: &[usize], wanted: &Region) -> Vec<(Region, Region)> {
    let mut out = Vec::new();
    let full = (0..a.len())
        .rev()
        .take_while(|d| wanted.shape[*d] == a[*d])
        .count();
    let run = a.len().saturating_sub(full + 1);
    let length: usize = wanted.shape[run.min(a.len())..].iter().product();
    let mut at: Vec<usize> = wanted.start.to_vec();
    loop {
        let first = at.iter().zip(a).fold(0, |flat, (x, n)| flat * n + x);
        let mut from = first;
        while from < first + length {
            let longest = steps(a, from)
                .flat_map(|x| steps(b, from).map(move |y| (x, y)))
                .map(|((s, cap), (t, other))| {
                    let both = s / gcd(s, t) * t;
                    cap.min(other).min(first + length - from) / both * both
                });
            let longest = longest.max().unwrap_or(1).max(1);
            out.push((region_at(a, from, longest), region_at(b, from, longest)));
            from += longest;
        }
        // The next run, counting up over the dimensions before it.
        let mut d = run;
        loop {
            if d == 0 {
                return out;
            }
            d -= 1;
            at[d] += 1;
            if at[d] < wanted.start[d] + wanted.shape[d] {
                break;
            }
            at[d] = wanted.start[d];
        }
    }
}

/// In which steps a region can grow from a flat position, and how far: along each dimension at
/// whose beginning the position stands.
fn steps(shape: &[usize], at: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut stride = 1;
    let strides = shape.iter().rev().map(move |n| {
        let here = stride;
        stride *= n;
        (here, *n)
    });
    strides
        .filter(move |(stride, _)| at.is_multiple_of(*stride))
        .map(move |(stride, n)| (stride, (n - at / stride % n) * stride))
}

/// The region of consecutive elements, which is known to be one.
fn region_at(shape: &[usize], at: usize, length: usize) -> Region {
    let mut out = region(shape.iter().map(|_| 0), shape.iter().map(|_| 1));
    let (mut rest, mut left) = (at, length);
    for d in (0..shape.len()).rev() {
        out.start[d] = rest % shape[d];
        rest /= shape[d];
        out.shape[d] = left.min(shape[d]);
        left /= out.shape[d];
    }
    out
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// A row-major buffer with its dimensions in another order.
fn permute(bytes: &[u8], shape: &[usize], order: &[usize], size: usize) -> Vec<u8> {
    match size {
        1 => permute_sized::<1>(bytes, shape, order),
        2 => permute_sized::<2>(bytes, shape, order),
        4 => permute_sized::<4>(bytes, shape, order),
        _ => permute_sized::<8>(bytes, shape, order),
    }
}

fn permute_sized<const SIZE: usize>(bytes: &[u8], shape: &[usize], order: &[usize]) -> Vec<u8> {
    let mut strides = vec![1; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d];
    }
    let mut out = vec![0; bytes.len()];
    let mut at = vec![0; order.len()];
    let mut from = 0;
    for target in out.chunks_exact_mut(SIZE) {
        target.copy_from_slice(&bytes[from * SIZE..(from + 1) * SIZE]);
        for d in (0..order.len()).rev() {
            at[d] += 1;
            from += strides[order[d]];
            if at[d] < shape[order[d]] {
                break;
            }
            from -= at[d] * strides[order[d]];
            at[d] = 0;
        }
    }
    out
}

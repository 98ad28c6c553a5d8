//! Indices that are computed from the position of an element.

use crate::{Dims, Kind, Shape, backend::Affine};
use smallvec::smallvec;

/// The kind of index that counts up to `max`: i32 unless that is too small.
pub(crate) fn index_kind(max: usize) -> Kind {
    if max <= i32::MAX as usize {
        Kind::I32
    } else {
        Kind::I64
    }
}

/// An index over a whole tensor, for the part of it that begins at `start`.
pub(super) fn shifted(index: &Affine, start: &[usize]) -> Affine {
    let steps = index
        .strides
        .iter()
        .zip(start)
        .map(|(stride, start)| stride * *start as i64);
    Affine {
        offset: index.offset + steps.sum::<i64>(),
        strides: index.strides.clone(),
    }
}

/// Column minus row minus `k` over the last two of (at least two) dimensions: zero on diagonal `k`,
/// positive above it.
pub(super) fn diagonal_index(shape: &Shape, k: i64) -> (Affine, Kind) {
    let rank = shape.rank();
    let reach = shape[rank - 1]
        .max(shape[rank - 2])
        .min(i64::MAX as usize / 4);
    let mut strides: Dims<i64> = smallvec![0; rank];
    strides[rank - 2] = -1;
    strides[rank - 1] = 1;
    // Every diagonal past the corner is as empty as the first one there.
    (
        Affine {
            offset: -k.clamp(-(reach as i64), reach as i64),
            strides,
        },
        index_kind(2 * reach),
    )
}

//! Reading what an index expression selects.

use super::{
    lookups::{AT_ONCE, Lookups, leading, moved},
    selection::{Selection, Take},
};
use crate::{Dims, Result, Shape, Tensor, ops::index_kind};

/// The part of `x` that slices and integers select, as a view: every axis stays, with size 1 where
/// an integer stands.
pub(super) fn part(x: &Tensor, takes: &[Take]) -> Result<Tensor> {
    let mut out = x.clone();
    // What lies on other ranks comes last, when less is left of it.
    let (cut, whole): (Vec<usize>, Vec<usize>) = (0..takes.len())
        .filter(|d| !takes[*d].is_all(x.dims()[*d]))
        .partition(|d| is_cut(x, *d));
    for axis in whole {
        out = sliced(&out, axis, takes[axis])?;
    }
    for axis in cut {
        let take = takes[axis];
        // A lookup leaves one place partial on every rank; a slice of one would move it to one rank.
        out = if take.dropped {
            out.index_select(axis as i64, &range(x, take)?)?
        } else {
            sliced(&out, axis, take)?
        };
    }
    Ok(out)
}

/// Whether ranks hold different parts of an axis.
pub(super) fn is_cut(x: &Tensor, axis: usize) -> bool {
    x.sharding().axes_of(axis).next().is_some()
}

/// Where a slice stops, if it stops before the end that its step leads to. Axes of tensors without
/// elements may have any size.
fn end(take: Take) -> Option<i64> {
    let end = (take.len as i64)
        .saturating_mul(take.step as i64)
        .saturating_add(take.start as i64);
    (end >= 0).then_some(end)
}

/// The places that are taken of an axis of `x`, as an index.
pub(super) fn range(x: &Tensor, take: Take) -> Result<Tensor> {
    Tensor::arange(
        take.start as i64,
        end(take).unwrap_or(-1),
        take.step as i64,
        index_kind(x.numel()).dtype(),
        x.mesh(),
    )
}

fn sliced(x: &Tensor, axis: usize, take: Take) -> Result<Tensor> {
    x.slice(
        axis as i64,
        Some(take.start as i64),
        end(take),
        take.step as i64,
    )
}

/// A part with the dimensions that index tensors look at: integers gone, and the axes of a mask
/// made one.
pub(super) struct Columns {
    /// The dimensions.
    pub(super) shape: Shape,
    /// Which of them each index tensor looks at.
    pub(super) indexed: Vec<usize>,
}

impl Columns {
    /// Of a part with dimensions `dims`.
    pub(super) fn new(selection: &Selection, lookups: &Lookups, dims: &[usize]) -> Self {
        let (mut shape, mut indexed, mut axis) = (Dims::new(), Vec::new(), 0);
        while axis < dims.len() {
            match lookups.picks.iter().find(|(first, ..)| *first == axis) {
                Some((_, axes, _)) => {
                    indexed.push(shape.len());
                    shape.push(Shape::from(&dims[axis..axis + axes]).numel());
                    axis += axes;
                }
                None => {
                    if !selection.takes[axis].dropped {
                        shape.push(dims[axis]);
                    }
                    axis += 1;
                }
            }
        }
        Self {
            shape: shape.into(),
            indexed,
        }
    }
}

/// A reshape, where it is one.
pub(super) fn reshaped(x: &Tensor, shape: &Shape) -> Result<Tensor> {
    if x.shape() == shape {
        Ok(x.clone())
    } else {
        x.reshape(shape)
    }
}

/// The sizes of the result's dimensions that do not come from index tensors.
pub(super) fn kept_sizes(selection: &Selection) -> Dims {
    selection
        .kept
        .iter()
        .map(|axis| axis.map_or(1, |axis| selection.takes[axis].len))
        .collect()
}

/// What the expression selects.
pub(super) fn get(
    op: &'static str,
    x: &Tensor,
    selection: &Selection,
    lookups: &Lookups,
) -> Result<Tensor> {
    let part = part(x, &selection.takes)?;
    lookups.check(op, part.dims(), kept_sizes(selection).contains(&0))?;
    let columns = Columns::new(selection, lookups, part.dims());
    let rows = reshaped(&part, &columns.shape)?;
    let batch = lookups.batch.rank();
    let (out, at) = if lookups.picks.is_empty() {
        (
            flagged(rows, selection, &lookups.batch)?,
            kept_before(selection),
        )
    } else {
        gather(&rows, &columns.indexed, lookups)?
    };
    placed(out, selection, batch, at)
}

/// How many axes of the tensor stand before the dimensions of the index tensors.
pub(super) fn kept_before(selection: &Selection) -> usize {
    selection.kept[..selection.front].iter().flatten().count()
}

/// Adds the dimension that masks without dimensions make.
fn flagged(rows: Tensor, selection: &Selection, batch: &Shape) -> Result<Tensor> {
    let Some(size) = batch.dims().first() else {
        return Ok(rows);
    };
    let at = kept_before(selection) as i64;
    rows.unsqueeze(at)?.narrow(at, 0, *size)
}

/// Gathers, and says at which dimension those of the indices are.
fn gather(rows: &Tensor, indexed: &[usize], lookups: &Lookups) -> Result<(Tensor, usize)> {
    let indices: Vec<&Tensor> = lookups.picks.iter().map(|(_, _, index)| index).collect();
    let adjacent = indexed.windows(2).all(|pair| pair[1] == pair[0] + 1);
    if adjacent && indices.len() <= AT_ONCE {
        let axes: Vec<(usize, &Tensor)> = indexed.iter().copied().zip(indices).collect();
        return Ok((rows.gather_axes(&axes)?, indexed[0]));
    }
    let (rows, indices) = leading(rows, indexed, &indices)?;
    Ok((rows.index_get(&indices.iter().collect::<Vec<_>>())?, 0))
}

/// Moves `batch` dimensions at `at` to their place in the result, and adds the new ones.
fn placed(out: Tensor, selection: &Selection, batch: usize, at: usize) -> Result<Tensor> {
    let mut out = moved(&out, at..at + batch, kept_before(selection)..)?;
    for (d, _) in selection
        .kept
        .iter()
        .enumerate()
        .filter(|(_, axis)| axis.is_none())
    {
        out = out.unsqueeze((if d < selection.front { d } else { d + batch }) as i64)?;
    }
    Ok(out)
}

//! Index tensors made ready for a gather or scatter: masks become places, and their shapes a common
//! one.

use super::selection::{Pick, Selection};
use crate::{Error, Result, Shape, Tensor, ledger::on_behalf_of_caller, ops::index_kind};
use std::panic::Location;

/// A gather or scatter takes at most this many index tensors.
pub(super) const AT_ONCE: usize = 4;

/// So many elements of a mask are counted at once: their positions fit `i32`, and counting takes 8
/// bytes for each.
const MASK_PART: usize = 1 << 28;

/// The index tensors of an expression.
#[derive(Debug, Default)]
pub(super) struct Lookups {
    /// For each index tensor its first axis, how many axes it looks at as if they were one, and the
    /// places.
    pub(super) picks: Vec<(usize, usize, Tensor)>,
    /// The common shape of all, also of masks without dimensions.
    pub(super) batch: Shape,
}

/// Turns masks into places, reading from the device how many there are.
pub(super) async fn look_up_places(
    op: &'static str,
    selection: &Selection,
    caller: &'static Location<'static>,
) -> Result<Lookups> {
    let mut lookups = Lookups::default();
    let mut shapes = Vec::with_capacity(selection.picks.len());
    for pick in &selection.picks {
        let flag = match pick {
            Pick::Flag(flag) => *flag,
            Pick::Mask { mask, .. } if mask.rank() == 0 => mask.item_async().await?.to_bool(),
            Pick::Mask { axis, mask } => {
                let places = places(op, mask, caller).await?;
                shapes.push(places.shape().clone());
                lookups.picks.push((*axis, mask.rank(), places));
                continue;
            }
            Pick::Places { axis, index } => {
                shapes.push(index.shape().clone());
                lookups.picks.push((*axis, 1, index.clone()));
                continue;
            }
        };
        shapes.push([usize::from(flag)].into());
    }
    lookups.batch = common(op, &shapes)?;
    // Masks without dimensions are no operands of a lookup: another index has their part. And where
    // nothing is looked up, no place is wrong.
    let own = common(
        op,
        &lookups
            .picks
            .iter()
            .map(|(_, _, index)| index.shape().clone())
            .collect::<Vec<_>>(),
    )?;
    let widened = if lookups.batch.numel() == 0 {
        lookups.picks.len()
    } else {
        usize::from(own != lookups.batch)
    };
    for (axis, axes, index) in lookups.picks.iter_mut().take(widened) {
        // A place without dimensions is as an integer, which must exist.
        if (index.rank(), *axes) == (0, 1) {
            counted(op, selection.takes[*axis].len, index)?;
        }
        *index = index.expand(&lookups.batch)?;
    }
    Ok(lookups)
}

fn common(op: &'static str, shapes: &[Shape]) -> Result<Shape> {
    shapes.iter().try_fold(Shape::scalar(), |all, shape| all.broadcast(op, shape)).map_err(|_| {
        let listed: Vec<String> = shapes.iter().map(|shape| shape.to_string()).collect();
        let detail = format!("index tensors of shapes {} do not broadcast together (a mask counts with its number of true elements)", listed.join(", "));
        Error::Shape { op, detail }
    })
}

/// Where a mask holds, as positions in row-major order.
async fn places(
    op: &'static str,
    mask: &Tensor,
    caller: &'static Location<'static>,
) -> Result<Tensor> {
    let n = mask.numel();
    let dtype = index_kind(n).dtype();
    let mut parts = Vec::new();
    for start in (0..n.max(1)).step_by(MASK_PART) {
        let counting = {
            let _scope = on_behalf_of_caller(op, mask, caller);
            mask.reshape([n])?
                .narrow(0, start, MASK_PART.min(n - start))?
                .nonzero_async()
        };
        let positions = counting.await?;
        let positions = positions.reshape([positions.dims()[0]])?;
        parts.push(if start == 0 {
            positions.cast(dtype)?
        } else {
            positions.cast(dtype)?.add(start as i64)?
        });
    }
    if parts.len() == 1 {
        Ok(parts.remove(0))
    } else {
        Tensor::concat(&parts.iter().collect::<Vec<_>>(), 0)
    }
}

impl Lookups {
    /// Refuses places outside axes that no kernel will look at, because the axis or the result is
    /// empty.
    pub(super) fn check(&self, op: &'static str, dims: &[usize], empty: bool) -> Result<()> {
        if self.batch.numel() == 0 {
            return Ok(());
        }
        for (axis, axes, index) in &self.picks {
            let size = Shape::from(&dims[*axis..axis + axes]).numel();
            if size == 0 || empty {
                counted(op, size, index)?;
            }
        }
        Ok(())
    }
}

/// Places of an axis counted from its beginning, checked. There is at least one.
fn counted(op: &'static str, size: usize, index: &Tensor) -> Result<Tensor> {
    if size == 0 {
        return Err(Error::IndexOutOfRange {
            op,
            index: 0,
            len: 0,
        });
    }
    Tensor::arange(0, size as i64, 1, index_kind(size).dtype(), index.mesh())?
        .gather_axes(&[(0, index)])
}

/// Dimensions `from` at the places `to`, where they are not there already.
pub(super) fn moved(
    x: &Tensor,
    from: impl Iterator<Item = usize>,
    to: impl Iterator<Item = usize>,
) -> Result<Tensor> {
    let (from, to): (Vec<i64>, Vec<i64>) = from
        .zip(to)
        .map(|(from, to)| (from as i64, to as i64))
        .unzip();
    if from == to {
        Ok(x.clone())
    } else {
        x.movedim(&from, &to)
    }
}

/// The indexed dimensions `dims` of `x` brought to the front, and of more than a kernel takes at
/// once the last ones made one.
pub(super) fn leading(
    x: &Tensor,
    dims: &[usize],
    indices: &[&Tensor],
) -> Result<(Tensor, Vec<Tensor>)> {
    let x = moved(x, dims.iter().copied(), 0..)?;
    let mut indices: Vec<Tensor> = indices.iter().map(|index| (*index).clone()).collect();
    if indices.len() <= AT_ONCE {
        return Ok((x, indices));
    }
    let (kept, joined) = (AT_ONCE - 1, &x.dims()[AT_ONCE - 1..indices.len()]);
    let size = Shape::from(joined).checked_numel("reshape")?;
    let dtype = index_kind(size).dtype();
    let mut position: Option<Tensor> = None;
    for (index, size) in indices.drain(kept..).zip(joined) {
        // Each is checked on its own: outside its axis it could still be a place in all of them
        // together.
        let index = if index.numel() == 0 {
            index
        } else {
            counted("index_get", *size, &index)?
        }
        .cast(dtype)?;
        position = Some(match position {
            Some(before) => before.mul(*size as i64)?.add(&index)?,
            None => index,
        });
    }
    indices.extend(position);
    let shape: Shape = x.dims()[..kept]
        .iter()
        .copied()
        .chain([size])
        .chain(x.dims()[kept + joined.len()..].iter().copied())
        .collect();
    Ok((x.reshape(shape)?, indices))
}

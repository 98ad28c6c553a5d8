//! Writing to what an index expression selects. The result is a new tensor, composed of ops that
//! have gradients.

use super::{
    get::{Columns, is_cut, kept_before, kept_sizes, part, range, reshaped},
    lookups::{Lookups, leading, moved},
    selection::{Pick, Selection, Take},
};
use crate::{Arg, DType, Dims, Error, Result, Shape, Tensor, ops::create::exact_scalar};

/// What happens to an element that is selected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// It becomes the value; of several values, the last.
    Set,
    /// The value is added, each time it is selected.
    Add,
}

/// The value as a tensor of the destination's dtype, where the destination lies.
pub(super) fn value(op: &'static str, x: &Tensor, value: Arg<'_>, mode: Mode) -> Result<Tensor> {
    if mode == Mode::Add && x.dtype() == DType::Bool {
        return Err(Error::DType {
            op,
            dtype: DType::Bool,
            expected: "a number; bools can only be set",
        });
    }
    match value {
        Arg::Number(number) => Tensor::full(
            (),
            exact_scalar(op, number, x.dtype())?,
            x.dtype(),
            x.mesh(),
        ),
        Arg::Tensor(t) if t.dtype() == x.dtype() => Ok(t.clone()),
        Arg::Tensor(t) if t.dtype().promote(x.dtype()) == x.dtype() => t.cast(x.dtype()),
        Arg::Tensor(t) => Err(Error::DType {
            op,
            dtype: t.dtype(),
            expected: "a value that promotes to the tensor's dtype: use `cast` on one of them",
        }),
    }
}

/// What a value expands to: the sizes of the result's dimensions, and which of them are new.
struct Target {
    sizes: Dims,
    /// Whether a dimension is one of the tensor or of its index tensors.
    real: Vec<bool>,
}

impl Target {
    /// For index tensors with dimensions `batch`.
    fn new(selection: &Selection, batch: &[usize]) -> Self {
        let mut sizes = kept_sizes(selection);
        let mut real: Vec<bool> = selection.kept.iter().map(Option::is_some).collect();
        sizes.insert_from_slice(selection.front, batch);
        real.splice(selection.front..selection.front, batch.iter().map(|_| true));
        Self { sizes, real }
    }

    /// The value with a dimension for each real one of the target, of its size or of size 1.
    fn align(&self, op: &'static str, value: &Tensor) -> Result<Tensor> {
        let extra = value.rank().saturating_sub(self.sizes.len());
        let lead = self.sizes.len().saturating_sub(value.rank());
        let (ones, dims) = value.dims().split_at(extra);
        let fits = ones.iter().all(|n| *n == 1)
            && dims
                .iter()
                .zip(&self.sizes[lead..])
                .all(|(n, to)| *n == 1 || n == to);
        if !fits {
            let to = Shape::from(self.sizes.clone());
            let detail = format!(
                "a value of shape {} does not expand to the shape {to} of what is selected: sizes must be equal or 1",
                value.shape()
            );
            return Err(Error::Shape { op, detail });
        }
        let aligned: Shape = (0..self.sizes.len())
            .filter(|d| self.real[*d])
            .map(|d| d.checked_sub(lead).map_or(1, |d| dims[d]))
            .collect();
        reshaped(value, &aligned)
    }
}

/// Sets where a mask holds without asking how often that is: possible where the value is the same
/// for all places of the mask.
pub(super) fn masked(
    op: &'static str,
    x: &Tensor,
    selection: &Selection,
    value: &Tensor,
    mode: Mode,
) -> Result<Option<Tensor>> {
    let [Pick::Mask { axis, mask }] = selection.picks.as_slice() else {
        return Ok(None);
    };
    let after = selection.kept.len() - selection.front;
    let alike = value
        .rank()
        .checked_sub(after + 1)
        .is_none_or(|d| value.dims()[d] == 1);
    if !alike {
        return Ok(None);
    }
    let aligned = Target::new(selection, &[1]).align(op, value)?;
    let part = part(x, &selection.takes)?;
    if part.numel() == 0 {
        return Ok(Some(x.clone()));
    }
    // The dimension of the places goes; the others are in the order of the axes.
    let mut sizes: Dims = aligned.dims().into();
    sizes.remove(kept_before(selection));
    let mut sizes = sizes.into_iter();
    let indexed = *axis..axis + mask.rank();
    let spread: Shape = (0..x.rank())
        .map(|d| {
            if indexed.contains(&d) || selection.takes[d].dropped {
                1
            } else {
                sizes.next().unwrap_or(1)
            }
        })
        .collect();
    let holds: Shape = (0..x.rank())
        .map(|d| {
            if indexed.contains(&d) {
                part.dims()[d]
            } else {
                1
            }
        })
        .collect();
    let (value, mask) = (reshaped(&aligned, &spread)?, reshaped(mask, &holds)?);
    let written = match mode {
        Mode::Set => part.masked_fill(&mask, &value)?,
        Mode::Add => mask.where_(&part.add(&value)?, &part)?,
    };
    Ok(Some(put_back(x, &written, &selection.takes)?))
}

/// Writes a value to what the expression selects.
pub(super) fn set(
    op: &'static str,
    x: &Tensor,
    selection: &Selection,
    lookups: &Lookups,
    value: &Tensor,
    mode: Mode,
) -> Result<Tensor> {
    let target = Target::new(selection, lookups.batch.dims());
    let value = target.align(op, value)?;
    let empty = target.sizes.contains(&0);
    let dims: Dims = selection.takes.iter().map(|take| take.len).collect();
    lookups.check(op, &dims, empty)?;
    if empty {
        return Ok(x.clone());
    }
    let columns = Columns::new(selection, lookups, &dims);
    let whole = Shape::from(dims);
    if lookups.picks.is_empty() {
        // Masks without dimensions have one dimension of size 1 here.
        let value = reshaped(
            &value,
            &without(value.shape(), kept_before(selection), lookups.batch.rank()),
        )?;
        let value = value.expand(&columns.shape)?;
        let written = match mode {
            Mode::Set => value,
            Mode::Add => reshaped(&part(x, &selection.takes)?, &columns.shape)?.add(&value)?,
        };
        return put_back(x, &reshaped(&written, &whole)?, &selection.takes);
    }
    let rows = reshaped(&part(x, &selection.takes)?, &columns.shape)?;
    let indices: Vec<&Tensor> = lookups.picks.iter().map(|(_, _, index)| index).collect();
    let (at, batch) = (kept_before(selection), lookups.batch.rank());
    let value = moved(&value, at..at + batch, 0..)?;
    let written = put(&rows, &columns.indexed, &indices, &value, mode)?;
    put_back(x, &reshaped(&written, &whole)?, &selection.takes)
}

/// A shape without `n` dimensions at `at`.
fn without(shape: &Shape, at: usize, n: usize) -> Shape {
    shape.dims()[..at]
        .iter()
        .chain(&shape.dims()[at + n..])
        .copied()
        .collect()
}

/// Writes at indices of dimensions `indexed`; the value has the dimensions of the indices first,
/// then the others.
fn put(
    x: &Tensor,
    indexed: &[usize],
    indices: &[&Tensor],
    value: &Tensor,
    mode: Mode,
) -> Result<Tensor> {
    let front: Shape = indexed
        .iter()
        .map(|d| x.dims()[*d])
        .chain(
            (0..x.rank())
                .filter(|d| !indexed.contains(d))
                .map(|d| x.dims()[d]),
        )
        .collect();
    let (rows, indices) = leading(x, indexed, indices)?;
    let written = rows.index_put(
        &indices.iter().collect::<Vec<_>>(),
        value,
        mode == Mode::Add,
    )?;
    moved(
        &reshaped(&written, &front)?,
        0..indexed.len(),
        indexed.iter().copied(),
    )
}

/// `x` with the part that slices and integers select replaced by `part`, which has all axes and at
/// least one element.
fn put_back(x: &Tensor, part: &Tensor, takes: &[Take]) -> Result<Tensor> {
    let mut part = part.clone();
    let mut some = Vec::new();
    for (axis, take) in takes
        .iter()
        .enumerate()
        .filter(|(axis, take)| !take.is_all(x.dims()[*axis]))
    {
        let mut take = *take;
        if take.step < 0 {
            part = part.flip(&[axis as i64])?;
            take = Take {
                start: take.start - (take.len - 1) * take.step.unsigned_abs(),
                step: -take.step,
                ..take
            };
        }
        some.push((axis, take));
    }
    if some.is_empty() {
        return if x.is_plain() {
            Ok(part)
        } else {
            part.reshard(x.sharding().whole())
        };
    }
    let (cut, whole): (Vec<_>, Vec<_>) = some.into_iter().partition(|(axis, _)| is_cut(x, *axis));
    join(x, &part, &whole, &cut)
}

/// Puts a part back between its neighbours, axis by axis. Axes that are cut over ranks come last:
/// there every rank writes what is its own, where joining would gather the axis.
fn join(
    x: &Tensor,
    part: &Tensor,
    whole: &[(usize, Take)],
    cut: &[(usize, Take)],
) -> Result<Tensor> {
    let Some(((d, take), rest)) = whole.split_first() else {
        return write_cut(x, part, cut);
    };
    let (axis, size) = (*d as i64, x.dims()[*d]);
    let (step, last) = (
        take.step.unsigned_abs(),
        take.start + (take.len - 1) * take.step.unsigned_abs(),
    );
    let middle = if rest.is_empty() && cut.is_empty() {
        part.clone()
    } else {
        join(
            &x.slice(
                axis,
                Some(take.start as i64),
                Some(last as i64 + 1),
                take.step as i64,
            )?,
            part,
            rest,
            cut,
        )?
    };
    let mut pieces = vec![x.narrow(axis, 0, take.start)?];
    if step == 1 {
        pieces.push(middle);
    } else {
        // Each element but the last is followed by the step - 1 that are not selected.
        let (spread, runs) = (last - take.start, take.len - 1);
        let split: Shape = x.dims()[..*d]
            .iter()
            .copied()
            .chain([runs, step])
            .chain(x.dims()[d + 1..].iter().copied())
            .collect();
        let between =
            x.narrow(axis, take.start, spread)?
                .reshape(split)?
                .narrow(axis + 1, 1, step - 1)?;
        let mixed = Tensor::concat(
            &[
                &middle.narrow(axis, 0, runs)?.unsqueeze(axis + 1)?,
                &between,
            ],
            axis + 1,
        )?;
        pieces.push(mixed.reshape(x.shape().with(*d, spread))?);
        pieces.push(middle.narrow(axis, runs, 1)?);
    }
    pieces.push(x.narrow(axis, last + 1, size - last - 1)?);
    let pieces: Vec<&Tensor> = pieces.iter().filter(|piece| piece.dims()[*d] > 0).collect();
    Tensor::concat(&pieces, axis)
}

/// Writes a part of axes that are cut over ranks.
fn write_cut(x: &Tensor, part: &Tensor, cut: &[(usize, Take)]) -> Result<Tensor> {
    if cut.is_empty() {
        return Ok(part.clone());
    }
    let axes: Vec<usize> = cut.iter().map(|(axis, _)| *axis).collect();
    let mut indices = Vec::with_capacity(cut.len());
    for (k, (_, take)) in cut.iter().enumerate() {
        let grid: Shape = (0..cut.len())
            .map(|d| if d == k { take.len } else { 1 })
            .collect();
        indices.push(reshaped(&range(x, *take)?, &grid)?);
    }
    put(
        x,
        &axes,
        &indices.iter().collect::<Vec<_>>(),
        &moved(part, axes.iter().copied(), 0..)?,
        Mode::Set,
    )
}

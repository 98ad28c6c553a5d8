//! Pools that cover a dimension with a given number of windows.

use super::{AVERAGE, MAX, check_float, leading, on_mesh_of, on_windows, table};
use crate::{
    Error, Result, Shape, Tensor,
    grad::{Back, recompute, record1},
};
use smallvec::smallvec;

/// The first element of each window and the one behind its last.
fn bounds(n: usize, out: usize) -> Vec<(usize, usize)> {
    (0..out)
        .map(|i| {
            (
                (i as u128 * n as u128 / out as u128) as usize,
                ((i as u128 + 1) * n as u128).div_ceil(out as u128) as usize,
            )
        })
        .collect()
}

/// The elements of each window of one axis, as a dimension of their own behind it; short windows
/// repeat their last element. With the length of each window.
fn windows_of(
    op: &'static str,
    input: &Tensor,
    axis: usize,
    out: usize,
) -> Result<(Tensor, Vec<usize>)> {
    let n = input.shape()[axis];
    super::super::sort::check_positions(op, input.shape(), n)?;
    let bounds = bounds(n, out);
    let longest = bounds
        .iter()
        .map(|(start, end)| end - start)
        .max()
        .unwrap_or(0);
    let places: Vec<i32> = bounds
        .iter()
        .flat_map(|&(start, end)| (0..longest).map(move |i| (start + i).min(end - 1) as i32))
        .collect();
    let index = on_mesh_of(
        Tensor::from_slice(&places, [out, longest], input.device())?,
        input,
    )?;
    Ok((
        input.gather_axes(&[(axis, &index)])?,
        bounds.iter().map(|(start, end)| end - start).collect(),
    ))
}

/// Pools the last dimensions to `out`.
#[track_caller]
pub(super) fn adaptive(
    op: &'static str,
    input: &Tensor,
    out: &[usize],
    average: bool,
) -> Result<Tensor> {
    if average {
        check_float(op, input)?;
    }
    let lead = leading(op, input, out.len())?;
    if let Some(d) = (0..out.len()).find(|d| out[*d] == 0 || input.shape()[lead + d] == 0) {
        return Err(Error::Shape {
            op,
            detail: format!(
                "dimension {} of {} cannot become {}: both sizes must be at least 1",
                lead + d,
                input.type_string(),
                out[d]
            ),
        });
    }
    let shape: Shape = input.dims()[..lead].iter().chain(out).copied().collect();
    shape.checked_numel(op)?;
    let run = || {
        if !input.is_plain() {
            let (info, local) = (if average { &AVERAGE } else { &MAX }, |x: &Tensor| {
                Ok(smallvec![adaptive(op, x, out, average)?])
            });
            return Ok(on_windows(op, info, 0, input, out.len(), local)?.remove(0));
        }
        input.device().check(input.dtype(), shape.numel())?;
        if input.numel() == 0 {
            return input.no_elements(input.dtype(), shape);
        }
        axis_by_axis(op, input, out, average)
    };
    if !average {
        let out = out.to_vec();
        return Ok(recompute(
            op,
            &[input],
            || Ok(smallvec![run()?]),
            move |x| Ok(smallvec![axis_by_axis(op, &x[0], &out, false)?]),
        )?
        .remove(0));
    }
    record1(op, &[input], run, |_| {
        let sizes = input.dims()[lead..].to_vec();
        Ok(move |b: &Back<'_>| {
            let g = b.grad()?;
            let wide = g.cast(g.dtype().kind().dtype())?;
            let back = |g: Tensor, (d, size): (usize, &usize)| {
                if g.dims()[lead + d] == *size {
                    Ok(g)
                } else {
                    unaveraged(&g, lead + d, *size)
                }
            };
            Ok(smallvec![Some(
                sizes
                    .iter()
                    .enumerate()
                    .try_rfold(wide, back)?
                    .cast(g.dtype())?
            )])
        })
    })
}

/// Pools one axis at a time, which is the same as all at once: every window is a box.
fn axis_by_axis(op: &'static str, input: &Tensor, out: &[usize], average: bool) -> Result<Tensor> {
    let lead = input.rank() - out.len();
    let wide = input.dtype().kind().dtype();
    let mut done = if average {
        input.cast(wide)?
    } else {
        input.clone()
    };
    for (d, &size) in out.iter().enumerate() {
        let axis = lead + d;
        if done.shape()[axis] == size {
            continue;
        }
        let (windows, lengths) = windows_of(op, &done, axis, size)?;
        let last = axis as i64 + 1;
        done = if !average {
            windows.max(&[last], false)?
        } else {
            let longest = windows.shape()[axis + 1];
            let mask: Vec<bool> = lengths
                .iter()
                .flat_map(|n| (0..longest).map(move |i| i >= *n))
                .collect();
            let behind = vec![1; done.rank() - axis - 1];
            let beside = |dims: &[usize]| dims.iter().chain(&behind).copied().collect::<Shape>();
            let beyond = Tensor::from_slice(&mask, beside(&[size, longest]), input.device())?;
            let counts: Vec<f64> = lengths.iter().map(|n| *n as f64).collect();
            windows
                .masked_fill(&beyond, 0.0)?
                .sum(&[last], false)?
                .div(&table(&counts, beside(&[size]), wide, input)?)?
        };
    }
    done.cast(input.dtype())
}

/// The gradient of the means along one axis, which had `n` elements: each window hands every
/// element its share.
fn unaveraged(g: &Tensor, axis: usize, n: usize) -> Result<Tensor> {
    let bounds = bounds(n, g.dims()[axis]);
    let lengths: Vec<f64> = bounds
        .iter()
        .map(|(start, end)| (end - start) as f64)
        .collect();
    let beside: Shape = std::iter::once(lengths.len())
        .chain(g.dims()[axis + 1..].iter().map(|_| 1))
        .collect();
    let shares = g.div(&on_mesh_of(table(&lengths, beside, g.dtype(), g)?, g)?)?;
    // The windows and the elements of all pairs that meet.
    let (windows, elements): (Vec<i32>, Vec<i32>) = bounds
        .iter()
        .enumerate()
        .flat_map(|(i, &(start, end))| (start..end).map(move |element| (i as i32, element as i32)))
        .unzip();
    let vector =
        |places: &[i32]| on_mesh_of(Tensor::from_slice(places, [places.len()], g.device())?, g);
    let zeros = Tensor::zeros(g.shape().with(axis, n), g.dtype(), g)?;
    zeros.index_add(
        axis as i64,
        &vector(&elements)?,
        &shares.index_select(axis as i64, &vector(&windows)?)?,
    )
}

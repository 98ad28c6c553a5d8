//! Regions of tensors: sizes that cannot overflow, regions that lie inside, regions cut into
//! smaller ones, and the runs of bytes they are in memory.

use anymesh_core::Region;
use std::ops::Range;

/// The number of elements where every product of dimensions, without those that are zero, fits with
/// room for the widest element: afterwards sizes and strides need no more checks.
pub(crate) fn checked_numel(shape: &[usize]) -> Option<usize> {
    let product = shape
        .iter()
        .try_fold(1usize, |n, &d| n.checked_mul(d.max(1)))?;
    product
        .checked_mul(16)
        .filter(|&bytes| bytes <= isize::MAX as usize)?;
    Some(if shape.contains(&0) { 0 } else { product })
}

/// The distance in bytes between neighbours along each dimension of a row-major tensor.
pub(crate) fn row_major(shape: &[usize], size: usize) -> Vec<u64> {
    let mut strides = vec![size as u64; shape.len()];
    for d in (0..shape.len().saturating_sub(1)).rev() {
        strides[d] = strides[d + 1] * shape[d + 1].max(1) as u64;
    }
    strides
}

/// The slabs of a shape of elements of a size.
pub(crate) fn slabs(shape: Vec<usize>, size: usize, limit: usize) -> impl Iterator<Item = Region> {
    // Regions are whole from dimension `whole` on, have `step` indices of the one before it, and
    // one index of those before that.
    let (mut whole, mut row) = (shape.len(), size);
    while whole > 0 && row.saturating_mul(shape[whole - 1]) <= limit {
        whole -= 1;
        row *= shape[whole];
    }
    let step = (limit / row.max(1)).max(1);
    let mut next = (!shape.contains(&0)).then(|| vec![0; shape.len()]);
    std::iter::from_fn(move || {
        let start = next.take()?;
        let mut size = shape.clone();
        size[..whole].fill(1);
        if let Some(d) = whole.checked_sub(1) {
            size[d] = step.min(shape[d] - start[d]);
        }
        let mut after = start.clone();
        for d in (0..whole).rev() {
            after[d] += size[d];
            if after[d] < shape[d] {
                next = Some(after);
                break;
            }
            after[d] = 0;
        }
        Some(Region {
            start: start.into(),
            shape: size.into(),
        })
    })
}

/// The shortest run of bytes that tiles are cut to: shorter ones cost more to read than they save.
const SHORTEST_RUN: usize = 4 << 10;

/// Cuts a region into a grid of tiles of at most `limit` bytes (or one element): the longest
/// dimension is halved until they are small enough, the last one only while rows stay worth a read.
/// So a region of another layout meets few tiles that it needs only a part of, along whichever
/// dimension it is cut.
pub(crate) fn cut_into_tiles(region: &Region, size: usize, limit: usize) -> Vec<Region> {
    let rank = region.shape.len();
    let mut tile = region.shape.to_vec();
    while tile.iter().product::<usize>() * size > limit {
        let rows = tile.len().saturating_sub(1);
        let last = |d: usize| d == rows && tile[d] * size < 2 * SHORTEST_RUN;
        // Rows that are too short to cut are cut all the same where nothing else is left.
        let choice = (0..rank)
            .filter(|&d| tile[d] > 1 && !last(d))
            .max_by_key(|&d| (tile[d], std::cmp::Reverse(d)));
        let Some(d) = choice.or_else(|| (0..rank).rev().find(|&d| tile[d] > 1)) else {
            break;
        };
        tile[d] = tile[d].div_ceil(2);
    }
    let mut out = vec![region.clone()];
    for d in 0..rank {
        let cut = |part: &Region| -> Vec<Region> {
            let piece = |start: usize| {
                let mut piece = part.clone();
                piece.start[d] += start;
                piece.shape[d] = tile[d].min(part.shape[d] - start);
                piece
            };
            (0..part.shape[d])
                .step_by(tile[d].max(1))
                .map(piece)
                .collect()
        };
        if tile[d] < region.shape[d] {
            out = out.iter().flat_map(cut).collect();
        }
    }
    out
}

/// The regions that elements `range` of a tensor are, counted in row-major order, each with its
/// first element. They follow each other, and there are at most `2 * rank - 1`.
pub(crate) fn flat_regions(shape: &[usize], range: Range<usize>) -> Vec<(Region, usize)> {
    let strides = row_major(shape, 1);
    let mut out = vec![];
    let mut at = range.start;
    while at < range.end {
        let left = range.end - at;
        // The outermost dimension at whose beginning we are and of which a whole index is left.
        let outermost = (0..shape.len())
            .find(|&d| at.is_multiple_of(strides[d] as usize) && left >= strides[d] as usize);
        let (mut start, mut size) = (vec![0; shape.len()], vec![1; shape.len()]);
        let mut rest = at;
        for (i, stride) in start.iter_mut().zip(&strides) {
            (*i, rest) = (rest / *stride as usize, rest % *stride as usize);
        }
        let mut count = 1;
        if let Some(d) = outermost {
            size[d] = (left / strides[d] as usize).min(shape[d] - start[d]);
            size[d + 1..].copy_from_slice(&shape[d + 1..]);
            count = size[d] * strides[d] as usize;
        }
        out.push((
            Region {
                start: start.into(),
                shape: size.into(),
            },
            at,
        ));
        at += count;
    }
    out
}

/// The contiguous runs of bytes of `part`: offset in the region `of`, offset in the region `to`,
/// length. Both hold `part`.
pub(crate) fn runs(
    part: &Region,
    of: &Region,
    to: &Region,
    size: usize,
) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
    // Trailing dimensions that are whole in all three are one run.
    let rank = part.shape.len();
    let (mut outer, mut length) = (rank, size);
    while outer > 0 {
        outer -= 1;
        length *= part.shape[outer];
        if part.shape[outer] != of.shape[outer] || part.shape[outer] != to.shape[outer] {
            break;
        }
    }
    // For each dimension before it: indices left and all there are, and the bytes from one to the
    // next in both regions.
    let steps = |of: &Region| row_major(&of.shape, size);
    let (from_steps, to_steps) = (steps(of), steps(to));
    let first = |of: &Region, steps: &[u64]| {
        (0..rank)
            .map(|d| (part.start[d] - of.start[d]) * steps[d] as usize)
            .sum::<usize>()
    };
    let (mut from, mut into) = (first(of, &from_steps), first(to, &to_steps));
    let mut dims: Vec<(usize, usize, usize, usize)> = (0..outer)
        .map(|d| {
            (
                0,
                part.shape[d],
                from_steps[d] as usize,
                to_steps[d] as usize,
            )
        })
        .collect();
    let mut left: usize = if part.numel() == 0 {
        0
    } else {
        part.shape[..outer].iter().product()
    };
    std::iter::from_fn(move || {
        left = left.checked_sub(1)?;
        let run = (from, into, length);
        for (at, count, a, b) in dims.iter_mut().rev() {
            *at += 1;
            if *at < *count {
                (from, into) = (from + *a, into + *b);
                break;
            }
            (from, into, *at) = (from - *a * (*count - 1), into - *b * (*count - 1), 0);
        }
        Some(run)
    })
}

/// Copies `part` from one row-major buffer to another: `from` holds the region `from_region`, `to`
/// holds `to_region`, and `part` lies in both.
pub fn copy_region(
    from: &[u8],
    from_region: &Region,
    to: &mut [u8],
    to_region: &Region,
    part: &Region,
    size: usize,
) {
    for (source, target, length) in runs(part, from_region, to_region, size) {
        to[target..target + length].copy_from_slice(&from[source..source + length]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(start: &[usize], shape: &[usize]) -> Region {
        Region {
            start: start.iter().copied().collect(),
            shape: shape.iter().copied().collect(),
        }
    }

    /// Shapes of every rank up to four, with sizes of one and of zero.
    fn shapes() -> [Vec<usize>; 7] {
        [
            vec![],
            vec![1],
            vec![7],
            vec![3, 5],
            vec![4, 1, 6],
            vec![2, 3, 4, 5],
            vec![3, 0, 2],
        ]
    }

    /// The places in a row-major tensor of the elements of a region, in order.
    fn places(shape: &[usize], part: &Region) -> Vec<usize> {
        let strides = row_major(shape, 1);
        let mut out = vec![0];
        for d in 0..shape.len() {
            out = out
                .iter()
                .flat_map(|at| {
                    (0..part.shape[d])
                        .map(|i| at + (part.start[d] + i) * strides[d] as usize)
                        .collect::<Vec<_>>()
                })
                .collect();
        }
        out
    }

    #[test]
    fn regions_are_copied_between_buffers_of_other_regions() {
        let whole = region(&[0, 0, 0], &[3, 4, 5]);
        let from: Vec<u8> = (0..60).collect();
        for part in [
            region(&[1, 1, 1], &[2, 2, 3]),
            region(&[0, 0, 0], &[3, 4, 5]),
            region(&[2, 0, 0], &[1, 4, 5]),
            region(&[0, 3, 0], &[3, 1, 5]),
            region(&[1, 2, 3], &[0, 2, 1]),
        ] {
            let mut to = vec![255; part.numel()];
            copy_region(&from, &whole, &mut to, &part, &part, 1);
            assert_eq!(
                to,
                places(&whole.shape, &part)
                    .iter()
                    .map(|p| *p as u8)
                    .collect::<Vec<_>>()
            );
        }
        let mut scalar = [0; 2];
        copy_region(
            &[7, 8],
            &region(&[], &[]),
            &mut scalar,
            &region(&[], &[]),
            &region(&[], &[]),
            2,
        );
        assert_eq!(scalar, [7, 8]);
    }

    #[test]
    fn tiles_fill_a_region_and_are_cut_along_every_dimension() {
        for (shape, size, limit) in [
            (vec![1000, 1 << 20], 4, 4 << 20),
            (vec![1024, 4096], 4, 4 << 20),
            (vec![3, 5, 7], 2, 20),
            (vec![], 8, 4),
            (vec![17], 1, 4),
            (vec![4, 0], 4, 8),
        ] {
            let mut whole = region(&vec![7; shape.len()], &shape);
            let parts = cut_into_tiles(&whole, size, limit);
            assert!(
                parts.iter().all(|p| p.numel() * size <= limit.max(size)),
                "{shape:?}"
            );
            assert_eq!(
                parts.iter().map(Region::numel).sum::<usize>(),
                whole.numel(),
                "{shape:?}"
            );
            whole.start.iter_mut().for_each(|s| *s = 0);
            let mut seen: Vec<usize> = if whole.numel() > 1000 {
                vec![]
            } else {
                parts
                    .iter()
                    .flat_map(|p| places(&vec![7 + 17; shape.len()], p))
                    .collect()
            };
            let count = seen.len();
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen.len(), count, "tiles of {shape:?} overlap");
        }
        let square = cut_into_tiles(&region(&[0, 0], &[1024, 4096]), 4, 4 << 20);
        assert!(
            square.iter().all(|t| t.shape[..] == [1024, 1024]),
            "{square:?}"
        );
        let long = cut_into_tiles(&region(&[0, 0], &[64, 1 << 20]), 4, 1 << 20);
        assert!(
            long.len() == 256 && long.iter().all(|t| t.shape[1] * 4 >= SHORTEST_RUN),
            "{:?}",
            long[0]
        );
    }

    #[test]
    fn flat_ranges_are_few_regions_that_follow_each_other() {
        for shape in shapes() {
            let n: usize = shape.iter().product();
            for begin in 0..=n {
                for end in begin..=n {
                    let regions = flat_regions(&shape, begin..end);
                    assert!(
                        regions.len() <= (2 * shape.len()).max(2) - 1,
                        "{shape:?} {begin}..{end}: {regions:?}"
                    );
                    let elements: Vec<usize> = regions
                        .iter()
                        .flat_map(|(b, _)| places(&shape, b))
                        .collect();
                    assert_eq!(elements, (begin..end).collect::<Vec<_>>(), "{shape:?}");
                    assert!(regions.iter().all(|(b, at)| places(&shape, b)[0] == *at));
                }
            }
        }
    }

    #[test]
    fn slabs_follow_each_other_without_holes_and_keep_the_limit() {
        for shape in shapes() {
            for limit in [1, 2, 3, 8, 20, 31, 64, 1000] {
                let strides = row_major(&shape, 2);
                let mut at = 0;
                for slab in slabs(shape.clone(), 2, limit) {
                    let start: usize = slab
                        .start
                        .iter()
                        .zip(&strides)
                        .map(|(&i, &s)| i * s as usize)
                        .sum();
                    assert_eq!(start, at, "{shape:?} {limit} {slab:?}");
                    assert!(
                        slab.numel() * 2 <= limit.max(2),
                        "{shape:?} {limit} {slab:?}"
                    );
                    at += slab.numel() * 2;
                }
                assert_eq!(at, 2 * shape.iter().product::<usize>(), "{shape:?} {limit}");
            }
        }
    }

    #[test]
    fn sizes_that_overflow_have_no_number_of_elements() {
        assert_eq!(checked_numel(&[3, 4]), Some(12));
        assert_eq!(checked_numel(&[3, 0]), Some(0));
        assert_eq!(checked_numel(&[usize::MAX, 0]), None);
        assert_eq!(checked_numel(&[1 << 40, 1 << 40]), None);
    }
}

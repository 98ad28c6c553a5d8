//! Sizes that cannot overflow, boxes that lie inside, and tensors cut into slabs.

use crate::{Error, Result, TensorInfo};
use anymesh_core::Region;

/// The number of elements where every product of dimensions, without those that are zero, fits with room for the widest element: afterwards sizes and strides
/// need no more checks.
pub(crate) fn checked_numel(shape: &[usize]) -> Option<usize> {
    let product = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d.max(1)))?;
    product.checked_mul(16).filter(|&bytes| bytes <= isize::MAX as usize)?;
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

/// Whether a box lies inside a tensor and the buffer has its size.
pub(crate) fn check_box(name: &str, info: &TensorInfo, region: &Region, out: &[u8]) -> Result<()> {
    let inside = region.start.len() == info.shape.len()
        && region.shape.len() == info.shape.len()
        && info.shape.iter().zip(region.start.iter().zip(&region.shape)).all(|(&n, (&start, &count))| start.checked_add(count).is_some_and(|end| end <= n));
    if !inside {
        return Err(Error::Argument(format!(
            "box of shape {:?} at {:?} does not lie inside tensor '{name}' of shape {:?}",
            &region.shape[..],
            &region.start[..],
            info.shape
        )));
    }
    let bytes = region.numel() * info.dtype.size();
    if out.len() != bytes {
        return Err(Error::Argument(format!("a box of {bytes} bytes of tensor '{name}' was asked for into a buffer of {}", out.len())));
    }
    Ok(())
}

/// Cuts a tensor into boxes of at most `limit` bytes (or one element) that follow each other in row-major order. A tensor without elements has none.
pub(crate) fn slabs(info: &TensorInfo, limit: usize) -> impl Iterator<Item = Region> + use<> {
    // Boxes are whole from dimension `whole` on, have `step` indices of the one before it, and one index of those before that.
    let shape = info.shape.clone();
    let (mut whole, mut row) = (shape.len(), info.dtype.size());
    while whole > 0 && row.saturating_mul(shape[whole - 1]) <= limit {
        whole -= 1;
        row *= shape[whole];
    }
    let step = (limit / row.max(1)).max(1);
    let mut next = (info.numel() > 0).then(|| vec![0; shape.len()]);
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
        Some(Region { start: start.into(), shape: size.into() })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use anymesh_core::DType;

    #[test]
    fn slabs_follow_each_other_without_holes_and_keep_the_limit() {
        for shape in [vec![], vec![1], vec![7], vec![3, 5], vec![4, 1, 6], vec![2, 3, 4, 5], vec![3, 0, 2]] {
            for limit in [1, 2, 3, 8, 20, 31, 64, 1000] {
                let info = TensorInfo { dtype: DType::F16, shape: shape.clone() };
                let strides = row_major(&shape, 2);
                let mut at = 0;
                for slab in slabs(&info, limit) {
                    let start: usize = slab.start.iter().zip(&strides).map(|(&i, &s)| i * s as usize).sum();
                    assert_eq!(start, at, "{shape:?} {limit} {slab:?}");
                    assert!(slab.numel() * 2 <= limit.max(2), "{shape:?} {limit} {slab:?}");
                    at += slab.numel() * 2;
                }
                assert_eq!(at, info.bytes(), "{shape:?} {limit}");
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

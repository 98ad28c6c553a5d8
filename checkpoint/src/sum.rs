//! Sums of what tensors hold, however they are stored.

use crate::{Result, Source};
use xxhash_rust::xxh3::Xxh3;

/// The XXH3 of the elements of a tensor in row-major order, as 16 hexadecimal digits: the same for
/// equal tensors of any layout and format. At most `chunk` bytes of it are in memory.
///
/// ```
/// # use anymesh_checkpoint::{Memory, TensorInfo, content_sum};
/// # use anymesh_core::DType;
/// let mut source = Memory::default();
/// source.insert("w", TensorInfo { dtype: DType::U8, shape: vec![2, 3] }, vec![1, 2, 3, 4, 5, 6])?;
/// assert_eq!(content_sum(&source, "w", 2)?, content_sum(&source, "w", 100)?);
/// # Ok::<(), anymesh_checkpoint::Error>(())
/// ```
pub fn content_sum(source: &dyn Source, name: &str, chunk: usize) -> Result<String> {
    let info = source.info(name)?;
    let (mut sum, mut bytes) = (Xxh3::new(), vec![]);
    for slab in info.slabs(chunk) {
        bytes.resize(slab.numel() * info.dtype.size(), 0);
        source.read(name, &slab, &mut bytes)?;
        sum.update(&bytes);
    }
    Ok(format!("{:016x}", sum.digest()))
}

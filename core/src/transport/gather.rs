//! What processes tell each other.

use super::{Part, check::fail};
use crate::{DType, Mesh, Result, Tensor};

/// What every process of a mesh has to say, with its first rank, in the order of those ranks. Each of
/// them calls this, with any number of bytes.
///
/// ```
/// # use anymesh_core::{Mesh, transport::gather_bytes};
/// # let mesh = Mesh::new("dp=2", &anymesh_backend_cpu::device())?;
/// assert_eq!(gather_bytes(&mesh, b"alone")?, [(0, b"alone".to_vec())]);
/// # Ok::<(), anymesh_core::Error>(())
/// ```
pub fn gather_bytes(mesh: &Mesh, mine: &[u8]) -> Result<Vec<(usize, Vec<u8>)>> {
    let op = "gather_bytes";
    mesh.check_here(op)?;
    let Some(transport) = mesh.transport().filter(|_| !mesh.is_local()) else {
        return Ok(vec![(0, mine.to_vec())]);
    };
    // The first rank of a process speaks for it; the others say that they do not.
    let first = mesh.addressable().next();
    let own = |rank: usize| if Some(rank) == first { mine } else { &[] };
    let length = |rank: usize| match Some(rank) == first {
        true => mine.len() as i64,
        false => -1,
    };
    let part = |rank: usize, size: usize, dtype: DType, bytes: &[u8]| match mesh.position_of(rank) {
        Some(at) => Tensor::from_bytes(bytes, dtype, [size], mesh.device(at))
            .map(|data| Part::new(rank, &data)),
        None => Ok(Part::elsewhere(rank, dtype, [size])),
    };
    let lengths = (0..mesh.ranks())
        .map(|rank| part(rank, 1, DType::I64, &length(rank).to_le_bytes()))
        .collect::<Result<Vec<_>>>()?;
    let lengths = transport.all_gather(mesh, &lengths, 0)?;
    let lengths = lengths.into_iter().flatten().next();
    let lengths: Vec<Option<usize>> = match lengths {
        Some(told) => told.to_vec::<i64>()?,
        None => vec![],
    }
    .into_iter()
    .map(|n| usize::try_from(n).ok())
    .collect();
    let parts = (lengths.iter().enumerate())
        .map(|(rank, n)| part(rank, n.unwrap_or(0), DType::U8, own(rank)))
        .collect::<Result<Vec<_>>>()?;
    let all = transport.all_gather(mesh, &parts, 0)?;
    let all = match all.into_iter().flatten().next() {
        Some(all) => all.to_bytes()?,
        None => vec![],
    };
    let (mut rest, mut out) = (all.as_slice(), vec![]);
    for (rank, n) in lengths.into_iter().enumerate() {
        let Some(n) = n else { continue };
        let short = || fail(op, &[rank], "it sent fewer bytes than it said");
        let (bytes, after) = rest.split_at_checked(n).ok_or_else(short)?;
        out.push((rank, bytes.to_vec()));
        rest = after;
    }
    Ok(out)
}

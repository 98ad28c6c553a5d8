//! The values of a tensor on the host, read rank by rank: no transport, no kernel and no rule has a
//! part in it, because those are what is judged.

use super::elements::combined;
use crate::{DType, Error, Region, Result, Shape, Sharding, Tensor};

/// A whole tensor, dense.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Value {
    pub(super) dtype: DType,
    pub(super) shape: Shape,
    pub(super) bytes: Vec<u8>,
}

/// What a rank says that a box of a tensor is.
pub(super) struct Part {
    pub(super) rank: usize,
    pub(super) region: Region,
    pub(super) bytes: Vec<u8>,
}

/// Whether there is anything to compare here: not on a device without values, nor for ranks of
/// other processes.
pub(super) fn is_readable(x: &Tensor) -> bool {
    let mesh = x.mesh();
    let has_values = || (0..mesh.held().len()).all(|i| mesh.device(i).has_values());
    mesh.is_single() && has_values() || mesh.is_local() && mesh.has_values() && has_values()
}

/// The bytes of a plain tensor, dense.
fn dense(x: &Tensor) -> Result<Vec<u8>> {
    let Some((buffer, layout)) = x.memory().filter(|_| x.numel() > 0) else {
        return Ok(Vec::new());
    };
    let (size, backend) = (x.dtype().size(), x.device().backend());
    let fetched;
    let all = match backend.in_place(buffer) {
        Some(bytes) => bytes,
        None => {
            let whole = 0..buffer.bytes() as usize;
            fetched = crate::wait::wait("compare", backend.download(buffer, whole))?;
            &fetched[..]
        }
    };
    let (run, first) = layout.runs();
    let mut out = Vec::with_capacity(x.numel() * size);
    for at in first.positions() {
        let run = all.get(at * size..(at + run) * size);
        out.extend(run.ok_or_else(|| Error::DeviceFailed {
            device: x.device().to_string(),
            detail: "a buffer is shorter than what is read from it".into(),
        })?);
    }
    Ok(out)
}

/// What each rank has; where ranks have terms, what those make together. Ranks that share memory
/// are there once.
pub(super) fn parts(x: &Tensor) -> Result<Vec<Part>> {
    let (mesh, sharding, shape) = (x.mesh(), x.sharding(), x.shape());
    if mesh.is_single() {
        let whole = Region {
            start: smallvec::smallvec![0; shape.rank()],
            shape: shape.dims().into(),
        };
        let bytes = dense(x)?;
        let part = Part {
            rank: 0,
            region: whole,
            bytes,
        };
        return Ok(vec![part]);
    }
    let partial: Vec<usize> = sharding.partial().map(|(axis, _)| axis).collect();
    let mut seen: Vec<(Region, Vec<Tensor>)> = Vec::new();
    let mut out = Vec::new();
    for (_, rank) in mesh.held() {
        // The first of those who have terms of the same speaks for all.
        if partial.iter().any(|axis| mesh.coordinate(rank, *axis) > 0) {
            continue;
        }
        let region = sharding.region(mesh, rank, shape);
        let terms: Vec<Tensor> = (mesh.group(rank, &partial).into_iter())
            .filter_map(|rank| mesh.position_of(rank))
            .map(|i| x.held(i))
            .collect();
        let known = seen.iter().any(|(other, others)| {
            let same = |(a, b): (&Tensor, &Tensor)| {
                a.shares_memory(b) && a.layout() == b.layout() && a.device() == b.device()
            };
            *other == region && others.len() == terms.len() && others.iter().zip(&terms).all(same)
        });
        if known || region.numel() == 0 {
            continue;
        }
        let mut bytes = terms.iter().map(dense).collect::<Result<Vec<_>>>()?;
        let bytes = match sharding.partial().next() {
            Some((_, reduction)) => combined(x.dtype(), reduction, &bytes),
            None => bytes.pop().unwrap_or_default(),
        };
        seen.push((region.clone(), terms));
        out.push(Part {
            rank,
            region,
            bytes,
        });
    }
    Ok(out)
}

/// The first element of every row of a box in the whole tensor, and how long rows are.
pub(super) fn rows(region: &Region, shape: &Shape) -> (usize, Vec<usize>) {
    let (run, first) = region.of(&crate::Layout::contiguous(shape.clone())).runs();
    (run, first.positions().collect())
}

impl Part {
    /// Whether it has the bits of a value.
    pub(super) fn is_of(&self, value: &Value) -> bool {
        let size = value.dtype.size();
        let (run, first) = rows(&self.region, &value.shape);
        let mut rows = self.bytes.chunks_exact((run * size).max(1)).zip(first);
        rows.all(|(row, at)| *row == value.bytes[at * size..][..run * size])
    }
}

impl Value {
    /// What the parts of a tensor make together: where several ranks have a box, what the last of
    /// them has.
    pub(super) fn of(x: &Tensor, parts: &[Part]) -> Self {
        let size = x.dtype().size();
        let mut bytes = vec![0; x.numel() * size];
        for part in parts {
            let (run, first) = rows(&part.region, x.shape());
            for (row, at) in part.bytes.chunks_exact((run * size).max(1)).zip(first) {
                bytes[at * size..][..run * size].copy_from_slice(row);
            }
        }
        Self {
            dtype: x.dtype(),
            shape: x.shape().clone(),
            bytes,
        }
    }

    /// A tensor that lies as `x` does and has these values. What is partial stays as it is: there
    /// is more than one way to cut a value into terms.
    pub(super) fn in_place_of(&self, x: &Tensor) -> Result<Tensor> {
        let (mesh, sharding): (_, &Sharding) = (x.mesh(), x.sharding());
        if sharding.is_partial() {
            return Ok(x.clone());
        }
        let shape = self.shape.clone();
        if mesh.is_single() {
            let plain = Tensor::from_bytes(&self.bytes, self.dtype, shape, x.device())?;
            return Ok(with_past(plain, x));
        }
        let cut = Tensor::from_bytes(&self.bytes, self.dtype, shape, (mesh, sharding))?;
        Ok(match cut.shared_shards() {
            // The same value to those who know it by its forms.
            Some(shards) => with_past(x.with_form(sharding.clone(), shards.clone()), x),
            None => with_past(cut, x),
        })
    }
}

fn with_past(mut value: Tensor, of: &Tensor) -> Tensor {
    if let Some(edge) = of.edge() {
        value.attach(edge.clone());
    }
    value
}

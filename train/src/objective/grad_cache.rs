//! Losses over a batch whose activations do not fit: encoded in chunks, twice.

use super::{Error, Result};
use crate::Pass;
use anymesh_core::{
    Tensor,
    grad::{Gradients, no_grad},
};
use std::ops::Range;

/// Some rows of one of the sets that a loss compares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Of which set: queries are 0 and passages 1, say.
    pub set: usize,
    /// The how manieth of all chunks.
    pub index: usize,
    /// Which rows of the set.
    pub rows: Range<usize>,
}

/// A loss over representations of the whole global batch with the activations of one chunk in
/// memory (GradCache): chunks are encoded without a graph, the loss gives the gradient of all
/// representations, and each chunk is encoded again and gone back from with its part of it. It costs
/// a second forward pass.
///
/// The gradients are those of the loss, not an estimate. Dropout too is the same both times, because
/// each chunk has random keys that are values. They have the bits of a program that encodes the
/// same chunks with a graph and goes back once, where each parameter is used once for a chunk and
/// nothing is cut: second passes go backwards through the chunks, as that program's backward pass
/// does. A parameter that is used twice has its gradients added in another order, as do partial sums
/// on meshes, and a program that encodes all rows in one product adds them up in that product's
/// order.
///
/// ```
/// # use anymesh_core::{DType, Tensor, grad::Gradients, ops::Rng};
/// # use anymesh_train::{Pass, objective::{Contrastive, GradCache, contrastive}};
/// # let device = anymesh_backend_cpu::device();
/// # let normal = |n, seed| Tensor::normal([n, 8], 0.0, 1.0, DType::F32, &device, Rng::new(seed));
/// let (queries, passages) = (normal(6, 1)?, normal(12, 2)?);
/// let weight = normal(8, 3)?.require_grad()?;
/// let options = Contrastive { group: 2, ..Default::default() };
/// let mut gradients = Gradients::default();
/// let loss = GradCache::new(4)?.run(
///     &[6, 12],
///     &Pass::train(Rng::new(0)),
///     |chunk, _| {
///         let set = [&queries, &passages][chunk.set];
///         Ok(set.narrow(0, chunk.rows.start, chunk.rows.len())?.linear(&weight, None)?)
///     },
///     |found| contrastive(&found[0], &found[1], &options),
///     |more| Ok(gradients.add(more)?),
/// )?;
/// let [q, p] = [queries.linear(&weight, None)?, passages.linear(&weight, None)?];
/// let whole = contrastive(&q, &p, &options)?;
/// assert_eq!(loss.item()?, whole.item()?);
/// let apart = gradients.of(&weight)?.sub(&whole.backward()?.of(&weight)?)?;
/// assert!(apart.abs()?.max_all()?.item()?.to_f64() < 1e-5);
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GradCache {
    chunk: usize,
}

impl GradCache {
    /// With at most this many rows in a chunk.
    pub fn new(chunk: usize) -> Result<Self> {
        match chunk {
            0 => Err(Error::config("chunk", "a chunk has one row or more")),
            _ => Ok(Self { chunk }),
        }
    }

    /// The chunks of sets of these numbers of rows, in the order in which they are encoded.
    pub fn chunks(&self, sets: &[usize]) -> Vec<Chunk> {
        let mut chunks = vec![];
        for (set, &rows) in sets.iter().enumerate() {
            for start in (0..rows).step_by(self.chunk) {
                chunks.push(Chunk {
                    set,
                    index: chunks.len(),
                    rows: start..rows.min(start + self.chunk),
                });
            }
        }
        chunks
    }

    /// The loss, without its past. `encode` gives the representations of a chunk, a row for each of
    /// its rows, and must give the same ones again in the second pass: it is called with the same
    /// [`Pass`]. `loss` gets those of each set. `add` gets gradients chunk by chunk, and those of
    /// what the loss itself learns (a temperature), to be added up.
    #[track_caller]
    pub fn run(
        &self,
        sets: &[usize],
        pass: &Pass,
        mut encode: impl FnMut(&Chunk, &Pass) -> Result<Tensor>,
        loss: impl FnOnce(&[Tensor]) -> Result<Tensor>,
        mut add: impl FnMut(Gradients) -> Result<()>,
    ) -> Result<Tensor> {
        if let Some(set) = sets.iter().position(|rows| *rows == 0) {
            return Err(Error::config("sets", format!("set {set} has no rows")));
        }
        let chunks = self.chunks(sets);
        let mut found: Vec<Vec<Tensor>> = vec![vec![]; sets.len()];
        for chunk in &chunks {
            let rows = no_grad(|| encode(chunk, &pass.part(chunk.index)))?;
            check_rows(chunk, &rows)?;
            found[chunk.set].push(rows.detach());
        }
        let mut cached = Vec::with_capacity(sets.len());
        for parts in found {
            let refs: Vec<&Tensor> = parts.iter().collect();
            let whole = no_grad(|| Tensor::concat(&refs, 0))?;
            cached.push(whole.require_grad()?);
        }
        let loss = loss(&cached)?;
        let mut gradients = loss.backward()?;
        let seeds = cached
            .iter()
            .map(|set| gradients.take(set))
            .collect::<anymesh_core::Result<Vec<_>>>()?;
        drop(cached);
        add(gradients)?;
        // As one backward pass through all of them would go.
        for chunk in chunks.iter().rev() {
            let rows = encode(chunk, &pass.part(chunk.index))?;
            check_rows(chunk, &rows)?;
            let (start, len) = (chunk.rows.start, chunk.rows.len());
            let seed = no_grad(|| seeds[chunk.set].narrow(0, start, len))?;
            add(rows.backward_with(&seed)?)?;
        }
        Ok(loss.detach())
    }
}

fn check_rows(chunk: &Chunk, found: &Tensor) -> Result<()> {
    match found.dims().first() {
        Some(rows) if *rows == chunk.rows.len() => Ok(()),
        _ => Err(Error::config(
            "encode",
            format!(
                "rows {:?} of set {} were encoded as {}: a representation for each row is needed",
                chunk.rows,
                chunk.set,
                found.type_string()
            ),
        )),
    }
}

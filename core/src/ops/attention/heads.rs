//! Query heads that are cut finer than there are key heads, or across their bounds.

use crate::{Result, Tensor, ops::PadMode};
use smallvec::SmallVec;
use std::ops::Range;

/// Which of all key heads the query heads of a rank read, each of which is read by `group` of all
/// query heads.
pub(super) struct KeyHeads {
    pub(super) all: usize,
    pub(super) group: usize,
    /// The query heads; none where their key heads are all that the rank has.
    pub(super) queries: Option<Range<usize>>,
}

impl KeyHeads {
    /// For each of its key heads, how many of its query heads read it.
    fn readers(&self, queries: &Range<usize>) -> SmallVec<[(usize, usize); 4]> {
        let mut readers: SmallVec<[(usize, usize); 4]> = SmallVec::new();
        for head in queries.clone().map(|q| q / self.group) {
            match readers.last_mut() {
                Some((last, count)) if *last == head => *count += 1,
                _ => readers.push((head, 1)),
            }
        }
        readers
    }

    /// Whether each is read by as many: else each is repeated for every reader.
    fn is_even(readers: &[(usize, usize)]) -> bool {
        readers.iter().all(|(_, count)| *count == readers[0].1)
    }

    /// Keys or values `[b, h, t, d]` as its queries read them.
    pub(super) fn of(&self, x: &Tensor) -> Result<Tensor> {
        let Some(queries) = &self.queries else {
            return Ok(x.clone());
        };
        let readers = self.readers(queries);
        let Some((first, _)) = readers.first() else {
            return x.narrow(1, 0, 0);
        };
        let read = x.narrow(1, *first, readers.len())?;
        if Self::is_even(&readers) {
            return Ok(read);
        }
        let repeated = (readers.iter().enumerate())
            .map(|(i, (_, count))| {
                let one = read.narrow(1, i, 1)?;
                one.expand(one.shape().with(1, *count))
            })
            .collect::<Result<Vec<_>>>()?;
        Tensor::concat(&repeated.iter().collect::<Vec<_>>(), 1)
    }

    /// The gradient of all key heads from that of [`of`](Self::of).
    pub(super) fn back(&self, g: &Tensor) -> Result<Tensor> {
        let Some(queries) = &self.queries else {
            return Ok(g.clone());
        };
        let readers = self.readers(queries);
        let Some((first, _)) = readers.first() else {
            return Tensor::zeros(g.shape().with(1, self.all), g.dtype(), g.device());
        };
        let mut read = g.clone();
        if !Self::is_even(&readers) {
            let mut at = 0;
            let mut sums = Vec::with_capacity(readers.len());
            for (_, count) in &readers {
                sums.push(g.narrow(1, at, *count)?.sum(&[1], true)?);
                at += count;
            }
            read = Tensor::concat(&sums.iter().collect::<Vec<_>>(), 1)?;
        }
        let behind = self.all - first - readers.len();
        read.pad(
            &[(0, 0), (*first, behind), (0, 0), (0, 0)],
            PadMode::Constant(0.0.into()),
        )
    }
}

//! Batches, as a function of how many samples were consumed.

mod place;
mod steps;

use super::{Mixture, Sample, Source};
use crate::{Error, Result};
use anymesh_core::{IntoSharding, Mesh, Shape, Sharding, Tensor, ops::SequenceOrder};
use std::{ops::Range, sync::Arc, time::Duration};

pub use steps::Steps;

/// How a [`Loader`] reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoaderOptions {
    /// Samples of a global batch: of one step of the optimizer, over all ranks.
    pub batch: usize,
    /// Parts that a global batch is cut into, one after the other.
    pub micro_batches: usize,
    /// Which order samples come in, where they are shuffled.
    pub seed: u64,
    /// Whether samples are shuffled, in each epoch in another way.
    pub shuffle: bool,
    /// How often samples are gone through; without end if not given.
    pub epochs: Option<u64>,
    /// How a micro-batch `[rows, length]` lies on the mesh.
    pub sharding: String,
    /// The order of the positions of a row, before it is cut: that of the model
    /// ([`Model::order`](crate::models::Model::order)).
    pub order: SequenceOrder,
    /// The token that fills rows that are too short.
    pub pad: u32,
    /// Batches that are read ahead by a thread; none for 0.
    pub ahead: usize,
}

impl Default for LoaderOptions {
    fn default() -> Self {
        Self {
            batch: 1,
            micro_batches: 1,
            seed: 0,
            shuffle: true,
            epochs: None,
            sharding: "[@dp?@ep?, @cp?]".into(),
            order: SequenceOrder::Straight,
            pad: 0,
            ahead: 2,
        }
    }
}

/// A micro-batch: tensors `[rows, length]` of i32, all placed alike.
#[derive(Clone, Debug)]
pub struct Batch {
    /// The tokens that the model reads.
    pub ids: Tensor,
    /// The token that comes next; -100 where no loss is taken.
    pub labels: Tensor,
    /// Which document of its row a position belongs to; -1 is padding. Only where the source
    /// [has documents](Source::has_documents).
    pub documents: Option<Tensor>,
    /// Where in its document a position is. Only where the source has documents.
    pub positions: Option<Tensor>,
    /// The order that the positions of all of these are in.
    pub order: SequenceOrder,
}

impl Batch {
    /// Rows of one text each, in straight order.
    pub fn new(ids: Tensor, labels: Tensor) -> Self {
        Self {
            ids,
            labels,
            documents: None,
            positions: None,
            order: SequenceOrder::Straight,
        }
    }

    /// The same in another order. A [`Loader`] places batches in the order that its options say, and
    /// sends nothing for it; this is for batches that are made in another way.
    ///
    /// ```
    /// # use anymesh_core::{Tensor, ops::SequenceOrder};
    /// # use anymesh_train::data::Batch;
    /// # let device = anymesh_backend_cpu::device();
    /// let ids = Tensor::new(&[[10, 11, 12, 13]], &device)?;
    /// let labels = Tensor::new(&[[11, 12, 13, -100]], &device)?;
    /// let batch = Batch::new(ids, labels).in_order(SequenceOrder::Paired { ranks: 2 })?;
    /// assert_eq!(batch.ids.to_vec::<i32>()?, [10, 13, 11, 12]);
    /// assert_eq!(batch.labels.to_vec::<i32>()?, [11, -100, 12, 13], "the next token of each");
    /// # Ok::<(), anymesh_train::Error>(())
    /// ```
    pub fn in_order(&self, order: SequenceOrder) -> Result<Self> {
        let put = |x: &Tensor| x.from_order(1, self.order)?.in_order(1, order);
        let maybe = |x: &Option<Tensor>| x.as_ref().map(put).transpose();
        Ok(Self {
            ids: put(&self.ids)?,
            labels: put(&self.labels)?,
            documents: maybe(&self.documents)?,
            positions: maybe(&self.positions)?,
            order,
        })
    }

    /// How many positions have a label, over all rows: a number on the mesh, perhaps still a
    /// partial sum.
    pub fn valid(&self) -> Result<Tensor> {
        Ok(self.labels.ne(super::IGNORED)?.sum_all()?)
    }
}

/// A global batch: what one step of the optimizer learns from.
#[derive(Clone, Debug)]
pub struct Step {
    /// The positions of its samples. The end is what a checkpoint keeps: how many samples were
    /// consumed.
    pub positions: Range<u64>,
    /// Its parts, in order.
    pub micro_batches: Vec<Batch>,
    /// How long the program waited for it to be read.
    pub waited: Duration,
}

impl Step {
    /// How many positions of the global batch have a label: what the sum of their losses is divided
    /// by. It is a sum over global tensors, known before the first backward pass and the same on
    /// every mesh. All processes call this.
    pub fn valid(&self) -> Result<u64> {
        let mut valid = None;
        for batch in &self.micro_batches {
            let more = batch.valid()?;
            valid = Some(match valid {
                None => more,
                Some(sum) => more.add(&sum)?,
            });
        }
        match valid {
            None => Ok(0),
            Some(sum) => Ok(sum.item()?.to_f64() as u64),
        }
    }
}

/// Batches as a function of how many samples were consumed before. Its state is that one number: a
/// run resumes at any position, on any mesh, with any batch, and sees the samples it would have
/// seen.
///
/// A process reads only the rows that its ranks hold. The last batch of the last epoch is filled
/// with rows without labels.
///
/// ```
/// # use anymesh_core::Mesh;
/// # use anymesh_train::data::{Concat, Loader, LoaderOptions, Memory, Tokenizer};
/// # let device = anymesh_backend_cpu::device();
/// let mesh = Mesh::new("dp=2", &device)?;
/// let text = Memory::texts(["One sharded tensor program, any mesh."], &Tokenizer::bytes())?;
/// let options = LoaderOptions { batch: 4, epochs: Some(2), ..Default::default() };
/// let loader = Loader::new(Concat::new(text, 8)?, &mesh, options)?;
/// assert_eq!(loader.samples(), Some(10));
/// let mut consumed = 0;
/// for step in loader.steps(consumed) {
///     let step = step?;
///     let batch = &step.micro_batches[0];
///     assert_eq!(batch.ids.type_string(), "i32[4@dp, 8]");
///     consumed = step.positions.end;
/// }
/// assert_eq!(consumed, 10);
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Loader(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    mixture: Mixture,
    mesh: Mesh,
    options: LoaderOptions,
    sharding: Sharding,
    /// The shape of a micro-batch.
    shape: Shape,
    /// The rows of a micro-batch that ranks of this process hold.
    rows: Vec<usize>,
    samples: Option<u64>,
    has_documents: bool,
}

/// What a process reads of a global batch, before it is placed.
#[derive(Debug)]
struct Rows {
    positions: Range<u64>,
    /// Every row of the global batch; those that nobody here holds were not read.
    samples: Vec<Option<Sample>>,
}

impl Loader {
    /// Batches of a source or of a [`Mixture`] of several.
    pub fn new(source: impl IntoMixture, mesh: &Mesh, options: LoaderOptions) -> Result<Self> {
        let mixture = source.into_mixture()?;
        let LoaderOptions {
            batch,
            micro_batches,
            ..
        } = options;
        if batch == 0 || micro_batches == 0 {
            let detail = format!(
                "{batch} samples in {micro_batches} micro-batches: at least one of each is needed"
            );
            return Err(Error::config("batch", detail));
        }
        if !batch.is_multiple_of(micro_batches) {
            let below = batch / micro_batches * micro_batches;
            let nearest = match below {
                0 => format!("the nearest is {micro_batches}"),
                _ => format!(
                    "the nearest are {below} and {}",
                    below.saturating_add(micro_batches)
                ),
            };
            let detail = format!(
                "global batch {batch} is not a multiple of {micro_batches} micro-batches: {nearest}"
            );
            return Err(Error::config("batch", detail));
        }
        if options.pad > i32::MAX as u32 {
            let detail = format!("{} is no token: tokens are below 2^31", options.pad);
            return Err(Error::config("data.pad", detail));
        }
        let shape = Shape::from([batch / micro_batches, mixture.length()]);
        options.order.check(shape[1])?;
        let sharding = options.sharding.as_str().into_sharding(mesh, 2)?;
        sharding.check(mesh, 2)?;
        if sharding.is_partial() {
            let detail = format!("'{}' has parts of sums: tokens are whole", options.sharding);
            return Err(Error::config("data.sharding", detail));
        }
        let samples = match options.epochs {
            None => None,
            Some(epochs) => {
                let samples = mixture.count().checked_mul(epochs);
                Some(samples.filter(|n| *n > 0).ok_or_else(|| {
                    let detail = format!("{epochs} epochs of {} samples", mixture.count());
                    Error::config("data.epochs", detail)
                })?)
            }
        };
        Ok(Self(Arc::new(Inner {
            rows: place::rows_here(mesh, &sharding, &shape),
            has_documents: mixture.has_documents(),
            mesh: mesh.clone(),
            mixture,
            options,
            sharding,
            shape,
            samples,
        })))
    }

    /// All samples once, in their order: what evaluation reads.
    pub fn evaluation(
        source: impl IntoMixture,
        mesh: &Mesh,
        options: LoaderOptions,
    ) -> Result<Self> {
        let options = LoaderOptions {
            shuffle: false,
            epochs: Some(1),
            ..options
        };
        Self::new(source, mesh, options)
    }

    /// The options.
    pub fn options(&self) -> &LoaderOptions {
        &self.0.options
    }

    /// The length of rows.
    pub fn length(&self) -> usize {
        self.0.shape[1]
    }

    /// How many samples there are in all epochs, if they end.
    pub fn samples(&self) -> Option<u64> {
        self.0.samples
    }

    /// How many steps there are after so many samples, if they end.
    pub fn steps_after(&self, consumed: u64) -> Option<u64> {
        let left = self.0.samples?.saturating_sub(consumed);
        Some(left.div_ceil(self.0.options.batch as u64))
    }

    /// The global batch after so many samples; none where there are no more.
    pub fn step(&self, consumed: u64) -> Result<Option<Step>> {
        let began = std::time::Instant::now();
        let Some(rows) = self.read(consumed)? else {
            return Ok(None);
        };
        Ok(Some(self.place(&rows, began.elapsed())?))
    }

    /// All global batches after so many samples, read ahead by a thread.
    pub fn steps(&self, consumed: u64) -> Steps {
        Steps::new(self.clone(), consumed)
    }

    /// Reads what this process holds of a global batch.
    fn read(&self, consumed: u64) -> Result<Option<Rows>> {
        let this = &*self.0;
        let (batch, options) = (this.options.batch as u64, &this.options);
        let Some(end) = consumed.checked_add(batch) else {
            let detail = format!("{consumed} samples cannot have been consumed");
            return Err(Error::config("data.consumed", detail));
        };
        let end = this.samples.map_or(end, |samples| end.min(samples));
        if end <= consumed {
            return Ok(None);
        }
        let mut samples = vec![None; options.batch];
        let rows = this.shape[0];
        for micro in 0..options.micro_batches {
            for row in &this.rows {
                let row = micro * rows + row;
                let position = consumed + row as u64;
                samples[row] = Some(match position < end {
                    true => self.sample(position)?,
                    // What is beyond the last epoch.
                    false => Sample::default(),
                });
            }
        }
        Ok(Some(Rows {
            positions: consumed..end,
            samples,
        }))
    }

    /// The sample at a position.
    pub fn sample(&self, position: u64) -> Result<Sample> {
        let this = &*self.0;
        let options = &this.options;
        let (source, index) = this.mixture.at(position, options.seed, options.shuffle);
        let sample = this.mixture.sample(source, index)?;
        let lengths = [
            sample.ids.len(),
            sample.labels.len(),
            sample.documents.len(),
            sample.positions.len(),
        ];
        if lengths[0] > this.shape[1] || lengths.iter().any(|len| *len != lengths[0]) {
            let detail = format!(
                "sample {index} of source {source} has {lengths:?} tokens, labels, documents and positions: its rows have {}",
                this.shape[1]
            );
            return Err(Error::config("data", detail));
        }
        Ok(sample)
    }
}

/// What a [`Loader`] reads from: a [`Source`], or several as a [`Mixture`].
pub trait IntoMixture {
    /// As a mixture.
    fn into_mixture(self) -> Result<Mixture>;
}

impl<S: Source + 'static> IntoMixture for S {
    fn into_mixture(self) -> Result<Mixture> {
        Mixture::one(self)
    }
}

impl IntoMixture for Mixture {
    fn into_mixture(self) -> Result<Mixture> {
        Ok(self)
    }
}

#[cfg(test)]
mod tests;

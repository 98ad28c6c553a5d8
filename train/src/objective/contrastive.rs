//! Contrastive training: each query is to find its passage among all passages of the global batch.

use super::{
    Error, Result, check_dims, check_floats, chunks::sum_over_chunks, entropy::entropy, loss_type,
};
use anymesh_core::{DType, Tensor, ops::LossReduction};

/// What cosines are divided by.
#[derive(Clone, Debug)]
pub enum Temperature {
    /// This number, above zero.
    Constant(f64),
    /// The exponential of a scalar, which is learned: its own logarithm begins at `ln 0.05`, say.
    Learned(Tensor),
}

/// How [`contrastive`] compares.
#[derive(Clone, Debug)]
pub struct Contrastive {
    /// What cosines are divided by; 0.05 unless told.
    pub temperature: Temperature,
    /// How many passages each query brings: its own, which comes first, and hard negatives. The
    /// passage of query `i` is number `i * group`.
    pub group: usize,
    /// Whether passages are to find their queries too: the mean of both directions.
    pub symmetric: bool,
    /// With the scores of at most this many queries in memory at a time; the backward pass makes
    /// them again. For batches whose square is large.
    pub chunk: Option<usize>,
}

impl Default for Contrastive {
    fn default() -> Self {
        Self {
            temperature: Temperature::Constant(0.05),
            group: 1,
            symmetric: false,
            chunk: None,
        }
    }
}

/// The first values of a representation, which are to be a representation of their own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prefix {
    /// How many values.
    pub width: usize,
    /// What their loss is multiplied with.
    pub weight: f64,
}

impl Prefix {
    /// Prefixes that all weigh the same.
    pub fn all(widths: &[usize]) -> Vec<Self> {
        let of = |&width: &usize| Self { width, weight: 1.0 };
        widths.iter().map(of).collect()
    }
}

impl Contrastive {
    fn check(&self, queries: &Tensor, passages: &Tensor) -> Result<()> {
        check_floats(&[("queries", queries), ("passages", passages)])?;
        if self.group == 0 {
            return Err(Error::config("group", "a query brings one passage or more"));
        }
        if self.chunk == Some(0) {
            return Err(Error::config("chunk", "a chunk has one query or more"));
        }
        match &self.temperature {
            Temperature::Constant(t) if !(t.is_finite() && *t > 0.0) => {
                let detail = format!("cosines cannot be divided by {t}: give a number above 0");
                return Err(Error::config("temperature", detail));
            }
            Temperature::Learned(log) if log.numel() != 1 || !log.dtype().is_float() => {
                let found = log.type_string();
                let detail = format!("a learned temperature is one float, this is {found}");
                return Err(Error::config("temperature", detail));
            }
            _ => {}
        }
        let (count, width) = match *queries.dims() {
            [count, width] if count > 0 => (count, width),
            _ => {
                let found = queries.type_string();
                let detail = format!("representations are [batch, width], these are {found}");
                return Err(Error::config("queries", detail));
            }
        };
        let because = format!("{count} queries with {} passages each", self.group);
        check_dims("passages", passages, &[count * self.group, width], &because)
    }

    /// Vectors of length one, and queries divided by the temperature.
    fn prepared(&self, queries: &Tensor, passages: &Tensor) -> Result<[Tensor; 2]> {
        let dtype = loss_type(&[queries, passages]);
        let unit = |x: &Tensor| x.cast(dtype)?.normalize(2.0, -1, 1e-12);
        let queries = match &self.temperature {
            Temperature::Constant(t) => unit(queries)?.mul(1.0 / t)?,
            Temperature::Learned(log) => {
                let scale = log.reshape(())?.cast(dtype)?.neg()?.exp()?;
                unit(queries)?.mul(&scale)?
            }
        };
        Ok([queries, unit(passages)?])
    }

    /// The sum over rows of the cross-entropy of their products with columns, of which row `i` is
    /// to find number `i * group`.
    #[track_caller]
    fn sum(&self, rows: &Tensor, columns: &Tensor, group: usize) -> Result<Tensor> {
        let count = rows.dims()[0];
        let mesh = rows.mesh();
        let targets = Tensor::arange(0, (count * group) as i64, group as i64, DType::I32, mesh)?;
        let columns = columns.t()?;
        let loss = move |rows: &Tensor, targets: &Tensor| -> Result<Tensor> {
            let scores = rows.matmul(&columns)?;
            Ok(entropy(&scores, targets, None, 0.0, LossReduction::Sum)?)
        };
        let Some(chunk) = self.chunk else {
            return loss(rows, &targets);
        };
        let sum = sum_over_chunks(&[(rows, 0), (&targets, 0)], chunk, move |parts| {
            loss(&parts[0], &parts[1])
        })?;
        sum.ok_or_else(|| Error::config("queries", "there are none"))
    }

    #[track_caller]
    fn mean(&self, queries: &Tensor, passages: &Tensor) -> Result<Tensor> {
        let [queries, passages] = self.prepared(queries, passages)?;
        let count = queries.dims()[0] as f64;
        let forth = self.sum(&queries, &passages, self.group)?;
        if !self.symmetric {
            return Ok(forth.mul(1.0 / count)?);
        }
        let own = passages.slice(0, None, None, self.group as i64)?;
        let back = self.sum(&own, &queries, 1)?;
        Ok(forth.add(&back)?.mul(0.5 / count)?)
    }
}

/// InfoNCE: the mean over all queries of the global batch of the cross-entropy of their cosines with
/// all passages, divided by a temperature. Queries are `[n, width]`, passages `[n * group, width]`;
/// both are normalised here.
///
/// What ranks hold of either does not matter: remote passages have gradients as near ones do, and
/// nothing is to be scaled by the number of ranks.
///
/// ```
/// # use anymesh_core::{Mesh, Tensor};
/// # use anymesh_train::objective::{Contrastive, Temperature, contrastive};
/// # let device = anymesh_backend_cpu::device();
/// let mesh = Mesh::new("dp=3", &device)?;
/// // Four queries that are their own passages, at right angles.
/// let one = |at: &[usize]| f64::from(at[0] == at[1]);
/// let x = Tensor::from_fn([4, 4], (&mesh, "[@dp, _]"), one)?;
/// let temperature = Temperature::Constant(0.5);
/// let loss = contrastive(&x, &x, &Contrastive { temperature, ..Default::default() })?;
/// let expected = (1.0 + 3.0 * f64::exp(-2.0)).ln();
/// assert!((loss.item()?.to_f64() - expected).abs() < 1e-12);
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[track_caller]
pub fn contrastive(queries: &Tensor, passages: &Tensor, options: &Contrastive) -> Result<Tensor> {
    options.check(queries, passages)?;
    options.mean(queries, passages)
}

/// [`contrastive`] on prefixes of the representations, each normalised anew: the sum of their
/// losses. What is learned can be cut off after any of these widths.
#[track_caller]
pub fn matryoshka(
    queries: &Tensor,
    passages: &Tensor,
    prefixes: &[Prefix],
    options: &Contrastive,
) -> Result<Tensor> {
    options.check(queries, passages)?;
    let mut sum: Option<Tensor> = None;
    for Prefix { width, weight } in prefixes {
        let whole = queries.dims()[1];
        if *width == 0 || *width > whole {
            let detail = format!("representations of {whole} values have no first {width}");
            return Err(Error::config("prefixes", detail));
        }
        if !(weight.is_finite() && *weight >= 0.0) {
            let detail = format!("a prefix weighs 0 or more, not {weight}");
            return Err(Error::config("prefixes", detail));
        }
        let first = |x: &Tensor| x.narrow(-1, 0, *width);
        let loss = options.mean(&first(queries)?, &first(passages)?)?;
        let loss = match *weight == 1.0 {
            true => loss,
            false => loss.mul(*weight)?,
        };
        sum = Some(match sum {
            None => loss,
            Some(sum) => sum.add(&loss)?,
        });
    }
    sum.ok_or_else(|| Error::config("prefixes", "give one width or more"))
}

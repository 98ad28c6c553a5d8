//! What is read of a tensor, and how: part by part where it lies, with a stride where it is large.

use crate::{number::grouped, value};
use anymesh_core::{
    DType, Element, F8E4M3, F8E5M2, Placement, Reduction, Region, Result, Scalar, Tensor, bf16, f16,
};
use std::collections::BTreeSet;

/// Matrices that are shown of a tensor with more than two dimensions.
const MATRICES: usize = 8;
/// Elements that are read without leaving some out.
const ALL: usize = 1 << 20;
/// Rows and columns that are read of more.
const SIDE: usize = 512;

/// Elements of a tensor at equal distances.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    /// The sizes of the tensor.
    pub(super) dims: Vec<usize>,
    /// Of each dimension how many were read, and how far apart; the first is element 0.
    pub(super) chosen: Vec<(usize, usize)>,
    /// In row-major order; nothing where they lie in another process.
    pub(super) values: Vec<Option<Scalar>>,
    statistics: Statistics,
}

/// What the values come to.
#[derive(Clone, Copy, Debug, Default)]
struct Statistics {
    /// How many were looked at.
    count: usize,
    nan: usize,
    infinite: usize,
    /// Of those that are finite.
    low: f64,
    high: f64,
    mean: f64,
    /// Not known where a device computed the others.
    deviation: Option<f64>,
    /// Whether these are all that the tensor has.
    all: bool,
    /// What was found among all values, where these are only some.
    found: &'static str,
}

/// Which elements are read: all, or of a large tensor some.
fn choose(dims: &[usize]) -> Vec<(usize, usize)> {
    let outer = dims.len().saturating_sub(2);
    let mut room = MATRICES;
    let mut chosen: Vec<(usize, usize)> = (dims[..outer].iter().rev())
        .map(|n| {
            let taken = (*n).min(room);
            room /= taken.max(1);
            (taken, 1)
        })
        .collect();
    chosen.reverse();
    let matrices: usize = chosen.iter().map(|(n, _)| n).product();
    let inner = dims[outer..]
        .iter()
        .fold(matrices, |n, d| n.saturating_mul(*d));
    for n in &dims[outer..] {
        let step = match inner <= ALL {
            true => 1,
            false => n.div_ceil(SIDE).max(1),
        };
        chosen.push((n.div_ceil(step), step));
    }
    chosen
}

pub(super) async fn sample(x: &Tensor) -> Result<Sample> {
    let dims = x.dims().to_vec();
    let chosen = choose(&dims);
    let values = read(x, &chosen).await?;
    let mut statistics = Statistics::of(&values);
    statistics.all = statistics.count == x.numel();
    if !statistics.all && !x.sharding().is_partial() && x.mesh().is_local() {
        statistics = statistics.on_device(x).await?;
    }
    Ok(Sample {
        dims,
        chosen,
        values,
        statistics,
    })
}

/// The parts of this process that are to be read, each once.
fn parts(x: &Tensor) -> Vec<(Region, Tensor)> {
    let x = &x.detach();
    let (mesh, sharding) = (x.mesh(), x.sharding());
    if x.is_plain() {
        let whole = Region {
            start: x.dims().iter().map(|_| 0).collect(),
            shape: x.dims().iter().copied().collect(),
        };
        return vec![(whole, x.clone())];
    }
    let mut seen = BTreeSet::new();
    let mut out = vec![];
    for (rank, part) in x.shards() {
        let held = sharding.region(mesh, rank, x.shape());
        // Terms of a reduction differ where their places are the same.
        let first = match sharding.is_partial() {
            true => (0..mesh.axes().len()).all(|axis| {
                sharding.placement(axis) != Placement::Replicate || mesh.coordinate(rank, axis) == 0
            }),
            false => seen.insert((held.start.to_vec(), held.shape.to_vec())),
        };
        if first && held.numel() > 0 {
            out.push((held, part));
        }
    }
    out
}

/// The chosen elements, as far as they are in this process.
async fn read(x: &Tensor, chosen: &[(usize, usize)]) -> Result<Vec<Option<Scalar>>> {
    let total: usize = chosen.iter().map(|(n, _)| n).product();
    let mut out = vec![None; total];
    let partial = x.sharding().partial().next().map(|(_, r)| r);
    if partial.is_some() && !x.mesh().is_local() {
        // Some of the terms are elsewhere, so no value is known.
        return Ok(out);
    }
    for (held, part) in parts(x) {
        // The chosen elements of the part: of each dimension a range of those that were chosen.
        let mut ranges = vec![];
        let mut view = part;
        for (d, (count, step)) in chosen.iter().enumerate() {
            let (start, end) = (held.start[d], held.start[d] + held.shape[d]);
            let (from, to) = (start.div_ceil(*step), end.div_ceil(*step).min(*count));
            ranges.push(from..to.max(from));
            if from < to && (to - from < held.shape[d]) {
                let first = (from * step - start) as i64;
                let last = ((to - 1) * step - start) as i64 + 1;
                view = view.slice(d as i64, Some(first), Some(last), *step as i64)?;
            }
        }
        if ranges.iter().any(|r| r.is_empty()) {
            continue;
        }
        let values = scalars(x.dtype(), &view.to_bytes_async().await?);
        for (i, value) in values.into_iter().enumerate() {
            let (mut rest, mut stride, mut at) = (i, 1, 0);
            for (range, (count, _)) in ranges.iter().zip(chosen).rev() {
                at += (range.start + rest % range.len()) * stride;
                rest /= range.len();
                stride *= count;
            }
            out[at] = Some(match (out[at], partial) {
                (Some(other), Some(reduction)) => combined(reduction, x.dtype(), other, value),
                _ => value,
            });
        }
    }
    Ok(out)
}

/// Stored elements as numbers.
fn scalars(dtype: DType, bytes: &[u8]) -> Vec<Scalar> {
    fn all<T: Element>(bytes: &[u8], number: impl Fn(T) -> Scalar) -> Vec<Scalar> {
        T::from_bytes(bytes).into_iter().map(number).collect()
    }
    let float = |x: f32| Scalar::Float(x.into());
    match dtype {
        DType::Bool => all(bytes, Scalar::Bool),
        DType::U8 => all::<u8>(bytes, |v| Scalar::Int(v.into())),
        DType::U32 => all::<u32>(bytes, |v| Scalar::Int(v.into())),
        DType::I32 => all::<i32>(bytes, |v| Scalar::Int(v.into())),
        DType::I64 => all(bytes, Scalar::Int),
        DType::F8E4M3 => all::<F8E4M3>(bytes, |v| float(v.to_f32())),
        DType::F8E5M2 => all::<F8E5M2>(bytes, |v| float(v.to_f32())),
        DType::F16 => all::<f16>(bytes, |v| float(v.to_f32())),
        DType::BF16 => all::<bf16>(bytes, |v| float(v.to_f32())),
        DType::F32 => all::<f32>(bytes, float),
        DType::F64 => all(bytes, Scalar::Float),
    }
}

/// What two terms come to: exact for integers, and for floats to more digits than are shown.
fn combined(reduction: Reduction, dtype: DType, a: Scalar, b: Scalar) -> Scalar {
    let (x, y) = (a.to_f64(), b.to_f64());
    let (i, j) = (a.to_i64(), b.to_i64());
    let float = dtype.is_float();
    let wrapped = |n: i64| {
        Scalar::Int(match dtype {
            DType::U8 => i64::from(n as u8),
            DType::U32 => i64::from(n as u32),
            DType::I32 => i64::from(n as i32),
            _ => n,
        })
    };
    match reduction {
        Reduction::And => Scalar::Bool(a.to_bool() && b.to_bool()),
        Reduction::Or => Scalar::Bool(a.to_bool() || b.to_bool()),
        Reduction::Max | Reduction::Min if float && (x.is_nan() || y.is_nan()) => {
            Scalar::Float(f64::NAN)
        }
        Reduction::Sum if float => Scalar::Float(x + y),
        Reduction::Prod if float => Scalar::Float(x * y),
        Reduction::Max if float => Scalar::Float(x.max(y)),
        Reduction::Min if float => Scalar::Float(x.min(y)),
        Reduction::Sum => wrapped(i.wrapping_add(j)),
        Reduction::Prod => wrapped(i.wrapping_mul(j)),
        Reduction::Max => wrapped(i.max(j)),
        Reduction::Min => wrapped(i.min(j)),
    }
}

impl Statistics {
    fn of(values: &[Option<Scalar>]) -> Self {
        let mut out = Statistics {
            low: f64::INFINITY,
            high: f64::NEG_INFINITY,
            ..Statistics::default()
        };
        let (mut finite, mut sum) = (0usize, 0.0);
        for v in values.iter().flatten().map(|v| v.to_f64()) {
            out.count += 1;
            match v {
                v if v.is_nan() => out.nan += 1,
                v if v.is_infinite() => out.infinite += 1,
                v => {
                    (out.low, out.high) = (out.low.min(v), out.high.max(v));
                    finite += 1;
                    sum += v;
                }
            }
        }
        out.mean = sum / finite.max(1) as f64;
        let squares: f64 = (values.iter().flatten().map(|v| v.to_f64()))
            .filter(|v| v.is_finite())
            .map(|v| (v - out.mean) * (v - out.mean))
            .sum();
        out.deviation = Some((squares / finite.max(1) as f64).sqrt());
        out
    }

    /// Of all elements, computed part by part where these lie. Values that are no numbers would
    /// hide the others: then only that is added.
    async fn on_device(mut self, x: &Tensor) -> Result<Self> {
        if x.dtype() == DType::Bool {
            return Ok(self);
        }
        let mut out = Statistics {
            low: f64::INFINITY,
            high: f64::NEG_INFINITY,
            all: true,
            ..Statistics::default()
        };
        for (_, part) in parts(x) {
            let low = part.min_all()?.item_async().await?.to_f64();
            let high = part.max_all()?.item_async().await?.to_f64();
            if !(low.is_finite() && high.is_finite()) {
                self.found = match low.is_nan() || high.is_nan() {
                    true => "; some of all values are NaN",
                    false => "; some of all values are infinite",
                };
                return Ok(self);
            }
            let mean = part.mean_all()?.item_async().await?.to_f64();
            (out.low, out.high) = (out.low.min(low), out.high.max(high));
            out.count += part.numel();
            out.mean += (mean - out.mean) * (part.numel() as f64 / out.count as f64);
        }
        Ok(out)
    }

    fn text(&self) -> String {
        let mut words = vec![];
        if self.low <= self.high {
            words.push(format!("smallest {}", value(self.low)));
            words.push(format!("mean {}", value(self.mean)));
            words.push(format!("largest {}", value(self.high)));
        }
        words.extend(
            self.deviation
                .filter(|_| self.low <= self.high)
                .map(|d| format!("standard deviation {}", value(d))),
        );
        if self.nan > 0 {
            words.push(format!("{} NaN", grouped(self.nan as u64)));
        }
        if self.infinite > 0 {
            words.push(format!("{} infinite", grouped(self.infinite as u64)));
        }
        let of = match self.all {
            true => String::new(),
            false => format!(
                " (of the {} values that were read)",
                grouped(self.count as u64)
            ),
        };
        format!("{}{of}{}.", words.join(", "), self.found)
    }
}

impl Sample {
    /// Rows and columns of the matrices that were read, and how many of these there are.
    pub(super) fn matrices(&self) -> (usize, usize, usize) {
        let n = self.chosen.len();
        let columns = self.chosen.last().map_or(1, |c| c.0);
        let rows = if n > 1 { self.chosen[n - 2].0 } else { 1 };
        let outer = self.chosen[..n.saturating_sub(2)].iter();
        (outer.map(|c| c.0).product(), rows, columns)
    }

    /// What is to be said below the picture.
    pub(super) fn notes(&self) -> Vec<String> {
        let mut out = vec![];
        if self.statistics.count > 1 {
            out.push(self.statistics.text());
        }
        let n = self.dims.len();
        let all: usize = self.dims[..n.saturating_sub(2)].iter().product();
        let (matrices, ..) = self.matrices();
        if matrices < all {
            out.push(format!(
                "Shown are {matrices} of {} matrices.",
                grouped(all as u64)
            ));
        }
        let steps: Vec<String> = ["row", "column"][2 - n.min(2)..]
            .iter()
            .zip(&self.chosen[n.saturating_sub(2)..])
            .filter(|(_, (_, step))| *step > 1)
            .map(|(what, (_, step))| format!("{what} of each {}", grouped(*step as u64)))
            .collect();
        if !steps.is_empty() {
            out.push(format!("Read was one {}.", steps.join(" and one ")));
        }
        let missing = self.values.iter().filter(|v| v.is_none()).count();
        if missing > 0 {
            let missing = grouped(missing as u64);
            out.push(format!(
                "{missing} of the values shown lie in other processes."
            ));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_the_size_little_is_read() {
        let count = |dims: &[usize]| choose(dims).iter().map(|(n, _)| n).product::<usize>();
        assert_eq!(count(&[]), 1);
        assert_eq!(count(&[1000, 1000]), 1_000_000);
        assert_eq!(choose(&[10_000, 10_000]), [(500, 20), (500, 20)]);
        assert_eq!(choose(&[4, 3, 5, 5]), [(2, 1), (3, 1), (5, 1), (5, 1)]);
        for dims in [
            &[1 << 40][..],
            &[1 << 30, 3],
            &[2; 30],
            &[7; 10],
            &[96, 4096, 4096],
        ] {
            assert!(count(dims) <= 8 * SIDE * SIDE, "{dims:?}: {}", count(dims));
        }
    }
}

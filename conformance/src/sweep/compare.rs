//! What every rank holds of a result, against the whole result.

use super::partial::positions;
use anymesh_core::{DType, Kind, Region, Result, Tensor};

/// How near results must be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Precision {
    /// Equal bits.
    Bits,
    /// Equal values: 0 equals -0, and any NaN any other.
    Values,
    /// Differences of at most this, relative to values above one.
    Rounded(f64),
}

impl Precision {
    /// Reordered sums of a few rounded `f32`.
    pub const ROUNDED: Self = Self::Rounded(1e-5);
}

/// A result as plain numbers.
pub(super) struct Expected {
    pub(super) shape: Vec<usize>,
    dtype: DType,
    values: Vec<f64>,
    bytes: Vec<u8>,
}

impl Expected {
    pub(super) fn new(x: &Tensor) -> Result<Self> {
        Ok(Self {
            shape: x.dims().into(),
            dtype: x.dtype(),
            values: values(x)?,
            bytes: x.to_bytes()?,
        })
    }
}

/// The elements as `f64`.
pub fn values(t: &Tensor) -> Result<Vec<f64>> {
    Ok(match t.dtype().kind() {
        Kind::F32 if t.dtype() == DType::F32 => {
            t.to_vec::<f32>()?.into_iter().map(f64::from).collect()
        }
        Kind::I32 => t.to_vec::<i32>()?.into_iter().map(f64::from).collect(),
        Kind::Bool => t
            .to_vec::<bool>()?
            .into_iter()
            .map(|v| f64::from(u8::from(v)))
            .collect(),
        Kind::F64 => t.to_vec::<f64>()?,
        Kind::I64 => t.to_vec::<i64>()?.into_iter().map(|v| v as f64).collect(),
        Kind::U32 => t
            .cast(DType::U32)?
            .to_vec::<u32>()?
            .into_iter()
            .map(f64::from)
            .collect(),
        Kind::F32 => t
            .cast(DType::F32)?
            .to_vec::<f32>()?
            .into_iter()
            .map(f64::from)
            .collect(),
    })
}

/// The tensor with nothing partial.
fn without_partials(x: &Tensor) -> Result<Tensor> {
    x.detach().reshard(x.sharding().whole())
}

/// Compares results on a mesh, rank by rank, with what they are without one.
pub fn compare(precision: Precision, actual: &[Tensor], expected: &[Tensor]) -> Result<(), String> {
    let expected = expected
        .iter()
        .map(Expected::new)
        .collect::<Result<Vec<_>>>();
    compare_with(precision, actual, &expected.map_err(|e| e.to_string())?)
}

/// [`compare`] with results that were read before.
pub(super) fn compare_with(
    precision: Precision,
    actual: &[Tensor],
    expected: &[Expected],
) -> Result<(), String> {
    if actual.len() != expected.len() {
        return Err(format!(
            "{} results, expected {}",
            actual.len(),
            expected.len()
        ));
    }
    // First what all processes do together, whatever each of them finds.
    let whole = actual.iter().map(without_partials);
    let whole = whole.collect::<Result<Vec<_>>>();
    let whole = whole.map_err(|e| e.to_string())?;
    for (o, ((actual, expected), whole)) in actual.iter().zip(expected).zip(&whole).enumerate() {
        if actual.dims() != &expected.shape[..] || actual.dtype() != expected.dtype {
            return Err(format!(
                "result {o} is {}, expected {}{:?}",
                actual.type_string(),
                expected.dtype,
                expected.shape
            ));
        }
        if actual.is_plain() {
            return Err(format!("result {o} has left the mesh"));
        }
        let mut seen: Vec<(Region, Tensor)> = vec![];
        for (rank, part) in whole.shards() {
            let region = whole.sharding().region(whole.mesh(), rank, whole.shape());
            if part.dims() != &region.shape[..] {
                return Err(format!(
                    "result {o} ({}): rank {rank} holds {}",
                    actual.type_string(),
                    part.type_string()
                ));
            }
            // Ranks that share memory need one look.
            if seen
                .iter()
                .any(|(r, p)| *r == region && p.shares_memory(&part))
            {
                continue;
            }
            seen.push((region.clone(), part.clone()));
            let bytes = match precision {
                Precision::Bits => part.to_bytes().map_err(|e| e.to_string())?,
                Precision::Values | Precision::Rounded(_) => vec![],
            };
            let part = values(&part).map_err(|e| e.to_string())?;
            let size = expected.dtype.size();
            for (i, at) in positions(&region, &expected.shape).enumerate() {
                let (a, e) = (part[i], expected.values[at]);
                let same = a == e || (a.is_nan() && e.is_nan());
                let right = match precision {
                    Precision::Bits => {
                        bytes[i * size..][..size] == expected.bytes[at * size..][..size]
                    }
                    Precision::Values => same,
                    Precision::Rounded(by) => same || (a - e).abs() <= by * e.abs().max(1.0),
                };
                if !right {
                    return Err(format!(
                        "result {o} ({}): rank {rank} has {a} at {at}, expected {e}",
                        actual.type_string()
                    ));
                }
            }
        }
    }
    Ok(())
}

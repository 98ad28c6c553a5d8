//! Arrays on the host, and what reductions of them should be.

use anymesh_core::{Device, Element, F8E4M3, F8E5M2, Reduction, Result, Tensor, bf16, f16};
use std::ops::Range;

/// An element type with values to test with and reductions as plain loops.
pub(super) trait Sample: Element + Copy {
    /// A value for each well-mixed number; every fifth or so is zero.
    fn sample(n: u64) -> Self;
    /// The values combined in order.
    fn reduce(values: &[Self], reduction: Reduction) -> Self;

    /// How far a sum or a product in any order, rounded at every step, can be from the one in order:
    /// `2 k u` times the sum of the absolute values, or times the product, for `k` values and half
    /// the distance `u` from 1 to the next number. Nothing for what has the same bits in any order.
    fn spread(_values: &[Self], _reduction: Reduction) -> Option<f64> {
        None
    }

    /// As a number.
    fn number(self) -> f64 {
        f64::NAN
    }
}

impl Sample for bool {
    fn sample(n: u64) -> Self {
        !n.is_multiple_of(3)
    }

    fn reduce(values: &[Self], reduction: Reduction) -> Self {
        match reduction {
            Reduction::Sum | Reduction::Max | Reduction::Or => values.contains(&true),
            Reduction::Prod | Reduction::Min | Reduction::And => !values.contains(&false),
        }
    }
}

macro_rules! integers {
    ($($t:ty),*) => {$(
        impl Sample for $t {
            fn sample(n: u64) -> Self {
                if n.is_multiple_of(5) { 0 } else { (n >> 8) as $t }
            }

            fn reduce(values: &[Self], reduction: Reduction) -> Self {
                let fold = |f: fn($t, $t) -> $t| values[1..].iter().fold(values[0], |a, b| f(a, *b));
                match reduction {
                    Reduction::Sum => fold(<$t>::wrapping_add),
                    Reduction::Prod => fold(<$t>::wrapping_mul),
                    Reduction::Max => fold(<$t>::max),
                    Reduction::Min => fold(<$t>::min),
                    Reduction::And => values.iter().all(|v| *v != 0).into(),
                    Reduction::Or => values.iter().any(|v| *v != 0).into(),
                }
            }
        }
    )*};
}
integers!(u8, u32, i32, i64);

macro_rules! floats {
    ($($t:ty as $wide:ty, $widen:expr, $round:expr, $unit:expr;)*) => {$(
        impl Sample for $t {
            fn number(self) -> f64 {
                f64::from($widen(self))
            }

            fn spread(values: &[Self], reduction: Reduction) -> Option<f64> {
                let unit: Option<f64> = $unit;
                let unit = unit?;
                let sizes = values.iter().map(|v| v.number().abs());
                let size: f64 = match reduction {
                    Reduction::Sum => sizes.sum(),
                    Reduction::Prod => sizes.product(),
                    _ => return None,
                };
                Some(2.0 * values.len() as f64 * unit * size)
            }

            fn sample(n: u64) -> Self {
                // More digits than the dtype has, so that sums and products must round; small
                // enough that none overflows.
                if n.is_multiple_of(5) { $round(0.0) } else { $round((n >> 11) as $wide / (1u64 << 50) as $wide - 4.0) }
            }

            fn reduce(values: &[Self], reduction: Reduction) -> Self {
                let fold = |f: fn($wide, $wide) -> $wide| $round(values[1..].iter().fold($widen(values[0]), |a, b| f(a, $widen(*b))));
                let truth = |t: bool| $round(if t { 1.0 } else { 0.0 });
                match reduction {
                    Reduction::Sum => fold(|a, b| a + b),
                    Reduction::Prod => fold(|a, b| a * b),
                    Reduction::Max => fold(<$wide>::max),
                    Reduction::Min => fold(<$wide>::min),
                    Reduction::And => truth(values.iter().all(|v| $widen(*v) != 0.0)),
                    Reduction::Or => truth(values.iter().any(|v| $widen(*v) != 0.0)),
                }
            }
        }
    )*};
}
floats! {
    f32 as f32, |x| x, |x| x, Some(0.5f64.powi(24));
    f64 as f64, |x| x, |x| x, Some(0.5f64.powi(53));
    f16 as f32, f16::to_f32, f16::from_f32, Some(0.5f64.powi(11));
    bf16 as f32, bf16::to_f32, bf16::from_f32, Some(0.5f64.powi(8));
    F8E4M3 as f32, F8E4M3::to_f32, F8E4M3::from_f32, None;
    F8E5M2 as f32, F8E5M2::to_f32, F8E5M2::from_f32, None;
}

/// A dense array in row-major order.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Array<T> {
    pub(super) dims: Vec<usize>,
    data: Vec<T>,
    /// How far each element may be off; nothing where bits must be the same.
    within: Option<Vec<f64>>,
}

impl<T: Sample> Array<T> {
    /// Values that differ from rank to rank.
    pub(super) fn of_rank(rank: usize, dims: &[usize]) -> Self {
        let mix = |i: usize| {
            let n = ((rank as u64 + 1) << 32 | i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (n ^ (n >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
        };
        Self {
            dims: dims.into(),
            data: (0..dims.iter().product())
                .map(|i| T::sample(mix(i) ^ mix(i) >> 32))
                .collect(),
            within: None,
        }
    }

    /// Element by element.
    pub(super) fn reduce(arrays: &[Self], reduction: Reduction) -> Self {
        let data = (0..arrays[0].data.len())
            .map(|i| {
                T::reduce(
                    &arrays.iter().map(|a| a.data[i]).collect::<Vec<_>>(),
                    reduction,
                )
            })
            .collect();
        Self {
            dims: arrays[0].dims.clone(),
            data,
            within: None,
        }
    }

    /// The same, where a transport may combine in another order.
    pub(super) fn reduce_loosely(arrays: &[Self], reduction: Reduction) -> Self {
        let spread = |i: usize| {
            let values: Vec<T> = arrays.iter().map(|a| a.data[i]).collect();
            T::spread(&values, reduction)
        };
        Self {
            within: (0..arrays[0].data.len()).map(spread).collect(),
            ..Self::reduce(arrays, reduction)
        }
    }

    /// A range of a dimension.
    pub(super) fn cut(&self, dim: usize, range: Range<usize>) -> Self {
        let mut dims = self.dims.clone();
        dims[dim] = range.len();
        let steps = |row: usize| self.steps(row, dim, range.clone());
        Self {
            data: (self.rows(dim).flat_map(steps))
                .map(|i| self.data[i])
                .collect(),
            within: self.within.as_ref().map(|within| {
                let steps = |row: usize| self.steps(row, dim, range.clone());
                (self.rows(dim).flat_map(steps))
                    .map(|i| within[i])
                    .collect()
            }),
            dims,
        }
    }

    /// Arrays joined along a dimension.
    pub(super) fn concat(arrays: &[Self], dim: usize) -> Self {
        let mut dims = arrays[0].dims.clone();
        dims[dim] = arrays.iter().map(|a| a.dims[dim]).sum();
        let data = arrays[0]
            .rows(dim)
            .flat_map(|row| {
                arrays.iter().flat_map(move |a| {
                    let steps = a.steps(row, dim, 0..a.dims[dim]);
                    steps.map(|i| a.data[i])
                })
            })
            .collect();
        Self {
            dims,
            data,
            within: None,
        }
    }

    /// All positions in the dimensions before `dim`.
    fn rows(&self, dim: usize) -> Range<usize> {
        0..self.dims[..dim].iter().product()
    }

    /// Where the elements with `range` in `dim` are, in one position of the dimensions before it.
    fn steps(&self, row: usize, dim: usize, range: Range<usize>) -> Range<usize> {
        let inner: usize = self.dims[dim + 1..].iter().product();
        let start = row * self.dims[dim] * inner;
        start + range.start * inner..start + range.end * inner
    }

    /// On a device; `transposed` lies in memory with its two dimensions swapped.
    pub(super) fn tensor(&self, device: &Device, transposed: bool) -> Result<Tensor> {
        match self.dims[..] {
            [n, m] if transposed => {
                let data: Vec<T> = (0..n * m).map(|i| self.data[i % n * m + i / n]).collect();
                Tensor::from_slice(&data, [m, n], device)?.t()
            }
            _ => Tensor::from_slice(&self.data, &self.dims[..], device),
        }
    }

    /// Whether a tensor has the same type and bits, or values that are close enough.
    pub(super) async fn compare(&self, got: &Tensor) -> Result<(), String> {
        if got.dtype() != T::DTYPE || got.dims() != self.dims {
            return Err(format!(
                "got {}, expected {}{:?}",
                got.type_string(),
                T::DTYPE,
                self.dims
            ));
        }
        let bytes = got.to_bytes_async().await.map_err(|e| e.to_string())?;
        if bytes == bytemuck::cast_slice::<T, u8>(&self.data) {
            return Ok(());
        }
        let values = T::from_bytes(&bytes);
        if let Some(within) = &self.within {
            let off = |i: usize| (values[i].number() - self.data[i].number()).abs();
            let wrong = (0..self.data.len()).find(|i| !(off(*i) <= within[*i]));
            return match wrong {
                None => Ok(()),
                Some(i) => Err(format!(
                    "element {i} of {}: got {:?}, expected {:?}, which may be off by {}",
                    got.type_string(),
                    values[i],
                    self.data[i],
                    within[i]
                )),
            };
        }
        let at = values
            .iter()
            .zip(&self.data)
            .position(|(a, b)| a != b)
            .unwrap_or(0);
        Err(format!(
            "element {at} of {}: got {:?}, expected {:?}",
            got.type_string(),
            values.get(at),
            self.data.get(at)
        ))
    }
}

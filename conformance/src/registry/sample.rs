//! Small calls of an op: made-up inputs that show when an op is computed wrongly.

use anymesh_core::{DType, Device, Result, Shape, Tensor};
use serde_json::Value;

/// A small call of an op.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The operands in order; `None` for one that is left out.
    pub inputs: Vec<Option<Input>>,
    /// The attributes, a JSON object.
    pub attrs: Value,
    /// Whether every correct way of computing it gives equal values (0 equals -0). False where
    /// values are rounded before they add up, so that the order matters, also when an operand is a
    /// sum of parts that are themselves whole numbers.
    pub exact: bool,
}

impl Sample {
    /// A call that has one right answer to the bit.
    pub(super) fn new(inputs: impl IntoIterator<Item = Input>, attrs: Value) -> Self {
        Self {
            inputs: inputs.into_iter().map(Some).collect(),
            attrs,
            exact: true,
        }
    }

    /// The same call, where results may differ by rounding unless `exact`.
    pub(super) fn exact(self, exact: bool) -> Self {
        Self { exact, ..self }
    }

    /// The same call without operand `at`; those behind it move up by one.
    pub(super) fn without(mut self, at: usize) -> Self {
        self.inputs.insert(at, None);
        self
    }

    /// The inputs as tensors, the same for the same seed.
    pub fn make(&self, seed: u64, device: &Device) -> Result<Vec<Option<Tensor>>> {
        let make = |(i, input): (usize, &Option<Input>)| {
            input
                .as_ref()
                .map(|input| input.make(seed.wrapping_add(i as u64), device))
                .transpose()
        };
        self.inputs.iter().enumerate().map(make).collect()
    }
}

/// A made-up operand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its dtype.
    pub dtype: DType,
    /// Its values.
    pub fill: Fill,
}

/// The values of a made-up operand. All are exact in `f32` and in sums of a few.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Integers from `lo` to `hi`, both included, of any dtype.
    Int {
        /// The smallest.
        lo: i64,
        /// The largest.
        hi: i64,
    },
    /// Positions in a dimension of this size.
    Index(usize),
    /// Zero or one.
    Bool,
    /// Multiples of 1/8 inside (0, 1).
    Unit,
    /// Multiples of 1/8 from `lo` to `hi`, both included.
    Eighths {
        /// Eight times the smallest.
        lo: i64,
        /// Eight times the largest.
        hi: i64,
    },
    /// The numbers from 0 to the number of elements in a random order: no two are equal.
    Distinct,
    /// Small integers that ascend along the last dimension, with some equal neighbours.
    Sorted,
    /// One of these.
    Pick(&'static [i64]),
    /// NaN, infinities, 0 and 1.
    Special,
}

impl Fill {
    /// `n` values in rows of `row`.
    fn values(self, n: usize, row: usize, seed: u64) -> Vec<f64> {
        let mut rng = SplitMix(seed);
        let mut from = |lo: i64, hi: i64| {
            lo + (rng.next() % hi.saturating_sub(lo).saturating_add(1).max(1) as u64) as i64
        };
        let mut draw = |lo, hi| -> Vec<f64> { (0..n).map(|_| from(lo, hi) as f64).collect() };
        match self {
            Fill::Int { lo, hi } => draw(lo, hi),
            Fill::Index(size) => draw(0, size as i64 - 1),
            Fill::Bool => draw(0, 1),
            Fill::Unit => draw(1, 7).iter().map(|v| v / 8.0).collect(),
            Fill::Eighths { lo, hi } => draw(lo, hi).iter().map(|v| v / 8.0).collect(),
            Fill::Pick([]) => draw(0, 0),
            Fill::Pick(list) => draw(0, list.len() as i64 - 1)
                .iter()
                .map(|at| list[*at as usize] as f64)
                .collect(),
            Fill::Special => draw(0, 4)
                .iter()
                .map(|at| [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, 1.0][*at as usize])
                .collect(),
            Fill::Distinct => {
                let mut all: Vec<f64> = (0..n).map(|i| i as f64).collect();
                (1..n).for_each(|i| all.swap(i, from(0, i as i64) as usize));
                all
            }
            Fill::Sorted => {
                let mut sum = 0.0;
                let steps = draw(0, 2);
                steps
                    .iter()
                    .enumerate()
                    .map(|(i, step)| {
                        sum = if i % row.max(1) == 0 {
                            step - 2.0
                        } else {
                            sum + step
                        };
                        sum
                    })
                    .collect()
            }
        }
    }
}

impl Input {
    /// An operand of any dtype.
    pub(super) fn new(dtype: DType, shape: &[usize], fill: Fill) -> Self {
        Self {
            shape: shape.to_vec(),
            dtype,
            fill,
        }
    }

    /// The operand as a tensor, the same for the same seed.
    pub fn make(&self, seed: u64, device: &Device) -> Result<Tensor> {
        let n = Shape::from(self.shape.as_slice()).checked_numel("sample")?;
        let values: Vec<f32> = self
            .fill
            .values(n, self.shape.last().copied().unwrap_or(1), seed)
            .iter()
            .map(|v| *v as f32)
            .collect();
        Tensor::from_slice(&values, self.shape.as_slice(), device)?.cast(self.dtype)
    }
}

/// Floats with these values.
pub(super) fn floats(shape: &[usize], fill: Fill) -> Input {
    Input::new(DType::F32, shape, fill)
}

/// Floats that are small integers of both signs.
pub(super) fn small(shape: &[usize]) -> Input {
    floats(shape, Fill::Int { lo: -3, hi: 3 })
}

/// Floats, all of them different.
pub(super) fn distinct(shape: &[usize]) -> Input {
    floats(shape, Fill::Distinct)
}

/// `i32` that are small integers of both signs.
pub(super) fn integers(shape: &[usize]) -> Input {
    Input::new(DType::I32, shape, Fill::Int { lo: -3, hi: 3 })
}

/// Truth values.
pub(super) fn bools(shape: &[usize]) -> Input {
    Input::new(DType::Bool, shape, Fill::Bool)
}

/// `i32` positions in a dimension of `size`.
pub(super) fn index(shape: &[usize], size: usize) -> Input {
    Input::new(DType::I32, shape, Fill::Index(size))
}

/// A small deterministic generator (splitmix64), independent of the random ops.
#[derive(Debug)]
pub(crate) struct SplitMix(pub(crate) u64);

impl SplitMix {
    /// 64 random bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

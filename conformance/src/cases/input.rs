//! Seeded inputs in every layout.

use crate::registry::SplitMix;
use anymesh_core::{DType, Device, Dims, F8E4M3, F8E5M2, Result, Shape, Tensor, bf16, f16};

/// How the elements of an input lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum View {
    Contiguous,
    /// Last two dimensions swapped in memory.
    Transposed,
    /// Every second element of a larger tensor, from an odd offset.
    Sliced,
    /// First dimension repeated without memory (all rows equal).
    Broadcast,
    /// Last dimension runs backwards.
    Negative,
}

impl View {
    /// All layouts.
    pub const ALL: [View; 5] = [
        View::Contiguous,
        View::Transposed,
        View::Sliced,
        View::Broadcast,
        View::Negative,
    ];
}

/// What values an input holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fill {
    /// Uniform in a range, rounded to the dtype.
    Uniform(f64, f64),
    /// Integers in `low..=high`, exact in every dtype when they are small.
    Integers(i64, i64),
    /// Uniform in a range, with NaN, infinities, zeros of both signs, tiny and large values mixed
    /// in.
    Special(f64, f64),
    /// Uniform in a range, with chosen values mixed in.
    Mixed(&'static [f64], f64, f64),
}

fn unit(rng: &mut SplitMix) -> f64 {
    (rng.next() >> 11) as f64 / (1u64 << 53) as f64
}

/// One value in four from the list.
fn mixed(rng: &mut SplitMix, list: &[f64], low: f64, high: f64) -> f64 {
    match rng.next() % 4 {
        0 => list[(rng.next() % list.len() as u64) as usize],
        _ => low + (high - low) * unit(rng),
    }
}

/// `n` values of a fill, the same for the same seed everywhere.
pub fn random_values(n: usize, fill: Fill, seed: u64) -> Vec<f64> {
    const SPECIAL: &[f64] = &[
        f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        0.0,
        -0.0,
        1.0,
        -1.0,
        1e-30,
        3e4,
        -3e4,
    ];
    let mut rng = SplitMix(seed);
    (0..n)
        .map(|_| match fill {
            Fill::Uniform(low, high) => low + (high - low) * unit(&mut rng),
            Fill::Integers(low, high) => {
                (low + (rng.next() % (high - low + 1) as u64) as i64) as f64
            }
            Fill::Special(low, high) => mixed(&mut rng, SPECIAL, low, high),
            Fill::Mixed(list, low, high) => mixed(&mut rng, list, low, high),
        })
        .collect()
}

/// Stores values as elements of `dtype`.
pub(crate) fn to_bytes(values: &[f64], dtype: DType) -> Vec<u8> {
    fn pack<T: bytemuck::NoUninit>(values: &[f64], f: impl Fn(f64) -> T) -> Vec<u8> {
        bytemuck::cast_slice(&values.iter().map(|v| f(*v)).collect::<Vec<T>>()).to_vec()
    }
    match dtype {
        DType::Bool => pack(values, |v| u8::from(v != 0.0)),
        DType::U8 => pack(values, |v| v as u8),
        DType::U32 => pack(values, |v| v as u32),
        DType::I32 => pack(values, |v| v as i32),
        DType::I64 => pack(values, |v| v as i64),
        DType::F8E4M3 => pack(values, |v| F8E4M3::from_f32(v as f32)),
        DType::F8E5M2 => pack(values, |v| F8E5M2::from_f32(v as f32)),
        DType::F16 => pack(values, f16::from_f64),
        DType::BF16 => pack(values, bf16::from_f64),
        DType::F32 => pack(values, |v| v as f32),
        DType::F64 => pack(values, |v| v),
    }
}

/// A tensor of the given type whose elements lie as `view` says. Shapes of lower rank than a view
/// needs fall back to contiguous.
pub fn input(
    device: &Device,
    dtype: DType,
    shape: &[usize],
    view: View,
    fill: Fill,
    seed: u64,
) -> Result<Tensor> {
    let rank = shape.len();
    let mut memory: Dims = shape.into();
    match view {
        View::Transposed if rank >= 2 => memory.swap(rank - 2, rank - 1),
        View::Sliced if rank >= 1 => memory.iter_mut().for_each(|d| *d = 2 * *d + 1),
        View::Broadcast if rank >= 1 => memory[0] = 1,
        _ => {}
    }
    let memory = Shape::from(memory);
    let values = random_values(memory.numel(), fill, seed);
    let base = Tensor::from_bytes(&to_bytes(&values, dtype), dtype, &memory, device)?;
    match view {
        View::Transposed if rank >= 2 => base.transpose(-2, -1),
        View::Sliced => (0..rank as i64).try_fold(base, |x, axis| x.slice(axis, Some(1), None, 2)),
        View::Broadcast if rank >= 1 => base.expand(shape),
        View::Negative if rank >= 1 => base.slice(-1, None, None, -1),
        _ => Ok(base),
    }
}

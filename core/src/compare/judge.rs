//! Whether two values are the same, and where they are not.

use super::{
    elements::number,
    value::{Part, Value, rows},
};
use crate::DType;

/// How far two values may be apart.
///
/// Reductions in another order round differently, so results of a device and of a mesh are rarely
/// the same bits. An element `b` is the same as `a` where
/// `|a - b| <= relative * scale + absolute`, and the scale is the largest of
///
/// - `|a|` itself,
/// - the largest magnitude in the result, because an element that came out small by cancellation
///   has the rounding of its neighbours (magnitudes of a million and more are masks, and are judged
///   by themselves alone),
/// - where the op added up many elements into fewer, a tenth of the largest magnitude of what it
///   read times the root of how many became one, because sums may cancel altogether,
/// - for gradients, a twentieth of the largest magnitude of what came in (less where it was spread
///   over more elements), because of a difference nothing but rounding may be left,
/// - where partial terms are much larger than what they add up to, those.
///
/// An op that reads partial values of a narrow dtype is judged as that dtype is.
///
/// NaN is the same as NaN and as nothing else; an infinity as itself. Integers and bools are the
/// same or are not.
///
/// ```
/// # use anymesh_core::{DType, compare::Tolerance};
/// let default = Tolerance::of(DType::F32);
/// assert_eq!((default.relative, default.absolute), (1e-5, 0.0));
/// assert!(Tolerance::of(DType::BF16).relative > default.relative);
/// assert_eq!(Tolerance::BITS.relative, 0.0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// Times the scale.
    pub relative: f64,
    /// Beside it.
    pub absolute: f64,
}

impl Tolerance {
    /// The same bits, but for those of a NaN.
    pub const BITS: Self = Self {
        relative: 0.0,
        absolute: 0.0,
    };

    /// The larger of two.
    pub(super) fn or(self, other: Self) -> Self {
        Self {
            relative: self.relative.max(other.relative),
            absolute: self.absolute.max(other.absolute),
        }
    }

    /// What is used where nothing else is asked for: some tens of roundings in wide floats, which
    /// ops add up in; in narrow ones, which are rounded when they are stored, and where partial sums
    /// are stored too, a few.
    pub fn of(dtype: DType) -> Self {
        let relative = match dtype {
            DType::F64 => 1e-13,
            DType::F32 => 1e-5,
            DType::F16 => 4e-3,
            DType::BF16 => 3e-2,
            DType::F8E4M3 => 0.25,
            DType::F8E5M2 => 0.5,
            _ => 0.0,
        };
        Self {
            relative,
            absolute: 0.0,
        }
    }
}

/// The largest difference of two values.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Where it is, in the whole tensor.
    pub index: Vec<usize>,
    /// The value there in the first run.
    pub a: f64,
    /// The value there in the second.
    pub b: f64,
    /// `|a - b|`; infinite where only one of them is a number.
    pub largest: f64,
    /// What it might have been.
    pub allowed: f64,
    /// The rank that has `b`; the first of them where its terms are on several.
    pub rank: usize,
    /// How many elements differ by more than is allowed.
    pub wrong: usize,
    /// How many were compared: more than the tensor has where several ranks hold the same.
    pub of: usize,
}

/// What is taken for a mask.
const MASK: f64 = 1e6;

/// The largest magnitude that is no mask and finite.
pub(super) fn magnitude(dtype: DType, bytes: &[u8]) -> f64 {
    (0..bytes.len() / dtype.size())
        .map(|i| number(dtype, bytes, i).abs())
        .filter(|x| *x < MASK)
        .fold(0.0, f64::max)
}

/// How far two numbers are apart.
fn distance(a: f64, b: f64) -> f64 {
    if a == b || a.is_nan() && b.is_nan() {
        0.0
    } else if a.is_finite() && b.is_finite() {
        (a - b).abs()
    } else {
        f64::INFINITY
    }
}

/// How a value is judged.
pub(super) struct Judge<'a> {
    pub(super) tolerance: Tolerance,
    /// The least scale, asked for when something seems to differ.
    pub(super) least_scale: &'a dyn Fn() -> f64,
}

impl Judge<'_> {
    /// The difference of a value from its parts elsewhere; none where they are the same.
    pub(super) fn difference(&self, a: &Value, b: &[Part]) -> Option<Difference> {
        let (dtype, size) = (a.dtype, a.dtype.size());
        let mut scale = None;
        let mut worst: Option<(f64, usize, Difference)> = None;
        let (mut wrong, mut of) = (0, 0);
        for part in b {
            let (run, first) = rows(&part.region, &a.shape);
            of += part.region.numel();
            for (row, at) in part.bytes.chunks_exact((run * size).max(1)).zip(first) {
                let expected = &a.bytes[at * size..][..run * size];
                if row == expected {
                    continue;
                }
                for i in 0..run {
                    let (x, y) = (number(dtype, expected, i), number(dtype, row, i));
                    let apart = distance(x, y);
                    if apart == 0.0 {
                        continue;
                    }
                    let scale = *scale.get_or_insert_with(|| {
                        magnitude(dtype, &a.bytes).max((self.least_scale)())
                    });
                    let of_scale = if dtype.is_float() {
                        self.tolerance.relative * scale.max(x.abs()) + self.tolerance.absolute
                    } else {
                        0.0
                    };
                    // An infinite value allows nothing.
                    let allowed = if of_scale.is_finite() { of_scale } else { 0.0 };
                    if apart <= allowed {
                        continue;
                    }
                    wrong += 1;
                    let excess = apart / allowed.max(f64::MIN_POSITIVE);
                    if worst.as_ref().is_none_or(|(most, ..)| excess > *most) {
                        let found = Difference {
                            index: vec![],
                            a: x,
                            b: y,
                            largest: apart,
                            allowed,
                            rank: part.rank,
                            wrong: 0,
                            of: 0,
                        };
                        worst = Some((excess, at + i, found));
                    }
                }
            }
        }
        worst.map(|(_, at, found)| Difference {
            index: index(at, a.shape.dims()),
            wrong,
            of,
            ..found
        })
    }
}

/// The index of an element from its position.
fn index(mut at: usize, dims: &[usize]) -> Vec<usize> {
    let mut index = vec![0; dims.len()];
    for (i, size) in index.iter_mut().zip(dims).rev() {
        (*i, at) = (at % size, at / size);
    }
    index
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Region, Shape};

    fn judged(a: &[f32], b: &[f32], least: f64) -> Option<Difference> {
        let bytes = |x: &[f32]| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let shape = Shape::from([a.len() / 2, 2]);
        let part = Part {
            rank: 3,
            region: Region {
                start: smallvec::smallvec![0, 0],
                shape: shape.dims().into(),
            },
            bytes: bytes(b),
        };
        let a = Value {
            dtype: DType::F32,
            shape,
            bytes: bytes(a),
        };
        let judge = Judge {
            tolerance: Tolerance::of(DType::F32),
            least_scale: &|| least,
        };
        judge.difference(&a, &[part])
    }

    #[test]
    fn rounding_of_the_largest_value_is_allowed_everywhere() {
        assert_eq!(judged(&[1.0, 1e-6], &[1.0 + 5e-6, 5e-6], 0.0), None);
        let found = judged(&[1.0, 1e-6], &[1.0, 1e-3], 0.0).expect("too far");
        assert_eq!((found.index, found.rank, found.wrong), (vec![0, 1], 3, 1));
    }

    #[test]
    fn a_mask_does_not_hide_what_is_beside_it() {
        let found = judged(&[-1e9, 1.0], &[-1e9, 1.001], 0.0).expect("too far");
        assert_eq!(found.index, [0, 1]);
        assert_eq!(judged(&[-1e9, 1.0], &[-1.000_001e9, 1.0], 0.0), None);
    }

    #[test]
    fn nan_is_the_same_as_nan_alone() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        assert_eq!(judged(&[nan, inf], &[nan, inf], 0.0), None);
        for (a, b) in [(nan, 1.0), (1.0, nan), (inf, 1.0), (1.0, inf), (inf, -inf)] {
            let found = judged(&[a, 2.0], &[b, 2.0], 0.0).expect("differs");
            assert!(found.largest.is_infinite(), "{a} {b}");
        }
    }

    #[test]
    fn what_cancels_in_a_sum_is_judged_by_what_was_added() {
        assert!(judged(&[1e-8, 0.0], &[-1e-8, 0.0], 0.0).is_some());
        assert_eq!(judged(&[1e-8, 0.0], &[-1e-8, 0.0], 1.0), None);
    }
}

//! How elements are stored, and what they are held as while computing.

use anymesh_kernel::{DType, F8E4M3, F8E5M2, Kind, Scalar, bf16, f16};
use bytemuck::{Pod, Zeroable};
use half::slice::HalfFloatSliceExt;
use std::sync::LazyLock;

/// The type of a register: `f64`, `f32`, `i64`, `i32`, `u32`, and `u8` (0 or 1) for bool.
pub(crate) trait Held: Pod + PartialOrd + Default + Send + Sync {
    const KIND: Kind;
    /// No value is smaller.
    const LOWEST: Self;
    /// No value is larger.
    const HIGHEST: Self;

    /// Times a factor; only floats can be scaled.
    fn scaled(self, factor: f64) -> Self;

    /// Through the low bits of a word, for registers that hold one value for a whole block.
    fn to_word(self) -> u64;
    fn from_word(word: u64) -> Self;

    /// A literal or parameter: integers wrap.
    fn from_scalar(scalar: Scalar) -> Self;
}

macro_rules! held {
    ($($t:ty, $kind:ident, $lowest:expr, $highest:expr, $scaled:expr, $to:expr, $from:expr, $scalar:expr);*) => {$(
        impl Held for $t {
            const KIND: Kind = Kind::$kind;
            const LOWEST: Self = $lowest;
            const HIGHEST: Self = $highest;
            fn scaled(self, factor: f64) -> Self {
                $scaled(self, factor)
            }
            fn to_word(self) -> u64 {
                $to(self)
            }
            fn from_word(word: u64) -> Self {
                $from(word)
            }
            fn from_scalar(scalar: Scalar) -> Self {
                $scalar(scalar)
            }
        }
    )*};
}
held!(
    f64, F64, f64::NEG_INFINITY, f64::INFINITY, |v, f| v * f, f64::to_bits, f64::from_bits, Scalar::to_f64;
    f32, F32, f32::NEG_INFINITY, f32::INFINITY, |v, f| (f64::from(v) * f) as f32, |v: f32| u64::from(v.to_bits()), |w| f32::from_bits(w as u32), |s: Scalar| s.to_f64() as f32;
    i64, I64, i64::MIN, i64::MAX, |v, _| v, |v| v as u64, |w| w as i64, Scalar::to_i64;
    i32, I32, i32::MIN, i32::MAX, |v, _| v, |v| v as u64, |w| w as i32, |s: Scalar| s.to_i64() as i32;
    u32, U32, u32::MIN, u32::MAX, |v, _| v, u64::from, |w| w as u32, |s: Scalar| s.to_i64() as u32;
    u8, Bool, 0, 1, |v, _| v, u64::from, |w| w as u8, |s: Scalar| u8::from(s.to_bool())
);

/// The type of an element in memory. Storing what was loaded gives the same bits, also those of
/// NaNs, so that elements which are only moved do not change.
pub(crate) trait Stored: Pod + Send + Sync {
    type Held: Held;
    /// Whether memory can be read as registers without converting.
    const IN_PLACE: bool = false;

    fn load(self) -> Self::Held;
    fn store(value: Self::Held) -> Self;

    fn load_all(from: &[Self], to: &mut [Self::Held]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = from.load();
        }
    }

    fn store_all(from: &[Self::Held], to: &mut [Self]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = Self::store(*from);
        }
    }
}

macro_rules! stored_as_held {
    ($($t:ty),*) => {$(
        impl Stored for $t {
            type Held = $t;
            const IN_PLACE: bool = true;
            #[inline(always)]
            fn load(self) -> $t {
                self
            }
            fn store(value: $t) -> $t {
                value
            }
            fn load_all(from: &[$t], to: &mut [$t]) {
                to.copy_from_slice(from);
            }
            fn store_all(from: &[$t], to: &mut [$t]) {
                to.copy_from_slice(from);
            }
        }
    )*};
}
stored_as_held!(f64, f32, i64, i32, u32);

/// A byte held as `u32`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(transparent)]
pub(crate) struct Byte(u8);

impl Stored for Byte {
    type Held = u32;
    fn load(self) -> u32 {
        u32::from(self.0)
    }
    fn store(value: u32) -> Self {
        Self(value as u8)
    }
}

/// A logical value. Memory may come from outside, so any byte but 0 is read as true.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(transparent)]
pub(crate) struct Truth(u8);

impl Stored for Truth {
    type Held = u8;
    fn load(self) -> u8 {
        u8::from(self.0 != 0)
    }
    fn store(value: u8) -> Self {
        Self(value)
    }
}

/// The instructions that convert f16 make signalling NaNs quiet, so NaNs go by hand.
impl Stored for f16 {
    type Held = f32;
    /// Without branches, so that loops over it vectorise: the exponent is moved by a product, which
    /// also makes subnormals normal; of what is infinite or NaN it is set.
    #[inline(always)]
    fn load(self) -> f32 {
        let bits = u32::from(self.to_bits());
        let (sign, size) = ((bits & 0x8000) << 16, (bits & 0x7fff) << 13);
        let moved = (f32::from_bits(size) * f32::from_bits((254 - 15) << 23)).to_bits();
        let special = size | 0x7f80_0000;
        f32::from_bits(sign | if size < 0x7c00 << 13 { moved } else { special })
    }
    fn store(value: f32) -> Self {
        let bits = value.to_bits();
        if value.is_nan() {
            f16::from_bits(nan(
                (bits >> 16) as u16 & 0x8000 | 0x7c00,
                (bits >> 13) as u16 & 0x3ff,
                0x200,
            ))
        } else {
            f16::from_f32(value)
        }
    }
    fn load_all(from: &[f16], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
        if any_above(bytemuck::cast_slice(from), 0x7c00) {
            to.iter_mut()
                .zip(from)
                .filter(|(_, from)| from.is_nan())
                .for_each(|(to, from)| *to = from.load());
        }
    }
    fn store_all(from: &[f32], to: &mut [f16]) {
        to.convert_from_f32_slice(from);
        if any_above(bytemuck::cast_slice(to), 0x7c00) {
            to.iter_mut()
                .zip(from)
                .filter(|(_, from)| from.is_nan())
                .for_each(|(to, from)| *to = Self::store(*from));
        }
    }
}

impl Stored for bf16 {
    type Held = f32;
    #[inline(always)]
    fn load(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    fn store(value: f32) -> Self {
        let front = (value.to_bits() >> 16) as u16;
        if value.is_nan() {
            bf16::from_bits(nan(front & 0xff80, front & 0x7f, 0x40))
        } else {
            rounded(value)
        }
    }
    fn store_all(from: &[f32], to: &mut [bf16]) {
        to.iter_mut()
            .zip(from)
            .for_each(|(to, from)| *to = rounded(*from));
        if any_above(bytemuck::cast_slice(to), 0x7f80) {
            to.iter_mut()
                .zip(from)
                .filter(|(_, from)| from.is_nan())
                .for_each(|(to, from)| *to = Self::store(*from));
        }
    }
}

/// To nearest even without branches, so that loops over it vectorise. Some NaN for NaN.
fn rounded(value: f32) -> bf16 {
    let bits = value.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    bf16::from_bits(if value.is_nan() {
        (bits >> 16) as u16 | 0x40
    } else {
        rounded
    })
}

/// A NaN with this sign and exponent and the front of a payload, or quiet where that is nothing:
/// without a payload it would be infinite.
fn nan(rest: u16, payload: u16, quiet: u16) -> u16 {
    rest | if payload == 0 { quiet } else { payload }
}

/// Whether one of some 16-bit floats is above `infinity` but for its sign, which NaNs are. The
/// largest of all is found faster than the first.
fn any_above(codes: &[i16], infinity: i16) -> bool {
    codes
        .iter()
        .fold(0, |largest, code| (code & i16::MAX).max(largest))
        > infinity
}

static F8E4M3_VALUES: LazyLock<[f32; 256]> =
    LazyLock::new(|| std::array::from_fn(|code| F8E4M3(code as u8).to_f32()));
static F8E5M2_VALUES: LazyLock<[f32; 256]> =
    LazyLock::new(|| std::array::from_fn(|code| F8E5M2(code as u8).to_f32()));

macro_rules! stored_f8 {
    ($($t:ident $table:ident),*) => {$(
        impl Stored for $t {
            type Held = f32;
            fn load(self) -> f32 {
                $table[self.0 as usize]
            }
            fn store(value: f32) -> Self {
                $t::from_f32(value)
            }
            fn load_all(from: &[$t], to: &mut [f32]) {
                let table: &[f32; 256] = &$table;
                for (to, from) in to.iter_mut().zip(from) {
                    *to = table[from.0 as usize];
                }
            }
        }
    )*};
}
stored_f8!(F8E4M3 F8E4M3_VALUES, F8E5M2 F8E5M2_VALUES);

/// Runs a block of code with the memory type of a dtype.
macro_rules! with_stored {
    ($dtype:expr, $S:ident => $body:expr) => {
        match $dtype {
            ::anymesh_kernel::DType::Bool => {
                type $S = $crate::element::Truth;
                $body
            }
            ::anymesh_kernel::DType::U8 => {
                type $S = $crate::element::Byte;
                $body
            }
            ::anymesh_kernel::DType::U32 => {
                type $S = u32;
                $body
            }
            ::anymesh_kernel::DType::I32 => {
                type $S = i32;
                $body
            }
            ::anymesh_kernel::DType::I64 => {
                type $S = i64;
                $body
            }
            ::anymesh_kernel::DType::F8E4M3 => {
                type $S = ::anymesh_kernel::F8E4M3;
                $body
            }
            ::anymesh_kernel::DType::F8E5M2 => {
                type $S = ::anymesh_kernel::F8E5M2;
                $body
            }
            ::anymesh_kernel::DType::F16 => {
                type $S = ::anymesh_kernel::f16;
                $body
            }
            ::anymesh_kernel::DType::BF16 => {
                type $S = ::anymesh_kernel::bf16;
                $body
            }
            ::anymesh_kernel::DType::F32 => {
                type $S = f32;
                $body
            }
            ::anymesh_kernel::DType::F64 => {
                type $S = f64;
                $body
            }
        }
    };
}
pub(crate) use with_stored;

/// Runs a block of code with the register type of a kind.
macro_rules! with_held {
    ($kind:expr, $T:ident => $body:expr) => {
        match $kind {
            ::anymesh_kernel::Kind::Bool => {
                type $T = u8;
                $body
            }
            ::anymesh_kernel::Kind::U32 => {
                type $T = u32;
                $body
            }
            ::anymesh_kernel::Kind::I32 => {
                type $T = i32;
                $body
            }
            ::anymesh_kernel::Kind::I64 => {
                type $T = i64;
                $body
            }
            ::anymesh_kernel::Kind::F32 => {
                type $T = f32;
                $body
            }
            ::anymesh_kernel::Kind::F64 => {
                type $T = f64;
                $body
            }
        }
    };
}
pub(crate) use with_held;

/// Whether elements of `dtype` lie in memory exactly as registers do.
pub(crate) fn is_held_as_stored(dtype: DType) -> bool {
    dtype == dtype.kind().dtype()
}

/// Stores registers of the dtype's kind as elements of the dtype.
pub(crate) fn store<T: Held>(from: &[T], dtype: DType, to: &mut [u8]) {
    with_stored!(dtype, S => S::store_all(bytemuck::cast_slice(from), bytemuck::cast_slice_mut(to)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounding_without_branches_is_the_ordinary_one() {
        let mut bits = 1u32;
        for _ in 0..200_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            for bits in [bits, bits & 0xffff_0000, (bits & 0xffff_0000) | 0x8000] {
                let value = f32::from_bits(bits);
                let (fast, slow) = (rounded(value), bf16::from_f32(value));
                assert!(
                    fast.to_bits() == slow.to_bits() || (fast.is_nan() && slow.is_nan()),
                    "{bits:#x}"
                );
            }
        }
    }

    #[test]
    fn every_small_float_survives_load_and_store() {
        fn survives<S: Stored<Held = f32>>(codes: &[S]) {
            let (mut held, mut stored) = (vec![0f32; codes.len()], vec![S::zeroed(); codes.len()]);
            S::load_all(codes, &mut held);
            S::store_all(&held, &mut stored);
            assert_eq!(
                bytemuck::cast_slice::<S, u8>(&stored),
                bytemuck::cast_slice::<S, u8>(codes)
            );
            let single: Vec<S> = codes.iter().map(|code| S::store(code.load())).collect();
            assert_eq!(
                bytemuck::cast_slice::<S, u8>(&single),
                bytemuck::cast_slice::<S, u8>(codes)
            );
            assert!(
                codes
                    .iter()
                    .zip(held)
                    .all(|(code, held)| code.load().to_bits() == held.to_bits())
            );
        }
        survives(&(0..=u16::MAX).map(f16::from_bits).collect::<Vec<_>>());
        survives(&(0..=u16::MAX).map(bf16::from_bits).collect::<Vec<_>>());
        survives(&(0..=u8::MAX).map(F8E4M3).collect::<Vec<_>>());
        survives(&(0..=u8::MAX).map(F8E5M2).collect::<Vec<_>>());
    }

    #[test]
    fn a_nan_whose_payload_is_lost_stays_a_nan() {
        for bits in [
            0x7f80_0001u32,
            0xff80_0001,
            0x7f80_1fff,
            0xff80_ffff,
            0x7fc0_0000,
        ] {
            let value = f32::from_bits(bits);
            let mut all = [f16::ZERO];
            f16::store_all(&[value], &mut all);
            assert!(
                all[0].is_nan()
                    && f16::store(value).is_nan()
                    && <bf16 as Stored>::store(value).is_nan(),
                "{bits:#x}"
            );
        }
    }
}

//! One loop for each instruction, operand kind and way of reading the operands (a slice, or one
//! value for all positions).

use crate::{
    element::{Held, Stored, with_held},
    fastmath::{self, Function},
    frame::{Frame, Src},
    functions,
    scalar::{self, Float, Int},
    simd::{Kernel, dispatch, fused_or_not},
};
use anymesh_kernel::{
    DType, Kind,
    map::{Binary, Reg, Unary},
};
use std::marker::PhantomData;

/// A loop over one operand. What `f` is made of is marked `#[inline(always)]` wherever it is not
/// short, see [`Kernel`].
struct Each<'a, A, R, F>(&'a [A], &'a mut [R], F);

impl<A: Copy, R, F: Fn(A) -> R> Kernel for Each<'_, A, R, F> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        for (out, a) in self.1.iter_mut().zip(self.0) {
            *out = (self.2)(*a);
        }
    }
}

/// A loop over two operands.
struct Each2<'a, A, B, R, F>(&'a [A], &'a [B], &'a mut [R], F);

impl<A: Copy, B: Copy, R, F: Fn(A, B) -> R> Kernel for Each2<'_, A, B, R, F> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        for ((out, a), b) in self.2.iter_mut().zip(self.0).zip(self.1) {
            *out = (self.3)(*a, *b);
        }
    }
}

/// Applies `f` to every value.
#[inline(always)]
fn each<A: Copy, R: Copy>(a: Src<'_, A>, out: &mut [R], f: impl Fn(A) -> R) {
    match a {
        Src::One(a) => out.fill(f(a)),
        Src::Many(a) => dispatch(Each(a, out, f)),
    }
}

/// Applies `f` to every pair of values.
#[inline(always)]
fn each2<A: Copy, R: Copy>([a, b]: [Src<'_, A>; 2], out: &mut [R], f: impl Fn(A, A) -> R) {
    match (a, b) {
        (Src::One(a), Src::One(b)) => out.fill(f(a, b)),
        (Src::One(a), Src::Many(b)) => dispatch(Each(b, out, |b| f(a, b))),
        (Src::Many(a), Src::One(b)) => dispatch(Each(a, out, |a| f(a, b))),
        (Src::Many(a), Src::Many(b)) => dispatch(Each2(a, b, out, f)),
    }
}

/// [`each`] for functions that are calls, which no vector instruction makes faster.
fn calls<A: Copy, R: Copy>(a: Src<'_, A>, out: &mut [R], f: impl Fn(A) -> R) {
    match a {
        Src::One(a) => out.fill(f(a)),
        Src::Many(a) => Each(a, out, f).run(),
    }
}

/// [`each2`] for functions that are calls.
fn calls2<A: Copy, R: Copy>([a, b]: [Src<'_, A>; 2], out: &mut [R], f: impl Fn(A, A) -> R) {
    match (a, b) {
        (Src::One(a), Src::One(b)) => out.fill(f(a, b)),
        (Src::One(a), Src::Many(b)) => Each(b, out, |b| f(a, b)).run(),
        (Src::Many(a), Src::One(b)) => Each(a, out, |a| f(a, b)).run(),
        (Src::Many(a), Src::Many(b)) => Each2(a, b, out, f).run(),
    }
}

fn slice<T: Held>(out: &mut [u8], len: usize) -> &mut [T] {
    &mut bytemuck::cast_slice_mut(&mut out[..len * size_of::<T>()])[..len]
}

pub(crate) fn unary(op: Unary, kind: Kind, a: Reg, frame: &Frame<'_>, out: &mut [u8], len: usize) {
    match kind {
        Kind::F32 => unary_float::<f32>(op, frame.src(a), out, len),
        Kind::F64 => unary_float::<f64>(op, frame.src(a), out, len),
        Kind::I32 => unary_int::<i32>(op, frame.src(a), slice(out, len)),
        Kind::I64 => unary_int::<i64>(op, frame.src(a), slice(out, len)),
        Kind::U32 => unary_int::<u32>(op, frame.src(a), slice(out, len)),
        Kind::Bool => each(frame.src::<u8>(a), slice(out, len), |a: u8| {
            u8::from(a == 0)
        }),
    }
}

fn unary_float<T: Float>(op: Unary, a: Src<'_, T>, bytes: &mut [u8], len: usize) {
    match op {
        // These two give bools, one byte each: `bytes` is not as long as floats would be.
        Unary::IsNan => each(a, slice(bytes, len), |a| u8::from(a.is_nan())),
        Unary::IsInf => each(a, slice(bytes, len), |a| u8::from(a.is_infinite())),
        _ => float_to_float(op, a, slice(bytes, len)),
    }
}

fn float_to_float<T: Float>(op: Unary, a: Src<'_, T>, out: &mut [T]) {
    if T::FAST && fast(op, a, out) {
        return;
    }
    if op == Unary::Rsqrt {
        return each(a, out, |a: T| T::narrow(1.0 / a.wide().sqrt()));
    }
    if let Some(f) = functions::of(op) {
        return calls(a, out, |a: T| T::narrow(f(a.wide())));
    }
    match op {
        Unary::Neg => each(a, out, |a| -a),
        Unary::Abs => each(a, out, T::abs),
        Unary::Sign => each(a, out, scalar::sign),
        Unary::Sqrt => each(a, out, T::sqrt),
        Unary::Floor => each(a, out, T::floor),
        Unary::Ceil => each(a, out, T::ceil),
        Unary::Round => each(a, out, T::round),
        _ => each(a, out, T::trunc),
    }
}

/// Applies a function of `fastmath` to every value.
fn fast_each<F: Function, T: Float>(values: &[T], out: &mut [T]) {
    struct Each<'a, F, T>(&'a [T], &'a mut [T], PhantomData<F>);
    impl<F: Function, T: Float> Each<'_, F, T> {
        #[inline(always)]
        fn body<const FUSED: bool>(self) {
            for (out, value) in self.1.iter_mut().zip(self.0) {
                *out = T::narrow(F::call::<FUSED>(value.wide()));
            }
        }
    }
    impl<F: Function, T: Float> Kernel for Each<'_, F, T> {
        fused_or_not!(());
    }
    dispatch(Each::<F, T>(values, out, PhantomData));
}

/// The functions of `fastmath`. Returns false for what is not among them.
fn fast<T: Float>(op: Unary, a: Src<'_, T>, out: &mut [T]) -> bool {
    fn run<F: Function, T: Float>(a: Src<'_, T>, out: &mut [T]) {
        match a {
            // Not by a call: one value has the same bits as many.
            Src::One(a) => {
                let mut one = [T::default()];
                fast_each::<F, T>(&[a], &mut one);
                out.fill(one[0]);
            }
            Src::Many(a) => fast_each::<F, T>(a, out),
        }
    }
    match op {
        Unary::Exp => run::<fastmath::Exp, T>(a, out),
        Unary::Exp2 => run::<fastmath::Exp2, T>(a, out),
        Unary::Expm1 => run::<fastmath::Expm1, T>(a, out),
        Unary::Log => run::<fastmath::Log, T>(a, out),
        Unary::Log2 => run::<fastmath::Log2, T>(a, out),
        Unary::Log10 => run::<fastmath::Log10, T>(a, out),
        Unary::Log1p => run::<fastmath::Log1p, T>(a, out),
        Unary::Tanh => run::<fastmath::Tanh, T>(a, out),
        Unary::Sinh => run::<fastmath::Sinh, T>(a, out),
        Unary::Cosh => run::<fastmath::Cosh, T>(a, out),
        Unary::Erf => run::<fastmath::Erf, T>(a, out),
        Unary::Sin | Unary::Cos => {
            let exact: fn(f64) -> f64 = if op == Unary::Sin {
                run::<fastmath::Sin, T>(a, out);
                f64::sin
            } else {
                run::<fastmath::Cos, T>(a, out);
                f64::cos
            };
            let limit = f64::from(fastmath::TRIG_LIMIT);
            // Written so that NaN needs no second look either.
            let is_large = |a: T| a.wide().abs() > limit;
            let any = match a {
                Src::One(a) => is_large(a),
                Src::Many(a) => a.iter().any(|a| is_large(*a)),
            };
            if any {
                for (i, out) in out
                    .iter_mut()
                    .enumerate()
                    .filter(|(i, _)| is_large(a.at(*i)))
                {
                    *out = T::narrow(exact(a.at(i).wide()));
                }
            }
        }
        _ => return false,
    }
    true
}

fn unary_int<T: Int>(op: Unary, a: Src<'_, T>, out: &mut [T]) {
    match op {
        Unary::Neg => each(a, out, T::neg),
        Unary::Abs => each(a, out, scalar::int_abs),
        Unary::Sign => each(a, out, scalar::int_sign),
        _ => each(a, out, T::not),
    }
}

/// Returns false where an integer was divided by zero.
pub(crate) fn binary(
    op: Binary,
    kind: Kind,
    [a, b]: [Reg; 2],
    frame: &Frame<'_>,
    out: &mut [u8],
    len: usize,
) -> bool {
    if op.is_comparison() {
        with_held!(kind, T => compare::<T>(op, [frame.src(a), frame.src(b)], slice(out, len)));
        return true;
    }
    match kind {
        Kind::F32 => binary_float::<f32>(op, [frame.src(a), frame.src(b)], slice(out, len)),
        Kind::F64 => binary_float::<f64>(op, [frame.src(a), frame.src(b)], slice(out, len)),
        Kind::I32 => return binary_int::<i32>(op, [frame.src(a), frame.src(b)], slice(out, len)),
        Kind::I64 => return binary_int::<i64>(op, [frame.src(a), frame.src(b)], slice(out, len)),
        Kind::U32 => return binary_int::<u32>(op, [frame.src(a), frame.src(b)], slice(out, len)),
        Kind::Bool => binary_bool(op, [frame.src(a), frame.src(b)], slice(out, len)),
    }
    true
}

fn compare<T: Held>(op: Binary, ab: [Src<'_, T>; 2], out: &mut [u8]) {
    match op {
        Binary::Eq => each2(ab, out, |a, b| u8::from(a == b)),
        Binary::Ne => each2(ab, out, |a, b| u8::from(a != b)),
        Binary::Lt => each2(ab, out, |a, b| u8::from(a < b)),
        Binary::Le => each2(ab, out, |a, b| u8::from(a <= b)),
        Binary::Gt => each2(ab, out, |a, b| u8::from(a > b)),
        _ => each2(ab, out, |a, b| u8::from(a >= b)),
    }
}

fn binary_float<T: Float>(op: Binary, ab: [Src<'_, T>; 2], out: &mut [T]) {
    match op {
        Binary::Add => each2(ab, out, |a, b| a + b),
        Binary::Sub => each2(ab, out, |a, b| a - b),
        Binary::Mul => each2(ab, out, |a, b| a * b),
        Binary::Div => each2(ab, out, |a, b| a / b),
        Binary::FloorDiv => calls2(ab, out, scalar::float_floor_div),
        Binary::TruncDiv => each2(ab, out, |a, b| (a / b).trunc()),
        Binary::Rem => calls2(ab, out, scalar::float_rem),
        Binary::Max => each2(ab, out, scalar::max),
        Binary::Min => each2(ab, out, scalar::min),
        Binary::Fmax => each2(ab, out, scalar::fmax),
        Binary::Fmin => each2(ab, out, scalar::fmin),
        Binary::Atan2 => calls2(ab, out, |a, b| T::narrow(a.wide().atan2(b.wide()))),
        Binary::Hypot => calls2(ab, out, |a, b| T::narrow(a.wide().hypot(b.wide()))),
        Binary::Copysign => each2(ab, out, T::copysign),
        _ => pow(ab, out),
    }
}

/// Small whole exponents, which is what most programs have, are products.
fn pow<T: Float>(ab: [Src<'_, T>; 2], out: &mut [T]) {
    let Src::One(exponent) = ab[1] else {
        return calls2(ab, out, |a, b| T::narrow(a.wide().powf(b.wide())));
    };
    match exponent.wide() {
        1.0 => each(ab[0], out, |a| a),
        2.0 => each(ab[0], out, |a| a * a),
        3.0 if T::FAST => each(ab[0], out, |a| T::narrow(a.wide() * a.wide() * a.wide())),
        4.0 if T::FAST => each(ab[0], out, |a| {
            T::narrow((a.wide() * a.wide()) * (a.wide() * a.wide()))
        }),
        -1.0 => each(ab[0], out, |a| T::ONE / a),
        e => calls(ab[0], out, |a| T::narrow(a.wide().powf(e))),
    }
}

fn binary_int<T: Int>(op: Binary, ab: [Src<'_, T>; 2], out: &mut [T]) -> bool {
    let divides = matches!(op, Binary::FloorDiv | Binary::TruncDiv | Binary::Rem);
    let by_zero = match ab[1] {
        Src::One(b) => b == T::ZERO,
        Src::Many(b) => divides && b.contains(&T::ZERO),
    };
    if divides && by_zero {
        return false;
    }
    match op {
        Binary::Add => each2(ab, out, T::add),
        Binary::Sub => each2(ab, out, T::sub),
        Binary::Mul => each2(ab, out, T::mul),
        Binary::FloorDiv => calls2(ab, out, scalar::int_floor_div),
        Binary::TruncDiv => calls2(ab, out, T::div),
        Binary::Rem => calls2(ab, out, scalar::int_floor_rem),
        Binary::Pow => calls2(ab, out, scalar::int_pow),
        Binary::Max => each2(ab, out, |a, b| a.max(b)),
        Binary::Min => each2(ab, out, |a, b| a.min(b)),
        Binary::And => each2(ab, out, T::and),
        Binary::Or => each2(ab, out, T::or),
        Binary::Xor => each2(ab, out, T::xor),
        Binary::Shl => each2(ab, out, scalar::int_shl),
        _ => each2(ab, out, scalar::int_shr),
    }
    true
}

fn binary_bool(op: Binary, ab: [Src<'_, u8>; 2], out: &mut [u8]) {
    match op {
        Binary::And | Binary::Min => each2(ab, out, |a, b| a & b),
        Binary::Or | Binary::Max => each2(ab, out, |a, b| a | b),
        _ => each2(ab, out, |a, b| a ^ b),
    }
}

pub(crate) fn select<T: Held>([c, a, b]: [Reg; 3], frame: &Frame<'_>, out: &mut [u8], len: usize) {
    let (c, a, b) = (frame.src::<u8>(c), frame.src::<T>(a), frame.src::<T>(b));
    match size_of::<T>() {
        1 => select_bits::<u8>(c, a.bits(), b.bits(), slice(out, len)),
        4 => select_bits::<u32>(c, a.bits(), b.bits(), slice(out, len)),
        _ => select_bits::<i64>(c, a.bits(), b.bits(), slice(out, len)),
    }
}

/// Selects values as bits: both sides are read and one is masked out. Of an `if` the compiler makes
/// a choice between two addresses, and then gathers.
fn select_bits<T: Bits>(c: Src<'_, u8>, a: Src<'_, T>, b: Src<'_, T>, out: &mut [T]) {
    match (c, a, b) {
        (Src::Many(c), Src::Many(a), Src::Many(b)) => dispatch(Select(c, a, b, out)),
        (Src::Many(c), Src::Many(a), Src::One(b)) => {
            dispatch(Each2(c, a, out, |c, a| T::choose(c, a, b)))
        }
        (Src::Many(c), Src::One(a), Src::Many(b)) => {
            dispatch(Each2(c, b, out, |c, b| T::choose(c, a, b)))
        }
        (Src::Many(c), Src::One(a), Src::One(b)) => each(Src::Many(c), out, |c| T::choose(c, a, b)),
        (Src::One(c), a, b) => each(if c != 0 { a } else { b }, out, |v| v),
    }
}

/// A loop over conditions and what they choose from.
struct Select<'a, T>(&'a [u8], &'a [T], &'a [T], &'a mut [T]);

impl<T: Bits> Kernel for Select<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        for (((out, c), a), b) in self.3.iter_mut().zip(self.0).zip(self.1).zip(self.2) {
            *out = T::choose(*c, *a, *b);
        }
    }
}

/// An integer of the size of what is chosen.
trait Bits: Held {
    fn choose(condition: u8, yes: Self, no: Self) -> Self;
}

macro_rules! bits {
    ($($t:ty),*) => {$(
        impl Bits for $t {
            #[inline(always)]
            fn choose(condition: u8, yes: Self, no: Self) -> Self {
                let mask = <$t>::from(condition != 0).wrapping_neg();
                (yes & mask) | (no & !mask)
            }
        }
    )*};
}
bits!(u8, u32, i64);

pub(crate) fn cast(
    kind: Kind,
    dtype: DType,
    a: Reg,
    frame: &Frame<'_>,
    out: &mut [u8],
    len: usize,
) {
    match kind {
        // Not by way of a wider float, which would make a signalling NaN quiet.
        Kind::F32 if dtype.kind() == Kind::F32 => {
            each(frame.src::<f32>(a), slice(out, len), |a| a);
            round(dtype, slice(out, len));
        }
        Kind::F32 => cast_float::<f32>(dtype, frame.src(a), out, len),
        Kind::F64 => cast_float::<f64>(dtype, frame.src(a), out, len),
        Kind::I32 => cast_int(
            dtype,
            frame.src::<i32>(a),
            out,
            len,
            i64::from,
            |v| v as f32,
            f64::from,
        ),
        Kind::I64 => cast_int(
            dtype,
            frame.src::<i64>(a),
            out,
            len,
            |v| v,
            |v| v as f32,
            |v| v as f64,
        ),
        Kind::U32 => cast_int(
            dtype,
            frame.src::<u32>(a),
            out,
            len,
            i64::from,
            |v| v as f32,
            f64::from,
        ),
        Kind::Bool => cast_int(
            dtype,
            frame.src::<u8>(a),
            out,
            len,
            i64::from,
            f32::from,
            f64::from,
        ),
    }
}

fn cast_float<T: Float>(dtype: DType, a: Src<'_, T>, out: &mut [u8], len: usize) {
    match dtype {
        DType::Bool => each(a, slice(out, len), |a| u8::from(a != T::default())),
        DType::U8 => each(a, slice(out, len), |a| u32::from(a.wide() as u8)),
        DType::U32 => each(a, slice(out, len), |a| a.wide() as u32),
        DType::I32 => each(a, slice(out, len), |a| a.wide() as i32),
        DType::I64 => each(a, slice(out, len), |a| a.wide() as i64),
        DType::F64 => each(a, slice(out, len), T::wide),
        _ => {
            each(a, slice(out, len), |a| a.wide() as f32);
            round(dtype, slice(out, len));
        }
    }
}

fn cast_int<T: Held>(
    dtype: DType,
    a: Src<'_, T>,
    out: &mut [u8],
    len: usize,
    int: impl Fn(T) -> i64,
    single: impl Fn(T) -> f32,
    double: impl Fn(T) -> f64,
) {
    match dtype {
        DType::Bool => each(a, slice(out, len), |a| u8::from(a != T::default())),
        DType::U8 => each(a, slice(out, len), |a| u32::from(int(a) as u8)),
        DType::U32 => each(a, slice(out, len), |a| int(a) as u32),
        DType::I32 => each(a, slice(out, len), |a| int(a) as i32),
        DType::I64 => each(a, slice(out, len), int),
        DType::F64 => each(a, slice(out, len), double),
        _ => {
            each(a, slice(out, len), single);
            round(dtype, slice(out, len));
        }
    }
}

/// Rounds to a small float type and back; nothing to do for `f32`.
fn round(dtype: DType, values: &mut [f32]) {
    fn through<S: Stored<Held = f32>>(values: &mut [f32]) {
        for values in values.chunks_mut(64) {
            let mut small = [S::zeroed(); 64];
            S::store_all(values, &mut small[..values.len()]);
            S::load_all(&small[..values.len()], values);
        }
    }
    match dtype {
        DType::F16 => through::<anymesh_kernel::f16>(values),
        DType::BF16 => through::<anymesh_kernel::bf16>(values),
        DType::F8E4M3 => through::<anymesh_kernel::F8E4M3>(values),
        DType::F8E5M2 => through::<anymesh_kernel::F8E5M2>(values),
        _ => {}
    }
}

pub(crate) fn philox(
    kind: Kind,
    index: Reg,
    key: [Reg; 3],
    word: u8,
    frame: &Frame<'_>,
    out: &mut [u8],
    len: usize,
) {
    let key = key.map(|k| frame.src::<u32>(k));
    match kind {
        Kind::I32 => philox_words(
            frame.src::<i32>(index),
            |v| v as u64,
            key,
            word,
            slice(out, len),
        ),
        _ => philox_words(
            frame.src::<i64>(index),
            |v| v as u64,
            key,
            word,
            slice(out, len),
        ),
    }
}

fn philox_words<T: Copy>(
    index: Src<'_, T>,
    wide: impl Fn(T) -> u64,
    key: [Src<'_, u32>; 3],
    word: u8,
    out: &mut [u32],
) {
    match (index, key) {
        (Src::Many(indices), [Src::One(low), Src::One(high), Src::One(stream)]) => {
            let words = Words {
                key: [low, high],
                stream,
                indices,
                wide,
                out,
            };
            // A loop for each word: a constant position in the result lets the loop vectorise.
            match word {
                0 => dispatch(Word::<_, _, 0>(words)),
                1 => dispatch(Word::<_, _, 1>(words)),
                2 => dispatch(Word::<_, _, 2>(words)),
                _ => dispatch(Word::<_, _, 3>(words)),
            }
        }
        (index, [low, high, stream]) => {
            for (i, out) in out.iter_mut().enumerate() {
                let index = wide(index.at(i));
                *out = scalar::philox(
                    [index as u32, (index >> 32) as u32, stream.at(i), 0],
                    [low.at(i), high.at(i)],
                )[word as usize & 3];
            }
        }
    }
}

/// Random words of one stream.
struct Words<'a, T, W> {
    key: [u32; 2],
    stream: u32,
    indices: &'a [T],
    wide: W,
    out: &'a mut [u32],
}

struct Word<'a, T, W, const N: usize>(Words<'a, T, W>);

impl<T: Copy, W: Fn(T) -> u64, const N: usize> Kernel for Word<'_, T, W, N> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let Words {
            key,
            stream,
            indices,
            wide,
            out,
        } = self.0;
        for (out, index) in out.iter_mut().zip(indices) {
            let index = wide(*index);
            *out = scalar::philox([index as u32, (index >> 32) as u32, stream, 0], key)[N];
        }
    }
}

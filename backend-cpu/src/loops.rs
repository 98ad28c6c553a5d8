//! One loop for each instruction, operand kind and way of reading the operands (a slice, or one
//! value for all positions). Which one an instruction takes is chosen once for a program: to find it
//! for every block takes longer than a short one runs.

mod philox;

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
    map::{Binary, Inst, Program, Reg, Unary},
};
use std::marker::PhantomData;

/// A loop over the positions of a block.
trait Loop: Sync {
    /// Computes `len` positions. Returns false where an integer was divided by zero.
    fn run(&self, step: &Step, frame: &Frame<'_>, out: &mut [u8], len: usize) -> bool;
}

type Chosen = &'static dyn Loop;

/// An instruction with its loop.
#[derive(Clone, Copy)]
pub(crate) struct Step {
    pub(crate) inst: Inst,
    run: Chosen,
    operands: [Reg; 4],
    count: u8,
    /// What the operands are; of a choice, what it chooses from.
    kind: Kind,
}

impl Step {
    pub(crate) fn new(program: &Program, i: usize) -> Self {
        let inst = program.insts[i];
        let (mut operands, mut count) = ([0; 4], 0);
        inst.operands(|r| {
            operands[usize::from(count)] = r;
            count += 1;
        });
        let kind = match (inst, count) {
            (Inst::Select(..), _) | (_, 0) => program.kinds[i],
            _ => program.kinds[usize::from(operands[0])],
        };
        Self {
            inst,
            run: chosen(&inst, kind),
            operands,
            count,
            kind,
        }
    }

    /// The registers that it reads.
    pub(crate) fn operands(&self) -> &[Reg] {
        &self.operands[..usize::from(self.count)]
    }

    /// Computes `len` positions. Returns false where an integer was divided by zero.
    #[inline]
    pub(crate) fn run(&self, frame: &Frame<'_>, out: &mut [u8], len: usize) -> bool {
        self.run.run(self, frame, out, len)
    }
}

fn chosen(inst: &Inst, kind: Kind) -> Chosen {
    match *inst {
        Inst::Unary(op, _) => unary(op, kind),
        Inst::Binary(op, ..) => binary(op, kind),
        Inst::Select(..) => with_held!(kind, T => &Whole(select::<T>)),
        Inst::Cast(..) | Inst::Fence(..) => &Whole(cast),
        Inst::Philox { .. } => &Whole(philox::philox),
        Inst::Load(_) | Inst::Inside(_) | Inst::Index(_) | Inst::Param(_) | Inst::Const(..) => {
            &Whole(|_, _, _, _| {})
        }
    }
}

/// A function of one operand of type `A`.
struct One<A, R, F: Fn(A) -> R>(F, PhantomData<fn(A) -> R>);

impl<A: Held, R: Held, F: Fn(A) -> R + Sync> Loop for One<A, R, F> {
    fn run(&self, step: &Step, frame: &Frame<'_>, out: &mut [u8], len: usize) -> bool {
        each(frame.src(step.operands[0]), slice(out, len), &self.0);
        true
    }
}

/// A function of two operands of type `A`.
struct Two<A, R, F: Fn(A, A) -> R>(F, PhantomData<fn(A) -> R>);

impl<A: Held, R: Held, F: Fn(A, A) -> R + Sync> Loop for Two<A, R, F> {
    fn run(&self, step: &Step, frame: &Frame<'_>, out: &mut [u8], len: usize) -> bool {
        let [a, b, ..] = step.operands;
        each2([frame.src(a), frame.src(b)], slice(out, len), &self.0);
        true
    }
}

/// [`Two`] for functions that are calls, which no vector instruction makes faster; `true` where they
/// divide.
struct Calls<A, R, F: Fn(A, A) -> R, const DIVIDES: bool>(F, PhantomData<fn(A) -> R>);

impl<A: Held, R: Held, F: Fn(A, A) -> R + Sync, const DIVIDES: bool> Loop
    for Calls<A, R, F, DIVIDES>
{
    fn run(&self, step: &Step, frame: &Frame<'_>, out: &mut [u8], len: usize) -> bool {
        let [a, b, ..] = step.operands;
        let ab = [frame.src::<A>(a), frame.src::<A>(b)];
        let zero = A::default();
        let by_zero = || match ab[1] {
            Src::One(b) => b == zero,
            Src::Many(b) => b.contains(&zero),
        };
        if DIVIDES && by_zero() {
            return false;
        }
        calls2(ab, slice(out, len), &self.0);
        true
    }
}

/// A function of `fastmath`.
struct Fast<F, T>(PhantomData<fn(F) -> T>);

impl<F: Function, T: Float> Loop for Fast<F, T> {
    fn run(&self, step: &Step, frame: &Frame<'_>, out: &mut [u8], len: usize) -> bool {
        fast::<F, T>(frame.src(step.operands[0]), slice(out, len));
        true
    }
}

/// What does all by itself, and never fails.
struct Whole<F: Fn(&Step, &Frame<'_>, &mut [u8], usize)>(F);

impl<F: Fn(&Step, &Frame<'_>, &mut [u8], usize) + Sync> Loop for Whole<F> {
    fn run(&self, step: &Step, frame: &Frame<'_>, out: &mut [u8], len: usize) -> bool {
        (self.0)(step, frame, out, len);
        true
    }
}

/// Loops that are made of a function without anything of its own, so that they are constants.
macro_rules! one {
    ($t:ty, $f:expr) => {
        &One::<$t, _, _>($f, PhantomData)
    };
}
macro_rules! two {
    ($t:ty, $f:expr) => {
        &Two::<$t, _, _>($f, PhantomData)
    };
}
macro_rules! calls {
    ($t:ty, $f:expr) => {
        &Calls::<$t, _, _, false>($f, PhantomData)
    };
    ($t:ty, $f:expr, divides) => {
        &Calls::<$t, _, _, true>($f, PhantomData)
    };
}

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

/// [`each`] for functions that are calls.
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

fn unary(op: Unary, kind: Kind) -> Chosen {
    match kind {
        Kind::F32 => unary_float::<f32>(op),
        Kind::F64 => unary_float::<f64>(op),
        Kind::I32 => unary_int::<i32>(op),
        Kind::I64 => unary_int::<i64>(op),
        Kind::U32 => unary_int::<u32>(op),
        Kind::Bool => one!(u8, |a| u8::from(a == 0)),
    }
}

fn unary_float<T: Float>(op: Unary) -> Chosen {
    if T::FAST
        && let Some(fast) = fast_function::<T>(op)
    {
        return fast;
    }
    match op {
        Unary::IsNan => one!(T, |a| u8::from(a.is_nan())),
        Unary::IsInf => one!(T, |a| u8::from(a.is_infinite())),
        Unary::Rsqrt => one!(T, |a| T::narrow(1.0 / a.wide().sqrt())),
        Unary::Neg => one!(T, |a| -a),
        Unary::Abs => one!(T, T::abs),
        Unary::Sign => one!(T, scalar::sign),
        Unary::Sqrt => one!(T, T::sqrt),
        Unary::Floor => one!(T, T::floor),
        Unary::Ceil => one!(T, T::ceil),
        Unary::Round => one!(T, T::round),
        Unary::Trunc => one!(T, T::trunc),
        _ => &Whole(function::<T>),
    }
}

/// A function that is a call.
fn function<T: Float>(step: &Step, frame: &Frame<'_>, out: &mut [u8], len: usize) {
    if let Inst::Unary(op, a) = step.inst
        && let Some(f) = functions::of(op)
    {
        calls(frame.src(a), slice(out, len), |a: T| T::narrow(f(a.wide())));
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

fn fast<F: Function, T: Float>(a: Src<'_, T>, out: &mut [T]) {
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

/// The functions of `fastmath`.
fn fast_function<T: Float>(op: Unary) -> Option<Chosen> {
    Some(match op {
        Unary::Exp => &Fast::<fastmath::Exp, T>(PhantomData),
        Unary::Exp2 => &Fast::<fastmath::Exp2, T>(PhantomData),
        Unary::Expm1 => &Fast::<fastmath::Expm1, T>(PhantomData),
        Unary::Log => &Fast::<fastmath::Log, T>(PhantomData),
        Unary::Log2 => &Fast::<fastmath::Log2, T>(PhantomData),
        Unary::Log10 => &Fast::<fastmath::Log10, T>(PhantomData),
        Unary::Log1p => &Fast::<fastmath::Log1p, T>(PhantomData),
        Unary::Tanh => &Fast::<fastmath::Tanh, T>(PhantomData),
        Unary::Sinh => &Fast::<fastmath::Sinh, T>(PhantomData),
        Unary::Cosh => &Fast::<fastmath::Cosh, T>(PhantomData),
        Unary::Erf => &Fast::<fastmath::Erf, T>(PhantomData),
        Unary::Sin => &Whole(|step, frame, out, len| {
            trigonometric::<fastmath::Sin, T>(f64::sin, step, frame, slice(out, len))
        }),
        Unary::Cos => &Whole(|step, frame, out, len| {
            trigonometric::<fastmath::Cos, T>(f64::cos, step, frame, slice(out, len))
        }),
        _ => return None,
    })
}

/// Large angles are computed once more, by a call.
fn trigonometric<F: Function, T: Float>(
    exact: fn(f64) -> f64,
    step: &Step,
    frame: &Frame<'_>,
    out: &mut [T],
) {
    let a = frame.src::<T>(step.operands[0]);
    fast::<F, T>(a, out);
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

fn unary_int<T: Int>(op: Unary) -> Chosen {
    match op {
        Unary::Neg => one!(T, T::neg),
        Unary::Abs => one!(T, scalar::int_abs),
        Unary::Sign => one!(T, scalar::int_sign),
        _ => one!(T, T::not),
    }
}

fn binary(op: Binary, kind: Kind) -> Chosen {
    if op.is_comparison() {
        return with_held!(kind, T => compare::<T>(op));
    }
    match kind {
        Kind::F32 => binary_float::<f32>(op),
        Kind::F64 => binary_float::<f64>(op),
        Kind::I32 => binary_int::<i32>(op),
        Kind::I64 => binary_int::<i64>(op),
        Kind::U32 => binary_int::<u32>(op),
        Kind::Bool => binary_bool(op),
    }
}

fn compare<T: Held>(op: Binary) -> Chosen {
    match op {
        Binary::Eq => two!(T, |a, b| u8::from(a == b)),
        Binary::Ne => two!(T, |a, b| u8::from(a != b)),
        Binary::Lt => two!(T, |a, b| u8::from(a < b)),
        Binary::Le => two!(T, |a, b| u8::from(a <= b)),
        Binary::Gt => two!(T, |a, b| u8::from(a > b)),
        _ => two!(T, |a, b| u8::from(a >= b)),
    }
}

fn binary_float<T: Float>(op: Binary) -> Chosen {
    match op {
        Binary::Add => two!(T, |a, b| a + b),
        Binary::Sub => two!(T, |a, b| a - b),
        Binary::Mul => two!(T, |a, b| a * b),
        Binary::Div => two!(T, |a, b| a / b),
        Binary::FloorDiv => calls!(T, scalar::float_floor_div),
        Binary::TruncDiv => two!(T, |a, b| (a / b).trunc()),
        Binary::Rem => calls!(T, scalar::float_rem),
        Binary::Max => two!(T, scalar::max),
        Binary::Min => two!(T, scalar::min),
        Binary::Fmax => two!(T, scalar::fmax),
        Binary::Fmin => two!(T, scalar::fmin),
        Binary::Atan2 => calls!(T, |a, b| T::narrow(a.wide().atan2(b.wide()))),
        Binary::Hypot => calls!(T, |a, b| T::narrow(a.wide().hypot(b.wide()))),
        Binary::Copysign => two!(T, T::copysign),
        _ => &Whole(|step, frame, out, len| {
            let [a, b, ..] = step.operands;
            pow::<T>([frame.src(a), frame.src(b)], slice(out, len));
        }),
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

fn binary_int<T: Int>(op: Binary) -> Chosen {
    match op {
        Binary::Add => two!(T, T::add),
        Binary::Sub => two!(T, T::sub),
        Binary::Mul => two!(T, T::mul),
        Binary::FloorDiv => calls!(T, scalar::int_floor_div, divides),
        Binary::TruncDiv => calls!(T, T::div, divides),
        Binary::Rem => calls!(T, scalar::int_floor_rem, divides),
        Binary::Pow => calls!(T, scalar::int_pow),
        Binary::Max => two!(T, |a, b| a.max(b)),
        Binary::Min => two!(T, |a, b| a.min(b)),
        Binary::And => two!(T, T::and),
        Binary::Or => two!(T, T::or),
        Binary::Xor => two!(T, T::xor),
        Binary::Shl => two!(T, scalar::int_shl),
        _ => two!(T, scalar::int_shr),
    }
}

fn binary_bool(op: Binary) -> Chosen {
    match op {
        Binary::And | Binary::Min => two!(u8, |a, b| a & b),
        Binary::Or | Binary::Max => two!(u8, |a, b| a | b),
        _ => two!(u8, |a, b| a ^ b),
    }
}

fn select<T: Held>(step: &Step, frame: &Frame<'_>, out: &mut [u8], len: usize) {
    let [c, a, b, _] = step.operands;
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

fn cast(step: &Step, frame: &Frame<'_>, out: &mut [u8], len: usize) {
    let (a, kind) = (step.operands[0], step.kind);
    let dtype = match step.inst {
        Inst::Cast(_, dtype) => dtype,
        // Of a fence: each instruction is computed by itself anyway.
        _ => kind.dtype(),
    };
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

//! What reductions accumulate, and how.

use crate::{
    element::Held,
    scalar::{self, Float, Int},
    simd::{Kernel, dispatch, fused_or_not, vectorized},
};
use std::marker::PhantomData;

/// Independent accumulators of a loop over a row, so that it vectorises and additions do not wait
/// for each other.
const LANES: usize = 16;

/// Rows of which columns are summed at a time.
const TOGETHER: usize = 4;

/// A reduction of values in order.
pub(crate) trait Fold: Sync {
    type In: Held;
    type Acc: Copy + Send + Sync;
    type Out: Held;

    /// Before any value.
    fn start(&self) -> Self::Acc;
    /// Takes the value at position `at`.
    fn one(&self, acc: &mut Self::Acc, value: Self::In, at: usize);
    /// Takes neighbouring values from position `at` on.
    fn row(&self, acc: &mut Self::Acc, values: &[Self::In], at: usize);
    /// Takes values `[rows, accs]` whose rows begin `step` apart, at least as far as they are long;
    /// the first row is at position `at`.
    #[inline(always)]
    fn slab(&self, accs: &mut [Self::Acc], values: &[Self::In], step: usize, at: usize) {
        vectorized(|| {
            for (r, values) in values.chunks(step).enumerate() {
                for (acc, value) in accs.iter_mut().zip(values) {
                    self.one(acc, *value, at + r);
                }
            }
        });
    }
    /// Joins with what came after.
    fn join(&self, acc: Self::Acc, later: Self::Acc) -> Self::Acc;
    fn finish(&self, acc: Self::Acc) -> Self::Out;
}

/// The lanes of whole blocks. They are a value of its own, so that they stay in registers.
struct Lanes<'a, T, A, S>(&'a [[T; LANES]], A, S);

impl<T: Copy, A: Copy, S: Fn(A, T) -> A> Kernel for Lanes<'_, T, A, S> {
    type Out = [A; LANES];
    #[inline(always)]
    fn run(self) -> [A; LANES] {
        let mut lanes = [self.1; LANES];
        for block in self.0 {
            for i in 0..LANES {
                lanes[i] = (self.2)(lanes[i], block[i]);
            }
        }
        lanes
    }
}

/// Folds a row with independent lanes, then the lanes.
#[inline(always)]
pub(crate) fn lanes<T: Copy, A: Copy>(
    values: &[T],
    start: A,
    step: impl Fn(A, T) -> A,
    join: impl Fn(A, A) -> A,
) -> A {
    if values.len() < LANES {
        return values.iter().fold(start, |acc, value| step(acc, *value));
    }
    let (blocks, rest) = values.as_chunks::<LANES>();
    let mut lanes = dispatch(Lanes(blocks, start, &step));
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane = step(*lane, *value);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = join(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// `exp(x - base)` of each value.
pub(crate) struct Exps<'a, T>(pub(crate) &'a [T], pub(crate) f64, pub(crate) &'a mut [f64]);

impl<T: Float> Kernel for Exps<'_, T> {
    fused_or_not!(());
}

impl<T: Float> Exps<'_, T> {
    #[inline(always)]
    fn body<const FUSED: bool>(self) {
        for (exp, x) in self.2.iter_mut().zip(self.0) {
            *exp = T::exp_wide::<FUSED>(x.wide() - self.1);
        }
    }
}

/// A fold that only has an optional factor on its result.
macro_rules! scaled {
    ($($(#[$doc:meta])* $name:ident),*) => {$(
        $(#[$doc])*
        pub(crate) struct $name<T> {
            scale: f64,
            kind: PhantomData<T>,
        }

        impl<T> $name<T> {
            pub(crate) fn new(scale: Option<f64>) -> Self {
                Self { scale: scale.unwrap_or(1.0), kind: PhantomData }
            }
        }
    )*};
}
scaled!(
    /// Sum in `f64`.
    SumFloat,
    /// Product in `f64`.
    ProdFloat,
    /// `log(sum(exp(x)))` in `f64`.
    LogSumExp
);

impl<T: Float> Fold for SumFloat<T> {
    type In = T;
    type Acc = f64;
    type Out = T;
    fn start(&self) -> f64 {
        0.0
    }
    #[inline(always)]
    fn one(&self, acc: &mut f64, value: T, _: usize) {
        *acc += value.wide();
    }
    fn row(&self, acc: &mut f64, values: &[T], _: usize) {
        *acc += lanes(values, 0.0, |sum, v| sum + v.wide(), |a, b| a + b);
    }
    fn slab(&self, accs: &mut [f64], values: &[T], step: usize, _: usize) {
        dispatch(Columns(accs, values, step));
    }
    fn join(&self, acc: f64, later: f64) -> f64 {
        acc + later
    }
    fn finish(&self, acc: f64) -> T {
        T::narrow(acc * self.scale)
    }
}

/// Sums of columns: what they had before, values, and how far apart the rows of those begin.
struct Columns<'a, T>(&'a mut [f64], &'a [T], usize);

impl<T: Float> Kernel for Columns<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let Columns(accs, values, step) = self;
        let n = accs.len();
        // Several rows at a time, so that sums are read and written less often than values.
        for rows in values.chunks(TOGETHER * step) {
            if rows.len() < (TOGETHER - 1) * step + n {
                for row in rows.chunks(step) {
                    accs.iter_mut()
                        .zip(row)
                        .for_each(|(sum, x)| *sum += x.wide());
                }
                continue;
            }
            let [a, b, c, d] = [0, 1, 2, 3].map(|r| &rows[r * step..r * step + n]);
            for (i, sum) in accs.iter_mut().enumerate() {
                *sum = *sum + a[i].wide() + b[i].wide() + c[i].wide() + d[i].wide();
            }
        }
    }
}

impl<T: Float> Fold for ProdFloat<T> {
    type In = T;
    type Acc = f64;
    type Out = T;
    fn start(&self) -> f64 {
        1.0
    }
    #[inline(always)]
    fn one(&self, acc: &mut f64, value: T, _: usize) {
        *acc *= value.wide();
    }
    fn row(&self, acc: &mut f64, values: &[T], _: usize) {
        *acc *= lanes(values, 1.0, |product, v| product * v.wide(), |a, b| a * b);
    }
    fn join(&self, acc: f64, later: f64) -> f64 {
        acc * later
    }
    fn finish(&self, acc: f64) -> T {
        T::narrow(acc * self.scale)
    }
}

/// Joins two partial results: the largest value, and the sum of exponentials relative to it.
/// Without branches, so that it vectorises; where the largest value is not finite the sum is not
/// used.
#[inline(always)]
pub(crate) fn log_sum_exp_step<T: Float>(
    (top, sum): (f64, f64),
    (later_top, later_sum): (f64, f64),
) -> (f64, f64) {
    let new = scalar::max(top, later_top);
    let base = if new.is_finite() { new } else { 0.0 };
    (
        new,
        sum * T::exp_wide::<false>(top - base) + later_sum * T::exp_wide::<false>(later_top - base),
    )
}

/// One more row for accumulators of many columns: their largest values, their sums, the row.
struct LogSumExpColumns<'a, T>(&'a mut [f64], &'a mut [f64], &'a [T]);

impl<T: Float> Kernel for LogSumExpColumns<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        for ((top, sum), v) in self.0.iter_mut().zip(self.1).zip(self.2) {
            (*top, *sum) = log_sum_exp_step::<T>((*top, *sum), (v.wide(), 1.0));
        }
    }
}

impl<T: Float> Fold for LogSumExp<T> {
    type In = T;
    type Acc = (f64, f64);
    type Out = T;
    fn start(&self) -> (f64, f64) {
        (f64::NEG_INFINITY, 0.0)
    }
    fn one(&self, acc: &mut (f64, f64), value: T, _: usize) {
        *acc = log_sum_exp_step::<T>(*acc, (value.wide(), 1.0));
    }
    fn row(&self, acc: &mut (f64, f64), values: &[T], at: usize) {
        if values.len() < LANES {
            return values.iter().for_each(|value| self.one(acc, *value, at));
        }
        let top = lanes(values, T::LOWEST, scalar::max, scalar::max).wide();
        let base = if top.is_finite() { top } else { 0.0 };
        let mut sum = 0.0;
        for values in values.chunks(64) {
            let mut exps = [0.0; 64];
            dispatch(Exps(values, base, &mut exps));
            sum += lanes(&exps[..values.len()], 0.0, |a, b| a + b, |a, b| a + b);
        }
        *acc = log_sum_exp_step::<T>(*acc, (top, sum));
    }
    fn slab(&self, accs: &mut [(f64, f64)], values: &[T], step: usize, _: usize) {
        // The two halves of the accumulators apart, so that the loop over columns vectorises.
        const WIDTH: usize = 64;
        for (i, accs) in accs.chunks_mut(WIDTH).enumerate() {
            let (mut tops, mut sums) = ([0.0; WIDTH], [0.0; WIDTH]);
            for (c, acc) in accs.iter().enumerate() {
                (tops[c], sums[c]) = *acc;
            }
            for row in values.chunks(step) {
                let row = &row[i * WIDTH..i * WIDTH + accs.len()];
                dispatch(LogSumExpColumns(&mut tops, &mut sums, row));
            }
            for (c, acc) in accs.iter_mut().enumerate() {
                *acc = (tops[c], sums[c]);
            }
        }
    }
    fn join(&self, acc: (f64, f64), later: (f64, f64)) -> (f64, f64) {
        log_sum_exp_step::<T>(acc, later)
    }
    fn finish(&self, (top, sum): (f64, f64)) -> T {
        T::narrow((if top.is_finite() { top + sum.ln() } else { top }) * self.scale)
    }
}

/// Wrapping sum.
#[derive(Default)]
pub(crate) struct SumInt<T>(PhantomData<T>);

impl<T: Int> Fold for SumInt<T> {
    type In = T;
    type Acc = T;
    type Out = T;
    fn start(&self) -> T {
        T::ZERO
    }
    #[inline(always)]
    fn one(&self, acc: &mut T, value: T, _: usize) {
        *acc = acc.add(value);
    }
    fn row(&self, acc: &mut T, values: &[T], _: usize) {
        *acc = acc.add(lanes(values, T::ZERO, T::add, T::add));
    }
    fn join(&self, acc: T, later: T) -> T {
        acc.add(later)
    }
    fn finish(&self, acc: T) -> T {
        acc
    }
}

/// Wrapping product.
#[derive(Default)]
pub(crate) struct ProdInt<T>(PhantomData<T>);

impl<T: Int> Fold for ProdInt<T> {
    type In = T;
    type Acc = T;
    type Out = T;
    fn start(&self) -> T {
        T::ONE
    }
    #[inline(always)]
    fn one(&self, acc: &mut T, value: T, _: usize) {
        *acc = acc.mul(value);
    }
    fn row(&self, acc: &mut T, values: &[T], _: usize) {
        *acc = acc.mul(lanes(values, T::ONE, T::mul, T::mul));
    }
    fn join(&self, acc: T, later: T) -> T {
        acc.mul(later)
    }
    fn finish(&self, acc: T) -> T {
        acc
    }
}

/// Largest (`MAX`) or smallest value.
pub(crate) struct Extreme<T, const MAX: bool> {
    scale: Option<f64>,
    kind: PhantomData<T>,
}

impl<T, const MAX: bool> Extreme<T, MAX> {
    pub(crate) fn new(scale: Option<f64>) -> Self {
        Self {
            scale,
            kind: PhantomData,
        }
    }
}

impl<T, const MAX: bool> Default for Extreme<T, MAX> {
    fn default() -> Self {
        Self::new(None)
    }
}

/// The more extreme of two values; NaN wins.
#[inline(always)]
fn extreme<T: Held, const MAX: bool>(a: T, b: T) -> T {
    if MAX {
        scalar::max(a, b)
    } else {
        scalar::min(a, b)
    }
}

fn lowest<T: Held, const MAX: bool>() -> T {
    if MAX { T::LOWEST } else { T::HIGHEST }
}

impl<T: Held, const MAX: bool> Fold for Extreme<T, MAX> {
    type In = T;
    type Acc = T;
    type Out = T;
    fn start(&self) -> T {
        lowest::<T, MAX>()
    }
    #[inline(always)]
    fn one(&self, acc: &mut T, value: T, _: usize) {
        *acc = extreme::<T, MAX>(*acc, value);
    }
    fn row(&self, acc: &mut T, values: &[T], _: usize) {
        let row = lanes(
            values,
            lowest::<T, MAX>(),
            extreme::<T, MAX>,
            extreme::<T, MAX>,
        );
        *acc = extreme::<T, MAX>(*acc, row);
    }
    fn join(&self, acc: T, later: T) -> T {
        extreme::<T, MAX>(acc, later)
    }
    fn finish(&self, acc: T) -> T {
        self.scale.map_or(acc, |scale| acc.scaled(scale))
    }
}

/// Position of the first largest (`MAX`) or smallest value; the first NaN wins.
#[derive(Default)]
pub(crate) struct Arg<T, const MAX: bool>(PhantomData<T>);

/// Position of an accumulator that has seen nothing.
const NOWHERE: i32 = -1;

impl<T: Held, const MAX: bool> Arg<T, MAX> {
    /// Whether `new` is strictly more extreme than `old`.
    #[inline(always)]
    fn beats(new: T, old: T) -> bool {
        #[allow(clippy::eq_op)]
        let (new_is_nan, old_is_nan) = (new != new, old != old);
        (if MAX { new > old } else { new < old }) || (new_is_nan && !old_is_nan)
    }
}

impl<T: Held, const MAX: bool> Fold for Arg<T, MAX> {
    type In = T;
    type Acc = (T, i32);
    type Out = i32;
    fn start(&self) -> (T, i32) {
        (lowest::<T, MAX>(), NOWHERE)
    }
    fn one(&self, acc: &mut (T, i32), value: T, at: usize) {
        if acc.1 == NOWHERE || Self::beats(value, acc.0) {
            *acc = (value, at as i32);
        }
    }
    fn row(&self, acc: &mut (T, i32), values: &[T], at: usize) {
        // The extreme of a whole row vectorises; its place is looked for only where it is news.
        let best = lanes(
            values,
            lowest::<T, MAX>(),
            extreme::<T, MAX>,
            extreme::<T, MAX>,
        );
        if acc.1 == NOWHERE || Self::beats(best, acc.0) {
            #[allow(clippy::eq_op)]
            let place = values
                .iter()
                .position(|v| *v == best || (best != best && *v != *v));
            *acc = (best, (at + place.unwrap_or_default()) as i32);
        }
    }
    fn join(&self, acc: (T, i32), later: (T, i32)) -> (T, i32) {
        if acc.1 == NOWHERE || (later.1 != NOWHERE && Self::beats(later.0, acc.0)) {
            later
        } else {
            acc
        }
    }
    fn finish(&self, acc: (T, i32)) -> i32 {
        acc.1
    }
}

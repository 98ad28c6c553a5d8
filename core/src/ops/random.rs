//! Random tensors: the value of element `i` is a function of seed, stream and `i` alone, on every
//! device, layout and mesh.
//!
//! All values come from the words of Philox 4x32-10 with the element's global index as counter. On
//! a mesh each rank draws its own part.
//!
//! ```
//! # use anymesh_core::{DType, Tensor, ops::Rng};
//! # let device = anymesh_backend_cpu::device();
//! let mut rng = Rng::new(42);
//! let a = Tensor::uniform([2, 3], 0.0, 1.0, DType::F32, &device, rng.split())?;
//! let b = Tensor::uniform([2, 3], 0.0, 1.0, DType::F32, &device, rng.split())?;
//! let again = Tensor::uniform([2, 3], 0.0, 1.0, DType::F32, &device, Rng::new(42))?;
//! assert_eq!(a.to_vec::<f32>()?, again.to_vec::<f32>()?);
//! assert_ne!(a.to_vec::<f32>()?, b.to_vec::<f32>()?);
//! # Ok::<(), anymesh_core::Error>(())
//! ```

use super::{
    Map, OpInfo, Operand, POSITIONS, affine::shifted, create, creates, index_kind, map1, op,
};
use crate::ops::{Order, Side};
use crate::{
    DType, Device, Dims, Error, F8E4M3, F8E5M2, IntoPlace, Kind, MapProgram, Region, Result,
    Scalar, Shape, Tensor,
    backend::Affine,
    bf16, f16,
    map::{Binary, Builder, Val},
    observe,
    spmd::Call,
};

/// The ops of this file. Creation needs no input: each rank draws the elements it holds, by their
/// global index.
pub const OPS: &[OpInfo] = &[
    creates("uniform"),
    creates("normal"),
    creates("bernoulli"),
    creates("randint"),
    creates("permutation"),
    MULTINOMIAL,
];

const MULTINOMIAL: OpInfo =
    op("multinomial", "...c -> ...n ; replicate c").without_gradient(POSITIONS);

/// A key for one random tensor. Plain data: copy it to draw the same values again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rng {
    /// What the user chose.
    pub seed: u64,
    /// Counts the draws of one program.
    pub stream: u32,
}

impl Rng {
    /// The first key of a seed.
    pub fn new(seed: u64) -> Self {
        Self { seed, stream: 0 }
    }

    /// The key after this one.
    pub fn next(&self) -> Rng {
        match self.stream.checked_add(1) {
            Some(stream) => Rng { stream, ..*self },
            // Past the last stream the seed moves on, so that no key comes twice.
            None => Rng {
                seed: self
                    .seed
                    .wrapping_mul(0x5851_f42d_4c95_7f2d)
                    .wrapping_add(1),
                stream: 0,
            },
        }
    }

    /// Hands out this key and moves on to the next.
    pub fn split(&mut self) -> Rng {
        let key = *self;
        *self = self.next();
        key
    }

    /// The arguments for the params that [`key`] declares.
    pub(crate) fn params(&self) -> [Scalar; 3] {
        [
            Scalar::Int((self.seed & 0xffff_ffff) as i64),
            Scalar::Int((self.seed >> 32) as i64),
            Scalar::Int(i64::from(self.stream)),
        ]
    }
}

/// Declares the three params of a random key; they are passed as [`Rng::params`].
pub(crate) fn key(b: &Builder) -> [Val<'_>; 3] {
    [
        b.param(DType::U32),
        b.param(DType::U32),
        b.param(DType::U32),
    ]
}

/// A value uniform in [0, 1) at a global index: 24 bits of word 0 for `F32`, 53 bits of words 0 and
/// 1 for `F64`.
pub(crate) fn uniform01<'b>(
    b: &'b Builder,
    index: Val<'b>,
    key: [Val<'b>; 3],
    kind: Kind,
) -> Val<'b> {
    unit_bits(b, index, key, kind, 0) * unit_step(kind)
}

/// The distance between neighbouring values of [`uniform01`].
fn unit_step(kind: Kind) -> f64 {
    if kind == Kind::F64 {
        2f64.powi(-53)
    } else {
        2f64.powi(-24)
    }
}

/// The `which`-th integer (as a float, exact) below 2^24 or 2^53 at a global index.
fn unit_bits<'b>(
    b: &'b Builder,
    index: Val<'b>,
    key: [Val<'b>; 3],
    kind: Kind,
    which: u8,
) -> Val<'b> {
    let bits = |word: u8, drop: i64| {
        let word = b.philox(index, key, word);
        word.binary(Binary::Shr, word.lit(drop)).cast(kind.dtype())
    };
    match kind {
        Kind::F64 => bits(2 * which, 5) * 2f64.powi(26) + bits(2 * which + 1, 6),
        _ => bits(which, 8),
    }
}

/// The kind in which a float dtype is drawn, or an error for the others.
fn drawn_kind(op: &'static str, dtype: DType) -> Result<Kind> {
    if dtype.is_float() {
        Ok(dtype.kind())
    } else {
        Err(Error::DType {
            op,
            dtype,
            expected: "a float dtype",
        })
    }
}

/// A random tensor to come, or the part of one that a rank holds.
pub(crate) struct Draw {
    op: &'static str,
    shape: Shape,
    /// The global index of every element.
    index: Affine,
    /// What counts it.
    kind: Kind,
    rng: Rng,
}

impl Draw {
    /// A whole tensor.
    pub(crate) fn whole(op: &'static str, shape: &Shape, rng: Rng) -> Result<Self> {
        let kind = index_kind(shape.checked_numel(op)?);
        let index = Affine {
            offset: 0,
            strides: shape.strides().iter().map(|s| *s as i64).collect(),
        };
        Ok(Self {
            op,
            shape: shape.clone(),
            index,
            kind,
            rng,
        })
    }

    /// A box of it, which has the values that the whole tensor has there.
    pub(crate) fn part(&self, region: &Region) -> Self {
        Self {
            shape: region.shape.clone().into(),
            index: shifted(&self.index, &region.start),
            ..*self
        }
    }

    /// The program whose value is built from the global index and the key, and from operands and
    /// params that `value` declares.
    pub(crate) fn program(
        &self,
        dtype: DType,
        value: impl for<'b> FnOnce(&'b Builder, Val<'b>, [Val<'b>; 3]) -> Val<'b>,
    ) -> Result<MapProgram> {
        let b = Builder::new();
        let (index, key) = (b.index(self.kind.dtype()), key(&b));
        b.finish(&[(value(&b, index, key), dtype)])
    }

    /// Runs such a program with plain operands.
    pub(crate) fn run(
        &self,
        program: &MapProgram,
        operands: &[&Tensor],
        params: &[Scalar],
        device: &Device,
    ) -> Result<Tensor> {
        let operands: Dims<Operand<'_>> = operands.iter().map(|t| Operand::from(*t)).collect();
        let params = [&self.rng.params()[..], params].concat();
        let map = Map {
            indices: std::slice::from_ref(&self.index),
            params: &params,
            ..Map::new(self.op, program, &self.shape)
        };
        Ok(map.run(&operands, device)?.remove(0))
    }

    /// The tensor whose elements `value` builds, each rank its own.
    #[track_caller]
    pub(crate) fn values(
        self,
        dtype: DType,
        params: &[Scalar],
        place: impl IntoPlace,
        value: impl for<'b> FnOnce(&'b Builder, Val<'b>, [Val<'b>; 3]) -> Val<'b>,
    ) -> Result<Tensor> {
        let program = self.program(dtype, value)?;
        let place = place.into_place(self.shape.rank())?;
        observe::op(self.op, &[], || {
            place.build(dtype, &self.shape, |device, region| {
                self.part(region).run(&program, &[], params, device)
            })
        })
    }
}

impl Tensor {
    /// Uniform in `low <= x < high`, with 24 random bits (f64: 53).
    ///
    /// The bounds hold in the dtype: values that would round to `high` become the largest value
    /// below it, and those that would round under `low` the smallest above it.
    #[track_caller]
    pub fn uniform(
        shape: impl Into<Shape>,
        low: f64,
        high: f64,
        dtype: DType,
        place: impl IntoPlace,
        rng: Rng,
    ) -> Result<Tensor> {
        let (op, shape) = ("uniform", shape.into());
        let kind = drawn_kind(op, dtype)?;
        let (first, last) = (-below(-low, dtype, true), below(high, dtype, false));
        let range = high - low;
        if !(low < high
            && first <= last
            && range.is_finite()
            && (dtype == DType::F64 || range <= f64::from(f32::MAX)))
        {
            return Err(Error::argument(
                op,
                "high",
                format!("there is no finite range of {dtype} values from {low} to below {high}"),
            ));
        }
        let params = [low, range, first, last].map(Scalar::Float);
        Draw::whole(op, &shape, rng)?.values(dtype, &params, place, |b, index, key| {
            let [low, range, first, last] = [(); 4].map(|()| b.param(kind.dtype()));
            // The inner `min` changes nothing; it keeps compilers from fusing the product into the
            // sum, which would round differently.
            let value = (uniform01(b, index, key, kind) * range).min(range) + low;
            value.max(first).min(last)
        })
    }

    /// Normally distributed: the Box-Muller transform of two uniform values,
    /// `sqrt(-2 ln(u)) cos(2 pi v)` with `u` in (0, 1]. Float dtypes.
    #[track_caller]
    pub fn normal(
        shape: impl Into<Shape>,
        mean: f64,
        std: f64,
        dtype: DType,
        place: impl IntoPlace,
        rng: Rng,
    ) -> Result<Tensor> {
        let (op, shape) = ("normal", shape.into());
        let kind = drawn_kind(op, dtype)?;
        if !(mean.is_finite() && std.is_finite() && std >= 0.0) {
            return Err(Error::argument(
                op,
                "std",
                format!("mean {mean} and standard deviation {std} are not finite, or negative"),
            ));
        }
        Draw::whole(op, &shape, rng)?.values(
            dtype,
            &[mean, std].map(Scalar::Float),
            place,
            |b, index, key| {
                let (mean, std, step) = (
                    b.param(kind.dtype()),
                    b.param(kind.dtype()),
                    unit_step(kind),
                );
                let radius = ((unit_bits(b, index, key, kind, 0) + 1.0) * step).log() * -2.0;
                // Half a turn back, so that the angle stays between -pi and pi, where every device
                // is precise.
                let turn = unit_bits(b, index, key, kind, 1) * step - 0.5;
                radius.sqrt() * (turn * std::f64::consts::TAU).cos() * std + mean
            },
        )
    }

    /// One with probability `p` (to 32 bits) and zero otherwise, in any dtype.
    #[track_caller]
    pub fn bernoulli(
        shape: impl Into<Shape>,
        p: f64,
        dtype: DType,
        place: impl IntoPlace,
        rng: Rng,
    ) -> Result<Tensor> {
        let (op, shape) = ("bernoulli", shape.into());
        if !(0.0..=1.0).contains(&p) {
            return Err(Error::argument(
                op,
                "p",
                format!("{p} is not a probability between 0 and 1"),
            ));
        }
        let threshold = (p * 2f64.powi(32)).round();
        if threshold >= 2f64.powi(32) {
            return Self::ones(shape, dtype, place);
        }
        let params = [Scalar::Int(threshold as i64)];
        Draw::whole(op, &shape, rng)?.values(dtype, &params, place, |b, index, key| {
            b.philox(index, key, 0).lt(b.param(DType::U32))
        })
    }

    /// Integers uniform in `low..high`. No value is more likely than another by more than one part
    /// in 2^32.
    #[track_caller]
    pub fn randint(
        shape: impl Into<Shape>,
        low: i64,
        high: i64,
        dtype: DType,
        place: impl IntoPlace,
        rng: Rng,
    ) -> Result<Tensor> {
        let (op, shape) = ("randint", shape.into());
        if !dtype.is_int() {
            return Err(Error::DType {
                op,
                dtype,
                expected: "an integer dtype",
            });
        }
        if low >= high {
            return Err(Error::argument(
                op,
                "high",
                format!("there is no integer from {low} to below {high}"),
            ));
        }
        create::exact_scalar(op, low.into(), dtype)?;
        create::exact_scalar(op, (high - 1).into(), dtype)?;
        let range = (i128::from(high) - i128::from(low)) as u64;
        let kind = dtype.kind();
        // Unsigned and signed 32-bit sums wrap to the right value whatever the signs.
        let words = if range >> 32 == 0 { 1 } else { 2 };
        let params = [
            Scalar::Int(low),
            Scalar::Int((range & 0xffff_ffff) as i64),
            Scalar::Int((range >> 32) as i64),
        ];
        Draw::whole(op, &shape, rng)?.values(dtype, &params[..=words], place, |b, index, key| {
            let low = b.param(kind.dtype());
            let range: Dims<Val<'_>> = (0..words).map(|_| b.param(DType::U32)).collect();
            // One word more than the range has: the surplus is what makes the values equally
            // likely.
            let random: Dims<Val<'_>> = (0..=words as u8)
                .map(|word| b.philox(index, key, word))
                .collect();
            let scaled = scale(b, &random, &range);
            let value = match scaled[..] {
                [low, high] if kind == Kind::I64 => {
                    high.cast(DType::I64) * (1i64 << 32) + low.cast(DType::I64)
                }
                _ => scaled[0].cast(kind.dtype()),
            };
            value + low
        })
    }

    /// The numbers `0..n` (i32) in random order.
    #[track_caller]
    pub fn permutation(n: usize, place: impl IntoPlace, rng: Rng) -> Result<Tensor> {
        let (op, shape) = ("permutation", Shape::from([n]));
        super::reduce::check_positions(op, n)?;
        let draw = Draw::whole(op, &shape, rng)?;
        let program = draw.program(DType::U32, |b, index, key| b.philox(index, key, 0))?;
        // Where a number ends up depends on all keys, so every rank draws all of them and takes its
        // part.
        let place = place.into_place(1)?;
        observe::op(op, &[], || {
            place.build(DType::I32, &shape, |device, region| {
                draw.run(&program, &[], &[], device)?
                    .argsort(0, Order::Ascending)?
                    .window(region)
            })
        })
    }

    /// Draws `samples` positions (i32) along the last dimension, each with probability proportional
    /// to the (float, non-negative) weight there. Without replacement no position comes twice, and
    /// `samples` must not exceed the positions of positive weight.
    ///
    /// A row whose weights are all zero has no meaning; it gives valid positions.
    #[track_caller]
    pub fn multinomial(&self, samples: usize, replacement: bool, rng: Rng) -> Result<Tensor> {
        let op = "multinomial";
        drawn_kind(op, self.dtype())?;
        let Some((&n, lead)) = self.dims().split_last() else {
            return Err(Error::shape(
                op,
                [self],
                "a 0-d tensor holds no weights to choose from",
            ));
        };
        if n > i32::MAX as usize || (samples > 0 && n == 0) || (!replacement && samples > n) {
            return Err(Error::argument(
                op,
                "samples",
                format!(
                    "cannot draw {samples} of the {n} positions of {}",
                    self.type_string()
                ),
            )
            .of([self]));
        }
        let mut dims: Dims = lead.into();
        dims.push(samples);
        let shape = Shape::from(dims);
        shape.checked_numel(op)?;
        // Every row is drawn by itself, from its place in the whole tensor.
        let choose = |weights: &Tensor, region: Region| match replacement {
            _ if region.numel() == 0 => weights.no_elements(DType::I32, region.shape.into()),
            true => weights.choose_with_replacement(Draw::whole(op, &shape, rng)?.part(&region)),
            false => {
                let rows = Region {
                    start: region.start,
                    shape: weights.dims().into(),
                };
                weights
                    .choose_distinct(Draw::whole(op, self.shape(), rng)?.part(&rows))?
                    .narrow(-1, 0, samples)?
                    .contiguous()
            }
        };
        let weights = &self.detach();
        observe::op(op, &[weights], || {
            if weights.is_plain() {
                return choose(
                    weights,
                    Region {
                        start: smallvec::smallvec![0; self.rank()],
                        shape: shape.dims().into(),
                    },
                );
            }
            Call::of(&MULTINOMIAL, &[weights]).run1(|l| choose(&l[0], l.region(0, &shape)))
        })
    }

    /// Inverts the running sum of the weights at uniform values.
    fn choose_with_replacement(&self, draw: Draw) -> Result<Tensor> {
        let (op, dtype, last) = ("multinomial", self.dtype().kind().dtype(), self.rank() - 1);
        let n = self.shape()[last];
        let sums = self.cast(dtype)?.cumsum(-1)?;
        let totals = sums.narrow(-1, n - 1, 1)?;
        let program = draw.program(dtype, |b, index, key| {
            uniform01(b, index, key, dtype.kind()) * b.load(dtype)
        })?;
        let points = draw.run(&program, &[&totals], &[], self.device())?;
        // Rows without any weight are found past the end.
        let b = Builder::new();
        let program = b.finish(&[(b.load(DType::I32).min(b.param(DType::I32)), DType::I32)])?;
        map1(
            op,
            &program,
            &[&sums.searchsorted(&points, Side::Right)?],
            &[Scalar::Int(n as i64 - 1)],
        )
    }

    /// All positions in the order in which exponential clocks with the weights as rates ring.
    fn choose_distinct(&self, draw: Draw) -> Result<Tensor> {
        let weights = self.cast(self.dtype().kind().dtype())?;
        let dtype = weights.dtype();
        let program = draw.program(dtype, |b, index, key| {
            let unit = (unit_bits(b, index, key, dtype.kind(), 0) + 1.0) * unit_step(dtype.kind());
            let weight = b.load(dtype);
            weight
                .gt(0.0)
                .select(-unit.log() / weight, weight.lit(f64::INFINITY))
        })?;
        draw.run(&program, &[&weights], &[], self.device())?
            .argsort(-1, Order::Ascending)
    }
}

/// The product of two 32-bit values as (low, high) words, with 32-bit arithmetic: browsers have no
/// wider integers.
fn wide_mul<'b>(x: Val<'b>, y: Val<'b>) -> (Val<'b>, Val<'b>) {
    let low = |v: Val<'b>| v.and(0xffff);
    let high = |v: Val<'b>| v.binary(Binary::Shr, v.lit(16i64));
    let (xl, xh, yl, yh) = (low(x), high(x), low(y), high(y));
    let first = xh * yl + high(xl * yl);
    let second = xl * yh + low(first);
    (x * y, xh * yh + high(first) + high(second))
}

/// `random * range / 2^(32 * random.len())`, rounded down: an integer below the range. Words are in
/// order of significance, the least first; the result has as many as the range.
fn scale<'b>(b: &'b Builder, random: &[Val<'b>], range: &[Val<'b>]) -> Dims<Val<'b>> {
    let zero = b.constant(0i64, DType::U32);
    let mut sum: Dims<Val<'b>> = smallvec::smallvec![zero; random.len() + range.len()];
    for (i, &x) in random.iter().enumerate() {
        let mut carry = zero;
        for (j, &y) in range.iter().enumerate() {
            // The high word of a product leaves room for the two carries.
            let (low, high) = wide_mul(x, y);
            let (partial, first) = carrying_add(low, sum[i + j]);
            let (total, second) = carrying_add(partial, carry);
            sum[i + j] = total;
            carry = high + first + second;
        }
        sum[i + range.len()] = carry;
    }
    sum.into_iter().skip(random.len()).collect()
}

/// A sum and the 0 or 1 that it carries over.
fn carrying_add<'b>(x: Val<'b>, y: Val<'b>) -> (Val<'b>, Val<'b>) {
    let sum = x + y;
    (sum, sum.lt(x).cast(DType::U32))
}

/// The largest value of `dtype` below `bound` (or at it, if `inclusive`).
fn below(bound: f64, dtype: DType, inclusive: bool) -> f64 {
    let mut value = match dtype {
        DType::F64 => bound,
        DType::F32 => f64::from(bound as f32),
        DType::F16 => f16::from_f64(bound).to_f64(),
        DType::BF16 => bf16::from_f64(bound).to_f64(),
        // Clamping is right here: whatever lies above the largest value has that one below it.
        DType::F8E4M3 => f64::from(F8E4M3::saturating_from_f32(bound as f32).to_f32()),
        _ => f64::from(F8E5M2::saturating_from_f32(bound as f32).to_f32()),
    };
    if value > bound || (value == bound && !inclusive) {
        value = match dtype {
            DType::F64 => value.next_down(),
            DType::F32 => f64::from((value as f32).next_down()),
            DType::F16 => {
                f16::from_bits(down(f16::from_f64(value).to_bits().into(), 16) as u16).to_f64()
            }
            DType::BF16 => {
                bf16::from_bits(down(bf16::from_f64(value).to_bits().into(), 16) as u16).to_f64()
            }
            DType::F8E4M3 => {
                f64::from(F8E4M3(down(F8E4M3::from_f32(value as f32).0.into(), 8) as u8).to_f32())
            }
            _ => f64::from(F8E5M2(down(F8E5M2::from_f32(value as f32).0.into(), 8) as u8).to_f32()),
        };
    }
    value
}

/// The bits of the next smaller value of a float format of some width: magnitudes count up from
/// zero on both sides of it.
fn down(bits: u32, width: u32) -> u32 {
    let sign = 1 << (width - 1);
    match bits {
        _ if bits == 0 || bits == sign => sign | 1,
        _ if bits & sign == 0 => bits - 1,
        _ => bits + 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_below_a_bound_is_the_nearest_one_the_dtype_has() {
        assert_eq!(below(1.0, DType::F32, false), 1.0 - 2f64.powi(-24));
        assert_eq!(below(1.0, DType::F32, true), 1.0);
        assert_eq!(below(1.0, DType::BF16, false), 1.0 - 2f64.powi(-8));
        assert_eq!(below(1.0, DType::F16, false), 1.0 - 2f64.powi(-11));
        assert_eq!(below(1.0, DType::F8E5M2, false), 0.875);
        assert_eq!(below(1.0, DType::F8E4M3, false), 0.9375);
        assert_eq!(
            below(0.0, DType::BF16, false),
            -f64::from(bf16::from_bits(1))
        );
        assert_eq!(below(-1.0, DType::F8E5M2, false), -1.25);
        assert_eq!(below(1.0 + 2f64.powi(-12), DType::BF16, false), 1.0);
        assert_eq!(below(1e9, DType::F8E4M3, false), 448.0);
    }

    #[test]
    fn no_key_comes_twice_at_the_end_of_the_streams() {
        let mut rng = Rng {
            seed: 5,
            stream: u32::MAX,
        };
        let last = rng.split();
        assert_eq!(last.stream, u32::MAX);
        assert_ne!(rng.seed, 5);
        assert_eq!(rng.next().stream, 1);
    }
}

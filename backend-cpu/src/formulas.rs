//! Formulas that are compiled ahead (`anymesh_kernel::map::formulas`), in loops over held values. They
//! give the bits of their programs.

use crate::{
    fastmath, scalar,
    simd::{Kernel, dispatch, fused_or_not},
};
use anymesh_kernel::{
    DType, MapProgram,
    map::formulas::{
        AdamStep, Formula, Gelu, GeluPull, GeluTanh, GeluTanhPull, Silu, SiluTimes, Value,
    },
};
use std::{
    collections::HashMap,
    marker::PhantomData,
    ops::{Add, Div, Mul, Neg, Sub},
    sync::LazyLock,
};

/// A number of a formula.
#[derive(Clone, Copy)]
pub(crate) struct Number<const FUSED: bool>(pub(crate) f32);

macro_rules! arithmetic {
    ($($trait:ident $name:ident $op:tt $other:ty, |$x:ident| $value:expr;)*) => {$(
        impl<const FUSED: bool> $trait<$other> for Number<FUSED> {
            type Output = Self;
            #[inline(always)]
            fn $name(self, $x: $other) -> Self {
                Self(self.0 $op $value)
            }
        }
    )*};
}
arithmetic! {
    Add add + Self, |x| x.0;
    Sub sub - Self, |x| x.0;
    Mul mul * Self, |x| x.0;
    Div div / Self, |x| x.0;
    Add add + f64, |x| x as f32;
    Mul mul * f64, |x| x as f32;
}

impl<const FUSED: bool> Neg for Number<FUSED> {
    type Output = Self;
    #[inline(always)]
    fn neg(self) -> Self {
        Self(-self.0)
    }
}

impl<const FUSED: bool> Value for Number<FUSED> {
    #[inline(always)]
    fn lit(self, value: f64) -> Self {
        Self(value as f32)
    }
    #[inline(always)]
    fn exp(self) -> Self {
        Self(fastmath::exp::<FUSED>(f64::from(self.0)) as f32)
    }
    #[inline(always)]
    fn erf(self) -> Self {
        Self(fastmath::erf::<FUSED>(f64::from(self.0)) as f32)
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        Self(self.0.sqrt())
    }
    #[inline(always)]
    fn rsqrt(self) -> Self {
        Self((1.0 / f64::from(self.0).sqrt()) as f32)
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        Self(scalar::max(self.0, other.0))
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        Self(scalar::min(self.0, other.0))
    }
    #[inline(always)]
    fn above_0(self, yes: Self, no: Self) -> Self {
        // Not by branches, see `fastmath`.
        let mask = u32::from(self.0 > 0.0).wrapping_neg();
        Self(f32::from_bits(
            (yes.0.to_bits() & mask) | (no.0.to_bits() & !mask),
        ))
    }
}

/// The loop of a formula.
pub(crate) trait Compiled: Sync {
    /// Computes results from as many values of each input, and numbers. Inputs, numbers and results
    /// are as many as the program has.
    fn run(&self, inputs: &[&[f32]], numbers: &[f32], results: &mut [&mut [f32]]);
}

struct Over<F, const N: usize, const P: usize, const O: usize>(PhantomData<fn() -> F>);

impl<F: Formula<N, P, O>, const N: usize, const P: usize, const O: usize> Compiled
    for Over<F, N, P, O>
{
    fn run(&self, inputs: &[&[f32]], numbers: &[f32], results: &mut [&mut [f32]]) {
        dispatch(Each::<F, N, P, O> {
            inputs: std::array::from_fn(|k| inputs[k]),
            numbers: std::array::from_fn(|k| numbers[k]),
            results: std::array::from_fn(|k| std::mem::take(&mut results[k])),
            formula: PhantomData,
        });
    }
}

struct Each<'a, F, const N: usize, const P: usize, const O: usize> {
    inputs: [&'a [f32]; N],
    numbers: [f32; P],
    results: [&'a mut [f32]; O],
    formula: PhantomData<F>,
}

impl<F: Formula<N, P, O>, const N: usize, const P: usize, const O: usize> Each<'_, F, N, P, O> {
    #[inline(always)]
    fn body<const FUSED: bool>(self) {
        // All as long as the first, so that no index is checked in the loop.
        let len = self.results[0].len();
        let inputs = self.inputs.map(|input| &input[..len]);
        let results = self.results.map(|result| &mut result[..len]);
        let numbers = self.numbers.map(Number::<FUSED>);
        for i in 0..len {
            let made = F::of(inputs.map(|input| Number::<FUSED>(input[i])), numbers);
            for k in 0..O {
                results[k][i] = made[k].0;
            }
        }
    }
}

impl<F: Formula<N, P, O>, const N: usize, const P: usize, const O: usize> Kernel
    for Each<'_, F, N, P, O>
{
    fused_or_not!(());
}

type Programs = HashMap<MapProgram, &'static dyn Compiled>;

/// Those of floats that are held as `f32`, by their programs.
static ALL: LazyLock<Programs> = LazyLock::new(|| {
    fn add<F: Formula<N, P, O> + 'static, const N: usize, const P: usize, const O: usize>(
        all: &mut Programs,
    ) {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let compiled: &'static dyn Compiled = &Over::<F, N, P, O>(PhantomData);
            all.extend(F::program(dtype).map(|program| (program, compiled)));
        }
    }
    let mut all = HashMap::new();
    add::<Silu, _, _, _>(&mut all);
    add::<SiluTimes, _, _, _>(&mut all);
    add::<Gelu, _, _, _>(&mut all);
    add::<GeluPull, _, _, _>(&mut all);
    add::<GeluTanh, _, _, _>(&mut all);
    add::<GeluTanhPull, _, _, _>(&mut all);
    add::<AdamStep, _, _, _>(&mut all);
    all
});

/// No formula has fewer instructions: short programs are not looked for.
const SHORTEST: usize = 8;

/// The loop of a program that is one of the formulas.
pub(crate) fn of(program: &MapProgram) -> Option<&'static dyn Compiled> {
    match program.insts.len() >= SHORTEST {
        true => ALL.get(program).copied(),
        false => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        map::map,
        testing::{dense_view, random, read, upload},
    };
    use anymesh_kernel::{
        Layout, Scalar, Shape, View,
        backend::{MapCall, MapInput},
        map::Program,
    };

    fn run(program: &MapProgram, shape: &Shape, inputs: &[View]) -> Vec<u64> {
        let input = |view: &View| MapInput {
            view: view.clone(),
            window: None,
        };
        let made = map(&MapCall {
            op: "test",
            program: program.clone(),
            shape: shape.clone(),
            inputs: inputs.iter().map(input).collect(),
            indices: Default::default(),
            params: program.params.iter().map(|_| Scalar::Float(0.75)).collect(),
            over: Default::default(),
        });
        let made = made.expect("runs");
        let results = made.iter().zip(&program.outputs);
        let values = results.flat_map(|(made, (_, dtype))| read(made, *dtype));
        // The sign of zero counts, the bits of a NaN do not.
        let bits = |x: f64| if x.is_nan() { u64::MAX } else { x.to_bits() };
        values.map(bits).collect()
    }

    /// The same program with an instruction that nobody reads, so that it is not known.
    fn unknown(program: &MapProgram) -> MapProgram {
        let mut program = Program::clone(program);
        program.insts.push(anymesh_kernel::map::Inst::Load(0));
        program.kinds.push(program.kinds[0]);
        MapProgram::from(program)
    }

    #[test]
    fn a_compiled_formula_has_the_bits_of_its_program() {
        let mut x = random(5000, 1, false);
        x.extend([0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN]);
        x.extend([1e-42, -1e-42, 29.9, 30.1, -30.1, 88.0, -104.0, 3e38, -3e38]);
        x.extend(
            random(3000, 2, false)
                .iter()
                .map(|x| x.exp2().exp2() * x.signum()),
        );
        let y = random(x.len(), 3, false);
        let shape: Shape = [x.len()].into();
        assert_eq!(ALL.len(), 21);
        for program in ALL.keys() {
            let dtype = program.inputs[0];
            let other = unknown(program);
            assert!(of(program).is_some() && of(&other).is_none());
            let one = View {
                buffer: upload(&[1.5], dtype),
                dtype,
                layout: Layout::contiguous([1].into()).expand(&shape),
            };
            let (x, y) = (
                dense_view(&x, dtype, shape.clone()),
                dense_view(&y, dtype, shape.clone()),
            );
            // Every position another value, or all the same one of an input.
            for inputs in [[&x, &y], [&y, &x], [&one, &x], [&x, &one], [&one, &one]] {
                let inputs: Vec<View> = inputs.into_iter().cycle().take(4).cloned().collect();
                let inputs = &inputs[..program.inputs.len()];
                let (got, expected) = (run(program, &shape, inputs), run(&other, &shape, inputs));
                assert!(got == expected, "{program} of {dtype}");
            }
        }
    }
}

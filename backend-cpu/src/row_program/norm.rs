//! The gradients of norms, compiled ahead: each row goes by in a few loops, without a program's way
//! through memory after every instruction. They give the bits of their programs.

use super::Task;
use crate::{
    fold::{Fold, SumFloat},
    formulas::Number,
    frame::BLOCK,
    memory::{bytes_of, typed},
    simd::vectorized,
};
use anymesh_kernel::{
    DType, Mixed, Result, View,
    backend::{NormGradient, NormPosition, RowProgram, RowProgramCall},
};
use std::{ops::Range, sync::LazyLock};

type Position = NormPosition<Number<false>>;

/// Those of `f32`, by their programs.
pub(super) static ALL: LazyLock<Mixed<RowProgram, NormGradient>> = LazyLock::new(|| {
    let mut all = Mixed::default();
    for bits in 0..1 << 7 {
        let is = |bit: u32| bits >> bit & 1 == 1;
        let dtype = |bit| is(bit).then_some(DType::F32);
        let which = NormGradient {
            x: DType::F32,
            g: DType::F32,
            weight: dtype(0),
            bias: dtype(1),
            beside: dtype(2),
            rms: is(3),
            of_input: is(4),
            of_weight: is(5),
            of_bias: is(6),
        };
        if let Ok(program) = which.program() {
            all.entry((*program).clone()).or_insert(which);
        }
    }
    all
});

/// An input of which each row is a slice.
struct Rows<'a> {
    data: &'a [f32],
    start: usize,
    step: usize,
}

impl<'a> Rows<'a> {
    fn of(view: &'a View) -> Result<Option<Self>> {
        let [row, 1] = view.layout.strides[..] else {
            return Ok(None);
        };
        if row < 0 {
            return Ok(None);
        }
        Ok(Some(Self {
            data: typed(bytes_of(&view.buffer)?),
            start: view.layout.offset,
            step: row.unsigned_abs(),
        }))
    }

    fn row(&self, i: usize, columns: Range<usize>) -> &'a [f32] {
        let at = self.start + i * self.step;
        &self.data[at + columns.start..at + columns.end]
    }
}

/// A call of such a program.
pub(super) struct Norm<'a> {
    which: NormGradient,
    n: usize,
    x: Rows<'a>,
    g: Rows<'a>,
    weight: Option<Rows<'a>>,
    beside: Option<Rows<'a>>,
    share: f64,
    eps: f32,
}

/// What is known of a row.
#[derive(Clone, Copy)]
struct Known {
    mean: Option<f32>,
    root: f32,
    along: f32,
    level: Option<f32>,
}

impl<'a> Norm<'a> {
    /// The call, if it is one of these and rows of all inputs are slices.
    pub(super) fn of(call: &'a RowProgramCall) -> Result<Option<Self>> {
        let Some(which) = ALL.get(&*call.program) else {
            return Ok(None);
        };
        let mut views = call.inputs.iter();
        let mut next = || views.next().map_or(Ok(None), Rows::of);
        let (Some(x), Some(g)) = (next()?, next()?) else {
            return Ok(None);
        };
        let mut given = |is: bool| if is { next() } else { Ok(None) };
        let weight = given(which.weight.is_some())?;
        let beside = given(which.beside.is_some())?;
        if weight.is_some() != which.weight.is_some() || beside.is_some() != which.beside.is_some()
        {
            return Ok(None);
        }
        Ok(Some(Self {
            which: *which,
            n: call.length(),
            x,
            g,
            weight,
            beside,
            share: call.params[NormGradient::SHARE].to_f64(),
            eps: call.params[NormGradient::EPS].to_f64() as f32,
        }))
    }

    pub(super) fn task(&self, task: &mut Task<'_>) {
        let n = self.n;
        for i in 0..task.count {
            let row = task.first + i;
            let known = self.known(row);
            if self.which.of_input {
                let out = &mut bytemuck::cast_slice_mut(task.each[0])[i * n..(i + 1) * n];
                self.of_input(row, known, out);
            }
            let root = Number(known.root);
            let mut sums = task.sums.chunks_exact_mut(n);
            if self.which.weight.is_some() && self.which.of_weight {
                self.add(row, known.mean, sums.next(), |at| at.of_weight(root));
            }
            if self.which.bias.is_some() && self.which.of_bias {
                self.add(row, known.mean, sums.next(), |at| at.g);
            }
        }
    }

    /// The values that are the same in a whole row.
    fn known(&self, row: usize) -> Known {
        let rms = self.which.rms;
        let mean = (!rms).then(|| self.fold(row, None, |at| at.x));
        let variance = self.fold(row, mean, |at| at.centered() * at.centered());
        let root = Position::root(Number(variance), Number(self.eps));
        let mut known = Known {
            mean,
            root: root.0,
            along: 0.0,
            level: None,
        };
        if self.which.of_input {
            known.along = self.fold(row, mean, |at| at.scaled() * at.direction(root));
            known.level = (!rms).then(|| self.fold(row, mean, |at| at.scaled()));
        }
        known
    }

    /// The mean of something over a row.
    fn fold(&self, row: usize, mean: Option<f32>, f: impl Fn(Position) -> Number<false>) -> f32 {
        let (sum, mut values) = (SumFloat::<f32>::new(Some(self.share)), [0.0; BLOCK]);
        let mut acc = sum.start();
        for first in (0..self.n).step_by(BLOCK) {
            let values = &mut values[..BLOCK.min(self.n - first)];
            self.each(row, first, mean, values, |at, value| *value = f(at).0);
            sum.row(&mut acc, values, first);
        }
        sum.finish(acc)
    }

    /// Adds something to sums of columns.
    fn add(
        &self,
        row: usize,
        mean: Option<f32>,
        sums: Option<&mut [f64]>,
        f: impl Fn(Position) -> Number<false>,
    ) {
        if let Some(sums) = sums {
            self.each(row, 0, mean, sums, |at, sum| *sum += f64::from(f(at).0));
        }
    }

    /// The gradient of the input.
    fn of_input(&self, row: usize, known: Known, out: &mut [f32]) {
        let (root, along) = (Number(known.root), Number(known.along));
        let level = known.level.map(Number);
        self.each(row, 0, known.mean, out, |at, out| {
            *out = at.of_input(root, along, level).0;
        });
        if let Some(beside) = &self.beside {
            let beside = beside.row(row, 0..self.n);
            vectorized(|| {
                (out.iter_mut().zip(beside)).for_each(|(out, other)| *out = *other + *out);
            });
        }
    }

    /// Calls `f` with each position of a row from column `first` on, and what belongs to it.
    fn each<T>(
        &self,
        row: usize,
        first: usize,
        mean: Option<f32>,
        of: &mut [T],
        f: impl Fn(Position, &mut T),
    ) {
        let columns = first..first + of.len();
        let (x, g) = (
            self.x.row(row, columns.clone()),
            self.g.row(row, columns.clone()),
        );
        let mean = mean.map(Number);
        let position = |x: &f32, g: &f32, weight: Option<&f32>| NormPosition {
            x: Number(*x),
            g: Number(*g),
            weight: weight.map(|weight| Number(*weight)),
            mean,
        };
        let both = of.iter_mut().zip(x.iter().zip(g));
        match &self.weight {
            Some(weight) => {
                let all = both.zip(weight.row(row, columns));
                vectorized(|| all.for_each(|((of, (x, g)), w)| f(position(x, g, Some(w)), of)));
            }
            None => vectorized(|| both.for_each(|(of, (x, g))| f(position(x, g, None), of))),
        }
    }
}

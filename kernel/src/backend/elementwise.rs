//! Calls of the families that visit every position of a space: maps, reductions, scans.

use super::View;
use crate::{
    DType, Dims, MapProgram, Scalar, Shape,
    map::{MAX_INPUTS, MAX_OUTPUTS},
};
use smallvec::SmallVec;

/// `offset + sum(coordinate[d] * strides[d])`: an index computed from the position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Affine {
    /// Value at the origin.
    pub offset: i64,
    /// Step for each dimension of the iteration shape.
    pub strides: Dims<i64>,
}

/// An input of a map program.
#[derive(Clone, Debug)]
pub struct MapInput {
    /// The elements. Without a window the layout's shape is the iteration shape.
    pub view: View,
    /// Where the view's origin lies in the iteration space. Positions outside
    /// `start .. start + shape` load zero, and `Inside` is false there. This is how padding and
    /// concatenation read.
    pub window: Option<Dims<isize>>,
}

/// Runs a map program over every position of `shape`.
#[derive(Clone, Debug)]
pub struct MapCall {
    /// The op, for error messages and profiles.
    pub op: &'static str,
    /// The program.
    pub program: MapProgram,
    /// The iteration space, which is the shape of every output.
    pub shape: Shape,
    /// One for each of the program's inputs.
    pub inputs: SmallVec<[MapInput; 2]>,
    /// One for each of the program's indices.
    pub indices: SmallVec<[Affine; 1]>,
    /// One for each of the program's params.
    pub params: SmallVec<[Scalar; 2]>,
    /// Results that may take the memory of an input, whose values nobody will read any more.
    pub over: Over,
}

/// For each result of a map the input whose memory it may take, if any. Such an input is dense, of the
/// result's dtype, all of its memory, and no other input; the result is computed from it. A backend may
/// take other memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Over([u8; MAX_OUTPUTS]);

impl Over {
    /// Lets result `output` take the memory of input `input`, if a program can have so many of both.
    pub fn set(&mut self, output: usize, input: usize) {
        if let Some(own) = self.0.get_mut(output).filter(|_| input < MAX_INPUTS) {
            *own = input as u8 + 1;
        }
    }

    /// The input whose memory result `output` may take.
    pub fn of(&self, output: usize) -> Option<usize> {
        usize::from(*self.0.get(output)?).checked_sub(1)
    }

    /// Results, and the input whose memory each may take.
    pub fn pairs(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        (0..MAX_OUTPUTS).filter_map(|k| Some((k, self.of(k)?)))
    }
}

/// How many values become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Sum; integers wrap.
    Sum,
    /// Product; integers wrap.
    Prod,
    /// Largest; NaN wins. `any` on bool.
    Max,
    /// Smallest; NaN wins. `all` on bool.
    Min,
    /// Position (i32) of the first largest value; the first NaN counts as largest.
    ArgMax,
    /// Position (i32) of the first smallest value; the first NaN counts as smallest.
    ArgMin,
    /// `log(sum(exp(x)))` without overflow. Floats only.
    LogSumExp,
}

/// Reduces the (single) output of a map program over some axes. Positions are counted in row-major
/// order of the reduced axes.
#[derive(Clone, Debug)]
pub struct ReduceCall {
    /// The values to reduce. The program has one output; it is stored only after the reduction.
    pub map: MapCall,
    /// Sorted axes of the map's shape that disappear.
    pub axes: Dims,
    /// The reduction.
    pub mode: ReduceOp,
    /// Multiplies a float result before it is rounded to the output dtype (a mean is a sum with a
    /// scale).
    pub scale: Option<f64>,
    /// The stored dtype: of the program's output kind, or i32 for arg-reductions.
    pub dtype: DType,
}

/// Running reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum ScanOp {
    Sum,
    Prod,
    /// NaN wins and stays.
    Max,
    /// NaN wins and stays.
    Min,
    LogSumExp,
}

/// Inclusive scan along one axis.
#[derive(Clone, Debug)]
pub struct ScanCall {
    /// The op, for error messages and profiles.
    pub op: &'static str,
    /// The input.
    pub input: View,
    /// The axis.
    pub axis: usize,
    /// The operation.
    pub mode: ScanOp,
    /// Whether to also give the position (i32) of the running extreme (the latest among equals; Max
    /// and Min only).
    pub positions: bool,
}

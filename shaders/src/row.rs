//! Softmax and the norms as row programs.

use crate::{CubeBackend, row_program::stores};
use anymesh_kernel::{
    DType, Result, View,
    backend::{Buffers, RowCall, RowOp},
};

/// The longest rows that are added to another: threads hold them however many inputs there are, so
/// that sums go in the order in which they go without.
const LONGEST_SUM: usize = 16 * 1024;

/// Whether all is computed in f32, and rows can be stored in whole words.
pub(crate) fn fits(call: &RowCall) -> bool {
    let narrow = |view: &View| view.dtype != DType::F64;
    let parameters = match &call.mode {
        RowOp::Softmax | RowOp::LogSoftmax => true,
        RowOp::Norm { weight, bias, .. } => weight.iter().chain(bias).all(narrow),
    };
    // Parameters that repeat do so for all inputs but the first.
    let repeats = matches!(call.mode, RowOp::Norm { groups, inner, .. } if groups > 1 || inner > 1);
    let length = call.input.layout.shape[1];
    let sum = call.residual.is_none() || length <= LONGEST_SUM && !repeats;
    stores(length, call.input.dtype) && narrow(&call.input) && parameters && sum
}

impl CubeBackend {
    pub(crate) fn run_row(&self, call: &RowCall) -> Result<Buffers> {
        let (program, repeat) = call.as_program()?;
        self.run_rows(&program, repeat)
    }
}

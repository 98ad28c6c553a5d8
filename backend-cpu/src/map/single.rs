//! Programs of one instruction over dense operands: no grid, no blocks and no scratch memory, which
//! take longer than what a small op computes.

use super::Code;
use crate::{
    element::{Held, with_held},
    frame::{Frame, Place},
    grid::{is_dense, memory_of},
    memory::{Memory, typed},
    parallel,
};
use anymesh_kernel::{Error, Result, backend::MapCall, map::Inst};

/// The result of a call that is such a one, and small enough for one thread.
pub(super) fn run(call: &MapCall, code: &Code) -> Result<Option<Memory>> {
    let (Some(i), len) = (code.single, call.shape.numel()) else {
        return Ok(None);
    };
    if len >= parallel::THRESHOLD || !call.inputs.iter().all(is_dense) {
        return Ok(None);
    }
    let (i, program) = (usize::from(i), &call.program);
    let mut places = code.places(&call.params, &program.kinds);
    let inputs = memory_of(call.inputs.iter().map(|input| &input.view))?;
    for ((place, inst), kind) in places.iter_mut().zip(&program.insts).zip(&program.kinds) {
        let Inst::Load(k) = *inst else { continue };
        let input = usize::from(k);
        let at = call.inputs[input].view.layout.offset;
        *place = match len {
            // As a block of one position has it.
            1 => with_held!(*kind, T => Place::One(typed::<T>(inputs[input])[at].to_word())),
            _ => Place::Input(k, at),
        };
    }
    let mut result = Memory::new(len * program.outputs[0].1.size())?;
    let frame = Frame {
        inputs: &inputs,
        slots: &[],
        places: &places,
        outs: &[],
        len,
    };
    match code.steps[i].run(&frame, result.bytes_mut(), len) {
        true => Ok(Some(result)),
        false => Err(Error::DivisionByZero { op: call.op }),
    }
}

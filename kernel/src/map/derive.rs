//! The derivative of an elementwise program is an elementwise program.
//!
//! Each register carries its slope with respect to one input, next to its value. Going forward
//! keeps both sides of a `select` apart: where a side is not taken, its slope (perhaps infinite or
//! NaN) is not taken either.
//!
//! At a kink the slope is in the middle: 0 for `abs`, a half for each side of `max` and `min` of
//! equal values. That makes sums of such functions that are smooth (softplus written with `abs` and
//! `max`) right at the kink too.

use super::{
    Builder, Inst, MapProgram, Program, Val,
    slope::Slope::{self, Const, Zero},
};
use crate::Result;

/// The product of the derivative of a program's output and the output's gradient.
#[derive(Clone, Debug, PartialEq)]
pub struct Derivative {
    /// Its inputs are the gradient (unless `is_slope`) and those of the original program that
    /// `uses` names.
    pub program: MapProgram,
    /// Inputs of the original program.
    pub uses: Vec<usize>,
    /// Whether the gradient itself is the result.
    pub is_identity: bool,
    /// Whether there was no room for the gradient among the inputs: the result is only the
    /// derivative.
    pub is_slope: bool,
}

impl MapProgram {
    /// The gradient of input `input` from that of output `output`; `None` where the output does not
    /// change with the input (or one of them is not a float).
    pub fn derivative(&self, output: usize, input: usize) -> Result<Option<Derivative>> {
        let (out, dtype) = self.outputs[output];
        let into = self.inputs[input];
        if !dtype.is_float() || !into.is_float() {
            return Ok(None);
        }
        let b = Builder::new();
        self.replay(&b);
        let at = |reg: u16| Val { builder: &b, reg };
        let mut slopes: Vec<Slope<'_>> = Vec::with_capacity(self.insts.len());
        for (i, inst) in self.insts.iter().enumerate() {
            let value = at(i as u16);
            let slope = |reg: u16| slopes[reg as usize];
            let own = match *inst {
                _ if !self.kinds[i].is_float() => Zero,
                Inst::Load(k) if k as usize == input => Const(1.0),
                Inst::Load(_)
                | Inst::Inside(_)
                | Inst::Index(_)
                | Inst::Param(_)
                | Inst::Const(..)
                | Inst::Philox { .. } => Zero,
                Inst::Cast(a, _) => match slope(a) {
                    Slope::Val(v) => Slope::Val(v.cast(self.kinds[i].dtype())),
                    other => other,
                },
                Inst::Fence(a, _) => slope(a),
                Inst::Select(c, yes, no) => slope(yes).unless(at(c), slope(no), value),
                Inst::Unary(op, a) => match slope(a) {
                    Zero => Zero,
                    t => op.slope(t, at(a), value),
                },
                Inst::Binary(op, x, y) => match (slope(x), slope(y)) {
                    (Zero, Zero) => Zero,
                    (tx, ty) => op.slope(at(x), tx, at(y), ty, value),
                },
            };
            slopes.push(own);
        }
        let slope = slopes[out as usize];
        if matches!(slope, Zero) {
            return Ok(None);
        }
        let is_identity = matches!(slope, Const(1.0)) && dtype == into;
        let like = at(out);
        let (program, uses) = self.trimmed(&b, slope.value(like), into)?;
        if uses.len() >= super::MAX_INPUTS {
            return Ok(Some(Derivative {
                program,
                uses,
                is_identity,
                is_slope: true,
            }));
        }
        let (program, uses) = self.trimmed(&b, slope.times(b.load(dtype)).value(like), into)?;
        Ok(Some(Derivative {
            program,
            uses: uses[1..].to_vec(),
            is_identity,
            is_slope: false,
        }))
    }

    /// The same instructions with the same numbers.
    fn replay(&self, b: &Builder) {
        let mut state = b.0.borrow_mut();
        state.insts = self.insts.clone();
        state.kinds = self.kinds.clone();
        state.inputs = self.inputs.clone();
        state.indices = self.indices.clone();
        state.params = self.params.clone();
    }

    /// The program that stores `result`, without what it does not need, and the inputs it does:
    /// those of this program behind any other.
    fn trimmed(
        &self,
        b: &Builder,
        result: Val<'_>,
        dtype: crate::DType,
    ) -> Result<(MapProgram, Vec<usize>)> {
        let whole = b.peek(result, dtype)?;
        let mut live = vec![false; whole.insts.len()];
        live[whole.outputs[0].0 as usize] = true;
        whole.mark_operands(&mut live);
        let mut uses: Vec<usize> = (0..whole.inputs.len())
            .filter(|k| {
                whole
                    .insts
                    .iter()
                    .zip(&live)
                    .any(|(inst, live)| *live && inst.input() == Some(*k))
            })
            .collect();
        uses.sort_by_key(|k| *k < self.inputs.len());
        let mut numbers = vec![0; whole.insts.len()];
        let (mut insts, mut kinds) = (vec![], vec![]);
        for (i, inst) in whole.insts.iter().enumerate().filter(|(i, _)| live[*i]) {
            numbers[i] = insts.len() as u16;
            insts.push(inst.renumbered(
                |r| numbers[r as usize],
                |k| uses.iter().position(|u| *u == k as usize).unwrap_or(0) as u8,
            ));
            kinds.push(whole.kinds[i]);
        }
        let outputs = vec![(numbers[whole.outputs[0].0 as usize], dtype)];
        let inputs = uses.iter().map(|k| whole.inputs[*k]).collect();
        Ok((
            Program {
                insts,
                kinds,
                inputs,
                indices: whole.indices,
                params: whole.params,
                outputs,
            }
            .into(),
            uses,
        ))
    }
}

//! Which values of a program need not be right to the last digit.

use anymesh_kernel::{
    DType, Kind,
    map::{Binary, Inst, Program, Unary},
};

/// Registers whose values reach nothing but a rounding to a float of at most 16 bits, by steps that
/// do not make much of small errors.
///
/// An op gives the same bits by itself, where its result is stored, as joined with others, where it
/// is cast: outputs count as casts where they are `stored`.
pub(super) fn coarse(program: &Program, stored: bool) -> Vec<bool> {
    let short = |dtype: DType| dtype.is_float() && dtype.size() <= 2;
    let mut exact = vec![false; program.insts.len()];
    for (reg, dtype) in &program.outputs {
        exact[usize::from(*reg)] |= !(stored && short(*dtype));
    }
    for (i, inst) in program.insts.iter().enumerate().rev() {
        let forgives = match *inst {
            Inst::Cast(_, dtype) => short(dtype),
            Inst::Unary(
                Unary::Neg
                | Unary::Abs
                | Unary::Exp
                | Unary::Tanh
                | Unary::Erf
                | Unary::Sqrt
                | Unary::Rsqrt,
                _,
            )
            | Inst::Binary(
                Binary::Add | Binary::Sub | Binary::Mul | Binary::Div | Binary::Max | Binary::Min,
                ..,
            )
            | Inst::Select(..)
            | Inst::Fence(..) => !exact[i],
            _ => false,
        };
        if !forgives {
            inst.operands(|reg| exact[usize::from(reg)] = true);
        }
    }
    let kinds = program.kinds.iter();
    let coarse = exact.iter().zip(kinds);
    coarse
        .map(|(exact, kind)| !exact && *kind == Kind::F32)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use anymesh_kernel::map::Builder;

    /// Which divisions of a program are coarse.
    fn divisions(program: &Program, stored: bool) -> Vec<bool> {
        let coarse = coarse(program, stored);
        let all = program.insts.iter().zip(coarse);
        all.filter(|(inst, _)| matches!(inst, Inst::Binary(Binary::Div, ..)))
            .map(|(_, coarse)| coarse)
            .collect()
    }

    #[test]
    fn what_is_rounded_later_may_be_coarse_and_what_is_compared_or_kept_may_not() {
        let b = Builder::new();
        let x = b.load(DType::BF16);
        let hidden = (x / 3.0) * 2.0;
        let compared = x / 5.0;
        let kept = x / 7.0;
        let sum = compared.gt(0.0).select(hidden, -hidden) + kept.cast(DType::F16);
        let program = b
            .finish(&[(sum, DType::BF16), (kept, DType::F32)])
            .expect("a program");
        assert_eq!(divisions(&program, true), [true, false, false]);
        assert_eq!(divisions(&program, false), [false, false, false]);
    }

    #[test]
    fn a_cast_hides_as_much_as_a_store() {
        let b = Builder::new();
        let rounded = (b.load(DType::F32) / 3.0).cast(DType::BF16);
        let program = b.finish(&[(rounded, DType::F32)]).expect("a program");
        assert_eq!(divisions(&program, true), [true]);
        assert_eq!(divisions(&program, false), [true]);
    }
}

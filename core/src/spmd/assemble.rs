//! The rule of results whose dimensions are made of those of the operands, element by element.

use super::{
    built::Data,
    info::RuleForm,
    rule::{Factor, FactorKind, Factors, Operands, Rule, Through, letter},
};
use crate::{Error, Reduction, Result, reshard::Recipe};
use smallvec::{SmallVec, smallvec};

/// Some dimensions are made by recipes and may be cut all the same; the others pass. See
/// [`assemble_data`].
pub(crate) const ASSEMBLE: RuleForm = RuleForm::built("assemble", assemble);

/// Which partial values pass, where places are filled. Every rank fills its part, and that must
/// combine to what the places are filled with: all reductions keep zero, all but sums keep one, all
/// but sums and products any other.
pub(super) fn keep(constant: Option<f64>) -> i64 {
    match constant {
        None | Some(0.0) => 0,
        Some(1.0) => 1,
        Some(_) => 2,
    }
}

/// The reductions of [`keep`].
pub(super) fn kept(code: i64) -> &'static [Reduction] {
    use Reduction::*;
    match code {
        0 => Reduction::ALL_STATIC,
        1 => &[Max, Min, Prod, And, Or],
        _ => &[Max, Min, And, Or],
    }
}

/// The dimensions that are made, how, and with what places are filled.
pub(crate) fn assemble_data(recipes: &[(usize, Recipe)], constant: Option<f64>) -> Data {
    let mut data: Data = smallvec![keep(constant)];
    for (dim, recipe) in recipes {
        data.push(*dim as i64);
        data.extend(recipe.numbers());
    }
    data
}

fn assemble(operands: &Operands<'_>, data: &[i64]) -> Result<Rule> {
    let mut rule = Rule::default();
    for d in 0..operands.rank(0) {
        rule.factors.push(Factor {
            letter: letter(d),
            size: 0,
            kind: FactorKind::Pass,
        });
    }
    let mut left = &data[1..];
    while let Some((dim, rest)) = left.split_first() {
        let wrong = || Error::argument("assemble", "data", "these numbers are no recipe");
        let (recipe, rest) = Recipe::from_numbers(rest).ok_or_else(wrong)?;
        rule.factors[*dim as usize].kind = FactorKind::Borders;
        rule.recipes.push((*dim as u8, recipe));
        left = rest;
    }
    let dims: SmallVec<[Factors; 4]> = (0..operands.rank(0)).map(|d| smallvec![d as u8]).collect();
    rule.inputs = smallvec![dims.clone(); operands.count()];
    rule.outputs.push(dims);
    rule.through.push(Through {
        operands: ((1u64 << operands.count()) - 1) as u32,
        reductions: kept(data[0]),
    });
    Ok(rule)
}

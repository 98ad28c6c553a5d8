//! Rules that follow from ranks and axes rather than from a text: those of views, of maps, of
//! reductions.
//!
//! Each function takes the operands and the numbers of its call. The functions that make those
//! numbers stand beside them, so that both sides of an encoding can be read together.

use super::{
    assemble::{keep, kept},
    info::RuleForm,
    rule::{Factor, FactorKind, Factors, Operands, Rule, Through, letter},
};
use crate::{Dims, Reduction, Result, Shape};
use smallvec::{SmallVec, smallvec};

/// The numbers of a call.
pub(crate) type Data = SmallVec<[i64; 8]>;

/// Whether a number that [`i64::from`] made of a bool is true.
pub(crate) fn is_true(data: &[i64], at: usize) -> bool {
    data.get(at).copied().unwrap_or(0) != 0
}

/// A factor whose size is not known yet.
fn factor(d: usize, kind: FactorKind) -> Factor {
    Factor {
        letter: letter(d),
        size: 0,
        kind,
    }
}

/// A list of one reduction, for a [`Through`].
fn one_of_all(reduction: Reduction) -> &'static [Reduction] {
    let at = reduction as usize;
    &Reduction::ALL_STATIC[at..=at]
}

/// A map: every dimension passes, and operands broadcast. See [`map_data`].
pub(crate) const MAP: RuleForm = RuleForm::built("map", map);

/// A map over a space of `shape` with so many results, perhaps linear in its first operand, so that
/// partial sums pass through that.
pub(crate) fn map_data(shape: &Shape, results: usize, linear: bool) -> Data {
    [results as i64, linear.into()]
        .into_iter()
        .chain(shape.dims().iter().map(|n| i64::from(*n == 1)))
        .collect()
}

fn map(operands: &Operands<'_>, data: &[i64]) -> Result<Rule> {
    let (results, linear, ones) = (data[0] as usize, is_true(data, 1), &data[2..]);
    let mut rule = spread(operands, ones);
    // A dimension that no operand has is computed whole.
    let there = |d: usize| {
        rule.inputs
            .iter()
            .flatten()
            .flatten()
            .any(|f| *f as usize == d)
    };
    let result: SmallVec<[Factors; 4]> = (0..ones.len())
        .map(|d| {
            if there(d) {
                smallvec![d as u8]
            } else {
                Factors::new()
            }
        })
        .collect();
    rule.outputs = smallvec![result; results];
    if linear {
        rule.through.push(Through {
            operands: 1,
            reductions: &[Reduction::Sum],
        });
    }
    Ok(used(rule))
}

/// A rule without results, in which a factor for each dimension of a space stands for it in the
/// operands that do not repeat along it.
fn spread(operands: &Operands<'_>, ones: &[i64]) -> Rule {
    let mut rule = Rule::default();
    rule.factors
        .extend((0..ones.len()).map(|d| factor(d, FactorKind::Pass)));
    for i in 0..operands.count() {
        let lead = ones.len() - operands.rank(i);
        let dim = |d: usize| -> Factors {
            if operands.is_one(i, d) && !is_true(ones, lead + d) {
                Factors::new()
            } else {
                smallvec![(lead + d) as u8]
            }
        };
        rule.inputs.push((0..operands.rank(i)).map(dim).collect());
    }
    rule
}

/// The rule without the factors that no operand has.
fn used(mut rule: Rule) -> Rule {
    for f in (0..rule.factors.len()).rev() {
        if rule.alone(f).is_none() {
            rule.factors.remove(f);
            let dims = rule.inputs.iter_mut().chain(rule.outputs.iter_mut());
            for g in dims.flatten().flatten().filter(|g| **g as usize > f) {
                *g -= 1;
            }
        }
    }
    rule
}

/// A reduction of what a map makes of operands that broadcast to the first. See [`reduce_data`].
pub(crate) const REDUCE: RuleForm = RuleForm::built("reduce", reduce);

/// How results of parts of a dimension become one.
#[derive(Clone, Copy)]
pub(crate) enum Combine {
    /// They are partial results of this reduction. Whether partial values of the operand pass.
    By(Reduction, bool),
    /// With this many statistics.
    Statistics(u32),
}

/// A reduction over `axes`, which stay with size 1 or go.
pub(crate) fn reduce_data(axes: &[usize], keepdim: bool, combine: Combine) -> Data {
    let (code, more) = match combine {
        Combine::By(reduction, through) => (reduction as i64, through.into()),
        Combine::Statistics(count) => (-1, i64::from(count)),
    };
    [keepdim.into(), code, more]
        .into_iter()
        .chain(axes.iter().map(|a| *a as i64))
        .collect()
}

fn reduce(operands: &Operands<'_>, data: &[i64]) -> Result<Rule> {
    let (keepdim, code, more) = (is_true(data, 0), data[1], data[2]);
    let is_axis = |d: usize| data[3..].contains(&(d as i64));
    let combine = match usize::try_from(code) {
        Ok(reduction) => Combine::By(Reduction::ALL[reduction], more != 0),
        Err(_) => Combine::Statistics(more as u32),
    };
    let ones: Data = operands.ones(0).iter().map(|one| i64::from(*one)).collect();
    let mut rule = spread(operands, &ones);
    for d in (0..ones.len()).filter(|d| is_axis(*d)) {
        rule.factors[d].kind = match combine {
            Combine::By(reduction, _) => FactorKind::Reduce(reduction),
            Combine::Statistics(count) => FactorKind::Stats(count),
        };
    }
    let result = (0..ones.len())
        .filter(|d| keepdim || !is_axis(*d))
        .map(|d| {
            if is_axis(d) {
                Factors::new()
            } else {
                smallvec![d as u8]
            }
        });
    rule.outputs.push(result.collect());
    if let Combine::By(reduction, true) = combine {
        rule.through.push(Through {
            operands: 1,
            reductions: one_of_all(reduction),
        });
    }
    Ok(rule)
}

/// A view, or anything else that only moves elements. See [`view_data`].
pub(crate) const VIEW: RuleForm = RuleForm::built("view", view);

/// Dimension `i` of the result is dimension `to[i]` of the operand, or a new one, which is whole.
/// Dimensions of the operand that the result lacks are whole too.
pub(crate) fn view_data(to: &[Option<usize>]) -> Data {
    to.iter().map(|d| d.map_or(-1, |d| d as i64)).collect()
}

fn view(operands: &Operands<'_>, data: &[i64]) -> Result<Rule> {
    Ok(moved(operands, data, Reduction::ALL_STATIC))
}

/// A view through which partial values of these reductions pass.
fn moved(operands: &Operands<'_>, to: &[i64], reductions: &'static [Reduction]) -> Rule {
    let mut rule = Rule::default();
    let mut input: SmallVec<[Factors; 4]> = smallvec![Factors::new(); operands.rank(0)];
    let mut output: SmallVec<[Factors; 4]> = smallvec![Factors::new(); to.len()];
    for (d, source) in to.iter().enumerate() {
        if let Ok(s) = usize::try_from(*source) {
            let f = rule.factors.len() as u8;
            (input[s], output[d]) = (smallvec![f], smallvec![f]);
            rule.factors.push(factor(s, FactorKind::Pass));
        }
    }
    rule.inputs.push(input);
    rule.outputs.push(output);
    rule.through.push(Through {
        operands: 1,
        reductions,
    });
    rule
}

/// A view with a constant around it. See [`pad_data`].
pub(crate) const PAD: RuleForm = RuleForm::built("pad", pad);

/// A view as [`view_data`] says, with a constant (none where the edges are made of elements).
pub(crate) fn pad_data(to: &[Option<usize>], constant: Option<f64>) -> Data {
    std::iter::once(keep(constant))
        .chain(view_data(to))
        .collect()
}

fn pad(operands: &Operands<'_>, data: &[i64]) -> Result<Rule> {
    Ok(moved(operands, &data[1..], kept(data[0])))
}

/// Tensors joined along a dimension, which is the number of the call: it is whole in every one, the
/// others are cut alike. All are partial or none is, so that a part that is whole counts once.
pub(crate) const JOIN: RuleForm = RuleForm::built("join", join);

fn join(operands: &Operands<'_>, data: &[i64]) -> Result<Rule> {
    let terms = vec!["...c"; operands.count()].join(", ");
    let text = format!("{terms} -> ...c ; replicate c ; through any all");
    operands.read(&text, &[('c', &[data[0] as usize])])
}

/// Another shape of the same number of elements, which is the numbers of the call: the factors are
/// the sizes that both share from the left.
pub(crate) const RESHAPE: RuleForm = RuleForm::built_of_sizes("reshape", reshape);

/// The numbers of a shape.
pub(crate) fn shape_data(shape: &Shape) -> Data {
    shape.dims().iter().map(|n| *n as i64).collect()
}

fn reshape(operands: &[&Shape], data: &[i64]) -> Result<Rule> {
    let from = operands[0];
    let to: Dims = data.iter().map(|n| *n as usize).collect();
    let mut rule = Rule::default();
    let (mut input, mut output): (SmallVec<[Factors; 4]>, SmallVec<[Factors; 4]>) = (
        smallvec![Factors::new(); from.rank()],
        smallvec![Factors::new(); to.len()],
    );
    let (mut i, mut j) = (0, 0);
    let (mut a, mut b) = (
        from.dims().first().copied().unwrap_or(1),
        to.first().copied().unwrap_or(1),
    );
    while i < from.rank() && j < to.len() && from.numel() > 0 {
        let common = gcd(a, b);
        if common > 1 {
            shared(&mut rule, &mut input[i], &mut output[j], common);
            (a, b) = (a / common, b / common);
        } else if a == 1 && b == 1 {
            // A dimension of size 1 that both have: the rank that holds it keeps it.
            shared(&mut rule, &mut input[i], &mut output[j], 1);
        } else if a > 1 && b > 1 {
            // Sizes that share nothing: what follows is mixed up until the products meet again.
            // These parts stay whole.
            let (mut x, mut y) = (a, b);
            whole(&mut rule, &mut input[i], a);
            whole(&mut rule, &mut output[j], b);
            while x != y {
                if x < y {
                    i += 1;
                    x *= from[i];
                    whole(&mut rule, &mut input[i], from[i]);
                } else {
                    j += 1;
                    y *= to[j];
                    whole(&mut rule, &mut output[j], to[j]);
                }
            }
            (a, b) = (1, 1);
        }
        if a == 1 {
            i += 1;
            a = from.dims().get(i).copied().unwrap_or(1);
        }
        if b == 1 {
            j += 1;
            b = to.get(j).copied().unwrap_or(1);
        }
    }
    rule.inputs.push(input);
    rule.outputs.push(output);
    rule.through.push(Through {
        operands: 1,
        reductions: Reduction::ALL_STATIC,
    });
    Ok(rule)
}

fn shared(rule: &mut Rule, input: &mut Factors, output: &mut Factors, size: usize) {
    let f = rule.factors.len() as u8;
    input.push(f);
    output.push(f);
    rule.factors.push(Factor {
        letter: (b'a' + f % 26) as char,
        size,
        kind: FactorKind::Pass,
    });
}

fn whole(rule: &mut Rule, dim: &mut Factors, size: usize) {
    dim.push(rule.factors.len() as u8);
    rule.factors.push(Factor {
        letter: '_',
        size,
        kind: FactorKind::Whole,
    });
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Each element of a dimension several times in place; the dimension and how often are the numbers
/// of the call. Parts of the dimension are parts of the longer one where the cut is even.
pub(crate) const REPEAT: RuleForm = RuleForm::built_of_sizes("repeat", repeat);

fn repeat(operands: &[&Shape], data: &[i64]) -> Result<Rule> {
    let (shape, axis, times) = (operands[0], data[0] as usize, data[1] as usize);
    let mut rule = Rule::default();
    rule.factors.extend((0..shape.rank()).map(|d| Factor {
        size: shape[d],
        ..factor(d, FactorKind::Pass)
    }));
    let dims: SmallVec<[Factors; 4]> = (0..shape.rank()).map(|d| smallvec![d as u8]).collect();
    rule.inputs.push(dims.clone());
    rule.outputs.push(dims);
    rule.outputs[0][axis].push(shape.rank() as u8);
    rule.factors.push(Factor {
        letter: 'r',
        size: times,
        kind: FactorKind::Whole,
    });
    rule.through.push(Through {
        operands: 1,
        reductions: Reduction::ALL_STATIC,
    });
    Ok(rule)
}

/// The grids that vectors (or scalars) span, with the vector of each dimension of the grids as the
/// numbers of the call. A grid of one vector must not count as partial because another one is.
pub(crate) const GRIDS: RuleForm = RuleForm::built("grids", grids);

fn grids(operands: &Operands<'_>, data: &[i64]) -> Result<Rule> {
    let mut rule = Rule::default();
    let mut grid: SmallVec<[Factors; 4]> = smallvec![Factors::new(); data.len()];
    for i in 0..operands.count() {
        let mut dims = SmallVec::new();
        if operands.rank(i) == 1 {
            let f: Factors = smallvec![rule.factors.len() as u8];
            for (d, _) in data.iter().enumerate().filter(|(_, v)| **v == i as i64) {
                grid[d] = f.clone();
            }
            dims.push(f);
            rule.factors.push(factor(i, FactorKind::Pass));
        }
        rule.inputs.push(dims);
    }
    rule.outputs = smallvec![grid; operands.count()];
    rule.through.push(Through {
        operands: ((1u64 << operands.count()) - 1) as u32,
        reductions: Reduction::ALL_STATIC,
    });
    Ok(rule)
}

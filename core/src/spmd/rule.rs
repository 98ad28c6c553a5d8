//! Sharding rules as data.
//!
//! A rule names the dimensions of an op's operands and results by *factors*:
//! `...mk, ...kn -> ...mn ; reduce k sum ; linear 0 ; linear 1`. Equal letters are the same factor;
//! `...` stands for the remaining dimensions, which broadcast. A factor may be cut over mesh axes
//! if all that carry it are cut alike. One that the result lacks is reduced; where only some
//! results lack it, it stays cut in the others. `(gc)` is one dimension made of two factors, major
//! first. After `;` stand clauses:
//!
//! | clause | meaning |
//! |---|---|
//! | `reduce k sum` | ranks that hold different parts of `k` give partial results |
//! | `replicate k` | `k` must be whole; so must every dimension that only the result has |
//! | `stats k 2` | `k` may be cut: the op then runs as its decomposition, in which 2 statistics cross |
//! | `linear 0 2` | partial sums pass through operands 0 and 2 together, if the others are whole |
//! | `monotone 0` | the same for partial maxima and minima |
//! | `through or 0 1` | the same for the reduction named |
//!
//! An operand that is in every `linear` clause but lacks a factor that is reduced with `sum` is an
//! addend (a bias): where that factor is cut, it becomes partial, so that it is added once.

use super::notation::Parser;
use crate::{Reduction, Result, Shape, Tensor};
use smallvec::SmallVec;

/// The factors of one dimension, major first; none means that the dimension must be whole.
pub type Factors = SmallVec<[u8; 2]>;

/// What may happen to a factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Every result has it.
    Pass,
    /// The results lack it; parts of it give partial results.
    Reduce(Reduction),
    /// Parts of it are combined through this many statistics.
    Stats(u32),
    /// It is never cut.
    Whole,
}

/// A logical dimension of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Factor {
    /// Its letter; dimensions that `...` stands for are A, B, C and so on.
    pub letter: char,
    /// Its size.
    pub size: usize,
    /// What may happen to it.
    pub kind: Kind,
}

/// Operands through which partial values of some reductions pass together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Through {
    /// A bit for each operand.
    pub operands: u32,
    /// The reductions.
    pub reductions: &'static [Reduction],
}

/// A rule for operands of given shapes.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Rule {
    /// The factors.
    pub factors: SmallVec<[Factor; 8]>,
    /// The dimensions of each operand.
    pub inputs: SmallVec<[SmallVec<[Factors; 4]>; 3]>,
    /// The dimensions of each result.
    pub outputs: SmallVec<[SmallVec<[Factors; 4]>; 2]>,
    /// How partial values pass.
    pub through: SmallVec<[Through; 2]>,
    /// A bit for each operand that is added once.
    pub addends: u32,
}

/// What the op was given for a term of its rule.
#[derive(Clone, Copy, Debug)]
pub enum Given<'a> {
    /// A tensor of this shape.
    Shape(&'a Shape),
    /// A number: whole on every rank, so clauses in which its operand would be partial do not hold.
    Number,
    /// Nothing, such as no bias: as if it were zero.
    Nothing,
}

impl<'a> From<&'a Tensor> for Given<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Given::Shape(tensor.shape())
    }
}

impl<'a> From<Option<&'a Tensor>> for Given<'a> {
    fn from(tensor: Option<&'a Tensor>) -> Self {
        tensor.map_or(Given::Nothing, |t| Given::Shape(t.shape()))
    }
}

/// A letter that stands for these dimensions, wherever they are; in a term of its own it stands for
/// all there are.
pub type Bind<'a> = (char, &'a [usize]);

impl Rule {
    /// Reads a rule for what the op was given. The terms of missing operands are dropped.
    ///
    /// ```
    /// # use anymesh_core::{Shape, spmd::{Rule, rule::Given}};
    /// let rule = Rule::new("mk, kn -> mn ; reduce k sum", &[Given::Shape(&[4, 6].into()), Given::Shape(&[6, 8].into())], &[])?;
    /// assert_eq!(rule.factors.iter().map(|f| (f.letter, f.size)).collect::<Vec<_>>(), [('m', 4), ('k', 6), ('n', 8)]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    pub fn new(text: &str, shapes: &[Given<'_>], binds: &[Bind<'_>]) -> Result<Self> {
        Self::with_sizes(text, shapes, binds, &[])
    }

    /// As [`new`](Self::new), with the sizes of factors that only stand in brackets. Sizes that
    /// follow from the operands need not be given; of those that nothing tells, the first takes all
    /// there is.
    ///
    /// ```
    /// # use anymesh_core::{Shape, spmd::{Rule, rule::Given}};
    /// let rule = Rule::with_sizes("n(gc) -> n(gc)", &[Given::Shape(&[4, 6].into())], &[], &[('g', 2)])?;
    /// assert_eq!(rule.factors.iter().map(|f| (f.letter, f.size)).collect::<Vec<_>>(), [('n', 4), ('g', 2), ('c', 3)]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    pub fn with_sizes(
        text: &str,
        shapes: &[Given<'_>],
        binds: &[Bind<'_>],
        sizes: &[(char, usize)],
    ) -> Result<Self> {
        Parser::new(text, binds, sizes).read(shapes)
    }

    /// Every dimension of `shape` passes; operands broadcast to it.
    pub fn broadcast(shape: &Shape, operands: &[&Tensor], outputs: usize) -> Self {
        let mut rule = Rule::default();
        for d in 0..shape.rank() {
            rule.factors.push(Factor {
                letter: letter(d),
                size: shape[d],
                kind: Kind::Pass,
            });
        }
        for t in operands {
            let lead = shape.rank() - t.rank();
            rule.inputs.push(
                (0..t.rank())
                    .map(|d| {
                        if t.dims()[d] == shape[lead + d] {
                            smallvec::smallvec![(lead + d) as u8]
                        } else {
                            Factors::new()
                        }
                    })
                    .collect(),
            );
        }
        rule.outputs = smallvec::smallvec![(0..shape.rank()).map(|d| smallvec::smallvec![d as u8]).collect(); outputs];
        // A dimension that no operand has is computed whole.
        for f in 0..shape.rank() {
            if !rule
                .inputs
                .iter()
                .any(|dims| dims.iter().any(|d| d.contains(&(f as u8))))
            {
                rule.factors[f].kind = Kind::Whole;
            }
        }
        rule
    }

    /// With these operands, together, letting partial values of `reductions` pass.
    pub fn let_through(mut self, operands: u32, reductions: &'static [Reduction]) -> Self {
        self.through.push(Through {
            operands,
            reductions,
        });
        self
    }

    /// The factor with this letter.
    pub fn factor(&self, letter: char) -> Option<usize> {
        self.factors.iter().position(|f| f.letter == letter)
    }

    /// The factors between a shape and another of the same number of elements: sizes that both
    /// share from the left.
    pub fn reshape(from: &Shape, to: &Shape) -> Self {
        let mut rule = Rule::default();
        let (mut input, mut output): (SmallVec<[Factors; 4]>, SmallVec<[Factors; 4]>) = (
            smallvec::smallvec![Factors::new(); from.rank()],
            smallvec::smallvec![Factors::new(); to.rank()],
        );
        let (mut i, mut j) = (0, 0);
        let (mut a, mut b) = (
            from.dims().first().copied().unwrap_or(1),
            to.dims().first().copied().unwrap_or(1),
        );
        while i < from.rank() && j < to.rank() && from.numel() > 0 {
            let common = gcd(a, b);
            if common > 1 {
                rule.shared(&mut input[i], &mut output[j], common);
                (a, b) = (a / common, b / common);
            } else if a == 1 && b == 1 {
                // A dimension of size 1 that both have: the rank that holds it keeps it.
                rule.shared(&mut input[i], &mut output[j], 1);
            } else if a > 1 && b > 1 {
                // Sizes that share nothing: what follows is mixed up until the products meet again.
                // These parts stay whole.
                let (mut x, mut y) = (a, b);
                rule.whole(&mut input[i], a);
                rule.whole(&mut output[j], b);
                while x != y {
                    if x < y {
                        i += 1;
                        x *= from[i];
                        rule.whole(&mut input[i], from[i]);
                    } else {
                        j += 1;
                        y *= to[j];
                        rule.whole(&mut output[j], to[j]);
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
                b = to.dims().get(j).copied().unwrap_or(1);
            }
        }
        rule.inputs.push(input);
        rule.outputs.push(output);
        rule.through.push(Through {
            operands: 1,
            reductions: Reduction::ALL_STATIC,
        });
        rule
    }

    /// The factors of a view: dimension `i` of the result is dimension `to[i]` of the operand, or a
    /// new one, which is whole. Dimensions of the operand that the result lacks are whole too.
    /// Elements only move, so partial values of every reduction pass.
    pub fn view(from: &Shape, to: &[Option<usize>]) -> Self {
        let mut rule = Rule::default();
        let mut input: SmallVec<[Factors; 4]> = smallvec::smallvec![Factors::new(); from.rank()];
        let mut output: SmallVec<[Factors; 4]> = smallvec::smallvec![Factors::new(); to.len()];
        for (d, source) in to.iter().enumerate() {
            if let Some(s) = *source {
                let f = rule.factors.len() as u8;
                (input[s], output[d]) = (smallvec::smallvec![f], smallvec::smallvec![f]);
                rule.factors.push(Factor {
                    letter: letter(s),
                    size: from[s],
                    kind: Kind::Pass,
                });
            }
        }
        rule.inputs.push(input);
        rule.outputs.push(output);
        rule.let_through(1, Reduction::ALL_STATIC)
    }

    fn shared(&mut self, input: &mut Factors, output: &mut Factors, size: usize) {
        let f = self.factors.len() as u8;
        input.push(f);
        output.push(f);
        self.factors.push(Factor {
            letter: (b'a' + f % 26) as char,
            size,
            kind: Kind::Pass,
        });
    }

    fn whole(&mut self, dim: &mut Factors, size: usize) {
        dim.push(self.factors.len() as u8);
        self.factors.push(Factor {
            letter: '_',
            size,
            kind: Kind::Whole,
        });
    }
}

/// The letter of dimension `d` among those that `...` stands for: A to Z, then À and on. No tensor on
/// a mesh has more dimensions than there are.
pub fn letter(d: usize) -> char {
    match d {
        0..26 => char::from(b'A' + d as u8),
        _ => char::from(0xc0 + (d - 26).min(0x3f) as u8),
    }
}

/// Whether a letter is one of those that `...` stands for.
pub(super) fn is_rest(letter: char) -> bool {
    letter.is_ascii_uppercase() || ('À'..='ÿ').contains(&letter)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

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
//! | `replicate k` | `k` must be whole, but not what stands beside it in brackets; so must every dimension that only the result has |
//! | `stats k 2` | `k` may be cut: the op then runs as its decomposition, in which 2 statistics cross |
//! | `borders k 7..7+0..6` | `k` of the result is [made so](Recipe) of that of the operands, and may be cut: ranks then fetch what they lack |
//! | `linear 0 2` | partial sums pass through operands 0 and 2 together, if the others are whole |
//! | `monotone 0` | the same for partial maxima and minima |
//! | `through or 0 1` | the same for the reduction named; `any` for all of them |
//! | `addend 0` | operand 0 is an addend, and no other |
//!
//! An operand that is in every `linear` clause but lacks a factor that is reduced with `sum` is an
//! addend (a bias): where that factor is cut, it becomes partial, so that it is added once. The
//! clause `addend` says otherwise.
//!
//! `linear` promises that the terms of a sum, one by one, give results that add up to the result of
//! the sum: for finite terms and finite other operands, up to rounding, overflow and the sign of
//! zero. What has a pole breaks that promise at the pole (`2 / 0 + -1 / 0` is NaN, `1 / 0` is
//! infinite), so an elementwise op whose program has one
//! ([`MapProgram::has_pole`](crate::map::MapProgram::has_pole)), with the numbers that it was called
//! with, takes nothing partial: `x / y` adds terms up first and `x / 2` does not. An operand that
//! holds infinities is not looked for: a partial sum times infinity may be NaN where the sum times
//! infinity is infinite.
//!
//! A rule prints itself in this notation.

use super::notation::Parser;
use crate::{
    DType, Error, Mesh, Reduction, Result, Shape, Sharding, Tensor,
    reshard::{Recipe, lacked},
};
use smallvec::SmallVec;
use std::fmt;

/// The factors of one dimension, major first; none means that the dimension must be whole.
pub type Factors = SmallVec<[u8; 2]>;

/// What may happen to a factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FactorKind {
    /// Every result has it.
    Pass,
    /// The results lack it; parts of it give partial results.
    Reduce(Reduction),
    /// Parts of it are combined through this many statistics.
    Stats(u32),
    /// The result's is made of the operands' by a [recipe](Rule::recipes): each rank fetches what it
    /// lacks for its part.
    Borders,
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
    pub kind: FactorKind,
}

/// Operands through which partial values of some reductions pass together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Through {
    /// A bit for each operand.
    pub operands: u32,
    /// The reductions.
    pub reductions: &'static [Reduction],
}

/// Where a result is wanted: what it takes to get there counts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Wanted {
    /// The sharding, with nothing partial.
    pub sharding: Sharding,
    /// How many results are added up before they go there together, each of which pays its share.
    pub shared_by: u32,
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
    /// Of what the result's dimensions consist that are neither equal to the operands' nor whole, by
    /// factor.
    pub recipes: SmallVec<[(u8, Recipe); 1]>,
    /// Where a call wants its results to lie, as far as it knows. Results beyond these are wanted
    /// without partial values.
    pub wanted: Vec<Option<Wanted>>,
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
        Parser::new(text, binds, sizes).read(shapes).map_err(|e| {
            e.of(shapes.iter().filter_map(|given| match given {
                Given::Shape(shape) => Some(*shape),
                Given::Number | Given::Nothing => None,
            }))
        })
    }

    /// The factor with this letter.
    pub fn factor(&self, letter: char) -> Option<usize> {
        self.factors.iter().position(|f| f.letter == letter)
    }

    /// Sets the size of every factor from the dimensions that are it; an error where no dimension
    /// is.
    pub(super) fn with_sizes_of(mut self, shapes: &[&Shape]) -> Result<Self> {
        for f in 0..self.factors.len() {
            let Some((operand, dim)) = self.alone(f) else {
                return Err(Error::Rule {
                    op: "rule",
                    rule: self.to_string(),
                    detail: format!(
                        "factor {} is no dimension of an operand",
                        self.factors[f].letter
                    ),
                });
            };
            self.factors[f].size = shapes[operand][dim];
        }
        Ok(self)
    }

    /// The letters under which its factors are printed: each its own where it has one that can be
    /// read back, else the first that is free.
    pub fn letters(&self) -> SmallVec<[char; 8]> {
        let mut taken: SmallVec<[char; 8]> = SmallVec::new();
        let wanted: SmallVec<[char; 8]> = self
            .factors
            .iter()
            .map(|f| f.letter.to_ascii_lowercase())
            .collect();
        for (f, &letter) in wanted.iter().enumerate() {
            let own = letter.is_ascii_lowercase() && !taken.contains(&letter);
            let mut free = ('a'..='z')
                .chain('A'..='Z')
                .filter(|c| !taken.contains(c) && !wanted[f..].contains(c));
            taken.push(if own {
                letter
            } else {
                free.next().unwrap_or('?')
            });
        }
        taken
    }

    /// Whether no part of a dimension can be cut.
    fn is_whole(&self, dim: &Factors) -> bool {
        dim.iter()
            .all(|f| self.factors[*f as usize].kind == FactorKind::Whole)
    }

    /// The operands that every clause lets sums pass through: addends, unless a clause says
    /// otherwise.
    pub(super) fn usual_addends(&self) -> u32 {
        self.through
            .iter()
            .filter(|t| t.reductions.contains(&Reduction::Sum))
            .map(|t| t.operands)
            .reduce(|a, b| a & b)
            .unwrap_or(0)
    }

    /// The same without its clauses on partial values: nothing partial passes.
    pub(super) fn without_partials(self) -> Self {
        Self {
            through: SmallVec::new(),
            addends: 0,
            ..self
        }
    }

    /// The size of a factor in the results.
    pub(super) fn result_size(&self, factor: u8) -> usize {
        let recipe = self.recipes.iter().find(|(f, _)| *f == factor);
        recipe.map_or(self.factors[factor as usize].size, |(_, r)| r.size())
    }

    /// Bytes that the worst rank fetches for its part of the result, given what the first operand is
    /// and how all of them lie.
    pub(super) fn border_bytes(
        &self,
        mesh: &Mesh,
        shape: &Shape,
        dtype: DType,
        sharding: &Sharding,
    ) -> u64 {
        let dim = |f: u8| self.inputs[0].iter().position(|d| d.contains(&f));
        let recipes: SmallVec<[(usize, Recipe); 1]> = self
            .recipes
            .iter()
            .filter_map(|(f, recipe)| Some((dim(*f)?, recipe.clone())))
            .collect();
        lacked(mesh, shape, sharding, &recipes).saturating_mul(dtype.size() as u64)
    }

    /// The operand and the dimension that a factor is by itself.
    pub(super) fn alone(&self, factor: usize) -> Option<(usize, usize)> {
        let is = |d: &Factors| d[..] == [factor as u8];
        self.inputs
            .iter()
            .enumerate()
            .find_map(|(i, dims)| dims.iter().position(is).map(|d| (i, d)))
    }
}

/// What a function that makes a rule may know of the operands: what a solved call is known by.
#[derive(Debug)]
pub struct Operands<'a>(&'a [Given<'a>]);

impl<'a> Operands<'a> {
    pub(super) fn new(given: &'a [Given<'a>]) -> Self {
        Self(given)
    }

    /// How many there are, with numbers and missing ones.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// The number of dimensions of operand `i`; none where it is no tensor.
    pub(crate) fn rank(&self, i: usize) -> usize {
        match self.0[i] {
            Given::Shape(shape) => shape.rank(),
            Given::Number | Given::Nothing => 0,
        }
    }

    /// Whether dimension `d` of operand `i` has size 1.
    pub(crate) fn is_one(&self, i: usize, d: usize) -> bool {
        matches!(self.0[i], Given::Shape(shape) if shape[d] == 1)
    }

    /// For each dimension of operand `i` whether it has size 1.
    pub(crate) fn ones(&self, i: usize) -> SmallVec<[bool; 6]> {
        (0..self.rank(i)).map(|d| self.is_one(i, d)).collect()
    }

    /// The rule of a text. It has no brackets: their factors would depend on sizes.
    pub(crate) fn read(&self, text: &str, binds: &[Bind<'_>]) -> Result<Rule> {
        if text.contains('(') {
            return Err(Error::Parse {
                what: "sharding rule",
                text: text.into(),
                expected: "no brackets in a rule that is made from ranks".into(),
            });
        }
        Rule::new(text, self.0, binds)
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

/// The notation that it could have been read from.
impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letters = self.letters();
        let term = |dims: &SmallVec<[Factors; 4]>| -> String {
            let dim = |d: &Factors| match d[..] {
                _ if self.is_whole(d) => "1".to_string(),
                [one] => letters[one as usize].to_string(),
                _ => format!(
                    "({})",
                    d.iter().map(|f| letters[*f as usize]).collect::<String>()
                ),
            };
            dims.iter().map(dim).collect()
        };
        let terms =
            |list: &[SmallVec<[Factors; 4]>]| list.iter().map(term).collect::<Vec<_>>().join(", ");
        write!(f, "{} -> {}", terms(&self.inputs), terms(&self.outputs))?;
        // A factor that is never cut needs a letter where it is in brackets with others.
        let named: SmallVec<[u8; 8]> = (self.inputs.iter().chain(&self.outputs).flatten())
            .filter(|d| !self.is_whole(d))
            .flatten()
            .copied()
            .collect();
        let mut kinds: SmallVec<[FactorKind; 4]> = SmallVec::new();
        for factor in &self.factors {
            if factor.kind != FactorKind::Pass && !kinds.contains(&factor.kind) {
                kinds.push(factor.kind);
            }
        }
        for kind in kinds {
            let of: String = (0..self.factors.len())
                .filter(|f| self.factors[*f].kind == kind && named.contains(&(*f as u8)))
                .flat_map(|f| [' ', letters[f]])
                .collect();
            if of.is_empty() {
                continue;
            }
            match kind {
                FactorKind::Pass | FactorKind::Borders => {}
                FactorKind::Reduce(reduction) => write!(f, " ; reduce{of} {reduction}")?,
                FactorKind::Stats(count) => write!(f, " ; stats{of} {count}")?,
                FactorKind::Whole => write!(f, " ; replicate{of}")?,
            }
        }
        for (factor, recipe) in &self.recipes {
            write!(f, " ; borders {} {recipe}", letters[*factor as usize])?;
        }
        let operands = |mask: u32| -> String {
            (0..32)
                .filter(|i| mask >> i & 1 == 1)
                .map(|i| format!(" {i}"))
                .collect()
        };
        for through in &self.through {
            let of = operands(through.operands);
            match through.reductions {
                [Reduction::Sum] => write!(f, " ; linear{of}")?,
                [Reduction::Max, Reduction::Min] => write!(f, " ; monotone{of}")?,
                all if all == Reduction::ALL_STATIC => write!(f, " ; through any{of}")?,
                some => {
                    for reduction in some {
                        write!(f, " ; through {reduction}{of}")?;
                    }
                }
            }
        }
        // Only a sum has addends.
        let sums = |f: &Factor| f.kind == FactorKind::Reduce(Reduction::Sum);
        if self.addends != self.usual_addends() && self.factors.iter().any(sums) {
            write!(f, " ; addend{}", operands(self.addends))?;
        }
        Ok(())
    }
}

//! Sharding rules as data.
//!
//! A rule names the dimensions of an op's operands and results by *factors*: `...mk, ...kn -> ...mn ; reduce k sum ; linear 0 ; linear 1`. Equal letters are the
//! same factor; `...` stands for the remaining dimensions, which broadcast. A factor may be cut over mesh axes if all that carry it are cut alike. One that
//! the result lacks is reduced. After `;` stand clauses:
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
//! An operand that is in every `linear` clause but lacks a factor that is reduced with `sum` is an addend (a bias): where that factor is cut, it becomes partial, so
//! that it is added once.

use crate::{Error, Reduction, Result, Shape, Tensor};
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
    Stats(u8),
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

/// A letter that stands for these dimensions, wherever they are.
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
        Parser { text, rule: Rule::default(), whole: SmallVec::new(), whole_rest: false, binds }.read(shapes)
    }

    /// Every dimension of `shape` passes; operands broadcast to it.
    pub fn broadcast(shape: &Shape, operands: &[&Tensor], outputs: usize) -> Self {
        let mut rule = Rule::default();
        for d in 0..shape.rank() {
            rule.factors.push(Factor { letter: letter(d), size: shape[d], kind: Kind::Pass });
        }
        for t in operands {
            let lead = shape.rank() - t.rank();
            rule.inputs
                .push((0..t.rank()).map(|d| if t.dims()[d] == shape[lead + d] { smallvec::smallvec![(lead + d) as u8] } else { Factors::new() }).collect());
        }
        rule.outputs = smallvec::smallvec![(0..shape.rank()).map(|d| smallvec::smallvec![d as u8]).collect(); outputs];
        // A dimension that no operand has is computed whole.
        for f in 0..shape.rank() {
            if !rule.inputs.iter().any(|dims| dims.iter().any(|d| d.contains(&(f as u8)))) {
                rule.factors[f].kind = Kind::Whole;
            }
        }
        rule
    }

    /// With these operands, together, letting partial values of `reductions` pass.
    pub fn let_through(mut self, operands: u32, reductions: &'static [Reduction]) -> Self {
        self.through.push(Through { operands, reductions });
        self
    }

    /// The factor with this letter.
    pub fn factor(&self, letter: char) -> Option<usize> {
        self.factors.iter().position(|f| f.letter == letter)
    }

    /// The factors between a shape and another of the same number of elements: sizes that both share from the left.
    pub fn reshape(from: &Shape, to: &Shape) -> Self {
        let mut rule = Rule::default();
        let (mut input, mut output): (SmallVec<[Factors; 4]>, SmallVec<[Factors; 4]>) =
            (smallvec::smallvec![Factors::new(); from.rank()], smallvec::smallvec![Factors::new(); to.rank()]);
        let (mut i, mut j) = (0, 0);
        let (mut a, mut b) = (from.dims().first().copied().unwrap_or(1), to.dims().first().copied().unwrap_or(1));
        while i < from.rank() && j < to.rank() && from.numel() > 0 {
            let common = gcd(a, b);
            if common > 1 {
                rule.shared(&mut input[i], &mut output[j], common);
                (a, b) = (a / common, b / common);
            } else if a == 1 && b == 1 {
                // A dimension of size 1 that both have: the rank that holds it keeps it.
                rule.shared(&mut input[i], &mut output[j], 1);
            } else if a > 1 && b > 1 {
                // Sizes that share nothing: what follows is mixed up until the products meet again. These parts stay whole.
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
        rule.through.push(Through { operands: 1, reductions: Reduction::ALL_STATIC });
        rule
    }

    /// The factors of a view: dimension `i` of the result is dimension `to[i]` of the operand, or a new one, which is whole. Dimensions of the operand that the
    /// result lacks are whole too. Elements only move, so partial values of every reduction pass.
    pub fn view(from: &Shape, to: &[Option<usize>]) -> Self {
        let mut rule = Rule::default();
        let mut input: SmallVec<[Factors; 4]> = smallvec::smallvec![Factors::new(); from.rank()];
        let mut output: SmallVec<[Factors; 4]> = smallvec::smallvec![Factors::new(); to.len()];
        for (d, source) in to.iter().enumerate() {
            if let Some(s) = *source {
                let f = rule.factors.len() as u8;
                (input[s], output[d]) = (smallvec::smallvec![f], smallvec::smallvec![f]);
                rule.factors.push(Factor { letter: letter(s), size: from[s], kind: Kind::Pass });
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
        self.factors.push(Factor { letter: (b'a' + f % 26) as char, size, kind: Kind::Pass });
    }

    fn whole(&mut self, dim: &mut Factors, size: usize) {
        dim.push(self.factors.len() as u8);
        self.factors.push(Factor { letter: '_', size, kind: Kind::Whole });
    }
}

/// The letter of dimension `d` among those that `...` stands for.
pub fn letter(d: usize) -> char {
    (b'A' + d as u8) as char
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

struct Parser<'a> {
    text: &'a str,
    rule: Rule,
    /// Letters that must be whole.
    whole: SmallVec<[char; 8]>,
    /// Whether all that `...` stands for must be whole.
    whole_rest: bool,
    binds: &'a [Bind<'a>],
}

/// Where the operand of a term is among those given.
#[derive(Clone, Copy)]
enum Place {
    At(usize),
    Number,
    Nothing,
}

/// A piece of a term.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Item {
    Letter(char),
    One,
    Rest,
}

impl Parser<'_> {
    fn fail<T>(&self, why: impl Into<String>) -> Result<T> {
        Err(Error::Parse { what: "sharding rule", text: self.text.into(), expected: why.into() })
    }

    fn read(mut self, shapes: &[Given<'_>]) -> Result<Rule> {
        let mut clauses = self.text.split(';').map(str::trim);
        let head = clauses.next().unwrap_or("");
        let Some((left, right)) = head.split_once("->") else { return self.fail("operands -> results, such as mk, kn -> mn") };
        let clauses: SmallVec<[&str; 6]> = clauses.filter(|c| !c.is_empty()).collect();
        for clause in &clauses {
            if let Some(letters) = clause.strip_prefix("replicate ") {
                self.whole_rest |= letters.contains("...");
                self.whole.extend(letters.chars().filter(|c| c.is_ascii_lowercase()));
            }
        }
        let left: SmallVec<[&str; 4]> = if left.trim().is_empty() { SmallVec::new() } else { left.split(',').collect() };
        if left.len() < shapes.len() {
            return self.fail(format!("{} operands, as many as the op was given", shapes.len()));
        }
        // The longest run that `...` stands for decides its letters, which align at the right.
        let mut rest = 0;
        for (term, shape) in left.iter().zip(shapes) {
            if let Given::Shape(shape) = shape {
                let items = self.items(term)?;
                if items.contains(&Item::Rest) {
                    rest = rest.max((shape.rank() + 1).saturating_sub(self.explicit(&items)));
                }
            }
        }
        let rest = rest.saturating_sub(usize::from(rest > 0));
        let mut position = 0;
        let mut numbers: SmallVec<[Place; 4]> = SmallVec::new();
        for (term, given) in left.iter().zip(shapes) {
            let shape = match given {
                Given::Shape(shape) => shape,
                Given::Number => {
                    numbers.push(Place::Number);
                    continue;
                }
                Given::Nothing => {
                    numbers.push(Place::Nothing);
                    continue;
                }
            };
            numbers.push(Place::At(position));
            position += 1;
            let dims = self.term(term, Some(shape), rest)?;
            self.rule.inputs.push(dims);
        }
        for term in right.split(',') {
            let dims = self.term(term, None, rest)?;
            self.rule.outputs.push(dims);
        }
        for clause in clauses {
            self.clause(clause, &numbers)?;
        }
        self.finish()
    }

    /// Splits a term into letters, ones and `...`.
    fn items(&self, term: &str) -> Result<SmallVec<[Item; 6]>> {
        let mut out = SmallVec::new();
        let mut chars = term.chars().filter(|c| !c.is_whitespace()).peekable();
        while let Some(c) = chars.next() {
            match c {
                'a'..='z' => out.push(Item::Letter(c)),
                '1' => out.push(Item::One),
                '.' => {
                    if chars.next() != Some('.') || chars.next() != Some('.') {
                        return self.fail("`...` for the remaining dimensions");
                    }
                    out.push(Item::Rest);
                }
                _ => return self.fail(format!("letters a to z, 1 and `...` in terms, not '{c}'")),
            }
        }
        if out.iter().filter(|i| **i == Item::Rest).count() > 1 {
            return self.fail("`...` once in a term");
        }
        Ok(out)
    }

    /// The number of dimensions that a term's letters stand for, without `...`.
    fn explicit(&self, items: &[Item]) -> usize {
        items.iter().map(|item| self.width(*item)).sum()
    }

    fn width(&self, item: Item) -> usize {
        match item {
            Item::Letter(c) => self.binds.iter().find(|(b, _)| *b == c).map_or(1, |(_, axes)| axes.len()),
            Item::One => 1,
            Item::Rest => 0,
        }
    }

    /// The factors of each dimension of an operand, or of a result, whose shape is not known.
    fn term(&mut self, term: &str, shape: Option<&Shape>, rest: usize) -> Result<SmallVec<[Factors; 4]>> {
        let items = self.items(term)?;
        let explicit = self.explicit(&items);
        let has_rest = items.contains(&Item::Rest);
        let rank = match shape {
            Some(shape) => shape.rank(),
            None => explicit + if has_rest { rest } else { 0 },
        };
        let covered = if has_rest { rank.checked_sub(explicit) } else { (rank == explicit).then_some(0) };
        let Some(covered) = covered else {
            return Err(Error::Shape { op: "rule", detail: format!("an operand of rank {rank} does not fit '{}' in '{}'", term.trim(), self.text) });
        };
        // Bound letters take their dimensions, the others fill what is left in order.
        let mut dims: SmallVec<[Option<char>; 6]> = smallvec::smallvec![None; rank];
        let mut taken: SmallVec<[bool; 6]> = smallvec::smallvec![false; rank];
        for item in &items {
            if let Item::Letter(c) = item
                && let Some((_, axes)) = self.binds.iter().find(|(b, _)| b == c)
            {
                for (n, &axis) in axes.iter().enumerate() {
                    if axis >= rank {
                        return Err(Error::Shape { op: "rule", detail: format!("dimension {axis} of an operand of rank {rank}, in '{}'", self.text) });
                    }
                    // Several dimensions under one letter are factors of their own, told apart by an upper half of the alphabet.
                    dims[axis] = Some(if n == 0 { *c } else { char::from_u32(*c as u32 + 0x400 * n as u32).unwrap_or(*c) });
                    taken[axis] = true;
                }
            }
        }
        let mut free = (0..rank).filter(|d| !taken[*d]).collect::<SmallVec<[usize; 6]>>().into_iter();
        for item in &items {
            match item {
                Item::Letter(c) if self.binds.iter().any(|(b, _)| b == c) => {}
                Item::Letter(c) => {
                    if let Some(d) = free.next() {
                        dims[d] = Some(*c);
                    }
                }
                Item::One => {
                    free.next();
                }
                Item::Rest => {
                    for n in 0..covered {
                        if let Some(d) = free.next() {
                            dims[d] = (!self.whole_rest).then(|| letter(rest - covered + n));
                        }
                    }
                }
            }
        }
        let mut out = SmallVec::new();
        for (d, letter) in dims.iter().enumerate() {
            let size = shape.map(|s| s[d]);
            out.push(match letter {
                Some(c) if !self.is_whole(*c) => self.dimension(*c, size)?,
                _ => Factors::new(),
            });
        }
        Ok(out)
    }

    fn is_whole(&self, letter: char) -> bool {
        self.whole.iter().any(|w| same_letter(*w, letter))
    }

    /// The factor of a dimension; broadcast dimensions have none.
    fn dimension(&mut self, letter: char, size: Option<usize>) -> Result<Factors> {
        let known = self.rule.factor(letter);
        let Some(size) = size else {
            // A letter that only the result has cannot be cut: no operand says how.
            return Ok(known.map(|f| f as u8).into_iter().collect());
        };
        let Some(f) = known else {
            self.rule.factors.push(Factor { letter, size, kind: Kind::Pass });
            return Ok([self.rule.factors.len() as u8 - 1].into_iter().collect());
        };
        let broadcasts = letter.is_ascii_uppercase();
        let factor = &mut self.rule.factors[f];
        if factor.size == size {
            return Ok([f as u8].into_iter().collect());
        }
        if broadcasts && size == 1 {
            return Ok(Factors::new());
        }
        if broadcasts && factor.size == 1 {
            factor.size = size;
            for dims in &mut self.rule.inputs {
                for dim in dims {
                    dim.retain(|other| *other as usize != f);
                }
            }
            return Ok([f as u8].into_iter().collect());
        }
        let detail = format!("factor {letter} of '{}' has size {} in one operand and {size} in another", self.text, factor.size);
        Err(Error::Shape { op: "rule", detail })
    }

    fn clause(&mut self, clause: &str, numbers: &[Place]) -> Result<()> {
        let mut words = clause.split_whitespace();
        let operands = |parser: &Self, words: std::str::SplitWhitespace<'_>| -> Result<u32> {
            let mut mask = 0;
            for word in words {
                if word == "all" {
                    return Ok((1 << parser.rule.inputs.len()) - 1);
                }
                let Ok(n) = word.parse::<usize>() else { return parser.fail(format!("operand numbers, not '{word}'")) };
                match numbers.get(n) {
                    Some(Place::At(n)) => mask |= 1 << n,
                    Some(Place::Number) => return Ok(0),
                    Some(Place::Nothing) | None => {}
                }
            }
            Ok(mask)
        };
        let (name, rest) = (words.next().unwrap_or(""), words.clone());
        match name {
            "replicate" | "offset" => {}
            "reduce" => {
                let mut letters: SmallVec<[&str; 4]> = rest.collect();
                let reduction = letters.pop().unwrap_or("").parse()?;
                self.mark(&letters, Kind::Reduce(reduction))?;
            }
            "stats" => {
                let mut letters: SmallVec<[&str; 4]> = rest.collect();
                let count = letters.last().and_then(|w| w.parse().ok());
                if count.is_some() {
                    letters.pop();
                }
                self.mark(&letters, Kind::Stats(count.unwrap_or(2)))?;
            }
            "linear" | "monotone" | "through" => {
                const EXTREMES: &[Reduction] = &[Reduction::Max, Reduction::Min];
                let (reductions, operands) = match name {
                    "linear" => (&[Reduction::Sum] as &'static [Reduction], operands(self, rest)?),
                    "monotone" => (EXTREMES, operands(self, rest)?),
                    _ => {
                        let name = words.next().unwrap_or("");
                        let all = Reduction::ALL_STATIC;
                        let reductions = match name {
                            "any" => all,
                            _ => {
                                let one: Reduction = name.parse()?;
                                all.iter().position(|r| *r == one).map_or(&all[..0], |i| &all[i..=i])
                            }
                        };
                        (reductions, operands(self, words)?)
                    }
                };
                if operands != 0 {
                    self.rule.through.push(Through { operands, reductions });
                }
            }
            _ => return self.fail(format!("clauses replicate, reduce, stats, linear, monotone, through, offset, not '{name}'")),
        }
        Ok(())
    }

    fn mark(&mut self, letters: &[&str], kind: Kind) -> Result<()> {
        for letter in letters {
            for factor in &mut self.rule.factors {
                let rest = *letter == "..." && factor.letter.is_ascii_uppercase();
                if rest || letter.chars().next().is_some_and(|c| same_letter(c, factor.letter)) {
                    factor.kind = kind;
                }
            }
        }
        Ok(())
    }

    /// Factors that pass must be in every result; reduced ones leave the results (a dimension of size 1 may stay in their place).
    fn finish(mut self) -> Result<Rule> {
        for f in 0..self.rule.factors.len() {
            let has = |dims: &SmallVec<[Factors; 4]>| dims.iter().any(|d| d.contains(&(f as u8)));
            match self.rule.factors[f].kind {
                Kind::Reduce(_) => {
                    for dims in &mut self.rule.outputs {
                        for dim in dims {
                            dim.retain(|other| *other as usize != f);
                        }
                    }
                }
                Kind::Stats(_) | Kind::Whole => {}
                Kind::Pass if self.rule.outputs.iter().all(has) => {}
                Kind::Pass => {
                    let letter = self.rule.factors[f].letter;
                    return self.fail(format!("a `reduce` or `replicate` clause for {letter}, which a result lacks"));
                }
            }
        }
        let linear = self.rule.through.iter().filter(|t| t.reductions.contains(&Reduction::Sum));
        self.rule.addends = linear.map(|t| t.operands).reduce(|a, b| a & b).unwrap_or(0);
        Ok(self.rule)
    }
}

/// Whether a factor belongs to a letter: the dimensions of a bound letter are told apart by a multiple of 0x400.
fn same_letter(letter: char, factor: char) -> bool {
    letter == factor || (factor as u32 >= 0x400 && factor as u32 % 0x400 == letter as u32)
}

//! Reads the notation of [rules](super::rule).

use super::rule::{Bind, Factor, FactorKind, Factors, Given, Rule, Through, is_rest, letter};
use crate::{Error, OperandType, Reduction, Result, Shape, reshard::Recipe};
use smallvec::SmallVec;

/// The state while a text is read.
pub(super) struct Parser<'a> {
    text: &'a str,
    rule: Rule,
    /// Letters that must be whole.
    whole: SmallVec<[char; 8]>,
    /// Whether all that `...` stands for must be whole.
    whole_rest: bool,
    binds: &'a [Bind<'a>],
    /// Sizes of factors in brackets.
    sizes: SmallVec<[(char, usize); 4]>,
    /// Letters of dimensions that are made of others: operands differ in their size.
    made: SmallVec<[char; 2]>,
    /// Operands that are added once, where a clause says which.
    addends: Option<u32>,
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
enum Item<'a> {
    Letter(char),
    /// The letters of one dimension, major first.
    Compound(&'a str),
    One,
    Rest,
}

/// What stands for each dimension of an operand; nothing where it is whole.
type Items<'a> = SmallVec<[Option<Item<'a>>; 6]>;

impl<'a> Parser<'a> {
    pub(super) fn new(text: &'a str, binds: &'a [Bind<'a>], sizes: &[(char, usize)]) -> Self {
        Self {
            text,
            rule: Rule::default(),
            whole: SmallVec::new(),
            made: SmallVec::new(),
            whole_rest: false,
            binds,
            sizes: sizes.into(),
            addends: None,
        }
    }

    fn fail<T>(&self, why: impl Into<String>) -> Result<T> {
        Err(Error::Parse {
            what: "sharding rule",
            text: self.text.into(),
            expected: why.into(),
        })
    }

    pub(super) fn read(mut self, shapes: &[Given<'_>]) -> Result<Rule> {
        let mut clauses = self.text.split(';').map(str::trim);
        let head = clauses.next().unwrap_or("");
        let Some((left, right)) = head.split_once("->") else {
            return self.fail("operands -> results, such as mk, kn -> mn");
        };
        let clauses: SmallVec<[&str; 6]> = clauses.filter(|c| !c.is_empty()).collect();
        for clause in &clauses {
            if let Some(letters) = clause.strip_prefix("replicate ") {
                self.whole_rest |= letters.contains("...");
                self.whole
                    .extend(letters.chars().filter(|c| c.is_ascii_lowercase()));
            }
            if let Some(made) = clause.strip_prefix("borders ") {
                self.made.extend(made.chars().next());
            }
        }
        // One operand without dimensions is a term without letters.
        let left: SmallVec<[&str; 4]> = if left.trim().is_empty() && shapes.is_empty() {
            SmallVec::new()
        } else {
            left.split(',').collect()
        };
        // Numbers of elementwise ops need no term.
        if shapes
            .iter()
            .skip(left.len())
            .any(|given| matches!(given, Given::Shape(_)))
        {
            return self.fail(format!(
                "{} operands, as many as the op was given",
                shapes.len()
            ));
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
        if head.contains('(') {
            self.find_sizes(&left, shapes, rest)?;
        }
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
            self.clause(clause, &numbers, shapes)?;
        }
        self.finish()
    }

    /// Splits a term into letters, brackets, ones and `...`.
    fn items(&self, term: &'a str) -> Result<SmallVec<[Item<'a>; 6]>> {
        let mut out = SmallVec::new();
        let mut left = term.trim();
        while let Some(c) = left.chars().next() {
            let mut used = c.len_utf8();
            match c {
                'a'..='z' => out.push(Item::Letter(c)),
                '1' => out.push(Item::One),
                '.' if left.starts_with("...") => {
                    used = 3;
                    out.push(Item::Rest);
                }
                '(' => {
                    let letters = left[1..].split(')').next().unwrap_or("");
                    used = letters.len() + 2;
                    if letters.is_empty()
                        || used > left.len()
                        || !letters.chars().all(|c| c.is_ascii_lowercase())
                    {
                        return self.fail("letters a to z between ( and )");
                    }
                    out.push(Item::Compound(letters));
                }
                c if c.is_whitespace() => {}
                _ => {
                    return self.fail(format!(
                        "letters a to z, (..), 1 and `...` in terms, not '{c}'"
                    ));
                }
            }
            left = &left[used..];
        }
        if out.iter().filter(|i| **i == Item::Rest).count() > 1 {
            return self.fail("`...` once in a term");
        }
        Ok(out)
    }

    /// The number of dimensions that a term's letters stand for, without `...`.
    fn explicit(&self, items: &[Item<'_>]) -> usize {
        items.iter().map(|item| self.width(*item)).sum()
    }

    fn width(&self, item: Item<'_>) -> usize {
        match item {
            Item::Letter(c) => self
                .binds
                .iter()
                .find(|(b, _)| *b == c)
                .map_or(1, |(_, axes)| axes.len()),
            Item::One | Item::Compound(_) => 1,
            Item::Rest => 0,
        }
    }

    /// What stands for each dimension of an operand of this rank, or of a result, whose rank
    /// follows from the term.
    fn assign(&self, term: &'a str, rank: Option<usize>, rest: usize) -> Result<Items<'a>> {
        let items = self.items(term)?;
        let explicit = self.explicit(&items);
        let has_rest = items.contains(&Item::Rest);
        let rank = rank.unwrap_or(explicit + if has_rest { rest } else { 0 });
        let covered = if has_rest {
            rank.checked_sub(explicit)
        } else {
            (rank == explicit).then_some(0)
        };
        let Some(covered) = covered else {
            return Err(Error::shape(
                "rule",
                None::<OperandType>,
                format!(
                    "an operand of rank {rank} does not fit '{}' in '{}'",
                    term.trim(),
                    self.text
                ),
            ));
        };
        // Bound letters take their dimensions, the others fill what is left in order.
        let mut dims: Items<'a> = smallvec::smallvec![None; rank];
        let mut taken: SmallVec<[bool; 6]> = smallvec::smallvec![false; rank];
        for item in &items {
            if let Item::Letter(c) = item
                && let Some((_, axes)) = self.binds.iter().find(|(b, _)| b == c)
            {
                for (n, &axis) in axes.iter().enumerate() {
                    let axis = if items.len() == 1 { n } else { axis };
                    if axis >= rank {
                        return Err(Error::shape(
                            "rule",
                            None::<OperandType>,
                            format!(
                                "dimension {axis} of an operand of rank {rank}, in '{}'",
                                self.text
                            ),
                        ));
                    }
                    // Several dimensions under one letter are factors of their own, told apart by
                    // an upper half of the alphabet.
                    dims[axis] = Some(Item::Letter(if n == 0 {
                        *c
                    } else {
                        char::from_u32(*c as u32 + 0x400 * n as u32).unwrap_or(*c)
                    }));
                    taken[axis] = true;
                }
            }
        }
        let mut free = (0..rank)
            .filter(|d| !taken[*d])
            .collect::<SmallVec<[usize; 6]>>()
            .into_iter();
        for item in &items {
            match item {
                Item::Letter(c) if self.binds.iter().any(|(b, _)| b == c) => {}
                Item::Letter(_) | Item::Compound(_) => {
                    if let Some(d) = free.next() {
                        dims[d] = Some(*item);
                    }
                }
                Item::One => {
                    free.next();
                }
                Item::Rest => {
                    for n in 0..covered {
                        if let Some(d) = free.next() {
                            dims[d] = (!self.whole_rest)
                                .then(|| Item::Letter(letter(rest - covered + n)));
                        }
                    }
                }
            }
        }
        Ok(dims)
    }

    /// The factors of each dimension of an operand, or of a result, whose shape is not known.
    fn term(
        &mut self,
        term: &'a str,
        shape: Option<&Shape>,
        rest: usize,
    ) -> Result<SmallVec<[Factors; 4]>> {
        let mut out = SmallVec::new();
        for (d, item) in self
            .assign(term, shape.map(Shape::rank), rest)?
            .into_iter()
            .enumerate()
        {
            let size = shape.map(|s| s[d]);
            out.push(match item {
                Some(Item::Letter(c)) if !self.is_whole(c) => self.dimension(c, size)?,
                Some(Item::Compound(letters)) if !letters.chars().all(|c| self.is_whole(c)) => {
                    self.compound(letters, size)?
                }
                _ => Factors::new(),
            });
        }
        Ok(out)
    }

    /// Finds the sizes of factors in brackets from dimensions they have alone and from the others
    /// in their brackets.
    fn find_sizes(&mut self, terms: &[&'a str], shapes: &[Given<'_>], rest: usize) -> Result<()> {
        let mut compounds: SmallVec<[(&str, usize); 6]> = SmallVec::new();
        for (term, given) in terms.iter().zip(shapes) {
            let Given::Shape(shape) = given else { continue };
            for (item, &size) in self
                .assign(term, Some(shape.rank()), rest)?
                .into_iter()
                .zip(shape.dims())
            {
                match item {
                    Some(Item::Letter(c)) if self.size(c).is_none() => self.sizes.push((c, size)),
                    Some(Item::Compound(letters)) => compounds.push((letters, size)),
                    _ => {}
                }
            }
        }
        // A factor that is the only unknown one in its brackets follows from the others. Where
        // nothing tells, the first takes all.
        loop {
            let open = |(letters, _): &(&str, usize)| {
                letters.chars().filter(|c| self.size(*c).is_none()).count()
            };
            let next = compounds
                .iter()
                .copied()
                .filter(|c| open(c) > 0)
                .min_by_key(open);
            let Some((letters, size)) = next else {
                return Ok(());
            };
            let known: usize = letters.chars().filter_map(|c| self.size(c)).product();
            let unknown = letters.chars().find(|c| self.size(*c).is_none());
            self.sizes
                .extend(unknown.map(|c| (c, size.checked_div(known).unwrap_or(1))));
        }
    }

    fn size(&self, letter: char) -> Option<usize> {
        self.sizes
            .iter()
            .find(|(l, _)| *l == letter)
            .map(|(_, size)| *size)
    }

    /// The factors of a dimension in brackets.
    fn compound(&mut self, letters: &str, size: Option<usize>) -> Result<Factors> {
        let mut out = Factors::new();
        for c in letters.chars() {
            let known = self.rule.factor(c);
            let f = match (known, size) {
                (Some(f), _) => f,
                // Only results have it.
                (None, None) => return Ok(Factors::new()),
                (None, Some(_)) => {
                    let kind = match self.is_whole(c) {
                        true => FactorKind::Whole,
                        false => FactorKind::Pass,
                    };
                    let size = self.size(c).unwrap_or(1);
                    self.rule.factors.push(Factor {
                        letter: c,
                        size,
                        kind,
                    });
                    self.rule.factors.len() - 1
                }
            };
            out.push(f as u8);
        }
        let product: usize = out
            .iter()
            .map(|f| self.rule.factors[*f as usize].size)
            .product();
        match size {
            Some(size) if size != product => {
                let detail = format!(
                    "a dimension of size {size} is not ({letters}) of size {product} in '{}'",
                    self.text
                );
                Err(Error::shape("rule", None::<OperandType>, detail))
            }
            _ => Ok(out),
        }
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
            self.rule.factors.push(Factor {
                letter,
                size,
                kind: FactorKind::Pass,
            });
            return Ok([self.rule.factors.len() as u8 - 1].into_iter().collect());
        };
        let broadcasts = is_rest(letter);
        let factor = &mut self.rule.factors[f];
        if factor.size == size || self.made.contains(&letter) {
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
        let detail = format!(
            "factor {letter} of '{}' has size {} in one operand and {size} in another",
            self.text, factor.size
        );
        Err(Error::shape("rule", None::<OperandType>, detail))
    }

    fn clause(&mut self, clause: &str, numbers: &[Place], shapes: &[Given<'_>]) -> Result<()> {
        let mut words = clause.split_whitespace();
        let operands = |parser: &Self, words: std::str::SplitWhitespace<'_>| -> Result<u32> {
            let mut mask = 0;
            for word in words {
                if word == "all" {
                    return Ok((1 << parser.rule.inputs.len()) - 1);
                }
                let Ok(n) = word.parse::<usize>() else {
                    return parser.fail(format!("operand numbers, not '{word}'"));
                };
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
            "replicate" => {}
            "addend" => self.addends = Some(operands(self, rest)?),
            "reduce" => {
                let mut letters: SmallVec<[&str; 4]> = rest.collect();
                let reduction = letters.pop().unwrap_or("").parse()?;
                self.mark(&letters, FactorKind::Reduce(reduction))?;
            }
            "stats" => {
                let mut letters: SmallVec<[&str; 4]> = rest.collect();
                let count = letters.last().and_then(|w| w.parse().ok());
                if count.is_some() {
                    letters.pop();
                }
                self.mark(&letters, FactorKind::Stats(count.unwrap_or(2)))?;
            }
            "borders" => self.recipe(&mut words, shapes)?,
            "linear" | "monotone" | "through" => {
                const EXTREMES: &[Reduction] = &[Reduction::Max, Reduction::Min];
                let (reductions, operands) = match name {
                    "linear" => (
                        &[Reduction::Sum] as &'static [Reduction],
                        operands(self, rest)?,
                    ),
                    "monotone" => (EXTREMES, operands(self, rest)?),
                    _ => {
                        let name = words.next().unwrap_or("");
                        let all = Reduction::ALL_STATIC;
                        let reductions = match name {
                            "any" => all,
                            _ => {
                                let one: Reduction = name.parse()?;
                                all.iter()
                                    .position(|r| *r == one)
                                    .map_or(&all[..0], |i| &all[i..=i])
                            }
                        };
                        (reductions, operands(self, words)?)
                    }
                };
                if operands != 0 {
                    self.rule.through.push(Through {
                        operands,
                        reductions,
                    });
                }
            }
            _ => return self.fail(format!(
                "clauses replicate, reduce, stats, borders, linear, monotone, through, addend, not '{name}'"
            )),
        }
        Ok(())
    }

    /// A dimension that is made of the operands', each of which has it.
    fn recipe(
        &mut self,
        words: &mut std::str::SplitWhitespace<'_>,
        shapes: &[Given<'_>],
    ) -> Result<()> {
        let (letter, text) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
        let factor = letter.chars().next().and_then(|c| self.rule.factor(c));
        let size = |(dims, given): (&SmallVec<[Factors; 4]>, &Given<'_>)| {
            let dim = dims
                .iter()
                .position(|d| factor.is_some_and(|f| d[..] == [f as u8]))?;
            match given {
                Given::Shape(shape) => Some(shape[dim]),
                Given::Number | Given::Nothing => None,
            }
        };
        let sizes: Option<SmallVec<[usize; 2]>> =
            self.rule.inputs.iter().zip(shapes).map(size).collect();
        let (Some(factor), Some(sizes)) = (factor, sizes) else {
            return self.fail(format!("a dimension {letter} of every operand"));
        };
        let recipe = Recipe::parse(text, &sizes)?;
        self.rule.recipes.push((factor as u8, recipe));
        self.mark(&[letter], FactorKind::Borders)
    }

    fn mark(&mut self, letters: &[&str], kind: FactorKind) -> Result<()> {
        for letter in letters {
            for factor in &mut self.rule.factors {
                let rest = *letter == "..." && is_rest(factor.letter);
                if rest
                    || letter
                        .chars()
                        .next()
                        .is_some_and(|c| same_letter(c, factor.letter))
                {
                    factor.kind = kind;
                }
            }
        }
        Ok(())
    }

    /// Factors that pass must be in every result; reduced ones that every result names leave a
    /// dimension of size 1 there.
    fn finish(mut self) -> Result<Rule> {
        for f in 0..self.rule.factors.len() {
            let has = |dims: &SmallVec<[Factors; 4]>| dims.iter().any(|d| d.contains(&(f as u8)));
            match self.rule.factors[f].kind {
                FactorKind::Reduce(_) if !self.rule.outputs.iter().all(has) => {}
                FactorKind::Reduce(_) => {
                    for dims in &mut self.rule.outputs {
                        for dim in dims {
                            dim.retain(|other| *other as usize != f);
                        }
                    }
                }
                FactorKind::Stats(_) | FactorKind::Borders | FactorKind::Whole => {}
                FactorKind::Pass if self.rule.outputs.iter().all(has) => {}
                FactorKind::Pass => {
                    let letter = self.rule.factors[f].letter;
                    return self.fail(format!(
                        "a `reduce` or `replicate` clause for {letter}, which a result lacks"
                    ));
                }
            }
        }
        self.rule.addends = self.addends.unwrap_or(self.rule.usual_addends());
        Ok(self.rule)
    }
}

/// Whether a factor belongs to a letter: the dimensions of a bound letter are told apart by a
/// multiple of 0x400.
fn same_letter(letter: char, factor: char) -> bool {
    letter == factor || (factor as u32 >= 0x400 && factor as u32 % 0x400 == letter as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn factors(
        text: &str,
        shapes: &[&[usize]],
        sizes: &[(char, usize)],
    ) -> Result<Vec<(char, usize)>> {
        let shapes: Vec<Shape> = shapes.iter().map(|s| Shape::from(*s)).collect();
        let given: Vec<Given<'_>> = shapes.iter().map(Given::Shape).collect();
        Ok(Rule::with_sizes(text, &given, &[], sizes)?
            .factors
            .iter()
            .map(|f| (f.letter, f.size))
            .collect())
    }

    #[test]
    fn sizes_in_brackets_follow_from_what_is_known() {
        // The key heads say how many query heads share one; the channels of a weight and the groups
        // say the rest.
        assert_eq!(
            factors("(hg)s, ht -> (hg)s ; replicate t", &[&[6, 5], &[2, 4]], &[]).unwrap(),
            [('h', 2), ('g', 3), ('s', 5)]
        );
        let grouped = "n(gc), (go)c -> n(go) ; reduce c sum";
        assert_eq!(
            factors(grouped, &[&[7, 6], &[8, 3]], &[]).unwrap(),
            [('n', 7), ('g', 2), ('c', 3), ('o', 4)]
        );
        assert_eq!(
            factors("(gc) -> (gc)", &[&[6]], &[]).unwrap(),
            [('g', 6), ('c', 1)],
            "nothing tells"
        );
        assert_eq!(
            factors("(gc), c -> (gc)", &[&[0], &[0]], &[]).unwrap(),
            [('g', 1), ('c', 0)]
        );
    }

    #[test]
    fn brackets_that_do_not_fit_are_refused() {
        assert!(matches!(
            factors("(gc) -> (gc)", &[&[6]], &[('g', 4)]),
            Err(Error::Shape { .. })
        ));
        for text in ["(gc -> gc", "() -> ", "(g1) -> g", "(...) -> ..."] {
            assert!(
                matches!(factors(text, &[&[6]], &[]), Err(Error::Parse { .. })),
                "{text}"
            );
        }
    }

    #[test]
    fn a_factor_that_some_results_lack_is_cut_in_the_others() {
        let shape = Shape::from([4, 6]);
        let rule = Rule::new("mk -> mk, m ; reduce k sum", &[Given::Shape(&shape)], &[]).unwrap();
        assert_eq!(
            rule.outputs
                .iter()
                .map(|dims| dims.iter().map(|d| d.len()).sum::<usize>())
                .collect::<Vec<_>>(),
            [2, 1]
        );
        let kept = Rule::new("mk -> mk ; reduce k sum", &[Given::Shape(&shape)], &[]).unwrap();
        assert_eq!(
            kept.outputs[0][1].len(),
            0,
            "a dimension of size 1 stays in its place"
        );
    }

    #[test]
    fn a_bound_letter_alone_is_all_of_an_operand() {
        let (x, w) = (Shape::from([2, 3, 4]), Shape::from([3, 4]));
        let rule = Rule::new(
            "...r, r -> ...r",
            &[Given::Shape(&x), Given::Shape(&w)],
            &[('r', &[1, 2])],
        )
        .unwrap();
        assert_eq!(rule.inputs[0][1..], rule.inputs[1][..]);
    }
}

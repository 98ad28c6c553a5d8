//! Sums of products, written with a letter for each dimension.
//!
//! ```
//! # use anymesh_core::Tensor;
//! # let device = anymesh_backend_cpu::device();
//! let a = Tensor::from_slice(&[1f32, 2., 3., 4.], [2, 2], &device)?;
//! assert_eq!(Tensor::einsum("ij,jk->ik", &[&a, &a])?.to_vec::<f32>()?, [7., 10., 15., 22.]);
//! assert_eq!(Tensor::einsum("ii", &[&a])?.to_vec::<f32>()?, [5.]); // the trace
//! assert_eq!(Tensor::einsum("...j->...", &[&a])?.to_vec::<f32>()?, [3., 7.]);
//! # Ok::<(), anymesh_core::Error>(())
//! ```

use super::{
    OpInfo, RuleForm,
    expr::Expr,
    index::{listed, nth},
    matmul::number_type,
};
use crate::{
    Dims, Error, Layout, Result, Shape, Tensor,
    backend::Affine,
    grad::{Back, record1},
    spmd::{Call, Rule, built::Data, plain, rule::Operands},
};
use smallvec::smallvec;

/// The ops of this file. The rule of an einsum is the equation itself.
pub const OPS: &[OpInfo] = &[EINSUM];

const EINSUM: OpInfo = OpInfo::new(OP, RuleForm::built("equation", rule)).runs(&["cast"]);

const OP: &str = "einsum";

/// A dimension's name: a letter, or the place of a dimension that `...` stands for, counted from
/// the right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Label {
    Letter(char),
    Ellipsis(usize),
}

impl Label {
    /// A number for it: letters are positive.
    fn number(self) -> i64 {
        match self {
            Label::Letter(c) => i64::from(u32::from(c)),
            Label::Ellipsis(i) => -1 - i as i64,
        }
    }
}

impl std::fmt::Display for Label {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Label::Letter(c) => write!(f, "dimension '{c}'"),
            Label::Ellipsis(i) => write!(f, "dimension {} from the right of '...'", i + 1),
        }
    }
}

/// A tensor whose dimensions have names, each at most once.
#[derive(Clone, Debug)]
struct Named {
    tensor: Tensor,
    labels: Vec<Label>,
}

impl Named {
    fn axes_of(&self, labels: &[Label]) -> Vec<i64> {
        labels
            .iter()
            .filter_map(|l| self.labels.iter().position(|m| m == l))
            .map(|i| i as i64)
            .collect()
    }

    /// Sums over every label that `keep` refuses.
    fn reduce(self, keep: impl Fn(&Label) -> bool) -> Result<Named> {
        let gone: Vec<i64> = (0..self.labels.len())
            .filter(|i| !keep(&self.labels[*i]))
            .map(|i| i as i64)
            .collect();
        if gone.is_empty() {
            return Ok(self);
        }
        // A sum of u8 counts in i32; products go on in the common dtype.
        let tensor = self.tensor.sum(&gone, false)?.cast(self.tensor.dtype())?;
        Ok(Named {
            tensor,
            labels: self.labels.into_iter().filter(|l| keep(l)).collect(),
        })
    }

    /// The dimensions in the order of `labels` (all of this tensor's), merged into groups of the
    /// given lengths.
    fn grouped(&self, labels: &[Label], groups: [usize; 3]) -> Result<Tensor> {
        let ordered = self.tensor.permute(&self.axes_of(labels))?;
        let mut dims = Dims::new();
        let mut rest = ordered.dims();
        for n in groups {
            let (group, others) = rest.split_at(n);
            dims.push(Shape::from(group).checked_numel(OP)?);
            rest = others;
        }
        ordered.reshape(dims)
    }
}

fn bad_text(text: &str, expected: impl Into<String>) -> Error {
    Error::Parse {
        what: "einsum equation",
        text: text.into(),
        expected: expected.into(),
    }
}

/// One term: letters, and where `...` stood among them.
struct Term {
    letters: Vec<char>,
    ellipsis: Option<usize>,
}

fn parse_term(equation: &str, term: &str) -> Result<Term> {
    let compact: String = term.chars().filter(|c| !c.is_whitespace()).collect();
    let (before, after, ellipsis) = match compact.split_once("...") {
        Some((before, after)) => (before.to_string(), after.to_string(), true),
        None => (compact, String::new(), false),
    };
    let letters: Vec<char> = before.chars().chain(after.chars()).collect();
    if !letters.iter().all(char::is_ascii_alphabetic) {
        return Err(bad_text(
            equation,
            "letters a to z and A to Z and at most one '...' in each term, terms separated by ',', the result after '->'",
        ));
    }
    Ok(Term {
        letters,
        ellipsis: ellipsis.then_some(before.len()),
    })
}

impl Term {
    /// The labels of a tensor of `rank` dimensions, left to right.
    fn labels(&self, rank: usize) -> Option<Vec<Label>> {
        let hidden = rank.checked_sub(self.letters.len())?;
        if hidden > 0 && self.ellipsis.is_none() {
            return None;
        }
        let at = self.ellipsis.unwrap_or(0);
        let letters = |range: &[char]| range.iter().map(|c| Label::Letter(*c)).collect::<Vec<_>>();
        let dots = (0..hidden).rev().map(Label::Ellipsis).collect();
        Some(
            [
                letters(&self.letters[..at]),
                dots,
                letters(&self.letters[at..]),
            ]
            .concat(),
        )
    }
}

/// The label of each dimension. Dimensions with the same label must have the same size.
fn labels(equation: &str, term: &Term, tensor: &Tensor) -> Result<Vec<Label>> {
    let labels = term.labels(tensor.rank()).ok_or_else(|| {
        bad_text(
            equation,
            format!(
                "a term with one letter for each of the {} dimensions of {}, or '...'",
                tensor.rank(),
                tensor.type_string()
            ),
        )
    })?;
    for (d, label) in labels.iter().enumerate() {
        let (size, first) = (
            tensor.dims()[d],
            labels
                .iter()
                .position(|l| l == label)
                .map_or(0, |first| tensor.dims()[first]),
        );
        if first != size {
            return Err(Error::shape(
                OP,
                [tensor],
                format!(
                    "'{equation}': {label} is {first} and {size} in {}",
                    tensor.type_string()
                ),
            ));
        }
    }
    Ok(labels)
}

/// A plain tensor with these labels; one that occurs twice becomes one dimension, its diagonal (a
/// view).
fn name(labels: &[Label], tensor: &Tensor) -> Named {
    let old = tensor.layout();
    let mut named: Vec<Label> = vec![];
    let (mut dims, mut strides) = (Dims::new(), Dims::<isize>::new());
    for (d, label) in labels.iter().enumerate() {
        match named.iter().position(|l| l == label) {
            Some(first) => strides[first] += old.strides[d],
            None => {
                named.push(*label);
                dims.push(old.shape[d]);
                strides.push(old.strides[d]);
            }
        }
    }
    Named {
        tensor: tensor.viewed(Layout {
            shape: dims.into(),
            strides,
            offset: old.offset,
        }),
        labels: named,
    }
}

/// The labels of the result: as written after `->`, or the hidden dimensions and then the letters
/// that occur once, in alphabetical order.
fn result_labels(
    equation: &str,
    output: Option<&str>,
    terms: &[Term],
    operands: &[Vec<Label>],
) -> Result<Vec<Label>> {
    let hidden = operands
        .iter()
        .flatten()
        .filter_map(|l| {
            if let Label::Ellipsis(i) = l {
                Some(i + 1)
            } else {
                None
            }
        })
        .max()
        .unwrap_or(0);
    let Some(output) = output else {
        let mut letters: Vec<char> = terms.iter().flat_map(|t| &t.letters).copied().collect();
        letters.sort_unstable();
        let once = letters
            .iter()
            .filter(|c| letters.iter().filter(|d| d == c).count() == 1)
            .map(|c| Label::Letter(*c));
        return Ok((0..hidden).rev().map(Label::Ellipsis).chain(once).collect());
    };
    let term = parse_term(equation, output)?;
    let rank = term.letters.len() + if term.ellipsis.is_some() { hidden } else { 0 };
    let labels = term.labels(rank).unwrap_or_default();
    for (i, label) in labels.iter().enumerate() {
        if labels[..i].contains(label) || !operands.iter().any(|o| o.contains(label)) {
            return Err(bad_text(
                equation,
                "a result whose letters each occur once, and in some operand",
            ));
        }
    }
    Ok(labels)
}

/// The size of each label: hidden dimensions of size 1 broadcast, letters must agree.
fn sizes(
    equation: &str,
    labels: &[Vec<Label>],
    tensors: &[&Tensor],
) -> Result<Vec<(Label, usize)>> {
    let mut sizes: Vec<(Label, usize)> = vec![];
    for (labels, tensor) in labels.iter().zip(tensors) {
        for (label, &size) in labels.iter().zip(tensor.dims()) {
            match sizes.iter_mut().find(|(l, _)| l == label) {
                None => sizes.push((*label, size)),
                Some((_, known)) if *known == size => {}
                Some((Label::Ellipsis(_), known)) if *known == 1 => *known = size,
                Some((Label::Ellipsis(_), _)) if size == 1 => {}
                Some((_, known)) => {
                    return Err(Error::shape(
                        OP,
                        tensors.iter().copied(),
                        format!(
                            "'{equation}': {label} is {known} in one operand and {size} in another"
                        ),
                    ));
                }
            }
        }
    }
    Ok(sizes)
}

/// The rule of an equation, whose labels, those of the operands and then those of the result, are
/// the numbers of the call: labels are factors, those that the result lacks are summed, and the sum
/// is linear in every operand. Dimensions of which the diagonal is taken are whole.
fn rule(operands: &Operands<'_>, data: &[i64]) -> Result<Rule> {
    let mut terms: Vec<&[i64]> = vec![];
    let mut result = data;
    for i in 0..operands.count() {
        let (term, rest) = result.split_at(operands.rank(i));
        terms.push(term);
        result = rest;
    }
    let mut labels: Vec<i64> = vec![];
    // Labels of which some operand has more than one element.
    let mut longer: Vec<i64> = vec![];
    for (i, term) in terms.iter().enumerate() {
        for (d, label) in term.iter().enumerate() {
            if !labels.contains(label) {
                labels.push(*label);
            }
            if !operands.is_one(i, d) {
                longer.push(*label);
            }
        }
    }
    let letter = |label: &i64| labels.iter().position(|l| l == label).map_or('1', nth);
    let spell = |(i, term): (usize, &&[i64])| -> String {
        let dim = |(d, label): (usize, &i64)| {
            if operands.is_one(i, d) && longer.contains(label) {
                '1'
            } else {
                letter(label)
            }
        };
        term.iter().enumerate().map(dim).collect()
    };
    let inputs: Vec<String> = terms.iter().enumerate().map(spell).collect();
    let of = |keep: &dyn Fn(&i64) -> bool| {
        listed(
            &labels
                .iter()
                .filter(|l| keep(l))
                .map(letter)
                .collect::<String>(),
        )
    };
    let summed = of(&|label| !result.contains(label));
    let diagonals = of(&|label| {
        let twice = |term: &&[i64]| term.iter().filter(|l| *l == label).count() > 1;
        terms.iter().any(twice)
    });
    let linear: String = (0..terms.len()).map(|i| format!(" ; linear {i}")).collect();
    let output: String = result.iter().map(letter).collect();
    operands.read(
        &format!(
            "{} -> {output} ; reduce{summed} sum ; replicate{diagonals}{linear}",
            inputs.join(", ")
        ),
        &[],
    )
}

/// Multiplies two operands and sums over what only they share. Labels for which `needed` holds
/// stay.
fn contract(left: Named, right: Named, needed: impl Fn(&Label) -> bool) -> Result<Named> {
    let shared = |l: &Label| left.labels.contains(l) && right.labels.contains(l);
    let pick = |labels: &[Label], f: &dyn Fn(&Label) -> bool| {
        labels.iter().copied().filter(|l| f(l)).collect::<Vec<_>>()
    };
    let batch = pick(&left.labels, &|l| shared(l) && needed(l));
    let summed = pick(&left.labels, &|l| shared(l) && !needed(l));
    let rows = pick(&left.labels, &|l| !shared(l));
    let columns = pick(&right.labels, &|l| !shared(l));
    let a = left.grouped(
        &[&batch[..], &rows, &summed].concat(),
        [batch.len(), rows.len(), summed.len()],
    )?;
    let b = right.grouped(
        &[&batch[..], &summed, &columns].concat(),
        [batch.len(), summed.len(), columns.len()],
    )?;
    // Nothing to sum: a plain product does less work than matrices with one column.
    let product = if summed.is_empty() {
        a.mul(&b)?
    } else {
        a.bmm(&b)?
    };
    let sizes = |labels: &[Label], of: &Named| -> Dims {
        of.axes_of(labels)
            .iter()
            .map(|i| of.tensor.shape()[*i as usize])
            .collect()
    };
    let dims: Dims = [
        sizes(&batch, &left),
        sizes(&rows, &left),
        sizes(&columns, &right),
    ]
    .into_iter()
    .flatten()
    .collect();
    Ok(Named {
        tensor: product.reshape(dims)?,
        labels: [batch, rows, columns].concat(),
    })
}

impl Tensor {
    /// The Einstein sum of any number of tensors. Each term of `equation` names the dimensions of
    /// one operand; letters that the result does not have are summed over. A letter twice in one
    /// term takes the diagonal; `...` stands for any further dimensions, which broadcast. Without
    /// `->` the result has the letters that occur once, in alphabetical order. Operands are
    /// contracted two at a time from left to right.
    #[track_caller]
    pub fn einsum(equation: &str, tensors: &[&Tensor]) -> Result<Tensor> {
        let (inputs, output) = match equation.split_once("->") {
            Some((inputs, output)) => (inputs, Some(output)),
            None => (equation, None),
        };
        let terms = inputs
            .split(',')
            .map(|term| parse_term(equation, term))
            .collect::<Result<Vec<_>>>()?;
        if terms.len() != tensors.len() {
            return Err(bad_text(
                equation,
                format!("{} terms, one for each operand", tensors.len()),
            ));
        }
        plain(OP, tensors)?;
        let dtype = number_type(OP, tensors)?;
        let cast = tensors
            .iter()
            .map(|t| t.cast(dtype))
            .collect::<Result<Vec<_>>>()?;
        let tensors: Vec<&Tensor> = cast.iter().collect();
        let labels = terms
            .iter()
            .zip(&tensors)
            .map(|(term, tensor)| labels(equation, term, tensor))
            .collect::<Result<Vec<_>>>()?;
        let result = result_labels(equation, output, &terms, &labels)?;
        Terms { labels, result }.run(equation, &tensors)
    }
}

/// A sum of products: the labels of the operands' dimensions and of the result's.
#[derive(Clone, Debug)]
struct Terms {
    labels: Vec<Vec<Label>>,
    result: Vec<Label>,
}

impl Terms {
    /// The sum over operands of one dtype; the equation is for messages.
    #[track_caller]
    fn run(&self, equation: &str, tensors: &[&Tensor]) -> Result<Tensor> {
        record1(
            OP,
            tensors,
            || self.value(equation, tensors),
            |_| {
                // The gradient of an operand needs the others.
                let needed = |i: usize| {
                    tensors
                        .iter()
                        .enumerate()
                        .any(|(j, t)| j != i && t.requires_grad())
                };
                let kept: Vec<Option<Tensor>> = tensors
                    .iter()
                    .enumerate()
                    .map(|(i, t)| needed(i).then(|| t.kept()))
                    .collect();
                let shapes: Vec<Shape> = tensors.iter().map(|t| t.shape().clone()).collect();
                let (terms, equation) = (self.clone(), equation.to_string());
                Ok(move |b: &Back<'_>| {
                    let g = b.grad()?;
                    (0..shapes.len())
                        .map(|i| b.wanted(i, || terms.pull(&equation, i, &shapes[i], &kept, g)))
                        .collect()
                })
            },
        )
    }

    /// The gradient of operand `i`: a sum of products again, of the result's gradient and the other
    /// operands.
    #[track_caller]
    fn pull(
        &self,
        equation: &str,
        i: usize,
        shape: &Shape,
        kept: &[Option<Tensor>],
        g: &Tensor,
    ) -> Result<Tensor> {
        let own = &self.labels[i];
        let mut labels = vec![self.result.clone()];
        let mut tensors = vec![g];
        for (j, (term, t)) in self.labels.iter().zip(kept).enumerate() {
            if let (Some(t), true) = (t, j != i) {
                labels.push(term.clone());
                tensors.push(t);
            }
        }
        let sizes = sizes(equation, &labels, &tensors)?;
        let mut result: Vec<Label> = vec![];
        // Each dimension of the operand once, of size 1 where it was broadcast, or summed without
        // any other having it.
        let mut dims = Dims::new();
        for (d, label) in own.iter().enumerate() {
            let there = sizes
                .iter()
                .any(|(l, size)| l == label && *size == shape[d]);
            if there && !result.contains(label) {
                result.push(*label);
                dims.push(shape[d]);
            } else {
                dims.push(1);
            }
        }
        let out = Terms { labels, result }
            .run(equation, &tensors)?
            .reshape(dims)?
            .expand(shape)?;
        on_diagonals(own, out)
    }

    #[track_caller]
    fn value(&self, equation: &str, tensors: &[&Tensor]) -> Result<Tensor> {
        let Self { labels, result } = self;
        if let ([labels], [only]) = (&labels[..], tensors)
            && labels == result
        {
            return Ok(only.detach());
        }
        let sizes = sizes(equation, labels, tensors)?;
        if !plain(OP, tensors)? {
            let data: Data = (labels.iter().flatten())
                .chain(result)
                .map(|label| label.number())
                .collect();
            return Call::of(&EINSUM, tensors)
                .data(&data)
                .run1(|l| self.value(equation, &l.inputs.iter().collect::<Vec<_>>()));
        }
        let mut operands: Vec<Named> = labels
            .iter()
            .zip(tensors)
            .map(|(labels, tensor)| name(labels, tensor))
            .collect();
        for operand in &mut operands {
            let dims: Dims = operand
                .labels
                .iter()
                .filter_map(|label| {
                    sizes
                        .iter()
                        .find(|(l, _)| l == label)
                        .map(|(_, size)| *size)
                })
                .collect();
            operand.tensor = operand.tensor.expand(dims)?;
        }

        let mut rest = operands.into_iter();
        let Some(mut done) = rest.next() else {
            return Err(bad_text(equation, "at least one term"));
        };
        loop {
            let later: Vec<Label> = rest
                .as_slice()
                .iter()
                .flat_map(|o| o.labels.iter().copied())
                .collect();
            done = done.reduce(|l| result.contains(l) || later.contains(l))?;
            let Some(next) = rest.next() else { break };
            let later: Vec<Label> = rest
                .as_slice()
                .iter()
                .flat_map(|o| o.labels.iter().copied())
                .collect();
            let needed = |l: &Label| result.contains(l) || later.contains(l);
            let next = next.reduce(|l| needed(l) || done.labels.contains(l))?;
            done = contract(done, next, needed)?;
        }
        done.tensor.permute(&done.axes_of(result))
    }
}

/// Zero but where dimensions of one label have one index.
#[track_caller]
fn on_diagonals(labels: &[Label], x: Tensor) -> Result<Tensor> {
    let mut out = x;
    for (d, label) in labels.iter().enumerate() {
        let Some(first) = labels[..d].iter().position(|l| l == label) else {
            continue;
        };
        let mut apart = Affine {
            offset: 0,
            strides: smallvec![0; labels.len()],
        };
        (apart.strides[first], apart.strides[d]) = (1, -1);
        out = Expr::new(OP, &[&out]).index(apart).map(out.dtype(), |a| {
            a.i[0].eq(0).select(a.x[0], a.x[0].lit(0.0))
        })?;
    }
    Ok(out)
}

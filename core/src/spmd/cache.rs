//! What was solved before.
//!
//! A call is looked up by what its rule is made of: the text or the function, what the call adds to
//! it, and each operand's sharding, rank, dimensions of size 1 and other forms. If the solution moves nothing, it
//! holds for all sizes. Otherwise bytes decide, and a second table knows the sizes too. Debug builds
//! make the rule of every call that is found anew, and compare.

use super::{
    Call,
    call::{AtHand, Form},
    info::{Build, RuleForm},
    rule::{FactorKind, Factors, Rule, Wanted},
    solve::{self, Assigned, Operand, Solution},
};
use crate::{
    DType, Error, Result, Shape, Sharding, Tensor,
    reshard::{self, Objective, ValidPlan},
    table::Table,
};
use smallvec::SmallVec;
use std::{
    hash::{Hash, Hasher},
    rc::Rc,
};

/// A solved call.
#[derive(Debug)]
pub(crate) struct Solved {
    pub(crate) solution: Solution,
    /// Each factor's letter, and where its size is.
    pub(crate) factors: SmallVec<[(char, Size); 8]>,
    outputs: SmallVec<[SmallVec<[Factors; 4]>; 2]>,
    /// How each operand gets where it must be; none where nothing is sent.
    pub(crate) plans: SmallVec<[Option<Rc<ValidPlan>>; 3]>,
    pub(crate) rule: Rule,
    /// The same number for the same solution, everywhere.
    pub(crate) decision: u64,
}

/// Where the size of a factor is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Size {
    /// It is dimension `.1` of operand `.0`.
    Of(usize, usize),
    /// It is a part of a dimension; the rule depends on it.
    Fixed(usize),
}

impl Size {
    pub(crate) fn size(self, operands: &[Tensor]) -> usize {
        match self {
            Size::Of(operand, dim) => operands[operand].dims()[dim],
            Size::Fixed(size) => size,
        }
    }
}

impl Solved {
    fn new(
        rule: Rule,
        mut solution: Solution,
        operands: &[&Tensor],
        held: &AtHand,
    ) -> Result<Self> {
        let size = |f: usize| match rule.alone(f) {
            Some((operand, dim)) => Size::Of(operand, dim),
            None => Size::Fixed(rule.factors[f].size),
        };
        let factors = (0..rule.factors.len())
            .map(|f| (rule.factors[f].letter, size(f)))
            .collect();
        let plan = |i: usize| {
            let (x, to) = (operands[i], &solution.inputs[i]);
            let from = solution.source(i, x.sharding(), &held[i]);
            if solution.free || from == to {
                return Ok(None);
            }
            reshard::known(x.mesh(), x.shape(), x.dtype(), from, to, Objective::Bytes).map(Some)
        };
        let plans: SmallVec<[Option<Rc<ValidPlan>>; 3]> =
            (0..operands.len()).map(plan).collect::<Result<_>>()?;
        let decision = (0..operands.len()).fold(solution.digest(), |digest, i| {
            match usize::from(solution.sources[i]) {
                0 => digest.word(0),
                form => digest.word(1).sharding(&held[i][form - 1]),
            }
        });
        let decision = decision.0;
        solution.bytes =
            solution.statistics + plans.iter().flatten().map(|p| p.recv_bytes).sum::<u64>();
        Ok(Self {
            solution,
            factors,
            outputs: rule.outputs.clone(),
            plans,
            rule,
            decision,
        })
    }

    /// The rule with the sizes of these operands: a solution that moves nothing holds for all sizes.
    pub(super) fn rule_for(&self, operands: &[&Tensor]) -> Rule {
        self.rule_of(|operand| operands[operand].shape())
    }

    /// The same, from the shapes alone.
    pub(super) fn rule_of<'s>(&self, shape: impl Fn(usize) -> &'s Shape) -> Rule {
        let mut rule = self.rule.clone();
        for (factor, (_, size)) in rule.factors.iter_mut().zip(&self.factors) {
            if let Size::Of(operand, dim) = size {
                factor.size = shape(*operand)[*dim];
            }
        }
        rule
    }

    /// The global shape of a result: sizes of factors, and of what is not cut as one rank has it.
    pub(crate) fn output_shape(
        &self,
        op: &'static str,
        output: usize,
        local: &Shape,
        operands: &[Tensor],
    ) -> Result<Shape> {
        let dims = &self.outputs[output];
        if dims.len() != local.rank() {
            return Err(Error::shape(
                op,
                [local],
                format!(
                    "result {output} has shape {local}, its rule has {} dimensions",
                    dims.len()
                ),
            ));
        }
        // A dimension that is made of others is whole where the local step makes it.
        let made = |f: &u8| self.rule.factors[*f as usize].kind == FactorKind::Borders;
        let size = |(d, factors): (usize, &Factors)| match factors.iter().all(made) {
            true => local[d],
            false => factors
                .iter()
                .map(|f| self.factors[*f as usize].1.size(operands))
                .product(),
        };
        Ok(dims.iter().enumerate().map(size).collect())
    }
}

/// What a rule is made from, compared by where it is in memory: what is there never changes.
#[derive(Clone)]
enum Maker {
    Text(&'static str),
    /// Kept, so that no other text comes to lie there.
    User(Rc<str>),
    Ranks(usize),
    Sizes(usize),
}

impl Maker {
    fn of(call: &Call<'_>) -> Result<Self> {
        Ok(match call.form {
            Form::Text(text) => Maker::User(interned(text)),
            Form::Info(info) => match info.rule {
                RuleForm::Text(text) => Maker::Text(text),
                RuleForm::Built(built) => match built.build {
                    Build::Ranks(build) => Maker::Ranks(build as usize),
                    Build::Sizes(build) => Maker::Sizes(build as usize),
                },
                rule => match rule.texts().get(call.variant) {
                    Some(text) => Maker::Text(text),
                    None => {
                        return Err(call.no_variant(info));
                    }
                },
            },
        })
    }

    fn place(&self) -> (usize, usize) {
        let text = |text: &str| (text.as_ptr() as usize, text.len());
        match self {
            Maker::Text(t) => text(t),
            Maker::User(t) => text(t),
            Maker::Ranks(function) => (*function, 0),
            Maker::Sizes(function) => (*function, 1),
        }
    }

    /// Whether the rule depends on sizes other than 1. A user's operands are not checked before, so
    /// every new combination of sizes must be.
    fn reads_sizes(&self) -> bool {
        match self {
            Maker::Text(text) => text.contains('('),
            Maker::User(_) | Maker::Sizes(_) => true,
            Maker::Ranks(_) => false,
        }
    }
}

impl PartialEq for Maker {
    fn eq(&self, other: &Self) -> bool {
        self.place() == other.place()
    }
}

impl Eq for Maker {}

impl Hash for Maker {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.place().hash(state);
    }
}

/// A user's text, the same one for equal texts.
fn interned(text: &str) -> Rc<str> {
    thread_local! {
        static TEXTS: Table<Rc<str>, Rc<str>> = Table::default();
    }
    TEXTS.with(|texts| {
        texts.get(text).unwrap_or_else(|| {
            let kept: Rc<str> = text.into();
            texts.insert(kept.clone(), kept.clone());
            kept
        })
    })
}

/// Dimensions that the mask of an operand has room for.
const MASKED: usize = 32;

#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    maker: Maker,
    mesh: u64,
    /// Missing operands, numbers, and whether clauses on partial values hold.
    terms: (u32, u32, bool),
    /// Bound letters, sizes of factors and numbers of the call, each list with its length.
    data: SmallVec<[i64; 10]>,
    /// Sharding, rank, and a bit for each dimension of size 1.
    operands: SmallVec<[(Sharding, usize, u32); 3]>,
    /// The other shardings in which operands are at hand, each with the operand's number.
    held: Vec<(usize, Sharding)>,
    /// Where results are wanted.
    wanted: Vec<Option<Wanted>>,
    /// What was decided before.
    assigned: Option<Rc<Assigned>>,
    /// The shapes, one after the other, where the rule depends on them.
    shapes: SmallVec<[usize; 8]>,
}

impl Key {
    fn new(call: &Call<'_>, held: &AtHand, assigned: Option<&Rc<Assigned>>) -> Result<Self> {
        let ones = |t: &Tensor| {
            t.dims()
                .iter()
                .take(MASKED)
                .enumerate()
                .fold(0, |mask, (d, n)| mask | u32::from(*n == 1) << d)
        };
        let mut data = SmallVec::new();
        data.push((call.binds.len() << 16 | call.sizes.len()) as i64);
        for (letter, axes) in &call.binds {
            data.push((*letter as i64) << 32 | axes.len() as i64);
            data.extend(axes.iter().map(|a| *a as i64));
        }
        for (letter, size) in &call.sizes {
            data.extend([*letter as i64, *size as i64]);
        }
        data.extend_from_slice(call.data);
        let maker = Maker::of(call)?;
        let mut shapes = SmallVec::new();
        if maker.reads_sizes() || call.inputs.iter().any(|t| t.rank() > MASKED) {
            shapes.extend(call.inputs.iter().flat_map(|t| t.dims().iter().copied()));
        }
        Ok(Self {
            maker,
            mesh: call.inputs[0].mesh().key(),
            terms: (call.missing, call.numbers, call.partials),
            data,
            operands: call
                .inputs
                .iter()
                .map(|t| (t.sharding().clone(), t.rank(), ones(t)))
                .collect(),
            held: held
                .iter()
                .enumerate()
                .flat_map(|(i, forms)| forms.iter().map(move |form| (i, form.clone())))
                .collect(),
            wanted: call.wanted.clone(),
            assigned: assigned.cloned(),
            shapes,
        })
    }
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct SizedKey {
    key: Key,
    sizes: SmallVec<[usize; 12]>,
    dtypes: SmallVec<[DType; 3]>,
}

thread_local! {
    /// `None` where the sizes decide.
    static BY_PATTERN: Table<Key, Option<Rc<Solved>>> = Table::default();
    static BY_SIZE: Table<SizedKey, Rc<Solved>> = Table::default();
}

/// The solution for a call, from the tables or from the solver.
pub(super) fn find(call: &Call<'_>, held: &AtHand) -> Result<Rc<Solved>> {
    let best = || no_fit(call, "no assignment fits it");
    found(call, held, None)?.ok_or_else(best)
}

/// The solution that was decided before; `None` where it does not fit the call.
pub(super) fn find_assigned(
    call: &Call<'_>,
    held: &AtHand,
    assigned: &Rc<Assigned>,
) -> Result<Option<Rc<Solved>>> {
    found(call, held, Some(assigned))
}

fn no_fit(call: &Call<'_>, detail: &str) -> Error {
    Error::Rule {
        op: call.op,
        rule: call
            .rule()
            .map_or_else(|e| e.to_string(), |r| r.to_string()),
        detail: detail.into(),
    }
}

fn found(
    call: &Call<'_>,
    held: &AtHand,
    assigned: Option<&Rc<Assigned>>,
) -> Result<Option<Rc<Solved>>> {
    let key = Key::new(call, held, assigned)?;
    let found = BY_PATTERN.with(|table| table.get(&key));
    if let Some(Some(solved)) = found {
        return solved.checked(call).map(Some);
    }
    let sizes = call
        .inputs
        .iter()
        .flat_map(|t| t.dims().iter().copied())
        .collect();
    let sized = SizedKey {
        key,
        sizes,
        dtypes: call.inputs.iter().map(|t| t.dtype()).collect(),
    };
    if found.is_some()
        && let Some(solved) = BY_SIZE.with(|table| table.get(&sized))
    {
        return solved.checked(call).map(Some);
    }
    let rule = call.rule()?;
    let operands: SmallVec<[Operand<'_>; 3]> = call
        .inputs
        .iter()
        .zip(held)
        .map(|(t, held)| Operand::of(t, held))
        .collect();
    let mesh = call.inputs[0].mesh();
    let solution = match assigned {
        None => solve::solve(mesh, &rule, &operands)?,
        Some(given) => match solve::assigned(mesh, &rule, &operands, given)? {
            Some(solution) => solution,
            None => return Ok(None),
        },
    };
    let free = solution.free;
    let solved = Rc::new(Solved::new(rule, solution, call.inputs, held)?);
    BY_PATTERN.with(|table| table.insert(sized.key.clone(), free.then(|| solved.clone())));
    if !free {
        BY_SIZE.with(|table| table.insert(sized, solved.clone()));
    }
    Ok(Some(solved))
}

impl Solved {
    /// What was found in a table; in debug builds, if the call has that rule.
    fn checked(self: Rc<Self>, call: &Call<'_>) -> Result<Rc<Self>> {
        if cfg!(debug_assertions) {
            let rule = call.rule()?;
            if rule != self.rule_for(call.inputs) {
                return Err(Error::Rule {
                    op: call.op,
                    rule: rule.to_string(),
                    detail: format!(
                        "the call was solved by '{}': the table of solved calls took one for the other",
                        self.rule
                    ),
                });
            }
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Mesh, meta, spmd::OpInfo};

    #[test]
    fn a_call_that_was_taken_for_another_is_an_error_in_debug_builds() {
        const ROWS: OpInfo = OpInfo::new("rows", RuleForm::Text("mk -> m ; reduce k sum"));
        const COLUMNS: OpInfo = OpInfo::new("columns", RuleForm::Text("mk -> k ; reduce m sum"));
        let mesh = Mesh::new("a=2", &meta()).expect("a mesh");
        let x = |rows: usize| Tensor::ones([rows, 6], DType::F32, &mesh).expect("a tensor");
        let (small, large) = (x(4), x(8));
        let nothing: AtHand = smallvec::smallvec![Vec::new()];
        let solved = find(&Call::of(&ROWS, &[&small]), &nothing).expect("a solution");
        let again = find(&Call::of(&ROWS, &[&large]), &nothing).expect("a solution");
        assert!(Rc::ptr_eq(&solved, &again), "it holds for every size");
        let wrong = solved.checked(&Call::of(&COLUMNS, &[&small]));
        assert_eq!(wrong.is_err(), cfg!(debug_assertions));
    }
}

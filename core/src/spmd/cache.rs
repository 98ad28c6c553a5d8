//! What was solved before.
//!
//! An op is looked up by what its rule reads: the mesh, its attributes, and each operand's
//! sharding, rank and broadcast dimensions. If the solution moves nothing, it holds for all sizes.
//! Otherwise bytes decide, and a second table knows the sizes too. Each thread has its own tables,
//! so that no op waits for a lock.

use super::{
    Call,
    rule::{Factors, Rule},
    solve::{self, Operand, Solution},
};
use crate::{
    DType, Error, Result, Shape, Sharding, Tensor,
    reshard::{self, Objective, ValidPlan},
};
use smallvec::SmallVec;
use std::{
    cell::RefCell,
    collections::HashMap,
    hash::{BuildHasherDefault, Hash, Hasher},
    rc::Rc,
};

/// A solved op.
#[derive(Debug)]
pub(crate) struct Known {
    pub(crate) solution: Solution,
    /// Each factor's letter, and where its size is.
    pub(crate) factors: SmallVec<[(char, Size); 8]>,
    outputs: SmallVec<[SmallVec<[Factors; 4]>; 2]>,
    /// How each operand gets where it must be; none where nothing is sent.
    pub(crate) plans: SmallVec<[Option<Rc<ValidPlan>>; 3]>,
    pub(crate) rule: Rule,
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

impl Known {
    fn new(rule: Rule, mut solution: Solution, operands: &[&Tensor]) -> Result<Self> {
        let size = |f: usize| {
            let alone =
                |dims: &SmallVec<[Factors; 4]>| dims.iter().position(|d| d[..] == [f as u8]);
            let place = rule
                .inputs
                .iter()
                .enumerate()
                .find_map(|(i, dims)| alone(dims).map(|d| Size::Of(i, d)));
            place.unwrap_or(Size::Fixed(rule.factors[f].size))
        };
        let factors = (0..rule.factors.len())
            .map(|f| (rule.factors[f].letter, size(f)))
            .collect();
        let plan = |(x, to): (&&Tensor, &Sharding)| {
            if solution.free || x.sharding() == to {
                return Ok(None);
            }
            reshard::known(
                x.mesh(),
                x.shape(),
                x.dtype(),
                x.sharding(),
                to,
                Objective::Bytes,
            )
            .map(Some)
        };
        let plans: SmallVec<[Option<Rc<ValidPlan>>; 3]> = operands
            .iter()
            .zip(&solution.inputs)
            .map(plan)
            .collect::<Result<_>>()?;
        solution.bytes =
            solution.statistics + plans.iter().flatten().map(|p| p.recv_bytes).sum::<u64>();
        Ok(Self {
            solution,
            factors,
            outputs: rule.outputs.clone(),
            plans,
            rule,
        })
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
            return Err(Error::Shape {
                op,
                detail: format!(
                    "result {output} has shape {local}, its rule has {} dimensions",
                    dims.len()
                ),
            });
        }
        let size = |(d, factors): (usize, &Factors)| match factors.is_empty() {
            true => local[d],
            false => factors
                .iter()
                .map(|f| self.factors[*f as usize].1.size(operands))
                .product(),
        };
        Ok(dims.iter().enumerate().map(size).collect())
    }
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    op: &'static str,
    mesh: u64,
    attrs: SmallVec<[i64; 6]>,
    /// Sharding, rank, and a bit for each dimension of size 1.
    operands: SmallVec<[(Sharding, u8, u32); 3]>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct SizedKey {
    key: Key,
    sizes: SmallVec<[usize; 12]>,
    dtypes: SmallVec<[DType; 3]>,
}

/// Mixes words by multiplication: keys are short and not chosen by an adversary.
#[derive(Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 29
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, n: u8) {
        self.write_u64(n.into());
    }

    fn write_u32(&mut self, n: u32) {
        self.write_u64(n.into());
    }

    fn write_usize(&mut self, n: usize) {
        self.write_u64(n as u64);
    }

    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(23) ^ n).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

/// A number for what tells one rule from another, such as its text.
pub(crate) fn hash(what: impl Hash) -> u64 {
    let mut mix = Mix::default();
    what.hash(&mut mix);
    mix.finish()
}

/// What a thread remembers. It is emptied when it has grown large, so that a program with ever new
/// shapes does not grow for ever.
pub(crate) struct Table<K, V>(RefCell<HashMap<K, V, BuildHasherDefault<Mix>>>);

impl<K, V> Default for Table<K, V> {
    fn default() -> Self {
        Self(RefCell::default())
    }
}

impl<K: Eq + Hash, V: Clone> Table<K, V> {
    const LIMIT: usize = 1 << 16;

    pub(crate) fn get(&self, key: &K) -> Option<V> {
        self.0.borrow().get(key).cloned()
    }

    pub(crate) fn insert(&self, key: K, value: V) {
        let mut table = self.0.borrow_mut();
        if table.len() >= Self::LIMIT {
            table.clear();
        }
        table.insert(key, value);
    }
}

thread_local! {
    /// `None` where the sizes decide.
    static BY_PATTERN: Table<Key, Option<Rc<Known>>> = Table::default();
    static BY_SIZE: Table<SizedKey, Rc<Known>> = Table::default();
}

/// The solution for a call, from the tables or from the solver.
pub(crate) fn find(call: &Call<'_>, rule: impl FnOnce() -> Result<Rule>) -> Result<Rc<Known>> {
    let mesh = call.inputs[0].mesh();
    let ones = |t: &Tensor| {
        t.dims()
            .iter()
            .take(32)
            .enumerate()
            .fold(0, |mask, (d, n)| mask | u32::from(*n == 1) << d)
    };
    let operands = call
        .inputs
        .iter()
        .map(|t| (t.sharding().clone(), t.rank() as u8, ones(t)))
        .collect();
    let key = Key {
        op: call.op,
        mesh: mesh.key(),
        attrs: call.attrs.into(),
        operands,
    };
    let known = BY_PATTERN.with(|table| table.get(&key));
    if let Some(Some(known)) = known {
        return Ok(known);
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
    if known.is_some()
        && let Some(known) = BY_SIZE.with(|table| table.get(&sized))
    {
        return Ok(known);
    }
    let rule = rule()?;
    let operands: SmallVec<[Operand<'_>; 3]> = call
        .inputs
        .iter()
        .map(|t| Operand {
            shape: t.shape(),
            dtype: t.dtype(),
            sharding: t.sharding(),
        })
        .collect();
    let solution = solve::solve(mesh, &rule, &operands)?;
    let free = solution.free;
    let known = Rc::new(Known::new(rule, solution, call.inputs)?);
    BY_PATTERN.with(|table| table.insert(sized.key.clone(), free.then(|| known.clone())));
    if !free {
        BY_SIZE.with(|table| table.insert(sized, known.clone()));
    }
    Ok(known)
}

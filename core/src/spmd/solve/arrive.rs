//! Where choices want an operand, and what bringing it there takes.

use super::{
    Choice, Operand,
    assign::{Candidates, Order},
};
use crate::{
    Mesh, Placement, Reduction, Result, Sharding,
    reshard::{Held, Price},
    spmd::rule::{FactorKind, Factors, Rule},
};
use anymesh_kernel::Mixed;
use smallvec::SmallVec;

/// An operand brought to a sharding.
pub(super) struct Arrival {
    /// `None` where parts of factors would not be parts of a dimension.
    pub(super) sharding: Option<Sharding>,
    /// From each form of the operand, those first that cost least.
    ways: SmallVec<[Way; 1]>,
}

impl Arrival {
    /// Bytes that it takes at least; `None` where it cannot be.
    pub(super) fn at_least(&self) -> Option<u64> {
        self.ways.first().map(|way| way.bytes)
    }
}

/// How an operand gets from one of its forms to a sharding.
#[derive(Clone, Copy)]
pub(super) struct Way {
    /// The number of the form.
    pub(super) source: u8,
    /// Bytes: what it takes, or at least takes.
    pub(super) bytes: u64,
    /// Whether it takes just that.
    exact: bool,
    pub(super) kind: WayKind,
}

/// What an operand needs besides bytes, the least first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum WayKind {
    Nothing,
    /// Ranks drop parts of what they have, whatever the sizes.
    Slice,
    Step,
}

impl Way {
    fn key(&self) -> (u64, WayKind, u8) {
        (self.bytes, self.kind, self.source)
    }
}

/// What was asked for: for each axis, in a byte, what it does; and in what order, where that
/// matters. With more axes than there is room for nothing is remembered.
type Asked = u128;

/// Axes that [`Asked`] has room for, each with a byte for what it does and four bits for its place.
const REMEMBERED_AXES: usize = 8;

/// What it takes to know where an operand goes, in ranks that are looked at, beside those.
const ARRIVAL_COST: usize = 64;

/// The code of a partial value; those below are of factors.
const PARTIAL: u8 = 200;

/// One operand, and where it was wanted so far.
pub(super) struct Arrivals<'a> {
    mesh: &'a Mesh,
    dims: &'a [Factors],
    rule: &'a Rule,
    operand: Operand<'a>,
    /// What it holds, for each of its forms.
    held: SmallVec<[Held<'a>; 1]>,
    /// What each candidate of each axis asks of it: 0 for nothing, a factor and 1, or a reduction
    /// and [`PARTIAL`].
    codes: SmallVec<[SmallVec<[u8; 6]>; 4]>,
    known: Mixed<Asked, usize>,
    list: Vec<Arrival>,
}

impl<'a> Arrivals<'a> {
    pub(super) fn new<'c>(
        mesh: &'a Mesh,
        rule: &'a Rule,
        number: usize,
        operand: Operand<'a>,
        candidates: impl Iterator<Item = &'c Candidates>,
    ) -> Self {
        let code = |choice: &Choice| match (target(rule, number, *choice), choice) {
            (Placement::Partial(reduction), _) => PARTIAL + reduction as u8,
            (Placement::Shard(_), Choice::Cut(f)) => *f as u8 + 1,
            _ => 0,
        };
        let held = |form| Held::new(mesh, operand.shape, operand.dtype, form);
        Self {
            mesh,
            dims: &rule.inputs[number],
            rule,
            operand,
            held: operand.forms().map(held).collect(),
            codes: candidates
                .map(|c| c.list.iter().map(code).collect())
                .collect(),
            known: Mixed::default(),
            list: Vec::with_capacity(32),
        }
    }

    /// Where an assignment wants it, by number, and what knowing that took, in ranks looked at.
    pub(super) fn find(&mut self, at: &[u8], order: &Order, axes: &[usize]) -> (usize, usize) {
        let asked = self.asked(at, order);
        if let Some(found) = asked.and_then(|asked| self.known.get(&asked)) {
            return (*found, 0);
        }
        let walked = |held: &[Held<'_>]| held.iter().map(Held::walked).sum::<usize>();
        let before = walked(&self.held);
        let arrival = self.arrival(at, order, axes);
        self.list.push(arrival);
        let number = self.list.len() - 1;
        if let Some(asked) = asked {
            self.known.insert(asked, number);
        }
        (number, ARRIVAL_COST + walked(&self.held) - before)
    }

    pub(super) fn get(&self, number: usize) -> &Arrival {
        &self.list[number]
    }

    fn code(&self, at: &[u8], p: u8) -> u8 {
        self.codes[p as usize][at[p as usize] as usize]
    }

    fn asked(&self, at: &[u8], order: &Order) -> Option<Asked> {
        if at.len() > REMEMBERED_AXES {
            return None;
        }
        let mut asked = 0;
        for p in 0..at.len() as u8 {
            asked |= u128::from(self.code(at, p)) << (8 * p);
        }
        // Only the order among axes that cut the same factor matters.
        let in_order = order.windows(2).all(|pair| pair[0] < pair[1]);
        let together = |i: usize, j: usize| {
            let code = self.code(at, order[i]);
            (1..PARTIAL).contains(&code) && code == self.code(at, order[j])
        };
        if !in_order && (1..order.len()).any(|i| (0..i).any(|j| together(i, j))) {
            for (i, p) in order.iter().enumerate() {
                asked |= u128::from(*p + 1) << (8 * REMEMBERED_AXES + 4 * i);
            }
        }
        Some(asked)
    }

    fn arrival(&self, at: &[u8], order: &Order, axes: &[usize]) -> Arrival {
        let codes = || order.iter().map(|p| (axes[*p as usize], self.code(at, *p)));
        let cuts: SmallVec<[(u8, u8); 4]> = codes()
            .filter(|(_, code)| (1..PARTIAL).contains(code))
            .map(|(axis, code)| (code - 1, axis as u8))
            .collect();
        let partial = codes().filter(|(_, code)| *code >= PARTIAL);
        let sharding = cut(self.mesh, self.rule, self.dims, &cuts)
            .map(|cut| {
                partial.fold(cut, |s, (axis, code)| {
                    s.partial_over(axis, Reduction::ALL[(code - PARTIAL) as usize])
                })
            })
            .filter(|s| !mixes(s));
        let mut ways: SmallVec<[Way; 1]> = SmallVec::new();
        if let Some(to) = &sharding {
            let forms = self.operand.forms().enumerate();
            ways.extend(forms.map(|(source, from)| self.way(source, from, to)));
            ways.sort_by_key(Way::key);
        }
        Arrival { sharding, ways }
    }

    /// What it takes to get from one of its forms to a sharding.
    fn way(&self, source: usize, from: &Sharding, to: &Sharding) -> Way {
        let (price, kind) = if to == from {
            (Price::Exact(0), WayKind::Nothing)
        } else if is_slice(from, to) {
            (Price::Exact(0), WayKind::Slice)
        } else {
            (self.held[source].price(to), WayKind::Step)
        };
        let (bytes, exact) = match price {
            Price::Exact(bytes) => (bytes, true),
            Price::AtLeast(bytes) => (bytes, false),
        };
        Way {
            source: source as u8,
            bytes,
            exact,
            kind,
        }
    }

    /// The cheapest way there, priced exactly, and how many prices that took; `None` where it
    /// cannot be.
    pub(super) fn cheapest(&mut self, number: usize) -> Result<Option<(Way, usize)>> {
        let mut priced = 0;
        let Arrival { sharding, ways } = &mut self.list[number];
        let Some(to) = sharding else {
            return Ok(None);
        };
        // The first one's bound is the least of all, so once that one is exact it is the best.
        while let Some(first) = ways.first_mut().filter(|way| !way.exact) {
            first.bytes = self.held[first.source as usize].exact(to)?;
            first.exact = true;
            priced += 1;
            ways.sort_by_key(Way::key);
        }
        Ok(ways.first().map(|way| (*way, priced)))
    }
}

/// What a choice asks of an operand along its axis.
pub(super) fn target(rule: &Rule, operand: usize, choice: Choice) -> Placement {
    match choice {
        Choice::Whole => Placement::Replicate,
        Choice::Through(mask, reduction) if mask >> operand & 1 == 1 => {
            Placement::Partial(reduction)
        }
        Choice::Through(..) => Placement::Replicate,
        Choice::Cut(f) => match rule.inputs[operand]
            .iter()
            .position(|d| d.contains(&(f as u8)))
        {
            Some(dim) => Placement::Shard(dim),
            None if rule.factors[f].kind == FactorKind::Reduce(Reduction::Sum)
                && rule.addends >> operand & 1 == 1 =>
            {
                Placement::Partial(Reduction::Sum)
            }
            None => Placement::Replicate,
        },
    }
}

/// The sharding of dimensions with these factors; `None` where parts of factors would not be parts
/// of the dimension.
pub(super) fn cut(
    mesh: &Mesh,
    rule: &Rule,
    dims: &[Factors],
    cuts: &[(u8, u8)],
) -> Option<Sharding> {
    let mut sharding = Sharding::replicated();
    if cuts.is_empty() {
        return Some(sharding);
    }
    for (d, factors) in dims.iter().enumerate() {
        // Whether all factors so far are cut down to single elements, so that the next one may be
        // cut too.
        let mut single_elements = true;
        for (n, f) in factors.iter().enumerate() {
            let size = rule.factors[*f as usize].size;
            let mut parts = 1;
            for (_, axis) in cuts.iter().filter(|(g, _)| g == f) {
                sharding = sharding.cut(d, *axis as usize);
                parts *= mesh.size(*axis as usize);
            }
            // Uneven parts of the last factor are parts of the dimension, because the split
            // refines; those of an earlier one are not.
            let last = factors[n + 1..]
                .iter()
                .all(|f| rule.factors[*f as usize].size == 1);
            if parts > 1 && !(single_elements && (last || size.is_multiple_of(parts))) {
                return None;
            }
            single_elements &= parts == size;
        }
    }
    Some(sharding)
}

/// Whether values would be partial with different reductions, whose order would matter.
pub(super) fn mixes(sharding: &Sharding) -> bool {
    let mut reductions = sharding.partial().map(|(_, r)| r);
    let first = reductions.next();
    reductions.any(|r| Some(r) != first)
}

/// Whether one axis gets from a placement to another without sending anything.
pub(super) fn is_free(from: Placement, to: Placement) -> bool {
    from == to || from == Placement::Replicate
}

/// Whether ranks only drop a part of what they have or fill in an identity, whatever the sizes.
pub(super) fn is_slice(from: &Sharding, to: &Sharding) -> bool {
    let keeps_cuts = from.cuts().all(|(d, _)| {
        let mut to = to.axes_of(d);
        from.axes_of(d).all(|a| to.next() == Some(a))
    });
    let keeps_partial = from
        .partial()
        .all(|(a, r)| to.placement(a) == Placement::Partial(r));
    let new_partial_is_new = to.partial().all(|(a, _)| {
        from.placement(a) == to.placement(a) || from.placement(a) == Placement::Replicate
    });
    keeps_cuts && keeps_partial && new_partial_is_new
}

//! All ways in which a tensor can lie on a mesh, and which of them a run looks at.

use super::{partial, values};
use crate::registry::SplitMix;
use anymesh_core::{DType, Mesh, Reduction, Result, Sharding, Tensor, TensorType};
use std::{
    cell::RefCell,
    collections::{HashMap, HashSet, hash_map::Entry},
    rc::Rc,
};

/// The reductions whose partial values a tensor can be made of. Logical ones combine truth values;
/// of truth values, the others are logical ones under another name.
pub fn reductions(dtype: DType) -> &'static [Reduction] {
    use Reduction::*;
    match dtype {
        DType::Bool => &Reduction::ALL,
        _ => &[Sum, Max, Min, Prod],
    }
}

/// All ways in which a tensor of `rank` dimensions can lie on a mesh of `axes` axes: each of them
/// replicates, cuts a dimension at any position among the cuts it has, or is partial with one of
/// `reductions`, which all partial axes share.
pub fn shardings(rank: usize, axes: usize, reductions: &[Reduction]) -> Vec<Sharding> {
    let mut all: Vec<(Vec<(usize, usize)>, Vec<usize>, Option<Reduction>)> =
        vec![(vec![], vec![], None)];
    for axis in 0..axes {
        let mut next = all.clone();
        for (cuts, over, reduction) in &all {
            for dim in 0..rank {
                // At every position among the cuts of this dimension.
                let places: Vec<usize> = (0..=cuts.len())
                    .filter(|p| *p == cuts.len() || cuts[*p].0 == dim)
                    .collect();
                for place in places {
                    let mut cuts = cuts.clone();
                    cuts.insert(place, (dim, axis));
                    next.push((cuts, over.clone(), *reduction));
                }
            }
            for r in reductions
                .iter()
                .filter(|r| reduction.is_none_or(|other| other == **r))
            {
                next.push((cuts.clone(), [&over[..], &[axis]].concat(), Some(*r)));
            }
        }
        all = next;
    }
    let build = |(cuts, over, reduction): (Vec<(usize, usize)>, Vec<usize>, Option<Reduction>)| {
        let cut = cuts
            .iter()
            .fold(Sharding::replicated(), |s, (dim, axis)| s.cut(*dim, *axis));
        over.iter().fold(cut, |s, axis| {
            reduction.map_or(s.clone(), |r| s.partial_over(*axis, r))
        })
    };
    let mut seen = HashSet::new();
    let mut out: Vec<Sharding> = all.into_iter().map(build).collect();
    out.retain(|sharding| seen.insert(sharding.clone()));
    out
}

/// Rank, mesh axes and reductions, and all there are of them.
type Ways = HashMap<(usize, usize, &'static [Reduction]), Rc<[Sharding]>>;

/// [`shardings`] of a tensor of this rank and dtype, which are the same for every sample.
fn ways(rank: usize, axes: usize, dtype: DType) -> Rc<[Sharding]> {
    thread_local! {
        static KNOWN: RefCell<Ways> = RefCell::default();
    }
    let reductions = reductions(dtype);
    KNOWN.with_borrow_mut(|known| {
        known
            .entry((rank, axes, reductions))
            .or_insert_with(|| shardings(rank, axes, reductions).into())
            .clone()
    })
}

/// The ways in which an operand can lie on a mesh, each made when it is first wanted.
pub(super) struct Layouts<'a> {
    mesh: &'a Mesh,
    operand: Option<&'a Plain>,
    ways: Rc<[Sharding]>,
    /// What each rank holds.
    made: HashMap<usize, (TensorType, Vec<Tensor>)>,
}

/// A tensor without a mesh, and its values.
pub(super) struct Plain {
    pub(super) tensor: Tensor,
    values: Vec<f64>,
}

impl Plain {
    pub(super) fn new(tensor: &Tensor) -> Result<Self> {
        Ok(Self {
            tensor: tensor.clone(),
            values: values(tensor)?,
        })
    }
}

impl<'a> Layouts<'a> {
    pub(super) fn new(operand: Option<&'a Plain>, mesh: &'a Mesh) -> Self {
        let list = |x: &Plain| ways(x.tensor.rank(), mesh.axes().len(), x.tensor.dtype());
        Self {
            mesh,
            operand,
            ways: operand.map_or_else(|| Rc::new([]) as Rc<[Sharding]>, list),
            made: HashMap::new(),
        }
    }

    /// How many there are; leaving an operand out is one way.
    pub(super) fn len(&self) -> usize {
        self.ways.len().max(1)
    }

    /// The operand in way `i`: a value of its own each time, so that what was made of it in one
    /// case is not at hand in another.
    pub(super) fn get(&mut self, i: usize) -> Result<Option<Tensor>> {
        let (Some(plain), Some(sharding)) = (self.operand, self.ways.get(i)) else {
            return Ok(None);
        };
        let (ty, parts) = match self.made.entry(i) {
            Entry::Occupied(made) => made.into_mut(),
            Entry::Vacant(place) => {
                let (x, values) = (&plain.tensor, &plain.values);
                let laid = partial::lay_out(x, values, self.mesh, sharding.clone())?;
                let ty = TensorType {
                    dtype: x.dtype(),
                    shape: x.shape().clone(),
                    sharding: sharding.clone(),
                };
                let parts = laid.shards().into_iter().map(|(_, part)| part);
                place.insert((ty, parts.collect()))
            }
        };
        Tensor::from_shards(ty, self.mesh, parts).map(Some)
    }
}

/// Which of `total` cases a run looks at: all, or `limit` different ones that the seed picks. A
/// start and a step that has no factor in common with the total visit every case in the end.
pub(super) fn picked(
    total: u64,
    limit: Option<usize>,
    seed: u64,
) -> impl ExactSizeIterator<Item = u64> {
    let count = limit.map_or(total, |limit| total.min(limit as u64));
    let mut random = SplitMix(seed);
    let (start, step) = if count == total {
        (0, 1)
    } else {
        let start = random.next() % total;
        let step = std::iter::repeat_with(|| 1 + random.next() % total)
            .find(|step| gcd(*step, total) == 1);
        (start, step.unwrap_or(1))
    };
    (0..count as usize).map(move |i| {
        ((u128::from(start) + i as u128 * u128::from(step)) % u128::from(total)) as u64
    })
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn picked_cases_are_different_and_change_with_the_seed() {
        for total in [41, 100, 7919, 18_225, u64::MAX] {
            let some: Vec<u64> = picked(total, Some(40), 1).collect();
            let unique: std::collections::BTreeSet<&u64> = some.iter().collect();
            assert_eq!(unique.len(), 40, "{total}");
            assert!(some.iter().all(|case| *case < total));
            assert_eq!(some, picked(total, Some(40), 1).collect::<Vec<_>>());
            assert_ne!(some, picked(total, Some(40), 2).collect::<Vec<_>>());
        }
    }

    #[test]
    fn without_a_limit_every_case_is_picked() {
        assert!(picked(1000, None, 7).eq(0..1000));
        assert!(picked(3, Some(40), 7).eq(0..3));
    }

    #[test]
    fn every_reduction_is_among_the_layouts() {
        for (dtype, expected) in [(DType::F32, 4), (DType::I64, 4), (DType::Bool, 6)] {
            let all = shardings(1, 2, reductions(dtype));
            let mut found: Vec<Reduction> = all
                .iter()
                .flat_map(|s| s.partial().map(|(_, r)| r))
                .collect();
            found.sort_unstable();
            found.dedup();
            assert_eq!(found.len(), expected, "{dtype}");
            // Each axis: replicated, cut (both on the dimension in either order), or partial.
            let plain = 1 + 2 + 2;
            let partial = expected * (2 + 1 + 2);
            assert_eq!(all.len(), plain + partial, "{dtype}");
        }
    }
}

//! All ways in which a tensor can lie on a mesh, and which of them a run looks at.

use super::{partial, values};
use crate::registry::SplitMix;
use anymesh_core::{DType, Mesh, Reduction, Result, Sharding, Tensor};

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
    let mut out: Vec<Sharding> = vec![];
    for sharding in all.into_iter().map(build) {
        if !out.contains(&sharding) {
            out.push(sharding);
        }
    }
    out
}

/// The ways in which an operand can lie on a mesh, each made when it is first wanted.
pub(super) struct Layouts<'a> {
    mesh: &'a Mesh,
    operand: Option<(&'a Tensor, Vec<f64>)>,
    made: Vec<(Sharding, Option<Tensor>)>,
}

impl<'a> Layouts<'a> {
    pub(super) fn new(x: Option<&'a Tensor>, mesh: &'a Mesh) -> Result<Self> {
        let Some(x) = x else {
            return Ok(Self {
                mesh,
                operand: None,
                made: vec![],
            });
        };
        let made = shardings(x.rank(), mesh.axes().len(), reductions(x.dtype()))
            .into_iter()
            .map(|s| (s, None))
            .collect();
        Ok(Self {
            mesh,
            operand: Some((x, values(x)?)),
            made,
        })
    }

    /// How many there are; leaving an operand out is one way.
    pub(super) fn len(&self) -> usize {
        self.made.len().max(1)
    }

    pub(super) fn get(&mut self, i: usize) -> Result<Option<Tensor>> {
        let (Some((x, plain)), Some((sharding, made))) = (&self.operand, self.made.get_mut(i))
        else {
            return Ok(None);
        };
        if made.is_none() {
            *made = Some(partial::lay_out(x, plain, self.mesh, sharding.clone())?);
        }
        Ok(made.clone())
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

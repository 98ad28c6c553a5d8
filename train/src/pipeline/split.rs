//! Which layers are in which stage.

use crate::{Error, Result};
use anymesh_core::Mesh;
use anymesh_schedule::Placement;
use std::ops::Range;

/// The layers of a model in stages, on a mesh with an axis `pp`.
///
/// ```
/// # use anymesh_core::Mesh;
/// # use anymesh_schedule::Placement;
/// # use anymesh_train::pipeline::Split;
/// # let device = anymesh_backend_cpu::device();
/// let mesh = Mesh::new("pp=2, tp=2", &device)?;
/// // Six layers of cost 1, and a head that costs as much as two.
/// let split = Split::balanced(&mesh, &[1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 0.0, 2.0, 1, Placement::Loop)?;
/// assert_eq!(split.layers(0), 0..4);
/// assert_eq!(split.mesh_of(1).to_string(), "mesh(tp=2)");
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Split {
    /// The first layer of each stage, and the number of layers.
    bounds: Vec<usize>,
    /// All stages together.
    mesh: Mesh,
    meshes: Vec<Mesh>,
    owner: Vec<usize>,
}

/// How a model is to be cut into stages.
#[derive(Clone, Debug, PartialEq)]
pub struct Stages {
    /// How many stages each rank of `pp` has.
    pub chunks: usize,
    /// Which rank has which stage.
    pub placement: Placement,
    /// How many layers each stage has; evenly by cost where it is not said.
    pub layers: Option<Vec<usize>>,
    /// What layers cost, where it was [measured](super::measure); the model's own estimate by the
    /// sizes of its products otherwise.
    pub costs: Option<LayerCosts>,
}

/// What the layers of a model cost, in any unit.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerCosts {
    /// What is computed before the layers: a lookup.
    pub first: f64,
    /// Each layer.
    pub layers: Vec<f64>,
    /// What is computed after them: the head and the loss.
    pub last: f64,
}

impl Default for Stages {
    fn default() -> Self {
        Self {
            chunks: 1,
            placement: Placement::Loop,
            layers: None,
            costs: None,
        }
    }
}

/// The axis that stages lie along.
pub(crate) const AXIS: &str = "pp";

impl Split {
    /// With the number of layers of each stage, on `mesh.at("pp", ..)` as `placement` says.
    pub fn new(mesh: &Mesh, layers: &[usize], placement: Placement) -> Result<Self> {
        let ranks = match mesh.axis(AXIS) {
            Ok(axis) => mesh.size(axis),
            Err(_) => 1,
        };
        let stages = layers.len();
        if stages == 0 || !stages.is_multiple_of(ranks) {
            let detail = format!(
                "{stages} stages do not go over {ranks} ranks of the axis {AXIS}: give each rank the same number"
            );
            return Err(Error::config("pipeline.split", detail));
        }
        Self::owned(mesh, layers, placement.owners(ranks, stages / ranks))
    }

    /// Each layer as a stage of its own between one that has what comes before them and one that has
    /// what comes after, in a row over the ranks of `pp`: to [measure](super::measure) what they cost.
    pub fn one_by_one(mesh: &Mesh, layers: usize) -> Result<Self> {
        let ranks = mesh.axis(AXIS).map_or(1, |axis| mesh.size(axis));
        let stages = layers + 2;
        let mut counts = vec![1; stages];
        (counts[0], counts[stages - 1]) = (0, 0);
        let owner = (0..stages).map(|s| s * ranks / stages).collect();
        Self::owned(mesh, &counts, owner)
    }

    fn owned(mesh: &Mesh, layers: &[usize], owner: Vec<usize>) -> Result<Self> {
        let place = |rank: &usize| match mesh.axis(AXIS) {
            Ok(_) => mesh.at(AXIS, *rank),
            Err(_) => Ok(mesh.clone()),
        };
        let mut bounds = vec![0];
        for (i, count) in layers.iter().enumerate() {
            bounds.push(bounds[i] + count);
        }
        let meshes = owner.iter().map(place).collect::<Result<_, _>>()?;
        Ok(Self {
            bounds,
            mesh: mesh.clone(),
            meshes,
            owner,
        })
    }

    /// With `chunks` stages on each rank, such that the costliest stage costs least. `first` and
    /// `last` is what is computed before and after the layers: a lookup, the head and the loss.
    pub fn balanced(
        mesh: &Mesh,
        costs: &[f64],
        first: f64,
        last: f64,
        chunks: usize,
        placement: Placement,
    ) -> Result<Self> {
        let ranks = mesh.axis(AXIS).map_or(1, |axis| mesh.size(axis));
        let layers = balanced(costs, first, last, ranks * chunks.max(1))?;
        Self::new(mesh, &layers, placement)
    }

    /// How many stages there are.
    pub fn stages(&self) -> usize {
        self.meshes.len()
    }

    /// The layers of a stage.
    pub fn layers(&self, stage: usize) -> Range<usize> {
        self.bounds[stage]..self.bounds[stage + 1]
    }

    /// How many layers there are.
    pub fn count(&self) -> usize {
        self.bounds[self.bounds.len() - 1]
    }

    /// The stage that has a layer.
    pub fn stage_of(&self, layer: usize) -> usize {
        // The last that begins at or before it: stages without layers lie before.
        self.bounds[..self.stages()].partition_point(|b| *b <= layer) - 1
    }

    /// Where all of them lie.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Where a stage lies.
    pub fn mesh_of(&self, stage: usize) -> &Mesh {
        &self.meshes[stage]
    }

    /// For each stage the rank along `pp` that has it.
    pub fn owners(&self) -> &[usize] {
        &self.owner
    }
}

/// How many layers each of `stages` gets, such that the costliest stage costs least; where several
/// ways do, the one that gives the stages before more. `first` and `last` are added to the first and
/// the last stage. A stage may get none where there are fewer layers than stages.
pub fn balanced(costs: &[f64], first: f64, last: f64, stages: usize) -> Result<Vec<usize>> {
    if stages == 0 {
        return Err(Error::config("pipeline.split", "there must be a stage"));
    }
    if let Some(bad) = (costs.iter().chain([&first, &last])).find(|c| !c.is_finite() || **c < 0.0) {
        let detail = format!("{bad} is no cost of a layer: it must be finite and not negative");
        return Err(Error::config("pipeline.split", detail));
    }
    let n = costs.len();
    let mut sums = vec![0.0; n + 1];
    for (i, cost) in costs.iter().enumerate() {
        sums[i + 1] = sums[i] + cost;
    }
    let of_stage = |s: usize, from: usize, to: usize| {
        let own = sums[to] - sums[from];
        let first = if s == 0 { first } else { 0.0 };
        let last = if s + 1 == stages { last } else { 0.0 };
        own + first + last
    };
    // best[s][i]: the least cost of the worst of stages s.. if they get the layers from i on.
    let mut best = vec![vec![f64::INFINITY; n + 1]; stages + 1];
    best[stages][n] = 0.0;
    for s in (0..stages).rev() {
        for from in 0..=n {
            for to in from..=n {
                let worst = of_stage(s, from, to).max(best[s + 1][to]);
                best[s][from] = best[s][from].min(worst);
            }
        }
    }
    let (mut layers, mut from) = (vec![], 0);
    for s in 0..stages {
        // The longest that keeps to the optimum, but none to stages that all could share.
        let limit = best[0][0];
        let fits = |to: &usize| of_stage(s, from, *to) <= limit && best[s + 1][*to] <= limit;
        let most = (from..=n).rev().find(fits).unwrap_or(n);
        // Leaves a layer to each stage after it, where there are enough.
        let after = (stages - 1 - s).min((n - from).saturating_sub(1));
        let to = (from..=n - after).rev().find(fits).unwrap_or(most);
        layers.push(to - from);
        from = to;
    }
    Ok(layers)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The least worst cost, by trying all.
    fn by_trying(costs: &[f64], first: f64, last: f64, stages: usize) -> f64 {
        fn go(costs: &[f64], extra: f64, last: f64, stages: usize) -> f64 {
            if stages == 1 {
                return costs.iter().sum::<f64>() + extra + last;
            }
            let cut = |i: usize| {
                let own = costs[..i].iter().sum::<f64>() + extra;
                own.max(go(&costs[i..], 0.0, last, stages - 1))
            };
            (0..=costs.len()).map(cut).fold(f64::INFINITY, f64::min)
        }
        go(costs, first, last, stages)
    }

    #[test]
    fn the_costliest_stage_costs_least() -> Result<()> {
        let mut state = 1u64;
        let mut next = |n: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) % n
        };
        for _ in 0..300 {
            let costs: Vec<f64> = (0..next(8)).map(|_| 1.0 + next(4) as f64).collect();
            let (first, last, stages) = (next(3) as f64, next(5) as f64, 1 + next(5) as usize);
            let layers = balanced(&costs, first, last, stages)?;
            assert_eq!((layers.len(), layers.iter().sum()), (stages, costs.len()));
            let (mut from, mut worst) = (0, 0f64);
            for (s, count) in layers.iter().enumerate() {
                let mut cost: f64 = costs[from..from + count].iter().sum();
                cost += if s == 0 { first } else { 0.0 };
                cost += if s + 1 == stages { last } else { 0.0 };
                worst = worst.max(cost);
                from += count;
            }
            assert_eq!(
                worst,
                by_trying(&costs, first, last, stages),
                "{costs:?} {layers:?}"
            );
        }
        assert_eq!(balanced(&[1.0; 8], 0.0, 0.0, 4)?, [2, 2, 2, 2]);
        assert_eq!(balanced(&[1.0; 3], 0.0, 0.0, 4)?, [1, 1, 1, 0]);
        assert!(balanced(&[f64::NAN], 0.0, 0.0, 1).is_err());
        Ok(())
    }
}

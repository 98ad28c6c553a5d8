//! Plans: a list of steps from one sharding to another, with what each costs.

use super::{
    Collective,
    edge::{Axes, Space},
    fewest::{Fewest, Path, Rest},
    moves::to_resolve,
    search::{Measure, Search},
};
use crate::{DType, Error, Mesh, Result, Shape, Sharding, operand::sharding_text};

/// One step of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// What it does.
    pub kind: Collective,
    /// The mesh axes it moves data along, in the order in which groups count their ranks.
    pub axes: Axes,
    /// The sharding before.
    pub from: Sharding,
    /// The sharding after.
    pub to: Sharding,
    /// Bytes that the worst rank receives.
    pub recv_bytes: u64,
    /// Bytes of the tensor that the worst rank holds, before and after together.
    pub peak_bytes: u64,
    /// Time under the mesh's cost model.
    pub seconds: f64,
}

/// What to make small.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Objective {
    /// Bytes received by the worst rank, as if latency were free.
    Bytes,
    /// Seconds under the mesh's cost model.
    #[default]
    Time,
}

/// How to get from one sharding to another. It prints as a table; [`to_json`](Plan::to_json) has
/// the same for programs.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Where the tensor lies.
    pub mesh: Mesh,
    /// Its global shape.
    pub shape: Shape,
    /// Its elements.
    pub dtype: DType,
    /// The sharding at the start.
    pub from: Sharding,
    /// The sharding at the end.
    pub to: Sharding,
    /// In order; none where nothing is to do.
    pub steps: Vec<Step>,
    /// Bytes that ranks receive: the sum over steps of what the worst rank receives.
    pub recv_bytes: u64,
    /// What any plan must send to the worst rank, because it lacks it. Not known where partial
    /// values are combined.
    pub lower_bound: Option<u64>,
    /// The largest [peak](Step::peak_bytes) of the steps.
    pub peak_bytes: u64,
    /// Time under the mesh's cost model.
    pub seconds: f64,
}

/// The best plan from `from` to `to` for a tensor of this shape, within the memory that the mesh's
/// [cost model](super::CostModel) allows.
///
/// With [`Objective::Bytes`] a tensor that is not partial goes in one step, which sends each rank
/// exactly what it lacks.
///
/// ```
/// # use anymesh_core::{DType, Mesh, Reduction, Shape, Sharding, reshard::{Collective, Objective, plan}};
/// # let mesh = Mesh::new("dp=2, tp=4", &anymesh_backend_cpu::device())?;
/// let rows = Sharding::replicated().cut(0, 1);
/// let columns = Sharding::replicated().cut(1, 1);
/// let plan = plan(&mesh, &Shape::from([64, 64]), DType::F32, &rows, &columns, Objective::Bytes)?;
/// assert_eq!((plan.steps[0].kind, plan.recv_bytes, plan.lower_bound), (Collective::AllToAll, 3072, Some(3072)));
/// # Ok::<(), anymesh_core::Error>(())
/// ```
pub fn plan(
    mesh: &Mesh,
    shape: &Shape,
    dtype: DType,
    from: &Sharding,
    to: &Sharding,
    objective: Objective,
) -> Result<Plan> {
    from.check(mesh, shape.rank())?;
    to.check(mesh, shape.rank())?;
    let space = Space::new(mesh, shape, dtype)?;
    let (start, goal) = (space.strip(from), space.strip(to));
    let resolve = if space.empty {
        0
    } else {
        to_resolve(&start, &goal)
    };
    let direct = if resolve == 0 {
        Path::from_iter([start, goal.clone()])
    } else {
        fewest_bytes(&space, &start, &goal, resolve)
    };
    let build = |path: Path| assemble(&space, dtype, from, to, path, resolve == 0);
    let ceiling = mesh.cost().memory.unwrap_or(u64::MAX);
    let search = |measure, ceiling| Search {
        space: &space,
        to: &goal,
        resolve,
        measure,
        ceiling,
    };
    let measure = match objective {
        Objective::Time => Measure::Seconds,
        Objective::Bytes => {
            let plan = build(direct.clone())?;
            if plan.peak_bytes <= ceiling {
                return Ok(plan);
            }
            Measure::Bytes
        }
    };
    if let Some(path) = search(measure, ceiling).run(&direct) {
        return build(path);
    }
    let lowest = match search(Measure::Peak, u64::MAX).run(&direct) {
        Some(path) => build(path)?,
        None => build(direct)?,
    };
    let text = |s: &Sharding| s.type_string(dtype, shape, mesh);
    Err(Error::Memory {
        from: text(from),
        to: text(to),
        needed: lowest.peak_bytes,
        ceiling,
    })
}

/// Combines what is partial, then gets the rest in one step.
fn fewest_bytes(space: &Space, from: &Sharding, to: &Sharding, resolve: u32) -> Path {
    let to_grid = space.grid(to);
    let rest = |at: &Sharding| Rest::new(space, at, to, &to_grid);
    let mut path = Fewest::path(space, from, to, resolve, space.local(to), &rest);
    if path.last() != Some(to) {
        path.push(to.clone());
    }
    path
}

/// The plan along a path of stripped shardings, whose ends are those that were asked for.
pub(super) fn assemble(
    space: &Space,
    dtype: DType,
    from: &Sharding,
    to: &Sharding,
    path: Path,
    bounded: bool,
) -> Result<Plan> {
    let mut steps: Vec<Step> = Vec::with_capacity(path.len());
    let mut at = path[0].clone();
    let mut grid = space.grid(&at);
    for (i, next) in path.iter().enumerate().skip(1) {
        if *next == at && !(i + 1 == path.len() && steps.is_empty() && from != to) {
            continue;
        }
        let next_grid = space.grid(next);
        let impossible = || {
            let text = |s: &Sharding| s.type_string(dtype, space.shape, space.mesh);
            Error::Sharding {
                sharding: sharding_text(next, space.shape.rank(), space.mesh),
                detail: format!("no step leads from {} to {}", text(&at), text(next)),
            }
        };
        let edge = space
            .edge(&at, &grid, next, &next_grid)
            .ok_or_else(impossible)?;
        // Slices in a row are one.
        if let Some(last) = steps
            .last_mut()
            .filter(|s| s.kind == Collective::Slice && edge.kind == Collective::Slice)
        {
            last.to = next.clone();
            last.peak_bytes = space
                .traffic(&last.from, &space.grid(&last.from), next, &next_grid)
                .both
                * space.size;
        } else {
            let (recv_bytes, peak_bytes, seconds) =
                (edge.recv_bytes, edge.peak_bytes, edge.seconds);
            steps.push(Step {
                kind: edge.kind,
                axes: edge.axes,
                from: at,
                to: next.clone(),
                recv_bytes,
                peak_bytes,
                seconds,
            });
        }
        (at, grid) = (next.clone(), next_grid);
    }
    if let Some(first) = steps.first_mut() {
        first.from = from.clone();
    }
    if let Some(last) = steps.last_mut() {
        last.to = to.clone();
    }
    let recv_bytes = steps.iter().map(|s| s.recv_bytes).sum();
    let lower_bound = bounded.then(|| match (steps.len(), path.first(), path.last()) {
        (2.., Some(first), Some(last)) => {
            space
                .traffic(first, &space.grid(first), last, &grid)
                .missing
                * space.size
        }
        _ => recv_bytes,
    });
    let peak_bytes = steps
        .iter()
        .map(|s| s.peak_bytes)
        .max()
        .unwrap_or_else(|| space.local(&path[0]));
    let seconds = steps.iter().fold(0.0, |t, s| t + s.seconds);
    let (mesh, shape) = (space.mesh.clone(), space.shape.clone());
    Ok(Plan {
        mesh,
        shape,
        dtype,
        from: from.clone(),
        to: to.clone(),
        steps,
        recv_bytes,
        lower_bound,
        peak_bytes,
        seconds,
    })
}

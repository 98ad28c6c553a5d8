//! A function of what each rank holds, with the gradient of what it does there.

use super::{
    backward::Pass,
    tape::{Back, Edge, Mode, Pulled, is_recording, mode, record, with_mode},
};
use crate::{
    Error, Mesh, NoGradient, Reduction, Result, Shape, Sharding, Tensor, TensorType, observe,
    tensor::{Outputs, plain},
    transport::told,
};
use std::cell::RefCell;

/// Runs a function on the parts of each rank, and makes the parts that it gives the results. The
/// function is told the rank; it computes with plain tensors of one device, and may do so
/// differently on every rank: shapes inside of it are its own affair. Where [`apply`](crate::spmd::apply)
/// has a rule that says how ranks share an op, here operands are taken as they lie, and `results`
/// says how the results do.
///
/// The gradient is that of the function, rank by rank. Over a mesh axis that cuts a result, or over
/// which one is partial, ranks compute different terms: the gradient of an operand that is whole
/// along it is a partial sum over it. Along all other axes the function must give the same on every
/// rank. A gradient of a gradient there is none.
///
/// Plain operands are one part: the function runs on them as it is.
///
/// ```
/// # use anymesh_core::{DType, Mesh, Tensor, TensorType, spmd};
/// # let device = anymesh_backend_cpu::device();
/// let mesh = Mesh::new("ep=2", &device)?;
/// let x = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0], [4], (&mesh, "[@ep]"))?;
/// let w = Tensor::from_slice(&[10f32], [1], (&mesh, "[_]"))?.require_grad()?;
/// // Each rank has a factor of its own beside that of all.
/// let ty = TensorType::parse("f32[4@ep]", &mesh)?;
/// let y = spmd::on_parts("scaled", &[&x, &w], &[ty], |rank, x| {
///     Ok(vec![x[0].mul(&x[1])?.mul(1.0 + rank as f64)?])
/// })?;
/// assert_eq!(y[0].to_vec::<f32>()?, [10.0, 20.0, 60.0, 80.0]);
/// let gradient = y[0].sum_all()?.backward()?.of(&w)?;
/// assert_eq!(gradient.to_vec::<f32>()?, [3.0 + 14.0]);
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[track_caller]
pub fn on_parts(
    op: &'static str,
    inputs: &[&Tensor],
    results: &[TensorType],
    f: impl Fn(usize, &[Tensor]) -> Result<Vec<Tensor>>,
) -> Result<Vec<Tensor>> {
    if inputs.is_empty() {
        let detail = "a function of parts needs at least one operand";
        return Err(Error::argument(op, "inputs", detail));
    }
    if plain(op, inputs)? {
        return f(0, &inputs.iter().map(|t| (*t).clone()).collect::<Vec<_>>());
    }
    let mesh = inputs[0].mesh().clone();
    for ty in results {
        ty.sharding.check(&mesh, ty.shape.rank())?;
    }
    // Terms are added up before a function sees them.
    let whole = |t: &&Tensor| match t.sharding().is_partial() {
        true => t.reshard(t.sharding().whole()),
        false => Ok((*t).clone()),
    };
    let inputs = inputs.iter().map(whole).collect::<Result<Vec<_>>>()?;
    let refs: Vec<&Tensor> = inputs.iter().collect();
    let tracked = is_recording(&refs) && mode() == Mode::On;
    let graphs = RefCell::new(vec![]);
    let forward = || -> Result<Outputs> {
        let mut parts: Vec<Vec<Tensor>> = vec![vec![]; results.len()];
        for (i, rank) in mesh.held() {
            let (graph, given) = told(&mesh, Some(rank), local(&inputs, i, rank, tracked, &f))?;
            check(op, &mesh, rank, results, &given)?;
            graphs.borrow_mut().push(graph);
            given
                .into_iter()
                .zip(&mut parts)
                .for_each(|(t, p)| p.push(t));
        }
        let made = |(ty, parts): (&TensorType, Vec<Tensor>)| {
            let (sharding, shape) = (ty.sharding.clone(), ty.shape.clone());
            Tensor::from_parts(&mesh, sharding, ty.dtype, shape, parts)
        };
        Ok(results.iter().zip(parts).map(made).collect())
    };
    let of = |t: &Tensor| TensorType {
        dtype: t.dtype(),
        shape: t.shape().clone(),
        sharding: t.sharding().clone(),
    };
    let pull = |_: &Outputs| {
        let returns = Returns {
            op,
            graphs: graphs.take(),
            places: results.iter().map(|ty| ty.sharding.clone()).collect(),
            inputs: inputs.iter().map(of).collect(),
            mesh: mesh.clone(),
        };
        Ok(move |back: &Back<'_>| returns.pull(back))
    };
    Ok(record(op, &refs, forward, pull)?.into_vec())
}

/// What one rank's run of the function left: where its operands begin, and where its results end.
struct Graph {
    leaves: Vec<Option<Edge>>,
    ends: Vec<Option<Edge>>,
}

/// Runs the function on what the `i`-th held rank has.
fn local(
    inputs: &[Tensor],
    i: usize,
    rank: usize,
    tracked: bool,
    f: &impl Fn(usize, &[Tensor]) -> Result<Vec<Tensor>>,
) -> Result<(Graph, Vec<Tensor>)> {
    let leaf = |t: &Tensor| match tracked && t.edge().is_some() {
        true => t.held(i).require_grad(),
        false => Ok(t.held(i)),
    };
    let leaves = inputs.iter().map(leaf).collect::<Result<Vec<_>>>()?;
    let mode = if tracked { Mode::On } else { Mode::Off };
    let given = with_mode(mode, || f(rank, &leaves))?;
    let edges = |of: &[Tensor]| of.iter().map(|t| t.edge().cloned()).collect();
    let graph = Graph {
        leaves: edges(&leaves),
        ends: edges(&given),
    };
    Ok((graph, given.iter().map(Tensor::detach).collect()))
}

/// Refuses what are not the parts that were promised.
fn check(
    op: &'static str,
    mesh: &Mesh,
    rank: usize,
    results: &[TensorType],
    given: &[Tensor],
) -> Result<()> {
    if results.len() != given.len() {
        let detail = format!(
            "{} results were promised, the function gave {}",
            results.len(),
            given.len()
        );
        return Err(Error::argument(op, "results", detail));
    }
    for (ty, part) in results.iter().zip(given) {
        let wanted = Shape::from(ty.sharding.region(mesh, rank, &ty.shape).shape);
        if (part.dtype(), part.shape()) != (ty.dtype, &wanted) {
            let detail = format!(
                "rank {rank} must have {}{wanted} of the result, the function gave {}",
                ty.dtype,
                part.type_string()
            );
            return Err(Error::shape(op, [part], detail));
        }
    }
    Ok(())
}

/// The way back.
struct Returns {
    op: &'static str,
    graphs: Vec<Graph>,
    places: Vec<Sharding>,
    inputs: Vec<TensorType>,
    mesh: Mesh,
}

impl Returns {
    fn pull(&self, back: &Back<'_>) -> Result<Pulled> {
        if mode() == Mode::On {
            let detail = "a function of parts has no gradient of its gradient";
            return Err(Error::gradient(
                self.op,
                NoGradient::NotDifferentiable,
                detail,
            ));
        }
        let _unseen = observe::unseen();
        // Each term of a sum has the gradient of the sum.
        let place = |(slot, sharding): (usize, &Sharding)| {
            let gradient = back.grad_of(slot);
            gradient.map(|g| g.reshard(sharding.whole())).transpose()
        };
        let seeds = self.places.iter().enumerate().map(place);
        let seeds = seeds.collect::<Result<Vec<_>>>()?;
        let mut parts: Vec<Vec<Tensor>> = vec![vec![]; self.inputs.len()];
        for ((i, rank), graph) in self.mesh.held().zip(&self.graphs) {
            let found = told(&self.mesh, Some(rank), self.found(back, graph, &seeds, i))?;
            for (slot, gradient) in found.into_iter().enumerate() {
                parts[slot].extend(gradient);
            }
        }
        let joined = |(slot, parts): (usize, Vec<Tensor>)| {
            let ty = &self.inputs[slot];
            let (place, shape) = (self.place(&ty.sharding), ty.shape.clone());
            let wanted = back.needs(slot);
            wanted.then(|| Tensor::from_parts(&self.mesh, place, ty.dtype, shape, parts))
        };
        Ok(parts.into_iter().enumerate().map(joined).collect())
    }

    /// The gradients of the operands that are wanted, on one rank.
    fn found(
        &self,
        back: &Back<'_>,
        graph: &Graph,
        seeds: &[Option<Tensor>],
        i: usize,
    ) -> Result<Vec<Option<Tensor>>> {
        let wanted = |slot: usize| graph.leaves[slot].as_ref().filter(|_| back.needs(slot));
        let targets: Vec<Edge> = (0..self.inputs.len())
            .filter_map(|slot| wanted(slot).cloned())
            .collect();
        let seed = |(edge, seed): (&Option<Edge>, &Option<Tensor>)| {
            Some((edge.clone()?, seed.as_ref()?.held(i)))
        };
        let seeds = graph.ends.iter().zip(seeds).filter_map(seed).collect();
        let found = Pass {
            targets: Some(&targets),
            stop: true,
            // The halves of a backward pass come by one after the other.
            retain: true,
            ..Pass::default()
        }
        .run(seeds)?;
        let mut gradients = vec![];
        for (slot, ty) in self.inputs.iter().enumerate() {
            let Some(edge) = wanted(slot) else {
                gradients.push(None);
                continue;
            };
            gradients.push(Some(match found.gradients.get(&edge.key()) {
                Some(gradient) => gradient.wait()?,
                // Nothing on this rank depended on it.
                None => {
                    let (_, rank) = self.mesh.held().nth(i).unwrap_or_default();
                    let region = ty.sharding.region(&self.mesh, rank, &ty.shape);
                    let here = self.mesh.local_mesh(i);
                    Tensor::zeros(Shape::from(region.shape), ty.dtype, here)?
                }
            }));
        }
        Ok(gradients)
    }

    /// How the gradient of an operand lies: partial along the axes over which ranks compute
    /// different terms and all have it.
    fn place(&self, operand: &Sharding) -> Sharding {
        let differs = |axis: &usize| {
            let of = |s: &Sharding| {
                s.cuts().any(|(_, a)| a == *axis) || s.partial().any(|(a, _)| a == *axis)
            };
            self.places.iter().any(of) && !operand.cuts().any(|(_, a)| a == *axis)
        };
        (0..self.mesh.axes().len())
            .filter(differs)
            .fold(operand.clone(), |s, axis| {
                s.partial_over(axis, Reduction::Sum)
            })
    }
}

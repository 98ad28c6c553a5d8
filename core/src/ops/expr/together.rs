//! The same expression over many tensors, in few launches.

use super::{Args, Expr};
use crate::{
    Buffer, DType, Device, Layout, Reduction, Result, Tensor,
    backend::{Launch, Views},
    grad::is_recording,
    map::{MapProgram, Val},
    observe,
    ops::run::MapRule,
    spmd::plain,
};
use smallvec::SmallVec;

impl<'a> Expr<'a> {
    /// What [`maps`](Self::maps) gives for each of several expressions that differ in their tensors
    /// alone, such as one step of an optimizer for all parameters. A device may take many of them in
    /// one launch.
    ///
    /// ```
    /// # use anymesh_core::{DType, Tensor, ops::Expr};
    /// # let device = anymesh_backend_cpu::device();
    /// let a = Tensor::new(&[1f32, 2.0], &device)?;
    /// let b = Tensor::new(&[3f32], &device)?;
    /// let each = [&a, &b].map(|x| Expr::new("twice", &[x]).params(&[2.0]));
    /// let twice = Expr::maps_each(&each, [DType::F32], |a| [a.x[0] * a.p[0]])?;
    /// assert_eq!(twice[0][0].to_vec::<f32>()?, [2.0, 4.0]);
    /// assert_eq!(twice[1][0].to_vec::<f32>()?, [6.0]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn maps_each<const N: usize>(
        each: &[Expr<'a>],
        dtypes: [DType; N],
        f: impl for<'b> Fn(&Args<'b>) -> [Val<'b>; N],
    ) -> Result<Vec<[Tensor; N]>> {
        Self::maps_together(each, dtypes, f, |_, _| SmallVec::new())
    }

    /// [`maps_each`](Self::maps_each) over tensors that are let go, so that a device may write
    /// results in their place: result `k` in that of tensor `over[k]`, where nobody else holds it.
    /// The first `reads` tensors of each are the inputs, the others are there for their memory.
    /// Afterwards `each` is empty; where this fails the tensors are still in it.
    ///
    /// ```
    /// # use anymesh_core::{DType, Tensor, ops::Expr};
    /// # let device = anymesh_backend_cpu::device();
    /// let (x, y) = (Tensor::new(&[1f32, 2.0], &device)?, Tensor::new(&[3f32], &device)?);
    /// let mut each = vec![vec![x], vec![y]];
    /// let next = Expr::maps_over("next", &[], &mut each, 1, [Some(0)], [DType::F32], |a| [a.x[0] + 1.0])?;
    /// assert_eq!(next[0][0].to_vec::<f32>()?, [2.0, 3.0]);
    /// assert!(each.is_empty());
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn maps_over<const N: usize>(
        op: &'static str,
        params: &[f64],
        each: &mut Vec<Vec<Tensor>>,
        reads: usize,
        over: [Option<usize>; N],
        dtypes: [DType; N],
        f: impl for<'b> Fn(&Args<'b>) -> [Val<'b>; N],
    ) -> Result<Vec<[Tensor; N]>> {
        let all: Vec<Expr<'_>> = (each.iter())
            .map(|tensors| {
                let inputs: SmallVec<[&Tensor; 6]> = tensors.iter().take(reads).collect();
                Expr::new(op, &inputs).params(params)
            })
            .collect();
        let memory = |i: usize, rank: usize| {
            let mut memory = SmallVec::new();
            for (k, from) in over.iter().enumerate() {
                let tensor = from.and_then(|from| each[i].get(from));
                let fits = |t: &&Tensor| t.dtype() == dtypes[k] && t.shape() == each[i][0].shape();
                let own = tensor.filter(fits).and_then(|t| t.own_buffer(rank));
                memory.extend(own.map(|buffer| (k, buffer)));
            }
            memory
        };
        let made = Expr::maps_together(&all, dtypes, f, memory)?;
        drop(all);
        each.clear();
        Ok(made)
    }

    /// What [`maps_each`](Self::maps_each) gives. `over` says which memory of a rank may be taken for
    /// which results of an expression.
    #[track_caller]
    fn maps_together<const N: usize>(
        each: &[Expr<'_>],
        dtypes: [DType; N],
        f: impl for<'b> Fn(&Args<'b>) -> [Val<'b>; N],
        over: impl Fn(usize, usize) -> SmallVec<[(usize, Buffer); 4]>,
    ) -> Result<Vec<[Tensor; N]>> {
        let mut out: Vec<Option<[Tensor; N]>> = Vec::with_capacity(each.len());
        let mut parts: Vec<Part> = Vec::with_capacity(each.len());
        let mut groups: Vec<Group> = vec![];
        for (i, expr) in each.iter().enumerate() {
            let tensors: SmallVec<[&Tensor; 6]> = expr.tensors().collect();
            let shape = expr.shape()?;
            let together = shape.numel() > 0
                && !is_recording(&tensors)
                && !observe::is_on()
                && (plain(expr.op, &tensors)? || expr.lie_alike(&tensors));
            if !together {
                out.push(Some(expr.clone().maps(dtypes, &f)?));
                continue;
            }
            out.push(None);
            let mesh = tensors[0].mesh();
            for (rank, _) in mesh.held().enumerate() {
                let part = parts.len();
                parts.push((i, None));
                let of_rank = match mesh.is_single() {
                    true => &shape,
                    false => tensors[0].held_shape(rank),
                };
                if of_rank.numel() == 0 {
                    continue;
                }
                let device = mesh.local_mesh(rank).device(0);
                let views = tensors.iter().map(|t| t.held_view(rank));
                let views = views.collect::<Result<Views>>()?;
                let known =
                    (groups.iter()).position(|g| g.device == *device && expr.is_like(&each[g.of]));
                let new = known.is_none();
                if new {
                    groups.push(Group {
                        program: expr.program(of_rank, dtypes, &f)?,
                        of: i,
                        device: device.clone(),
                        parts: Vec::with_capacity(each.len()),
                        launches: Vec::with_capacity(each.len()),
                    });
                }
                let last = groups.len() - 1;
                let group = &mut groups[known.unwrap_or(last)];
                let map = expr.over(&group.program, of_rank);
                if new {
                    map.check(device)?;
                }
                let kernel = map.call_of(views).into();
                let over = over(i, rank);
                group.parts.push(part);
                group.launches.push(Launch { kernel, over });
            }
        }
        for group in groups {
            let made = group.device.launch_all(group.launches)?;
            for (part, views) in group.parts.into_iter().zip(made) {
                parts[part].1 = Some(views);
            }
        }
        for of_one in parts.chunk_by_mut(|a, b| a.0 == b.0) {
            let i = of_one[0].0;
            out[i] = Some(put_together(each[i].inputs[0], dtypes, of_one));
        }
        let all: Vec<[Tensor; N]> = out.into_iter().flatten().collect();
        debug_assert_eq!(all.len(), each.len(), "results for each");
        Ok(all)
    }

    /// Whether it has the program of another one, for the same function.
    fn is_like(&self, other: &Self) -> bool {
        self.op == other.op
            && self.params.len() == other.params.len()
            && self.indices.is_empty()
            && other.indices.is_empty()
            && self.maybe.is_empty()
            && other.maybe.is_empty()
            && (self.tensors().map(Tensor::dtype)).eq(other.tensors().map(Tensor::dtype))
    }

    /// Whether each rank computes results of what it holds, and they lie as the tensors do.
    fn lie_alike(&self, tensors: &[&Tensor]) -> bool {
        let first = tensors[0];
        let alike = |t: &&Tensor| {
            t.mesh() == first.mesh()
                && t.sharding() == first.sharding()
                && t.shape() == first.shape()
        };
        // Terms of a sum pass through what loses nothing.
        let passes = matches!(self.rule, MapRule::Op { partials: true, .. }) && tensors.len() == 1;
        let mut reductions = first.sharding().partial();
        tensors.iter().all(alike) && reductions.all(|(_, r)| passes && r == Reduction::Sum)
    }
}

/// What one rank has of the results of an expression, which is told by its number; nothing where it
/// has no elements.
type Part = (usize, Option<Views>);

/// Launches with one program.
struct Group {
    program: MapProgram,
    /// An expression that has it.
    of: usize,
    device: Device,
    /// The parts that it gives, and the launch of each.
    parts: Vec<usize>,
    launches: Vec<Launch>,
}

/// The results of which these are the parts, which lie as `like`.
fn put_together<const N: usize>(
    like: &Tensor,
    dtypes: [DType; N],
    parts: &mut [Part],
) -> [Tensor; N] {
    // From the last to the first, so that each is taken from the end of what its launch gave.
    let mut all = std::array::from_fn(|k| {
        let k = N - 1 - k;
        let held = parts.iter_mut().enumerate().map(|(rank, (_, views))| {
            let view = views.as_mut().and_then(Views::pop);
            view.map_or_else(
                || (None, Layout::contiguous(like.held_shape(rank).clone())),
                |view| (Some(view.buffer), view.layout),
            )
        });
        Tensor::from_held(like, dtypes[k], held)
    });
    all.reverse();
    all
}

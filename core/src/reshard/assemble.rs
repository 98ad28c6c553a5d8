//! Tensors that are made of others element by element, where dimensions are cut: every rank fetches
//! the elements that it lacks, in one exchange.

use super::{
    boxes::{Inbox, lost},
    recipe::{Recipe, Run, Share, lacked},
};
use crate::{
    DType, Layout, Mesh, Region, Result, Shape, Sharding, Tensor, ledger, split,
    transport::{InProcess, Transport},
};
use smallvec::SmallVec;

/// What one rank makes its part of the result of.
pub(crate) struct Fetched {
    /// The elements that it needs of each operand; none where it needs nothing of it.
    pub(crate) operands: SmallVec<[Option<Tensor>; 1]>,
    /// For each dimension that is made, how. Pieces count the elements that were fetched.
    pub(crate) shares: SmallVec<[(usize, Share); 1]>,
    /// Dtype and shape of its part of the result.
    pub(crate) dtype: DType,
    pub(crate) shape: Shape,
}

/// Elements that lie in one part: which part, which of its elements, and where among those that are
/// fetched.
struct Chunk {
    holder: usize,
    run: Run,
    at: usize,
}

/// What one part of a dimension needs.
struct Needs {
    share: Share,
    /// Of each operand.
    chunks: SmallVec<[SmallVec<[Chunk; 2]>; 1]>,
}

/// A dimension that is made, by parts.
struct Along {
    dim: usize,
    /// The axes that cut it.
    axes: SmallVec<[usize; 2]>,
    parts: Vec<Needs>,
}

impl Along {
    fn new(inputs: &[Tensor], dim: usize, recipe: &Recipe) -> Self {
        let (mesh, sharding) = (inputs[0].mesh(), inputs[0].sharding());
        let axes: SmallVec<[usize; 2]> = sharding.axes_of(dim).collect();
        let count = axes.iter().map(|a| mesh.size(*a)).product();
        let needs = |part: usize| {
            let share = recipe.share(split(recipe.size(), part, count));
            let chunks = (inputs.iter().enumerate()).map(|(operand, x)| {
                let (size, mut at) = (x.dims()[dim], 0);
                let mut out = SmallVec::new();
                for run in share.runs(operand) {
                    for (holder, held) in run.by_holder(size, count) {
                        let run = Run {
                            start: held.start - split(size, holder, count).start,
                            ..held
                        };
                        out.push(Chunk { holder, run, at });
                        at += held.len;
                    }
                }
                out
            });
            Needs {
                chunks: chunks.collect(),
                share: share.of_runs(),
            }
        };
        Self {
            dim,
            axes,
            parts: (0..count).map(needs).collect(),
        }
    }

    /// The part of the dimension that a rank has.
    fn of(&self, mesh: &Mesh, rank: usize) -> &Needs {
        let (part, _) = mesh.part(rank, self.axes.iter().copied());
        &self.parts[part]
    }
}

/// A tensor whose dimensions `recipes` are made of those of the operands, which have one dtype and
/// one sharding: that of the result. Other dimensions are equal. `put` makes each rank's part of
/// what it fetched.
pub(crate) fn assemble(
    inputs: &[Tensor],
    recipes: &[(usize, Recipe)],
    put: impl Fn(&Fetched, &crate::Device) -> Result<Tensor>,
) -> Result<Tensor> {
    let x = &inputs[0];
    let (mesh, sharding) = (x.mesh(), x.sharding());
    let shape = (recipes.iter()).fold(x.shape().clone(), |shape, (dim, recipe)| {
        shape.with(*dim, recipe.size())
    });
    let ty = |shape: &Shape| sharding.type_string(x.dtype(), shape, mesh);
    let bytes = lacked(mesh, x.shape(), sharding, recipes) * x.dtype().size() as u64;
    let axes: SmallVec<[usize; 3]> = (recipes.iter())
        .flat_map(|(dim, _)| sharding.axes_of(*dim))
        .collect();
    // The neighbours that it fetches from do not wait for each other.
    let sent = ledger::Sent::along("exchange", mesh, &axes, 1, bytes);
    let types = || (ty(x.shape()), ty(&shape));
    ledger::write(sent, types, || {
        let parts = if mesh.has_values() {
            let along: SmallVec<[Along; 1]> = recipes
                .iter()
                .map(|(dim, recipe)| Along::new(inputs, *dim, recipe))
                .collect();
            exchange(inputs, &along, &shape, put)?
        } else {
            let part = |(i, rank)| {
                let region = sharding.region(mesh, rank, &shape);
                Tensor::placeholder(x.dtype(), &Shape::from(region.shape), mesh.local_mesh(i))
            };
            mesh.held().map(part).collect::<Result<_>>()?
        };
        Ok(Tensor::from_parts(
            mesh,
            sharding.clone(),
            x.dtype(),
            shape.clone(),
            parts,
        ))
    })
}

/// The part of the result that each addressable rank has.
fn exchange(
    inputs: &[Tensor],
    along: &[Along],
    shape: &Shape,
    put: impl Fn(&Fetched, &crate::Device) -> Result<Tensor>,
) -> Result<Vec<Tensor>> {
    let (mesh, sharding, dtype) = (inputs[0].mesh(), inputs[0].sharding(), inputs[0].dtype());
    let mut here = vec![None; mesh.ranks()];
    for (i, rank) in mesh.addressable().enumerate() {
        here[rank] = Some(i);
    }
    let mut inbox = Inbox::new(dtype);
    let mut out: Vec<Option<Tensor>> = vec![None; mesh.addressable().len()];
    // (part here, what it is made of with the numbers of operands in the inbox), (part here, part
    // that it shares).
    let (mut opened, mut shared) = (vec![], vec![]);
    for rank in 0..mesh.ranks() {
        let region = sharding.region(mesh, rank, shape);
        if region.numel() == 0 {
            if let Some(i) = here[rank] {
                out[i] = Some(Tensor::nothing(dtype, region.shape.into(), mesh.device(i)));
            }
            continue;
        }
        if let (Some(i), Some(twin)) = (here[rank], twin(mesh, sharding, rank)) {
            shared.push((i, twin));
            continue;
        }
        let needs: SmallVec<[&Needs; 2]> = along.iter().map(|a| a.of(mesh, rank)).collect();
        let mut numbers: SmallVec<[Option<usize>; 1]> = SmallVec::new();
        for (operand, x) in inputs.iter().enumerate() {
            let mut number = None;
            // Every combination of chunks, the last dimension first.
            let count: usize = needs.iter().map(|n| n.chunks[operand].len()).product();
            for combination in 0..count {
                let mut left = combination;
                let mut wanted = Region {
                    start: smallvec::smallvec![0; shape.rank()],
                    shape: region.shape.clone(),
                };
                let mut source = rank;
                let mut runs: SmallVec<[(usize, Run); 2]> = SmallVec::new();
                for (along, needs) in along.iter().zip(&needs).rev() {
                    let chunks = &needs.chunks[operand];
                    let chunk = &chunks[left % chunks.len()];
                    left /= chunks.len();
                    source = mesh.with_part(source, &along.axes, chunk.holder);
                    wanted.start[along.dim] = chunk.at;
                    wanted.shape[along.dim] = chunk.run.len;
                    runs.push((along.dim, chunk.run));
                }
                let data = here[source].map(|j| elements(&x.part(j), &runs));
                if here[rank].is_some() && number.is_none() {
                    number = Some(inbox.open());
                }
                match (source == rank, number, data) {
                    (true, Some(number), Some(data)) => inbox.have(number, wanted, data),
                    (false, None, None) | (true, ..) => {}
                    (false, number, data) => inbox.ask(number, wanted, source, rank, data),
                }
            }
            numbers.push(number);
        }
        if let Some(i) = here[rank] {
            let shares = along.iter().zip(&needs);
            let fetched = Fetched {
                operands: SmallVec::new(),
                shares: shares.map(|(a, n)| (a.dim, n.share.clone())).collect(),
                dtype,
                shape: region.shape.into(),
            };
            opened.push((i, numbers, fetched));
        }
    }
    let transport: &dyn Transport = mesh.transport().map_or(&InProcess, |t| &**t);
    let delivered = inbox.deliver(mesh, transport)?;
    for (i, numbers, mut fetched) in opened {
        fetched.operands = (numbers.iter())
            .map(|number| number.map(|n| delivered[n].clone()))
            .collect();
        out[i] = Some(put(&fetched, mesh.device(i))?);
    }
    for (i, twin) in shared {
        out[i] = out[twin].clone();
    }
    out.into_iter().collect::<Option<Vec<_>>>().ok_or_else(lost)
}

/// The first rank that holds what `rank` does, if it is another one of the same device. Only where
/// all ranks are here: elsewhere every process must say what is sent, whether or not it needs it.
fn twin(mesh: &Mesh, sharding: &Sharding, rank: usize) -> Option<usize> {
    if !mesh.is_local() {
        return None;
    }
    let telling = sharding.cut_mask() | sharding.partial_mask();
    let twin = (0..mesh.axes().len())
        .filter(|axis| telling & 1 << axis == 0)
        .fold(rank, |rank, axis| mesh.moved(rank, axis, 0));
    (twin != rank && mesh.device(twin) == mesh.device(rank)).then_some(twin)
}

/// Some of the elements of a plain tensor.
fn elements(x: &Tensor, runs: &[(usize, Run)]) -> Tensor {
    let slice = |layout: Layout, (dim, run): &(usize, Run)| {
        layout.slice(*dim, run.start, run.step as isize, run.len)
    };
    x.with_layout(runs.iter().fold(x.layout().clone(), slice))
}

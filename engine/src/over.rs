//! Results that take the memory of an operand which nobody will read any more: a list then needs less,
//! and what a training step changes stays where it lies.

use crate::{
    graph::{Graph, Source, fusable},
    groups::Reading,
    plan::{Body, Fused, Plan, Step},
};
use anymesh_kernel::{
    DType, Kernel, Layout, MapProgram, Mixed, Shape,
    map::{Inst, MAX_OUTPUTS},
};
use smallvec::SmallVec;

/// Results of a step, and for each the operand whose memory it takes.
pub(crate) type Pairs = SmallVec<[(usize, usize); 1]>;

/// For each step of a plan the results that may take the memory of an operand: nobody holds it but the
/// list, no later step reads it, and this one not as another operand, too.
pub(crate) fn pairs(plan: &Plan, graph: &Graph<'_>) -> Vec<Pairs> {
    let mut last = Mixed::<Source, usize>::default();
    for (i, step) in plan.steps.iter().enumerate() {
        let nodes = match step {
            Step::Single(node) => std::slice::from_ref(node),
            Step::Fused(fused) => &fused.nodes,
        };
        for source in nodes.iter().flat_map(|n| &graph.operands[*n as usize]) {
            last.insert(*source, i);
        }
    }
    let of_step = |(i, step): (usize, &Step)| {
        let sources: SmallVec<[Source; 6]> = match step {
            Step::Single(node) => graph.operands[*node as usize].iter().copied().collect(),
            Step::Fused(fused) => fused.inputs().iter().map(|r| r.source).collect(),
        };
        let free = |operand: usize| {
            let source = sources[operand];
            let times = sources.iter().filter(|other| **other == source).count();
            times == 1 && last.get(&source) == Some(&i) && !graph.known(source).held
        };
        match step {
            Step::Single(node) => of_kernel(graph.kernels[*node as usize], &free),
            Step::Fused(fused) => of_fused(fused, &free),
        }
    };
    plan.steps.iter().enumerate().map(of_step).collect()
}

fn of_kernel(kernel: &Kernel, free: &dyn Fn(usize) -> bool) -> Pairs {
    let Kernel::Map(call) = kernel else {
        let mut pairs = kernel.over();
        pairs.retain(|(_, operand)| free(*operand));
        return pairs;
    };
    if fusable(kernel).is_none() {
        return Pairs::new();
    }
    let inputs = call.inputs.iter().map(|input| Input {
        dtype: input.view.dtype,
        layout: &input.view.layout,
        whole: input.window.is_none()
            && input.view.buffer.bytes() == dense_bytes(input.view.dtype, &call.shape),
    });
    of_map(&call.program, &call.shape, inputs, free)
}

fn of_fused(fused: &Fused, free: &dyn Fn(usize) -> bool) -> Pairs {
    let (shape, inputs) = (&fused.shape, fused.inputs());
    let whole = |reading: &Reading| {
        reading.window.is_none() && reading.bytes == dense_bytes(reading.dtype, shape)
    };
    let inputs = inputs.iter().map(|reading| Input {
        dtype: reading.dtype,
        layout: &reading.layout,
        whole: whole(reading),
    });
    match &fused.body {
        Body::Map {
            joined,
            reduce: None,
        } => of_map(&joined.program, shape, inputs, free),
        Body::Map { .. } => Pairs::new(),
        Body::Rows { program, over, .. } => {
            let stored = program.dtypes()[0].first().copied();
            let fits = |first: &Input<'_>| first.whole && Some(first.dtype) == stored;
            let takes = *over && free(0) && inputs.take(1).any(|first| fits(&first));
            takes.then_some((0, 0)).into_iter().collect()
        }
    }
}

fn dense_bytes(dtype: DType, shape: &Shape) -> u64 {
    (shape.numel() * dtype.size()) as u64
}

/// An input of a map.
struct Input<'a> {
    dtype: DType,
    layout: &'a Layout,
    /// Whether its memory is as large as what is computed.
    whole: bool,
}

/// The results of a map that are computed from an input which is free and lies in memory as they do.
fn of_map<'a>(
    program: &MapProgram,
    shape: &Shape,
    inputs: impl Iterator<Item = Input<'a>>,
    free: &dyn Fn(usize) -> bool,
) -> Pairs {
    let mut pairs = Pairs::new();
    for (k, input) in inputs.enumerate() {
        let layout = input.layout;
        let dense = layout.offset == 0 && layout.is_contiguous() && layout.shape == *shape;
        if !input.whole || !dense || !free(k) {
            continue;
        }
        let from = computed_from(program, k);
        let result = program.outputs.iter().take(MAX_OUTPUTS).enumerate();
        let mut fitting =
            result.filter(|(_, (reg, dtype))| *dtype == input.dtype && from[usize::from(*reg)]);
        let own = |(o, _): &(usize, _)| pairs.iter().all(|(other, _)| other != o);
        if let Some((o, _)) = fitting.find(own) {
            pairs.push((o, k));
        }
    }
    pairs
}

/// The registers of a program whose values are computed from input `k`.
fn computed_from(program: &MapProgram, k: usize) -> Vec<bool> {
    let mut from = vec![false; program.insts.len()];
    for (i, inst) in program.insts.iter().enumerate() {
        let mut any = matches!(*inst, Inst::Load(input) if usize::from(input) == k);
        inst.operands(|r| any |= from[usize::from(r)]);
        from[i] = any;
    }
    from
}

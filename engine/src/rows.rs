//! Reductions of rows and the elementwise launches around them as one row program: what is a softmax, a
//! norm or the gradient of one, but was written as sums, products and exponentials.
//!
//! A device adds up a row in the same order alone and in any row program
//! ([`ReduceCall::as_rows`](anymesh_kernel::backend::ReduceCall::as_rows)), and fences keep the parts
//! from being computed in another way because others are near, so the bits are those of the launches.

use crate::{
    graph::{Source, fusable},
    groups::{Group, Groups, How, Reading, Segment},
    plan::{Body, Fused, Number, name, nodes, stored},
    program::{Joining, RESULT, live},
};
use anymesh_kernel::{
    DType, Kernel, Kind, Layout, MapProgram, Scalar, Shape,
    backend::{ReduceCall, RowFold, RowProgram, in_rows},
    map::{Binary, Inst, Program, Reg, Unary},
};
use smallvec::SmallVec;
use std::{collections::HashMap, sync::Arc};

/// Fences at most: each is an argument of the kernel.
const MAX_FENCES: usize = 64;
/// Values of elements that are kept for several parts at most: each takes a register for every element
/// that a thread has.
const MAX_SHARED: usize = 2;
/// Instructions that one of them has to save.
const MIN_GAIN: usize = 12;

/// What an instruction takes, in instructions of a GPU, roughly.
fn takes(inst: &Inst) -> usize {
    match inst {
        Inst::Const(..) | Inst::Param(_) | Inst::Cast(..) => 0,
        Inst::Unary(Unary::Neg | Unary::Abs | Unary::Not, _) => 1,
        Inst::Unary(..) | Inst::Binary(Binary::Div | Binary::Pow, ..) => 10,
        _ => 1,
    }
}

/// A view of a number for each row, in their order, over all of their elements.
fn of_each_row(shape: &Shape, lead: usize) -> Layout {
    let mut layout = Layout::contiguous(shape.dims()[..lead].into());
    layout.strides.resize(shape.rank(), 0);
    Layout {
        shape: shape.clone(),
        ..layout
    }
}

/// Whether two views show the same.
fn same_view(a: &Layout, b: &Layout) -> bool {
    let mut strides = a.strides.iter().zip(&b.strides).zip(a.shape.dims());
    a.shape == b.shape && a.offset == b.offset && strides.all(|((a, b), n)| *n == 1 || a == b)
}

impl Group {
    /// How long its rows are.
    fn row(&self) -> Option<usize> {
        Some(self.shape.dims()[self.rows?..].iter().product())
    }
}

impl Groups<'_> {
    /// Takes in what made an operand of a group, where one of the two reduces rows, and the other goes
    /// through the same ones or makes numbers of rows from such.
    pub(crate) fn take_in_rows(&mut self, group: usize, reading: &Reading) -> Option<()> {
        let Source::Result { node, .. } = reading.source else {
            return None;
        };
        let maker = self.home[node as usize];
        let (own, made) = (&self.list[group], &self.list[maker]);
        let others = |group: &Group| group.reduces && group.rows.is_none();
        if maker == group || others(own) || others(made) {
            return None;
        }
        let (shape, lead) = match made.rows {
            Some(lead) => (made.shape.clone(), lead),
            None => (own.shape.clone(), own.rows?),
        };
        let (dense, elements) = (Layout::contiguous(shape.clone()), shape.numel());
        let moved = match (own.row(), made.row()) {
            (Some(own), Some(made)) if own != made => return None,
            (None, Some(row)) if row > 1 && own.shape.numel() * row == elements => {
                let mut moved = own.seen_through(&of_each_row(&shape, lead))?;
                moved.iter_mut().for_each(|segment| segment.of_rows = true);
                moved
            }
            _ if own.shape.numel() == elements => own.seen_through(&dense)?,
            _ => return None,
        };
        if made.shape.numel() != elements {
            return None;
        }
        let mut segments = made.seen_through(&dense)?;
        for reading in moved.iter().flat_map(Segment::readings) {
            let Source::Result { node, .. } = reading.source else {
                continue;
            };
            if self.home[node as usize] != maker {
                continue;
            }
            let maker = segments.iter().find(|s| s.node == node as usize)?;
            let seen = match maker.of_rows {
                true => same_view(&reading.layout, &of_each_row(&shape, lead)),
                false => same_view(&reading.layout, &dense),
            };
            if !seen || reading.window.is_some() {
                return None;
            }
        }
        self.chain(&mut segments, moved, maker)?;
        let after = Group {
            segments,
            shape,
            node: own.node,
            reduces: false,
            rows: Some(lead),
            gone: false,
        };
        let allowed = !self.reaches(maker, group)
            && self.fits(&after, group, maker, How::Join)
            && self.saves_memory(group, maker, How::Join);
        allowed.then(|| self.commit(after, group, maker, How::Join))
    }

    /// Whether a group that takes in what `maker` does can be a row program. Of a part that is computed
    /// again nothing is stored.
    pub(crate) fn fits_rows(&self, after: &Group, group: usize, maker: usize, how: How) -> bool {
        let row = after.row().unwrap_or(1);
        let (mut of_each, mut of_rows) = (0, 0);
        for segment in &after.segments {
            let Some(call) = fusable(self.graph.kernels[segment.node]) else {
                return false;
            };
            let program = &call.program;
            let wide = |kind: &Kind| matches!(kind, Kind::F64 | Kind::I64);
            let plain = segment.indices.is_empty()
                && segment.readings().all(|reading| reading.window.is_none())
                && !program.kinds.contains(&Kind::F64)
                && !program.params.iter().any(wide);
            if !plain {
                return false;
            }
            let home = self.home[segment.node];
            if home != group && (how == How::Copy || home != maker) {
                continue;
            }
            for (k, (reg, dtype)) in program.outputs.iter().enumerate() {
                if !self.is_needed(segment.node, k, &[group, maker]) {
                    continue;
                }
                // Whole words, and no small floats that are to keep their bits.
                let small = dtype.is_float() && dtype.size() < 4;
                let stores = match segment.of_rows {
                    true => *dtype == DType::F32,
                    false => {
                        dtype.size() <= 4
                            && row * dtype.size() % 4 == 0
                            && !(small && program.moved(*dtype)[usize::from(*reg)])
                    }
                };
                if !stores {
                    return false;
                }
                of_each += usize::from(!segment.of_rows);
                of_rows += usize::from(segment.of_rows);
            }
        }
        let mut inputs: SmallVec<[&Reading; 8]> = SmallVec::new();
        for reading in after.readings() {
            if !inputs.iter().any(|known| known.same(reading)) {
                inputs.push(reading);
            }
        }
        let (_, most) = self.options.most();
        after.reduces
            || of_each.max(of_rows) <= most
                && inputs.len() + of_each + of_rows <= self.options.buffers
    }
}

/// A group that goes through rows as one launch, and a program that stands for all of it.
pub(crate) fn fused(
    groups: &Groups<'_>,
    g: usize,
    alive: &[bool],
    fences: bool,
) -> Option<(Fused, MapProgram)> {
    let (group, graph) = (&groups.list[g], groups.graph);
    let (of_rows, of_each): (Vec<_>, Vec<_>) = (stored(groups, g, alive).into_iter())
        .partition(|(segment, _)| group.segments[*segment].of_rows);
    let mut joining = Joining::new(fences, None);
    let outputs = joining.segments(graph, group)?;
    let mut folds: Vec<(usize, &ReduceCall)> = vec![];
    for (s, segment) in group.segments.iter().enumerate() {
        if let Kernel::Reduce(call) = graph.kernels[segment.node] {
            folds.push((s, call));
        }
    }
    // All that is reduced, all that is stored of elements, and of rows.
    let reduced = folds.iter().map(|(s, _)| (outputs[*s][0].0, DType::F32));
    let mut all: Vec<(Reg, DType)> = reduced.collect();
    all.extend(of_each.iter().map(|(s, k)| outputs[*s][*k]));
    for (s, k) in &of_rows {
        all.push(match folds.iter().any(|(fold, _)| fold == s) {
            true => (joining.value(*s, 0), DType::F32),
            false => outputs[*s][*k],
        });
    }
    let calls: Vec<&ReduceCall> = folds.iter().map(|(_, call)| *call).collect();
    // What a launch stored may be computed once for several parts.
    let (count, live) = (all.len(), joining.live(&all));
    for (s, _) in (group.segments.iter().enumerate()).filter(|(_, segment)| !segment.of_rows) {
        let values = (0..outputs[s].len()).map(|k| (joining.value(s, k), DType::F32));
        all.extend(values.filter(|(reg, _)| live[usize::from(*reg)]));
    }
    let joined = joining.finish(all);
    let (all, values) = joined.program.outputs.split_at(count);
    let (reduced, stored) = all.split_at(calls.len());
    let (each, rows) = stored.split_at(of_each.len());
    let mut parts = Parts::new(&joined.program, &joined.params, &calls);
    let mut of_parts: Vec<&[(Reg, DType)]> = (0..calls.len()).map(|k| &reduced[k..=k]).collect();
    of_parts.extend([each, rows]);
    let shared = parts.share(&of_parts, values)?;
    let mut folds = Vec::with_capacity(calls.len());
    for (k, call) in calls.iter().enumerate() {
        folds.push(RowFold {
            program: parts.part(&reduced[k..=k])?,
            mode: call.mode,
            scale: parts.scales[k],
        });
    }
    let mut some = |outputs: &[(Reg, DType)]| match outputs.is_empty() {
        true => Some(None),
        false => parts.part(outputs).map(Some),
    };
    let program = RowProgram {
        folds,
        each: some(each)?,
        rows: some(rows)?,
        columns: None,
        shared,
        params: parts.numbers.len(),
    };
    let layouts: SmallVec<[&Layout; 6]> = joined.inputs.iter().map(|r| &r.layout).collect();
    let (shape, layouts) = in_rows(group.rows?, &layouts)?;
    let inputs = (joined.inputs.iter().zip(layouts))
        .map(|(reading, layout)| Reading {
            layout,
            ..reading.clone()
        })
        .collect();
    let place = |(s, k): &(usize, usize)| (group.segments[*s].node as u32, *k as u8);
    let nodes = nodes(group);
    let fused = Fused {
        op: name(nodes.iter().map(|n| graph.kernels[*n as usize].op())),
        body: Body::Rows {
            program: Arc::new(program),
            inputs,
            numbers: parts.numbers,
            over: false,
        },
        shape,
        outputs: of_each.iter().chain(&of_rows).map(place).collect(),
        nodes,
    };
    Some((fused, joined.program))
}

/// The programs of the parts of a row program, of one that has them all.
struct Parts {
    /// What all parts have in common: instructions, inputs, parameters.
    whole: Program,
    /// The parameters before the results of reductions.
    numbers: Vec<Number>,
    /// For each reduction the parameter that its result is multiplied with.
    scales: Vec<Option<usize>>,
    /// Fences that have a number.
    fences: usize,
}

impl Parts {
    /// Of a joined program with what each of its parameters is.
    fn new(joined: &Program, given: &[(usize, usize)], calls: &[&ReduceCall]) -> Self {
        let (mut numbers, mut kinds) = (vec![], vec![]);
        for ((node, which), kind) in given.iter().zip(&joined.params) {
            if *node != RESULT {
                numbers.push(Number::Of(*node as u32, *which));
                kinds.push(*kind);
            }
        }
        let mut scales = vec![];
        for call in calls {
            scales.push(call.scale.map(|scale| {
                numbers.push(Number::Known(Scalar::Float(scale)));
                kinds.push(Kind::F32);
                numbers.len() - 1
            }));
        }
        kinds.extend(calls.iter().map(|_| Kind::F32));
        let mut own = 0;
        let places: Vec<usize> = (given.iter())
            .map(|(node, which)| match *node == RESULT {
                true => numbers.len() + which,
                false => {
                    own += 1;
                    own - 1
                }
            })
            .collect();
        let mut whole = Program {
            params: kinds,
            outputs: vec![],
            ..joined.clone()
        };
        for inst in &mut whole.insts {
            if let Inst::Param(k) = inst {
                *k = places[usize::from(*k)] as u8;
            }
        }
        Self {
            whole,
            numbers,
            scales,
            fences: 0,
        }
    }

    /// Chooses values that several parts need and that take long, and computes them once for all.
    fn share(
        &mut self,
        parts: &[&[(Reg, DType)]],
        values: &[(Reg, DType)],
    ) -> Option<Option<MapProgram>> {
        let mut chosen: Vec<Reg> = vec![];
        let insts = &self.whole.insts;
        // What is there before anything is reduced.
        let mut late = vec![false; insts.len()];
        for (i, inst) in insts.iter().enumerate() {
            let mut own = matches!(inst, Inst::Param(k) if usize::from(*k) >= self.numbers.len());
            inst.operands(|r| own |= late[usize::from(r)]);
            late[i] = own;
        }
        while chosen.len() < MAX_SHARED {
            let mut left = insts.clone();
            for reg in &chosen {
                left[usize::from(*reg)] = Inst::Load(0);
            }
            let of_parts: Vec<Vec<bool>> = (parts.iter())
                .map(|outputs| live(&left, outputs.iter().map(|(reg, _)| *reg)))
                .collect();
            let of_chosen = live(insts, chosen.iter().copied());
            let gain = |reg: Reg| {
                let at = usize::from(reg);
                let uses = of_parts.iter().filter(|live| live[at]).count();
                let all = live(&left, std::iter::once(reg));
                let takes: usize = (left.iter().zip(&all).filter(|(_, live)| **live))
                    .map(|(inst, _)| takes(inst))
                    .sum();
                takes * (uses + usize::from(of_chosen[at])).saturating_sub(1)
            };
            let values = values.iter().map(|(reg, _)| *reg);
            let able = |reg: &Reg| {
                let at = usize::from(*reg);
                !late[at] && self.whole.kinds[at] == Kind::F32 && !chosen.contains(reg)
            };
            let best = (values.filter(able).map(|reg| (gain(reg), reg))).max();
            match best {
                Some((gain, reg)) if gain >= MIN_GAIN => chosen.push(reg),
                _ => break,
            }
        }
        if chosen.is_empty() {
            return Some(None);
        }
        chosen.sort_unstable();
        let outputs: Vec<(Reg, DType)> = chosen.iter().map(|reg| (*reg, DType::F32)).collect();
        let shared = self.part(&outputs)?;
        for reg in &chosen {
            self.whole.insts[usize::from(*reg)] = Inst::Load(self.whole.inputs.len() as u8);
            self.whole.inputs.push(DType::F32);
        }
        Some(Some(shared))
    }

    /// The part with these outputs. No other part has a fence of the same number: what two parts
    /// compute, each from the same inputs, a compiler must not take for one.
    fn part(&mut self, outputs: &[(Reg, DType)]) -> Option<MapProgram> {
        let part: MapProgram = Program {
            outputs: outputs.to_vec(),
            ..self.whole.clone()
        }
        .into();
        let mut part = Program::clone(&part.without_unused());
        let mut known = HashMap::new();
        for inst in &mut part.insts {
            if let Inst::Fence(_, number) = inst {
                let fences = &mut self.fences;
                let own = known.entry(*number).or_insert_with(|| {
                    *fences += 1;
                    *fences
                });
                *number = u8::try_from(*own).ok()?;
            }
        }
        (self.fences <= MAX_FENCES).then(|| part.into())
    }
}

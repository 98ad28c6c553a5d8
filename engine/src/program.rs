//! Programs joined into one that gives the same bits.

use crate::{
    graph::{Graph, fusable},
    groups::{Feed, Group, Reading},
};
use anymesh_kernel::{
    DType, Kernel, Kind, MapProgram, Scalar,
    backend::Affine,
    map::{Inst, Program, Reg},
};

/// A joined program, and where what it is given comes from.
#[derive(Clone, Debug)]
pub(crate) struct Joined {
    pub(crate) program: MapProgram,
    /// One for each input.
    pub(crate) inputs: Vec<Reading>,
    /// One for each index.
    pub(crate) indices: Vec<Affine>,
    /// One for each scalar: a launch, and which of its scalars it is.
    pub(crate) params: Vec<(usize, usize)>,
}

/// The programs of a group as one that stores these outputs of these segments. `first` is the input
/// to name first.
pub(crate) fn join(
    graph: &Graph<'_>,
    group: &Group,
    stored: &[(usize, usize)],
    first: Option<&Reading>,
    fences: bool,
) -> Option<Joined> {
    let mut joining = Joining::new(fences, first);
    let outputs = joining.segments(graph, group)?;
    let outputs = stored.iter().map(|(segment, k)| outputs[*segment][*k]);
    Some(joining.finish(outputs.collect()))
}

/// The registers that some are computed from, and these.
pub(crate) fn live(insts: &[Inst], of: impl Iterator<Item = Reg>) -> Vec<bool> {
    let mut live = vec![false; insts.len()];
    of.for_each(|reg| live[usize::from(reg)] = true);
    for i in (0..insts.len()).rev() {
        if live[i] {
            insts[i].operands(|r| live[usize::from(r)] = true);
        }
    }
    live
}

/// The launch whose scalars are the results of reductions of rows, one after the other.
pub(crate) const RESULT: usize = usize::MAX;

/// Programs that are being joined.
#[derive(Default)]
pub(crate) struct Joining {
    /// Whether the device compiles programs.
    compiled: bool,
    insts: Vec<Inst>,
    kinds: Vec<Kind>,
    inputs: Vec<Reading>,
    indices: Vec<(Affine, Kind)>,
    params: Vec<((usize, usize), Kind)>,
    /// For each segment and output, the register that holds what a load of the stored output would.
    values: Vec<Vec<Reg>>,
}

impl Joining {
    pub(crate) fn new(compiled: bool, first: Option<&Reading>) -> Self {
        Self {
            compiled,
            inputs: first.into_iter().cloned().collect(),
            ..Self::default()
        }
    }

    /// What output `k` of a segment is to those who read it.
    pub(crate) fn value(&self, segment: usize, k: usize) -> Reg {
        self.values[segment][k]
    }

    /// Joins the programs of a group and returns the outputs of each. Where a group goes through rows,
    /// what a reduction gives is a parameter.
    pub(crate) fn segments(
        &mut self,
        graph: &Graph<'_>,
        group: &Group,
    ) -> Option<Vec<Vec<(Reg, DType)>>> {
        let (in_rows, mut results) = (group.rows.is_some() && !group.reduces, 0);
        let mut outputs: Vec<Vec<(Reg, DType)>> = vec![];
        for (s, segment) in group.segments.iter().enumerate() {
            let call = fusable(graph.kernels[segment.node])?;
            // Segments are few, so their numbers fit.
            let fence = self.compiled.then_some(s as u8 + 1);
            let program = &call.program;
            let shared = program.shared_products();
            let mut regs: Vec<Reg> = Vec::with_capacity(program.insts.len());
            for (i, (inst, kind)) in program.insts.iter().zip(&program.kinds).enumerate() {
                let reg = match *inst {
                    Inst::Load(k) => match &segment.feeds[usize::from(k)] {
                        Feed::Memory(reading) => {
                            let input = self.input(reading);
                            let loaded = self.push(Inst::Load(input), *kind);
                            self.fence(loaded, *kind, fence)
                        }
                        Feed::Register { segment, output } => {
                            let value = self.values[*segment][*output];
                            self.fence(value, *kind, fence)
                        }
                    },
                    Inst::Inside(k) => match &segment.feeds[usize::from(k)] {
                        Feed::Memory(reading) if reading.window.is_some() => {
                            let input = self.input(reading);
                            self.push(Inst::Inside(input), *kind)
                        }
                        _ => self.push(Inst::Const(Scalar::Bool(true), Kind::Bool), Kind::Bool),
                    },
                    Inst::Index(k) => {
                        let index = self.index(&segment.indices[usize::from(k)], *kind);
                        let position = self.push(Inst::Index(index), *kind);
                        self.fence(position, *kind, fence)
                    }
                    Inst::Param(k) => {
                        let param = self.param((segment.node, usize::from(k)), *kind);
                        self.push(Inst::Param(param), *kind)
                    }
                    Inst::Fence(a, _) => regs[usize::from(a)],
                    other => self.push(other.over(|r| regs[usize::from(r)]), *kind),
                };
                let reg = if shared[i] {
                    self.fence(reg, *kind, fence)
                } else {
                    reg
                };
                regs.push(reg);
            }
            let of = |(reg, dtype): &(Reg, DType)| (regs[usize::from(*reg)], *dtype);
            outputs.push(program.outputs.iter().map(of).collect());
            let values = match in_rows && matches!(graph.kernels[segment.node], Kernel::Reduce(_)) {
                true => {
                    let result = self.param((RESULT, results), Kind::F32);
                    results += 1;
                    vec![self.push(Inst::Param(result), Kind::F32)]
                }
                false => (program.outputs.iter())
                    .map(|(reg, dtype)| self.stored(program, &regs, *reg, *dtype))
                    .collect(),
            };
            self.values.push(values);
        }
        Some(outputs)
    }

    /// The register of an instruction; one that is there already is not computed again.
    fn push(&mut self, inst: Inst, kind: Kind) -> Reg {
        let known = self.insts.iter().position(|known| *known == inst);
        known.unwrap_or_else(|| {
            self.insts.push(inst);
            self.kinds.push(kind);
            self.insts.len() - 1
        }) as Reg
    }

    fn fence(&mut self, reg: Reg, kind: Kind, number: Option<u8>) -> Reg {
        match number {
            Some(number) => self.push(Inst::Fence(reg, number), kind),
            None => reg,
        }
    }

    fn input(&mut self, reading: &Reading) -> u8 {
        let known = self.inputs.iter().position(|known| known.same(reading));
        known.unwrap_or_else(|| {
            self.inputs.push(reading.clone());
            self.inputs.len() - 1
        }) as u8
    }

    fn index(&mut self, form: &Affine, kind: Kind) -> u8 {
        let known = (self.indices.iter()).position(|(f, k)| f == form && *k == kind);
        known.unwrap_or_else(|| {
            self.indices.push((form.clone(), kind));
            self.indices.len() - 1
        }) as u8
    }

    fn param(&mut self, param: (usize, usize), kind: Kind) -> u8 {
        let known = self.params.iter().position(|(known, _)| *known == param);
        known.unwrap_or_else(|| {
            self.params.push((param, kind));
            self.params.len() - 1
        }) as u8
    }

    /// What a load gives of register `reg` of a program when it was stored as `dtype`: rounded, and
    /// elements that are only moved as they were.
    fn stored(&mut self, program: &MapProgram, regs: &[Reg], reg: Reg, dtype: DType) -> Reg {
        if dtype == dtype.kind().dtype() {
            let own = regs[usize::from(reg)];
            // What is rounded to a small float may be computed coarsely, but not what was stored before.
            return match self.insts[usize::from(own)] {
                Inst::Unary(..) | Inst::Binary(..) | Inst::Select(..) | Inst::Fence(..)
                    if self.compiled && dtype == DType::F32 =>
                {
                    self.push(Inst::Cast(own, dtype), dtype.kind())
                }
                _ => own,
            };
        }
        let moved = program.moved(dtype);
        self.rounded(program, regs, &moved, reg, dtype)
    }

    fn rounded(
        &mut self,
        program: &MapProgram,
        regs: &[Reg],
        moved: &[bool],
        reg: Reg,
        dtype: DType,
    ) -> Reg {
        let own = regs[usize::from(reg)];
        match program.insts[usize::from(reg)] {
            _ if !moved[usize::from(reg)] => self.push(Inst::Cast(own, dtype), dtype.kind()),
            Inst::Select(condition, yes, no) => {
                let yes = self.rounded(program, regs, moved, yes, dtype);
                let no = self.rounded(program, regs, moved, no, dtype);
                let condition = regs[usize::from(condition)];
                self.push(Inst::Select(condition, yes, no), dtype.kind())
            }
            Inst::Cast(a, _) | Inst::Fence(a, _) => self.rounded(program, regs, moved, a, dtype),
            _ => own,
        }
    }

    /// The registers that some outputs need.
    pub(crate) fn live(&self, outputs: &[(Reg, DType)]) -> Vec<bool> {
        live(&self.insts, outputs.iter().map(|(reg, _)| *reg))
    }

    /// The program without what no output needs.
    pub(crate) fn finish(self, outputs: Vec<(Reg, DType)>) -> Joined {
        let live = self.live(&outputs);
        let used = |of: &dyn Fn(&Inst) -> Option<u8>, count: usize| -> Vec<Option<u8>> {
            let mut used = vec![false; count];
            for (inst, _) in self.insts.iter().zip(&live).filter(|(_, live)| **live) {
                if let Some(k) = of(inst) {
                    used[usize::from(k)] = true;
                }
            }
            let mut next = 0;
            let number = |used: bool| {
                next += u8::from(used);
                used.then(|| next - 1)
            };
            used.into_iter().map(number).collect()
        };
        let input = |inst: &Inst| match *inst {
            Inst::Load(k) | Inst::Inside(k) => Some(k),
            _ => None,
        };
        let index = |inst: &Inst| match *inst {
            Inst::Index(k) => Some(k),
            _ => None,
        };
        let param = |inst: &Inst| match *inst {
            Inst::Param(k) => Some(k),
            _ => None,
        };
        let inputs = used(&input, self.inputs.len());
        let indices = used(&index, self.indices.len());
        let params = used(&param, self.params.len());
        let new = |numbers: &[Option<u8>], k: u8| numbers[usize::from(k)].unwrap_or_default();
        let (mut insts, mut kinds) = (vec![], vec![]);
        let mut numbers: Vec<Reg> = vec![0; self.insts.len()];
        for (i, inst) in self.insts.iter().enumerate().filter(|(i, _)| live[*i]) {
            numbers[i] = insts.len() as Reg;
            insts.push(match *inst {
                Inst::Load(k) => Inst::Load(new(&inputs, k)),
                Inst::Inside(k) => Inst::Inside(new(&inputs, k)),
                Inst::Index(k) => Inst::Index(new(&indices, k)),
                Inst::Param(k) => Inst::Param(new(&params, k)),
                other => other.over(|r| numbers[usize::from(r)]),
            });
            kinds.push(self.kinds[i]);
        }
        fn kept<T>(list: Vec<T>, numbers: &[Option<u8>]) -> Vec<T> {
            let both = list.into_iter().zip(numbers);
            both.filter(|(_, n)| n.is_some()).map(|(t, _)| t).collect()
        }
        let inputs = kept(self.inputs, &inputs);
        let (indices, index_kinds) = kept(self.indices, &indices).into_iter().unzip();
        let (params, param_kinds) = kept(self.params, &params).into_iter().unzip();
        let outputs = (outputs.into_iter())
            .map(|(reg, dtype)| (numbers[usize::from(reg)], dtype))
            .collect();
        let program = Program {
            insts,
            kinds,
            inputs: inputs.iter().map(|reading| reading.dtype).collect(),
            indices: index_kinds,
            params: param_kinds,
            outputs,
        };
        Joined {
            program: program.into(),
            inputs,
            indices,
            params,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anymesh_kernel::map::{Binary, Builder};

    #[test]
    fn what_was_stored_as_f32_is_no_step_of_what_rounds_it() {
        let builder = Builder::new();
        let third = builder.load(DType::F32) / 3.0;
        let program = builder.finish(&[(third, DType::F32)]).expect("valid");
        let stored = |compiled: bool| {
            let mut joining = Joining {
                compiled,
                ..Joining::default()
            };
            let regs: Vec<Reg> = (program.insts.iter().zip(&program.kinds))
                .map(|(inst, kind)| joining.push(*inst, *kind))
                .collect();
            let (reg, dtype) = program.outputs[0];
            let value = joining.stored(&program, &regs, reg, dtype);
            joining.insts[usize::from(value)]
        };
        // Kernels compute coarsely what only casts to small floats read.
        assert!(matches!(stored(true), Inst::Cast(_, DType::F32)));
        assert!(matches!(stored(false), Inst::Binary(Binary::Div, ..)));
    }
}

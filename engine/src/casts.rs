//! Conversions around row kernels: what widens an operand of softmax, a norm, cross-entropy or one of
//! their gradients becomes a part of how they read it, and what rounds a result a part of how they
//! store it. So rows that are computed in `f32` are not written and read as such on the way.

use crate::{
    graph::{Source, fusable},
    groups::{Feed, Groups, Reading},
};
use anymesh_kernel::{
    DType, Kernel,
    backend::{MapCall, RowProgramCall},
    map::Inst,
};
use smallvec::SmallVec;

/// Conversions that a row kernel makes itself.
#[derive(Clone, Debug, Default)]
pub(crate) struct Casts {
    /// Operands that are read as they were before they were widened: which, by which launch, and what
    /// that read.
    pub(crate) inputs: SmallVec<[(usize, u32, Reading); 1]>,
    /// Results that are stored as a launch made them of what was stored: which, that launch, and as
    /// what.
    pub(crate) outputs: SmallVec<[(usize, u32, DType); 1]>,
}

impl Casts {
    /// The call of a row kernel with its conversions; its buffers are those of the operands that it
    /// had.
    pub(crate) fn call(&self, kernel: &Kernel) -> Option<RowProgramCall> {
        let mut call = match kernel {
            Kernel::RowProgram(call) => (**call).clone(),
            // Parameters that repeat within rows are nothing that programs say.
            Kernel::Row(call) => match call.as_program() {
                Ok((call, None)) => call,
                _ => return None,
            },
            _ => return None,
        };
        for (k, _, reading) in &self.inputs {
            let view = call.inputs.get_mut(*k)?;
            view.dtype = reading.dtype;
            view.layout.offset += reading.layout.offset;
            call.program = call.program.with_input(*k, reading.dtype).into();
        }
        for (k, _, dtype) in &self.outputs {
            let stored = call.program.dtypes()[0].get(*k).copied();
            if stored != Some(DType::F32) {
                return None;
            }
            call.program = call.program.with_rounded(*k, *dtype).into();
        }
        Some(call)
    }
}

/// A launch that does nothing but convert what lies densely, from one of these dtypes to the other.
fn conversion(kernel: &Kernel, from: fn(DType) -> bool, to: fn(DType) -> bool) -> Option<&MapCall> {
    let call = fusable(kernel).filter(|_| matches!(kernel, Kernel::Map(_)))?;
    let ([input], [(reg, dtype)]) = (&call.inputs[..], &call.program.outputs[..]) else {
        return None;
    };
    let insts = &call.program.insts;
    let mut reg = usize::from(*reg);
    // A load is of the kind that both have; what rounds is the store, or a cast to what is stored.
    while let Inst::Cast(of, cast) = insts[reg] {
        if cast != DType::F32 && cast != *dtype {
            return None;
        }
        reg = usize::from(of);
    }
    let dense = input.window.is_none()
        && input.view.layout.is_contiguous()
        && input.view.layout.shape == call.shape;
    let converts = matches!(insts[reg], Inst::Load(0)) && from(input.view.dtype) && to(*dtype);
    (dense && converts).then_some(call)
}

fn is_small(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F16)
}

fn is_f32(dtype: DType) -> bool {
    dtype == DType::F32
}

impl Groups<'_> {
    /// Has row kernels make the conversions around them that nobody else needs.
    pub(crate) fn take_casts(&mut self, supports: &dyn Fn(&Kernel) -> bool) {
        for n in 0..self.graph.kernels.len() {
            if self.list[n].segments.len() != 1 {
                continue;
            }
            let kernel = self.graph.kernels[n];
            if conversion(kernel, is_small, is_f32).is_some() {
                self.widens(n, supports);
            } else if let Some(call) = conversion(kernel, is_f32, is_small) {
                let dtype = call.program.outputs[0].1;
                self.rounds(n, dtype, supports);
            }
        }
    }

    /// The operands of a launch, as they are read.
    pub(crate) fn operands(&self, n: usize) -> SmallVec<[Source; 4]> {
        let mut operands = self.graph.operands[n].clone();
        let casts = self.casts.get(&n);
        for (k, _, reading) in casts.iter().flat_map(|casts| &casts.inputs) {
            operands[*k] = reading.source;
        }
        operands
    }

    /// The conversions of a row kernel with more of them, if there is a kernel for it.
    fn with(
        &self,
        n: usize,
        change: impl FnOnce(&mut Casts),
        supports: &dyn Fn(&Kernel) -> bool,
    ) -> Option<Casts> {
        let mut casts = self.casts.get(&n).cloned().unwrap_or_default();
        change(&mut casts);
        let call = casts.call(self.graph.kernels[n])?;
        supports(&call.into()).then_some(casts)
    }

    /// What is widened by launch `cast`, if all who read that are row kernels, which can do so.
    fn widens(&mut self, cast: usize, supports: &dyn Fn(&Kernel) -> bool) -> Option<()> {
        let widened = Source::Result {
            node: cast as u32,
            output: 0,
        };
        let Some(Feed::Memory(reading)) = self.list[cast].segments[0].feeds.first().cloned() else {
            return None;
        };
        if self.held(widened) || self.readers(widened).is_empty() {
            return None;
        }
        let mut changed: SmallVec<[(usize, Casts); 2]> = SmallVec::new();
        for n in self.readers(widened).iter().map(|n| *n as usize) {
            let operands = self.operands(n);
            let places: SmallVec<[usize; 2]> = (0..operands.len())
                .filter(|k| operands[*k] == widened)
                .collect();
            // A kernel binds a buffer once.
            if places.len() != 1 || operands.contains(&reading.source) {
                return None;
            }
            let take = |casts: &mut Casts| {
                casts.inputs.push((places[0], cast as u32, reading.clone()));
            };
            changed.push((n, self.with(n, take, supports)?));
        }
        for (n, casts) in changed {
            self.casts.insert(n, casts);
            self.remove_reader(widened, n);
            self.add_reader(reading.source, n);
        }
        self.remove_reader(reading.source, cast);
        self.let_go(cast);
        Some(())
    }

    /// What launch `cast` makes of a result of a row kernel, if nobody else reads the result.
    fn rounds(
        &mut self,
        cast: usize,
        dtype: DType,
        supports: &dyn Fn(&Kernel) -> bool,
    ) -> Option<()> {
        let Some(Feed::Memory(reading)) = self.list[cast].segments[0].feeds.first() else {
            return None;
        };
        let source = reading.source;
        let Source::Result { node, output } = source else {
            return None;
        };
        let (n, k) = (node as usize, usize::from(output));
        let alone = self.readers(source) == [cast as u32] && !self.held(source);
        let whole =
            reading.layout.offset == 0 && reading.bytes == 4 * self.list[cast].shape.numel() as u64;
        if !alone || !whole || !self.list[n].segments.is_empty() {
            return None;
        }
        let take = |casts: &mut Casts| casts.outputs.push((k, cast as u32, dtype));
        let casts = self.with(n, take, supports)?;
        self.casts.insert(n, casts);
        self.remove_reader(source, cast);
        self.let_go(cast);
        self.home[cast] = n;
        Some(())
    }

    /// A launch that another one stands for.
    fn let_go(&mut self, n: usize) {
        let gone = &mut self.list[n];
        gone.gone = true;
        gone.segments.clear();
    }
}

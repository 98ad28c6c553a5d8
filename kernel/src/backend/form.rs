//! What a launch is, apart from the memory that it works on.

use super::{
    AttentionCall, GroupedOp, IndexAxis, Kernel, MapCall, RowOp, RowProgram, ScatterCall, View,
};
use crate::{DType, Layout, MapProgram, Scalar};
use smallvec::SmallVec;
use std::{
    hash::{Hash, Hasher},
    sync::Arc,
};

/// What a launch is, or a list of launches, apart from the memory that it works on and from the numbers
/// that its programs are given. Launches of one form do the same with other operands, so what a backend
/// found out for one of them holds for all: cheap to make, to hash and to compare.
///
/// ```
/// use anymesh_kernel::{Buffer, DType, Layout, View, backend::{Kernel, SortCall}};
/// let sort = |buffer: &Buffer, len: usize| -> Kernel {
///     let layout = Layout::contiguous([len].into());
///     let input = View { buffer: buffer.clone(), dtype: DType::U8, layout };
///     SortCall { op: "argsort", input, descending: false }.into()
/// };
/// let (a, b) = (Buffer::new((), 64), Buffer::new((), 64));
/// assert_eq!(sort(&a, 8).form(), sort(&b, 8).form());
/// assert_ne!(sort(&a, 8).form(), sort(&a, 9).form());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Form {
    hash: u64,
    words: SmallVec<[u64; 64]>,
    programs: SmallVec<[MapProgram; 1]>,
    rows: SmallVec<[Arc<RowProgram>; 1]>,
}

impl Hash for Form {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl Form {
    /// A number that forms are told apart by, mostly.
    pub fn number(&self) -> u64 {
        self.hash
    }

    /// The form of launches one after the other, of none yet, with room for as much as another one has.
    /// It is no form before it is [done](Self::done).
    pub fn like(other: Option<&Form>) -> Self {
        Form {
            hash: 0,
            words: SmallVec::with_capacity(other.map_or(0, |other| other.words.len())),
            programs: SmallVec::new(),
            rows: SmallVec::new(),
        }
    }

    /// Adds a launch.
    pub fn add(&mut self, kernel: &Kernel) {
        // Which family and which op: words that live for ever are told apart by where they are.
        for text in [kernel.family(), kernel.op()] {
            self.push(text.as_ptr() as u64);
            self.push(text.len() as u64);
        }
        self.operands(kernel);
        self.call(kernel);
    }

    /// After the last launch.
    pub fn done(mut self) -> Self {
        self.close();
        self
    }

    /// The memory that it takes itself, about.
    pub fn bytes(&self) -> usize {
        self.words.len() * 8 + self.programs.len() * 16
    }

    fn push(&mut self, word: u64) {
        self.words.push(word);
    }

    fn all(&mut self, words: impl IntoIterator<Item = usize>) {
        // Lists follow each other: each begins with its length.
        let at = self.words.len();
        self.push(0);
        self.words.extend(words.into_iter().map(|word| word as u64));
        self.words[at] = (self.words.len() - at) as u64;
    }

    fn layout(&mut self, layout: &Layout) {
        let rank = layout.shape.rank();
        self.words.reserve(2 * rank + 2);
        self.push(rank as u64);
        (layout.shape.dims().iter()).for_each(|dim| self.push(*dim as u64));
        (layout.strides.iter()).for_each(|stride| self.push(*stride as u64));
        self.push(layout.offset as u64);
    }

    /// Views, and which of them share memory.
    fn operands(&mut self, kernel: &Kernel) {
        let views: SmallVec<[&View; 6]> = kernel.operands().collect();
        self.push(views.len() as u64);
        for (k, view) in views.iter().enumerate() {
            let first = views[..k]
                .iter()
                .position(|other| other.buffer.same(&view.buffer));
            self.push((view.dtype as u64) << 32 | first.unwrap_or(k) as u64);
            self.push(view.buffer.bytes());
            self.layout(&view.layout);
        }
    }

    fn map(&mut self, call: &MapCall) {
        self.all(call.shape.dims().iter().copied());
        for input in &call.inputs {
            let window = input.window.iter().flatten().map(|start| *start as usize);
            self.push(u64::from(input.window.is_some()));
            self.all(window);
        }
        for form in &call.indices {
            self.push(form.offset as u64);
            self.all(form.strides.iter().map(|stride| *stride as usize));
        }
        let over = call.over.pairs();
        self.all(over.map(|(output, input)| output << 8 | input));
        self.programs.push(call.program.clone());
    }

    fn axes(&mut self, axes: &[IndexAxis]) {
        self.all((axes.iter()).flat_map(|axis| [axis.len, axis.stride as usize]));
    }

    fn scatter(&mut self, call: &ScatterCall) {
        self.all([call.rows, call.inner, call.mode as usize]);
        self.all(call.shape.dims().iter().copied());
        self.push(call.base.offset as u64);
        self.all(call.base.strides.iter().map(|stride| *stride as usize));
        self.axes(&call.axes);
    }

    fn attention(&mut self, call: &AttentionCall) {
        self.push(call.scale.to_bits());
        let flags = u64::from(call.documents.is_some()) << 1 | u64::from(call.causal);
        self.push(flags << 8 | call.order as u64);
    }

    fn row(&mut self, mode: &RowOp) {
        match mode {
            RowOp::Softmax => self.push(0),
            RowOp::LogSoftmax => self.push(1),
            RowOp::Norm {
                rms,
                eps,
                weight,
                bias,
                groups,
                channels,
                inner,
            } => {
                let flags = [*rms, weight.is_some(), bias.is_some()];
                let flags = flags
                    .iter()
                    .fold(1, |all, flag| all << 1 | u64::from(*flag));
                self.push(flags);
                self.push(eps.to_bits());
                self.all([*groups, *channels, *inner]);
            }
        }
    }

    /// Everything of a launch that is not an operand.
    fn call(&mut self, kernel: &Kernel) {
        let dtype = |dtype: DType| dtype as u64;
        match kernel {
            Kernel::Map(call) => self.map(call),
            Kernel::Reduce(call) => {
                self.map(&call.map);
                self.all(call.axes.iter().copied());
                self.push((call.mode as u64) << 8 | dtype(call.dtype));
                self.push(call.scale.map_or(u64::MAX, f64::to_bits));
            }
            Kernel::Scan(call) => {
                let positions = usize::from(call.positions);
                self.all([call.axis, call.mode as usize, positions]);
            }
            Kernel::Matmul(call) => {
                let over = call.addend.as_ref().map(|addend| addend.over);
                let extras = [call.scales.is_some(), call.bias.is_some()];
                let flags = [extras[0], extras[1], over.is_some(), over == Some(true)];
                let flags = flags.iter().fold(1, |all, f| all << 1 | u64::from(*f));
                self.push(flags << 8 | dtype(call.dtype));
            }
            Kernel::Grouped(call) => {
                let groups = match call.mode {
                    GroupedOp::Rows => u64::MAX,
                    GroupedOp::Sums { groups } => groups as u64,
                };
                self.push(call.first as u64);
                self.push(groups);
                self.push(dtype(call.dtype));
            }
            Kernel::Gather(call) => self.axes(&call.axes),
            Kernel::CheckIndex(call) => self.push(call.len as u64),
            Kernel::Scatter(call) => self.scatter(call),
            Kernel::Search(call) => self.push(u64::from(call.right)),
            Kernel::Sort(call) => self.push(u64::from(call.descending)),
            Kernel::Conv(call) => {
                let lists = [call.out, call.stride, call.padding, call.dilation];
                self.all(lists.into_iter().flatten());
                let transposed = usize::from(call.transposed);
                self.all([call.channels, call.groups, transposed]);
            }
            Kernel::Row(call) => {
                self.push(u64::from(call.residual.is_some()));
                self.row(&call.mode);
            }
            Kernel::RowProgram(call) => {
                self.all(call.shape.dims().iter().copied());
                self.push(u64::from(call.over));
                self.rows.push(call.program.clone());
            }
            Kernel::Attention(call) => self.attention(call),
            Kernel::AttentionBackward(call) => self.attention(&call.forward),
        }
    }

    fn close(&mut self) {
        let mixed = |hash: u64, word: u64| {
            (hash.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        };
        // Four numbers side by side: one by one each step waits for the one before.
        let (fours, rest) = self.words.as_chunks::<4>();
        let mut lanes = [1u64, 2, 3, 4];
        for four in fours {
            for (lane, word) in lanes.iter_mut().zip(four) {
                *lane = mixed(*lane, *word);
            }
        }
        let mut hash = lanes.into_iter().chain(rest.iter().copied()).fold(0, mixed);
        let rows = (self.rows.iter()).flat_map(|program| program.programs());
        for program in self.programs.iter().chain(rows) {
            hash = mixed(hash, program.number());
        }
        self.hash = hash ^ hash >> 29;
    }
}

impl Kernel {
    /// What it is, apart from its operands' memory and from its [numbers](Self::numbers).
    pub fn form(&self) -> Form {
        let mut form = Form::like(None);
        form.add(self);
        form.done()
    }

    /// The numbers that its program is given when it is launched.
    pub fn numbers(&self) -> &[Scalar] {
        match self {
            Kernel::Map(call) => &call.params,
            Kernel::Reduce(call) => &call.map.params,
            Kernel::RowProgram(call) => &call.params,
            _ => &[],
        }
    }
}

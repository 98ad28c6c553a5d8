//! A map program expanded into straight-line kernel code on four lanes.
//!
//! [`eval`] is plain Rust that runs while a kernel is compiled: it walks the program and emits code
//! for each instruction. Reductions fold what it returns. Map kernels store what [`eval_stored`]
//! returns: elements that a program only moves never become values there, and keep their bits.

mod coarse;
mod emit;
mod lanes;

pub(crate) use emit::*;
pub(crate) use lanes::*;

use anymesh_kernel::{
    DType, Dims, Kind, MapProgram, Scalar, Shape,
    backend::{Affine, MapCall, MapInput, Repeat},
    layout::collapse,
};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// How four consecutive positions find their elements in an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Mode {
    /// Dense and aligned: one vector load. With a window all four are inside of it, or none.
    Vector,
    /// The same element for all four: one scalar load.
    Splat,
    /// In one row, a fixed step apart.
    Strided,
    /// Anywhere: each lane finds its own coordinates.
    Scattered,
    /// Of a [`Repeat`]: each lane finds its own.
    Repeated,
    /// Of a [`Repeat`]: the same for all four.
    RepeatedSplat,
}

/// One input as the kernel sees it at compile time.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Source {
    dtype: DType,
    mode: Mode,
    windowed: bool,
    /// Position among the buffers of its width.
    binding: usize,
    /// Where its offset and strides start among the numbers.
    first: usize,
}

/// Everything about a map call that is fixed when its kernel is compiled.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MapPlan {
    pub(crate) program: MapProgram,
    rank: usize,
    sources: Vec<Source>,
    /// Where the affine indices start among the numbers.
    indices: usize,
    /// Whether the device's own float functions are as good as ours.
    native: bool,
}

impl MapPlan {
    /// Another program over the same inputs.
    pub(crate) fn with_program(&self, program: &MapProgram) -> Self {
        Self {
            program: program.clone(),
            ..self.clone()
        }
    }

    /// Whether the device's own float functions are used.
    pub(crate) fn native(&self) -> bool {
        self.native
    }
}

/// What changes from launch to launch: numbers, parameters and buffers by word width.
pub(crate) struct Bound {
    pub(crate) plan: MapPlan,
    pub(crate) address: AddressType,
    pub(crate) numbers: Vec<usize>,
    pub(crate) params: Vec<u32>,
    wide: Vec<(Handle, usize)>,
    pairs: Vec<(Handle, usize)>,
    words: Vec<(Handle, usize)>,
}

/// Where chunks of four positions may start.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Chunks {
    /// At multiples of four.
    Anywhere,
    /// At multiples of four within each run of so many positions.
    Runs(usize),
    /// At multiples of four within the last dimension, with whose end they end; inputs but the
    /// first may repeat.
    Rows(Option<Repeat>),
}

/// A signed step as an unsigned number that wraps to it in the kernel's address width.
pub(crate) fn wrap(value: i64, address: AddressType) -> usize {
    match address {
        AddressType::U32 => value as u32 as usize,
        AddressType::U64 => value as usize,
    }
}

/// Buffers for a sequence argument.
pub(crate) fn bind<T: CubePrimitive>(
    buffers: &[(Handle, usize)],
    bytes: usize,
) -> SequenceArg<Box<[T]>> {
    let mut arg = SequenceArg::new();
    for (handle, size) in buffers {
        // SAFETY: the length is the buffer's own size in units of the element.
        arg.push(unsafe { BufferArg::from_raw_parts(handle.clone(), size / bytes) });
    }
    arg
}

impl Bound {
    /// Lays out a call with its dimensions in `order`. Chunks of four positions start at multiples
    /// of four, or, with a `run`, at multiples of four within each run of that many positions.
    pub(crate) fn new(
        call: &MapCall,
        order: Option<&[usize]>,
        run: Option<usize>,
        handles: &[(Handle, usize)],
        address: AddressType,
    ) -> Self {
        let chunks = match run {
            Some(run) => Chunks::Runs(run),
            None => Chunks::Anywhere,
        };
        Self::laid_out(call, order, chunks, handles, address)
    }

    /// Lays out a call over rows for chunks that start at multiples of four within a row and end with
    /// it: dimensions stay apart. With a `repeat` inputs but the first are lists of parameters, and
    /// rows have one dimension. Other programs over the same inputs have fences up to a number.
    pub(crate) fn rows(
        call: &MapCall,
        repeat: Option<Repeat>,
        fences: usize,
        handles: &[(Handle, usize)],
        address: AddressType,
    ) -> Self {
        let mut bound = Self::laid_out(call, None, Chunks::Rows(repeat), handles, address);
        let more = fences.saturating_sub(call.program.fences());
        bound.params.extend(std::iter::repeat_n(0, more));
        bound
    }

    /// Lays out a call whose inputs are dense, for a kernel that finds them by itself: all are
    /// bound by their width, one after the other, and every address is as wide as can be.
    pub(crate) fn dense(call: &MapCall, handles: &[(Handle, usize)]) -> Self {
        let mut bound = Bound {
            plan: MapPlan {
                program: call.program.clone(),
                rank: 1,
                sources: vec![],
                indices: 0,
                native: false,
            },
            address: AddressType::U64,
            numbers: vec![],
            params: vec![],
            wide: vec![],
            pairs: vec![],
            words: vec![],
        };
        for (input, handle) in call.inputs.iter().zip(handles) {
            let dtype = input.view.dtype;
            let list = match dtype.size() {
                4 | 8 => &mut bound.wide,
                2 => &mut bound.pairs,
                _ => &mut bound.words,
            };
            list.push(handle.clone());
            bound.plan.sources.push(Source {
                dtype,
                mode: Mode::Vector,
                windowed: false,
                binding: list.len() - 1,
                first: 0,
            });
        }
        bound.push_params(call);
        bound
    }

    fn laid_out(
        call: &MapCall,
        order: Option<&[usize]>,
        chunks: Chunks,
        handles: &[(Handle, usize)],
        address: AddressType,
    ) -> Self {
        let permuted = |strides: &[i64]| -> Dims<isize> {
            match order {
                Some(order) => order.iter().map(|&d| strides[d] as isize).collect(),
                None => strides.iter().map(|&s| s as isize).collect(),
            }
        };
        let shape: Shape = match order {
            Some(order) => order.iter().map(|&d| call.shape[d]).collect(),
            None => call.shape.clone(),
        };
        let wide = |s: &[isize]| -> Dims<i64> { s.iter().map(|&s| s as i64).collect() };
        let mut strides: Vec<Dims<isize>> = call
            .inputs
            .iter()
            .map(|i| permuted(&wide(&i.view.layout.strides)))
            .collect();
        strides.extend(call.indices.iter().map(|a| permuted(&a.strides)));
        // Windows belong to dimensions, so dimensions keep apart where there is one.
        let apart =
            matches!(chunks, Chunks::Rows(_)) || call.inputs.iter().any(|i| i.window.is_some());
        let shape = if apart {
            shape
        } else {
            collapse(&shape, &mut strides)
        };
        let shape = if shape.rank() == 0 {
            strides.iter_mut().for_each(|s| s.push(0));
            Shape::from([1])
        } else {
            shape
        };
        let order: Dims = order.map_or_else(|| (0..call.shape.rank()).collect(), Dims::from_slice);
        let (inputs, indices) = strides.split_at(call.inputs.len());

        let mut bound = Bound {
            plan: MapPlan {
                program: call.program.clone(),
                rank: shape.rank(),
                sources: vec![],
                indices: 0,
                native: false,
            },
            address,
            numbers: shape.dims().to_vec(),
            params: vec![],
            wide: vec![],
            pairs: vec![],
            words: vec![],
        };
        for (k, (input, strides)) in call.inputs.iter().zip(inputs).enumerate() {
            bound.add_input(
                input,
                strides,
                &shape,
                &order,
                chunks,
                &handles[k],
                &call.inputs,
                k,
            );
        }
        bound.plan.indices = bound.numbers.len();
        for (affine, strides) in call.indices.iter().zip(indices) {
            bound.push_affine(affine.offset, strides);
        }
        bound.push_params(call);
        bound
    }

    fn push_params(&mut self, call: &MapCall) {
        for (value, kind) in call.params.iter().zip(&call.program.params) {
            self.push_param(*value, *kind);
        }
        // A zero the compiler cannot see through: constants that shader languages refuse (infinity,
        // NaN) are made with it. Each number of fences has one of its own.
        let zeros = 1 + call.program.fences();
        self.params.extend(std::iter::repeat_n(0, zeros));
    }

    fn push_affine(&mut self, offset: i64, strides: &[isize]) {
        self.numbers.push(wrap(offset, self.address));
        self.numbers
            .extend(strides.iter().map(|&s| wrap(s as i64, self.address)));
    }

    fn push_param(&mut self, value: Scalar, kind: Kind) {
        match kind {
            Kind::F32 => self.params.push((value.to_f64() as f32).to_bits()),
            Kind::Bool => self.params.push(u32::from(value.to_bool())),
            Kind::I32 | Kind::U32 => self.params.push(value.to_i64() as u32),
            Kind::I64 | Kind::F64 => {
                let bits = if kind == Kind::F64 {
                    value.to_f64().to_bits()
                } else {
                    value.to_i64() as u64
                };
                self.params.extend([bits as u32, (bits >> 32) as u32]);
            }
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn add_input(
        &mut self,
        input: &MapInput,
        strides: &[isize],
        shape: &Shape,
        order: &[usize],
        chunks: Chunks,
        handle: &(Handle, usize),
        all: &[MapInput],
        k: usize,
    ) {
        let last = shape.rank() - 1;
        // Four positions stay in one row when the innermost dimension is a multiple of four, or the
        // only one.
        let aligned_runs = !matches!(chunks, Chunks::Runs(run) if run % 4 != 0);
        let even = shape[last] % 4 == 0 && aligned_runs;
        let whole = chunks == Chunks::Runs(shape[last]);
        let rows = matches!(chunks, Chunks::Rows(_));
        let row = even || rows || shape.rank() == 1 && (aligned_runs || whole);
        let repeat = match chunks {
            Chunks::Rows(repeat) if k > 0 => repeat,
            _ => None,
        };
        let aligned =
            input.view.layout.offset % 4 == 0 && strides[..last].iter().all(|s| s % 4 == 0);
        // One buffer is bound once: shader languages refuse aliases. Uses that differ in width fall
        // back to single words.
        let shared = all
            .iter()
            .enumerate()
            .any(|(j, other)| j != k && other.view.buffer.same(&input.view.buffer));
        let mode = if let Some(repeat) = repeat {
            match even && repeat.inner % 4 == 0 {
                true => Mode::RepeatedSplat,
                false => Mode::Repeated,
            }
        } else if let Some(window) = &input.window {
            // Where it covers whole rows, four positions are inside or outside together.
            let covers = order.get(last).is_some_and(|&own| {
                window[own] == 0 && input.view.layout.shape[own] == shape[last]
            });
            match covers && even && strides[last] == 1 && aligned && !shared {
                true => Mode::Vector,
                false => Mode::Scattered,
            }
        } else if row && strides[last] == 1 && aligned && !shared {
            Mode::Vector
        } else if row && strides[last] == 0 {
            Mode::Splat
        } else if even {
            Mode::Strided
        } else {
            Mode::Scattered
        };
        let size = input.view.dtype.size();
        let list = match (mode, size) {
            (Mode::Vector, 4 | 8) => &mut self.wide,
            (Mode::Vector, 2) => &mut self.pairs,
            _ => &mut self.words,
        };
        let known = (0..k)
            .find(|&j| shared && all[j].view.buffer.same(&input.view.buffer))
            .map(|j| self.plan.sources[j].binding);
        let binding = known.unwrap_or_else(|| {
            list.push(handle.clone());
            list.len() - 1
        });
        let first = self.numbers.len();
        let start: Dims<isize> = input.window.as_ref().map_or_else(
            || smallvec::smallvec![0; order.len()],
            |w| order.iter().map(|&d| w[d]).collect(),
        );
        let mut offset = input.view.layout.offset as i64;
        if input.window.is_some() {
            offset -= start
                .iter()
                .zip(strides)
                .map(|(s, t)| *s as i64 * *t as i64)
                .sum::<i64>();
        }
        match repeat {
            Some(Repeat {
                groups,
                channels,
                inner,
            }) => {
                self.numbers.push(wrap(offset, self.address));
                self.numbers.extend([groups, channels, inner]);
            }
            None => self.push_affine(offset, strides),
        }
        if input.window.is_some() {
            self.numbers
                .extend(start.iter().map(|&s| wrap(s as i64, self.address)));
            self.numbers
                .extend(order.iter().map(|&d| input.view.layout.shape[d]));
        }
        self.plan.sources.push(Source {
            dtype: input.view.dtype,
            mode,
            windowed: input.window.is_some(),
            binding,
            first,
        });
    }

    /// Lets the kernel use the device's own float functions.
    pub(crate) fn with_native(mut self, native: bool) -> Self {
        self.plan.native = native;
        self
    }

    /// The launch arguments that every kernel with a program in it takes, in the order of
    /// [`Inputs`].
    pub(crate) fn launch(&self) -> InputsLaunch {
        InputsLaunch::new(
            bind(&self.wide, 16),
            bind(&self.pairs, 8),
            bind(&self.words, 4),
            self.numbers.iter().copied().collect(),
            self.params.iter().copied().collect(),
        )
    }
}

/// The address width a call needs: all element positions, affine values and the iteration space
/// must fit.
pub(crate) fn address_of(call: &MapCall, buffers: impl Iterator<Item = usize>) -> AddressType {
    let reach = |a: &Affine| {
        a.offset.unsigned_abs()
            + a.strides
                .iter()
                .zip(call.shape.dims())
                .map(|(s, n)| s.unsigned_abs() * *n as u64)
                .sum::<u64>()
    };
    let largest = buffers
        .map(|bytes| bytes as u64 / 4)
        .chain(call.indices.iter().map(reach))
        .chain([call.shape.numel() as u64])
        .max();
    if largest.unwrap_or(0) < i32::MAX as u64 {
        AddressType::U32
    } else {
        AddressType::U64
    }
}

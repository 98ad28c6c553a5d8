//! Elementwise programs.

use crate::{
    CubeBackend, Memory,
    intern::Interned,
    program::{Bound, Inputs, MapPlan, address_of, bind, eval_stored},
    reg::Raw,
    words::{self, U2, U4},
};
use anymesh_kernel::{
    Buffer, DType, Layout, MapProgram, Result, Shape, View,
    backend::{Buffers, MapCall, MapInput},
};
use cubecl::prelude::*;
use smallvec::smallvec;

/// Threads of a cube, for every elementwise kernel.
pub(crate) const CUBE: u32 = 256;

/// The output buffers by word width. Kernels use them through their expansions, which the compiler
/// does not see.
#[derive(CubeType, CubeLaunch)]
#[allow(dead_code)]
pub(crate) struct Outputs {
    wide: Sequence<Box<[U4]>>,
    pairs: Sequence<Box<[U2]>>,
    words: Sequence<Box<[u32]>>,
}

#[cube]
fn put_wide(out: &mut [U4], at: usize, value: U4) {
    out[at] = value;
}

#[cube]
fn put_pair(out: &mut [U2], at: usize, value: U2) {
    out[at] = value;
}

#[cube]
fn put_word(out: &mut [u32], at: usize, value: u32) {
    out[at] = value;
}

#[cube]
fn twice(at: usize, #[comptime] plus: usize) -> usize {
    at * 2usize + plus
}

/// Stores four lanes as elements `4 * chunk ..` of the `nth` buffer of their width.
pub(crate) fn store(
    scope: &Scope,
    out: &mut OutputsExpand,
    nth: usize,
    chunk: NativeExpand<usize>,
    value: Raw,
    dtype: DType,
) {
    match (value, dtype.size()) {
        (Raw::Wide(bits), _) => {
            for half in 0..2usize {
                let lanes = words::split64::expand(scope, bits, half);
                let at = twice::expand(scope, chunk, half);
                put_wide::expand(
                    scope,
                    out.wide.__expand_index_mut_method(scope, nth.into()),
                    at,
                    lanes,
                );
            }
        }
        (Raw::Bits(bits), 4) => {
            put_wide::expand(
                scope,
                out.wide.__expand_index_mut_method(scope, nth.into()),
                chunk,
                bits,
            );
        }
        (Raw::Bits(bits), 2) => {
            let bits = words::pack16::expand(scope, bits);
            put_pair::expand(
                scope,
                out.pairs.__expand_index_mut_method(scope, nth.into()),
                chunk,
                bits,
            );
        }
        (Raw::Bits(bits), _) => {
            let bits = words::pack8::expand(scope, bits);
            put_word::expand(
                scope,
                out.words.__expand_index_mut_method(scope, nth.into()),
                chunk,
                bits,
            );
        }
    }
}

/// Position of an output among those of its word width.
pub(crate) fn nth_of_width(dtypes: &[DType], k: usize) -> usize {
    let class = |d: &DType| d.size().clamp(1, 4);
    dtypes[..k]
        .iter()
        .filter(|d| class(d) == class(&dtypes[k]))
        .count()
}

/// Computes `unroll` chunks and then stores them: loads that no store separates can be in flight
/// together.
#[cube]
#[allow(unused_variables)]
fn run(
    inputs: &Inputs,
    out: &mut Outputs,
    faults: &mut Sequence<Box<[u32]>>,
    first: usize,
    chunks: usize,
    #[comptime] plan: Interned<MapPlan>,
    #[comptime] unroll: usize,
) {
    intrinsic!(|scope| {
        let dtypes: Vec<DType> = plan.program.outputs.iter().map(|(_, d)| *d).collect();
        let mut computed = Vec::with_capacity(unroll);
        for u in 0..unroll {
            let chunk = nth_chunk::expand(scope, first, u);
            let start = start_of::expand(scope, chunk, chunks);
            let mut fault = |lanes| crate::fault::divided(scope, faults, lanes);
            computed.push((chunk, eval_stored(scope, inputs, &plan, start, &mut fault)));
        }
        for (chunk, results) in computed {
            let inside = below::expand(scope, chunk, chunks);
            if_expand(scope, inside, |scope| {
                for (k, value) in results.iter().enumerate() {
                    store(
                        scope,
                        out,
                        nth_of_width(&dtypes, k),
                        chunk,
                        *value,
                        dtypes[k],
                    );
                }
            });
        }
    })
}

#[cube]
fn nth_chunk(first: usize, #[comptime] u: usize) -> usize {
    first + comptime!(u * CUBE as usize)
}

/// The first position of a chunk; threads past the end repeat the last chunk and store nothing.
#[cube]
fn start_of(chunk: usize, chunks: usize) -> usize {
    min(chunk, chunks - 1usize) * 4usize
}

#[cube]
fn below(chunk: usize, chunks: usize) -> bool {
    chunk < chunks
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn map_kernel(
    inputs: &Inputs,
    out: &mut Outputs,
    faults: &mut Sequence<Box<[u32]>>,
    chunks: usize,
    #[comptime] plan: Interned<MapPlan>,
    #[comptime] unroll: usize,
) {
    let first = CUBE_POS * comptime!(CUBE as usize * unroll) + UNIT_POS as usize;
    run(inputs, out, faults, first, chunks, plan, unroll);
}

impl Outputs {
    /// Buffers for launch: `memory` for each dtype, sorted by word width.
    pub(crate) fn bound(memory: &[(crate::Memory, DType)]) -> OutputsLaunch {
        let of = |sizes: &[usize]| -> Vec<_> {
            memory
                .iter()
                .filter(|(_, d)| sizes.contains(&d.size()))
                .map(|(m, _)| (m.handle.clone(), m.bytes))
                .collect()
        };
        OutputsLaunch::new(
            bind(&of(&[4, 8]), 16),
            bind(&of(&[2]), 8),
            bind(&of(&[1]), 4),
        )
    }
}

impl Outputs {
    /// Buffers for launch, all as single words, in order.
    pub(crate) fn as_words(memory: &[(crate::Memory, DType)]) -> OutputsLaunch {
        let words: Vec<_> = memory
            .iter()
            .map(|(m, _)| (m.handle.clone(), m.bytes))
            .collect();
        OutputsLaunch::new(bind(&[], 16), bind(&[], 8), bind(&words, 4))
    }
}

impl OutputsExpand {
    /// The `nth` buffer of single words.
    pub(crate) fn words_mut(
        &mut self,
        scope: &Scope,
        nth: usize,
    ) -> &mut <Box<[u32]> as CubeType>::ExpandType {
        self.words.__expand_index_mut_method(scope, nth.into())
    }
}

impl CubeBackend {
    pub(crate) fn run_map(&self, call: &MapCall) -> Result<Buffers> {
        if let Some(memory) = self.run_turned(call)? {
            return Ok(smallvec![memory.buffer()]);
        }
        let elements = call.shape.numel();
        let bound = self.bind_program(call, None, None)?;
        let mut outputs = Vec::with_capacity(call.program.outputs.len());
        let mut buffers = Buffers::new();
        for (k, (_, dtype)) in call.program.outputs.iter().enumerate() {
            let input = call.over.of(k).and_then(|input| call.inputs.get(input));
            let taken = match input {
                Some(input) => self.memory_over(&input.view, *dtype, elements)?,
                None => None,
            };
            let (memory, buffer) = match taken {
                Some(taken) => taken,
                None => {
                    let memory = self.alloc(*dtype, elements)?;
                    (memory.clone(), memory.buffer())
                }
            };
            outputs.push((memory, *dtype));
            buffers.push(buffer);
        }
        let chunks = elements.div_ceil(4);
        // Large tensors: 16 bytes from each thread, of the widest elements; where much is computed, 32
        // bytes of all that is read or of what is written, so that it hides some of the loads. On an
        // H200 a copy took 1 to 4 % longer with 32 bytes and 8 % with 8, and gelu 10 % longer with 16.
        // Small tensors: more threads.
        let read = call.inputs.iter().map(|i| i.view.dtype.size());
        let written = call.program.outputs.iter().map(|(_, d)| d.size());
        let unroll = match chunks < 1 << 20 {
            true => 1,
            false if call.program.insts.len() < 10 => 4 / read.chain(written).max().unwrap_or(4),
            false => 8 / read.sum::<usize>().max(written.sum()),
        };
        let unroll = unroll.clamp(1, 4);
        // SAFETY: threads past the last chunk do nothing; the outputs are padded to whole chunks.
        unsafe {
            map_kernel::launch_unchecked(
                &self.client,
                crate::cubes(chunks.div_ceil(unroll), CUBE),
                CubeDim::new_1d(CUBE),
                bound.address,
                bound.launch(),
                Outputs::bound(&outputs),
                self.fault_if(call.program.can_fault()),
                chunks,
                self.programs.intern(bound.plan),
                unroll,
            );
        }
        Ok(buffers)
    }

    /// The memory of an input, where `elements` of `dtype` fit into it as they lie there: for a result that
    /// may take it. Every thread reads an element before it writes it, and no other one after. Only on
    /// CUDA: elsewhere one kernel cannot bind memory twice.
    pub(crate) fn memory_over(
        &self,
        view: &View,
        dtype: DType,
        elements: usize,
    ) -> Result<Option<(Memory, Buffer)>> {
        let dense = view.layout.offset == 0 && view.layout.is_contiguous();
        if !self.native || view.dtype != dtype || !dense {
            return Ok(None);
        }
        let memory = crate::memory(view)?;
        let fits = memory.bytes == Memory::padded(dtype, elements);
        Ok(fits.then(|| (memory.clone(), view.buffer.clone())))
    }

    /// Lays out a map call for a kernel (see [`Bound::new`]).
    pub(crate) fn bind_program(
        &self,
        call: &MapCall,
        order: Option<&[usize]>,
        run: Option<usize>,
    ) -> Result<Bound> {
        let handles = call
            .inputs
            .iter()
            .map(|input| crate::memory(&input.view).map(|m| (m.handle.clone(), m.bytes)))
            .collect::<Result<Vec<_>>>()?;
        let address = address_of(call, handles.iter().map(|(_, bytes)| *bytes));
        Ok(Bound::new(call, order, run, &handles, address).with_native(self.native))
    }

    /// A dense buffer of `elements` converted to another dtype; itself where it already has it.
    pub(crate) fn convert(
        &self,
        memory: Memory,
        from: DType,
        to: DType,
        elements: usize,
    ) -> Result<Buffer> {
        let buffer = memory.buffer();
        if from == to {
            return Ok(buffer);
        }
        let shape = Shape::from([elements]);
        let view = View {
            buffer,
            dtype: from,
            layout: Layout::contiguous(shape.clone()),
        };
        self.copy_as(&view, to)
    }

    /// The elements of a view, dense and as `dtype`.
    pub(crate) fn copy_as(&self, view: &View, dtype: DType) -> Result<Buffer> {
        let input = MapInput {
            view: view.clone(),
            window: None,
        };
        let call = MapCall {
            op: "cast",
            program: MapProgram::cast(view.dtype, dtype),
            shape: view.layout.shape.clone(),
            inputs: smallvec![input],
            indices: smallvec![],
            params: smallvec![],
            over: Default::default(),
        };
        Ok(self.run_map(&call)?.swap_remove(0))
    }

    /// The view itself where it is dense from the start of its buffer and of `dtype`, else a copy
    /// that is.
    pub(crate) fn dense(&self, view: &View, dtype: DType) -> Result<View> {
        if view.dtype == dtype && view.layout.offset == 0 && view.layout.is_contiguous() {
            return Ok(view.clone());
        }
        Ok(View {
            buffer: self.copy_as(view, dtype)?,
            dtype,
            layout: Layout::contiguous(view.layout.shape.clone()),
        })
    }
}

//! The same map over many tensors as one launch, on devices whose kernels reach any memory.
//!
//! A kernel is given the buffers of the first tensor, and a table that says for every tensor how
//! far its own buffers lie from those. So the kernel is the same for any number of tensors, and it
//! computes what a launch for each would.

use crate::{
    CubeBackend, Memory, Reached,
    intern::Interned,
    map::{CUBE, Outputs, OutputsExpand, nth_of_width, store},
    program::{Bound, Inputs, MapPlan, eval_dense},
};
use anymesh_kernel::{
    Buffer, DType, Kernel, Result,
    backend::{Buffers, Launch, MapCall},
};
use cubecl::prelude::*;
use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError},
};

/// Chunks of four elements that a cube computes.
const SPAN: usize = 2048;

/// Tables that are kept.
const TABLES: usize = 16;

/// Tables by what is in them, the oldest first.
pub(crate) type Tables = Mutex<VecDeque<(Vec<u64>, Memory)>>;

/// A map among the kernels that are launched together.
pub(crate) struct Member<'a> {
    pub(crate) position: usize,
    pub(crate) call: &'a MapCall,
    /// Results and the memory that they take.
    over: &'a [(usize, Buffer)],
}

/// Whether a call reads dense memory from the first position to the last, and nothing but values.
fn is_dense(call: &MapCall) -> bool {
    call.indices.is_empty()
        && !call.program.can_fault()
        && call.inputs.iter().all(|input| {
            input.window.is_none()
                && input.view.layout.is_contiguous()
                && input.view.layout.offset % 4 == 0
        })
}

/// Whether two calls differ in nothing but their tensors.
fn alike(a: &MapCall, b: &MapCall) -> bool {
    a.program == b.program && a.params == b.params
}

/// The tensor that a cube belongs to: the last one of those whose first cubes `table` begins with
/// that does not begin behind it.
#[cube]
fn tensor_of(table: &[u64], cube: u64, tensors: usize) -> usize {
    let mut low = 0usize;
    let mut high = tensors;
    while high - low > 1usize {
        let middle = (low + high) / 2usize;
        if table[middle] <= cube {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}

#[cube]
fn shifted(chunk: usize, shift: usize) -> usize {
    chunk + shift
}

#[cube]
fn first_of(chunk: usize) -> usize {
    chunk * 4usize
}

/// Computes a chunk of a tensor, whose inputs and then outputs lie `shifts` away from those that the
/// kernel is given.
#[cube]
#[allow(unused_variables)]
fn chunk_of(
    inputs: &Inputs,
    out: &mut Outputs,
    shifts: &Sequence<usize>,
    chunk: usize,
    #[comptime] plan: Interned<MapPlan>,
) {
    intrinsic!(|scope| {
        let dtypes: Vec<DType> = plan.program.outputs.iter().map(|(_, d)| *d).collect();
        let count = plan.program.inputs.len();
        let place = |k: usize| {
            let shift = *shifts.__expand_index_method(scope, k.into());
            shifted::expand(scope, chunk, shift)
        };
        let at: Vec<_> = (0..count)
            .map(|k| first_of::expand(scope, place(k)))
            .collect();
        let results = eval_dense(scope, inputs, &plan, &at);
        let out: &mut OutputsExpand = out;
        for (k, value) in results.into_iter().enumerate() {
            let nth = nth_of_width(&dtypes, k);
            store(scope, out, nth, place(count + k), value, dtypes[k]);
        }
    })
}

/// The table has the first cube of each tensor, and then for each its chunks and the distances of
/// its inputs and outputs in chunks.
#[cube(launch_unchecked, address_type = "dynamic")]
fn maps_kernel(
    inputs: &Inputs,
    out: &mut Outputs,
    table: &[u64],
    tensors: usize,
    cubes: usize,
    #[comptime] plan: Interned<MapPlan>,
) {
    if CUBE_POS < cubes {
        let cube = CUBE_POS as u64;
        let tensor = tensor_of(table, cube, tensors);
        let words = comptime!(1 + plan.program.inputs.len() + plan.program.outputs.len());
        let entry = tensors + tensor * words;
        let chunks = usize::cast_from(table[entry]);
        let begin = usize::cast_from(cube - table[tensor]) * SPAN;
        let end = min(begin + SPAN, chunks);
        let mut shifts = Sequence::<usize>::new();
        #[unroll]
        for k in 1..words {
            shifts.push(usize::cast_from(table[entry + k]));
        }
        let mut chunk = begin + UNIT_POS as usize;
        while chunk < end {
            chunk_of(inputs, out, &shifts, chunk, plan.clone());
            chunk += CUBE as usize;
        }
    }
}

impl CubeBackend {
    /// The maps of which several can be one launch, or whose results take other memory.
    pub(crate) fn groups<'a>(&self, launches: &'a [Launch]) -> Result<Vec<Vec<Member<'a>>>> {
        let mut groups: Vec<Vec<Member<'a>>> = vec![];
        if self.arena.address(&self.faults).is_none() {
            return Ok(groups);
        }
        for (position, launch) in launches.iter().enumerate() {
            let Kernel::Map(call) = &launch.kernel else {
                continue;
            };
            if !is_dense(call) {
                continue;
            }
            let member = Member {
                position,
                call,
                over: &launch.over,
            };
            match groups.iter_mut().find(|group| alike(group[0].call, call)) {
                Some(group) => group.push(member),
                None => groups.push(vec![member]),
            }
        }
        // One by itself is as well launched alone, unless its results go where others were.
        groups.retain(|group| group.len() > 1 || !group[0].over.is_empty());
        Ok(groups)
    }

    /// The memory of a result: what it may be written over, if it fits, or its own.
    fn result_of(&self, member: &Member<'_>, k: usize) -> Result<Buffer> {
        let elements = member.call.shape.numel();
        let (_, dtype) = member.call.program.outputs[k];
        if let Some((_, buffer)) = member.over.iter().find(|(of, _)| *of == k) {
            let memory: &Memory = buffer.get()?;
            if memory.bytes == Memory::padded(dtype, elements) {
                return Ok(buffer.clone());
            }
        }
        Ok(self.alloc(dtype, elements)?.buffer())
    }

    /// One launch for calls that are [alike] and dense. Every thread reads the elements of a
    /// position before it writes there, and no others.
    pub(crate) fn run_maps(&self, members: &[Member<'_>]) -> Result<Vec<Buffers>> {
        let calls: Vec<&MapCall> = members.iter().map(|member| member.call).collect();
        let first = calls[0];
        let mut given: Vec<Buffers> = Vec::with_capacity(calls.len());
        for member in members {
            let count = member.call.program.outputs.len();
            let mut results = Buffers::with_capacity(count);
            for k in 0..count {
                results.push(self.result_of(member, k)?);
            }
            given.push(results);
        }
        let mut used: Vec<Reached<'_>> = Vec::with_capacity(calls.len());
        for (call, results) in calls.iter().zip(&given) {
            let mut reached = Reached::default();
            for input in &call.inputs {
                reached.reads.push(crate::memory(&input.view)?);
            }
            for buffer in results {
                reached.writes.push(buffer.get()?);
            }
            used.push(reached);
        }
        let (starts, entries, cubes) = self.table(&calls, &used);
        let words = starts.into_iter().chain(entries);
        let table = self.table_memory(words.collect())?;

        let handles: Vec<_> = used[0]
            .reads
            .iter()
            .map(|m| (m.handle.clone(), m.bytes))
            .collect();
        let bound = Bound::dense(first, &handles).with_native(self.native);
        let dtypes = first.program.outputs.iter().map(|(_, dtype)| *dtype);
        let outputs: Vec<_> = (used[0].writes.iter().copied().cloned())
            .zip(dtypes)
            .collect();
        // SAFETY: cubes past the last one do nothing, threads stay below the chunks of their
        // tensor, and all of the memory that the table leads to is held until this is queued.
        unsafe {
            maps_kernel::launch_unchecked(
                &self.client,
                crate::cubes(cubes, 1),
                CubeDim::new_1d(CUBE),
                bound.address,
                bound.launch(),
                Outputs::bound(&outputs),
                crate::arg(&table, 8),
                calls.len(),
                cubes,
                self.programs.intern(bound.plan),
            );
        }
        if let Some(done) = used[0].writes.first() {
            self.arena.reached(done, &used[1..]);
        }
        drop(used);
        Ok(given)
    }

    /// Memory with a table. A step that changes tensors where they are has the same tables every time.
    fn table_memory(&self, words: Vec<u64>) -> Result<Memory> {
        let mut tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, known)) = tables.iter().find(|(known, _)| *known == words) {
            return Ok(known.clone());
        }
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.resize(bytes.len().next_multiple_of(crate::PAD), 0);
        // In the place of an old one: what is taken and given back moves what is taken next.
        let alike = |(_, old): &(Vec<u64>, Memory)| old.bytes == bytes.len();
        let old = (tables.len() >= TABLES).then(|| tables.iter().position(alike).unwrap_or(0));
        let memory = match old.and_then(|k| tables.remove(k)) {
            Some((_, old)) if old.bytes == bytes.len() => self.arena.refilled(&old, bytes)?,
            _ => self.arena.filled(bytes)?,
        };
        tables.push_back((words, memory.clone()));
        Ok(memory)
    }

    /// The first cube of each tensor, the rest of the table, and how many cubes there are.
    fn table(&self, calls: &[&MapCall], used: &[Reached<'_>]) -> (Vec<u64>, Vec<u64>, usize) {
        let words = 1 + calls[0].inputs.len() + calls[0].program.outputs.len();
        let mut starts = Vec::with_capacity(calls.len());
        let mut entries = Vec::with_capacity(words * calls.len());
        let mut cubes = 0;
        // Where a tensor's elements lie, in chunks: addresses are multiples of all their sizes.
        let place = |memory: &Memory, dtype: DType, offset: usize| {
            let size = dtype.size() as u64;
            let address = self.arena.address(memory).unwrap_or(0) + offset as u64 * size;
            address / (4 * size)
        };
        for (call, used) in calls.iter().zip(used) {
            let chunks = call.shape.numel().div_ceil(4);
            starts.push(cubes as u64);
            cubes += chunks.div_ceil(SPAN);
            entries.push(chunks as u64);
            let inputs = call.inputs.iter().zip(&used.reads);
            entries.extend(
                inputs.map(|(input, memory)| {
                    place(memory, input.view.dtype, input.view.layout.offset)
                }),
            );
            let outputs = call.program.outputs.iter().zip(&used.writes);
            entries.extend(outputs.map(|((_, dtype), memory)| place(memory, *dtype, 0)));
        }
        // Distances from the buffers of the first tensor, which wrap around as addresses do.
        let bases: Vec<u64> = (calls[0].inputs.iter().zip(&used[0].reads))
            .map(|(input, memory)| place(memory, input.view.dtype, 0))
            .chain(entries[1 + calls[0].inputs.len()..words].iter().copied())
            .collect();
        for entry in entries.chunks_exact_mut(words) {
            for (at, base) in entry[1..].iter_mut().zip(&bases) {
                *at = at.wrapping_sub(*base);
            }
        }
        (starts, entries, cubes)
    }
}

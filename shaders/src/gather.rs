//! Indexed reads. Elements move as bits, so only their size matters.

use crate::{
    CubeBackend, Memory,
    intern::Interned,
    map::CUBE,
    program::{affine, bind, coordinates, wrap},
    words::{bits_at, join},
};
use anymesh_kernel::{
    Buffer, DType, Dims, Result, Shape, View,
    backend::{CheckIndexCall, GatherCall, IndexAxis},
    layout::collapse,
};
use cubecl::{prelude::*, server::Handle};

/// The address width that reaches positions below `limit`.
pub(crate) fn address(limit: usize) -> AddressType {
    if limit < i32::MAX as usize {
        AddressType::U32
    } else {
        AddressType::U64
    }
}

/// One index operand as the kernel sees it at compile time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Axis {
    wide: bool,
    signed: bool,
    /// Position among the index buffers.
    binding: usize,
}

/// A position that index tensors choose, as it is fixed when a kernel is compiled.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct IndexPlan {
    pub(crate) rank: usize,
    axes: Vec<Axis>,
}

/// A [`IndexPlan`] with what changes from launch to launch.
pub(crate) struct Indexing {
    pub(crate) plan: IndexPlan,
    pub(crate) shape: Shape,
    /// Sizes of the iteration space; offset and steps of the base; for each axis offset and steps
    /// of its indices, the distance that one step of the index goes, and the size it must stay
    /// below.
    pub(crate) numbers: Vec<usize>,
    buffers: Vec<(Handle, usize)>,
}

impl Indexing {
    /// `base(c) + sum(index_k[c] * stride_k)` over `shape`, where the base is
    /// `offset + sum(c[d] * strides[d])`. Every position of an index and of the result must be
    /// within reach of `address`.
    pub(crate) fn new(
        shape: &Shape,
        offset: i64,
        strides: &[isize],
        axes: &[IndexAxis],
        address: AddressType,
    ) -> Result<Self> {
        let mut all: Vec<Dims<isize>> = std::iter::once(Dims::from_slice(strides))
            .chain(axes.iter().map(|a| a.indices.layout.strides.clone()))
            .collect();
        let mut shape = collapse(shape, &mut all);
        if shape.rank() == 0 {
            all.iter_mut().for_each(|s| s.push(0));
            shape = Shape::from([1]);
        }
        let mut out = Self {
            plan: IndexPlan {
                rank: shape.rank(),
                axes: vec![],
            },
            numbers: shape.dims().to_vec(),
            shape,
            buffers: vec![],
        };
        let mut known: Vec<&Buffer> = vec![];
        out.numbers.push(wrap(offset, address));
        out.numbers
            .extend(all[0].iter().map(|&s| wrap(s as i64, address)));
        for (axis, strides) in axes.iter().zip(&all[1..]) {
            let view = &axis.indices;
            let memory = crate::memory(view)?;
            let binding = known
                .iter()
                .position(|b| b.same(&view.buffer))
                .unwrap_or_else(|| {
                    known.push(&view.buffer);
                    out.buffers.push((memory.handle.clone(), memory.bytes));
                    known.len() - 1
                });
            out.plan.axes.push(Axis {
                wide: view.dtype == DType::I64,
                signed: view.dtype != DType::U32,
                binding,
            });
            out.numbers.push(view.layout.offset);
            out.numbers
                .extend(strides.iter().map(|&s| wrap(s as i64, address)));
            out.numbers
                .extend([wrap(axis.stride as i64, address), axis.len]);
        }
        Ok(out)
    }

    pub(crate) fn buffers(&self) -> SequenceArg<Box<[u32]>> {
        bind(&self.buffers, 4)
    }

    pub(crate) fn numbers(&self) -> SequenceArg<usize> {
        self.numbers.iter().copied().collect()
    }
}

/// Where the indices lead.
#[derive(CubeType)]
pub(crate) struct Place {
    pub(crate) at: usize,
    /// Whether all indices were in range; `at` means nothing otherwise.
    pub(crate) inside: bool,
}

/// An index (negative ones lie `below` zero and count from the end), and whether it is in range.
#[cube]
fn resolve<I: Int>(index: I, below: I, len: I, negative: bool) -> (I, bool) {
    let inside = (negative && below <= len) || (!negative && index < len);
    (select(negative, len - below, index), inside)
}

/// The position at `coordinates` (innermost first). An index out of range is reported.
#[cube]
pub(crate) fn locate(
    indices: &Sequence<Box<[u32]>>,
    coordinates: &Sequence<usize>,
    numbers: &Sequence<usize>,
    faults: &mut [u32],
    #[comptime] plan: Interned<IndexPlan>,
) -> Place {
    let rank = comptime!(plan.rank);
    let mut at = affine(coordinates, numbers, rank, rank);
    let mut inside = true;
    #[unroll]
    for k in 0..comptime!(plan.axes.len()) {
        let axis = comptime!(plan.axes[k]);
        let first = comptime!(2 * rank + 1 + k * (rank + 3));
        let words = indices.index(axis.binding);
        let index = affine(coordinates, numbers, rank, first);
        let step = *numbers.index(comptime!(first + rank + 1));
        let len = *numbers.index(comptime!(first + rank + 2));
        if comptime!(axis.wide) {
            let (low, high) = (words[index * 2usize], words[index * 2usize + 1usize]);
            let index = join(low, high);
            let (found, fits) =
                resolve::<u64>(index, 0u64 - index, len as u64, high >> 31u32 == 1u32);
            at += found as usize * step;
            inside = inside && fits;
            if !fits {
                crate::fault::index(faults, low, high, len as u32);
            }
        } else {
            let low = words[index];
            let negative = comptime!(axis.signed).runtime() && low >> 31u32 == 1u32;
            let (found, fits) =
                resolve::<usize>(low as usize, (0u32 - low) as usize, len, negative);
            at += found * step;
            inside = inside && fits;
            if !fits {
                crate::fault::index(
                    faults,
                    low,
                    select(negative, 0xffff_ffffu32, 0u32),
                    len as u32,
                );
            }
        }
    }
    Place { at, inside }
}

/// A thread looks at one position. An index out of range is reported, and that is all.
#[cube(launch_unchecked, address_type = "dynamic")]
fn check_kernel(
    indices: &Sequence<Box<[u32]>>,
    faults: &mut [u32],
    numbers: &Sequence<usize>,
    count: usize,
    #[comptime] plan: Interned<IndexPlan>,
) {
    if ABSOLUTE_POS < count {
        let here = coordinates(ABSOLUTE_POS, numbers, plan.rank);
        locate(indices, &here, numbers, faults, plan);
    }
}

/// A thread copies one unit of some words: the index does not change within it.
#[cube(launch_unchecked, address_type = "dynamic")]
fn gather_units<N: Size>(
    src: &[Vector<u32, N>],
    indices: &Sequence<Box<[u32]>>,
    out: &mut [Vector<u32, N>],
    faults: &mut [u32],
    numbers: &Sequence<usize>,
    units: usize,
    #[comptime] plan: Interned<IndexPlan>,
) {
    let unit = ABSOLUTE_POS;
    if unit < units {
        let here = coordinates(unit, numbers, plan.rank);
        let place = locate(indices, &here, numbers, faults, plan);
        let mut value = Vector::<u32, N>::new(0u32);
        if place.inside {
            value = src[place.at];
        }
        out[unit] = value;
    }
}

/// Coordinates (innermost first) `lane` steps along the innermost dimension.
#[cube]
fn shifted(
    first: &Sequence<usize>,
    #[comptime] lane: usize,
    #[comptime] rank: usize,
) -> Sequence<usize> {
    let mut out = Sequence::<usize>::new();
    #[unroll]
    for k in 0..rank {
        if comptime!(k == 0) {
            out.push(*first.index(0usize) + lane);
        } else {
            out.push(*first.index(k));
        }
    }
    out
}

/// How single elements are gathered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Each {
    /// Bytes of an element.
    size: usize,
    /// Whether four elements always share all coordinates but the innermost.
    row: bool,
}

/// A thread makes four elements of the output, each from its own place; `N` words at a time are
/// stored.
#[cube(launch_unchecked, address_type = "dynamic")]
fn gather_each<N: Size>(
    src: &[u32],
    indices: &Sequence<Box<[u32]>>,
    out: &mut [Vector<u32, N>],
    faults: &mut [u32],
    numbers: &Sequence<usize>,
    elements: usize,
    #[comptime] plan: Interned<IndexPlan>,
    #[comptime] how: Each,
) {
    let rank = comptime!(plan.rank);
    let start = ABSOLUTE_POS * 4usize;
    if start < elements {
        let first = coordinates(start, numbers, rank);
        let mut low = Array::<u32>::new(4usize);
        let mut high = Array::<u32>::new(4usize);
        #[unroll]
        for lane in 0..4usize {
            // Lanes past the end repeat the last element.
            let here = if comptime!(how.row) {
                shifted(&first, lane, rank)
            } else {
                coordinates(min(start + lane, elements - 1usize), numbers, rank)
            };
            let place = locate(indices, &here, numbers, faults, plan.clone());
            low[lane] = 0u32;
            high[lane] = 0u32;
            if place.inside {
                if comptime!(how.size == 8) {
                    low[lane] = src[place.at * 2usize];
                    high[lane] = src[place.at * 2usize + 1usize];
                } else {
                    low[lane] = bits_at(src, place.at, how.size);
                }
            }
        }
        let width = comptime!(how.size.min(4));
        #[unroll]
        for part in 0..comptime!(how.size / how.size.min(4)) {
            let mut value = Vector::<u32, N>::empty();
            #[unroll]
            for word in 0..width {
                let bits = if comptime!(how.size == 8) {
                    let lane = comptime!(part * 2 + word / 2);
                    if comptime!(word % 2 == 0) {
                        low[lane]
                    } else {
                        high[lane]
                    }
                } else if comptime!(how.size == 4) {
                    low[word]
                } else if comptime!(how.size == 2) {
                    low[comptime!(word * 2)] | low[comptime!(word * 2 + 1)] << 16u32
                } else {
                    low[0usize] | low[1usize] << 8u32 | low[2usize] << 16u32 | low[3usize] << 24u32
                };
                value.insert(word, bits);
            }
            out[ABSOLUTE_POS * comptime!(how.size / how.size.min(4)) + part] = value;
        }
    }
}

/// The most words (4, 2 or 1) that can be copied at once: runs along the innermost dimension, and
/// everything that is added to reach one, are multiples of it.
fn unit_words(call: &GatherCall, indexing: &Indexing) -> Option<usize> {
    let (rank, size) = (indexing.plan.rank, call.src.dtype.size());
    let strides = |first: usize| &indexing.numbers[first + 1..first + 1 + rank];
    let along = (0..call.axes.len()).any(|k| strides(2 * rank + 1 + k * (rank + 3))[rank - 1] != 0);
    let base = strides(rank);
    if along || base[rank - 1] != 1 {
        return None;
    }
    let whole = |bytes: usize| {
        let fits = |elements: usize| elements.wrapping_mul(size).is_multiple_of(bytes);
        fits(indexing.shape[rank - 1])
            && fits(call.src.layout.offset)
            && base[..rank - 1].iter().all(|&s| fits(s))
            && call.axes.iter().all(|a| fits(a.stride.unsigned_abs()))
    };
    [4, 2, 1].into_iter().find(|words| whole(words * 4))
}

impl CubeBackend {
    pub(crate) fn run_gather(&self, call: &GatherCall) -> Result<Buffer> {
        let (shape, dtype) = (&call.src.layout.shape, call.src.dtype);
        // An index tensor that is also the source is read through a copy: a buffer is bound once.
        let mut axes = call.axes.clone();
        for axis in axes
            .iter_mut()
            .filter(|axis| axis.indices.buffer.same(&call.src.buffer))
        {
            axis.indices = View {
                buffer: self.copy_as(&axis.indices, axis.indices.dtype)?,
                dtype: axis.indices.dtype,
                layout: anymesh_kernel::Layout::contiguous(shape.clone()),
            };
        }
        let source = crate::memory(&call.src)?;
        let elements = shape.numel();
        let reach = axes
            .iter()
            .map(|axis| Ok(crate::memory(&axis.indices)?.bytes / 4))
            .collect::<Result<Vec<_>>>()?
            .into_iter()
            .max()
            .unwrap_or(0);
        let address = address(reach.max(elements).max(source.bytes / dtype.size().min(4)));
        let indexing = Indexing::new(
            shape,
            call.src.layout.offset as i64,
            &call.src.layout.strides,
            &axes,
            address,
        )?;
        let out = self.alloc(dtype, elements)?;
        match unit_words(call, &indexing) {
            Some(words) => self.gather_units(call, indexing, source, &out, words, address),
            None => {
                let how = Each {
                    size: dtype.size(),
                    row: indexing.shape[indexing.plan.rank - 1].is_multiple_of(4),
                };
                let width = how.size.min(4);
                // SAFETY: threads past the end do nothing; the output is padded to whole chunks of
                // four elements.
                unsafe {
                    gather_each::launch_unchecked(
                        &self.client,
                        crate::cubes(elements.div_ceil(4), CUBE),
                        CubeDim::new_1d(CUBE),
                        address,
                        width,
                        crate::arg(source, 4),
                        indexing.buffers(),
                        crate::arg(&out, width * 4),
                        self.fault_arg(),
                        indexing.numbers(),
                        elements,
                        self.indexings.intern(indexing.plan),
                        how,
                    );
                }
            }
        }
        Ok(out.buffer())
    }

    /// Checks indices: writes nothing but faults.
    pub(crate) fn run_check_index(&self, call: &CheckIndexCall) -> Result<()> {
        let shape = &call.indices.layout.shape;
        let count = shape.numel();
        let address = address(count.max(crate::memory(&call.indices)?.bytes / 4));
        let axis = IndexAxis {
            indices: call.indices.clone(),
            len: call.len,
            stride: 0,
        };
        let nowhere = Dims::from_elem(0, shape.rank());
        let indexing = Indexing::new(shape, 0, &nowhere, &[axis], address)?;
        // SAFETY: threads past the last position do nothing.
        unsafe {
            check_kernel::launch_unchecked(
                &self.client,
                crate::cubes(count, CUBE),
                CubeDim::new_1d(CUBE),
                address,
                indexing.buffers(),
                self.fault_arg(),
                indexing.numbers(),
                count,
                self.indexings.intern(indexing.plan),
            );
        }
        Ok(())
    }

    /// Gathers units of `words` words: all that was counted in elements is now counted in units.
    fn gather_units(
        &self,
        call: &GatherCall,
        mut indexing: Indexing,
        source: &Memory,
        out: &Memory,
        words: usize,
        address: AddressType,
    ) {
        let (rank, size) = (indexing.plan.rank, call.src.dtype.size());
        let in_units = |elements: i64| elements * size as i64 / (words * 4) as i64;
        let signed = |n: usize| {
            if address == AddressType::U32 {
                i64::from(n as u32 as i32)
            } else {
                n as i64
            }
        };
        let numbers = &mut indexing.numbers;
        numbers[rank - 1] = in_units(numbers[rank - 1] as i64) as usize;
        for n in &mut numbers[rank..2 * rank] {
            *n = wrap(in_units(signed(*n)), address);
        }
        for (k, axis) in call.axes.iter().enumerate() {
            numbers[2 * rank + 1 + k * (rank + 3) + rank + 1] =
                wrap(in_units(axis.stride as i64), address);
        }
        let units = call.src.layout.shape.numel() * size / (words * 4);
        // SAFETY: threads past the end do nothing.
        unsafe {
            gather_units::launch_unchecked(
                &self.client,
                crate::cubes(units, CUBE),
                CubeDim::new_1d(CUBE),
                address,
                words,
                crate::arg(source, words * 4),
                indexing.buffers(),
                crate::arg(out, words * 4),
                self.fault_arg(),
                indexing.numbers(),
                units,
                self.indexings.intern(indexing.plan),
            );
        }
    }
}

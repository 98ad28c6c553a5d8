//! Running reductions along one axis, of an input seen as `[outer, n, inner]`.
//!
//! With `inner > 1` a thread walks down its column; with `inner == 1` the threads of a cube share a
//! row, four elements each, and scan their totals in shared memory. Few long lines are cut into
//! splits: a first launch makes the total of each split, a second one scans the totals, a third one
//! scans the elements with what came before their split. The order of every combination is fixed by
//! the shape alone.

use crate::{
    CubeBackend, Memory,
    gather::address,
    map::CUBE,
    program::bind,
    reduce::elem_of,
    words::{D4, F4},
};
use anymesh_kernel::{
    DType, Error, Kind, Result,
    backend::{Buffers, ScanCall, ScanOp},
    map::Unary,
};
use cubecl::prelude::*;

/// What is known of a run of elements.
#[derive(CubeType)]
struct Acc<T: Numeric> {
    /// The reduction itself; the largest element for log-sum-exp.
    value: T,
    /// `sum(exp(x - value))`, for log-sum-exp.
    sum: T,
    /// Where `value` was found.
    place: u32,
}

/// What a launch is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct How {
    op: ScanOp,
    kind: Kind,
    /// Whether positions of the extremes are followed.
    places: bool,
    /// Whether the input is totals of splits.
    from_parts: bool,
    /// Whether the output is: of each element, or with `totals` of each split.
    to_parts: bool,
    /// Store the total of each split only.
    totals: bool,
    /// Whether splits begin with what came before them.
    carried: bool,
    /// Threads that share a row.
    width: u32,
}

/// Elements, or what is known of runs: values, for log-sum-exp also sums, where they are followed
/// also places.
#[derive(CubeType, CubeLaunch)]
struct Parts<T: Numeric> {
    values: Sequence<Box<[T]>>,
    places: Sequence<Box<[u32]>>,
}

#[cube]
fn unary<T: Numeric>(x: T, #[comptime] op: Unary, #[comptime] kind: Kind) -> T {
    if comptime!(kind == Kind::F64) {
        T::cast_from(crate::math::unary_wide(D4::new(f64::cast_from(x)), op).extract(0usize))
    } else {
        T::cast_from(crate::math::unary(F4::new(f32::cast_from(x)), op).extract(0usize))
    }
}

#[cube]
fn is_nan<T: Numeric>(x: T, #[comptime] kind: Kind) -> bool {
    if comptime!(kind == Kind::F64) {
        f64::cast_from(x).is_nan()
    } else if comptime!(kind == Kind::F32) {
        f32::cast_from(x).is_nan()
    } else {
        false.runtime()
    }
}

/// Whether the later `b` replaces `a` as the extreme: the latest among equals, and the latest NaN.
#[cube]
fn replaces<T: Numeric>(a: T, b: T, #[comptime] how: How) -> bool {
    let beyond = if comptime!(how.op == ScanOp::Min) {
        b <= a
    } else {
        b >= a
    };
    is_nan::<T>(b, how.kind) || (!is_nan::<T>(a, how.kind) && beyond)
}

/// `a`, then `b`.
#[cube]
fn combine<T: Numeric>(a: &Acc<T>, b: &Acc<T>, #[comptime] how: How) -> Acc<T> {
    match how.op {
        ScanOp::Sum => Acc::<T> {
            value: a.value + b.value,
            sum: a.sum,
            place: a.place,
        },
        ScanOp::Prod => Acc::<T> {
            value: a.value * b.value,
            sum: a.sum,
            place: a.place,
        },
        ScanOp::Max | ScanOp::Min => {
            let take = replaces::<T>(a.value, b.value, how);
            Acc::<T> {
                value: select(take, b.value, a.value),
                sum: a.sum,
                place: select(take, b.place, a.place),
            }
        }
        ScanOp::LogSumExp => {
            let top = select(replaces::<T>(a.value, b.value, how), b.value, a.value);
            // Equal values need no factor, and infinities must not be subtracted from each other.
            let one = T::from_int(1);
            let fa = select(
                a.value == top,
                one,
                unary::<T>(a.value - top, Unary::Exp, how.kind),
            );
            let fb = select(
                b.value == top,
                one,
                unary::<T>(b.value - top, Unary::Exp, how.kind),
            );
            Acc::<T> {
                value: top,
                sum: a.sum * fa + b.sum * fb,
                place: a.place,
            }
        }
    }
}

#[cube]
fn nothing<T: Numeric>(identity: T) -> Acc<T> {
    Acc::<T> {
        value: identity,
        sum: T::from_int(0),
        place: 0u32,
    }
}

#[cube]
fn assign<T: Numeric>(to: &mut Acc<T>, from: &Acc<T>) {
    to.value = from.value;
    to.sum = from.sum;
    to.place = from.place;
}

/// A stored accumulator.
#[cube]
fn stored<T: Numeric>(parts: &Parts<T>, at: usize, #[comptime] how: How) -> Acc<T> {
    let value = parts.values.index(0usize)[at];
    let sum = if comptime!(how.op == ScanOp::LogSumExp) {
        parts.values.index(1usize)[at]
    } else {
        T::from_int(0)
    };
    let place = if comptime!(how.places) {
        parts.places.index(0usize)[at]
    } else {
        0u32.runtime()
    };
    Acc::<T> { value, sum, place }
}

/// Element `at`, which is number `position` of its line.
#[cube]
fn enter<T: Numeric>(input: &Parts<T>, at: usize, position: usize, #[comptime] how: How) -> Acc<T> {
    if comptime!(how.from_parts) {
        stored(input, at, how)
    } else {
        Acc::<T> {
            value: input.values.index(0usize)[at],
            sum: T::from_int(1),
            place: position as u32,
        }
    }
}

#[cube]
fn write<T: Numeric>(out: &mut Parts<T>, at: usize, acc: &Acc<T>, #[comptime] how: How) {
    if comptime!(how.op == ScanOp::LogSumExp) {
        if comptime!(how.to_parts) {
            out.values.index_mut(0usize)[at] = acc.value;
            out.values.index_mut(1usize)[at] = acc.sum;
        } else {
            out.values.index_mut(0usize)[at] =
                acc.value + unary::<T>(acc.sum, Unary::Log, how.kind);
        }
    } else {
        out.values.index_mut(0usize)[at] = acc.value;
    }
    if comptime!(how.places) {
        out.places.index_mut(0usize)[at] = acc.place;
    }
}

/// A thread walks one split of a column; `lines` is `outer * splits * inner`, and so many threads
/// have one.
#[cube(launch_unchecked, address_type = "dynamic")]
fn scan_columns<T: Numeric>(
    input: &Parts<T>,
    carry: &Parts<T>,
    out: &mut Parts<T>,
    n: usize,
    inner: usize,
    splits: usize,
    per_split: usize,
    lines: usize,
    identity: InputScalar,
    #[comptime] how: How,
) {
    let line = ABSOLUTE_POS;
    if line < lines {
        let (column, rest) = (line % inner, line / inner);
        let (split, outer) = (rest % splits, rest / splits);
        let first = outer * n * inner + column;
        let mut acc = nothing::<T>(identity.get::<T>());
        if comptime!(how.carried) {
            if split > 0usize {
                assign(&mut acc, &stored(carry, line - inner, how));
            }
        }
        let end = min((split + 1usize) * per_split, n);
        let mut position = split * per_split;
        while position < end {
            let at = first + position * inner;
            let both = combine(&acc, &enter(input, at, position, how), how);
            assign(&mut acc, &both);
            if comptime!(!how.totals) {
                write(out, at, &acc, how);
            }
            position += 1usize;
        }
        if comptime!(how.totals) {
            write(out, line, &acc, how);
        }
    }
}

/// `width` threads share one split of a row, tile by tile of four elements each.
#[cube(launch_unchecked, address_type = "dynamic")]
fn scan_rows<T: Numeric>(
    input: &Parts<T>,
    carry: &Parts<T>,
    out: &mut Parts<T>,
    n: usize,
    splits: usize,
    tiles: usize,
    lines: usize,
    identity: InputScalar,
    #[comptime] how: How,
) {
    let width = comptime!(how.width as usize);
    let mut values = Shared::<[T]>::new_slice(256usize);
    let mut sums = Shared::<[T]>::new_slice(comptime!(if how.op == ScanOp::LogSumExp {
        256usize
    } else {
        1usize
    }));
    let mut places =
        Shared::<[u32]>::new_slice(comptime!(if how.places { 256usize } else { 1usize }));
    let identity = identity.get::<T>();
    let me = UNIT_POS as usize;
    let lane = me % width;
    let line = CUBE_POS * comptime!(CUBE as usize / how.width as usize) + me / width;
    let (row, split) = (line / splits, line % splits);
    let mut before = nothing::<T>(identity);
    if comptime!(how.carried) {
        if split > 0usize && line < lines {
            assign(&mut before, &stored(carry, line - 1usize, how));
        }
    }
    let end = select(line < lines, n, 0usize);
    let mut tile = 0usize;
    while tile < tiles {
        let start = (split * tiles + tile) * comptime!(4 * width) + lane * 4usize;
        let from = row * n + start;
        // What the thread's own elements make, up to each of them.
        let mut a = nothing::<T>(identity);
        if start < end {
            assign(&mut a, &enter(input, from, start, how));
        }
        let mut b = nothing::<T>(identity);
        if start + 1usize < end {
            assign(&mut b, &enter(input, from + 1usize, start + 1usize, how));
        }
        let b = combine(&a, &b, how);
        let mut c = nothing::<T>(identity);
        if start + 2usize < end {
            assign(&mut c, &enter(input, from + 2usize, start + 2usize, how));
        }
        let c = combine(&b, &c, how);
        let mut d = nothing::<T>(identity);
        if start + 3usize < end {
            assign(&mut d, &enter(input, from + 3usize, start + 3usize, how));
        }
        let d = combine(&c, &d, how);

        // Totals of all threads up to each.
        let mut upto = nothing::<T>(identity);
        assign(&mut upto, &d);
        let mut distance = 1usize;
        while distance < width {
            share(&mut values, &mut sums, &mut places, me, &upto, how);
            sync_cube();
            if lane >= distance {
                let both = combine(
                    &shared(&values, &sums, &places, me - distance, how),
                    &upto,
                    how,
                );
                assign(&mut upto, &both);
            }
            sync_cube();
            distance *= 2usize;
        }
        share(&mut values, &mut sums, &mut places, me, &upto, how);
        sync_cube();

        let mut prefix = nothing::<T>(identity);
        assign(&mut prefix, &before);
        if lane > 0usize {
            let both = combine(
                &before,
                &shared(&values, &sums, &places, me - 1usize, how),
                how,
            );
            assign(&mut prefix, &both);
        }
        if comptime!(!how.totals) {
            if start < end {
                write(out, from, &combine(&prefix, &a, how), how);
            }
            if start + 1usize < end {
                write(out, from + 1usize, &combine(&prefix, &b, how), how);
            }
            if start + 2usize < end {
                write(out, from + 2usize, &combine(&prefix, &c, how), how);
            }
            if start + 3usize < end {
                write(out, from + 3usize, &combine(&prefix, &d, how), how);
            }
        }
        let both = combine(
            &before,
            &shared(
                &values,
                &sums,
                &places,
                me - lane + comptime!(width - 1),
                how,
            ),
            how,
        );
        assign(&mut before, &both);
        sync_cube();
        tile += 1usize;
    }
    if comptime!(how.totals) {
        if lane == 0usize && line < lines {
            write(out, line, &before, how);
        }
    }
}

#[cube]
fn share<T: Numeric>(
    values: &mut [T],
    sums: &mut [T],
    places: &mut [u32],
    at: usize,
    acc: &Acc<T>,
    #[comptime] how: How,
) {
    values[at] = acc.value;
    if comptime!(how.op == ScanOp::LogSumExp) {
        sums[at] = acc.sum;
    }
    if comptime!(how.places) {
        places[at] = acc.place;
    }
}

#[cube]
fn shared<T: Numeric>(
    values: &[T],
    sums: &[T],
    places: &[u32],
    at: usize,
    #[comptime] how: How,
) -> Acc<T> {
    let sum = if comptime!(how.op == ScanOp::LogSumExp) {
        sums[at]
    } else {
        T::from_int(0)
    };
    let place = if comptime!(how.places) {
        places[at]
    } else {
        0u32.runtime()
    };
    Acc::<T> {
        value: values[at],
        sum,
        place,
    }
}

/// Buffers of a launch; see [`Parts`].
#[derive(Default)]
struct Held {
    values: Vec<Memory>,
    places: Vec<Memory>,
}

impl Held {
    fn launch<T: Numeric>(&self) -> PartsLaunch<T> {
        let list =
            |m: &[Memory]| -> Vec<_> { m.iter().map(|m| (m.handle.clone(), m.bytes)).collect() };
        PartsLaunch::new(
            bind(&list(&self.values), size_of::<T>()),
            bind(&list(&self.places), 4),
        )
    }
}

/// The space that is scanned.
#[derive(Clone, Copy)]
struct Space {
    outer: usize,
    n: usize,
    inner: usize,
    /// Pieces of a line, of `per_split` elements each but the last.
    splits: usize,
    per_split: usize,
}

impl Space {
    /// Cuts lines so that there are enough threads for a large GPU, where a piece is worth a
    /// launch.
    fn cut(outer: usize, n: usize, inner: usize) -> Self {
        let (wanted, unit) = if inner == 1 {
            let cubes = (outer * width(n) as usize).div_ceil(CUBE as usize);
            (
                if cubes < 256 { 1024 / cubes.max(1) } else { 1 },
                4 * CUBE as usize,
            )
        } else {
            let threads = outer * inner;
            (
                if threads < 32_768 {
                    65_536 / threads
                } else {
                    1
                },
                1,
            )
        };
        let least = if inner == 1 { 4 * unit } else { 64 };
        let splits = wanted.min(n / least).clamp(1, 1024);
        let per_split = n.div_ceil(splits).next_multiple_of(unit);
        Self {
            outer,
            n,
            inner,
            splits: n.div_ceil(per_split),
            per_split,
        }
    }
}

/// Threads for a row.
fn width(n: usize) -> u32 {
    (n.div_ceil(4).next_power_of_two() as u32).clamp(1, CUBE)
}

impl CubeBackend {
    pub(crate) fn run_scan(&self, call: &ScanCall) -> Result<Buffers> {
        let dtype = call.input.dtype;
        let kind = if dtype == DType::Bool {
            Kind::U32
        } else {
            dtype.kind()
        };
        if call.mode == ScanOp::LogSumExp && kind == Kind::F64 && !self.capabilities.f64_math {
            return Err(Error::Unsupported {
                device: self.name.clone(),
                what: "logcumsumexp in f64".into(),
                hint: "cast to f32".into(),
            });
        }
        // Infinities saturate to the ends of an integer type; adding to -0 changes nothing, not
        // even -0.
        let identity = match call.mode {
            ScanOp::Sum => -0.0,
            ScanOp::Prod => 1.0,
            ScanOp::Max | ScanOp::LogSumExp => f64::NEG_INFINITY,
            ScanOp::Min => f64::INFINITY,
        };
        let mut out = match kind {
            Kind::F32 => self.scan_as::<f32>(call, kind, identity as f32)?,
            Kind::F64 => self.scan_as::<f64>(call, kind, identity)?,
            Kind::I32 => self.scan_as::<i32>(call, kind, identity as i32)?,
            Kind::I64 => self.scan_as::<i64>(call, kind, identity as i64)?,
            Kind::U32 | Kind::Bool => self.scan_as::<u32>(call, kind, identity as u32)?,
        };
        let values = self.convert(
            out.values.swap_remove(0),
            kind.dtype(),
            dtype,
            call.input.layout.shape.numel(),
        )?;
        let places = out.places.pop().map(Memory::buffer);
        Ok(std::iter::once(values).chain(places).collect())
    }

    fn scan_as<T: Numeric>(&self, call: &ScanCall, kind: Kind, identity: T) -> Result<Held> {
        let dims = call.input.layout.shape.dims();
        let view = self.dense(&call.input, kind.dtype())?;
        let input = Held {
            values: vec![crate::memory(&view)?.clone()],
            places: vec![],
        };
        let space = Space::cut(
            dims[..call.axis].iter().product(),
            dims[call.axis],
            dims[call.axis + 1..].iter().product(),
        );
        let how = How {
            op: call.mode,
            kind,
            places: call.positions,
            from_parts: false,
            to_parts: false,
            totals: false,
            carried: false,
            width: width(space.n),
        };
        let identity = InputScalar::new(identity, elem_of(kind));
        if space.splits == 1 {
            return self.launch_scan::<T>(&input, &Held::default(), space, identity, how);
        }
        let totals = self.launch_scan::<T>(
            &input,
            &Held::default(),
            space,
            identity,
            How {
                to_parts: true,
                totals: true,
                ..how
            },
        )?;
        let across = Space {
            n: space.splits,
            splits: 1,
            per_split: space.splits,
            ..space
        };
        let before = self.launch_scan::<T>(
            &totals,
            &Held::default(),
            across,
            identity,
            How {
                from_parts: true,
                to_parts: true,
                width: width(across.n),
                ..how
            },
        )?;
        self.launch_scan::<T>(
            &input,
            &before,
            space,
            identity,
            How {
                carried: true,
                ..how
            },
        )
    }

    fn launch_scan<T: Numeric>(
        &self,
        input: &Held,
        carry: &Held,
        space: Space,
        identity: InputScalar,
        how: How,
    ) -> Result<Held> {
        let Space {
            outer,
            n,
            inner,
            splits,
            per_split,
        } = space;
        let lines = outer * splits * inner;
        let elements = if how.totals { lines } else { outer * n * inner };
        let dtype = how.kind.dtype();
        let values = if how.to_parts && how.op == ScanOp::LogSumExp {
            2
        } else {
            1
        };
        let out = Held {
            values: (0..values)
                .map(|_| self.alloc(dtype, elements))
                .collect::<Result<_>>()?,
            places: (0..usize::from(how.places))
                .map(|_| self.alloc(DType::I32, elements))
                .collect::<Result<_>>()?,
        };
        let (client, dim, address) = (
            &self.client,
            CubeDim::new_1d(CUBE),
            address(outer * n * inner),
        );
        // SAFETY: kernels guard lines and elements; the buffers are as long as what is read and
        // written.
        unsafe {
            if inner == 1 {
                let tiles = per_split.min(n).div_ceil(4 * how.width as usize);
                scan_rows::launch_unchecked::<T>(
                    client,
                    crate::cubes(lines * how.width as usize, CUBE),
                    dim,
                    address,
                    input.launch(),
                    carry.launch(),
                    out.launch(),
                    n,
                    splits,
                    tiles,
                    lines,
                    identity,
                    how,
                );
            } else {
                scan_columns::launch_unchecked::<T>(
                    client,
                    crate::cubes(lines, CUBE),
                    dim,
                    address,
                    input.launch(),
                    carry.launch(),
                    out.launch(),
                    n,
                    inner,
                    splits,
                    per_split,
                    lines,
                    identity,
                    how,
                );
            }
        }
        Ok(out)
    }
}

//! Walks positions in row-major order and reads operands there, a block at a time.
//!
//! Neighbouring dimensions that every operand steps through evenly are merged first. Merging leaves
//! linear positions as they are, so everything above this module counts in linear positions only.

use crate::{
    copy,
    element::{Held, Stored, is_held_as_stored, with_stored},
    memory::{Dense, Memory, bytes_of, typed},
    parallel,
};
use anymesh_kernel::{
    DType, Dims, Result, View,
    backend::{Affine, MapInput},
};
use smallvec::SmallVec;
use std::ops::Range;

/// How one operand is read, with strides for the grid's dimensions.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) dtype: DType,
    offset: isize,
    strides: Dims<isize>,
    /// Seldom there, and large.
    window: Option<Box<Window>>,
    /// Whether positions that follow each other are equally far apart throughout.
    even: bool,
}

/// The part of the grid where an operand has elements. Operands that cover everything have no
/// window.
#[derive(Debug, Clone)]
struct Window {
    start: Dims<usize>,
    size: Dims<usize>,
}

impl Window {
    fn is_full(&self, d: usize, dim: usize) -> bool {
        self.start[d] == 0 && self.size[d] == dim
    }
}

/// Where the elements of a block are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fetched {
    /// All the same: the first of the slot.
    One,
    /// In the operand's own memory from this element on.
    InPlace(usize),
    /// In the slot.
    Filled,
}

/// The iteration space with its operands and affine forms.
#[derive(Debug)]
pub(crate) struct Grid<'a> {
    /// At least one dimension.
    dims: Dims<usize>,
    pub(crate) len: usize,
    /// The memory of each operand.
    pub(crate) inputs: Inputs<'a>,
    pub(crate) sources: Sources,
    forms: Sources,
}

/// The memory of operands, mostly few.
pub(crate) type Inputs<'a> = SmallVec<[&'a [u8]; 2]>;
type Sources = SmallVec<[Source; 2]>;

impl Source {
    fn new(view: &View, window: Option<&Dims<isize>>, dims: &[usize]) -> Self {
        let layout = &view.layout;
        let mut offset = layout.offset as isize;
        let strides = Dims::from_slice(&layout.strides);
        let window = window.and_then(|origin| {
            let mut window = Window {
                start: Dims::new(),
                size: Dims::new(),
            };
            for d in 0..dims.len() {
                let (low, high) = (
                    origin[d].max(0),
                    (origin[d] + layout.shape[d] as isize).min(dims[d] as isize),
                );
                // Strides apply to grid coordinates, so the origin may well lie before the buffer.
                offset -= origin[d] * strides[d];
                window.start.push(low as usize);
                window.size.push((high - low).max(0) as usize);
            }
            (0..dims.len())
                .any(|d| !window.is_full(d, dims[d]))
                .then(|| Box::new(window))
        });
        Self {
            dtype: view.dtype,
            offset,
            strides,
            window,
            even: false,
        }
    }

    fn form(affine: &Affine) -> Self {
        Self {
            dtype: DType::I64,
            offset: affine.offset as isize,
            strides: affine.strides.iter().map(|s| *s as isize).collect(),
            window: None,
            even: false,
        }
    }

    fn permute(&mut self, order: &[usize]) {
        self.strides = order.iter().map(|d| self.strides[*d]).collect();
        if let Some(window) = &mut self.window {
            **window = Window {
                start: order.iter().map(|d| window.start[*d]).collect(),
                size: order.iter().map(|d| window.size[*d]).collect(),
            };
        }
    }

    /// Whether dimension `d` can be merged into dimension `into`.
    fn merges(&self, into: usize, d: usize, dim: usize) -> bool {
        self.strides[into] == self.strides[d] * dim as isize
            && self.window.as_ref().is_none_or(|w| w.is_full(d, dim))
    }

    /// Makes dimension `to` of the merged grid from dimension `from`; `merge` joins it to what is
    /// already there.
    fn place(&mut self, to: usize, from: usize, dim: usize, merge: bool) {
        self.strides[to] = self.strides[from];
        if let Some(window) = &mut self.window {
            let scale = if merge { dim } else { 1 };
            let source = if merge { to } else { from };
            (window.start[to], window.size[to]) =
                (window.start[source] * scale, window.size[source] * scale);
        }
    }
}

/// Whether an operand's elements lie in order, at every position.
pub(crate) fn is_dense(input: &MapInput) -> bool {
    input.window.is_none() && input.view.layout.is_contiguous()
}

/// The memory of each of these.
pub(crate) fn memory_of<'a>(views: impl Iterator<Item = &'a View>) -> Result<Inputs<'a>> {
    let mut all = Inputs::new();
    for view in views {
        all.push(bytes_of(&view.buffer)?);
    }
    Ok(all)
}

impl<'a> Grid<'a> {
    /// The grid of a map call. `order` permutes the axes.
    pub(crate) fn new(
        dims: &[usize],
        inputs: &'a [MapInput],
        indices: &[Affine],
        order: Option<&[usize]>,
    ) -> Result<Self> {
        if indices.is_empty() && order.is_none() && inputs.iter().all(is_dense) {
            return Self::flat(dims.iter().product(), inputs);
        }
        let source = |input: &MapInput| Source::new(&input.view, input.window.as_ref(), dims);
        let sources = inputs.iter().map(source).collect();
        let forms = indices.iter().map(Source::form).collect();
        let inputs = memory_of(inputs.iter().map(|input| &input.view))?;
        Ok(Self::merged(dims, inputs, sources, forms, order))
    }

    /// The grid of dense operands, in one dimension: what small ops mostly have.
    fn flat(len: usize, inputs: &'a [MapInput]) -> Result<Self> {
        let stride = isize::from(len != 1);
        let mut sources = Sources::new();
        for MapInput { view, .. } in inputs {
            sources.push(Source {
                dtype: view.dtype,
                offset: view.layout.offset as isize,
                strides: Dims::from_elem(stride, 1),
                window: None,
                even: true,
            });
        }
        Ok(Self {
            dims: Dims::from_elem(len, 1),
            len,
            inputs: memory_of(inputs.iter().map(|input| &input.view))?,
            sources,
            forms: Sources::new(),
        })
    }

    /// The grid of operands that all have the shape `dims`.
    pub(crate) fn of_views(dims: &[usize], views: &[&'a View]) -> Result<Self> {
        let sources = (views.iter())
            .map(|view| Source::new(view, None, dims))
            .collect();
        let inputs = memory_of(views.iter().copied())?;
        Ok(Self::merged(dims, inputs, sources, Sources::new(), None))
    }

    fn merged(
        dims: &[usize],
        inputs: Inputs<'a>,
        mut sources: Sources,
        mut forms: Sources,
        order: Option<&[usize]>,
    ) -> Self {
        let len = dims.iter().product();
        let mut dims = Dims::from_slice(dims);
        if let Some(order) = order {
            dims = order.iter().map(|d| dims[*d]).collect();
            sources
                .iter_mut()
                .chain(&mut forms)
                .for_each(|s| s.permute(order));
        }
        let mut kept = 0;
        for d in 0..dims.len() {
            let dim = dims[d];
            if dim == 1
                && sources
                    .iter()
                    .all(|s| s.window.as_ref().is_none_or(|w| w.is_full(d, 1)))
            {
                continue;
            }
            let merge = kept > 0
                && sources
                    .iter()
                    .chain(&forms)
                    .all(|s| s.merges(kept - 1, d, dim));
            let to = if merge { kept - 1 } else { kept };
            sources
                .iter_mut()
                .chain(&mut forms)
                .for_each(|s| s.place(to, d, dim, merge));
            dims[to] = if merge { dims[to] * dim } else { dim };
            kept = to + 1;
        }
        dims.truncate(kept);
        if kept == 0 {
            dims.push(1);
        }
        for s in sources.iter_mut().chain(&mut forms) {
            s.strides.truncate(kept);
            s.strides.resize(dims.len(), 0);
            s.even = (1..dims.len()).all(|d| s.strides[d - 1] == s.strides[d] * dims[d] as isize);
        }
        Self {
            dims,
            len,
            inputs,
            sources,
            forms,
        }
    }

    /// Calls `f(coordinates, at, position, len)` for every run of `range` along the innermost
    /// dimension.
    fn runs(
        &self,
        source: &Source,
        range: Range<usize>,
        mut f: impl FnMut(&[usize], isize, usize, usize),
    ) {
        let (dims, strides) = (&self.dims, &source.strides);
        let last = dims.len() - 1;
        let mut coords: Dims = Dims::from_elem(0, dims.len());
        let (mut rest, mut at) = (range.start, source.offset);
        for d in (0..dims.len()).rev() {
            coords[d] = if d == 0 { rest } else { rest % dims[d] };
            rest /= dims[d];
            at += coords[d] as isize * strides[d];
        }
        let mut done = 0;
        loop {
            let len = (dims[last] - coords[last]).min(range.len() - done);
            f(&coords, at, done, len);
            done += len;
            if done == range.len() {
                return;
            }
            at -= coords[last] as isize * strides[last];
            coords[last] = 0;
            for d in (0..last).rev() {
                coords[d] += 1;
                at += strides[d];
                if coords[d] < dims[d] {
                    break;
                }
                at -= strides[d] * dims[d] as isize;
                coords[d] = 0;
            }
        }
    }

    /// The innermost stride of operand `k`.
    pub(crate) fn step(&self, k: usize) -> isize {
        self.sources[k].strides[self.dims.len() - 1]
    }

    /// Calls `f(at, position, len)` for every run of operand `k`.
    pub(crate) fn runs_of(
        &self,
        k: usize,
        range: Range<usize>,
        mut f: impl FnMut(isize, usize, usize),
    ) {
        self.runs(&self.sources[k], range, |_, at, position, len| {
            f(at, position, len)
        });
    }

    /// Like `runs_of` for all operands together: calls `f(at, position, len)` with the position of
    /// each in its memory.
    pub(crate) fn runs_of_all(
        &self,
        range: Range<usize>,
        mut f: impl FnMut(&[isize], usize, usize),
    ) {
        let mut at: Dims<isize> = Dims::from_elem(0, self.sources.len());
        // Every operand steps through the same coordinates; the first one drives, the others follow
        // them.
        self.runs(&self.sources[0], range, |coords, first, position, len| {
            at[0] = first;
            for (at, source) in at.iter_mut().zip(&self.sources).skip(1) {
                *at = source.offset
                    + coords
                        .iter()
                        .zip(&source.strides)
                        .map(|(c, s)| *c as isize * s)
                        .sum::<isize>();
            }
            f(&at, position, len);
        });
    }

    /// The linear range as one run: its first position in memory, where that is possible.
    fn single_run(&self, source: &Source, range: &Range<usize>) -> Option<isize> {
        let last = self.dims.len() - 1;
        if source.even {
            return Some(source.offset + range.start as isize * source.strides[last]);
        }
        if range.start % self.dims[last] + range.len() > self.dims[last] {
            return None;
        }
        let mut first = None;
        self.runs(source, range.clone(), |_, at, _, _| first = Some(at));
        first
    }

    /// The elements of operand `k` for all positions, where they lie one after the other as they are
    /// held.
    pub(crate) fn in_place<T: Held>(&self, k: usize) -> Option<&[T]> {
        let source = &self.sources[k];
        let dense = source.even && self.step(k) == 1 && source.window.is_none();
        let held = is_held_as_stored(source.dtype) && source.dtype.kind() == T::KIND;
        if !dense || !held || source.dtype == DType::Bool {
            return None;
        }
        let start = usize::try_from(source.offset).ok()?;
        typed(self.inputs[k]).get(start..start + self.len)
    }

    /// Reads a block of operand `k`.
    pub(crate) fn fetch<S: Stored>(
        &self,
        k: usize,
        range: Range<usize>,
        slot: &mut [S::Held],
    ) -> Fetched {
        let (source, data) = (&self.sources[k], typed::<S>(self.inputs[k]));
        let step = source.strides[self.dims.len() - 1];
        if let Some(window) = &source.window {
            slot.fill(S::Held::default());
            self.runs(source, range, |coords, at, position, len| {
                if let Some(inside) = window.overlap(coords, len) {
                    let at = at + inside.start as isize * step;
                    copy_run(
                        data,
                        at,
                        step,
                        &mut slot[position + inside.start..position + inside.end],
                    );
                }
            });
            return Fetched::Filled;
        }
        match self.single_run(source, &range) {
            Some(at) if step == 0 => {
                slot[0] = data[at as usize].load();
                Fetched::One
            }
            Some(at) if S::IN_PLACE && step == 1 => Fetched::InPlace(at as usize),
            Some(at) => {
                copy_run(data, at, step, &mut slot[..range.len()]);
                Fetched::Filled
            }
            None => {
                self.runs(source, range, |_, at, position, len| {
                    copy_run(data, at, step, &mut slot[position..position + len])
                });
                Fetched::Filled
            }
        }
    }

    /// Whether positions are inside an operand's window: `None` where all are.
    pub(crate) fn inside(
        &self,
        source: &Source,
        range: Range<usize>,
        slot: &mut [u8],
    ) -> Option<()> {
        let window = source.window.as_ref()?;
        slot.fill(0);
        self.runs(source, range, |coords, _, position, len| {
            if let Some(inside) = window.overlap(coords, len) {
                slot[position + inside.start..position + inside.end].fill(1);
            }
        });
        Some(())
    }

    /// The values of an affine form.
    pub(crate) fn form<T>(
        &self,
        form: usize,
        range: Range<usize>,
        slot: &mut [T],
        convert: impl Fn(i64) -> T,
    ) {
        let source = &self.forms[form];
        let step = source.strides[self.dims.len() - 1] as i64;
        self.runs(source, range, |_, at, position, len| {
            for (i, value) in slot[position..position + len].iter_mut().enumerate() {
                *value = convert(at as i64 + i as i64 * step);
            }
        });
    }
}

impl Window {
    /// The part of a run of `len` positions from `coords` on that lies inside.
    fn overlap(&self, coords: &[usize], len: usize) -> Option<Range<usize>> {
        let last = coords.len() - 1;
        let within =
            |d: usize| coords[d] >= self.start[d] && coords[d] < self.start[d] + self.size[d];
        if !(0..last).all(within) {
            return None;
        }
        let start = self.start[last].saturating_sub(coords[last]);
        let end = (self.start[last] + self.size[last])
            .saturating_sub(coords[last])
            .min(len);
        (start < end).then_some(start..end)
    }
}

fn copy_run<S: Stored>(data: &[S], at: isize, step: isize, to: &mut [S::Held]) {
    let first = at as usize;
    match step {
        1 => S::load_all(&data[first..first + to.len()], to),
        0 => to.fill(data[first].load()),
        2.. => {
            for (to, from) in to
                .iter_mut()
                .zip(data[first..].iter().step_by(step as usize))
            {
                *to = from.load();
            }
        }
        _ => {
            for (to, from) in to
                .iter_mut()
                .zip(data[..=first].iter().rev().step_by(step.unsigned_abs()))
            {
                *to = from.load();
            }
        }
    }
}

/// The elements of a view in row-major order, held as `T`, which is the kind of the view's dtype.
/// Borrowed where they already lie so.
pub(crate) fn dense<T: Held>(view: &View) -> Result<Dense<'_, T>> {
    let len = view.layout.shape.numel();
    let as_held = is_held_as_stored(view.dtype) && T::KIND != anymesh_kernel::Kind::Bool;
    if view.layout.is_contiguous() && as_held {
        let start = view.layout.offset;
        return Ok(Dense::Borrowed(
            &typed(bytes_of(&view.buffer)?)[start..start + len],
        ));
    }
    copied(view)
}

/// [`dense`] that is always a copy.
pub(crate) fn copied<'v, T: Held>(view: &View) -> Result<Dense<'v, T>> {
    if is_held_as_stored(view.dtype) && T::KIND != anymesh_kernel::Kind::Bool {
        return Ok(Dense::Copied(copy::copy(view)?));
    }
    let len = view.layout.shape.numel();
    let grid = Grid::of_views(view.layout.shape.dims(), &[view])?;
    let mut out = Memory::elements::<T>(len)?;
    with_stored!(view.dtype, S => fill_dense::<S>(&grid, out.typed_mut()));
    Ok(Dense::Copied(out))
}

fn fill_dense<S: Stored>(grid: &Grid<'_>, out: &mut [S::Held]) {
    parallel::chunks(out, parallel::CHUNK, |start, chunk| {
        let range = start..start + chunk.len();
        match grid.fetch::<S>(0, range, chunk) {
            Fetched::One => chunk.fill(chunk[0]),
            Fetched::InPlace(at) => {
                S::load_all(&typed(grid.inputs[0])[at..at + chunk.len()], chunk)
            }
            Fetched::Filled => {}
        }
    });
}

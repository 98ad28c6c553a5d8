//! Pooling: one value for each window over the last dimensions.
//!
//! Windows are a view of the (padded) input, so a pool is a reduction. Adaptive pools cut a
//! dimension of size `n` into `out` windows `floor(i * n / out) .. ceil((i + 1) * n / out)`, which
//! may overlap by one and differ in length by one.
//!
//! The gradient of a maximum goes to the first element of the window that is it (in adaptive pools,
//! equal ones share it).
//!
//! ```
//! # use anymesh_core::{Tensor, ops::{AvgPool, MaxPool}};
//! # let device = anymesh_backend_cpu::device();
//! let x = Tensor::from_slice(&[1f32, 5., 2., 4., 3.], [1, 1, 5], &device)?;
//! assert_eq!(x.max_pool1d(&MaxPool::new([2]))?.to_vec::<f32>()?, [5., 4.]);
//! let edges = AvgPool { padding: [1], count_include_pad: false, ..AvgPool::new([2]) };
//! assert_eq!(x.avg_pool1d(&edges)?.to_vec::<f32>()?, [1., 3.5, 3.5]);
//! assert_eq!(x.adaptive_avg_pool1d([2])?.to_vec::<f32>()?, [8. / 3., 3.]);
//! # Ok::<(), anymesh_core::Error>(())
//! ```

mod adaptive;
mod gradient;

use super::{Map, OpInfo, PadMode, conv::Slide, op, reduce::Reduce};
use crate::{
    DType, Dims, Error, Layout, MapProgram, Result, Scalar, Shape, Sharding, Tensor,
    backend::{Affine, ReduceOp},
    grad::{Back, record, record1},
    map::Builder,
    spmd::Call,
    tensor::Outputs,
};
use adaptive::adaptive;
use smallvec::smallvec;

const MAX: OpInfo = op("max_pool1d", "...w -> ...w ; replicate w ; through max 0");
const MAX_WITH_INDICES: OpInfo = op(
    "max_pool1d_with_indices",
    "...w -> ...w, ...w ; replicate w",
);
const AVERAGE: OpInfo = op("avg_pool1d", "...w -> ...w ; replicate w ; linear 0");

/// The ops of this file. `w` are the dimensions with windows; they stay whole.
pub const OPS: &[OpInfo] = &[
    MAX.named("max_pool1d"),
    MAX.named("max_pool2d"),
    MAX.named("max_pool3d"),
    MAX_WITH_INDICES.named("max_pool1d_with_indices"),
    MAX_WITH_INDICES.named("max_pool2d_with_indices"),
    MAX_WITH_INDICES.named("max_pool3d_with_indices"),
    AVERAGE.named("avg_pool1d"),
    AVERAGE.named("avg_pool2d"),
    AVERAGE.named("avg_pool3d"),
    MAX.named("adaptive_max_pool1d"),
    MAX.named("adaptive_max_pool2d"),
    MAX.named("adaptive_max_pool3d"),
    AVERAGE.named("adaptive_avg_pool1d"),
    AVERAGE.named("adaptive_avg_pool2d"),
    AVERAGE.named("adaptive_avg_pool3d"),
];

/// The windows of a max pool over `N` dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaxPool<const N: usize> {
    /// Size of the window.
    pub kernel: [usize; N],
    /// Step of the window.
    pub stride: [usize; N],
    /// Places before and after each dimension that hold no value; at most half the window.
    pub padding: [usize; N],
    /// Step between the elements of a window.
    pub dilation: [usize; N],
    /// Whether a window may reach over the end (but not begin there).
    pub ceil_mode: bool,
}

impl<const N: usize> MaxPool<N> {
    /// Windows side by side.
    pub fn new(kernel: [usize; N]) -> Self {
        Self {
            kernel,
            stride: kernel,
            padding: [0; N],
            dilation: [1; N],
            ceil_mode: false,
        }
    }
}

/// The windows of an average pool over `N` dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AvgPool<const N: usize> {
    /// Size of the window.
    pub kernel: [usize; N],
    /// Step of the window.
    pub stride: [usize; N],
    /// Zeros before and after each dimension; at most half the window.
    pub padding: [usize; N],
    /// Whether a window may reach over the end (but not begin there).
    pub ceil_mode: bool,
    /// Whether the padding counts as elements. What is beyond the padding never does.
    pub count_include_pad: bool,
}

impl<const N: usize> AvgPool<N> {
    /// Windows side by side.
    pub fn new(kernel: [usize; N]) -> Self {
        Self {
            kernel,
            stride: kernel,
            padding: [0; N],
            ceil_mode: false,
            count_include_pad: true,
        }
    }
}

/// The windows of all pooled dimensions, with the number of them along each.
#[derive(Clone)]
struct Windows {
    slides: Vec<Slide>,
    out: Dims,
}

impl Windows {
    fn new(
        op: &'static str,
        input: &Tensor,
        kernel: &[usize],
        stride: &[usize],
        padding: &[usize],
        dilation: &[usize],
        ceil_mode: bool,
    ) -> Result<Self> {
        let lead = leading(op, input, kernel.len())?;
        let mut windows = Windows {
            slides: vec![],
            out: Dims::new(),
        };
        for d in 0..kernel.len() {
            let slide = Slide {
                size: input.shape()[lead + d],
                kernel: kernel[d],
                stride: stride[d],
                padding: padding[d],
                dilation: dilation[d],
            };
            if slide.size == 0 {
                return Err(Error::shape(
                    op,
                    [input],
                    format!("dimension {} of {} is empty", lead + d, input.type_string()),
                ));
            }
            let mut out = slide.out(op).map_err(|e| e.of([input]))?;
            let (window, padded) = slide.extents(op)?;
            if padding[d] > window / 2 {
                return Err(Error::argument(
                    op,
                    "padding",
                    format!(
                        "padding {} is more than half of a window that spans {window}",
                        padding[d]
                    ),
                )
                .of([input]));
            }
            // One more window for the rest, unless it would begin behind the input.
            if ceil_mode
                && (padded - window) % stride[d] != 0
                && out * stride[d] < slide.size + padding[d]
            {
                out += 1;
            }
            windows.slides.push(slide.normal(out > 1));
            windows.out.push(out);
        }
        Ok(windows)
    }

    fn out_shape(&self, input: &Tensor) -> Shape {
        input.dims()[..input.rank() - self.out.len()]
            .iter()
            .chain(&self.out)
            .copied()
            .collect()
    }

    fn axes(&self, rank: usize) -> Vec<i64> {
        (0..self.slides.len()).map(|d| (rank + d) as i64).collect()
    }

    /// A view `[.., out.., kernel..]` of the input, padded with `fill` where windows reach over its
    /// edges.
    fn view(&self, op: &'static str, input: &Tensor, fill: Scalar) -> Result<Tensor> {
        let lead = input.rank() - self.slides.len();
        let mut pairs = vec![(0, 0); lead];
        for (slide, out) in self.slides.iter().zip(&self.out) {
            let (window, _) = slide.extents(op)?;
            let end = (out.saturating_sub(1)) * slide.stride + window;
            pairs.push((
                slide.padding,
                end.saturating_sub(slide.size + slide.padding),
            ));
        }
        let padded = if pairs.iter().all(|p| *p == (0, 0)) {
            input.clone()
        } else {
            input.pad(&pairs, PadMode::Constant(fill))?
        };
        let old = padded.layout();
        let mut dims: Dims = input.dims()[..lead].into();
        let mut strides: Dims<isize> = old.strides[..lead].into();
        dims.extend(self.out.iter().copied());
        strides.extend(
            self.slides
                .iter()
                .zip(&old.strides[lead..])
                .map(|(s, step)| step * s.stride as isize),
        );
        dims.extend(self.slides.iter().map(|s| s.kernel));
        strides.extend(
            self.slides
                .iter()
                .zip(&old.strides[lead..])
                .map(|(s, step)| step * s.dilation as isize),
        );
        let shape = Shape::from(dims);
        shape.checked_numel(op)?;
        Ok(padded.viewed(Layout {
            shape,
            strides,
            offset: old.offset,
        }))
    }

    /// The number of elements that each window divides by, if they are not all the same.
    fn counts(&self, op: &'static str, count_include_pad: bool) -> Result<Option<Vec<f64>>> {
        for out in &self.out {
            check_table(op, "stride", *out)?;
        }
        let along = |slide: &Slide, out: usize| -> Vec<usize> {
            let (low, high) = if count_include_pad {
                (0, slide.size + 2 * slide.padding)
            } else {
                (slide.padding, slide.padding + slide.size)
            };
            (0..out)
                .map(|i| (i * slide.stride + slide.kernel).min(high) - (i * slide.stride).max(low))
                .collect()
        };
        let each: Vec<Vec<usize>> = self
            .slides
            .iter()
            .zip(&self.out)
            .map(|(s, out)| along(s, *out))
            .collect();
        if each
            .iter()
            .zip(&self.slides)
            .all(|(counts, s)| counts.iter().all(|n| *n == s.kernel))
        {
            return Ok(None);
        }
        let all = self
            .out
            .iter()
            .fold(1usize, |n, out| n.saturating_mul(*out));
        check_table(op, "stride", all)?;
        Ok(Some(each.iter().fold(vec![1.0], |table, counts| {
            table
                .iter()
                .flat_map(|t| counts.iter().map(move |n| t * *n as f64))
                .collect()
        })))
    }
}

/// The number of dimensions before the pooled ones.
pub(super) fn leading(op: &'static str, input: &Tensor, n: usize) -> Result<usize> {
    let few = || {
        Error::shape(
            op,
            [input],
            format!("{} has fewer than {n} dimensions", input.type_string()),
        )
    };
    input.rank().checked_sub(n).ok_or_else(few)
}

/// An op on the last `n` dimensions, which are whole on every rank, of a tensor on a mesh.
#[track_caller]
pub(super) fn on_windows(
    op: &'static str,
    info: &'static OpInfo,
    variant: usize,
    input: &Tensor,
    n: usize,
    local: impl Fn(&Tensor) -> Result<Outputs>,
) -> Result<Outputs> {
    let windows: Dims = (leading(op, input, n)?..input.rank()).collect();
    Call::of(info, &[input])
        .on_behalf_of(op)
        .variant(variant)
        .bind('w', &windows)
        .run(|l| local(&l[0]))
}

/// The value that loses against every other.
fn lowest(dtype: DType) -> Scalar {
    match dtype {
        DType::Bool | DType::U8 | DType::U32 => Scalar::Int(0),
        DType::I32 => Scalar::Int(i32::MIN.into()),
        DType::I64 => Scalar::Int(i64::MIN),
        // This type has no infinity.
        DType::F8E4M3 => Scalar::Float(-448.0),
        _ => Scalar::Float(f64::NEG_INFINITY),
    }
}

fn check_number(op: &'static str, input: &Tensor) -> Result<()> {
    if input.dtype() == DType::Bool {
        Err(Error::DType {
            op,
            dtype: DType::Bool,
            expected: "numbers",
        })
    } else {
        Ok(())
    }
}

#[track_caller]
fn max_pool(op: &'static str, input: &Tensor, windows: &Windows) -> Result<Tensor> {
    check_number(op, input)?;
    record1(
        op,
        &[input],
        || largest(op, input, windows),
        |_| {
            let (input, windows) = (input.kept(), windows.clone());
            Ok(move |b: &Back<'_>| {
                let (_, positions) = largest_with_indices(op, &input.detach(), &windows)?;
                Ok(smallvec![Some(windows.unpicked(b.grad()?, &positions)?)])
            })
        },
    )
}

/// [`max_pool`] without its gradient.
#[track_caller]
fn largest(op: &'static str, input: &Tensor, windows: &Windows) -> Result<Tensor> {
    if !input.is_plain() {
        return Ok(on_windows(op, &MAX, 0, input, windows.out.len(), |x| {
            Ok(smallvec![largest(op, x, windows)?])
        })?
        .remove(0));
    }
    if input.numel() == 0 {
        return input.no_elements(input.dtype(), windows.out_shape(input));
    }
    windows
        .view(op, input, lowest(input.dtype()))?
        .max(&windows.axes(input.rank()), false)
}

/// Positions in the window, turned into positions in the pooled dimensions of the input.
fn max_pool_indices(op: &'static str, input: &Tensor, windows: &Windows) -> Result<Tensor> {
    let view = windows.view(op, input, lowest(input.dtype()))?;
    let axes: Dims = (input.rank()..view.rank()).collect();
    let program = MapProgram::cast(input.dtype(), input.dtype());
    let (reduce, dtype) = (ReduceOp::ArgMax, DType::I32);
    let places = Reduce {
        op,
        program: &program,
        operands: &[&view],
        params: &[],
        axes: &axes,
        keepdim: false,
        reduce,
        scale: None,
        dtype,
        linear: false,
    }
    .run()?;
    let lead = input.rank() - windows.slides.len();
    let b = Builder::new();
    let mut place = b.load(DType::I32);
    let mut flat = place.lit(0);
    let (mut indices, mut step) = (vec![], 1i64);
    for (d, slide) in windows.slides.iter().enumerate().rev() {
        let mut start = Affine {
            offset: -(slide.padding as i64),
            strides: smallvec![0; input.rank()],
        };
        start.strides[lead + d] = slide.stride as i64;
        indices.push(start);
        let at = b.index(DType::I32) + place.rem(slide.kernel as i64) * slide.dilation as i64;
        // Where all values are the lowest the first place wins, which may be padding: take the
        // first element of the window that is not.
        let at = at
            .lt(0)
            .select(at.rem(slide.dilation as i64), at)
            .min(slide.size as i64 - 1);
        flat = flat + at * step;
        place = place.floor_div(slide.kernel as i64);
        step *= slide.size as i64;
    }
    let program = b.finish(&[(flat, DType::I32)])?;
    Ok(Map {
        indices: &indices,
        ..Map::new(op, &program, places.shape())
    }
    .run(&[(&places).into()], input.device())?
    .remove(0))
}

#[track_caller]
fn max_pool_with_indices(
    op: &'static str,
    input: &Tensor,
    windows: &Windows,
) -> Result<(Tensor, Tensor)> {
    check_number(op, input)?;
    let run = || {
        largest_with_indices(op, input, windows)
            .map(|(values, positions)| -> Outputs { smallvec![values, positions] })
    };
    let mut out = record(op, &[input], run, |out| {
        let (positions, windows) = (out[1].clone(), windows.clone());
        Ok(move |b: &Back<'_>| Ok(smallvec![Some(windows.unpicked(b.grad()?, &positions)?)]))
    })?;
    Ok((out.remove(0), out.remove(0)))
}

/// [`max_pool_with_indices`] without its gradient.
#[track_caller]
fn largest_with_indices(
    op: &'static str,
    input: &Tensor,
    windows: &Windows,
) -> Result<(Tensor, Tensor)> {
    if !input.is_plain() {
        let mut out = on_windows(op, &MAX_WITH_INDICES, 0, input, windows.out.len(), |x| {
            let (values, indices) = largest_with_indices(op, x, windows)?;
            Ok(smallvec![values, indices])
        })?;
        return Ok((out.remove(0), out.remove(0)));
    }
    let values = largest(op, input, windows)?;
    if input.numel() == 0 {
        let none = input.no_elements(DType::I32, values.shape().clone())?;
        return Ok((values, none));
    }
    let plane: Shape = windows
        .slides
        .iter()
        .map(|s| s.size + 2 * s.padding)
        .collect();
    super::reduce::check_positions(op, plane.checked_numel(op)?)?;
    Ok((values, max_pool_indices(op, input, windows)?))
}

fn check_float(op: &'static str, input: &Tensor) -> Result<()> {
    if input.dtype().is_float() {
        Ok(())
    } else {
        Err(Error::DType {
            op,
            dtype: input.dtype(),
            expected: "floats",
        })
    }
}

#[track_caller]
fn avg_pool(
    op: &'static str,
    input: &Tensor,
    windows: &Windows,
    count_include_pad: bool,
) -> Result<Tensor> {
    check_float(op, input)?;
    record1(
        op,
        &[input],
        || average(op, input, windows, count_include_pad),
        |_| {
            let windows = windows.clone();
            Ok(move |b: &Back<'_>| {
                Ok(smallvec![Some(
                    windows.unaveraged(b.grad()?, count_include_pad)?
                )])
            })
        },
    )
}

/// [`avg_pool`] without its gradient.
#[track_caller]
fn average(
    op: &'static str,
    input: &Tensor,
    windows: &Windows,
    count_include_pad: bool,
) -> Result<Tensor> {
    if !input.is_plain() {
        let local = |x: &Tensor| Ok(smallvec![average(op, x, windows, count_include_pad)?]);
        return Ok(on_windows(op, &AVERAGE, 0, input, windows.out.len(), local)?.remove(0));
    }
    if input.numel() == 0 {
        return input.no_elements(input.dtype(), windows.out_shape(input));
    }
    let axes = windows.axes(input.rank());
    let Some(counts) = windows.counts(op, count_include_pad)? else {
        return windows
            .view(op, input, Scalar::Float(0.0))?
            .mean(&axes, false);
    };
    // Sums of small floats may not fit their dtype, and the quotient is rounded once.
    let wide = input.dtype().kind().dtype();
    let sums = windows
        .view(op, &input.cast(wide)?, Scalar::Float(0.0))?
        .sum(&axes, false)?;
    sums.div(&table(&counts, windows.out.clone(), wide, input)?)?
        .cast(input.dtype())
}

/// The most numbers of a table that the host makes for a device.
const MAX_TABLE: usize = 1 << 26;

/// Refuses tables that would fill the host's memory, whatever the device can hold.
pub(super) fn check_table(op: &'static str, argument: &'static str, n: usize) -> Result<()> {
    if n <= MAX_TABLE {
        return Ok(());
    }
    Err(Error::argument(
        op,
        argument,
        format!("needs a table of {n} numbers on the host: at most {MAX_TABLE}"),
    ))
}

/// A small host-made tensor of floats beside `like`.
pub(super) fn table(
    values: &[f64],
    shape: impl Into<Shape>,
    dtype: DType,
    like: &Tensor,
) -> Result<Tensor> {
    if dtype == DType::F64 {
        return Tensor::from_slice(values, shape, like.device());
    }
    let values: Vec<f32> = values.iter().map(|v| *v as f32).collect();
    Tensor::from_slice(&values, shape, like.device())
}

/// A small tensor on the device of `like` where `like` lies: whole on every rank of a mesh.
pub(super) fn on_mesh_of(small: Tensor, like: &Tensor) -> Result<Tensor> {
    if like.is_plain() {
        Ok(small)
    } else {
        small.to_mesh(like.mesh(), Sharding::replicated())
    }
}

macro_rules! pools {
    ($($n:literal $max:ident $max_with:ident $avg:ident $adaptive_max:ident $adaptive_avg:ident),*) => {
        impl Tensor {$(
            #[doc = concat!("The largest value of each window over the last ", $n, " dimension(s); NaN wins.")]
            #[track_caller]
            pub fn $max(&self, options: &MaxPool<$n>) -> Result<Tensor> {
                let (op, p) = (stringify!($max), options);
                max_pool(op, self, &Windows::new(op, self, &p.kernel, &p.stride, &p.padding, &p.dilation, p.ceil_mode)?)
            }

            #[doc = concat!("The largest value of each window over the last ", $n, " dimension(s), and where it is: the position (i32) of the first such element among those dimensions, in row-major order.")]
            #[track_caller]
            pub fn $max_with(&self, options: &MaxPool<$n>) -> Result<(Tensor, Tensor)> {
                let (op, p) = (stringify!($max_with), options);
                max_pool_with_indices(op, self, &Windows::new(op, self, &p.kernel, &p.stride, &p.padding, &p.dilation, p.ceil_mode)?)
            }

            #[doc = concat!("The mean of each window over the last ", $n, " dimension(s). Floats only.")]
            #[track_caller]
            pub fn $avg(&self, options: &AvgPool<$n>) -> Result<Tensor> {
                let (op, p) = (stringify!($avg), options);
                avg_pool(op, self, &Windows::new(op, self, &p.kernel, &p.stride, &p.padding, &[1; $n], p.ceil_mode)?, p.count_include_pad)
            }

            #[doc = concat!("The largest values of `out` windows that cover the last ", $n, " dimension(s).")]
            #[track_caller]
            pub fn $adaptive_max(&self, out: [usize; $n]) -> Result<Tensor> {
                adaptive(stringify!($adaptive_max), self, &out, false)
            }

            #[doc = concat!("The means of `out` windows that cover the last ", $n, " dimension(s). Floats only.")]
            #[track_caller]
            pub fn $adaptive_avg(&self, out: [usize; $n]) -> Result<Tensor> {
                adaptive(stringify!($adaptive_avg), self, &out, true)
            }
        )*}
    };
}
pools!(
    1 max_pool1d max_pool1d_with_indices avg_pool1d adaptive_max_pool1d adaptive_avg_pool1d,
    2 max_pool2d max_pool2d_with_indices avg_pool2d adaptive_max_pool2d adaptive_avg_pool2d,
    3 max_pool3d max_pool3d_with_indices avg_pool3d adaptive_max_pool3d adaptive_avg_pool3d
);

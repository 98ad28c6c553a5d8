//! Tensors from nothing: constants, ranges, identities and masks.
//!
//! Each element is computed from its index, so that a rank that holds a part of the tensor computes
//! that part alone. Constructors take anything that says where ([`IntoPlace`]): a device for a plain
//! tensor, a mesh for one on every rank, or a mesh with a sharding.
//!
//! ```
//! # use anymesh_core::{DType, Mesh, Tensor};
//! # let device = anymesh_backend_cpu::device();
//! assert_eq!(Tensor::arange(0, 10, 3, DType::I32, &device)?.to_vec::<i32>()?, [0, 3, 6, 9]);
//! assert_eq!(Tensor::linspace(0.0, 1.0, 5, DType::F32, &device)?.to_vec::<f32>()?, [0.0, 0.25, 0.5, 0.75, 1.0]);
//! assert_eq!(Tensor::causal_mask(2, 3, &device)?.to_vec::<bool>()?, [true, true, false, true, true, true]);
//!
//! let mesh = Mesh::new("x=2", &device)?;
//! let rows = Tensor::arange(0, 10, 3, DType::I32, (&mesh, "[@x]"))?;
//! assert_eq!(rows.type_string(), "i32[4@x]");
//! assert_eq!(rows.shards()[1].1.to_vec::<i32>()?, [6, 9]);
//! # Ok::<(), anymesh_core::Error>(())
//! ```

use super::{
    Map, OpInfo,
    affine::{diagonal_index, shifted},
    creates, index_kind,
};
use crate::{
    DType, Device, Dims, Error, IntoPlace, Kind, Place, Region, Result, Scalar, Shape, Tensor,
    backend::Affine,
    map::{Binary, Builder},
    observe,
};

/// The ops of this file: nothing comes in, every rank computes its part of the result from where it
/// lies.
pub const OPS: &[OpInfo] = &[
    creates("full"),
    creates("arange"),
    creates("linspace"),
    creates("eye"),
    creates("tril_mask"),
    creates("triu_mask"),
    creates("causal_mask"),
];

/// The smallest and largest integer of a dtype (0 and 1 for bool).
fn int_range(dtype: DType) -> (i64, i64) {
    match dtype {
        DType::Bool => (0, 1),
        DType::U8 => (0, i64::from(u8::MAX)),
        DType::U32 => (0, i64::from(u32::MAX)),
        DType::I32 => (i64::from(i32::MIN), i64::from(i32::MAX)),
        _ => (i64::MIN, i64::MAX),
    }
}

/// A scalar as an element of `dtype`: floats take any number and round it, integers and bool only
/// what they hold exactly.
pub(crate) fn exact_scalar(op: &'static str, value: Scalar, dtype: DType) -> Result<Scalar> {
    if dtype.is_float() {
        return Ok(Scalar::Float(value.to_f64()));
    }
    let int = value.to_i64();
    let (low, high) = int_range(dtype);
    // The largest i64 rounds up as a float, so that a float of 2^63 would seem to survive the way
    // to i64 and back.
    let lossless = matches!(value, Scalar::Float(f) if int as f64 == f && int != i64::MAX)
        || !matches!(value, Scalar::Float(_));
    match lossless && (low..=high).contains(&int) {
        true if dtype == DType::Bool => Ok(Scalar::Bool(int == 1)),
        true => Ok(Scalar::Int(int)),
        false => Err(Error::argument(
            op,
            "value",
            format!(
                "{value:?} is not a value of {dtype}: use one from {low} to {high} or another dtype"
            ),
        )),
    }
}

/// Zero as the kernels of `dtype` take it.
pub(crate) fn zero_scalar(dtype: DType) -> Scalar {
    match dtype.kind() {
        Kind::Bool => Scalar::Bool(false),
        Kind::F32 | Kind::F64 => Scalar::Float(0.0),
        _ => Scalar::Int(0),
    }
}

/// A dense tensor of one value that [`exact_scalar`] gave.
#[track_caller]
pub(crate) fn filled(
    op: &'static str,
    shape: Shape,
    value: Scalar,
    dtype: DType,
    place: &Place,
) -> Result<Tensor> {
    let b = Builder::new();
    let program = b.finish(&[(b.param(dtype), dtype)])?;
    generated(op, &program, &shape, &[], &[value], dtype, place)
}

/// Runs a program without inputs, on each rank for its part.
#[track_caller]
pub(super) fn generated(
    op: &'static str,
    program: &crate::MapProgram,
    shape: &Shape,
    indices: &[Affine],
    params: &[Scalar],
    dtype: DType,
    place: &Place,
) -> Result<Tensor> {
    shape.checked_numel(op)?;
    let part = |device: &Device, region: &Region| {
        let part = Shape::from(region.shape.clone());
        let indices: Dims<Affine> = indices
            .iter()
            .map(|index| shifted(index, &region.start))
            .collect();
        Ok(Map {
            indices: &indices,
            params,
            ..Map::new(op, program, &part)
        }
        .run(&[], device)?
        .remove(0))
    };
    observe::op(op, &[], || place.build(dtype, shape, part))
}

/// The float kind in which ranges are computed: f64 where every device has it, so that long f32
/// ranges do not drift.
fn range_kind(dtype: DType, place: &Place) -> Kind {
    let devices = 0..place.mesh.held().len();
    if dtype == DType::F64
        || devices
            .into_iter()
            .all(|i| place.mesh.device(i).supports(DType::F64))
    {
        Kind::F64
    } else {
        Kind::F32
    }
}

fn vector_index() -> Affine {
    Affine {
        offset: 0,
        strides: smallvec::smallvec![1],
    }
}

impl Tensor {
    /// All zero (false).
    #[track_caller]
    pub fn zeros(shape: impl Into<Shape>, dtype: DType, place: impl IntoPlace) -> Result<Tensor> {
        Self::full(shape, 0, dtype, place)
    }

    /// All one (true).
    #[track_caller]
    pub fn ones(shape: impl Into<Shape>, dtype: DType, place: impl IntoPlace) -> Result<Tensor> {
        Self::full(shape, 1, dtype, place)
    }

    /// All of one value. An integer dtype takes only integers that it holds; a float dtype rounds.
    #[track_caller]
    pub fn full(
        shape: impl Into<Shape>,
        value: impl Into<Scalar>,
        dtype: DType,
        place: impl IntoPlace,
    ) -> Result<Tensor> {
        let shape = shape.into();
        let place = place.into_place(shape.rank())?;
        let value = exact_scalar("full", value.into(), dtype)?;
        filled("full", shape, value, dtype, &place)
    }

    /// Zeros of this tensor's shape and dtype, where it lies.
    #[track_caller]
    pub fn zeros_like(&self) -> Result<Tensor> {
        Self::zeros(self.shape(), self.dtype(), self)
    }

    /// Ones of this tensor's shape and dtype, where it lies.
    #[track_caller]
    pub fn ones_like(&self) -> Result<Tensor> {
        Self::ones(self.shape(), self.dtype(), self)
    }

    /// One value in this tensor's shape and dtype, where it lies.
    #[track_caller]
    pub fn full_like(&self, value: impl Into<Scalar>) -> Result<Tensor> {
        Self::full(self.shape(), value, self.dtype(), self)
    }

    /// `start, start + step, ...` up to but without `end`. Every element is `start + i * step`, so
    /// rounding does not add up.
    ///
    /// Integer dtypes take integer arguments and are exact. With floats there are
    /// `ceil((end - start) / step)` elements (computed in f64), as in NumPy: where the quotient is
    /// not exact the last element may lie at `end`. Use [`linspace`](Tensor::linspace) to say the
    /// count instead.
    #[track_caller]
    pub fn arange(
        start: impl Into<Scalar>,
        end: impl Into<Scalar>,
        step: impl Into<Scalar>,
        dtype: DType,
        place: impl IntoPlace,
    ) -> Result<Tensor> {
        let (op, place) = ("arange", place.into_place(1)?);
        let (start, end, step) = (start.into(), end.into(), step.into());
        let wrong = |argument, detail: String| Error::argument(op, argument, detail);
        if dtype == DType::Bool {
            return Err(Error::DType {
                op,
                dtype,
                expected: "an integer or float dtype",
            });
        }
        if step.to_f64() == 0.0 {
            return Err(wrong(
                "step",
                "the step is zero: the range would never end".into(),
            ));
        }
        let b = Builder::new();
        let (count, params, kind) = if dtype.is_float() {
            let (start, end, step) = (start.to_f64(), end.to_f64(), step.to_f64());
            let count = ((end - start) / step).ceil().max(0.0);
            // The quotient of finite numbers may be infinite, and of infinite ones NaN (which `max`
            // drops).
            if !(start.is_finite() && end.is_finite() && step.is_finite() && count < 2f64.powi(60))
            {
                let detail =
                    format!("{start} to {end} by {step} is not a range of countable length");
                return Err(wrong("end", detail));
            }
            (
                count as u64,
                [Scalar::Float(step), Scalar::Float(start)],
                range_kind(dtype, &place),
            )
        } else {
            let exact = |value| exact_scalar(op, value, DType::I64).map(|s| i128::from(s.to_i64()));
            let (start, end, step) = (exact(start)?, exact(end)?, exact(step)?);
            let distance = if step > 0 { end - start } else { start - end };
            let count = if distance <= 0 {
                0
            } else {
                (distance - 1) / step.abs() + 1
            };
            let (low, high) = int_range(dtype);
            let fits = |value: i128| (i128::from(low)..=i128::from(high)).contains(&value);
            if count > 0 && !(fits(start) && fits(start + (count - 1) * step)) {
                let detail = format!(
                    "values from {start} to {end} by {step} do not fit {dtype} ({low} to {high})"
                );
                return Err(wrong("dtype", detail));
            }
            // Arithmetic wraps, so it is exact as soon as the values fit, also where a step on its
            // own does not.
            let wrapped = |value: i128| match dtype.kind() {
                Kind::U32 => Scalar::Int(i64::from(value as u32)),
                Kind::I32 => Scalar::Int(i64::from(value as i32)),
                _ => Scalar::Int(value as i64),
            };
            (count as u64, [wrapped(step), wrapped(start)], dtype.kind())
        };
        let shape = Shape::from([usize::try_from(count)
            .map_err(|_| wrong("end", format!("{count} elements cannot be addressed")))?]);
        let index = b.index(index_kind(shape[0]).dtype()).cast(kind.dtype());
        let (step, start) = (b.param(kind.dtype()), b.param(kind.dtype()));
        let program = b.finish(&[(index * step + start, dtype)])?;
        generated(
            op,
            &program,
            &shape,
            &[vector_index()],
            &params,
            dtype,
            &place,
        )
    }

    /// `n` evenly spaced values from `start` to `end`, both included and exact (`n = 1` gives
    /// `start`). Float dtypes only.
    #[track_caller]
    pub fn linspace(
        start: f64,
        end: f64,
        n: usize,
        dtype: DType,
        place: impl IntoPlace,
    ) -> Result<Tensor> {
        let (op, place) = ("linspace", place.into_place(1)?);
        if !dtype.is_float() {
            return Err(Error::DType {
                op,
                dtype,
                expected: "a float dtype",
            });
        }
        let shape = Shape::from([n]);
        shape.checked_numel(op)?;
        let kind = range_kind(dtype, &place);
        let step = (end - start) / n.saturating_sub(1).max(1) as f64;
        let limit = if kind == Kind::F64 {
            f64::MAX
        } else {
            f64::from(f32::MAX)
        };
        if !(step.abs() <= limit && start.abs() <= limit && end.abs() <= limit) {
            return Err(Error::argument(
                op,
                "end",
                format!(
                    "{start} to {end} has no even spacing: give finite ends, nearer to each other"
                ),
            ));
        }
        let b = Builder::new();
        let (index, back) = (
            b.index(index_kind(n).dtype()),
            b.index(index_kind(n).dtype()),
        );
        let (start_, end_, step_, half) = (
            b.param(kind.dtype()),
            b.param(kind.dtype()),
            b.param(kind.dtype()),
            b.param(index.kind().dtype()),
        );
        // Each half counts from its own end, so that both ends come out exactly.
        let from_start = index.cast(kind.dtype()) * step_ + start_;
        let from_end = end_ - back.cast(kind.dtype()) * step_;
        let program = b.finish(&[(index.lt(half).select(from_start, from_end), dtype)])?;
        let reversed = Affine {
            offset: n as i64 - 1,
            strides: smallvec::smallvec![-1],
        };
        let params = [
            Scalar::Float(start),
            Scalar::Float(end),
            Scalar::Float(step),
            Scalar::Int(n.div_ceil(2) as i64),
        ];
        generated(
            op,
            &program,
            &shape,
            &[vector_index(), reversed],
            &params,
            dtype,
            &place,
        )
    }

    /// An `n` by `m` matrix with one on diagonal `k` (column minus row) and zero elsewhere.
    #[track_caller]
    pub fn eye(n: usize, m: usize, k: i64, dtype: DType, place: impl IntoPlace) -> Result<Tensor> {
        band("eye", n, m, Binary::Eq, k, dtype, &place.into_place(2)?)
    }

    /// True on and below diagonal `k` (column minus row) of an `n` by `m` matrix.
    #[track_caller]
    pub fn tril_mask(n: usize, m: usize, k: i64, place: impl IntoPlace) -> Result<Tensor> {
        band(
            "tril_mask",
            n,
            m,
            Binary::Le,
            k,
            DType::Bool,
            &place.into_place(2)?,
        )
    }

    /// True on and above diagonal `k` (column minus row) of an `n` by `m` matrix.
    #[track_caller]
    pub fn triu_mask(n: usize, m: usize, k: i64, place: impl IntoPlace) -> Result<Tensor> {
        band(
            "triu_mask",
            n,
            m,
            Binary::Ge,
            k,
            DType::Bool,
            &place.into_place(2)?,
        )
    }

    /// Which of `keys` positions each of `queries` positions may see, where both end at the same
    /// time: query `i` sees keys `0 ..= i + keys - queries`.
    #[track_caller]
    pub fn causal_mask(queries: usize, keys: usize, place: impl IntoPlace) -> Result<Tensor> {
        let count = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        band(
            "causal_mask",
            queries,
            keys,
            Binary::Le,
            count(keys) - count(queries),
            DType::Bool,
            &place.into_place(2)?,
        )
    }
}

/// A matrix that is one where the distance to diagonal `k` compares to zero.
fn band(
    op: &'static str,
    n: usize,
    m: usize,
    keep: Binary,
    k: i64,
    dtype: DType,
    place: &Place,
) -> Result<Tensor> {
    let shape = Shape::from([n, m]);
    let (index, kind) = diagonal_index(&shape, k);
    let b = Builder::new();
    let diagonal = b.index(kind.dtype());
    let program = b.finish(&[(diagonal.binary(keep, diagonal.lit(0i64)), dtype)])?;
    generated(op, &program, &shape, &[index], &[], dtype, place)
}

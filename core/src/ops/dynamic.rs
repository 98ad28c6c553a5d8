//! Ops whose result size depends on the values: `nonzero`, `masked_select`, `unique`.
//!
//! The size is read from the device once, so each is `async`, with a waiting form where threads can
//! wait. Everything else stays on the device: a running count of the marked elements, in which the
//! position of the `i`-th one is found by binary search.
//!
//! On a mesh every rank gathers the operands whole (the ledger sees it) and finds the same: the
//! results are replicated. A call gathers at once, not when its future is first polled.
//!
//! Elements that `masked_select` takes get their gradients; of equal elements that `unique` makes
//! one, the first gets it.
//!
//! ```
//! # use anymesh_core::Tensor;
//! # let device = anymesh_backend_cpu::device();
//! let x = Tensor::from_slice(&[0f32, 5., 0., 7., 5., 0.], [2, 3], &device)?;
//! assert_eq!(x.nonzero()?.to_vec::<i32>()?, [0, 1, 1, 0, 1, 1]);
//! let unique = x.unique()?;
//! assert_eq!(unique.values.to_vec::<f32>()?, [0., 5., 7.]);
//! assert_eq!(unique.counts.to_vec::<i32>()?, [3, 2, 1]);
//! assert_eq!(unique.inverse.to_vec::<i32>()?, [0, 1, 0, 2, 1, 0]);
//! # Ok::<(), anymesh_core::Error>(())
//! ```

use super::{Map, OpInfo, Operand, POSITIONS, map1, op, sort::check_positions};
use crate::{
    DType, Dims, Error, MapProgram, Mesh, Result, Shape, Sharding, Tensor,
    backend::ScatterOp,
    grad::{Back, is_recording, record1},
    map::Builder,
    spmd::{Call, plain},
};

/// The ops of this file. Where an element ends up depends on all before it.
pub const OPS: &[OpInfo] = &[
    OpInfo::composed("nonzero", &["whole"]).without_gradient(POSITIONS),
    OpInfo::composed("masked_select", &["whole"]),
    OpInfo::composed("unique", &["whole"]),
];

/// The steps of this file: a tensor that every rank gets whole.
pub(super) const STEPS: &[OpInfo] = &[WHOLE];

const WHOLE: OpInfo = op("whole", "... -> ... ; replicate ...");

/// A tensor as every rank needs it: whole, and plain.
#[track_caller]
fn gathered(op: &'static str, x: &Tensor) -> Result<Tensor> {
    if x.is_plain() {
        return Ok(x.clone());
    }
    let run = || {
        let whole = Call::of(&WHOLE, &[x])
            .on_behalf_of(op)
            .run1(|l| Ok(l[0].clone()))?;
        Ok(whole.part(0))
    };
    record1(op, &[x], run, |_| {
        let (mesh, sharding) = (x.mesh().clone(), x.sharding().whole());
        Ok(move |b: &Back<'_>| {
            Ok(smallvec::smallvec![Some(
                b.grad()?.to_mesh(&mesh, &sharding)?
            )])
        })
    })
}

/// [`gathered`], with a gradient if one is wanted where the op is called, and not where it is
/// awaited.
#[track_caller]
fn tracked(op: &'static str, x: &Tensor) -> Result<Tensor> {
    if is_recording(&[x]) {
        gathered(op, x)
    } else {
        gathered(op, &x.detach())
    }
}

/// A result on every rank of the operand's mesh.
fn replicated(result: Tensor, mesh: &Mesh) -> Result<Tensor> {
    if mesh.is_single() {
        Ok(result)
    } else {
        result.to_mesh(mesh, Sharding::replicated())
    }
}

/// What [`Tensor::unique`] finds in a tensor.
#[derive(Clone, Debug)]
pub struct Unique {
    /// The different values, ascending.
    pub values: Tensor,
    /// For each element of the input, in its shape, the position (i32) of its value in `values`.
    pub inverse: Tensor,
    /// How often each value occurs (i32).
    pub counts: Tensor,
}

/// A vector of marks (i32, 0 or 1) turned into positions.
struct Marked {
    /// Marks up to and including each element (i32).
    running: Tensor,
    /// Where the marks are, ascending (i32).
    positions: Tensor,
}

/// Numbers the marks and finds them. Reads how many there are.
async fn find(op: &'static str, marks: &Tensor) -> Result<Marked> {
    let n = marks.numel();
    check_positions(op, marks.shape(), n)?;
    if n == 0 {
        return Ok(Marked {
            running: marks.clone(),
            positions: marks.clone(),
        });
    }
    let running = marks.cumsum(0)?;
    let count = running.narrow(0, n - 1, 1)?.item_async().await?.to_i64();
    let numbers = Tensor::arange(1, count + 1, 1, DType::I32, marks.device())?;
    let positions = running.searchsorted(&numbers, false)?;
    Ok(Marked { running, positions })
}

/// Positions (i32) in row-major order of the elements that are not zero.
async fn nonzero_positions(op: &'static str, tensor: &Tensor) -> Result<Tensor> {
    let marks =
        map1(op, &is_nonzero(tensor.dtype())?, &[tensor], &[])?.reshape([tensor.numel()])?;
    Ok(find(op, &marks).await?.positions)
}

/// 1 for what is not zero.
fn is_nonzero(dtype: DType) -> Result<MapProgram> {
    let b = Builder::new();
    let mark = b.load(dtype).cast(DType::Bool).cast(DType::I32);
    b.finish(&[(mark, DType::I32)])
}

/// 1 for what begins a new value in sorted order: what differs from the element before it, and the
/// first, which has none before it.
fn begins(dtype: DType) -> Result<MapProgram> {
    let b = Builder::new();
    let (here, before) = (b.load(dtype), b.load(dtype));
    let mut same = here.eq(before);
    if dtype.is_float() {
        same = same.or(here.is_nan().and(before.is_nan()));
    }
    b.finish(&[(!same.and(before.inside()), DType::I32)])
}

/// [`Tensor::nonzero`] of a plain tensor.
async fn nonzero(x: &Tensor) -> Result<Tensor> {
    let op = "nonzero";
    let positions = nonzero_positions(op, x).await?;
    let shape = Shape::from([positions.numel(), x.rank()]);
    if shape.numel() == 0 {
        return x.no_elements(DType::I32, shape);
    }
    let table = |values: Dims<isize>| {
        let values: Vec<i32> = values.iter().map(|v| *v as i32).collect();
        Tensor::from_slice(&values, [values.len()], x.device())
    };
    let b = Builder::new();
    let (position, step, size) = (b.load(DType::I32), b.load(DType::I32), b.load(DType::I32));
    let program = b.finish(&[(position.floor_div(step).rem(size), DType::I32)])?;
    let (steps, sizes) = (
        table(x.shape().strides())?,
        table(x.dims().iter().map(|d| *d as isize).collect())?,
    );
    map1(
        op,
        &program,
        &[&positions.unsqueeze(1)?, &steps, &sizes],
        &[],
    )
}

/// [`Tensor::unique`] of a plain tensor.
async fn unique(x: &Tensor) -> Result<Unique> {
    let op = "unique";
    let n = x.numel();
    let flat = x.reshape([n])?;
    if n == 0 {
        let none = x.no_elements(DType::I32, [0].into())?;
        return Ok(Unique {
            values: flat,
            inverse: x.no_elements(DType::I32, x.shape().clone())?,
            counts: none,
        });
    }
    let (sorted, order) = flat.sort(0, false)?;
    let compared = sorted.detach();
    let operands = [
        Operand::from(&compared),
        Operand::at(&compared, smallvec::smallvec![1]),
    ];
    let marks = Map::new(op, &begins(x.dtype())?, &[n].into())
        .run(&operands, x.device())?
        .remove(0);
    let Marked { running, positions } = find(op, &marks).await?;

    let values = sorted.index_select(0, &positions)?;
    let found = positions.numel();
    let end = Tensor::from_slice(&[n as i32], [1], x.device())?;
    let next = if found == 1 {
        end
    } else {
        Tensor::concat(&[&positions.narrow(0, 1, found - 1)?, &end], 0)?
    };
    let counts = next.sub(&positions)?;
    let numbers = running.sub(1)?;
    let inverse = numbers
        .scatter(0, &order, &numbers, ScatterOp::Set)?
        .reshape(x.shape())?;
    Ok(Unique {
        values,
        inverse,
        counts,
    })
}

impl Tensor {
    /// The coordinates `[count, rank]` (i32) of all elements that are not zero (NaN is not), in
    /// row-major order. Reads their number from the device.
    #[track_caller]
    pub fn nonzero_async(&self) -> impl Future<Output = Result<Tensor>> + use<> {
        let (whole, mesh) = (gathered("nonzero", &self.detach()), self.mesh().clone());
        async move { replicated(nonzero(&whole?).await?, &mesh) }
    }

    /// [`nonzero_async`](Tensor::nonzero_async), waiting for the read.
    #[cfg(not(target_family = "wasm"))]
    #[track_caller]
    pub fn nonzero(&self) -> Result<Tensor> {
        pollster::block_on(self.nonzero_async())
    }

    /// The elements where `mask` (bool) holds, as a vector in row-major order; tensor and mask
    /// broadcast. Reads their number from the device.
    #[track_caller]
    pub fn masked_select_async(
        &self,
        mask: &Tensor,
    ) -> impl Future<Output = Result<Tensor>> + use<> {
        let (operands, mesh) = (masked_operands(self, mask), self.mesh().clone());
        async move {
            let (x, mask) = operands?;
            let shape = x.shape().broadcast("masked_select", mask.shape())?;
            let positions = nonzero_positions("masked_select", &mask.expand(&shape)?).await?;
            replicated(
                x.expand(&shape)?
                    .reshape([shape.numel()])?
                    .index_select(0, &positions)?,
                &mesh,
            )
        }
    }

    /// [`masked_select_async`](Tensor::masked_select_async), waiting for the read.
    #[cfg(not(target_family = "wasm"))]
    #[track_caller]
    pub fn masked_select(&self, mask: &Tensor) -> Result<Tensor> {
        pollster::block_on(self.masked_select_async(mask))
    }

    /// The different values of all elements in ascending order, with positions and counts. All NaN
    /// count as one value, and -0 as 0 (the first of them is kept). Reads the number of values from
    /// the device.
    #[track_caller]
    pub fn unique_async(&self) -> impl Future<Output = Result<Unique>> + use<> {
        let (whole, mesh) = (tracked("unique", self), self.mesh().clone());
        async move {
            let Unique {
                values,
                inverse,
                counts,
            } = unique(&whole?).await?;
            Ok(Unique {
                values: replicated(values, &mesh)?,
                inverse: replicated(inverse, &mesh)?,
                counts: replicated(counts, &mesh)?,
            })
        }
    }

    /// [`unique_async`](Tensor::unique_async), waiting for the read.
    #[cfg(not(target_family = "wasm"))]
    #[track_caller]
    pub fn unique(&self) -> Result<Unique> {
        pollster::block_on(self.unique_async())
    }
}

/// Checks what [`Tensor::masked_select`] is given, and gathers it.
#[track_caller]
fn masked_operands(x: &Tensor, mask: &Tensor) -> Result<(Tensor, Tensor)> {
    let op = "masked_select";
    plain(op, &[x, mask])?;
    if mask.dtype() != DType::Bool {
        return Err(Error::DType {
            op,
            dtype: mask.dtype(),
            expected: "a bool mask",
        });
    }
    x.shape().broadcast(op, mask.shape())?;
    Ok((tracked(op, x)?, gathered(op, mask)?))
}

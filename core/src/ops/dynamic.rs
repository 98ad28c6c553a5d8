//! Ops whose result size depends on the values: `nonzero`, `masked_select`, `unique`.
//!
//! The size is read from the device once, so each is `async`, with a waiting form where threads can
//! wait. Everything else stays on the device: a running count of the marked elements, in which the
//! position of the `i`-th one is found by binary search.
//!
//! On a mesh the results are on every rank. Where an operand is cut, each part counts what it
//! selects, and what was selected crosses; every rank gathers the operands whole where that takes
//! fewer bytes (the ledger sees it). So it is where gradients are wanted, and in calls that are
//! awaited on a mesh of several processes: those gather at once and not when their future is first
//! polled, because processes must communicate in the same order.
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

mod cut;
mod parts;

use super::{Map, OpInfo, Operand, POSITIONS, map1, op, reduce::check_positions};
use crate::ops::{Order, Side};
use crate::wait::wait;
use crate::{
    DType, Dims, Error, MapProgram, Mesh, Result, Shape, Sharding, Tensor,
    backend::ScatterOp,
    grad::{Back, is_recording, record1},
    ledger,
    map::Builder,
    observe,
    spmd::{Call, plain},
    transport::told,
};
use cut::{nonzero_of_parts, selected_of_parts, unique_of_parts};
use parts::Parts;
use std::panic::Location;

/// The ops of this file. Where an element ends up depends on all before it.
pub const OPS: &[OpInfo] = &[
    OpInfo::composed("nonzero", &["whole", "counted"]).without_gradient(POSITIONS),
    OpInfo::composed("masked_select", &["whole", "counted alike"]),
    OpInfo::composed("unique", &["whole", "counted"]),
];

/// The steps of this file: a tensor that every rank gets whole, and tensors of whose parts only
/// counts cross at first.
pub(super) const STEPS: &[OpInfo] = &[WHOLE, COUNTED, ALIKE];

const WHOLE: OpInfo = op("whole", "... -> ... ; replicate ...");
const COUNTED: OpInfo = op("counted", "... -> ... ; stats ... 1");
const ALIKE: OpInfo = op("counted alike", "..., ... -> ..., ... ; stats ... 1");

/// An op and the line that called it.
type Caller = (&'static str, &'static Location<'static>);

/// When ranks may communicate: at once, in the order of calls, or when counts have been read.
#[derive(Clone, Copy, PartialEq)]
enum When {
    AtOnce,
    Counted,
}

impl When {
    /// Of a call whose future the caller awaits.
    fn awaited(x: &Tensor) -> Self {
        if x.mesh().is_local() {
            When::Counted
        } else {
            When::AtOnce
        }
    }

    /// Whether a tensor is gathered at once. Without values there is nothing to count.
    fn gathers(self, x: &Tensor) -> bool {
        self == When::AtOnce || x.is_plain() || !x.mesh().has_values() || is_recording(&[x])
    }
}

/// What there is to select from.
enum Source {
    /// All of it, plain.
    Whole(Tensor),
    /// Parts of it on ranks.
    Cut(Parts),
}

impl Source {
    #[track_caller]
    fn new(op: &'static str, x: &Tensor, when: When) -> Result<Self> {
        if x.numel() == 0 || when.gathers(x) {
            return Ok(Source::Whole(tracked(op, x)?));
        }
        let caller = ledger::outermost().unwrap_or((op, Location::caller()));
        let x = Call::of(&COUNTED, &[&x.detach()])
            .on_behalf_of(op)
            .run1_or(|l| Ok(l[0].clone()), |inputs| Ok(inputs[0].clone()))?;
        if x.sharding().cuts().len() == 0 {
            return Ok(Source::Whole(x.part(0)));
        }
        Ok(Source::Cut(Parts::new(&x, caller)))
    }
}

/// A tensor as every rank needs it: whole, and plain.
#[track_caller]
fn gathered(op: &'static str, x: &Tensor) -> Result<Tensor> {
    if x.is_plain() {
        return Ok(x.clone());
    }
    x.mesh().check_here(op)?;
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

impl observe::Results for Unique {
    fn tensors(&mut self) -> smallvec::SmallVec<[&mut Tensor; 2]> {
        smallvec::smallvec![&mut self.values, &mut self.inverse, &mut self.counts]
    }
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
    check_positions(op, n)?;
    if n == 0 {
        return Ok(Marked {
            running: marks.clone(),
            positions: marks.clone(),
        });
    }
    let running = marks.cumsum(0)?;
    let count = running.narrow(0, n - 1, 1)?.item_async().await?.to_i64();
    let numbers = Tensor::arange(1, count + 1, 1, DType::I32, marks.device())?;
    let positions = running.searchsorted(&numbers, Side::Left)?;
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
    coordinates(op, x.shape(), &positions)
}

/// The coordinates `[count, rank]` of positions in a tensor of this shape.
fn coordinates(op: &'static str, whole: &Shape, positions: &Tensor) -> Result<Tensor> {
    let shape = Shape::from([positions.numel(), whole.rank()]);
    if shape.numel() == 0 {
        return Tensor::zeros(shape, DType::I32, positions.mesh());
    }
    let table = |values: Dims<isize>| {
        let values: Vec<i32> = values.iter().map(|v| *v as i32).collect();
        Tensor::from_slice(&values, [values.len()], positions.mesh())
    };
    let b = Builder::new();
    let (position, step, size) = (b.load(DType::I32), b.load(DType::I32), b.load(DType::I32));
    let program = b.finish(&[(position.floor_div(step).rem(size), DType::I32)])?;
    let (steps, sizes) = (
        table(whole.strides())?,
        table(whole.dims().iter().map(|d| *d as isize).collect())?,
    );
    map1(
        op,
        &program,
        &[&positions.unsqueeze(1)?, &steps, &sizes],
        &[],
    )
}

/// The elements of a plain tensor where a plain mask of the same shape holds.
async fn taken(op: &'static str, x: &Tensor, mask: &Tensor) -> Result<Tensor> {
    let positions = nonzero_positions(op, mask).await?;
    x.reshape([x.numel()])?.index_select(0, &positions)
}

/// Marks (i32) of what begins a new value in a vector that is sorted.
fn starts(op: &'static str, sorted: &Tensor) -> Result<Tensor> {
    if sorted.numel() == 0 {
        return sorted.no_elements(DType::I32, sorted.shape().clone());
    }
    let compared = sorted.detach();
    let operands = [
        Operand::from(&compared),
        Operand::at(&compared, smallvec::smallvec![1]),
    ];
    Ok(Map::new(op, &begins(sorted.dtype())?, sorted.shape())
        .run(&operands, sorted.device())?
        .remove(0))
}

/// How far from each of these positions (i32) to the next, and from the last one to `end`.
fn widths(positions: &Tensor, end: usize) -> Result<Tensor> {
    let found = positions.numel();
    if found == 0 {
        return Ok(positions.clone());
    }
    let end = Tensor::from_slice(&[end as i32], [1], positions.device())?;
    let next = if found == 1 {
        end
    } else {
        Tensor::concat(&[&positions.narrow(0, 1, found - 1)?, &end], 0)?
    };
    next.sub(positions)
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
    let (sorted, order) = flat.sort(0, Order::Ascending)?;
    let Marked { running, positions } = find(op, &starts(op, &sorted)?).await?;
    let values = sorted.index_select(0, &positions)?;
    let counts = widths(&positions, n)?;
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

impl Unique {
    /// On every rank of a mesh.
    fn on(self, mesh: &Mesh) -> Result<Self> {
        Ok(Self {
            values: replicated(self.values, mesh)?,
            inverse: replicated(self.inverse, mesh)?,
            counts: replicated(self.counts, mesh)?,
        })
    }
}

impl Tensor {
    /// The coordinates `[count, rank]` (i32) of all elements that are not zero (NaN is not), in
    /// row-major order. Reads their number from the device.
    #[track_caller]
    pub fn nonzero_async(&self) -> impl Future<Output = Result<Tensor>> + use<> {
        self.nonzero_when(When::awaited(self))
    }

    #[track_caller]
    fn nonzero_when(&self, when: When) -> impl Future<Output = Result<Tensor>> + use<> {
        let (seen, _unseen) = observe::awaiting("nonzero", &[self]);
        let (source, mesh) = (
            Source::new("nonzero", &self.detach(), when),
            self.mesh().clone(),
        );
        observe::awaited(seen, async move {
            let run = async || match source? {
                Source::Whole(x) => replicated(nonzero(&x).await?, &mesh),
                Source::Cut(parts) => nonzero_of_parts(&parts).await,
            };
            told(&mesh, None, run().await)
        })
    }

    /// [`nonzero_async`](Tensor::nonzero_async), waiting for the read.
    #[track_caller]
    pub fn nonzero(&self) -> Result<Tensor> {
        wait("nonzero", self.nonzero_when(When::Counted))
    }

    /// The elements where `mask` (bool) holds, as a vector in row-major order; tensor and mask
    /// broadcast. Reads their number from the device.
    #[track_caller]
    pub fn masked_select_async(
        &self,
        mask: &Tensor,
    ) -> impl Future<Output = Result<Tensor>> + use<> {
        self.masked_select_when(mask, When::awaited(self))
    }

    #[track_caller]
    fn masked_select_when(
        &self,
        mask: &Tensor,
        when: When,
    ) -> impl Future<Output = Result<Tensor>> + use<> {
        let (seen, _unseen) = observe::awaiting("masked_select", &[self, mask]);
        let (operands, mesh) = (masked_operands(self, mask, when), self.mesh().clone());
        observe::awaited(seen, async move {
            let run = async || match operands? {
                (Source::Cut(x), Source::Cut(mask)) => selected_of_parts(&x, &mask).await,
                (Source::Whole(x), Source::Whole(mask)) => {
                    let shape = x.shape().broadcast("masked_select", mask.shape())?;
                    let (x, mask) = (x.expand(&shape)?, mask.expand(&shape)?);
                    replicated(taken("masked_select", &x, &mask).await?, &mesh)
                }
                _ => Err(Error::argument(
                    "masked_select",
                    "mask",
                    "it does not lie as the tensor does",
                )),
            };
            told(&mesh, None, run().await)
        })
    }

    /// [`masked_select_async`](Tensor::masked_select_async), waiting for the read.
    #[track_caller]
    pub fn masked_select(&self, mask: &Tensor) -> Result<Tensor> {
        wait(
            "masked_select",
            self.masked_select_when(mask, When::Counted),
        )
    }

    /// The different values of all elements in ascending order, with positions and counts. All NaN
    /// count as one value, and -0 as 0 (the first of them is kept). Reads the number of values from
    /// the device.
    #[track_caller]
    pub fn unique_async(&self) -> impl Future<Output = Result<Unique>> + use<> {
        self.unique_when(When::awaited(self))
    }

    #[track_caller]
    fn unique_when(&self, when: When) -> impl Future<Output = Result<Unique>> + use<> {
        let (seen, _unseen) = observe::awaiting("unique", &[self]);
        let (source, mesh) = (Source::new("unique", self, when), self.mesh().clone());
        observe::awaited(seen, async move {
            let run = async || match source? {
                Source::Whole(x) => unique(&x).await?.on(&mesh),
                Source::Cut(parts) => unique_of_parts(&parts).await,
            };
            told(&mesh, None, run().await)
        })
    }

    /// [`unique_async`](Tensor::unique_async), waiting for the read.
    #[track_caller]
    pub fn unique(&self) -> Result<Unique> {
        wait("unique", self.unique_when(When::Counted))
    }
}

/// Checks what [`Tensor::masked_select`] is given, and brings both to lie alike.
#[track_caller]
fn masked_operands(x: &Tensor, mask: &Tensor, when: When) -> Result<(Source, Source)> {
    let op = "masked_select";
    plain(op, &[x, mask])?;
    if mask.dtype() != DType::Bool {
        return Err(Error::DType {
            op,
            dtype: mask.dtype(),
            expected: "a bool mask",
        });
    }
    let shape = x.shape().broadcast(op, mask.shape())?;
    // What is expanded may take more to bring together than it is.
    let fits = |t: &Tensor| t.shape() == &shape;
    if shape.numel() == 0 || when.gathers(x) || !fits(x) || !fits(mask) {
        let whole = (tracked(op, x)?, gathered(op, mask)?);
        return Ok((Source::Whole(whole.0), Source::Whole(whole.1)));
    }
    let caller = ledger::outermost().unwrap_or((op, Location::caller()));
    let (x, mask) = (x.detach(), mask.detach());
    let alike = Call::of(&ALIKE, &[&x, &mask]).on_behalf_of(op).run_or(
        |l| Ok(l.inputs.iter().cloned().collect()),
        |inputs| Ok(inputs.iter().cloned().collect()),
    )?;
    if alike[0].sharding().cuts().len() == 0 {
        return Ok((
            Source::Whole(alike[0].part(0)),
            Source::Whole(alike[1].part(0)),
        ));
    }
    let parts = |t: &Tensor| Source::Cut(Parts::new(t, caller));
    Ok((parts(&alike[0]), parts(&alike[1])))
}

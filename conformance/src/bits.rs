//! What is only moved keeps its bits, on a device: every float of 8 and 16 bits and the corners of
//! the wider ones, NaNs with their payloads, quiet or signalling, through every op that moves
//! elements.
//!
//! Where an element must come from is told by the op itself, on integers that are their own
//! positions.

use anymesh_core::{
    DType, Device, Mesh, Result, Scalar, Tensor,
    backend::ScatterOp,
    ops::{Order, PadMode},
};

/// An op that moves elements. `blank` is what it may put where no element goes.
struct Move {
    name: &'static str,
    run: fn(x: &Tensor, blank: Scalar) -> Result<Tensor>,
}

const fn moving(name: &'static str, run: fn(&Tensor, Scalar) -> Result<Tensor>) -> Move {
    Move { name, run }
}

/// Of a tensor of shape `[A, n, C]`. Odd sizes: elements of 8 and 16 bits straddle words.
const MOVES: &[Move] = &[
    moving("cast to its own dtype", |x, _| x.cast(x.dtype())),
    moving("contiguous of a permutation", |x, _| {
        x.permute(&[2, 0, 1])?.contiguous()
    }),
    moving("contiguous of a slice", |x, _| {
        x.slice(1, Some(1), None, 3)?.contiguous()
    }),
    moving("contiguous of a flip", |x, _| x.flip(&[])?.contiguous()),
    moving("contiguous of an expansion", |x, _| {
        x.narrow(0, 1, 1)?.expand([3, x.dims()[1], C])?.contiguous()
    }),
    moving("reshape of a transposition", |x, _| {
        x.transpose(0, 1)?.reshape([x.numel()])
    }),
    moving("unfold", |x, _| x.unfold(1, 3, 2)?.contiguous()),
    moving("concat of many", |x, _| {
        Tensor::concat(&x.split(&[1; C], 2)?.iter().rev().collect::<Vec<_>>(), 2)
    }),
    moving("concat along the rows", |x, _| {
        Tensor::concat(&[&x.narrow(1, 3, 2)?, x, &x.narrow(1, 0, 1)?], 1)
    }),
    moving("stack", |x, _| {
        Tensor::stack(&x.unbind(0)?.iter().collect::<Vec<_>>(), -1)
    }),
    moving("pad with a constant", |x, blank| {
        x.pad(&[(1, 0), (0, 2), (3, 1)], PadMode::Constant(blank))
    }),
    moving("pad by reflection", |x, _| {
        x.pad(&[(0, 0), (2, 1), (3, 3)], PadMode::Reflect)
    }),
    moving("pad in a circle", |x, _| {
        x.pad(&[(1, 2), (0, 0), (5, 1)], PadMode::Circular)
    }),
    moving("roll", |x, _| x.roll(&[2, -3], &[1, 2])),
    moving("tile", |x, _| x.tile(&[1, 1, 2])),
    moving("repeat_interleave", |x, _| x.repeat_interleave(3, -1)),
    moving("where_", |x, _| checkers(x)?.where_(x, &x.flip(&[0])?)),
    moving("masked_fill", |x, blank| {
        x.masked_fill(&checkers(x)?, blank)
    }),
    moving("index_select", |x, _| {
        x.index_select(1, &places(x, &[2, 0, 0, -1])?)
    }),
    moving("gather", |x, _| {
        x.gather(
            2,
            &places(x, &[6, 0, -3])?
                .reshape([1, 1, 3])?
                .expand([A, x.dims()[1], 3])?,
        )
    }),
    moving("index_get", |x, _| {
        x.index_get(&[&places(x, &[4, 1, 1])?, &places(x, &[0, -1, 2])?])
    }),
    moving("scatter", |x, _| {
        x.scatter(
            1,
            &places(x, &[1, 2])?.reshape([1, 2, 1])?.expand([A, 2, C])?,
            &x.narrow(1, 4, 2)?,
            ScatterOp::Set,
        )
    }),
    moving("index_put", |x, _| {
        x.index_put(&[&places(x, &[3, 0])?], &x.narrow(0, 1, 2)?, ScatterOp::Set)
    }),
    moving("get of a slice and a list", |x, _| {
        x.index_select(0, &places(x, &[2, 2])?)?
            .slice(2, None, None, -2)?
            .contiguous()
    }),
    moving("to a mesh and back", |x, _| {
        x.to_mesh(&mesh(x)?, "[_, @b@a, _]")?.full_tensor()
    }),
    moving("reshard", |x, _| {
        x.to_mesh(&mesh(x)?, "[@a, @b, _]")?
            .reshard("[@b, _, @a]")?
            .full_tensor()
    }),
    moving("to another mesh", |x, _| {
        x.to_mesh(&mesh(x)?, "[@a, _, @b]")?
            .to_mesh(&Mesh::new("c=3", x.device())?, "[_, @c, _]")?
            .full_tensor()
    }),
    moving("concat on a mesh", |x, _| {
        let x = x.to_mesh(&mesh(x)?, "[@a, @b, _]")?;
        Tensor::concat(&[&x, &x.flip(&[2])?], 2)?.full_tensor()
    }),
];

const A: usize = 5;
const C: usize = 7;

fn mesh(x: &Tensor) -> Result<Mesh> {
    Mesh::new("a=2, b=3", x.device())
}

/// Every other element.
fn checkers(x: &Tensor) -> Result<Tensor> {
    Tensor::from_fn(x.shape(), x.device(), |at| {
        at.iter().sum::<usize>() % 2 == 0
    })
}

fn places(x: &Tensor, places: &[i32]) -> Result<Tensor> {
    Tensor::from_slice(places, [places.len()], x.device())
}

/// Bit patterns of a dtype: all of them up to 16 bits; of wider ones those with few ones or few
/// zeros, among them zeros, infinities, subnormals and NaNs with the payloads 1, 2, 4, ... and
/// their complements.
fn patterns(dtype: DType) -> Vec<u64> {
    let bits = dtype.size() as u32 * 8;
    match (dtype, bits) {
        (DType::Bool, _) => vec![0, 1],
        (_, 8 | 16) => (0..1 << bits).collect(),
        _ => {
            let fraction = if bits == 32 { 23 } else { 52 };
            let all = u64::MAX >> (64 - bits);
            let exponent = all >> 1 & !0 << fraction;
            let few = (0..bits).flat_map(|a| (0..bits).map(move |b| 1u64 << a | 1 << b));
            few.flat_map(|x| [x, x | exponent, all ^ x, (all ^ x) & !exponent])
                .chain([0, exponent, all, all ^ exponent])
                .collect()
        }
    }
}

/// The elements in little-endian bytes, as tensors hold them.
fn bytes(patterns: impl Iterator<Item = u64>, size: usize) -> Vec<u8> {
    patterns
        .flat_map(|p| p.to_le_bytes().into_iter().take(size))
        .collect()
}

/// Moves bit patterns of every dtype that the device has by every op; what came out otherwise, in
/// words.
pub async fn moved(device: &Device) -> Result<Vec<String>> {
    let mut wrong = vec![];
    for dtype in DType::ALL
        .into_iter()
        .filter(|dtype| device.supports(*dtype))
    {
        let known = patterns(dtype);
        let n = known.len().div_ceil(A * C).max(6);
        let (shape, pattern) = ([A, n, C], |i: i32| {
            if i < 0 {
                0
            } else {
                known[i as usize % known.len()]
            }
        });
        let x = Tensor::from_bytes(
            &bytes((0..A * n * C).map(|i| pattern(i as i32)), dtype.size()),
            dtype,
            shape,
            device,
        )?;
        let own = Tensor::arange(0, (A * n * C) as i64, 1, DType::I32, device)?.reshape(shape)?;
        let blank = if dtype == DType::Bool {
            Scalar::Bool(false)
        } else {
            Scalar::Int(0)
        };
        let mut all = vec![];
        for m in MOVES {
            let from = (m.run)(&own, Scalar::Int(-1))?;
            all.push((m.name, from, (m.run)(&x, blank)?));
        }
        // Where a sort moves its elements depends on them, and it says so itself.
        let (sorted, order) = x.sort(1, Order::Descending)?;
        all.push(("sort", own.take_along_axis(1, &order)?, sorted));
        for (name, from, got) in all {
            let from = from.to_vec_async::<i32>().await?;
            let expected = bytes(from.iter().map(|i| pattern(*i)), dtype.size());
            let got = got.to_bytes_async().await?;
            let change = changed(&expected, &got, dtype.size());
            wrong.extend(change.map(|change| format!("{name} of {dtype}: {change}")));
        }
    }
    Ok(wrong)
}

/// How the elements that came out differ from those expected, in words.
fn changed(expected: &[u8], got: &[u8], size: usize) -> Option<String> {
    if expected.len() != got.len() {
        return Some(format!("{} bytes instead of {}", got.len(), expected.len()));
    }
    let mut pairs = expected.chunks(size).zip(got.chunks(size));
    let differ = pairs.clone().filter(|(e, g)| e != g).count();
    let (e, g) = pairs.find(|(e, g)| e != g)?;
    let hex = |bytes: &[u8]| -> String { bytes.iter().rev().map(|b| format!("{b:02x}")).collect() };
    let (count, from, to) = (expected.len() / size, hex(e), hex(g));
    Some(format!(
        "{differ} of {count} elements changed, such as {from} to {to}"
    ))
}

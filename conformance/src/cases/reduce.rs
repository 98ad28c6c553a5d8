//! Cases for reductions.

use super::{Cases, Fill, View, input, unary::whole};
use crate::functions::TURNS;
use anymesh_core::{DType, Device, Result, Tensor};

/// A reduction over the given axes.
type Run = fn(&Tensor, &[i64], bool) -> Result<Vec<Tensor>>;

/// Which inputs an op is tested with.
#[derive(Clone, Copy, PartialEq)]
enum Inputs {
    /// Values whose sum does not cancel.
    Sums,
    /// Values near 1, few enough that the order of multiplication costs few digits.
    Products,
    /// Values that occur several times, so that the first position matters.
    Ties,
    /// Mostly zeros.
    Logic,
}

struct Op {
    name: &'static str,
    run: Run,
    inputs: Inputs,
    /// Takes one axis or all.
    single: bool,
    /// What an empty axis gives is an error.
    nonempty: bool,
    /// A variant of an op that is tested in full.
    variant: bool,
}

fn ops() -> Vec<Op> {
    use Inputs::*;
    let op = |name, inputs, run| Op {
        name,
        run,
        inputs,
        single: false,
        nonempty: false,
        variant: false,
    };
    let extreme = |name, run| Op {
        name,
        run,
        inputs: Ties,
        single: false,
        nonempty: true,
        variant: false,
    };
    let position = |name, run| Op {
        name,
        run,
        inputs: Ties,
        single: true,
        nonempty: true,
        variant: false,
    };
    let variant = |op: Op| Op {
        variant: true,
        ..op
    };
    vec![
        op("sum", Sums, |x, a, k| Ok(vec![x.sum(a, k)?])),
        op("mean", Sums, |x, a, k| Ok(vec![x.mean(a, k)?])),
        op("prod", Products, |x, a, k| Ok(vec![x.prod(a, k)?])),
        extreme("amax", |x, a, k| Ok(vec![x.amax(a, k)?])),
        extreme("amin", |x, a, k| Ok(vec![x.amin(a, k)?])),
        variant(extreme("max", |x, a, k| Ok(vec![x.max(a, k)?]))),
        variant(extreme("min", |x, a, k| Ok(vec![x.min(a, k)?]))),
        op("any", Logic, |x, a, k| Ok(vec![x.any(a, k)?])),
        op("all", Logic, |x, a, k| {
            Ok(vec![x.logical_not()?.all(a, k)?])
        }),
        op("count_nonzero", Logic, |x, a, k| {
            Ok(vec![x.count_nonzero(a, k)?])
        }),
        op("norm", Sums, |x, a, k| Ok(vec![x.norm(2.0, a, k)?])),
        variant(op("norm", Logic, |x, a, k| Ok(vec![x.norm(0.0, a, k)?]))),
        variant(op("norm", Sums, |x, a, k| Ok(vec![x.norm(1.0, a, k)?]))),
        variant(op("norm", Sums, |x, a, k| Ok(vec![x.norm(3.0, a, k)?]))),
        variant(extreme("norm", |x, a, k| {
            Ok(vec![
                x.norm(f64::INFINITY, a, k)?,
                x.norm(f64::NEG_INFINITY, a, k)?,
            ])
        })),
        op("var", Sums, |x, a, k| Ok(vec![x.var(a, k, 0)?])),
        variant(op("std", Sums, |x, a, k| Ok(vec![x.std(a, k, 1)?]))),
        op("logsumexp", Sums, |x, a, k| Ok(vec![x.logsumexp(a, k)?])),
        position("argmax", |x, a, k| {
            Ok(vec![x.argmax(a.first().copied(), k)?])
        }),
        position("argmin", |x, a, k| {
            Ok(vec![x.argmin(a.first().copied(), k)?])
        }),
        variant(position("max_with_indices", |x, a, k| {
            pair(x.max_with_indices(a.first().copied().unwrap_or(-1), k)?)
        })),
        variant(position("min_with_indices", |x, a, k| {
            pair(x.min_with_indices(a.first().copied().unwrap_or(-1), k)?)
        })),
        variant(position("median", |x, a, k| {
            pair(x.median(a.first().copied(), k)?)
        })),
    ]
}

fn pair((a, b): (Tensor, Tensor)) -> Result<Vec<Tensor>> {
    Ok(vec![a, b])
}

fn fill(inputs: Inputs, dtype: DType) -> Fill {
    match inputs {
        Inputs::Sums if dtype.is_float() => Fill::Uniform(-1.0, 2.0),
        Inputs::Products if dtype.is_float() => Fill::Uniform(0.8, 1.25),
        Inputs::Ties if dtype.is_float() => Fill::Integers(-6, 6),
        Inputs::Ties if dtype.is_signed() => Fill::Integers(-6, 6),
        Inputs::Ties => Fill::Integers(0, if dtype == DType::Bool { 1 } else { 12 }),
        Inputs::Logic => Fill::Mixed(&[1.0, 0.0, 0.0], 0.0, 0.0),
        // Averages and norms of huge integers would only test rounding.
        _ => match whole(dtype) {
            Fill::Integers(low, high) => Fill::Integers(low.max(-100), high.min(100)),
            other => other,
        },
    }
}

fn add(
    cases: &mut Cases,
    op: &Op,
    (dtype, shape, view): (DType, &[usize], View),
    axes: &[i64],
    keepdim: bool,
    fill: Fill,
) {
    let (run, shape, axes) = (op.run, shape.to_vec(), axes.to_vec());
    let detail = format!("{dtype}{shape:?} {view:?} over {axes:?} keepdim {keepdim} {fill:?}");
    cases.add(op.name, dtype, detail, move |device: &Device| {
        run(
            &input(device, dtype, &shape, view, fill, 11)?,
            &axes,
            keepdim,
        )
    });
}

pub(super) fn cases() -> Cases {
    let mut cases = Cases::new("reduce");
    for op in ops() {
        add_op(&mut cases, &op);
    }
    cases
}

fn add_op(cases: &mut Cases, op: &Op) {
    let main = DType::F32;
    let of = |dtype| fill(op.inputs, dtype);
    let axes: &[&[i64]] = if op.single {
        &[&[0], &[1], &[-1], &[]]
    } else {
        &[&[0], &[1], &[-1], &[0, 1], &[0, 2], &[2, 1], &[]]
    };
    for (i, axes) in axes.iter().enumerate() {
        add(
            cases,
            op,
            (main, &[5, 6, 7], View::Contiguous),
            axes,
            i % 2 == 0,
            of(main),
        );
    }
    for (i, dtype) in DType::ALL
        .into_iter()
        .enumerate()
        .filter(|(_, d)| *d != main)
    {
        add(
            cases,
            op,
            (dtype, &[5, 33], View::ALL[i % 5]),
            &[if i % 2 == 0 { 0 } else { -1 }],
            false,
            of(dtype),
        );
    }
    for view in View::ALL {
        add(cases, op, (main, &[3, 8, 9], view), &[1], false, of(main));
    }
    if !op.variant {
        add_sizes(cases, op);
    }
    add(
        cases,
        op,
        (main, &[0, 3], View::Contiguous),
        &[1],
        false,
        of(main),
    );
    if !op.nonempty {
        add(
            cases,
            op,
            (main, &[4, 0, 3], View::Contiguous),
            &[1],
            true,
            of(main),
        );
        add(
            cases,
            op,
            (main, &[0], View::Contiguous),
            &[],
            false,
            of(main),
        );
    }
    // Rows are short, so that many of them hold no NaN and some hold two. Products and sums of 1e30
    // overflow in an order that is free.
    let turns = if op.nonempty || op.inputs == Inputs::Logic {
        TURNS
    } else {
        &[f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0]
    };
    add(
        cases,
        op,
        (main, &[61, 5], View::Contiguous),
        &[1],
        false,
        Fill::Mixed(turns, 0.5, 1.5),
    );
}

/// Everything that depends on how a kernel divides its work.
fn add_sizes(cases: &mut Cases, op: &Op) {
    let main = DType::F32;
    let of = |dtype| fill(op.inputs, dtype);
    for view in View::ALL {
        add(cases, op, (main, &[3, 8, 9], view), &[], false, of(main));
    }
    for dtype in [DType::I32, DType::F16] {
        add(
            cases,
            op,
            (dtype, &[6, 4, 5], View::Transposed),
            &[1],
            true,
            of(dtype),
        );
    }
    // A product of thousands of factors depends on their order; everything else is also run over
    // whole blocks.
    let lengths: &[usize] = if op.inputs == Inputs::Products {
        &[1, 3, 64, 65, 257]
    } else {
        &[1, 3, 255, 257, 4099]
    };
    for &n in lengths {
        add(
            cases,
            op,
            (main, &[n], View::Contiguous),
            &[0],
            false,
            of(main),
        );
    }
    if op.inputs != Inputs::Products {
        add(
            cases,
            op,
            (main, &[3, 4099], View::Contiguous),
            &[1],
            false,
            of(main),
        );
        add(
            cases,
            op,
            (main, &[1025, 3], View::Contiguous),
            &[0],
            false,
            of(main),
        );
        add(
            cases,
            op,
            (main, &[2, 300, 5], View::Contiguous),
            &[1],
            true,
            of(main),
        );
        add(
            cases,
            op,
            (DType::I32, &[3, 4099], View::Contiguous),
            &[1],
            false,
            of(DType::I32),
        );
    }
    if ["sum", "amax", "argmin", "any"].contains(&op.name) {
        add(
            cases,
            op,
            (main, &[(1 << 16) + 5], View::Contiguous),
            &[],
            false,
            of(main),
        );
        add(
            cases,
            op,
            (main, &[700, 300], View::Contiguous),
            &[1],
            false,
            of(main),
        );
    }
    add(
        cases,
        op,
        (main, &[], View::Contiguous),
        &[],
        false,
        of(main),
    );
}

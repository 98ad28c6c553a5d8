//! Matrix products and Einstein sums. Values are small integers, so every order of summation gives
//! the same.

use super::{
    Attr, AttrKind, Call, Entry, Fill, Input, Sample, attr, entry, one, required,
    sample::{floats, integers, small},
};
use anymesh_core::ops::Baddbmm;
use anymesh_core::{DType, Result, Tensor};
use serde_json::{Value, json};

const BADDBMM: &[Attr] = &[
    attr(
        "beta",
        AttrKind::Float,
        "1",
        "the factor on the first operand",
    ),
    attr("alpha", AttrKind::Float, "1", "the factor on the product"),
];

pub(super) const ENTRIES: &[Entry] = &[
    entry(
        "matmul",
        "x, y",
        &[],
        |c| one(c.x(0)?.matmul(c.x(1)?)),
        matmuls,
    ),
    entry(
        "matmul_as",
        "x, y",
        RESULT,
        |c| one(c.x(0)?.matmul_as(c.x(1)?, c.attrs.dtype("dtype")?)),
        matmuls,
    ),
    entry(
        "matmul_scaled",
        "x, y, x_scale, y_scale",
        RESULT,
        |c| {
            let dtype = c.attrs.dtype("dtype")?;
            one(c.x(0)?.matmul_scaled(c.x(1)?, c.x(2)?, c.x(3)?, dtype))
        },
        scaled,
    ),
    entry(
        "outer_scaled",
        "x, y, x_scale, y_scale",
        RESULT,
        |c| {
            let dtype = c.attrs.dtype("dtype")?;
            one(c.x(0)?.outer_scaled(c.x(1)?, c.x(2)?, c.x(3)?, dtype))
        },
        scaled,
    ),
    entry(
        "quantize_f8",
        "x",
        &[required(
            "dtype",
            AttrKind::DType,
            "the dtype of the codes: f8e4m3 or f8e5m2",
        )],
        |c| {
            let (codes, scale) = c.x(0)?.quantize_f8(c.attrs.dtype("dtype")?)?;
            Ok(vec![codes, scale])
        },
        quantized,
    ),
    entry(
        "bmm",
        "x, y",
        &[],
        |c| one(c.x(0)?.bmm(c.x(1)?)),
        |_| {
            products(&[
                (&[5, 2, 3], &[5, 3, 4]),
                (&[4, 3, 2], &[4, 2, 5]),
                (&[2, 4, 8], &[2, 8, 1]),
            ])
        },
    ),
    entry(
        "dot",
        "x, y",
        &[],
        |c| one(c.x(0)?.dot(c.x(1)?)),
        |_| products(&[(&[7], &[7]), (&[8], &[8]), (&[2], &[2])]),
    ),
    entry(
        "outer",
        "x, y",
        &[],
        |c| one(c.x(0)?.outer(c.x(1)?)),
        |_| products(&[(&[5], &[7]), (&[8], &[4]), (&[2], &[3])]),
    ),
    entry(
        "linear",
        "x, weight, bias?",
        &[],
        |c| one(c.x(0)?.linear(c.x(1)?, c.maybe(2))),
        linears,
    ),
    entry(
        "linear_each",
        "x, weights...",
        &[attr(
            "biases",
            AttrKind::Bool,
            "false",
            "whether the second half of what follows x are biases, one for each weight",
        )],
        |c| {
            let all = c.all(1..c.inputs.len())?;
            let (weights, biases) = match c.attrs.bool("biases")? {
                true => all.split_at(all.len() / 2),
                false => all.split_at(all.len()),
            };
            let bias = |i: usize| biases.get(i).copied();
            let weights = weights.iter().enumerate().map(|(i, w)| (*w, bias(i)));
            c.x(0)?.linear_each(&weights.collect::<Vec<_>>())
        },
        |_| {
            let each = |x: &[usize], rows: &[usize]| {
                let weights = rows.iter().map(|n| small(&[*n, x[x.len() - 1]]));
                std::iter::once(small(x)).chain(weights).collect::<Vec<_>>()
            };
            let biased = |x: &[usize], rows: &[usize]| {
                let biases = rows.iter().map(|n| small(&[*n]));
                let inputs = each(x, rows).into_iter().chain(biases);
                Sample::new(inputs.collect::<Vec<_>>(), json!({ "biases": true }))
            };
            vec![
                Sample::new(each(&[5, 7], &[3, 8]), json!({})),
                Sample::new(each(&[2, 3, 4], &[8]), json!({})),
                Sample::new(each(&[2, 3, 4], &[12, 6, 6]), json!({})),
                biased(&[2, 4, 4], &[4, 4]),
                biased(&[6, 8], &[8, 2, 2]),
            ]
        },
    ),
    entry(
        "grouped_matmul",
        "x, matrices, ends",
        &[],
        |c| one(c.x(0)?.grouped_matmul(c.x(1)?, c.x(2)?)),
        |_| {
            let call = |[n, k, m]: [usize; 3], groups| {
                let ends = Input::new(DType::I32, &[groups], Fill::Index(n + 1));
                Sample::new([small(&[n, k]), small(&[groups, k, m]), ends], json!({}))
            };
            vec![
                call([9, 3, 5], 3),
                call([8, 4, 4], 4),
                call([16, 2, 4], 8),
                call([3, 1, 2], 2),
            ]
        },
    ),
    entry(
        "grouped_outer",
        "x, y, ends",
        &[],
        |c| one(c.x(0)?.grouped_outer(c.x(1)?, c.x(2)?)),
        |_| {
            let call = |[n, k, m]: [usize; 3], groups| {
                let ends = Input::new(DType::I32, &[groups], Fill::Index(n + 1));
                Sample::new([small(&[n, k]), small(&[n, m]), ends], json!({}))
            };
            vec![call([9, 5, 7], 3), call([8, 4, 8], 4), call([3, 1, 2], 2)]
        },
    ),
    entry("baddbmm", "x, a, b", BADDBMM, baddbmm, baddbmms),
    entry(
        "einsum",
        "tensors...",
        &[required(
            "equation",
            AttrKind::Str,
            "a letter for each dimension, such as ij,jk->ik",
        )],
        einsum,
        einsums,
    ),
];

fn baddbmm(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(c.x(0)?.baddbmm(
        c.x(1)?,
        c.x(2)?,
        &Baddbmm {
            beta: c.attrs.float("beta")?,
            alpha: c.attrs.float("alpha")?,
        },
    ))
}

fn einsum(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(Tensor::einsum(
        &c.attrs.str("equation")?,
        &c.all(0..c.inputs.len())?,
    ))
}

fn products(shapes: &[(&[usize], &[usize])]) -> Vec<Sample> {
    shapes
        .iter()
        .map(|(x, y)| Sample::new([small(x), small(y)], json!({})))
        .collect()
}

/// The dtype that a product is stored as.
const RESULT: &[Attr] = &[required(
    "dtype",
    AttrKind::DType,
    "the dtype of the result",
)];

/// Matrices, vectors on either side and on both, batches that broadcast, and integers.
fn matmuls(op: &'static str) -> Vec<Sample> {
    let mut all = products(&[
        (&[5, 7], &[7, 3]),
        (&[8, 4], &[4, 8]),
        (&[2, 3, 4], &[4, 5]),
        (&[4, 1, 3, 2], &[3, 2, 4]),
        (&[5], &[5, 4]),
        (&[4, 3], &[3]),
        (&[8], &[8]),
    ]);
    if op == "matmul" {
        all.push(Sample::new(
            [integers(&[3, 4]), integers(&[4, 2])],
            json!({}),
        ));
    } else {
        for (sample, dtype) in all
            .iter_mut()
            .zip(["f32", "bf16", "f16"].into_iter().cycle())
        {
            sample.attrs = json!({"dtype": dtype});
        }
    }
    all
}

/// 8-bit floats of one kind and of two; the products are whole numbers times a power of two.
fn scaled(op: &'static str) -> Vec<Sample> {
    let call = |[x, y]: [&[usize]; 2], [a, b]: [DType; 2], dtype: &str| {
        let codes = |dtype, shape| Input::new(dtype, shape, Fill::Int { lo: -3, hi: 3 });
        let scale = |list| Input::new(DType::F32, &[], Fill::Pick(list));
        Sample::new(
            [codes(a, x), codes(b, y), scale(&[2, 4]), scale(&[2, 8])],
            json!({"dtype": dtype}),
        )
    };
    let (e4m3, e5m2) = (DType::F8E4M3, DType::F8E5M2);
    if op == "outer_scaled" {
        return vec![
            call([&[8, 4], &[8, 8]], [e5m2, e4m3], "bf16"),
            call([&[5, 7], &[5, 3]], [e4m3, e4m3], "f32"),
            call([&[2, 4, 3], &[2, 4, 5]], [e5m2, e5m2], "f16"),
        ];
    }
    vec![
        call([&[4, 8], &[8, 8]], [e4m3, e4m3], "bf16"),
        call([&[5, 7], &[7, 3]], [e5m2, e4m3], "f32"),
        call([&[2, 3, 4], &[4, 5]], [e4m3, e5m2], "f16"),
        call([&[4, 1, 3, 2], &[3, 2, 4]], [e5m2, e5m2], "f32"),
    ]
}

/// Whole numbers, zeros alone, and nothing at all.
fn quantized(_: &'static str) -> Vec<Sample> {
    let call = |shape: &[usize], most: i64, dtype: &str| {
        let fill = Fill::Int {
            lo: -most,
            hi: most,
        };
        Sample::new([floats(shape, fill)], json!({"dtype": dtype}))
    };
    vec![
        call(&[5, 7], 7, "f8e4m3"),
        call(&[8], 3, "f8e5m2"),
        call(&[2, 3], 0, "f8e4m3"),
        call(&[3, 0], 7, "f8e5m2"),
    ]
}

fn linears(_: &'static str) -> Vec<Sample> {
    vec![
        Sample::new([small(&[5, 7]), small(&[3, 7]), small(&[3])], json!({})),
        Sample::new([small(&[2, 3, 4]), small(&[8, 4])], json!({})),
        Sample::new([small(&[8]), small(&[4, 8]), small(&[4])], json!({})),
    ]
}

fn baddbmms(_: &'static str) -> Vec<Sample> {
    let call = |x: &[usize], a: &[usize], b: &[usize], attrs| {
        Sample::new([small(x), small(a), small(b)], attrs)
    };
    vec![
        call(&[5, 2, 4], &[5, 2, 3], &[5, 3, 4], json!({})),
        call(
            &[4, 1, 5],
            &[4, 3, 2],
            &[4, 2, 5],
            json!({"beta": 0.5, "alpha": -2}),
        ),
        call(&[3], &[2, 4, 8], &[2, 8, 3], json!({"beta": 0, "alpha": 1})),
    ]
}

fn einsums(_: &'static str) -> Vec<Sample> {
    let call = |equation: &str, shapes: &[&[usize]]| {
        let inputs: Vec<Input> = shapes.iter().map(|shape| small(shape)).collect();
        Sample::new(inputs, Value::from_iter([("equation", equation)]))
    };
    vec![
        call("ij,jk->ik", &[&[5, 7], &[7, 3]]),
        call("bij,bkj->bki", &[&[4, 2, 3], &[4, 5, 3]]),
        call("ij->j", &[&[8, 3]]),
        call("ii->i", &[&[4, 4]]),
        call("...i,i->...", &[&[2, 3, 4], &[4]]),
        call("ab,bc,cd->da", &[&[4, 2], &[2, 3], &[3, 5]]),
        call("i,j", &[&[8], &[3]]),
        // Diagonals that are summed and that are not, letters that one operand has alone, hidden
        // dimensions that broadcast or are summed.
        call("ii->", &[&[4, 4]]),
        call("iij,jk->ik", &[&[3, 3, 2], &[2, 4]]),
        call("iji,ik->j", &[&[3, 2, 3], &[3, 4]]),
        call("ij,kl->", &[&[4, 2], &[3, 2]]),
        call("...ij,...jk->...ki", &[&[2, 1, 3, 2], &[4, 2, 2]]),
        call("i...,...->i", &[&[3, 1, 2], &[4, 2]]),
    ]
}

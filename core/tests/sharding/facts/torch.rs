//! PyTorch's ops on a mesh of 2.

use super::case::{Case, Operand, POSITIVE, Program, SMALL, Theirs, nth, of, of2, op, placement};
use anymesh_conformance::registry::Fill;
use anymesh_core::{DType, Placement, Result, Sharding, Tensor, meta};
use serde_json::{Value, json};

/// Ranks of every recorded mesh.
const RANKS: u64 = 2;

/// What we run for an op of the table, by its name there.
fn program(name: &str, shape: &[usize]) -> Option<Program> {
    let over = |dims: &[usize]| json!(dims);
    Some(match name {
        "relu" => op("relu", json!({})),
        "exp" => op("exp", json!({})),
        "neg" => op("neg", json!({})),
        "sigmoid" => op("sigmoid", json!({})),
        "gelu" => op("gelu", json!({})),
        "sqrt" => op("sqrt", json!({})),
        "abs" => op("abs", json!({})),
        "sum" => op("sum", json!({})),
        "sum_d0" => op("sum", json!({"axes": [0]})),
        "sum_d1_keep" => op("sum", json!({"axes": [1], "keepdim": true})),
        "mean" => op("mean", json!({})),
        "mean_d0" => op("mean", json!({"axes": [0]})),
        "mean_d1" => op("mean", json!({"axes": [1]})),
        "amax_d0" => op("amax", json!({"axes": [0]})),
        "amax_d1" => op("amax", json!({"axes": [1]})),
        "amin" => op("amin", json!({})),
        "prod_d0" => op("prod", json!({"axes": [0]})),
        "max_d1_vals" => nth("max_with_indices", json!({"axis": 1}), 0),
        "argmax_d0" => op("argmax", json!({"axis": 0})),
        "argmax_d1" => op("argmax", json!({"axis": 1})),
        "var_d0" => op("var", json!({"axes": [0]})),
        "var_d1" => op("var", json!({"axes": [1]})),
        "std" => op("std", json!({})),
        "norm2" => op("norm", json!({})),
        "norm2_d0" => op("norm", json!({"axes": [0]})),
        "logsumexp_d1" => op("logsumexp", json!({"axes": [1]})),
        "softmax_d0" => op("softmax", json!({"axis": 0})),
        "softmax_d1" => op("softmax", json!({"axis": 1})),
        "log_softmax_d1" => op("log_softmax", json!({"axis": 1})),
        "cumsum_d0" => op("cumsum", json!({"axis": 0})),
        "cumsum_d1" => op("cumsum", json!({"axis": 1})),
        "t" => op("permute", json!({"axes": [1, 0]})),
        "unsqueeze0" => op("unsqueeze", json!({"axis": 0})),
        "unsqueeze2" => op("unsqueeze", json!({"axis": 2})),
        "reshape_flat" => op("reshape", json!({"dims": [-1]})),
        "flip_d0" => op("flip", json!({"axes": [0]})),
        "roll_d0" => op("roll", json!({"shifts": [1], "axes": [0]})),
        "tril" => op("tril", json!({})),
        "slice_d0" => op("slice", json!({"axis": 0, "start": 1, "stop": 5})),
        "slice_d1" => op("slice", json!({"axis": 1, "start": 0, "stop": 3})),
        "select_d0" => of(|x| x.narrow(0, 1, 1)?.squeeze(&[0])),
        "split_d0_first" => nth("split", json!({"axis": 0, "sizes": [3, shape[0] - 3]}), 0),
        "split_d1_last" => op(
            "slice",
            json!({"axis": 1, "start": (shape[1] - 1) / 2 * 2, "stop": shape[1]}),
        ),
        "chunk2_d1" => nth(
            "split",
            json!({"axis": 1, "sizes": [shape[1].div_ceil(2), shape[1] / 2]}),
            1,
        ),
        "unbind_d0_1" => nth("unbind", json!({"axis": 0}), 1),
        "expand" => op("expand", json!({"shape": over(&[&[3], shape].concat())})),
        "repeat" => op("tile", json!({"reps": [2, 1]})),
        "topk_d1_vals" => nth("topk", json!({"k": 2, "axis": 1}), 0),
        "topk_d0_vals" => nth("topk", json!({"k": 2, "axis": 0}), 0),
        "sort_d1_vals" => nth("sort", json!({"axis": 1}), 0),
        "sort_d0_vals" => nth("sort", json!({"axis": 0}), 0),
        "mul_scalar" => of(|x| x.mul(2.5)),
        "add_scalar" => of(|x| x.add(1.5)),
        "div_scalar" => of(|x| x.div(2.0)),
        "pow2" => of(|x| x.pow(2.0)),
        "clamp" => op("clip", json!({"low": -1, "high": 2})),
        "layer_norm" => op("layer_norm", json!({})),
        "rms_norm" => op("rms_norm", json!({})),
        "pad_d1" => op("pad", json!({"pairs": [[0, 0], [1, 2]]})),
        "full_like" => of(|x| x.full_like(3.0)),
        "zeros_like" => of(Tensor::zeros_like),
        // A copy and a dropout that drops nothing are the tensor itself here.
        "clone" | "dropout_eval" => of(|x| Ok(x.clone())),
        "contiguous" => op("contiguous", json!({})),
        "bf16_cast" => of(|x| x.cast(DType::BF16)),
        "index_select_d0" => {
            of(|x| x.index_select(0, &Tensor::from_fn([3], x.mesh(), |at| at[0] as i64 * 2)?))
        }
        "any" => of(|x| x.gt(0.0)?.any(&[], false)),
        "all_d0" => of(|x| x.gt(0.0)?.all(&[0], false)),
        "cat_self_d0" => of(|x| Tensor::concat(&[x, x], 0)),
        "cat_self_d1" => of(|x| Tensor::concat(&[x, x], 1)),
        "stack_self" => of(|x| Tensor::stack(&[x, x], 0)),
        "add" => op("add", json!({})),
        "sub" => op("sub", json!({})),
        "mul" => op("mul", json!({})),
        "div" => op("div", json!({})),
        "maximum" => op("maximum", json!({})),
        "where" => of2(|x, y| x.gt(0.0)?.where_(x, y)),
        "mm" | "matmul_vec" => op("matmul", json!({})),
        "linear" => op("linear", json!({})),
        "bmm" => op("bmm", json!({})),
        "einsum_bij" => op("einsum", json!({"equation": "bij,bjk->bik"})),
        "cat_d0" => op("concat", json!({"axis": 0})),
        "cat_d1" => op("concat", json!({"axis": 1})),
        "outer" => op("outer", json!({})),
        "lerp" => op("lerp", json!({"weight": 0.25})),
        _ => return None,
    })
}

fn fill(name: &str, at: usize) -> Fill {
    match (name, at) {
        ("sqrt", _) | ("div", 1) => POSITIVE,
        _ => SMALL,
    }
}

/// The dimension of the result that dimension `dim` of operand `at` becomes, where there is one.
fn becomes(name: &str, at: usize, dim: usize, rank: usize, output: usize) -> Option<usize> {
    match (name, at) {
        ("linear", 1) => (dim == 0).then_some(output - 1),
        ("linear" | "mm" | "bmm" | "einsum_bij", 0) => (dim + 1 != rank).then_some(dim),
        ("mm" | "bmm" | "einsum_bij", 1) => (dim + 2 != rank).then_some(dim),
        ("add" | "sub" | "mul" | "div" | "maximum" | "where" | "lerp" | "cat_d0" | "cat_d1", _) => {
            Some(dim + output - rank)
        }
        _ => None,
    }
}

/// The fewest bytes that the counted collectives can be, given the placement of the result: each is
/// of the cheapest input that such a collective can apply to, and of the result where there is none
/// (the collective is then inside the op). An input that is cut as the result is was not moved.
/// PyTorch pads shards to the largest.
fn bytes(name: &str, comm: &Value, inputs: &[Operand], output: &[usize], left: &Sharding) -> u64 {
    let elements = |shape: &[usize]| shape.iter().product::<usize>() as u64;
    let cut = |shape: &[usize], dim: usize| {
        elements(shape) / (shape[dim].max(1) as u64) * (shape[dim] as u64).div_ceil(RANKS)
    };
    // The smallest part of all cuts that fit the result.
    let smallest_cut = |shape: &[usize], at: usize, but: Option<usize>| {
        let cuts = |fits: &dyn Fn(usize) -> bool| {
            (0..shape.len())
                .filter(|d| Some(*d) != but && fits(*d))
                .map(|d| cut(shape, d))
                .min()
        };
        let seen = |d: usize| match left.placement(0) {
            Placement::Shard(o) => becomes(name, at, d, shape.len(), output.len()) == Some(o),
            _ => false,
        };
        cuts(&seen).or_else(|| cuts(&|_| true)).unwrap_or(1)
    };
    let moved = |at: usize, o: &Operand| match (o.sharding.placement(0), left.placement(0)) {
        (Placement::Shard(d), Placement::Shard(out)) => {
            becomes(name, at, d, o.input.shape.len(), output.len()) != Some(out)
        }
        _ => true,
    };
    let mut total = 0;
    for (kind, count) in comm.as_object().expect("counts") {
        let of = |at: usize, shape: &[usize], placement: Option<Placement>| match (
            kind.as_str(),
            placement,
        ) {
            ("all_gather", Some(Placement::Shard(d))) => Some((RANKS - 1) * cut(shape, d)),
            ("all_gather", None) => Some((RANKS - 1) * smallest_cut(shape, at, None)),
            ("all_to_all", Some(Placement::Shard(d))) => {
                let mut local = shape.to_vec();
                local[d] = local[d].div_ceil(RANKS as usize);
                Some((RANKS - 1) * smallest_cut(&local, at, Some(d)))
            }
            ("all_reduce", Some(Placement::Partial(_)) | None) => {
                Some(2 * (RANKS - 1) * elements(shape) / RANKS)
            }
            ("reduce_scatter", Some(Placement::Partial(_)) | None) => {
                Some((RANKS - 1) * smallest_cut(shape, at, None))
            }
            _ => None,
        };
        let inputs = inputs.iter().enumerate().filter(|(at, o)| moved(*at, o));
        let cheapest = inputs
            .filter_map(|(at, o)| of(at, &o.input.shape, Some(o.sharding.placement(0))))
            .min();
        let elements = cheapest
            .or_else(|| of(usize::MAX, output, None))
            .expect("a collective of some tensor");
        total += elements * 4 * count.as_u64().expect("a count");
    }
    total
}

/// All recorded calls; the name of one that we have no op for.
pub(crate) fn cases() -> Result<Vec<Result<Case, String>>> {
    let (mut all, device) = (vec![], meta());
    for line in include_str!("../../facts/torch_ops.jsonl").lines() {
        let group: Value = serde_json::from_str(line).expect("a line of JSON");
        let name = group["op"].as_str().expect("an op");
        let shapes: Vec<Vec<usize>> =
            serde_json::from_value(group["shapes"].clone()).expect("shapes");
        for row in group["rows"].as_array().expect("rows") {
            let Some(program) = program(name, &shapes[0]) else {
                all.push(Err(name.to_string()));
                continue;
            };
            let placements = row[0]
                .as_array()
                .expect("placements")
                .iter()
                .map(|p| placement(p.as_str().expect("a placement")));
            let inputs: Vec<Operand> = placements
                .zip(&shapes)
                .enumerate()
                .map(|(i, (s, shape))| Operand::new(shape, s, fill(name, i)))
                .collect();
            let plain = inputs
                .iter()
                .map(|o| Tensor::zeros(o.input.shape.as_slice(), DType::F32, &device))
                .collect::<Result<Vec<_>>>()?;
            let output = program(&plain)?.swap_remove(0);
            let left = row[1].as_str().expect("a placement");
            let theirs = (left != "refused").then(|| {
                let left = placement(left);
                Theirs {
                    bytes: bytes(name, &row[2], &inputs, output.dims(), &left),
                    outputs: vec![left],
                }
            });
            all.push(Ok(Case {
                name: format!("{name} {}", row[0]),
                mesh: vec![RANKS as usize],
                inputs,
                program,
                reduced: None,
                theirs,
            }));
        }
    }
    Ok(all)
}

//! What we run for Paddle's ops.

use super::{
    case::{POSITIVE, Program, of, of2, op},
    paddle::index,
};
use anymesh_conformance::registry::Fill;
use anymesh_core::{
    Result, Tensor,
    backend::ScatterOp,
    ops::{AttentionOptions, CrossEntropyOptions, LossReduction, RopeOptions, RopeStyle},
};
use serde_json::{Value, json};

/// The attributes of a recorded call.
#[derive(Clone)]
pub(crate) struct Attrs(pub(crate) Value);

impl Attrs {
    fn int(&self, name: &str) -> i64 {
        self.0[name].as_i64().expect("an integer")
    }

    fn ints(&self, name: &str) -> Vec<i64> {
        self.0[name]
            .as_array()
            .expect("integers")
            .iter()
            .map(|v| v.as_i64().expect("an integer"))
            .collect()
    }

    fn is(&self, name: &str) -> bool {
        self.0[name].as_bool().unwrap_or(false)
    }
}

/// Why a recorded call is none that could run. Makes the one repair that the record itself names:
/// an index as long as its updates.
pub(crate) fn malformed(
    name: &str,
    attrs: &Attrs,
    shapes: &mut [Vec<usize>],
) -> Option<&'static str> {
    match name {
        "scatter" | "scatter_nd_add" => {
            let n = shapes[2][0];
            shapes[1] = vec![n];
            None
        }
        "cross_entropy_with_softmax" if attrs.int("axis") == 1 => {
            Some("labels do not fit the axis")
        }
        "fused_gemm_epilogue" => {
            let inner = |s: &[usize], transposed: bool, last: bool| {
                if s.len() == 1 {
                    s[0]
                } else {
                    s[s.len() - if transposed == last { 2 } else { 1 }]
                }
            };
            let fits = inner(&shapes[0], attrs.is("trans_x"), true)
                == inner(&shapes[1], attrs.is("trans_y"), false);
            (!fits || shapes[1].len() < 2).then_some("the matrices do not fit")
        }
        "unbind" if attrs.int("axis") >= shapes[0].len() as i64 => Some("there is no such axis"),
        "expand" if attrs.ints("shape").contains(&0) => Some("a size of 0 that is not one"),
        "einsum" if attrs.0["equation"] == "ij->ii" => Some("a letter twice in the result"),
        "lookup_table_v2" if !attrs.0["weight"].is_null() => {
            Some("attributes in place of the table")
        }
        "fused_rotary_position_embedding" if shapes.len() > 1 => Some("positions that are given"),
        "unique" => Some("unique rows"),
        _ => None,
    }
}

/// Sizes that attributes depend on.
pub(crate) fn fixed(name: &str, shapes: &[Vec<usize>]) -> Vec<usize> {
    match name {
        // All but the dimensions that are copied.
        "reshape" if shapes[0].len() == 3 && shapes[0][2] == 3072 => vec![3072],
        "reshape" | "split" => shapes.concat(),
        // Room for indices that are all different.
        "scatter" => vec![shapes[0][0]],
        _ => vec![],
    }
}

/// Results that are larger than the inputs.
pub(crate) fn results(name: &str, attrs: &Attrs, shapes: &[Vec<usize>]) -> Vec<Vec<usize>> {
    match name {
        "one_hot" => vec![[&shapes[0][..], &[attrs.int("num_classes") as usize]].concat()],
        "add" if shapes[0].len() == 4 => vec![[&shapes[0][..1], &shapes[1]].concat()],
        "flash_attention" => vec![shapes[0].iter().chain(&shapes[1][1..2]).copied().collect()],
        "expand" => vec![expanded(attrs, &shapes[0], &|n| n)],
        _ => vec![],
    }
}

fn expanded(attrs: &Attrs, shape: &[usize], size: &dyn Fn(usize) -> usize) -> Vec<usize> {
    let to = attrs.ints("shape");
    let more = to.len() - shape.len();
    to.iter()
        .enumerate()
        .map(|(i, n)| {
            if *n < 0 {
                size(shape[i - more])
            } else {
                size(*n as usize)
            }
        })
        .collect()
}

/// The values of operand `at`.
pub(crate) fn fill(name: &str, attrs: &Attrs, shapes: &[Vec<usize>], at: usize) -> Option<Fill> {
    let axis = || attrs.int("axis").rem_euclid(shapes[0].len() as i64) as usize;
    match (name, at) {
        ("cross_entropy_with_softmax" | "c_softmax_with_cross_entropy", 1) => {
            index(*shapes[0].last()?)
        }
        ("lookup_table_v2", 0) => index(shapes[1][0]),
        ("gather" | "index_select" | "take_along_axis" | "put_along_axis", 1) => {
            index(shapes[0][axis()])
        }
        // Where the last of equal indices would win, there are none.
        ("scatter", 1) => Some(Fill::Distinct),
        ("scatter_nd_add", 1) => index(shapes[0][0]),
        ("one_hot", 0) => index(5),
        ("batch_norm", 2) => Some(POSITIVE),
        _ => None,
    }
}

/// The matrices as Paddle multiplies them.
fn product(x: &Tensor, y: &Tensor, trans_x: bool, trans_y: bool) -> Result<Tensor> {
    let turned = |t: &Tensor, turn: bool| {
        if turn {
            t.transpose(-1, -2)
        } else {
            Ok(t.clone())
        }
    };
    turned(x, trans_x)?.matmul(&turned(y, trans_y)?)
}

/// The losses of positions whose classes are the last dimension.
fn losses(x: &Tensor, label: &Tensor) -> Result<Tensor> {
    let options = CrossEntropyOptions {
        reduction: LossReduction::None,
        ..Default::default()
    };
    x.movedim(&[-1], &[1])?
        .cross_entropy(&label.squeeze(&[-1])?, &options)
}

/// Channels last, as the ops here want them first.
fn channels_first(x: &Tensor, last: bool) -> Result<Tensor> {
    if last {
        x.movedim(&[-1], &[1])
    } else {
        Ok(x.clone())
    }
}

fn convolution(name: &'static str, attrs: &Attrs) -> Program {
    let last = attrs.0["data_format"]
        .as_str()
        .is_some_and(|f| f.ends_with('C'));
    let groups = attrs.0["groups"].as_u64().unwrap_or(1);
    let conv = op(name, json!({"groups": groups}));
    Box::new(move |x| conv(&[channels_first(&x[0], last)?, x[1].clone()]))
}

/// What we run for an op with these inputs; `size` is what becomes of a size.
pub(crate) fn program(
    name: &str,
    attrs: &Attrs,
    shapes: &[Vec<usize>],
    size: &dyn Fn(usize) -> usize,
) -> Option<Program> {
    let a = &attrs.0;
    let reduced = |name, keep: &str| op(name, json!({"axes": a["axis"], "keepdim": a[keep]}));
    let along = |name| op(name, json!({"axis": a["axis"]}));
    Some(match name {
        "add_n" => Box::new(|x| {
            Ok(vec![
                x[1..].iter().try_fold(x[0].clone(), |sum, t| sum.add(t))?,
            ])
        }),
        "argmax" => op(
            "argmax",
            if attrs.is("flatten") {
                json!({})
            } else {
                json!({"axis": a["axis"]})
            },
        ),
        "argmin" => op(
            "argmin",
            if attrs.is("flatten") {
                json!({})
            } else {
                json!({"axis": a["axis"]})
            },
        ),
        "argsort" => op(
            "sort",
            json!({"axis": a["axis"], "descending": a["descending"]}),
        ),
        "c_softmax_with_cross_entropy" => of2(losses),
        "cross_entropy_with_softmax" if attrs.is("use_softmax") && !attrs.is("soft_label") => {
            of2(losses)
        }
        "conv2d" => convolution("conv2d", attrs),
        "depthwise_conv2d" => convolution("conv2d", attrs),
        "conv3d" => convolution("conv3d", attrs),
        "conv2d_transpose" => op("conv_transpose2d", json!({})),
        "cummin" => along("cummin"),
        "cumsum" => along("cumsum"),
        "einsum" => op("einsum", json!({"equation": a["equation"]})),
        "add" => op("add", json!({})),
        "greater_than" => op("gt", json!({})),
        "less_than" => op("lt", json!({})),
        "lookup_table_v2" => of2(|ids, table| table.embedding(ids)),
        "expand_as" => of2(|x, y| x.expand(y.dims())),
        "expand" => op(
            "expand",
            json!({"shape": expanded(attrs, &shapes[0], size)}),
        ),
        // Which numbers are dropped is no matter of placement: without dropping.
        "flash_attention" | "flashmask_attention" => {
            let options = AttentionOptions {
                causal: attrs.is("causal"),
                ..Default::default()
            };
            Box::new(move |x| {
                let heads = x[..3]
                    .iter()
                    .map(|t| t.transpose(1, 2))
                    .collect::<Result<Vec<_>>>()?;
                Ok(vec![
                    heads[0]
                        .attention(&heads[1], &heads[2], &options)?
                        .out
                        .transpose(1, 2)?,
                ])
            })
        }
        "flatten" => op(
            "flatten",
            json!({"start": a["start_axis"], "end": a["stop_axis"]}),
        ),
        "fused_gemm_epilogue" => {
            let (tx, ty) = (attrs.is("trans_x"), attrs.is("trans_y"));
            Box::new(move |x| Ok(vec![product(&x[0], &x[1], tx, ty)?.add(&x[2])?]))
        }
        "gather" | "index_select" => along("index_select"),
        "gelu" => op("gelu", json!({})),
        "label_smooth" => {
            let epsilon = a["epsilon"].as_f64()?;
            Box::new(move |x| {
                let kept = x[0].mul(1.0 - epsilon)?;
                Ok(vec![match x.get(1) {
                    Some(prior) => kept.add(&prior.mul(epsilon)?)?,
                    None => kept.add(epsilon / x[0].dims()[x[0].rank() - 1] as f64)?,
                }])
            })
        }
        "label_smooth_grad" => {
            let epsilon = a["epsilon"].as_f64()?;
            of(move |g| g.mul(1.0 - epsilon))
        }
        "layer_norm" => op(
            "layer_norm",
            json!({"eps": a["epsilon"], "dims": shapes[0].len() as i64 - attrs.int("begin_norm_axis")}),
        ),
        "logsumexp" => reduced("logsumexp", "keepdims"),
        "matmul" => {
            let (tx, ty) = (attrs.is("trans_x"), attrs.is("trans_y"));
            of2(move |x, y| product(x, y, tx, ty))
        }
        "one_hot" => op(
            "one_hot",
            json!({"classes": size(attrs.int("num_classes") as usize)}),
        ),
        "p_norm" if attrs.is("asvector") => {
            op("norm", json!({"p": a["porder"], "keepdim": a["keepdims"]}))
        }
        "p_norm" => op(
            "norm",
            json!({"p": a["porder"], "axes": [a["axis"]], "keepdim": a["keepdims"]}),
        ),
        "put_along_axis" => {
            let axis = attrs.int("axis");
            Box::new(move |x| {
                Ok(vec![x[0].put_along_axis(
                    axis,
                    &x[1],
                    &x[2],
                    ScatterOp::Set,
                )?])
            })
        }
        "max" => reduced("amax", "keep_dim"),
        "min" => reduced("amin", "keep_dim"),
        "any" => {
            let axes = attrs.ints("axis");
            of(move |x| x.gt(0.0)?.any(&axes, false))
        }
        "squared_l2_norm" => {
            let axes = attrs.ints("axis");
            of(move |x| x.square()?.sum(&axes, false))
        }
        "reshape" => {
            // A size of 0 is the input's.
            let to = attrs
                .ints("shape")
                .into_iter()
                .enumerate()
                .map(|(i, n)| if n == 0 { size(shapes[0][i]) as i64 } else { n });
            op("reshape", json!({"dims": to.collect::<Vec<_>>()}))
        }
        "roll" => op("roll", json!({"shifts": a["shifts"], "axes": a["axis"]})),
        "scatter" => Box::new(|x| Ok(vec![x[0].index_put(&[&x[1]], &x[2], ScatterOp::Set)?])),
        "scatter_nd_add" => {
            Box::new(|x| Ok(vec![x[0].scatter_nd_add(&x[1].unsqueeze(-1)?, &x[2])?]))
        }
        "slice" => op(
            "slice",
            json!({"axis": a["axes"][0], "start": a["starts"][0], "stop": a["ends"][0]}),
        ),
        "softmax" => along("softmax"),
        "split_with_num" => op("chunk", json!({"n": a["num"], "axis": a["axis"]})),
        "split" => op("split", json!({"sizes": a["sections"], "axis": a["axis"]})),
        "squeeze" => of({
            let axes: Vec<i64> = attrs
                .ints("axis")
                .into_iter()
                .filter(|d| shapes[0][*d as usize] == 1)
                .collect();
            move |x| x.squeeze(&axes)
        }),
        "stack" => along("stack"),
        "concat" => along("concat"),
        // The index may be smaller than the tensor along every dimension.
        "take_along_axis" => along("gather"),
        "transpose" => op("permute", json!({"axes": a["perm"]})),
        "triu" => op("triu", json!({"k": a["diagonal"]})),
        "unbind" => along("unbind"),
        "unsqueeze" => op("unsqueeze", json!({"axis": a["axis"][0]})),
        "fused_rotary_position_embedding" => of(|x| {
            let (cos, sin) =
                Tensor::rope_tables(x.dims()[1], x.dims()[3], &RopeOptions::default(), x.mesh())?;
            x.rope(
                &cos.unsqueeze(1)?,
                &sin.unsqueeze(1)?,
                RopeStyle::Interleaved,
            )
        }),
        "empty_like" => of(Tensor::zeros_like),
        "pow" => of(|x| x.pow(2.0)),
        "mean_all" => op("mean", json!({})),
        "batch_norm" => op("batch_norm", json!({})),
        "topk" => op(
            "topk",
            json!({"k": a["k"], "axis": a["axis"], "largest": a["largest"]}),
        ),
        "tile" => op("tile", json!({"reps": a["repeat_times"]})),
        "expand_grad" | "expand_as_grad" => of2(|x, g| {
            let more = g.rank() - x.rank();
            let axes: Vec<i64> = (0..g.rank())
                .filter(|d| *d >= more && x.dims()[d - more] == 1 && g.dims()[*d] != 1)
                .map(|d| d as i64)
                .collect();
            let kept = if axes.is_empty() {
                g.clone()
            } else {
                g.sum(&axes, true)?
            };
            let front: Vec<i64> = (0..more as i64).collect();
            if front.is_empty() {
                Ok(kept)
            } else {
                kept.sum(&front, false)
            }
        }),
        "transpose_grad" => {
            let perm = attrs.ints("perm");
            let n = perm.len() as i64;
            let back: Vec<usize> = (0..n)
                .map(|d| {
                    perm.iter()
                        .position(|p| p.rem_euclid(n) == d)
                        .expect("a permutation")
                })
                .collect();
            op("permute", json!({"axes": back}))
        }
        "concat_grad" => {
            let axis = attrs.int("axis");
            Box::new(move |x| {
                let (parts, grad) = x.split_at(x.len() - 1);
                grad[0].split(
                    &parts
                        .iter()
                        .map(|t| t.dims()[axis as usize])
                        .collect::<Vec<_>>(),
                    axis,
                )
            })
        }
        _ => return None,
    })
}

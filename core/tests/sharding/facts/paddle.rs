//! Paddle's sharding rules, on the meshes of its tests.

use super::{
    case::{Case, Operand, SMALL, Theirs, mesh, reduction},
    paddle_ops::{self, Attrs},
};
use anymesh_conformance::registry::{Fill, Input};
use anymesh_core::{
    DType, Mesh, Shape, Sharding, meta,
    reshard::{Objective, plan},
};
use serde_json::Value;

/// The most elements of the inputs for which values are computed.
const MOST: usize = 60_000;

/// A tensor's sharding, from the axes of every dimension and the partial axes.
fn sharding(tensor: &Value) -> Sharding {
    let mut out = Sharding::replicated();
    for (dim, axes) in tensor["dims"]
        .as_array()
        .expect("axes of dimensions")
        .iter()
        .enumerate()
    {
        let list = axes
            .as_array()
            .cloned()
            .unwrap_or_else(|| vec![axes.clone()]);
        for axis in list.iter().filter_map(Value::as_u64) {
            out = out.cut(dim, axis as usize);
        }
    }
    for (axis, name) in tensor["partial"].as_object().into_iter().flatten() {
        out = out.partial_over(
            axis.parse().expect("an axis"),
            reduction(name.as_str().expect("a reduction")),
        );
    }
    out
}

/// Sizes that a CPU can hold. A size becomes a smaller one that leaves the same remainder over the
/// mesh, the same wherever it occurs.
struct Sizes(Vec<(usize, usize)>);

impl Sizes {
    fn of(&self, n: usize) -> usize {
        self.0
            .iter()
            .find(|(from, _)| *from == n)
            .map_or(n, |(_, to)| *to)
    }

    fn of_all(&self, shape: &[usize]) -> Vec<usize> {
        shape.iter().map(|n| self.of(*n)).collect()
    }

    fn new(shapes: &[Vec<usize>], ranks: usize, fixed: &[usize]) -> Self {
        let mut sizes = Self(vec![]);
        let mut open: Vec<usize> = shapes
            .concat()
            .into_iter()
            .filter(|n| *n > 4 * ranks && !fixed.contains(n))
            .collect();
        open.sort_unstable();
        open.dedup();
        while shapes
            .iter()
            .map(|s| sizes.of_all(s).iter().product::<usize>())
            .sum::<usize>()
            > MOST
        {
            let Some(n) = open.pop() else { break };
            sizes.0.push((n, 2 * ranks + n % ranks));
        }
        sizes
    }
}

/// The fewest bytes that bring the inputs to where the rule wants them.
fn bytes(row: &Value, inputs: &[Operand], mesh: &Mesh) -> u64 {
    let want = row["want"].as_array().expect("wanted inputs");
    let one = |(o, to): (&Operand, &Value)| {
        let (shape, to) = (Shape::from(o.input.shape.as_slice()), sharding(to));
        plan(
            mesh,
            &shape,
            o.input.dtype,
            &o.sharding,
            &to,
            Objective::Bytes,
        )
        .expect("a plan")
        .recv_bytes
    };
    inputs
        .iter()
        .zip(want)
        .filter(|(_, to)| !to.is_null())
        .map(one)
        .sum()
}

/// What Paddle's kernels communicate themselves, where the rule says nothing: softmax with
/// cross-entropy over classes that are cut reduces the maximum, the sum of exponentials and the
/// target's logit of every position.
fn inside(row: &Value, inputs: &[Operand], mesh: &Mesh) -> u64 {
    if !matches!(
        row["op"].as_str(),
        Some("cross_entropy_with_softmax" | "c_softmax_with_cross_entropy")
    ) {
        return 0;
    }
    let (logits, wanted) = (&inputs[0], sharding(&row["want"][0]));
    let k: usize = wanted
        .axes_of(logits.input.shape.len() - 1)
        .map(|a| mesh.size(a))
        .product();
    let mut local = wanted
        .region(mesh, 0, &Shape::from(logits.input.shape.as_slice()))
        .shape;
    local.pop();
    3 * 2 * (k as u64 - 1) * local.iter().product::<usize>() as u64 * DType::F32.size() as u64
        / k as u64
}

fn case(row: &Value) -> Result<Case, String> {
    let (name, id) = (
        row["op"].as_str().expect("an op"),
        row["id"].as_str().expect("a name"),
    );
    let not_covered = |why: &str| {
        Err(if why.is_empty() {
            name.to_string()
        } else {
            format!("{id}: {why}")
        })
    };
    let sizes: Vec<usize> = serde_json::from_value(row["mesh"].clone()).expect("a mesh");
    let tensors = row["inputs"].as_array().expect("inputs");
    let Some(mut shapes) = tensors
        .iter()
        .map(|t| serde_json::from_value::<Vec<usize>>(t["shape"].clone()).ok())
        .collect::<Option<Vec<_>>>()
    else {
        return not_covered("sizes are unknown");
    };
    if tensors
        .iter()
        .zip(&shapes)
        .any(|(t, s)| t["dims"].as_array().is_some_and(|d| d.len() != s.len()))
    {
        return not_covered("axes for another number of dimensions");
    }
    let abstract_mesh = mesh(&sizes, &meta());
    if tensors
        .iter()
        .zip(&shapes)
        .any(|(t, s)| sharding(t).check(&abstract_mesh, s.len()).is_err())
    {
        return not_covered("an axis is used twice");
    }
    let attrs = Attrs(row["attrs"].clone());
    if let Some(why) = paddle_ops::malformed(name, &attrs, &mut shapes) {
        return not_covered(why);
    }
    let fixed = paddle_ops::fixed(name, &shapes);
    let small = Sizes::new(
        &[shapes.clone(), paddle_ops::results(name, &attrs, &shapes)].concat(),
        sizes.iter().product(),
        &fixed,
    );
    let operands = |size: &dyn Fn(usize) -> usize| -> Vec<Operand> {
        let shapes: Vec<Vec<usize>> = shapes
            .iter()
            .map(|s| s.iter().map(|n| size(*n)).collect())
            .collect();
        let one = |(i, t): (usize, &Value)| {
            Operand::new(
                &shapes[i],
                sharding(t),
                paddle_ops::fill(name, &attrs, &shapes, i).unwrap_or(SMALL),
            )
        };
        tensors.iter().enumerate().map(one).collect()
    };
    let program = |size: &dyn Fn(usize) -> usize| paddle_ops::program(name, &attrs, &shapes, size);
    let (Some(run), Some(run_small)) = (program(&|n| n), program(&|n| small.of(n))) else {
        return not_covered("");
    };
    let inputs = operands(&|n| n);
    let theirs = if row["refused"] == true || row["soundness"] == "unsound" {
        None
    } else {
        let outputs = row["outputs"]
            .as_array()
            .expect("outputs")
            .iter()
            .map(|t| {
                if t.is_null() {
                    Sharding::replicated()
                } else {
                    sharding(t)
                }
            })
            .collect();
        Some(Theirs {
            bytes: bytes(row, &inputs, &abstract_mesh) + inside(row, &inputs, &abstract_mesh),
            outputs,
        })
    };
    let reduced = (!small.0.is_empty()).then(|| (operands(&|n| small.of(n)), run_small));
    Ok(Case {
        name: id.into(),
        mesh: sizes,
        inputs,
        program: run,
        reduced,
        theirs,
    })
}

/// All recorded calls; what is missing for one that we cannot make.
pub(crate) fn cases() -> Vec<Result<Case, String>> {
    include_str!("../../facts/paddle_ops.jsonl")
        .lines()
        .map(|line| case(&serde_json::from_str(line).expect("a line of JSON")))
        .collect()
}

/// Indices into a dimension.
pub(crate) fn index(size: usize) -> Option<Fill> {
    Some(Fill::Index(size))
}

#[test]
fn smaller_sizes_cut_as_the_recorded_ones() {
    let sizes = Sizes::new(&[vec![8, 1024, 50304], vec![8, 1024, 1]], 6, &[]);
    assert_eq!(
        (sizes.of(8), sizes.of(1024) % 6, sizes.of(50304) % 6),
        (8, 1024 % 6, 0)
    );
    assert!(
        Input {
            shape: sizes.of_all(&[8, 1024, 50304]),
            dtype: DType::F32,
            fill: SMALL
        }
        .shape
        .iter()
        .product::<usize>()
            <= MOST
    );
}

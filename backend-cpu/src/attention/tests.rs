use super::*;
use crate::testing::{assert_close, dense_view, random, read, values, views};
use anymesh_kernel::{View, backend::AttentionBackwardCall};

struct Naive {
    out: Vec<f64>,
    lse: Vec<f64>,
}

fn naive(call: &AttentionCall, [q, k, v]: [&[f64]; 3]) -> Naive {
    let (qs, ks, dv) = (
        call.q.layout.shape.dims(),
        call.k.layout.shape.dims(),
        call.v.layout.shape[3],
    );
    let (s, t, d, group) = (qs[2], ks[2], qs[3], qs[1] / ks[1]);
    let mut result = Naive {
        out: vec![],
        lse: vec![],
    };
    let documents = (call.documents.as_ref()).map(|both| both.each_ref().map(values));
    for head in 0..qs[0] * qs[1] {
        for i in 0..s {
            let seen = if call.causal {
                (i + 1 + t).saturating_sub(s).min(t)
            } else {
                t
            };
            let score = |j: usize| {
                call.scale
                    * (0..d)
                        .map(|e| q[(head * s + i) * d + e] * k[(head / group * t + j) * d + e])
                        .sum::<f64>()
            };
            let batch = head / qs[1];
            let same = |j: usize| match &documents {
                Some([queries, keys]) => queries[batch * s + i] == keys[batch * t + j],
                None => true,
            };
            let exps: Vec<f64> = (0..seen)
                .map(|j| if same(j) { score(j).exp() } else { 0.0 })
                .collect();
            let sum: f64 = exps.iter().sum();
            result.lse.push(sum.ln());
            for e in 0..dv {
                let mix: f64 = exps
                    .iter()
                    .enumerate()
                    .map(|(j, w)| w / sum * v[(head / group * t + j) * dv + e])
                    .sum();
                result.out.push(if sum == 0.0 { 0.0 } else { mix });
            }
        }
    }
    result
}

const SHAPES: [(usize, usize, usize, usize, usize, usize, usize); 5] = [
    (1, 1, 1, 3, 4, 2, 2),
    (2, 4, 2, 5, 5, 3, 4),
    (1, 3, 1, 6, 4, 5, 2),
    (1, 2, 2, 1, 7, 4, 4),
    (1, 1, 1, 150, 1000, 8, 8),
];

/// Documents of queries and of keys: none, packed ones or mixed ones, some of which only one side has.
fn documents(how: usize, queries: [usize; 2], keys: [usize; 2]) -> Option<[View; 2]> {
    let number = |i: usize, len: usize, side: usize| match how {
        1 => (i % len * 3 / len) as f64,
        2 => ((i * 5 + i / 3) % 3) as f64 - 1.0,
        _ => (i % 2 * 2 + side) as f64,
    };
    let view = |shape: [usize; 2], side| {
        let ids: Vec<f64> = (0..shape[0] * shape[1])
            .map(|i| number(i, shape[1], side))
            .collect();
        dense_view(&ids, DType::I32, shape)
    };
    (how > 0).then(|| [view(queries, 0), view(keys, 1)])
}

#[test]
fn attention_equals_its_definition() {
    for (b, hq, hk, s, t, d, dv) in SHAPES {
        for causal in [false, true] {
            for dtype in [DType::F64, DType::F32, DType::BF16] {
                let (qs, ks, vs) = (
                    views(&[b, hq, s, d], dtype, 1, false),
                    views(&[b, hk, t, d], dtype, 2, false),
                    views(&[b, hk, t, dv], dtype, 3, false),
                );
                for i in 0..if s > 100 { 1 } else { 4 } {
                    let call = AttentionCall {
                        op: "test",
                        q: qs[i].clone(),
                        k: ks[(i + 1) % 4].clone(),
                        v: vs[(i + 2) % 4].clone(),
                        scale: 0.3,
                        causal,
                        documents: documents(i, [b, s], [b, t]),
                        order: AttentionOrder::Heads,
                    };
                    let (out, lse) = attention(&call).expect("runs");
                    let expected = naive(
                        &call,
                        [&values(&call.q), &values(&call.k), &values(&call.v)],
                    );
                    let (tolerance, held) = match dtype {
                        DType::F64 => (1e-13, DType::F64),
                        DType::F32 => (1e-5, DType::F32),
                        _ => (8e-3, DType::F32),
                    };
                    assert_close(&read(&out, dtype), &expected.out, tolerance, "out");
                    assert_close(
                        &read(&lse, held),
                        &expected.lse,
                        tolerance.min(1e-5),
                        "log-sum-exp",
                    );
                }
            }
        }
    }
}

#[test]
fn gradients_equal_differences() {
    for (b, hq, hk, s, t, d, dv) in SHAPES.into_iter().filter(|shape| shape.3 < 100) {
        for (causal, how) in [(false, 0), (true, 0), (false, 1), (true, 2)] {
            let sizes = [[b, hq, s, d], [b, hk, t, d], [b, hk, t, dv]];
            let data: Vec<Vec<f64>> = sizes
                .iter()
                .zip(4..)
                .map(|(shape, seed)| random(shape.iter().product(), seed, false))
                .collect();
            let view = |i: usize| dense_view(&data[i], DType::F64, sizes[i]);
            let (q, k, v) = (view(0), view(1), view(2));
            let forward = AttentionCall {
                op: "test",
                q,
                k,
                v,
                scale: 0.3,
                causal,
                documents: documents(how, [b, s], [b, t]),
                order: AttentionOrder::Heads,
            };
            let (out, lse) = attention(&forward).expect("runs");
            let wrap = |buffer, shape: Vec<usize>| View {
                buffer,
                dtype: DType::F64,
                layout: anymesh_kernel::Layout::contiguous(shape.into()),
            };
            let (out, lse) = (wrap(out, vec![b, hq, s, dv]), wrap(lse, vec![b, hq, s]));
            let seeds = random(b * hq * s * dv, 9, false);
            let grad = dense_view(&seeds, DType::F64, [b, hq, s, dv]);
            let got = attention_backward(&AttentionBackwardCall {
                forward: forward.clone(),
                out,
                lse,
                grad,
            })
            .expect("runs");
            let loss = |data: &[Vec<f64>]| -> f64 {
                naive(&forward, [&data[0], &data[1], &data[2]])
                    .out
                    .iter()
                    .zip(&seeds)
                    .map(|(o, g)| o * g)
                    .sum()
            };
            for i in 0..3 {
                let step = 1e-5;
                let expected: Vec<f64> = (0..data[i].len())
                    .map(|at| {
                        let mut moved = data.clone();
                        moved[i][at] += step;
                        let up = loss(&moved);
                        moved[i][at] -= 2.0 * step;
                        (up - loss(&moved)) / (2.0 * step)
                    })
                    .collect();
                assert_close(
                    &read(&got[i], DType::F64),
                    &expected,
                    1e-7,
                    &format!("gradient {i} of {sizes:?}, causal {causal}, documents {how}"),
                );
            }
        }
    }
}

/// The elements of a dense buffer in this shape, with the second and third dimension swapped.
fn swapped(buffer: &Buffer, shape: [usize; 4]) -> Vec<f64> {
    let all = read(buffer, DType::F32);
    let layout = anymesh_kernel::Layout::contiguous(shape.into()).permute(&[0, 2, 1, 3]);
    layout.positions().map(|at| all[at]).collect()
}

#[test]
fn every_order_holds_the_same_values() {
    // Few texts, and enough of them for tasks that have all heads of one.
    for sizes in [(2, 4, 2, 5, 3), (70, 4, 2, 5, 3), (70, 3, 1, 67, 4)] {
        same_in_every_order(sizes);
    }
}

fn same_in_every_order((b, hq, hk, s, d): (usize, usize, usize, usize, usize)) {
    let heads = hq + 2 * hk;
    let packed = dense_view(
        &random(b * s * heads * d, 5, false),
        DType::F32,
        [b, s, heads, d],
    );
    let part = |first: usize, heads: usize| View {
        layout: (packed.layout.slice(2, first, 1, heads)).permute(&[0, 2, 1, 3]),
        ..packed.clone()
    };
    let (q, k, v) = (part(0, hq), part(hq, hk), part(hq + hk, hk));
    assert_eq!(AttentionOrder::of(&q, &k, &v), AttentionOrder::Packed);
    let grad = dense_view(&random(b * hq * s * d, 6, false), DType::F32, [b, hq, s, d]);
    let run = |order: AttentionOrder| {
        let (q, k, v) = (q.clone(), k.clone(), v.clone());
        let forward = AttentionCall {
            op: "test",
            q,
            k,
            v,
            scale: 0.3,
            causal: true,
            documents: None,
            order,
        };
        let (out, lse) = attention(&forward).expect("runs");
        let sums = read(&lse, DType::F32);
        let wrap = |buffer: Buffer, shape: &[usize]| View {
            buffer,
            dtype: DType::F32,
            layout: anymesh_kernel::Layout::contiguous(shape.into()),
        };
        let mut seen = wrap(out.clone(), &[b, hq, s, d]);
        if order != AttentionOrder::Heads {
            seen = wrap(out.clone(), &[b, s, hq, d]);
            seen.layout = seen.layout.permute(&[0, 2, 1, 3]);
        }
        let grads = attention_backward(&AttentionBackwardCall {
            forward,
            out: seen,
            lse: wrap(lse, &[b, hq, s]),
            grad: grad.clone(),
        });
        (out, sums, grads.expect("runs"))
    };
    let (out, sums, by_head) = run(AttentionOrder::Heads);
    let out = read(&out, DType::F32);
    let (other, other_sums, by_position) = run(AttentionOrder::Positions);
    assert_eq!(swapped(&other, [b, s, hq, d]), out);
    assert_eq!(other_sums, sums);
    let (other, other_sums, one) = run(AttentionOrder::Packed);
    assert_eq!(swapped(&other, [b, s, hq, d]), out);
    assert_eq!(other_sums, sums);
    assert_eq!((by_position.len(), one.len()), (3, 1));
    let all = read(&one[0], DType::F32);
    for (i, (first, n)) in [(0, hq), (hq, hk), (hq + hk, hk)].into_iter().enumerate() {
        let expected = read(&by_head[i], DType::F32);
        assert_eq!(swapped(&by_position[i], [b, s, n, d]), expected);
        let positions = part(first, n).layout;
        let got: Vec<f64> = positions.positions().map(|at| all[at]).collect();
        assert_eq!(got, expected);
    }
}

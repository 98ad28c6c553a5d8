//! Attention within documents: what the kernels give beside what the steps give.

use super::{Cases, Problem, View};
use anymesh_core::{
    DType::{self, *},
    Device, Result, Tensor,
    ops::attention::{AttentionOptions, attention_backward, backward_decomposed, decomposed},
};

/// How documents lie.
#[derive(Clone, Copy, Debug)]
enum Lie {
    /// One after the other, of lengths up to so many, as in packed sequences.
    Packed(usize),
    /// Numbers that go down.
    Backwards(usize),
    /// Each position is of any of three.
    Mixed,
    /// Queries and keys have no document in common, but for those of the first batch.
    Apart,
}

impl Lie {
    /// The documents of `len` positions of a batch; `side` is 0 for queries and 1 for keys.
    fn of(self, batch: usize, len: usize, side: usize) -> Vec<i32> {
        let runs = |longest: usize, step: i32| -> Vec<i32> {
            // Queries are the last ones of keys, as causal ones are: they end together.
            let (mut left, mut document) = (0, 0);
            let mut from_end = vec![];
            while from_end.len() < len {
                if left == 0 {
                    document += step;
                    left = 1 + (document.unsigned_abs() as usize * 37 + batch * 11) % longest;
                }
                from_end.push(document);
                left -= 1;
            }
            from_end.reverse();
            from_end
        };
        match self {
            Lie::Packed(longest) => runs(longest, -1),
            Lie::Backwards(longest) => runs(longest, 1),
            Lie::Mixed => (0..len)
                .map(|i| ((i * 7 + i / 5 + batch) % 3) as i32 - 1)
                .collect(),
            Lie::Apart => (0..len)
                .map(|i| {
                    if batch == 0 {
                        5
                    } else {
                        (i % 4 * 2 + side) as i32
                    }
                })
                .collect(),
        }
    }

    fn tensor(self, device: &Device, shape: [usize; 2], side: usize) -> Result<Tensor> {
        let ids: Vec<i32> = (0..shape[0])
            .flat_map(|batch| self.of(batch, shape[1], side))
            .collect();
        Tensor::from_slice(&ids, shape, device)
    }
}

/// Every problem with its documents.
fn problems() -> Vec<(Problem, DType, bool, Lie)> {
    let base = Problem {
        b: 2,
        h: 2,
        hk: 2,
        s: 130,
        t: 130,
        d: 64,
        dv: 64,
    };
    let mut out = vec![];
    for causal in [false, true] {
        for dtype in [F32, BF16, F16] {
            for lie in [
                Lie::Packed(40),
                Lie::Packed(200),
                Lie::Backwards(70),
                Lie::Mixed,
                Lie::Apart,
            ] {
                for (s, t) in [(130, 130), (70, 200)] {
                    out.push((Problem { s, t, ..base }, dtype, causal, lie));
                }
            }
            // More than one tile on either side, heads that share keys, and sizes of all kinds.
            for (b, h, hk, s, d) in [
                (1, 4, 2, 520, 64),
                (1, 4, 1, 300, 128),
                (1, 2, 1, 200, 192),
                (1, 2, 2, 200, 256),
                (2, 2, 2, 90, 16),
                (2, 3, 1, 90, 80),
                (1, 2, 2, 70, 7),
            ] {
                let problem = Problem {
                    b,
                    h,
                    hk,
                    s,
                    t: s,
                    d,
                    dv: d,
                };
                out.push((problem, dtype, causal, Lie::Packed(100)));
                out.push((problem, dtype, causal, Lie::Mixed));
            }
        }
        let narrow = Problem {
            d: 16,
            dv: 24,
            ..base
        };
        for dtype in [F32, F64] {
            out.push((narrow, dtype, causal, Lie::Packed(30)));
        }
        // So few queries that plain products take them.
        let few = Problem {
            s: 3,
            t: 90,
            ..base
        };
        out.push((few, F32, causal, Lie::Packed(20)));
    }
    out
}

fn options(d: &Device, problem: Problem, causal: bool, lie: Lie) -> Result<AttentionOptions> {
    let Problem { b, s, t, .. } = problem;
    Ok(AttentionOptions {
        causal,
        documents: Some([lie.tensor(d, [b, s], 0)?, lie.tensor(d, [b, t], 1)?]),
        ..Default::default()
    })
}

/// Forward.
pub(super) fn forward(cases: &mut Cases) {
    for (problem, dtype, causal, lie) in problems() {
        let name = format!("{dtype} {problem:?} causal {causal} documents {lie:?}");
        cases.add("attention", dtype, name, move |d| {
            let [q, k, v] = problem.inputs(d, dtype, View::Contiguous)?;
            let options = options(d, problem, causal, lie)?;
            let done = q.attention(&k, &v, &options)?;
            let parts = decomposed(&q, &k, &v, &options)?;
            Ok(vec![done.out, done.lse, parts.out, parts.lse])
        });
    }
    // Numbers that kernels do not take as they are.
    for dtype in [U8, U32, I64] {
        let name = format!("documents {dtype}");
        cases.add("attention", F32, name, move |d| {
            let problem = Problem {
                b: 1,
                h: 2,
                hk: 1,
                s: 70,
                t: 70,
                d: 32,
                dv: 32,
            };
            let [q, k, v] = problem.inputs(d, F32, View::Contiguous)?;
            let ids = Lie::Backwards(20).tensor(d, [1, 70], 0)?.cast(dtype)?;
            // Every second one of a longer row: strides are not dense.
            let ids = Tensor::stack(&[&ids, &ids], 2)?
                .narrow(2, 1, 1)?
                .squeeze(&[2])?;
            let options = AttentionOptions {
                causal: true,
                documents: Some([ids.clone(), ids]),
                ..Default::default()
            };
            let done = q.attention(&k, &v, &options)?;
            Ok(vec![done.out, done.lse])
        });
    }
}

/// Gradients, from one forward pass so that both see the same statistics.
pub(super) fn backward(cases: &mut Cases) {
    for (problem, dtype, causal, lie) in problems() {
        let name = format!("{dtype} {problem:?} causal {causal} documents {lie:?}");
        cases.add("attention_backward", dtype, name, move |d| {
            let [q, k, v] = problem.inputs(d, dtype, View::Contiguous)?;
            let grad = problem.grad(d, dtype)?;
            let options = options(d, problem, causal, lie)?;
            let forward = q.attention(&k, &v, &options)?;
            let (dq, dk, dv) = attention_backward(&q, &k, &v, &forward, &grad, &options)?;
            let (eq, ek, ev) = backward_decomposed(&q, &k, &v, &forward, &grad, &options)?;
            Ok(vec![dq, dk, dv, eq, ek, ev])
        });
    }
}

//! Cases for attention and its gradient.

mod documents;

use super::{Cases, Fill, View, input, nn::FLOATS};
use anymesh_core::{
    DType::{self, *},
    Device, Result, Tensor,
    ops::attention::{
        Attention, AttentionOptions, attention_backward, backward_decomposed, decomposed,
    },
};

/// Sizes of a problem: batch, heads, key heads, queries, keys, vector size, value size.
#[derive(Clone, Copy, Debug)]
struct Problem {
    b: usize,
    h: usize,
    hk: usize,
    s: usize,
    t: usize,
    d: usize,
    dv: usize,
}

impl Problem {
    fn inputs(self, device: &Device, dtype: DType, view: View) -> Result<[Tensor; 3]> {
        let Problem {
            b,
            h,
            hk,
            s,
            t,
            d,
            dv,
        } = self;
        let make = |shape: [usize; 4], seed| {
            input(device, dtype, &shape, view, Fill::Uniform(-1.5, 1.5), seed)
        };
        Ok([
            make([b, h, s, d], 1)?,
            make([b, hk, t, d], 2)?,
            make([b, hk, t, dv], 3)?,
        ])
    }

    fn grad(self, device: &Device, dtype: DType) -> Result<Tensor> {
        input(
            device,
            dtype,
            &[self.b, self.h, self.s, self.dv],
            View::Contiguous,
            Fill::Uniform(-1.0, 1.0),
            4,
        )
    }
}

const LENGTHS: [(usize, usize); 10] = [
    (1, 1),
    (1, 65),
    (7, 7),
    (7, 130),
    (64, 64),
    (65, 64),
    (65, 130),
    (130, 65),
    (130, 130),
    (130, 7),
];

/// Every problem with the layout of its inputs.
fn problems() -> Vec<(Problem, DType, bool, View)> {
    let base = Problem {
        b: 1,
        h: 2,
        hk: 2,
        s: 65,
        t: 130,
        d: 64,
        dv: 64,
    };
    let mut out = vec![];
    for causal in [false, true] {
        // Where tensor cores take whole tiles.
        for dtype in [F32, BF16, F16] {
            for (s, t) in LENGTHS.into_iter().chain([(300, 300), (200, 520)]) {
                out.push((Problem { s, t, ..base }, dtype, causal, View::Contiguous));
            }
            let wide = Problem {
                h: 4,
                s: 300,
                t: 300,
                d: 128,
                dv: 128,
                ..base
            };
            out.push((wide, dtype, causal, View::Contiguous));
        }
        for dtype in FLOATS {
            for d in [8, 16, 20, 64, 80, 100, 128, 256] {
                out.push((
                    Problem {
                        b: 2,
                        s: 40,
                        t: 70,
                        d,
                        dv: d,
                        ..base
                    },
                    dtype,
                    causal,
                    View::Contiguous,
                ));
            }
            for (h, hk) in [(4, 1), (6, 3), (8, 2)] {
                out.push((
                    Problem {
                        h,
                        hk,
                        s: 17,
                        t: 33,
                        d: 16,
                        dv: 16,
                        ..base
                    },
                    dtype,
                    causal,
                    View::Contiguous,
                ));
            }
        }
        for view in View::ALL {
            out.push((
                Problem {
                    b: 2,
                    s: 20,
                    t: 30,
                    d: 16,
                    dv: 24,
                    ..base
                },
                F32,
                causal,
                view,
            ));
            out.push((
                Problem {
                    b: 2,
                    h: 4,
                    s: 30,
                    t: 30,
                    d: 32,
                    dv: 32,
                    ..base
                },
                BF16,
                causal,
                view,
            ));
        }
    }
    out
}

/// Operands as models have them, the heads of a position next to each other: out of three products,
/// or out of one.
fn laid(
    device: &Device,
    dtype: DType,
    [b, h, hk, s, d]: [usize; 5],
    packed: bool,
) -> Result<[Tensor; 3]> {
    let make = |heads: usize, seed| {
        let (shape, fill) = ([b, s, heads, d], Fill::Uniform(-1.5, 1.5));
        input(device, dtype, &shape, View::Contiguous, fill, seed)
    };
    let parts = match packed {
        true => make(h + 2 * hk, 7)?.split(&[h, hk, hk], 2)?,
        false => vec![make(h, 7)?, make(hk, 8)?, make(hk, 9)?],
    };
    Ok([
        parts[0].transpose(1, 2)?,
        parts[1].transpose(1, 2)?,
        parts[2].transpose(1, 2)?,
    ])
}

/// Sizes and dtypes of operands that are [`laid`] out by position.
fn layouts() -> Vec<([usize; 5], DType, bool)> {
    let mut out = vec![];
    for dtype in [F32, BF16, F16] {
        for sizes in [
            [2, 3, 3, 70, 64],
            [1, 4, 2, 200, 64],
            [2, 4, 2, 40, 128],
            [1, 2, 1, 400, 128],
            [1, 2, 2, 150, 192],
            [1, 2, 1, 70, 256],
            [2, 2, 2, 33, 7],
        ] {
            for packed in [false, true] {
                out.push((sizes, dtype, packed));
            }
        }
    }
    out
}

/// Forward.
pub(super) fn forward() -> Cases {
    let mut cases = Cases::new("attention");
    for (sizes, dtype, packed) in layouts() {
        let name = format!("{dtype} by position {sizes:?} packed {packed}");
        cases.add("attention", dtype, name, move |d| {
            let [q, k, v] = laid(d, dtype, sizes, packed)?;
            let options = AttentionOptions::causal();
            let done = q.attention(&k, &v, &options)?;
            let parts = decomposed(&q, &k, &v, &options)?;
            Ok(vec![done.out, done.lse, parts.out, parts.lse])
        });
    }
    for (problem, dtype, causal, view) in problems() {
        cases.add(
            "attention",
            dtype,
            format!("{dtype} {problem:?} causal {causal} {view:?}"),
            move |d| {
                let [q, k, v] = problem.inputs(d, dtype, view)?;
                let options = AttentionOptions {
                    causal,
                    ..Default::default()
                };
                let (fused, parts) = (
                    q.attention(&k, &v, &options)?,
                    decomposed(&q, &k, &v, &options)?,
                );
                Ok(vec![fused.out, fused.lse, parts.out, parts.lse])
            },
        );
    }
    let small = Problem {
        b: 2,
        h: 4,
        hk: 2,
        s: 9,
        t: 12,
        d: 8,
        dv: 8,
    };
    for dtype in FLOATS {
        for causal in [false, true] {
            cases.add(
                "attention",
                dtype,
                format!("{dtype} masked causal {causal}"),
                move |d| {
                    let [q, k, v] = small.inputs(d, dtype, View::Contiguous)?;
                    let seen = input(
                        d,
                        Bool,
                        &[2, 1, 9, 12],
                        View::Contiguous,
                        Fill::Integers(0, 1),
                        5,
                    )?;
                    let added = input(
                        d,
                        dtype,
                        &[4, 1, 12],
                        View::Contiguous,
                        Fill::Uniform(-2.0, 2.0),
                        6,
                    )?;
                    let mut out = vec![];
                    for mask in [seen, added] {
                        let done = q.attention(
                            &k,
                            &v,
                            &AttentionOptions {
                                causal,
                                mask: Some(mask),
                                scale: Some(0.3),
                                documents: None,
                            },
                        )?;
                        out.extend([done.out, done.lse]);
                    }
                    Ok(out)
                },
            );
        }
    }
    for problem in [
        Problem { t: 0, ..small },
        Problem { s: 0, ..small },
        Problem { b: 0, ..small },
    ] {
        cases.add("attention", F32, format!("empty {problem:?}"), move |d| {
            let [q, k, v] = problem.inputs(d, F32, View::Contiguous)?;
            let done = q.attention(&k, &v, &AttentionOptions::default())?;
            Ok(vec![done.out, done.lse])
        });
    }
    documents::forward(&mut cases);
    cases
}

/// Gradients, from one forward pass so that both see the same statistics.
pub(super) fn backward() -> Cases {
    let mut cases = Cases::new("attention");
    for (sizes, dtype, packed) in layouts() {
        let name = format!("{dtype} by position {sizes:?} packed {packed}");
        cases.add("attention_backward", dtype, name, move |d| {
            let [q, k, v] = laid(d, dtype, sizes, packed)?;
            let [b, h, _, s, size] = sizes;
            let (shape, fill) = ([b, s, h, size], Fill::Uniform(-1.0, 1.0));
            let grad = input(d, dtype, &shape, View::Contiguous, fill, 6)?.transpose(1, 2)?;
            let options = AttentionOptions::causal();
            let forward = q.attention(&k, &v, &options)?;
            let (dq, dk, dv) = attention_backward(&q, &k, &v, &forward, &grad, &options)?;
            let (eq, ek, ev) = backward_decomposed(&q, &k, &v, &forward, &grad, &options)?;
            Ok(vec![dq, dk, dv, eq, ek, ev])
        });
    }
    // With one query and one key the gradients of both are zero: only rounding would be compared.
    for (problem, dtype, causal, view) in problems().into_iter().filter(|(p, ..)| p.t > 1) {
        cases.add(
            "attention_backward",
            dtype,
            format!("{dtype} {problem:?} causal {causal} {view:?}"),
            move |d| {
                let [q, k, v] = problem.inputs(d, dtype, view)?;
                let grad = problem.grad(d, dtype)?;
                let options = AttentionOptions {
                    causal,
                    ..Default::default()
                };
                let forward: Attention = q.attention(&k, &v, &options)?;
                let (dq, dk, dv) = attention_backward(&q, &k, &v, &forward, &grad, &options)?;
                let (eq, ek, ev) = backward_decomposed(&q, &k, &v, &forward, &grad, &options)?;
                Ok(vec![dq, dk, dv, eq, ek, ev])
            },
        );
    }
    documents::backward(&mut cases);
    cases
}

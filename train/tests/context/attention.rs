//! The ops by themselves: values and gradients against attention on one device, and what each rank
//! computes and holds.

use anymesh_core::{
    DType, Device, Error, Mesh, Result, Tensor,
    backend::Kernel,
    grad::{GradOptions, grad},
    meta,
    ops::{AttentionOptions, Rng, SequenceOptions, SequenceOrder},
    spmd::{self, Ledger, OnDifference, PlanOptions},
};
use anymesh_train::nn::same_document;
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// Queries, keys and values with sizes `[b, queries, keys, s, d]`, and a weight for each result.
fn operands([b, hq, hk, s, d]: [usize; 5], device: &Device) -> Result<[Tensor; 4]> {
    let normal = |h: usize, seed: u64| {
        let rng = Rng::new(seed);
        Tensor::normal([b, h, s, d], 0.0, 1.0, DType::F64, device, rng)
    };
    Ok([
        normal(hq, 1)?,
        normal(hk, 2)?,
        normal(hk, 3)?,
        normal(hq, 4)?,
    ])
}

fn documents(b: usize, s: usize, device: &Device) -> Result<Tensor> {
    Tensor::from_fn([b, s], device, |at| (at[1] / (3 + 2 * at[0])) as i32)
}

/// The result and the gradients of the weighted sum of it.
fn with_gradients(
    [q, k, v, weight]: &[Tensor; 4],
    f: impl Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
) -> Result<[Tensor; 4]> {
    let tracked = |x: &Tensor| x.require_grad();
    let (q, k, v) = (tracked(q)?, tracked(k)?, tracked(v)?);
    let out = f(&q, &k, &v)?;
    let grads = out.mul(weight)?.sum(&[], false)?.backward()?;
    Ok([out.detach(), grads.of(&q)?, grads.of(&k)?, grads.of(&v)?])
}

#[track_caller]
fn assert_near(what: &str, a: &Tensor, b: &Tensor) -> Result<()> {
    let (a, b) = (a.to_vec::<f64>()?, b.to_vec::<f64>()?);
    assert_eq!(a.len(), b.len(), "{what}");
    for (i, (a, b)) in a.iter().zip(&b).enumerate() {
        assert!((a - b).abs() <= 1e-13, "{what}, element {i}: {a} and {b}");
    }
    Ok(())
}

/// A ring, or gathered keys.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Op {
    Ring,
    Gathered,
}

impl Op {
    fn run(self, [q, k, v]: [&Tensor; 3], options: &SequenceOptions) -> Result<Tensor> {
        match self {
            Op::Ring => q.ring_attention(k, v, options),
            Op::Gathered => q.gathered_attention(k, v, options),
        }
    }
}

#[test]
fn values_and_gradients_are_those_of_one_device() -> Result<()> {
    let cpu = anymesh_backend_cpu::device();
    let cut = "[@dp?, @tp?, @cp?, _]";
    for (axes, ranks, sizes) in [
        ("cp=2", 2, [2, 4, 2, 16, 3]),
        ("cp=4", 4, [1, 4, 4, 16, 3]),
        ("cp=4", 4, [2, 4, 1, 10, 3]),
        ("cp=4", 4, [1, 2, 1, 3, 2]),
        ("cp=2, tp=2", 2, [2, 4, 2, 12, 3]),
        // One head of keys for all ranks of tp: terms of its gradient come from each.
        ("tp=2, cp=2", 2, [1, 4, 1, 8, 3]),
        ("dp=2, cp=4", 4, [2, 2, 2, 16, 3]),
    ] {
        let [b, _, _, s, _] = sizes;
        let mesh = Mesh::new(axes, &cpu)?;
        let plain = operands(sizes, &cpu)?;
        let papers = documents(b, s, &cpu)?;
        let orders = [SequenceOrder::Straight, SequenceOrder::paired(ranks)];
        for order in orders.into_iter().filter(|o| o.check(s).is_ok()) {
            for (causal, packed) in [(true, false), (false, false), (true, true), (false, true)] {
                let one = with_gradients(&plain, |q, k, v| {
                    let options = AttentionOptions {
                        causal,
                        mask: packed
                            .then(|| same_document(&papers))
                            .transpose()
                            .expect("a mask"),
                        scale: None,
                        documents: None,
                    };
                    Ok(q.attention(k, v, &options)?.out)
                })?;
                let options = SequenceOptions {
                    scale: None,
                    causal,
                    order,
                    documents: match packed {
                        true => Some(papers.in_order(1, order)?.to_mesh(&mesh, "[@dp?, @cp?]")?),
                        false => None,
                    },
                };
                let place = |x: &Tensor| {
                    // Heads that are fewer than ranks are on every one of them.
                    let sharding = match x.dims()[1] {
                        1 => "[@dp?, _, @cp?, _]",
                        _ => cut,
                    };
                    x.in_order(2, order)?.to_mesh(&mesh, sharding)
                };
                let [q, k, v, w] = &plain;
                let there = [place(q)?, place(k)?, place(v)?, place(w)?];
                for op in [Op::Ring, Op::Gathered] {
                    let found = with_gradients(&there, |q, k, v| op.run([q, k, v], &options))?;
                    let names = ["out", "dq", "dk", "dv"];
                    for ((a, b), name) in found.iter().zip(&one).zip(names) {
                        let what = format!(
                            "{op:?} {name} on {axes}, {order:?}, causal {causal}, documents {packed}, {sizes:?}"
                        );
                        let a = a.full_tensor()?.from_order(2, order)?;
                        assert_near(&what, &a, b)?;
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn on_one_device_an_order_is_only_an_order() -> Result<()> {
    let cpu = anymesh_backend_cpu::device();
    let [q, k, v, _] = operands([1, 2, 1, 8, 3], &cpu)?;
    let order = SequenceOrder::Paired { ranks: 2 };
    let options = SequenceOptions {
        order,
        ..SequenceOptions::causal()
    };
    let put = |x: &Tensor| x.in_order(2, order);
    let one = q.attention(&k, &v, &AttentionOptions::causal())?.out;
    for op in [Op::Ring, Op::Gathered] {
        let out = op.run([&put(&q)?, &put(&k)?, &put(&v)?], &options)?;
        assert_near("in pairs", &out.from_order(2, order)?, &one)?;
    }
    Ok(())
}

/// Scores that a call of the kernel computes.
fn scores(kernel: &Kernel) -> u64 {
    let call = match kernel {
        Kernel::Attention(call) => call,
        Kernel::AttentionBackward(call) => &call.forward,
        _ => return 0,
    };
    let (q, k) = (call.q.layout.shape.dims(), call.k.layout.shape.dims());
    let (s, t) = (q[2] as u64, k[2] as u64);
    let seen = match call.causal {
        true => (0..s).map(|i| (i + 1 + t).saturating_sub(s)).sum(),
        false => s * t,
    };
    q[0] as u64 * q[1] as u64 * seen
}

/// What each rank computed: scores of the forward and of the backward pass.
fn work(op: Op, order: SequenceOrder, ranks: usize, s: usize) -> Result<Vec<u64>> {
    let counters: Vec<Arc<AtomicU64>> = (0..ranks).map(|_| Arc::default()).collect();
    let device = |count: &Arc<AtomicU64>| {
        let count = count.clone();
        anymesh_backend_cpu::device().decorated(move |cpu, kernel| {
            count.fetch_add(scores(&kernel), Ordering::Relaxed);
            cpu.launch(kernel)
        })
    };
    let devices: Vec<Device> = counters.iter().map(device).collect();
    let mesh = Mesh::over(&format!("cp={ranks}"), &devices)?;
    let x = Tensor::from_fn([1, 2, s, 4], (&mesh, "[_, _, @cp, _]"), |at| {
        ((at[1] * 31 + at[2] * 7 + at[3]) as f32).sin()
    })?;
    let options = SequenceOptions {
        order,
        ..SequenceOptions::causal()
    };
    let q = x.require_grad()?;
    let out = op.run([&q, &q, &q], &options)?;
    out.sum(&[], false)?.backward()?.of(&q)?;
    let counts = counters.iter().map(|n| n.load(Ordering::Relaxed));
    Ok(counts.collect())
}

#[test]
fn in_pairs_all_ranks_compute_as_much_and_nothing_that_is_not_seen() -> Result<()> {
    for (ranks, s) in [(2, 16), (4, 32), (8, 32)] {
        // Two heads, forward and backward, of the triangle.
        let all = (2 * 2 * s * (s + 1) / 2) as u64;
        for op in [Op::Ring, Op::Gathered] {
            let straight = work(op, SequenceOrder::Straight, ranks, s)?;
            assert_eq!(straight.iter().sum::<u64>(), all, "{op:?} {straight:?}");
            let (first, last) = (straight[0], straight[ranks - 1]);
            assert!(
                last > 2 * first,
                "{op:?}: the last part sees most: {straight:?}"
            );
            let paired = work(op, SequenceOrder::paired(ranks), ranks, s)?;
            assert_eq!(paired, vec![all / ranks as u64; ranks], "{op:?}");
        }
    }
    Ok(())
}

#[test]
fn a_ring_holds_two_parts_of_keys_however_long_the_sequence() -> Result<()> {
    // Each rank has 32 positions.
    let peak = |op: Op, ranks: usize| -> Result<u64> {
        let device = || anymesh_backend_cpu::device().decorated(|cpu, kernel| cpu.launch(kernel));
        let devices: Vec<Device> = (0..ranks).map(|_| device()).collect();
        let mesh = Mesh::over(&format!("cp={ranks}"), &devices)?;
        let place = (&mesh, "[_, _, @cp, _]");
        let make = |k: f32| {
            Tensor::from_fn([1, 2, 32 * ranks, 32], place, |at| {
                (at[1..].iter().fold(1, |h, i| h * 5 + i) as f32 * k).sin()
            })
        };
        let (q, k, v) = (make(0.3)?, make(0.7)?, make(1.1)?);
        let before: Vec<u64> = devices.iter().map(|d| d.memory().in_use).collect();
        devices.iter().for_each(Device::reset_peak);
        let options = SequenceOptions {
            order: SequenceOrder::Paired { ranks },
            ..SequenceOptions::causal()
        };
        let tracked = [q.require_grad()?, k.require_grad()?, v.require_grad()?];
        let out = op.run([&tracked[0], &tracked[1], &tracked[2]], &options)?;
        let grads = out.sum(&[], false)?.backward()?;
        grads.of(&tracked[1])?;
        let above = |(d, before): (&Device, &u64)| d.memory().peak - before;
        Ok(devices.iter().zip(&before).map(above).max().unwrap_or(0))
    };
    // Keys and values of a rank.
    let part = (2 * 2 * 32 * 32 * 4) as u64;
    let (few, many) = (peak(Op::Ring, 4)?, peak(Op::Ring, 16)?);
    assert_eq!(few, many, "a part has {part} bytes");
    assert!(
        many < 16 * part,
        "{many} bytes, all keys and values have {}",
        16 * part
    );
    let (few, many) = (peak(Op::Gathered, 4)?, peak(Op::Gathered, 16)?);
    assert!(many - few >= 12 * part, "gathered: {few} and {many} bytes");
    Ok(())
}

#[test]
fn types_without_values_are_the_same() -> Result<()> {
    let mesh = Mesh::new("dp=2, cp=8, tp=4", &meta())?;
    let place = (&mesh, "[@dp, @tp, @cp, _]");
    let tensor = |heads: usize| Tensor::zeros([2, heads, 131_072, 128], DType::BF16, place);
    let (q, k) = (tensor(32)?, tensor(8)?);
    let options = SequenceOptions {
        order: SequenceOrder::Paired { ranks: 8 },
        documents: Some(Tensor::zeros(
            [2, 131_072],
            DType::I32,
            (&mesh, "[@dp, @cp]"),
        )?),
        ..SequenceOptions::causal()
    };
    for op in [Op::Ring, Op::Gathered] {
        let (q, k) = (q.require_grad()?, k.require_grad()?);
        let out = op.run([&q, &k, &k], &options)?;
        assert_eq!(out.type_string(), "bf16[2@dp, 32@tp, 131072@cp, 128]");
        let grads = out.backward_with(&out.detach())?;
        assert_eq!(grads.of(&q)?.type_string(), q.type_string());
        assert_eq!(grads.of(&k)?.type_string(), k.type_string());
    }
    Ok(())
}

#[test]
fn what_cannot_be_is_said() -> Result<()> {
    let cpu = anymesh_backend_cpu::device();
    let mesh = Mesh::new("cp=2", &cpu)?;
    let [q, k, v, _] = operands([1, 2, 1, 8, 3], &cpu)?.map(|x| {
        let cut = x.to_mesh(&mesh, "[_, _, @cp, _]");
        cut.expect("it is cut")
    });
    let with = |order| SequenceOptions {
        order,
        ..SequenceOptions::causal()
    };
    // Chunks that are none, and pairs for other ranks.
    let error = q.ring_attention(&k, &v, &with(SequenceOrder::Paired { ranks: 3 }));
    assert!(matches!(error, Err(Error::Argument { .. })), "{error:?}");
    for op in [Op::Ring, Op::Gathered] {
        let error = op.run([&q, &k, &v], &with(SequenceOrder::Paired { ranks: 4 }));
        assert!(matches!(error, Err(Error::Argument { .. })), "{error:?}");
        let fewer = k.narrow(2, 0, 6)?;
        let error = op.run([&q, &fewer, &fewer], &SequenceOptions::causal());
        assert!(matches!(error, Err(Error::Shape { .. })), "{error:?}");
        let floats = SequenceOptions {
            documents: Some(Tensor::zeros([1, 8], DType::F64, &mesh)?),
            ..SequenceOptions::causal()
        };
        let error = op.run([&q, &k, &v], &floats);
        assert!(matches!(error, Err(Error::DType { .. })), "{error:?}");
        // The gradient of the gradient is not there, and not silently wrong.
        let q = q.require_grad()?;
        let loss = op
            .run([&q, &k, &v], &SequenceOptions::causal())?
            .sum(&[], false)?;
        let again = GradOptions {
            create_graph: true,
            ..GradOptions::default()
        };
        let error = grad(&[&loss], &[&q], &again);
        assert!(matches!(error, Err(Error::Gradient { .. })), "{error:?}");
    }
    Ok(())
}

#[test]
fn a_plan_of_a_step_counts_what_the_ring_sends() -> Result<()> {
    let cpu = anymesh_backend_cpu::device();
    let mesh = Mesh::new("cp=4", &cpu)?;
    let place = (&mesh, "[_, _, @cp, _]");
    let x = Tensor::from_fn([1, 2, 16, 4], place, |at| (at[2] as f64 * 0.3).sin())?;
    for op in [Op::Ring, Op::Gathered] {
        let step = || {
            let q = x.require_grad()?;
            let out = op.run([&q, &q, &q], &SequenceOptions::causal())?;
            out.square()?.sum(&[], false)?.backward()?.of(&q)
        };
        let plan = spmd::plan(&PlanOptions::default(), step)?;
        let (alone, planned) = (
            Ledger::record(step),
            Ledger::record(|| spmd::with_plan(&plan, OnDifference::Error, step)),
        );
        assert_eq!(planned.0?.to_vec::<f64>()?, alone.0?.to_vec::<f64>()?);
        assert_eq!(planned.1.bytes(), plan.bytes(), "{op:?}");
        assert_eq!(planned.1.bytes(), alone.1.bytes(), "{op:?}");
    }
    Ok(())
}

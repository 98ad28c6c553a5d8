//! A backend with fused kernels is asked for them, with rows that are dense and parameters where
//! the contract says.

use super::*;
use anymesh_core::{
    Backend, Buffer, Capabilities, Result, View,
    backend::*,
    ops::{
        NormOptions,
        attention::{AttentionOptions, attention_backward, backward_decomposed, decomposed},
        norm, softmax,
    },
};
use smallvec::smallvec;
use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// The CPU device with fused kernels written as loops over the host's memory.
#[derive(Debug)]
struct Fused {
    inner: Device,
    calls: Arc<AtomicUsize>,
}

impl Fused {
    fn read(&self, view: &View) -> Result<Vec<f64>> {
        assert_eq!(view.dtype, DType::F64);
        let last = view.layout.positions().max().unwrap_or(0);
        let bytes = wait(self.download(&view.buffer, 0..(last + 1) * 8))?;
        let all: Vec<f64> = bytes
            .chunks(8)
            .map(|b| f64::from_le_bytes(b.try_into().expect("8 bytes")))
            .collect();
        Ok(view.layout.positions().map(|p| all[p]).collect())
    }

    fn numbers(&self, view: &View) -> Result<Vec<i32>> {
        assert_eq!(view.dtype, DType::I32);
        let last = view.layout.positions().max().unwrap_or(0);
        let bytes = wait(self.download(&view.buffer, 0..(last + 1) * 4))?;
        let all: Vec<i32> = bytes
            .chunks(4)
            .map(|b| i32::from_le_bytes(b.try_into().expect("4 bytes")))
            .collect();
        Ok(view.layout.positions().map(|p| all[p]).collect())
    }

    fn write(&self, values: &[f64]) -> Result<Buffer> {
        self.upload(
            &values
                .iter()
                .flat_map(|v| v.to_le_bytes())
                .collect::<Vec<u8>>(),
        )
    }

    /// Scores `[b, h, s, t]` and what scales them to probabilities.
    fn probabilities(&self, call: &AttentionCall) -> Result<(Vec<f64>, Vec<f64>)> {
        let (q, k) = (self.read(&call.q)?, self.read(&call.k)?);
        let (&[b, h, s, d], &[_, hk, t, _]) =
            (call.q.layout.shape.dims(), call.k.layout.shape.dims())
        else {
            panic!("rank 4")
        };
        let (mut p, mut lse) = (vec![], vec![]);
        let documents = match &call.documents {
            Some([queries, keys]) => Some((self.numbers(queries)?, self.numbers(keys)?)),
            None => None,
        };
        for row in 0..b * h * s {
            let (n, head, i) = (row / (h * s), row / s % h, row % s);
            let key = n * hk + head / (h / hk);
            let score = |j: usize| {
                (0..d)
                    .map(|x| q[row * d + x] * k[(key * t + j) * d + x])
                    .sum::<f64>()
                    * call.scale
            };
            let scores: Vec<f64> = (0..t)
                .map(|j| {
                    let apart = |(queries, keys): &(Vec<i32>, Vec<i32>)| {
                        queries[n * s + i] != keys[n * t + j]
                    };
                    if call.causal && j + s > i + t || documents.as_ref().is_some_and(apart) {
                        f64::NEG_INFINITY
                    } else {
                        score(j)
                    }
                })
                .collect();
            let sum: f64 = scores.iter().map(|x| x.exp()).sum();
            p.extend(scores.iter().map(|x| x.exp() / sum));
            lse.push(sum.ln());
        }
        Ok((p, lse))
    }

    fn row(&self, call: &RowCall) -> Result<Buffer> {
        assert!(call.input.layout.is_contiguous());
        let n = call.input.layout.shape[1];
        let mut out = vec![];
        for (r, row) in self.read(&call.input)?.chunks(n).enumerate() {
            match &call.mode {
                RowOp::Softmax | RowOp::LogSoftmax => {
                    let sum: f64 = row.iter().map(|x| x.exp()).sum();
                    out.extend(row.iter().map(|x| {
                        if matches!(call.mode, RowOp::Softmax) {
                            x.exp() / sum
                        } else {
                            x - sum.ln()
                        }
                    }));
                }
                RowOp::Norm {
                    rms,
                    eps,
                    weight,
                    bias,
                    groups,
                    channels,
                    inner,
                } => {
                    let read = |p: &Option<View>, default| {
                        p.as_ref()
                            .map_or(Ok(vec![default; groups * channels]), |p| self.read(p))
                    };
                    let (w, b) = (read(weight, 1.0)?, read(bias, 0.0)?);
                    let mean = if *rms {
                        0.0
                    } else {
                        row.iter().sum::<f64>() / n as f64
                    };
                    let var = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
                    let parameter = |j: usize| (r % groups) * channels + j / inner;
                    out.extend(row.iter().enumerate().map(|(j, x)| {
                        (x - mean) / (var + eps).sqrt() * w[parameter(j)] + b[parameter(j)]
                    }));
                }
            }
        }
        self.write(&out)
    }

    fn attention(&self, call: &AttentionCall) -> Result<(Buffer, Buffer)> {
        let (p, lse) = self.probabilities(call)?;
        let v = self.read(&call.v)?;
        let (&[_, h, s, _], &[_, hk, t, dv]) =
            (call.q.layout.shape.dims(), call.v.layout.shape.dims())
        else {
            panic!("rank 4")
        };
        let mut out = vec![];
        for row in 0..lse.len() {
            let key = row / (h * s) * hk + row / s % h / (h / hk);
            out.extend((0..dv).map(|x| {
                (0..t)
                    .map(|j| p[row * t + j] * v[(key * t + j) * dv + x])
                    .sum::<f64>()
            }));
        }
        let out = match call.order {
            AttentionOrder::Heads => self.write(&out)?,
            AttentionOrder::Positions | AttentionOrder::Packed => {
                self.write_by_position(&[(&out, &call.q)], dv)?
            }
        };
        Ok((out, self.write(&lse)?))
    }

    /// What was made for the heads of these operands, the heads of a position next to each other.
    fn write_by_position(&self, parts: &[(&[f64], &View)], size: usize) -> Result<Buffer> {
        let (batch, length) = (parts[0].1.layout.shape[0], parts[0].1.layout.shape[2]);
        let mut out = vec![];
        for at in 0..batch * length {
            for (values, of) in parts {
                let heads = of.layout.shape[1];
                for head in 0..heads {
                    let row = (at / length * heads + head) * length + at % length;
                    out.extend(&values[row * size..][..size]);
                }
            }
        }
        self.write(&out)
    }

    fn attention_backward(&self, call: &AttentionBackwardCall) -> Result<Buffers> {
        let (p, _) = self.probabilities(&call.forward)?;
        let [q, k, v, out, grad] = [
            &call.forward.q,
            &call.forward.k,
            &call.forward.v,
            &call.out,
            &call.grad,
        ]
        .map(|x| self.read(x).expect("readable"));
        let (&[_, h, s, d], &[_, hk, t, e]) = (
            call.forward.q.layout.shape.dims(),
            call.forward.v.layout.shape.dims(),
        ) else {
            panic!("rank 4")
        };
        let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
        for row in 0..q.len() / d {
            let key = row / (h * s) * hk + row / s % h / (h / hk);
            let inner: f64 = (0..e).map(|x| grad[row * e + x] * out[row * e + x]).sum();
            for j in 0..t {
                let at = key * t + j;
                let dp: f64 = (0..e).map(|x| grad[row * e + x] * v[at * e + x]).sum();
                let ds = p[row * t + j] * (dp - inner) * call.forward.scale;
                (0..e).for_each(|x| dv[at * e + x] += p[row * t + j] * grad[row * e + x]);
                (0..d).for_each(|x| dk[at * d + x] += ds * q[row * d + x]);
                (0..d).for_each(|x| dq[row * d + x] += ds * k[at * d + x]);
            }
        }
        let AttentionCall { q, k, v, order, .. } = &call.forward;
        let made: [(&[f64], &View); 3] = [(&dq, q), (&dk, k), (&dv, v)];
        match order {
            AttentionOrder::Heads => made.iter().map(|(x, _)| self.write(x)).collect(),
            AttentionOrder::Positions => (made.iter().zip([d, d, e]))
                .map(|(part, size)| self.write_by_position(&[*part], size))
                .collect(),
            AttentionOrder::Packed => Ok(smallvec![self.write_by_position(&made, d)?]),
        }
    }
}

fn wait<T>(mut future: BoxFuture<'_, T>) -> T {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    loop {
        if let std::task::Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return value;
        }
    }
}

impl Backend for Fused {
    fn name(&self) -> &str {
        "fused"
    }
    fn capabilities(&self) -> &Capabilities {
        self.inner.backend().capabilities()
    }
    fn upload(&self, bytes: &[u8]) -> Result<Buffer> {
        self.inner.backend().upload(bytes)
    }
    fn download<'a>(
        &'a self,
        buffer: &'a Buffer,
        bytes: Range<usize>,
    ) -> BoxFuture<'a, Result<Vec<u8>>> {
        self.inner.backend().download(buffer, bytes)
    }
    fn sync(&self) -> BoxFuture<'_, Result<()>> {
        self.inner.backend().sync()
    }
    fn supports(&self, kernel: &Kernel) -> bool {
        !matches!(kernel, Kernel::Row(call) if call.residual.is_some())
    }
    fn launch(&self, kernel: Kernel) -> Result<Buffers> {
        if kernel.is_fused() {
            self.calls.fetch_add(1, Ordering::Relaxed);
        }
        Ok(match &kernel {
            Kernel::Row(call) => smallvec![self.row(call)?],
            Kernel::Attention(call) => {
                self.attention(call).map(|(out, lse)| smallvec![out, lse])?
            }
            Kernel::AttentionBackward(call) => self.attention_backward(call)?,
            _ => return self.inner.backend().launch(kernel),
        })
    }
}

/// A device with fused kernels, and how often they were called.
fn fused_device() -> (Device, Arc<AtomicUsize>) {
    let calls = Arc::new(AtomicUsize::new(0));
    (
        Device::new(Fused {
            inner: anymesh_backend_cpu::device(),
            calls: calls.clone(),
        }),
        calls,
    )
}

fn on(device: &Device, shape: &[usize], seed: u64) -> Tensor {
    Tensor::from_slice(
        &values(shape.iter().product(), -2.0, 2.0, seed),
        shape,
        device,
    )
    .expect("fits")
}

#[test]
fn fused_rows_equal_the_decomposition_along_every_axis_of_a_strided_view() {
    let (device, calls) = fused_device();
    let x = on(&device, &[3, 4, 10], 1)
        .transpose(0, 1)
        .and_then(|x| x.narrow(2, 1, 7))
        .expect("a view");
    for axis in -3..3 {
        assert_close(
            &x.softmax(axis).expect("valid"),
            &read(&softmax::decomposed(&x, axis).expect("valid")),
            1e-13,
        );
        assert_close(
            &x.log_softmax(axis).expect("valid"),
            &read(&softmax::log_decomposed(&x, axis).expect("valid")),
            1e-13,
        );
    }
    assert_eq!(calls.load(Ordering::Relaxed), 12);
}

#[test]
fn fused_norms_equal_the_decomposition() {
    let (device, calls) = fused_device();
    let x = on(&device, &[2, 5, 6], 1).transpose(1, 2).expect("a view");
    // Every second element, so that parameters have to be made dense.
    let parameter = |n: usize, seed| {
        on(&device, &[2 * n], seed)
            .slice(0, Some(1), None, 2)
            .expect("a view")
    };
    let (w, b) = (parameter(6, 2), parameter(6, 3));
    let spec = |groups: usize| norm::Norm {
        rms: false,
        eps: 1e-5,
        weight: Some(&w),
        bias: Some(&b),
        groups,
        channels: 6 / groups,
        inner: 5,
    };
    for groups in [1, 2, 3, 6] {
        assert_close(
            &x.group_norm(groups, &NormOptions::new().weight(&w).bias(&b))
                .expect("valid"),
            &read(&norm::decomposed(&x, &spec(groups)).expect("valid")),
            1e-13,
        );
    }
    let (w, b) = (parameter(5, 4), parameter(5, 5));
    let spec = |rms: bool| norm::Norm {
        rms,
        eps: 1e-5,
        weight: Some(&w),
        bias: (!rms).then_some(&b),
        groups: 1,
        channels: 5,
        inner: 1,
    };
    assert_close(
        &x.layer_norm(&NormOptions::new().weight(&w).bias(&b))
            .expect("valid"),
        &read(&norm::decomposed(&x, &spec(false)).expect("valid")),
        1e-13,
    );
    assert_close(
        &x.rms_norm(&NormOptions::new().weight(&w)).expect("valid"),
        &read(&norm::decomposed(&x, &spec(true)).expect("valid")),
        1e-13,
    );
    assert_eq!(calls.load(Ordering::Relaxed), 6);
}

#[test]
fn fused_attention_equals_the_decomposition_and_is_not_asked_for_masks() {
    let (device, calls) = fused_device();
    let (q, k, v) = (
        on(&device, &[2, 4, 3, 5], 1),
        on(&device, &[2, 2, 6, 5], 2),
        on(&device, &[2, 2, 6, 7], 3),
    );
    let q = q
        .transpose(1, 2)
        .and_then(|q| q.contiguous())
        .and_then(|q| q.transpose(1, 2))
        .expect("a view");
    let grad = on(&device, &[2, 4, 3, 7], 4);
    // Every query sees a key of its own document.
    let number =
        |ids: &[i32], len: usize| Tensor::from_slice(ids, [2, len], &device).expect("fits");
    let within = [
        number(&[1, 0, 1, 4, 4, 3], 3),
        number(&[1, 0, 0, 0, 1, 1, 3, 4, 4, 4, 2, 3], 6),
    ];
    for (causal, documents) in [
        (false, None),
        (true, None),
        (false, Some(within.clone())),
        (true, Some(within)),
    ] {
        let options = AttentionOptions {
            causal,
            documents,
            ..Default::default()
        };
        let (fused, parts) = (
            q.attention(&k, &v, &options).expect("valid"),
            decomposed(&q, &k, &v, &options).expect("valid"),
        );
        assert_close(&fused.out, &read(&parts.out), 1e-12);
        assert_close(&fused.lse, &read(&parts.lse), 1e-12);
        let (dq, dk, dv) = attention_backward(&q, &k, &v, &fused, &grad, &options).expect("valid");
        let (eq, ek, ev) = backward_decomposed(&q, &k, &v, &fused, &grad, &options).expect("valid");
        for (actual, expected) in [(dq, eq), (dk, ek), (dv, ev)] {
            assert_eq!(actual.shape(), expected.shape());
            assert_close(&actual, &read(&expected), 1e-12);
        }
    }
    assert_eq!(calls.load(Ordering::Relaxed), 8);
    let mask = Some(
        Tensor::from_slice(&[true, false, true, true, true, true], [6], &device).expect("fits"),
    );
    q.attention(
        &k,
        &v,
        &AttentionOptions {
            mask,
            ..Default::default()
        },
    )
    .expect("valid");
    assert_eq!(calls.load(Ordering::Relaxed), 8);
}

#[test]
fn projections_of_one_product_are_attended_to_and_pulled_back_where_they_lie() {
    let launched = Arc::new(std::sync::Mutex::new(vec![]));
    let seen = launched.clone();
    let device = anymesh_backend_cpu::device().decorated(move |backend, kernel| {
        seen.lock().expect("whole").push(kernel.family());
        backend.launch(kernel)
    });
    let (b, s, h, hk, d) = (2, 5, 4, 2, 3);
    let widths = [h * d, hk * d, hk * d];
    let packed = on(&device, &[b, s, widths.iter().sum()], 1)
        .require_grad()
        .expect("a float");
    let seed = on(&device, &[b, s, h * d], 2);
    let by_head =
        |x: &Tensor, n: usize| -> Result<Tensor> { x.reshape([b, s, n, d])?.transpose(1, 2) };
    let attend = |parts: &[Tensor]| -> Result<Tensor> {
        let [q, k, v] = [(0, h), (1, hk), (2, hk)].map(|(i, n)| by_head(&parts[i], n));
        let out = q?.attention(&k?, &v?, &AttentionOptions::causal())?.out;
        out.transpose(1, 2)?.reshape([b, s, h * d])
    };
    launched.lock().expect("whole").clear();
    let parts = packed.split(&widths, 2).expect("whole");
    let out = attend(&parts).expect("valid");
    let grads = out.backward_with(&seed).expect("valid");
    let joined = grads.get(&packed).expect("placed").expect("a gradient");
    assert_eq!(
        *launched.lock().expect("whole"),
        ["attention", "attention_backward"]
    );
    // Each in memory of its own.
    let apart: Vec<Tensor> = parts
        .iter()
        .map(|x| x.detach().contiguous()?.require_grad())
        .collect::<Result<_>>()
        .expect("copies");
    let expected = attend(&apart).expect("valid");
    assert_eq!(read(&out), read(&expected));
    let grads = expected.backward_with(&seed).expect("valid");
    let each: Vec<Tensor> = apart
        .iter()
        .map(|x| grads.get(x).expect("placed").expect("a gradient"))
        .collect();
    let each = Tensor::concat(&each.iter().collect::<Vec<_>>(), 2).expect("fits");
    assert_eq!(read(&joined), read(&each));
}

#[test]
fn the_rows_of_the_cpu_agree_with_the_decomposition_at_every_length() {
    for (dtype, tolerance) in [
        (DType::F64, 1e-13),
        (DType::F32, 1e-5),
        (DType::F16, 4e-3),
        (DType::BF16, 2e-2),
    ] {
        for n in [1, 2, 31, 256, 257, 1000, 4099, 8193] {
            let x = on(&DEVICE, &[3, n], n as u64)
                .cast(dtype)
                .expect("castable");
            assert_close(
                &x.softmax(1).expect("valid"),
                &read(&softmax::decomposed(&x, 1).expect("valid")),
                tolerance,
            );
            assert_close(
                &x.log_softmax(1).expect("valid"),
                &read(&softmax::log_decomposed(&x, 1).expect("valid")),
                tolerance,
            );
            for rms in [false, true] {
                let w = on(&DEVICE, &[n], 7);
                let spec = norm::Norm {
                    rms,
                    eps: 1e-5,
                    weight: Some(&w),
                    bias: None,
                    groups: 1,
                    channels: n,
                    inner: 1,
                };
                let y = if rms {
                    x.rms_norm(&NormOptions::new().weight(&w))
                } else {
                    x.layer_norm(&NormOptions::new().weight(&w))
                };
                assert_close(
                    &y.expect("valid"),
                    &read(&norm::decomposed(&x, &spec).expect("valid")),
                    tolerance,
                );
            }
        }
    }
}

//! The rows. `benches/peers/torch_kernels.py` and `numpy_cpu.py` know each by its name.

use super::{Bench, Sizes};
use crate::Result;
use anymesh_core::{
    DType, Mesh, Tensor,
    ops::{AttentionOptions, CrossEntropyOptions, NormOptions, attention::attention_backward},
};
use anymesh_train::{
    Build, Init, Param, Policy,
    optim::{AdamW, Groups, Optimizer, Rule, Sums},
};
use std::collections::{BTreeMap, BTreeSet};

/// A result that nobody reads.
fn nothing(_: Tensor) {}

impl Bench<'_> {
    pub(super) fn all(&mut self) -> Result<()> {
        match self.sizes {
            Sizes::Gpu => {
                self.maps(4096, DType::F32)?;
                self.maps(8192, DType::BF16)?;
                for dtype in [DType::F32, DType::BF16, DType::F16] {
                    self.matmul(4096, dtype)?;
                }
                self.matmul(8192, DType::BF16)?;
                for n in [4096, 8192] {
                    self.matmul_scaled(n, DType::F8E4M3)?;
                }
                // So small that what counts is the host.
                for dtype in [DType::F32, DType::BF16, DType::I32] {
                    self.matmul(128, dtype)?;
                }
                for sizes in [[16, 12, 12, 1024, 64], [8, 16, 16, 2048, 64]] {
                    self.attention(sizes, DType::BF16)?;
                }
                for sizes in [[2, 32, 32, 8192, 128], [4, 32, 8, 2048, 128]] {
                    self.attention(sizes, DType::BF16)?;
                }
                self.attention([16, 12, 12, 1024, 64], DType::F32)?;
                for sizes in [[16, 12, 12, 1024, 64], [2, 32, 32, 8192, 128]] {
                    self.packed_attention(sizes, DType::BF16)?;
                }
                self.cross_entropy([16384, 50304], DType::BF16)?;
                self.layer_norm([16384, 768], DType::BF16)?;
                self.gelu([16384, 3072], DType::BF16)?;
                self.adamw([12, 768, 50304, 1024])?;
                for sizes in [
                    [8, 16384, 4096, 14336],
                    [8, 4096, 4096, 14336],
                    [32, 16384, 7168, 2048],
                    [64, 32768, 2048, 1408],
                    [64, 8192, 2048, 1408],
                    [128, 65536, 2048, 768],
                    [128, 16384, 2048, 768],
                ] {
                    self.grouped(sizes, DType::BF16)?;
                }
                Ok(())
            }
            Sizes::Cpu => {
                self.matmul(1024, DType::F32)?;
                self.flat(1 << 24, "2^24")?;
                self.maps(2048, DType::F32)?;
                self.attention([2, 8, 8, 512, 64], DType::F32)?;
                self.packed_attention([2, 8, 8, 512, 64], DType::F32)?;
                self.cross_entropy([2048, 8192], DType::F32)?;
                self.layer_norm([4096, 768], DType::F32)?;
                self.gelu([2048, 3072], DType::F32)?;
                self.adamw([2, 256, 4096, 128])
            }
            Sizes::Tiny => {
                self.matmul(16, DType::F32)?;
                self.matmul_scaled(16, DType::F8E4M3)?;
                self.flat(64, "64")?;
                self.maps(16, DType::F32)?;
                self.attention([1, 4, 2, 16, 32], DType::BF16)?;
                self.packed_attention([1, 4, 2, 32, 32], DType::BF16)?;
                self.cross_entropy([8, 16], DType::BF16)?;
                self.layer_norm([8, 16], DType::BF16)?;
                self.gelu([8, 16], DType::BF16)?;
                self.adamw([1, 16, 32, 8])?;
                self.grouped([2, 32, 16, 16], DType::BF16)
            }
        }
    }

    /// Ops that memory bounds, on a square matrix.
    fn maps(&mut self, n: usize, dtype: DType) -> Result<()> {
        let ops = [
            "copy",
            "add",
            "gelu",
            "exp",
            "sum last",
            "sum first",
            "sum all",
            "amax last",
            "softmax",
            "layer_norm",
            "rms_norm",
            "transpose copy",
        ];
        let names = ops.map(|op| format!("{op} {dtype} {n}x{n}"));
        if !self.wants(&names) {
            return Ok(());
        }
        let (x, y) = (
            self.normal(&[n, n], dtype, 0)?,
            self.normal(&[n, n], dtype, 1)?,
        );
        let (w, b) = (self.normal(&[n], dtype, 2)?, self.normal(&[n], dtype, 3)?);
        let size = n * n * dtype.size();
        for (op, name) in ops.iter().zip(&names) {
            let (bytes, f): (usize, Box<dyn Fn() -> anymesh_core::Result<Tensor>>) = match *op {
                "copy" => (2 * size, Box::new(|| x.t()?.t()?.mul(1.0))),
                "add" => (3 * size, Box::new(|| &x + &y)),
                "gelu" => (2 * size, Box::new(|| x.gelu())),
                "exp" => (2 * size, Box::new(|| x.exp())),
                "sum last" => (size, Box::new(|| x.sum(&[1], false))),
                "sum first" => (size, Box::new(|| x.sum(&[0], false))),
                "sum all" => (size, Box::new(|| x.sum(&[], false))),
                "amax last" => (size, Box::new(|| x.amax(&[1], false))),
                "softmax" => (2 * size, Box::new(|| x.softmax(-1))),
                "layer_norm" => (
                    2 * size,
                    Box::new(|| x.layer_norm(&NormOptions::new().weight(&w).bias(&b))),
                ),
                "rms_norm" => (
                    2 * size,
                    Box::new(|| x.rms_norm(&NormOptions::new().weight(&w))),
                ),
                _ => (2 * size, Box::new(|| x.t()?.contiguous())),
            };
            self.row(name, bytes, 0.0, || Ok(f().map(nothing)?))?;
        }
        Ok(())
    }

    /// Ops that memory bounds, on a long vector.
    fn flat(&mut self, n: usize, size: &str) -> Result<()> {
        let names = ["add", "exp", "sum"].map(|op| format!("{op} f32 {size}"));
        if !self.wants(&names) {
            return Ok(());
        }
        let (x, y) = (
            self.normal(&[n], DType::F32, 0)?,
            self.normal(&[n], DType::F32, 1)?,
        );
        self.row(&names[0], 12 * n, 0.0, || Ok((&x + &y).map(nothing)?))?;
        self.row(&names[1], 8 * n, 0.0, || Ok(x.exp().map(nothing)?))?;
        self.row(&names[2], 4 * n, 0.0, || {
            Ok(x.sum(&[], false).map(nothing)?)
        })
    }

    fn matmul(&mut self, n: usize, dtype: DType) -> Result<()> {
        let name = format!("matmul {dtype} {n}");
        if !self.wants(&[&name]) {
            return Ok(());
        }
        // Of whole numbers those that are left of the normal ones.
        let factor = match dtype.is_float() {
            true => dtype,
            false => DType::F32,
        };
        let (a, b) = (
            self.normal(&[n, n], factor, 0)?.cast(dtype)?,
            self.normal(&[n, n], factor, 1)?.cast(dtype)?,
        );
        let flops = 2.0 * (n as f64).powi(3);
        self.row(&name, 0, flops, || Ok(a.matmul(&b).map(nothing)?))
    }

    /// A product of 8-bit floats with scales, stored as bf16: a weight is given as layers have it.
    fn matmul_scaled(&mut self, n: usize, dtype: DType) -> Result<()> {
        let name = format!("matmul_scaled {dtype} {n}");
        if !self.wants(&[&name]) {
            return Ok(());
        }
        let (a, a_scale) = self.normal(&[n, n], DType::F32, 0)?.quantize_f8(dtype)?;
        let (b, b_scale) = self.normal(&[n, n], DType::F32, 1)?.quantize_f8(dtype)?;
        let (b, flops) = (b.t()?, 2.0 * (n as f64).powi(3));
        self.row(&name, 0, flops, || {
            let out = a.matmul_scaled(&b, &a_scale, &b_scale, DType::BF16);
            Ok(out.map(nothing)?)
        })
    }

    /// Products of groups of rows, as experts have them: forward, and the gradients of rows and of
    /// matrices.
    fn grouped(&mut self, [groups, n, k, m]: [usize; 4], dtype: DType) -> Result<()> {
        let name = |what: &str| format!("{what} {dtype} {groups}x{n}x{k}x{m}");
        let names = ["grouped", "grouped dx", "grouped dw"].map(name);
        if !self.wants(&names) {
            return Ok(());
        }
        // Groups of unequal sizes, the same as in the peer's script.
        let sizes = (0..groups).scan(0, |sum, g| {
            *sum += 8 + g * 37 % 16;
            Some(*sum)
        });
        let sums: Vec<usize> = sizes.collect();
        let all = sums.last().copied().unwrap_or(1);
        let ends: Vec<i32> = sums.iter().map(|sum| (n * sum / all) as i32).collect();
        let ends = Tensor::from_slice(&ends, [groups], self.device)?;
        let x = self.normal(&[n, k], dtype, 0)?;
        let w = self.normal(&[groups, m, k], dtype, 1)?;
        let y = self.normal(&[n, m], dtype, 2)?;
        let turned = w.transpose(1, 2)?;
        let flops = 2.0 * (n * k * m) as f64;
        self.row(&names[0], 0, flops, || {
            Ok(x.grouped_matmul(&turned, &ends).map(nothing)?)
        })?;
        self.row(&names[1], 0, flops, || {
            Ok(y.grouped_matmul(&w, &ends).map(nothing)?)
        })?;
        self.row(&names[2], 0, flops, || {
            Ok(y.grouped_outer(&x, &ends).map(nothing)?)
        })
    }

    /// Causal attention, forward and backward: `batch x heads x length x size`, with `heads:heads of
    /// keys` where those are fewer. Only what the mask leaves is counted.
    fn attention(&mut self, sizes: [usize; 5], dtype: DType) -> Result<()> {
        let names = ["attention", "attention backward"];
        let pairs = sizes[3] * sizes[3];
        self.attend(names, sizes, dtype, pairs, AttentionOptions::causal())
    }

    /// The same within documents that are packed into sequences, about eight in each.
    fn packed_attention(&mut self, sizes: [usize; 5], dtype: DType) -> Result<()> {
        let names = ["attention packed", "attention packed backward"];
        let [b, .., s, _] = sizes;
        // Lengths that the peer's script has, too.
        let (mut lengths, mut left) = (vec![], s);
        for i in 0.. {
            if left == 0 {
                break;
            }
            let length = ((1 + i * 5 % 7) * (s / 32)).min(left);
            lengths.push(length);
            left -= length;
        }
        let ids: Vec<i32> = (lengths.iter().zip(0..))
            .flat_map(|(length, id)| std::iter::repeat_n(id, *length))
            .collect();
        let documents = Tensor::from_slice(&ids.repeat(b), [b, s], self.device)?;
        let options = AttentionOptions {
            documents: Some([documents.clone(), documents]),
            ..AttentionOptions::causal()
        };
        let pairs = lengths.iter().map(|length| length * length).sum();
        self.attend(names, sizes, dtype, pairs, options)
    }

    /// Attention forward and backward, of so many pairs of positions before the causal mask.
    fn attend(
        &mut self,
        ops: [&str; 2],
        [b, h, keys, s, d]: [usize; 5],
        dtype: DType,
        pairs: usize,
        options: AttentionOptions,
    ) -> Result<()> {
        let heads = match keys == h {
            true => h.to_string(),
            false => format!("{h}:{keys}"),
        };
        let names = ops.map(|op| format!("{op} {dtype} {b}x{heads}x{s}x{d}"));
        if !self.wants(&names) {
            return Ok(());
        }
        let (q, grad) = (
            self.normal(&[b, h, s, d], dtype, 0)?,
            self.normal(&[b, h, s, d], dtype, 3)?,
        );
        let (k, v) = (
            self.normal(&[b, keys, s, d], dtype, 1)?,
            self.normal(&[b, keys, s, d], dtype, 2)?,
        );
        let flops = 2.0 * (b * h * pairs * d) as f64;
        self.long_row(&names[0], 0, flops, || {
            q.attention(&k, &v, &options)?;
            Ok(())
        })?;
        if !self.wants(&names[1..]) {
            return Ok(());
        }
        let forward = q.attention(&k, &v, &options)?;
        self.long_row(&names[1], 0, 2.5 * flops, || {
            attention_backward(&q, &k, &v, &forward, &grad, &options)?;
            Ok(())
        })
    }

    /// The mean loss of rows of logits, and its gradient.
    fn cross_entropy(&mut self, [n, classes]: [usize; 2], dtype: DType) -> Result<()> {
        let name = format!("cross_entropy forward+backward {dtype} {n}x{classes}");
        if !self.wants(&[&name]) {
            return Ok(());
        }
        let logits = self.normal(&[n, classes], dtype, 0)?.require_grad()?;
        let label = |at: &[usize]| (at[0] * 7919 % classes) as i32;
        let labels = Tensor::from_fn([n], self.device, label)?;
        let options = CrossEntropyOptions::default();
        self.long_row(&name, 2 * n * classes * dtype.size(), 0.0, || {
            logits.cross_entropy(&labels, &options)?.backward()?;
            Ok(())
        })
    }

    /// Layer norm, and the gradients of all that it reads.
    fn layer_norm(&mut self, [n, width]: [usize; 2], dtype: DType) -> Result<()> {
        let name = format!("layer_norm forward+backward {dtype} {n}x{width}");
        if !self.wants(&[&name]) {
            return Ok(());
        }
        let x = self.normal(&[n, width], dtype, 0)?.require_grad()?;
        let w = self.normal(&[width], dtype, 1)?.require_grad()?;
        let b = self.normal(&[width], dtype, 2)?.require_grad()?;
        let grad = self.normal(&[n, width], dtype, 3)?;
        // Read and written forward; read twice and written once backward.
        self.row(&name, 5 * n * width * dtype.size(), 0.0, || {
            x.layer_norm(&NormOptions::new().weight(&w).bias(&b))?
                .backward_with(&grad)?;
            Ok(())
        })
    }

    /// GELU by tanh, and its gradient.
    fn gelu(&mut self, [n, width]: [usize; 2], dtype: DType) -> Result<()> {
        let name = format!("gelu_tanh forward+backward {dtype} {n}x{width}");
        if !self.wants(&[&name]) {
            return Ok(());
        }
        let x = self.normal(&[n, width], dtype, 0)?.require_grad()?;
        let grad = self.normal(&[n, width], dtype, 1)?;
        self.row(&name, 5 * n * width * dtype.size(), 0.0, || {
            x.gelu_tanh()?.backward_with(&grad)?;
            Ok(())
        })
    }

    /// One update of all parameters of a GPT-2 that has one matrix for queries, keys and values, as
    /// the peer has.
    fn adamw(&mut self, [layers, width, vocabulary, positions]: [usize; 4]) -> Result<()> {
        let name = format!("adamw f32 {layers}x{width}x{vocabulary}x{positions}");
        if !self.wants(&[&name]) {
            return Ok(());
        }
        let c = width;
        let mut shapes = vec![vec![vocabulary, c], vec![positions, c], vec![c], vec![c]];
        for _ in 0..layers {
            shapes.extend(std::iter::repeat_n(vec![c], 4));
            for [inner, outer] in [[c, 3 * c], [c, c], [c, 4 * c], [4 * c, c]] {
                shapes.extend([vec![outer, inner], vec![outer]]);
            }
        }
        let mesh = Mesh::single(self.device);
        let build = Build::new(&mesh, Policy::f32(), 1);
        let parameter = |(i, shape): (usize, &Vec<usize>)| {
            let sharding = ["[_]", "[_, _]"][shape.len() - 1];
            let init = Init::Normal(0.02);
            build.param(&i.to_string(), shape.as_slice(), sharding, init)
        };
        let mut model = shapes
            .iter()
            .enumerate()
            .map(parameter)
            .collect::<Result<Vec<Param>>>()?;
        let mut gradients = BTreeMap::new();
        for (i, shape) in shapes.iter().enumerate() {
            gradients.insert(i.to_string(), self.normal(shape, DType::F32, i as u32)?);
        }
        let mut optimizer = Optimizer::new(&model, &Groups::all(Rule::AdamW(AdamW::default())))?;
        optimizer.clip = None;
        let count: usize = shapes.iter().map(|s| s.iter().product::<usize>()).sum();
        // Value, gradient and two moments are read, all but the gradient written.
        self.long_row(&name, 28 * count, 0.0, || {
            let sums = Sums {
                gradients: gradients.clone(),
                missing: BTreeSet::new(),
            };
            optimizer.step(&mut model, sums, 1.0)?;
            Ok(())
        })
    }
}

//! What is trained in the tests: a small language model with AdamW, in several layouts.

use anymesh_checkpoint::{Checkpoint, Contents, Load};
use anymesh_core::{
    DType, Error, Mesh, Result, Tensor, TypeSpec,
    grad::no_grad,
    i,
    ops::{CrossEntropyOptions, Expr, NormOptions, Rng},
};
use std::collections::BTreeMap;

const BATCH: usize = 12;
const CONTEXT: usize = 4;
const VOCABULARY: usize = 32;

/// The parameters with how they lie: cut by tensor parallelism, by data parallelism, by both or not
/// at all.
fn parameters(layout: &str) -> [(&'static str, &'static str); 4] {
    match layout {
        "tensor" => [
            ("embedding", "f32[32@tp?, 8]"),
            ("up", "f32[24@tp?, 32]"),
            ("down", "f32[8, 24@tp?]"),
            ("head", "f32[32@tp?, 8]"),
        ],
        "sharded" => [
            ("embedding", "f32[32@dp?, 8]"),
            ("up", "f32[24@dp?, 32]"),
            ("down", "f32[8@dp?, 24]"),
            ("head", "f32[32@dp?, 8]"),
        ],
        "both" => [
            ("embedding", "f32[32@tp?, 8@dp?]"),
            ("up", "f32[24@tp?, 32@dp?]"),
            ("down", "f32[8@dp?, 24@tp?]"),
            ("head", "f32[32@tp?, 8@dp?]"),
        ],
        _ => [
            ("embedding", "f32[32, 8]"),
            ("up", "f32[24, 32]"),
            ("down", "f32[8, 24]"),
            ("head", "f32[32, 8]"),
        ],
    }
}

/// A small language model and AdamW.
pub(crate) struct Training {
    mesh: Mesh,
    pub(crate) step: u64,
    names: [&'static str; 4],
    pub(crate) tensors: BTreeMap<String, Tensor>,
}

impl Training {
    pub(crate) fn new(mesh: &Mesh, layout: &str) -> Result<Self> {
        let (mut rng, mut tensors) = (Rng::new(7), BTreeMap::new());
        for (name, ty) in parameters(layout) {
            let ty: TypeSpec = ty.parse()?;
            let w = Tensor::normal(&ty.shape, 0.0, 0.2, ty.dtype, (mesh, &ty), rng.split())?;
            tensors.insert(format!("m.{name}"), w.zeros_like()?);
            tensors.insert(format!("v.{name}"), w.zeros_like()?);
            tensors.insert(name.into(), w.require_grad()?);
        }
        Ok(Self {
            mesh: mesh.clone(),
            step: 0,
            names: parameters(layout).map(|(name, _)| name),
            tensors,
        })
    }

    pub(crate) fn load(&mut self, saved: &Checkpoint) -> Result<()> {
        let wanted = Contents::new(0, std::mem::take(&mut self.tensors));
        self.tensors = Load::default()
            .replace(saved, &wanted)
            .map_err(other)?
            .tensors;
        for name in self.names {
            let w = self.tensors[name].require_grad()?;
            self.tensors.insert(name.into(), w);
        }
        self.step = saved.manifest().step;
        Ok(())
    }

    fn loss(&self) -> Result<Tensor> {
        let w = |name: &str| &self.tensors[name];
        let first = self.step as usize * BATCH;
        let tokens = Tensor::from_fn([BATCH, CONTEXT + 1], (&self.mesh, "[@dp?, _]"), |at| {
            let line = (first + at[0]) * 7919 % 10_007;
            ((line + at[1] * (1 + line % 3)) % VOCABULARY) as i32
        })?;
        let seen = w("embedding").embedding(&tokens.get(i![.., ..-1])?)?;
        let x = seen.reshape([BATCH, CONTEXT * 8])?;
        let h = x.linear(w("up"), None)?.silu()?.linear(w("down"), None)?;
        let logits = h.rms_norm(&NormOptions::new())?.linear(w("head"), None)?;
        logits.cross_entropy(&tokens.get(i![.., -1])?, &CrossEntropyOptions::default())
    }

    pub(crate) fn step(&mut self) -> Result<f64> {
        let loss = self.loss()?;
        let grads = loss.backward()?;
        self.step += 1;
        let unbias = [0.9, 0.99].map(|beta| 1.0 - f64::powi(beta, self.step as i32));
        for name in self.names {
            let [w, m, v] = ["", "m.", "v."].map(|k| self.tensors[&format!("{k}{name}")].clone());
            let [next, m, v] = no_grad(|| {
                Expr::new("adamw", &[&w, &grads.of(&w)?, &m, &v])
                    .params(&unbias)
                    .maps([DType::F32; 3], |a| {
                        let (w, g) = (a.x[0], a.x[1]);
                        let m = a.x[2] * 0.9 + g * 0.1;
                        let v = a.x[3] * 0.99 + g * g * 0.01;
                        let step = m / a.p[0] / ((v / a.p[1]).sqrt() + 1e-8) + w * 0.01;
                        [w - step * 0.01, m, v]
                    })
            })?;
            self.tensors.insert(format!("m.{name}"), m);
            self.tensors.insert(format!("v.{name}"), v);
            self.tensors.insert(name.into(), w.with_values(&next)?);
        }
        // Whoever has no rank of the mesh goes along and has nothing to read.
        match self.mesh.addressable().len() {
            0 => Ok(f64::NAN),
            _ => Ok(loss.item()?.to_f64()),
        }
    }
}

/// An error of another crate.
pub(crate) fn other(error: impl std::fmt::Display) -> Error {
    Error::argument("test", "checkpoint", error.to_string())
}

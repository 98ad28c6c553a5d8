use anymesh::prelude::*;
use std::collections::BTreeMap;

/// The parameters, and how each lies on a mesh that has an axis `tp`.
const PARAMETERS: [(&str, &str); 4] = [
    ("embedding", "f32[64@tp?, 32]"),
    ("up", "f32[128@tp?, 256]"),
    ("down", "f32[32, 128@tp?]"),
    ("head", "f32[64@tp?, 32]"),
];

/// A model that reads eight tokens and says the ninth.
struct Model {
    parameters: BTreeMap<String, Tensor>,
}

impl Model {
    fn new(mesh: &Mesh) -> Result<Self> {
        let (mut rng, mut parameters) = (Rng::new(42), BTreeMap::new());
        for (name, ty) in PARAMETERS {
            let ty: TypeSpec = ty.parse()?;
            let w = Tensor::normal(&ty.shape, 0.0, 0.1, ty.dtype, (mesh, &ty), rng.split())?;
            parameters.insert(name.to_string(), w.require_grad()?);
        }
        Ok(Self { parameters })
    }

    fn loss(&self, tokens: &Tensor) -> Result<Tensor> {
        let w = |name: &str| &self.parameters[name];
        let seen = w("embedding").embedding(&tokens.get(i![.., ..-1])?)?;
        let x = seen.reshape([32, 8 * 32])?;
        let h = x.linear(w("up"), None)?.silu()?.linear(w("down"), None)?;
        let logits = h.rms_norm(&NormOptions::new())?.linear(w("head"), None)?;
        logits.cross_entropy(&tokens.get(i![.., -1])?, &CrossEntropyOptions::default())
    }

    fn step(&mut self, tokens: &Tensor) -> Result<f64> {
        let loss = self.loss(tokens)?;
        let grads = loss.backward()?;
        for w in self.parameters.values_mut() {
            let g = grads.of(w)?;
            w.update(|w| w - g * 0.5)?;
        }
        Ok(loss.item()?.to_f64())
    }

    fn train(&mut self, tokens: &Tensor, steps: usize) -> Result<Vec<f64>> {
        (0..steps).map(|_| self.step(tokens)).collect()
    }
}

/// 32 lines of nine tokens, each counting up in steps of its own.
fn tokens(mesh: &Mesh) -> Result<Tensor> {
    Tensor::from_fn([32, 9], (mesh, "[@dp?, _]"), |at| {
        ((at[0] * 7 + at[1] * (at[0] % 5 + 1)) % 64) as i32
    })
}

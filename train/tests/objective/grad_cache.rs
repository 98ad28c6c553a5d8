//! GradCache: the gradients of the whole, the memory of a chunk.

use crate::support::{facts, meshes, near, numbers};
use anymesh_core::{DType, Device, Mesh, Tensor, grad::Gradients, meta, ops::Rng};
use anymesh_train::{
    Pass, Result,
    objective::{Chunk, Contrastive, GradCache, Prefix, Temperature, contrastive, matryoshka},
};

#[test]
fn the_recorded_gradient_in_chunks_of_any_size_on_every_mesh() -> Result<()> {
    let (fact, given) = (facts("gradcache"), facts("contrastive"));
    let temperature = given["temperature"].as_f64().expect("a number");
    let options = Contrastive {
        temperature: Temperature::Constant(temperature),
        ..Default::default()
    };
    let sets = [numbers(&given["queries"]), numbers(&given["passages"])];
    let weight = numbers(&fact["weight"]);
    for mesh in meshes() {
        let of = |values: &[f64], first: usize, rows, sharding: &str| {
            Tensor::from_fn([rows, 3], (&mesh, sharding), |at| {
                values[(first + at[0]) * 3 + at[1]]
            })
        };
        for cut in ["[@tp?, _]", "[_, @tp?]"] {
            let weight = of(&weight, 0, 3, cut)?.require_grad()?;
            for chunk in [1, 2, 3, 4] {
                let mut gradients = Gradients::default();
                let loss = GradCache::new(chunk)?.run(
                    &[4, 4],
                    &Pass::eval(),
                    |chunk, _| {
                        let (first, rows) = (chunk.rows.start, chunk.rows.len());
                        let x = of(&sets[chunk.set], first, rows, "[@dp?, _]")?;
                        Ok(x.linear(&weight, None)?)
                    },
                    |found| contrastive(&found[0], &found[1], &options),
                    |more| Ok(gradients.add(more)?),
                )?;
                assert!(!loss.requires_grad());
                let found = gradients.of(&weight)?.to_vec::<f64>()?;
                let what = format!("chunks of {chunk}, weight {cut}, {mesh}");
                near(&what, &found, &numbers(&fact["grad_weight"]), 1e-12);
            }
        }
    }
    Ok(())
}

/// An encoder with dropout, and what is to be encoded.
struct Case {
    weights: Vec<Tensor>,
    sets: [Tensor; 2],
    log_temperature: Tensor,
}

const SETS: [usize; 2] = [10, 20];

impl Case {
    fn new(mesh: &Mesh) -> Result<Self> {
        let normal = |shape: [usize; 2], cut: &str, seed| {
            Tensor::normal(shape, 0.0, 0.5, DType::F32, (mesh, cut), Rng::new(seed))
        };
        Ok(Self {
            weights: vec![
                normal([24, 12], "[@tp?, _]", 1)?.require_grad()?,
                normal([8, 24], "[_, @tp?]", 2)?.require_grad()?,
            ],
            sets: [
                normal([SETS[0], 12], "[_, _]", 3)?,
                normal([SETS[1], 12], "[_, _]", 4)?,
            ],
            log_temperature: Tensor::full((), -1.5, DType::F32, mesh)?.require_grad()?,
        })
    }

    fn encode(&self, chunk: &Chunk, pass: &Pass) -> Result<Tensor> {
        let (first, rows) = (chunk.rows.start, chunk.rows.len());
        let x = self.sets[chunk.set].narrow(0, first, rows)?;
        let hidden = x
            .reshard("[@dp?, _]")?
            .linear(&self.weights[0], None)?
            .tanh()?;
        let hidden = match pass.rng("dropout") {
            Some(rng) => hidden.dropout(0.3, rng)?,
            None => hidden,
        };
        Ok(hidden.linear(&self.weights[1], None)?)
    }

    fn loss(&self, found: &[Tensor]) -> Result<Tensor> {
        let options = Contrastive {
            temperature: Temperature::Learned(self.log_temperature.clone()),
            group: 2,
            symmetric: true,
            ..Default::default()
        };
        matryoshka(&found[0], &found[1], &Prefix::all(&[4, 8]), &options)
    }

    fn leaves(&self) -> impl Iterator<Item = &Tensor> {
        self.weights.iter().chain([&self.log_temperature])
    }

    fn values(&self, loss: &Tensor, gradients: &Gradients) -> Result<Vec<Vec<f32>>> {
        let mut values = vec![loss.to_vec::<f32>()?];
        for leaf in self.leaves() {
            values.push(gradients.of(leaf)?.to_vec::<f32>()?);
        }
        Ok(values)
    }

    fn cached(&self, cache: GradCache, pass: &Pass) -> Result<Vec<Vec<f32>>> {
        let mut gradients = Gradients::default();
        let loss = cache.run(
            &SETS,
            pass,
            |chunk, pass| self.encode(chunk, pass),
            |found| self.loss(found),
            |more| Ok(gradients.add(more)?),
        )?;
        self.values(&loss, &gradients)
    }

    /// The same chunks with everything kept, and one backward pass.
    fn whole(&self, cache: GradCache, pass: &Pass) -> Result<Vec<Vec<f32>>> {
        let mut parts: [Vec<Tensor>; 2] = Default::default();
        for chunk in cache.chunks(&SETS) {
            let encoded = self.encode(&chunk, &pass.part(chunk.index))?;
            parts[chunk.set].push(encoded);
        }
        let mut found = vec![];
        for parts in &parts {
            let refs: Vec<&Tensor> = parts.iter().collect();
            found.push(Tensor::concat(&refs, 0)?);
        }
        let loss = self.loss(&found)?;
        let gradients = loss.backward()?;
        self.values(&loss, &gradients)
    }
}

#[test]
fn the_bits_are_those_of_one_backward_pass_also_with_dropout() -> Result<()> {
    let case = Case::new(&Mesh::single(&anymesh_backend_cpu::device()))?;
    let bits = |values: Vec<Vec<f32>>| -> Vec<Vec<u32>> {
        let bits = |v: Vec<f32>| v.into_iter().map(f32::to_bits).collect();
        values.into_iter().map(bits).collect()
    };
    for chunk in [1, 3, 4, 7, 20] {
        let cache = GradCache::new(chunk)?;
        let mut seen = vec![];
        for pass in [
            Pass::eval(),
            Pass::train(Rng::new(5)),
            Pass::train(Rng::new(6)),
        ] {
            let cached = bits(case.cached(cache, &pass)?);
            assert_eq!(cached, bits(case.whole(cache, &pass)?), "chunks of {chunk}");
            assert!(!seen.contains(&cached), "dropout does something");
            seen.push(cached);
        }
    }
    Ok(())
}

#[test]
fn on_meshes_gradients_are_those_of_one_device() -> Result<()> {
    let cache = GradCache::new(4)?;
    let pass = Pass::train(Rng::new(5));
    let mut first: Option<Vec<Vec<f32>>> = None;
    for mesh in meshes() {
        let case = Case::new(&mesh)?;
        let [cached, whole] = [case.cached(cache, &pass)?, case.whole(cache, &pass)?];
        let first = first.get_or_insert_with(|| cached.clone());
        let wide = |v: &[f32]| v.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
        for ((cached, whole), first) in cached.iter().zip(&whole).zip(first) {
            near(&format!("{mesh}, kept"), &wide(cached), &wide(whole), 2e-6);
            near(
                &format!("{mesh}, one device"),
                &wide(cached),
                &wide(first),
                2e-6,
            );
        }
    }
    Ok(())
}

#[test]
fn memory_does_not_grow_with_the_batch() -> Result<()> {
    let (width, inner, out, chunk) = (256, 4096, 64, 32);
    let device: Device = meta().decorated(|backend, kernel| backend.launch(kernel));
    // Bytes at the peak of a step beside parameters, for a batch of so many pairs; what is encoded
    // is made chunk by chunk, as a loader would.
    let peak = |pairs: usize, cached: bool| -> Result<u64> {
        let zeros = |shape: [usize; 2]| Tensor::zeros(shape, DType::F32, &device);
        let up = zeros([inner, width])?.require_grad()?;
        let down = zeros([out, inner])?.require_grad()?;
        let before = device.memory().in_use;
        device.reset_peak();
        let encode = |chunk: &Chunk, pass: &Pass| -> Result<Tensor> {
            let mut h = zeros([chunk.rows.len(), width])?
                .linear(&up, None)?
                .gelu()?;
            if let Some(rng) = pass.rng("dropout") {
                h = h.dropout(0.1, rng)?;
            }
            Ok(h.linear(&down, None)?)
        };
        // Scores of some queries at a time: their square would be large in the end.
        let options = Contrastive {
            chunk: Some(chunk),
            ..Default::default()
        };
        let loss = |found: &[Tensor]| contrastive(&found[0], &found[1], &options);
        let cache = GradCache::new(if cached { chunk } else { pairs })?;
        let pass = Pass::train(Rng::new(0));
        let mut gradients = Gradients::default();
        if cached {
            let add = |more| Ok(gradients.add(more)?);
            cache.run(&[pairs, pairs], &pass, encode, loss, add)?;
        } else {
            let mut found = vec![];
            for chunk in cache.chunks(&[pairs, pairs]) {
                found.push(encode(&chunk, &pass)?);
            }
            gradients = loss(&found)?.backward()?;
        }
        gradients.of(&up)?;
        Ok(device.memory().peak - before)
    };
    let batches = [256, 512, 1024];
    let mut cached = vec![];
    let mut kept = vec![];
    for pairs in batches {
        cached.push(peak(pairs, true)?);
        kept.push(peak(pairs, false)?);
    }
    println!("pairs {batches:?}: in chunks of {chunk} {cached:?} bytes, at once {kept:?}");
    // All that a larger batch adds are the gradients of its representations.
    let representations = |pairs: usize| (2 * pairs * out * 4) as u64;
    for i in 1..batches.len() {
        let more = representations(batches[i]) - representations(batches[i - 1]);
        assert_eq!(cached[i] - cached[i - 1], more, "{cached:?}");
        let activations = ((batches[i] - batches[i - 1]) * inner * 4) as u64;
        assert!(kept[i] - kept[i - 1] > 4 * activations, "{kept:?}");
    }
    assert!(cached[2] * 4 < kept[2]);
    Ok(())
}
